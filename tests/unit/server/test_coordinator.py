"""Rules of the server without a network: missing sites, long polls, staleness, evaluations to come."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from harness.sim_journal import initial

from atoll import Settings
from atoll.protocol import messages
from atoll.protocol.status_messages import RoundSummary, SiteRound
from atoll.rounds import events
from atoll.rounds.state import Rules, State
from atoll.server.coordinator import roster as roster_module
from atoll.server.coordinator.accept_update import staleness
from atoll.server.coordinator.attendance import Attendance
from atoll.server.coordinator.long_polls import FairEvent
from atoll.server.coordinator.roster import STILL, Presence
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.server.tasks.workflow_schedule import EVALUATES, WorkflowSchedule

# -- sites that a round closed without


SITES = "abcdefghij"


@pytest.fixture
def roster() -> dict[str, Presence]:
    return {site: Presence(site) for site in SITES}


@pytest.fixture
def state() -> State:
    """Of a run that waits for its sites, and is not short of any."""
    return initial(Rules(3))


def closed(attendance: Attendance, number: int, workers: str, expected: int, fragment: int = 0) -> None:
    attendance.closed(
        RoundSummary(
            fragment=fragment,
            round=number,
            version=number,
            sites=[SiteRound(site=site) for site in workers],
            metrics={},
            counts={},
            seconds=0.0,
            bytes_up=0,
            expected=expected,
            population=len(SITES),
        )
    )


def without(report: str) -> str:
    return report.partition("without ")[2].partition(":")[0]


def test_only_drawn_sites_count_as_missing(
    state: State, roster: dict[str, Presence], caplog: pytest.LogCaptureFixture
) -> None:
    """A site counts as missing if it was drawn for a round that closed without it. The log says so once, and the
    warning ends when the site takes part again.
    """
    attendance = Attendance(roster, 0, expected={0: "abc"})  # its round was open when this server started
    for number, drawn, workers in ((1, "abc", "ab"), (2, "def", "def"), (3, "cgh", "gh"), (4, "cij", "cij")):
        if number > 1:
            attendance.expects(events.RoundOpened(0, number - 1, tuple(drawn)), state)
        closed(attendance, number, workers, expected=3)
        assert [without(text) for text in attendance.warnings(state)] == ([] if number == 4 else ["c"])
    assert [without(each) for each in caplog.messages] == ["c"], "once, for as long as the same site is missing"


def test_a_site_no_longer_awaited_counts_as_missing(
    state: State, roster: dict[str, Presence], caplog: pytest.LogCaptureFixture
) -> None:
    """If a round stops waiting for a site, as after a refused update, and closes without it, the log says that the site
    is missing.
    """
    attendance = Attendance(roster, 0)
    attendance.expects(events.RoundOpened(0, 0, ("a", "b", "c")), state)
    attendance.expects(events.ExpectedChanged(0, 0, ("a", "b")), state)
    closed(attendance, 1, "ab", expected=3)
    assert [without(each) for each in caplog.messages] == ["c"]


def test_a_complete_fragment_hides_no_missing_site(
    state: State, roster: dict[str, Presence], caplog: pytest.LogCaptureFixture
) -> None:
    """If one fragment closes with all sites and another closes without one site, the log and the status say that this
    site is missing.
    """
    attendance = Attendance(roster, 0, expected={0: "abc", 1: "abc"})
    for number in range(1, 4):
        closed(attendance, number, "abc", expected=3, fragment=0)
        closed(attendance, number, "ab", expected=3, fragment=1)
    assert [without(each) for each in caplog.messages] == ["c"]
    assert [without(text) for text in attendance.warnings(state)] == ["c"]


# -- long polls


def test_the_event_loop_serves_others_between_waiters() -> None:
    """When an event wakes 100 waiters, the event loop serves other tasks between two of them.

    So a heartbeat does not wait for all of them.
    """

    async def main() -> list[str]:
        event, seen = FairEvent(), list[str]()

        async def waits(name: str) -> None:
            await event.wait(60)
            seen.append(name)

        async def beats() -> None:
            while len(seen) < 200:
                seen.append("beat")
                await asyncio.sleep(0)

        waiting = [asyncio.create_task(waits(f"w{number:03}")) for number in range(100)]
        await asyncio.sleep(0)
        event.set()
        await beats()
        await asyncio.gather(*waiting)
        return seen

    seen = asyncio.run(main())
    workers = [name for name in seen if name != "beat"]
    assert workers == [f"w{number:03}" for number in range(100)]
    assert not any(a != "beat" != b for a, b in itertools.pairwise(seen)), "two went on at once"


def test_a_waiter_that_gave_up_is_forgotten() -> None:
    """If a waiter's time is over, the event no longer keeps this waiter."""

    async def main() -> None:
        event = FairEvent()
        await event.wait(0.001)
        assert not event._waiting

    asyncio.run(main())


def test_an_event_wakes_each_waiter_exactly_once() -> None:
    """If an event is set a second time, it wakes each waiter exactly once, including a waiter that came in between."""

    async def main() -> list[int]:
        event, seen = FairEvent(), list[int]()

        async def waits(number: int) -> None:
            await event.wait(60)
            seen.append(number)

        tasks = [asyncio.create_task(waits(number)) for number in range(3)]
        await asyncio.sleep(0)
        event.set()
        tasks.append(asyncio.create_task(waits(3)))
        await asyncio.sleep(0)
        event.set()
        await asyncio.gather(*tasks)
        return seen

    assert asyncio.run(main()) == [0, 1, 2, 3]


def test_a_cancelled_waiter_does_not_block_others() -> None:
    """If a waiter is cancelled when it is due, the next waiter is still woken."""

    async def main() -> None:
        event = FairEvent()
        gone = asyncio.create_task(event.wait(60))
        stays = asyncio.create_task(event.wait(60))
        await event.wait(0)  # the time is over at once: it returns
        event.set()  # both are due
        gone.cancel()
        async with asyncio.timeout(10):
            await stays
        assert gone.cancelled() or gone.done()

    asyncio.run(main())


# -- hanging workers


def test_a_training_hangs_after_four_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training site counts as hanging after four times the length of its longest step, and not before the given
    patience.
    """
    # The longest step took 100 s. A pause of 399 s is not reported, and one of 400 s is.
    now = [1000.0]
    monkeypatch.setattr(roster_module.time, "monotonic", lambda: now[0])
    presence = Presence("a")
    presence.note(messages.Heartbeat(state=roster_module.TRAINING, step=1))
    now[0] += 100.0
    presence.note(messages.Heartbeat(state=roster_module.TRAINING, step=2))
    assert (presence.longest_s, STILL) == (100.0, 4.0)
    now[0] += 399.0
    assert presence.hangs_s(patience_s=60.0) == 0.0
    now[0] += 1.0
    assert presence.hangs_s(patience_s=60.0) == 400.0
    assert presence.hangs_s(patience_s=401.0) == 0.0


def test_a_restored_site_does_not_count_as_hanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart of the server, a site that made steps before does not count as hanging in its first round."""
    now = [1000.0]
    monkeypatch.setattr(roster_module.time, "monotonic", lambda: now[0])
    presence = Presence("a", is_restored=True)
    beat = messages.Heartbeat(state=roster_module.TRAINING, step=20)  # a hand-written loop counts them in `submit`
    presence.note(beat)
    now[0] += 1000.0
    assert presence.hangs_s(patience_s=60.0) == 0.0


# -- what the log has of sites


def test_the_number_of_a_sites_warnings_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    """The log has at most a hundred different warnings of a site."""
    # A broken site sends two hundred different warnings, each twice. A hundred of them are logged and remembered.
    presence = Presence("a")
    for number in range(400):
        presence.note(messages.Heartbeat(warnings=[f"step {number // 2} failed"]))
    assert caplog.messages == [f"a reports: step {number} failed" for number in range(100)]
    assert len(presence.told) == 100


@pytest.mark.parametrize("simulated", [False, True])
def test_surplus_sites_are_reported_except_in_simulations(roster: dict[str, Presence], simulated: bool) -> None:
    """A new site beyond the number of sites of the run is reported, except in a simulation.

    A simulation that goes on with other names of sites has named them itself, and no worker can be started again.
    """
    attendance = Attendance(roster, 0, simulated=simulated)
    assert attendance.why_surplus("j", len(SITES)) == ""
    assert ("j is a new site, number 10 of a run" in attendance.why_surplus("j", 9)) is not simulated


# -- staleness


@pytest.mark.covers("L13")
@pytest.mark.parametrize(("version", "rounds"), [(0, 3), (1, 2), (2, 2), (3, 1), (4, 0), (5, 0)])
def test_staleness_leaves_out_lost_versions(version: int, rounds: int) -> None:
    """The staleness of an update is the number of versions made since its base; lost versions do not count."""
    # The run has the versions 0, 1, 3 and 4. A worker may still train from 2 or 5, which were lost.
    assert staleness(4, version, lost=(2,)) == rounds


def test_versions_lost_later_do_not_make_an_update_fresher() -> None:
    """Only lost versions between an update's base and the head are left out, as when `atoll verify` looks back."""
    assert staleness(2, 1, lost=(3,)) == 1


# -- evaluations to come


def test_a_site_may_expect_a_later_evaluation(tmp_path: Path) -> None:
    """The schedule knows which sites will evaluate: those of an evaluation that is running or still to come."""
    settings = Settings.build(
        {
            "disk.state_dir": tmp_path,
            "rounds.sites": 2,
            "rounds.total": 1,
            "workflow.steps": [{"kind": "train"}, {"kind": EVALUATES, "args": {"sites": ["a"]}}],
        }
    )
    schedule = WorkflowSchedule(settings, None, TaskFilters(settings))
    assert [schedule.will_evaluate(site) for site in "ab"] == [True, False]
    schedule.steps[1].state = "running"
    assert schedule.will_evaluate("a")
    schedule.steps[1].state = "done"
    assert not schedule.will_evaluate("a")
