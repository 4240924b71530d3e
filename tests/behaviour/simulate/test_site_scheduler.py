"""How a simulation's scheduler treats sites with scripts that do not return, and sites that fail or are refused."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import engine_here
import pytest
from simulated_world import doing, simulation, workers_of

from atoll.errors import NotSimulated, RunFailed, StoreError
from atoll.simulate import simulation as simulation_module
from atoll.simulate.engine import Job, JobResult

STUCK = JobResult(stuck=True)
Answers = dict[str, list[JobResult | None]]
"""Site → the results of its next jobs; None: train the site."""

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def answers(here: None, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Results that a test gives in place of training."""
    given: Answers = defaultdict(list)

    class Scripted(engine_here.Here):
        capacity = 2

        def start(self, beginning: Any, heard: Any) -> None:
            self._hears = heard
            super().start(beginning, heard)

        def put(self, job: Job) -> None:
            result = given[job.site].pop(0) if given[job.site] else None
            if result is None:
                super().put(job)
            else:
                self._hears.job_done(job, result)

    monkeypatch.setattr(simulation_module, "Engine", Scripted)
    return given


@pytest.mark.covers("V2")
def test_gives_up_a_site_in_time(tmp_path: Path, answers: Answers) -> None:
    """After three times without a return of its script, a site takes no further part; the others go on."""
    answers["site-0001"] = [STUCK, STUCK, STUCK]
    done = simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    assert list(done.failed) == ["site-0001"]
    assert "3 times in a row" in done.failed["site-0001"]
    assert workers_of(tmp_path / "state") == [["0", "2", "3"]] * 3


@pytest.mark.covers("V2")
def test_keeps_a_slow_site(tmp_path: Path, answers: Answers) -> None:
    """An update that counts ends the row of slow tries."""
    answers["site-0001"] = [STUCK, STUCK, None, STUCK, STUCK, None, STUCK]
    done = simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    assert done.failed == {}
    assert workers_of(tmp_path / "state") == [["0", "1", "2", "3"]] * 3


@pytest.mark.covers("V2")
def test_slow_tries_of_two_sites_are_counted_apart(tmp_path: Path, answers: Answers) -> None:
    """Two slow tries of each of two sites end neither of them."""
    answers["site-0000"], answers["site-0001"] = [STUCK, STUCK], [STUCK, STUCK]
    done = simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    assert done.failed == {}
    assert done.late == 0  # each was trained again within its round


def test_counts_accepted_updates_alone(tmp_path: Path, answers: Answers) -> None:
    """Counts updates and bytes of accepted updates alone.

    Three rounds of four sites, of which one fails at once: 11 updates, and the bytes of as many.
    """
    answers["site-0003"] = [None, None, JobResult(error="ValueError: no data", trace="Traceback: no data")]
    done = simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    one = simulation(tmp_path / "one", sites=1, **{"rounds.total": 1}).run()
    assert (done.worker_rounds, list(done.failed)) == (11, ["site-0003"])
    assert done.bytes_up == 11 * one.bytes_up > 0


def test_a_full_disk_fails_no_site(tmp_path: Path, answers: Answers) -> None:
    """A full disk fails the simulation and not the site. What a disk does is not the fault of the site that met it."""
    answers["site-0001"] = [JobResult(error="No space left on device", disk=True)]
    with pytest.raises(StoreError, match="The disk failed while site-0001 was trained"):
        simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    assert simulation(tmp_path, **{"rounds.min_sites": 1}).run().failed == {}


def test_an_impossible_script_ends_it(tmp_path: Path, answers: Answers) -> None:
    """A script that no simulation can run ends it.

    The error names what to change in the script, in place of failing one site after the other.
    """
    answers["site-0000"] = [JobResult(error="It trains with DiLoCo.", remedy="Use a federated loop.")]
    with pytest.raises(NotSimulated, match="It trains with DiLoCo") as refused:
        simulation(tmp_path).run()
    assert refused.value.remedy == "Use a federated loop."


@pytest.mark.covers("X3")
def test_names_the_last_failed_site(tmp_path: Path, answers: Answers) -> None:
    """Names the last failed site of a round that cannot close.

    With one of four sites left and three needed, the error says how low rounds.min_sites would have to be.
    """
    for site in ("site-0001", "site-0002", "site-0003"):
        answers[site] = [JobResult(error=f"ValueError: no data at {site}")]
    with pytest.raises(RunFailed, match="the last site that failed is site-000") as failed:
        simulation(tmp_path, **{"rounds.min_sites": 3}).run()
    assert "set rounds.min_sites = 1 to continue without the failed sites" in failed.value.remedy


@pytest.mark.covers("V2")
def test_asks_a_refused_site_again(tmp_path: Path) -> None:
    """A refused site is asked again in the next round. One bad update costs one round of the site, and is counted."""
    nan = """\
        if worker.site == "site-0002" and fl_round.number == 2:
            model[0].weight.data[0, 0] = float("nan")
"""
    done = simulation(tmp_path, doing(nan), **{"rounds.min_sites": 1}).run()
    assert (done.refused, done.failed) == ({"site-0002": 1}, {})
    assert workers_of(tmp_path / "state") == [list("0123"), list("013"), list("0123")]
