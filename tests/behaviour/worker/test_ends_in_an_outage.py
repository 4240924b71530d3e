"""A DiLoCo loop that ends while its server is away: which steps the run has not, and how often that is logged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import diloco, serve, take_steps

import atoll

H = 4
STREAMS = {"K": 2, "tau": 1}


def train(folder: Path, lost_at: int, steps: int, **settings: Any) -> atoll.DiLoCo:
    """Steps of one worker; its server goes away for good after step `lost_at`."""
    with serve(folder, **{"algorithm": "diloco", "H": H, "sites": 1, "rounds": 100} | settings) as server:
        with diloco(server, folder, max_sync_retries=0) as loop:
            take_steps(loop, lost_at)
            server.stop()
            take_steps(loop, steps - lost_at)
    return loop


def numbers(record: logging.LogRecord) -> list[object]:
    return [each for each in record.args or () if isinstance(each, int)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "atoll" and record.levelno == logging.WARNING]


@pytest.mark.covers("L7")
@pytest.mark.parametrize(
    ("settings", "lost_at", "counted"),
    [
        ({}, 9, 8),
        (STREAMS, 9, 8),  # fragments are taken after 2, 4, 6 and 8 steps; that of step 8 was merged after 9
    ],
    ids=["whole", "streaming"],
)
def test_warns_of_every_step_since_the_last_synchronisation_that_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], lost_at: int, counted: int
) -> None:
    caplog.set_level("INFO", "atoll")
    loop = train(tmp_path, lost_at, 40, **settings)  # the last step is a turn, too, and is skipped
    assert loop.step == 40
    assert loop.skipped > 3
    assert [40 - counted, counted] in [numbers(record) for record in warnings(caplog)]


@pytest.mark.covers("L7")
@pytest.mark.parametrize("settings", [{}, STREAMS], ids=["whole", "streaming"])
def test_logs_an_outage_once_however_many_turns_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    caplog.set_level("INFO", "atoll")
    loop = train(tmp_path, 9, 40, **settings)
    assert loop.skipped > 3
    assert len([record for record in warnings(caplog) if "skipped" in record.getMessage()]) == 1


def test_does_not_warn_where_no_turn_was_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "atoll")
    train(tmp_path, 11, 11)
    assert warnings(caplog) == []
    assert [3] in [numbers(record) for record in caplog.records]  # of 11 steps 8 are in two updates


@pytest.mark.covers("X4")
def test_an_update_that_does_not_arrive_has_no_line_with_a_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line of a short transfer comes at DEBUG."""
    caplog.set_level("DEBUG", "atoll")
    with serve(tmp_path, algorithm="diloco", H=H, sites=1) as server, Proxy(server.port) as proxy:
        with diloco(proxy.url, tmp_path, max_sync_retries=0) as loop:
            proxy.faults += [Fault("PUT .*", "up", BEFORE_HEADER, "reset") for _ in range(100)]
            take_steps(loop, H)
            assert loop.skipped == 1
            assert "a: submitting" not in caplog.text
            proxy.faults.clear()
            take_steps(loop, H)
            assert "a: submitting" in caplog.text
