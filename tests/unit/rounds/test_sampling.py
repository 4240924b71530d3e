"""Client sampling: which sites a round asks for."""

from collections import Counter

import pytest

from atoll import Settings
from atoll.rounds import machine
from atoll.rounds.events import RoundOpened
from atoll.rounds.sampling import Sampling
from atoll.rounds.state import Rules

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
def test_how_many_are_drawn(fraction: float, minimum: int, at_least: int, drawn: int) -> None:
    assert len(Sampling(fraction, minimum).draw(SITES, 0, 0, at_least)) == drawn


def test_a_share_that_is_inexact_in_binary_draws_no_extra_worker() -> None:
    assert 0.07 * 100 > 7
    assert len(Sampling(0.07).draw([f"site-{index}" for index in range(100)], 0, 0)) == 7


def test_a_draw_depends_on_seed_and_round_and_on_nothing_else() -> None:
    sampling = Sampling(0.2, seed=1)
    first = sampling.draw(SITES, 0, 5)
    assert sampling.draw(list(reversed(SITES)), 0, 5) == first == sorted(first)
    assert len({tuple(sampling.draw(SITES, 0, version)) for version in range(20)}) == 20
    assert Sampling(0.2, seed=2).draw(SITES, 0, 5) != first
    assert sampling.draw(SITES, 1, 5) != first
    stranger = next(site for site in SITES if site not in first)
    without = sampling.draw([site for site in SITES if site != stranger], 0, 5)
    assert set(without) == set(first)  # a site that was not drawn anyway is not missed (⌈0.2·29⌉ is 6, too)


def test_draws_all_workers_equally_often() -> None:
    """3 of 30 in 2,000 rounds: 200 each are expected, ± 13.4; five of those are 67."""
    counts = Counter(site for version in range(2000) for site in Sampling(0.1).draw(SITES, 0, version))
    assert min(counts.values()) > 200 - 67
    assert max(counts.values()) < 200 + 67


def test_a_round_asks_the_drawn_workers_and_closes_with_them(story) -> None:
    sampling = Sampling(0.5, seed=3)
    run = story(sites=4, sampling=sampling)
    run.join("a", "b", "c", "d")
    for version in range(5):
        drawn = tuple(sampling.draw("abcd", 0, version))
        assert len(drawn) == 2
        assert run.expected() == drawn
        for site in set("abcd") - set(drawn):
            assert run.withheld(site) == "was not drawn for this round; each round draws anew"
        run.submit(*drawn)
        assert RoundOpened(0, version + 1, tuple(sampling.draw("abcd", 0, version + 1))) in run.commit()


def test_draws_a_replacement_for_a_drawn_worker_that_dies(story) -> None:
    run = story(sites=3, sampling=Sampling(0.3, seed=0))
    run.join("a", "b", "c")
    (drawn,) = run.expected()
    run.leave(drawn)
    (other,) = run.expected()
    assert other != drawn
    run.submit(other)
    assert run.phase() == "closing"


def test_never_fewer_than_a_round_needs(story) -> None:
    run = story(sites=4, min_sites=3, sampling=Sampling(0.25))
    run.join("a", "b", "c", "d")
    assert len(run.expected()) == 3


def test_a_restarted_server_draws_the_same(story) -> None:
    """`Story` restores after every event and compares; here the round opens in the restore itself."""
    rules = Rules(sites=2, sampling=Sampling(0.5, seed=9))
    run = story(sites=2, sampling=rules.sampling)
    run.join("a", "b")
    run.submit(*run.expected())
    journal = run.journal
    journal.move_head(0, 1)  # committed, and killed before the next round was opened
    restored, effects = machine.restore(rules, journal.snapshot(), 0.0)
    assert RoundOpened(0, 1, tuple(rules.sampling.draw("ab", 0, 1))) in effects
    assert tuple(restored.rounds[0].expected) == tuple(rules.sampling.draw("ab", 0, 1))


def test_the_settings() -> None:
    settings = Settings.build({"rounds.sample_fraction": 0.25, "rounds.sample_min": 2, "rounds.sample_seed": 7})
    assert Rules.from_settings(settings).sampling == Sampling(0.25, 2, 7)
    assert Rules.from_settings(Settings()).sampling == Sampling()
