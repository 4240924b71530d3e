"""A user's afternoon: init, server, two workers, export; and a server that is stopped and started again."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.processes import Nursery, wait_until
from kit.client import Client
from safetensors import safe_open

ATOLL = [sys.executable, "-m", "atoll.cli.main"]


class Served:
    """`atoll server` in a folder; its lines can be read."""

    def __init__(self, nursery: Nursery, folder: Path, *flags: str) -> None:
        own = ("run.toml", "--port", "0", "--set", "disk.min_free_bytes=0")
        self.process = nursery.start("atoll", "server", *own, *flags, cwd=folder)
        self._seen = 0
        self.url = re.search(r"listening on (\S+)", self.until("listening on")).group(1)  # type: ignore[union-attr]

    @property
    def lines(self) -> list[str]:
        """What it has said so far."""
        return self.process.output().splitlines(keepends=True)

    def until(self, words: str) -> str:
        """The next line with these words."""

        def found() -> str:
            for number, line in enumerate(self.lines[self._seen :], self._seen + 1):
                if words in line and line.endswith("\n"):
                    self._seen = number
                    return line
            assert self.process.poll() is None, f"{words!r} was never said:\n{self.process.output()}"
            return ""

        return wait_until(found, repr(words), 50.0)

    def end(self) -> int:
        return self.process.wait(60)


@pytest.fixture
def serve(nursery, tmp_path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*flags: str) -> Served:
        started.append(Served(nursery, tmp_path / "mine", *flags))
        return started[-1]

    yield start
    for served in started:
        served.process.kill()


@pytest.mark.slow
@pytest.mark.covers("P6", "L12")
@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        pytest.param("fedavg", [], marks=pytest.mark.long),
        pytest.param("fedavg", ["--set", "algorithm.name=scaffold"], marks=pytest.mark.long),
        ("diloco", []),
    ],
)
def test_what_init_writes_runs_as_it_is(
    atoll_command, nursery, serve, tmp_path, algorithm: str, flags: list[str]
) -> None:
    atoll_command("new", "mine", "--algorithm", algorithm)
    served = serve("--rounds", "3", *flags)
    workers = [
        nursery.start(
            "atoll", "worker", "--server", served.url, "--site", site, "--", sys.executable, "train.py",
            cwd=tmp_path / "mine",
        )
        for site in ("a", "b")
    ]  # fmt: skip
    assert [worker.wait(100) for worker in workers] == [0, 0], [worker.output() for worker in workers]
    assert served.end() == 0, served.lines
    assert any("round 3: version 3 from 2 updates (a, b)" in line for line in served.lines)
    assert any("finished at version 3" in line for line in served.lines)
    exports = tmp_path / "mine" / "atoll-run" / "exports"
    with safe_open(exports / "model.safetensors", framework="pt") as file:
        assert "1.weight" in file.keys()  # noqa: SIM118
    rounds = [json.loads(line) for line in (exports / "metrics.jsonl").read_text().splitlines()]
    assert [(each["version"], "loss" in each["metrics"]) for each in rounds] == [(1, True), (2, True), (3, True)]
    exported = atoll_command("export", "again.safetensors", "--dir", "mine/atoll-run")
    assert exported.stdout.startswith("version 3"), exported.stderr
    assert (tmp_path / "again.safetensors").read_bytes() == (exports / "model.safetensors").read_bytes()


@pytest.mark.covers("X4")
def test_the_server_says_that_it_starts_before_it_loads_what_is_slow(monkeypatch, caplog) -> None:
    from atoll import Settings
    from atoll.cli import server

    caplog.set_level("INFO", "atoll")
    for name in ("log_lines", "raise_on_sigterm"):
        monkeypatch.setattr(server, name, lambda: None)
    monkeypatch.setitem(sys.modules, "atoll.server.serve", None)  # importing it fails: nothing before it needs it
    with pytest.raises(ImportError):
        server.run_until_finished(Settings.build({"run.name": "mine"}))
    assert caplog.messages == ["starting mine; loading PyTorch takes a few seconds"]


@pytest.mark.slow
@pytest.mark.covers("L11")
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long), (signal.SIGINT, 130)]
)
def test_a_stopped_server_says_that_it_can_go_on(atoll_command, serve, number: signal.Signals, code: int) -> None:
    atoll_command("new", "mine")
    served = serve()
    served.process.send(number)
    assert served.end() == code
    assert "to continue the run, start the same command again" in served.lines[-1]
    assert "the model so far: atoll export model.safetensors --dir atoll-run" in served.lines[-1]
    assert not any("Traceback" in line for line in served.lines)
    again = serve()
    again.process.send(signal.SIGTERM)
    assert again.end() == 0


@pytest.mark.slow
def test_a_server_with_a_workflow_speaks_of_no_model(serve, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "flow.py").write_text("def main(controller):\n    controller.sites(at_least=1)\n")
    (tmp_path / "mine" / "run.toml").write_text('workflow.function = "flow.py:main"\n')
    served = serve()
    assert served.until("run ").endswith("): workflow; files in atoll-run\n")
    assert "flow.py:main; start workers with a script that uses atoll.tasks" in served.until("starting the workflow")


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_server_that_is_stopped_behind_the_end_of_its_run_says_so(
    atoll_command, serve, tmp_path, number: signal.Signals
) -> None:
    """A worker that has not asked again is waited for; a user who does not want to wait has a finished run."""
    atoll_command("new", "mine")
    served = serve("--rounds", "1", "--set", "rounds.sites=1", "--set", "rounds.min_sites=1")
    client = Client(served.url, site="a", folder=tmp_path / "w")
    client.next_round()
    client.submit(client.pull())
    served.until("finished at version 1")
    served.process.send(number)
    assert served.end() == 0
    assert "to serve the result to sites that have not downloaded it yet" in served.lines[-1], "".join(served.lines)
    client.close()


@pytest.mark.slow
@pytest.mark.covers("F28", "F29")
def test_a_second_server_is_refused_by_port_and_by_directory(atoll_command, serve) -> None:
    atoll_command("new", "mine")
    served = serve()
    port = served.url.rsplit(":", 1)[1]
    by_port = atoll_command("server", "mine/run.toml", "--port", port, "--dir", "other")
    assert by_port.returncode == 3, by_port.stderr
    by_directory = atoll_command("server", "mine/run.toml", "--port", "0")
    assert by_directory.returncode == 4, by_directory.stderr
    for outcome in (by_port, by_directory):
        assert outcome.stderr.startswith("atoll: ")
        assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.covers("X4")
def test_on_a_terminal_the_server_shows_the_table_of_status_below_its_lines(atoll_command, tmp_path) -> None:
    atoll_command("new", "mine")
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [*ATOLL, "server", "run.toml", "--port", "0", "--set", "disk.min_free_bytes=0"],
        cwd=tmp_path / "mine",
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while b"no worker has joined yet" not in said:
            said += os.read(terminal, 4096)
        process.terminate()
        with contextlib.suppress(OSError):  # how a terminal says that no process writes to it any more
            while more := os.read(terminal, 4096):
                said += more
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    text = said.decode()
    assert text.index("; loading PyTorch") < text.index("listening on") < text.index("no worker has joined yet")
    assert "to continue the run, start the same command again" in text[text.index("no worker has joined yet") :]
    assert "waits for 2 sites to join" in text
