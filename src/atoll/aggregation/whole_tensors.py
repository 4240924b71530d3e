"""The step of optimizers that need whole tensors, one tensor after the other, and their state of 0 dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregation.decode_updates import Updates
from atoll.aggregation.outer_state import MASTER, WHOLES, merged
from atoll.aggregation.scratch import Scratch, read_at
from atoll.aggregation.tables import Tables
from atoll.aggregation.values import PassInputs, PassOutputs
from atoll.aggregation.windows import Extent, kind_of, window_of
from atoll.failpoints import failpoint
from atoll.outer_optimizers.torch_optimizer import OuterRule, State
from atoll.posix import write_at
from atoll.tensors.chunks import bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Layout, Segment


class Wholes:
    """The wholes of a state file, as they were and as they become; a few bytes per tensor.

    Args:
        layout: of the state file; None where it has none, or where the pass steps whole tensors.
        fd: the file as it was; None in the first round.
    """

    def __init__(self, layout: Layout | None, fd: int | None) -> None:
        segments = [segment for segment in layout.segments if segment.spec.group == WHOLES] if layout else []
        self._before: dict[str, State] = {}
        self._after: dict[str, State] = {}
        self._runs: list[tuple[int, Tensor]] = []
        for low, nbytes in merged((segment.offset, segment.nbytes) for segment in segments):
            old, new = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
            if fd is not None:
                read_at(fd, bytes_of(old), low)
                new.copy_(old)
            self._runs.append((low, new))
            for segment in segments:
                if low <= segment.offset < low + nbytes:
                    tensor, _, key = segment.spec.name.rpartition(".")
                    span = slice(segment.offset - low, segment.offset - low + segment.nbytes)
                    dtype, shape = torch_dtype(segment.spec.dtype), segment.spec.shape
                    self._before.setdefault(tensor, {})[key] = old[span].view(dtype).view(shape)
                    self._after.setdefault(tensor, {})[key] = new[span].view(dtype).view(shape)

    def clones(self, tensor: str) -> State:
        """The state of a tensor as it was, free to be changed."""
        return {key: value.clone() for key, value in self._before.get(tensor, {}).items()}

    def set(self, tensor: str, key: str, value: Tensor) -> None:
        """What an entry becomes."""
        self._after[tensor][key].copy_(value)

    def write(self, fd: int) -> None:
        """Write what all entries became."""
        for offset, run in self._runs:
            write_at(fd, bytes_of(run), offset)


# -- The step for optimizers that need whole tensors: one tensor after the other, each read, reduced, stepped and
# written.
#
# Memory is the largest tensor a few times over (values, gradient, state). The parts are hashed from the file
# afterwards.


def step_whole(
    inputs: PassInputs,
    outputs: PassOutputs,
    rule: OuterRule,
    updates: Updates,
    tables: Tables,
    scratch: Scratch,
) -> float:
    """Step every parameter of the version, and write it and its state.

    Args:
        inputs, outputs, rule: as `run_pass`.
        updates: of the round.
        tables: say in which runs updates are reduced.
        scratch: for those runs.

    Returns:
        The sum of squares of the reduced pseudo-gradient.
    """
    stepper, squares, chunk_elements = rule.stepper(), 0.0, tables.windows.max_elements
    for segment in inputs.version_layout.segments:
        spec = segment.spec
        if not spec.numel or kind_of(spec, rule.granularity) != "whole":
            continue
        failpoint("pass.chunk")
        accumulate = accumulate_dtype(spec.dtype)
        values = _read(inputs.base_fd, segment)
        kept = tables.entries.get(spec.name, {})
        before = (
            None if inputs.state_fd is None else {key: _read(inputs.state_fd, entry) for key, entry in kept.items()}
        )
        master = before.pop(MASTER) if before and MASTER in before else values.to(accumulate)
        reduced = torch.empty(spec.numel, dtype=accumulate)
        for start in range(0, spec.numel, chunk_elements):
            stop = min(start + chunk_elements, spec.numel)
            window = window_of([Extent(segment, start, stop)], rule.granularity)
            updates.reduce_(window, reduced[start:stop], scratch)
        squares += float(torch.dot(reduced, reduced))
        states = None if before is None else [before]
        (after,) = stepper.step_([master], [reduced.view(spec.shape)], states, [spec.name])
        failpoint("pass.write")
        if inputs.downlink is None:  # else what goes down of it is made part by part
            _write(outputs.version_fd, segment, values.copy_(master))
        for key, entry in kept.items():
            assert outputs.state_fd is not None
            _write(outputs.state_fd, entry, master if key == MASTER else after[key])
    return squares


def _read(fd: int, segment: Segment) -> Tensor:
    stored = torch.empty(segment.nbytes, dtype=torch.uint8)
    read_at(fd, bytes_of(stored), segment.offset)
    return stored.view(torch_dtype(segment.spec.dtype)).view(segment.spec.shape)


def _write(fd: int, segment: Segment, value: Tensor) -> None:
    write_at(fd, bytes_of(value.contiguous()), segment.offset)
