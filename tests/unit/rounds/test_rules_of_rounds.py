"""Rules of rounds: sampling, closing policies, the aggregating worker, the best version and the early stop."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import pytest
from round_story import Story

from atoll import Settings
from atoll.format_text import listed
from atoll.rounds import machine
from atoll.rounds.closing_policy import Barrier, Close, QuorumDeadline, RoundView, StayOpen
from atoll.rounds.early_stopping import Measurement, MetricProgress, Tracking
from atoll.rounds.events import (
    BestFound,
    RoundOpened,
    RunFinished,
    RunPaused,
    RunResumed,
    VersionCommitted,
    VersionEvaluated,
)
from atoll.rounds.sampling import Sampling, aggregator_of, choose_holders, ranking
from atoll.rounds.state import Rules
from atoll.rounds.transitions import IssuedTicket

# -- sampling


SITES = [f"site-{index:02}" for index in range(30)]


@pytest.mark.parametrize(
    ("fraction", "minimum", "at_least", "drawn"),
    [
        (1.0, 1, 1, 30),
        (0.1, 1, 1, 3),
        (0.11, 1, 1, 4),
        (0.1, 5, 1, 5),
        (0.1, 1, 7, 7),
        (0.01, 1, 1, 1),
        (0.5, 99, 1, 30),
    ],
)
def test_a_draw_has_the_required_number(fraction: float, minimum: int, at_least: int, drawn: int) -> None:
    """A draw has the given fraction of the sites, rounded up, and at least the given minimum. It has at most all
    sites.
    """
    assert len(Sampling(fraction, minimum).draw(SITES, 0, 0, at_least)) == drawn


def test_an_inexact_fraction_draws_no_extra_site() -> None:
    """A fraction that is inexact in binary draws no extra site: 0.07 of 100 sites are 7, although 0.07 * 100 is above
    7.
    """
    assert 0.07 * 100 > 7
    assert len(Sampling(0.07).draw([f"site-{index}" for index in range(100)], 0, 0)) == 7


def test_draws_depend_only_on_seed_and_round() -> None:
    """A draw depends only on the seed, the fragment and the version. It does not change if the sites have another
    order, or if a site is missing that is not drawn.
    """
    sampling = Sampling(0.2, seed=1)
    first = sampling.draw(SITES, 0, 5)
    assert sampling.draw(list(reversed(SITES)), 0, 5) == first == sorted(first)
    assert len({tuple(sampling.draw(SITES, 0, version)) for version in range(20)}) == 20
    assert Sampling(0.2, seed=2).draw(SITES, 0, 5) != first
    assert sampling.draw(SITES, 1, 5) != first
    stranger = next(site for site in SITES if site not in first)
    without = sampling.draw([site for site in SITES if site != stranger], 0, 5)
    assert set(without) == set(first)  # a site that was not drawn anyway is not missed (⌈0.2·29⌉ is 6, too)


def test_all_sites_are_drawn_equally_often() -> None:
    """All sites are drawn equally often."""
    # With 3 of 30 sites in 2,000 rounds, 200 draws of each site are expected, ± 13.4. Five times this deviation is 67.
    counts = Counter(site for version in range(2000) for site in Sampling(0.1).draw(SITES, 0, version))
    assert min(counts.values()) > 200 - 67
    assert max(counts.values()) < 200 + 67


def test_a_round_waits_only_for_drawn_workers(story) -> None:
    """A round waits for the drawn workers and closes with their updates. The server tells the other workers that they
    were not drawn.
    """
    sampling = Sampling(0.5, seed=3)
    run = story("abcd", sampling=sampling)
    for version in range(5):
        drawn = tuple(sampling.draw("abcd", 0, version))
        assert len(drawn) == 2
        assert run.expected() == drawn
        for site in set("abcd") - set(drawn):
            assert run.withheld(site) == "was not drawn for this round; each round draws again"
        run.submit(*drawn)
        assert RoundOpened(0, version + 1, tuple(sampling.draw("abcd", 0, version + 1))) in run.commit()


def test_a_lost_drawn_worker_is_replaced(story) -> None:
    """If a drawn worker leaves, another worker is drawn in its place."""
    run = story("abc", sampling=Sampling(0.3, seed=0))
    (drawn,) = run.expected()
    run.leave(drawn)
    (other,) = run.expected()
    assert other != drawn
    run.submit(other)
    assert run.phase() == "closing"


def test_a_draw_has_at_least_min_sites(story) -> None:
    """A draw has at least `rounds.min_sites` sites, even if the fraction is smaller."""
    run = story("abcd", min_sites=3, sampling=Sampling(0.25))
    assert len(run.expected()) == 3


def test_a_restarted_server_repeats_its_draw(story) -> None:
    """If the server is killed before it has opened the next round, the restarted server opens this round with the draw
    that it would have had.
    """
    # `Story` restores the server after every event and compares. Here the round opens in the restore itself.
    rules = Rules(sites=2, sampling=Sampling(0.5, seed=9))
    run = story("ab", sampling=rules.sampling)
    run.submit(*run.expected())
    journal = run.journal
    journal.move_head(0, 1)  # committed, and killed before the next round was opened
    restored, effects = machine.restore(rules, journal.snapshot(), 0.0)
    assert RoundOpened(0, 1, tuple(rules.sampling.draw("ab", 0, 1))) in effects
    assert tuple(restored.rounds[0].expected) == tuple(rules.sampling.draw("ab", 0, 1))


# -- which worker aggregates, and which hold a version


@pytest.mark.covers("P10")
def test_chosen_aggregators_take_turns_before_others() -> None:
    """The sites that the user has chosen as aggregators take turns from version to version."""
    # The other sites come after them. A chosen site that is not there is left out.
    rounds = [ranking(["a", "b", "c"], seed=0, fragment=0, version=v, named=("c", "a"))[:2] for v in range(4)]
    assert rounds == [["c", "a"], ["a", "c"], ["c", "a"], ["a", "c"]]
    assert ranking(["a", "b"], seed=0, fragment=0, version=0, named=("c", "a")) == ["a", "b"]  # c is not here


@pytest.mark.covers("P10")
def test_aggregators_that_nothing_determines_are_drawn() -> None:
    """If the user has chosen no aggregators, a hash of the seed, fragment, version and site orders the sites. Every
    order occurs.
    """
    drawn = {site: hashlib.sha256(f"5/1/7/{site}".encode()).hexdigest() for site in ("a", "b", "c")}
    assert ranking(["c", "a", "b"], seed=5, fragment=1, version=7) == sorted(drawn, key=lambda site: drawn[site])
    orders = {tuple(ranking(["a", "b", "c"], seed=0, fragment=0, version=v)) for v in range(100)}
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
def test_a_suitable_site_aggregates(order: str, holders: str, excluded: str, before: str, expected: str | None) -> None:
    """In a swarm, the next site in the order aggregates, if it has the version, has not failed and has not aggregated
    lately.
    """
    assert aggregator_of(list(order), set(holders), list(excluded), set(before)) == expected


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
def test_chosen_aggregators_are_preferred_to_others(
    holders: str, excluded: str, before: str, named: str, expected: str
) -> None:
    """A site that the user has chosen as aggregator is preferred. Another site aggregates only if no chosen site holds
    the version without having failed.
    """
    assert aggregator_of(["a", "b", "c"], set(holders), set(excluded), set(before), tuple(named)) == expected


@pytest.mark.covers("P10")
def test_two_sites_hold_the_newest_version() -> None:
    """Two sites are chosen to hold the newest version, if there are two. A site that has the version is chosen
    first.
    """
    assert choose_holders(["a", "b", "c"], {"c"}) == {"a", "c"}
    assert choose_holders(["a", "b", "c"], {"b", "c"}) == {"b", "c"}
    assert choose_holders(["c"], {"c"}) == {"c"}


# -- policies and transition tables


def view(expected: str, accepted: str, floor: int = 1) -> RoundView:
    """A round that opened at 100 s from version 4; ticket n is that of the n-th letter of the alphabet."""
    updates = tuple(IssuedTicket(ord(site) - 96, site, 0, 4, "accepted") for site in accepted)
    return RoundView(0, 4, 100.0, tuple(expected), updates, floor, "rounds.min_sites")


TWO = QuorumDeadline(quorum=2, deadline_s=30)
LACKS = "waits for another site: only {} accepted or expected (rounds.min_sites)"


@pytest.mark.parametrize(
    ("policy", "seen", "now_s", "decision"),
    [
        (Barrier(), view("abc", "abc"), 1e9, Close((1, 2, 3))),
        (Barrier(), view("abc", "b"), 1e9, StayOpen("waits for a and c")),
        (Barrier(), view("", ""), 1e9, StayOpen(LACKS.format("0 of 1 update"))),
        (Barrier(), view("ab", "ab", floor=3), 1e9, StayOpen(LACKS.format("2 of 3 updates"))),
        (TWO, view("abc", "abc"), 100, Close((1, 2, 3))),
        (TWO, view("abc", "ab"), 129, StayOpen("waits for c", until_s=130)),
        (TWO, view("abc", "ab"), 130, Close((1, 2))),
        (TWO, view("abc", "a", 2), 131, StayOpen("waits for b and c; the deadline has passed with 1 of 2 updates")),
        (TWO, view("a", "a", 2), 129, StayOpen(LACKS.format("1 of 2 updates"), until_s=130)),
    ],
)
def test_a_policy_decides_by_accepted_and_missing_updates(policy, seen, now_s, decision):
    """A barrier and a quorum decide by the accepted and the missing updates whether a round closes. If it stays open,
    they give the reason.
    """
    assert policy.decide(seen, now_s) == decision


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("ab", "a and b"),
        ("abc", "a, b and c"),
        ("abcd", "a, b, c and d"),
        ("abcdef", "a, b, c and 3 others"),
    ],
)
def test_names_are_listed_as_in_a_sentence(names, text):
    """A list of names has commas and an `and`. A long list has three names and the number of the others."""
    assert listed(names) == text


def test_settings_determine_the_rules_of_rounds():
    """The settings of a run determine the closing policy, the smallest number of updates and the sampling."""
    plain = Rules.from_settings(Settings.build({"rounds.sites": 3, "rounds.min_sites": 2, "rounds.total": 4}))
    assert plain == Rules(sites=3, min_sites=2, rounds=4, policy=Barrier())
    assert plain.floor == 2
    quorum = Rules.from_settings(
        Settings.build({"rounds.sites": 3, "rounds.quorum": 2, "rounds.deadline_s": 9}), fragments=4
    )
    assert quorum == Rules(sites=3, policy=QuorumDeadline(2, 9), fragments=4)
    assert (quorum.floor, quorum.floor_name) == (2, "rounds.quorum")
    assert (str(plain.policy), str(quorum.policy)) == ("waits for all sites", "quorum 2 after 9 s")
    drawn = Settings.build({"rounds.sample_fraction": 0.25, "rounds.sample_min": 2, "rounds.sample_seed": 7})
    assert Rules.from_settings(drawn).sampling == Sampling(0.25, 2, 7)


# -- the best version and the early stop


def story(**tracking):
    run = Story(Rules(sites=1, tracking=Tracking("acc", **tracking)))
    run.join("a")
    return run


def round_of(run, value):
    """One round whose workers measured `value` of what they pulled; the effects of its commit."""
    run.submit("a")
    return run.commit(value=value)


def best_in(effects):
    return [effect.measured for effect in effects if isinstance(effect, BestFound)]


@pytest.mark.covers("X41")
def test_a_metric_belongs_to_the_pulled_version():
    """The metric of a round belongs to the version that the workers pulled. A later version with an equal metric does
    not become the best.
    """
    run = story()
    assert best_in(round_of(run, 0.5)) == [Measurement(version=0, round=1, value=0.5)]  # of the initial model
    assert best_in(round_of(run, 0.7)) == [Measurement(version=1, round=2, value=0.7)]
    assert best_in(round_of(run, 0.7)) == []  # as good is not better: the first stays
    assert best_in(round_of(run, 0.6)) == []
    assert run.state.progress == MetricProgress(Measurement(1, 2, 0.7), mark=0.7, stale=2)


def test_a_metric_after_lost_versions_belongs_correctly():
    """If versions were lost, a metric belongs to the number of the version that the workers pulled."""
    # Versions 2 to 4 were lost, so round 2 led from version 1 to version 5.
    run = story()
    round_of(run, 0.5)
    run.submit("a")
    run.send(VersionCommitted(0, 5, 0.6))  # 2 to 4 were lost: round 2 led from 1 to 5
    assert best_in(round_of(run, 0.9)) == [Measurement(version=5, round=3, value=0.9)]


def test_the_smallest_metric_may_be_the_best():
    """With the mode `min`, the version with the smallest metric is the best."""
    run = story(mode="min")
    assert [bool(best_in(round_of(run, value))) for value in (2.0, 3.0, 1.0)] == [True, False, True]
    assert run.state.progress.best == Measurement(2, 3, 1.0)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_round_without_finite_metric_changes_nothing(value):
    """If the metric of a round is missing, NaN or infinite, the best version and the count for an early stop do not
    change.
    """
    run = story(patience=1)
    round_of(run, 0.5)
    for _ in range(3):
        assert any(isinstance(effect, RoundOpened) for effect in round_of(run, value))
    assert run.state.progress == MetricProgress(Measurement(0, 1, 0.5), 0.5, 0)


@pytest.mark.covers("X42")
def test_a_run_without_improvement_stops_early():
    """A run stops early when its metric has not improved for `patience` rounds."""
    # An equal metric is no improvement. The reason is shown.
    run = story(patience=2)
    for value in (0.5, 0.6, 0.55):
        assert RunFinished() not in round_of(run, value)
    effects = round_of(run, 0.6)  # the second after 0.6; equal is no improvement
    assert RunFinished() in effects
    assert not any(isinstance(effect, RoundOpened) for effect in effects)
    assert run.state.finished
    assert run.withheld("a") == "finished"
    assert run.why() == "is finished; stopped early: acc has not improved for 2 rounds; the maximum is 0.6, version 1"


def test_small_improvements_do_not_prevent_an_early_stop():
    # min_delta 0.25: from 0.5, neither 0.625 nor 0.75 is more than that away; 0.875 is, of the last good mark 0.5
    """A metric that improves by no more than `min_delta` makes its version the best, but does not restart the count for
    an early stop.
    """
    # With `min_delta` 0.25, neither 0.625 nor 0.75 is more than 0.25 away from 0.5, and 0.875 is.
    run = story(patience=3, min_delta=0.25)
    for value, stale in ((0.5, 0), (0.625, 1), (0.75, 2), (0.875, 0), (1.0, 1)):
        round_of(run, value)
        assert run.state.progress.stale == stale
        assert run.state.progress.best.value == value


@pytest.mark.parametrize("paused", [False, True])
def test_a_restart_ends_an_evaluated_run_no_earlier(paused):
    """An evaluation shows, while round 4 is open or the run is paused before it, that the run is to end. So round 4 is
    the last one, with a restart and without.
    """
    run = story(patience=2)
    for number in (1, 2, 3):
        ticket = run.ticket("a")
        if paused and number == 3:
            run.send(RunPaused())
        run.accept(ticket)
        run.commit()
        run.send(VersionEvaluated(number, number, 0.5))  # `Story` compares with a restart after each event
    assert run.state.rounds[0].phase == ("paused" if paused else "open")
    if paused:
        run.send(RunResumed())
    assert RunFinished() in round_of(run, None)


def test_a_restart_judges_metrics_by_new_settings():
    """If a run stopped early, a restart with more patience continues the run. With the same settings, the run stays
    finished, even if its end was not recorded.
    """
    run = story(patience=2)
    for value in (0.6, 0.5, 0.5):
        round_of(run, value)
    assert run.state.finished
    journal = run.journal.snapshot()
    patient = Rules(sites=1, tracking=Tracking("acc", patience=5))
    assert not machine.restore(patient, journal, 0.0)[0].finished
    assert machine.restore(run.rules, journal, 0.0)[0].finished
    # killed between the commit and the word that the run is finished: the same again, and said now
    run.journal.finished = False
    state, effects = machine.restore(run.rules, run.journal.snapshot(), 0.0)
    assert state.finished
    assert effects == (RunFinished(),)
