"""`atoll.tasks`: answer the tasks that a workflow at the server sends.

    with atoll.tasks("http://host:8512", site="clinic-a") as worker:

        @worker.task("train")
        def train(payload):
            return {"w": payload["w"] + 1}

        worker.run()                           # until the workflow has ended

        for task in worker.tasks():            # or, in a loop of your own
            task.answer({"w": task.payload["w"] + 1})

A process that is killed and started again gets its open task again. The worker waits for a server that is gone.

This file has handlers by the names of tasks, the loop that calls them, and payloads that are pulled ahead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from atoll.blobs.object_file import Stored
from atoll.blobs.payload_cut import ChunkSizes, read_plain, way_of
from atoll.errors import (
    TRANSIENT,
    AtollError,
    BadRequest,
    Conflict,
    Gone,
    PartCorrupt,
    StoreError,
    TicketClosed,
    TransferError,
    TransferStalled,
    UsageError,
    print_interrupt_in_a_line,
    public_api,
)
from atoll.filters.base import ByTask, for_tasks, said
from atoll.protocol import routes
from atoll.protocol import task_messages as tm
from atoll.tensors.payload import Packed, pack
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import http_to, server_of
from atoll.transport.object_client import chunk_sizes, fetch, fetch_stored, idle_timeout, withdraw
from atoll.transport.object_server import Draft, written
from atoll.worker.arguments import default_site, require_joined, require_site
from atoll.worker.exchange.encode_update import AnswerFilters
from atoll.worker.log_lines import LOG, ensure_lines, told
from atoll.worker.session.channel import HttpChannel
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.session.session import Session
from atoll.worker.tasks.evaluate_models import Evaluate, Models, key_of, uploaded

# -- Tensors of the next task, pulled while a task is still worked on; matched by the id of the task.
#
# The server alone decides which task is next. Tensors that were pulled for a task that is over are dropped.


PAUSE_S = 1.0
"""Seconds after a request that failed; the worker's own requests find out what is wrong."""


@dataclass(eq=False)
class _Next:
    """A task with tensors on their way, or here; None if it has none, or if they did not come."""

    task: str
    stored: Future[Stored | None] = field(default_factory=Future)
    abort: threading.Event = field(default_factory=threading.Event)


class Ahead:
    """Asks for the next task in a thread, and pulls its tensors to disk.

    Args:
        connection: of the site.
        pull: pulls the tensors of a task into a file; the event ends it.
    """

    def __init__(self, connection: Session, pull: Callable[[tm.ObjectKey, threading.Event], Stored]) -> None:
        self._connection, self._pull = connection, pull
        self._news = threading.Condition()
        self._in_hand, self._working, self._closing = "", False, False
        self._next: _Next | None = None
        self._thread: threading.Thread | None = None

    def take(self, task: str) -> Stored | None:
        """Return the tensors of a task that has arrived, if they are or will be pulled; else None."""
        with self._news:
            found, self._next = self._next, None
            self._in_hand, self._working = task, False
        if found is None:
            return None
        if found.task != task:
            found.abort.set()
            return None
        return found.stored.result()

    def begin(self) -> None:
        """Look for the next task: work on this one begins."""
        with self._news:
            self._working = True
            self._news.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="atoll-ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Pull no more. Idempotent; a request that still waits for a task ends by itself."""
        with self._news:
            self._closing = True
            if self._next is not None:
                self._next.abort.set()
            self._next = None
            self._news.notify()

    def _main(self) -> None:
        http = self._connection.http
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closing or (self._working and self._next is None))
                if self._closing:
                    return
                request = tm.TaskRequest(wait_s=routes.LONG_POLL_S, besides=self._in_hand)
            try:
                reply = http.post(routes.TASKS, request, tm.TaskReply, timeout_s=routes.LONG_POLL_S + 10.0)
            except AtollError as error:
                LOG.debug("%s: cannot look for the next task: %s", self._connection.site, error)
                with self._news:
                    if isinstance(error, BadRequest):  # the server does not know this request
                        return
                    self._news.wait_for(lambda: self._closing, PAUSE_S)
                continue
            if reply.status == "finished":
                return
            if reply.task is not None:
                self._ahead_of(reply.task)

    def _ahead_of(self, message: tm.Task) -> None:
        with self._news:
            if self._closing or message.task == self._in_hand or self._next is not None:
                return  # it has arrived meanwhile, and its tensors are pulled there
            coming = self._next = _Next(message.task)
        stored = None
        try:
            if message.body.object is not None:
                stored = self._pull(message.body.object, coming.abort)
        except AtollError as error:
            LOG.debug("%s: task %r was not pulled ahead: %s", self._connection.site, message.name, error)
        finally:
            coming.stored.set_result(stored)


# -- One task of a site: its payload, and how it is answered.


@public_api
class Task:
    """One task of this site. The server sends it again until it is answered.

    Attributes:
        name: `train`, `validate`, `submit_model`, or one of the workflow's own.
        id: the same for all sites of a broadcast.
        payload: what the workflow sent; references in it are not resolved.
    """

    def __init__(self, connection: Session, message: tm.Task, warned: set[str], filters: AnswerFilters) -> None:
        self._warned = warned  # names of tasks with a warning in the log
        self._filters = filters
        self.name, self.id = message.name, message.task
        self.payload: Any = None
        self._connection, self._streamed = connection, message.streamed
        self._sizes = ChunkSizes(message.tensor_chunk_bytes, message.np_chunk_bytes)

    @public_api
    def answer(self, payload: Any = None) -> bool:
        """Answer with any nested dicts, lists and tuples of tensors, arrays and plain values.

        Returns:
            False if the task is over meanwhile: the answer is not used, and nothing of it is kept.

        Raises:
            UsageError: something in it cannot travel, or a filter failed; it is named, and nothing was sent.
            TransferError: the server answers, but takes no bytes of the tensors.
        """
        answer = self.written(pack(payload))
        del payload  # its memory is not needed while the answer is on its way
        return self.deliver(answer)

    def written(self, packed: Packed) -> tm.TaskAnswer | Draft:
        """Filter an answer and return it as it travels: in a message, or from disk."""
        with self._filters.behind(packed, self.name) as packed:
            way = way_of(self.name, packed, chunk_sizes(self._sizes), streamed=self._streamed, what="answer")
            if way.warning and self.name not in self._warned:
                self._warned.add(self.name)
                LOG.warning("%s: %s", self._connection.site, way.warning)
            if way.plain is not None:
                return tm.TaskAnswer(body=tm.Body(plain=way.plain))
            return written(packed, way.cut, None)

    def deliver(self, answer: tm.TaskAnswer | Draft) -> bool:
        """Send what `written` returned; upload a draft first, and close it. Return as `answer` does."""
        if isinstance(answer, tm.TaskAnswer):
            return self._send(answer)
        ref = uploaded(self._connection, answer, f"answer to {self.described}")
        taken = self._send(tm.TaskAnswer(body=tm.Body(object=key_of(ref))))
        if not taken:
            with contextlib.suppress(AtollError):  # the server removes it by itself
                withdraw(ref)
        return taken

    @public_api
    def fail(self, error: BaseException | str) -> bool:
        """Answer that this site cannot do it, and why.

        Returns:
            As `answer`.
        """
        return self._send(tm.TaskAnswer(error=told(error) or "it gave no reason"))

    @property
    def described(self) -> str:
        """Its name and the beginning of its id, for errors."""
        return f"task {self.name!r} ({self.id[:8]})"

    def _send(self, answer: tm.TaskAnswer) -> bool:
        connection, path = self._connection, routes.TASK_ANSWER.format(task=self.id)
        try:
            connection.patiently(lambda: connection.http.send(path, answer), None, f"answer task {self.name!r}")
            return True
        except (TicketClosed, Conflict, Gone) as error:
            LOG.warning("%s: the answer to task %r was not taken: %s", connection.site, self.name, error)
            return False


Handler = Callable[[Any], Any]
H = TypeVar("H", bound=Callable[..., Any])

SUBMIT, VALIDATE = "submit_model", "validate"

UNDELIVERED = (TransferError, UsageError, StoreError, BadRequest)
"""Why an answer is not sent though its handler returned one: a stream fails while it is read, tensors do not get
through, the disk of this site is full, or the server never keeps so much."""


OF_EVALUATIONS = -2
"""The number, in place of a fragment's, of the warning that a worker cannot evaluate while it trains."""


def say_evaluation_follows(connection: Session) -> None:
    """Warn a site with a script that evaluates only if it opens `atoll.tasks` after its loop."""
    if connection.evaluates:
        told = (
            f"the run ends with a cross-site evaluation that asks site {connection.site}, and a DiLoCo loop answers no "
            "tasks. Open atoll.tasks with worker.evaluates(function) after the loop in the same script, or leave the "
            "site out of the evaluation's sites: else the evaluation waits for it, and has no values of it."
        )
        LOG.warning("%s: %s", connection.site, told)
        connection.warn(OF_EVALUATIONS, [told])


@public_api
class Answers:
    """What scripts register at a worker, however it takes part, and how its tasks are answered with it.

    Args:
        session: of the site.
        filters: that its answers pass through.
        pulls_ahead: whether the tensors of the next task are pulled while one is worked on.
        local: returns the model that the site has trained last, from its file.
        folder: for models that are evaluated; by default that of temporary files.
    """

    _joined_by = "atoll.join"  # the call that takes part again after this worker has left

    def __init__(
        self,
        session: Session,
        filters: ByTask,
        *,
        pulls_ahead: bool = False,
        local: Callable[[], Packed] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._session, self._filters = session, AnswerFilters(filters, session.site)
        self._ahead = Ahead(session, self._stored) if pulls_ahead else None
        self._models = Models(session, self._filters, local, folder, self._ref_to)
        self._handlers: dict[str, Handler] = {}
        self._builtin: dict[str, Handler] = {}
        self._warned: set[str] = set()
        self._rounds_begin = False

    @property
    def site(self) -> str:
        """The site's name in the run."""
        return self._session.site

    # -- what scripts call

    @public_api
    def task(self, name: str) -> Callable[[H], H]:
        """Decorate the function that answers the tasks of a name: payload in, payload out.

        An error that it raises becomes the answer of the site; the worker goes on to the next task.
        """

        def decorate(handler: H) -> H:
            if name in self._handlers or (name == VALIDATE and name in self._builtin):
                raise UsageError(f"Task {name!r} has a handler already.", "Give each task one.")
            self._handlers[name] = handler
            return handler

        return decorate

    @public_api
    def evaluates(self, function: Evaluate | None = None, *, model: nn.Module | None = None) -> Any:
        """Register the function by which this site evaluates models, its own and others'; usable as a decorator.

        The site then also sends its own model to be evaluated elsewhere: `submits` says which.

        Args:
            function: takes the model and returns metrics: name → number.
            model: a module that each model is loaded into, in place, and that the function takes; not the one that
                `submits` returns. None: the function takes a `LazyState`, name → tensor on disk.

        Raises:
            UsageError: there is one already.
        """
        if function is None:
            return lambda decorated: self.evaluates(decorated, model=model)
        if self._evaluates:
            raise UsageError("Task 'validate' has a handler already.", "Register one function that evaluates.")
        self._models.filled = model
        self._builtin[VALIDATE] = functools.partial(self._models.evaluate, function, model)
        self._builtin.setdefault(SUBMIT, self._models.submit)
        return function

    def submits(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Say which model this site sends to the server, to be evaluated elsewhere; usable as a decorator.

        Args:
            function: returns a module, a mapping name → tensor, or a `LazyState`; None refuses. By default the site
                sends the model that it submitted last, as it was before filters and codec.
        """
        self._models.give = function
        self._builtin[SUBMIT] = self._models.submit
        return function

    def note(self, text: str) -> None:
        """Report what this site is doing: the status shows it, and it counts as progress of the site."""
        self._session.tell(state=text[:64])

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks of this site, each with its payload, until the last workflow has ended."""
        return self._tasks(rounds=False)

    @public_api
    def run(self) -> None:
        """Answer tasks with the handlers until the last workflow has ended."""
        self._require_evaluator()
        if not self._answers_any:
            raise UsageError("The worker has no handler.", 'Decorate a function with @worker.task("train") first.')
        self._serve(rounds=False)

    # -- how tasks are answered

    @property
    def _answers_any(self) -> bool:
        """Whether any task is answered: by the script's own handlers, or through `evaluates` or `submits`."""
        return bool(self._handlers or self._builtin)

    @property
    def _evaluates(self) -> bool:
        return VALIDATE in self._builtin or VALIDATE in self._handlers

    def _require_joined(self) -> None:
        """Refuse to go on with a worker that has left its run."""
        require_joined(self._session.has_left, self.site, self._joined_by)

    def _require_evaluator(self) -> None:
        """Refuse to begin if a cross-site evaluation will ask for a function that is not registered.

        Raises:
            UsageError: it is not registered.
        """
        if self._session.evaluates and not self._evaluates:
            raise UsageError(
                f"The run ends with a cross-site evaluation, and site {self.site} has no function that evaluates.",
                "Register one before the loop, with worker.evaluates(function); or leave the site out of the "
                "evaluation's sites.",
            )

    def _serve(self, *, rounds: bool) -> bool:
        """Answer tasks with the handlers.

        Args:
            rounds: whether this process takes part in rounds, too, and returns to them when they begin.

        Returns:
            Whether rounds begin; else the last workflow has ended.
        """
        for task in self._tasks(rounds=rounds):
            handler = self._handlers.get(task.name) or self._builtin.get(task.name)
            if handler is None:
                known = ", ".join(sorted({*self._handlers, *self._builtin})) or "none"
                LOG.error("%s: there is no handler for task %r, only for %s", self.site, task.name, known)
                task.fail(f"there is no handler for task {task.name!r}, only for {known}")
                continue
            try:
                packed = pack(handler(task.payload))  # an answer that cannot travel is an error of the handler
            except Exception as error:
                LOG.exception("%s: task %r failed", self.site, task.name)
                task.fail(error)
                continue
            task.payload = None  # its memory is not needed while the answer is on its way
            try:
                try:
                    answer = task.written(packed)
                finally:
                    del packed
                task.deliver(answer)
            except UNDELIVERED as error:
                LOG.error("%s: %s", self.site, said(error))
                task.fail(error)
        return self._rounds_begin

    def _tasks(self, *, rounds: bool) -> Iterator[Task]:
        """Yield the tasks of this site, each with its payload, until the last workflow has ended or rounds begin."""
        self._require_joined()
        session, lost, stalled = self._session, "", ""
        self._rounds_begin = False
        request = tm.TaskRequest(wait_s=routes.LONG_POLL_S, rounds=rounds)
        ask = functools.partial(
            session.http.post, routes.TASKS, request, tm.TaskReply, timeout_s=routes.LONG_POLL_S + 10.0
        )
        while True:
            session.tell(state="waiting for a task")
            reply = session.patiently(ask, None, "ask for the next task")
            if reply.status == "finished":
                LOG.info("%s: the workflow has ended", self.site)
                return
            if reply.status == "rounds":
                self._rounds_begin = True
                return
            if reply.task is None:
                continue
            task = Task(session, reply.task, self._warned, self._filters)
            try:
                task.payload = self._payload_of(reply.task)
            except StoreError as error:  # its own disk: the server is told, and does not send it again
                LOG.error("%s: the tensors of %s cannot be kept: %s", self.site, task.described, error)
                task.fail(error)
                continue
            except TRANSIENT as error:
                if isinstance(error, TransferStalled) and stalled == task.id:
                    task.fail(self._never_came(task, error))
                    continue
                stalled = task.id if isinstance(error, TransferStalled) else stalled
                LOG.warning("%s: task %r did not arrive, asking again: %s", self.site, task.name, error)
                continue
            except (Gone, BadRequest, PartCorrupt, TransferError) as error:
                if isinstance(error, Gone) and lost != task.id:
                    lost = task.id  # the task was closed meanwhile, and does not come again
                    continue
                task.fail(error)
                continue
            session.tell(state=f"task {task.name}"[:64])
            if self._ahead is not None:
                self._ahead.begin()
            yield task

    def _payload_of(self, message: tm.Task) -> Any:
        stored = self._ahead.take(message.task) if self._ahead is not None else None
        if stored is not None:
            return stored.tree()
        if message.body.object is None:
            return read_plain(message.body.plain or "")
        return fetch(self._ref_to(message.body.object), idle_timeout_s=self._idle_timeout_s())

    def _stored(self, key: tm.ObjectKey, abort: threading.Event) -> Stored:
        return fetch_stored(self._ref_to(key), idle_timeout_s=self._idle_timeout_s(), abort=abort)

    def _ref_to(self, key: tm.ObjectKey) -> TensorRef:
        http = self._session.http
        return TensorRef(
            http.host, http.port, http.secure is not None, key.object, key.secret, key.digest, key.expires_at
        )

    def _idle_timeout_s(self) -> float:
        return idle_timeout(None, self._session.info.idle_timeout_s)

    def _never_came(self, task: Task, why: TransferStalled) -> TransferStalled:
        """Return the error that names the task, the site and the server."""
        server = self._session.http.server
        error = TransferStalled(
            f"The tensors of {task.described} do not arrive at site {self.site} from {server}: {why.message}",
            why.remedy,
        )
        LOG.error("%s: %s", self.site, error)
        return error

    def _answer_no_more(self) -> None:
        """Pull nothing ahead any more. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()


@public_api
class TaskWorker(Answers):
    """A site that answers tasks; made by `atoll.tasks`. Use it as a context manager."""

    _joined_by = "atoll.tasks"

    @public_api
    def __enter__(self) -> TaskWorker:
        self._require_joined()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_interrupt_in_a_line(error)
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Deregister. Idempotent."""
        self._answer_no_more()
        self._session.leave(last_words(error))


@public_api
def tasks(
    server: str | None = None,
    site: str | None = None,
    *,
    labels: dict[str, str] | None = None,
    request_task_tensors: bool = True,
    filters: ByTask = (),
) -> TaskWorker:
    """Take part in a run that has a workflow.

    Args:
        server: address of the server; by default `ATOLL_SERVER`.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        labels: shown in status.
        request_task_tensors: whether to pull the tensors of a task after it has arrived. False: pull those of the next
            task ahead, to disk, while a task is still worked on. Payloads are the same.
        filters: applied in this order to every answer of this site before it leaves; or by the name of a task.

    Returns:
        The worker; a context manager that deregisters it.

    Raises:
        UsageError: no server is named, or something in `filters` is no filter.
        ServerUnreachable: the server does not answer. VersionSkew: it speaks another protocol.
    """
    ensure_lines()
    server = server_of(server)
    if not server:
        raise UsageError("Tasks come from a server, and no server is named.", "Give its address, or set ATOLL_SERVER.")
    for_tasks(filters)  # refused before anything is asked
    session = Session(HttpChannel(http_to(server)), require_site(site or default_site()), labels=labels)
    folder = Path(os.environ.get("ATOLL_DIR", ""))
    kept_in = folder if os.environ.get("ATOLL_DIR") and folder.is_dir() else None
    worker = TaskWorker(session, filters, pulls_ahead=not request_task_tensors, folder=kept_in)
    session.join()
    LOG.info("%s: takes part in %s at %s", session.site, session.info.name, session.http.server)
    return worker
