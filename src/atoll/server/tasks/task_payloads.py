"""What tasks send and what sites answer, through the server's filters.

A payload is one object for all sites, and an object of its own for each site with filters that change it. An answer
that filters change is written to another file.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from atoll.blobs.object_file import Contents, Stored, write_object
from atoll.blobs.payload_cut import ChunkSizes, Cut, way_of
from atoll.config import Settings
from atoll.errors import RETRY_S, AtollError, ConfigError, DiskFull, PartCorrupt, UsageError
from atoll.filters.base import About, Filter, filtered, said
from atoll.posix import nameless_file, read_at
from atoll.protocol import task_messages as tm
from atoll.runtime import single_thread
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.filter_table import Given, SiteFilters
from atoll.server.tasks.task_queue import Answer, TaskPayload, TaskPayloads, read_contents
from atoll.server.tasks.user_code import UserThreads
from atoll.store.file_slots import disk_error
from atoll.tensors.custom_types import Stream
from atoll.tensors.payload import Packed

LOG = logging.getLogger("atoll.server")

NO_DATA_FILTERS = (
    "Leave them out: a site may change what it has loaded before it trains; or send each site a payload of its own, in "
    "a run with a workflow."
)


# -- Filters


class TaskFilters:
    """Filters of what is sent (`data`) and of what is answered (`results`), by site and task.

    Args:
        settings, data, results: as `SiteFilters` has them.

    Raises:
        ConfigError, UsageError: as `SiteFilters`.
    """

    def __init__(self, settings: Settings, data: Given = (), results: Given = ()) -> None:
        self._folder = settings.disk.state_dir / "objects"
        self.data = SiteFilters(settings, data, "workflow.payload_filters")
        self.results = SiteFilters(settings, results)

    def require_rounds(self) -> None:
        """Refuse filters that only a workflow uses.

        Raises:
            ConfigError: what a round sends would be filtered, or filters name tasks.
        """
        if self.data:
            raise ConfigError(
                f"workflow.payload_filters are set ({self.data}), and the run has rounds: a version is one file that "
                "every "
                "site pulls, and measures its change against.",
                NO_DATA_FILTERS,
            )
        if self.results.tasks:
            raise ConfigError(
                f"workflow.result_filters name the tasks {', '.join(self.results.tasks)}, and a run of rounds has "
                "none.",
                "Leave tasks out; sites names the sites with filtered updates.",
            )

    def warn_of_strangers(self, sites: Collection[str]) -> None:
        """Warn of filters for sites that have never joined."""
        self.data.warn_of_strangers(sites)
        self.results.warn_of_strangers(sites)

    def warn_of_unsent(self, names: Collection[str]) -> None:
        """Warn of filters for tasks that were never sent."""
        self.data.warn_of_unsent(names)
        self.results.warn_of_unsent(names)

    @contextmanager
    def sent(self, packed: Packed, site: str, task: str) -> Iterator[Packed]:
        """Filter a payload for one site, which is written within; `packed` itself if nothing is filtered.

        Raises:
            UsageError: a filter failed, here or during the writing.
        """
        filters = self.data.of(site, task)
        if not filters:
            yield packed
            return
        with single_thread():
            what = f"The payload of task {task!r} for site {site} is not sent"
            yield filtered(packed, filters, About(site, task=task), what)

    async def received_beside(self, threads: UserThreads, answer: Answer, task: str) -> Answer:
        """Filter an answer as `received`, in a thread beside the loop."""
        what = f"The server's filters at the answer of {answer.site} to task {task!r}"
        return await threads.run(functools.partial(self.received, answer, task), what, f"from {answer.site}")

    def received(self, answer: Answer, task: str) -> Answer:
        """Filter an answer into a file of its own. Its `error` says if a filter fails."""
        filters = self.results.of(answer.site, task)
        if not filters or answer.contents is None:
            return answer
        try:
            with single_thread():
                return self._filtered(answer, answer.contents, filters, task)
        except AtollError as error:
            LOG.error("%s", said(error))
            return Answer(answer.site, answer.key, error=str(error))
        except BaseException as error:  # sys.exit in a filter, or a filter with a failing repr
            LOG.error("the answer of site %s to task %r is not used", answer.site, task, exc_info=error)
            reason = f"The filters of its answer failed at the server: {type(error).__name__}: {error}"
            return Answer(answer.site, answer.key, error=reason)
        finally:
            answer.close()

    def _filtered(self, answer: Answer, contents: Contents, filters: Sequence[Filter], task: str) -> Answer:
        what = f"The answer of site {answer.site} to task {task!r}"
        packed = _packed(answer, contents, what)
        behind = filtered(packed, filters, About(answer.site, task=task), f"{what} is not used")
        if behind is packed:
            fd, answer.fd = answer.fd, -1
            return replace(answer, fd=fd)
        found = replace(answer, contents=None, fd=-1)
        try:
            found.fd = nameless_file(self._folder)
            manifest = write_object(behind, found.fd, Cut(contents.layout.part_bytes))
            found.contents = read_contents(found, manifest.cuts, what)
        except OSError as error:
            found.close()
            raise disk_error(error, self._folder) from error
        except BaseException:
            found.close()
            raise
        return found


def _packed(answer: Answer, contents: Contents, what: str) -> Packed:
    """Take an answer apart; its tensors stay in its file."""

    def read(offset: int, memory: memoryview) -> None:
        try:
            read_at(answer.fd, memory, offset)
        except EOFError as error:
            raise PartCorrupt(f"{what} is cut off: {error}.", "Send the answer again.") from None

    lazy = Stored(contents, read, lambda: None, behind=contents.behind).lazy
    streams = [
        Stream(lazy[name].dtype, tuple(lazy[name].shape), lazy[name].runs, f"tensor {name!r} of {what}")
        for name in contents.names
    ]
    return Packed(contents.skeleton, tuple(streams), frozenset())


# -- Payloads


class PayloadWriter:
    """Writes what a workflow sends: in the thread of the workflow, and in threads for what passes filters.

    Args:
        sizes: of the parts.
        ask: runs a coroutine on the server's loop.
    """

    def __init__(
        self, run: Coordinator, filters: TaskFilters, sizes: ChunkSizes, ask: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._run, self._filters, self._sizes, self._ask = run, filters, sizes, ask

    def write(self, task: str, sites: Sequence[str], packed: Packed, timeout_s: float | None) -> TaskPayloads:
        """Write the payload of a task for its sites. Each site's filters get the original payload.

        Args:
            timeout_s: how long the filters of one site may take, and how long a full disk is waited for.

        Raises:
            UsageError: it cannot travel. DiskFull, StoreError: the disk fails.
        """
        if packed.tensors:
            self._ask(self._wait_for_space(task, timeout_s))
        payloads: TaskPayloads = self._ask(self.filtered(task, sites, packed, timeout_s))
        if len(payloads.own) + len(payloads.failed) < len(sites) or not sites:
            payloads.shared = self.written(task, packed)
        return payloads

    async def _wait_for_space(self, task: str, timeout_s: float | None) -> None:
        """Wait until there is space, as a site does when the server's disk is full."""
        began_s, trouble = time.monotonic(), self._run.trouble
        try:
            while True:
                try:
                    return self._run.require_space()
                except DiskFull as error:
                    if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                        raise
                    if not trouble:
                        LOG.error("task %r cannot be sent: %s", task, error)
                    trouble[0] = str(error)
                await asyncio.sleep(RETRY_S)
        finally:
            trouble.pop(0, None)

    async def filtered(self, task: str, sites: Sequence[str], packed: Packed, timeout_s: float | None) -> TaskPayloads:
        """Write the payload of each site with filters that change it, on the server's loop.

        All sites at once, since the filters of one may hang. A type of the user's is read for one site after the
        other: its code need not be thread-safe.
        """
        payloads = TaskPayloads()
        sites = [site for site in sites if self._filters.data.of(site, task)]
        user_type = any(isinstance(tensor, Stream) for tensor in packed.tensors)
        at_once = asyncio.Semaphore(1 if user_type else max(1, len(sites)))

        async def one(site: str) -> TaskPayload | None:
            what = f"The server's filters at the payload of task {task!r} for {site}"
            work = functools.partial(self._write_filtered, task, site, packed)
            async with at_once:
                try:
                    return await self._run.user_threads.run(work, what, f"to {site}", timeout_s)
                except TimeoutError:
                    raise UsageError(
                        f"{what} were not done after {timeout_s:g} s: it is not sent.",
                        "Look at their code, or give more time.",
                    ) from None

        found = await asyncio.gather(*map(one, sites), return_exceptions=True)
        for site, own in zip(sites, found, strict=True):
            match own:
                case TaskPayload():
                    payloads.own[site] = own
                case UsageError():
                    LOG.error("%s", said(own))
                    payloads.failed[site] = str(own)
                case BaseException():
                    raise own
        return payloads

    def _write_filtered(self, task: str, site: str, packed: Packed) -> TaskPayload | None:
        with self._filters.sent(packed, site, task) as own:
            return None if own is packed else self.written(task, own)

    def written(self, task: str, packed: Packed) -> TaskPayload:
        """Write a payload as it is, in this thread; one without tensors needs no file."""
        objects, queue = self._run.objects, self._run.task_queue
        streamed = task in self._run.settings.workflow.streamed_tasks
        way = way_of(task, packed, self._sizes, streamed=streamed)
        if way.warning:
            queue.warn(task, way.warning)
        if way.plain is not None:
            return TaskPayload(objects, way.kind, tm.Body(plain=way.plain))
        return TaskPayload.write(objects, packed, way.cut)
