"""The models that sites download from the server in an evaluation: versions, exported files, models of sites."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from atoll.blobs.model_file import packed_state
from atoll.blobs.payload_cut import Cut
from atoll.errors import AtollError, Gone
from atoll.protocol.task_messages import EvaluatedModel, ObjectKey
from atoll.server.coordinator.background_writes import BEST_MODEL, BEST_NOTE, export_model
from atoll.server.tasks.task_queue import TaskPayload
from atoll.server.tasks.workflow_controller import Controller
from atoll.tensors.lazy_tensors import LazyState
from atoll.tensors.reference import TensorRef

LOG = logging.getLogger("atoll.server")

SUFFIX = ".safetensors"

ModelLocation = ObjectKey | TensorRef
"""From where sites download a model: an object on this server, or a reference to an object of another process."""


def is_file(version: str) -> bool:
    """Return whether a text is the path of a safetensors file, and not the name of a version."""
    return version.endswith(SUFFIX)


class ModelsToEvaluate:
    """The models that the server keeps as objects during one evaluation. The end of the `with` block removes them.

    Call methods in the workflow's thread, except `of_site`. Writing a model needs only a few MiB of memory.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller, self._run = controller, controller.run
        self._payloads: list[TaskPayload] = []

    def __enter__(self) -> ModelsToEvaluate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def remove() -> None:
            for payload in self._payloads:
                payload.discard()

        if self._payloads:
            self._controller.ask(remove())  # a server that is stopping removes its objects itself

    def of_run(self, versions: Sequence[str | int] | None) -> list[tuple[EvaluatedModel, ModelLocation | None]]:
        """Return the matrix row of each model of the run, and the place from which sites download the model.

        If a model is missing, its row has an `error`, and the place is None. A model that `versions` names twice has
        only one row.

        Args:
            versions: "latest", "best", version numbers or safetensors files; None means the latest version, if the run
                has a model.
        """
        if versions is None:
            versions = () if self._run.plan.schema.is_nothing else ("latest",)
        found: dict[str, tuple[EvaluatedModel, ModelLocation | None]] = {}
        for version in versions:
            row, location = self._of_version(version)
            found.setdefault(row.name, (row, location))
        return list(found.values())

    def of_site(self, answer: Any) -> tuple[ModelLocation | None, str]:
        """Return the place from which other sites download a site's own model. Call this on the event loop.

        Args:
            answer: the site's answer to the task `submit_model`.

        Returns:
            (place, "") or, if the answer has no usable model, (None, error).
        """
        model = answer.get("model") if isinstance(answer, dict) else None
        if isinstance(model, TensorRef):  # returned by a user's handler
            return model, ""
        try:
            key = ObjectKey.model_validate(model)
        except ValidationError:
            return None, "the site's answer to submit_model is not a reference to a model"
        try:
            payload = TaskPayload.taken_over(self._run.objects, key)
        except AtollError as error:
            return None, f"the server does not have the model of the site: {error}"
        self._payloads.append(payload)
        return payload.key, ""

    def _of_version(self, version: str | int) -> tuple[EvaluatedModel, ModelLocation | None]:
        row = EvaluatedModel(name=f"version {version}" if type(version) is int else str(version), kind="version")
        path: Path | None = None
        temporary = False
        try:
            path, row, temporary = self._file_of(version, row)
            location = self._written(path)
        except (AtollError, FileNotFoundError, PermissionError) as error:
            why = str(error)
            if isinstance(error, OSError) and path is not None:
                why = f"{error.strerror}, at the server: {path.absolute()}"
            LOG.error("%s cannot be evaluated: %s", row.name, why)
            return row.model_copy(update={"error": why}), None
        finally:
            if temporary and path is not None:
                path.unlink(missing_ok=True)
        return row.model_copy(update={"digest": location.digest}), location

    def _file_of(self, version: str | int, row: EvaluatedModel) -> tuple[Path, EvaluatedModel, bool]:
        """Return the file with a model, the row of the matrix for it, and whether to remove the file after use.

        Raises:
            Gone: there is no such model, or it is no longer kept.
        """
        run, exports = self._run, self._run.background.exports.folder
        if isinstance(version, str) and is_file(version):
            return Path(version), row.model_copy(update={"kind": "file"}), False
        if version == "best":
            path = exports / BEST_MODEL
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                number = int(json.loads((exports / BEST_NOTE).read_text(encoding="utf-8"))["version"])
                name = f"best (version {number})"
                return path, row.model_copy(update={"name": name, "version": number}), False
            raise Gone(
                "There is no best version.",
                "Set rounds.best_metric. A best version exists after a round with this metric.",
            )
        newest = run.store.versions.heads()
        heads = newest if version == "latest" else (int(version),) * len(newest)
        row = row.model_copy(update={"name": f"version {min(heads)}", "version": min(heads)})
        path = (
            run.settings.disk.state_dir / "objects" / f"evaluated-{os.getpid()}{SUFFIX}"
        )  # the next start removes a leftover
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            run.require_space()
            return export_model(run.plan, run.store, path, heads), row, True
        except Gone:
            saved = exports / f"model-{min(heads):06d}{SUFFIX}"
            if saved.is_file():
                return saved, row, False
            if min(heads) > min(newest):
                raise Gone(f"Version {min(heads)} does not exist: the newest is {min(newest)}.") from None
            raise Gone(
                f"Version {min(heads)} is no longer kept.",
                "To keep it, set disk.export_every before training. Once the run is finished, "
                "disk.keep_versions does not apply.",
            ) from None

    def _written(self, path: Path) -> ObjectKey:
        """Copy the model of a file into an object that sites may download. Return the object's key."""
        run = self._run
        run.require_space()
        state = LazyState.open(path)
        try:
            cut = Cut(run.settings.workflow.tensor_part_bytes or 2**23)
            payload = TaskPayload.write(run.objects, packed_state(state), cut)
        finally:
            state.release()

        async def hold() -> ObjectKey:
            payload.hold()
            self._payloads.append(payload)
            return payload.key

        return self._controller.ask(hold())
