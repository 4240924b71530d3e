"""Warnings about the weights that sites report, in asynchronous rounds: each closes with one update."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.protocol.run_events import RoundClosed
from atoll.server.coordinator.reported_numbers import ReportedNumbers
from atoll.server.coordinator.roster import Presence

EVEN = {"a": 10.0, "b": 4.0, "c": 4.0, "d": 6.0}
"""a has 10 of 24: less than half. Of the first three alone, it has 10 of 18."""


def reports(sites: Iterable[str], **states: str) -> ReportedNumbers:
    roster = {site: Presence(site, state=states.get(site, "alive")) for site in sites}
    return ReportedNumbers(roster, needs_steps=False, weight_share=0.5)


def close(reported: ReportedNumbers, number: int, *sites: str) -> list[str]:
    reported.on_event(RoundClosed(fragment=0, round=number, sites=list(sites)))
    return reported.warnings


def test_the_first_updates_alone_cause_no_warning() -> None:
    reported = reports(EVEN)
    for number, (site, weight) in enumerate(EVEN.items(), start=1):
        reported.note(site, weight, 0)
        assert close(reported, number, site) == []
    reported.note("a", 15.0, 0)  # 15 of 29
    (told,) = close(reported, 5, "a")
    assert told.startswith("a has 52% of the weight of 4 sites")


def test_a_site_that_sits_out_is_not_waited_for() -> None:
    reported = reports("abcd")
    reported.heard.add("d")
    for site, weight in (("a", 10.0), ("b", 4.0), ("c", 4.0)):
        reported.note(site, weight, 0)
    (told,) = close(reported, 3, "c")
    assert told.startswith("a has 56% of the weight of 3 sites")


def test_a_site_that_has_left_has_no_share() -> None:
    """A site that has left does not count: neither in the sum of weights nor with a warning about its own share.

    By hand: b, c and d have 4 of 12 each, less than half.
    """
    reported = reports("abcd", a="left")
    for site, weight in (("a", 90.0), ("b", 4.0), ("c", 4.0), ("d", 4.0)):
        reported.note(site, weight, 0)
    assert close(reported, 4, "d") == []
