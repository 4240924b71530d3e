"""What a restarted server makes of its journal, and what a round does whose aggregating worker is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.sim_journal import snapshot
from round_story import Story, closed

from atoll.rounds import events, machine
from atoll.rounds.closing_policy import AsyncBuffer, QuorumDeadline
from atoll.rounds.events import AggregatorLost, GenerationBegun, RoundReopened, StateLost, TicketsExpired
from atoll.rounds.leases import Member
from atoll.rounds.state import FragmentSnapshot, Rules, Snapshot
from atoll.rounds.transitions import IssuedTicket

MEMBERS = (Member("a", 1, alive=True), Member("b", 2, alive=True))
OPEN = FragmentSnapshot(0, ("a", "b"), started=True)


def restart(run: Story, now_s: float = 0.0) -> tuple[events.Effect, ...]:
    """Stop the server of `run` and start it again from the journal."""
    run.state, effects = machine.restore(run.rules, run.journal.snapshot(), now_s)
    run.now_s = now_s
    for effect in effects:
        run.journal.apply(effect)
    again, nothing = machine.restore(run.rules, run.journal.snapshot(), now_s)
    assert nothing == ()
    assert snapshot(again) == snapshot(run.state)
    return effects


@pytest.mark.covers("F6")
def test_an_open_round_expects_the_same_workers_after_a_restart(story):
    run = story(sites=2)
    run.join("a", "b", "late")
    ticket = run.ticket("a")
    assert restart(run) == ()
    assert run.expected() == ("a", "b")
    assert run.withheld("late") == "counts from the next round on"
    assert run.ask("a") == events.TicketIssued("a", ticket, 0, 0, new=False)


def test_silence_and_deadline_start_anew(story):
    run = story("ab", policy=QuorumDeadline(1, 60))
    run.submit("a")
    run.now_s = 50
    restart(run, now_s=5.0)  # a new process: its clock has nothing to do with the old one
    assert run.state.next_deadline_s == 65
    run.now_s = 64
    assert run.wait(0) == ()
    assert events.RoundClosed(0, 0, (1,)) in run.wait(1)


def test_the_grace_of_an_update_starts_anew_and_ends_without_another_update(story):
    run = story("abc", policy=AsyncBuffer(grace_s=10))
    run.submit("a")
    run.now_s = 9
    restart(run, now_s=100.0)
    assert not closed(run.wait(9))
    assert closed(run.wait(1)) == [(1,)]


def test_the_dead_stay_dead_and_numbers_are_not_given_again(story):
    run = story("ab")
    run.ticket("a")
    run.leave("b")
    restart(run)
    assert [member.state for member in run.state.members.values()] == ["alive", "left"]
    run.join("c")
    assert run.lease("c") == 3
    run.leave("a")  # now the round needs c
    assert run.ticket("c") == 2


@pytest.mark.covers("F10")
def test_a_frozen_round_stays_closing_until_its_pass_has_run_again(story):
    run = story("a")
    run.submit("a")
    assert restart(run) == ()
    assert run.why() == "aggregates 1 update of round 1"
    assert run.state.rounds[0].frozen == (1,)
    assert events.RoundOpened(0, 1, ("a",)) in run.commit()


# What a crash between two journal writes has left undone; each case: the journal → what restoring still has to do.
UNDONE = {
    "the last worker's lease is in, the opening of round one is not": (
        Snapshot((FragmentSnapshot(0),), MEMBERS),
        (events.RoundOpened(0, 0, ("a", "b")), events.Woken()),
    ),
    "the last accept is in, the closing is not": (
        Snapshot((OPEN,), MEMBERS, (IssuedTicket(1, "b", 0, 0, "accepted"), IssuedTicket(2, "a", 0, 0, "accepted"))),
        (events.RoundClosed(0, 0, (2, 1)),),
    ),
    "the closing is in, the expiry of the other tickets is not": (
        Snapshot(
            (FragmentSnapshot(0, frozen=(1,)),),
            MEMBERS,
            (IssuedTicket(1, "b", 0, 0, "accepted"), IssuedTicket(2, "a", 0, 0, "open")),
        ),
        (events.TicketsExpired((2,), "the round from version 0 closed without it"),),
    ),
    "the head has moved, the next round has not opened": (
        Snapshot(
            (FragmentSnapshot(1, started=True),),
            MEMBERS,
            (IssuedTicket(1, "a", 0, 0, "counted"),),
        ),
        (events.RoundOpened(0, 1, ("a", "b")), events.Woken()),
    ),
    "a death is in, the round still expects the dead": (
        Snapshot((OPEN,), (MEMBERS[0], Member("b", 2, alive=False, why="dead"))),
        (events.ExpectedChanged(0, 0, ("a",)), events.Woken()),
    ),
    "a refusal is in, the round still expects the refused": (
        Snapshot((OPEN,), MEMBERS, (IssuedTicket(1, "a", 0, 0, "refused", "NaN"),)),
        (events.ExpectedChanged(0, 0, ("b",)), events.Woken()),
    ),
    "a return is in, the round does not expect it yet": (
        Snapshot((FragmentSnapshot(0, ("a",)),), MEMBERS, (IssuedTicket(1, "b", 0, 0, "open"),), next_lease=9),
        (events.ExpectedChanged(0, 0, ("a", "b")), events.Woken()),
    ),
}


@pytest.mark.covers("F8", "F9", "F12", "F13")
@pytest.mark.parametrize("case", UNDONE)
def test_restoring_does_what_a_crash_has_left_undone(case):
    journal, undone = UNDONE[case]
    rules = Rules(sites=2)
    state, effects = machine.restore(rules, journal, 3.0)
    assert effects == undone
    assert machine.restore(rules, journal, 3.0) == (state, effects)  # killed again before a write: the same
    assert machine.restore(rules, snapshot(state), 3.0) == (state, ())  # and after it: nothing is left


@pytest.mark.covers("F12")
def test_the_last_commit_is_in_the_end_of_the_run_is_not_and_more_rounds_may_follow():
    rules = Rules(sites=1, rounds=3)
    journal = Snapshot((FragmentSnapshot(3, started=True),), MEMBERS[:1])
    state, effects = machine.restore(rules, journal, 0.0)
    assert effects == (events.RunFinished(),)
    assert state.finished
    finished = replace(journal, finished=True)
    assert machine.restore(rules, finished, 0.0) == (state, ())
    state, effects = machine.restore(Rules(sites=1, rounds=5), finished, 0.0)
    assert effects == (events.RoundOpened(0, 3, ("a",)), events.Woken())
    assert not state.finished


@pytest.mark.covers("F41")
def test_rounds_are_counted_where_numbers_of_versions_were_lost() -> None:
    """Guards against a run of three rounds that ends at version 3, though version 2 was lost and did not count."""
    rules = Rules(sites=1, rounds=3)
    lost = Snapshot((FragmentSnapshot(1, started=True),), (Member("a", 1, alive=True),))
    state, _ = machine.restore(rules, lost, 0.0)
    for ticket, version, number in ((1, 3, 2), (2, 4, 3)):
        assert (state.rounds[0].phase, state.rounds[0].number) == ("open", number)
        for event in (
            events.TicketRequested("a", 1, 0),
            events.UpdateAccepted(ticket),
            events.VersionCommitted(0, version),
        ):
            state, effects = machine.step(state, event, 1.0)
        again = machine.restore(rules, snapshot(state), 1.0)[0]
        assert (again.rounds[0].done, again.finished) == (number, number == 3)
    assert (state.finished, state.rounds[0].head, state.rounds[0].lost) == (True, 4, 1)
    assert events.RunFinished() in effects


# -- a round whose aggregating worker is lost
#
# `Story` compares after every event what a restart would make of the journal with what the machine has.


@pytest.mark.covers("P10")
def test_what_was_collected_of_an_open_round_comes_again_under_the_same_tickets(story):
    run = story("ab")
    number = run.ticket("a")
    run.accept(number)
    assert run.missing() == ("b",)
    effects = run.send(AggregatorLost(0, "it has gone"))
    assert RoundReopened(0, 0, (number,), "it has gone") in effects
    assert (run.phase(), run.missing()) == ("open", ("a", "b"))
    assert run.ticket("a") == number  # the same ticket, again
    run.accept(number)
    assert closed(run.submit("b")) == [(number, 2)]
    run.commit()
    assert run.state.rounds[0].head == 1


@pytest.mark.covers("P10")
def test_a_round_that_was_closed_is_open_again(story):
    run = story("ab")
    assert closed(run.submit("a", "b")) == [(1, 2)]
    run.send(AggregatorLost(0, "it has gone"))
    assert (run.phase(), run.missing(), run.state.rounds[0].frozen) == ("open", ("a", "b"), ())
    assert closed(run.submit("a", "b")) == [(1, 2)]


@pytest.mark.covers("P10")
def test_a_submitter_that_has_died_meanwhile_is_not_waited_for(story):
    run = story("ab")
    run.submit("a")
    run.leave("a")  # its update stays in its round, where it is
    run.send(AggregatorLost(0, "it has gone"))
    assert run.missing() == ("b",)
    assert closed(run.submit("b")) == [(2,)]


@pytest.mark.covers("P10")
def test_the_lost_aggregator_that_leaves_first_costs_only_its_own_update(story):
    run = story("abc")
    assert closed(run.submit("a", "b", "c")) == [(1, 2, 3)]
    run.leave("a")
    run.send(AggregatorLost(0, "it has gone"))
    assert run.missing() == ("b", "c")
    assert closed(run.submit("b", "c")) == [(2, 3)]


def test_nothing_to_lose_changes_nothing(story):
    run = story(sites=1, fragments=2)
    assert run.send(AggregatorLost(0, "the server was started again")) == ()  # gathering
    run.join("a")
    run.submit("a", fragment=1)
    assert run.send(AggregatorLost(0, "it has gone")) == ()
    assert [run.phase(fragment) for fragment in (0, 1)] == ["open", "closing"]


@pytest.mark.covers("P10")
def test_the_grace_begins_with_the_first_update_that_comes_again(story):
    run = story("abc", policy=AsyncBuffer(grace_s=10))
    first, second = run.ticket("a"), run.ticket("b")
    run.accept(first)
    run.now_s = 9
    run.send(AggregatorLost(0, "it has gone"))
    assert not closed(run.accept(second))
    assert not closed(run.wait(9))
    assert closed(run.wait(1)) == [(second,)]


# -- a round in which the state of the algorithm begins anew


@pytest.mark.covers("S2")
def test_no_ticket_of_a_round_outlives_the_state_of_its_algorithm(story):
    run = story("abc")
    accepted, still_open = run.ticket("a"), run.ticket("b")
    run.accept(accepted)
    effects = run.send(StateLost("the server has gone back"))
    assert GenerationBegun(0, "the server has gone back") in effects
    assert [each.tickets for each in effects if isinstance(each, TicketsExpired)] == [(accepted, still_open)]
    assert (run.phase(), run.missing()) == ("open", ("a", "b", "c"))
    assert closed(run.submit("a", "b", "c")) == [(3, 4, 5)]


@pytest.mark.covers("S2")
def test_the_state_of_an_algorithm_does_not_begin_anew_while_a_round_is_aggregated(story):
    run = story("ab")
    run.submit("a", "b")
    assert (run.phase(), run.send(StateLost("the server has gone back"))) == ("closing", ())
    run.commit()
    assert GenerationBegun(1, "the server has gone back") in run.send(StateLost("the server has gone back"))
