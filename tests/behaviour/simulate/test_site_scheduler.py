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
def test_a_site_that_hangs_three_times_fails(tmp_path: Path, answers: Answers) -> None:
    """If a site's script does not return three times in a row, the site fails, and the others go on."""
    answers["site-0001"] = [STUCK, STUCK, STUCK]
    done = simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    assert list(done.failed) == ["site-0001"]
    assert "3 times in a row" in done.failed["site-0001"]
    assert workers_of(tmp_path / "state") == [["0", "2", "3"]] * 3


@pytest.mark.covers("V2")
def test_a_slow_site_is_kept_if_it_returns(tmp_path: Path, answers: Answers) -> None:
    """A simulated site whose script times out twice in a row is kept if its next update counts."""
    answers["site-0001"] = [STUCK, STUCK, None, STUCK, STUCK, None, STUCK]
    done = simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    assert done.failed == {}
    assert workers_of(tmp_path / "state") == [["0", "1", "2", "3"]] * 3


@pytest.mark.covers("V2")
def test_timeouts_of_two_sites_are_counted_separately(tmp_path: Path, answers: Answers) -> None:
    """Two timeouts of each of two sites end neither of them, because the count is separate for each site."""
    answers["site-0000"], answers["site-0001"] = [STUCK, STUCK], [STUCK, STUCK]
    done = simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    assert done.failed == {}
    assert done.late == 0  # each was trained again within its round


def test_a_simulation_counts_only_accepted_updates(tmp_path: Path, answers: Answers) -> None:
    """A simulation's result counts only the updates that were accepted, and their bytes."""
    # Of three rounds of four sites, one site fails in its last round: 11 updates count.
    answers["site-0003"] = [None, None, JobResult(error="ValueError: no data", trace="Traceback: no data")]
    done = simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    one = simulation(tmp_path / "one", sites=1, **{"rounds.total": 1}).run()
    assert (done.worker_rounds, list(done.failed)) == (11, ["site-0003"])
    assert done.bytes_up == 11 * one.bytes_up > 0


def test_a_full_disk_does_not_fail_its_site(tmp_path: Path, answers: Answers) -> None:
    """If a simulated site meets a full disk, the simulation ends with an error, but no site fails. The next start
    succeeds.
    """
    answers["site-0001"] = [JobResult(error="No space left on device", disk=True)]
    with pytest.raises(StoreError, match="The disk failed while site-0001 was trained"):
        simulation(tmp_path, **{"rounds.min_sites": 1}).run()
    assert simulation(tmp_path, **{"rounds.min_sites": 1}).run().failed == {}


def test_a_script_that_cannot_be_simulated_is_refused(tmp_path: Path, answers: Answers) -> None:
    """If a script cannot run in a simulation, the simulation ends and says what to change, and does not fail one site
    after the other.
    """
    answers["site-0000"] = [JobResult(error="It trains with DiLoCo.", remedy="Use a federated loop.")]
    with pytest.raises(NotSimulated, match="It trains with DiLoCo") as refused:
        simulation(tmp_path).run()
    assert refused.value.remedy == "Use a federated loop."


@pytest.mark.covers("X3")
def test_an_open_round_names_the_last_failed_site(tmp_path: Path, answers: Answers) -> None:
    """If failed sites keep a round from closing, the error names the site that failed last, and says how low
    `rounds.min_sites` would have to be.
    """
    # Three of four sites fail, and three are needed.
    for site in ("site-0001", "site-0002", "site-0003"):
        answers[site] = [JobResult(error=f"ValueError: no data at {site}")]
    with pytest.raises(RunFailed, match="the last site that failed is site-000") as failed:
        simulation(tmp_path, **{"rounds.min_sites": 3}).run()
    assert "set rounds.min_sites = 1 to continue without the failed sites" in failed.value.remedy


@pytest.mark.covers("V2")
def test_asks_a_refused_site_again(tmp_path: Path) -> None:
    """If the update of a site is refused, this site loses one round, and is asked again in the next one. The result
    counts the refusal.
    """
    nan = """\
        if worker.site == "site-0002" and fl_round.number == 2:
            model[0].weight.data[0, 0] = float("nan")
"""
    done = simulation(tmp_path, doing(nan), **{"rounds.min_sites": 1}).run()
    assert (done.refused, done.failed) == ({"site-0002": 1}, {})
    assert workers_of(tmp_path / "state") == [list("0123"), list("013"), list("0123")]
