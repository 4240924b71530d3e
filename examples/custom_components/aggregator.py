"""An aggregator of your own: whole updates, which stay on disk; one tensor at a time is in memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.aggregation.user_aggregator import Update


class ByAgreement:
    """The mean of the updates, each weighed by how much it points where the others do, and 0 if it points away."""

    def __init__(self, sharpness: float = 1.0) -> None:
        self.sharpness = sharpness

    def aggregate(self, updates: Sequence[Update]) -> Iterator[tuple[str, Tensor]]:
        """(name, pseudo-gradient) of every parameter; the outer optimizer then steps against it."""
        dots = torch.zeros(len(updates), len(updates), dtype=torch.float64)
        for name in updates[0].tensors:
            rows = torch.stack([update.tensors[name].double().flatten() for update in updates])
            dots += rows @ rows.T
        lengths = dots.diagonal().sqrt().clamp(min=1e-12)
        agreement = (dots / lengths / lengths[:, None]).mean(dim=1).clamp(min=0) ** self.sharpness
        shares = (agreement / agreement.sum()).tolist() if agreement.sum() > 0 else [1 / len(updates)] * len(updates)
        for name in updates[0].tensors:
            yield name, sum(update.tensors[name].float() * share for update, share in zip(updates, shares, strict=True))
