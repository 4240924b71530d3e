"""The operations on tasks: a site asks for its next one, and answers it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time

from atoll.errors import AtollError, BadRequest, Conflict, DiskFull
from atoll.protocol import task_messages as tm
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.run import Run
from atoll.server.tasks.task_queue import Answer, check_plain, key_of, read_contents
from atoll.server.transient_errors import require_space


class TaskHandlers:
    """The operations on tasks of the server that serves `run`."""

    run: Run

    def __init__(self) -> None:
        self._putting: dict[tuple[str, str, str], asyncio.Future[None]] = {}

    async def request_task(self, lease: Lease, message: tm.TaskRequest) -> tm.TaskReply:
        queue = self.run.task_queue
        queue.require_workflow()
        until_s = time.monotonic() + message.wait_s
        while True:
            task = queue.next_for(lease.site, message.besides)
            if task is not None:
                return tm.TaskReply(status="task", task=task)
            if queue.finished:
                return tm.TaskReply(status="finished")
            if message.rounds and queue.rounds == "now":
                return tm.TaskReply(status="rounds")
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return tm.TaskReply(status="wait")
            await self.run.changed(left_s)
            self.run.require_lease(lease)  # it may have been lost meanwhile: another process has its task then

    async def answer_task(self, lease: Lease, task: str, message: tm.TaskAnswer) -> None:
        queue, site, key = self.run.task_queue, lease.site, key_of(message)
        queue.require_workflow()
        body = message.body
        try:
            if (body is None) == (message.error is None):
                raise BadRequest("An answer has a payload or an error.", "Use the same Atoll version on both sides.")
            if queue.is_taken(task, site, key):
                return
            if body is None:
                queue.put(task, Answer(site, key, error=message.error or "it gave no reason"))
            elif body.object is None:
                text = body.plain or ""
                check_plain(text)
                queue.put(task, Answer(site, key, text=text))
            else:
                await self._put_once(task, site, key, body.object)
        except DiskFull:  # the site asks again, and finds it
            raise
        except AtollError:
            if body is not None and body.object is not None:
                with contextlib.suppress(AtollError):  # it was taken, or never came
                    self.run.objects.remove(body.object.object, body.object.secret)
            raise

    async def _put_once(self, task: str, site: str, key: str, given: tm.ObjectKey) -> None:
        """Put an answer that came as an object. While it is read and filtered the site may ask again: it waits, too."""
        putting = self._putting.get((task, site, key))
        if putting is None:
            putting = asyncio.ensure_future(self._put(task, site, key, given))
            self._putting[task, site, key] = putting
            putting.add_done_callback(lambda done: self._put_is_done((task, site, key), done))
        await asyncio.shield(putting)

    def _put_is_done(self, which: tuple[str, str, str], done: asyncio.Future[None]) -> None:
        del self._putting[which]
        if not done.cancelled():
            done.exception()  # whoever asked was told, or asks again

    async def _put(self, task: str, site: str, key: str, given: tm.ObjectKey) -> None:
        queue, name = self.run.task_queue, self.run.task_queue.name_of(task)
        if queue.received is not None:  # it makes another file of it
            require_space(self.run.store, self.run.settings)
        answer = await self._collected(site, key, given, f"The answer of site {site}")
        if queue.received is not None:
            what = f"The server's filters at the answer of {site} to task {name!r}"
            work = functools.partial(queue.received, answer, name)
            answer = await queue.while_open(task, site, lambda: self.run.user_threads.run(work, what, f"from {site}"))
        queue.put(task, answer)

    async def _collected(self, site: str, key: str, given: tm.ObjectKey, what: str) -> Answer:
        """An answer that has come as an object, which is no one else's from now on."""
        kept, fd = self.run.objects.take(given.object, given.secret)
        try:
            if kept.digest != given.digest:
                raise Conflict(f"{what} is another object than its digest says.", "Send the answer again.")
            loop = asyncio.get_running_loop()
            contents = await loop.run_in_executor(self.run.io, read_contents, fd, kept.extent, what)
        except BaseException:
            os.close(fd)
            raise
        return Answer(site, key, way="inline" if kept.inline else "streamed", contents=contents, fd=fd)
