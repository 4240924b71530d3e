"""Run a closed round's pass over real files, and commit what comes of it. No decision is taken here."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.aggregation.decode_updates import FrozenUpdate
from atoll.aggregation.make_version import BaseDamaged, FrozenRound, NextFiles, RoundFiles, UpdateFile, close
from atoll.aggregation.plan import Plan
from atoll.errors import StateCorrupt
from atoll.format_text import size, time_left
from atoll.protocol import status_messages
from atoll.rounds.sampling import Sampling
from atoll.server.coordinator.ledger_rows import staleness
from atoll.server.coordinator.user_aggregator_process import Aggregator
from atoll.server.update_filters import Filtering
from atoll.store.file_slots import disk_error
from atoll.store.journal_tables import TicketRow, VersionRow
from atoll.store.store import Store


@dataclass(frozen=True)
class Frozen:
    """What the journal says of a frozen round.

    Attributes:
        rows: its tickets, in order.
        behind: of each, how many versions its base is behind that of the round.
        scales: what staleness leaves of each.
        population: how many workers had joined the run.
        total_weight: of all of them; 0 where no reducer of the run needs it.
        expected: updates that the round has when no site is missing; 0: an asynchronous step.
        population_scale: the total weight when the base was made, divided by this one.
    """

    rows: list[TicketRow]
    behind: list[int]
    scales: list[float]
    population: int
    total_weight: float
    expected: int
    population_scale: float


def frozen_round(plan: Plan, store: Store, fragment: int, base_version: int, tickets: Sequence[int]) -> Frozen:
    """The round that these tickets were frozen for."""
    rows, frozen = [store.tickets.get(ticket) for ticket in tickets], store.run_log.round(fragment, base_version)
    lost = store.run_log.lost_versions(fragment)
    behind = [staleness(base_version, row.base_version, lost) for row in rows]
    summary = json.loads(store.versions.get(fragment, base_version).summary_json or "{}")
    population, total = (frozen.population, frozen.total_weight) if frozen else (0, 0.0)
    before = summary.get("total_weight") or total
    settings = plan.settings
    sampling = Sampling(settings.sample_fraction, settings.sample_min)
    return Frozen(
        rows,
        behind,
        [plan.staleness_weight(s) for s in behind],
        population,
        total,
        sampling.size(settings.num_workers) if settings.mode == "sync" else 0,
        before / total if total else 1.0,
    )


def close_round(
    plan: Plan,
    store: Store,
    fragment: int,
    base_version: int,
    tickets: Sequence[int],
    number: int,
    cancelled: threading.Event,
    filtering: Filtering,
    aggregator: Aggregator | None = None,
) -> tuple[VersionRow, status_messages.RoundSummary]:
    """Reduce exactly these tickets in this order, step, write the next version and move the head.

    Args:
        number: of the round, for its summary.
        filtering: what the server has made of updates.
        aggregator: the user's, which then makes one pseudo-gradient of the updates' `params`.

    Raises:
        RunFailed: the aggregator failed, or the result overflows; the round stays frozen.
        DiskFull: nothing is lost; the same call may be made again.
        StateCorrupt: the base is not what was written; the server ends, and falls back when it starts.
        StoreError: the disk failed.
        SyncFailed: fsync failed; the server must end.
    """
    begin = time.monotonic()
    frozen = frozen_round(plan, store, fragment, base_version, tickets)
    rows, planned = frozen.rows, plan.fragments[fragment]
    base = store.versions.pin(fragment, base_version)
    version = store.versions.next_number(fragment)
    draft = store.versions.begin(fragment, version)
    try:
        sources = [filtering.source(row) for row in rows]
        result = close(
            plan,
            FrozenRound(
                fragment,
                tuple(
                    FrozenUpdate(row.ticket, row.site, row.weight, row.norm, scale, row.steps)
                    for row, scale in zip(rows, frozen.scales, strict=True)
                ),
                frozen.total_weight,
                frozen.population_scale,
            ),
            RoundFiles(
                base.fd,
                store.versions.state_file(fragment) if base.row.state_digests else None,
                {row.ticket: UpdateFile(source.fd, source.norm) for row, source in zip(rows, sources, strict=True)},
                base.row.part_digests,
                base.row.state_digests,
                aggregator.aggregate(store, rows, number, cancelled) if aggregator else None,
            ),
            NextFiles(draft.version_fd, draft.state_fd, draft.delta_fd),
            cancelled,
        )
        seconds = time.monotonic() - begin
        summary = summary_of(fragment, number, version, frozen, seconds, result.grad_norm)
        row = store.versions.commit(
            draft,
            digest=result.digest,
            part_digests=result.part_digests,
            state_digests=result.state_digests,
            delta_digest=planned.downlink.digest(result.delta_digests) if planned.downlink else "",
            delta_digests=result.delta_digests,
            summary_json=summary.model_dump_json(),
            tickets=tickets,
        )
    except BaseDamaged as error:
        draft.abandon()
        raise StateCorrupt(
            f"Version {base_version} of fragment {fragment} was damaged on disk while the server ran: {error.message}",
            f"Look at the disk of {store.slots.folder}, then start the server again: it goes on from the newest "
            "version that is whole.",
        ) from error
    except OSError as error:
        draft.abandon()
        raise disk_error(error, store.slots.folder / f"version {version}") from error
    except BaseException:
        draft.abandon()
        raise
    finally:
        base.release()
    return row, summary


def summary_of(
    fragment: int, number: int, version: int, frozen: Frozen, seconds: float, grad_norm: float
) -> status_messages.RoundSummary:
    """What is told of a round; metrics are averaged by the updates' weights, per key over those that reported it."""
    rows = frozen.rows
    means: dict[str, float] = {}
    counts: dict[str, int] = {}
    for key in sorted({key for row in rows for key in row.metrics}):
        reported = [(row.metrics[key], row.weight) for row in rows if key in row.metrics]
        means[key] = sum(value * weight for value, weight in reported) / sum(weight for _, weight in reported)
        counts[key] = len(reported)
    return status_messages.RoundSummary(
        fragment=fragment,
        round=number,
        version=version,
        workers=[row.site for row in rows],
        weights=[row.weight for row in rows],
        metrics=means,
        counts=counts,
        seconds=seconds,
        grad_norm=grad_norm if math.isfinite(grad_norm) else None,
        bytes_up=sum(row.bytes for row in rows),
        expected=frozen.expected,
        population=frozen.population,
        total_weight=frozen.total_weight,
        staleness=frozen.behind,
    )


def in_words(
    summary: status_messages.RoundSummary, row: VersionRow, left_s: float | None, *, streams: bool = False
) -> str:
    """A round, for the log, and how long the run still takes."""
    left = f"; {told}" if (told := time_left(left_s)) else ""
    of = f" of fragment {summary.fragment}" if streams else ""
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in summary.metrics.items())
    behind = f", {', '.join(map(str, summary.staleness))} behind" if any(summary.staleness) else ""
    count = len(summary.workers)
    instead = f" instead of {summary.expected}" if count < summary.expected else ""
    return (
        f"round {summary.round}{of}: version {row.version} from {count} update{'' if count == 1 else 's'}{instead} "
        f"({', '.join(summary.workers)}{behind}), {size(summary.bytes_up)}, reduced in {summary.seconds:.2f} s"
        f"{f'; {numbers}' if numbers else ''}{left}"
    )
