"""The server's filters of a workflow: what a site is sent of a payload, and what is taken of its answer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from atoll.blobs.manifest import Cut
from atoll.blobs.object_file import Contents, Stored, write_object
from atoll.config import Settings
from atoll.errors import AtollError, ConfigError, PartCorrupt
from atoll.filters.base import About, Filter, filtered, said
from atoll.posix import nameless_file, read_at
from atoll.server.filter_table import Given, SiteFilters
from atoll.server.tasks.task_queue import Answer, read_contents
from atoll.store.file_slots import disk_error
from atoll.tensors.alone import alone
from atoll.tensors.custom_types import Stream
from atoll.tensors.payload import Packed

LOG = logging.getLogger("atoll.server")

NO_DATA_FILTERS = (
    "Leave them out: a site may change what it has loaded before it trains; or send each site a payload of its own, in "
    "a run with a workflow."
)


class TaskFilters:
    """Filters of what is sent (`data`) and of what is answered (`results`), by site and task.

    Args:
        settings, data, results: as `SiteFilters` has them.

    Raises:
        ConfigError, UsageError: as `SiteFilters`.
    """

    def __init__(self, settings: Settings, data: Given = (), results: Given = ()) -> None:
        self._folder = settings.state_dir / "objects"
        self.data = SiteFilters(settings, data, "task_data_filters")
        self.results = SiteFilters(settings, results)

    def require_rounds(self) -> None:
        """Refuse those that only a workflow has a use for.

        Raises:
            ConfigError: what a round sends is filtered, or filters go by tasks.
        """
        if self.data:
            raise ConfigError(
                f"task_data_filters are set ({self.data}), and the run has rounds: a version is one file that every "
                "site pulls, and measures its change against.",
                NO_DATA_FILTERS,
            )
        if self.results.tasks:
            raise ConfigError(
                f"task_result_filters name the tasks {', '.join(self.results.tasks)}, and a run of rounds has none.",
                "Leave tasks out; sites says whose updates are filtered.",
            )

    def warn_of_strangers(self, sites: Collection[str]) -> None:
        """As `SiteFilters` does, of both."""
        self.data.warn_of_strangers(sites)
        self.results.warn_of_strangers(sites)

    def warn_of_unsent(self, names: Collection[str]) -> None:
        """As `SiteFilters` does, of both."""
        self.data.warn_of_unsent(names)
        self.results.warn_of_unsent(names)

    @contextmanager
    def sent(self, packed: Packed, site: str, task: str) -> Iterator[Packed]:
        """What a site is to be sent of a payload, to be written within; `packed` itself where nothing is filtered.

        Raises:
            UsageError: a filter failed, here or while it is written.
        """
        filters = self.data.of(site, task)
        if not filters:
            yield packed
            return
        with alone():
            what = f"The payload of task {task!r} for site {site} is not sent"
            yield filtered(packed, filters, About(site, task=task), what)

    def received(self, answer: Answer, task: str) -> Answer:
        """What is taken of an answer, in a file of its own; in a thread. An error where a filter fails."""
        filters = self.results.of(answer.site, task)
        if not filters or answer.contents is None:
            return answer
        try:
            with alone():
                return self._behind(answer, answer.contents, filters, task)
        except AtollError as error:
            LOG.error("%s", said(error))
            return Answer(answer.site, answer.key, error=str(error))
        except BaseException as error:  # sys.exit in a filter, or a filter whose name cannot be said
            LOG.error("the answer of site %s to task %r is not used", answer.site, task, exc_info=error)
            reason = f"The filters of its answer failed at the server: {type(error).__name__}: {error}"
            return Answer(answer.site, answer.key, error=reason)
        finally:
            answer.close()

    def _behind(self, answer: Answer, contents: Contents, filters: Sequence[Filter], task: str) -> Answer:
        what = f"The answer of site {answer.site} to task {task!r}"
        packed = _on_disk(answer, contents, what)
        mine = filtered(packed, filters, About(answer.site, task=task), f"{what} is not used")
        if mine is packed:
            fd, answer.fd = answer.fd, -1
            return replace(answer, fd=fd)
        behind = replace(answer, contents=None, fd=-1)
        try:
            behind.fd = fd = nameless_file(self._folder)
            extent, _ = write_object(mine, fd, Cut(contents.layout.part_bytes))
            behind.contents = read_contents(fd, extent, what)
        except OSError as error:
            behind.close()
            raise disk_error(error, self._folder) from error
        except BaseException:
            behind.close()
            raise
        return behind


def _on_disk(answer: Answer, contents: Contents, what: str) -> Packed:
    """An answer taken apart, its tensors in its file."""

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
