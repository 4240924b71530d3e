"""The tool that runs official programs of other frameworks: what it takes for right, and what not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import compat
import pytest
from kit.flower_apps import write_app

from atoll.testing.run import wait_until


def test_every_listed_program_can_be_judged() -> None:
    """Each has texts to be printed that are regular expressions, and a script has the run file of its server."""
    listed = compat.programs()
    assert len({program.folder for program in listed}) == len(listed)
    for program in listed:
        assert [re.compile(each) for each in program.says]
        assert program.framework in ("flower", "nvflare")
        assert bool(program.script) == bool(program.run) == (program.framework == "nvflare")


def test_the_memory_of_a_process_is_found_by_a_word_of_its_command() -> None:
    """The process may be below the one that was started."""
    with subprocess.Popen(["sh", "-c", "cat -; true"], stdin=subprocess.PIPE) as process:
        memory = compat.PeakMemory(process.pid, "-")
        memory.start()
        wait_until(lambda: 0.1 < memory.mb < 100, "cat is found")
        memory.ended.set()
        memory.join()


@pytest.mark.slow
def test_a_program_is_right_if_it_prints_what_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app runs in a copy. A text that it does not print is named, and so is a file that differs afterwards."""
    pytest.importorskip("flwr")
    monkeypatch.setattr(compat, "write_data", lambda folder: (folder / "data").mkdir())
    (tmp_path / "theirs" / "flower").mkdir(parents=True)
    write_app(tmp_path / "theirs" / "flower")
    program = compat.Program("flower/adds", 2, ("next: runs/adds-1", "Strategy execution finished"))
    outcome = compat.run_program(program, tmp_path / "theirs", tmp_path / "right")
    assert not outcome.wrong, outcome.wrong
    assert not (tmp_path / "theirs" / "flower" / "adds" / "runs").exists()
    changed = tmp_path / "right" / "work" / "adds" / "pyproject.toml"
    changed.write_text(changed.read_text() + "\n")
    assert compat.changed_files(tmp_path / "theirs" / "flower" / "adds", changed.parent) == ["pyproject.toml"]
    other = compat.Program("flower/adds", 2, ("next: runs/adds-1", "never printed"))
    wrong = compat.run_program(other, tmp_path / "theirs", tmp_path / "wrong").wrong
    assert wrong.startswith("did not print 'never printed'")
    text = compat.table([outcome, compat.Outcome(other, wrong)], [(program, "torchvision missing")])
    assert "1 of 2 programs" in text
    assert "| flower/adds | 2 | did not print 'never printed' | 0 | 0 |" in text
    assert "not run: torchvision missing" in text
