"""`atoll.tasks`: answer the tasks that a workflow at the server sends.

    with atoll.tasks("http://host:8512", site="clinic-a") as worker:

        @worker.task("train")
        def train(payload):
            return {"w": payload["w"] + 1}

        worker.run()                           # until the workflow has ended

        for task in worker.tasks():            # or, in a loop of your own
            task.answer({"w": task.payload["w"] + 1})

A process that is killed and started again gets its open task again. A server that is gone is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from atoll.errors import (
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
)
from atoll.filters.payloads import ByTask, said
from atoll.tensors.cuts import ChunkSizes
from atoll.tensors.objects import Stored
from atoll.tensors.payload import Packed, pack
from atoll.tensors.reference import TensorRef
from atoll.transport.publisher import Draft, written
from atoll.wire import routes
from atoll.wire import task_messages as tm
from atoll.wire.tasks import read_plain, way_of
from atoll.worker.ahead import Ahead
from atoll.worker.border import border
from atoll.worker.connection import START_RETRIES, Connection, NetworkLost, default_site, require_site
from atoll.worker.fetch import fetch, fetch_stored
from atoll.worker.filtering import AnswerFilters
from atoll.worker.publish import EXPIRES_S, send, withdraw
from atoll.worker.reporting import LOG, ensure_lines, told
from atoll.worker.transfer import chunk_sizes, idle_timeout

Handler = Callable[[Any], Any]

UNDELIVERED = (TransferError, UsageError, StoreError, BadRequest)
"""Why an answer is not sent though its handler gave one: a stream that fails while it is read, tensors that do not get
through, a disk of this site that takes none, a server that would never keep so much."""

STALLS = 2
"""Times that the tensors of a task may stand still before they are given up; the first one may pass by itself."""


class Task:
    """One task of this site. It is given again until it is answered.

    Attributes:
        name: `train`, `validate`, `submit_model`, or one of the workflow's own.
        id: the same for all sites of a broadcast.
        payload: as the workflow sent it; references in it are not followed.
    """

    def __init__(self, connection: Connection, message: tm.Task, warned: set[str], filters: AnswerFilters) -> None:
        self._warned = warned  # of which names of tasks the user has been warned
        self._filters = filters
        self.name, self.id = message.name, message.task
        self.payload: Any = None
        self._connection, self._streamed = connection, message.streamed
        self._sizes = ChunkSizes(message.tensor_chunk_bytes, message.np_chunk_bytes)

    @border
    def answer(self, payload: Any = None) -> bool:
        """Answer with any nested dicts, lists and tuples of tensors, arrays and plain values.

        Returns:
            False where the task is over meanwhile: the answer is not used, and nothing of it is kept.

        Raises:
            UsageError: something in it cannot travel, or a filter failed; it is named, and nothing was sent.
            TransferError: the server answers, but takes no byte of the tensors.
        """
        answer = self._written(pack(payload))
        del payload  # its memory is not needed while the answer is on its way
        return self._deliver(answer)

    def _written(self, packed: Packed) -> tm.TaskAnswer | Draft:
        """An answer as it travels, behind the filters: in a message, or from disk."""
        with self._filters.behind(packed, self.name) as packed:
            way = way_of(self.name, packed, chunk_sizes(self._sizes), streamed=self._streamed, what="answer")
            if way.warning and self.name not in self._warned:
                self._warned.add(self.name)
                LOG.warning("%s: %s", self._connection.site, way.warning)
            if way.plain is not None:
                return tm.TaskAnswer(body=tm.Body(plain=way.plain))
            return written(packed, way.cut, None)

    def _deliver(self, answer: tm.TaskAnswer | Draft) -> bool:
        if isinstance(answer, tm.TaskAnswer):
            return self._send(answer)
        ref = self._upload(answer)
        key = tm.ObjectKey(object=ref.object, secret=ref.secret, digest=ref.digest, expires_at=ref.expires_at)
        taken = self._send(tm.TaskAnswer(body=tm.Body(object=key)))
        if not taken:
            with contextlib.suppress(AtollError):  # the server removes it by itself
                withdraw(ref)
        return taken

    @border
    def fail(self, error: BaseException | str) -> bool:
        """Answer that this site cannot do it; the workflow is told why.

        Returns:
            As `answer`.
        """
        return self._send(tm.TaskAnswer(error=told(error) or "it gave no reason"))

    @property
    def described(self) -> str:
        """Its name and the beginning of its id, as errors say it."""
        return f"task {self.name!r} ({self.id[:8]})"

    def _upload(self, draft: Draft) -> TensorRef:
        connection, stalls = self._connection, 0
        server = connection.http.server
        idle_timeout_s = idle_timeout(None, connection.info.idle_timeout_s)

        def upload() -> TensorRef:
            nonlocal stalls
            try:
                return send(draft, server, expires_s=EXPIRES_S, idle_timeout_s=idle_timeout_s)
            except TransferStalled as error:
                stalls += 1
                if stalls < STALLS:
                    raise
                raise TransferError(
                    f"The tensors of site {connection.site}'s answer to {self.described} do not arrive at {server}: "
                    f"{error.message}",
                    error.remedy,
                ) from error

        try:
            return connection.patiently(upload, None, f"send the answer to task {self.name!r}")
        finally:
            draft.close()

    def _send(self, answer: tm.TaskAnswer) -> bool:
        connection, path = self._connection, routes.TASK_ANSWER.format(task=self.id)
        try:
            connection.patiently(lambda: connection.http.send(path, answer), None, f"answer task {self.name!r}")
            return True
        except (TicketClosed, Conflict, Gone) as error:
            LOG.warning("%s: the answer to task %r was not taken: %s", connection.site, self.name, error)
            return False


class TaskWorker:
    """A site that answers tasks; made by `atoll.tasks`. Use it as a context manager."""

    def __init__(
        self,
        server: str,
        site: str,
        labels: dict[str, str] | None,
        request_task_tensors: bool,
        filters: ByTask,
    ) -> None:
        self._filters = AnswerFilters(filters, site)
        self._connection = Connection(server, site, labels=labels, max_retries=START_RETRIES)
        self._ahead = None if request_task_tensors else Ahead(self._connection, self._stored)
        self._handlers: dict[str, Handler] = {}
        self._warned: set[str] = set()
        self._connection.join(START_RETRIES)
        LOG.info("%s: takes part in %s at %s", site, self._connection.info.name, self._connection.http.server)

    @property
    def site(self) -> str:
        """Its name."""
        return self._connection.site

    def task(self, name: str) -> Callable[[Handler], Handler]:
        """Decorate the function that answers the tasks of a name: payload in, payload out.

        What it raises is the site's answer; the worker goes on to the next task.
        """

        def decorate(handler: Handler) -> Handler:
            if name in self._handlers:
                raise UsageError(f"Task {name!r} has a handler already.", "Give each task one.")
            self._handlers[name] = handler
            return handler

        return decorate

    @border
    def run(self) -> None:
        """Answer tasks with the handlers until the workflow has ended."""
        if not self._handlers:
            raise UsageError("The worker has no handler.", 'Decorate a function with @worker.task("train") first.')
        for task in self.tasks():
            handler = self._handlers.get(task.name)
            if handler is None:
                known = ", ".join(sorted(self._handlers))
                LOG.error("%s: there is no handler for task %r, only for %s", self.site, task.name, known)
                task.fail(f"there is no handler for task {task.name!r}, only for {known}")
                continue
            try:
                packed = pack(handler(task.payload))  # what cannot travel is the handler's error, too
            except Exception as error:
                LOG.exception("%s: task %r failed", self.site, task.name)
                task.fail(error)
                continue
            task.payload = None  # given back while the answer is on its way
            try:
                try:
                    answer = task._written(packed)
                finally:
                    del packed
                task._deliver(answer)
            except UNDELIVERED as error:
                LOG.error("%s: %s", self.site, said(error))
                task.fail(error)

    def tasks(self) -> Iterator[Task]:
        """The tasks of this site as they come, each with its payload; ends with the workflow."""
        connection, lost, stalled = self._connection, "", ""
        request = tm.TaskRequest(wait_s=routes.LONG_POLL_S)
        ask = functools.partial(
            connection.http.post, routes.TASKS, request, tm.TaskReply, timeout_s=routes.LONG_POLL_S + 10.0
        )
        while True:
            self._doing("waiting for a task")
            reply = connection.patiently(ask, None, "ask for the next task")
            if reply.status == "finished":
                LOG.info("%s: the workflow has ended", self.site)
                return
            if reply.task is None:
                continue
            task = Task(connection, reply.task, self._warned, self._filters)
            try:
                task.payload = self._payload_of(reply.task)
            except StoreError as error:  # before what may pass: of a full disk of its own a site tells
                LOG.error("%s: the tensors of %s cannot be kept: %s", self.site, task.described, error)
                task.fail(error)
                continue
            except NetworkLost as error:
                if isinstance(error, TransferStalled) and stalled == task.id:
                    task.fail(self._never_came(task, error))
                    continue
                stalled = task.id if isinstance(error, TransferStalled) else stalled
                LOG.warning("%s: task %r did not arrive, asking again: %s", self.site, task.name, error)
                continue
            except (Gone, BadRequest, PartCorrupt, TransferError) as error:
                if isinstance(error, Gone) and lost != task.id:
                    lost = task.id  # it was closed meanwhile, and is not given again
                    continue
                task.fail(error)
                continue
            self._doing(f"task {task.name}"[:64])
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
        http = self._connection.http
        return TensorRef(
            http.host, http.port, http.secure is not None, key.object, key.secret, key.digest, key.expires_at
        )

    def _idle_timeout_s(self) -> float:
        return idle_timeout(None, self._connection.info.idle_timeout_s)

    def _never_came(self, task: Task, why: TransferStalled) -> TransferStalled:
        """Names who did not send what."""
        server = self._connection.http.server
        error = TransferStalled(
            f"The tensors of {task.described} do not arrive at site {self.site} from {server}: {why.message}",
            why.remedy,
        )
        LOG.error("%s: %s", self.site, error)
        return error

    def _doing(self, state: str) -> None:
        self._connection.heartbeat = self._connection.heartbeat.model_copy(update={"state": state})

    def __enter__(self) -> TaskWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Deregister. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()
        self._connection.leave(f"{type(error).__name__}: {error}" if error else None)


@border
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
        request_task_tensors: whether a task's tensors are asked for once it has arrived. False: those of the next one
            are pulled ahead, to disk, while a task is still worked on. What a task is given is the same.
        filters: that every answer of this site passes through, in this order, before any byte of it leaves; or by the
            name of a task.

    Returns:
        The worker; a context manager that deregisters it.

    Raises:
        UsageError: there is no address: without a server nobody sends tasks; or a filter is none.
        ServerUnreachable: nobody answers. VersionSkew: the two sides speak different protocols.
    """
    ensure_lines()
    server = server or os.environ.get("ATOLL_SERVER")
    if not server:
        raise UsageError("Tasks come from a server, and none is named.", "Give its address, or set ATOLL_SERVER.")
    return TaskWorker(server, require_site(site or default_site()), labels, request_task_tensors, filters)
