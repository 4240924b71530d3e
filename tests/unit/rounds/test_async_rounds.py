"""Asynchronous rounds: updates of any base, at once, exactly as stale as the journal says; local steps by speed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from harness.schedules import Schedule, Violation, explore, simulate
from round_story import closed

from atoll.algorithms.diloco import dynamic_local_steps
from atoll.rounds import machine
from atoll.rounds.closing_policy import AsyncBuffer
from atoll.rounds.events import FINISHED, RunFinished, SatOut, TicketsExpired
from atoll.rounds.state import Rules, State


def begin(story, *sites, **rules):
    """All sites have joined and hold a ticket of version 0; returns the run and the tickets by site."""
    policy = rules.pop("policy", AsyncBuffer())
    run = story(sites=len(sites), policy=policy, **rules)
    run.join(*sites)
    return run, {site: run.ticket(site) for site in sites}


@pytest.mark.covers("L5")
def test_an_asynchronous_update_is_applied_at_once(story):
    """In an asynchronous run, each update makes a version at once. Other sites keep their tickets, and their updates
    count with a growing staleness.
    """
    run, tickets = begin(story, "a", "b")
    run.join("c")
    tickets["c"] = run.ticket("c")  # though it came late
    assert run.missing() == ()
    assert closed(run.accept(tickets["b"])) == [(tickets["b"],)]
    run.commit()
    assert run.missing() == ()
    # a's ticket is of version 0; it counts at version 1, and so on: staleness 1, then 2.
    assert run.state.staleness(run.state.rounds[0].tickets["a"]) == 1
    assert closed(run.accept(tickets["a"])) == [(tickets["a"],)]
    run.commit()
    assert run.state.staleness(run.state.rounds[0].tickets["c"]) == 2
    assert closed(run.accept(tickets["c"])) == [(tickets["c"],)]
    run.commit()
    assert run.state.rounds[0].head == 3


def test_updates_during_a_pass_keep_their_order(story):
    """Updates that come while a version is made are applied afterwards, one by one, in the order of the journal."""
    run, tickets = begin(story, "a", "b", "c", "d")
    run.accept(tickets["d"])
    assert not closed(run.accept(tickets["c"]))
    assert not closed(run.accept(tickets["a"]))
    # two are before it, and the pass of d is under way: version 0 + 1 + 2
    assert run.state.staleness(run.state.rounds[0].tickets["b"]) == 3
    assert closed(run.commit()) == [(tickets["c"],)]
    assert closed(run.commit()) == [(tickets["a"],)]
    assert not closed(run.commit())


def test_a_worker_waits_only_for_its_own_update(story):
    """In an asynchronous run, a worker gets its next ticket when its own update is in a version. Other workers do not
    wait for this update.
    """
    run, tickets = begin(story, "a", "b")
    run.accept(tickets["a"])
    assert "its update is accepted" in run.withheld("a")
    assert run.ticket("b") == tickets["b"]  # of the head still
    run.commit()
    assert run.ticket("a") > tickets["b"]


def test_a_newer_ticket_replaces_one_of_an_earlier_version(story):
    """If a site asks again after a new version was made, it gets a ticket of that version. Its earlier ticket
    expires.
    """
    run, tickets = begin(story, "a", "b")
    run.accept(tickets["a"])
    run.commit()
    newer = run.ticket("b")
    assert newer != tickets["b"]
    assert run.state.rounds[0].tickets["b"].base_version == 1
    assert "is over" in run.state.may_submit("b", run.lease("b"), tickets["b"])
    assert run.journal.tickets[tickets["b"]].state == "expired"


@pytest.mark.covers("L5")
def test_an_update_too_far_behind_is_refused(story):
    """An update that would be more than `async.max_staleness` versions behind is refused. Its ticket expires, and the
    site goes on from the newest version.
    """
    run, tickets = begin(story, "a", "b", "c", max_staleness=1)
    run.accept(tickets["a"])
    run.commit()
    assert run.state.may_submit("c", run.lease("c"), tickets["c"]) is None  # 1 behind
    run.accept(tickets["b"])  # version 2 is being made: c would be 2 behind
    assert "would be 2 versions behind; async.max_staleness is 1" in run.state.may_submit(
        "c", run.lease("c"), tickets["c"]
    )
    expired = [effect for effect in run.commit() if isinstance(effect, TicketsExpired)]
    assert [effect.tickets for effect in expired] == [(tickets["c"],)]
    assert "async.max_staleness = 1 behind version 2" in expired[0].reason
    assert run.state.rounds[0].tickets.get("c") is None
    assert run.ticket("c")  # it goes on from the head


def test_updates_of_a_buffer_are_reduced_together(story):
    """With a buffer of two updates, a version is made from two updates together, in the order of their sites."""
    run, tickets = begin(story, "a", "b", "c", policy=AsyncBuffer(buffer=2))
    assert not closed(run.accept(tickets["c"]))
    assert run.missing() == ("a", "b")
    assert "waits for 1 more of 2 updates" in run.why()
    assert closed(run.accept(tickets["a"])) == [(tickets["a"], tickets["c"])]  # by site within a step
    run.commit()
    assert not closed(run.accept(tickets["b"]))  # the next buffer


def test_a_buffer_closes_if_no_worker_remains(story):
    """If no worker remains that could fill the buffer, a version is made from the updates in the buffer."""
    run, tickets = begin(story, "a", "b", policy=AsyncBuffer(buffer=3))
    run.accept(tickets["a"])
    assert closed(run.accept(tickets["b"])) == [(tickets["a"], tickets["b"])]
    run.commit()
    again = run.ticket("a")
    assert not closed(run.accept(again))
    assert closed(run.leave("b")) == [(again,)]


def test_async_grace_collects_more_updates(story):
    """With a grace of 10 s, an asynchronous version is made 10 s after the first update, from all updates that have
    come.
    """
    run, tickets = begin(story, "a", "b", "c", policy=AsyncBuffer(grace_s=10))
    run.now_s = 5
    assert not closed(run.accept(tickets["a"]))
    assert not closed(run.wait(4))
    assert not closed(run.accept(tickets["c"]))
    assert run.missing() == ("b",)
    assert run.state.next_deadline_s == 15
    assert closed(run.wait(6)) == [(tickets["a"], tickets["c"])]


def test_async_grace_ends_without_another_update(story):
    """If an update comes while a version is made, its grace period starts with the commit of this version and ends by
    itself.
    """
    run, tickets = begin(story, "a", "b", "c", policy=AsyncBuffer(grace_s=10))
    run.accept(tickets["a"])
    assert closed(run.wait(10)) == [(tickets["a"],)]
    run.accept(tickets["b"])  # while the version of a is made
    run.now_s = 20
    assert not closed(run.commit())
    assert not closed(run.wait(9))
    assert closed(run.wait(1)) == [(tickets["b"],)]


def test_an_infinite_grace_acts_as_a_barrier(story):
    """With an infinite grace, a version waits for the updates of all sites."""
    run, tickets = begin(story, "a", "b", policy=AsyncBuffer(grace_s=math.inf))
    run.accept(tickets["b"])
    assert not closed(run.wait(100))
    assert run.why() == "waits for a"
    assert closed(run.accept(tickets["a"])) == [(tickets["a"], tickets["b"])]


@pytest.mark.covers("L3")
@pytest.mark.parametrize("policy", [AsyncBuffer(buffer=2), AsyncBuffer(grace_s=math.inf)], ids=["buffer", "grace"])
@pytest.mark.parametrize("sits_out", [False, True], ids=["submitted", "sat out"])
def test_sites_waiting_in_two_fragments_do_not_deadlock(story, policy, sits_out):
    """If one site waits in fragment 0 and the other site in fragment 1, fragment 0 closes with the
    update that it has.
    """
    # Site `b` has submitted to fragment 1 or sits out there, so no site is left for fragment 0. Site `a` goes on and
    # may still submit to fragment 1.
    run, tickets = begin(story, "a", "b", policy=policy, fragments=2)
    assert not closed(run.accept(tickets["a"]))
    mine = run.ticket("b", 1)
    # b waits in fragment 1: no site is left for fragment 0; a then goes on, and may yet submit to fragment 1
    assert closed(run.send(SatOut(mine)) if sits_out else run.accept(mine)) == [(tickets["a"],)]
    assert run.state.rounds[1].phase == "open"


def test_a_worker_with_two_open_fragments_is_awaited(story):
    """If a worker may have two fragments under way, fragment 0 still waits for a worker that has submitted to fragment
    1.
    """
    run, tickets = begin(story, "a", "b", policy=AsyncBuffer(buffer=2), fragments=2, max_inflight=2)
    run.accept(tickets["a"])
    assert not closed(run.accept(run.ticket("b", 1)))
    assert closed(run.accept(tickets["b"])) == [(tickets["a"], tickets["b"])]


def test_the_first_rounds_may_be_barriers(story):
    """With `sync_rounds_first=1`, the first round of an asynchronous run waits for all sites. The next round does
    not.
    """
    run, tickets = begin(story, "a", "b", policy=AsyncBuffer(sync_rounds_first=1))
    assert not closed(run.accept(tickets["a"]))
    assert run.missing() == ("b",)
    assert closed(run.accept(tickets["b"])) == [(tickets["a"], tickets["b"])]
    run.commit()
    later = run.ticket("b")
    assert closed(run.accept(later)) == [(later,)]


def test_a_refused_asynchronous_site_retries_at_once(story):
    """In an asynchronous run, a site with a refused update gets a new ticket at once."""
    run, tickets = begin(story, "a", "b")
    run.refuse(tickets["a"])
    assert run.ticket("a") > tickets["b"]


def test_a_finished_run_keeps_acknowledged_updates(story):
    """An asynchronous run ends at its number of versions and keeps an acknowledged update that is not in a version. A
    restart with more rounds counts this update.
    """
    run, tickets = begin(story, "a", "b", "c", rounds=1)
    run.accept(tickets["a"])
    run.accept(tickets["b"])
    effects = run.commit()
    assert RunFinished() in effects
    assert [effect.tickets for effect in effects if isinstance(effect, TicketsExpired)] == [(tickets["c"],)]
    assert run.withheld("b") == FINISHED
    assert run.journal.tickets[tickets["b"]].state == "accepted"
    more, undone = machine.restore(
        Rules(3, policy=AsyncBuffer(), rounds=2), run.journal.snapshot(), run.now_s
    )  # a start with more rounds counts it
    assert closed(undone) == [(tickets["b"],)]
    assert more.rounds[0].phase == "closing"


def test_an_asynchronous_run_without_faults_makes_progress():
    # Each site trains 5 to 7 s and polls every 4 s, none waits: in 150 s each makes at least 7 updates.
    """Without faults, a simulated asynchronous run of three sites makes at least 21 versions, also from stale
    updates.
    """
    counts = simulate(Schedule(3, 3, 1, 0, 30, 1, buffer=1))
    assert counts["RoundClosed"] >= counts["versions"] >= 21
    assert counts["stale"] > 0


def restarts_forget_older_tickets(monkeypatch):
    def restore(rules, journal, now_s):
        fresh = [t for t in journal.tickets if t.base_version == journal.fragments[t.fragment].head]
        return original(rules, replace(journal, tickets=tuple(fresh)), now_s)

    original = machine.restore
    monkeypatch.setattr(machine, "restore", restore)


def stale_updates_are_let_through(monkeypatch):
    monkeypatch.setattr(State, "may_submit", lenient)


def lenient(state, site, lease, ticket):
    said = original_may_submit(state, site, lease, ticket)
    return None if isinstance(said, str) and "max_staleness" in said else said


original_may_submit = State.may_submit


@pytest.mark.parametrize("plant", [restarts_forget_older_tickets, stale_updates_are_let_through])
def test_a_planted_bug_of_asynchronous_rounds_is_found(plant, monkeypatch):
    """The exploration finds each planted bug of asynchronous rounds: a restart that forgets older tickets, and an
    accepted update that is too stale.
    """
    plant(monkeypatch)
    with pytest.raises(Violation):
        explore(examples=400, shrink=False)


# -- local steps by speed (DyLU), by hand


@pytest.mark.covers("L6", "L18")
@pytest.mark.parametrize(
    ("speed", "h", "k", "steps"),
    [
        (10.0, 500, 1, 500),  # the fastest
        (3.3333, 500, 1, 166),  # ⌊0.33333 · 500⌋
        (5.0, 30, 3, 15),  # 3 · ⌊0.5 · 10⌋
        (4.0, 50, 5, 20),  # 5 · ⌊0.4 · 10⌋
        (3.9, 50, 5, 15),  # 5 · ⌊0.39 · 10⌋ = 5 · 3
        (2.9, 100, 1, 29),  # though 2.9 / 10 · 100 is 28.999999999999996
        (0.001, 500, 1, 1),
        (0.001, 30, 3, 3),  # at least K
        (0.0, 500, 1, 500),  # not measured yet
    ],
)
def test_local_steps_depend_on_the_sites_speed(speed, h, k, steps):
    """The number of a site's local steps is in proportion to its speed, compared with the fastest site. It is a
    multiple of K and at least K.
    """
    assert dynamic_local_steps(speed, 10.0, h, k) == steps


def test_local_steps_are_full_before_any_measurement():
    """Before any speed is measured, a site makes all H local steps."""
    assert dynamic_local_steps(0.0, 0.0, 500) == 500
