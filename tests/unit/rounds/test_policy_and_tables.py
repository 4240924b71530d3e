"""Policies by themselves, and the transition tables."""

from __future__ import annotations

import pytest

from atoll import Settings
from atoll.rounds.closing_policy import Barrier, Close, QuorumDeadline, RoundView, Wait, listed
from atoll.rounds.state import Rules
from atoll.rounds.transitions import TICKET, IllegalTransition, Ticket, advance


def view(expected: str, accepted: str, floor: int = 1) -> RoundView:
    """A round that opened at 100 s from version 4; ticket n is that of the n-th letter of the alphabet."""
    updates = tuple(Ticket(ord(site) - 96, site, 0, 4, "accepted") for site in accepted)
    return RoundView(0, 4, 100.0, tuple(expected), updates, floor, "rounds.min_sites")


@pytest.mark.parametrize(
    ("seen", "decision"),
    [
        (view("abc", "abc"), Close((1, 2, 3))),
        (view("abc", "b"), Wait("waits for a and c")),
        (view("", ""), Wait("waits for another site: 0 alive, rounds.min_sites is 1")),
        (view("ab", "ab", floor=3), Wait("waits for another site: 2 alive, rounds.min_sites is 3")),
    ],
)
def test_barrier(seen, decision):
    assert Barrier().decide(seen, 1e9) == decision


@pytest.mark.parametrize(
    ("seen", "now_s", "decision"),
    [
        (view("abc", "abc"), 100, Close((1, 2, 3))),
        (view("abc", "ab"), 129, Wait("waits for c", until_s=130)),
        (view("abc", "ab"), 130, Close((1, 2))),
        (view("abc", "a", floor=2), 131, Wait("waits for b and c; the deadline has passed, 1 of 2 updates are in")),
    ],
)
def test_quorum_and_deadline(seen, now_s, decision):
    assert QuorumDeadline(quorum=2, deadline_s=30).decide(seen, now_s) == decision


def test_a_policy_says_what_it_is():
    assert (str(Barrier()), str(QuorumDeadline(2, 60.0))) == ("barrier", "quorum 2 after 60 s")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("a", "a"),
        ("ab", "a and b"),
        ("abc", "a, b and c"),
        ("abcd", "a, b, c and d"),
        ("abcdef", "a, b, c and 3 others"),
    ],
)
def test_names_are_listed_as_people_do(names, text):
    assert listed(names) == text


def test_the_rules_of_settings():
    plain = Rules.from_settings(Settings.build({"rounds.sites": 3, "rounds.min_sites": 2, "rounds.total": 4}))
    assert plain == Rules(sites=3, min_sites=2, rounds=4, policy=Barrier())
    assert plain.floor == 2
    quorum = Rules.from_settings(
        Settings.build({"rounds.sites": 3, "rounds.quorum": 2, "rounds.deadline_s": 9}), fragments=4
    )
    assert quorum == Rules(sites=3, policy=QuorumDeadline(2, 9), fragments=4)
    assert (quorum.floor, quorum.floor_name) == (2, "rounds.quorum")


def test_what_a_table_does_not_list_cannot_happen():
    assert advance("Ticket 3", TICKET, "open", "update accepted") == "accepted"
    with pytest.raises(IllegalTransition, match=r"^Ticket 3 is expired; 'update accepted' cannot happen to it\.$"):
        advance("Ticket 3", TICKET, "expired", "update accepted")
