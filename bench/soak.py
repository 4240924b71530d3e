"""Kill and stop processes of small runs at random moments, for minutes: is an acknowledged update lost or doubled?

    python bench/soak.py --minutes 10                    every mode in turn
    python bench/soak.py --minutes 2 --only swarm --set run.seed=7

A run is one server and two or three sites, each a process forked from one that has imported torch. One of them at a
time is ended (SIGKILL, and started again) or stopped for a moment (SIGSTOP, SIGCONT). When the run is finished: every
update that the audit log has as accepted counts exactly once (an asynchronous run may leave its last ones uncounted,
which the table shows), and the exported model has the bits of an undisturbed run
where those are promised. A DiLoCo site that is killed trains its local steps anew, so bits are promised there only
while nothing but the server is disturbed, and no synchronisation is skipped for it; an asynchronous run's bits depend
on when updates arrive.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from harness.processes import Nursery, RestartedProcess
from kit import ForkedServer, ForkedSite, exported, tensors_digest
from safetensors.torch import load_file

ROUNDS_SCRIPT = """
import os
import torch
from safetensors.torch import save_file
import atoll
from kit.models import SITES, build_model, local_step

site, model = os.environ["ATOLL_SITE"], build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.join(swarm=True) as worker:
    for fl_round in worker:
        fl_round.load_into(model)
        fl_round.correct(model, optimizer)
        for step in range(2):
            local_step(model, optimizer, site, 10 * fl_round.number + step)
        fl_round.submit(model, weight=SITES.get(site, 1.0), steps=2)
        with open(f"{site}.acknowledged", "a") as file:
            file.write(f"{fl_round.number}\\n")
    save_file(worker.load_into(model).state_dict(), f"{site}.part")
os.replace(f"{site}.part", f"{site}.safetensors")
"""

LOOP_SCRIPT = """
import os
import torch
import atoll
from kit.models import SITES, build_model, local_step

site, model = os.environ["ATOLL_SITE"], build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.DiLoCo(model, optimizer, weight=SITES.get(site, 1.0), swarm=True) as loop:
    step = merged = 0
    while not loop.finished:
        local_step(model, optimizer, site, step)
        step += 1
        if (rounds := loop.sync_metrics["rounds"]) > merged:
            with open(f"{site}.merged", "a") as file:
                file.write("x" * (rounds - merged))
            merged = rounds
"""


@dataclass(frozen=True)
class Mode:
    """One kind of run.

    Attributes:
        script: what each site runs.
        sites: their names.
        same_bits: whether the model has the bits of an undisturbed run.
        kills_sites: whether sites are disturbed, too.
        leftover: updates that may be accepted and not counted when the run is finished: those that came for a step
            that an asynchronous run no longer takes.
    """

    script: str
    settings: dict[str, Any]
    sites: tuple[str, ...] = ("a", "b")
    same_bits: bool = True
    kills_sites: bool = True
    leftover: int = 0


DILOCO = {
    "algorithm.name": "diloco",
    "diloco.sync_every": 6,
    "algorithm.outer_optimizer.lr": 0.7,
    "algorithm.outer_optimizer.momentum": 0.9,
}
STREAMING = {
    **DILOCO,
    "diloco.num_fragments": 3,
    "diloco.fragment_sync_delay": 1,
    "diloco.fragment_update_alpha": 0.25,
    "aggregation.upload_codec.name": "int8",
    "aggregation.download_codec.name": "int8",
}
DELAYED = {"async.enabled": True, "async.momentum_every": 3, "aggregation.upload_codec.name": "none"}
MODES = {
    "fedavg": Mode(ROUNDS_SCRIPT, {"algorithm.name": "fedavg", "rounds.total": 40}),
    "scaffold": Mode(
        ROUNDS_SCRIPT,
        {
            "algorithm.name": "scaffold",
            "rounds.total": 40,
            "algorithm.outer_optimizer.lr": 1.0,
            "algorithm.outer_optimizer.momentum": 0.0,
        },
    ),
    "streaming, server disturbed": Mode(LOOP_SCRIPT, {**STREAMING, "rounds.total": 40}, kills_sites=False),
    "streaming": Mode(LOOP_SCRIPT, {**STREAMING, "rounds.total": 40}, same_bits=False),
    "async, delayed Nesterov": Mode(
        LOOP_SCRIPT, {**DILOCO, **DELAYED, "rounds.total": 120, "rounds.sites": 3}, ("a", "b", "c"), False, leftover=3
    ),
    "swarm": Mode(
        ROUNDS_SCRIPT,
        {
            "algorithm.name": "fedavg",
            "swarm.enabled": True,
            "rounds.total": 20,
            "rounds.sites": 3,
            "network.heartbeat_timeout_s": 3.0,
        },
        ("a", "b", "c"),
    ),
}
PAUSE_S = 0.25
"""Between two disturbances in the mean."""
DISTURBED_S = 25.0
"""A run is left alone after that, to come to its end."""
END_S = 240.0


@dataclass
class Tally:
    """What one mode has been through."""

    runs: int = 0
    kills: int = 0
    stops: int = 0
    accepted: int = 0
    lost: int = 0
    left_over: int = 0
    doubled: int = 0
    other_bits: int = 0
    failed: list[str] = field(default_factory=list)


class Disturber:
    """Ends and stops processes of a run, until it is told to leave them alone."""

    def __init__(self, targets: list[RestartedProcess], chance: random.Random) -> None:
        self._targets, self._chance = targets, chance
        self._over = threading.Event()
        self.kills = self.stops = 0
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        end = time.monotonic() + DISTURBED_S
        while time.monotonic() < end and not self._over.wait(self._chance.expovariate(1 / PAUSE_S)):
            process = self._chance.choice(self._targets).now
            if process.poll() is not None:
                continue
            if self._chance.random() < 0.75:
                process.send(signal.SIGKILL)
                self.kills += 1
            else:
                process.send(signal.SIGSTOP)
                self._over.wait(self._chance.uniform(0.05, 1.5))
                process.send(signal.SIGCONT)
                self.stops += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def run_once(
    nursery: Nursery, folder: Path, mode: Mode, disturb: Callable[[list[RestartedProcess]], Disturber | None]
) -> None:
    """One run to its end.

    Raises:
        TimeoutError, AssertionError: a process hangs, or ends badly; its last words are in the message.
    """
    with ForkedServer(
        nursery, folder, **{"rounds.min_sites": 1 if mode.leftover else len(mode.sites), **mode.settings}
    ) as server:
        patience = {"ATOLL_MAX_SYNC_RETRIES": "1000"} if mode.same_bits else {}  # a turn that is skipped changes bits
        sites = [
            RestartedProcess(partial(ForkedSite(nursery, folder, server.url, site, mode.script).start, **patience))
            for site in mode.sites
        ]
        disturber = disturb([server.process, *(sites if mode.kills_sites else [])])
        try:
            for process in (*sites, server.process):
                code = process.wait(END_S)
                told = f"{process.now.output()[-2000:]}\nserver:\n{server.log.read_text()[-2000:]}"
                assert code == 0, f"exit code {code}: {told}"
        finally:
            if disturber is not None:
                disturber.close()
            for process in sites:
                process.close()


def digest_of(folder: Path, mode: Mode) -> str:
    """Of the model that the run ended with: the server's export, or of a swarm what each site has."""
    if not mode.settings.get("swarm.enabled"):
        return tensors_digest(exported(folder))
    found = {tensors_digest(load_file(folder / f"{site}.safetensors")) for site in mode.sites}
    return found.pop() if len(found) == 1 else "the sites' models differ"


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def judge(folder: Path, mode: Mode, undisturbed: str, tally: Tally) -> None:
    """Count what was accepted, by the audit log and by what the sites were told, and what became of it.

    A site of rounds notes each update that was acknowledged; a DiLoCo loop each of which it has merged the result.
    """
    with closing(sqlite3.connect(folder / "state/journal.sqlite")) as journal:
        rows = journal.execute("SELECT what, detail_json FROM audit").fetchall()
        counted = journal.execute("SELECT site, base_version FROM tickets WHERE state = 'counted'").fetchall()
    entries = [(what, json.loads(detail)) for what, detail in rows]
    accepted = {entry["ticket"] for what, entry in entries if what == "accepted"}
    committed = Counter(ticket for what, entry in entries if what == "committed" for ticket in entry["tickets"])
    told = {(site, int(line) - 1) for site in mode.sites for line in read(folder / f"{site}.acknowledged").splitlines()}
    merged = Counter({site: len(read(folder / f"{site}.merged")) for site in mode.sites})
    untold = merged - Counter(site for site, _ in counted)  # of what the server acknowledged, and forgot altogether
    lost = len(accepted - committed.keys())
    tally.accepted += len(accepted)
    left_over = lost if lost <= mode.leftover else 0
    tally.left_over += left_over
    tally.lost += lost - left_over + len(told - set(counted)) + max(0, untold.total() - mode.leftover)
    tally.doubled += sum(times - 1 for times in committed.values())
    if mode.same_bits and digest_of(folder, mode) != undisturbed:
        tally.other_bits += 1


def soak(nursery: Nursery, names: list[str], minutes: float, seed: int, kept: Path | None) -> dict[str, Tally]:
    """Run the modes in turn until the time is over."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    tallies, chance = {name: Tally() for name in names}, random.Random(seed)
    undisturbed: dict[str, str] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            run_once(nursery, Path(temporary), MODES[name], lambda _: None)
            undisturbed[name] = digest_of(Path(temporary), MODES[name])
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        name = min(names, key=lambda each: tallies[each].kills)
        tally, mode = tallies[name], MODES[name]
        started: list[Disturber] = []

        def disturb(targets: list[RestartedProcess], started: list[Disturber] = started) -> Disturber:
            started.append(Disturber(targets, chance))
            return started[0]

        folder = Path(tempfile.mkdtemp(prefix="atoll-soak-", dir=kept))
        faults = (tally.lost, tally.doubled, tally.other_bits, len(tally.failed))
        try:
            run_once(nursery, folder, mode, disturb)
            judge(folder, mode, undisturbed[name], tally)
        except (AssertionError, TimeoutError) as error:
            tally.failed.append(f"{folder}: {error}")
        tally.runs += 1
        tally.kills += started[0].kills
        tally.stops += started[0].stops
        if faults == (tally.lost, tally.doubled, tally.other_bits, len(tally.failed)):
            shutil.rmtree(folder)
        print(f"{name}: {tally.runs} runs, {tally.kills} kills, {tally.stops} stops", file=sys.stderr, flush=True)
    return tallies


def main() -> int:
    """Print a table; the exit code is 1 where an update was lost or doubled, bits differ, or a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", choices=MODES, default=list(MODES), help="these modes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; what happens in them differs each time")
    parser.add_argument("--dir", type=Path, help="where folders of runs go; those with a fault stay")
    options = parser.parse_args()
    with closing(Nursery()) as nursery:
        tallies = soak(nursery, options.only, options.minutes, options.seed, options.dir)
    print("| mode | runs | kills | stops | accepted | lost | left over | doubled | other bits | failed |")
    print("|" + " --- |" * 10)
    for name, each in tallies.items():
        bits = str(each.other_bits) if MODES[name].same_bits else "not promised"
        row = [name, each.runs, each.kills, each.stops, each.accepted, each.lost, each.left_over, each.doubled]
        row += [bits, len(each.failed)]
        print(f"| {' | '.join(map(str, row))} |")
    for each in tallies.values():
        for failure in each.failed:
            print(f"\n{failure}", file=sys.stderr)
    faults = [each.lost or each.doubled or each.other_bits or each.failed for each in tallies.values()]
    print(f"{sum(each.kills for each in tallies.values())} kills")
    return 1 if any(faults) else 0


if __name__ == "__main__":
    sys.exit(main())
