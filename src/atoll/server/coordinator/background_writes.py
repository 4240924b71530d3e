"""What is written behind the commits of a run: metrics, exports, the durable version, the best one, the result."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

from atoll.aggregation.plan import Plan
from atoll.errors import AtollError, Gone
from atoll.protocol import status_messages
from atoll.rounds.early_stopping import Measured
from atoll.server.coordinator.best_version import BestVersion
from atoll.server.coordinator.exports import Exports
from atoll.server.coordinator.persistor import Persistor
from atoll.server.free_space import RETRY_S
from atoll.server.transient_errors import passing
from atoll.store.rows import VersionRow
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")


class Behind:
    """Runs on the server's loop; what takes its time is done by threads of `io`."""

    def __init__(self, plan: Plan, store: Store, io: Executor, persistor: Persistor | None = None) -> None:
        self._plan, self._settings, self._store, self._io, self.persistor = plan, plan.settings, store, io, persistor
        self.exports = Exports(plan, store)
        self.best = BestVersion(plan, store, self.exports.folder)
        self._metrics_in_turn = asyncio.Lock()
        self._durable_in_turn = asyncio.Lock()

    def save_initial(self) -> None:
        """A run that has just begun: a persistor gets what it begins with."""
        if self.persistor is not None and self._settings.save_every and max(heads := self._store.heads()) == 0:
            self.persistor.save(self._plan, self._store, heads)

    def close(self) -> None:
        """The store is about to be closed."""
        if self.persistor is not None:
            self.persistor.close()

    async def after_commit(
        self,
        row: VersionRow,
        summary: status_messages.RoundSummary,
        *,
        heads: Sequence[int],
        last: bool,
        finished: bool,
    ) -> None:
        """What may lag behind a commit: the metrics file, an export, the durable version.

        Args:
            heads: the version of each fragment.
            last: whether every other fragment has had this round, too.
        """
        loop = asyncio.get_running_loop()
        every = self._settings.save_every
        due = bool(every) and summary.round % every == 0 and last
        if due and self.persistor is not None and not finished:
            self.persistor.save(self._plan, self._store, heads)
        try:
            async with self._metrics_in_turn:  # asynchronous commits may come faster than lines are written
                await loop.run_in_executor(self._io, self.exports.append_metrics, summary, row.created_at)
            if due:
                try:
                    await loop.run_in_executor(self._io, self.exports.save, heads)
                except Gone as error:
                    LOG.debug("version %d was overtaken before it was exported: %s", row.version, error)
            # Each holds its version, and an older one that ends late would be said to be the durable one.
            async with self._durable_in_turn:
                await loop.run_in_executor(self._io, self._store.write_durable, row.fragment)
        except (AtollError, OSError) as error:
            reason = passing(error)
            if reason is None:
                raise
            LOG.error("version %d could not be saved: %s", row.version, reason)

    async def save_best(self, measured: Measured) -> None:
        """Write the best version, and let the persistor have it; one that is not kept any more is told of."""
        try:
            await self._saved("the best version", functools.partial(self.best.save, measured))
            if self.persistor is not None:
                self.persistor.save_best(self._plan, self.best.handed(measured))
        except Gone:
            LOG.warning(
                "version %d is the best so far (%s %.6g), but is no longer kept: %s stays as it is until a better one",
                measured.version,
                self.best.metric,
                measured.value,
                self.best.path,
            )

    async def save_result(self) -> Path | str:
        """Write the head as the run's result; that of a swarm is at its sites."""
        if self._plan.is_swarm:
            return "each site writes it to its own folder"
        path = await self._saved("the result", self.exports.save)
        if self.persistor is not None:
            heads = self._store.heads()
            await asyncio.wrap_future(self.persistor.save(self._plan, self._store, heads, final=True))
        return path

    async def handed(self) -> None:
        """Wait until the persistor has had everything that it is to have."""
        if self.persistor is not None:
            await asyncio.wrap_future(self.persistor.handed())

    async def _saved(self, what: str, save: Callable[[], T]) -> T:
        """Run `save` in a thread; where space or open files are lacking, again until they are there."""
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._io, save)
            except (AtollError, OSError) as error:
                reason = passing(error)
                if reason is None:
                    raise
                LOG.error("%s could not be saved: %s Trying again in %g s.", what, reason, RETRY_S)
                await asyncio.sleep(RETRY_S)


async def over(*tasks: asyncio.Task[None] | None) -> None:
    """Wait until these have ended, however they do."""
    if begun := [task for task in tasks if task is not None]:
        await asyncio.wait(begun)
