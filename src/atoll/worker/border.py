"""Where an error leaves Atoll for the program that called it: short, and with an exit code that tells its kind.

A user needs the line of his own script and what the error says; which of our functions passed it on is for us, and goes
to the logger `atoll` at DEBUG.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from atoll.errors import AtollError
from atoll.worker.reporting import LOG

P = ParamSpec("P")
R = TypeVar("R")

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

    return call


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
