"""Sites, and runs within one process, on systems without calls that Linux has; `system_calls` knows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.servers import DEFAULT_OUTER_OPTIMIZER, serve
from torch import nn

from atoll import system_calls

MACOS = ("posix_fallocate", "memfd_create", "MFD_CLOEXEC", "pipe2", "RWF_NOWAIT", "fdatasync", "sched_getaffinity")
"""Names of `os` that macOS has not, of those that Atoll uses in a site, in DiLoCo or in a run within one process."""
LACKS = {"macOS": MACOS, "more": (*MACOS, "preadv", "register_at_fork")}
"""Kind of system → names that it lacks; the second has no `fcntl`, no `resource` and no /proc either."""

BEGIN = """
import builtins, json, os, subprocess, sys
import aiohttp, torch, torch.utils.data

lacks, others = json.loads(sys.argv[1]), len(sys.argv) > 2
for name in lacks:
    delattr(os, name)
if others:
    sys.modules["fcntl"] = sys.modules["resource"] = None
    there = open
    def hidden(path, *given, **named):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return there(path, *given, **named)
    builtins.open = hidden

import atoll

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
"""

SCRIPTS = {
    "fedavg": """
with atoll.join() as worker:
    for each in worker:
        each.load_into(model)
        with torch.no_grad():
            model.bias += 1.0
        each.submit(model, weight=1.0)
print(each.number)
""",
    "diloco": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.DiLoCo(model, optimizer):
    for _ in range(6):
        sum(each.square().sum() for each in model.parameters()).backward()
        optimizer.step()
print(3)
""",
    "one process": """
def train(worker):
    for each in worker:
        each.load_into(model)
        with torch.no_grad():
            model.bias += 1.0
        each.submit(model, weight=1.0)

settings = {"algorithm.name": "fedavg", "rounds.total": 3, "disk.min_free_bytes": 0}
in_memory = {"disk.in_files": False, "disk.min_free_bytes": 1, "disk.state_dir": "in-memory"}
atoll.run(model, train, sites=["a"], settings=settings)
atoll.run(model, train, sites=["a"], settings=settings | in_memory)
print(3)
""",
}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.covers("P6")
@pytest.mark.parametrize("system", LACKS)
@pytest.mark.parametrize("way", SCRIPTS)
def test_runs_without_calls_of_linux(tmp_path: Path, way: str, system: str) -> None:
    """A site of a run with rounds, DiLoCo, and a run within one process need no call that macOS lacks."""
    (tmp_path / "script.py").write_text(BEGIN + SCRIPTS[way])
    settings = DEFAULT_OUTER_OPTIMIZER | ({"algorithm": "diloco", "H": 2} if way == "diloco" else {})
    with serve(tmp_path, nn.Linear(4, 2), sites=1, **settings) as server:
        given = {"ATOLL_SERVER": server.url, "ATOLL_SITE": "a", "ATOLL_DIR": str(tmp_path / "work")}
        argv = [sys.executable, "script.py", json.dumps(LACKS[system]), *(["others"] if system == "more" else [])]
        here = os.environ | (given if way != "one process" else {})
        done = subprocess.run(argv, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.split()[-1:]) == (0, ["3"]), done.stderr
        assert way == "one process" or server.wait(30)


def test_calls_that_take_the_place_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files get their length, memory files keep bytes, and reads fill one buffer after the other, up to the end."""
    for name in LACKS["more"]:
        monkeypatch.delattr(os, name)
    fd = system_calls.memory_file("any")
    try:
        system_calls.allocate(fd, 2, 5)
        assert os.fstat(fd).st_size == 7
        system_calls.allocate(fd, 0, 3)
        assert os.fstat(fd).st_size == 7
        os.pwrite(fd, b"abcdefg", 0)
        first, second = bytearray(2), bytearray(9)
        assert system_calls.read_into(fd, [memoryview(first), memoryview(second)], 1) == 6
        assert (bytes(first), bytes(second[:4])) == (b"bc", b"defg")
        assert system_calls.read_into(fd, [memoryview(first)], 7) == 0
        assert system_calls.read_cached(fd, memoryview(first), 0) == 0
        system_calls.sync_data(fd)
    finally:
        os.close(fd)
    assert system_calls.cores() >= 1
