"""`atoll.functional`: federated rounds as plain functions, for scripts that cannot use a loop over `atoll.join`.

    atoll.functional.init()
    while atoll.functional.is_running():
        atoll.functional.receive(into=model)
        train(model)
        atoll.functional.send(model)

A process takes part in one run at a time. Defaults come from ATOLL_SERVER, ATOLL_SITE and ATOLL_DIR, which `atoll
worker` sets.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch import nn

from atoll.errors import UsageError, public_api
from atoll.filters.base import Filter
from atoll.tensors.arrays import Arrays
from atoll.worker.exchange.script_state import WorkerState
from atoll.worker.session.leave_at_exit import what_ends
from atoll.worker.training.federated_loop import Model, Round, Worker, join


class _Part:
    """How this process takes part in its run: the worker, and the open round if there is one."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.rounds: Iterator[Round] = iter(worker)
        self.round: Round | None = None
        self.has_received = self.owes_update = self.is_over = False

    def next_round(self) -> Round | None:
        """Return the open round, or wait for the next one. At the end of the run, leave and return None."""
        if self.round is None and not self.is_over:
            self.round = next(self.rounds, None)
            if self.round is None:
                self.leave()
        return self.round

    def leave(self, error: BaseException | None = None) -> None:
        self.is_over, self.round, self.has_received, self.owes_update = True, None, False, False
        self.worker.leave(error)


_part: _Part | None = None


@public_api
def init(
    server: str | None = None,
    site: str | None = None,
    *,
    folder: str | Path | None = None,
    labels: dict[str, str] | None = None,
    filters: Sequence[Filter] = (),
    require_server: bool = False,
    swarm: bool = False,
) -> None:
    """Join a run. The arguments are those of `atoll.join`. Without a server, the script runs alone, for one round.

    The process leaves the run when the run is over or when the process ends.

    Raises:
        UsageError: this process already takes part in a run.
        ConfigError, PeerError, ServerLost, ServerUnreachable, StateLocked: as for `atoll.join`.
    """
    global _part
    if _part is not None and not _part.is_over:
        raise UsageError("atoll.functional.init() was called twice.", "Call it once, before the loop.")
    worker = join(
        server, site, folder=folder, labels=labels, filters=filters, require_server=require_server, swarm=swarm
    )
    _part = _Part(worker)
    atexit.register(_leave_at_exit, _part)


@public_api
def is_running() -> bool:
    """Wait for the next round; return whether there is one. If the open round was not received, return True at once.

    Raises:
        UsageError: `init` was not called, or `send` was not called after `receive`.
    """
    part = _current()
    if part.round is not None and part.owes_update:
        raise UsageError(
            f"Round {part.round.number} was received, but nothing was sent.",
            "Call atoll.functional.send(model) once in each round.",
        )
    return part.next_round() is not None


@public_api
def receive(into: Model | None = None, *, framework: Literal["torch", "numpy"] = "torch") -> Round | None:
    """Wait for the next round, load its global model, and return the round; None when the run is over.

    The model is loaded into `into`; without `into`, it is in the round's attribute `params`. Until `send` is called,
    further calls return the same round.

    Args:
        into: a model to load the global model into, in place; `params` then stays empty.
        framework: the kind of arrays in `params`.

    Raises:
        UsageError: `init` was not called.
        SchemaMismatch: `into` has other tensors than the run's model.
    """
    part = _current()
    round_ = part.next_round()
    if round_ is None:
        return None
    if into is not None:
        round_.load_into(into)
    if not part.has_received:
        round_.params = {} if into is not None else round_.state_dict(framework)
        part.has_received = True
    part.owes_update = True
    return round_


@public_api
def send(
    model: nn.Module | Arrays,
    *,
    weight: float = 1.0,
    metrics: dict[str, float] | None = None,
    steps: int = 0,
    groups: Mapping[str, Arrays] | None = None,
    clear_cache: bool = True,
) -> None:
    """Submit the trained model, and end the round. The other arguments are those of `Round.submit`.

    Args:
        clear_cache: whether to empty the round's attribute `params`, to free memory while this worker waits for the
            next round. If False, the received model stays in `params`, and the sent model is stored in the attribute
            `sent`.

    Raises:
        UsageError: `init` was not called, or nothing was received since the last `send`.
        SchemaMismatch, UsageError: as for `Round.submit`.
    """
    part = _current()
    if part.round is None or not part.has_received:
        raise UsageError(
            "There is no open round to send an update for.",
            "Call atoll.functional.receive() once in each round, before send().",
        )
    part.owes_update = False  # after an error, the script may receive the round again
    part.round.submit(model, weight=weight, metrics=metrics, steps=steps, groups=groups)
    if clear_cache:
        part.round.params = {}
    else:
        part.round.sent = model
    part.round, part.has_received = None, False


@public_api
def skip(*, metrics: dict[str, float] | None = None) -> None:
    """Sit out the round that `is_running` or `receive` has opened, as `Round.skip` does. No model is needed.

    Args:
        metrics: finite numbers by name, for the server's log.

    Raises:
        UsageError: `init` was not called, or no round is open.
    """
    part = _current()
    if part.round is None:
        raise UsageError(
            "There is no open round to skip.",
            "Call atoll.functional.is_running() or receive() once in each round, before skip().",
        )
    part.round.skip(metrics=metrics)
    part.round.params = {}
    part.round, part.has_received, part.owes_update = None, False, False


@public_api
def state() -> WorkerState:
    """Return what this site keeps for itself from update to update: `Worker.state`.

    Raises:
        UsageError: `init` was not called.
    """
    return _current().worker.state


def forget() -> None:
    """Forget that this process has called `init`, so that the next simulated site in this process can call it."""
    global _part
    _part = None
    atexit.unregister(_leave_at_exit)


def _current() -> _Part:
    if _part is None:
        raise UsageError("Atoll was not initialised.", "Call atoll.functional.init() first.")
    return _part


def _leave_at_exit(part: _Part) -> None:
    """Leave the run when the process ends. Tell the server about the uncaught error that ends the process, if any."""
    if not part.is_over:
        part.leave(what_ends())
