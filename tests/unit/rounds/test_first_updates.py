"""Sites that never contribute: rounds do not wait for them for ever, and they make room for others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from round_story import closed

from atoll.rounds import events, machine
from atoll.rounds.closing_policy import AsyncBuffer
from atoll.rounds.sampling import Sampling

FULL = AsyncBuffer(buffer=3)


@pytest.mark.parametrize("policy", [None, FULL, AsyncBuffer(grace_s=math.inf)])
def test_a_round_waits_for_a_first_update_for_its_limit(story, policy):
    """A round closes without a site that has never contributed when `first_update_s` have passed since its first
    update. Heartbeats do not change that.
    """
    run = story("abg", first_update_s=100, heartbeat_timeout_s=81, **({"policy": policy} if policy else {}))
    run.ticket("g")
    run.wait(30)
    a, b = run.submit("a"), run.ticket("b")
    assert not closed(a)
    run.wait(50)
    run.seen("g"), run.seen("a")
    run.accept(b)
    run.wait(49)
    run.seen("g"), run.seen("a")
    assert run.phase() == "open"
    assert run.state.next_deadline_s == 130
    run.now_s = 130.0
    run.seen("g")
    assert len(closed(run.send(events.TimePassed()))[0]) == 2
    assert run.state.late == {"g"}


def test_a_slow_first_round_is_waited_for_in_proportion(story):
    """If the first update of a round took longer than `first_update_s`, the others have as long again."""
    run = story("ab", first_update_s=100, heartbeat_timeout_s=0)
    run.ticket("b")
    run.wait(1000)
    run.submit("a")
    run.wait(999)
    assert run.phase() == "open"
    run.wait(1)
    assert run.phase() == "closing"


def test_no_deadline_runs_before_the_first_update(story):
    """Until a first site contributes to a round, the round waits for all sites, without a deadline."""
    run = story("ab", first_update_s=100, heartbeat_timeout_s=0)
    run.wait(10_000)
    assert (run.expected(), run.state.next_deadline_s) == (("a", "b"), None)


def test_later_rounds_do_not_wait_until_the_site_contributes(story):
    """A late site gets a ticket in each later round, which closes without it. Once an update of it is accepted, rounds
    wait for it like for any other.
    """
    run = story("ag", first_update_s=100, heartbeat_timeout_s=0)
    run.ticket("g")
    run.submit("a")
    run.wait(100)
    run.commit()
    for _ in range(2):
        run.ticket("g")
        assert run.expected() == ("a",)
        assert closed(run.submit("a"))
        run.commit()
    ticket = run.ticket("g")
    run.leave("g")
    run.join("g")  # a new process is the same site
    assert run.expected() == ("a",)
    run.accept(ticket)
    assert closed(run.submit("a")) == [(ticket + 1, ticket)]
    run.commit()
    assert run.expected() == ("a", "g")
    run.submit("a")
    run.wait(100_000)
    assert run.phase() == "open"  # rounds.deadline_s is for sites that have contributed


def test_after_a_restart_the_late_site_has_its_time_once_more(story):
    """After a restart, the open round waits for a site that was late before, for `first_update_s` from the start."""
    run = story("abg", first_update_s=100, heartbeat_timeout_s=0)
    run.ticket("g")
    run.submit("a", "b")
    run.wait(100)
    run.commit()
    run.ticket("g")
    run.submit("a")
    restored, _ = machine.restore(run.rules, replace(run.journal.snapshot(), proven=frozenset("ab")), 7.0)
    assert (restored.late, restored.missing(0)) == (frozenset(), (("b", 7.0), ("g", 7.0)))
    assert restored.newcomers(0) == {"g": 107.0}


def test_each_site_has_its_time(story):
    """A site that a round waits for only later, in place of a late one, has `first_update_s` from then on."""
    run = story("abcd", first_update_s=100, heartbeat_timeout_s=0, sampling=Sampling(0.5, 2), min_sites=2)
    silent, sends = run.expected()
    run.wait(10)
    run.submit(sends)
    run.wait(100)
    assert run.state.late == {silent}
    (second,) = set(run.expected()) - {sends}
    assert run.state.newcomers(0) == {second: 210.0}
    assert run.state.next_deadline_s == 210.0
    run.wait(99)
    assert run.state.late == {silent}
    run.wait(1)
    assert run.state.late == {silent, second}


def test_a_site_that_joins_a_long_round_has_its_time(story):
    """In an asynchronous round, a site that joins long after the round's first update is not late at once."""
    run = story("ab", first_update_s=100, heartbeat_timeout_s=0, policy=AsyncBuffer(buffer=3))
    run.submit("a")
    run.wait(90)
    run.join("new")
    run.wait(10)
    assert run.state.late == {"b"}
    run.wait(89)
    assert run.expected() == ("a", "new")
    run.wait(1)
    assert run.state.late == {"b", "new"}


def test_ever_new_names_hold_rounds_for_a_fifth_of_the_time(story):
    """Under a new name in each round, a stranger holds rounds for twice the limit, then for a fifth of the time.

    Site a trains for 100 s. Left of 2·100 s: 200; 200 − 100 + 200/5 = 140; 140 − 100 + 200/5 = 80; 180/5 = 36;
    136/5 = 27.2.
    """
    run, waits = story("a", first_update_s=100, heartbeat_timeout_s=0), []
    run.submit("a")
    for number in range(5):
        run.join(f"ghost-{number}")
        run.commit()
        run.wait(100)
        run.submit("a")
        waits.append(run.state.next_deadline_s - run.now_s)
        run.wait(waits[-1])
        assert run.phase() == "closing"
    assert waits == pytest.approx([100, 100, 80, 36, 27.2])
    run.join("honest")
    run.commit()
    ticket = run.ticket("honest")
    run.submit("a")
    assert run.phase() == "open"
    run.accept(ticket)
    run.commit()
    assert run.expected() == ("a", "honest")  # from its first update on


def test_a_round_that_others_sit_out_ends_without_the_late_site(story):
    """If all others sit a round out, a site that has never contributed holds it no longer than the limit."""
    run = story("abg", first_update_s=100, heartbeat_timeout_s=0)
    run.sit_out("a", "b")
    assert run.state.rounds[0].sat_out_rounds == 0
    run.wait(100)
    assert run.state.rounds[0].sat_out_rounds == 1


def test_a_late_site_takes_no_place_in_a_draw(story):
    """With sampling, late sites are not among those from which a round is drawn."""
    run = story("abg", first_update_s=100, heartbeat_timeout_s=0, sampling=Sampling(0.5, 2), min_sites=2)
    while "g" not in run.expected():
        run.submit(*run.expected())
        run.commit()
    run.submit(*(site for site in run.expected() if site != "g"))
    run.wait(100)
    for _ in range(10):
        run.submit(*(site for site in run.missing()))
        run.commit()
        assert run.expected() == ("a", "b")


def test_a_paused_run_lets_no_site_be_late(story):
    """While a run is paused, a site without a ticket cannot contribute, so its time does not run out."""
    run = story("ab", first_update_s=100, heartbeat_timeout_s=0)
    run.submit("a")
    run.send(events.RunPaused())
    run.wait(1000)
    assert (run.state.late, run.state.next_deadline_s) == (frozenset(), None)


def test_new_sites_take_the_room_of_those_that_never_contributed(story):
    """When the run has its most sites, those that have never contributed and are gone or late are forgotten. Others
    stay, dead ones too.
    """
    run = story("abgh", first_update_s=100, heartbeat_timeout_s=0, most_sites=4)
    run.ticket("g")
    ticket = run.ticket("h")
    run.submit("a", "b")
    run.leave("a")
    run.wait(100)
    run.commit()
    assert sorted(run.state.members) == ["a", "b", "g", "h"]
    run.send(events.WorkerJoined("invited", invited=True))  # takes no other site's room
    assert sorted(run.state.members) == ["a", "b", "g", "h", "invited"]
    run.leave("invited")
    effects = run.join("new")  # the invited site, which is gone, makes room, and one late site
    assert events.LeaseEnded("g", 3, "dead", machine.LATE) in effects
    assert sorted(run.state.members) == ["a", "b", "h", "new"]
    assert run.state.late == {"h"}
    run.join("last")
    assert sorted(run.state.members) == ["a", "b", "last", "new"]
    assert run.state.may_submit("h", 4, ticket) == events.LeaseRefused("h", "'h' has not joined this run")
