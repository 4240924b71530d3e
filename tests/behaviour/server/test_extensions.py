"""Guests of a server: a package brings an extension, the run file names it, and nothing of it can stop the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.admin import roll_back
from kit.packages import install
from kit.requests import get, post
from kit.world import World

from atoll.errors import ConfigError
from atoll.server.coordinator import extension
from atoll.testing.run import wait_until

pytestmark = pytest.mark.covers("X44")

START, GOAL = {"w": torch.zeros(2)}, "/v1/extensions/counts/goal"

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


def counting(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str = COUNTS, **settings: Any) -> World:
    """A run of one site with the extension; its package is installed."""
    points = {"atoll.extensions": {"counts": "counts_plugin:Counts"}}
    install(monkeypatch, folder / "packages", "counts_plugin", code, points)
    return World(folder, START, "a", **{"rounds": 1, "server.extensions": ("counts",)} | settings)


def test_a_package_brings_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension of an installed package adds operations, acts on events and on each tick, and adds its part and its
    warning to the status.
    """
    with counting(monkeypatch, tmp_path) as world:
        token = (tmp_path / "state" / "admin.token").read_text().strip()
        assert post(world.url, GOAL, {"rounds": 3}, Authorization=f"Bearer {token}") == (200, {"rounds": 3})
        assert get(world.url, GOAL) == (200, {"rounds": 3})
        status, problem = post(world.url, GOAL, {"rounds": 4})  # a stranger
        assert status in (401, 403), problem
        assert GOAL in get(world.url, "/openapi.json")[1]["paths"]
        world.rounds(1.0, 1)
        world.wait(1)
        wait_until(lambda: world.status.extensions["counts"]["has ticked"], "a tick")
        assert world.status.extensions == {"counts": {"ended": 1, "goal": 3, "has ticked": True}}
        assert "the goal is far" in world.status.warnings
        world.finish()


def test_an_operation_name_may_end_with_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension's operation for administrators needs the administrator's token, even if its name ends with `_head`
    like those of HEAD routes.
    """
    code = COUNTS.replace("set_goal", "set_goal_head")
    with counting(monkeypatch, tmp_path, code) as world:
        status, problem = post(world.url, GOAL, {"rounds": 4})
        assert status in (401, 403), problem
        world.rounds(1.0, 1)
        world.finish()


FOLLOWS = """
from atoll.server.coordinator.extension import Extension

MADE, HEARD, CLOSED = [], [], []


class Counts(Extension):
    name = "counts"

    def __init__(self, run):
        super().__init__(run)
        MADE.append(self)

    def on_event(self, event):
        HEARD.append((event.number, event.what, self.run.state.rounds[0].head))

    async def close(self):
        CLOSED.append(self)
"""


def test_an_extension_outlives_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback, an extension goes on: it is made and closed once, and gets each event once, in order."""
    with counting(monkeypatch, tmp_path, FOLLOWS, rounds=2, **{"disk.keep_versions": 3}) as world:
        import counts_plugin

        world.rounds(1.0, 1)
        world.wait(1)
        roll_back(world, 0)
        world.rounds(1.0, 1, 2)
        world.finish()
    numbers = [number for number, _, _ in counts_plugin.HEARD]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [head for _, what, head in counts_plugin.HEARD if what in ("went back", "round ended")] == [1, 0, 2, 3]
    assert len(counts_plugin.MADE) == 1
    assert counts_plugin.CLOSED == counts_plugin.MADE


def test_extensions_close_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension that never closes delays the server's end by `CLOSE_S` seconds, and does not keep the others from
    closing.
    """
    monkeypatch.setattr(extension, "CLOSE_S", 0.5)
    more = """
class Hangs(Counts):
    name = "hangs"

    async def close(self):
        import asyncio
        await asyncio.Event().wait()
"""
    names = ("counts_plugin:Hangs", "counts")
    with counting(monkeypatch, tmp_path, FOLLOWS + more, **{"server.extensions": names}) as world:
        world.rounds(1.0, 1)
        world.finish()
    import counts_plugin

    assert [each.name for each in counts_plugin.CLOSED] == ["counts"]
    assert "the extension hangs could not be closed: TimeoutError()" in world.text


NO_JSON = {"NaN": "float('nan')", "half of a pair": r"'\ud800'", "too much": "'x' * 2**17", "no value": "object()"}


@pytest.mark.parametrize("case", NO_JSON)
def test_a_faulty_extension_status_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """If an extension's status is not valid JSON or is too large, the server's status omits it and has a warning. The
    run goes on.
    """
    code = COUNTS.replace('{"ended": self.ended', f'{{"bad": {NO_JSON[case]}, "ended": self.ended')
    with counting(monkeypatch, tmp_path, code) as world:
        assert get(world.url, "/v1/status")[1]["extensions"] == {}
        world.rounds(1.0, 1)
        (problem,) = [text for text in world.status.warnings if "counts" in text]
        assert problem.startswith("the extension counts failed: ")
        world.finish()


def test_an_installed_package_alone_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a package with an extension is installed but `server.extensions` does not name it, the server does not use
    it.
    """
    with counting(monkeypatch, tmp_path, **{"server.extensions": ()}) as world:
        assert get(world.url, GOAL)[0] == 404
        assert world.status.extensions == {}
        world.rounds(1.0, 1)
        world.finish()


COUNTS_ALONE = ("counts",)
WRONG: dict[str, tuple[str, tuple[str, ...], str]] = {
    "a name that exists": (COUNTS.replace("set_goal", "get_status"), COUNTS_ALONE, "another operation has this name"),
    "a path of Atoll": (COUNTS.replace(GOAL, "/v1/status"), COUNTS_ALONE, "does not begin with"),
    "no method": (COUNTS.replace("async def get_goal", "async def other"), COUNTS_ALONE, "no method of this name"),
    "no extension": ("Counts = print\n", COUNTS_ALONE, "is no extension"),
    "raises": (
        COUNTS + "\n    def __init__(self, run):\n        raise OSError(5)\n",
        COUNTS_ALONE,
        r"cannot be made: OSError\(5\)",
    ),
    "two of one name": (
        COUNTS.replace("operations = (", "others = ("),
        ("counts", "counts_plugin:Counts"),
        "Two extensions have the name 'counts'",
    ),
    "not installed": (COUNTS, ("nobodys",), "nobodys"),
}
"""Code of the package, the names in the settings, and why the start is refused."""


@pytest.mark.parametrize("case", WRONG)
def test_refuses_an_unusable_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The server refuses to start with an extension that is wrong or not installed, and says why."""
    code, names, why = WRONG[case]
    with pytest.raises(ConfigError, match=why):
        counting(monkeypatch, tmp_path, code, **{"server.extensions": names}).start()


FAILS = {
    "on event": ("self.ended +=", "raise ZeroDivisionError\n        self.ended +="),
    "tick": ("self.ticks += 1", "raise ZeroDivisionError"),
    "status": ("        return {", "        raise ZeroDivisionError\n        return {"),
    "status of no JSON": ("        return {", "        return object()\n        return {"),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_failing_extension_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """If an extension fails again and again, the run goes on. The status has one warning and the log has one line."""
    before, after = FAILS[case]
    code = COUNTS.replace(before, after, 1)
    with counting(monkeypatch, tmp_path, code, rounds=2) as world:
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
def test_a_client_gets_500_if_an_operation_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """If an operation of an extension raises an error, the client gets status 500 and the run goes on."""
    code = COUNTS.replace("return self.goal", f"raise {error}")
    with counting(monkeypatch, tmp_path, code) as world:
        assert get(world.url, GOAL)[0] == 500
        world.rounds(1.0, 1)
        assert world.finish()["w"].tolist() == [1.0, 1.0]
