"""The best version so far, as files for people: `best.safetensors`, and `best.json` that says which it is.

Both are inodes of their own, written whole, fsynced, then renamed; the model first, so what `best.json` names is there.
Which version is best the journal's metrics say; these files are made again from it where a kill came between.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

from atoll.aggregation.plan import Plan
from atoll.errors import StoreError
from atoll.protocol import status_messages
from atoll.rounds.early_stopping import Measured, Tracking
from atoll.server.coordinator.exports import export_model
from atoll.server.coordinator.persistor import Best
from atoll.store.rows import HistoryRow
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

MODEL, NOTE = "best.safetensors", "best.json"


class BestVersion:
    """Writes into the folder of the exports, one version at a time."""

    def __init__(self, plan: Plan, store: Store, folder: Path) -> None:
        self._plan, self._store, self._folder = plan, store, folder
        self.metric = plan.settings.best_metric or ""
        self.saved: Measured | None = self._noted()

    @property
    def path(self) -> Path:
        """Of the model."""
        return self._folder / MODEL

    def save(self, measured: Measured) -> None:
        """Write the version; nothing is done where it is there already.

        Raises:
            Gone: it is not kept any more.
            DiskFull: what was there before is still there.
            SyncFailed: fsync failed; the server must end.
            StoreError: a folder is in the place of a file.
        """
        if self.saved == measured:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        require_files(self._folder)
        told = {"version": str(measured.version), "round": str(measured.round), self.metric: repr(measured.value)}
        export_model(self._plan, self._store, self.path, (measured.version,), told)
        self._write_note(measured)
        self.saved = measured

    def handed(self, measured: Measured) -> Best:
        """What a persistor gets of the version that was written last."""
        rows = (row for row in self._store.history(None, 0) if row.version == measured.version)
        summary = next((row.summary_json for row in rows), "") or "{}"
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return Best(measured.version, {self.metric: measured.value}, json.loads(summary), fd)

    def _write_note(self, measured: Measured) -> None:
        note = {
            "version": measured.version,
            "round": measured.round,
            "metric": self.metric,
            "mode": self._plan.settings.best_mode,
            "value": measured.value,
        }
        temporary = self._folder / f".{NOTE}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
            file.flush()
            self._store.sync(file.fileno(), str(temporary))
        os.replace(temporary, self._folder / NOTE)
        self._store.sync_folder(self._folder)

    def _noted(self) -> Measured | None:
        """What the files are, by this metric; None where one of them is missing, or they are by another one.

        The model's own header says it, too. A note that differs is damaged, or was to be replaced when the server was
        killed: it is made again.
        """
        path = self._folder / NOTE
        if not (path.exists() and self.path.exists()):
            return None
        told = self._header()
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            noted = Measured(int(note["version"]), int(note["round"]), float(note["value"]))
            metric = note["metric"]
        except (OSError, ValueError, KeyError, TypeError):
            noted, metric = None, self.metric
        if metric == self.metric and told == noted:
            return noted
        if told is not None:
            LOG.warning("%s is damaged, or older than %s: it is made again. Look at the disk.", path, MODEL)
            self._write_note(told)
        return told

    def _header(self) -> Measured | None:
        """What the model's header says; None where it is of another metric, or damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "pt") as file:
                told = file.metadata()
            return Measured(int(told["version"]), int(told["round"]), float(told[self.metric]))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None


def require_files(folder: Path) -> None:
    """Refuse to replace a folder, which may hold anything.

    Raises:
        StoreError: one lies where one of the files is to be.
    """
    for path in (folder / MODEL, folder / NOTE):
        if path.is_dir():
            raise StoreError(f"{path} is a folder.", "Move it away, and start the server again: the file is made.")


def measured_of(history: list[HistoryRow], metric: str) -> list[Measured]:
    """What the workers of each round measured of the version that they had pulled, in the order of rounds.

    Args:
        history: every version of one fragment, oldest first.
    """
    found, base = [], 0
    for row in history:
        if row.summary_json:
            summary = status_messages.RoundSummary.model_validate_json(row.summary_json)
            if (value := value_of(summary, metric)) is not None:
                found.append(Measured(base, summary.round, value))
        base = row.version
    return found


def value_of(summary: status_messages.RoundSummary, metric: str) -> float | None:
    """The round's value of the metric; None where nobody reported it, or the mean is not finite."""
    value = summary.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None


def missing(summary: status_messages.RoundSummary, tracking: Tracking) -> str:
    """What to say where a round says nothing about the tracked metric."""
    has = ", ".join(sorted(summary.metrics)) or "none"
    return (
        f"round {summary.round} has no finite {tracking.metric!r} (its metrics: {has}); neither the best version nor "
        f"early_stop_rounds looks at such a round. Report it: submit(model, metrics={{{tracking.metric!r}: …}})"
    )
