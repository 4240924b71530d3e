"""Models of a run as objects that sites pull from its server: versions that are kept, exports, files of the user's."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from atoll.blobs.manifest import Cut
from atoll.blobs.model_file import packed_state
from atoll.blobs.object_file import write_object
from atoll.errors import AtollError, Gone
from atoll.server.coordinator.background_writes import BEST_MODEL, BEST_NOTE, export_model
from atoll.server.tasks.evaluation_matrix import Row, Source
from atoll.server.tasks.task_queue import key_to
from atoll.server.tasks.workflow_controller import Controller
from atoll.server.transient_errors import require_space
from atoll.store.file_slots import disk_error
from atoll.store.kept_objects import Kept
from atoll.tensors.lazy_tensors import LazyState

LOG = logging.getLogger("atoll.server")

SUFFIX = ".safetensors"


def is_file(version: str) -> bool:
    """Whether it names a file rather than a version."""
    return version.endswith(SUFFIX)


class GlobalModels:
    """Writes them in the workflow's thread, in runs of some MiB; as a context manager, lets go of them.

    Args:
        versions: as `cross_site_evaluation` has them.
    """

    def __init__(self, controller: Controller, versions: Sequence[str | int] | None) -> None:
        self._controller, self._run = controller, controller.run
        self._kept: list[Kept] = []
        if versions is None:
            versions = () if self._run.plan.schema.is_nothing else ("latest",)
        self._versions = versions
        self.sources: list[Source] = []

    def __enter__(self) -> GlobalModels:
        try:
            for version in self._versions:
                source = self._source(version)
                if source.row.name not in (each.row.name for each in self.sources):
                    self.sources.append(source)
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()

    def _let_go(self) -> None:
        async def let_go() -> None:
            for kept in self._kept:
                self._run.objects.let_go(kept)

        if self._kept:
            self._controller.ask(let_go())  # where the server ends, it lets go by itself

    def _source(self, version: str | int) -> Source:
        """One row; with the reason, where its model cannot be had."""
        row = Row(name=f"version {version}" if type(version) is int else str(version), kind="version")
        try:
            path, row, passing = self._file_of(version, row)
        except AtollError as error:
            LOG.error("%s cannot be evaluated: %s", row.name, error)
            return Source(row.model_copy(update={"error": str(error)}))
        try:
            place = self._held(path)
        except (AtollError, FileNotFoundError, PermissionError) as error:
            told = (
                str(error) if isinstance(error, AtollError) else f"{error.strerror}, at the server: {path.absolute()}"
            )
            LOG.error("%s cannot be evaluated: %s", row.name, told)
            return Source(row.model_copy(update={"error": told}))
        finally:
            if passing:
                path.unlink(missing_ok=True)
        return Source(row.model_copy(update={"digest": place["digest"]}), place=place)

    def _file_of(self, version: str | int, row: Row) -> tuple[Path, Row, bool]:
        """A file of a model, its row, and whether the file is to go.

        Raises:
            Gone: there is none any more.
        """
        run, exports = self._run, self._run.behind.exports.folder
        if isinstance(version, str) and is_file(version):
            return Path(version), row.model_copy(update={"kind": "file"}), False
        if version == "best":
            path = exports / BEST_MODEL
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                number = int(json.loads((exports / BEST_NOTE).read_text(encoding="utf-8"))["version"])
                name = f"best (version {number})"
                return path, row.model_copy(update={"name": name, "version": number}), False
            raise Gone("There is no best version.", "It is kept where best_metric is set, once that was reported.")
        newest = run.store.heads()
        heads = newest if version == "latest" else (int(version),) * len(newest)
        row = row.model_copy(update={"name": f"version {min(heads)}", "version": min(heads)})
        path = run.settings.state_dir / "objects" / f"evaluated-{os.getpid()}{SUFFIX}"  # a start removes what is left
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            require_space(run.store, run.settings)
            return export_model(run.plan, run.store, path, heads), row, True
        except Gone:
            saved = exports / f"model-{min(heads):06d}{SUFFIX}"
            if saved.is_file():
                return saved, row, False
            if min(heads) > min(newest):
                raise Gone(f"There is no version {min(heads)}: the run has come to {min(newest)}.") from None
            raise Gone(
                f"Version {min(heads)} is no longer kept.",
                "Set save_every before training; keep_versions counts while the run is not finished.",
            ) from None

    def _held(self, path: Path) -> dict[str, Any]:
        """The model as an object of the server's; what sites are told of it."""
        run = self._run
        require_space(run.store, run.settings)
        state = LazyState.open(path)
        object_id, fd = run.objects.draft()
        try:
            extent, digests = write_object(
                packed_state(state), fd, Cut(run.settings.tensor_download_chunk_size or 2**23)
            )
        except BaseException as error:
            run.objects.discard(object_id)
            raise disk_error(error, path) if isinstance(error, OSError) else error from error
        finally:
            os.close(fd)
            state.release()

        async def hold() -> dict[str, Any]:
            try:
                kept, secret = run.objects.hold(object_id, extent, digests, inline=False)
            except BaseException:
                run.objects.discard(object_id)
                raise
            self._kept.append(kept)
            return key_to(kept, secret).model_dump()

        return self._controller.ask(hold())
