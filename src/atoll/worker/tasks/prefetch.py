"""Tensors of the next task, pulled while the one in hand is still worked on; matched by the task's id.

The server alone says which task is next. What was pulled for another one, which is over meanwhile, is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from atoll.blobs.object_file import Stored
from atoll.errors import AtollError, BadRequest
from atoll.protocol import routes
from atoll.protocol import task_messages as tm
from atoll.worker.log_lines import LOG
from atoll.worker.session.connection import Connection

PAUSE_S = 1.0
"""After a request that failed: the worker's own requests find out what is wrong."""


@dataclass(eq=False)
class _Next:
    """A task whose tensors are on their way, or here; None where it has none, or they did not come."""

    task: str
    stored: Future[Stored | None] = field(default_factory=Future)
    abort: threading.Event = field(default_factory=threading.Event)


class Ahead:
    """Asks for the task after the one in hand, in a thread, and pulls its tensors to disk.

    Args:
        connection: of the site.
        pull: gets the tensors of a task into a file; ended by the event.
    """

    def __init__(self, connection: Connection, pull: Callable[[tm.ObjectKey, threading.Event], Stored]) -> None:
        self._connection, self._pull = connection, pull
        self._news = threading.Condition()
        self._in_hand, self._working, self._closing = "", False, False
        self._next: _Next | None = None
        self._thread: threading.Thread | None = None

    def take(self, task: str) -> Stored | None:
        """The task has arrived: its tensors where they have been pulled, or are about to be; else None."""
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
        """The task in hand is worked on from now on: look for the next one."""
        with self._news:
            self._working = True
            self._news.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="atoll-ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Pull nothing more. Idempotent; a request that still waits for a task ends by itself."""
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
                    if isinstance(error, BadRequest):  # a server that knows nothing of this
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
                return  # it has arrived meanwhile, and its tensors are asked for there
            coming = self._next = _Next(message.task)
        stored = None
        try:
            if message.body.object is not None:
                stored = self._pull(message.body.object, coming.abort)
        except AtollError as error:
            LOG.debug("%s: task %r was not pulled ahead: %s", self._connection.site, message.name, error)
        finally:
            coming.stored.set_result(stored)
