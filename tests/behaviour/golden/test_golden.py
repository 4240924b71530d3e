"""The golden matrix: every way of a run leaves the bits of its setup, and those that were written down for this build.

A digest that changes on purpose is written anew by `python tools/golden.py`, which prints the old and the new ones.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from golden_axes import AXES, FEW, is_valid, name_of, pairs_of, runs, setup_of, valid_pairs
from golden_runs import build_key, differing, digests_of, in_words, known

RUNS = runs()
SETUPS = list(dict.fromkeys(name_of(setup_of(row)) for row in RUNS))
WRITTEN = known()


@pytest.mark.covers("D8", "V1")
@pytest.mark.parametrize("setup", SETUPS)
def test_every_way_of_a_run_leaves_the_same_bits(tmp_path: Path, request: pytest.FixtureRequest, setup: str) -> None:
    found = {
        name_of(row): digests_of(row, tmp_path / str(number), lambda: request.getfixturevalue("nursery"))
        for number, row in enumerate(RUNS)
        if name_of(setup_of(row)) == setup
    }
    first, *others = found.values()
    for other in others:
        assert not differing(first, other), "\n".join(f"{name}: {in_words(each)}" for name, each in found.items())
    if build_key() in WRITTEN:
        written = WRITTEN[build_key()]
        assert {name: in_words(each) for name, each in found.items()} == {name: written[name] for name in found}


def test_digests_are_written_down_for_every_run() -> None:
    """On a build without digests, the matrix compares the ways of a run with each other alone."""
    assert WRITTEN
    for key, written in WRITTEN.items():
        assert written.keys() == {name_of(row) for row in RUNS}, key
    if build_key() not in WRITTEN:
        warnings.warn(
            f"No golden digests of {build_key()}: the ways of each run were compared with each other alone. "
            "Write them down on a revision that you trust: python tools/golden.py",
            stacklevel=1,
        )


def test_every_pair_of_values_that_is_not_refused_is_covered() -> None:
    assert len(RUNS) >= 120
    assert len({name_of(row) for row in RUNS}) == len(RUNS)
    assert all(is_valid(row) and row.keys() == AXES.keys() for row in RUNS)
    assert set().union(*map(pairs_of, RUNS)) == valid_pairs()


def test_every_setup_runs_in_two_ways() -> None:
    assert all(sum(name_of(setup_of(row)) == setup for row in RUNS) > 1 for setup in SETUPS)


@pytest.mark.parametrize("places", [FEW[:1], FEW[1:]], ids="-".join)
def test_places_that_start_processes_have_few_runs(places: tuple[str, ...]) -> None:
    assert 0 < sum(row["place"] in places for row in RUNS) <= 8
