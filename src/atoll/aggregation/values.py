"""What the pass takes and gives: open files with their layouts, and digests. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.codecs.version_difference import Downlink
from atoll.tensors.layout import Layout


@dataclass(frozen=True)
class UpdateSource:
    """One accepted update.

    Attributes:
        site: who submitted it.
        fd: its spool.
        layout: how it lies there.
        weight: as submitted; finite and above zero.
        norm: L2, of all its `params`, as they were accepted.
        scale: of its `params`, on top of the normalised weight: what staleness leaves of it.
        steps: local optimizer steps that it reports.
    """

    site: str
    fd: int
    layout: Layout
    weight: float
    norm: float = 0.0
    scale: float = 1.0
    steps: int = 1


@dataclass(frozen=True)
class PassInputs:
    """What the next version follows from.

    Attributes:
        version_layout: of the base and of the next version.
        base_fd: the base version.
        updates: in the frozen order (by site name).
        state_header: first bytes of the state file, as `state_layout` gives them; empty where nothing is kept.
        state_layout: of the state file; None where nothing is kept.
        state_fd: the base's outer state; None in the first round.
        population_weight, population_scale: as `RoundFacts`.
        reduced: the pseudo-gradient of `params` where an aggregator has made one of the updates; they are then reduced
            in everything else only.
        downlink: how versions go down; None: whole. With one, the state file has a master of every parameter.
        base_digests: what the base is to be, as `PassResult.part_digests`; None: it is not checked.
        base_state_digests: likewise of the base's outer state.
    """

    version_layout: Layout
    base_fd: int
    updates: Sequence[UpdateSource]
    state_header: bytes = b""
    state_layout: Layout | None = None
    state_fd: int | None = None
    population_weight: float = 0.0
    population_scale: float = 1.0
    reduced: UpdateSource | None = None
    downlink: Downlink | None = None
    base_digests: tuple[bytes, ...] | None = None
    base_state_digests: tuple[bytes, ...] | None = None


@dataclass(frozen=True)
class PassOutputs:
    """Where the next version goes; files of (at least) the layouts' sizes that nobody reads or writes meanwhile."""

    version_fd: int
    state_fd: int | None = None
    delta_fd: int | None = None


@dataclass(frozen=True)
class PassResult:
    """What was written.

    Attributes:
        part_digests: BLAKE3 of each part of the version, as `state.version_regions`.
        state_digests: of the state file, as `state.state_regions`; empty where nothing is kept.
        delta_digests: of each part of what goes down, as `Downlink.parts`; empty where versions are pulled whole.
        digest: names the version (`Layout.update_digest`).
        grad_norm: L2 norm of the reduced pseudo-gradient; six digits, to be shown; infinite where it overflows.
        seconds: wall time.
    """

    part_digests: tuple[bytes, ...]
    state_digests: tuple[bytes, ...]
    digest: str
    grad_norm: float
    seconds: float
    delta_digests: tuple[bytes, ...] = ()
