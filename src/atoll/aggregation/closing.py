"""A frozen round's pass over files that are there, wherever it runs: the same inputs give the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from atoll.aggregation.make_version import PassInputs, PassOutputs, PassResult, UpdateSource, run_pass
from atoll.aggregation.plan import Plan


def close(
    plan: Plan,
    fragment: int,
    *,
    base_fd: int,
    state_fd: int | None,
    updates: Sequence[UpdateSource],
    population_weight: float,
    population_scale: float,
    outputs: PassOutputs,
    cancelled: threading.Event,
    base_digests: tuple[bytes, ...] | None = None,
    base_state_digests: tuple[bytes, ...] | None = None,
    reduced: UpdateSource | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> PassResult:
    """Reduce these updates in their order, step, and write the next version of a fragment.

    Args:
        state_fd: the base's outer state; None where there is none yet.
        population_weight, population_scale, reduced, base_digests, base_state_digests: as `PassInputs`.

    Raises:
        CancelledError: (concurrent.futures) `cancelled` was set.
        Overflow: the next version would hold Inf or NaN.
        StateCorrupt: the base or its outer state is not what its digests say.
        OSError: the disk is full, or fails.
    """
    planned = plan.fragments[fragment]
    return run_pass(
        PassInputs(
            version_layout=planned.version,
            base_fd=base_fd,
            updates=updates,
            state_header=planned.state[0] if planned.state else b"",
            state_layout=planned.state_layout,
            state_fd=state_fd,
            population_weight=population_weight,
            population_scale=population_scale,
            downlink=planned.downlink,
            reduced=reduced,
            base_digests=base_digests,
            base_state_digests=base_state_digests,
        ),
        outputs,
        rule=plan.rule,
        reducers=plan.reducers,
        codecs=plan.codecs,
        threads=plan.threads,
        on_progress=on_progress,
        cancelled=cancelled,
        tables=planned.tables,
    )
