"""The round machine: which sites take part, and when rounds open and close."""

from __future__ import annotations

import pytest
from harness.sim_journal import initial
from round_story import Story, closed

from atoll.rounds import events, machine
from atoll.rounds.closing_policy import Barrier, Close, QuorumDeadline, RoundView, StayOpen
from atoll.rounds.leases import Member
from atoll.rounds.sampling import Sampling
from atoll.rounds.state import FragmentSnapshot, Rules, Snapshot, State
from atoll.rounds.transitions import IllegalTransition

# -- opening and closing


@pytest.mark.covers("L22")
def test_round_one_opens_when_all_sites_have_joined(story):
    """The first round opens when the required number of sites has joined. A site that has left does not count."""
    run = story(sites=3)
    run.join("c")
    assert run.why() == "waits for 3 sites to join; 1 joined so far"
    run.leave("c")  # it does not count
    run.join("a", "c")
    assert run.withheld("a") == "waits for 3 sites to join; 2 joined so far"
    assert run.join("b")[1:] == (events.RoundOpened(0, 0, ("a", "b", "c")), events.Woken())


def test_waiting_for_one_site_uses_the_singular(story):
    """If a run needs one site, the reason for waiting says `1 site`."""
    assert story(sites=1).why() == "waits for 1 site to join; 0 joined so far"


def test_a_barrier_closes_in_order_of_site_names(story):
    """A barrier closes a round when all workers have submitted. The updates are in the order of the site names, not of
    the tickets.
    """
    run = story("cba")
    tickets = {site: run.ticket(site) for site in ("c", "a", "b")}
    assert tickets == {"c": 1, "a": 2, "b": 3}  # issued in this order; reduced in order of names
    assert run.accept(2) == run.accept(2) == ()  # reported again: nothing happens
    assert run.why() == "waits for b and c"
    assert run.accept(1) == ()
    assert run.accept(3) == (events.RoundClosed(0, 0, (2, 3, 1)),)
    assert run.why() == "aggregates 3 updates of round 1"


def test_a_commit_opens_the_next_round(story):
    """When a version is committed, the next round opens for the sites that are alive then."""
    run = story("ab")
    run.submit("a", "b")
    run.join("c")
    run.leave("a")
    assert run.commit() == (events.RoundOpened(0, 1, ("b", "c")), events.Woken())


@pytest.mark.covers("F33")
def test_a_late_site_counts_from_the_next_round(story):
    """A site that joins while a round is open takes part from the next round on."""
    run = story(sites=2)
    run.join("a", "b", "c")
    assert run.withheld("c") == "counts from the next round on"
    assert run.missing() == ("a", "b")
    assert len(closed(run.submit("a", "b"))) == 1
    run.commit()
    assert run.expected() == ("a", "b", "c")
    assert run.ticket("c") == 3


@pytest.mark.covers("F33", "L22")
def test_a_late_site_completes_a_small_round(story):
    """If a round has too few sites to close, a site that joins late takes part at once."""
    run = story("ab", min_sites=2)
    run.leave("b")
    assert run.why() == "waits for another site: only 1 of 2 updates accepted or expected (rounds.min_sites)"
    assert events.ExpectedChanged(0, 0, ("a", "c")) in run.join("c")
    assert closed(run.submit("a", "c")) == [(1, 2)]


def test_a_dead_site_does_not_count_as_alive(story):
    """A site that has left after its update was accepted counts with this update, and not as alive."""
    run = story("abc", min_sites=3)
    run.submit("c")
    run.leave("c")
    run.leave("b")
    assert list(run.state.active_s) == ["a"]
    assert run.why() == "waits for another site: only 2 of 3 updates accepted or expected (rounds.min_sites)"


@pytest.mark.covers("L22")
def test_a_waiting_site_replaces_a_lost_site(story):
    """If a site leaves and too few remain, a site that joined late takes its place in the round."""
    # Of two waiting sites, the first to join is taken.
    run = story(sites=2, min_sites=2)
    run.join("a", "b", "z", "c")  # z joined before c, so z is asked first
    effects = run.leave("b")
    assert events.ExpectedChanged(0, 0, ("a", "z")) in effects
    assert events.Woken() in effects
    assert run.withheld("c") == "counts from the next round on"


@pytest.mark.covers("F34")
def test_a_round_without_live_sites_waits(story):
    """If all sites of a round die, the round stays open and says why it waits. When a site joins again and submits, the
    round closes.
    """
    run = story("ab")
    run.wait(120)
    assert run.expected() == ()
    assert run.phase() == "open"
    assert run.why() == "waits for another site: only 0 of 1 update accepted or expected (rounds.min_sites)"
    run.join("b")
    assert closed(run.submit("b")) == [(1,)]


def test_a_round_opened_without_workers_waits(story):
    """If a round opens while no worker is alive, it waits for the first worker that joins."""
    run = story("a")
    run.submit("a")
    run.leave("a")
    assert events.RoundOpened(0, 1, ()) in run.commit()
    assert run.missing() == ()
    assert events.ExpectedChanged(0, 1, ("b",)) in run.join("b")
    assert closed(run.submit("b")) == [(2,)]


def test_a_quorum_suffices_after_the_deadline(story):
    """After its deadline, a round closes if a quorum has submitted. The tickets of the other sites expire."""
    run = story("abc", policy=QuorumDeadline(quorum=2, deadline_s=60), heartbeat_timeout_s=0)
    run.ticket("c")
    run.submit("b", "a")
    run.wait(59)
    assert run.phase() == "open"
    assert run.state.next_deadline_s == 60
    effects = run.wait(1)
    assert effects[0] == events.RoundClosed(0, 0, (3, 2))  # a got ticket 3, b 2
    assert effects[1] == events.TicketsExpired((1,), "the round from version 0 closed without it")
    assert run.state.may_submit("c", run.lease("c"), 1) == (
        "Ticket 1 is expired: the round from version 0 closed without it."
    )


@pytest.mark.covers("F35")
@pytest.mark.parametrize(("quorum", "min_sites"), [(1, 2), (2, 1)])
def test_a_deadline_without_quorum_closes_no_round(story, quorum, min_sites):
    """If fewer updates than the quorum or `rounds.min_sites` are there at the deadline, the round stays open."""
    run = story("ab", min_sites=min_sites, policy=QuorumDeadline(quorum, 60), heartbeat_timeout_s=0, first_update_s=0)
    run.submit("a")
    assert closed(run.wait(1000)) == []
    assert run.why() == "waits for b; the deadline has passed with 1 of 2 updates"
    assert run.state.next_deadline_s is None
    assert closed(run.submit("b")) == [(1, 2)]


def test_deadlines_count_from_each_rounds_opening(story):
    """The deadline of each round counts from the opening of this round."""
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
def test_a_round_closes_without_a_refused_update(story):
    """If a site's update is refused, the round closes with the updates of the other sites. The site takes part in the
    next round.
    """
    run = story("ab")
    bad = run.ticket("a")
    run.submit("b")
    effects = run.refuse(bad)
    assert effects[:2] == (events.ExpectedChanged(0, 0, ("b",)), events.RoundClosed(0, 0, (2,)))
    run.commit()
    assert run.expected() == ("a", "b")  # it takes part in the next round


@pytest.mark.covers("F31")
def test_a_refused_worker_waits_and_is_told_why(story):
    """A worker with a refused update waits for the next round, and the server tells it why. A new process of the site
    waits too.
    """
    run = story("ab")
    bad = run.ticket("a")
    run.refuse(bad)
    assert run.withheld("a") == "its update was refused (layer.weight is not finite); it counts from the next round on"
    assert run.state.may_submit("a", run.lease("a"), bad) == ("Ticket 1 is refused: layer.weight is not finite.")
    run.join("a")  # a new process of it does not change that
    assert run.withheld("a").startswith("its update was refused")


def test_a_needed_worker_may_retry_after_refusal(story):
    """If a round cannot close without a worker, this worker gets a new ticket after a refused update."""
    run = story("a")
    bad = run.ticket("a")
    assert run.refuse(bad) == (events.ExpectedChanged(0, 0, ()), events.Woken())
    again = run.ask("a")
    assert again == events.TicketIssued("a", 2, 0, 0, new=True)
    assert run.state.may_submit("a", run.lease("a"), bad) == (
        "Ticket 1 is over: its round has closed, or a newer ticket has replaced it."
    )
    assert closed(run.accept(2)) == [(2,)]


def test_a_round_closes_once(story):
    """If the last update of a round is accepted twice, the round closes only once."""
    run = story("a")
    number = run.ticket("a")
    assert len(closed(run.accept(number))) == 1
    assert run.accept(number) == ()  # told again: nothing happens
    assert run.withheld("a") == "aggregates 1 update of round 1"


@pytest.mark.covers("L4")
def test_fragments_have_rounds_of_their_own(story):
    """Each fragment has its own rounds and its own version. If a site leaves, the rounds of all fragments stop waiting
    for it.
    """
    run = story("ab", fragments=2)
    assert closed(run.submit("a", "b", fragment=1)) == [(1, 2)]
    assert run.commit(fragment=1) == (events.RoundOpened(1, 1, ("a", "b")), events.Woken())
    assert [run.state.rounds[f].head for f in (0, 1)] == [0, 1]
    assert run.missing(0) == ("a", "b")
    run.submit("a", fragment=0)
    assert [run.missing(f) for f in (0, 1)] == [("b",), ("a", "b")]
    run.leave("b")  # in both it is no longer waited for; in fragment 0 that was all that was missing
    assert [run.phase(f) for f in (0, 1)] == ["closing", "open"]


def test_a_run_ends_when_all_fragments_finish(story):
    """A run is finished when every fragment has had its number of rounds."""
    run = story("a", rounds=1, fragments=2)
    run.submit("a", fragment=0)
    assert run.commit(0) == (events.Woken(),)
    assert run.withheld("a", 0) == "finished"
    run.submit("a", fragment=1)
    assert run.commit(1) == (events.RunFinished(), events.Woken())
    assert run.state.finished
    assert run.why(1) == "is finished"
    run.join("b")
    assert run.withheld("b") == "finished"


def test_missing_sites_have_their_waiting_time(story):
    """For each missing site, the state has the time since which the round waits for it."""
    run = story(sites=2, min_sites=2)
    run.now_s = 10
    run.join("a", "b")
    assert run.state.missing(0) == (("a", 10), ("b", 10))
    run.now_s = 30
    run.leave("b")
    run.join("c")
    assert run.state.missing(0) == (("a", 10), ("c", 30))


# -- sites sit out


def test_a_round_sat_out_expires_old_tickets(story):
    """If all remaining sites sit out a round, the round ends without a version."""
    # The open ticket of a site that has left expires. Site `b` has ticket 1 and leaves. Sites `a` and `c` sit out.
    run = story("abc")
    run.ticket("b")
    run.leave("b")
    ended = events.RoundSatOut(0, 0, 1, next_ticket=4, number=1, sites=("a", "c"))
    expired = events.TicketsExpired((1,), "the round from version 0 closed without it")
    effects = run.sit_out("a", "c")
    assert [each for each in effects if not isinstance(each, events.ExpectedChanged)] == [
        ended,
        expired,
        events.RoundOpened(0, 0, ("a", "c")),
        events.Woken(),
    ]
    assert run.state.rounds[0].number == 2


def test_a_round_stays_open_for_a_refused_site(story):
    """If one site's update was refused and the other site sits out, the round stays open, because the refused site may
    submit again.
    """
    # Site `a` may submit again. When `a` has left, only `b` remains, which has sat out, and the round ends.
    run = story("ab")
    run.refuse(run.ticket("a"))
    run.sit_out("b")
    assert (run.phase(), run.state.rounds[0].number) == ("open", 1)
    assert run.ticket("a") == 3
    run.leave("a")
    assert (run.phase(), run.state.rounds[0].number) == ("open", 2)


def test_a_round_without_remaining_sites_stays_open(story):
    """If all sites leave a round, the round stays open, although one of them has sat out."""
    # Another site may train. Site `b` is expected when site `a` sits out. Then both sites leave.
    run = story("ab")
    run.sit_out("a")
    run.leave("a")
    run.leave("b")
    assert (run.phase(), run.state.rounds[0].number) == ("open", 1)
    assert run.join("c")
    assert run.missing() == ("c",)


def test_sites_are_drawn_again_after_sitting_out(story):
    """If all drawn sites sit out a round, the next round has another draw of sites.

    The version is still 0, but the round is the second one, so the draw differs.
    """
    sampling = Sampling(0.5, seed=3)
    run = story("abcd", sampling=sampling)
    first, second = (tuple(sampling.draw("abcd", 0, number)) for number in (0, 1))
    assert first != second
    assert run.expected() == first
    while run.state.rounds[0].number == 1:
        run.sit_out(run.missing()[0])
    assert run.state.rounds[0].head == 0
    assert run.expected() == second


@pytest.mark.parametrize("answer", [Story.submit, Story.sit_out], ids=["submitted", "sat out"])
def test_an_answer_makes_the_next_fragment_due(story, answer):
    """When a site has submitted to the round of one fragment or sits it out, the next fragment is due for this site."""
    run = story("ab", fragments=2)
    assert run.state.due("b") == 0
    answer(run, "b", fragment=0)
    assert (run.state.due("a"), run.state.due("b")) == (0, 1)


@pytest.mark.parametrize(
    "event", [events.VersionCommitted(0, 1), events.UpdateAccepted(9), events.TicketRequested("a", 1, 5)]
)
def test_an_impossible_event_is_refused(story, event):
    """An event that is impossible in the current state raises `IllegalTransition`."""
    run = story("a")
    with pytest.raises(IllegalTransition):
        machine.step(run.state, event, 0.0)


def test_accepting_an_expired_ticket_is_refused(story):
    """If an update with an expired ticket is accepted, the machine raises `IllegalTransition`."""
    run = story("ab", policy=QuorumDeadline(1, 60), heartbeat_timeout_s=0)
    late = run.ticket("b")
    run.submit("a")
    run.wait(60)
    with pytest.raises(
        IllegalTransition, match=f"Ticket {late} is expired, so the event 'update accepted' is not possible"
    ):
        machine.step(run.state, events.UpdateAccepted(late), run.now_s)


def test_a_waiting_barrier_ignores_single_updates(story, monkeypatch):
    """While a barrier waits for other sites, the machine does not ask the policy at each update."""
    # The last update closes the round. Guards against work that grows with the square of the number of workers.
    sites = [f"site-{number:02d}" for number in range(20)]
    run = story(sites=len(sites))
    run.join(*sites)
    looks: list[int] = []
    view = State.view
    monkeypatch.setattr(State, "view", lambda state, fragment: looks.append(fragment) or view(state, fragment))
    for site in sites:
        assert run.state.rounds[0].phase == "open"
        run.ticket(site)
        run.submit(site)
    assert run.state.rounds[0].phase == "closing"
    assert len(looks) <= 2  # with the last, and once more by the restart that a story plays after every event


class Hasty(Barrier):
    """A wrong policy: closes whatever is in."""

    def decide(self, view: RoundView, now_s: float) -> Close | StayOpen:
        return Close(tuple(update.ticket for update in view.accepted))


def test_a_policy_cannot_close_an_empty_round(story):
    """If a wrong policy would close a round without updates, the machine raises `IllegalTransition`."""
    run = story(sites=1, policy=Hasty())
    with pytest.raises(IllegalTransition, match="and at least 1"):
        run.join("a")  # the round opens, and the policy would close it with nothing


# -- leases, silence, leaving, and returning in the middle of a round


@pytest.mark.covers("L9")
def test_a_silent_worker_is_declared_dead(story):
    """A worker that is silent for the heartbeat timeout is declared dead, and the round closes with the updates of the
    other workers.
    """
    run = story("ab")
    run.submit("a")
    run.now_s = 119
    run.seen("a")
    assert run.state.next_deadline_s == 120
    assert run.wait(0.5) == ()
    assert run.wait(0.5) == (
        events.LeaseEnded("b", 2, "dead", "silent for 120 s"),
        events.ExpectedChanged(0, 0, ("a",)),
        events.RoundClosed(0, 0, (1,)),
        events.Woken(),
    )
    assert run.state.next_deadline_s == 239


@pytest.mark.covers("L9")
def test_a_heartbeat_timeout_of_0_declares_no_worker_dead(story):
    run = story("a", heartbeat_timeout_s=0)
    assert run.state.next_deadline_s is None
    assert run.wait(1e9) == ()
    assert run.state.members["a"].alive


@pytest.mark.covers("L9")
@pytest.mark.parametrize(("error", "why"), [("", "left"), ("CUDA out of memory", "failed")])
def test_a_worker_that_leaves_is_not_awaited(story, error, why):
    """If a worker leaves or fails, its lease ends with this reason, and the round closes without it."""
    run = story("ab")
    run.submit("a")
    effects = run.leave("b", error)
    assert effects[0] == events.LeaseEnded("b", 2, why, error)
    assert run.state.members["b"].why == why
    assert closed(effects) == [(1,)]
    assert events.Woken() in effects


@pytest.mark.parametrize("sign", ["heartbeat", "ticket request", "accepted update"])
def test_every_valid_message_keeps_a_worker_alive(story, sign):
    """A heartbeat, a request for a ticket and an accepted update each count as a sign of life of the worker."""
    run = story("ab")
    ticket = run.ticket("a")
    run.now_s = 100
    {"heartbeat": run.seen, "ticket request": run.ticket}.get(sign, lambda _: run.accept(ticket))("a")
    ended = [effect.site for effect in run.wait(20) if isinstance(effect, events.LeaseEnded)]
    assert ended == ["b"]


@pytest.mark.covers("F4")
def test_an_acknowledged_update_stays_when_its_worker_dies(story):
    """If a worker leaves after its update was accepted, the update still counts. A new process of the site does not
    train again in this round.
    """
    run = story("ab")
    run.submit("a")
    run.join("a")  # a new process of it does not train again
    assert run.withheld("a") == "its update is accepted; the round waits for b"
    effects = run.leave("a")
    assert run.expected() == ("a", "b")  # its update is in: nothing to wait for, nothing to take away
    assert not any(isinstance(effect, events.ExpectedChanged) for effect in effects)
    assert closed(run.submit("b")) == [(1, 2)]


@pytest.mark.covers("F19")
def test_the_newest_process_of_a_site_has_the_lease(story):
    """If two processes join as one site, the newest has the lease. Messages of the earlier process are refused and are
    no sign of life.
    """
    run = story(sites=1)
    assert run.join("a")[0] == events.LeaseGranted("a", 1)
    assert run.join("a")[0] == events.LeaseGranted("a", 2)
    told = (events.LeaseRefused("a", "a newer process has joined as 'a'", superseded=True),)
    for event in (events.WorkerSeen("a", 1), events.TicketRequested("a", 1, 0), events.WorkerLeft("a", 1)):
        assert run.send(event) == told
    assert run.state.may_submit("a", 1, 1) == told[0]
    assert run.expected() == ("a",)  # the same member, not a second one
    run.now_s = 100
    run.send(events.WorkerSeen("a", 1))  # no sign of life of the new process
    assert run.wait(20)[0] == events.LeaseEnded("a", 2, "dead", "silent for 120 s")


def test_a_worker_that_never_joined_is_refused(story):
    """A message of a site that has not joined, or with an unknown lease, is refused."""
    run = story(sites=1)
    assert run.send(events.WorkerSeen("x", 3)) == (events.LeaseRefused("x", "'x' has not joined this run"),)
    run.join("a")
    assert run.send(events.WorkerSeen("a", 9)) == (events.LeaseRefused("a", "the server has no lease 9 of 'a'"),)


@pytest.mark.covers("F5")
def test_a_worker_declared_dead_may_rejoin(story):
    """A worker that was declared dead may join again. If its round is still open, the worker gets its ticket again."""
    run = story("ab", min_sites=2)
    ticket = run.ticket("a")
    run.now_s = 60
    run.seen("b")
    run.wait(60)
    assert run.send(events.WorkerSeen("a", 1)) == (
        events.LeaseRefused("a", "'a' was silent for too long and was declared dead"),
    )
    assert events.ExpectedChanged(0, 0, ("a", "b")) in run.join("a")
    assert run.ask("a") == events.TicketIssued("a", ticket, 0, 0, new=False)
    assert run.state.may_submit("a", run.lease("a"), ticket) is None


@pytest.mark.covers("F2")
def test_a_returning_worker_keeps_its_open_ticket(story):
    """If a worker with an open ticket returns, the round waits for it again. A returning worker without a ticket waits
    for the next round.
    """
    run = story("abc")
    ticket = run.ticket("a")
    run.join("a")  # a new process of it
    assert run.ask("a") == events.TicketIssued("a", ticket, 0, 0, new=False)
    run.leave("a")
    run.leave("c")
    assert run.expected() == ("b",)
    run.join("a", "c")
    assert run.expected() == ("a", "b")
    assert run.withheld("c") == "counts from the next round on"  # it had no ticket
    assert run.ask("a") == events.TicketIssued("a", ticket, 0, 0, new=False)
    run.submit("b")
    assert closed(run.accept(ticket)) == [(ticket, 2)]


@pytest.mark.covers("F23")
def test_a_ticket_of_a_closed_round_is_refused(story):
    """If a worker returns after its round has closed, its ticket of that round is refused."""
    run = story("ab", heartbeat_timeout_s=120)
    stale = run.ticket("b")
    run.submit("a")
    run.now_s = 60
    run.seen("a")
    run.wait(60)  # b is declared dead, the round closes with a alone
    run.commit()
    run.join("b")
    refused = run.state.may_submit("b", run.lease("b"), stale)
    assert refused == "Ticket 1 is over: its round has closed, or a newer ticket has replaced it."
    assert run.withheld("b") == "counts from the next round on"


def test_only_a_tickets_own_site_may_submit(story):
    """A site may submit only with an open ticket that was issued to this site."""
    run = story("ab")
    ticket = run.ticket("a")
    assert run.state.may_submit("a", 1, ticket) is None
    assert run.state.may_submit("b", 2, ticket) == "Ticket 1 was not issued to 'b'."
    assert run.state.may_submit("b", 2, 7) == "Ticket 7 was never issued."
    run.accept(ticket)
    assert run.state.may_submit("a", 1, ticket) == "Ticket 1 is accepted."


def test_a_heartbeat_changes_only_the_contact_time(story):
    """A heartbeat changes only the time at which the worker was last heard of, so that it costs the server little."""
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
    """If 500 workers die at once, the expected sites of the round change only once."""
    run = story(sites=500)
    state = run.state
    for n in range(500):
        state, _ = machine.step(state, events.WorkerJoined(f"w{n:03}"), 0.0)
    state, effects = machine.step(state, events.TimePassed(), 120.0)
    assert sum(isinstance(effect, events.LeaseEnded) for effect in effects) == 500
    assert sum(isinstance(effect, events.ExpectedChanged) for effect in effects) == 1


def test_the_least_advanced_fragment_is_due_first():
    """For a site, the first fragment with the fewest rounds is due. A fragment is left out if its round has the site's
    update already.
    """
    tell = Story(Rules(sites=2, fragments=3))
    tell.join("a", "b")
    assert tell.state.due("c") == 0
    tell.submit("a")
    assert [tell.state.due(site) for site in "abc"] == [1, 0, 0]
    tell.submit("b")
    tell.commit()
    assert [tell.state.due(site) for site in "abc"] == [1, 1, 1]


@pytest.mark.covers("L7")
def test_a_worker_that_ends_is_not_awaited(story):
    """If a worker says that it submits no more, no round waits for it."""
    # Its last update still counts, and the worker stays alive for its results. The update of `a` for the second
    # fragment is in. The first fragment goes on with `b` alone, and the second counts both updates.
    run = story("ab", fragments=2)
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
def test_the_first_round_opens_when_training_begins() -> None:
    """While a workflow runs before the training, no round is open, even if all sites are there."""
    # The first round opens when the training begins.
    state = initial(Rules(sites=2, held=True))
    for site in "ab":
        state, _ = machine.step(state, events.WorkerJoined(site), 0.0)
    assert state.rounds[0].phase == "gathering"
    state, effects = machine.step(state, events.TrainingBegins(), 1.0)
    assert state.rounds[0].phase == "open"
    assert events.RoundOpened(0, 0, ("a", "b")) in effects
