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
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from atoll.blobs.manifest import ChunkSizes, read_plain
from atoll.blobs.object_file import Stored
from atoll.errors import RunFailed, StoreError, UsageError
from atoll.posix import read_at
from atoll.protocol import messages
from atoll.protocol import task_messages as tm
from atoll.registry import nearest
from atoll.server.coordinator.run import Run
from atoll.server.tasks.task_filters import TaskFilters
from atoll.server.tasks.task_payloads import PayloadWriter, TaskPayloads
from atoll.server.tasks.task_queue import Answer, Open
from atoll.tensors.payload import pack

if TYPE_CHECKING:
    from atoll.server.coordinator.run import Run


# -- Signs that something moves: what limits go by, in place of total time.


Signs = tuple[object, ...]


def of_site(run: Run, site: str) -> Signs:
    """What changes while a site does something: bytes, steps, what it says that it is doing. That it lives is none."""
    presence = run.roster.get(site)
    if presence is None:
        return ()
    beat = presence.beat
    return (
        presence.process,
        presence.bytes_up,
        presence.bytes_down,
        beat.state,
        beat.step,
        beat.bytes_up,
        beat.bytes_down,
    )


def of_run(run: Run) -> Signs:
    """What changes while anything of a run moves, at the server or at a site."""
    return (
        run.task_queue.moves,
        run.bytes_up,
        run.bytes_down,
        tuple(round_.head for round_ in run.state.rounds),
        run.state.next_ticket,
        *(of_site(run, site) for site in sorted(run.roster)),
    )


def why_gone(run: Run, site: str) -> str:
    """Why a site cannot be asked, in words without a subject; empty where it takes part."""
    member = run.state.members.get(site)
    if member is not None and member.alive:
        return ""
    presence = run.roster.get(site)
    if member is None or presence is None:
        return f"has never joined. {nearest(site, sorted(run.roster))}".rstrip(" .")
    return f"{presence.ended}: {presence.error}" if presence.error else presence.ended


@dataclass
class ProgressTimeout:
    """How long an answer of a site is waited for.

    Args:
        progress_timeout_s: without a sign of the site; 0: for ever.
        gone_too: whether a site that has gone is given up at once.
    """

    progress_timeout_s: float
    gone_too: bool = False
    _seen: dict[str, tuple[Signs, float]] = field(default_factory=dict)

    def over(self, run: Run, site: str) -> tuple[str, str]:
        """(`gone` or `stuck`, why) where it is given up, else two empty texts."""
        if self.gone_too and (why := why_gone(run, site)):
            return "gone", f"the site {why}"
        now_s, signs = time.monotonic(), of_site(run, site)
        before, since_s = self._seen.setdefault(site, (signs, now_s))
        if before != signs:
            self._seen[site] = (signs, now_s)
        elif self.progress_timeout_s and now_s - since_s >= self.progress_timeout_s:
            doing = run.roster[site].beat.state if site in run.roster else ""
            told = f" (it said: {doing})" if doing else ""
            return "stuck", f"the site moved nothing for {self.progress_timeout_s:g} s{told}"
        return "", ""


# -- What a site answered to a task, as a workflow gets it.


class Result:
    """What a site answered.

    Attributes:
        site: its name.
        task: the task's name.
        error: what the site failed with; empty where it did not.
        lost: `gone` or `stuck` where the site was given up, and `error` says why; else empty.
    """

    def __init__(self, task: str, answer: Answer) -> None:
        self.site, self.task, self.error, self.lost = answer.site, task, answer.error, answer.lost
        self._text = answer.text
        self._stored: Stored | None = None
        self._loaded: list[Any] = []
        self._loading = threading.Lock()
        if answer.contents is not None:
            fd, answer.fd = answer.fd, -1
            self._stored = Stored(
                answer.contents,
                lambda offset, memory: _read(fd, memory, offset),
                lambda: os.close(fd),
                behind=answer.contents.behind,
            )

    @property
    def ok(self) -> bool:
        """Whether there is a payload."""
        return not self.error

    @property
    def payload(self) -> Any:
        """What the site sent, with the same structure; its tensors are loaded when it is first asked for.

        Raises:
            RunFailed: the site failed.
        """
        with self._loading:
            if not self._loaded:
                self._loaded.append(self._tree())
                self._stored = None  # the file goes here
            return self._loaded[0]

    def _tree(self) -> Any:
        if self.error:
            raise RunFailed(
                f"Site {self.site} failed at task {self.task!r}: {self.error}", "Look at its log; skip results not ok."
            )
        return read_plain(self._text or "") if self._stored is None else self._stored.tree()

    def __repr__(self) -> str:
        return f"Result(site={self.site!r}, task={self.task!r}{f', error={self.error!r}' if self.error else ''})"


def _read(fd: int, memory: memoryview, offset: int) -> None:
    try:
        read_at(fd, memory, offset)
    except EOFError as error:
        raise StoreError(f"The file of a result was cut off: {error}.") from None


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

    Attributes:
        name: of the workflow, as the run file has it.
        run: the server's own state, for workflows that come with Atoll; it changes without notice.
    """

    def __init__(
        self,
        run: Run,
        loop: asyncio.AbstractEventLoop,
        filters: TaskFilters,
        name: str = "workflow",
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name, self.run = name, run
        self._run, self._loop, self._note = run, loop, note
        self._lock, self._stopped = threading.Lock(), False
        self._asked: set[concurrent.futures.Future[Any]] = set()
        self._sizes = ChunkSizes(run.settings.tensor_download_chunk_size, run.settings.np_download_chunk_size)
        self._filters = filters
        self._packing = PayloadWriter(run, filters, self._sizes, self.ask)

    def note(self, text: str) -> None:
        """Let the status say how far the workflow is; also a sign of life, by which its progress limit goes."""
        self._note(str(text)[:200])

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
            while len(there := self._run.task_queue.alive()) < at_least:
                if time.monotonic() >= deadline_s:
                    names = ", ".join(there) or "none"
                    raise RunFailed(
                        f"{len(there)} of {at_least} sites joined within {timeout_s:g} s: {names}.",
                        "Start the others, or wait longer.",
                    )
                await self._run.changed(min(deadline_s - time.monotonic(), 1.0))
            return there

        return self.ask(wait())

    def broadcast(
        self,
        task: str,
        payload: Any = None,
        *,
        sites: Sequence[str] | None = None,
        min_responses: int | None = None,
        timeout_s: float | None = None,
        progress_timeout_s: float = 0.0,
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
            progress_timeout_s: a site that shows nothing for so long (no byte, no step, no other word of what it does)
                is given up, which is its answer; 0: never.

        Returns:
            A result for each site that answered, in the order of their names.

        Raises:
            RunFailed: fewer than `min_responses` payloads came; who failed or is missing is named.
            UsageError: the payload cannot travel, the name is none, `timeout_s` is no time, or `sites` are no names, or
                have one that has never joined, though `num_workers` sites have.
            DiskFull: the server's disk was full for `timeout_s`, or became full while the payload was written.
        """
        timeout = ProgressTimeout(_limit(progress_timeout_s))
        return self._send(task, payload, sites, min_responses, timeout_s, timeout)

    def _send(
        self,
        task: str,
        payload: Any,
        sites: Sequence[str] | None,
        min_responses: int | None,
        timeout_s: float | None,
        timeout: ProgressTimeout,
    ) -> list[Result]:
        _require_name(task)
        _deadline(timeout_s)  # refused before anything is written
        if min_responses is not None and (not _is_number(min_responses) or min_responses < 0):
            raise UsageError(f"min_responses is {min_responses!r}.", "Give how many answers suffice; None: all.")
        if sites is None:
            chosen = self.sites(min_responses or 1, timeout_s=timeout_s)
        else:
            chosen, begin_s = _named(sites), time.monotonic()
            if not timeout.gone_too:
                self.ask(self._require_joined(task, chosen, timeout_s))
            if timeout_s is not None:
                timeout_s = max(0.0, timeout_s - (time.monotonic() - begin_s))
        if min_responses is not None and min_responses > len(chosen):
            raise UsageError(
                f"min_responses is {min_responses}, but task {task!r} goes to {len(chosen)} sites.",
                "Ask for fewer, or send it to more.",
            )
        payloads = self._packing.payloads(task, chosen, pack(payload), timeout_s)
        del payload
        try:
            answers = self.ask(self._collect(task, chosen, payloads, min_responses, timeout_s, timeout))
        finally:
            payloads.discard()
        self._filters.warn_of_strangers(self._run.roster)
        return [Result(task, answer) for answer in sorted(answers, key=lambda answer: answer.site)]

    def send(
        self,
        site: str,
        task: str,
        payload: Any = None,
        *,
        timeout_s: float | None = None,
        progress_timeout_s: float = 0.0,
    ) -> Result:
        """Send a task to one site, as `broadcast`.

        Raises:
            RunFailed: it did not answer in time.
        """
        results = self.broadcast(
            task, payload, sites=[site], timeout_s=timeout_s, progress_timeout_s=progress_timeout_s
        )
        if not results:
            raise RunFailed(f"Site {site} did not answer task {task!r} within {timeout_s:g} s.", "Look at its log.")
        return results[0]

    def attempt(self, site: str, task: str, payload: Any, progress_timeout_s: float) -> Result:
        """Send a task to one site; that it has gone, or moves nothing, is a result, too (`Result.lost`)."""
        timeout = ProgressTimeout(progress_timeout_s, gone_too=True)
        return self._send(task, payload, [site], None, None, timeout)[0]

    # -- inside

    async def _require_joined(self, task: str, sites: Sequence[str], timeout_s: float | None) -> None:
        """Wait until these sites have joined once, as long as fewer than `num_workers` sites have.

        Raises:
            UsageError: one has not; the nearest is named.
        """
        deadline_s, say_s, warnings = _deadline(timeout_s), time.monotonic(), self._run.task_queue.warnings
        roster, wanted, waits = self._run.roster, self._run.settings.num_workers, f"{task} waits"
        try:
            while unknown := next((site for site in sites if site not in roster), None):
                joined, now_s = sorted(roster), time.monotonic()
                if len(joined) >= wanted or now_s >= deadline_s:
                    raise UsageError(
                        f"Task {task!r} is for the site {unknown!r}, which has never joined.",
                        nearest(
                            unknown,
                            joined,
                            f"Sites that have: {', '.join(joined) or 'none'}. Wait for further ones with "
                            "controller.sites(at_least=…).",
                        ),
                    )
                warnings[waits] = (
                    f"task {task!r} waits for {unknown!r}, which has never joined; {len(joined)} of {wanted} sites "
                    f"have: {', '.join(joined) or 'none'}. {nearest(unknown, joined)}"
                ).strip()
                if now_s >= say_s:
                    say_s = now_s + 10 * SAY_S
                    LOG.warning("%s", warnings[waits])
                await self._run.changed(min(deadline_s - now_s, 1.0))
        finally:
            warnings.pop(waits, None)

    async def _collect(
        self,
        name: str,
        sites: Sequence[str],
        payloads: TaskPayloads,
        min_responses: int | None,
        timeout_s: float | None,
        timeout: ProgressTimeout,
    ) -> list[Answer]:
        queue = self._run.task_queue
        streamed = name in self._run.settings.stream_tasks
        task = queue.open(name, sites, *payloads.hold(), payloads.failed, streamed=streamed, sizes=self._sizes)
        try:
            await self._answered(task, min_responses, timeout_s, timeout)
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
            queue.close(task)

    async def _answered(
        self, task: Open, min_responses: int | None, timeout_s: float | None, timeout: ProgressTimeout
    ) -> None:
        deadline_s, say_s = _deadline(timeout_s), time.monotonic() + SAY_S
        while task.missing:
            for site in task.missing:
                lost, why = timeout.over(self._run, site)
                if lost:
                    self._run.task_queue.give_up(task, site, lost, why)
            missing = task.missing
            if not missing:
                return
            alive, now_s = self._run.task_queue.alive(), time.monotonic()
            enough = min_responses is not None and task.good >= min_responses
            if now_s >= deadline_s or (enough and not any(site in alive for site in missing)):
                return
            if now_s >= say_s:
                say_s = now_s + 10 * SAY_S
                LOG.info("task %r waits for %s", task.message.name, ", ".join(missing))
            await self._run.changed(min(deadline_s - now_s, 1.0))

    def ask(self, work: Coroutine[Any, Any, T]) -> T:
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

    def require_running(self) -> None:
        """For threads of a workflow that wait for something else.

        Raises:
            ServerStops: the server ends, or the workflow was given up.
        """
        if self._stopped:
            raise ServerStops

    def stop(self) -> None:
        """End what the workflow waits for, and refuse the rest."""
        with self._lock:
            self._stopped = True
            asked = list(self._asked)
        for future in asked:
            future.cancel()


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
    if not _is_number(timeout_s) or not timeout_s >= 0:  # NaN, too, with which nothing would ever be late
        raise UsageError(f"timeout_s is {timeout_s!r}.", "Give seconds, 0 or more; or None to wait for ever.")
    return time.monotonic() + timeout_s


def _limit(progress_timeout_s: float) -> float:
    """Seconds.

    Raises:
        UsageError: it is no time.
    """
    if not _is_number(progress_timeout_s) or not 0 <= progress_timeout_s < float("inf"):
        raise UsageError(f"progress_timeout_s is {progress_timeout_s!r}.", "Give seconds; 0 sets no limit.")
    return progress_timeout_s


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
