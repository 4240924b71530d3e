"""Run a closed round's pass over real files, and commit what comes of it. No decision is taken here."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence

from atoll.aggregation.close import PassInputs, PassOutputs, UpdateSource, run_pass
from atoll.server.aggregator import Aggregator
from atoll.server.filters import Filtering
from atoll.server.outcome import staleness
from atoll.server.plan import Plan
from atoll.store.rows import TicketRow, VersionRow
from atoll.store.slots import disk_error
from atoll.store.store import Store
from atoll.wire import status_messages
from atoll.wire.units import size

WEIGHTS_APART = 4.0
"""Largest by smallest weight of a round, from which on it is said what SCAFFOLD makes of it."""


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
        RunFailed: the aggregator failed; the round stays frozen.
        DiskFull: nothing is lost; the same call may be made again.
        StoreError: the disk failed.
        SyncFailed: fsync failed; the server must end.
    """
    begin = time.monotonic()
    rows = [store.ticket(ticket) for ticket in tickets]
    planned = plan.fragments[fragment]
    base = store.pin_version(fragment, base_version)
    version = store.next_version(fragment)
    draft = store.begin_version(fragment, version)
    frozen = store.round(fragment, base_version)
    population = frozen.population if frozen else 0
    lost = store.lost_versions(fragment)
    behind = [staleness(base_version, row.base_version, lost) for row in rows]
    before = json.loads(base.row.summary_json or "{}").get("population", population)
    try:
        sources = [filtering.source(row) for row in rows]
        result = run_pass(
            PassInputs(
                version_layout=planned.version,
                base_fd=base.fd,
                updates=[
                    UpdateSource(row.site, source.fd, planned.update, row.weight, source.norm, plan.staleness_weight(s))
                    for row, source, s in zip(rows, sources, behind, strict=True)
                ],
                state_header=planned.state[0] if planned.state else b"",
                state_layout=planned.state_layout,
                state_fd=store.state_file(fragment) if base.row.state_digests else None,
                control_scale=before / population if population else 1.0,
                downlink=planned.downlink,
                reduced=aggregator.aggregate(store, rows, number, cancelled) if aggregator else None,
            ),
            PassOutputs(draft.version_fd, draft.state_fd, draft.delta_fd),
            rule=plan.rule,
            reducers=plan.reducers_of(population, [row.steps for row in rows]),
            codecs=plan.codecs,
            threads=plan.threads,
            cancelled=cancelled,
            tables=planned.tables,
        )
        summary = _summary(fragment, number, version, rows, time.monotonic() - begin, result.grad_norm, population)
        summary = summary.model_copy(update={"staleness": behind})
        row = store.commit_version(
            draft,
            digest=result.digest,
            part_digests=result.part_digests,
            state_digests=result.state_digests,
            delta_digest=planned.downlink.digest(result.delta_digests) if planned.downlink else "",
            delta_digests=result.delta_digests,
            summary_json=summary.model_dump_json(),
            tickets=tickets,
        )
    except OSError as error:
        draft.abandon()
        raise disk_error(error, store.slots_directory / f"version {version}") from error
    except BaseException:
        draft.abandon()
        raise
    finally:
        base.release()
    return row, summary


def _summary(
    fragment: int,
    number: int,
    version: int,
    rows: Sequence[TicketRow],
    seconds: float,
    grad_norm: float,
    population: int,
) -> status_messages.RoundSummary:
    """Metrics are averaged by the updates' weights, per key over those that reported it."""
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
        population=population,
    )


def unequal_weights(summary: status_messages.RoundSummary) -> str:
    """What to say of a round with controls where weights differ much; nothing where they do not."""
    (least, light), (most, heavy) = (f(zip(summary.weights, summary.workers, strict=True)) for f in (min, max))
    if most < WEIGHTS_APART * least:
        return ""
    return (
        f"the weights of round {summary.round} go from {least:g} ({light}) to {most:g} ({heavy}). SCAFFOLD's controls "
        "count every site alike, so that it trains what is best for their plain mean. Let all sites submit with the "
        "same weight, and make about as many steps; or run fedavg or fednova"
    )


def in_words(summary: status_messages.RoundSummary, row: VersionRow, *, streams: bool = False) -> str:
    """A round, for the log."""
    of = f" of fragment {summary.fragment}" if streams else ""
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in summary.metrics.items())
    behind = f", {', '.join(map(str, summary.staleness))} behind" if any(summary.staleness) else ""
    count = len(summary.workers)
    return (
        f"round {summary.round}{of}: version {row.version} from {count} update{'' if count == 1 else 's'} "
        f"({', '.join(summary.workers)}{behind}), {size(summary.bytes_up)}, reduced in {summary.seconds:.2f} s"
        f"{f'; {numbers}' if numbers else ''}"
    )
