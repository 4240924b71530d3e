"""How the time between two updates is divided."""

from __future__ import annotations

import pytest

from atoll.worker.training.update_report import ReportClock


class Time:
    """A clock that the test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_each_update_has_its_own_time() -> None:
    """The time since the last update is divided into training and waiting, and begins again with each update."""
    # 3 s of training, 2 s of waiting and 5 s of training make 8 and 2. Then there is 1 s of each, with the wait still
    # under way.
    time = Time()
    clock = ReportClock(time)
    time.now_s += 3
    with clock.waiting():
        time.now_s += 2
    time.now_s += 5
    report = clock.report(4.0, 7, {"loss": 0.5})
    assert (report.weight, report.steps, report.metrics) == (4.0, 7, {"loss": 0.5})
    assert (report.train_seconds, report.wait_seconds, clock.waited_s) == (8.0, 2.0, 2.0)
    time.now_s += 1
    with clock.waiting():
        time.now_s += 1
        report = clock.report(1.0, 0, {})
    assert (report.train_seconds, report.wait_seconds, clock.waited_s) == (1.0, 1.0, 3.0)


def test_each_fragment_has_times_of_its_own() -> None:
    """Each fragment has its own times of training and waiting since its last update."""
    time = Time()
    clock = ReportClock(time)
    time.now_s += 4
    assert clock.report(1.0, 1, {}, fragment=0).train_seconds == 4.0
    with clock.waiting():
        time.now_s += 2
    other, again = clock.report(1.0, 1, {}, fragment=1), clock.report(1.0, 1, {}, fragment=0)
    assert (other.train_seconds, other.wait_seconds) == (4.0, 2.0)
    assert (again.train_seconds, again.wait_seconds) == (0.0, 2.0)


def test_a_wait_ended_by_an_error_counts() -> None:
    """If an error ends a wait, the time until then counts as waiting."""
    time = Time()
    clock = ReportClock(time)

    def interrupted() -> None:
        with clock.waiting():
            time.now_s += 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert clock.report(1.0, 1, {}).wait_seconds == 2.0
