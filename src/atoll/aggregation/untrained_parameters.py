"""Find the parameters that no site trains, so that the outer optimizer does not move them.

Weight decay moves a parameter of pseudo-gradient zero. That is right for a parameter that is trained, and wrong
for one that all sites keep frozen. A parameter counts as untrained in a round if two things hold:

    updates        each update of the round has zeros in all its elements
    outer state    it is still as after a step along a gradient of zeros, so no earlier update has changed it

So a parameter with momentum goes on moving in a round without a gradient, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.aggregation.decode_updates import Updates, read_at
from atoll.aggregation.outer_state import Entries
from atoll.blobs.model_file import MASTER
from atoll.outer_optimizers.torch_optimizer import OuterRule
from atoll.tensors.byte_runs import RunTable
from atoll.tensors.chunks import Scratch, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Segment


def untrained(
    rule: OuterRule, runs: RunTable, updates: Updates, entries: Entries, state_fd: int | None
) -> frozenset[str]:
    """Return the names of the untrained parameters of a round; none if the outer optimizer moves none of them.

    Args:
        rule: the outer optimizer.
        runs: byte runs of the version.
        updates: the updates of the round.
        entries: segments of the outer state: name of a parameter → key → segment.
        state_fd: file of the outer state; None in the first round, or if there is no such state.
    """
    if not rule.moves_untrained:
        return frozenset()
    scratch, found = Scratch(runs.max_elements), set()
    for segment in runs.layout.segments:
        spec = segment.spec
        if not (spec.is_stepped and spec.numel):
            continue
        is_zero = updates.hold(segment, runs, scratch, lambda values: not values.any())
        if is_zero and (state_fd is None or _is_untouched(rule, segment, entries, state_fd, runs.max_elements)):
            found.add(spec.name)
    return frozenset(found)


def _in_chunks(numel: int, size: int, holds: Callable[[int, int], bool]) -> bool:
    return all(holds(start, min(start + size, numel)) for start in range(0, numel, size))


def _is_untouched(rule: OuterRule, segment: Segment, entries: Entries, state_fd: int, size: int) -> bool:
    """Return whether a parameter's outer state is as after steps along zeros. Values of the whole tensor may differ."""
    spec, in_chunks = segment.spec, rule.granularity == "chunk"
    zeros = torch.zeros((1,) if in_chunks else spec.shape, dtype=accumulate_dtype(spec.dtype))
    (blank,) = rule.stepper().step_([zeros], [torch.zeros_like(zeros)], None, [spec.name])
    for key, entry in entries.get(spec.name, {}).items():
        if key == MASTER or (in_chunks and blank[key].dim() == 0) or entry.spec.shape == ():
            continue

        def is_blank(start: int, stop: int, entry: Segment = entry, values: Tensor = blank[key]) -> bool:
            stored = torch.empty(stop - start, dtype=torch_dtype(entry.spec.dtype))
            read_at(state_fd, bytes_of(stored), entry.offset + start * entry.spec.item_bytes)
            return torch.equal(stored, (values if in_chunks else values.reshape(-1)[start:stop]).expand_as(stored))

        if not _in_chunks(entry.spec.numel, size, is_blank):
            return False
    return True
