"""Decorators of public functions and classes: they hide internal frames, and set the exit code of a script.

A user needs the line of the script and what the error says. The functions of Atoll that passed it on go to the logger
`atoll` at DEBUG.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from atoll.errors import AtollError

LOG = logging.getLogger("atoll")

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def border(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose errors come without the frames and the causes inside Atoll."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except AtollError as error:
            LOG.debug("%s", error, exc_info=True)
            _tell_by_exit_code()
            raise error.with_traceback(None) from None
        except KeyboardInterrupt:
            say_interrupt_in_a_line()
            raise

    vars(call)[_MARK] = True
    return call


def bordered(cls: C) -> C:
    """A public class: `border` around its constructor, its public methods and its properties.

    Not around generators: what they raise comes when they are iterated.
    """
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name not in _ENTRIES:
            continue
        if inspect.isfunction(member) and not inspect.isgeneratorfunction(member) and not is_border(member):
            setattr(cls, name, border(member))
        elif isinstance(member, classmethod) and not is_border(member.__func__):
            setattr(cls, name, classmethod(border(member.__func__)))
        elif isinstance(member, property) and member.fget is not None and not is_border(member.fget):
            setattr(cls, name, member.getter(border(member.fget)))
    return cls


def is_border(function: Callable[..., Any]) -> bool:
    """Whether an error that leaves this function has an exit code."""
    return _MARK in vars(function)


_MARK = "_is_border"
_ENTRIES = ("__init__", "__call__", "__enter__", "__getitem__")

_hook_before: Hook | None = None


def _tell_by_exit_code() -> None:
    """Let an error of Atoll that nobody catches end the program with its `exit_code`, where Python would say 1."""
    global _hook_before
    interactive = hasattr(sys, "ps1") or sys.flags.interactive  # there an error must not end the session
    if _hook_before is None and not interactive:
        _hook_before, sys.excepthook = sys.excepthook, _print_and_exit


def say_interrupt_in_a_line(error: BaseException | None = None) -> None:
    """Let Ctrl-C that nothing catches end the program with one line, where Python would print a traceback.

    The exit status stays Python's: the process ends by SIGINT, which a shell calls 130.

    Args:
        error: what ends a block; nothing is done where it is no interrupt.
    """
    if (error is None or isinstance(error, KeyboardInterrupt)) and sys.excepthook is sys.__excepthook__:
        _tell_by_exit_code()


def _print_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _hook_before is not None
    if isinstance(error, KeyboardInterrupt) and _hook_before is sys.__excepthook__:
        print("atoll: interrupted", file=sys.stderr, flush=True)
        return
    _hook_before(kind, error, trace)
    if isinstance(error, AtollError):
        raise SystemExit(error.exit_code)
