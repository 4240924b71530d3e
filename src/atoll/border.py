"""How an error of Atoll reaches a user: one line on standard error, in commands, scripts and simulations alike.

The decorators of public functions and classes hide the frames inside Atoll, which go to the logger `atoll` at DEBUG.
A script that does not catch the error ends with one line, which names the line of the script, and with its exit code.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from atoll.errors import AtollError
from atoll.format_text import visible, visible_lines

LOG = logging.getLogger("atoll")

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def border(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: its errors come without the frames and the causes inside Atoll."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except AtollError as error:
            LOG.debug("%s", error, exc_info=True)
            _end_with_one_line()
            raise error.with_traceback(None) from None
        except KeyboardInterrupt:
            say_interrupt_in_a_line()
            raise

    vars(call)[_MARK] = True
    return call


def bordered(cls: C) -> C:
    """Decorate a public class: `border` around its constructor, its public methods and its properties.

    Generators are left out: they raise when they are iterated.
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
    """Return whether an error that leaves this function ends a script with one line and its exit code."""
    return _MARK in vars(function)


_MARK = "_is_border"
_ENTRIES = ("__init__", "__call__", "__enter__", "__getitem__")

_hook_before: Hook | None = None


def print_error(error: AtollError, where: str = "") -> None:
    """Print an error as one line on standard error.

    Where the user's code raised it, its traceback comes before that line.

    Args:
        where: the place in the user's script that the error came out of.
    """
    if error.trace:
        print(visible_lines(error.trace), file=sys.stderr)
    place = f" ({where})" if where else ""
    print(f"atoll: {visible(' '.join(str(error).split()))}{visible(place)}", file=sys.stderr, flush=True)


def _end_with_one_line() -> None:
    """Let an uncaught error of Atoll end the program with one line and its `exit_code`, not a traceback and 1."""
    global _hook_before
    interactive = hasattr(sys, "ps1") or sys.flags.interactive  # there an error must not end the session
    if _hook_before is None and not interactive:
        _hook_before, sys.excepthook = sys.excepthook, _print_and_exit


def say_interrupt_in_a_line(error: BaseException | None = None) -> None:
    """Let an uncaught Ctrl-C end the program with one line, in place of a traceback.

    The exit status stays Python's: the process ends by SIGINT, which a shell calls 130.

    Args:
        error: what ends a block; nothing is done where it is no interrupt.
    """
    if (error is None or isinstance(error, KeyboardInterrupt)) and sys.excepthook is sys.__excepthook__:
        _end_with_one_line()


def _print_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _hook_before is not None
    is_ours = _hook_before is sys.__excepthook__  # a hook that was there before prints as it likes
    if isinstance(error, KeyboardInterrupt) and is_ours:
        print("atoll: interrupted", file=sys.stderr, flush=True)
        return
    if isinstance(error, AtollError) and is_ours:
        print_error(error, _place(trace))
    else:
        _hook_before(kind, error, trace)
    if isinstance(error, AtollError):
        raise SystemExit(error.exit_code)


def _place(trace: TracebackType | None) -> str:
    """Return the last line of the traceback that is not Atoll's, as `train.py, line 7`."""
    inside = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(inside)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
