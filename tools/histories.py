"""Play random histories: a real server and real workers over a virtual clock, network and disk, with all faults.

    make histories MINUTES=10                    for as long
    python tools/histories.py --count 1000       so many
    python tools/histories.py --seed 7           one, with its trace

Each history follows from its seed. If an invariant does not hold, the seed is printed, with the command that plays it
again, to the same trace. `tests/harness/histories` has the code, docs/decisions/0059 what is checked.
"""

from __future__ import annotations

import argparse
import gc
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "spec")]

import torch  # noqa: E402
from harness.histories.scenario import Scenario  # noqa: E402
from harness.histories.story import Told, play  # noqa: E402

LOG_LEVEL = logging.CRITICAL + 1
SAY_EVERY_S = 30.0
COLLECT_EVERY = 100
"""Histories between two collections of garbage, which would otherwise take a tenth of the time."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="play this one alone, and print its trace")
    parser.add_argument("--from", dest="first", type=int, help="the first seed (drawn at random)")
    parser.add_argument("--count", type=int, help="so many histories, or fewer if the time is over")
    parser.add_argument("--minutes", type=float, help="for so long (10, if no count is given)")
    parser.add_argument("--go-on", action="store_true", help="go on after a violation, and print all of them")
    arguments = parser.parse_args(argv)
    if arguments.seed is not None:
        return _show(arguments.seed)
    first = secrets.randbelow(10**9) if arguments.first is None else arguments.first
    minutes = arguments.minutes or (10.0 if arguments.count is None else float("inf"))
    return _play_many(first, arguments.count, 60.0 * minutes, go_on=arguments.go_on)


def _show(seed: int) -> int:
    """Play one history, and print its trace, and what is wrong."""
    try:
        told = play(seed)
    except BaseException as error:
        told = getattr(error, "told", Told(Scenario.of(seed)))
        print("\n".join(told.trace))
        print(f"\n{told.scenario}\n{_said(error)}")
        return 1
    print("\n".join(told.trace))
    print(f"\n{told.scenario}\nAll invariants hold.")
    return 0


def _play_many(first: int, count: int | None, most_s: float, *, go_on: bool) -> int:
    print(f"Histories from seed {first} on.", flush=True)
    begin_s = said_s = time.perf_counter()
    begin_cpu_s = time.process_time()
    seen, played, failed = Counter[str](), 0, list[int]()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        while (count is None or played < count) and time.perf_counter() - begin_s < most_s:
            seed = first + played
            played += 1
            try:
                seen += play(seed).counts
            except Exception as error:
                failed.append(seed)
                print(f"seed {seed}: {_said(error)}\n  python tools/histories.py --seed {seed}", flush=True)
                if not go_on:
                    break
            if played % COLLECT_EVERY == 0:
                gc.collect()
            if time.perf_counter() - said_s > SAY_EVERY_S:
                said_s = time.perf_counter()
                print(f"{played} histories, {played / (said_s - begin_s):.1f} a second", flush=True)
    finally:
        gc.enable()
        gc.unfreeze()
    seconds = time.perf_counter() - begin_s
    print("\n| what | times |\n|---|---|")
    for what, times in sorted(seen.items()):
        print(f"| {what} | {times} |")
    wrong = f"{len(failed)} broke an invariant: {failed}" if failed else "all invariants held"
    cpu_s = time.process_time() - begin_cpu_s
    print(
        f"\n{played} histories in {seconds:.0f} s, {played / seconds:.1f} a second "
        f"({played / cpu_s:.1f} for each second of CPU): {wrong}."
    )
    return 1 if failed else 0


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    logging.getLogger("atoll").setLevel(LOG_LEVEL)
    torch.set_num_threads(1)
    sys.exit(main())
