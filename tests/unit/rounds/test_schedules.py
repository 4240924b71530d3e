"""The round machine holds its promises in every schedule that is tried, and the search finds bugs that are
planted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from harness import schedules
from harness.schedules import MUTANTS, Fault, Schedule, Violation, explore, simulate

from atoll.rounds import machine
from atoll.rounds.events import AggregatorLost, ExpectedChanged

PLAIN = Schedule(workers=3, sites=3, min_sites=2, quorum=0, deadline_s=30, fragments=1)


@pytest.mark.covers("F5", "F8", "F9", "F12", "F13", "F17", "F19", "F23")
def test_no_order_of_faults_breaks_a_guarantee():
    """In a search through many orders of events and faults, no update of a round is lost or counted twice."""
    seen = explore(examples=250)
    wanted = ("versions", "crashes", "LeaseEnded", "TicketsExpired", "ExpectedChanged", "refused", *schedules.FAULTS)
    assert all(seen[what] > 10 for what in wanted), f"the search hardly meets some of what it is for: {seen}"


def test_pausing_and_stopping_hold_in_every_schedule():
    """In any order of events, a paused run opens no round, a stopped run finishes, and no acknowledged
    update is lost.
    """
    # Except those of a round that is ended at once.
    seen = explore(examples=200, admin=True)
    wanted = ("finished", "RoundStopped", "crashes", "versions", *schedules.OF_THE_ADMIN)
    assert all(seen[what] > 10 for what in wanted), seen


def test_a_run_without_faults_makes_versions_steadily():
    # A round: ask 2 s, train at most 7 s, polls of 4 s, submit 2 s, pass 2 s; in 150 s at least 6 of them.
    """Without faults, a simulated run makes at least 6 versions in 150 s and loses no lease or ticket."""
    # A round takes at most 7 s to train, with polls of 4 s. Asking, submitting and the pass take 2 s each.
    counts = simulate(PLAIN)
    assert counts["versions"] >= 6
    assert counts["LeaseEnded"] == counts["TicketsExpired"] == counts["crashes"] == 0
    assert counts["accepted"] >= 3 * counts["versions"]


@pytest.mark.covers("F20")
def test_clock_jumps_do_not_change_a_run():
    """Jumps of the wall clock do not change a simulated run. If the server used the wall clock, a live site would be
    declared dead.
    """
    # All sites have joined at 1 s, so the server checks their silence at 41 s. By a clock that was set at 40 s, this is
    # a day later.
    jumps = (Fault(40, "clock forward", 0), Fault(60, "clock back", 0), Fault(90, "clock back", 0))
    assert simulate(replace(PLAIN, faults=jumps)) == simulate(PLAIN) + Counter(fault.kind for fault in jumps)
    # All joined at 1 s, so the silences are looked at at 41 s, a day later by a clock that was set at 40 s.
    with pytest.raises(Violation, match=r"site-\d was declared dead, but was heard of"):
        simulate(replace(PLAIN, faults=jumps), mutant="wall clock")


FOUND_AS = {
    "no dedupe": "the mean of its updates",
    "acknowledge before journal": "acknowledged ticket",
    "lost expected": "closed without awaited|the journal makes",
    "quorum of one": "a round closed with 1 of",
    "two-step commit": "the mean of its updates",
    "wall clock": "declared dead, but was heard|closed without awaited|the journal makes",
    "no fencing": "under stale lease",
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_of_the_server_is_found(mutant):
    """The search through orders of events finds each bug that was put into the server, and reports the broken
    guarantee.
    """
    with pytest.raises(Violation, match=FOUND_AS[mutant]):
        explore(examples=300, mutant=mutant, shrink=False)


def no_help_from_late_joiners(monkeypatch):
    monkeypatch.setattr(machine.leases, "alive", lambda members: [])


def every_restart_opens_the_round_anew(monkeypatch):
    def restored(rules, journal, tickets, now_s, **more):
        return original(rules, replace(journal, expected=None), tickets, now_s, **more)

    original = machine._restored
    monkeypatch.setattr(machine, "_restored", restored)


def the_dead_are_waited_for(monkeypatch):
    monkeypatch.setattr(machine, "_revise", lambda draft, fragment: None)


def leases_start_again(monkeypatch):
    def restore(rules, journal, now_s):
        state, effects = original(rules, journal, now_s)
        return replace(state, next_lease=1), effects

    original = machine.restore
    monkeypatch.setattr(machine, "restore", restore)


@pytest.mark.parametrize(
    "plant",
    [no_help_from_late_joiners, every_restart_opens_the_round_anew, the_dead_are_waited_for, leases_start_again],
)
def test_a_planted_bug_of_the_machine_is_found(plant, monkeypatch):
    """The search through orders of events finds each bug that was put into the rules of rounds."""
    plant(monkeypatch)
    with pytest.raises(Violation):
        explore(examples=300, shrink=False)


def test_a_failing_order_of_events_is_shortened():
    """If the search finds an order of events that fails, it reports a short one with at most one fault."""
    with pytest.raises(Violation) as caught:
        explore(examples=30, mutant="two-step commit")
    notes = "\n".join(caught.value.__notes__)
    assert "in Schedule(" in notes
    assert notes.count("Fault(") <= 1  # one crash between the two writes is all that it takes


@pytest.mark.covers("P10")
def test_no_order_of_faults_breaks_a_swarm():
    """In a search through many orders of events and faults in a swarm, an accepted update is in exactly one version, or
    its ticket is open again.
    """
    seen = explore(examples=200, swarm=True)
    wanted = ("versions", "crashes", "lose", "RoundReopened", "TicketsExpired", "ExpectedChanged")
    assert all(seen[what] > 10 for what in wanted), f"the search hardly meets some of what it is for: {seen}"


@pytest.mark.covers("P10")
@pytest.mark.parametrize("ending", ["leave", "fail"])
def test_a_planted_bug_of_reopened_rounds_is_found(monkeypatch, ending):
    """The checks find a planted bug: a reopened round that forgets its expected workers.

    By hand: site 0 has submitted by 15 s, and leaves, so the round still counts its update. Site 1 stands still, which
    keeps the round open. The aggregator is lost at 30 s, and with it the update: the round expects sites 1 and 2 alone.
    """
    losses = Fault(3, "stop", 1), Fault(15, ending, 0), Fault(30, "lose", 0)
    assert simulate(replace(PLAIN, faults=losses))["RoundReopened"] == 1
    step = machine.step

    def forgets(state, event, now_s):
        after, effects = step(state, event, now_s)
        if isinstance(event, AggregatorLost):
            effects = tuple(effect for effect in effects if not isinstance(effect, ExpectedChanged))
        return after, effects

    monkeypatch.setattr(machine, "step", forgets)
    with pytest.raises(Violation, match="at 30 s: the journal makes"):
        simulate(replace(PLAIN, faults=losses))
