"""Try what others send: answers to sites, requests to a server, messages, headers, policies and files of state.

python tools/fuzz.py                              # 10,000 answers
python tools/fuzz.py --answers 300 --seed 5       # fewer, and others
python tools/fuzz.py --only get_run --shown 20    # of one operation
python tools/fuzz.py --minutes 60                 # answers, requests, readers and files, a quarter of the time each
python tools/fuzz.py --minutes 5 --part routes    # requests alone
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
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from harness import fork_server, hostile_runs
from harness.fuzz_readers import Files, read_case, reader_case, readers
from harness.fuzz_routes import Routes
from harness.fuzzed import Findings, Values, try_for
from harness.hostile_runs import Plan, Verdict

TESTS = Path(__file__).parents[1] / "tests"


PARTS = ("answers", "routes", "readers", "files")
STATE = TESTS / "behaviour" / "upgrades" / "recorded" / "state-13.tar.xz"
ANSWERS_A_SECOND = 20
"""Plans are drawn for so many answers in a second; there is time for fewer."""


def main() -> int:
    """Try what the options say, and print the figures. Return 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000, help="wrong answers to try, at least")
    parser.add_argument("--minutes", type=float, default=0.0, help="instead: all parts, for so long together")
    parser.add_argument("--part", choices=PARTS, help="with --minutes: this part alone")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; the same cases for the same seed")
    parser.add_argument("--only", default="", help="only answers of operations with this in their name")
    parser.add_argument("--program", default="", help="only answers to this program")
    parser.add_argument("--processes", type=int, default=8, help="sites at a time; they wait more than they compute")
    parser.add_argument("--shown", type=int, default=60, help="groups of failures to print")
    given = parser.parse_args()
    if given.part not in (None, "answers") and not given.minutes:
        parser.error("--part needs --minutes")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("atoll").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    fork_server.install()
    parts = [given.part] if given.part else PARTS if given.minutes else ["answers"]
    seconds, failed = given.minutes * 60 / len(parts), False
    with tempfile.TemporaryDirectory() as name:
        for part in parts:
            folder = Path(name, part)
            folder.mkdir()
            failed |= (
                try_answers(folder, given, seconds)
                if part == "answers"
                else try_part(part, folder, given.seed, seconds)
            )
    return int(failed)


def try_part(part: str, folder: Path, seed: int, seconds: float) -> bool:
    """Try requests, readers or files for a while, and print the findings. Return whether there are any."""
    findings, begin_s = Findings(), time.monotonic()
    if part == "files":
        files = Files(folder, STATE)
        count = try_for(files.case, lambda case: files.read(findings, case), seed, begin_s + seconds)
    else:
        values = Values()
        if part == "routes":
            with Routes(folder / "states", values, findings) as served:
                count = try_for(served.case, served.send, seed, begin_s + seconds)
        else:
            found = readers()
            make, read = partial(reader_case, found, values), partial(read_case, found, findings)
            count = try_for(make, read, seed, begin_s + seconds)
    print(findings.text())
    for name, tried in sorted(findings.tried.items()):
        print(f"{name:40} {tried:7}")
    print(
        f"{part}: {count} cases in {time.monotonic() - begin_s:.0f} s, findings: {dict(findings.counts) or 0}",
        flush=True,
    )
    return bool(findings.counts)


def try_answers(folder: Path, given: argparse.Namespace, seconds: float) -> bool:
    """Let sites run against a server that answers wrongly, and print the figures. Return whether a site did wrong.

    Args:
        folder: for the files of the sites.
        given: the options.
        seconds: how long; 0: until all answers are tried.
    """
    begin_s = time.monotonic()
    recordings = hostile_runs.record_all(folder / "tapes")
    if given.program:
        recordings = {given.program: recordings[given.program]}
    operations = [each for each in hostile_runs.operations_of(recordings) if given.only in each]
    answers = int(seconds * ANSWERS_A_SECOND) or given.answers
    todo: list[Plan] = []
    for number, operation in enumerate(operations):
        count = -(-answers * (number + 1) // len(operations)) - len(todo)
        todo += hostile_runs.drawn(hostile_runs.plans(recordings, operation), count, given.seed)
    if not given.program and given.only in "lies":
        todo += hostile_runs.drawn(hostile_runs.lying_plans(), -(-answers // 10), given.seed)
    print(f"{len(todo)} plans drawn in {time.monotonic() - begin_s:.0f} s", flush=True)
    figures = Figures(given.shown)
    todo = [plan for first in range(97) for plan in todo[first::97]]  # of every operation, if the time is short
    until_s = time.monotonic() + seconds if seconds else float("inf")
    hostile_runs.run_all(todo, recordings, folder / "sites", given.processes, figures.add, until_s)
    print(figures.text(), f"{time.monotonic() - begin_s:.0f} s", sep="\n", flush=True)
    return bool(figures.failures)


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
