"""Which worker aggregates, and which hold a version: by hand."""

from __future__ import annotations

import hashlib

import pytest

from atoll.rounds.sampling import appointed, to_hold, turn


@pytest.mark.covers("P10")
def test_the_users_choice_takes_turns_and_the_rest_come_after() -> None:
    rounds = [turn(["a", "b", "c"], seed=0, fragment=0, version=v, named=("c", "a"))[:2] for v in range(4)]
    assert rounds == [["c", "a"], ["a", "c"], ["c", "a"], ["a", "c"]]
    assert turn(["a", "b"], seed=0, fragment=0, version=0, named=("c", "a")) == ["a", "b"]  # c is not here


@pytest.mark.covers("P10")
def test_otherwise_each_site_draws_a_number_for_each_version() -> None:
    drawn = {site: hashlib.sha256(f"5/1/7/{site}".encode()).hexdigest() for site in ("a", "b", "c")}
    assert turn(["c", "a", "b"], seed=5, fragment=1, version=7) == sorted(drawn, key=lambda site: drawn[site])
    orders = {tuple(turn(["a", "b", "c"], seed=0, fragment=0, version=v)) for v in range(100)}
    assert len(orders) == 6  # every order comes up


@pytest.mark.covers("P10")
@pytest.mark.parametrize(
    ("order", "holders", "excluded", "before", "expected"),
    [
        ("abc", "abc", "", "", "a"),
        ("abc", "bc", "", "", "b"),  # a has no version
        ("abc", "abc", "a", "", "b"),  # a has failed
        ("abc", "ab", "", "a", "b"),  # another one each round
        ("abc", "abc", "", "ab", "c"),  # a and b failed not long ago
        ("abc", "a", "", "a", "a"),  # a alone has it
        ("abc", "ab", "b", "a", "a"),  # rather the one before than one that has failed
        ("abc", "ab", "ab", "a", "a"),  # all have failed: the one that failed first
        ("abc", "ab", "ba", "", "b"),
        ("abc", "", "", "", None),
    ],
)
def test_chooses_the_aggregator(order: str, holders: str, excluded: str, before: str, expected: str | None) -> None:
    assert appointed(list(order), set(holders), list(excluded), set(before)) == expected


@pytest.mark.covers("P10")
@pytest.mark.parametrize(
    ("holders", "excluded", "before", "named", "expected"),
    [
        ("abc", "", "c", "c", "c"),  # round after round, where one alone is named
        ("abc", "", "c", "bc", "b"),  # of two that are named, another one each round
        ("ac", "", "c", "bc", "c"),  # and the one that is left of them, where one has left
        ("ab", "", "a", "c", "b"),  # a named one without the version waits for it
        ("abc", "c", "c", "c", "a"),  # nor one that has failed at this round
        ("c", "c", "c", "c", "c"),  # unless no other has it
    ],
)
def test_others_are_asked_only_where_none_of_the_users_choice_can(
    holders: str, excluded: str, before: str, named: str, expected: str
) -> None:
    assert appointed(["a", "b", "c"], set(holders), set(excluded), set(before), tuple(named)) == expected


@pytest.mark.covers("P10")
def test_two_hold_the_newest_version_where_there_are_two() -> None:
    assert to_hold(["a", "b", "c"], {"c"}) == {"a", "c"}
    assert to_hold(["a", "b", "c"], {"b", "c"}) == {"b", "c"}
    assert to_hold(["c"], {"c"}) == {"c"}
