"""Files for people: the model as a safetensors file of its own, and one line of metrics a round."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.server.plan import Plan
from atoll.store.store import Store
from atoll.tensors.layout import BUFFER_NAMES, TIED, Layout, safetensors_header
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec
from atoll.wire import status_messages

MODEL = "model.safetensors"
METRICS = "metrics.jsonl"


class Exports:
    """Writes into `save_dir`. A model appears whole, under its name, or not at all; metrics grow by a line a round."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan, self._store = plan, store
        self.folder: Path = plan.settings.save_dir or plan.settings.state_dir / "exports"
        self._lock = threading.Lock()

    def save(self, heads: Sequence[int] | None = None) -> Path:
        """Export a version (the head by default) as `model-<version>.safetensors`, and as `model.safetensors`.

        Tied tensors are written under each of their names, so that the file loads strictly.

        Args:
            heads: the version of each fragment; the model's number is the least of them.
        """
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            heads = self._store.heads() if heads is None else heads
            header, ranges = export_ranges(self._plan.schema, self._plan.versions)
            if self._plan.settings.save_every:
                numbered = self.folder / f"model-{min(heads):06d}.safetensors"
                self._store.export_model(numbered, heads, header, ranges)
            return self._store.export_model(self.folder / MODEL, heads, header, ranges)

    def append_metrics(self, summary: status_messages.RoundSummary, at: str) -> None:
        """Add the line of a round."""
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(_line(summary.model_dump_json(), at))

    def rewrite_metrics(self) -> None:
        """Make the file what the journal says: a line may have been lost, or belong to a version that fell."""
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / f".{METRICS}.tmp"
            rows = [row for row in self._store.history(None) if row.summary_json]
            temporary.write_text("".join(_line(row.summary_json, row.created_at) for row in rows), encoding="utf-8")
            os.replace(temporary, self.folder / METRICS)


def export_ranges(
    schema: Schema, versions: Sequence[Layout], told: Mapping[str, str] | None = None
) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Header and slot ranges of an export: every tensor, and each tied one again under its further name.

    Its metadata say which names are tied, and which are buffers. A range is (fragment, offset, nbytes).

    Args:
        schema: of the whole model.
        versions: layout of each fragment's versions.
        told: further metadata of the header.
    """
    schema = schema.model
    places = {
        name: (f, segment.offset) for f, layout in enumerate(versions) for name, segment in layout.by_name.items()
    }
    owners = {spec.name: spec for spec in schema.tensors}
    named = [(spec, spec.name) for spec in schema.tensors] + [
        (TensorSpec(alias, owners[owner].dtype, owners[owner].shape, owners[owner].group), owner)
        for alias, owner in schema.aliases
    ]
    ordered = sorted(named, key=lambda pair: -pair[0].item_bytes)
    metadata = {"format": "pt", BUFFER_NAMES: json.dumps([spec.name for spec, _ in named if spec.group == BUFFERS])}
    if schema.aliases:
        metadata[TIED] = json.dumps(dict(schema.aliases))
    header = safetensors_header([spec for spec, _ in ordered], metadata | dict(told or {}))
    return header, [(*places[owner], spec.nbytes) for spec, owner in ordered]


def _line(summary_json: str, at: str) -> str:
    return json.dumps({"at": at, **json.loads(summary_json)}) + "\n"
