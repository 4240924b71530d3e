"""Atoll's lines on a terminal: once each, and as much as the program wants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import wait_until
from kit import diloco, serve

EIGHT_LOOPS = """
import logging, threading, time
from atoll.worker.log_lines import LOG, ensure_lines
{before}
class Slow(logging.StreamHandler):
    def __init__(self, *stream):
        time.sleep(0.1)  # the others come in, if they can
        super().__init__(*stream)
logging.StreamHandler = Slow
together = threading.Barrier(8)
def begins():
    together.wait()
    ensure_lines()
threads = [threading.Thread(target=begins) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
LOG.info("a line")
LOG.warning("a warning")
"""


def said(before: str = "") -> list[str]:
    """What a program prints when eight loops begin at once in its threads."""
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_LOOPS.format(before=before)], capture_output=True, text=True, check=True
    )
    return [line.partition(" atoll: ")[2] for line in done.stderr.splitlines()]


def test_loops_that_begin_in_several_threads_print_every_line_once() -> None:
    assert said() == ["a line", "a warning"]


def test_a_level_that_the_program_has_set_stays() -> None:
    assert said("logging.getLogger('atoll').setLevel(logging.WARNING)") == ["a warning"]


@pytest.mark.covers("X4")
@pytest.mark.parametrize(("algorithm", "warns"), [("fedavg", True), ("diloco", False)])
def test_a_diloco_loop_names_the_runs_algorithm_and_warns_of_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str, warns: bool
) -> None:
    caplog.set_level("INFO", "atoll")
    with serve(tmp_path, algorithm=algorithm, sites=1) as server, diloco(server, tmp_path, sync_every=500) as loop:
        assert f"joined run atoll ({algorithm}) at " in caplog.text
        assert ("the run's algorithm is fedavg, so its outer step" in caplog.text) == warns
        loop.report(loss=1.0)  # the status has it from the same heartbeat as the warnings
        status = wait_until(lambda: (told := server.status()).workers[0].metrics and told, "a heartbeat")
        assert [text.partition(",")[0] for text in status.warnings] == ["a: the run's algorithm is fedavg"] * warns


@pytest.mark.covers("X4")
def test_a_diloco_loop_in_a_run_that_ends_with_an_evaluation_keeps_both_warnings(tmp_path: Path) -> None:
    steps = [{"kind": "train"}, {"kind": "cross_site_evaluation"}]
    settings = {"algorithm.name": "fedavg", "rounds.sites": 1, "workflow.steps": steps}
    with serve(tmp_path, **settings) as server, diloco(server, tmp_path, sync_every=500) as loop:
        loop.report(loss=1.0)
        status = wait_until(lambda: (told := server.status()).workers[0].metrics and told, "a heartbeat")
    assert [text.partition(",")[0] for text in status.warnings] == [
        "a: the run's algorithm is fedavg",
        "a: the run ends with a cross-site evaluation that asks site a",
    ]
