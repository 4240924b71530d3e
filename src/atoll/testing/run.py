"""Run a server and its sites inside a test, let places of it fail, and read what the run has done.

    settings = {"algorithm": {"name": "fedavg"}, "rounds": {"total": 3, "sites": 2}}
    with serve(build(), folder / "state", settings) as server:
        together(lambda: train("a", server.url), lambda: train("b", server.url))
        server.run()                                    # until its result is written
    assert [line["version"] for line in history(folder / "state")] == [1, 2, 3]

Failpoints are written `name=action`, with `;` between several. The actions are `kill` (SIGKILL), `stop` (SIGSTOP),
`enospc`, `emfile` and `eio` (raise that OSError), and `pause:PATH` (create PATH.reached, and wait until PATH exists).
`name=action@3` acts at the third time that the place is reached, `name=action@1,2` at the first and the second.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from atoll import runtime
from atoll.protocol import routes
from atoll.protocol.status_messages import Status

if TYPE_CHECKING:
    from torch import nn

    from atoll.server.serve import Server

__all__ = [
    "Status",
    "Threads",
    "failpoints",
    "free_port",
    "history",
    "serve",
    "status",
    "together",
    "wait_until",
]

T = TypeVar("T")

POLL_S = 0.01
_PORTS: Sequence[int] = range(20_000, 32_000)  # below those that Linux gives out by itself, 32,768 to 60,999
_HELD_PORTS: list[socket.socket] = []


# -- a server in this process


@contextmanager
def serve(
    model: nn.Module | str | None, state_dir: Path | str, settings: Mapping[str, Any] | None = None, **more: Any
) -> Iterator[Server]:
    """Start a server in this process, on a port that no other test uses, and stop it at the end of the block.

    Args:
        model: the initial model, or its name; None for a run of tasks alone.
        state_dir: where the run is kept. A second server on it goes on with the same run.
        settings: of the run, by `group.key` or group.
        more: further arguments of `atoll.Server`, such as a workflow or filters.
    """
    from atoll.server.serve import Server

    chosen = {"network.port": free_port(), "disk.state_dir": Path(state_dir), **(settings or {})}
    server = Server(model, chosen, **more).start()
    try:
        yield server
    finally:
        server.stop()


def status(url: str) -> Status:
    """Return the status of the run at `url`, without taking part in it.

    Raises:
        ServerUnreachable: no server answers.
    """
    from atoll.transport.http_client import ask

    return ask(url, routes.STATUS, Status)


def history(state_dir: Path | str) -> list[dict[str, Any]]:
    """Return what the server wrote of each round in `exports/metrics.jsonl`, oldest first.

    Each has `round`, `version`, `workers`, `metrics`, `bytes_up`, `seconds` and more.
    """
    path = Path(state_dir) / "exports" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# -- sites in this process


class Threads:
    """Run jobs at once, each in a thread. The threads end with the process, so a job that hangs blocks no other."""

    def __init__(self, *jobs: Callable[[], object]) -> None:
        self._ends = [_begun(job) for job in jobs]

    def join(self, timeout_s: float = 60.0) -> None:
        """Wait for all jobs, and raise the first error of one at once.

        Raises:
            AssertionError: a job still runs after `timeout_s` seconds.
        """
        _, waiting = wait(self._ends, timeout_s, FIRST_EXCEPTION)
        for end in self._ends:
            if end.done():
                end.result()
        assert not waiting, f"{len(waiting)} of {len(self._ends)} jobs still run after {timeout_s:g} s"


def _begun(job: Callable[[], object]) -> Future[object]:
    end: Future[object] = Future()

    def work() -> None:
        try:
            end.set_result(job())
        except BaseException as error:
            end.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return end


def together(*jobs: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Run jobs at once and wait for all of them, as `Threads.join` does."""
    Threads(*jobs).join(timeout_s)


@contextmanager
def failpoints(text: str) -> Iterator[Callable[[str], int]]:
    """Switch failpoints on in this process within the block. Yields a function: name → how often it was reached.

    Raises:
        ValueError: an action is unknown.
    """
    before = runtime.switch_failpoints_on(text)
    try:
        yield runtime.times_reached
    finally:
        runtime.switch_failpoints_on(before)


# -- waiting and ports


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """Ask until the answer is true, and return it.

    Raises:
        TimeoutError: `what` did not happen in `timeout_s` seconds.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not happen in {timeout_s:g} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free, and that no other call returns until this process ends.

    The system never gives it to a socket that asks for any port. Otherwise another test could get it before the server
    that is meant, or between two starts of that server. A named socket holds it against other processes' calls.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):  # tests seed `random`
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                held.bind(f"\0atoll-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                held.close()
                continue
        _HELD_PORTS.append(held)
        return port
    raise RuntimeError(f"no port of {_PORTS} is free")
