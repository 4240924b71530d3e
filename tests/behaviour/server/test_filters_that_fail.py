"""Filters at the server that fail, hang or have no disk, and servers that end meanwhile: updates count once."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bad_filters import Infinite, Shorter, Undecided
from filter_world import START, Halved, become, join, serving
from harness.processes import free_port, wait_until
from kit.folders import open_paths
from kit.sites import finish
from kit.wire import WireSite
from safetensors.torch import load_file
from torch import Tensor

from atoll.errors import RunFailed, UsageError
from atoll.filters import Drop, Filter, Outgoing
from atoll.server.coordinator.update_filters import HOLDER, Filtering
from atoll.testing.run import failpoints


@pytest.mark.covers("T8", "F14")
def test_asks_again_for_a_part_that_a_late_request_undoes_while_filters_work(tmp_path: Path) -> None:
    """A late request begins part 0 anew, and never ends it."""

    class Undone(Filter):
        def begin(self, update: Outgoing) -> None:
            server._require_run().store.tickets.spool(1).begin_part(0)

    with serving(tmp_path, sites=1, filters=[Undone()]) as server:
        status, reply = WireSite(server.url).train(1.0).push().complete()
    assert (status, reply["message"]) == (
        409,
        "The update for ticket 1 lacks 1 of 1 parts (first: part 0).",
    )


@pytest.mark.covers("T8")
def test_a_disk_without_space_for_what_filters_leave_is_told_as_such(tmp_path: Path) -> None:
    """The site is told to come back, and does."""
    with serving(tmp_path, sites=1, filters=[Halved()]) as server:
        update = WireSite(server.url).train(lambda tensors: tensors["w"].copy_(torch.tensor([2.0, 4.0]))).push()
        with failpoints("filters.write=enospc"):
            assert update.complete()[1]["code"] == "disk_full"
            assert update.complete()[0] == 200
        server.wait(30)
        assert load_file(server.save_state(tmp_path / "result.safetensors"))["w"].tolist() == [1.0, 2.0]


class Broken(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        if name == "head":
            raise KeyError("salt")
        return values


class Leaving(Filter):
    def begin(self, update: Outgoing) -> None:
        raise SystemExit(2)


@pytest.mark.covers("T8", "T7", "X3")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Leaving, r"a filter of the server called sys.exit\(2\)"),
        (Broken, r"the server's filter Broken\(\) failed at 'head': KeyError: 'salt'"),
        (Undecided, r"the server's filter Undecided\(\) failed at '\w+': KeyError: '\w+'"),
        (Shorter, r"the server's filter Shorter\(\) changed '\w+' from torch.float32 \[\d\] to torch"),
        (Infinite, r"the values of '\w+' after the server's filter Infinite\(\) are not finite"),
        (lambda: Drop("haed"), r".*no tensor of the model has the name 'haed'"),
    ],
    ids=["exits", "raises", "keeps", "shape", "infinite", "name"],
)
def test_the_round_goes_on_without_a_site_with_a_failing_filter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, told: str
) -> None:
    """Nothing is left of the update, which is as large as the model, before memory is looked through for cycles."""
    with serving(tmp_path, **{"rounds.min_sites": 1}, filters={"b": [kind()]}) as server:
        good, bad = join(server, tmp_path, "ab").values()
        good.submit(become([1.0, 2.0], 3.0))
        before = filtered_files(tmp_path / "state")
        gc.disable()
        try:
            bad.submit(become([9.0, 9.0], 9.0))
            assert filtered_files(tmp_path / "state") <= before
        finally:
            gc.enable()
        assert re.search(f"update of b was refused: {told}", caplog.text)  # the site is told
        bad.close()
        found, status = finish(server, {"a": good}), server.status()
    assert (found["w"].tolist(), found["head"].tolist()) == ([1.0, 2.0], [3.0])
    assert status.refused == 1
    assert status.history[-1].workers == ["a"]


def filtered_files(state: Path) -> set[str]:
    """Open files that never had a name: those of filtered updates, not spools that the closed round removed."""
    return {path for path in open_paths() if path.startswith(f"{state}/#")}


@pytest.mark.covers("T8", "X3")
def test_the_round_goes_on_without_a_site_with_a_failing_filter_of_its_own(tmp_path: Path) -> None:
    with serving(tmp_path, **{"rounds.min_sites": 1}) as server:
        good, bad = join(server, tmp_path, "ab", {"b": [Broken()]}).values()
        good.submit(become([1.0, 2.0], 3.0))
        with pytest.raises(UsageError, match=r"Broken\(\) failed at 'head': KeyError: 'salt'") as caught:
            bad.submit(become([9.0, 9.0], 9.0))
        bad.close(caught.value)
        found = finish(server, {"a": good})
    assert (found["w"].tolist(), found["head"].tolist()) == ([1.0, 2.0], [3.0])


@pytest.mark.covers("T8")
def test_a_sites_filter_that_fails_at_the_begin_leaves_the_outbox_as_it_was(tmp_path: Path) -> None:
    """A server that lost power may ask for the update before once more."""

    class Second(Filter):
        def begin(self, update: Outgoing) -> None:
            if update.about.round == 2:
                raise KeyError("salt")

    with serving(tmp_path, sites=1, rounds=2) as server:
        site = join(server, tmp_path, "a", {"a": [Second()]})["a"]
        site.submit(START)
        assert site.next_round() == 2
        site.pull()
        with pytest.raises(UsageError, match=r"Second\(\) failed at the start of the update: KeyError: 'salt'"):
            site.submit(START)
        (note,) = (tmp_path / "w").glob("a/*/outbox.json")
        assert json.loads(note.read_text())["round"] == 1
        site.close()


@pytest.mark.covers("T8", "X3")
def test_a_filter_that_fails_at_what_it_took_before_ends_the_server_and_loses_nothing(tmp_path: Path) -> None:
    """What was received is kept as it was, and is filtered anew behind a restart: halved once, not twice."""
    port = {"network.port": free_port()}
    with serving(tmp_path, filters=[Halved()], **port) as server:
        sites = join(server, tmp_path, "ab")
        sites["a"].submit(become([2.0, 4.0]))
    with serving(tmp_path, filters={"a": [Broken()]}, **port) as server:
        sites["b"].submit(become([6.0, 8.0]))
        told = r"update of a for round 1 .*Broken\(\) failed at 'head'.*it continues with the same updates"
        with pytest.raises(RunFailed, match=told):
            server.wait(60)
    with serving(tmp_path, filters=[Halved()], **port) as server:  # mended
        assert finish(server, sites)["w"].tolist() == [2.0, 3.0]


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


@pytest.mark.covers("T8")
def test_a_server_ends_while_a_filter_hangs_at_what_was_accepted_before_a_restart(
    tmp_path: Path, go: threading.Event
) -> None:
    """a's update is in the journal when the server ends; the next one's filter hangs at it when the round closes."""
    port, hanging = {"network.port": free_port()}, Hanging(go)
    with serving(tmp_path, **port) as server:
        first, second = join(server, tmp_path, "ab").values()
        first.submit(become([1.0, 1.0]))
    with serving(tmp_path, filters={"a": [hanging]}, **port) as server:
        second.submit(become([1.0, 1.0]))
        assert hanging.begun.wait(30)
    assert not go.is_set()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ticket of each update that the server's filters are asked about."""
    refusal, tickets = Filtering.refusal, list[int]()

    async def noted(filtering: Filtering, row: Any, number: int) -> str:
        tickets.append(row.ticket)
        return await refusal(filtering, row, number)

    monkeypatch.setattr(Filtering, "refusal", noted)
    return tickets


def move(w: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors["w"].fill_(w)


@pytest.mark.covers("T8")
def test_an_update_that_is_completed_twice_at_once_is_accepted_once(
    tmp_path: Path, go: threading.Event, asked: list[int]
) -> None:
    """The word that it is complete is sent again while the filter still works: both get the same receipt.

    The filter, which keeps state, works once; and no other update takes the place of what it reads.
    """

    class Noted(Hanging):
        def begin(self, update: Outgoing) -> None:
            begins.append(update.about.site)

    begins: list[str] = []
    hanging = Noted(go)
    with serving(tmp_path, sites=1, filters=[hanging]) as server, ThreadPoolExecutor() as threads:
        update = WireSite(server.url).train(move(2.0)).push()
        answers = [threads.submit(update.complete) for _ in range(2)]
        assert hanging.begun.wait(30)
        wait_until(lambda: len(asked) == 2, "that both wait")
        slot = server._run.store.tickets.spool(update.ticket).slot  # type: ignore[union-attr]
        held = slot.holds[HOLDER]
        go.set()
        (status, receipt), again = (answer.result(30) for answer in answers)
    assert (begins, held, HOLDER in slot.holds) == (["a"], 1, False)
    assert (status, receipt["digest"]) == (200, update.message["digest"])
    assert again == (status, receipt)


@pytest.mark.covers("T8")
def test_what_is_left_of_one_update_is_not_taken_for_another_that_came_in_its_place(
    tmp_path: Path, go: threading.Event, asked: list[int]
) -> None:
    """a sends (1, 1), and is started again elsewhere while the filter is at it. Then it sends (3, 3), with the same
    ticket: that is what the run comes to.
    """
    hanging = Hanging(go)
    with serving(tmp_path, sites=1, filters={"a": [hanging]}) as server, ThreadPoolExecutor() as threads:
        before = threads.submit(WireSite(server.url, process="one").train(move(1.0)).push().complete)
        assert hanging.begun.wait(30)
        after = threads.submit(WireSite(server.url, process="two").train(move(3.0)).push().complete)
        wait_until(lambda: len(asked) == 2, "that the second update is there")
        go.set()
        assert before.result(30)[1]["code"] == "superseded"
        assert after.result(30)[0] == 200
        assert asked[0] == asked[1]
        assert server.wait(30)
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == [3.0, 3.0]


@pytest.mark.covers("T8")
def test_a_site_with_a_hanging_filter_is_told_when_the_round_is_over_and_takes_part_in_the_next(
    tmp_path: Path, go: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is answered when the round is closed without it, by the deadline, not after `idle_timeout_s`. The
    filter, which is at its first update, does not begin the next one. The server ends all the same.
    """
    begun: list[int] = []

    class Counting(Hanging):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            begun.append(1)
            return super().apply(name, start, values)

    monkeypatch.setattr("atoll.server.coordinator.user_code.SAY_S", 0.05)
    hanging = Counting(go)
    options = {"rounds.total": 2, "rounds.quorum": 1, "rounds.min_sites": 1, "rounds.deadline_s": 0.3}
    with serving(tmp_path, filters={"a": [hanging], "b": [Filter()]}, **options) as server:
        stuck, other = join(server, tmp_path, "ab").values()
        for number in (1, 2):
            submitting = in_thread(lambda: stuck.submit(become([1.0, 1.0])))
            assert hanging.begun.wait(30)
            other.submit(become([1.0, 1.0]))
            submitting.join(30)
            assert not submitting.is_alive()
            assert (stuck.next_round(), other.next_round()) == ((2, 2) if number == 1 else (None, None))
            if number == 1:
                stuck.pull()
                other.pull()
        assert begun == [1]
        assert [entry.workers for entry in server.status().history] == [["b"], ["b"]]
        stuck.close()
        other.close()
    assert not go.is_set()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "The server's filters for the update of a in round 1: not finished after 0.05 s. Check their code." in told


@pytest.mark.covers("T8", "X3")
def test_a_turn_that_comes_to_nothing_is_given_back(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one place, and a has it. b is given up while it waits for it, then no thread can be started for b."""
    from atoll.server.coordinator import user_code

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
            broken.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await beside.run(lambda: None, "It", "b")
        async with asyncio.timeout(30):
            return await beside.run(lambda: "b", "It", "b")

    assert asyncio.run(main()) == "b"
