"""One loop at a time follows a parameter in a process: two on one optimizer would wait for each other, for ever."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from atoll.algorithms.optimizer_hooks import held_by
from atoll.errors import UsageError

_active: weakref.WeakKeyDictionary[object, list[object]] = weakref.WeakKeyDictionary()
"""Loop → what it claims; held, so that no other object gets its id."""
_lock = threading.Lock()


def claim(loop: object, optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Claim optimizers and the parameters that are trained for a loop, until `release`.

    Args:
        parameters: of its model, by name; frozen ones may have several loops.

    Raises:
        UsageError: another loop that is active has one of them.
    """
    held = held_by(optimizers)
    names = {id(each): name for name, each in parameters.items() if each.requires_grad or id(each) in held}
    with _lock:
        taken = {id(each) for other, claimed in _active.items() if other is not loop for each in claimed}
        if any(id(each) in taken for each in optimizers) or not taken.isdisjoint(names):
            which = next((f"parameter {names[each]!r}" for each in names if each in taken), "the optimizer")
            raise UsageError(
                f"Another DiLoCo of this process is active, and trains {which}, too.",
                "Leave its `with` block, or call its stop(), before this one starts. One DiLoCo takes several "
                "optimizers of a model, as a list.",
            )
        _active[loop] = [*optimizers, *(each for each in parameters.values() if id(each) in names)]


def release(loop: object) -> None:
    """Let other loops have what this one has claimed. Idempotent."""
    with _lock:
        _active.pop(loop, None)
