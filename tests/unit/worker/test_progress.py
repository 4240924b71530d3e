"""Lines that a worker logs: of a transfer, with its rate and the time left; of a run; of an outage."""

from __future__ import annotations

import logging

import pytest

from atoll.errors import TRANSIENT
from atoll.protocol import messages
from atoll.worker.log_lines import Progress, in_words
from atoll.worker.training.synchroniser import REPEAT_S, Outage

MB = 1_000_000


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO, "atoll")
    return Clock()


def move(bar: Progress, clock: Clock, seconds: int) -> None:
    """1 MB a second."""
    for _ in range(seconds):
        clock.now_s += 1.0
        bar.add(MB)


@pytest.mark.covers("X4")
def test_an_outage_does_not_count_into_the_rate(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    bar = Progress("a: submitting", 100 * MB, clock=clock)
    move(bar, clock, 10)
    clock.now_s += 3600.0
    bar.resume()
    move(bar, clock, 5)
    # 85 MB are left, 1 MB/s as before
    assert caplog.messages == [
        "a: submitting: 5.0 MB of 100.0 MB, 1.0 MB/s, 95 s left",
        "a: submitting: 10.0 MB of 100.0 MB, 1.0 MB/s, 90 s left",
        "a: submitting: 15.0 MB of 100.0 MB, 1.0 MB/s, 85 s left",
    ]


@pytest.mark.covers("X4")
def test_the_last_line_says_how_long_a_transfer_was_interrupted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    bar = Progress("a: submitting", 4 * MB, clock=clock)
    bar.resume()  # as it is called before the first attempt, too
    move(bar, clock, 2)
    clock.now_s += 15.0
    bar.resume()
    move(bar, clock, 2)
    bar.end()
    assert caplog.messages == ["a: submitting: 4.0 MB in 19.0 s, paused for 15.0 s (1.0 MB/s)"]


@pytest.mark.covers("X4")
def test_what_a_worker_does_in_a_run_is_said_in_words() -> None:
    info = messages.RunInfo.model_construct(codec="bf16", fragments=1)
    assert in_words(info, 60) == "H = 60, codec bf16"
    more = {"mode": "async", "sync_rounds_first": 2, "downlink_codec": "int4", "fragments": 3, "tau": 5, "alpha": 0.5}
    assert in_words(info.model_copy(update=more), 60) == (
        "H = 60, asynchronous after 2 synchronous rounds, codec bf16 up, int4 down, 3 fragments, tau 5, alpha 0.5"
    )


@pytest.mark.covers("X4")
def test_a_part_that_stalled_for_long_leaves_no_mark_either(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is resumed where a single part was sent again: there the window does it."""
    bar = Progress("a: submitting", 100 * MB, clock=clock)
    move(bar, clock, 5)
    clock.now_s += 60.0
    move(bar, clock, 6)
    assert caplog.messages == [
        "a: submitting: 5.0 MB of 100.0 MB, 1.0 MB/s, 95 s left",
        "a: submitting: 6.0 MB of 100.0 MB",
        "a: submitting: 11.0 MB of 100.0 MB, 1.0 MB/s, 89 s left",
    ]


def numbers(record: logging.LogRecord) -> list[object]:
    return [each for each in record.args or () if isinstance(each, int)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "atoll" and record.levelno == logging.WARNING]


def test_logs_an_outage_again_after_some_minutes_with_the_number_of_skipped_turns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "atoll")
    now_s = [0.0]
    outage = Outage(lambda: now_s[0])
    lost = TRANSIENT[0]("gone", "")
    for now_s[0] in (0.0, 100.0, REPEAT_S, REPEAT_S + 100.0, 2 * REPEAT_S):
        outage.skipped(lost, "a", "at step 1", "Why.")
    assert [numbers(record) for record in warnings(caplog)] == [[], [3], [5]]
    assert outage.is_on
    outage.ended("a", "goes on")
    outage.ended("a", "goes on")
    assert not outage.is_on
    assert len([record for record in caplog.records if record.levelno == logging.INFO]) == 1
    outage.skipped(lost, "a", "at step 2", "Why.")
    assert len(warnings(caplog)) == 4
