"""The queue of tasks: which are open, for whom, and what has been answered. On the event loop of the server alone."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from atoll.blobs.manifest import ChunkSizes, read_plain
from atoll.blobs.object_file import Contents, Extent
from atoll.errors import ConfigError, Conflict, PartCorrupt, TicketClosed
from atoll.posix import OwnedFile
from atoll.protocol import task_messages as tm
from atoll.protocol.object_manifest import new_id
from atoll.protocol.status_messages import TaskStatus
from atoll.store.kept_objects import Kept, ObjectStore

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")

SHOWN = 20
"""Tasks that a status shows."""
REMEMBERED = 10_000
"""Answers whose repetition is still understood once their task is over."""


@dataclass(eq=False)
class Answer(OwnedFile):
    """What a site answered; an object's bytes are an open file without a name, which `close` gives back.

    Attributes:
        text: of a payload that came within the message.
        contents: of one that came as an object.
        error: what the site failed with; empty where it did not.
        way: how its payload came: streamed, inline or skipped.
        key: names the answer: the same one may come again.
        lost: why none is waited for any more: `gone` or `stuck`; empty for what the site itself has answered.
    """

    site: str
    key: str
    error: str = ""
    way: str = "skipped"
    text: str | None = None
    contents: Contents | None = None
    fd: int = -1
    lost: str = ""


@dataclass(frozen=True)
class Sent:
    """A payload that sites may read, and how it travels; `kept` where it is an object."""

    body: tm.Body
    way: str
    kept: Kept | None = None


@dataclass(eq=False)
class Open:
    """A task that sites are to answer: its payload is `shared` but for the sites that have their `own`.

    Attributes:
        arriving: what filters are at; cancelled when the task is over.
    """

    number: int
    message: tm.Task
    shared: Sent | None
    own: dict[str, Sent]
    sites: tuple[str, ...]
    begun_s: float
    answers: dict[str, Answer] = field(default_factory=dict)
    arriving: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def way(self) -> str:
        """How its payload travels; of one that differs by site, to the first of them."""
        return next((sent.way for sent in (self.shared, *self.own.values()) if sent), "skipped")

    def message_for(self, site: str) -> tm.Task:
        """The task as a site is given it."""
        own = self.own.get(site)
        return self.message if own is None else self.message.model_copy(update={"body": own.body})

    @property
    def missing(self) -> list[str]:
        return [site for site in self.sites if site not in self.answers]

    @property
    def good(self) -> int:
        return sum(not answer.error for answer in self.answers.values())

    def status(self, *, is_open: bool) -> TaskStatus:
        """What people are told of it."""
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
        objects: holds what travels.
        wake: lets whoever waits for a task, or for an answer, look again.
        alive: gives the sites that take part.

    Attributes:
        active: whether the run sends tasks, now or later.
        trains: whether it has rounds, now or later; `rounds` says which of it.
        follows: whether tasks come behind its rounds.
        moves: counts what is sent and answered.
    """

    def __init__(self, objects: ObjectStore, wake: Callable[[], None], alive: Callable[[], list[str]]) -> None:
        self.objects, self.wake, self.alive = objects, wake, alive
        self.active = self.finished = self.follows = False
        self.trains = True
        self.rounds: Literal["to come", "now", "over"] = "now"
        self.moves = 0
        self.received: Callable[[Answer, str], Answer] | None = None  # what an answer passes, in a thread
        self.counts: dict[str, int] = {"streamed": 0, "inline": 0, "skipped": 0}
        self.warnings: dict[str, str] = {}  # by the name of the task
        self.names: set[str] = set()  # of the tasks that were sent
        self._over: deque[TaskStatus] = deque(maxlen=SHOWN)
        self._open: dict[str, Open] = {}
        self._taken: dict[tuple[str, str], str] = {}

    def require_workflow(self) -> None:
        """Refuse tasks on a server of rounds.

        Raises:
            ConfigError: it is one.
        """
        if not self.active:
            raise ConfigError("This server has no workflow: it gives out no tasks.", "Take part with atoll.join.")

    @property
    def tasks_now(self) -> bool:
        """Whether a site that asks for a round is to look for tasks: before the rounds, or behind them."""
        return self.active and not self.finished and self.rounds != "now"

    def require_rounds(self) -> None:
        """Refuse rounds on a server of tasks.

        Raises:
            ConfigError: it is one.
        """
        if not self.trains:
            raise ConfigError("This server has a workflow, and no rounds.", "Take part with atoll.tasks.")

    # -- what the workflow does

    def open(
        self,
        name: str,
        sites: Sequence[str],
        shared: Sent | None,
        own: dict[str, Sent],
        failed: Mapping[str, str],
        *,
        streamed: bool,
        sizes: ChunkSizes,
    ) -> Open:
        """Give a task to these sites.

        Args:
            shared, own: their payloads.
            failed: why a site is not given it; that counts as its answer.
            streamed, sizes: how answers are to travel.
        """
        message = tm.Task(
            task=new_id(),
            name=name,
            streamed=streamed,
            tensor_chunk_bytes=sizes.tensor,
            np_chunk_bytes=sizes.np,
            body=shared.body if shared else tm.Body(),
        )
        number = sum(self.counts.values()) + 1
        task = Open(number, message, shared, own, tuple(sites), time.monotonic())
        self.counts[task.way] += 1
        self.moves += 1
        self.names.add(name)
        for site, error in failed.items():
            task.answers[site] = Answer(site, "", error=error)
            self._taken[message.task, site] = ""
        self._open[message.task] = task
        self.wake()
        return task

    def give_up(self, task: Open, site: str, lost: str, why: str) -> None:
        """Wait for a site's answer no more: that is its answer, and one that comes later is not taken."""
        task.answers[site] = Answer(site, "", error=why, lost=lost)
        self._taken[task.message.task, site] = ""

    def close(self, task: Open) -> None:
        """No answer to it is taken any more, and its payload goes. Idempotent."""
        if self._open.pop(task.message.task, None) is not None:
            self._over.append(task.status(is_open=False))
        for arriving in task.arriving:
            arriving.cancel()
        for sent in (task.shared, *task.own.values()):
            self._let_go(sent)

    def _let_go(self, sent: Sent | None) -> None:
        if sent is not None and sent.kept is not None:
            self.objects.let_go(sent.kept)

    def finish(self) -> None:
        """The workflow has ended: sites are told."""
        self.finished = True
        self.wake()

    def warn(self, name: str, text: str) -> None:
        """Say it in the log, once for a name of a task, and in the status."""
        if name not in self.warnings:
            LOG.warning("%s", text)
        self.warnings[name] = text

    def status(self) -> list[TaskStatus]:
        """The last tasks that the workflow has sent, oldest first."""
        running = [task.status(is_open=True) for task in self._open.values()]
        return sorted([*self._over, *running], key=lambda task: task.number)[-SHOWN:]

    # -- what a site does

    def next_for(self, site: str, besides: str | None = None) -> tm.Task | None:
        """The oldest task that the site has not answered: the same again until it has, unless it is `besides`."""
        messages = (task.message_for(site) for task in self._open.values() if site in task.missing)
        return next((message for message in messages if message.task != besides), None)

    def is_taken(self, task_id: str, site: str, key: str) -> bool:
        """Whether this very answer was taken before.

        Raises:
            Conflict: another one was. TicketClosed: the task is over, or was not the site's.
        """
        before = self._taken.get((task_id, site))
        if before is not None:
            if before != key:
                raise Conflict(f"Site {site} has answered task {task_id[:8]} already.", "Ask for the next task.")
            return True
        self._open_for(task_id, site)
        return False

    def _open_for(self, task_id: str, site: str) -> Open:
        task = self._open.get(task_id)
        if task is None or site not in task.sites:
            name = f"{task.message.name!r} ({task_id[:8]})" if task else task_id[:8]
            raise TicketClosed(
                f"Task {name} is not open for site {site}: it is over, or was never its own.",
                "Ask for the next task; this answer is not used.",
            )
        return task

    async def while_open(self, task_id: str, site: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What is made of an answer, unless the task is over before.

        Raises:
            TicketClosed: it is.
        """
        task = self._open_for(task_id, site)
        making = asyncio.ensure_future(work())
        task.arriving.add(making)
        making.add_done_callback(task.arriving.discard)
        try:
            return await making
        except asyncio.CancelledError:
            self._open_for(task_id, site)  # tells why, where that is why
            raise

    def name_of(self, task_id: str) -> str:
        """The name of an open task; empty where it is over."""
        task = self._open.get(task_id)
        return task.message.name if task else ""

    def put(self, task_id: str, answer: Answer) -> None:
        """Take an answer to a task; one that comes again, or too late, is closed.

        Raises:
            Conflict, TicketClosed: as `is_taken`.
        """
        try:
            if self.is_taken(task_id, answer.site, answer.key):
                answer.close()
                return
        except BaseException:
            answer.close()
            raise
        task = self._open[task_id]
        task.answers[answer.site] = answer
        self.moves += 1
        self._let_go(task.own.get(answer.site))  # nobody else reads it
        self._taken[task_id, answer.site] = answer.key
        while len(self._taken) > REMEMBERED:
            del self._taken[next(iter(self._taken))]
        self.wake()


def key_of(message: tm.TaskAnswer) -> str:
    """What names an answer."""
    if message.body is not None and message.body.object is not None:
        return message.body.object.object
    return message.model_dump_json()


def check_plain(text: str) -> None:
    """Refuse a text that is no payload, before it is taken.

    Raises:
        BadRequest: it is none.
    """
    read_plain(text, build=False)


def read_contents(fd: int, extent: Extent, what: str) -> Contents:
    """What the head of an answer says; in a thread.

    Raises:
        BadRequest: it is no object. PartCorrupt: the file is cut off.
    """
    head = os.pread(fd, extent.head_bytes, 0)
    if len(head) != extent.head_bytes:
        raise PartCorrupt(f"{what} is cut off in its head.", "Send the answer again.")
    return Contents.read(head, extent, what)


def key_to(kept: Kept, secret: str) -> tm.ObjectKey:
    """What a site needs to pull an object from this server."""
    expires_at = int(max(kept.expires_at, time.time()))
    return tm.ObjectKey(object=kept.object, secret=secret, digest=kept.digest, expires_at=min(expires_at, 10**12 - 1))
