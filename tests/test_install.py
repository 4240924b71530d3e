"""`make demo` installs with lines that say what, how large and how far, whichever tool does the work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_SILENT_S = 2.0

UV = """#!/bin/sh
echo "$@" >> "$0.calls"
case "$*" in
  venv*) mkdir -p .venv/bin; touch .venv/bin/python;;
  *torch) echo "Resolved 30 packages in 1s"; sleep 3; echo "Installed 30 packages in 2s";;
  *) echo "Resolved 60 packages in 1s";;
esac
"""
PIP = """#!/bin/sh
echo "$@" >> "$0.calls"
case "$*" in
  *torch) echo "Collecting torch"; echo "  Downloading torch-2.13.0-cp311-linux_x86_64.whl (190 MB)"; sleep 3;;
  *) echo "Collecting rich"; echo "ERROR: No matching distribution found for rich" >&2; exit 3;;
esac
"""


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def installed(folder: Path, *path: Path) -> tuple[int, list[str], str, float]:
    """Install the extra `demo` into a folder: exit code, lines, standard error, and the longest time without a line.

    Args:
        path: folders of programs, before those of the system.
    """
    (folder / "tools").mkdir()
    tool = shutil.copy(ROOT / "tools" / "install.py", folder / "tools")
    environment = os.environ | {"PATH": ":".join([*map(str, path), "/usr/bin", "/bin"])}
    with (folder / "errors").open("w+") as errors:
        begin_s, lines, longest_s = time.monotonic(), [], 0.0
        with subprocess.Popen(
            [sys.executable, tool, "demo"], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                longest_s, begin_s = max(longest_s, time.monotonic() - begin_s), time.monotonic()
                lines.append(line.rstrip())
        return child.returncode, lines, (folder / "errors").read_text(), longest_s


@pytest.mark.slow
def test_uv_installs_and_shows_its_progress(tmp_path: Path) -> None:
    """If uv is there, `make` installs with it. The lines say what is installed, its size, and the progress."""
    uv = program(tmp_path / "bin" / "uv", UV)
    code, lines, errors, longest_s = installed(tmp_path, uv.parent)
    assert (code, errors) == (0, "")
    what = "Installing PyTorch, Atoll and its extra 'demo' into .venv, once: about 1.3 GB on disk"
    assert lines[0] == f"{what}, with uv ({uv})."
    assert lines[1] == "  Resolved 30 packages in 1s"
    assert [line.partition(":")[0] for line in lines[2:4]] == ["  installing torch"] * 2
    assert lines[2].endswith(" s, 0 MB in .venv")
    assert lines[-3:-1] == ["  Installed 30 packages in 2s", "  Resolved 60 packages in 1s"]
    assert lines[-1].startswith("Installed 0 packages, 0 MB in .venv, in ")
    assert longest_s < MOST_SILENT_S
    calls = (tmp_path / "bin" / "uv.calls").read_text().splitlines()
    assert [call.rpartition("constraints.txt ")[2] for call in calls[1:]] == ["torch", "-e .[demo]"]


@pytest.mark.slow
def test_pip_passes_on_its_failure_with_all_lines(tmp_path: Path) -> None:
    """Without uv, pip does it. When it fails, its exit code is that of `make`, and all that it has said is shown."""
    program(tmp_path / ".venv" / "bin" / "python", PIP)
    code, lines, errors, longest_s = installed(tmp_path)
    assert code == 3
    assert lines[0].endswith("with pip (uv would be faster; it is not on this machine).")
    assert lines[1] == "  torch 2.13.0, 190 MB"
    assert [line.partition(":")[0] for line in lines[2:4]] == ["  installing torch"] * 2
    assert errors.splitlines()[:2] == ["Collecting rich", "ERROR: No matching distribution found for rich"]
    assert longest_s < MOST_SILENT_S


def test_an_incomplete_environment_is_removed(tmp_path: Path) -> None:
    """If `make` cannot complete an environment, it removes it, so that the next `make` begins anew."""
    uv = program(tmp_path / "bin" / "uv", "#!/bin/sh\nmkdir -p .venv/bin; echo no space left; exit 7\n")
    code, lines, errors, _ = installed(tmp_path, uv.parent)
    assert code == 7
    assert len(lines) == 1
    assert errors.splitlines()[0] == "no space left"
    assert not (tmp_path / ".venv").exists()
