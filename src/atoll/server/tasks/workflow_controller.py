"""The controller, with which a workflow sends tasks and collects results. A workflow is a function of the user.

    def main(controller):
        model = {"w": torch.zeros(10)}
        for _ in range(3):
            results = controller.broadcast("train", model, min_responses=2, timeout_s=600)
            model = {"w": sum(result.payload["w"] for result in results) / len(results)}

The server calls the function in a thread. After a restart of the server, it calls the function again: what the function
has got from its controller before, it gets again, from the journal (`workflow_journal`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import math
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from atoll.blobs.object_file import Stored
from atoll.blobs.ways_to_send import ChunkSizes, read_plain
from atoll.errors import AtollError, RunFailed, StoreError, UsageError
from atoll.format_text import listed, number_of
from atoll.posix import read_at
from atoll.protocol import messages
from atoll.protocol import task_messages as tm
from atoll.registry import nearest
from atoll.server.coordinator.background_writes import BackgroundWriter, until_passed
from atoll.server.coordinator.run_core import RunCore
from atoll.server.tasks.task_payloads import PayloadWriter, TaskFilters
from atoll.server.tasks.task_queue import Answer, TaskFacts, TaskPayloads, TaskQueue
from atoll.server.tasks.workflow_journal import (
    Call,
    WorkflowJournal,
    digest_of,
    generators,
    raise_recorded,
    set_generators,
)
from atoll.tensors.payload import Packed, pack
from atoll.tensors.reference import new_id

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")

SAY_S = 30.0
"""Seconds after which the log names the sites that have not answered."""

_SITE: TypeAdapter[str] = TypeAdapter(messages.Site)


# -- Progress of sites. Limits such as `progress_timeout_s` start again at each progress. Heartbeats do not count.

ProgressSigns = tuple[object, ...]
"""Values that change while a site, or a run, makes progress."""


def progress_of(run: RunCore, site: str) -> ProgressSigns:
    """Return those values of a site that change when the site makes progress: bytes, steps and reported state."""
    presence = run.roster.get(site)
    if presence is None:
        return ()
    beat = presence.beat
    moved = (presence.bytes_up, presence.bytes_down, beat.bytes_up, beat.bytes_down)
    return presence.process, beat.state, beat.step, *moved


def progress_of_run(run: RunCore, queue: TaskQueue) -> ProgressSigns:
    """Return those values of a run that change when the server or a site makes progress."""
    return (
        queue.moves,
        run.bytes_up,
        run.bytes_down,
        tuple(round_.head for round_ in run.state.rounds),
        run.state.next_ticket,
        *(progress_of(run, site) for site in sorted(run.roster)),
    )


def why_gone(run: RunCore, site: str) -> str:
    """Return why a site does not take part, as words after its name, such as "has left"; empty if it takes part."""
    member = run.state.members.get(site)
    if member is not None and member.alive:
        return ""
    presence = run.roster.get(site)
    if member is None or presence is None:
        return f"has never joined. {nearest(site, sorted(run.roster))}".rstrip(" .")
    return f"{presence.ended}: {presence.error}" if presence.error else presence.ended


@dataclass
class AnswerLimits:
    """How many answers a workflow needs, and how long it waits for them.

    Attributes:
        min_responses, timeout_s, progress_timeout_s: the arguments of `Controller.broadcast`.
        gone_too: whether to stop waiting for a site that has left, failed or died.

    Raises:
        UsageError: a value is not a number, or is negative.
    """

    min_responses: int | None = None
    timeout_s: float | None = None
    progress_timeout_s: float = 0.0
    gone_too: bool = False
    _latest: dict[str, tuple[ProgressSigns, float]] = field(default_factory=dict)  # site → its last signs, their time

    def __post_init__(self) -> None:
        for name, remedy in (
            ("min_responses", "Give the number of answers that are enough, or None for all."),
            ("timeout_s", "Give a number of seconds, at least 0, or None for no limit."),
            ("progress_timeout_s", "Give a number of seconds; 0: no limit."),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not value >= 0):  # also if it is NaN
                raise UsageError(f"{name} is {value!r}, which is not a valid number.", remedy)

    def exceeded(self, run: RunCore, site: str) -> tuple[str, str]:
        """Check whether the workflow should stop waiting for a site.

        Returns:
            `gone` or `stuck`, and the reason as text; two empty texts if the workflow should go on waiting.
        """
        if self.gone_too and (why := why_gone(run, site)):
            return "gone", f"the site {why}"
        now_s, progress = time.monotonic(), progress_of(run, site)
        before, since_s = self._latest.setdefault(site, (progress, now_s))
        if before != progress:
            self._latest[site] = (progress, now_s)
        elif self.progress_timeout_s and now_s - since_s >= self.progress_timeout_s:
            state = run.roster[site].beat.state if site in run.roster else ""
            reported = f" (its last report: {state})" if state else ""
            return "stuck", f"the site made no progress for {self.progress_timeout_s:g} s{reported}"
        return "", ""


# -- Results


class Result:
    """One site's answer to a task.

    Attributes:
        site: name of the site.
        task: name of the task.
        error: why the site failed; empty if it did not.
        lost: why the server stopped waiting for the answer: `gone` (the site left or died) or `stuck` (no
            progress); empty if it did not stop.
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
                inline_bytes=answer.contents.inline_bytes,
            )

    @property
    def ok(self) -> bool:
        """Whether the site answered with a payload, and not with an error."""
        return not self.error

    @property
    def payload(self) -> Any:
        """The payload that the site sent. The first access loads its tensors.

        Raises:
            RunFailed: the site answered with an error, or did not answer.
        """
        with self._loading:
            if not self._loaded:
                self._loaded.append(self._tree())
                self._stored = None  # closes the file
            return self._loaded[0]

    @property
    def lazy(self) -> Any:
        """The payload with a `LazyTensor` on disk in place of each tensor and array. Ask for it before `payload`.

        Raises:
            RunFailed: the site answered with an error, or did not answer.
        """
        with self._loading:
            return self._loaded[0] if self._loaded else self._tree(lazily=True)

    def _tree(self, *, lazily: bool = False) -> Any:
        if self.error:
            raise RunFailed(
                f"Site {self.site} failed at task {self.task!r}: {self.error}",
                "See the site's log. To go on without it, skip results with ok = False.",
            )
        if self._stored is None:
            return read_plain(self._text or "")
        return self._stored.contents.tree(self._stored.lazy.__getitem__) if lazily else self._stored.tree()

    def __repr__(self) -> str:
        return f"Result(site={self.site!r}, task={self.task!r}{f', error={self.error!r}' if self.error else ''})"


def _read(fd: int, memory: memoryview, offset: int) -> None:
    try:
        read_at(fd, memory, offset)
    except EOFError as error:
        raise StoreError(f"The file of a result is incomplete: {error}.", "Check the server's disk.") from None


# -- The controller


class ServerStops(BaseException):
    """Raised in the thread of a workflow when the server stops. `except Exception` does not catch it."""


class Controller:
    """Sends a workflow's tasks to sites, and collects their answers.

    Several threads of a workflow may use one controller. A site gets its tasks one after another, oldest first.

    Attributes:
        name: name of the workflow, as in the run file.
        journal: what the function has observed. Integrations use it.
        run, queue, background: the run, its tasks and the writer of its files, for the workflows that Atoll ships;
            their interfaces may change without notice.
    """

    def __init__(
        self,
        run: RunCore,
        queue: TaskQueue,
        background: BackgroundWriter,
        loop: asyncio.AbstractEventLoop,
        filters: TaskFilters,
        journal: WorkflowJournal,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name, self.run, self.queue, self.background = journal.name, run, queue, background
        self._loop, self._note, self.journal = loop, note, journal
        self._lock, self._stopped = threading.Lock(), False
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._sizes = ChunkSizes(run.settings.workflow.tensor_part_bytes, run.settings.workflow.array_part_bytes)
        self._filters = filters
        self._writer = PayloadWriter(run, queue, filters, self._sizes, self.ask)
        self._random: random.Random | None = None

    def note(self, text: str) -> None:
        """Show a text in the status, such as how far the workflow is. The call counts as progress of the workflow."""
        self._note(str(text)[:200])

    def now(self) -> float:
        """Return the time in seconds since 1970. Use it in place of `time.time()`: a restart repeats its answers."""

        async def look() -> float:
            return time.time()

        return float(self._observed(["now"], look))

    @property
    def random(self) -> random.Random:
        """Random numbers of this run, which a restart repeats. Use it in one thread only."""

        async def draw() -> int:
            return secrets.randbits(63)

        if self._random is None:
            self._random = random.Random(self._observed(["seed"], draw))
        return self._random

    def sites(self, at_least: int = 0, *, timeout_s: float | None = None) -> list[str]:
        """Return the names of the sites that take part now, sorted.

        Args:
            at_least: wait until this number of sites take part.
            timeout_s: maximum wait in seconds; None: no limit.

        Raises:
            RunFailed: fewer than `at_least` sites take part after `timeout_s`.
        """
        return list(self._observed(["sites", at_least], lambda: self._present(at_least, timeout_s)))

    async def _present(self, at_least: int, timeout_s: float | None) -> list[str]:
        alive = self.run.alive
        if not await self._until(lambda: len(alive()) >= at_least, timeout_s):
            names = ", ".join(alive()) or "none"
            raise RunFailed(
                f"Only {len(alive())} of {number_of(at_least, 'site')} joined within {timeout_s:g} s: {names}.",
                "Start the other sites, or raise timeout_s.",
            )
        return alive()

    def broadcast(
        self,
        task: str,
        payload: Any = None,
        *,
        sites: Sequence[str] | None = None,
        min_responses: int | None = None,
        timeout_s: float | None = None,
        progress_timeout_s: float = 0.0,
        on_result: Callable[[Result], None] | None = None,
    ) -> list[Result]:
        """Send a task to several sites, and wait until every site has answered with a payload or an error.

        Args:
            task: name of the task: `train`, `validate`, `submit_model`, or one of your own.
            payload: nested dicts, lists and tuples with tensors, arrays and plain values. The server writes the payload
                once for all sites, and again for each site with filters.
            sites: names of sites. By default all sites that take part now; if these are fewer than `min_responses`, the
                call waits for more.
            min_responses: number of payloads that are enough; fewer are an error. Once these have come, the call waits
                only for those other sites that are alive. None: the call waits for all sites, even for dead ones, and
                any number is enough after `timeout_s`.
            timeout_s: maximum seconds to wait for answers; None: no limit. The same limit holds for the wait while the
                disk is full, and for the filters of a site. If the filters take longer, the site's result is an error.
            progress_timeout_s: seconds without progress (no byte, no step, no new state) after which the call stops
                waiting for a site. The site's result is then an error. 0: never.
            on_result: called with each result as it comes, on the server's event loop: it must not block.

        Returns:
            A result for each site that answered, sorted by site name.

        Raises:
            RunFailed: fewer than `min_responses` payloads came; the message names sites that failed or are missing. Or,
                without `sites`, too few sites took part within `timeout_s`.
            UsageError: the payload cannot be sent, an argument is wrong, or one of `sites` has not joined when
                `rounds.sites` sites have joined or `timeout_s` is over.
            DiskFull: the server's disk was full for `timeout_s`, or became full while the payload was written.
        """
        limits = AnswerLimits(min_responses, timeout_s, progress_timeout_s)
        _require_name(task)
        named, packed, journal = None if sites is None else _named(sites), pack(payload), self.journal
        del payload  # frees its memory during the wait
        turn = journal.turn()
        call = self._replayed_task(turn, task, named, packed)
        if is_live := call is None:
            call, payloads, timeout_s = self._sent(turn, task, named, packed, limits)
            limits = replace(limits, timeout_s=timeout_s)
            before, outcome = list[Answer](), None
        else:
            self.queue.names.add(task)
            raise_recorded(call.value)
            before, outcome = journal.answers(call)
            payloads = TaskPayloads()
            if outcome is None:
                missing = [site for site in call.value["sites"] if site not in {answer.site for answer in before}]
                payloads = self._writer.write(task, missing, packed, limits.timeout_s)
        del packed
        results: list[Result] = []

        def heard(result: Result) -> None:
            results.append(result)
            if on_result is not None:
                on_result(result)

        try:  # not as the coroutine's result: its future would keep the results, and their files, until gc runs
            if outcome is None:
                self.ask(self._collect(task, call, payloads, limits, heard, before))
            elif on_result is not None:
                self.ask(_told(task, before, heard))
            else:
                results.extend(Result(task, answer) for answer in before)
            raise_recorded(outcome or {})
        except BaseException:
            results.clear()
            raise
        if is_live:
            self._filters.warn_of_strangers(self.run.roster)
        return sorted(results, key=lambda result: result.site)

    def _replayed_task(self, turn: int, task: str, named: list[str] | None, packed: Packed) -> Call | None:
        """Return a task as the journal has it, with its answers so far; None if the journal does not have it."""
        cut = self.journal.cut_before(turn, task)
        if cut is None:
            return None
        sizes = ChunkSizes(*cut["sizes"]) if "sizes" in cut else self._sizes
        digest = digest_of(task, packed, sizes, streamed=cut.get("streamed", self._is_streamed(task)))
        return self._replayed(turn, ["task", task, digest, named])

    def _sent(
        self, turn: int, task: str, named: list[str] | None, packed: Packed, limits: AnswerLimits
    ) -> tuple[Call, TaskPayloads, float | None]:
        """Choose the sites of a new task, and write its payload. Return also the seconds left for the answers."""
        streamed = self._is_streamed(task)
        call = Call(-1, turn, ())

        def asked(digest: str) -> list[Any]:
            known = digest or not self.journal.is_kept
            return ["task", task, digest if known else digest_of(task, packed, self._sizes, streamed=streamed), named]

        try:
            chosen, timeout_s = self._chosen(task, named, limits)
            payloads = self._writer.write(task, chosen, packed, timeout_s)
        except AtollError as error:
            call.asked, failure = asked(""), error
            self.ask(self._recorded(lambda: self.journal.begin(call, failure)))
            raise
        call.asked = asked(payloads.shared.digest if payloads.shared is not None else "")
        sizes = [self._sizes.tensor, self._sizes.np]
        call.value = {"id": new_id(), "sites": chosen, "sizes": sizes, "streamed": streamed}
        return call, payloads, timeout_s

    def _is_streamed(self, task: str) -> bool:
        return task in self.run.settings.workflow.streamed_tasks

    def send(
        self,
        site: str,
        task: str,
        payload: Any = None,
        *,
        timeout_s: float | None = None,
        progress_timeout_s: float = 0.0,
    ) -> Result:
        """Send a task to one site, and return its result. Arguments and errors are those of `broadcast`.

        Raises:
            RunFailed: the site did not answer within `timeout_s`.
        """
        results = self.broadcast(
            task, payload, sites=[site], timeout_s=timeout_s, progress_timeout_s=progress_timeout_s
        )
        if not results:
            raise RunFailed(f"Site {site} did not answer task {task!r} in {timeout_s:g} s.", "See the site's log.")
        return results[0]

    async def attempt(self, site: str, task: str, payload: Any, progress_timeout_s: float) -> Result:
        """Send a task without tensors to one site, and return its result. Call this on the server's event loop.

        If the site leaves, dies or makes no progress for `progress_timeout_s`, return a result with `lost` set.
        """
        limits = AnswerLimits(progress_timeout_s=progress_timeout_s, gone_too=True)
        packed = pack(payload)
        payloads = await self._writer.filtered(task, [site], packed, None)
        if not payloads.own and not payloads.failed:
            payloads.shared = self._writer.written(task, packed)
        results: list[Result] = []
        call = Call(-1, -1, (), {"id": new_id(), "sites": [site], "streamed": self._is_streamed(task)})
        await self._collect(task, call, payloads, limits, results.append)
        return results[0]

    def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's event loop, and return its result.

        Raises:
            ServerStops: the server is stopping.
        """
        with self._lock:
            if self._stopped:
                work.close()
                raise ServerStops
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        try:
            return call.result()
        except concurrent.futures.CancelledError:
            raise ServerStops from None
        finally:
            with self._lock:
                self._calls.discard(call)

    def stop(self) -> None:
        """Make all running and later calls of the workflow raise `ServerStops`."""
        with self._lock:
            self._stopped = True
            calls = list(self._calls)
        for future in calls:
            future.cancel()

    # -- the journal

    def begin(self) -> None:
        """Begin the function in this thread: its global random numbers are those of its first start."""

        async def look() -> dict[str, Any]:
            return generators()

        self.journal.enter()
        set_generators(self._observed(["begin"], look))

    def polled(self, kind: str, look: Callable[[], list[str]]) -> list[str]:
        """Return what a function finds that looks for news again and again. News are journalled, their absence is not.

        Args:
            kind: a word for the news, in the journal.
            look: returns names of the news that are there.
        """
        before = self.journal.next_kind()
        if before and before != kind:
            return []
        if before or (self.journal.is_own_thread and look()):

            async def found() -> list[str]:
                return look()

            return list(self._observed([kind], found))
        return look()

    def _observed(self, asked: list[Any], look: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return an observation: that of the journal, or a new one, which is journalled."""
        turn = self.journal.turn()
        call = self._replayed(turn, asked)
        if call is None:
            call = Call(-1, turn, asked)
            self.ask(self._observe(call, look))
        raise_recorded(call.value)
        return call.value["value"]

    async def _observe(self, call: Call, look: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            call.value = {"value": await look()}
        except AtollError as error:
            failure = error
            await self._recorded(lambda: self.journal.begin(call, failure))
            raise
        await self._recorded(lambda: self.journal.begin(call))

    def _replayed(self, turn: int, asked: list[Any]) -> Call | None:
        """Return a call as the journal has it; None if it does not have it. If it has another, end the workflow."""
        try:
            return self.journal.replayed(turn, asked)
        except RunFailed as error:
            self.journal.fail(error)
            self.stop()
            raise ServerStops from None

    async def _recorded(self, write: Callable[[], None]) -> None:
        async def attempt() -> None:
            write()

        await until_passed(attempt, f"the journal of workflow {self.name} cannot be written")

    # -- inside

    def _chosen(self, task: str, sites: Sequence[str] | None, limits: AnswerLimits) -> tuple[list[str], float | None]:
        """Return the sites that a task goes to, and the seconds that are left for their answers."""
        needed, timeout_s = limits.min_responses or 0, limits.timeout_s
        if sites is None:
            chosen = self.ask(self._present(max(1, needed), timeout_s))
        else:
            chosen, begin_s = list(sites), time.monotonic()
            self.ask(self._require_joined(task, chosen, timeout_s))
            if timeout_s is not None:
                timeout_s = max(0.0, timeout_s - (time.monotonic() - begin_s))
        if needed > len(chosen):
            raise UsageError(
                f"min_responses is {needed}, but task {task!r} is sent to only {number_of(len(chosen), 'site')}.",
                "Lower min_responses, or send the task to more sites.",
            )
        return chosen, timeout_s

    async def _require_joined(self, task: str, sites: Sequence[str], timeout_s: float | None) -> None:
        """Wait until each of these sites has joined at least once, `rounds.sites` sites have joined, or time is over.

        Raises:
            UsageError: one of these sites has not joined by then. The message suggests the nearest name.
        """
        roster, wanted, queue = self.run.roster, self.run.settings.rounds.sites, self.queue
        waits = f"{task} waits"

        def unknown() -> str:
            return next((site for site in sites if site not in roster), "")

        def joined() -> str:
            return ", ".join(sorted(roster)) or "none"

        def decided() -> bool:
            if not (site := unknown()) or len(roster) >= wanted:
                return True
            queue.warn(
                waits,
                (
                    f"task {task!r} waits for {site!r}, which has never joined; {len(roster)} of {wanted} sites "
                    f"have joined: {joined()}. {nearest(site, sorted(roster))}"
                ).strip(),
            )
            return False

        try:
            await self._until(decided, timeout_s, lambda: queue.warned[waits])
        finally:
            queue.warned.pop(waits, None)
        if site := unknown():
            remedy = f"Sites that have joined: {joined()}. To wait for more, call controller.sites(at_least=…)."
            raise UsageError(
                f"Task {task!r} is for the site {site!r}, which has never joined.",
                nearest(site, sorted(roster), remedy),
            )

    async def _collect(
        self,
        name: str,
        call: Call,
        payloads: TaskPayloads,
        limits: AnswerLimits,
        on_result: Callable[[Result], None],
        before: Sequence[Answer] = (),
    ) -> None:
        queue, min_responses, heard, journal = self.queue, limits.min_responses, set[str](), self.journal
        if call.number < 0:
            await self._recorded(lambda: journal.begin(call))
        task = queue.open(
            name,
            call.value["sites"],
            payloads,
            streamed=call.value["streamed"],
            sizes=self._sizes,
            facts=TaskFacts(call.value["id"], before, functools.partial(journal.answered, call)),
        )

        def answered() -> bool:
            for site in task.missing:
                lost, why = limits.exceeded(self.run, site)
                if lost:
                    queue.give_up(task, site, lost, why)
            for site in [site for site in task.answers if site not in heard]:  # in the order in which they came
                heard.add(site)
                on_result(Result(name, task.answers[site]))
            enough = min_responses is not None and task.good >= min_responses
            return not task.missing or (enough and not set(task.missing) & set(self.run.alive()))

        try:
            await self._until(answered, limits.timeout_s, lambda: f"task {name!r} waits for {listed(task.missing)}")
            if min_responses is not None and task.good < min_responses:
                failed = [f"{site} failed: {each.error}" for site, each in sorted(task.answers.items()) if each.error]
                lacking = "; ".join([*failed, *([f"{listed(task.missing)} did not answer"] if task.missing else [])])
                raise RunFailed(
                    f"Task {name!r} got {task.good} of {number_of(min_responses, 'answer')}: {lacking}.",
                    "See the logs of these sites.",
                )
        except BaseException as error:
            queue.end(task)
            for answer in task.answers.values():
                answer.close()
            if isinstance(error, AtollError):
                failure = error
                await self._recorded(lambda: journal.over(call, failure))
            raise
        queue.end(task)
        await self._recorded(lambda: journal.over(call))

    async def _until(
        self, done: Callable[[], bool], timeout_s: float | None, awaited: Callable[[], str] | None = None
    ) -> bool:
        """Wait until `done()` is true, and return True. Return False after `timeout_s` seconds.

        Args:
            done: function that returns whether the wait is over.
            timeout_s: maximum seconds to wait; None: no limit.
            awaited: function that returns a text about the wait, which is logged from time to time.
        """
        begin_s = time.monotonic()
        deadline_s, say_s = begin_s + (math.inf if timeout_s is None else timeout_s), begin_s + SAY_S
        while not done():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return False
            if awaited and now_s >= say_s:
                say_s = now_s + 10 * SAY_S
                LOG.info("%s", awaited())
            await self.run.changed(min(deadline_s - now_s, 1.0))
        return True


async def _told(task: str, answers: Sequence[Answer], heard: Callable[[Result], None]) -> None:
    for answer in answers:
        heard(Result(task, answer))


def _named(sites: Sequence[str]) -> list[str]:
    """Return names of sites, sorted and without duplicates.

    Raises:
        UsageError: `sites` is one string, or a name is not valid.
    """
    if isinstance(sites, str):
        raise UsageError(f"sites is the string {sites!r}.", f"Give a list: [{sites!r}].")
    names = list(sites)
    for site in names:
        try:
            _SITE.validate_python(site, strict=True)
        except ValidationError:
            raise UsageError(
                f"{site!r} in sites is not the name of a site.", "Use names from controller.sites()."
            ) from None
    return sorted(set(names))


def _require_name(task: str) -> None:
    try:
        TypeAdapter(tm.TaskName).validate_python(task)
    except ValidationError:
        raise UsageError(
            f"{task!r} is not the name of a task.", "Use 1 to 64 letters, digits, dots, hyphens and underscores."
        ) from None
