"""The golden matrix: every way of a run leaves the bits of the specification, and those written down for this build.

What the matrix leaves out, Atoll refuses, and names what does not go together. A digest that changes on purpose is
written anew by `python tools/golden.py`, which prints the old and the new ones.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from golden_axes import (
    AXES,
    DEFAULTS,
    EXCLUSIONS,
    FEW,
    ROUNDS,
    STEPS,
    Exclusion,
    Row,
    by_setup,
    covering,
    is_valid,
    name_of,
    pairs_of,
    runs,
    settings_of,
    valid_pairs,
)
from golden_model import build
from golden_runs import build_key, differing, digests_of, in_words, known, norms_of, simulation
from golden_specification import digests_by_specification
from kit import serve

from atoll.errors import AtollError, ConfigError

RUNS = runs()


WRITTEN = known()


COVERING = covering(RUNS)
"""Runs with every pair of values. The others bring each algorithm together with each codec up and down, in two ways."""


@pytest.mark.covers("D8", "L3", "V1")
@pytest.mark.parametrize(
    "rows",
    [
        *(pytest.param(rows, id=setup) for setup, rows in by_setup(COVERING).items()),
        *(
            pytest.param(rows, id=f"{setup}, every way", marks=pytest.mark.long)
            for setup, rows in by_setup(RUNS).items()
        ),
    ],
)
def test_every_kind_of_run_gives_the_specified_bits(
    tmp_path: Path, request: pytest.FixtureRequest, rows: list[Row]
) -> None:
    """Each kind of run gives the bits of the specification, and those of the digests stored for this build, if there
    are any.
    """
    found = {
        name_of(row): digests_of(row, tmp_path / str(number), lambda: request.getfixturevalue("nursery"))
        for number, row in enumerate(rows)
    }
    specified = digests_by_specification(rows[0], norms_of(tmp_path / "0"))
    for name, digests in found.items():
        assert not differing(digests, specified), f"{name}: {in_words(digests)}; specified: {in_words(specified)}"
    if build_key() in WRITTEN:
        written = WRITTEN[build_key()]
        assert {name: in_words(each) for name, each in found.items()} == {name: written[name] for name in found}


def test_digests_are_stored_for_every_run() -> None:
    """Each build with stored digests has one for every run of the golden matrix."""
    assert WRITTEN
    for key, written in WRITTEN.items():
        assert written.keys() == {name_of(row) for row in RUNS}, key
    if build_key() not in WRITTEN:
        warnings.warn(
            f"No golden digests of {build_key()}: runs were compared with the specification alone. "
            "Write them down on a revision that you trust: python tools/golden.py",
            stacklevel=1,
        )


def test_the_golden_matrix_covers_every_valid_pair() -> None:
    assert len(RUNS) >= 120
    assert len({name_of(row) for row in RUNS}) == len(RUNS)
    assert all(is_valid(row) and row.keys() == AXES.keys() for row in RUNS)
    assert set().union(*map(pairs_of, RUNS)) == valid_pairs()
    assert set().union(*map(pairs_of, COVERING)) == valid_pairs()


def test_every_golden_setup_runs_in_two_ways() -> None:
    """Every combination of settings in the golden matrix is run in at least two ways, for example with a server and
    simulated.
    """
    assert all(len(rows) > 1 for rows in by_setup(RUNS).values())


@pytest.mark.parametrize("places", [FEW[:1], FEW[1:]], ids="-".join)
def test_slow_ways_to_run_have_few_golden_runs(places: tuple[str, ...]) -> None:
    """The golden matrix has at most 8 runs for each way to run that starts processes of its own."""
    assert 0 < sum(row["place"] in places for row in RUNS) <= 8


EXCLUDED = [
    pytest.param(each, row, id=name_of({axis: row[axis] for axis in each.of}))
    for each in EXCLUSIONS
    for row in each.rows()
    if each.by
]


def is_of_settings(each: Exclusion) -> bool:
    """Whether the server or the simulation refuses it before a site has joined."""
    places, algorithms = each.of.get("place", ()), each.of.get("algorithm", ())
    if "simulation" in places:
        return not set(STEPS[:1]) & set(algorithms)
    return not set(places) & {"fsdp", "ddp"} or not set(algorithms) & set(ROUNDS) - {"scaffold"}


def begin(row: Row, folder: Path) -> None:
    """Build the simulation, or start the server."""
    if row["place"] == "simulation":
        simulation(row, folder)
        return
    with serve(folder, build(), **settings_of(row)):
        pass


@pytest.mark.parametrize(("each", "row"), [case for case in EXCLUDED if is_of_settings(case.values[0])])
def test_impossible_combinations_are_refused(tmp_path: Path, each: Exclusion, row: Row) -> None:
    """Combinations of settings that the golden matrix leaves out are refused, and the error names what does not fit
    together.
    """
    with pytest.raises(ConfigError) as refused:
        begin(row, tmp_path)
    assert [word for word in each.by if word not in str(refused.value)] == []


@pytest.mark.parametrize("each", [each for each in EXCLUSIONS if not each.by], ids=lambda each: each.why)
def test_combinations_with_time_dependent_bits_start(tmp_path: Path, each: Exclusion) -> None:
    """Runs that the golden matrix leaves out only because their bits depend on time can be started."""
    for number, row in enumerate(each.rows()):
        with serve(tmp_path / str(number), build(), **settings_of(row)) as server:
            assert server.status().fragments


def test_a_simulation_refuses_diloco_at_the_site(tmp_path: Path) -> None:
    row = DEFAULTS | {"place": "simulation", "algorithm": "diloco"}
    assert not is_valid(row)
    with pytest.raises(AtollError, match=r"DiLoCo"):
        simulation(row, tmp_path, client="enter_diloco").run()


def test_every_exclusion_has_a_test() -> None:
    """Every combination of settings that a site refuses is also refused in a test elsewhere."""
    # A test above covers simulations. The tests of sharded sites and of a site's lock cover ranks.
    at_sites = [each for each in EXCLUSIONS if each.by and not is_of_settings(each)]
    assert {place for each in at_sites for place in each.of["place"]} == set(FEW)
