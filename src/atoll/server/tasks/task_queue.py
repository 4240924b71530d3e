"""The open tasks with their payloads and answers. Handles two requests of sites: get the next task, answer a task.

Everything runs on the server's event loop, except for writing payloads and reading answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from blake3 import blake3

from atoll.blobs.manifest import Cuts, Manifest
from atoll.blobs.object_file import Contents, write_object
from atoll.blobs.ways_to_send import ChunkSizes, Cut, read_plain
from atoll.errors import AtollError, BadRequest, Busy, ConfigError, Conflict, DiskFull, Gone, PartCorrupt, TicketClosed
from atoll.posix import OwnedFile, file_error
from atoll.protocol import run_events
from atoll.protocol import task_messages as tm
from atoll.protocol.status_messages import TaskStatus, WorkflowStatus
from atoll.server.coordinator.extension import Extension
from atoll.server.coordinator.lease_checks import LeaseChecks
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.user_code import shared
from atoll.store.kept_objects import Entry, ObjectStore
from atoll.tensors.payload import Packed

LOG = logging.getLogger("atoll.server")

SHOWN = 20
"""Maximum number of tasks in a status."""
REMEMBERED = 10_000
"""Number of last answers that the server recognises if a site sends them again, even after the task has ended."""


@dataclass(eq=False)
class Answer(OwnedFile):
    """A site's answer to a task: a payload or an error.

    Attributes:
        site: name of the site.
        key: text that identifies the answer, because the site may send the same answer again.
        error: why the site failed; empty if it did not.
        way: how the payload was sent: `streamed` (an object in parts), `inline` (an object within its manifest), or
            `without_tensors` (as text in the message, without an object).
        text: the payload, if it was in the message.
        contents: structure of the payload and descriptions of its tensors, if it was an object; values are in `fd`.
        fd: descriptor of the object's file, which `close` closes; −1 if there is none.
        lost: why the server stopped waiting for the answer: `gone` (the site left or died) or `stuck` (no
            progress); empty if it did not stop.
        kept: name of the file in which the payload is kept for a restart; empty if it is not.
    """

    site: str
    key: str
    error: str = ""
    way: str = "without_tensors"
    text: str | None = None
    contents: Contents | None = None
    fd: int = -1
    lost: str = ""
    kept: str = ""


@dataclass(eq=False)
class TaskPayload:
    """The payload of a task: a text in the message, or an object that the server keeps while sites download it.

    Attributes:
        objects: store of the object.
        way: how the payload is sent: `streamed` (an object in parts), `inline` (an object within its manifest), or
            `without_tensors` (as text in the message, without an object).
        body: what the message contains: the text, or the key of the object. `hold` sets the key.
    """

    objects: ObjectStore
    way: str
    body: tm.TaskBody = field(default_factory=tm.TaskBody)
    _draft: tuple[str, Manifest] | None = None
    _stored: Entry | None = None

    @classmethod
    def write(cls, objects: ObjectStore, packed: Packed, cut: Cut) -> TaskPayload:
        """Write a payload as an object. Sites may download it after `hold`. Thread-safe.

        Raises:
            UsageError: the payload cannot be sent.
            DiskFull, StoreError: the disk is full, or fails.
        """
        object_id, fd = objects.draft()
        try:
            manifest = write_object(packed, fd, cut)
        except BaseException as error:
            objects.discard(object_id)
            if isinstance(error, OSError):
                raise file_error(error, objects.folder) from error
            raise
        finally:
            os.close(fd)
        return cls(objects, "inline" if cut.inline else "streamed", _draft=(object_id, manifest))

    @classmethod
    def taken_over(cls, objects: ObjectStore, key: tm.ObjectKey) -> TaskPayload:
        """Turn an object that a site has uploaded into a payload for other sites.

        Raises:
            Gone, AuthError: the object does not exist or has expired, or its secret is wrong.
            Conflict: parts of the object are missing, or it belongs to the server already.
        """
        entry = objects.make_own(key.object, key.secret)
        return cls(objects, "streamed", tm.TaskBody(object=key_to(entry, key.secret)), _stored=entry)

    @property
    def digest(self) -> str:
        """Digest of the payload. Read it only before `hold`."""
        if self._draft is None:
            return blake3((self.body.plain or "").encode()).hexdigest()
        return self._draft[1].id

    @property
    def key(self) -> tm.ObjectKey:
        """The key with which a site downloads the object. Read it only after `hold`, and only if there is an object."""
        assert self.body.object is not None
        return self.body.object

    def hold(self) -> None:
        """Let sites download the payload.

        Raises:
            Busy: the store of objects is full.
            DiskFull, StoreError: the payload's file cannot be renamed.
        """
        if self._draft is not None:
            self._stored, secret = self.objects.hold(*self._draft, inline=self.way == "inline")
            self._draft, self.body = None, tm.TaskBody(object=key_to(self._stored, secret))

    def discard(self) -> None:
        """Remove the payload's object, if there is one. Idempotent."""
        if self._stored is not None:
            self.objects.drop(self._stored)
        self.__del__()

    def __del__(self) -> None:
        """Remove the payload's object if it was written, but `hold` was never called."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self.objects.discard(draft[0])


@dataclass(eq=False)
class TaskPayloads:
    """The payloads of one task.

    Attributes:
        shared: the payload of every site that is not in `own` or `failed`; None if there is no such site.
        own: site → its own payload, changed by filters.
        failed: site → error of its filters. The task is not sent to such a site.
    """

    shared: TaskPayload | None = None
    own: dict[str, TaskPayload] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[TaskPayload]:
        return iter([*([self.shared] if self.shared else []), *self.own.values()])

    def discard(self) -> None:
        """Remove all payloads. Idempotent."""
        for payload in self:
            payload.discard()


@dataclass(frozen=True)
class TaskFacts:
    """What the journal of a workflow has of a task.

    Attributes:
        task: id of the task.
        before: answers from before a restart of the server.
        record: writes an answer, within the transaction of its event.
    """

    task: str
    before: Sequence[Answer]
    record: Callable[[Answer], None]


@dataclass(eq=False)
class OpenTask:
    """A task that was sent, and waits for answers.

    Attributes:
        number: number of the task, from 1.
        message: the message with the task, for sites without a payload of their own.
        payloads: the payloads.
        sites: sites that the task is for.
        begun_s: time at which the task was sent, by `time.monotonic`.
        record: writes an answer into the workflow's journal, within the transaction of its event.
        answers: site → its answer.
        arriving: (site, key) → running work that reads and filters an answer. The end of the task cancels it.
    """

    number: int
    message: tm.TaskMessage
    payloads: TaskPayloads
    sites: tuple[str, ...]
    begun_s: float
    record: Callable[[Answer], None] = lambda answer: None
    answers: dict[str, Answer] = field(default_factory=dict)
    arriving: dict[tuple[str, str], asyncio.Future[None]] = field(default_factory=dict)

    @property
    def way(self) -> str:
        """How the shared payload is sent: `streamed`, `inline` or `without_tensors`. A site's own may differ.

        Without a shared payload: how the first site's own is sent; `without_tensors` if there is none.
        """
        return next((payload.way for payload in self.payloads), "without_tensors")

    @property
    def missing(self) -> list[str]:
        """Sites that have not answered."""
        return [site for site in self.sites if site not in self.answers]

    @property
    def good(self) -> int:
        """Number of answers without an error."""
        return sum(not answer.error for answer in self.answers.values())

    def status(self, *, is_open: bool) -> TaskStatus:
        """Return the task's status: its sites, how they answered, and which have not answered yet."""
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


class Workflows(Protocol):
    """Facts about a run's workflows (training, evaluations, functions of the user).

    Attributes:
        evaluated: function that returns the results so far of the newest cross-site evaluation; None before the first.
    """

    evaluated: Callable[[], tm.Evaluation] | None

    @property
    def trains(self) -> bool:
        """Whether one of the workflows is training."""

    @property
    def sends_tasks(self) -> bool:
        """Whether one of the workflows sends tasks."""

    @property
    def follows(self) -> bool:
        """Whether a workflow follows training."""

    @property
    def keeps_local(self) -> bool:
        """Whether sites must keep the models that they submit, because a cross-site evaluation needs them later."""

    def will_evaluate(self, site: str) -> bool:
        """Return whether a cross-site evaluation will still ask this site to evaluate models."""

    def status(self) -> list[WorkflowStatus]:
        """Return the status of each workflow, in order."""


AnswerFilter = Callable[[Answer, str], Awaitable[Answer]]
"""Function (answer, name of the task) → filtered answer."""


class TaskQueue(Extension):
    """The tasks that a server has sent, and their answers. It is the `Tasks` of the run, and one of its extensions.

    Args:
        run: the run.
        leases: checks of leases.
        objects: the objects of payloads and answers.
        workflows: the run's workflows; None: the run only trains.
        answer_filter: changes answers; None: the run has no filters of answers.

    Attributes:
        moves: number of tasks sent plus answers received.
        names: names of all tasks that were sent.
        warned: name of a task → a warning about it.
        awaited: ids of the tasks that were open before a restart, until the workflow has asked for them again.
    """

    name = "tasks"

    def __init__(
        self,
        run: RunCore,
        leases: LeaseChecks,
        objects: ObjectStore,
        workflows: Workflows | None,
        answer_filter: AnswerFilter | None,
    ) -> None:
        super().__init__(run)
        self.alive, self._run, self._leases, self.objects = run.alive, run, leases, objects
        self.workflows, self._answer_filter = workflows, answer_filter
        self.active = workflows is not None and workflows.sends_tasks
        self.trains = workflows is None or workflows.trains
        self.follows = workflows is not None and workflows.follows
        self.keeps_local = workflows is not None and workflows.keeps_local
        self.finished = False
        self.rounds: Literal["to come", "now", "over"] = "now" if workflows is None else "to come"
        self.moves = 0
        self.counts: dict[str, int] = {"streamed": 0, "inline": 0, "without_tensors": 0}
        self.warned: dict[str, str] = {}
        self.names: set[str] = set()
        self.awaited: set[str] = set()
        self._ended: deque[TaskStatus] = deque(maxlen=SHOWN)
        self._open: dict[str, OpenTask] = {}
        self._answer_keys: dict[tuple[str, str], str] = {}  # (task, site) → key of its answer

    def will_evaluate(self, site: str) -> bool:
        """Return whether a later task will ask this site to evaluate models."""
        return self.workflows is not None and self.workflows.will_evaluate(site)

    def require_workflow(self) -> None:
        """Raise an error if a site asks for tasks, but the run has only rounds.

        Raises:
            ConfigError: the run sends no tasks.
        """
        if not self.active:
            raise ConfigError("This server has no workflow, so it sends no tasks.", "Use atoll.join.")

    def require_rounds(self) -> None:
        """Raise an error if a site asks for a ticket, but the run has only tasks.

        Raises:
            ConfigError: the run has no rounds.
        """
        if not self.trains:
            raise ConfigError("This server has a workflow and no rounds.", "Use atoll.tasks.")

    # -- called by the workflow

    def open(
        self,
        name: str,
        sites: Sequence[str],
        payloads: TaskPayloads,
        *,
        streamed: bool,
        sizes: ChunkSizes,
        facts: TaskFacts,
    ) -> OpenTask:
        """Send a task to sites, and return it. If a site's filters failed, their error counts as the site's answer.

        Args:
            name: name of the task.
            sites: names of the sites.
            payloads: the payloads, which are written already.
            streamed: whether sites stream their answers.
            sizes: sizes of the parts of answers, in bytes.
            facts: what the workflow's journal has of the task.

        Raises:
            Busy: the store of objects is full. The task is not sent, and the payloads are removed.
            DiskFull, StoreError: a file cannot be renamed. The task is not sent, and the payloads are removed.
        """
        try:
            for payload in payloads:
                payload.hold()
        except BaseException:
            payloads.discard()
            raise
        message = tm.TaskMessage(
            task=facts.task,
            name=name,
            streamed=streamed,
            tensor_chunk_bytes=sizes.tensor,
            np_chunk_bytes=sizes.np,
            body=payloads.shared.body if payloads.shared else tm.TaskBody(),
        )
        number = sum(self.counts.values()) + 1
        task = OpenTask(number, message, payloads, tuple(sites), time.monotonic(), facts.record)
        task.answers |= {answer.site: answer for answer in facts.before}
        self.counts[task.way] += 1
        self.moves += 1
        self.names.add(name)
        if facts.task not in self.awaited:  # else the event is from before a restart
            self._run.events.tell(run_events.TaskOpened(task=name, sites=list(sites)))
        self.awaited.discard(facts.task)
        for site, error in payloads.failed.items():
            self._set_answer(task, Answer(site, "", error=error))
        self._open[message.task] = task
        self._run.wake()
        return task

    def give_up(self, task: OpenTask, site: str, lost: str, why: str) -> None:
        """Stop waiting for a site's answer. The error `why` counts as the site's answer, and a later answer is refused.

        Args:
            task: the task.
            site: name of the site.
            lost: `gone` (the site left or died) or `stuck` (it makes no progress).
            why: text of the error.
        """
        with contextlib.suppress(DiskFull):  # the next look at the site tries again
            self._set_answer(task, Answer(site, "", error=why, lost=lost))

    def end(self, task: OpenTask) -> None:
        """End a task: refuse further answers, and remove the payloads. Idempotent."""
        if self._open.pop(task.message.task, None) is not None:
            self._ended.append(task.status(is_open=False))
        for arriving in task.arriving.values():
            arriving.cancel()
        task.payloads.discard()

    def finish(self) -> None:
        """Record that the last workflow has ended. A site that asks for a task, and has none open, is told so."""
        self.finished = True
        self._run.wake()

    def warn(self, name: str, text: str) -> None:
        """Show a warning about the task `name` in the status. Log only the first warning for each name."""
        if name not in self.warned:
            LOG.warning("%s", text)
        self.warned[name] = text

    def warnings(self) -> Collection[str]:
        """Return the warnings about tasks."""
        dropped = self._run.store.facts.why_dropped
        return [*self.warned.values(), *([dropped] if dropped else [])]

    def workflows_status(self) -> list[WorkflowStatus]:
        """Return the status of each workflow, in order."""
        return [] if self.workflows is None else self.workflows.status()

    def tasks_status(self) -> list[TaskStatus]:
        """Return the status of the last `SHOWN` tasks, oldest first."""
        running = [task.status(is_open=True) for task in self._open.values()]
        return sorted([*self._ended, *running], key=lambda task: task.number)[-SHOWN:]

    # -- called for requests of sites

    def next_for(self, site: str, besides: str | None = None) -> tm.TaskMessage | None:
        """Return the site's oldest unanswered task; None if there is none.

        Args:
            site: name of the site.
            besides: id of a task to skip.
        """
        for task in self._open.values():
            if site in task.missing and task.message.task != besides:
                own = task.payloads.own.get(site)
                return task.message if own is None else task.message.model_copy(update={"body": own.body})
        return None

    def is_taken(self, task_id: str, site: str, key: str) -> bool:
        """Return whether the server has this answer already. If not, check that the task is open for the site.

        Raises:
            Conflict: the site has given another answer, or the server stopped waiting for the site (`give_up`).
            TicketClosed: the task is over, or was not sent to this site.
        """
        before = self._answer_keys.get((task_id, site))
        if before is None:
            self.open_for(task_id, site)
        elif before != key:
            raise Conflict(f"Task {task_id[:8]} takes no further answer from site {site}.", "Ask for the next task.")
        return before is not None

    def open_for(self, task_id: str, site: str) -> OpenTask:
        """Return the open task with this id.

        Raises:
            TicketClosed: the task is over, or was not sent to this site.
            Busy: the workflow is about to ask for the task again, after a restart.
        """
        if task_id in self.awaited:
            busy = Busy(f"Task {task_id[:8]} is not open again yet after the server's restart.", "Try again.")
            busy.retry_after_s = 1.0
            raise busy
        task = self._open.get(task_id)
        if task is None or site not in task.sites:
            name = f"{task.message.name!r} ({task_id[:8]})" if task else task_id[:8]
            raise TicketClosed(
                f"Task {name} is not open for site {site}: it is over, or was not sent to this site.",
                "Ask for the next task; this answer is not used.",
            )
        return task

    def answer(self, task_id: str, answer: Answer) -> None:
        """Record an answer. If the server has it already, only close the answer's file.

        Raises:
            Conflict: the site has given another answer, or the server stopped waiting for the site (`give_up`).
            TicketClosed: the task is over, or was not sent to this site.
        """
        if self.is_taken(task_id, answer.site, answer.key):
            answer.close()
            return
        task = self._open[task_id]
        self.moves += 1
        if (own := task.payloads.own.get(answer.site)) is not None:
            own.discard()  # it was for this site only
        self._set_answer(task, answer)
        self._run.wake()

    def recognise(self, answers: Iterable[tuple[str, str, str]]) -> None:
        """Recognise these answers if sites send them again: (id of the task, site, key), from before a restart."""
        for task_id, site, key in answers:
            self._remember(task_id, site, key)

    def _set_answer(self, task: OpenTask, answer: Answer) -> None:
        with self._run.store.journal.transaction():
            task.record(answer)
            self._run.events.tell(run_events.TaskAnswered(task=task.message.name, site=answer.site, error=answer.error))
        task.answers[answer.site] = answer
        self._remember(task.message.task, answer.site, answer.key)

    def _remember(self, task_id: str, site: str, key: str) -> None:
        self._answer_keys[task_id, site] = key
        while len(self._answer_keys) > REMEMBERED:
            del self._answer_keys[next(iter(self._answer_keys))]

    # -- requests of clients

    async def request_task(self, lease: Lease, message: tm.TaskRequest) -> tm.TaskReply:
        """Return the site's next open task, or why there is none. Wait up to `wait_s` seconds for a task.

        Raises:
            ConfigError: the run sends no tasks.
            Busy: the server is stopping.
            LeaseLost, Superseded: the site lost its lease while it waited.
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
            await self._run.changed(left_s)
            self._leases.require_lease(lease)  # if it was lost meanwhile, another process gets the task

    async def answer_task(self, lease: Lease, task: str, message: tm.TaskAnswer) -> None:
        """Record a site's answer: an error, a payload as JSON, or an object, which the server takes over.

        A site may send the same answer again. If the answer is refused, its object is removed. If the disk is full, the
        object is kept for the site's next attempt.

        Raises:
            ConfigError: the run sends no tasks.
            BadRequest: the answer is malformed.
            Conflict: the site has given another answer, or the server stopped waiting for the site (`give_up`); or the
                object lacks parts, has another digest or is the server's own.
            TicketClosed: the task is over, or was not sent to this site.
            Gone, AuthError, PartCorrupt: the object is not on this server, its secret is wrong, or its file is cut off.
            DiskFull: the disk has too little space.
            Busy: the workflow is about to ask for the task again, after a restart.
        """
        site, body = lease.site, message.body
        object_key = body.object if body is not None else None
        text = message.model_dump_json()
        key = object_key.object if object_key is not None else blake3(text.encode()).hexdigest()
        self.require_workflow()
        try:
            if (body is None) == (message.error is None):
                raise BadRequest("An answer needs a payload or an error.", "Use the same Atoll version on both sides.")
            if self.is_taken(task, site, key):
                return
            if body is None:
                self.answer(task, Answer(site, key, error=message.error or "no reason was given"))
            elif object_key is None:
                text = body.plain or ""
                read_plain(text, build=False)  # raises an error if the text is not a payload
                self.answer(task, Answer(site, key, text=text))
            else:
                await self._take_once(task, site, key, object_key)
        except (DiskFull, Busy):  # the site sends the answer again, with the same object
            raise
        except AtollError:
            if object_key is not None:
                with contextlib.suppress(AtollError):  # the object was taken before, or never came
                    self.objects.remove(object_key.object, object_key.secret)
            raise

    async def _take_once(self, task_id: str, site: str, key: str, object_key: tm.ObjectKey) -> None:
        """Read, filter and record an answer that a site has uploaded. A repeated request waits for the first request.

        Raises:
            TicketClosed: the task ended before the answer was read and filtered.
        """
        task = self.open_for(task_id, site)
        if not await shared(task.arriving, (site, key), lambda: self._take(task, site, key, object_key)):
            self.open_for(task_id, site)

    async def _take(self, task: OpenTask, site: str, key: str, object_key: tm.ObjectKey) -> None:
        what = f"The answer of site {site}"
        if self._answer_filter is not None:
            self._run.require_space()
        entry, fd, path = self.objects.opened(object_key.object, object_key.secret)
        answer, facts = Answer(site, key, way="inline" if entry.inline else "streamed", fd=fd), self._run.store.facts
        try:
            if entry.manifest.id != object_key.digest:
                raise Conflict(f"{what} does not match its digest.", "Send the answer again.")
            io = functools.partial(asyncio.get_running_loop().run_in_executor, self._run.io)
            answer.contents = contents = await io(read_contents, answer, entry.cuts, what)
            if self._answer_filter is not None:
                answer = await self._answer_filter(answer, task.message.name)
            if facts.kept and answer.contents is not None:
                answer.kept = await io(facts.keep, answer.fd, path if answer.contents is contents else None)
            self.answer(task.message.task, answer)
        except Exception:  # if cancelled, a thread may still read the file; it is closed with its last reference
            answer.close()
            facts.discard(answer.kept)
            raise
        self.objects.drop(entry)  # only now: after a kill, the site sends the same answer again

    async def get_evaluation(self) -> tm.Evaluation:
        """Return the results so far of the newest cross-site evaluation, as a matrix of sites and models.

        Raises:
            Gone: the run has had no cross-site evaluation.
        """
        workflows = self.workflows
        if workflows is None or workflows.evaluated is None:
            raise Gone(
                "This server has no results of a cross-site evaluation.",
                'Add {kind = "cross_site_evaluation"} to the workflows of the run, or use atoll evaluate RUN.TOML.',
            )
        return workflows.evaluated()


def read_contents(file: OwnedFile, cuts: Cuts, what: str) -> Contents:
    """Read the structure of an object from the beginning of its file, without the tensors. Call this in a thread.

    Args:
        file: the open file.
        cuts: sizes of the object and its parts.
        what: name of the answer, for messages.

    Raises:
        BadRequest: the file is not an object.
        PartCorrupt: the file is cut off.
    """
    head = os.pread(file.fd, cuts.head_bytes, 0)
    if len(head) != cuts.head_bytes:
        raise PartCorrupt(f"{what} is incomplete: its file ends too early.", "Send the answer again.")
    return Contents.read(head, cuts, what)


def key_to(entry: Entry, secret: str) -> tm.ObjectKey:
    """Return the key with which a site downloads an object from this server.

    Args:
        entry: the object.
        secret: its secret.
    """
    expires_at = int(max(entry.expires_at, time.time()))
    return tm.ObjectKey(
        object=entry.object, secret=secret, digest=entry.manifest.id, expires_at=min(expires_at, 10**12 - 1)
    )
