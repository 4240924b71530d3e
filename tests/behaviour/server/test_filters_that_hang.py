"""A filter of the server's that does not come to an end: it holds up its own site, and is told of in the log."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit.servers import plain_server
from kit.sites import clients, finish
from torch import Tensor

import atoll
from atoll.errors import Superseded
from atoll.filters import Filter

START = {"w": torch.zeros(2)}


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Lets what hangs end; behind every test, however it ends."""
    event = threading.Event()
    yield event
    event.set()


class Hanging(Filter):
    """Hangs at every update until the event is set; a copy for each site has the same event."""

    def __init__(self, go: threading.Event) -> None:
        self.go, self.begun = go, threading.Event()

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        self.begun.set()
        assert self.go.wait(60)
        return values


def serving(folder: Path, **options: Any) -> atoll.Server:
    return plain_server(folder, START, **({"rounds.sites": 2, "run.threads": 1} | options))


@pytest.mark.covers("T8")
def test_the_rounds_go_on_without_its_site_and_the_server_ends(
    tmp_path: Path, go: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds are closed by their deadline, with b alone."""
    from atoll.server.tasks import user_code

    monkeypatch.setattr(user_code, "SAY_S", 0.05)
    hanging, rounds = Hanging(go), 4
    options = {"rounds.total": rounds, "rounds.quorum": 1, "rounds.min_sites": 1, "rounds.deadline_s": 0.3}
    with serving(tmp_path, filters={"a": [hanging], "b": [Filter()]}, **options) as server:
        stuck, other = clients(server, tmp_path).values()
        assert (stuck.next_round(), other.next_round()) == (1, 1)
        stuck.pull()
        in_thread(lambda: stuck.submit({"w": torch.ones(2)}))
        assert hanging.begun.wait(30)
        for number in range(1, rounds + 1):
            other.pull()
            other.submit({"w": torch.full((2,), 1.0 + number)})
            assert other.next_round() == (number + 1 if number < rounds else None)
        other.close()
        lines = [entry.workers for entry in server.status().history]
        assert lines == [["b"]] * rounds
    assert not go.is_set()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "The server's filters for the update of a in round 1: not finished after 0.05 s. Check their code." in told


@pytest.mark.covers("T8")
def test_a_server_ends_while_it_hangs_at_what_was_accepted_before_a_restart(
    tmp_path: Path, go: threading.Event
) -> None:
    """a's update is in the journal when the server ends; the next one's filter hangs at it when the round closes."""
    port = free_port()
    with serving(tmp_path, **{"rounds.total": 1, "network.port": port}) as server:
        first, second = clients(server, tmp_path).values()
        assert (first.next_round(), second.next_round()) == (1, 1)
        first.pull()
        second.pull()
        first.submit({"w": torch.ones(2)})
    hanging = Hanging(go)
    with serving(tmp_path, **{"rounds.total": 1}, filters={"a": [hanging]}, **{"network.port": port}) as server:
        second.submit({"w": torch.ones(2)})
        assert hanging.begun.wait(30)
    assert not go.is_set()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.covers("T8")
def test_what_is_left_of_one_update_is_not_taken_for_another_that_came_in_its_place(
    tmp_path: Path, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a sends (1, 1), and is started again elsewhere while the filter is at it. Then it sends (3, 3), with the same
    ticket: that is what the run comes to.
    """
    from atoll.server.update_filters import Filtering

    asked: list[str | None] = []
    refusal = Filtering.refusal

    async def counted(filtering: Filtering, row: Any, number: int) -> str:
        asked.append(row.digest)
        return await refusal(filtering, row, number)

    monkeypatch.setattr(Filtering, "refusal", counted)
    hanging = Hanging(go)
    with serving(tmp_path, **{"rounds.sites": 1, "rounds.total": 1}, filters={"a": [hanging]}) as server:
        before = clients(server, tmp_path / "before", "a")["a"]
        before.next_round()
        before.pull()

        def superseded() -> None:
            with pytest.raises(Superseded):
                before.submit({"w": torch.ones(2)})

        first = in_thread(superseded)
        assert hanging.begun.wait(30)
        after = clients(server, tmp_path / "after", "a")["a"]
        after.next_round()
        after.pull()
        second = in_thread(lambda: after.submit({"w": torch.full((2,), 3.0)}))
        wait_until(lambda: len(asked) == 2, "that the second update is there")
        go.set()
        second.join(30)
        first.join(30)
        assert finish(server, {"a": after})["w"].tolist() == [3.0, 3.0]


@pytest.mark.covers("T8")
def test_its_site_is_told_when_the_round_is_over_and_takes_part_in_the_next(
    tmp_path: Path, go: threading.Event
) -> None:
    """Its request is answered when the round is closed without it, not when it has waited for `idle_timeout_s`. The
    filter, which is at its first update, does not begin the next one.
    """
    begun: list[int] = []

    class Counting(Hanging):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            begun.append(1)
            return super().apply(name, start, values)

    hanging = Counting(go)
    options = {"rounds.total": 2, "rounds.quorum": 1, "rounds.min_sites": 1, "rounds.deadline_s": 0.3}
    with serving(tmp_path, filters={"a": [hanging]}, **options) as server:
        stuck, other = clients(server, tmp_path).values()
        assert (stuck.next_round(), other.next_round()) == (1, 1)
        for number in (1, 2):
            stuck.pull()
            submitting = in_thread(lambda: stuck.submit({"w": torch.ones(2)}))
            assert hanging.begun.wait(30)
            other.pull()
            other.submit({"w": torch.ones(2)})
            submitting.join(30)
            assert not submitting.is_alive()
            assert (stuck.next_round(), other.next_round()) == ((2, 2) if number == 1 else (None, None))
        assert begun == [1]
        assert [entry.workers for entry in server.status().history] == [["b"], ["b"]]
        stuck.close()
        other.close()
    assert not go.is_set()


class Failing(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        raise ValueError("no")


@pytest.mark.covers("T8", "X3")
def test_an_update_that_is_refused_leaves_no_file_behind(tmp_path: Path) -> None:
    """Not until memory is next looked through for cycles either: it is as large as an update."""
    with serving(tmp_path, **{"rounds.sites": 1, "rounds.total": 1}, filters=[Failing()]) as server:
        site = clients(server, tmp_path, "a")["a"]
        site.next_round()
        site.pull()
        gc.disable()
        try:
            site.submit({"w": torch.ones(2)})
            assert server.status().refused == 1
            assert [
                each for each in open_files() if each.startswith(str(tmp_path)) and each.endswith("(deleted)")
            ] == []
        finally:
            gc.enable()


def open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


@pytest.mark.covers("T8", "X3")
def test_a_turn_that_comes_to_nothing_is_given_back(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one place, and a has it. b is given up while it waits for it, then no thread can be started for b."""
    from atoll.server.tasks import user_code

    monkeypatch.setattr(user_code, "AT_ONCE", 1)

    async def main() -> str:
        beside = user_code.UserThreads()
        first = asyncio.ensure_future(beside.run(lambda: go.wait(60), "It", "a"))
        await asyncio.sleep(0)  # it has the place
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await beside.run(lambda: None, "It", "b")
        go.set()
        assert await first
        with monkeypatch.context() as broken:
            broken.setattr(threading.Thread, "start", none_left)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await beside.run(lambda: None, "It", "b")
        async with asyncio.timeout(30):
            return await beside.run(lambda: "b", "It", "b")

    assert asyncio.run(main()) == "b"


@pytest.mark.covers("T8")
def test_filters_that_hang_give_their_places_to_other_sites(
    go: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from atoll.server.tasks import user_code

    monkeypatch.setattr(user_code, "AT_ONCE", 2)
    monkeypatch.setattr(user_code, "SAY_S", 0.05)

    async def main() -> tuple[str, set[bool]]:
        beside = user_code.UserThreads()
        hanging = [
            asyncio.ensure_future(beside.run(lambda: go.wait(60), f"The filter of {each}", each)) for each in "ab"
        ]
        await asyncio.sleep(0)  # they have the places
        async with asyncio.timeout(30):
            found = await beside.run(lambda: "c", "It", "c")
        go.set()
        return found, set(await asyncio.gather(*hanging))

    assert asyncio.run(main()) == ("c", {True})
    for site in "ab":
        assert f"The filter of {site}: not finished after" in caplog.text


def none_left(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
