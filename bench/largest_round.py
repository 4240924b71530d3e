"""The largest round that this machine takes, up to 5 GB × 4 workers: is memory flat on both sides?

The size is what the free disk takes (the server's files, and a base and an outbox file of each worker), and what the
free memory takes (every worker holds the model that it trains). A tenth of it runs first; then anonymous memory of both
runs is compared, at the server beside what it had imported, at a worker beside its model.

    python bench/largest_round.py                                   # 5 GB × 4, or the largest that fits
    python bench/largest_round.py --gb 20 --workers 8 --dir /data

Ends with 1 where memory grew with the model, or a result was not exact.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from round_run import Bench, measure

DISK_SHARE, MEMORY_SHARE = 0.9, 0.75
"""Of what is free: others write, too, and pages of files need memory to be fast."""
STEP_GB = 0.1
GROWS_MB, MOST_MB = {"server": 60, "worker": 20}, {"server": 200, "worker": 64}
"""Between the two runs, and at all; the difference allowed is that of scratch reached later."""


def largest_gb(most_gb: float, workers: int, disk_bytes: int, memory_bytes: int) -> float:
    """The largest size of the model in steps of 0.1 GB, at most `most_gb`, that so much free disk and memory take."""
    a_gb = Bench(1.0, workers, 1, 1)
    by_disk = DISK_SHARE * disk_bytes / a_gb.disk_bytes
    by_memory = MEMORY_SHARE * memory_bytes / (workers * a_gb.total_bytes)
    steps = int(min(by_disk, by_memory) / STEP_GB)
    return min(most_gb, round(steps * STEP_GB, 1))


def available_bytes() -> int:
    """Memory that could be had without writing anything out."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib) * 1024


def compared(small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    """Anonymous memory of two runs, and whether it is flat."""
    said: dict[str, Any] = {"ok": small["exact"] and large["exact"], "exact": small["exact"] and large["exact"]}
    for side, grows_mb in GROWS_MB.items():
        before, after = (run[f"{side}_peak_anon_mb"] for run in (small, large))
        said[f"{side}_peak_anon_mb"] = [before, after]
        said["ok"] = said["ok"] and after < before + grows_mb and after <= MOST_MB[side]
    return said | {"gb": [run["settings"]["gb"] for run in (small, large)], "rounds_s": large["rounds_s"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=5.0, help="the most, in 10⁹ bytes of the fp32 model")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--dir", type=Path, help="folder for files while it runs; by default the temporary one")
    given = parser.parse_args()
    folder = given.dir or Path(tempfile.gettempdir())
    free, available = shutil.disk_usage(folder).free, available_bytes()
    gb = largest_gb(given.gb, given.workers, free, available)
    print(
        f"{folder} has {free / 1e9:.1f} GB free, memory {available / 1e9:.1f} GB: {gb:g} GB × {given.workers} workers",
        file=sys.stderr,
    )
    if gb <= 0:
        print("That is too little: name another folder with --dir, or take fewer workers.", file=sys.stderr)
        return 1
    how: dict[str, Any] = {"workers": given.workers, "rounds": given.rounds, "tensors": given.tensors}
    small, large = (
        measure(Bench(gb=size_gb, folder=given.dir, **how), lambda text: print(text, file=sys.stderr))
        for size_gb in (gb / 10, gb)
    )
    said = compared(small, large)
    print(json.dumps(said, indent=2))
    return 0 if said["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
