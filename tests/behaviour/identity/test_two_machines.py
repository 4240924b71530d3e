"""The commands of the tutorial with two machines, in two network namespaces that only a virtual cable connects."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.processes import wait_until
from kit.two_machines import SERVER, two_machines

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "two-machines.md"


def at(machine: str, folder: Path, words: Sequence[str]) -> list[str]:
    """A command line that runs a command of the tutorial on a machine, with a home of its own."""
    home = folder.parent / f"home-{folder.name}"
    python = str(Path(sys.executable).parent)
    own = [f"HOME={home}", f"PATH={python}:{os.environ['PATH']}", f"PYTHONPATH={os.environ['PYTHONPATH']}"]
    return ["ip", "netns", "exec", machine, "env", "-i", "-C", str(folder), *own, *words]


def run(machine: str, folder: Path, line: str) -> str:
    done = subprocess.run(at(machine, folder, line.split()), check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_tutorial_trains_over_two_machines(tmp_path: Path) -> None:
    """The tutorial's commands: one invites at the server, one enrols at the site, and the run ends at both."""
    page = PAGE.read_text(encoding="utf-8")
    lines = [
        line.partition(" #")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
    ]
    new, serve, invite, enrol, work = (
        next(line for line in lines if line.startswith(f"atoll {word}"))
        for word in ("new", "server", "invite", "enrol", "worker")
    )
    server, site = tmp_path / "server", tmp_path / "site"
    server.mkdir()
    site.mkdir()
    with two_machines() as (there, here), open(tmp_path / "log", "w") as log:
        run(there, server, new)
        folder = server / new.split()[-1]
        options = " --set rounds.sites=1 --set rounds.min_sites=1 --set rounds.total=2"
        process = subprocess.Popen(
            at(there, folder, (serve.replace("0.0.0.0", SERVER) + options).split()), stdout=log, stderr=log
        )
        try:
            wait_until(lambda: "listening" in (tmp_path / "log").read_text(), 120)
            printed = run(there, folder, invite)
            (invitation,) = re.findall(r"atoll1_[A-Za-z0-9_-]+", printed)
            shutil.copy(folder / "train.py", site)
            run(here, site, enrol.replace("INVITATION", invitation))
            assert "version 2" in run(here, site, work)
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
