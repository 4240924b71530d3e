"""What a finished run has left in its state directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll.protocol.status_messages import RoundSummary
from kit.halfway import ask_journal


def saved_model(server: atoll.Server, folder: Path) -> dict[str, Tensor]:
    """The newest version of the model, from the state that the server saves."""
    state = load_file(server.save_state(folder / "now.safetensors"))
    return {name: tensor for name, tensor in state.items() if not name.startswith("atoll:")}


def of_sites(rounds: Iterable[RoundSummary | Mapping[str, Any]], field: str = "site") -> list[list[Any]]:
    """One list a round: this field of each of its sites."""
    told = (each if isinstance(each, Mapping) else each.model_dump() for each in rounds)
    return [[site[field] for site in each["sites"]] for each in told]


class Result:
    """What a finished run has left on disk; equal for equal bits.

    Attributes:
        exports: file → digest of the models that the run has exported, and of the note of the best.
        versions: (fragment, version, digest).
        updates: (site, fragment, round) of every counted update, each as often as it counted.
        tickets: (site, base version, state) of all of them.
        history: summaries of the rounds.
    """

    def __init__(self, folder: Path) -> None:
        files = (folder / "state" / "exports").glob("*")
        self.exports = {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.name != "metrics.jsonl"
        }
        self.versions = ask_journal(
            folder, "SELECT fragment, version, digest FROM history WHERE NOT lost ORDER BY fragment, version"
        )
        self._heads = ask_journal(
            folder, "SELECT max(version), hex(part_digests), hex(state_digests) FROM versions GROUP BY fragment"
        )
        self.updates = ask_journal(
            folder, "SELECT site, fragment, base_version + 1 FROM tickets WHERE state = 'counted' ORDER BY 1, 2, 3"
        )
        self.tickets = ask_journal(folder, "SELECT site, base_version, state FROM tickets ORDER BY 1, 2, ticket")
        rows = ask_journal(folder, "SELECT summary_json FROM history WHERE summary_json != '' ORDER BY seq")
        self.history: list[dict[str, Any]] = [json.loads(text) | {"sites": []} for (text,) in rows]
        of = {(summary["fragment"], summary["version"]): summary["sites"] for summary in self.history}
        for fragment, version, text in ask_journal(
            folder, "SELECT fragment, version, summary_json FROM site_rounds ORDER BY site"
        ):
            of[fragment, version].append(json.loads(text))

    @property
    def bits(self) -> tuple[Any, ...]:
        """The exported models, every version's digest, and the outer states at the end."""
        return self.exports, *self.without_exports

    @property
    def without_exports(self) -> tuple[Any, ...]:
        """The bits that a swarm, too, leaves at its server."""
        return self.versions, self._heads

    @property
    def digests(self) -> list[str]:
        """Of every version, in order."""
        return [digest for *_, digest in self.versions]

    @property
    def aggregators(self) -> list[str]:
        """Of every round of a swarm."""
        return [str(summary["aggregator"]) for summary in self.history]

    def counted(self) -> list[tuple[str, int]]:
        """(site, round) of every counted update, each as often as it counted."""
        return [(site, number) for site, _, number in self.updates]
