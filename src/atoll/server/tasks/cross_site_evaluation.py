"""Cross-site evaluation: every site's model and the run's own on every site's data.

    [[workflows]]
    kind = "cross_site_evaluation"
    versions = ["latest", 12, "best", "other.safetensors"]

A site keeps its model and gives a reference to it; who evaluates it pulls it from there, to disk. What the server has
of its own it writes once, for all. Here only references, numbers and errors come together.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from atoll import registry
from atoll.config.workflow_settings import file_name_of
from atoll.errors import ConfigError, RunFailed
from atoll.protocol import messages
from atoll.protocol.task_messages import Cell, Evaluation, markdown
from atoll.server.tasks.evaluation_matrix import Board, Row, Source
from atoll.server.tasks.models_to_evaluate import GlobalModels, is_file
from atoll.server.tasks.workflow_controller import Controller, why_gone

LOG = logging.getLogger("atoll.server")

SUBMIT, VALIDATE = "submit_model", "validate"
EVALUATION_TIMEOUT_S = 3600.0
GOODBYE_S = 10.0
"""How long sites have, in the end, to say that they keep their models for nobody any more."""
LOUD = 200
"""Cells up to which each is a line in the log."""
WORDS = ("latest", "best")


def cross_site_evaluation(
    controller: Controller,
    versions: Sequence[str | int] | None = None,
    site_models: bool = True,
    sites: Sequence[str] | None = None,
    evaluation_timeout_s: float = EVALUATION_TIMEOUT_S,
) -> Evaluation:
    """Let every site evaluate every model, and write the matrix into the exports: as JSON, and as tables.

    Args:
        versions: models of the run: `latest`, `best`, numbers of versions, safetensors files at the server; by default
            the latest, where the run has a model.
        site_models: whether sites are asked for theirs.
        sites: whose data, and whose models; by default all that have ever joined.
        evaluation_timeout_s: a site that shows nothing for so long, while it evaluates one model, is given up.

    Raises:
        ConfigError: an argument is none.
        RunFailed: not one cell has a value; why is told.
    """
    require(versions, site_models, sites, evaluation_timeout_s)
    run = controller.run
    chosen = sorted(set(sites)) if sites is not None else sorted(run.roster)
    board = Board(chosen, controller.require_running)
    with GlobalModels(controller, versions) as models:
        for source in models.sources:
            board.add(source)
        if site_models:
            for site in chosen:
                board.add(Source(Row(name=site, kind="site"), owner=site))
        told = _Told(controller, board)
        assert run.workflows is not None
        run.workflows.evaluated = told.so_far
        columns = [_Column(controller, board, site, evaluation_timeout_s, site_models, told) for site in chosen]
        with ThreadPoolExecutor(max(1, len(columns)), thread_name_prefix="atoll-evaluation") as pool:
            for done in [pool.submit(column.fill) for column in columns]:
                done.result()
        _withdraw(controller, board)
    return told.end()


def require(
    versions: Sequence[str | int] | None = None,
    site_models: bool = True,
    sites: Sequence[str] | None = None,
    evaluation_timeout_s: float = EVALUATION_TIMEOUT_S,
) -> None:
    """Refuse arguments that mean nothing, before a run begins that comes to them at its end.

    Raises:
        ConfigError: one is none; the nearest word is offered.
    """
    if versions is not None and (isinstance(versions, str) or not isinstance(versions, Sequence)):
        raise ConfigError(f"versions is {versions!r}.", 'Write a list: versions = ["latest"].')
    for each in versions or ():
        number = type(each) is int and 0 <= each < messages.NUMBER_BELOW
        if not (number or (isinstance(each, str) and (each in WORDS or is_file(each)))):
            raise ConfigError(
                f"versions has {each!r}.",
                registry.nearest(str(each), WORDS, 'Give "latest", "best", numbers of versions, .safetensors files.'),
            )
    if type(site_models) is not bool:
        raise ConfigError(f"site_models is {site_models!r}.", "Set it to true or false.")
    if sites is not None and (isinstance(sites, str) or not all(isinstance(site, str) for site in sites) or not sites):
        raise ConfigError(f"sites is {sites!r}.", 'Write a list of names: sites = ["clinic-a"].')
    if type(evaluation_timeout_s) not in (int, float) or not 0 <= evaluation_timeout_s < math.inf:
        raise ConfigError(f"evaluation_timeout_s is {evaluation_timeout_s!r}.", "Give seconds; 0 sets no limit.")
    if not site_models and versions is not None and not versions:
        raise ConfigError("versions is empty, and site_models is false: nothing is to be evaluated.", "Set one.")


cross_site_evaluation.require = require  # type: ignore[attr-defined]


class _Column:
    """One site: it gives its model, then evaluates those of all, one after the other. In a thread of its own."""

    def __init__(
        self, controller: Controller, board: Board, site: str, limit_s: float, submits: bool, told: _Told
    ) -> None:
        self._controller, self._board, self._site, self._limit_s = controller, board, site, limit_s
        self._submits, self._told = submits, told

    def fill(self) -> None:
        """Until each of its cells has a value or a reason; nobody waits for it in vain, whatever it raises."""
        try:
            if self._submits:
                place, error = self._model_of(self._site, through_server=False)
                self._board.settle(self._board.source_of(self._site), place, _shortened(error))
            while (source := self._board.next_for(self._site)) is not None:
                self._put(source, self._evaluated(source))
                self._told.note()
        finally:
            self._board.leave(self._site)

    def _put(self, source: Source, cell: Cell) -> None:
        self._board.put(cell)
        level = logging.INFO if self._board.count <= LOUD else logging.DEBUG
        told = cell.error or ", ".join(f"{key} {value:.6g}" for key, value in cell.metrics.items())
        LOG.log(level, "%s on %s: %s", source.row.name, cell.site, told or "no finite metric")

    def _evaluated(self, source: Source) -> Cell:
        """One cell."""
        cell = Cell(model=source.row.name, site=self._site)
        place = source.place
        while True:
            payload, error = self._asked(self._site, VALIDATE, {"model": place, "name": source.row.name})
            if error:
                return cell.model_copy(update={"error": _shortened(error)})
            unreachable = payload.get("unreachable") if isinstance(payload, dict) else None
            if unreachable is None:
                return _cell_of(cell, payload)
            place, error = self._another_place(source, place)
            if error:
                told = f"{source.row.name}'s model cannot be pulled: {unreachable}; {error}"
                return cell.model_copy(update={"error": _shortened(told)})

    def _another_place(self, source: Source, place: Any) -> tuple[Any, str]:
        """Where the model is to be had for who could not reach its owner: at the server, where the owner puts it."""
        with source.moving:
            if source.place is not place:  # another site has had it moved meanwhile
                return source.place, ""
            if not source.owner or source.through_server:
                return None, "nor is it anywhere else"
            found, error = self._model_of(source.owner, through_server=True)
            if error:
                return None, f"and its site gives it no other way: {error}"
            source.place, source.through_server = found, True
            LOG.info("%s cannot pull the model of %s from there: it comes by this server", self._site, source.owner)
            return found, ""

    def _model_of(self, site: str, *, through_server: bool) -> tuple[Any, str]:
        """Where a site's model can be pulled, or why nowhere."""
        payload, error = self._asked(site, SUBMIT, {"through_server": through_server}, waits=site == self._site)
        if error:
            return None, error
        if not isinstance(payload, dict) or "model" not in payload:
            return None, "the site answered submit_model with something else than a reference to a model"
        return payload["model"], ""

    def _asked(self, site: str, task: str, payload: Any, *, waits: bool = True) -> tuple[Any, str]:
        """What a site answers, or why it does not. One that has gone, or hangs, is waited for while others work."""
        board, run = self._board, self._controller.run
        if waits and (hung := board.hung.get(site)):
            if not board.wait(self._site, lambda: board.moved(run, site)):
                return None, hung
            del board.hung[site]
        while True:
            result = self._controller.attempt(site, task, payload, self._limit_s)
            if result.lost == "stuck":
                board.hang(run, site, result.error)
            if result.lost != "gone":
                break
            if not waits or not board.wait(self._site, lambda: not why_gone(run, site)):
                return None, f"the site {why_gone(run, site) or 'had gone'}"
        return (None, result.error) if result.error else (result.payload, "")


class _Told:
    """The matrix as it is, for who asks, for the status, and for the files."""

    def __init__(self, controller: Controller, board: Board) -> None:
        self._controller, self._board, self._finished = controller, board, False
        self._run = run = controller.run
        assert run.store.run is not None
        self._run_id = run.store.run.run_id
        self.note()

    def note(self) -> None:
        self._controller.note(f"{self._board.done} of {self._board.count} evaluations")

    def so_far(self) -> Evaluation:
        return Evaluation(
            run=self._run_id,
            name=self._run.settings.name,
            finished=self._finished,
            sites=self._board.sites,
            models=self._board.rows(),
            cells=self._board.cells(),
        )

    def end(self) -> Evaluation:
        """Write the files.

        Raises:
            RunFailed: there is nothing in them.
        """
        self._finished = True
        found, folder = self.so_far(), self._run.behind.exports.folder
        folder.mkdir(parents=True, exist_ok=True)
        name = file_name_of(self._controller.name)
        for suffix, text in ((".json", found.model_dump_json(indent=2) + "\n"), (".md", markdown(found))):
            _write(folder / f"{name}{suffix}", text)
        values = sum(bool(cell.metrics or cell.not_finite) for cell in found.cells)
        LOG.info("%d of %d evaluations have a result: %s", values, len(found.cells), folder / f"{name}.md")
        if not values:
            reasons = "; ".join(found.empty()[:3]) or "there is no site, or no model"
            raise RunFailed(
                f"The workflow {self._controller.name} evaluated nothing: {reasons}.", "Look at the logs of the sites."
            )
        return found


def _cell_of(cell: Cell, payload: Any) -> Cell:
    """A cell with what a site has measured; with an error where that is no mapping of names to numbers."""
    metrics = payload.get("metrics") if isinstance(payload, Mapping) else None
    if not isinstance(metrics, Mapping) or not 0 < len(metrics) <= messages.METRICS:
        what = "nothing" if not metrics and isinstance(metrics, Mapping | None) else f"a {type(metrics).__name__}"
        return cell.model_copy(update={"error": f"the site measured {what}, where a dict name → number is wanted"})
    found: dict[str, float] = {}
    for key, value in metrics.items():
        named = type(key) is str and 0 < len(key) <= messages.METRIC_CHARS and key.isprintable()
        if not named or type(value) not in (int, float):
            told = _shortened(f"the site measured {str(key)[:50]!r} as {str(value)[:50]!r}")
            return cell.model_copy(update={"error": told})
        found[key] = float(value) if abs(value) < 1e300 else math.inf
    finite = {key: value for key, value in found.items() if math.isfinite(value)}
    seconds = payload.get("seconds", 0.0)
    return cell.model_copy(
        update={
            "metrics": finite,
            "not_finite": sorted(found.keys() - finite.keys()),
            "seconds": float(seconds) if type(seconds) in (int, float) and 0 <= seconds < 1e9 else 0.0,
        }
    )


def _withdraw(controller: Controller, board: Board) -> None:
    """Nobody pulls any more: sites give their disk back."""
    owners = [source.owner for source in board.sources if source.owner and source.place is not None]
    there = [site for site in owners if site not in board.hung and not why_gone(controller.run, site)]
    if there:
        controller.broadcast(SUBMIT, {"withdraw": True}, sites=there, min_responses=0, timeout_s=GOODBYE_S)


def _write(path: Path, text: str) -> None:
    """Whole, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _shortened(text: str) -> str:
    """One line of what a site says, with nothing in it that a terminal would obey."""
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= 600 else f"{text[:597]}…"
