"""A site whose rounds a test takes one by one."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

import atoll


class ManualSite:
    """A worker of `atoll.join`, which joins when it has to, and its current round.

    Args:
        server, site, options: of `atoll.join`.
    """

    def __init__(self, server: str, site: str | None = None, **options: Any) -> None:
        self._given = {"server": server, "site": site, **options}
        self.round: Any = None  # what `next_round` gave

    @cached_property
    def worker(self) -> Any:
        """The worker, which has joined."""
        return atoll.join(**self._given)

    def join(self) -> ManualSite:
        """Join now."""
        assert self.worker is not None
        return self

    def __enter__(self) -> ManualSite:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run, where it was joined."""
        if "worker" in vars(self):
            vars(self).pop("worker").leave(error)

    @property
    def _place(self) -> Any:
        return self.worker._backend.participation

    def next_round(self, wait_s: float | None = None) -> int | None:
        """Wait for a round; its number."""
        self.round = self.worker.next_round(wait_s)
        return self.round.number if self.round is not None else None

    def pull(self, into: Any = None, framework: Any = "torch") -> dict[str, Any]:
        """The version that the round starts from, in new tensors or in those of `into`."""
        if into is None:
            return self.round.state_dict(framework)
        self.round.load_into(into)
        return dict(into.state_dict(keep_vars=True)) if isinstance(into, nn.Module) else into

    def submit(self, model: Any, **how: Any) -> None:
        """Submit what the model has become."""
        self.round.submit(model, **how)
