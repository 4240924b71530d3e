"""Outer state with one value per tensor (`step`), and the outer step of optimizers that need whole tensors.

An optimizer that needs whole tensors runs before the parts are made. Each tensor is read, reduced, stepped and written,
one after the other. The memory needed is a few times the largest tensor: values, gradient and state.
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
    """The entries of a state file with one value per tensor, before and after a round; a few bytes per tensor.

    Args:
        layout: layout of the state file; None if there is no state file, or if the optimizer steps whole tensors.
        fd: the state file from before the round; None in the first round.
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
        """Return copies of a tensor's entries from before the round: key → value."""
        return {key: value.clone() for key, value in self._before.get(tensor, {}).items()}

    def set(self, tensor: str, key: str, value: Tensor) -> None:
        """Store the new value of the entry `key` of a tensor, for `write`."""
        self._after[tensor][key].copy_(value)

    def write(self, fd: int) -> None:
        """Write the new values of all entries to the state file of the next version."""
        for offset, values in self._ranges:
            write_at(fd, bytes_of(values), offset)


def step_whole_tensors(
    planned: FragmentPlan,
    rule: OuterRule,
    updates: Updates,
    base: tuple[int, int | None],
    out: tuple[int, int | None],
) -> float:
    """Step every parameter of a version, and write parameters and outer state.

    If versions are downloaded through a codec, only the outer state with its masters is written.

    Args:
        planned: layouts of the fragment.
        rule: the outer optimizer.
        updates: the updates of the round.
        base: files to read: the base version and its outer state, or None if there is no state.
        out: files to write: the next version and its outer state, or None if there is no state.

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
        if planned.downlink is None:  # else `make_version` makes the version part by part, from the master
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
