"""The tasks that are open, their payloads and answers; and the two operations by which sites take part.

All of it runs on the event loop of the server, except for writing a payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Literal

from atoll.blobs.manifest import Cuts, Manifest
from atoll.blobs.object_file import Contents, write_object
from atoll.blobs.payload_cut import ChunkSizes, Cut, read_plain
from atoll.errors import AtollError, BadRequest, ConfigError, Conflict, DiskFull, PartCorrupt, TicketClosed
from atoll.posix import OwnedFile
from atoll.protocol import task_messages as tm
from atoll.protocol.status_messages import TaskStatus
from atoll.server.coordinator.roster import Lease
from atoll.server.tasks.user_code import shared
from atoll.store.file_slots import disk_error
from atoll.store.kept_objects import Kept, ObjectStore
from atoll.tensors.payload import Packed
from atoll.tensors.reference import new_id

LOG = logging.getLogger("atoll.server")

SHOWN = 20
"""Tasks in a status."""
REMEMBERED = 10_000
"""Answers that are recognised when they are repeated after their task is over."""


@dataclass(eq=False)
class Answer(OwnedFile):
    """What a site answered. The bytes of an object are an open file without a name; `close` gives it back.

    Attributes:
        key: identifies the answer, which may be sent again.
        error: why the site failed; empty if it did not.
        way: how the payload travelled: streamed, inline or skipped.
        text: the payload, if it came within the message.
        contents: the payload, if it came as an object.
        lost: `gone` or `stuck` if the site was given up; empty for an answer of its own.
    """

    site: str
    key: str
    error: str = ""
    way: str = "skipped"
    text: str | None = None
    contents: Contents | None = None
    fd: int = -1
    lost: str = ""


@dataclass(eq=False)
class TaskPayload:
    """What sites are sent: text within the message, or an object that is written, then held while sites read it.

    Attributes:
        way: how it travels: streamed, inline or skipped.
        body: as the message has it; an object is in it after `hold`.
    """

    objects: ObjectStore
    way: str
    body: tm.Body = field(default_factory=tm.Body)
    _draft: tuple[str, Manifest] | None = None
    _kept: Kept | None = None

    @classmethod
    def write(cls, objects: ObjectStore, packed: Packed, cut: Cut) -> TaskPayload:
        """Write an object that no site may read yet; from any thread.

        Raises:
            UsageError: it cannot travel. DiskFull, StoreError: the disk fails.
        """
        object_id, fd = objects.draft()
        try:
            manifest = write_object(packed, fd, cut)
        except BaseException as error:
            objects.discard(object_id)
            if isinstance(error, OSError):
                raise disk_error(error, objects.folder) from error
            raise
        finally:
            os.close(fd)
        return cls(objects, "inline" if cut.inline else "streamed", _draft=(object_id, manifest))

    @classmethod
    def taken_over(cls, objects: ObjectStore, key: tm.ObjectKey) -> TaskPayload:
        """Make an object that a site has sent one that other sites may read. Errors as `ObjectStore.make_own`."""
        kept = objects.make_own(key.object, key.secret)
        return cls(objects, "streamed", tm.Body(object=key_to(kept, key.secret)), _kept=kept)

    @property
    def key(self) -> tm.ObjectKey:
        """What a site needs to read it, if it is an object that is held."""
        assert self.body.object is not None
        return self.body.object

    def hold(self) -> None:
        """Let sites read it. Errors as `ObjectStore.hold`."""
        if self._draft is not None:
            self._kept, secret = self.objects.hold(*self._draft, inline=self.way == "inline")
            self._draft, self.body = None, tm.Body(object=key_to(self._kept, secret))

    def discard(self) -> None:
        """Remove it. Idempotent."""
        if self._kept is not None:
            self.objects.drop(self._kept)
        self.__del__()

    def __del__(self) -> None:
        """Remove what was given up before sites could read it."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self.objects.discard(draft[0])


@dataclass(eq=False)
class TaskPayloads:
    """The payloads of one task.

    Attributes:
        shared: for every site without its own; None if every site has its own.
        own: by site.
        failed: site → what its filter failed with; it is sent nothing.
    """

    shared: TaskPayload | None = None
    own: dict[str, TaskPayload] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[TaskPayload]:
        return iter([*([self.shared] if self.shared else []), *self.own.values()])

    def discard(self) -> None:
        """Remove all of them. Idempotent."""
        for payload in self:
            payload.discard()


@dataclass(eq=False)
class OpenTask:
    """A task that sites are to answer.

    Attributes:
        arriving: (site, key) → the work that reads and filters an answer; cancelled when the task is over.
    """

    number: int
    message: tm.Task
    payloads: TaskPayloads
    sites: tuple[str, ...]
    begun_s: float
    answers: dict[str, Answer] = field(default_factory=dict)
    arriving: dict[tuple[str, str], asyncio.Future[None]] = field(default_factory=dict)

    @property
    def way(self) -> str:
        """How the payload travels; to the first site if it differs."""
        return next((payload.way for payload in self.payloads), "skipped")

    @property
    def missing(self) -> list[str]:
        """Sites that have not answered."""
        return [site for site in self.sites if site not in self.answers]

    @property
    def good(self) -> int:
        """Number of answers without an error."""
        return sum(not answer.error for answer in self.answers.values())

    def status(self, *, is_open: bool) -> TaskStatus:
        """Return what the status shows of it."""
        ways = Counter("failed" if answer.error else answer.way for answer in self.answers.values())
        return TaskStatus(
            number=self.number,
            name=self.message.name,
            way=self.way,
            sites=list(self.sites),
            missing=self.missing,
            answers=dict(sorted(ways.items())),
            open=is_open,
            seconds=time.monotonic() - self.begun_s,
        )


class TaskQueue:
    """The tasks of one server.

    Args:
        objects: keeps payloads and answers.
        wake: wakes everything that waits for a task or for an answer.
        alive: returns the sites that take part.
        changed: returns when something has changed, or after the seconds given.
        require_lease: raises unless the lease still speaks for its site.
        require_space: raises DiskFull while there is no space for another file.
        io: reads files.

    Attributes:
        active: whether the run sends tasks at any time.
        trains: whether the run has rounds at any time; `rounds` says where it is.
        follows: whether tasks come after the rounds.
        moves: number of tasks sent and answers taken.
        answer_filter: filters the answer to the task of a name; None if the run has no such filters.
        names: names of all tasks that were sent.
    """

    def __init__(
        self,
        objects: ObjectStore,
        wake: Callable[[], None],
        alive: Callable[[], list[str]],
        changed: Callable[[float], Awaitable[None]],
        require_lease: Callable[[Lease], object],
        require_space: Callable[[], None],
        io: Executor,
    ) -> None:
        self.objects, self.wake, self.alive = objects, wake, alive
        self._changed, self._require_lease, self._require_space, self._io = changed, require_lease, require_space, io
        self.active = self.finished = self.follows = False
        self.trains = True
        self.rounds: Literal["to come", "now", "over"] = "now"
        self.moves = 0
        self.answer_filter: Callable[[Answer, str], Awaitable[Answer]] | None = None
        self.counts: dict[str, int] = {"streamed": 0, "inline": 0, "skipped": 0}
        self.warnings: dict[str, str] = {}  # by the name of the task
        self.names: set[str] = set()
        self._over: deque[TaskStatus] = deque(maxlen=SHOWN)
        self._open: dict[str, OpenTask] = {}
        self._taken: dict[tuple[str, str], str] = {}  # (task, site) → key of its answer

    def require_workflow(self) -> None:
        """Refuse tasks on a server that has rounds alone.

        Raises:
            ConfigError: the run sends no tasks.
        """
        if not self.active:
            raise ConfigError("This server has no workflow, so it sends no tasks.", "Take part with atoll.join.")

    def require_rounds(self) -> None:
        """Refuse rounds on a server that sends tasks alone.

        Raises:
            ConfigError: the run has no rounds.
        """
        if not self.trains:
            raise ConfigError("This server has a workflow, and no rounds.", "Take part with atoll.tasks.")

    # -- what the workflow does

    def open(
        self, name: str, sites: Sequence[str], payloads: TaskPayloads, *, streamed: bool, sizes: ChunkSizes
    ) -> OpenTask:
        """Send a task to these sites. What failed for a site counts as its answer.

        Args:
            streamed, sizes: how answers are to travel.

        Raises:
            Busy, DiskFull, StoreError: as `ObjectStore.hold`; then no site may read any of the payloads.
        """
        try:
            for payload in payloads:
                payload.hold()
        except BaseException:
            payloads.discard()
            raise
        message = tm.Task(
            task=new_id(),
            name=name,
            streamed=streamed,
            tensor_chunk_bytes=sizes.tensor,
            np_chunk_bytes=sizes.np,
            body=payloads.shared.body if payloads.shared else tm.Body(),
        )
        number = sum(self.counts.values()) + 1
        task = OpenTask(number, message, payloads, tuple(sites), time.monotonic())
        self.counts[task.way] += 1
        self.moves += 1
        self.names.add(name)
        for site, error in payloads.failed.items():
            self._set_answer(task, Answer(site, "", error=error))
        self._open[message.task] = task
        self.wake()
        return task

    def give_up(self, task: OpenTask, site: str, lost: str, why: str) -> None:
        """Stop waiting for the answer of a site: this counts as its answer, and a later one is refused."""
        self._set_answer(task, Answer(site, "", error=why, lost=lost))

    def close(self, task: OpenTask) -> None:
        """Refuse further answers, and remove the payloads. Idempotent."""
        if self._open.pop(task.message.task, None) is not None:
            self._over.append(task.status(is_open=False))
        for arriving in task.arriving.values():
            arriving.cancel()
        task.payloads.discard()

    def finish(self) -> None:
        """Tell sites that the last workflow has ended."""
        self.finished = True
        self.wake()

    def warn(self, name: str, text: str) -> None:
        """Put a warning about a task into the status, and once for each name into the log."""
        if name not in self.warnings:
            LOG.warning("%s", text)
        self.warnings[name] = text

    def status(self) -> list[TaskStatus]:
        """Return the last tasks that were sent, oldest first."""
        running = [task.status(is_open=True) for task in self._open.values()]
        return sorted([*self._over, *running], key=lambda task: task.number)[-SHOWN:]

    # -- what a site does

    def next_for(self, site: str, besides: str | None = None) -> tm.Task | None:
        """Return the oldest task that the site has not answered, other than `besides`."""
        for task in self._open.values():
            if site in task.missing and task.message.task != besides:
                own = task.payloads.own.get(site)
                return task.message if own is None else task.message.model_copy(update={"body": own.body})
        return None

    def is_taken(self, task_id: str, site: str, key: str) -> bool:
        """Return whether this same answer was taken before.

        Raises:
            Conflict: the site has given another answer. TicketClosed: as `open_for`.
        """
        before = self._taken.get((task_id, site))
        if before is None:
            self.open_for(task_id, site)
        elif before != key:
            raise Conflict(f"Site {site} has answered task {task_id[:8]} already.", "Ask for the next task.")
        return before is not None

    def open_for(self, task_id: str, site: str) -> OpenTask:
        """Return an open task of a site.

        Raises:
            TicketClosed: the task is over, or was not for this site.
        """
        task = self._open.get(task_id)
        if task is None or site not in task.sites:
            name = f"{task.message.name!r} ({task_id[:8]})" if task else task_id[:8]
            raise TicketClosed(
                f"Task {name} is not open for site {site}: it is over, or was never for this site.",
                "Ask for the next task; this answer is not used.",
            )
        return task

    def answer(self, task_id: str, answer: Answer) -> None:
        """Take an answer; close it if it is a repetition.

        Raises:
            Conflict, TicketClosed: as `is_taken`.
        """
        if self.is_taken(task_id, answer.site, answer.key):
            answer.close()
            return
        task = self._open[task_id]
        self.moves += 1
        if (own := task.payloads.own.get(answer.site)) is not None:
            own.discard()  # no other site reads it
        self._set_answer(task, answer)
        while len(self._taken) > REMEMBERED:
            del self._taken[next(iter(self._taken))]
        self.wake()

    def _set_answer(self, task: OpenTask, answer: Answer) -> None:
        task.answers[answer.site] = answer
        self._taken[task.message.task, answer.site] = answer.key

    # -- the operations: a site asks for its next task, and answers it

    async def request_task(self, lease: Lease, message: tm.TaskRequest) -> tm.TaskReply:
        """Give the next open task of a site, or wait up to `wait_s` seconds for one.

        Raises:
            ConfigError: the run sends no tasks. Busy: the server ends.
            LeaseLost, Superseded: the lease was lost meanwhile.
        """
        self.require_workflow()
        until_s = time.monotonic() + message.wait_s
        while True:
            task = self.next_for(lease.site, message.besides)
            if task is not None:
                return tm.TaskReply(status="task", task=task)
            if self.finished:
                return tm.TaskReply(status="finished")
            if message.rounds and self.rounds == "now":
                return tm.TaskReply(status="rounds")
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return tm.TaskReply(status="wait")
            await self._changed(left_s)
            self._require_lease(lease)  # it may have been lost meanwhile: then another process gets the task

    async def answer_task(self, lease: Lease, task: str, message: tm.TaskAnswer) -> None:
        """Take an answer: an error, a payload as JSON, or an object, which belongs to the server from then on.

        The same answer may be repeated. The object of an answer that is refused is removed, unless the disk is full.

        Raises:
            ConfigError: the run sends no tasks. BadRequest: it is malformed. Conflict, TicketClosed: as `is_taken`.
            Gone, AuthError, PartCorrupt: its object is not here, the secret is wrong, or it is cut off.
        """
        site, body = lease.site, message.body
        given = body.object if body is not None else None
        key = given.object if given is not None else message.model_dump_json()
        self.require_workflow()
        try:
            if (body is None) == (message.error is None):
                raise BadRequest("An answer has a payload or an error.", "Use the same Atoll version on both sides.")
            if self.is_taken(task, site, key):
                return
            if body is None:
                self.answer(task, Answer(site, key, error=message.error or "it gave no reason"))
            elif given is None:
                text = body.plain or ""
                read_plain(text, build=False)  # refuse what is no payload
                self.answer(task, Answer(site, key, text=text))
            else:
                await self._take_once(task, site, key, given)
        except DiskFull:  # the site asks again, and finds it
            raise
        except AtollError:
            if given is not None:
                with contextlib.suppress(AtollError):  # it was taken, or never came
                    self.objects.remove(given.object, given.secret)
            raise

    async def _take_once(self, task_id: str, site: str, key: str, given: tm.ObjectKey) -> None:
        """Take an answer that came as an object. A site that asks again meanwhile waits for the same work.

        Raises:
            TicketClosed: the task ended before the answer was read and filtered.
        """
        task = self.open_for(task_id, site)
        if not await shared(task.arriving, (site, key), lambda: self._take(task, site, key, given)):
            self.open_for(task_id, site)

    async def _take(self, task: OpenTask, site: str, key: str, given: tm.ObjectKey) -> None:
        what = f"The answer of site {site}"
        if self.answer_filter is not None:
            self._require_space()
        kept, fd = self.objects.take(given.object, given.secret)
        answer = Answer(site, key, way="inline" if kept.inline else "streamed", fd=fd)
        try:
            if kept.manifest.id != given.digest:
                raise Conflict(f"{what} is another object than its digest says.", "Send the answer again.")
            loop = asyncio.get_running_loop()
            answer.contents = await loop.run_in_executor(self._io, read_contents, answer, kept.cuts, what)
            if self.answer_filter is not None:
                answer = await self.answer_filter(answer, task.message.name)
            self.answer(task.message.task, answer)
        except Exception:  # when cancelled, a thread may still read the file: it closes with its last reference
            answer.close()
            raise


def read_contents(file: OwnedFile, cuts: Cuts, what: str) -> Contents:
    """Read the head of an answer; in a thread.

    Raises:
        BadRequest: it is no object. PartCorrupt: the file is cut off.
    """
    head = os.pread(file.fd, cuts.head_bytes, 0)
    if len(head) != cuts.head_bytes:
        raise PartCorrupt(f"{what} is cut off in its head.", "Send the answer again.")
    return Contents.read(head, cuts, what)


def key_to(kept: Kept, secret: str) -> tm.ObjectKey:
    """Return what a site needs to pull an object from this server."""
    expires_at = int(max(kept.expires_at, time.time()))
    return tm.ObjectKey(
        object=kept.object, secret=secret, digest=kept.manifest.id, expires_at=min(expires_at, 10**12 - 1)
    )
