"""Workflows: a function of the user's that sends tasks to the sites and collects results, in a thread of the server.

    def main(controller):
        model = {"w": torch.zeros(10)}
        for _ in range(3):
            results = controller.broadcast("train", model, min_responses=2, timeout_s=600)
            model = {"w": sum(result.payload["w"] for result in results) / len(results)}

A server that is started again begins the function again from its beginning.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from atoll import registry
from atoll.config import Settings
from atoll.errors import ConfigError, RunFailed, UsageError
from atoll.server.desk import Answer, Open
from atoll.server.parcels import Packing, Parcels
from atoll.server.result import Result
from atoll.server.run import Run
from atoll.server.task_filters import TaskFilters
from atoll.tensors.cuts import ChunkSizes
from atoll.tensors.payload import pack
from atoll.wire import messages
from atoll.wire import task_messages as tm

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")

SAY_S = 30.0
"""How long sites are awaited before the log says so."""

_SITE: TypeAdapter[str] = TypeAdapter(messages.Site)

Function = Callable[["Controller"], Any]


class ServerStops(BaseException):
    """Ends a workflow's thread when its server stops; no error, so that no `except Exception` goes on after it."""


class Controller:
    """What a workflow is given: it sends tasks and collects what sites answer.

    Several threads of a workflow may use it at a time: a site gets the tasks one after the other, oldest first.
    """

    def __init__(self, run: Run, loop: asyncio.AbstractEventLoop, filters: TaskFilters) -> None:
        self._run, self._loop = run, loop
        self._lock, self._stopped = threading.Lock(), False
        self._asked: set[concurrent.futures.Future[Any]] = set()
        self._sizes = ChunkSizes(run.settings.tensor_download_chunk_size, run.settings.np_download_chunk_size)
        self._filters = filters
        self._packing = Packing(run, filters, self._sizes, self._ask)

    def sites(self, at_least: int = 0, *, timeout_s: float | None = None) -> list[str]:
        """The sites that take part at this moment, in the order of their names.

        Args:
            at_least: wait until so many do.
            timeout_s: for so long at most; None: for ever.

        Raises:
            RunFailed: they did not come in time.
        """

        async def wait() -> list[str]:
            deadline_s = _deadline(timeout_s)
            while len(there := self._run.desk.alive()) < at_least:
                if time.monotonic() >= deadline_s:
                    names = ", ".join(there) or "none"
                    raise RunFailed(
                        f"{len(there)} of {at_least} sites joined within {timeout_s:g} s: {names}.",
                        "Start the others, or wait longer.",
                    )
                await self._run.changed(min(deadline_s - time.monotonic(), 1.0))
            return there

        return self._ask(wait())

    def broadcast(
        self,
        task: str,
        payload: Any = None,
        *,
        sites: Sequence[str] | None = None,
        min_responses: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """Send a task to several sites and collect what they answer.

        It waits until every site has answered: with a payload, or with the error that its handler raised.

        Args:
            task: its name: `train`, `validate`, `submit_model`, or one of your own.
            payload: nested dicts, lists and tuples with tensors, arrays and plain values. It is written once for all,
                and once more for each site that has filters.
            sites: their names; by default all that take part when it is sent, at least `min_responses` of them.
            min_responses: payloads that suffice where the sites that are missing are dead or have left, and without
                which this is an error. None: a site that is gone is waited for, and whatever has come is returned.
            timeout_s: seconds from when it is sent, after which nothing more is waited for; None: for ever. For as long
                a full disk is waited for; and a site whose filters take longer is not sent it, which is its answer.

        Returns:
            A result for each site that answered, in the order of their names.

        Raises:
            RunFailed: fewer than `min_responses` payloads came; who failed or is missing is named.
            UsageError: the payload cannot travel, the name is none, `sites` are no names, or `timeout_s` is no time.
            DiskFull: the server's disk was full for `timeout_s`, or became full while the payload was written.
        """
        _require_name(task)
        _deadline(timeout_s)  # refused before anything is written
        chosen = _named(sites) if sites is not None else self.sites(min_responses or 1, timeout_s=timeout_s)
        if min_responses is not None and min_responses > len(chosen):
            raise UsageError(
                f"min_responses is {min_responses}, but task {task!r} goes to {len(chosen)} sites.",
                "Ask for fewer, or send it to more.",
            )
        parcels = self._packing.parcels(task, chosen, pack(payload), timeout_s)
        del payload
        try:
            answers = self._ask(self._collect(task, chosen, parcels, min_responses, timeout_s))
        finally:
            parcels.discard()
        self._filters.warn_of_strangers(self._run.roster)
        return [Result(task, answer) for answer in sorted(answers, key=lambda answer: answer.site)]

    def send(self, site: str, task: str, payload: Any = None, *, timeout_s: float | None = None) -> Result:
        """Send a task to one site, as `broadcast`.

        Raises:
            RunFailed: it did not answer in time.
        """
        results = self.broadcast(task, payload, sites=[site], timeout_s=timeout_s)
        if not results:
            raise RunFailed(f"Site {site} did not answer task {task!r} within {timeout_s:g} s.", "Look at its log.")
        return results[0]

    # -- inside

    async def _collect(
        self,
        name: str,
        sites: Sequence[str],
        parcels: Parcels,
        min_responses: int | None,
        timeout_s: float | None,
    ) -> list[Answer]:
        desk = self._run.desk
        streamed = name in self._run.settings.stream_tasks
        task = desk.open(name, sites, *parcels.hold(), parcels.failed, streamed=streamed, sizes=self._sizes)
        try:
            await self._answered(task, min_responses, timeout_s)
            if min_responses is not None and task.good < min_responses:
                raise RunFailed(
                    f"Task {name!r} got {task.good} of {min_responses} answers: {_lacking(task)}.",
                    "Look at the logs of these sites.",
                )
            return list(task.answers.values())
        except BaseException:
            for answer in task.answers.values():
                answer.close()
            raise
        finally:
            desk.close(task)

    async def _answered(self, task: Open, min_responses: int | None, timeout_s: float | None) -> None:
        deadline_s, say_s = _deadline(timeout_s), time.monotonic() + SAY_S
        while missing := task.missing:
            alive, now_s = self._run.desk.alive(), time.monotonic()
            enough = min_responses is not None and task.good >= min_responses
            if now_s >= deadline_s or (enough and not any(site in alive for site in missing)):
                return
            if now_s >= say_s:
                say_s = now_s + 10 * SAY_S
                LOG.info("task %r waits for %s", task.message.name, ", ".join(missing))
            await self._run.changed(min(deadline_s - now_s, 1.0))

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the server's loop.

        Raises:
            ServerStops: the server ends.
        """
        with self._lock:
            if self._stopped:
                work.close()
                raise ServerStops
            asked = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._asked.add(asked)
        try:
            result: T = asked.result()
            return result
        except concurrent.futures.CancelledError:
            raise ServerStops from None
        finally:
            with self._lock:
                self._asked.discard(asked)

    def stop(self) -> None:
        """End what the workflow waits for, and refuse the rest."""
        with self._lock:
            self._stopped = True
            asked = list(self._asked)
        for future in asked:
            future.cancel()


class Workflow:
    """The thread of a user's function; its end is the run's.

    Args:
        settings, given: name the function, or are it.
        filters: of what is sent and answered.

    Raises:
        ConfigError: the settings name no function.
    """

    def __init__(self, settings: Settings, given: Function | None, filters: TaskFilters) -> None:
        self._name = str(settings.workflow or getattr(given, "__name__", "workflow"))
        found = given if given is not None else registry.load_attribute(self._name)
        if not callable(found):
            raise ConfigError(
                f"workflow {self._name!r} is a {type(found).__name__}.", "Name a function of one argument."
            )
        self._function: Function = found
        self._filters = filters

    def start(self, run: Run) -> None:
        """Begin the function, from its beginning; called on the server's event loop."""
        self._run, self._loop = run, asyncio.get_running_loop()
        self._controller = Controller(run, self._loop, self._filters)
        run.desk.active = True
        if self._filters.results:  # without them no answer needs a thread
            run.desk.received = self._filters.received
        if self._filters.data:
            LOG.info("what is sent to sites passes through filters: %s", self._filters.data)
        threading.Thread(target=self._main, args=(self._controller,), name="atoll-workflow", daemon=True).start()

    def stop(self) -> None:
        """Let go of the function: what it asks from now on ends it."""
        self._controller.stop()

    def _main(self, controller: Controller) -> None:
        end: Callable[[], None] = self._finish
        try:
            self._function(controller)
        except ServerStops:
            return
        except BaseException as error:  # sys.exit, too: the server would wait for ever
            LOG.error("the workflow %s failed", self._name, exc_info=error)
            failed = RunFailed(
                f"The workflow {self._name} failed: {type(error).__name__}: {error}",
                "The traceback is in the log; a start of the server begins it again.",
            )
            end = functools.partial(self._run.fail, failed)
        try:
            self._loop.call_soon_threadsafe(end)
        except RuntimeError:  # the server has ended meanwhile
            LOG.debug("the workflow %s outlived its server", self._name)

    def _finish(self) -> None:
        LOG.info("the workflow %s has ended", self._name)
        self._filters.warn_of_unsent(self._run.desk.names)
        self._run.desk.finish()
        self._run.finished.set()


def wanted(settings: Settings, given: Function | None) -> bool:
    """Whether a server runs a workflow in place of rounds.

    Raises:
        UsageError: two are named. ConfigError: it has rounds, too.
    """
    if given is not None and settings.workflow is not None:
        raise UsageError("Server got a workflow, and its settings name another.", "Give one of them.")
    if given is not None and settings.rounds:
        raise ConfigError(
            f"A workflow is given, and rounds is {settings.rounds}: a run has a workflow or rounds.",
            "Leave rounds out; the run is finished when the workflow returns.",
        )
    return given is not None or settings.workflow is not None


def _lacking(task: Open) -> str:
    failed = [f"{site} failed: {answer.error}" for site, answer in sorted(task.answers.items()) if answer.error]
    return "; ".join([*failed, *(f"{site} did not answer" for site in task.missing)])


def _deadline(timeout_s: float | None) -> float:
    """Monotonic.

    Raises:
        UsageError: there is no such time.
    """
    if timeout_s is None:
        return float("inf")
    if not timeout_s >= 0:  # NaN, too, with which nothing would ever be late
        raise UsageError(f"timeout_s is {timeout_s!r}.", "Give seconds, 0 or more; or None to wait for ever.")
    return time.monotonic() + timeout_s


def _named(sites: Sequence[str]) -> list[str]:
    """Sites in the order of their names, each once."""
    if isinstance(sites, str):
        raise UsageError(f"sites is the string {sites!r}.", f"Give a list: [{sites!r}].")
    given = list(sites)
    for site in given:
        try:
            _SITE.validate_python(site, strict=True)
        except ValidationError:
            raise UsageError(
                f"{site!r} in sites is not the name of a site.", "Give names as controller.sites() has them."
            ) from None
    return sorted(set(given))


def _require_name(task: str) -> None:
    try:
        TypeAdapter(tm.TaskName).validate_python(task)
    except ValidationError:
        raise UsageError(
            f"{task!r} is not the name of a task.", "Use 1 to 64 letters, digits, dots, hyphens and underscores."
        ) from None
