"""How the time between two updates is divided."""

from __future__ import annotations

import pytest

from atoll.worker.training.update_report import ReportClock


class Time:
    """A clock that the test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_each_update_begins_its_own_time() -> None:
    """Time is training or waiting and begins anew with each update.

    3 s of training, 2 s of waiting, 5 s of training: 8 and 2. Then 1 s of each, the wait still under way.
    """
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
    time = Time()
    clock = ReportClock(time)
    time.now_s += 4
    assert clock.report(1.0, 1, {}, fragment=0).train_seconds == 4.0
    with clock.waiting():
        time.now_s += 2
    other, again = clock.report(1.0, 1, {}, fragment=1), clock.report(1.0, 1, {}, fragment=0)
    assert (other.train_seconds, other.wait_seconds) == (4.0, 2.0)
    assert (again.train_seconds, again.wait_seconds) == (0.0, 2.0)


def test_a_wait_that_an_error_ends_counts() -> None:
    time = Time()
    clock = ReportClock(time)

    def interrupted() -> None:
        with clock.waiting():
            time.now_s += 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert clock.report(1.0, 1, {}).wait_seconds == 2.0
