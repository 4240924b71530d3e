"""Calls methods before every step of every optimizer of this process."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

Listener: TypeAlias = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""A function that is called before a step, with the optimizer and the arguments of its `step`."""
_listeners: dict[int, weakref.WeakMethod[Listener]] = {}
_installing = threading.Lock()
_installed: list[Any] = []
"""The hook of all optimizers. It stays: another thread may be calling the hooks, which must not change then."""


def before_every_step(method: Listener) -> None:
    """Call a method before every step of every optimizer of this process, as long as the method's object exists."""
    key = id(method.__self__)  # type: ignore[attr-defined]
    _listeners[key] = weakref.WeakMethod(method, lambda _: _listeners.pop(key, None))
    with _installing:
        if not _installed:
            hook: Any = _call_listeners
            if "torch._dynamo" in sys.modules:  # else there is no optimizer yet, and the import takes seconds
                hook = torch.compiler.disable(_call_listeners)  # type: ignore[no-untyped-call]
            _installed.append(register_optimizer_step_pre_hook(hook))


def no_longer_before_steps(method: Listener) -> None:
    """End what `before_every_step` has begun for the method's object. Idempotent."""
    _listeners.pop(id(method.__self__), None)  # type: ignore[attr-defined]


def _call_listeners(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    for each in list(_listeners.values()):
        method = each()
        if method is not None:
            method(optimizer, args, kwargs)
