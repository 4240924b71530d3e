"""A frozen round, reduced by a worker of a swarm: the same pass as a server's, over the files that it holds."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.aggregation.values import PassOutputs, UpdateSource
from atoll.config import Settings
from atoll.errors import AtollError, VersionSkew
from atoll.placement.closing import close
from atoll.placement.digests import in_text
from atoll.placement.plan import Plan
from atoll.placement.result import write_result
from atoll.store.slots import VERSION, Slot, disk_error
from atoll.wire.swarm_messages import Close, Closed, PeerWork, SwarmPlan
from atoll.worker.holding import Shelf, Version
from atoll.worker.reporting import LOG, told

Key = tuple[object, ...]
"""Of a job: what it is for."""


def reduced(
    plan: Plan,
    work: Close,
    base: Version,
    spools: Mapping[int, Slot],
    version: Slot,
    state: Slot | None,
    *,
    cancelled: threading.Event,
    on_bytes: Callable[[int], None],
) -> tuple[Version, Closed]:
    """Write the next version and its outer state into slots that nobody else uses.

    Args:
        base: the version that the round starts from.
        spools: ticket → where its update lies.
        on_bytes: told of the version's bytes as they are made.

    Returns:
        The version, and what is said of it.

    Raises:
        CancelledError: (concurrent.futures) `cancelled` was set. OSError: the disk is full, or fails.
    """
    begin, update, done = time.monotonic(), plan.fragments[work.fragment].update, 0

    def on_progress(nbytes: int) -> None:
        nonlocal done
        on_bytes(nbytes - done)
        done = nbytes

    result = close(
        plan,
        work.fragment,
        base_fd=base.slot.fd,
        state_fd=base.state.fd if base.state is not None else None,
        updates=[
            UpdateSource(each.site, spools[each.ticket].fd, update, each.weight, each.norm, each.scale)
            for each in work.updates
        ],
        steps=[each.steps for each in work.updates],
        population=work.population,
        control_scale=work.control_scale,
        outputs=PassOutputs(version.fd, state.fd if state is not None else None),
        cancelled=cancelled,
        on_progress=on_progress,
    )
    made = Version(
        fragment=work.fragment,
        version=work.version,
        digest=result.digest,
        slot=version,
        state=state if result.state_digests else None,
        part_digests=result.part_digests,
        state_digests=result.state_digests,
    )
    closed = Closed(
        fragment=work.fragment,
        version=work.version,
        tickets=[each.ticket for each in work.updates],
        digest=result.digest,
        part_digests=in_text(result.part_digests),
        state_digests=in_text(result.state_digests),
        grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
        seconds=time.monotonic() - begin,
    )
    return made, closed


def failed(work: Close, why: str) -> Closed:
    """What is said of a round that could not be reduced here."""
    return Closed(
        fragment=work.fragment, version=work.version, tickets=[each.ticket for each in work.updates], failed=why
    )


def why_failed(error: Exception, beside: Path) -> str:
    """What the server is told of it; another worker may have better luck. A traceback is for this worker's log.

    Args:
        beside: a file on the disk that was written to.
    """
    if isinstance(error, OSError):
        error = disk_error(error, beside)
    if not isinstance(error, AtollError):
        LOG.error("a round could not be reduced", exc_info=error)
    return told(error, 500)


def keep_result(site: str, plan: Plan, work: PeerWork, shelf: Shelf, target: Path) -> None:
    """Write the result of a finished run, and say so, or why it is not there."""
    try:
        result, why = result_of(plan, work, shelf, target), "not all of it has come"
    except AtollError as error:
        result, why = None, str(error)
    if result is not None:
        LOG.info("%s: the result of the run is in %s", site, result)
    elif work.finished:
        LOG.warning("%s: the result of the run is NOT in %s: %s; the other sites have it", site, target, why)


def result_of(plan: Plan, work: PeerWork, shelf: Shelf, target: Path) -> Path | None:
    """Write the result of a finished run, as the server would; None where it is not all here."""
    newest: dict[int, int] = {}
    for hold in work.hold:
        newest[hold.fragment] = max(hold.version, newest.get(hold.fragment, 0))
    found = [shelf.get(fragment, newest.get(fragment, -1)) for fragment in range(len(plan.fragments))]
    versions = [each for each in found if each is not None]
    if not work.finished or len(versions) < len(plan.fragments):
        return None
    with contextlib.ExitStack() as held:
        for each in versions:
            held.enter_context(shelf.reading(VERSION, each.fragment, [each.slot]))
        write_result(plan, [each.slot.fd for each in versions], target)
    return target


def plan_of(message: SwarmPlan, split_plan: Callable[[Settings], Plan]) -> Plan:
    """The plan of the server's settings, made here.

    Raises:
        VersionSkew: this Atoll does not know one of them, or what it names is not installed here.
    """
    try:
        return split_plan(Settings.build(dict(message.settings)))
    except AtollError as error:
        raise VersionSkew(
            f"This worker cannot aggregate what the server's settings say: {error.message}",
            f"Use the same Atoll version, and the same packages, at all sites. {error.remedy}",
        ) from error


def key_of(work: Close) -> Key:
    """What makes a frozen round this one."""
    return ("close", work.fragment, work.version, *(share.ticket for share in work.updates))
