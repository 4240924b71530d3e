"""Two lines on which federated runs of hospitals have failed, at full size, between two network namespaces (root).

    python bench/hospital_lines.py                          # both; 20 rounds each, hours
    python bench/hospital_lines.py --rounds 1 --mbit 100

acknowledgements   an update of 758 MB, whose acknowledgement is lost after the bytes have arrived
                   (NVIDIA/FLIP, issue 684)
relay              688 MB through a relay that passes nothing on for 30 s of each minute, and then drops
                   every connection (MediSwarm, issue 466)

No setting is changed. Printed: seconds of the rounds without and with the fault, without the time in which the relay
was silent; the goodput, which is their ratio; bytes sent and received in relation to the least possible; parts that
came again. The exit code is 1 if the goodput is below 90 %, or if a site was taken for dead.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.hospital_lines import run_over_a_line

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "acknowledgements": (758_000_000, {"lose": True}),
    "relay": (688_000_000, {"disturb": (30.0, 30.0)}),
}
LEAST = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[], help="by default, both")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mbit", type=float, default=100.0, help="what the line carries each way, in Mbit/s")
    parser.add_argument("--share", type=float, default=1.0, help="share of the full size of the update")
    given = parser.parse_args()
    failed = False
    for name in given.cases or CASES:
        full, fault = CASES[name]
        nbytes = int(full * given.share) // 4 * 4
        with tempfile.TemporaryDirectory(prefix="atoll-line-") as folder:
            line: dict[str, Any] = {"nbytes": nbytes, "mbit_per_s": given.mbit}
            usual = run_over_a_line(Path(folder) / "usual", rounds=1, **line)
            found = run_over_a_line(Path(folder) / name, rounds=given.rounds, **line, **fault)
        goodput = usual.seconds * given.rounds / (found.seconds - found.silent_s)
        least = nbytes * given.rounds
        print(
            f"{name}: {given.rounds} rounds of {nbytes / 1e6:.0f} MB at {given.mbit:g} Mbit/s; a round without a fault "
            f"{usual.seconds:.1f} s, with it {found.seconds / given.rounds:.1f} s, of which the relay is silent for "
            f"{found.silent_s / given.rounds:.1f} s; goodput {goodput:.1%}; sent {found.sent_bytes / least:.3f} x, "
            f"received {found.received_bytes / least:.3f} x; {found.again} parts again, {found.lost} acknowledgements "
            f"lost, {found.deaths} deaths",
            flush=True,
        )
        failed |= goodput < LEAST or found.deaths > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
