"""Write `recorded/` anew: state directories and conversations of earlier commits.

python tests/behaviour/upgrades/record.py         # all commits, from this repository's history
python tests/behaviour/upgrades/record.py f62228de
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from conversation import Recording, save  # noqa: E402

COMMITS = {"d4b817c4": 11, "cff38b2f": 12, "f62228de": 13, "b5d0dbf8": 14}
"""Commit → version of its journal: before the page of a run, before identity, with identity and policy, and with
workflows that survive a kill.
"""
RECORDED = HERE / "recorded"
_DOCUMENT = "import json; from atoll.protocol.openapi import openapi; print(json.dumps(openapi('')))"


def checked_out(commit: str, folder: Path) -> Path:
    """Put the sources of a commit into a folder, and return their path."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=HERE.parents[2], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "src"


def environment(src: Path) -> dict[str, str]:
    """Return the environment of a process with the sources of a commit."""
    return {**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run_old(src: Path, how: str, folder: Path, *more: str) -> str:
    """Run `old_run.py` by the sources of a commit, and return its output."""
    argv = [sys.executable, str(HERE / "old_run.py"), how, str(folder), *more]
    return subprocess.run(argv, env=environment(src), cwd=folder.parent, stdout=subprocess.PIPE, text=True).stdout


def record(commit: str, folder: Path) -> str:
    """Write the two files of a commit, and return the digest of its undisturbed run."""
    src = checked_out(commit, folder)
    run_old(src, "killed", folder / "killed")
    with tarfile.open(RECORDED / f"state-{COMMITS[commit]}.tar.xz", "w:xz") as tar:
        tar.add(folder / "killed", "")
    document = json.loads(subprocess.run([sys.executable, "-c", _DOCUMENT], env=environment(src), cwd=folder,
                                         capture_output=True, check=True).stdout)  # fmt: skip
    argv = [sys.executable, str(HERE / "old_run.py"), "server", str(folder / "alone")]
    with subprocess.Popen(argv, env=environment(src), cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        with Recording(urlsplit(server.stdout.readline().strip()).port or 0) as recording:
            run_old(src, "site", folder / "alone", recording.url, "a")
            save(RECORDED / f"wire-{COMMITS[commit]}.json.xz", recording.exchanges, document)
    return run_old(src, "whole", folder / "whole").strip()


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    digests = RECORDED / "digests.json"
    found = json.loads(digests.read_text()) if digests.exists() else {}
    for commit in sys.argv[1:] or COMMITS:
        with tempfile.TemporaryDirectory() as folder:
            found[str(COMMITS[commit])] = record(commit, Path(folder))
    digests.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
