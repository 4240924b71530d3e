"""Writes the payloads of tasks, and applies the server's filters to payloads and to answers of sites.

The payload of a task is written once for all sites, and again for each site with filters that change it. If filters
change an answer, the filtered answer is written to another file.
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
from atoll.blobs.ways_to_send import ChunkSizes, Cut, way_of
from atoll.config import Settings
from atoll.errors import RETRY_S, AtollError, ConfigError, DiskFull, PartCorrupt, UsageError
from atoll.filters.base import About, Filter, filtered, with_cause
from atoll.posix import file_error, read_at
from atoll.protocol import task_messages as tm
from atoll.runtime import single_thread
from atoll.server.coordinator.filter_table import Given, SiteFilters
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.user_code import UserThreads
from atoll.server.tasks.task_queue import Answer, TaskPayload, TaskPayloads, TaskQueue, read_contents
from atoll.system_calls import nameless_file
from atoll.tensors.custom_types import Stream
from atoll.tensors.payload import Packed

LOG = logging.getLogger("atoll.server")

NO_DATA_FILTERS = (
    "Remove the filters. Instead, change the loaded model in the training script, or use a workflow that sends each "
    "site its own payload."
)


# -- Filters


class TaskFilters:
    """Applies the server's filters: `data` to payloads of tasks, `results` to answers of sites.

    Args:
        settings: the run's settings.
        data, results: filters that a program passes to `atoll.Server` in place of those in the settings.

    Raises:
        ConfigError: an entry of the settings is malformed.
        UsageError: an object is not a filter, or both the program and the settings have filters.
    """

    def __init__(self, settings: Settings, data: Given = (), results: Given = ()) -> None:
        self._folder = settings.disk.state_dir / "objects"
        self.data = SiteFilters(settings, data, "workflow.payload_filters")
        self.results = SiteFilters(settings, results)

    def require_rounds(self) -> None:
        """Raise an error if a run without tasks has filters that need tasks.

        Raises:
            ConfigError: there are filters of payloads, or filters that are limited to tasks.
        """
        if self.data:
            raise ConfigError(
                f"workflow.payload_filters is set ({self.data}), but the run has only rounds: all sites download "
                "the same version, which cannot be filtered for one site.",
                NO_DATA_FILTERS,
            )
        if self.results.tasks:
            raise ConfigError(
                f"workflow.result_filters has filters for the tasks {', '.join(self.results.tasks)}, but this run has "
                "only rounds, and sends no tasks.",
                "Remove the key 'tasks'. To limit a filter to some sites, use the key 'sites'.",
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
        """Yield the payload of a task as one site gets it: filtered, or `packed` itself if the site has no filters.

        Write the payload inside the `with` block, because filters run when a tensor is read.

        Raises:
            UsageError: a filter failed, before or while the payload was written.
        """
        filters = self.data.of(site, task)
        if not filters:
            yield packed
            return
        with single_thread():
            what = f"The payload of task {task!r} for site {site} was not sent"
            yield filtered(packed, filters, About(site, task=task), what)

    async def received_in_thread(self, threads: UserThreads, answer: Answer, task: str) -> Answer:
        """Do what `received` does, but in a thread for user code."""
        what = f"The server's filters for the answer of {answer.site} to task {task!r}"
        return await threads.run(functools.partial(self.received, answer, task), what, f"from {answer.site}")

    def received(self, answer: Answer, task: str) -> Answer:
        """Apply the filters to a site's answer, and return the result. A changed answer is in a new file.

        If a filter fails, return an answer without a payload. Its `error` gives the reason.
        """
        filters = self.results.of(answer.site, task)
        if not filters or answer.contents is None:
            return answer
        try:
            with single_thread():
                return self._filtered(answer, answer.contents, filters, task)
        except AtollError as error:
            LOG.error("%s", with_cause(error))
            return Answer(answer.site, answer.key, error=str(error))
        except BaseException as error:  # sys.exit in a filter, or a filter with a failing repr
            LOG.error("the answer of site %s to task %r was not used", answer.site, task, exc_info=error)
            reason = f"The server's filters for this answer failed: {type(error).__name__}: {error}"
            return Answer(answer.site, answer.key, error=reason)
        finally:
            answer.close()

    def _filtered(self, answer: Answer, contents: Contents, filters: Sequence[Filter], task: str) -> Answer:
        what = f"The answer of site {answer.site} to task {task!r}"
        packed = _packed(answer, contents, what)
        changed = filtered(packed, filters, About(answer.site, task=task), f"{what} was not used")
        if changed is packed:
            fd, answer.fd = answer.fd, -1
            return replace(answer, fd=fd)
        replaced = replace(answer, contents=None, fd=-1)
        try:
            replaced.fd = nameless_file(self._folder)
            manifest = write_object(changed, replaced.fd, Cut(contents.layout.part_bytes))
            replaced.contents = read_contents(replaced, manifest.cuts, what)
        except OSError as error:
            replaced.close()
            raise file_error(error, self._folder) from error
        except BaseException:
            replaced.close()
            raise
        return replaced


def _packed(answer: Answer, contents: Contents, what: str) -> Packed:
    """Return an answer's payload. Its tensors are read from the answer's file only when they are needed."""

    def read(offset: int, memory: memoryview) -> None:
        try:
            read_at(answer.fd, memory, offset)
        except EOFError as error:
            raise PartCorrupt(f"{what} is incomplete: {error}.", "Send the answer again.") from None

    lazy = Stored(contents, read, lambda: None, inline_bytes=contents.inline_bytes).lazy
    streams = [
        Stream(lazy[name].dtype, tuple(lazy[name].shape), lazy[name].runs, f"tensor {name!r} of {what}")
        for name in contents.names
    ]
    return Packed(contents.skeleton, tuple(streams), frozenset())


# -- Payloads


class PayloadWriter:
    """Writes the payloads of a workflow's tasks.

    Filters run in threads for user code, everything else in the workflow's thread.

    Args:
        run: the run.
        queue: the run's tasks.
        filters: filters of payloads.
        sizes: sizes of the parts of payloads, in bytes.
        ask: function that runs a coroutine on the server's event loop and returns its result.
    """

    def __init__(
        self,
        run: RunCore,
        queue: TaskQueue,
        filters: TaskFilters,
        sizes: ChunkSizes,
        ask: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        self._run, self._queue, self._filters, self._sizes, self._ask = run, queue, filters, sizes, ask

    def write(self, task: str, sites: Sequence[str], packed: Packed, timeout_s: float | None) -> TaskPayloads:
        """Write the payload of a task: once for all sites, and again for each site with filters that change it.

        Args:
            task: name of the task.
            sites: names of the sites.
            packed: the payload.
            timeout_s: maximum seconds for the filters of one site, and for the wait while the disk is full; None: no
                limit.

        Raises:
            UsageError: the payload cannot be sent.
            DiskFull, StoreError: the disk is full, or fails.
        """
        if packed.tensors:
            self._ask(self._wait_for_space(task, timeout_s))
        payloads: TaskPayloads = self._ask(self.filtered(task, sites, packed, timeout_s))
        if len(payloads.own) + len(payloads.failed) < len(sites) or not sites:
            payloads.shared = self.written(task, packed)
        return payloads

    async def _wait_for_space(self, task: str, timeout_s: float | None) -> None:
        """Wait until the server's disk has space.

        Raises:
            DiskFull: the disk is still full after `timeout_s` seconds.
        """
        began_s, trouble = time.monotonic(), self._run.trouble
        try:
            while True:
                try:
                    return self._run.require_space()
                except DiskFull as error:
                    if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                        raise
                    if not trouble:
                        LOG.error("task %r is not sent yet: %s", task, error)
                    trouble[0] = str(error)
                await asyncio.sleep(RETRY_S)
        finally:
            trouble.pop(0, None)

    async def filtered(self, task: str, sites: Sequence[str], packed: Packed, timeout_s: float | None) -> TaskPayloads:
        """Write a filtered payload for each site that has filters for this task. Call this on the server's event loop.

        Filters of different sites run in parallel, so that a filter that hangs delays only its own site. If the payload
        contains a user's own tensor type, filters run one after another: that type's code may not be thread-safe.

        Returns:
            For each site with filters, its payload in `own`, or the error of its filters in `failed`. `shared` is None.
        """
        payloads = TaskPayloads()
        sites = [site for site in sites if self._filters.data.of(site, task)]
        user_type = any(isinstance(tensor, Stream) for tensor in packed.tensors)
        at_once = asyncio.Semaphore(1 if user_type else max(1, len(sites)))

        async def of_site(site: str) -> TaskPayload | None:
            what = f"The server's filters for the payload of task {task!r} to {site}"
            work = functools.partial(self._write_filtered, task, site, packed)
            async with at_once:
                try:
                    return await self._run.user_threads.run(work, what, f"to {site}", timeout_s)
                except TimeoutError:
                    raise UsageError(
                        f"{what} did not finish within {timeout_s:g} s, so the payload was not sent.",
                        "Check the code of the filters, or raise the timeout.",
                    ) from None

        results = await asyncio.gather(*map(of_site, sites), return_exceptions=True)
        for site, own in zip(sites, results, strict=True):
            match own:
                case TaskPayload():
                    payloads.own[site] = own
                case UsageError():
                    LOG.error("%s", with_cause(own))
                    payloads.failed[site] = str(own)
                case BaseException():
                    raise own
        return payloads

    def _write_filtered(self, task: str, site: str, packed: Packed) -> TaskPayload | None:
        with self._filters.sent(packed, site, task) as own:
            return None if own is packed else self.written(task, own)

    def written(self, task: str, packed: Packed) -> TaskPayload:
        """Write a payload in the calling thread. A small payload without tensors becomes a text, and needs no file."""
        objects = self._queue.objects
        streamed = task in self._run.settings.workflow.streamed_tasks
        way = way_of(task, packed, self._sizes, streamed=streamed)
        if way.warning:
            self._queue.warn(task, way.warning)
        if way.plain is not None:
            return TaskPayload(objects, way.kind, tm.TaskBody(plain=way.plain))
        return TaskPayload.write(objects, packed, way.cut)
