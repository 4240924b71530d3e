"""Aggregates a closed round on the server: combines the updates in the store's files into the next version."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from atoll.aggregation.make_version import BaseDamaged, NextFiles, RoundFiles, make_version
from atoll.aggregation.plan import Plan
from atoll.errors import AtollError, StateCorrupt
from atoll.posix import file_error
from atoll.protocol import messages, run_events, status_messages
from atoll.protocol.values import FrozenRound, FrozenUpdate
from atoll.rounds.events import RoundClosed
from atoll.rounds.sampling import Sampling
from atoll.server.coordinator.accept_update import staleness
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.update_filters import Filtering
from atoll.server.coordinator.user_aggregator_process import Aggregator
from atoll.store.journal_tables import TicketRow, VersionRow
from atoll.store.store import Store
from atoll.store.versions import VersionDigests, VersionDraft

LOG = logging.getLogger("atoll.server")


def frozen_round(plan: Plan, store: Store, closed: RoundClosed, rows: Sequence[TicketRow], number: int) -> FrozenRound:
    """Return the record of a closed round, read from the journal. The next version is made from this record.

    Args:
        plan: plan of the run.
        store: store of the run.
        closed: the closed round.
        rows: the tickets of its updates, in order.
        number: number of the round.
    """
    fragment, base_version = closed.fragment, closed.base_version
    frozen, lost = store.run_log.round(fragment, base_version), store.run_log.lost_versions(fragment)
    summary = json.loads(store.versions.get(fragment, base_version).summary_json or "{}")
    total = frozen.total_weight if frozen else 0.0
    settings = plan.settings
    sampling = Sampling(settings.rounds.sample_fraction, settings.rounds.sample_min)

    return FrozenRound(
        fragment=fragment,
        number=number,
        base_version=base_version,
        version=store.versions.next_number(fragment),
        updates=frozen_updates(plan, rows, base_version, lost),
        expected=sampling.size(settings.rounds.sites) if not settings.async_.enabled else 0,
        population=frozen.population if frozen else 0,
        population_weight=total,
        population_scale=(summary.get("total_weight") or total) / total if total else 1.0,
        global_step=summary.get("global_step", 0.0),
        from_zero=store.run_log.generation.begins_at(base_version),
        sat_out=sorted(row.site for row in store.tickets.sitting_out(fragment)),
    )


def frozen_updates(plan: Plan, rows: Sequence[TicketRow], base_version: int, lost: Sequence[int]) -> list[FrozenUpdate]:
    """Return the updates of a closed round, with the factors of their weights.

    Args:
        plan: plan of the run.
        rows: the tickets of the updates, in order.
        base_version: the version that the round starts from.
        lost: numbers of lost versions.
    """
    lags = [staleness(base_version, row.base_version, lost) for row in rows]
    return [
        FrozenUpdate(
            ticket=row.ticket,
            site=row.site,
            digest=row.digest or "",
            weight=row.report.weight,
            steps=row.report.steps,
            norm=min(row.norm, sys.float_info.max),  # infinite if squares of fp64 values overflow
            staleness=lag,
            scale=plan.staleness_weight(lag),
            report=row.report,
            nbytes=row.bytes,
        )
        for row, lag in zip(rows, lags, strict=True)
    ]


class MadeVersion(NamedTuple):
    """The next version of a closed round, written and ready to be committed.

    Attributes:
        draft: its files.
        row: its row.
        summary: summary of the round.
        tickets: tickets of the updates from which it was made.
    """

    draft: VersionDraft
    row: VersionRow
    summary: status_messages.RoundSummary
    tickets: Sequence[int]

    @classmethod
    def of(
        cls,
        store: Store,
        draft: VersionDraft,
        written: VersionDigests,
        frozen: FrozenRound,
        summary: status_messages.RoundSummary,
    ) -> Self:
        """Make a draft with all its files ready to be committed. Call it in a thread if files were written.

        Args:
            store: store of the run.
            draft: the draft.
            written: digests of its files.
            frozen: record of the closed round.
            summary: summary of the round.

        Raises:
            SyncFailed: fsync failed; the server must end.
        """
        row = store.versions.finish(draft, written, summary_json=summary.model_dump_json(exclude={"sites"}))
        return cls(draft, row, summary, frozen.tickets)

    def commit(self, store: Store) -> None:
        """Write the rows of the version. Call it inside a transaction.

        Raises:
            StoreError: another version was committed meanwhile, or the round has other tickets.
        """
        sites = {each.site: each.model_dump_json() for each in self.summary.sites}
        store.versions.commit(self.draft, self.tickets, sites)


class LocalRounds:
    """Aggregates rounds on the server, with the run's reducers or with a user's aggregator in a separate process.

    It is the `RoundPlace` of runs without a swarm.
    """

    is_here = True

    def __init__(self, run: RunCore, filtering: Filtering) -> None:
        self._run, self._plan, self._store, self._filtering = run, run.plan, run.store, filtering
        self._aggregator: Aggregator | None = None
        self._cancelled = threading.Event()

    def start(self, fail: Callable[[AtollError], None]) -> None:
        """Start the user's aggregator, if the settings name one. Call this on the event loop.

        Args:
            fail: called on the event loop if the aggregator fails.

        Raises:
            ConfigError, RunFailed: the aggregator cannot be started.
        """
        if self._filtering.filters:
            LOG.info("filters for the updates and answers of sites: %s", self._filtering.filters)
        if self._plan.settings.aggregation.aggregator.path:
            loop = asyncio.get_running_loop()
            self._aggregator = Aggregator(
                self._plan, lambda error: loop.call_soon_threadsafe(fail, error), self._filtering
            )

    async def admit(self, message: messages.Join) -> None:
        """Do nothing: any worker that fits the run can take part."""

    def why_withheld(self, site: str, fragment: int) -> str:
        """Return an empty text: the server gives a ticket whenever a round is open."""
        return ""

    def trouble(self, fragment: int) -> str:
        """Return an empty text: the coordinator knows why a version cannot be written."""
        return ""

    def status(self, fragment: int) -> status_messages.PlaceStatus | None:
        """Return None: the server makes the versions."""
        return None

    def sources(self, fragment: int, version: int, digest: str) -> list[str]:
        """Return an empty list: the server has all versions."""
        return []

    async def deliver(self, lease: Lease, row: TicketRow, message: messages.Complete) -> messages.Receipt | None:
        """Return None: the parts of an update are at the server."""
        return None

    def on_event(self, event: run_events.Happened) -> None:
        """Pass accepted updates to a user's aggregator that wants them as they arrive. After a round, sweep filters."""
        match event:
            case run_events.UpdateAccepted(ticket=ticket, round=number) if self._aggregator is not None:
                self._aggregator.offer(self._store, self._store.tickets.get(ticket), number)
            case run_events.RoundEnded() if event.summary.version is not None:
                self._filtering.sweep()
                self._filtering.filters.warn_of_strangers(self._run.roster)

    def tick(self) -> None:
        """Do nothing."""

    async def aggregate(self, closed: RoundClosed, number: int) -> MadeVersion:
        """Aggregate the updates of a closed round, step the outer optimizer, and write the next version.

        The work runs in a pool thread. If filtered updates were lost in a restart, they are filtered again first.

        Args:
            closed: the closed round.
            number: number of the round.

        Raises:
            RunFailed: the user's aggregator failed, or the result is not finite; the round stays closed.
            DiskFull: the disk is full. Nothing is lost; the same call can be repeated.
            StateCorrupt: the file of the base version is damaged. The next start uses the newest intact version.
            StoreError: the disk failed.
            SyncFailed: fsync failed; the server must end.
        """
        rows = self._store.tickets.get_all(closed.tickets)
        frozen = frozen_round(self._plan, self._store, closed, rows, number)
        await self._filtering.prepare_accepted(rows, number)
        return await asyncio.get_running_loop().run_in_executor(self._run.io, self._aggregate, frozen, rows)

    def _aggregate(self, frozen: FrozenRound, rows: Sequence[TicketRow]) -> MadeVersion:
        store, aggregator, begin_s = self._store, self._aggregator, time.monotonic()
        fragment, base_version, number = frozen.fragment, frozen.base_version, frozen.number
        with store.versions.pin(fragment, base_version) as base:
            draft = store.versions.begin(fragment, frozen.version)
            try:
                result = make_version(
                    self._plan.of_round(number),
                    frozen,
                    RoundFiles(
                        base_fd=base.fd,
                        state_fd=store.versions.state_file(fragment) if base.row.state_digests else None,
                        updates={row.ticket: self._filtering.source(row) for row in rows},
                        base_digests=base.row.part_digests,
                        base_state_digests=base.row.state_digests,
                        reduced_fd=aggregator.aggregate(store, rows, number, self._cancelled) if aggregator else None,
                    ),
                    NextFiles(*draft.fds),
                    self._cancelled,
                )
                summary = summary_of(frozen, time.monotonic() - begin_s, result.grad_norm)
                return MadeVersion.of(store, draft, result, frozen, summary)
            except BaseException as error:
                draft.abandon()
                if isinstance(error, BaseDamaged):
                    raise StateCorrupt(
                        f"Version {base_version}{store.journal.of(fragment)} was damaged on disk while the server "
                        f"was running: {error.message}",
                        f"Check the disk of {store.slots.folder}, then start the run again: it continues from "
                        "the newest undamaged version.",
                    ) from error
                if isinstance(error, OSError):
                    raise file_error(error, store.slots.folder / f"version {frozen.version}") from error
                raise

    def cancel(self) -> None:
        """Cancel the running aggregation, if there is one."""
        self._cancelled.set()

    def close(self) -> None:
        """End the process of the user's aggregator, if there is one, and close the filtered updates."""
        if self._aggregator is not None:
            self._aggregator.close()
        self._filtering.close()


def summary_of(frozen: FrozenRound, seconds: float, grad_norm: float) -> status_messages.RoundSummary:
    """Return a round's summary. Each metric is the weighted mean over the updates that report it.

    Args:
        frozen: record of the closed round.
        seconds: how long it took to make the version.
        grad_norm: L2 norm of the pseudo-gradient, the aggregate of the updates.
    """
    updates = frozen.updates
    means: dict[str, float] = {}
    counts: dict[str, int] = {}
    for key in sorted({key for each in updates for key in each.report.metrics}):
        reported = [(each.report.metrics[key], each.weight) for each in updates if key in each.report.metrics]
        mean = sum(value * weight for value, weight in reported) / sum(weight for _, weight in reported)
        if not math.isfinite(mean):  # a product or the sum has overflowed, but the mean is between the values
            total, values = sum(weight for _, weight in reported), [value for value, _ in reported]
            mean = sum(value * (weight / total) for value, weight in reported)
            mean = max(min(values), min(max(values), mean))  # after the last rounding, too
        means[key] = mean
        counts[key] = len(reported)
    trained = len(updates) if frozen.expected else max(len(updates), frozen.population)
    return status_messages.RoundSummary(
        global_step=frozen.global_step + sum(each.steps for each in updates) / trained,
        fragment=frozen.fragment,
        round=frozen.number,
        version=frozen.version,
        sites=sorted(map(_site_round, updates), key=lambda each: each.site),
        metrics=means,
        counts=counts,
        seconds=seconds,
        grad_norm=grad_norm if math.isfinite(grad_norm) else None,
        bytes_up=sum(each.nbytes for each in updates),
        expected=frozen.expected,
        population=frozen.population,
        total_weight=frozen.population_weight or None,
        sat_out=frozen.sat_out,
    )


def _site_round(update: FrozenUpdate) -> status_messages.SiteRound:
    return status_messages.SiteRound(
        **dict(update.report),
        site=update.site,
        staleness=update.staleness,
        nbytes=update.nbytes,
        norm=update.norm if math.isfinite(update.norm) else None,
    )
