"""Try sites against a hostile server that answers every operation wrongly, and report what a site must not do.

python tools/fuzz.py                              # 10,000 answers
python tools/fuzz.py --answers 300 --seed 5       # fewer, and others
python tools/fuzz.py --only get_run --shown 20    # of one operation
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from harness import fork_server, hostile_runs
from harness.hostile_runs import Plan, Verdict

TESTS = Path(__file__).parents[1] / "tests"


def main() -> int:
    """Draw the plans, run them, and print the figures. Return 1 if a site did what it must not do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000, help="wrong answers to try, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; the same plans for the same seed")
    parser.add_argument("--only", default="", help="only operations with this in their name")
    parser.add_argument("--program", default="", help="only this program")
    parser.add_argument("--processes", type=int, default=8, help="sites at a time; they wait more than they compute")
    parser.add_argument("--shown", type=int, default=60, help="groups of failures to print")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("atoll").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    fork_server.install()
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recordings = hostile_runs.record_all(folder / "tapes")
        if given.program:
            recordings = {given.program: recordings[given.program]}
        operations = [each for each in hostile_runs.operations_of(recordings) if given.only in each]
        todo: list[Plan] = []
        for number, operation in enumerate(operations):
            count = -(-given.answers * (number + 1) // len(operations)) - len(todo)
            todo += hostile_runs.drawn(hostile_runs.plans(recordings, operation), count, given.seed)
        if not given.program and given.only in "lies":
            todo += hostile_runs.drawn(hostile_runs.lying_plans(), -(-given.answers // 10), given.seed)
        print(f"{len(todo)} plans drawn in {time.monotonic() - begin_s:.0f} s", flush=True)
        figures = Figures(given.shown)
        todo = todo[::7] + [plan for number, plan in enumerate(todo) if number % 7]
        hostile_runs.run_all(todo, recordings, folder / "sites", given.processes, figures.add)
    print(figures.text(), f"{time.monotonic() - begin_s:.0f} s", sep="\n")
    return 1 if figures.failures else 0


def group_of(kind: str, what: str, verdict: Verdict) -> str:
    """Return a name for failures that have probably one cause."""
    if kind == "traceback":
        return f"{kind}: {what.splitlines()[0]}"
    if kind == "hang or death":
        return f"{kind}: {' < '.join(what.split(' < ')[:2])[:200]}"
    faults = ", ".join(f"{strike.operation} {strike.answer.fault}" for strike in verdict.plan.strikes)
    faults = f"lie about {verdict.plan.lie.about}" if verdict.plan.lie else faults
    return f"{kind}: {what[:80] if kind == 'effects' else faults}"


class Figures:
    """What all runs have come to."""

    def __init__(self, shown: int) -> None:
        self.told, self.shown = Counter[str](), shown
        self.runs, self.peak_mb, self.longest_s = 0, 0.0, 0.0
        self.failures = Counter[str]()
        self.groups: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def add(self, verdict: Verdict) -> None:
        """Count a run, and print what was wrong with it."""
        with self._lock:
            self.runs += 1
            self.told[verdict.plan.operation] += bool(verdict.told)
            self.peak_mb = max(self.peak_mb, verdict.peak_mb)
            self.longest_s = max(self.longest_s, verdict.seconds)
            for kind, what in verdict.wrong.items():
                self.failures[kind] += 1
                self.groups.setdefault(group_of(kind, what, verdict), []).append(f"{verdict.plan}\n{what}")
            if not self.runs % 500:
                print(f"{self.runs} runs, {dict(self.failures)}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """Return the figures, one a line."""
        for name, members in sorted(self.groups.items(), key=lambda each: -len(each[1]))[: self.shown]:
            print(f"== {len(members)} times {name}")
            for member in members[:2]:
                print(f"   {member[:1200]}\n")
        lines = [f"{name:20} {count:6}" for name, count in self.told.items()]
        return "\n".join(
            [
                *lines,
                f"answers tried: {self.told.total()} in {self.runs} runs",
                f"highest memory of a run: {self.peak_mb:.0f} MB",
                f"longest run: {self.longest_s:.1f} s",
                f"failures: {dict(self.failures) or 0}",
            ]
        )


if __name__ == "__main__":
    sys.exit(main())
