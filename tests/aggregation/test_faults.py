"""A process killed, or a disk that fails, in the middle of a pass."""

import signal
import subprocess
import sys

import pytest
from pass_world import World

SCRIPT = """
import sys; sys.path.insert(0, {here!r})
from pathlib import Path
from pass_world import World
from atoll.tensors.layout import TILE
World(Path(sys.argv[1])).round(run_elements=TILE, threads=2)
"""


def run_with(folder, failpoints):
    folder.mkdir()
    script = SCRIPT.format(here=str(__file__).rpartition("/")[0])
    environment = {"ATOLL_FAILPOINTS": failpoints, "OMP_NUM_THREADS": "1", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.covers("F10", "F11")
@pytest.mark.parametrize("point", ["pass.chunk=kill@5", pytest.param("pass.write=kill@9", marks=pytest.mark.long)])
def test_killed_in_the_middle_the_same_pass_gives_the_same_bits(tmp_path, point):
    (tmp_path / "undisturbed").mkdir()
    expected = World(tmp_path / "undisturbed").round()
    assert run_with(tmp_path / "killed", point).returncode == -signal.SIGKILL
    again = World(tmp_path / "killed").round()
    assert (again.digest, again.state_digests) == (expected.digest, expected.state_digests)
    for name in ("v1", "s1"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


@pytest.mark.slow
def test_a_full_disk_ends_the_pass_with_that_error(tmp_path):
    result = run_with(tmp_path / "full", "pass.write=enospc@4")
    assert result.returncode == 1
    assert "no space left" in result.stderr
