"""Which sites a round closed without, and how often that is reported."""

from __future__ import annotations

import pytest
from harness.sim_journal import initial

from atoll.protocol.status_messages import RoundSummary
from atoll.rounds import events
from atoll.rounds.state import Rules, State
from atoll.server.coordinator.roster import Attendance, Presence

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
            workers=list(workers),
            weights=[1.0] * len(workers),
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


def test_only_sites_that_were_drawn_are_missed(
    state: State, roster: dict[str, Presence], caplog: pytest.LogCaptureFixture
) -> None:
    attendance = Attendance(roster, 0, asked={0: "abc"})  # its round was open when this server started
    for number, drawn, workers in ((1, "abc", "ab"), (2, "def", "def"), (3, "cgh", "gh"), (4, "cij", "cij")):
        if number > 1:
            attendance.asks(events.RoundOpened(0, number - 1, tuple(drawn)), state)
        closed(attendance, number, workers, expected=3)
        assert [without(text) for text in attendance.warnings(state)] == ([] if number == 4 else ["c"])
    assert [without(each) for each in caplog.messages] == ["c"], "once, for as long as the same site is missing"


def test_a_site_that_the_round_no_longer_waits_for_is_missed(
    state: State, roster: dict[str, Presence], caplog: pytest.LogCaptureFixture
) -> None:
    """As one with a refused update."""
    attendance = Attendance(roster, 0)
    attendance.asks(events.RoundOpened(0, 0, ("a", "b", "c")), state)
    attendance.asks(events.ExpectedChanged(0, 0, ("a", "b")), state)
    closed(attendance, 1, "ab", expected=3)
    assert [without(each) for each in caplog.messages] == ["c"]


def test_a_fragment_that_closed_with_all_sites_hides_no_other(
    state: State, roster: dict[str, Presence], caplog: pytest.LogCaptureFixture
) -> None:
    attendance = Attendance(roster, 0, asked={0: "abc", 1: "abc"})
    for number in range(1, 4):
        closed(attendance, number, "abc", expected=3, fragment=0)
        closed(attendance, number, "ab", expected=3, fragment=1)
    assert [without(each) for each in caplog.messages] == ["c"]
    assert [without(text) for text in attendance.warnings(state)] == ["c"]
