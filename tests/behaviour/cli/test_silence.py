"""No command is silent while something takes long: it says what it waits for, from its first seconds on."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from harness.processes import Nursery, Process, wait_until
from kit.peers import Connection, Peer, Request
from kit.processes import write_run_file

from atoll.cli import main, text
from atoll.cli import worker as worker_command
from atoll.cli.text import FIRST_S

TRAIN = """
from pathlib import Path
from kit_model import build_model

def train(worker):
    for fl_round in worker:
        while Path(__file__).with_name("hold").exists():
            pass
        model = build_model()
        fl_round.load_into(model)
        fl_round.submit(model)
"""

ASKING = {
    "status": "status --server {url}",
    "logs": "logs --server {url}",
    "pause": "pause --server {url}",
    "rollback": "rollback 1 --server {url}",
    "export": "export out.safetensors --server {url}",
    "evaluate": "evaluate --server {url}",
    "doctor": "doctor --port 0 --server {url}",
    "worker": "worker --server {url} -- true",
}


@pytest.mark.parametrize("words", ASKING.values(), ids=ASKING)
def test_a_command_says_that_a_server_is_slow(nursery: Nursery, tmp_path: Path, words: str) -> None:
    """A server that does not answer is named on standard error, before the command gives up or has an answer."""
    said = Event()

    def answer(connection: Connection, request: Request) -> None:
        if "content-length" in request.headers:
            connection.body(request)
        said.wait(60)
        connection.answer(404, b"nothing here")

    with Peer.answering(answer) as peer:
        asking = nursery.start("atoll", *words.format(url=peer.url).split(), cwd=tmp_path)
        wait_until(lambda: "still " in asking.output() or "waiting for " in asking.output(), "a line", 60)
        said.set()
        asking.wait(60)


@pytest.mark.parametrize("words", ["run run.toml", "server run.toml", "worker -- true", "evaluate run.toml"])
def test_a_command_that_loads_slowly_says_so_first(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine where its imports take longer than 0.2 s; with `-q`, it says nothing."""
    said = Event()

    def slow_import(name: str) -> Any:
        assert name == f"atoll.cli.{main.MODULES.get(own, own)}"
        assert said.wait(None if "-q" not in sys.argv else 3 * FIRST_S) is ("-q" not in sys.argv)
        raise ImportError(name)

    own = words.split()[0]
    monkeypatch.setattr(importlib, "import_module", slow_import)
    monkeypatch.setattr(text, "print_line", lambda line: (print(line), said.set()))
    for flags in ([], ["-q"]):
        said.clear()
        monkeypatch.setattr(sys, "argv", ["atoll", own, *flags, *words.split()[1:]])
        with pytest.raises(ImportError):
            main.loaded(own)
    assert capsys.readouterr().out == f"atoll: loading atoll {own} (0.2 s)\n"


@pytest.mark.slow
def test_a_worker_says_that_its_script_has_not_joined(nursery: Nursery, tmp_path: Path, canned: Any) -> None:
    """While a script neither joins nor ends, `atoll worker` says that it has not joined."""
    words = ["worker", "--server", canned.url, "--", sys.executable, "-c", "import signal; signal.pause()"]
    worker = nursery.start("atoll", *words, cwd=tmp_path)
    wait_until(lambda: count(worker, "has not joined yet; it takes seconds to load PyTorch (") >= 2, "two lines", 60)
    worker.kill()


def test_a_joined_script_is_not_asked_about_again(tmp_path: Path) -> None:
    """The line names the script, not its interpreter or its arguments; once the script has joined, no file is read."""
    words = [sys.executable, "train.py", "--key", "secret"]
    leases = tmp_path / "leases"
    awaited = worker_command._not_joined(worker_command.name_of(words), leases)
    assert awaited() == "atoll: train.py has not joined yet; it takes seconds to load PyTorch"
    leases.touch()
    assert awaited() == ""
    leases.unlink()
    assert awaited() == ""


@pytest.mark.parametrize(
    ("words", "name"),
    [(["/usr/bin/python3.11", "train.py"], "train.py"), (["./train"], "./train"), (["python", "-c", "x"], "python")],
)
def test_a_script_is_named_without_its_interpreter(words: list[str], name: str) -> None:
    assert worker_command.name_of(words) == name


def count(process: Process, text: str) -> int:
    return process.output().count(text)


@pytest.mark.slow
def test_a_server_says_again_what_it_waits_for(nursery: Nursery, tmp_path: Path) -> None:
    """Off a terminal, as a line that comes again, with the seconds for which nothing has happened."""
    write_run_file(tmp_path)
    server = nursery.start("atoll", "server", "run.toml", cwd=tmp_path)
    wait_until(lambda: count(server, "round 1: waits for 2 sites to join; 0 joined so far (") >= 3, "three lines", 60)
    server.kill()


@pytest.mark.slow
def test_a_simulation_says_what_it_waits_for(nursery: Nursery, tmp_path: Path) -> None:
    """Before the first round has ended, and in a later one that takes long."""
    (tmp_path / "hold").touch()
    write_run_file(tmp_path, **{"run.script": "train.py:train"})
    (tmp_path / "train.py").write_text(TRAIN)
    simulation = nursery.start("atoll", "simulate", "run.toml", "--processes", "1", cwd=tmp_path)
    first = "still starting the processes, and training the first round ("
    wait_until(lambda: count(simulation, first) >= 2, "two lines", 60)
    (tmp_path / "hold").unlink()
    assert simulation.wait(60) == 0, simulation.output()


# -- fewer lines, and more


def test_quiet_and_verbose_exclude_each_other(atoll_command: Any) -> None:
    for words in (("server",), ("simulate", "run.toml"), ("worker", "--", "true")):
        outcome = atoll_command(words[0], "-q", "-v", *words[1:])
        assert outcome.returncode == 2
        assert "Both --quiet and --verbose are given." in outcome.stderr


def test_quiet_and_verbose_reach_the_script(atoll_command: Any, canned: Any) -> None:
    """`-q` and `-v` of `atoll worker` set the log level of its script, too. With `-q`, the command itself prints
    nothing.
    """
    levels = "import atoll.format_text as f; print(f.log_level())"
    for flags, level, lines in ((("-q",), 30, 0), ((), 20, 1), (("-v",), 10, 1)):
        outcome = atoll_command("worker", *flags, "--server", canned.url, "--", sys.executable, "-c", levels)
        assert outcome.returncode == 0, outcome.stderr
        assert len(outcome.stderr.splitlines()) == lines
        assert json.loads(outcome.stdout or "20") == level
