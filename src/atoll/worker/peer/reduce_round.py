"""A frozen round, reduced by a worker of a swarm: the same pass as a server's, over the files that it holds."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.aggregation.closing import close
from atoll.aggregation.jobs import run_jobs
from atoll.aggregation.overflow import Overflow
from atoll.aggregation.plan import Plan
from atoll.aggregation.result_file import write_result
from atoll.aggregation.values import PassOutputs, UpdateSource
from atoll.aggregation.version_digests import in_text
from atoll.config import Settings
from atoll.errors import AtollError, StateCorrupt, VersionSkew
from atoll.protocol.swarm_messages import Close, Closed, PeerWork, Share, SwarmPlan
from atoll.store.file_slots import VERSION, Slot, disk_error, region_digest
from atoll.worker.log_lines import LOG, told
from atoll.worker.peer.peer_store import Shelf, Spool, Version

Key = tuple[object, ...]
"""Of a job: what it is for."""


class UpdateDamaged(StateCorrupt):
    """The disk has changed an update since it was collected."""

    def __init__(self, share: Share) -> None:
        super().__init__(f"The update of {share.site} is not what came: the disk has changed it.", "Look at the disk.")
        self.ticket = share.ticket


def reduced(
    plan: Plan,
    work: Close,
    base: Version,
    spools: Mapping[int, Spool],
    version: Slot,
    state: Slot | None,
    *,
    cancelled: threading.Event,
    on_bytes: Callable[[int], None],
) -> tuple[Version, Closed]:
    """Write the next version and its outer state into slots that nobody else uses.

    Args:
        base: the version that the round starts from.
        spools: ticket → its update.
        on_bytes: told of the updates' bytes as they are looked at, and of the version's as they are made.

    Returns:
        The version, and what is said of it.

    Raises:
        CancelledError: (concurrent.futures) `cancelled` was set. OSError: the disk is full, or fails.
        Overflow: the next version would hold Inf or NaN.
        UpdateDamaged: an update is not what came. StateCorrupt: nor is the base.
    """
    begin, update, done = time.monotonic(), plan.fragments[work.fragment].update, 0
    _require_whole(plan, work, spools, cancelled, on_bytes)

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
            UpdateSource(each.site, spools[each.ticket].slot.fd, update, each.weight, each.norm, each.scale)
            for each in work.updates
        ],
        steps=[each.steps for each in work.updates],
        total_weight=work.total_weight,
        control_scale=work.control_scale,
        base_digests=base.part_digests,
        base_state_digests=base.state_digests,
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


def _require_whole(
    plan: Plan,
    work: Close,
    spools: Mapping[int, Spool],
    cancelled: threading.Event,
    on_bytes: Callable[[int], None],
) -> None:
    """Read every update once more: what lay on a disk since it came goes into the model only as it came."""
    parts = plan.fragments[work.fragment].update.parts

    def look(job: tuple[Share, int]) -> None:
        share, index = job
        spool, part = spools[share.ticket], parts[index]
        if region_digest(spool.slot.fd, ((part.start, part.nbytes),)) != spool.part_digests[index]:
            raise UpdateDamaged(share)
        on_bytes(part.nbytes)

    run_jobs([(share, part.index) for share in work.updates for part in parts], plan.threads, lambda: look, cancelled)


def failed(work: Close, why: str, *, overflows: bool = False) -> Closed:
    """What is said of a round that could not be reduced here."""
    tickets = [each.ticket for each in work.updates]
    return Closed(fragment=work.fragment, version=work.version, tickets=tickets, failed=why, overflows=overflows)


def failed_by(error: Exception, work: Close, folder: Path) -> Closed:
    """What the server is told of an error; another worker may have better luck. A traceback is for this worker's log.

    Args:
        folder: in which the version was to be written.
    """
    if isinstance(error, OSError):
        error = disk_error(error, folder / f"version {work.version}")
    if not isinstance(error, AtollError):
        LOG.error("a round could not be reduced", exc_info=error)
    if isinstance(error, Overflow):
        return failed(work, error.message, overflows=True)
    return failed(work, told(error, 500))


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
