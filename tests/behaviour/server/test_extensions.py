"""Guests of a server: a package brings an extension, the run file names it, and nothing of it can stop the run."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.packages import install
from kit.requests import get, post
from kit.servers import new_server
from kit.world import World

from atoll.errors import ConfigError
from atoll.testing.run import wait_until

pytestmark = pytest.mark.covers("X44")

START = {"w": torch.zeros(2)}

COUNTS = """
from pydantic import BaseModel
from atoll.protocol.openapi import Operation
from atoll.protocol.run_events import RoundEnded
from atoll.server.coordinator.extension import Extension


class Goal(BaseModel):
    rounds: int


class Counts(Extension):
    name = "counts"
    operations = (
        Operation("set_goal", "POST", "/v1/extensions/counts/goal", "Set it.", ("admin",), request=Goal, reply=Goal),
        Operation("get_goal", "GET", "/v1/extensions/counts/goal", "Get it.", ("reader", "admin"), reply=Goal),
    )
    ended = ticks = 0
    goal = Goal(rounds=0)

    async def set_goal(self, message):
        self.goal = message
        return message

    async def get_goal(self):
        return self.goal

    def on_event(self, event):
        self.ended += isinstance(event, RoundEnded)

    def warnings(self):
        return ["the goal is far"] if self.goal.rounds > 0 else []

    def tick(self, now_s):
        self.ticks += 1

    def status(self):
        return {"ended": self.ended, "goal": self.goal.rounds, "has ticked": self.ticks > 0}
"""
"""39 lines: operations, events, a part of the status, a warning, a tick."""


def package(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str = COUNTS) -> None:
    install(monkeypatch, folder, "counts_plugin", code, {"atoll.extensions": {"counts": "counts_plugin:Counts"}})


def test_a_package_brings_operations_events_status_and_a_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, tmp_path / "packages")
    with World(tmp_path, START, "a", rounds=1, **{"server.extensions": ("counts",)}) as world:
        token = (tmp_path / "state" / "admin.token").read_text().strip()
        asked = urllib.request.Request(
            f"{world.url}/v1/extensions/counts/goal",
            data=b'{"rounds": 3}',
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        )
        assert json.loads(urllib.request.urlopen(asked).read()) == {"rounds": 3}
        assert get(world.url, "/v1/extensions/counts/goal") == (200, {"rounds": 3})
        status, problem = post(world.url, "/v1/extensions/counts/goal", {"rounds": 4})  # a stranger
        assert status in (401, 403), problem
        assert "/v1/extensions/counts/goal" in get(world.url, "/openapi.json")[1]["paths"]
        world.rounds(1.0, 1)
        world.wait(1)
        wait_until(lambda: world.status.extensions["counts"]["has ticked"], "a tick")
        assert world.status.extensions == {"counts": {"ended": 1, "goal": 3, "has ticked": True}}
        assert "the goal is far" in world.status.warnings
        world.finish()


def test_an_operation_named_like_a_head_route_keeps_its_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own HEAD routes end so; an operation of the admin stays the admin's."""
    package(monkeypatch, tmp_path / "packages", COUNTS.replace("set_goal", "set_goal_head"))
    with World(tmp_path, START, "a", rounds=1, **{"server.extensions": ("counts",)}) as world:
        status, problem = post(world.url, "/v1/extensions/counts/goal", {"rounds": 4})
        assert status in (401, 403), problem
        world.rounds(1.0, 1)
        world.finish()


NO_JSON = {"NaN": "float('nan')", "half of a pair": r"'\ud800'", "too much": "'x' * 2**17", "no value": "object()"}


@pytest.mark.parametrize("case", NO_JSON)
def test_a_status_that_is_no_json_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The rest of the status is there, with a warning, and the run goes on."""
    code = COUNTS.replace('{"ended": self.ended', f'{{"bad": {NO_JSON[case]}, "ended": self.ended')
    package(monkeypatch, tmp_path / "packages", code)
    with World(tmp_path, START, "a", rounds=1, **{"server.extensions": ("counts",)}) as world:
        assert get(world.url, "/v1/status")[1]["extensions"] == {}
        world.rounds(1.0, 1)
        (problem,) = [text for text in world.status.warnings if "counts" in text]
        assert problem.startswith("the extension counts failed: ")
        world.finish()


def test_an_installed_package_alone_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, tmp_path / "packages")
    with World(tmp_path, START, "a", rounds=1) as world:
        assert get(world.url, "/v1/extensions/counts/goal")[0] == 404
        assert world.status.extensions == {}
        world.rounds(1.0, 1)
        world.finish()


WRONG = {
    "a name that exists": (COUNTS.replace("set_goal", "get_status"), "another operation has this name"),
    "a path of Atoll": (COUNTS.replace("/v1/extensions/counts/goal", "/v1/status"), "does not begin with"),
    "no method": (COUNTS.replace("async def get_goal", "async def other"), "no method of this name"),
    "no extension": ("Counts = print\n", "is no extension"),
    "raises": (COUNTS + "\n    def __init__(self, run):\n        raise OSError(5)\n", r"cannot be made: OSError\(5\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses_an_extension_that_is_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    code, why = WRONG[case]
    package(monkeypatch, tmp_path / "packages", code)
    server = new_server(START, **{"disk.state_dir": tmp_path / "state", "server.extensions": ("counts",)})
    with pytest.raises(ConfigError, match=why), server:
        pass


def test_refuses_two_extensions_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, tmp_path / "packages", COUNTS.replace("operations = (", "others = ("))
    names = ("counts", "counts_plugin:Counts")
    server = new_server(START, **{"disk.state_dir": tmp_path / "state", "server.extensions": names})
    with pytest.raises(ConfigError, match="Two extensions have the name 'counts'"), server:
        pass


def test_refuses_an_extension_that_is_not_installed(tmp_path: Path) -> None:
    server = new_server(START, **{"disk.state_dir": tmp_path / "state", "server.extensions": ("nobodys",)})
    with pytest.raises(ConfigError, match="nobodys"), server:
        pass


FAILS = {
    "on event": ("self.ended +=", "raise ZeroDivisionError\n        self.ended +="),
    "tick": ("self.ticks += 1", "raise ZeroDivisionError"),
    "status": ("        return {", "        raise ZeroDivisionError\n        return {"),
    "status of no JSON": ("        return {", "        return object()\n        return {"),
}


@pytest.mark.parametrize("case", FAILS)
def test_an_extension_that_raises_is_named_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    before, after = FAILS[case]
    package(monkeypatch, tmp_path / "packages", COUNTS.replace(before, after, 1))
    with World(tmp_path, START, "a", rounds=2, **{"server.extensions": ("counts",)}) as world:
        world.rounds(1.0, 1, 2)
        world.wait(2)
        warned: list[Any] = []

        def is_named() -> bool:
            warned[:] = [text for text in world.status.warnings if text.startswith("the extension counts failed")]
            return bool(warned)

        wait_until(is_named, "the warning")
        assert len(warned) == 1
        assert world.text.count("the extension counts failed") == 1
        assert world.finish()["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("error", ["ConnectionResetError", "TimeoutError", "ZeroDivisionError"])
def test_an_operation_that_raises_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """Whatever it raises, the client gets an answer, and the run goes on."""
    package(monkeypatch, tmp_path / "packages", COUNTS.replace("return self.goal", f"raise {error}"))
    with World(tmp_path, START, "a", rounds=1, **{"server.extensions": ("counts",)}) as world:
        assert get(world.url, "/v1/extensions/counts/goal")[0] == 500
        world.rounds(1.0, 1)
        assert world.finish()["w"].tolist() == [1.0, 1.0]
