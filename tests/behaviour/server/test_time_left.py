"""How long a run still takes: by the rounds that were measured, and by nothing else."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery, wait_until
from kit.processes import command
from kit.servers import plain_server
from kit.wire import WireSite
from torch import nn

import atoll


@pytest.mark.covers("X4")
@pytest.mark.parametrize(
    ("commits_s", "commits_left", "now_s", "left"),
    [
        ((), 5, 100.0, None),
        ((100.0,), 5, 100.0, None),  # one round was opened, and none is over
        ((100.0, 110.0), 5, 110.0, 50.0),
        ((100.0, 110.0, 130.0), 4, 130.0, 60.0),  # 15 s each
        ((100.0, 110.0, 130.0), 4, 140.0, 50.0),  # 10 s of the next round are spent
        ((100.0, 110.0, 130.0), 4, 900.0, 45.0),  # it is late; those behind it are not shorter for that
        ((100.0, 110.0, 130.0), 1, 900.0, 0.0),
        ((100.0, 110.0), 0, 110.0, 0.0),
    ],
    ids=["nothing", "opened", "one", "mean", "spent", "late", "last-is-late", "over"],
)
def test_the_time_left_is_the_mean_round_times_those_left(
    commits_s: tuple[float, ...], commits_left: int, now_s: float, left: float | None
) -> None:
    from atoll.server.coordinator.roster import left_s

    assert left_s(commits_s, commits_left, now_s) == left


def test_what_was_long_ago_does_not_count(tmp_path: Path) -> None:
    """Rounds of an hour, then as many of a second as are looked at."""
    from atoll.server.coordinator.roster import ROUNDS, TimeLeft

    with serve(tmp_path, **{"rounds.total": 100}) as server:
        run = server._run
        assert run is not None
        left = TimeLeft(100, 1)
        for hour in range(1, 6):
            left.committed(0.0, 3600.0 * hour)
        for second in range(1, ROUNDS + 1):
            left.committed(0.0, 5 * 3600.0 + second)
        assert left.of(run.state, 5 * 3600.0 + ROUNDS) == 100.0  # none is done: a hundred of a second each
        assert TimeLeft(0, 1).of(run.state, 0.0) is None


def serve(folder: Path, **settings: object) -> atoll.Server:
    return plain_server(folder, nn.Linear(3, 2), **settings)


@pytest.mark.covers("X4")
def test_status_and_the_servers_lines_say_how_long_a_run_still_takes(
    tmp_path: Path, nursery: Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    told: list[float | None] = []
    with serve(tmp_path, **{"rounds.total": 4}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                told.append(server.status().left_s)
                shown = command(nursery, tmp_path, "status", "--server", server.url).stdout.splitlines()[1]
                assert bool(re.search(r"rounds 4 in all, up .* s, about \d+\.\d s left$", shown)) == (
                    fl_round.number > 1
                )
                fl_round.submit({name: torch.zeros_like(t) for name, t in fl_round.state_dict().items()})
        over = server.status()
    assert told[0] is None
    assert all(left is not None and 0 < left < 60 for left in told[1:])
    assert json.loads(over.model_dump_json())["left_s"] is None
    lines = [line for line in caplog.messages if line.startswith("round ")]
    assert [bool(re.search(r"; about \d\.\d s left$", line)) for line in lines] == [True, True, True, False]


def test_a_run_that_goes_on_until_it_is_stopped_has_no_time_left(
    tmp_path: Path, nursery: Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with (
        serve(tmp_path, **{"rounds.total": 0}) as server,
        atoll.join(server.url, site="a", folder=tmp_path / "w") as worker,
    ):
        for fl_round in worker:
            fl_round.submit(fl_round.state_dict())
            if fl_round.number == 3:
                break
        assert server.status().left_s is None
        assert "left" not in command(nursery, tmp_path, "status", "--server", server.url).stdout.splitlines()[1]
    assert not any("left" in line for line in caplog.messages if line.startswith("round "))


@pytest.mark.covers("X4")
def test_the_server_tells_waiting_sites_the_time_left(tmp_path: Path) -> None:
    with serve(tmp_path, **{"rounds.total": 5, "rounds.sites": 2}) as server:
        a, b = (WireSite(server.url, site) for site in "ab")
        updates = [site.train() for site in (a, b)]
        for update in updates:
            update.submit()
        a.train().submit()
        reply = a.ask(wait_s=0.0)
        assert reply["status"] == "wait"
        assert reply["left_s"] is not None


@pytest.mark.covers("X4")
def test_a_worker_that_waits_says_it_too() -> None:
    from atoll.protocol import messages
    from atoll.worker.log_lines import in_wait

    reply = messages.TicketReply(
        status="wait", head_version=1, head_digest="0" * 64, reason="round 2 waits for b", left_s=200.0
    )
    assert in_wait(15.2, reply) == "waiting 15 s: round 2 waits for b; about 3 min 20 s left of the run"
    assert in_wait(15.2, reply.model_copy(update={"left_s": None})) == "waiting 15 s: round 2 waits for b"


def test_no_time_is_named_while_a_run_waits_for_a_site(tmp_path: Path) -> None:
    with serve(tmp_path, **{"rounds.total": 3, "rounds.sites": 2}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as a:
            with atoll.join(server.url, site="b", folder=tmp_path / "w") as b:
                for worker in (a, b):
                    fl_round = next(iter(worker))
                    fl_round.submit(fl_round.state_dict())
                wait_until(lambda: server.status().version == 1, "the first round")
                assert server.status().left_s is not None
            wait_until(lambda: [each.state for each in server.status().workers] == ["alive", "left"], "b's leaving")
            assert server.status().left_s is None
