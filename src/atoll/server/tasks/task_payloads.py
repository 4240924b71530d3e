"""What a task sends: one object for all its sites, and one of its own for each site whose filters change it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.blobs.manifest import ChunkSizes, Way, way_of
from atoll.blobs.object_file import Extent, write_object
from atoll.errors import DiskFull, UsageError
from atoll.filters.base import said
from atoll.protocol import task_messages as tm
from atoll.server.coordinator.run import Run
from atoll.server.tasks.task_filters import TaskFilters
from atoll.server.tasks.task_queue import Sent, key_to
from atoll.server.transient_errors import RETRY_S, require_space
from atoll.store.file_slots import disk_error
from atoll.store.kept_objects import ObjectStore
from atoll.tensors.custom_types import Stream
from atoll.tensors.payload import Packed

LOG = logging.getLogger("atoll.server")


@dataclass(eq=False)
class TaskPayload:
    """A payload on disk, or in a message, that nobody can read yet."""

    way: Way
    objects: ObjectStore
    draft: tuple[str, Extent, list[bytes]] | None = None

    def hold(self) -> Sent:
        """Let it be read; on the event loop. Errors as `ObjectStore.hold`."""
        if self.draft is None:
            return Sent(tm.Body(plain=self.way.plain), self.way.kind)
        kept, secret = self.objects.hold(*self.draft, inline=self.way.cut.inline)
        self.draft = None
        return Sent(tm.Body(object=key_to(kept, secret)), self.way.kind, kept)

    def discard(self) -> None:
        """Remove what nobody has been let to. Idempotent."""
        draft, self.draft = self.draft, None
        if draft is not None:
            self.objects.discard(draft[0])

    def __del__(self) -> None:
        """One that nobody waited for any more."""
        self.discard()


@dataclass(eq=False)
class TaskPayloads:
    """The payloads of one task.

    Attributes:
        shared: for every site that has none of its own; None where all have.
        own: by site.
        failed: what a site's filter failed with, by site: it is sent nothing.
    """

    shared: TaskPayload | None = None
    own: dict[str, TaskPayload] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def hold(self) -> tuple[Sent | None, dict[str, Sent]]:
        """Let all be read; on the event loop. What was held before one failed is let go.

        Raises:
            Busy, DiskFull, StoreError: as `ObjectStore.hold`.
        """
        held: list[tuple[TaskPayload, Sent]] = []
        try:
            for payload in [*([self.shared] if self.shared else []), *self.own.values()]:
                held.append((payload, payload.hold()))
        except BaseException:
            for payload, sent in held:
                if sent.kept is not None:
                    payload.objects.let_go(sent.kept)
            raise
        sent_as = dict(held)
        shared = sent_as[self.shared] if self.shared else None
        return shared, {site: sent_as[payload] for site, payload in self.own.items()}

    def discard(self) -> None:
        """Remove what is not held. Idempotent."""
        for payload in [*([self.shared] if self.shared else []), *self.own.values()]:
            payload.discard()


class PayloadWriter:
    """Writes what a workflow sends; in the workflow's thread, but for what passes filters.

    Args:
        ask: does something on the server's loop.
    """

    def __init__(
        self, run: Run, filters: TaskFilters, sizes: ChunkSizes, ask: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._run, self._filters, self._sizes, self._ask = run, filters, sizes, ask

    def payloads(self, task: str, sites: Sequence[str], packed: Packed, timeout_s: float | None) -> TaskPayloads:
        """A task's payload for its sites; nobody's filters see what another's have left.

        Args:
            timeout_s: how long one site's filters may take, and how long a full disk is waited for.

        Raises:
            UsageError: it cannot travel. DiskFull, StoreError: the disk's.
        """
        payloads = TaskPayloads()
        if packed.tensors:
            self._ask(self._room(task, timeout_s))
        try:
            filtered = [site for site in sites if self._filters.data.of(site, task)]
            written = self._ask(self._all_beside(task, filtered, packed, timeout_s)) if filtered else []
            payloads.own = {
                site: own for site, own in zip(filtered, written, strict=True) if isinstance(own, TaskPayload)
            }
            for site, error in zip(filtered, written, strict=True):
                if isinstance(error, UsageError):
                    LOG.error("%s", said(error))
                    payloads.failed[site] = str(error)
                elif isinstance(error, BaseException):
                    raise error
            if len(payloads.own) + len(payloads.failed) < len(sites) or not sites:
                payloads.shared = self._parcel(task, packed)
        except BaseException:
            payloads.discard()
            raise
        return payloads

    async def _room(self, task: str, timeout_s: float | None) -> None:
        """Wait until there is space, as a site does that is told to come back."""
        began_s, trouble = time.monotonic(), self._run.trouble
        try:
            while True:
                try:
                    return require_space(self._run.store, self._run.settings)
                except DiskFull as error:
                    if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                        raise
                    if not trouble:
                        LOG.error("task %r cannot be sent: %s", task, error)
                    trouble[0] = str(error)
                await asyncio.sleep(RETRY_S)
        finally:
            trouble.pop(0, None)

    async def _all_beside(
        self, task: str, sites: Sequence[str], packed: Packed, timeout_s: float | None
    ) -> list[TaskPayload | BaseException | None]:
        """As `_beside`, or what it raises, for each site: at once, since one may hang.

        A type of the user's is read for one site after the other: its code need not bear several threads.
        """
        read_by_user = any(isinstance(tensor, Stream) for tensor in packed.tensors)
        at_once = asyncio.Semaphore(1 if read_by_user else len(sites))

        async def one(site: str) -> TaskPayload | None:
            async with at_once:
                return await self._beside(task, site, packed, timeout_s)

        return await asyncio.gather(*map(one, sites), return_exceptions=True)

    async def _beside(self, task: str, site: str, packed: Packed, timeout_s: float | None) -> TaskPayload | None:
        """What a site's filters leave, written; None where they are for nothing in it.

        Raises:
            UsageError: one failed, or they take too long.
        """
        what = f"The server's filters at the payload of task {task!r} for {site}"
        work = functools.partial(self._own, task, site, packed)
        try:
            return await self._run.user_threads.run(work, what, f"to {site}", timeout_s)
        except TimeoutError:
            raise UsageError(
                f"{what} were not done after {timeout_s:g} s: it is not sent.", "Look at their code, or give more time."
            ) from None

    def _own(self, task: str, site: str, packed: Packed) -> TaskPayload | None:
        with self._filters.sent(packed, site, task) as mine:
            return None if mine is packed else self._parcel(task, mine)

    def _parcel(self, task: str, packed: Packed) -> TaskPayload:
        settings, objects = self._run.settings, self._run.objects
        way = way_of(task, packed, self._sizes, streamed=task in settings.stream_tasks)
        if way.warning:
            self._run.task_queue.warn(task, way.warning)
        if way.plain is not None:
            return TaskPayload(way, objects)
        object_id, fd = objects.draft()
        try:
            return TaskPayload(way, objects, (object_id, *write_object(packed, fd, way.cut)))
        except OSError as error:
            objects.discard(object_id)
            raise disk_error(error, settings.state_dir) from error
        except BaseException:
            objects.discard(object_id)
            raise
        finally:
            os.close(fd)
