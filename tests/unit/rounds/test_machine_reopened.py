"""A round whose aggregating worker is lost: its tickets are open again, and nothing counts twice.

`Story` compares after every event what a restart would make of the journal with what the machine has.
"""

from __future__ import annotations

import pytest
from round_story import closed

from atoll.rounds.closing_policy import Async
from atoll.rounds.events import AggregatorLost, RoundReopened


@pytest.mark.covers("P10")
def test_what_was_collected_of_an_open_round_comes_again_under_the_same_tickets(story):
    run = story(sites=2)
    run.join("a", "b")
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
    run = story(sites=2)
    run.join("a", "b")
    assert closed(run.submit("a", "b")) == [(1, 2)]
    run.send(AggregatorLost(0, "it has gone"))
    assert (run.phase(), run.missing(), run.state.rounds[0].frozen) == ("open", ("a", "b"), ())
    assert closed(run.submit("a", "b")) == [(1, 2)]


@pytest.mark.covers("P10")
def test_a_submitter_that_has_died_meanwhile_is_not_waited_for(story):
    run = story(sites=2)
    run.join("a", "b")
    run.submit("a")
    run.leave("a")  # its update stays in its round, where it is
    run.send(AggregatorLost(0, "it has gone"))
    assert run.missing() == ("b",)
    assert closed(run.submit("b")) == [(2,)]


@pytest.mark.covers("P10")
def test_the_lost_aggregator_that_leaves_first_costs_only_its_own_update(story):
    run = story(sites=3)
    run.join("a", "b", "c")
    assert closed(run.submit("a", "b", "c")) == [(1, 2, 3)]
    run.leave("a")
    run.send(AggregatorLost(0, "it has gone"))
    assert run.missing() == ("b", "c")
    assert closed(run.submit("b", "c")) == [(2, 3)]


def test_nothing_to_lose_changes_nothing(story):
    run = story(sites=2)
    assert run.send(AggregatorLost(0, "the server was started again")) == ()  # gathering
    run.join("a", "b")
    assert run.send(AggregatorLost(0, "it has gone")) == ()
    assert run.phase() == "open"


def test_other_fragments_are_not_concerned(story):
    run = story(sites=1, fragments=2)
    run.join("a")
    run.submit("a", fragment=1)
    assert run.send(AggregatorLost(0, "it has gone")) == ()
    assert [run.phase(fragment) for fragment in (0, 1)] == ["open", "closing"]


@pytest.mark.covers("P10")
def test_the_grace_begins_with_the_first_update_that_comes_again(story):
    run = story(sites=3, policy=Async(grace_s=10))
    run.join("a", "b", "c")
    first, second = run.ticket("a"), run.ticket("b")
    run.accept(first)
    run.now_s = 9
    run.send(AggregatorLost(0, "it has gone"))
    assert not closed(run.accept(second))
    assert not closed(run.wait(9))
    assert closed(run.wait(1)) == [(second,)]
