"""The best version and the early stop, without IO: which version a metric is of, what improves, when it is over."""

import math

import pytest
from round_story import Story

from atoll.rounds import machine
from atoll.rounds.early_stopping import Measured, Progress, Tracking
from atoll.rounds.events import BestFound, RoundOpened, RunFinished, VersionCommitted
from atoll.rounds.state import Rules


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
def test_a_metric_is_credited_to_the_version_that_the_workers_pulled():
    run = story()
    assert best_in(round_of(run, 0.5)) == [Measured(version=0, round=1, value=0.5)]  # of the initial model
    assert best_in(round_of(run, 0.7)) == [Measured(version=1, round=2, value=0.7)]
    assert best_in(round_of(run, 0.7)) == []  # as good is not better: the first stays
    assert best_in(round_of(run, 0.6)) == []
    assert run.state.progress == Progress(Measured(1, 2, 0.7), mark=0.7, stale=2)


def test_a_version_after_lost_ones_is_credited_by_its_own_number():
    run = story()
    round_of(run, 0.5)
    run.submit("a")
    run.send(VersionCommitted(0, 5, 0.6))  # 2 to 4 were lost: round 2 led from 1 to 5
    assert best_in(round_of(run, 0.9)) == [Measured(version=5, round=3, value=0.9)]


def test_the_smallest_is_best_where_the_run_says_so():
    run = story(mode="min")
    assert [bool(best_in(round_of(run, value))) for value in (2.0, 3.0, 1.0)] == [True, False, True]
    assert run.state.progress.best == Measured(2, 3, 1.0)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_round_without_a_finite_value_says_nothing(value):
    run = story(patience=1)
    round_of(run, 0.5)
    for _ in range(3):
        assert any(isinstance(effect, RoundOpened) for effect in round_of(run, value))
    assert run.state.progress == Progress(Measured(0, 1, 0.5), 0.5, 0)


@pytest.mark.covers("X42")
def test_the_run_ends_after_so_many_rounds_without_an_improvement():
    run = story(patience=2)
    for value in (0.5, 0.6, 0.55):
        assert RunFinished() not in round_of(run, value)
    effects = round_of(run, 0.6)  # the second after 0.6; equal is no improvement
    assert RunFinished() in effects
    assert not any(isinstance(effect, RoundOpened) for effect in effects)
    assert run.state.finished
    assert run.withheld("a") == "finished"
    assert run.why() == "is finished; stopped early: acc has not improved for 2 rounds; the best is 0.6, version 1"


def test_small_steps_are_best_but_no_reason_to_go_on():
    # min_delta 0.25: from 0.5, neither 0.625 nor 0.75 is more than that away; 0.875 is, of the last good mark 0.5
    run = story(patience=3, min_delta=0.25)
    for value, stale in ((0.5, 0), (0.625, 1), (0.75, 2), (0.875, 0), (1.0, 1)):
        round_of(run, value)
        assert run.state.progress.stale == stale
        assert run.state.progress.best.value == value


def test_without_patience_the_run_goes_on():
    run = story()
    for _ in range(20):
        round_of(run, 0.5)
    assert not run.state.finished


def test_a_restart_with_other_settings_judges_the_same_metrics_anew():
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
