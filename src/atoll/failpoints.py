"""Places where a test may stop the process, switched on by the environment.

`ATOLL_FAILPOINTS="accept.before=kill;pass.chunk=kill@3;spool.write=enospc"` ends the process with SIGKILL the
first time `accept.before` is reached, the third time `pass.chunk` is, and makes `spool.write` raise ENOSPC.
`pause:PATH` waits until the file PATH exists, so that a test can look at a process in a known place; it says
that it is there by creating `PATH.reached`. `head.before=stop@1,2` stops the process (SIGSTOP) the first and the second
time, after a line on standard error: a test copies what lies on disk, and lets it go on (SIGCONT).
Without the variable a failpoint costs one truth test of an empty dict.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

VARIABLE = "ATOLL_FAILPOINTS"


def _parse(text: str) -> dict[str, tuple[str, frozenset[int]]]:
    """Read `name=action[@nth[,nth]]`, separated by `;`, as {name: (action, times)}."""
    actions: dict[str, tuple[str, frozenset[int]]] = {}
    for item in filter(None, text.split(";")):
        name, _, action = item.partition("=")
        action, _, times = action.partition("@")
        actions[name.strip()] = (action.strip(), frozenset(map(int, (times or "1").split(","))))
    return actions


_text = os.environ.get(VARIABLE, "")
_actions = _parse(_text)
_reached: dict[str, int] = {}
_lock = threading.Lock()


def switch_on(text: str) -> str:
    """Switch these failpoints on in place of the present ones, and count from zero; returns what was on before."""
    global _text, _actions
    with _lock:
        before, _text = _text, text
        _actions = _parse(text)
        _reached.clear()
    return before


def times_reached(name: str) -> int:
    """Return how often the failpoint `name` was reached since it was switched on."""
    return _reached.get(name, 0)


def failpoint(name: str) -> None:
    """Do what a test has switched on for this place; else nothing.

    Raises:
        OSError: ENOSPC, EMFILE or EIO, where the action is `enospc`, `emfile` or `eio`.
    """
    if not _actions or name not in _actions:
        return
    action, times = _actions[name]
    with _lock:
        _reached[name] = nth = _reached.get(name, 0) + 1
    if nth in times:
        _act(name, action, nth)


def _act(name: str, action: str, nth: int) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # other threads may run for a moment; this one must not go past the point
    elif action == "stop":
        os.write(2, f"failpoint {name} stops the process: {nth}\n".encode())
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread: it does not go past the point
    elif action == "enospc":
        raise OSError(errno.ENOSPC, f"failpoint {name}: no space left on device")
    elif action == "emfile":
        raise OSError(errno.EMFILE, f"failpoint {name}: too many open files")
    elif action == "eio":
        raise OSError(errno.EIO, f"failpoint {name}: input/output error")
    elif action.startswith("pause:"):
        path = action.removeprefix("pause:")
        with open(f"{path}.reached", "w"):
            pass
        while not os.path.exists(path):
            time.sleep(0.01)
    else:
        known = "kill, stop, enospc, emfile, eio or pause:PATH"
        raise ValueError(f"{VARIABLE}: unknown action {action!r} at {name!r}; use {known}")
