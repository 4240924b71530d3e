"""One task of a site: its payload, and how it is answered."""

from __future__ import annotations

import contextlib
from typing import Any

from atoll.blobs.manifest import ChunkSizes, way_of
from atoll.border import border, bordered
from atoll.errors import AtollError, Conflict, Gone, TicketClosed, TransferError, TransferStalled
from atoll.protocol import routes
from atoll.protocol import task_messages as tm
from atoll.tensors.payload import Packed, pack
from atoll.tensors.reference import TensorRef
from atoll.transport.object_server import Draft, written
from atoll.worker.exchange.filtering import AnswerFilters
from atoll.worker.log_lines import LOG, told
from atoll.worker.objects.object_transfer import chunk_sizes, idle_timeout
from atoll.worker.objects.publish import EXPIRES_S, send, withdraw
from atoll.worker.session.connection import Connection

STALLS = 2
"""Times that the tensors of a task may stand still before they are given up; the first one may pass by itself."""


@bordered
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
        answer = self.written(pack(payload))
        del payload  # its memory is not needed while the answer is on its way
        return self.deliver(answer)

    def written(self, packed: Packed) -> tm.TaskAnswer | Draft:
        """An answer as it travels, behind the filters: in a message, or from disk."""
        with self._filters.behind(packed, self.name) as packed:
            way = way_of(self.name, packed, chunk_sizes(self._sizes), streamed=self._streamed, what="answer")
            if way.warning and self.name not in self._warned:
                self._warned.add(self.name)
                LOG.warning("%s: %s", self._connection.site, way.warning)
            if way.plain is not None:
                return tm.TaskAnswer(body=tm.Body(plain=way.plain))
            return written(packed, way.cut, None)

    def deliver(self, answer: tm.TaskAnswer | Draft) -> bool:
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
