"""`atoll.functional.Client`: the protocol by hand, for programs that are neither of the two loops.

with atoll.functional.Client("http://host:8512", site="clinic-a") as client:
    ticket = client.next_round()
    state = client.pull()
    client.submit(train(state), weight=120)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn

from atoll.algorithms.optimizer_hooks import Given, StepHooks
from atoll.errors import UsageError, print_interrupt_in_a_line, public_api
from atoll.filters.base import Filter
from atoll.protocol import routes, status_messages
from atoll.protocol.values import Open, require
from atoll.tensors.arrays import Arrays
from atoll.tensors.module_tensors import named_tensors
from atoll.transport.http_client import http_to, server_of
from atoll.worker.exchange.participation import Participation, take_part
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.site_name import default_site, require_site
from atoll.worker.training.federated_loop import Round


@public_api
class Client:
    """A worker's requests, one by one.

    Args:
        server: address, `http://host:8512`.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        folder: where the base and outbox files lie.
        labels: anything to be shown in status.
        filters: that every update passes through, in this order, before any byte of it leaves.

    Nothing is sent before it is needed: `status` works without registering.
    """

    @public_api
    def __init__(
        self,
        server: str,
        site: str | None = None,
        *,
        folder: str | Path | None = None,
        labels: dict[str, str] | None = None,
        filters: Sequence[Filter] = (),
    ) -> None:
        self._server = server_of(server) or server
        self._site = require_site(site or default_site())
        self._folder = Path(folder) if folder else None
        self._labels = labels
        self._filters = filters
        self._place: Participation | None = None
        self._round: Round | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_interrupt_in_a_line(error)
        self.close(error)

    @public_api
    def register(self) -> Client:
        """Take part; the other requests do it when they have to."""
        if self._place is None:
            self._place = take_part(
                self._server,
                self._site,
                folder=self._folder,
                labels=self._labels,
                filters=self._filters,
            )
            self._place.exchange.recover()
        return self

    @public_api
    def next_round(self, wait_s: float | None = None) -> int | None:
        """Wait for the next round; its number, or None when the run is finished or the time is over."""
        place = self._registered()
        reply = require(place.exchange.next(wait_s))
        self._round = Round(place, reply.ticket) if isinstance(reply, Open) else None
        return self._round.number if self._round else None

    @public_api
    def pull(
        self, into: nn.Module | dict[str, Tensor] | None = None, *, framework: Literal["torch", "numpy"] = "torch"
    ) -> dict[str, Any]:
        """The version that the round starts from: new tensors or arrays by name, or `into`'s own, filled in place."""
        round_ = self._current()
        if into is None:
            return round_.state_dict(framework)
        model = round_.load_into(into)
        if not isinstance(model, nn.Module):
            return model
        owners, aliases = named_tensors(model)
        return owners | {alias: owners[owner] for alias, owner in aliases.items()}

    @public_api
    def correct(self, model: nn.Module, optimizer: Given) -> StepHooks:
        """Have the run's algorithm correct local training; a context manager that lets go of the optimizer."""
        return self._current().correct(model, optimizer)

    @public_api
    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return what the pulled version has beside the model in a group, by parameter's name; empty without one."""
        return self._current().global_state(group)

    @public_api
    def own_state(self, group: str) -> dict[str, Tensor]:
        """Return what the algorithm keeps at this site in a group, likewise."""
        return self._current().own_state(group)

    @public_api
    def submit(
        self,
        model: nn.Module | Arrays,
        *,
        weight: float = 1.0,
        metrics: dict[str, float] | None = None,
        steps: int = 0,
        groups: Mapping[str, Arrays] | None = None,
    ) -> None:
        """Submit what the model has become; returns when the server has it in its journal."""
        self._current().submit(model, weight=weight, metrics=metrics, steps=steps, groups=groups)

    @public_api
    def status(self) -> status_messages.Status:
        """The run at this moment."""
        return status(self._server)

    def close(self, error: BaseException | None = None) -> None:
        """Deregister. Idempotent."""
        place, self._place, self._round = self._place, None, None
        if place is not None:
            place.leave(last_words(error))

    def _registered(self) -> Participation:
        self.register()
        assert self._place is not None
        return self._place

    def _current(self) -> Round:
        if self._round is None:
            raise UsageError("There is no round.", "Call next_round() first.")
        return self._round


def status(server: str) -> status_messages.Status:
    """The status of the run at `server`, without taking part."""
    http = http_to(server)
    try:
        return http.get(routes.STATUS, status_messages.Status)
    finally:
        http.close()
