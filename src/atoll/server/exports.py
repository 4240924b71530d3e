"""Files for people: the model as a safetensors file of its own, and one line of metrics a round."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from atoll.server.model_file import ModelFile
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

    def save(self, version: int | None = None) -> Path:
        """Export a version (the head by default) as `model-<version>.safetensors`, and as `model.safetensors`.

        Tied tensors are written under each of their names, so that the file loads strictly.
        """
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            version = self._store.head(0).version if version is None else version
            if self._plan.settings.save_every:
                export_model(self._plan, self._store, self.folder / f"model-{version:06d}.safetensors", version)
            return export_model(self._plan, self._store, self.folder / MODEL, version)

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


def export_model(
    plan: Plan, store: Store, target: Path, version: int | None = None, told: Mapping[str, str] | None = None
) -> Path:
    """Write the model of a version (the head by default) to `target`, replacing what is there in one step.

    Args:
        told: further metadata of the header.

    Raises:
        Gone: the version, or what is needed of it, is not kept.
        DiskFull: nothing is left behind.
        SyncFailed: fsync failed; the server must end.
    """
    if plan.downlink is None:
        header, ranges = export_ranges(plan.schema, plan.version, told)
        return store.export(target, version=version, header=header, ranges=ranges)
    header, owners = export_header(plan.schema, told)

    def contents(version_fd: int, state_fd: int | None) -> Iterator[memoryview]:
        file = ModelFile(plan.version, version_fd, state_fd)
        for spec in owners:
            yield from file.runs(spec)

    return store.export(target, version=version, header=header, contents=contents)


def export_ranges(
    schema: Schema, version: Layout, told: Mapping[str, str] | None = None
) -> tuple[bytes, list[tuple[int, int]]]:
    """As `export_header`, with the slot's ranges of the tensors."""
    header, owners = export_header(schema, told)
    return header, [(version.by_name[spec.name].offset, spec.nbytes) for spec in owners]


def export_header(schema: Schema, told: Mapping[str, str] | None = None) -> tuple[bytes, list[TensorSpec]]:
    """Header of an export, and the tensors behind it: every one, and each tied one again under its further name.

    Its metadata say which names are tied, and which are buffers.

    Args:
        told: further metadata of the header.
    """
    schema = schema.model
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
    return header, [owners[owner] for _, owner in ordered]


def _line(summary_json: str, at: str) -> str:
    return json.dumps({"at": at, **json.loads(summary_json)}) + "\n"
