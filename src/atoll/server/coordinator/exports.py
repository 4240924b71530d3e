"""Files for people: the model as a safetensors file of its own, and one line of metrics a round."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from atoll.aggregation.plan import Plan
from atoll.aggregation.result_file import export_header as export_header
from atoll.protocol import status_messages
from atoll.server.model_file import ModelFile
from atoll.store.store import Store
from atoll.tensors.layout import Layout
from atoll.tensors.schema import TensorSpec

MODEL = "model.safetensors"
METRICS = "metrics.jsonl"


class Exports:
    """Writes into `save_dir`. A model appears whole, under its name, or not at all; metrics grow by a line a round."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan, self._store = plan, store
        self.folder: Path = plan.settings.exports
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
            if self._plan.settings.save_every:
                export_model(self._plan, self._store, self.folder / f"model-{min(heads):06d}.safetensors", heads)
            return export_model(self._plan, self._store, self.folder / MODEL, heads)

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
    plan: Plan,
    store: Store,
    target: Path,
    heads: Sequence[int] | None = None,
    told: Mapping[str, str] | None = None,
) -> Path:
    """Write a model to `target`, replacing what is there in one step.

    Args:
        heads: the version of each fragment; by default the newest.
        told: further metadata of the header.

    Raises:
        Gone: a version, or what is needed of it, is not kept.
        DiskFull: nothing is left behind.
        SyncFailed: fsync failed; the server must end.
    """
    header, owners = export_header(plan.schema, told)
    heads = store.heads() if heads is None else heads

    def contents(files: Sequence[tuple[int, int | None]]) -> Iterator[memoryview]:
        return model_runs(owners, [(layout, *each) for layout, each in zip(plan.versions, files, strict=True)])

    return store.export(target, heads, header, contents, with_state=plan.has_masters)


def model_runs(owners: Sequence[TensorSpec], sources: Sequence[tuple[Layout, int, int | None]]) -> Iterator[memoryview]:
    """The bytes behind the header of an export.

    Args:
        owners: the tensors, in order; some perhaps twice.
        sources: of each fragment the layout of its version, its file, and that of the outer state with the masters.
    """
    files = [ModelFile(*source) for source in sources]
    of = {name: file for (layout, *_), file in zip(sources, files, strict=True) for name in layout.by_name}
    for spec in owners:
        yield from of[spec.name].runs(spec)


def _line(summary_json: str, at: str) -> str:
    return json.dumps({"at": at, **json.loads(summary_json)}) + "\n"
