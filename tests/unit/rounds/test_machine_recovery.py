"""What a restarted server makes of its journal, and what a round does whose aggregating worker is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.sim_journal import snapshot
from round_story import Story, closed

from atoll.rounds import events, machine
from atoll.rounds.closing_policy import AsyncBuffer, Barrier, QuorumDeadline
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
def test_a_restart_keeps_the_expected_workers(story):
    """After a restart of the server, an open round expects the same workers as before, and they get their tickets
    again.
    """
    run = story(sites=2)
    run.join("a", "b", "late")
    ticket = run.ticket("a")
    assert restart(run) == ()
    assert run.expected() == ("a", "b")
    assert run.withheld("late") == "counts from the next round on"
    assert run.ask("a") == events.TicketIssued("a", ticket, 0, 0, new=False)


def test_the_deadline_starts_again_after_a_restart(story):
    """After a restart of the server, the deadline of the open round counts from the restart, by the clock of the new
    process.
    """
    run = story("ab", policy=QuorumDeadline(1, 60))
    run.submit("a")
    run.now_s = 50
    restart(run, now_s=5.0)  # a new process: its clock has nothing to do with the old one
    assert run.state.next_deadline_s == 65
    run.now_s = 64
    assert run.wait(0) == ()
    assert events.RoundClosed(0, 0, (1,)) in run.wait(1)


def test_the_grace_starts_again_after_a_restart(story):
    """After a restart of the server, the grace period of an accepted update starts again, and ends without another
    update.
    """
    run = story("abc", policy=AsyncBuffer(grace_s=10))
    run.submit("a")
    run.now_s = 9
    restart(run, now_s=100.0)
    assert not closed(run.wait(9))
    assert closed(run.wait(1)) == [(1,)]


def test_a_restart_reuses_no_lease_or_ticket(story):
    """After a restart of the server, a site that has left stays gone. New leases and tickets get new numbers."""
    run = story("ab")
    run.ticket("a")
    run.leave("b")
    restart(run)
    assert [member.state for member in run.state.members.values()] == ["alive", "left"]
    run.join("c")
    assert run.lease("c") == 3
    run.leave("a")  # now the round needs c
    assert run.ticket("c") == 2


def test_a_restart_keeps_a_site_out_that_has_an_old_ticket(story):
    """In an asynchronous run, a site that sits out a round with a ticket of an older version gets no ticket in this
    round, also after a restart of the server.
    """
    run = story("ab", policy=AsyncBuffer())
    old = run.ticket("b")
    run.submit("a")
    run.commit()
    run.send(events.SatOut(old))  # the round from version 1, with a ticket of version 0
    assert restart(run) == ()
    assert run.expected() == ("a",)
    assert run.withheld("b").startswith("it sits out this round")
    run.submit("a")
    run.commit()
    assert run.ticket("b") == 4


@pytest.mark.parametrize("policy", [Barrier(), AsyncBuffer(buffer=2)], ids=["barrier", "async"])
def test_a_restart_keeps_a_returning_site_in_the_round(story, policy):
    """If a round needs a site that sat out, and a new process of it joins, the site gets a ticket, also after a restart
    of the server.
    """
    run = story("ab", policy=policy, min_sites=2)
    run.sit_out("b")
    run.join("b")  # the new process may have samples
    assert restart(run) == ()
    assert run.expected() == ("a", "b")
    assert run.ticket("b") == 2


@pytest.mark.covers("F10")
def test_a_restart_aggregates_a_closing_round_again(story):
    """If the server restarts while it aggregates a round, the round stays closing until it is aggregated again. Then
    the next round opens.
    """
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
def test_a_restart_completes_an_interrupted_transition(case):
    """After a crash between two writes to the journal, a restart does what the crash has left undone. If this restart
    is killed before its first write, the next restart does all of it.
    """
    journal, undone = UNDONE[case]
    rules = Rules(sites=2)
    state, effects = machine.restore(rules, journal, 3.0)
    assert effects == undone
    assert machine.restore(rules, journal, 3.0) == (state, effects)  # killed again before a write: the same
    assert machine.restore(rules, snapshot(state), 3.0) == (state, ())  # and after it: nothing is left


@pytest.mark.covers("F12")
def test_a_restart_ends_or_extends_a_run():
    """If the server crashes after the last version was committed, a restart ends the run. A restart with more rounds
    opens the next round.
    """
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
def test_lost_versions_do_not_count_as_rounds() -> None:
    """If a version was lost, its number does not count as a round, and the run still makes all its rounds."""
    # Guards against a run of three rounds that ends at version 3, although version 2 was lost.
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
def test_a_lost_aggregator_keeps_the_rounds_tickets(story):
    """If the aggregating worker of an open round is lost, the sites submit their updates again with the same
    tickets.
    """
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
def test_a_lost_aggregator_reopens_a_closed_round(story):
    """If the aggregating worker is lost after the round has closed, the round opens again and waits for all updates."""
    run = story("ab")
    assert closed(run.submit("a", "b")) == [(1, 2)]
    run.send(AggregatorLost(0, "it has gone"))
    assert (run.phase(), run.missing(), run.state.rounds[0].frozen) == ("open", ("a", "b"), ())
    assert closed(run.submit("a", "b")) == [(1, 2)]


@pytest.mark.covers("P10")
def test_a_lost_aggregators_round_awaits_no_dead_site(story):
    """If the aggregating worker is lost, the round does not wait for a site that has left since its update."""
    run = story("ab")
    run.submit("a")
    run.leave("a")  # its update stays in its round, where it is
    run.send(AggregatorLost(0, "it has gone"))
    assert run.missing() == ("b",)
    assert closed(run.submit("b")) == [(2,)]


@pytest.mark.covers("P10")
def test_a_lost_aggregator_costs_only_its_update(story):
    """If the aggregating worker leaves and its loss is reported then, the round closes with the updates of the other
    sites.
    """
    run = story("abc")
    assert closed(run.submit("a", "b", "c")) == [(1, 2, 3)]
    run.leave("a")
    run.send(AggregatorLost(0, "it has gone"))
    assert run.missing() == ("b", "c")
    assert closed(run.submit("b", "c")) == [(2, 3)]


def test_an_aggregator_without_updates_may_be_lost(story):
    """If the aggregating worker is lost while its round has no update, or before the first round, nothing changes."""
    run = story(sites=1, fragments=2)
    assert run.send(AggregatorLost(0, "the server was started again")) == ()  # gathering
    run.join("a")
    run.submit("a", fragment=1)
    assert run.send(AggregatorLost(0, "it has gone")) == ()
    assert [run.phase(fragment) for fragment in (0, 1)] == ["open", "closing"]


@pytest.mark.covers("P10")
def test_the_grace_starts_after_a_lost_aggregator(story):
    """If the aggregating worker is lost, the grace starts with the next update that is accepted."""
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
def test_a_lost_algorithm_state_expires_all_tickets(story):
    """If the algorithm's state is lost, all open tickets expire, and the sites get new ones."""
    run = story("abc")
    accepted, still_open = run.ticket("a"), run.ticket("b")
    run.accept(accepted)
    effects = run.send(StateLost("the server has gone back"))
    assert GenerationBegun(0, "the server has gone back") in effects
    assert [each.tickets for each in effects if isinstance(each, TicketsExpired)] == [(accepted, still_open)]
    assert (run.phase(), run.missing()) == ("open", ("a", "b", "c"))
    assert closed(run.submit("a", "b", "c")) == [(3, 4, 5)]


@pytest.mark.covers("S2")
def test_a_lost_algorithm_state_waits_for_the_aggregation(story):
    """If the algorithm's state is lost while a round is aggregated, the round is committed first, and the state then
    starts at zero.
    """
    run = story("ab")
    run.submit("a", "b")
    assert (run.phase(), run.send(StateLost("the server has gone back"))) == ("closing", ())
    run.commit()
    assert GenerationBegun(1, "the server has gone back") in run.send(StateLost("the server has gone back"))
