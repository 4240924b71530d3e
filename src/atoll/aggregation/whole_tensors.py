"""Outer state that belongs to a tensor as a whole (`step`), and the step of optimizers that need whole tensors.

Such an optimizer steps one tensor after the other before the parts are made: each is read, reduced, stepped and
written. Memory is the largest tensor a few times over (values, gradient, state).
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregation.decode_updates import Updates, read_at
from atoll.aggregation.outer_state import WHOLES
from atoll.aggregation.plan import FragmentPlan
from atoll.blobs.model_file import MASTER
from atoll.outer_optimizers.torch_optimizer import OuterRule, State
from atoll.posix import write_at
from atoll.runtime import failpoint
from atoll.tensors.byte_runs import joined
from atoll.tensors.chunks import Scratch, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Layout, Segment


class WholeState:
    """The entries of a state file that belong to whole tensors, before and after a round; a few bytes per tensor.

    Args:
        layout: of the state file; None where it has none, or where the pass steps whole tensors.
        fd: the file as it was; None in the first round.
    """

    def __init__(self, layout: Layout | None, fd: int | None) -> None:
        segments = [segment for segment in layout.segments if segment.spec.group == WHOLES] if layout else []
        self._before: dict[str, State] = {}
        self._after: dict[str, State] = {}
        self._ranges: list[tuple[int, Tensor]] = []
        for low, nbytes in joined((segment.offset, segment.nbytes) for segment in segments):
            old, new = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
            if fd is not None:
                read_at(fd, bytes_of(old), low)
                new.copy_(old)
            self._ranges.append((low, new))
            for segment in segments:
                if low <= segment.offset < low + nbytes:
                    tensor, _, key = segment.spec.name.rpartition(".")
                    span = slice(segment.offset - low, segment.offset - low + segment.nbytes)
                    dtype, shape = torch_dtype(segment.spec.dtype), segment.spec.shape
                    self._before.setdefault(tensor, {})[key] = old[span].view(dtype).view(shape)
                    self._after.setdefault(tensor, {})[key] = new[span].view(dtype).view(shape)

    def clones(self, tensor: str) -> State:
        """Return the state of a tensor as it was, free to be changed."""
        return {key: value.clone() for key, value in self._before.get(tensor, {}).items()}

    def set(self, tensor: str, key: str, value: Tensor) -> None:
        """Keep what an entry becomes."""
        self._after[tensor][key].copy_(value)

    def write(self, fd: int) -> None:
        """Write what all entries became."""
        for offset, values in self._ranges:
            write_at(fd, bytes_of(values), offset)


def step_whole_tensors(
    planned: FragmentPlan,
    rule: OuterRule,
    updates: Updates,
    base: tuple[int, int | None],
    out: tuple[int, int | None],
) -> float:
    """Step every parameter of a version, and write it with its state.

    Args:
        base, out: files of the version and of its state, to be read and to be written; None: there is no state.

    Returns:
        The sum of squares of the reduced pseudo-gradient.
    """
    runs, stepper, squares = planned.version_runs, rule.stepper(), 0.0
    scratch = Scratch(runs.max_elements)
    for segment in planned.version.segments:
        spec = segment.spec
        if not (spec.numel and spec.is_stepped):
            continue
        failpoint("pass.chunk")
        values, state = _read(base[0], segment), planned.entries.get(spec.name, {})
        before = None if base[1] is None else {key: _read(base[1], entry) for key, entry in state.items()}
        theta = before.pop(MASTER) if before and MASTER in before else values.to(accumulate_dtype(spec.dtype))
        g = torch.empty(spec.numel, dtype=theta.dtype)
        for start in range(0, spec.numel, runs.max_elements):
            stop = min(start + runs.max_elements, spec.numel)
            g[start:stop].copy_(updates.reduce(runs.run(segment, start, stop), scratch)[0])
        squares += float(torch.dot(g, g))
        states = None if before is None else [before]
        (after,) = stepper.step_([theta], [g.view(spec.shape)], states, [spec.name])
        failpoint("pass.write")
        if planned.downlink is None:  # else what goes down of it is made part by part
            _write(out[0], segment, values.copy_(theta))
        for key, entry in state.items():
            assert out[1] is not None
            _write(out[1], entry, theta if key == MASTER else after[key])
    return squares


def _read(fd: int, segment: Segment) -> Tensor:
    stored = torch.empty(segment.nbytes, dtype=torch.uint8)
    read_at(fd, bytes_of(stored), segment.offset)
    return stored.view(torch_dtype(segment.spec.dtype)).view(segment.spec.shape)


def _write(fd: int, segment: Segment, value: Tensor) -> None:
    write_at(fd, bytes_of(value.contiguous()), segment.offset)
