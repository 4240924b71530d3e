"""`atoll.tasks`: answer the tasks that a workflow sends. A workflow is the user's own code at the server.

    with atoll.tasks("http://host:8512", site="clinic-a") as worker:

        @worker.task("train")
        def train(payload):
            return {"w": payload["w"] + 1}

        worker.run()                           # until the workflow has ended

        for task in worker.tasks():            # or, in a loop of your own
            task.answer({"w": task.payload["w"] + 1})

If the process is killed and started again, the server sends the unanswered task again. While the server does not
answer, the worker waits.

This file contains the registration of handlers, the loop that calls them, and the prefetching of payloads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from torch import nn

from atoll.blobs.object_file import Stored
from atoll.blobs.ways_to_send import ChunkSizes, read_plain, way_of
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
from atoll.filters.base import ByTask, for_tasks, with_cause
from atoll.posix import require_writable_folder
from atoll.protocol import messages, routes
from atoll.protocol import task_messages as tm
from atoll.runtime import ensure_lines
from atoll.tensors.payload import Packed, pack
from atoll.transport.http_client import http_to, server_of
from atoll.transport.object_client import chunk_sizes, fetch, fetch_stored, idle_timeout, withdraw
from atoll.transport.object_server import UnpublishedObject, outgoing
from atoll.worker.arguments import require_joined, site_of, weight_of
from atoll.worker.exchange.dry_run import DryRunOver, write_answer
from atoll.worker.exchange.encode_update import AnswerFilters
from atoll.worker.exchange.participation import say_proxy, warn_of_overruled
from atoll.worker.log_lines import LOG, error_text
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.session.ranks import keep_ranks_waiting
from atoll.worker.session.session import OF_EVALUATIONS, Session
from atoll.worker.tasks.evaluate_models import Evaluate, Models, key_of, reference_to, uploaded

# -- Prefetch: pull the tensors of the next task while the handler of the current task still runs.
#
# The server alone decides which task is next. If it sends another task, the prefetched tensors are dropped.


PAUSE_S = 1.0
"""Pause after a prefetch request that failed. The error is not reported, because the worker's next request shows it."""


@dataclass(eq=False)
class _Next:
    """The next task. Its tensors, if it has any, are downloaded while the site still works on the previous task.

    Attributes:
        task: the task's id.
        stored: a future with the task's tensors, done when the tensors are on disk. The result is None if there are
            no tensors, or if the download failed.
        abort: set this event to end the download.
    """

    task: str
    stored: Future[Stored | None] = field(default_factory=Future)
    abort: threading.Event = field(default_factory=threading.Event)


class TaskPrefetcher:
    """Asks the server for the next task in a thread, and downloads the task's tensors to disk.

    Args:
        connection: the site's session with the server.
    """

    def __init__(self, connection: Session) -> None:
        self._connection = connection
        self._news = threading.Condition()
        self._in_hand, self._working, self._closing = "", False, False
        self._next: _Next | None = None
        self._thread: threading.Thread | None = None

    def take(self, task: str) -> Stored | None:
        """Return the prefetched tensors of a task; None if there are none. If they are still arriving, wait for them.

        Args:
            task: the id of the task that the server has sent.
        """
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
        """Start to prefetch the next task. Call this when the work on the current task begins."""
        with self._news:
            self._working = True
            self._news.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="atoll-ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop prefetching. Idempotent. If a request is waiting for the server, the thread ends after the answer."""
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
                request = tm.TaskRequest(wait_s=http.poll_s, besides=self._in_hand)
            asked_s = time.monotonic()
            try:
                reply = http.post(routes.TASKS, request, tm.TaskReply)
            except AtollError as error:
                LOG.debug("%s: cannot ask for the next task: %s", self._connection.site, error)
                self._pause()
                continue
            if reply.status == "finished":
                return
            is_new = reply.task is not None and self._ahead_of(reply.task)
            if not is_new and time.monotonic() - asked_s < PAUSE_S:  # the server was asked to wait longer
                self._pause()

    def _pause(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._closing, PAUSE_S)

    def _ahead_of(self, message: tm.TaskMessage) -> bool:
        """Download the tensors of a task; return False if it is the one that the worker itself has now."""
        with self._news:
            if self._closing or message.task == self._in_hand or self._next is not None:
                return False
            coming = self._next = _Next(message.task)
        stored = None
        try:
            if message.body.object is not None:
                ref, info = reference_to(self._connection, message.body.object), self._connection.info
                timeout_s = idle_timeout(None, info.idle_timeout_s)
                stored = fetch_stored(ref, idle_timeout_s=timeout_s, abort=coming.abort)
        except AtollError as error:
            LOG.debug("%s: task %r was not downloaded ahead of time: %s", self._connection.site, message.name, error)
        finally:
            coming.stored.set_result(stored)
        return True


# -- One task of a site


@public_api
class Task:
    """One task for this site. Until the site has answered it, the server sends it again after an interruption.

    Attributes:
        name: name of the task: `train`, `validate`, `submit_model`, or a name that the workflow chose.
        id: id of the task; the same for all sites if the workflow sent the task to several.
        payload: the payload that the workflow sent. If it contains a `TensorRef` (a reference to tensors at another
            address), these tensors are not downloaded.
    """

    def __init__(self, connection: Session, message: tm.TaskMessage, warned: set[str], filters: AnswerFilters) -> None:
        self._warned = warned  # names of tasks that a warning was logged for
        self._filters = filters
        self.name, self.id = message.name, message.task
        self.payload: Any = None
        self._connection, self._streamed = connection, message.streamed
        self._sizes = ChunkSizes(message.tensor_chunk_bytes, message.np_chunk_bytes)

    @public_api
    def answer(self, payload: Any = None) -> bool:
        """Send an answer to the server.

        Args:
            payload: any nesting of dicts, lists and tuples with tensors, arrays and plain values.

        Returns:
            Whether the server accepted the answer; False if the workflow no longer waits for it.

        Raises:
            UsageError: a value in the payload cannot be sent, or a filter failed. Nothing was sent.
            TransferError: the server answers, but the tensors cannot be uploaded.
        """
        answer = self.written(pack(payload))
        del payload  # free its memory during the upload
        return self.deliver(answer)

    def written(self, packed: Packed) -> tm.TaskAnswer | UnpublishedObject:
        """Apply the filters to an answer. Return the message to send, or, for large answers, a draft to upload."""
        with self._filters.applied(packed, self.name) as packed:
            way = way_of(self.name, packed, chunk_sizes(self._sizes), streamed=self._streamed, what="answer")
            if way.warning and self.name not in self._warned:
                self._warned.add(self.name)
                LOG.warning("%s: an answer is sent in another way: %s", self._connection.site, way.warning)
            self._connection.way_out.clear_answer(self.id, self.name)
            if way.plain is not None:
                return tm.TaskAnswer(body=tm.TaskBody(plain=way.plain))
            return outgoing(packed, way.cut, None, f"The answer to {self.described}")

    def deliver(self, answer: tm.TaskAnswer | UnpublishedObject) -> bool:
        """Send an answer that `written` returned; upload a draft first. Return whether the server accepted it."""
        if (folder := self._connection.way_out.dry_run) is not None:
            if isinstance(answer, tm.TaskAnswer):
                sent = answer.model_dump()
            else:
                sent = {"bytes": answer.manifest.nbytes, "digest": answer.manifest.id}
            write_answer(folder, self.name, sent)
            raise DryRunOver
        if isinstance(answer, tm.TaskAnswer):
            return self._send(answer)
        ref = uploaded(self._connection, answer, f"answer to {self.described}")
        is_taken = self._send(tm.TaskAnswer(body=tm.TaskBody(object=key_of(ref))))
        if not is_taken:
            with contextlib.suppress(AtollError):  # else the server removes it later
                withdraw(ref)
        return is_taken

    @public_api
    def fail(self, error: BaseException | str) -> bool:
        """Answer that this site could not do the task.

        Args:
            error: the reason, which the workflow gets as text.

        Returns:
            Whether the server accepted the answer; False if the workflow no longer waits for it.
        """
        return self._send(tm.TaskAnswer(error=error_text(error) or "no reason was given"))

    def may_be_answered(self) -> bool:
        """Return whether the site's policy lets answers to this task leave. If not, answer that the task failed."""
        why = self._connection.way_out.why_no_task(self.name)
        if why:
            LOG.error("%s: %s", self._connection.site, why)
            self.fail(why)
        return not why

    @property
    def described(self) -> str:
        """The task's name and the beginning of its id, for error messages."""
        return f"task {self.name!r} ({self.id[:8]})"

    def _send(self, answer: tm.TaskAnswer) -> bool:
        connection, path = self._connection, routes.TASK_ANSWER.format(task=self.id)
        try:
            connection.patiently(lambda: connection.http.send(path, answer), None, f"answer task {self.name!r}")
            connection.progress.made("task", self.id)
            return True
        except (TicketClosed, Conflict, Gone) as error:
            LOG.warning("%s: the server refused the answer to task %r: %s", connection.site, self.name, error)
            return False


TaskHandler = Callable[[Any], Any]
H = TypeVar("H", bound=Callable[..., Any])

SUBMIT, VALIDATE = "submit_model", "validate"

UNDELIVERED = (TransferError, UsageError, StoreError, BadRequest)
"""Errors because of which an answer cannot be sent: a filter or a stream in it fails, tensors cannot be uploaded, this
site's disk is full, or the answer is too large for the server. The site then answers that the task has failed."""


def say_evaluation_follows(connection: Session) -> None:
    """Warn if the run ends with an evaluation at this site: a DiLoCo loop cannot answer the evaluation's tasks.

    The warning says that the script has to open `atoll.tasks` after the loop.
    """
    if connection.evaluates:
        warning = (
            f"the run ends with a cross-site evaluation that asks site {connection.site}, but a DiLoCo loop "
            "does not answer tasks. After the loop, open atoll.tasks with worker.evaluates(function) in the "
            "same script. Or leave the site out of the evaluation's sites; else the evaluation waits for the "
            "site and gets no values from it."
        )
        LOG.warning("%s: a later evaluation needs a handler: %s", connection.site, warning)
        connection.warn(OF_EVALUATIONS, [warning])


@public_api
class TaskWorker:
    """A worker that answers tasks; `atoll.tasks` returns it. Use it as a context manager.

    The `Worker` that `atoll.join` returns can do the same, and also takes part in rounds of training.

    Args:
        site: the site's name.
        session: the site's session; None: no server sends tasks, so the handlers are never called.
        filters: filters that are applied to the site's answers.
        pulls_ahead: whether to download the tensors of the next task while a handler runs.
        local: returns the model that the site submitted last, read from a file; None: this process trains no model.
        folder: the folder in which models are stored for evaluation; by default the folder for temporary files.
        load_kept: loads the tensors that the site keeps for itself into a module; None: there are none.

    Attributes:
        models: what answers the tasks of a cross-site evaluation. Integrations use it.
    """

    _joined_by = "atoll.tasks"  # the call that takes part again after this worker has left

    def __init__(
        self,
        site: str,
        session: Session | None = None,
        filters: ByTask = (),
        *,
        pulls_ahead: bool = False,
        local: Callable[[], Packed] | None = None,
        folder: Path | None = None,
        load_kept: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._site, self._session, self._filters = site, session, AnswerFilters(filters, site)
        self._process = os.getpid()  # a fork has not joined, so it does not leave
        self._ahead = TaskPrefetcher(session) if pulls_ahead and session is not None else None
        self.models = Models(site, session, self._filters, local, folder, load_kept)
        self._handlers: dict[str, TaskHandler] = {}
        self._builtin: dict[str, TaskHandler] = {}
        self._warned: set[str] = set()
        self._rounds_begin = False

    @property
    def site(self) -> str:
        """The site's name in the run."""
        return self._site

    @property
    def info(self) -> messages.RunInfo | None:
        """The description of the run; None without a server. Integrations use it."""
        return self._session.info if self._session is not None else None

    @public_api
    def __enter__(self) -> Self:
        self._require_joined()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_interrupt_in_a_line(error)
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run. Idempotent. In a fork of the process that joined, do nothing.

        Args:
            error: the error that ended the script, if any; the server gets its text.
        """
        if self._process != os.getpid():
            return
        self._answer_no_more()
        if self._session is not None:
            self._session.leave(last_words(error))

    # -- what scripts call

    @public_api
    def task(self, name: str) -> Callable[[H], H]:
        """Return a decorator that registers a function as the handler of tasks with this name.

        The function takes the task's payload and returns the answer's payload. If the function raises an error, the
        site sends this error as its answer, and the worker continues with the next task.

        Raises:
            UsageError: there is already a handler for this name.
        """

        def decorate(handler: H) -> H:
            if name in self._handlers or (name == VALIDATE and name in self._builtin):
                raise UsageError(f"Task {name!r} already has a handler.", "Register one handler for each task.")
            self._handlers[name] = handler
            return handler

        return decorate

    @public_api
    def evaluates(
        self, function: Evaluate | None = None, *, model: nn.Module | None = None, weight: float | None = None
    ) -> Any:
        """Register the function that evaluates models on this site's data. Usable as a decorator.

        If the run asks for the site's own model, the site also sends its model, so that other sites can evaluate it. By
        default, this is the model that the site submitted last. To send another model, use `submits`.

        Args:
            function: takes a model and returns metrics: name → number.
            model: a module into which each model is loaded, in place, before the function gets this module. It must not
                be the module that `submits` returns. None: the function gets a `LazyState`, a mapping name → tensor on
                disk.
            weight: number of samples that the metrics are a mean of, such as `len(data)`: the mean over the sites
                counts each by its weight.

        Raises:
            UsageError: a function is registered already, or the weight is not a number of at least 0.
        """
        if function is None:
            return lambda decorated: self.evaluates(decorated, model=model, weight=weight)
        weight = None if weight is None else weight_of(weight)
        if self._evaluates:
            raise UsageError(
                "A function for task 'validate' is already registered.", "Call worker.evaluates only once."
            )
        self.models.filled = model
        self._builtin[VALIDATE] = functools.partial(self.models.evaluate, function, model, weight)
        self._builtin.setdefault(SUBMIT, self.models.submit)
        return function

    def submits(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Register the function that returns this site's model, for evaluation at other sites. Usable as a decorator.

        Without such a function, the site sends the model that it submitted last, as it was before encoding. A site with
        filters must register a function.

        Args:
            function: returns a module, a mapping name → tensor, or a `LazyState`.
        """
        self.models.give = function
        self._builtin[SUBMIT] = self.models.submit
        return function

    def note(self, text: str) -> None:
        """Report what this site is doing. The server's status shows the text, and the report counts as progress."""
        if self._session is not None:
            self._session.tell(state=text[:64])

    def tasks(self) -> Iterator[Task]:
        """Yield each task of this site with its payload, until the last workflow has ended."""
        return self._tasks(rounds=False)

    @public_api
    def run(self) -> None:
        """Answer tasks with the registered handlers until the last workflow has ended.

        Raises:
            UsageError: no handler is registered; or the run evaluates models at this site, but `evaluates` was not
                called.
        """
        self._require_evaluator()
        if not self._answers_any:
            raise UsageError(
                "The worker has no task handler.",
                'Decorate a function with @worker.task("train") before calling run().',
            )
        self._serve(rounds=False)

    # -- how tasks are answered

    @property
    def _answers_any(self) -> bool:
        """Whether any handler is registered, by `task`, `evaluates` or `submits`."""
        return bool(self._handlers or self._builtin)

    @property
    def _evaluates(self) -> bool:
        return VALIDATE in self._builtin or VALIDATE in self._handlers

    def _require_joined(self) -> None:
        """Raise an error if this worker has left its run, or if this process is a fork of the one that joined."""
        process = self._process if self._session is not None else None
        require_joined(self._session is not None and self._session.has_left, self.site, self._joined_by, process)

    def _require_evaluator(self) -> None:
        """Raise an error if the run evaluates models at this site, but no function for evaluation is registered.

        Raises:
            UsageError: no such function is registered.
        """
        if self._session is not None and self._session.evaluates and not self._evaluates:
            raise UsageError(
                f"The run ends with a cross-site evaluation, but site {self.site} has no function to evaluate with.",
                "Register one with worker.evaluates(function) before the loop, or leave this site out of the "
                "evaluation.",
            )

    def _serve(self, *, rounds: bool) -> bool:
        """Answer tasks with the handlers until rounds of training begin, or until the last workflow has ended.

        Args:
            rounds: whether to stop when rounds begin. If False, go on until the last workflow has ended.

        Returns:
            Whether rounds begin; False if the last workflow has ended.
        """
        for task in self._tasks(rounds=rounds):
            self._handle(task)
        return self._rounds_begin

    def _handle(self, task: Task) -> None:
        handler = self._handlers.get(task.name) or self._builtin.get(task.name)
        if handler is None:
            known = ", ".join(sorted({*self._handlers, *self._builtin})) or "none"
            LOG.error("%s: this site has no handler for task %r, only for: %s", self.site, task.name, known)
            task.fail(f"this site has no handler for task {task.name!r}, only for: {known}")
            return
        self.answer_with(task, handler)

    def answer_with(self, task: Task, handler: TaskHandler) -> None:
        """Answer a task with what a function returns for its payload. Integrations call this.

        If the function raises an error, or its answer cannot be sent, answer that the task has failed.
        """
        try:
            answer = handler(task.payload)
        except Exception as error:
            LOG.exception("%s: task %r failed", self.site, task.name)
            task.fail(error)
            return
        try:
            packed = pack(answer)
        except Exception as error:
            is_told = isinstance(error, UsageError)  # names the value that cannot be sent
            LOG.error("%s: the answer to task %r cannot be sent: %s", self.site, task.name, error, exc_info=not is_told)
            task.fail(error)
            return
        del answer
        task.payload = None  # free its memory during the upload
        try:
            try:
                answer = task.written(packed)
            finally:
                del packed
            task.deliver(answer)
        except UNDELIVERED as error:
            LOG.error("%s: the answer could not be sent: %s", self.site, with_cause(error))
            task.fail(error)

    def _tasks(self, *, rounds: bool) -> Iterator[Task]:
        """Yield each task of this site with its payload, until the last workflow has ended or rounds of training begin.

        Args:
            rounds: whether to stop when rounds begin.
        """
        self._require_joined()
        self._rounds_begin = False
        if self._session is None:
            return
        session, lost, stalled = self._session, "", ""
        request = tm.TaskRequest(wait_s=session.http.poll_s, rounds=rounds)
        ask = functools.partial(session.http.post, routes.TASKS, request, tm.TaskReply)
        while True:
            session.tell(state="waiting for a task")
            keep_ranks_waiting()
            asked_s = time.monotonic()
            reply = session.patiently(ask, None, "ask for the next task")
            session.pace(reply.status in ("wait", "rounds"), asked_s, request.wait_s)
            if reply.status == "finished":
                LOG.info("%s: the workflow has ended", self.site)
                return
            if reply.status == "rounds":
                self._rounds_begin = True
                return
            if reply.task is None or not (task := self._task_of(session, reply.task)).may_be_answered():
                continue
            try:
                task.payload = self._payload_of(session, reply.task)
            except StoreError as error:  # this site's disk: fail the task, so that it is not sent again
                LOG.error("%s: the tensors of %s cannot be stored on disk: %s", self.site, task.described, error)
                task.fail(error)
                continue
            except TRANSIENT as error:
                if isinstance(error, TransferStalled) and stalled == task.id:
                    task.fail(never_came(session, task, error))
                    continue
                stalled = task.id if isinstance(error, TransferStalled) else stalled
                LOG.warning("%s: the tensors of task %r did not arrive; retrying: %s", self.site, task.name, error)
                continue
            except (Gone, BadRequest, PartCorrupt, TransferError) as error:
                body = reply.task.body.object
                if isinstance(error, Gone) and body is not None and lost != body.object:
                    lost = body.object  # probably the task is over, or the server restarted; if this comes again, fail
                    continue
                task.fail(error)
                continue
            session.tell(state=f"task {task.name}"[:64])
            if self._ahead is not None:
                self._ahead.begin()
            yield task

    def _task_of(self, session: Session, message: tm.TaskMessage) -> Task:
        return Task(session, message, self._warned, self._filters)

    def _payload_of(self, session: Session, message: tm.TaskMessage) -> Any:
        stored = self._ahead.take(message.task) if self._ahead is not None else None
        if stored is not None:
            return stored.tree()
        if message.body.object is None:
            return read_plain(message.body.plain or "")
        ref = reference_to(session, message.body.object)
        return fetch(ref, idle_timeout_s=idle_timeout(None, session.info.idle_timeout_s))

    def _answer_no_more(self) -> None:
        """Stop prefetching. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()


def never_came(session: Session, task: Task, why: TransferStalled) -> TransferStalled:
    """Log and return the error of a task for which two attempts to download the tensors have failed."""
    server = session.http.server
    error = TransferStalled(
        f"The tensors of {task.described} cannot be downloaded from {server} to site {session.site}: {why.message}",
        why.remedy,
    )
    LOG.error("%s: a task failed: %s", session.site, error)
    return error


@public_api
def tasks(
    server: str | None = None,
    site: str | None = None,
    *,
    labels: dict[str, str] | None = None,
    request_task_tensors: bool = True,
    filters: ByTask = (),
    folder: Path | str | None = None,
) -> TaskWorker:
    """Join a run as a worker that answers the tasks of the run's workflows.

    Args:
        server: address of the server; by default `ATOLL_SERVER`.
        site: this worker's name; by default `ATOLL_SITE`, else made from host and process.
        labels: labels of this worker, shown in the server's status.
        request_task_tensors: True: download a task's tensors when the task arrives. False: while a handler runs,
            already download the tensors of the next task to disk. The payloads are the same.
        filters: filters that are applied to every answer of this site, in this order, before it is sent; or a mapping
            task name → filters.
        folder: the folder for models that this site evaluates; by default `ATOLL_DIR`, else the folder for temporary
            files. It is made if it does not exist.

    Returns:
        The worker. Use it as a context manager, which leaves the run at the end.

    Raises:
        UsageError: no server address is given or set, or an entry of `filters` is not a filter.
        ServerLost: the server did not answer within ATOLL_GIVE_UP_S, by default a day.
        PeerError: a web server that is not Atoll answers at the server's address.
        ServerUnreachable: the server's certificate is not accepted, or the address is https but the server has no TLS.
        VersionSkew: server and worker use different versions of the protocol.
        StoreError: `folder` cannot be made or written.
    """
    ensure_lines()
    server = server_of(server)
    if not server:
        raise UsageError(
            "atoll.tasks has no server to get tasks from.", "Pass the server's address, or set ATOLL_SERVER."
        )
    for_tasks(filters)  # check the filters before any request
    site = site_of(site, server)
    warn_of_overruled(server, site)
    kept_in = _folder_for_models(folder)
    http = http_to(server, site=site)
    say_proxy(http, site)
    session = Session(http, site, labels=labels)
    worker = TaskWorker(site, session, filters, pulls_ahead=not request_task_tensors, folder=kept_in)
    session.join()
    LOG.info("%s: takes part in run %s at %s", session.site, session.info.name, session.http.server)
    return worker


def _folder_for_models(given: Path | str | None) -> Path | None:
    """Return the folder in which models are stored for evaluation; None: the folder for temporary files.

    Raises:
        StoreError: the given folder cannot be made or written.
    """
    if given is not None:
        require_writable_folder(Path(given), "Give a folder that this user may write.")
        return Path(given)
    of_site = os.environ.get("ATOLL_DIR", "")
    return Path(of_site) if of_site and Path(of_site).is_dir() else None
