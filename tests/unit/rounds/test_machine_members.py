"""Who takes part: leases that fence, silence, leaving, and returning in the middle of a round."""

from __future__ import annotations

import pytest
from harness.sim_journal import initial
from round_story import Story, closed

from atoll.rounds import events, machine, waiting
from atoll.rounds.leases import Member
from atoll.rounds.state import FragmentSnapshot, Rules, Snapshot


@pytest.mark.covers("L9")
def test_a_silent_worker_is_declared_dead_and_the_barrier_is_judged_again(story):
    run = story(sites=2)
    run.join("a", "b")
    run.submit("a")
    run.now_s = 119
    run.seen("a")
    assert waiting.next_deadline_s(run.state) == 120
    assert run.wait(0.5) == ()
    assert run.wait(0.5) == (
        events.LeaseEnded("b", 2, "dead", "silent for 120 s"),
        events.ExpectedChanged(0, 0, ("a",)),
        events.RoundClosed(0, 0, (1,)),
        events.Woken(0),
    )
    assert waiting.next_deadline_s(run.state) == 239


@pytest.mark.covers("L9")
def test_a_heartbeat_timeout_of_0_declares_no_worker_dead(story):
    run = story(sites=1, heartbeat_timeout_s=0)
    run.join("a")
    assert waiting.next_deadline_s(run.state) is None
    assert run.wait(1e9) == ()
    assert run.state.members["a"].alive


@pytest.mark.covers("L9")
def test_leaving_is_the_same_path(story):
    run = story(sites=2)
    run.join("a", "b")
    run.submit("a")
    effects = run.leave("b")
    assert effects[0] == events.LeaseEnded("b", 2, "left", "")
    assert closed(effects) == [(1,)]
    assert events.Woken(0) in effects


def test_a_worker_that_fails_says_why(story):
    run = story(sites=1)
    run.join("a")
    assert run.leave("a", "CUDA out of memory")[0] == events.LeaseEnded("a", 1, "failed", "CUDA out of memory")
    assert run.state.members["a"].why == "failed"


@pytest.mark.parametrize("sign", ["heartbeat", "ticket request", "accepted update"])
def test_every_valid_sign_of_life_counts(story, sign):
    run = story(sites=2)
    run.join("a", "b")
    ticket = run.ticket("a")
    run.now_s = 100
    {"heartbeat": run.seen, "ticket request": run.ticket}.get(sign, lambda _: run.accept(ticket))("a")
    ended = [effect.site for effect in run.wait(20) if isinstance(effect, events.LeaseEnded)]
    assert ended == ["b"]


@pytest.mark.covers("F4")
def test_an_acknowledged_update_stays_when_its_worker_dies(story):
    run = story(sites=2)
    run.join("a", "b")
    run.submit("a")
    effects = run.leave("a")
    assert run.expected() == ("a", "b")  # its update is in: nothing to wait for, nothing to take away
    assert not any(isinstance(effect, events.ExpectedChanged) for effect in effects)
    assert closed(run.submit("b")) == [(1, 2)]


@pytest.mark.covers("F19")
def test_the_newest_process_of_a_site_has_the_lease(story):
    run = story(sites=1)
    assert run.join("a")[0] == events.LeaseGranted("a", 1)
    assert run.join("a")[0] == events.LeaseGranted("a", 2)
    told = (events.LeaseRefused("a", "a newer process has joined as 'a'", superseded=True),)
    for event in (events.WorkerSeen("a", 1), events.TicketRequested("a", 1, 0), events.WorkerLeft("a", 1)):
        assert run.send(event) == told
    assert waiting.may_submit(run.state, "a", 1, 1) == told[0]
    assert run.expected() == ("a",)  # the same member, not a second one


def test_a_stale_lease_is_no_sign_of_life(story):
    run = story(sites=1)
    run.join("a", "a")
    run.now_s = 100
    run.send(events.WorkerSeen("a", 1))
    assert run.wait(20)[0] == events.LeaseEnded("a", 2, "dead", "silent for 120 s")


def test_refuses_a_worker_that_never_joined(story):
    run = story(sites=1)
    assert run.send(events.WorkerSeen("x", 3)) == (events.LeaseRefused("x", "'x' has not joined this run"),)
    run.join("a")
    assert run.send(events.WorkerSeen("a", 9)) == (events.LeaseRefused("a", "lease 9 of 'a' is not known here"),)


@pytest.mark.covers("F5")
def test_a_worker_that_was_stopped_past_its_lease_rejoins_and_gets_its_ticket_again(story):
    run = story(sites=2, min_sites=2)
    run.join("a", "b")
    ticket = run.ticket("a")
    run.now_s = 60
    run.seen("b")
    run.wait(60)
    assert run.send(events.WorkerSeen("a", 1)) == (
        events.LeaseRefused("a", "'a' was silent for too long and was declared dead"),
    )
    assert events.ExpectedChanged(0, 0, ("a", "b")) in run.join("a")
    assert run.ask("a") == events.TicketIssued("a", ticket, 0, 0, new=False)
    assert waiting.may_submit(run.state, "a", run.lease("a"), ticket) is None


@pytest.mark.covers("F2")
def test_a_restarted_worker_goes_on_under_its_open_ticket(story):
    run = story(sites=2)
    run.join("a", "b")
    ticket = run.ticket("a")
    run.join("a")
    assert run.ask("a") == events.TicketIssued("a", ticket, 0, 0, new=False)
    run.submit("b")
    assert closed(run.accept(ticket)) == [(ticket, 2)]


@pytest.mark.covers("F2")
def test_waits_again_for_a_worker_that_returns_with_an_open_ticket(story):
    run = story(sites=3)
    run.join("a", "b", "c")
    ticket = run.ticket("a")
    run.leave("a")
    assert run.expected() == ("b", "c")
    run.join("a")
    assert run.expected() == ("a", "b", "c")
    assert run.ask("a") == events.TicketIssued("a", ticket, 0, 0, new=False)


def test_a_worker_that_returns_without_a_ticket_counts_from_the_next_round_on(story):
    run = story(sites=2)
    run.join("a", "b")
    run.leave("a")
    run.join("a")
    assert run.withheld("a") == "counts from the next round on"


@pytest.mark.covers("F4")
def test_a_worker_restarted_after_its_acknowledgement_does_not_train_again(story):
    run = story(sites=2)
    run.join("a", "b")
    run.submit("a")
    run.join("a")
    assert run.withheld("a") == "its update is accepted; the round waits for b"


@pytest.mark.covers("F23")
def test_a_ticket_of_a_round_that_is_over_is_refused(story):
    run = story(sites=2, heartbeat_timeout_s=120)
    run.join("a", "b")
    stale = run.ticket("b")
    run.submit("a")
    run.now_s = 60
    run.seen("a")
    run.wait(60)  # b is declared dead, the round closes with a alone
    run.commit()
    run.join("b")
    refused = waiting.may_submit(run.state, "b", run.lease("b"), stale)
    assert refused == "Ticket 1 is over: its round has closed, or a newer ticket has replaced it."
    assert run.withheld("b") == "counts from the next round on"


def test_may_submit_checks_the_owner_of_the_ticket(story):
    run = story(sites=2)
    run.join("a", "b")
    ticket = run.ticket("a")
    assert waiting.may_submit(run.state, "a", 1, ticket) is None
    assert waiting.may_submit(run.state, "b", 2, ticket) == "Ticket 1 was not issued to 'b'."
    assert waiting.may_submit(run.state, "b", 2, 7) == "Ticket 7 was never issued."
    run.accept(ticket)
    assert waiting.may_submit(run.state, "a", 1, ticket) == "Ticket 1 is accepted."


def test_a_heartbeat_touches_nothing_but_when_the_worker_was_seen(story):
    run = story(sites=500)
    state, _ = machine.restore(
        run.rules,
        Snapshot(
            (FragmentSnapshot(0),),
            tuple(Member(f"w{n:03}", n + 1, alive=True) for n in range(500)),
        ),
        now_s=0.0,
    )
    after, effects = machine.step(state, events.WorkerSeen("w007", 8), 5.0)
    assert effects == ()
    assert after.members is state.members
    assert after.rounds is state.rounds
    assert after.seen_s["w007"] == 5.0
    assert state.seen_s["w007"] == 0.0


def test_500_deaths_at_once_change_the_round_once(story):
    run = story(sites=500)
    state = run.state
    for n in range(500):
        state, _ = machine.step(state, events.WorkerJoined(f"w{n:03}"), 0.0)
    state, effects = machine.step(state, events.TimePassed(), 120.0)
    assert sum(isinstance(effect, events.LeaseEnded) for effect in effects) == 500
    assert sum(isinstance(effect, events.ExpectedChanged) for effect in effects) == 1


def test_a_worker_that_begins_learns_the_next_fragment():
    """The first of those with the fewest rounds; but not one whose round has the site's update already."""
    tell = Story(Rules(sites=2, fragments=3))
    tell.join("a", "b")
    assert waiting.due(tell.state, "c") == 0
    tell.submit("a")
    assert [waiting.due(tell.state, site) for site in "abc"] == [1, 0, 0]
    tell.submit("b")
    tell.commit()
    assert [waiting.due(tell.state, site) for site in "abc"] == [1, 1, 1]


@pytest.mark.covers("L7")
def test_a_worker_that_submits_nothing_more_is_awaited_in_no_round_and_stays_for_its_results(story):
    """Of two fragments a's update of the second is in; the first goes on with b alone, and the second counts a's."""
    run = story(sites=2, fragments=2)
    run.join("a", "b")
    run.submit("a", "b")
    run.commit()
    run.submit("a", fragment=1)
    run.ticket("a")  # of round 2, which it will not use
    run.send(events.WorkerEnds("a", run.lease("a")))
    assert run.missing() == ("b",)
    assert run.withheld("a") == events.ENDS
    assert closed(run.submit("b")) == [(run.state.rounds[0].tickets["b"].id,)]
    run.commit()
    assert run.state.rounds[0].head == 2
    run.submit("b", fragment=1)
    assert len(run.state.rounds[1].frozen) == 2
    run.commit(1)
    assert run.state.members["a"].alive
    assert run.expected() == run.expected(1) == ("b",)
    run.join("a")  # a next process of it takes part as ever
    run.submit("b")
    run.commit()
    assert run.expected() == ("a", "b")


@pytest.mark.covers("P12")
def test_opens_the_first_round_once_training_begins() -> None:
    """A workflow before the rounds holds them: both sites are there, and no round is open."""
    state = initial(Rules(sites=2, held=True))
    for site in "ab":
        state, _ = machine.step(state, events.WorkerJoined(site), 0.0)
    assert state.rounds[0].phase == "gathering"
    state, effects = machine.step(state, events.TrainingBegins(), 1.0)
    assert state.rounds[0].phase == "open"
    assert events.RoundOpened(0, 0, ("a", "b")) in effects
