"""Cross-site evaluation: every site evaluates every model on its own data. The metrics are a matrix, models × sites.

    [[workflow.steps]]
    kind = "cross_site_evaluation"
    versions = ["latest", 12, "best", "other.safetensors"]

The server writes each model of the run once for all sites, and each site sends its own model to the server once. Sites
download the models from the server to disk, and answer with metrics. A row of the matrix is a model, a column is a
site. All sites work in parallel, each on its own column.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from atoll import registry
from atoll.blobs.model_file import packed_state
from atoll.blobs.ways_to_send import Cut
from atoll.config.bounds import MAX_WEIGHT
from atoll.config.workflow_settings import file_name_of
from atoll.errors import AtollError, ConfigError, Gone, RunFailed
from atoll.format_text import number_of
from atoll.posix import mode_in, no_sync, own_folder, read_named, replace_file
from atoll.protocol import messages
from atoll.protocol.task_messages import Cell, EvaluatedModel, Evaluation, ObjectKey, markdown
from atoll.server.coordinator.exports import BEST_MODEL, BEST_NOTE, export_model, made
from atoll.server.tasks.task_queue import TaskPayload
from atoll.server.tasks.workflow_controller import Controller, ProgressSigns, progress_of, why_gone
from atoll.tensors.lazy_tensors import LazyState
from atoll.tensors.reference import TensorRef

LOG = logging.getLogger("atoll.server")

SUFFIX = ".safetensors"

ModelLocation = ObjectKey | TensorRef
"""Where sites download a model from: an object on this server, or a reference to an object of another process."""

SUBMIT, VALIDATE = "submit_model", "validate"
EVALUATION_TIMEOUT_S = 3600.0
LOOK_S = 0.2
RETURN_S = 10.0
"""Minimum seconds to wait for a site that has left: the script of a DiLoCo loop leaves and then joins again."""
LOUD = 200
"""If the matrix has more cells than this, results of single cells are logged at DEBUG instead of INFO."""
WORDS = ("latest", "best")


def cross_site_evaluation(
    controller: Controller,
    versions: Sequence[str | int] | None = None,
    site_models: bool = True,
    sites: Sequence[str] | None = None,
    evaluation_timeout_s: float = EVALUATION_TIMEOUT_S,
) -> Evaluation:
    """Let every site evaluate every model, and write the matrix to the export folder, as JSON and as Markdown tables.

    Args:
        controller: controller of the workflow.
        versions: models of the run: `latest`, `best`, version numbers, or safetensors files at the server. By default
            the latest version, if the run has a model.
        site_models: whether each site's own model is evaluated, too.
        sites: names of the sites that take part; by default all that have ever joined.
        evaluation_timeout_s: seconds without progress after which the server stops waiting for a site that evaluates a
            model; 0: never.

    Raises:
        ConfigError: an argument is wrong.
        RunFailed: no evaluation gave a value; the message names reasons.
    """
    require(versions, site_models, sites, evaluation_timeout_s)
    run, workflows, background = controller.run, controller.queue.workflows, controller.background
    chosen = sorted(set(sites)) if sites is not None else sorted(run.roster)
    assert workflows is not None
    with ModelsToEvaluate(controller) as models:
        sources = [ModelSource(row, location=location, is_final=True) for row, location in models.of_run(versions)]
        if site_models:
            sources += [ModelSource(EvaluatedModel(name=site, kind="site"), owner=site) for site in chosen]
        matrix = EvaluationMatrix(controller, models, sources, chosen, evaluation_timeout_s)
        workflows.evaluated = matrix.so_far
        controller.note(matrix.progress)
        controller.ask(matrix.fill())
    evaluation = matrix.so_far(finished=True)
    workflows.evaluated = lambda: evaluation
    folder, state_dir = run.settings.exports, run.store.directory
    export = functools.partial(_export, evaluation, folder, state_dir, controller.name)
    controller.ask(background.saved("the evaluation", export))
    return evaluation


def require(
    versions: Sequence[str | int] | None = None,
    site_models: bool = True,
    sites: Sequence[str] | None = None,
    evaluation_timeout_s: float = EVALUATION_TIMEOUT_S,
) -> None:
    """Check the arguments of `cross_site_evaluation`. The server does so at its start, long before the evaluation.

    Raises:
        ConfigError: an argument is wrong.
    """
    if versions is not None and (isinstance(versions, str) or not isinstance(versions, Sequence)):
        raise ConfigError(f"versions is {versions!r}, not a list.", 'Write a list: versions = ["latest"].')
    for each in versions or ():
        number = type(each) is int and 0 <= each < messages.NUMBER_BELOW
        if not (number or (isinstance(each, str) and (each in WORDS or is_file(each)))):
            raise ConfigError(
                f"versions contains {each!r}, which is not a version.",
                registry.nearest(str(each), WORDS, 'Use "latest", "best", version numbers or .safetensors files.'),
            )
    if type(site_models) is not bool:
        raise ConfigError(f"site_models is {site_models!r}, not a boolean.", "Set it to true or false.")
    if sites is not None and (isinstance(sites, str) or not all(isinstance(site, str) for site in sites) or not sites):
        raise ConfigError(f"sites is {sites!r}.", 'Write a list of names: sites = ["clinic-a"].')
    if type(evaluation_timeout_s) not in (int, float) or not 0 <= evaluation_timeout_s < math.inf:
        raise ConfigError(
            f"evaluation_timeout_s is {evaluation_timeout_s!r}.", "Give a number of seconds, or 0 for no limit."
        )
    if not site_models and versions is not None and not versions:
        raise ConfigError("There is no model to evaluate: versions is empty.", "Add one, or set site_models = true.")


cross_site_evaluation.require = require  # type: ignore[attr-defined]


# -- the models that sites download from the server


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
        """Return the models of the run: for each, its row of the matrix and the place where sites download the model.

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
        """Return the place where other sites can download a site's own model. Call this on the event loop.

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
            payload = TaskPayload.taken_over(self._controller.queue.objects, key)
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
            LOG.error("the model %s cannot be evaluated: %s", row.name, why)
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
        run, exports = self._run, self._run.settings.exports
        if isinstance(version, str) and is_file(version):
            return Path(version), row.model_copy(update={"kind": "file"}), False
        if version == "best":
            path = exports / BEST_MODEL
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                number = int(json.loads(read_named(exports / BEST_NOTE))["version"])
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
            own_folder(path.parent, run.settings.disk.state_dir)
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
                "To keep it, set disk.export_every before training. After training, a larger "
                "disk.keep_versions does not help.",
            ) from None

    def _written(self, path: Path) -> ObjectKey:
        """Copy the model of a file into an object that sites may download. Return the object's key."""
        run = self._run
        run.require_space()
        state = LazyState.open(path)
        try:
            cut = Cut(run.settings.workflow.tensor_part_bytes or 2**23)
            payload = TaskPayload.write(self._controller.queue.objects, packed_state(state), cut)
        finally:
            state.release()

        async def hold() -> ObjectKey:
            payload.hold()
            self._payloads.append(payload)
            return payload.key

        return self._controller.ask(hold())


# -- the matrix


@dataclass(eq=False)
class ModelSource:
    """A row of the matrix, and the place where sites can download its model.

    Attributes:
        row: description of the model.
        owner: the site that trained the model; empty for a model of the run.
        location: where to download the model. None means "not known yet" while `is_final` is False, and "there is no
            model" when it is True.
        is_final: whether `location` is final.
    """

    row: EvaluatedModel
    owner: str = ""
    location: ModelLocation | None = None
    is_final: bool = False


class EvaluationMatrix:
    """The matrix of one evaluation. `fill` fills its cells. Call methods on the server's event loop.

    Args:
        controller: controller of the workflow, which sends the tasks.
        models: the models that the server keeps for this evaluation.
        sources: the rows, one for each model.
        sites: the columns, one for each site.
        limit_s: seconds without progress after which the server stops waiting for a site that evaluates a model; 0:
            never.
    """

    def __init__(
        self,
        controller: Controller,
        models: ModelsToEvaluate,
        sources: list[ModelSource],
        sites: list[str],
        limit_s: float,
    ) -> None:
        self._controller, self._run, self._models, self._limit_s = controller, controller.run, models, limit_s
        self.sources, self.sites = sources, sites
        self._cells: dict[tuple[str, str], Cell] = {}
        self._working, self._waiting = set(sites), set[str]()
        self._away_since_s: dict[str, float] = {}
        self._hung: dict[str, tuple[str, ProgressSigns]] = {}  # site → why it was given up, and its progress then

    async def fill(self) -> None:
        """Fill every cell with metrics or an error. All columns are filled in parallel."""
        done = await asyncio.gather(*map(self._fill_column, self.sites), return_exceptions=True)
        if error := next((each for each in done if each is not None), None):
            raise error

    async def _fill_column(self, site: str) -> None:
        """Ask a site for its own model, then let this site evaluate every model.

        If an error ends this before the site's own model arrives, record that there is none, so that the other sites
        do not wait for it.
        """
        own_model = next((source for source in self.sources if source.owner == site), None)
        try:
            if own_model is not None:
                answer, error = await self._ask(site, SUBMIT, None)
                location, error = (None, error) if error else self._models.of_site(answer)
                self._set_location(own_model, location, _one_line(error))
            while (source := await self._next_for(site)) is not None:
                location = source.location
                model = location if isinstance(location, TensorRef) or location is None else location.model_dump()
                payload, error = await self._ask(site, VALIDATE, {"model": model, "name": source.row.name})
                cell = Cell(model=source.row.name, site=site, error=_one_line(error))
                cell = self._cells[cell.model, site] = cell if error else _with_metrics(cell, payload)
                numbers = ", ".join(f"{key} {value:.6g}" for key, value in cell.metrics.items())
                level = logging.INFO if len(self.sources) * len(self.sites) <= LOUD else logging.DEBUG
                LOG.log(level, "%s on %s: %s", cell.model, cell.site, cell.error or numbers or "no finite metric")
                self._controller.note(self.progress)
        finally:
            self._working.discard(site)
            if own_model is not None and not own_model.is_final:
                self._set_location(own_model, None, "the site submitted no model")

    def _set_location(self, source: ModelSource, location: ModelLocation | None, error: str) -> None:
        """Record where a site's model can be downloaded, or why there is no model."""
        source.location, source.is_final = location, True
        digest = location.digest if location is not None else ""
        source.row = source.row.model_copy(update={"error": error, "digest": digest})
        self._run.wake()

    async def _next_for(self, site: str) -> ModelSource | None:
        """Wait for the next model that a site has to evaluate, and return it; None if it has evaluated all.

        Each site begins with a different model, so that not all sites download the same model at once.
        """
        begin = self.sites.index(site)
        order = self.sources[begin:] + self.sources[:begin]
        while True:
            for row in [source.row for source in order if source.is_final and source.row.error]:
                self._cells.setdefault((row.name, site), Cell(model=row.name, site=site, error=row.error))
            remaining = [source for source in order if (source.row.name, site) not in self._cells]
            ready = next((source for source in remaining if source.is_final), None)
            if ready is not None or not remaining:
                return ready
            await self._pause(site)  # until another site has sent its model

    async def _pause(self, site: str) -> None:
        self._waiting.add(site)
        await self._run.changed(LOOK_S)
        self._waiting.discard(site)

    async def _wait(self, site: str, until: Callable[[], bool]) -> bool:
        """Wait for a site that has left or hangs to return. It has returned when `until()` is true.

        Returns:
            True if the site has returned. False if `RETURN_S` seconds have passed and no other site is working.
        """
        end_s = self._away_since_s.setdefault(site, time.monotonic()) + RETURN_S
        while not until():
            if self._working - {site} <= self._waiting and time.monotonic() >= end_s:
                return False
            await self._pause(site)
        del self._away_since_s[site]
        return True

    async def _ask(self, site: str, task: str, payload: Any) -> tuple[Any, str]:
        """Send a task to a site. Return (payload of the answer, "") or (None, error).

        If the site has left or hangs, wait for it as long as other sites are working, and for at least `RETURN_S`
        seconds.
        """
        run = self._run
        if site in self._hung:
            why, before = self._hung[site]
            if not await self._wait(site, lambda: progress_of(run, site) != before):
                return None, why
            del self._hung[site]
        while True:
            result = await self._controller.attempt(site, task, payload, self._limit_s)
            if result.lost == "stuck":
                self._hung[site] = result.error, progress_of(run, site)
            if result.error and result.lost != "gone":
                return None, result.error
            if not result.error:
                return await asyncio.get_running_loop().run_in_executor(
                    run.io, operator.attrgetter("payload"), result
                ), ""
            if not await self._wait(site, lambda: not why_gone(run, site)):
                return None, f"the site {why_gone(run, site) or 'had gone'}"

    @property
    def progress(self) -> str:
        """The number of filled cells, as text for the status, such as "3 of 8 evaluations"."""
        return f"{len(self._cells)} of {number_of(len(self.sources) * len(self.sites), 'evaluation')}"

    def so_far(self, *, finished: bool = False) -> Evaluation:
        """Return the matrix with the cells filled so far, row by row. Thread-safe."""
        keys = [(source.row.name, site) for source in self.sources for site in self.sites]
        return Evaluation(
            run=self._run.store.run_log.run_id,
            name=self._run.settings.run.name,
            finished=finished,
            sites=self.sites,
            models=[source.row for source in self.sources],
            cells=[self._cells[key] for key in keys if key in self._cells],
        ).with_means()


def _with_metrics(cell: Cell, payload: Any) -> Cell:
    """Return a cell with the metrics in a site's payload, or with an error if they are missing or not valid.

    Args:
        cell: the cell without metrics.
        payload: payload of the site's answer.
    """
    metrics = payload.get("metrics") if isinstance(payload, Mapping) else None
    if isinstance(metrics, Mapping) and len(metrics) > messages.METRICS:
        error = f"the site returned {len(metrics)} metrics; an evaluation may have at most {messages.METRICS}"
        return cell.model_copy(update={"error": error})
    if not isinstance(metrics, Mapping) or not metrics:
        is_nothing = not metrics and isinstance(metrics, Mapping | None)
        what = "nothing" if is_nothing else f"an object of type {type(metrics).__name__}"
        return cell.model_copy(update={"error": f"the site returned {what} instead of a dict of metric name → number"})
    found: dict[str, float] = {}
    for key, value in metrics.items():
        named = type(key) is str and 0 < len(key) <= messages.METRIC_CHARS and key.isprintable()
        if not named or type(value) not in (int, float):
            error = _one_line(f"the site reported {str(key)[:50]!r} as {str(value)[:50]!r}, which is not a number")
            return cell.model_copy(update={"error": error})
        found[key] = float(value) if abs(value) < 1e300 else math.inf
    finite = {key: value for key, value in found.items() if math.isfinite(value)}
    seconds, weight = payload.get("seconds", 0.0), payload.get("weight")
    return cell.model_copy(
        update={
            "metrics": finite,
            "not_finite": sorted(found.keys() - finite.keys()),
            "weight": float(weight) if type(weight) in (int, float) and 0 <= weight <= MAX_WEIGHT else None,
            "seconds": float(seconds) if type(seconds) in (int, float) and 0 <= seconds < 1e9 else 0.0,
        }
    )


def _export(evaluation: Evaluation, folder: Path, state_dir: Path, workflow: str) -> None:
    """Write the matrix as JSON and as Markdown into the export folder `folder`, each file atomically.

    Raises:
        StoreError: the export folder cannot be made or written.
        RunFailed: no evaluation gave a value.
    """
    name = file_name_of(workflow)
    with made(folder, state_dir):
        for suffix, text in ((".json", evaluation.model_dump_json(indent=2) + "\n"), (".md", markdown(evaluation))):
            target, temporary = folder / f"{name}{suffix}", folder / f".{name}{suffix}.tmp"
            replace_file(target, [text.encode()], temporary=temporary, sync=no_sync, mode=mode_in(state_dir, target))
    values = sum(bool(cell.metrics or cell.not_finite) for cell in evaluation.cells)
    LOG.info("%d of %d evaluations have a result, see %s", values, len(evaluation.cells), folder / f"{name}.md")
    if not values:
        reasons = "; ".join(evaluation.empty()[:3]) or "there is no site, or no model"
        raise RunFailed(f"The workflow {workflow} evaluated nothing: {reasons}.", "See the logs of the sites.")


def _one_line(text: str) -> str:
    """Return a site's text as one line of at most 600 printable characters, without terminal control codes."""
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= 600 else f"{text[:597]}…"
