"""What status, logs and waiting sites are told while a run goes on and when its server ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, free_port, wait_until
from kit.admin import pause
from kit.local_run import LocalRun
from kit.processes import command, url_of
from kit.servers import PLAIN, plain_server
from kit.sites import manual_sites
from kit.wire import WireSite, heard
from kit.world import World

import atoll
from atoll.cli.stored_status import stored_status
from atoll.errors import RunFailed
from atoll.protocol.status_messages import HISTORY, Status
from atoll.server.coordinator.build_status import status_of
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.run_core import RunCore
from atoll.testing.run import Threads, status

UNHEARD = "no request since the server restarted"
SILENT: dict[str, Any] = {"network.heartbeat_timeout_s": 0, "network.heartbeat_interval_s": 0}
"""Nothing is sent but what a test sends."""
START = {"w": torch.ones(4)}


@pytest.mark.covers("X4")
@pytest.mark.parametrize(
    ("commits_s", "commits_left", "now_s", "left"),
    [
        ((), 5, 100.0, None),
        ((100.0,), 5, 100.0, None),  # one round was opened, and none is over
        ((100.0, 110.0), 5, 110.0, None),  # one time alone may be that of a warm-up
        ((100.0, 110.0, 120.0), 5, 120.0, 50.0),
        ((100.0, 103.0, 103.1, 103.2), 20, 103.2, 2.0),  # the first round, of 3 s, is not steady
        ((100.0, 130.0, 150.0, 151.0, 152.0), 10, 152.0, 10.0),  # nor are two
        ((100.0, 110.0, 130.0), 4, 130.0, 60.0),  # 15 s each
        ((100.0, 110.0, 130.0), 4, 140.0, 50.0),  # 10 s of the next round are spent
        ((100.0, 110.0, 130.0), 4, 150.0, 45.0),  # it takes longer than 15 s; later rounds are not shorter for that
        ((100.0, 110.0, 130.0), 1, 150.0, 0.0),
        ((100.0, 110.0, 130.0), 4, 161.0, None),  # after more than 30 s it is late: when it ends is not known
        ((100.0, 100.1, 100.2), 4, 101.2, 0.3),  # rounds of 0.1 s are late after 1.1 s
        ((100.0, 100.1, 100.2), 4, 101.4, None),
        ((100.0, 110.0, 120.0), 0, 120.0, 0.0),
    ],
    ids=[
        "nothing",
        "opened",
        "one",
        "two",
        "warm-up",
        "slow-start",
        "mean",
        "spent",
        "long",
        "last-is-long",
        "late",
        "short",
        "short-late",
        "over",
    ],
)
def test_the_time_left_follows_the_mean_round_time(
    commits_s: tuple[float, ...], commits_left: int, now_s: float, left: float | None
) -> None:
    """The time left is the mean time of a round times the rounds left, less the time that the open round has taken.

    If the open round takes longer than the mean, only the rounds after it count; if it is late, no time is told.
    """
    from atoll.server.coordinator.round_times import left_s

    assert left_s(commits_s, commits_left, now_s) == (left if left is None else pytest.approx(left))


def test_the_time_left_uses_only_recent_rounds(tmp_path: Path) -> None:
    """The time left is based on the most recent rounds: earlier rounds of an hour do not matter after rounds of a
    second.
    """
    from atoll.server.coordinator.round_times import ROUNDS, TimeLeft

    with plain_server(tmp_path, START, rounds=100) as server:
        run = server._require_served().run
        left = TimeLeft(100, 1)
        for hour in range(1, 6):
            left.committed(3600.0 * hour)
        for second in range(1, ROUNDS + 1):
            left.committed(5 * 3600.0 + second)
        assert left.of(run.state, 5 * 3600.0 + ROUNDS) == 100.0  # none is done: a hundred of a second each
        assert TimeLeft(0, 1).of(run.state, 0.0) is None


def test_the_first_round_gives_no_time_left(tmp_path: Path) -> None:
    """The first round, in which sites start, and the second give no time left."""
    # Two rounds of 5 s give 50 s for ten. With several fragments, this holds for the first rounds of each fragment.
    from atoll.server.coordinator.round_times import TimeLeft

    with plain_server(tmp_path, START, rounds=10) as server:
        run = server._require_served().run
        left = TimeLeft(10, 1)
        left.committed(60.0)
        assert left.of(run.state, 60.0) is None
        left.committed(65.0)
        assert left.of(run.state, 65.0) is None
        left.committed(70.0)
        assert left.of(run.state, 70.0) == 50.0
        streaming = TimeLeft(10, 2)
        for now_s in (50.0, 60.0):  # the first round of each of two fragments
            streaming.committed(now_s)
        assert streaming.of(run.state, 60.0) is None
        for now_s in (62.0, 64.0):
            streaming.committed(now_s)
        assert streaming.of(run.state, 64.0) == 20.0


async def test_a_slow_async_site_is_found_by_its_own_times(tmp_path: Path) -> None:
    """In an asynchronous run, a site is late if its update takes much longer than its earlier ones.

    By hand: b took 2 s for each of two updates, and has had its third ticket for 12 s. a has no open ticket.
    """
    async with LocalRun(tmp_path, START, {"rounds": 9, "rounds.sites": 2, "async.enabled": True}) as run:
        sites = {name: await run.join(name) for name in "ab"}
        for _ in range(2):
            opened = {name: site.open_round() for name, site in sites.items()}
            for seconds, name in ((1.0, "a"), (1.0, "b")):
                await run.advance(seconds)
                await run.submit(sites[name], opened[name].ticket, {"w": torch.ones(4)})
            await run.settle()
        sites["b"].open_round()
        await run.advance(12.0)
        found = status_of(run.served)
        assert [(each.ticket_s, each.usual_s) for each in found.workers] == [(0.0, 1.0), (12.0, 2.0)]
        assert found.headline is not None
        assert found.headline.late == ["b"]


@pytest.mark.covers("X4")
def test_a_restarted_server_measures_rounds_anew(tmp_path: Path) -> None:
    """After a restart, the status estimates the time left only from the first round that starts afterwards."""
    told: list[float | None] = []
    for rounds_here in (3, 4):
        with plain_server(tmp_path, START, rounds=9) as server:
            site = WireSite(server.url, "a")
            for _ in range(rounds_here):
                site.train().submit()
                site.ask()  # answered after the commit
                told.append(server.status().left_s)
    assert [left is not None for left in told] == [False, False, True, False, False, True, True]


@pytest.mark.covers("X4")
def test_status_and_log_show_the_time_left(tmp_path: Path, nursery: Nursery, caplog: pytest.LogCaptureFixture) -> None:
    """From the third round on, the status, `atoll status` and the log show the time left. After the end, they do
    not.
    """
    caplog.set_level(logging.INFO)
    told: list[float | None] = []
    with plain_server(tmp_path, START, rounds=4) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                told.append(server.status().left_s)
                shown = command(nursery, tmp_path, "status", "--server", server.url).stdout.splitlines()[1]
                named = re.search(r"rounds 4 in all, up .* s, (about [\d.]+ s|less than 1 s) left$", shown)
                assert bool(named) == (fl_round.number > 3)
                fl_round.submit(fl_round.state_dict())
        over = server.status()
    assert told[:3] == [None, None, None]
    assert all(left is not None and 0 < left < 60 for left in told[3:])
    assert json.loads(over.model_dump_json())["left_s"] is None
    lines = [line for line in caplog.messages if line.startswith("round ")]
    assert [bool(re.search(r"; (about [\d.]+ s|less than 1 s) left$", line)) for line in lines] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.covers("L6", "X4")
def test_a_status_compares_site_speeds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status with five sites compares their speeds once, not once for each site.

    With 1,000 sites, a comparison for each would hold up all requests for seconds.
    """
    dynamic = {"algorithm.name": "diloco", "diloco.dynamic_local_steps": True, "async.enabled": True}
    count, alive = itertools.count(), RunCore.alive
    with plain_server(tmp_path, START, **dynamic, **SILENT) as server:
        for number in range(5):
            WireSite(server.url, f"site-{number}")
        monkeypatch.setattr(RunCore, "alive", lambda run: (next(count), alive(run))[1])
        workers = server.status().workers
    assert [worker.local_steps for worker in workers] == [server.settings.diloco.sync_every] * 5
    assert next(count) < 5


@pytest.mark.covers("X4", "L13")
def test_a_waiting_site_learns_the_reason(tmp_path: Path) -> None:
    """The answer to a waiting site says which sites the round waits for, and the time left."""
    with plain_server(tmp_path, START, rounds=5, sites=2) as server:
        a, b = (WireSite(server.url, site) for site in "ab")
        for _ in range(3):
            for update in [site.train() for site in (a, b)]:
                update.submit()
        a.train().submit()
        reply = a.ask(wait_s=0.0)
    assert (reply["status"], reply["reason"]) == ("wait", "its update is accepted; the round waits for b")
    assert reply["left_s"] is not None


@pytest.mark.covers("X4")
def test_a_waiting_worker_prints_the_reason() -> None:
    """A waiting worker prints the time it has waited, the reason and, if it is known, the time left of the run."""
    from atoll.protocol import messages
    from atoll.worker.log_lines import in_wait

    reply = messages.TicketReply(
        status="wait", head_version=1, head_digest="0" * 64, reason="round 2 waits for b", left_s=200.0
    )
    assert in_wait(15.2, reply) == "waiting 15 s: round 2 waits for b; about 3 min 20 s left of the run"
    for left_s in None, 1.9:  # less than a minute says less than what it waits for
        assert in_wait(15.2, reply.model_copy(update={"left_s": left_s})) == "waiting 15 s: round 2 waits for b"


def test_no_time_left_while_sites_are_missing(tmp_path: Path) -> None:
    """If the run waits because a site has left, the status shows no time left."""
    with plain_server(tmp_path, START, rounds=5, sites=2) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as a:
            with atoll.join(server.url, site="b", folder=tmp_path / "w") as b:
                for _ in range(3):
                    for worker in (a, b):
                        fl_round = next(iter(worker))
                        fl_round.submit(fl_round.state_dict())
                wait_until(lambda: server.status().version == 3, "the first three rounds")
                assert server.status().left_s is not None
            wait_until(lambda: [each.state for each in server.status().workers] == ["alive", "left"], "b's leaving")
            assert server.status().left_s is None


@pytest.mark.covers("L13", "X4")
def test_status_lists_sites_not_heard_since_restart(tmp_path: Path, nursery: Nursery) -> None:
    """The status lists the sites that the server has not heard since its restart, with their versions before it, until
    each sends a heartbeat.
    """
    settings = SILENT | {"rounds.sites": 2, "network.port": free_port()}

    def of_a(server: atoll.Server) -> tuple[int, int]:
        a = server.status().workers[0]
        return a.version, a.staleness

    with plain_server(tmp_path, START, **settings) as server:
        a, b = (WireSite(server.url, site) for site in "ab")
        for _ in range(2):
            for update in [site.train() for site in (a, b)]:
                update.submit()
        for site in (a, b):
            site.ticket()
        assert UNHEARD not in server.status().fragments[0].reason
        assert of_a(server) == (2, 0)

    with plain_server(tmp_path, START, **settings) as server:
        assert server.status().fragments[0].reason.endswith(f"; {UNHEARD}: a, b")
        assert of_a(server) == (2, 0)
        a.beat()
        assert server.status().fragments[0].reason.endswith(f"; {UNHEARD}: b")
        shown = command(nursery, tmp_path, "status", "--server", server.url).stdout.splitlines()
        rows = {line.split()[0]: line for line in shown}
        assert f"; {UNHEARD}: b" in "\n".join(shown)
        assert " s ago" in rows["a"]
        assert "none since the server restarted" in rows["b"]
        assert WireSite(server.url, "late").ask(wait_s=0.0)["reason"].endswith(f"; {UNHEARD}: b")
        b.beat()
        assert UNHEARD not in server.status().fragments[0].reason
        WireSite(server.url, "a").leave()  # joins, and asks for nothing
        assert of_a(server) == (2, 0)


@pytest.mark.covers("L9", "X4")
@pytest.mark.parametrize(
    ("timeout_s", "then"),
    [(3600.0, " (declared dead after 3600 s without a heartbeat)"), (0.0, "")],
    ids=["dies", "stays"],
)
def test_status_lists_sites_that_miss_heartbeats(tmp_path: Path, timeout_s: float, then: str) -> None:
    """If a site is silent for 2.5 heartbeat intervals, the status says so, and when it will be declared dead. A
    heartbeat ends this.
    """
    beats = {"network.heartbeat_interval_s": 0.4, "network.heartbeat_timeout_s": timeout_s}
    with plain_server(tmp_path, START, **beats, sites=3) as server:
        sites = {site: WireSite(server.url, site) for site in "abc"}

        def reason(beating: str) -> str:
            for site in beating:
                sites[site].beat()
            return server.status().fragments[0].reason

        assert "no heartbeat" not in reason("abc")
        for beating, silent in (("ab", "c"), ("a", "b, c")):
            ending = f"; no heartbeat from {silent}{then}"
            wait_until(lambda: reason(beating).endswith(ending), ending, 10)  # noqa: B023
            assert server.status().fragments[0].trouble == ending.removeprefix("; ")
        wait_until(lambda: "no heartbeat" not in reason("abc"), "all are heard again", 10)


@pytest.mark.covers("L13")
def test_the_status_shows_awaited_sites(tmp_path: Path) -> None:
    """The status says how many sites have joined before the first round, and which sites it waits for afterwards."""
    with plain_server(tmp_path, START, sites=2) as server:
        first = manual_sites(server, tmp_path, ["first"])["first"]
        assert first.next_round(wait_s=0.0) is None
        waiting = status(server.url)
        assert "waits for 2 sites to join; 1 joined so far" in waiting.fragments[0].reason
        assert waiting.policy == "waits for all sites"
        second = manual_sites(server, tmp_path, ["second"])["second"]
        assert (first.next_round(), second.next_round()) == (1, 1)
        first.submit(first.pull())
        assert [missing.site for missing in server.status().fragments[0].waiting_for] == ["second"]
        first.close()
        second.close()


@pytest.mark.usefixtures("interruptible")
def test_stop_waits_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ctrl-C interrupts `server.run()`, `server.stop()` still waits until the server has ended."""
    # Guards against `Thread.join`: after an interruption by a signal, it takes a running thread for one that has ended.
    ended, stop = threading.Event(), Coordinator.stop

    async def slowly(self: Coordinator, **given: bool) -> None:
        await asyncio.sleep(0.3)  # long enough for a `stop` that does not wait to be found out
        await stop(self, **given)
        ended.set()

    monkeypatch.setattr(Coordinator, "stop", slowly)
    server = plain_server(tmp_path, START).start()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        server.run()
    server.stop()
    assert ended.is_set()
    timer.join()


def require_sent_away(
    server: atoll.Server, site: WireSite, path: str, end: Callable[[], object], code: str, why: str
) -> None:
    """A request of the site that waits when the server ends is told so."""
    with ThreadPoolExecutor(1) as thread:
        answer = heard(server, site.name, lambda: thread.submit(site.post, path, {"wait_s": 20.0}))
        assert not answer.done()
        end()
        _, told = answer.result(60)
    assert told["code"] == code
    assert why in told["message"]


@pytest.mark.parametrize("kind", ["tickets", "tasks"])
def test_a_stopping_server_ends_waiting_requests(tmp_path: Path, kind: str) -> None:
    """When the server stops, requests that wait for tickets or tasks are answered at once with `busy`."""

    def workflow(controller: Any) -> None:
        controller.sites(at_least=2)

    options: dict[str, Any] = {"workflow": workflow} if kind == "tasks" else {"rounds.sites": 2}
    with plain_server(tmp_path, START, **options) as server:
        require_sent_away(server, WireSite(server.url), f"/v1/{kind}", server.stop, "busy", "The server is stopping")


def test_a_failed_aggregator_ends_waiting_requests(tmp_path: Path) -> None:
    """If the aggregator fails while a site waits for a ticket, the site gets the error at once, and the run fails."""
    (tmp_path / "mine.py").write_text("def bad(updates):\n    raise ValueError('no such luck')\n")
    aggregator = {"aggregation.aggregator.path": f"{tmp_path / 'mine.py'}:bad"}
    with plain_server(tmp_path, START, sites=2, **aggregator) as server:
        first, last = (WireSite(server.url, site) for site in ("first", "last"))
        update = last.train()
        first.train().submit()
        require_sent_away(server, first, "/v1/tickets", update.submit, "server_failed", "no such luck")
        with pytest.raises(RunFailed, match="no such luck"):
            server.wait()
        server.stop()


@pytest.mark.covers("X4")
def test_the_server_names_sites_missing_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of the run, the log has the site that the server waits for, and later that it did not download the
    result.
    """
    monkeypatch.setattr("atoll.server.serve.GRACE_S", 0.5)
    monkeypatch.setattr("atoll.server.serve.GRACE_SAID_S", 0.0)
    caplog.set_level(logging.INFO, "atoll.server")
    with plain_server(tmp_path, START, rounds=1) as server:
        WireSite(server.url, "vanished").train().submit()
        server.run()
    assert "waiting for vanished to download the result, at most 0.5 s" in caplog.text
    assert "vanished did not download the result within 0.5 s" in caplog.text


@pytest.mark.covers("X4")
def test_the_server_ends_after_sites_loaded_the_result(tmp_path: Path) -> None:
    """The server keeps running at the end of the run until each site has loaded the result."""
    ended, loaded = threading.Event(), list[float]()

    def train() -> None:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.state_dict(), weight=1)
            assert not ended.wait(0.5)
            loaded.extend(worker.load_into({"w": torch.zeros(1)})["w"].tolist())

    settings = PLAIN | {"disk.state_dir": tmp_path / "state", "rounds.total": 1}
    with atoll.Server({"w": torch.ones(1)}, settings) as server:
        site = Threads(train)
        assert server.wait(60)
    ended.set()
    site.join()
    assert loaded == [1.0]


def test_requests_of_sites_do_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of the sites themselves do not keep the server running at the end of the run."""
    monkeypatch.setattr("atoll.server.serve.WATCHED_S", 3600.0)
    with plain_server(tmp_path, START, rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.state_dict(), weight=1)
            worker.load_into(dict(START))  # asks which version is the newest
        server.run()
        assert server.finished


def test_a_finished_server_stays_for_polling_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the end of the run, the server stays for clients that ask for the status, until `stop` is called."""
    # One client has seen the end, and the next has not yet.
    monkeypatch.setattr("atoll.server.serve.WATCHED_S", 3600.0)
    with plain_server(tmp_path, START, rounds=1) as server:
        assert not status(server.url).finished
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.state_dict(), weight=1)
        assert server.wait(60)
        ended = threading.Event()
        site = Threads(lambda: (server.run(), ended.set()))
        for _ in range(2):
            assert status(server.url).finished
            assert not ended.wait(0.5)
        server.stop()
        site.join()


# -- the lines of a server in a program

SERVES = """
{before}
import atoll, torch
settings = {{"algorithm.name": "fedavg", "rounds.total": 1, "network.port": 0, "disk.state_dir": "state"}}
with atoll.Server({{"w": torch.zeros(4)}}, settings) as server:
    server.run()
"""


@pytest.mark.covers("X4", "L20")
@pytest.mark.parametrize(
    ("before", "prefix"),
    [
        ("", r"\d\d:\d\d:\d\d atoll: "),
        ("import logging; logging.basicConfig(format='mine: %(message)s', level='INFO')", "mine: "),
    ],
    ids=["no logging", "logging of its own"],
)
def test_a_program_that_serves_prints_every_line_once(
    tmp_path: Path, nursery: Nursery, before: str, prefix: str
) -> None:
    """A program that starts a server prints each log line once. If it has set up logging itself, only its own handler
    prints the lines.
    """
    (tmp_path / "serve.py").write_text(SERVES.format(before=before))
    process = nursery.start("serve.py", cwd=tmp_path)
    with atoll.join(url_of(process), site="a", folder=tmp_path / "w") as worker:
        for fl_round in worker:
            fl_round.submit({"w": fl_round.state_dict()["w"] + 1})
    assert process.wait(60) == 0, process.output()
    begins = ["a joined", "a left", "listening on http://", "round 1: version 1"]
    begins += ["the newest 2 versions stay on disk", "the run is finished at version 1"]
    lines = [re.sub(f"^{prefix}", "", line) for line in process.output().splitlines()]
    assert all(line.startswith(begin) for line, begin in zip(sorted(lines), begins, strict=True)), lines


def test_the_status_has_the_first_recorded_values(tmp_path: Path) -> None:
    """After more rounds than the status has, the loss is compared with that of round 1: now, after a restart, and
    without a server.
    """
    with World(tmp_path, START, "a", rounds=30) as world:
        for number in range(1, HISTORY + 3):
            world.pull(number=number)
            world.submit("a", 0.5, metrics={"loss": 8.0 / number})
        world.wait(HISTORY + 2)
        told = f"in round {HISTORY + 2}, down from 8 in round 1."
        assert world.status.history[0].round == 3
        assert told in headline_text(world.status)
        world.restart()
        assert told in headline_text(world.status)
    stored, _ = stored_status(tmp_path / "state")
    assert told in headline_text(stored)


def headline_text(status: Status) -> str:
    assert status.headline is not None
    return status.headline.text


def test_a_report_about_an_older_round_is_not_shown(tmp_path: Path) -> None:
    """The status shows what a site last said only within the round that it was about.

    After its update has arrived, the site is shown as waiting for the others.
    """
    with World(tmp_path, START, "ab", rounds=9) as world:

        def doing() -> str:
            return next(each.doing for each in world.status.workers if each.site == "a")

        world.pull(number=1)
        presence = world.server._require_served().run.roster["a"]
        presence.beat = presence.beat.model_copy(update={"state": "submitting to round 1"})
        assert doing() == "submitting to round 1"
        world.submit("a", 0.5)
        presence.beat = presence.beat.model_copy(update={"state": "submitting to round 1"})
        assert doing() == "waiting for the others"
        world.submit("b", 0.5)
        world.wait(1)
        world.pull(number=2)
        presence.beat = presence.beat.model_copy(update={"state": "submitting to round 1"})
        assert doing() == ""
        presence.beat = presence.beat.model_copy(update={"state": "waiting for the round"})
        assert doing() == "about to train"


def test_a_held_up_run_has_no_time_left(tmp_path: Path) -> None:
    """After three rounds a time is told, and none while the run is paused. Versions that are kept are listed."""
    with World(tmp_path, START, "a", rounds=9) as world:
        for number in (1, 2, 3, 4):
            world.pull(number=number)
            world.submit("a", 0.5)
            world.wait(number)
        world.pull()
        assert world.status.left_s is not None
        assert world.status.kept_versions[-1] == 4
        pause(world)
        status = world.status
        assert status.left_s is None
        assert status.headline is not None
        assert status.headline.held_up
