"""Loops and processes that would wait for each other, or use each other's connections, are refused by name."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit import build_model, diloco, exported, local_step, serve, tensors_digest, train_
from kit.servers import plain_server

import atoll
from atoll.errors import AtollError, UsageError
from atoll.format_text import VisibleLines
from atoll.protocol.messages import Joined
from atoll.worker.log_lines import error_text

DILOCO: dict[str, Any] = {"algorithm": "diloco", "H": 2, "rounds": 3, "sites": 2, "codec": "none"}


def step(loop: atoll.DiLoCo, site: str) -> None:
    assert loop.optimizer is not None
    local_step(loop.model, loop.optimizer, site, loop.step)


@pytest.mark.parametrize("in_turns", [True, False])
def test_two_loops_in_a_thread_are_refused(tmp_path: Path, in_turns: bool) -> None:
    """If two DiLoCo loops of one run train in one thread, the error names both sites, as one would wait for the other
    for ever.
    """
    # In turns, it comes at the first step of the second loop; otherwise, where the first loop would wait for the second
    # to start.
    with serve(tmp_path, **DILOCO) as server, ExitStack() as opened:
        one, two = (opened.enter_context(diloco(server, tmp_path, site, build_model())) for site in "ab")
        step(one, "a")
        with pytest.raises(UsageError, match=r"Sites '[ab]' and '[ab]' of one run train in the same thread"):
            step(two if in_turns else one, "a")


def test_loops_that_never_wait_take_turns(tmp_path: Path) -> None:
    """Two loops of one run may take turns in one thread if neither waits for the other."""
    # With τ = 1, both updates are at the server before a result is merged.
    with serve(tmp_path, **DILOCO, tau=1, alpha=0.5) as server:
        with ExitStack() as opened:
            loops = [opened.enter_context(diloco(server, tmp_path, site, build_model())) for site in "ab"]
            while not all(loop.finished for loop in loops):
                for loop, site in zip(loops, "ab", strict=True):
                    step(loop, site)
        server.run()
    assert [loop.rounds for loop in loops] == [3, 3]


def test_loops_of_two_runs_take_turns(tmp_path: Path) -> None:
    """DiLoCo loops of two different runs may take turns in one thread."""
    folders = [tmp_path / "one", tmp_path / "two"]
    with ExitStack() as opened:
        servers = [opened.enter_context(serve(folder, **DILOCO | {"sites": 1})) for folder in folders]
        with ExitStack() as joined:
            loops = [joined.enter_context(diloco(*each)) for each in zip(servers, folders, strict=True)]
            for _ in range(6):
                for loop in loops:
                    step(loop, "a")
        for server in servers:
            server.run()
    assert len({tensors_digest(exported(folder)) for folder in folders}) == 1


def test_loops_started_in_one_thread_train_in_others(tmp_path: Path) -> None:
    """DiLoCo loops that one thread has started may train in other threads."""
    with serve(tmp_path, **DILOCO) as server, ExitStack() as opened:
        loops = {site: opened.enter_context(diloco(server, tmp_path, site, build_model())) for site in "ab"}

        def train(site: str) -> None:
            while not loops[site].finished:
                step(loops[site], site)

        threads = [threading.Thread(target=train, args=(site,)) for site in loops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [loop.step for loop in loops.values()] == [6, 6]


def in_a_fork(work: Callable[[], object]) -> str:
    """What an error in a fork says; empty if there was none."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            work()
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def refusal_of_a_fork(text: str, site: str = "a") -> bool:
    wanted = f"is a fork of process {os.getpid()}, which takes part in the run as site {site!r}"
    return wanted in text and "in the fork, with another site name" in text


@pytest.mark.covers("L2")
def test_a_fork_that_synchronises_is_refused(tmp_path: Path) -> None:
    """If a forked process steps through a synchronisation, it gets an error with its process id."""
    # Steps between synchronisations are allowed. The process that joined goes on, with the same result as without a
    # fork.

    def forks(number: int) -> bool:
        return number % 2 == 1

    def trained(folder: Path, *, forked: bool) -> str:
        with serve(folder, **DILOCO | {"sites": 1}) as server:
            with diloco(server, folder, "a", build_model()) as loop:
                while not loop.finished:
                    if forked and forks(loop.step):
                        assert refusal_of_a_fork(in_a_fork(partial(step, loop, "a")))
                    elif forked:
                        assert in_a_fork(partial(step, loop, "a")) == ""  # a step between two synchronisations
                    step(loop, "a")
            server.run()
        return tensors_digest(exported(folder))

    assert trained(tmp_path / "forked", forked=True) == trained(tmp_path / "plain", forked=False)


def test_a_fork_that_trains_is_refused(tmp_path: Path) -> None:
    """If a forked process asks for a round, loads or submits, it gets an error with its process id. The process that
    joined trains on.
    """
    model = build_model()
    with (
        plain_server(tmp_path, build_model(), sites=1, rounds=1) as server,
        atoll.join(server.url, site="a", folder=tmp_path / "w") as worker,
    ):
        assert refusal_of_a_fork(in_a_fork(worker.next_round))
        fl_round = worker.next_round()
        assert refusal_of_a_fork(in_a_fork(lambda: fl_round.load_into(model)))
        fl_round.load_into(model)
        train_(model, "a", 1)
        assert refusal_of_a_fork(in_a_fork(lambda: fl_round.submit(model)))
        fl_round.submit(model)


# -- a lease is a secret

LEASE = f"a:17:0123456789abcdef:{'5e' * 16}"


def formatted(text: str) -> str:
    return VisibleLines().format(logging.LogRecord("atoll", logging.WARNING, "", 1, "%s", (text,), None))


@pytest.mark.parametrize(
    "shown",
    [
        lambda text: str(AtollError(text)),
        lambda text: repr(AtollError(text)),
        lambda text: error_text(ValueError(text)),
        error_text,
        formatted,
        lambda text: f"Joined {Joined(lease=LEASE)!r}" + ":17:0123456789abcdef:...",
    ],
    ids=["error", "repr", "leave", "last words", "log", "message"],
)
def test_no_message_shows_the_secret_of_a_lease(shown: Callable[[str], str]) -> None:
    """No error message, log line or representation shows the secret of a lease. Its place has `...`."""
    text = shown(f"Invalid header value b'{LEASE}'")
    assert "5e5e" not in text
    assert ":17:0123456789abcdef:..." in text
