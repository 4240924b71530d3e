"""Writes files in the background after a version was committed: metrics, exported models, best version, result.

Afterwards, at most once a second, the newest version is fsynced, so that it survives a power loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import shlex
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

from atoll.aggregation.plan import Plan
from atoll.errors import RETRY_S, AtollError, DiskFull, Gone, causes, transient_reason
from atoll.protocol import status_messages
from atoll.rounds.early_stopping import Measurement
from atoll.server.coordinator.exports import METRICS, BestVersion, Exports
from atoll.server.coordinator.persistor import Persistor
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

T = TypeVar("T")

DURABLE_S = 1.0
"""Least time between two fsyncs of a fragment's versions. A power loss costs at most so much more training."""

LAST = " The server ends only after that, or with Ctrl-C. Ctrl-C loses nothing: the next start writes the file."
"""Text for the log about a file that is written after the last round."""


class BackgroundWriter:
    """Writes files in the background after commits. Call it on the event loop; slow work runs in pool threads.

    Attributes:
        unsaved: file that the writer tries to write again → why it could not be written.
    """

    def __init__(self, plan: Plan, store: Store, io: Executor, persistor: Persistor) -> None:
        self._plan, self._settings, self._store, self._io, self.persistor = plan, plan.settings, store, io, persistor
        self.exports = Exports(plan, store)
        self.best = BestVersion(plan, store, self.exports.folder)
        self._metrics_in_turn = asyncio.Lock()
        self._durable_in_turn = asyncio.Lock()
        self._durable_at_s: dict[int, float] = {}  # fragment → when the last fsync of its versions began
        self._durable_soon: set[int] = set()  # fragments with an fsync of the newest version after a pause
        self._best_in_turn = asyncio.Lock()
        self._measured: Measurement | None = None  # the best version, as long as it can be saved
        self.unsaved: dict[str, str] = {}
        self._said_unwritten = False  # whether the log says that files cannot be exported

    def complete_metrics(self) -> None:
        """Complete the metrics file. If the disk is full, a later round writes the file.

        Raises:
            StoreError: the export folder cannot be made or written.
        """
        try:
            self.exports.complete_metrics()
        except DiskFull as error:
            self._go_on_after(error, min(self._store.versions.heads()))

    def save_initial(self) -> None:
        """Pass version 0 to the user's persistor, if the run has just begun and `disk.export_every` is set."""
        if self._settings.disk.export_every and max(heads := self._store.versions.heads()) == 0:
            self.persistor.save(self._plan, self._store, heads)

    async def after_commit(
        self,
        summary: status_messages.RoundSummary,
        at: str | None,
        *,
        heads: Sequence[int],
        last: bool,
        finished: bool,
    ) -> None:
        """Write the round's metrics and, every `disk.export_every` rounds, the model. Then make the version durable.

        Args:
            summary: summary of the round of the committed version.
            at: time at which the version was written; None: the metrics are written later, by `write_metrics`.
            heads: number of the newest version of each fragment.
            last: whether all fragments have now finished this round.
            finished: whether the run is finished. If so, the persistor gets the model from `save_result`, and
                `make_durable` makes it durable.
        """
        loop, version = asyncio.get_running_loop(), summary.version or 0
        every = self._settings.disk.export_every
        due = bool(every) and summary.round % every == 0 and last
        if due and not finished:
            self.persistor.save(self._plan, self._store, heads)
        try:
            if at is not None:
                await self._append_metrics(summary, at)
            if due:
                try:
                    await loop.run_in_executor(self._io, self.exports.save, heads)
                except Gone as error:
                    LOG.debug("version %d was replaced by a newer one before it was exported: %s", version, error)
            self._said_unwritten = False
        except (AtollError, OSError) as error:
            self._go_on_after(error, version)
        try:
            if not finished:  # at the end of the run, `make_durable` follows
                await self._write_durable(summary.fragment)
            if self._measured is not None and not self.best.path.exists():  # a user has removed it
                await self.save_best(self._measured)
        except (AtollError, OSError) as error:
            self._go_on_after(error, version)

    async def _write_durable(self, fragment: int) -> None:
        """Make the newest version of a fragment durable; after a pause, if an earlier one was a moment ago.

        Calls during the pause return at once, because the version that is the newest at its end is written.
        """
        if fragment in self._durable_soon:
            return
        loop = asyncio.get_running_loop()
        self._durable_soon.add(fragment)
        await asyncio.sleep(self._durable_at_s.get(fragment, -math.inf) + DURABLE_S - loop.time())
        self._durable_soon.discard(fragment)
        # one at a time: otherwise an older version that is fsynced later would be recorded as the durable one
        async with self._durable_in_turn:
            self._durable_at_s[fragment] = loop.time()
            await loop.run_in_executor(self._io, self._store.versions.write_durable, fragment)

    async def _append_metrics(self, summary: status_messages.RoundSummary, at: str) -> None:
        loop = asyncio.get_running_loop()
        async with self._metrics_in_turn:  # asynchronous commits may come faster than lines are written
            await loop.run_in_executor(self._io, self.exports.append_metrics, summary, at)

    async def write_metrics(self, summary: status_messages.RoundSummary, at: str) -> None:
        """Write the metrics of a round that has no version, or one that was evaluated.

        Args:
            summary: summary of the round.
            at: time at which it ended.
        """
        try:
            await self._append_metrics(summary, at)
            self._said_unwritten = False
        except (AtollError, OSError) as error:
            self._go_on_after(error, self._store.versions.head(summary.fragment).version)

    def _go_on_after(self, error: AtollError | OSError, version: int) -> None:
        """Raise the error if the run cannot continue after it. Else log it, once until files can be written again."""
        if (reason := self._why_unwritten(error)) is None:
            raise error
        if not self._said_unwritten:
            self._said_unwritten = True
            LOG.error(
                "not all files of version %d could be written: %s The files of the next version are written "
                "as usual. As soon as metrics.jsonl can be written, it gets all of its lines.",
                version,
                reason,
            )

    def _why_unwritten(self, error: BaseException) -> str | None:
        """Return why a file cannot be written, if the cause is temporary or in the export folder; None otherwise."""
        folder = self.exports.folder.absolute()
        for cause in causes(error):
            file = cause.filename if isinstance(cause, OSError) else None  # a failed fsync has no file name
            if isinstance(file, str | Path) and Path(file).absolute().is_relative_to(folder):
                return transient_reason(error) or str(error)
        return transient_reason(error)

    async def save_best(self, measured: Measurement) -> None:
        """Write the best version, and pass it to the user's persistor. Warn if the server no longer has the version."""
        self._measured = measured
        try:
            async with self._best_in_turn:
                save = functools.partial(self.best.save, measured)
                await self.saved("the best version", save, " The next round waits for this.")
            self.persistor.save_best(self._plan, self._store, measured, self.best.path, self.best.metric)
        except Gone:
            self._measured = None
            LOG.warning(
                "version %d is the best so far (%s %.6g), but is no longer kept, so it cannot be saved: %s %s",
                measured.version,
                self.best.metric,
                measured.value,
                self.best.path,
                "is unchanged" if self.best.path.exists() else "is missing until a better version is found",
            )

    async def save_result(self) -> Path | str:
        """Write the newest version as the run's result, and return its path.

        In a swarm, each site writes the result, so this method returns a text that says so.
        """
        if self._plan.is_swarm:
            return "each site writes it to its own folder"
        elsewhere = f" Or: atoll export model.safetensors --dir {shlex.quote(str(self._settings.disk.state_dir))}."
        path = await self.saved("the result", self.exports.save, LAST + elsewhere)
        heads = self._store.versions.heads()
        await asyncio.wrap_future(self.persistor.save(self._plan, self._store, heads, final=True))
        return path

    async def end_pauses(self) -> None:
        """As the server stops: make those versions durable that wait for the end of a pause, if the disk takes them."""
        for fragment in self._durable_soon:
            with contextlib.suppress(AtollError, OSError):  # the next start makes it durable
                await asyncio.to_thread(self._store.versions.write_durable, fragment)  # the pool has ended

    async def make_durable(self) -> None:
        """At the end of the run: make the newest versions durable, without a pause."""
        async with self._durable_in_turn:
            for fragment in range(len(self._plan.fragments)):
                write = functools.partial(self._store.versions.write_durable, fragment)
                await self.saved("the newest version", write, LAST)

    async def save_metrics(self) -> None:
        """At the end of the run: complete the metrics file, because lines may be missing."""
        await self.saved(METRICS, self.exports.complete_metrics, LAST)

    async def saved(self, what: str, save: Callable[[], T], then: str = "") -> T:
        """Run `save` in a thread. Repeat this while space, file descriptors or a usable export folder are lacking."""
        loop, problem = asyncio.get_running_loop(), f"{what} could not be saved"

        def note(reason: str) -> None:
            self.unsaved[what] = f"{problem}: {reason}{then}"

        saved = await until_passed(
            lambda: loop.run_in_executor(self._io, save), problem, note, why=self._why_unwritten, then=then
        )
        self.unsaved.pop(what, None)
        return saved


async def until_passed(
    attempt: Callable[[], Awaitable[T]],
    problem: str,
    note: Callable[[str], None] = lambda reason: None,
    why: Callable[[BaseException], str | None] = transient_reason,
    then: str = "",
) -> T:
    """Return the result of `attempt`. While it fails for a reason that may pass, log the problem and retry.

    The log repeats the problem at intervals that double: after 1, 2, 4, 8 … attempts.

    Args:
        attempt: function to call.
        problem: the start of the log line, such as "the result could not be saved".
        note: callback with the reason, before each retry.
        why: function (error) → the reason to retry, or None if the error is to be raised. By default, disk space and
            file descriptors may be lacking.
        then: further text for the log line: what waits for the attempt.
    """
    count = 0
    while True:
        try:
            return await attempt()
        except Exception as error:
            reason = why(error)
            if reason is None:
                raise
            note(reason)
            count += 1
            if count & (count - 1) == 0:  # a power of two
                LOG.error("%s: %s Trying again every %g s.%s", problem, reason, RETRY_S, then)
            await asyncio.sleep(RETRY_S)


async def wait_for_end(*tasks: asyncio.Task[None] | None) -> None:
    """Wait until these tasks have ended, with or without an error. Arguments that are None are skipped."""
    if begun := [task for task in tasks if task is not None]:
        await asyncio.wait(begun)
