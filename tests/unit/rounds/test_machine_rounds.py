"""Opening and closing rounds: which sites a barrier waits for, quorum and deadline, refusals, fragments, the end."""

from __future__ import annotations

import pytest
from round_story import closed

from atoll.rounds import events, machine, opening, waiting
from atoll.rounds.closing_policy import Barrier, Close, QuorumDeadline, RoundView, Wait
from atoll.rounds.transitions import IllegalTransition


@pytest.mark.covers("L22")
def test_round_one_opens_when_all_sites_have_joined(story):
    run = story(sites=3)
    run.join("c")
    assert run.why() == "waits for 3 sites to join, 1 has"
    run.join("a")
    assert run.withheld("a") == "waits for 3 sites to join, 2 have"
    assert run.join("b")[1:] == (events.RoundOpened(0, 0, ("a", "b", "c")), events.Woken(0))


@pytest.mark.covers("L22")
def test_a_worker_that_left_does_not_count_towards_round_one(story):
    run = story(sites=2)
    run.join("a")
    run.leave("a")
    run.join("b")
    assert run.phase() == "gathering"
    run.join("a")
    assert run.expected() == ("a", "b")


def test_round_one_starts_from_whatever_version_is_the_head(story):
    run = story(sites=1, heads=(7,))
    assert events.RoundOpened(0, 7, ("a",)) in run.join("a")
    run.submit("a")
    assert events.RoundOpened(0, 8, ("a",)) in run.commit()


def test_a_barrier_closes_with_all_workers_in_order_of_site_names(story):
    run = story(sites=3)
    run.join("c", "b", "a")
    tickets = {site: run.ticket(site) for site in ("c", "a", "b")}
    assert tickets == {"c": 1, "a": 2, "b": 3}  # issued in this order; reduced in order of names
    assert run.accept(2) == ()
    assert run.why() == "waits for b and c"
    assert run.accept(1) == ()
    assert run.accept(3) == (events.RoundClosed(0, 0, (2, 3, 1)),)
    assert run.why() == "reduces 3 updates of round 1"


def test_the_next_round_opens_with_the_commit_for_those_alive_then(story):
    run = story(sites=2)
    run.join("a", "b")
    run.submit("a", "b")
    run.join("c")
    run.leave("a")
    assert run.commit() == (events.RoundOpened(0, 1, ("b", "c")), events.Woken(0))


@pytest.mark.covers("F33")
def test_a_late_joiner_counts_from_the_next_round_on(story):
    run = story(sites=2)
    run.join("a", "b", "c")
    assert run.withheld("c") == "counts from the next round on"
    assert run.missing() == ("a", "b")
    assert len(closed(run.submit("a", "b"))) == 1
    run.commit()
    assert run.expected() == ("a", "b", "c")
    assert run.ticket("c") == 3


@pytest.mark.covers("F33", "L22")
def test_a_late_joiner_is_expected_at_once_where_the_round_could_not_close_without_it(story):
    run = story(sites=2, min_sites=2)
    run.join("a", "b")
    run.leave("b")
    assert run.why() == "waits for another site: 1 alive, rounds.min_sites is 2"
    assert events.ExpectedChanged(0, 0, ("a", "c")) in run.join("c")
    assert closed(run.submit("a", "c")) == [(1, 2)]


@pytest.mark.covers("L22")
def test_a_waiting_late_joiner_steps_in_when_a_death_leaves_too_few(story):
    run = story(sites=2, min_sites=2)
    run.join("a", "b", "z", "c")  # z joined before c, so z is asked first
    effects = run.leave("b")
    assert events.ExpectedChanged(0, 0, ("a", "z")) in effects
    assert events.Woken(0) in effects
    assert run.withheld("c") == "counts from the next round on"


def test_min_sites_are_never_undercut(story):
    run = story(sites=3, min_sites=2)
    run.join("a", "b", "c")
    run.submit("a")
    run.leave("b")
    run.leave("c")
    assert run.phase() == "open"
    assert run.why() == "waits for another site: 1 alive, rounds.min_sites is 2"
    run.join("b")
    assert closed(run.submit("b")) == [(1, 2)]


@pytest.mark.covers("F34")
def test_when_all_die_the_round_waits_and_says_why(story):
    run = story(sites=2)
    run.join("a", "b")
    run.wait(120)
    assert run.expected() == ()
    assert run.phase() == "open"
    assert run.why() == "waits for another site: 0 alive, rounds.min_sites is 1"
    run.join("b")
    assert closed(run.submit("b")) == [(1,)]


def test_a_round_opened_for_no_worker_waits_for_the_first(story):
    run = story(sites=1)
    run.join("a")
    run.submit("a")
    run.leave("a")
    assert events.RoundOpened(0, 1, ()) in run.commit()
    assert run.missing() == ()
    assert events.ExpectedChanged(0, 1, ("b",)) in run.join("b")
    assert closed(run.submit("b")) == [(2,)]


def test_a_quorum_suffices_once_the_deadline_has_passed(story):
    run = story(sites=3, policy=QuorumDeadline(quorum=2, deadline_s=60), heartbeat_timeout_s=0)
    run.join("a", "b", "c")
    run.ticket("c")
    run.submit("b", "a")
    run.wait(59)
    assert run.phase() == "open"
    assert waiting.next_deadline_s(run.state) == 60
    effects = run.wait(1)
    assert effects[0] == events.RoundClosed(0, 0, (3, 2))  # a got ticket 3, b 2
    assert effects[1] == events.TicketsExpired((1,), "the round from version 0 closed without it")
    assert waiting.may_submit(run.state, "c", run.lease("c"), 1) == (
        "Ticket 1 is expired: the round from version 0 closed without it."
    )


def test_before_the_deadline_a_quorum_policy_is_a_barrier(story):
    run = story(sites=2, policy=QuorumDeadline(quorum=1, deadline_s=60))
    run.join("a", "b")
    assert closed(run.submit("a")) == []
    assert closed(run.submit("b")) == [(1, 2)]


@pytest.mark.covers("F35")
@pytest.mark.parametrize(("quorum", "min_sites"), [(1, 2), (2, 1)])
def test_below_quorum_or_min_sites_the_deadline_closes_nothing(story, quorum, min_sites):
    run = story(sites=2, min_sites=min_sites, policy=QuorumDeadline(quorum, 60), heartbeat_timeout_s=0)
    run.join("a", "b")
    run.submit("a")
    assert closed(run.wait(1000)) == []
    assert run.why() == "waits for b; the deadline has passed, 1 of 2 updates are in"
    assert waiting.next_deadline_s(run.state) is None
    assert closed(run.submit("b")) == [(1, 2)]


def test_a_quorum_is_not_undercut_by_deaths_either(story):
    run = story(sites=2, policy=QuorumDeadline(2, 60))
    run.join("a", "b")
    run.submit("a")
    run.leave("b")
    assert run.why() == "waits for another site: 1 alive, rounds.quorum is 2"
    run.wait(60)
    assert run.phase() == "open"


def test_the_deadline_counts_from_the_opening_of_each_round(story):
    run = story(sites=2, policy=QuorumDeadline(1, 60), heartbeat_timeout_s=0)
    run.now_s = 100
    run.join("a", "b")
    run.submit("a")
    assert closed(run.wait(60)) == [(1,)]
    run.now_s = 500
    run.commit()
    run.submit("a")
    assert closed(run.wait(59)) == []
    assert closed(run.wait(1)) == [(2,)]


@pytest.mark.covers("F31")
def test_a_refused_update_leaves_the_round_to_the_others(story):
    run = story(sites=2)
    run.join("a", "b")
    bad = run.ticket("a")
    run.submit("b")
    effects = run.refuse(bad)
    assert effects[:2] == (events.ExpectedChanged(0, 0, ("b",)), events.RoundClosed(0, 0, (2,)))
    run.commit()
    assert run.expected() == ("a", "b")  # it takes part in the next round


@pytest.mark.covers("F31")
def test_a_refused_worker_waits_and_is_told_why(story):
    run = story(sites=2)
    run.join("a", "b")
    bad = run.ticket("a")
    run.refuse(bad)
    assert run.withheld("a") == "its update was refused (layer.weight is not finite); it counts from the next round on"
    assert waiting.may_submit(run.state, "a", run.lease("a"), bad) == (
        "Ticket 1 is refused: layer.weight is not finite."
    )
    run.join("a")  # a new process of it does not change that
    assert run.withheld("a").startswith("its update was refused")


def test_a_refused_worker_may_try_again_where_the_round_cannot_close_without_it(story):
    run = story(sites=1)
    run.join("a")
    bad = run.ticket("a")
    assert run.refuse(bad) == (events.ExpectedChanged(0, 0, ()), events.Woken(0))
    again = run.ask("a")
    assert again == events.TicketIssued("a", 2, 0, 0, new=True)
    assert waiting.may_submit(run.state, "a", run.lease("a"), bad) == (
        "Ticket 1 is over: its round has closed, or a newer ticket has replaced it."
    )
    assert closed(run.accept(2)) == [(2,)]


def test_a_round_closes_once(story):
    run = story(sites=1)
    run.join("a")
    number = run.ticket("a")
    assert len(closed(run.accept(number))) == 1
    assert run.accept(number) == ()  # told again: nothing happens
    assert run.withheld("a") == "reduces 1 update of round 1"


@pytest.mark.covers("L4")
def test_fragments_have_rounds_of_their_own(story):
    run = story(sites=2, fragments=2)
    run.join("a", "b")
    assert closed(run.submit("a", "b", fragment=1)) == [(1, 2)]
    assert run.commit(fragment=1) == (events.RoundOpened(1, 1, ("a", "b")), events.Woken(1))
    assert [run.state.rounds[f].head for f in (0, 1)] == [0, 1]
    assert run.missing(0) == ("a", "b")
    run.submit("a", fragment=0)
    assert [run.missing(f) for f in (0, 1)] == [("b",), ("a", "b")]
    run.leave("b")  # in both it is no longer waited for; in fragment 0 that was all that was missing
    assert [run.phase(f) for f in (0, 1)] == ["closing", "open"]


def test_the_run_is_finished_when_every_fragment_has_its_rounds(story):
    run = story(sites=1, rounds=1, fragments=2)
    run.join("a")
    run.submit("a", fragment=0)
    assert run.commit(0) == (events.Woken(0),)
    assert run.withheld("a", 0) == "finished"
    run.submit("a", fragment=1)
    assert run.commit(1) == (events.RunFinished(), events.Woken(1))
    assert run.state.finished
    assert run.why(1) == "is finished"
    run.join("b")
    assert run.withheld("b") == "finished"


def test_missing_says_since_when(story):
    run = story(sites=2, min_sites=2)
    run.now_s = 10
    run.join("a", "b")
    assert waiting.missing(run.state, 0) == (("a", 10), ("b", 10))
    run.now_s = 30
    run.leave("b")
    run.join("c")
    assert waiting.missing(run.state, 0) == (("a", 10), ("c", 30))


@pytest.mark.parametrize(
    "event", [events.VersionCommitted(0, 1), events.UpdateAccepted(9), events.TicketRequested("a", 1, 5)]
)
def test_what_cannot_be_is_an_error_of_the_caller(story, event):
    run = story(sites=1)
    run.join("a")
    with pytest.raises(IllegalTransition):
        machine.step(run.state, event, 0.0)


def test_an_accept_after_the_round_closed_is_an_error_of_the_caller(story):
    run = story(sites=2, policy=QuorumDeadline(1, 60), heartbeat_timeout_s=0)
    run.join("a", "b")
    late = run.ticket("b")
    run.submit("a")
    run.wait(60)
    with pytest.raises(IllegalTransition, match=f"Ticket {late} is expired; 'update accepted' cannot happen"):
        machine.step(run.state, events.UpdateAccepted(late), run.now_s)


def test_a_barrier_that_waits_is_not_shown_every_update(story, monkeypatch):
    """Which would take the square of the workers; the last update closes the round all the same."""
    sites = [f"site-{number:02d}" for number in range(20)]
    run = story(sites=len(sites))
    run.join(*sites)
    looks: list[int] = []
    view = opening.view
    monkeypatch.setattr(opening, "view", lambda state, fragment: looks.append(fragment) or view(state, fragment))
    for site in sites:
        assert run.state.rounds[0].phase == "open"
        run.ticket(site)
        run.submit(site)
    assert run.state.rounds[0].phase == "closing"
    assert len(looks) <= 2  # with the last, and once more by the restart that a story plays after every event


class Hasty(Barrier):
    """A wrong policy: closes whatever is in."""

    def decide(self, view: RoundView, now_s: float) -> Close | Wait:
        return Close(tuple(update.ticket for update in view.accepted))


def test_the_machine_holds_the_floor_against_a_wrong_policy(story):
    run = story(sites=1, policy=Hasty())
    with pytest.raises(IllegalTransition, match=r"needed 1"):
        run.join("a")  # the round opens, and the policy would close it with nothing
