"""The files in the export folder: the model, the best version so far, and the metrics with one line per round."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from atoll.aggregation.plan import Plan
from atoll.blobs.model_file import model_header, model_runs
from atoll.errors import ConfigError, StoreError
from atoll.posix import (
    OWN_FILE,
    file_error,
    folder_error,
    mode_in,
    no_sync,
    open_named,
    open_own,
    own_folder,
    read_named,
    replace_file,
    require_regular,
    write_at,
)
from atoll.protocol import status_messages
from atoll.rounds.early_stopping import Measurement
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

MODEL = "model.safetensors"
METRICS = "metrics.jsonl"


class Exports:
    """Writes the files in the export folder: models, and metrics with one line per round."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan, self._store = plan, store
        self.folder: Path = plan.settings.exports
        self._lock = threading.Lock()
        self._complete = False  # whether the metrics file has a line for every round
        self._newest: dict[int, int] = {}  # fragment → the round in its last line

    def save(self, heads: Sequence[int] | None = None) -> Path:
        """Export a version as `model.safetensors`, and return the path.

        If `disk.export_every` is set, also write `model-<version>.safetensors`. Tied tensors are written under each of
        their names, so that `load_state_dict(strict=True)` accepts the file.

        Args:
            heads: for each fragment, the number of the version to export; by default the newest. The smallest of these
                numbers is `<version>` in the file's name.
        """
        with self._lock, made(self.folder, self._store.directory):
            heads = self._store.versions.heads() if heads is None else heads
            if self._plan.settings.disk.export_every:
                export_model(self._plan, self._store, self.folder / f"model-{min(heads):06d}.safetensors", heads)
            return export_model(self._plan, self._store, self.folder / MODEL, heads)

    def append_metrics(self, summary: status_messages.RoundSummary, at: str) -> None:
        """Append a line about a round to the metrics file.

        If this fails, or if the file lacks earlier lines, replace the whole file with one made from the journal.

        Args:
            summary: summary of the round.
            at: time of the end of the round, ISO 8601.

        Raises:
            StoreError: the export folder cannot be made or written. The old file stays as it is.
        """
        with self._lock:
            if self._newest.get(summary.fragment, 0) >= summary.round:  # the file was written again after the round
                if summary.global_metrics:  # perhaps before the version was evaluated
                    self._rewrite()
                return
            if self._complete and self._append(self._line(summary.model_dump_json(), at)):
                self._newest[summary.fragment] = summary.round
            else:
                self._rewrite()

    def complete_metrics(self) -> None:
        """Let the metrics file have a line for every round of the journal.

        After a crash, lines may be missing, or may be about lost versions.

        Raises:
            StoreError: the export folder cannot be made or written.
        """
        with self._lock:
            if not self._completed():
                self._rewrite()

    def _completed(self) -> bool:
        """Append the lines that a kill has left out. Return False if the file is not one of this run up to them.

        The last rounds tell: to compare all of them, the start of a long run would read millions of rows.
        """
        rounds = self._store.run_log.summaries(status_messages.HISTORY)
        lines = [self._line(each.summary_json, each.created_at) for each in rounds]
        end = self._end(sum(map(len, lines))) if len(lines) == status_messages.HISTORY else b""
        count = next((n for n in range(len(lines), 0, -1) if end.endswith(b"".join(lines[:n]))), 0)
        if not count or (count < len(lines) and not self._append(b"".join(lines[count:]))):
            return False
        self._complete, self._newest = True, {each.fragment: each.round for each in rounds}
        return True

    def _end(self, nbytes: int) -> bytes:
        """Return the last bytes of the metrics file; no bytes if it cannot be read."""
        with contextlib.suppress(OSError), open(self._opened(self.folder / METRICS), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
            return file.read()
        return b""

    def _append(self, line: bytes) -> bool:
        """Append a line to the metrics file, and return whether that succeeded. If not, no part of the line stays."""
        path = self.folder / METRICS
        with contextlib.suppress(OSError), open(self._opened(path), "r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                write_at(file.fileno(), line, end)
            except OSError:
                file.truncate(end)
            else:
                return True
        return False

    def _opened(self, path: Path) -> int:
        return open_own(path, os.O_RDWR, mode_in(self._store.directory, path))

    def _rewrite(self) -> None:
        self._complete = False
        rounds, with_sites = self._store.run_log.ended_rounds(None), self._store.run_log.with_sites
        lines = (self._line(with_sites(each.fragment, each.summary_json), each.created_at) for each in rounds)
        target, temporary = self.folder / METRICS, self.folder / f".{METRICS}.tmp"
        with made(self.folder, self._store.directory):
            mode = mode_in(self._store.directory, target)
            replace_file(target, lines, temporary=temporary, sync=no_sync, mode=mode)
        self._complete, self._newest = True, {each.fragment: each.round for each in rounds}

    def _line(self, summary_json: str, at: str) -> bytes:
        return f"{json.dumps({'at': at, 'run': self._store.run_log.run_id, **json.loads(summary_json)})}\n".encode()


@contextlib.contextmanager
def made(folder: Path, state_dir: Path) -> Iterator[None]:
    """Make the export folder. Replace an OSError, also one within the `with` block, by a `StoreError`.

    In the state directory, the folder is Atoll's own. Elsewhere, it is one that a user names.
    """
    try:
        if mode_in(state_dir, folder) == OWN_FILE:
            own_folder(folder, state_dir)
        else:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(error, folder, "Use a disk.export_dir that this user may write.") from error
    try:
        yield
    except OSError as error:
        raise file_error(error, error.filename2 or error.filename or folder / METRICS) from error


def export_model(
    plan: Plan,
    store: Store,
    target: Path,
    heads: Sequence[int] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a model of the run as a safetensors file, which replaces an existing file atomically.

    Args:
        plan: plan of the run.
        store: store of the run.
        target: path of the file.
        heads: for each fragment, the number of the version to export; by default the newest.
        metadata: further metadata for the file's header.

    Raises:
        Gone: a version, or a file that its export needs, is no longer kept.
        DiskFull: there is no space; no partial file is left.
        SyncFailed: fsync failed; the server must end.
    """
    header, owners = model_header(plan.schema, metadata)
    heads = store.versions.heads() if heads is None else heads

    def contents(files: Sequence[tuple[int, int | None]]) -> Iterator[memoryview]:
        return model_runs(owners, [(layout, *each) for layout, each in zip(plan.versions, files, strict=True)])

    return store.export(target, heads, header, contents, with_state=plan.has_masters)


# -- The best version so far: its model in `best.safetensors`, and its number and metric in `best.json`.
#
# Each file is written under another name, fsynced, then renamed. The model comes first, so that the version that
# `best.json` names always exists. The metrics in the journal decide which version is the best. If the server is killed
# between the two files, its next start writes them again.


BEST_MODEL, BEST_NOTE = "best.safetensors", "best.json"


class BestVersion:
    """Writes the two files of the best version, `best.safetensors` and `best.json`, in the export folder.

    Attributes:
        metric: name of the metric that decides which version is the best.
        saved: the version in the files; None if there is none.
    """

    def __init__(self, plan: Plan, store: Store, folder: Path) -> None:
        self._plan, self._store, self._folder = plan, store, folder
        self.metric = plan.settings.rounds.best_metric or ""
        self.saved: Measurement | None = self._noted()

    @property
    def path(self) -> Path:
        """Path of the best model."""
        return self._folder / BEST_MODEL

    def save(self, measured: Measurement) -> None:
        """Write both files for the best version `measured`, unless the files have this version already.

        Raises:
            Gone: the server no longer has the version.
            DiskFull: there is no space; the previous files are still there.
            SyncFailed: fsync failed; the server must end.
            StoreError: the export folder cannot be made or written.
        """
        if self.saved == measured and self.path.exists():
            return
        metadata = {"version": str(measured.version), "round": str(measured.round), self.metric: repr(measured.value)}
        with made(self._folder, self._store.directory):
            export_model(self._plan, self._store, self.path, (measured.version,), metadata)
            self._write_note(measured)
        self.saved = measured

    def _note(self, measured: Measurement) -> str:
        note = {
            "version": measured.version,
            "round": measured.round,
            "metric": self.metric,
            "mode": self._plan.settings.rounds.best_mode_in_effect,
            "value": measured.value,
        }
        return json.dumps(note) + "\n"

    def _write_note(self, measured: Measurement) -> None:
        target, temporary = self._folder / BEST_NOTE, self._folder / f".{BEST_NOTE}.tmp"
        sync, mode = self._store.journal.sync, mode_in(self._store.directory, target)
        note = self._note(measured).encode()
        replace_file(target, [note], temporary=temporary, sync=lambda fd: sync(fd, str(temporary)), mode=mode)
        self._store.journal.sync_folder(self._folder)

    def _noted(self) -> Measurement | None:
        """Return the version in `best.safetensors`; None if there is none, or if it is the best by another metric.

        If `best.json` names another version or is damaged, write it again: the server may have been killed between
        the two files.
        """
        measured, path = self._header(), self._folder / BEST_NOTE
        if measured is None:
            return None
        try:
            agrees = read_named(path).decode() == self._note(measured)
        except (OSError, ValueError):
            agrees = False
        if not agrees:
            LOG.warning(
                "the file %s is missing, damaged or older than %s; it is rewritten. Check the disk.", path, BEST_MODEL
            )
            self._write_note(measured)
        return measured

    def _header(self) -> Measurement | None:
        """Return the version that the header of `best.safetensors` names.

        Return None if the file is missing or damaged, or if the version is the best by another metric.
        """
        from safetensors import SafetensorError, safe_open

        try:
            require_regular(self.path)
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata()
            return Measurement(int(metadata["version"]), int(metadata["round"]), float(metadata[self.metric]))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None


def require_files(folder: Path, *, best: bool) -> None:
    """Check that the export folder has no folder or pipe with the name of a file that the run writes.

    Args:
        folder: the export folder.
        best: whether the run writes `best.safetensors` and `best.json`, too.

    Raises:
        StoreError: there is such a folder or pipe.
    """
    for path in [folder / name for name in (MODEL, METRICS, *((BEST_MODEL, BEST_NOTE) if best else ()))]:
        if path.exists() and not path.is_file():
            raise StoreError(f"{path} exists, but is not a plain file.", "Move it away, then start the run again.")


def require_no_results(folder: Path) -> None:
    """Before a new run begins, check that it will not replace files of another run in its export folder.

    Raises:
        ConfigError: there are such files. Empty files do not count.
    """
    paths = [folder / name for name in (METRICS, MODEL, BEST_MODEL, BEST_NOTE)]
    if found := [path.name for path in paths if path.is_file() and path.stat().st_size]:
        raise ConfigError(
            f"A new run would replace {', '.join(found)} of another run in {folder}.",
            "Set another disk.export_dir, or move the old files away.",
        )


def require_own_results(folder: Path, run: str) -> None:
    """Before a run continues, check that it will not replace the metrics of another run in its export folder.

    Args:
        folder: the export folder.
        run: id of the run.

    Raises:
        ConfigError: there are such metrics; the message names both runs.
    """
    try:
        with open(open_named(folder / METRICS), encoding="utf-8") as file:
            other = str(json.loads(file.readline())["run"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return  # no metrics yet, or damaged ones
    if other != run:
        raise ConfigError(
            f"{folder} has the exports of run {other[:8]}, which this run, {run[:8]}, would replace.",
            "Set another disk.export_dir, or move the old files away.",
        )
