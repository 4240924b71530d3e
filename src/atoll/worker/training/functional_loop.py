"""The loop over rounds as functions, for scripts that cannot be turned into one.

    atoll.functional.init()
    while atoll.functional.is_running():
        atoll.functional.receive(into=model)
        train(model)
        atoll.functional.send(model)

One run at a time in a process; settings come from ATOLL_SERVER, ATOLL_SITE and ATOLL_DIR, as `atoll worker` sets them.
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
from atoll.worker.session.leave_at_exit import what_ends
from atoll.worker.training.federated_loop import LocalWorker, Model, Round, Worker, join


class _Part:
    """What this process knows of its run."""

    def __init__(self, worker: Worker | LocalWorker) -> None:
        self.worker = worker
        self.rounds: Iterator[Round] = iter(worker)
        self.round: Round | None = None
        self.has_received = self.over = False

    def next_round(self) -> Round | None:
        """The open round, or the next one; it is waited for. None at the end, when the worker has left."""
        if self.round is None and not self.over:
            self.round = next(self.rounds, None)
            if self.round is None:
                self.leave()
        return self.round

    def leave(self, error: BaseException | None = None) -> None:
        self.over, self.round, self.has_received = True, None, False
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
) -> None:
    """Take part in a run; the arguments are those of `join`. Without a server the script runs alone, for one round.

    The process leaves the run when the run is over, or when the process ends.

    Raises:
        UsageError: it takes part in one already.
        ConfigError, ServerUnreachable, StateLocked: as `join`.
    """
    global _part
    if _part is not None and not _part.over:
        raise UsageError("atoll.functional.init() was called twice.", "Call it once, before the loop.")
    worker = join(server, site, folder=folder, labels=labels, filters=filters, require_server=require_server)
    _part = _Part(worker)
    atexit.register(_leave_at_exit, _part)


@public_api
def is_running() -> bool:
    """Whether there is another round; it is waited for, as only then that is known.

    Raises:
        UsageError: `init` was not called.
    """
    return _current().next_round() is not None


@public_api
def receive(into: Model | None = None, *, framework: Literal["torch", "numpy"] = "torch") -> Round | None:
    """The round with its global model, in `params`; None when the run is over. Asked again in the same round, the same.

    Args:
        into: a model to be filled in place; then no new tensors are made.
        framework: of `params`.

    Raises:
        UsageError: `init` was not called.
        SchemaMismatch: `into` is not the model of the run.
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
    """Submit what the model has become; the arguments are those of `fl_round.submit`. This ends the round.

    Args:
        clear_cache: forget what was received and sent, so that its memory is free while others are awaited; `params` of
            what `receive` gave is emptied. With False both are kept, in `params` and `sent`.

    Raises:
        UsageError: `init` was not called, or nothing was received since the last `send`.
        SchemaMismatch, UsageError: as `fl_round.submit`.
    """
    part = _current()
    if part.round is None or not part.has_received:
        raise UsageError("There is no round to send to.", "Call atoll.functional.receive() first, once in every round.")
    part.round.submit(model, weight=weight, metrics=metrics, steps=steps, groups=groups)
    if clear_cache:
        part.round.params = {}
    else:
        part.round.sent = model
    part.round, part.has_received = None, False


def forget() -> None:
    """Another simulated site of this process may begin, however the one before has ended."""
    global _part
    _part = None
    atexit.unregister(_leave_at_exit)


def _current() -> _Part:
    if _part is None:
        raise UsageError("Atoll was not initialised.", "Call atoll.functional.init() first.")
    return _part


def _leave_at_exit(part: _Part) -> None:
    """Tell the server that this process ends, and by which error, where nothing caught it."""
    if not part.over:
        part.leave(what_ends())
