"""No version holds Inf or NaN: a step, or a sum, beyond what the dtype can hold ends the run before it is published.

The initial model and every update are finite, so what is not finite came of the round's own arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregation.scratch import read_at
from atoll.aggregation.windows import Window
from atoll.errors import RunFailed
from atoll.tensors.chunks import bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.schema import FLOATS


class Overflow(RunFailed):
    """The next version would hold a value that its dtype cannot."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "Begin a new run in another state_dir from that version (atoll export) with a lower outer_lr or "
            "outer_momentum, smaller updates (the filter norm_clip), or a model in bf16 or fp32. A server that is "
            "started on this state_dir again comes to the same.",
        )


def require_finite(window: Window, values: Tensor, base_fd: int) -> None:
    """Check what the next version is to have of a window.

    Args:
        values: [numel], in the version's dtype.
        base_fd: of the version before it, for the message.

    Raises:
        Overflow: one of them is Inf or NaN.
    """
    if window.dtype not in FLOATS:
        return
    wide = values.to(accumulate_dtype(window.dtype))
    if bool(torch.dot(wide, wide).isfinite()):  # as a sum of squares: one quick pass, which no Inf or NaN survives
        return
    bad = wide.isfinite().logical_not_().nonzero()
    if not len(bad):
        return
    at = int(bad[0])
    for extent in window.extents:
        if at < extent.numel:
            break
        at -= extent.numel
    spec, dtype = extent.spec, torch_dtype(window.dtype)
    before = torch.empty(1, dtype=dtype)
    read_at(base_fd, bytes_of(before), extent.segment.offset + (extent.start + at) * dtype.itemsize)
    raise Overflow(
        f"The round's result overflows {window.dtype}, which holds values up to {torch.finfo(dtype).max:g}: element "
        f"{extent.start + at} of {spec.name!r} would go from {float(before):g} to {float(wide[bad[0]]):g}. No version "
        "is published; the last one stays."
    )
