"""Which of the values that a script reports an update carries."""

from __future__ import annotations

from atoll.worker.metrics import Reports


def report(reports: Reports, **values: float | None) -> None:
    """None: a value that is not finite."""
    reports.add({name: value for name, value in values.items() if value is not None}, dict.fromkeys(values, 0.0))


def test_a_value_that_is_no_longer_finite_takes_back_the_one_before() -> None:
    reports = Reports()
    report(reports, loss=5.0, acc=0.5)
    report(reports, loss=None)
    assert reports.newest == {"acc": 0.5}
    assert reports.take(0, is_lost=False) == {"acc": 0.5}


def test_a_newer_report_takes_the_place_of_one_that_was_lost() -> None:
    reports = Reports()
    report(reports, loss=5.0, acc=0.5)
    assert reports.take(0, is_lost=False) == {"loss": 5.0, "acc": 0.5}
    report(reports, loss=4.0)
    assert reports.take(0, is_lost=True) == {"loss": 4.0, "acc": 0.5}
    assert reports.take(0, is_lost=False) == {}
