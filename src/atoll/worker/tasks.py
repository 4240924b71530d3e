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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from atoll.errors import AtollError, BadRequest, Conflict, Gone, PartCorrupt, TicketClosed, UsageError
from atoll.tensors.cuts import ChunkSizes
from atoll.tensors.payload import pack
from atoll.tensors.reference import TensorRef
from atoll.transport.publisher import Draft, written
from atoll.wire import routes
from atoll.wire import task_messages as tm
from atoll.wire.tasks import read_plain, way_of
from atoll.worker.border import border
from atoll.worker.connection import START_RETRIES, Connection, NetworkLost, default_site, require_site
from atoll.worker.fetch import fetch
from atoll.worker.publish import EXPIRES_S, send, withdraw
from atoll.worker.reporting import LOG
from atoll.worker.transfer import chunk_sizes, idle_timeout

Handler = Callable[[Any], Any]

ERROR_CHARS = 2000
"""The most of an error that travels."""


class Task:
    """One task of this site. It is given again until it is answered.

    Attributes:
        name: `train`, `validate`, `submit_model`, or one of the workflow's own.
        id: the same for all sites of a broadcast.
        payload: as the workflow sent it; references in it are not followed.
    """

    def __init__(self, connection: Connection, message: tm.Task, payload: Any) -> None:
        self.name, self.id, self.payload = message.name, message.task, payload
        self._connection, self._streamed = connection, message.streamed
        self._sizes = ChunkSizes(message.tensor_chunk_bytes, message.np_chunk_bytes)

    @border
    def answer(self, payload: Any = None) -> bool:
        """Answer with any nested dicts, lists and tuples of tensors, arrays and plain values.

        Returns:
            False where the task is over meanwhile: the answer is not used, and nothing of it is kept.

        Raises:
            UsageError: something in it cannot travel; it is named.
        """
        packed = pack(payload)
        way = way_of(self.name, packed, chunk_sizes(self._sizes), streamed=self._streamed)
        if way.plain is not None:
            return self._send(tm.TaskAnswer(body=tm.Body(plain=way.plain)))
        draft = written(packed, way.cut, None)
        del payload, packed
        ref = self._upload(draft)
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
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return self._send(tm.TaskAnswer(error=text[:ERROR_CHARS] or "it gave no reason"))

    def _upload(self, draft: Draft) -> TensorRef:
        connection = self._connection
        idle_timeout_s = idle_timeout(None, connection.info.idle_timeout_s)
        try:
            return connection.patiently(
                lambda: send(draft, connection.http.server, expires_s=EXPIRES_S, idle_timeout_s=idle_timeout_s),
                None,
                f"send the answer to task {self.name!r}",
            )
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

    def __init__(self, server: str, site: str, labels: dict[str, str] | None) -> None:
        self._connection = Connection(server, site, labels=labels, max_retries=START_RETRIES)
        self._handlers: dict[str, Handler] = {}
        self._connection.join(START_RETRIES)

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
                result = handler(task.payload)
                pack(result)  # what cannot travel is the handler's error, too
            except Exception as error:
                LOG.exception("%s: task %r failed", self.site, task.name)
                task.fail(error)
                continue
            task.payload = None  # given back while the answer is on its way
            task.answer(result)
            del result

    def tasks(self) -> Iterator[Task]:
        """The tasks of this site as they come, each with its payload; ends with the workflow."""
        connection, lost = self._connection, ""
        while True:
            self._doing("waiting for a task")
            request = tm.TaskRequest(wait_s=routes.LONG_POLL_S)
            reply = connection.patiently(
                lambda request=request: connection.http.post(  # type: ignore[misc]
                    routes.TASKS, request, tm.TaskReply, timeout_s=routes.LONG_POLL_S + 10.0
                ),
                None,
                "ask for the next task",
            )
            if reply.status == "finished":
                return
            if reply.task is None:
                continue
            task = Task(connection, reply.task, None)
            try:
                task.payload = self._fetched(reply.task.body)
            except NetworkLost as error:
                LOG.warning("%s: task %r did not arrive, asking again: %s", self.site, task.name, error)
                continue
            except (Gone, BadRequest, PartCorrupt) as error:
                if isinstance(error, Gone) and lost != task.id:
                    lost = task.id  # it was closed meanwhile, and is not given again
                    continue
                task.fail(error)
                continue
            self._doing(f"task {task.name}"[:64])
            yield task

    def _fetched(self, body: tm.Body) -> Any:
        if body.object is None:
            return read_plain(body.plain or "")
        http, given = self._connection.http, body.object
        ref = TensorRef(
            http.host, http.port, http.secure is not None, given.object, given.secret, given.digest, given.expires_at
        )
        return fetch(ref, idle_timeout_s=idle_timeout(None, self._connection.info.idle_timeout_s))

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
        self._connection.leave(f"{type(error).__name__}: {error}" if error else None)


@border
def tasks(server: str, site: str | None = None, *, labels: dict[str, str] | None = None) -> TaskWorker:
    """Take part in a run that has a workflow.

    Args:
        server: address of the server.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        labels: shown in status.

    Returns:
        The worker; a context manager that deregisters it.

    Raises:
        ServerUnreachable: nobody answers. VersionSkew: the two sides speak different protocols.
    """
    return TaskWorker(server, require_site(site or default_site()), labels)
