"""Places where a test may stop the process, switched on by the environment.

`ATOLL_FAILPOINTS="accept.before=kill;pass.chunk=kill@3;spool.write=enospc"` ends the process with SIGKILL the
first time `accept.before` is reached, the third time `pass.chunk` is, and makes `spool.write` raise ENOSPC.
`pause:PATH` waits until the file PATH exists, so that a test can look at a process in a known place; it says
that it is there by creating `PATH.reached`.
Without the variable a failpoint costs one truth test of an empty dict.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

_ENV = "ATOLL_FAILPOINTS"


def _parse(text: str) -> dict[str, tuple[str, int]]:
    """`name=action[@nth]` separated by `;` → {name: (action, nth)}."""
    actions: dict[str, tuple[str, int]] = {}
    for item in filter(None, text.split(";")):
        name, _, action = item.partition("=")
        action, _, nth = action.partition("@")
        actions[name.strip()] = (action.strip(), int(nth or 1))
    return actions


_actions = _parse(os.environ.get(_ENV, ""))
_reached: dict[str, int] = {}
_lock = threading.Lock()


def failpoint(name: str) -> None:
    """Do what the environment asks for at this place; nothing, unless a test asked.

    Raises:
        OSError: ENOSPC, EMFILE or EIO, where the environment says `enospc`, `emfile` or `eio`.
    """
    if not _actions or name not in _actions:
        return
    action, nth = _actions[name]
    with _lock:
        _reached[name] = _reached.get(name, 0) + 1
        if _reached[name] != nth:
            return
    _act(name, action)


def _act(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # other threads may run for a moment; this one must not go past the point
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
        raise ValueError(f"{_ENV}: unknown action {action!r} at {name!r}; use kill, enospc, emfile, eio or pause:PATH")
