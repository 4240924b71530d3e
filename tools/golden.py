"""Write the digests of the golden matrix for this build of torch anew, and print what changes: old → new.

python tools/golden.py                    # all runs
python tools/golden.py --only scaffold    # those with this in their name
python tools/golden.py --check            # print only; exit code 1 if anything differs
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "behaviour" / "golden"))

import torch
from golden_axes import name_of, runs
from golden_runs import DIGESTS, build_key, digests_of, in_words, known
from harness.processes import Nursery


def main() -> int:
    """Run the matrix; write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print what would change, and write nothing")
    parser.add_argument("--only", default="", help="run only those with this in their name, and keep the others")
    given = parser.parse_args()
    logging.getLogger("atoll").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    digests, key = known(), build_key()
    old = digests.get(key, {})
    rows = [row for row in runs() if given.only in name_of(row)]
    names = {name_of(row) for row in runs()}
    new = {name: digest for name, digest in old.items() if name in names and given.only not in name}
    with closing(Nursery()) as nursery, tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            name = name_of(row)
            new[name] = in_words(digests_of(row, Path(folder) / str(number), lambda: nursery))
            if old.get(name) != new[name]:
                print(f"{name}\n  {old.get(name, 'none')}\n→ {new[name]}", flush=True)
    for name in old.keys() - new.keys():
        print(f"{name}\n  {old[name]}\n→ no run any more")
    changed = old != new
    print(f"{key}: {len(rows)} runs, {'changed' if changed else 'as written down'}")
    if given.check:
        return int(changed)
    DIGESTS.write_text(
        json.dumps(
            digests | {key: {name_of(row): new[name_of(row)] for row in runs() if name_of(row) in new}}, indent=1
        )
        + "\n",
        encoding="utf-8",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
