"""Trackers follow a run from a thread of their own: nothing of them can stop it, and they miss nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.admin import roll_back
from kit.packages import install
from kit.servers import new_simulation
from kit.world import World

from atoll.errors import ConfigError
from atoll.server.coordinator import tracker_threads
from atoll.testing.run import free_port, wait_until

START = {"w": torch.zeros(2)}

DIARY = """
import threading
from atoll.protocol.run_events import RoundEnded
from atoll.trackers import Tracker

EVENTS, RUNS, CLOSED = [], [], []
MAY_GO_ON = threading.Event()
MAY_GO_ON.set()


class Diary(Tracker):
    module = ""

    def __init__(self, run, title: str = "", pages: int = 1):
        super().__init__(run)
        RUNS.append((run, title))

    def on_event(self, event):
        MAY_GO_ON.wait()
        EVENTS.append(event)

    def close(self):
        CLOSED.append(True)
"""


def diary(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str = DIARY, **settings: Any) -> World:
    """A run of one site with the tracker; its package is installed."""
    install(monkeypatch, folder / "packages", "diary_plugin", code, {"atoll.trackers": {"diary": "diary_plugin:Diary"}})
    return World(folder, START, "a", **{"rounds": 2, "server.trackers": ("diary",)} | settings)


def test_a_package_can_add_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker of an installed package gets the run's name, settings and options, and every event in order."""
    chosen = {"server.trackers": {"diary": {"title": "dear"}}, "run.name": "pilot", "server.webhook": "http://h/secret"}
    with diary(monkeypatch, tmp_path, **chosen) as world:
        world.rounds(1.0, 1, 2, metrics={"loss": 0.5})
        world.finish()
    import diary_plugin

    ((run, title),) = diary_plugin.RUNS
    assert (run.name, title, run.id) == ("pilot", "dear", world.status.run)
    assert run.settings["rounds.total"] == "2"
    assert run.settings["algorithm.name"] == "fedavg"
    assert "secret" not in str(run.settings)
    numbers = [event.number for event in diary_plugin.EVENTS]
    assert numbers == list(range(1, len(numbers) + 1))
    ended = [event.summary for event in diary_plugin.EVENTS if event.what == "round ended"]
    assert [(each.round, each.metrics, each.workers) for each in ended] == [
        (1, {"loss": 0.5}, ["a"]),
        (2, {"loss": 0.5}, ["a"]),
    ]
    assert diary_plugin.EVENTS[-1].what in ("run finished", "site left")
    assert diary_plugin.CLOSED == [True]


def test_a_slow_tracker_does_not_delay_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a tracker takes no events, the run still ends. At the next start, the tracker gets all of them."""
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.2)
    with diary(monkeypatch, tmp_path) as world:
        import diary_plugin

        diary_plugin.MAY_GO_ON.clear()
        world.rounds(1.0, 1, 2)
        world.finish()
    assert "the tracker diary had not written everything" in world.text
    assert diary_plugin.EVENTS == []
    left = {each.name: each for each in threading.enumerate()}["atoll-tracker diary"]
    diary_plugin.MAY_GO_ON.set()
    left.join(10)
    diary_plugin.EVENTS.clear()
    with world:
        wait_until(lambda: any(event.what == "run finished" for event in diary_plugin.EVENTS), "all events")
    assert [event.round for event in diary_plugin.EVENTS if event.what == "round ended"] == [1, 2]


HANGS = {
    "as it is made": ("RUNS.append((run, title))", "MAY_GO_ON.wait()"),
    "at an event": ("EVENTS.append(event)", "MAY_GO_ON.wait()"),
    "as it is closed": ("CLOSED.append(True)", "MAY_GO_ON.wait()"),
}


@pytest.mark.parametrize("case", HANGS)
def test_a_hanging_tracker_delays_no_round_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Wherever it hangs: all rounds end, and the server ends `CLOSE_S` seconds later, with one line in the log."""
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.2)
    monkeypatch.setattr(tracker_threads, "BEGIN_S", 0.3)
    code = DIARY.replace("        MAY_GO_ON.wait()\n", "").replace(*HANGS[case]).replace("ON.set()", "ON.clear()")
    with diary(monkeypatch, tmp_path, code) as world:
        import diary_plugin

        world.rounds(1.0, 1, 2)
        assert world.finish()["w"].tolist() == [2.0, 2.0]
    assert world.text.count("the tracker diary had not written everything when the server ended") == 1
    diary_plugin.MAY_GO_ON.set()


def test_the_end_waits_for_a_tracker_that_is_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the import of a tracker's package takes longer than the whole run, the tracker gets all of it nevertheless."""
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.2)
    code = DIARY.replace("RUNS.append((run, title))", "MAY_GO_ON.wait()").replace("ON.set()", "ON.clear()")
    with diary(monkeypatch, tmp_path, code) as world:
        import diary_plugin

        let_it_begin = threading.Timer(1.0, diary_plugin.MAY_GO_ON.set)  # later than `CLOSE_S`
        world.rounds(1.0, 1, 2)
        let_it_begin.start()
        world.finish()
    assert "waiting for the tracker diary to begin" in world.text
    assert [event.round for event in diary_plugin.EVENTS if event.what == "round ended"] == [1, 2]


def test_a_rollback_does_not_wait_for_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker hangs while the run goes back and on. It is not begun again, and then gets each event once."""
    monkeypatch.setattr(
        tracker_threads, "CLOSE_S", 60.0
    )  # a server that waited for it would be too late for `roll_back`
    with diary(monkeypatch, tmp_path, rounds=3, **{"disk.keep_versions": 3}) as world:
        import diary_plugin

        world.rounds(1.0, 1)
        wait_until(lambda: any(event.what == "round ended" for event in diary_plugin.EVENTS), "the first round")
        diary_plugin.MAY_GO_ON.clear()
        world.rounds(1.0, 2)
        world.wait(2)
        roll_back(world, 1)
        world.rounds(1.0, 2, 3)
        world.wait(4)
        assert diary_plugin.CLOSED == []
        diary_plugin.MAY_GO_ON.set()
        world.finish()
    numbers = [event.number for event in diary_plugin.EVENTS]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [event.version for event in diary_plugin.EVENTS if event.what == "went back"] == [1]
    assert [event.summary.version for event in diary_plugin.EVENTS if event.what == "round ended"] == [1, 2, 3, 4]
    assert (len(diary_plugin.RUNS), diary_plugin.CLOSED) == (1, [True])
    assert "tracker diary" not in world.text


def test_a_resting_tracker_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run begins again, its journal is closed: a tracker reads no event there. Then it gets all of them."""
    with diary(monkeypatch, tmp_path) as world:
        import diary_plugin

        world.rounds(1.0, 1)
        wait_until(lambda: any(event.what == "round ended" for event in diary_plugin.EVENTS), "the first round")
        tracking = world.server._require_served().extensions.trackers
        asyncio.run(tracking.rest())
        world.rounds(1.0, 2)
        world.wait(2)
        (follower,) = tracking._followers
        assert follower._next_events() == []
        follower.read_on()
        world.finish()
    assert diary_plugin.EVENTS[-1].what in ("run finished", "site left")


def test_another_codec_begins_no_tracker_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server opens its files anew for round 2; the tracker gets each event of the open round once."""
    changes = {"rounds.changes": [{"from_round": 2, "aggregation.upload_codec": {"name": "int8"}}]}
    with diary(monkeypatch, tmp_path, **changes) as world:
        world.rounds(1.0, 1, 2)
        world.finish()
    import diary_plugin

    numbers = [event.number for event in diary_plugin.EVENTS]
    assert numbers == list(range(1, len(numbers) + 1))
    assert (len(diary_plugin.RUNS), diary_plugin.CLOSED) == (1, [True])


FAILS = {
    "at each event": ("EVENTS.append(event)", "raise OSError('no route to http://u:pw@host/x')"),
    "at its beginning": ("RUNS.append((run, title))", "raise OSError('no route to http://u:pw@host/x')"),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_failing_tracker_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """If a tracker fails, training goes on, and the log and the status report it once, without the password in its
    address.
    """
    with diary(monkeypatch, tmp_path, DIARY.replace(*FAILS[case])) as world:
        world.rounds(1.0, 1)
        wait_until(lambda: bool(world.status.warnings), "a warning")
        world.rounds(1.0, 2)
        (warning,) = world.status.warnings
        world.finish()
    assert warning.startswith("the tracker diary failed, and may lack something from now on: OSError: no route to")
    assert warning.endswith("http://...@host/x")
    assert world.text.count("the tracker diary failed") == 1
    assert world.result["w"].tolist() == [2.0, 2.0]


def test_a_tracker_that_fails_at_first_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a tracker cannot start at first, it is tried again, and then gets the events that it has missed."""
    code = DIARY.replace(
        "RUNS.append((run, title))", "RUNS.append((run, title))\n        if len(RUNS) < 2: raise OSError"
    )
    monkeypatch.setattr(tracker_threads, "RETRY_S", 0.01)
    with diary(monkeypatch, tmp_path, code) as world:
        world.rounds(1.0, 1, 2)
        world.finish()
    import diary_plugin

    assert [event.round for event in diary_plugin.EVENTS if event.what == "round ended"] == [1, 2]
    assert "the tracker diary works now" in world.text
    assert world.status.warnings == []


def test_an_unreachable_mlflow_is_reported_soon(tmp_path: Path) -> None:
    """If MLflow cannot be reached, the log says so within seconds, not only after the retries of
    MLflow's own client.
    """
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    port = free_port()
    chosen = {"mlflow": {"uri": f"http://127.0.0.1:{port}"}}
    with World(tmp_path, START, "a", rounds=1, **{"server.trackers": chosen}) as world:
        wait_until(lambda: bool(world.status.warnings), "a warning")
        assert f"127.0.0.1:{port} cannot be reached (Connection refused)" in world.status.warnings[0]
        world.rounds(1.0, 1)
        world.finish()


@pytest.mark.parametrize("by", ["option", "variable"])
def test_refuses_a_database_that_mlflow_cannot_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """If MLflow's tracking address is a database that only the full MLflow can open, the server does not start."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setattr(tracker_threads, "_is_installed", lambda module: module != "sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    options = {"uri": uri} if by == "option" else {}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    said = "server.trackers names 'mlflow', but sqlalchemy is not installed. Run: pip install 'mlflow'"
    with pytest.raises(ConfigError, match=said):
        World(tmp_path, START, "a", rounds=1, **{"server.trackers": {"mlflow": options}}).start()
    assert not (tmp_path / "state" / "journal.sqlite").exists()


WRONG: dict[str, tuple[str, object, str]] = {
    "unknown": (DIARY, ("dairy",), r"'dairy' is not one of the trackers: .*tensorboard.* Did you mean 'diary'\?"),
    "not installed": (
        DIARY.replace('module = ""', 'module, package = "nobodys_module.x", "nobodys[x]"'),
        ("diary",),
        r"'diary', but nobodys_module.x is not installed. Run: pip install 'nobodys\[x\]'",
    ),
    "no tracker": ("Diary = print\n", ("diary",), "is no tracker"),
    "unknown option": (DIARY, {"diary": {"titel": "x"}}, "unexpected keyword argument 'titel'. .* title, pages"),
    "wrong option": (DIARY, {"diary": {"pages": "many"}}, "pages is 'many', but must be a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tracker_refuses_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A wrong tracker in the settings refuses the start, before a run exists."""
    code, chosen, why = WRONG[case]
    with pytest.raises(ConfigError, match=why):
        diary(monkeypatch, tmp_path, code, **{"server.trackers": chosen}).start()
    assert not (tmp_path / "state" / "journal.sqlite").exists()


@pytest.mark.slow
def test_a_tracker_follows_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker gets the rounds of a simulation with all its sites, as it does those of a server."""
    (tmp_path / "mine.py").write_text(SIMULATED)
    points = {"atoll.trackers": {"diary": "diary_plugin:Diary"}}
    install(monkeypatch, tmp_path / "packages", "diary_plugin", DIARY, points)
    settings = {"rounds.total": 2, "server.trackers": ("diary",), "algorithm.name": "fedavg"}
    folder = {"disk.state_dir": tmp_path / "state", "disk.min_free_bytes": 0}
    script = f"{tmp_path / 'mine.py'}:train"
    new_simulation({"w": torch.zeros(2)}, script=script, sites=3, processes=1, **settings, **folder).run()
    import diary_plugin

    ended = [event.summary for event in diary_plugin.EVENTS if event.what == "round ended"]
    assert [(each.round, len(each.sites)) for each in ended] == [(1, 3), (2, 3)]
    assert diary_plugin.CLOSED == [True]


SIMULATED = """
import torch


def train(worker):
    for fl_round in worker:
        model = fl_round.load_into({"w": torch.zeros(2)})
        fl_round.submit({"w": model["w"] + 1})
"""
