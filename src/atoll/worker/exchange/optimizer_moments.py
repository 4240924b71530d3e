"""Updates that are refused, and what the optimizer remembers then: NaN in its moments makes every later step NaN."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import UpdateRefused
from atoll.worker.log_lines import LOG
from atoll.worker.session.session import Session

NAMED = 3
OF_THE_OPTIMIZER = -1
"""Under this number, in place of a fragment's, a worker warns of its optimizer."""

_warned: WeakSet[Session] = WeakSet()


def say_refused(session: Session, error: UpdateRefused, *, first: bool) -> None:
    """Say that an update was refused, and at the first one in a row whether the optimizer can recover from it."""
    LOG.warning("%s: %s", session.site, error)
    if first and (told := broken_moments(session.optimizers)):
        LOG.warning("%s: %s", session.site, told)
        session.warn(OF_THE_OPTIMIZER, [told])
        _warned.add(session)


def say_accepted(session: Session) -> None:
    """An update counts: what was warned of the optimizer is taken back, once its state is finite again."""
    if session in _warned and not broken_moments(session.optimizers):
        _warned.discard(session)
        session.warn(OF_THE_OPTIMIZER, [])


def broken_moments(optimizers: Iterable[Optimizer]) -> str:
    """What to tell of moments that are not finite, and what to do; empty where all are."""
    broken = sorted(
        {
            str(key)
            for optimizer in optimizers
            for state in optimizer.state.values()
            for key, value in (state.items() if isinstance(state, dict) else ())
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())
        }
    )
    if not broken:
        return ""
    names = ", ".join(broken[:NAMED])
    return (
        f"the optimizer's state ({names}) holds NaN or Inf: every further step of it will, too, and so every further "
        "update be refused. Clear it with optimizer.state.clear(), or start the script again, with a lower learning "
        "rate or clipped gradients."
    )
