"""Run a server and its sites inside a test, make them fail at chosen places, and read the history of the run.

    settings = {"algorithm": {"name": "fedavg"}, "rounds": {"total": 3, "sites": 2}}
    with serve(build(), folder / "state", settings) as server:
        together(lambda: train("a", server.url), lambda: train("b", server.url))
        server.run()                                    # returns when the result is written
    assert [line["version"] for line in history(folder / "state")] == [1, 2, 3]

A failpoint is a named place in Atoll's code. The text `name=action` makes an action happen when this place is reached;
separate several such texts by `;`. The actions are:

    kill                  send SIGKILL to this process
    stop                  send SIGSTOP
    enospc, emfile, eio   raise this OSError
    pause:PATH            create PATH.reached, and wait until PATH exists

`name=action@3` acts when the place is reached for the third time, `name=action@1,2` for the first and second time.
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

    from atoll.filters.base import Filter
    from atoll.server.serve import Server
    from atoll.worker.training.federated_loop import Worker

__all__ = [
    "Status",
    "Threads",
    "failpoints",
    "free_port",
    "history",
    "local_worker",
    "serve",
    "status",
    "together",
    "wait_until",
]

T = TypeVar("T")

POLL_S = 0.01
_PORTS: Sequence[int] = range(20_000, 32_000)  # below Linux's ephemeral ports, 32,768 to 60,999
_HELD_PORTS: dict[int, socket.socket] = {}


# -- a server in this process


@contextmanager
def serve(
    model: nn.Module | str | None, state_dir: Path | str, settings: Mapping[str, Any] | None = None, **more: Any
) -> Iterator[Server]:
    """Start a server in this process, on a port that no other test uses. Stop it at the end of the `with` block.

    Args:
        model: the initial model, or its name as in the setting `model.source`; None for a run that only executes tasks.
        state_dir: the run's state directory. A later server with the same directory continues the run.
        settings: the run's settings, as `{"group.key": value}` or `{"group": {"key": value}}`.
        more: further arguments of `atoll.Server`, such as a workflow or filters.
    """
    from atoll.server.serve import Server

    chosen = {"network.port": free_port(), "disk.state_dir": Path(state_dir), **(settings or {})}
    server = Server(model, chosen, **more).start()
    try:
        yield server
    finally:
        server.stop()


def local_worker(
    server: Server, site: str, *, folder: Path | str | None = None, filters: Sequence[Filter] = ()
) -> Worker:
    """Join the run of a server in this program, without a network. Use a thread for each site, as in a notebook.

        def train(site):
            with local_worker(server, site) as worker:
                for fl_round in worker: ...

        with atoll.Server(model, settings) as server:
            together(lambda: train("a"), lambda: train("b"))

    Args:
        server: the server, which has been started.
        site: name of the site.
        folder: the folder for Atoll's files of the sites; by default `local-sites` in the server's state directory.
        filters: filters that are applied to every update of this site, in this order.

    Returns:
        The worker, as of `atoll.join`.

    Raises:
        ConfigError: the run has fragments, ranks, a number of local steps between synchronisations, tasks or a swarm.
        StateLocked: another worker takes part as the same site, with the same folder.
        UsageError: the server is not running.
    """
    from atoll.simulate import embedded_site

    return embedded_site.local_worker(server, site, folder=folder, filters=filters)


def status(url: str) -> Status:
    """Return the status of the run at `url`, without joining the run.

    Raises:
        ServerUnreachable: no server answers.
    """
    from atoll.transport.http_client import ask

    return ask(url, routes.STATUS, Status)


def history(state_dir: Path | str) -> list[dict[str, Any]]:
    """Return the server's records of its rounds (`exports/metrics.jsonl`), oldest first.

    Each record has `round`, `version`, `workers`, `metrics`, `bytes_up`, `seconds` and more.
    """
    path = Path(state_dir) / "exports" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# -- sites in this process


class Threads:
    """Functions that run at the same time, each in a daemon thread, which cannot keep the process alive if it hangs."""

    def __init__(self, *jobs: Callable[[], object]) -> None:
        self._ends = [_begun(job) for job in jobs]

    def join(self, timeout_s: float = 60.0) -> None:
        """Wait for all functions to return. If one raises an error, raise it at once.

        Raises:
            AssertionError: a function still runs after `timeout_s` seconds.
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
    """Call functions at the same time, each in a thread. Wait for all of them, as `Threads.join` does."""
    Threads(*jobs).join(timeout_s)


@contextmanager
def failpoints(text: str) -> Iterator[Callable[[str], int]]:
    """Switch failpoints on in this process, until the end of the `with` block.

    Args:
        text: failpoints and their actions, as described at the top of this file.

    Yields:
        A function that returns how often a failpoint was reached, given the failpoint's name.

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
    """Call `condition` until its result is true, and return the result.

    Args:
        condition: the function to call.
        what: the awaited event, for the error message.
        timeout_s: maximum time to wait, in seconds.

    Raises:
        TimeoutError: the result is still not true after `timeout_s` seconds.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """Return a free port of 127.0.0.1. Until `give_back_port` or the end of this process, no other call returns it.

    The port is not one of Linux's ephemeral ports, so the system does not give it to another socket between two starts
    of a server. A Unix socket named after the port reserves the port, so that no call in another process returns it.
    """
    first = random.SystemRandom().randrange(len(_PORTS))  # tests seed `random`
    for port in (*_PORTS[first:], *_PORTS[:first]):
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                held.bind(f"\0atoll-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                held.close()
                continue
        _HELD_PORTS[port] = held
        return port
    raise RuntimeError(f"no port of {_PORTS} is free")


def give_back_port(port: int) -> None:
    """Let `free_port` return a port again, which no server of the test uses any more."""
    if (held := _HELD_PORTS.pop(port, None)) is not None:
        held.close()
