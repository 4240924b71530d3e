"""`atoll server` and `atoll config show`: flags and settings, what is said, stopped and started again."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from harness.processes import Nursery, Process, wait_until
from kit.processes import running, unread_pipe, url_of, wait_for_words
from kit.wire import WireSite

import atoll
from atoll.testing.run import status

Start = Callable[..., Process]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Starts `atoll server` in the folder `mine` on any free port, by default of its run file; kills it at the end."""
    with contextlib.ExitStack() as stack:

        def started(*flags: str, run_file: str = "run.toml", folder: Path = tmp_path / "mine") -> Process:
            words = ("--port", "0", "--set", "disk.min_free_bytes=0")
            server = nursery.start("atoll", "server", run_file, *flags, *words, cwd=folder)
            stack.callback(server.kill)
            return server

        yield started


@pytest.fixture
def mine(atoll_command: Callable[..., Any]) -> None:
    """What `atoll new mine` writes."""
    atoll_command("new", "mine")


# -- stopped and started again


@pytest.mark.slow
@pytest.mark.covers("L11", "F28", "F29")
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long), (signal.SIGINT, 130)]
)
def test_a_second_server_on_one_directory_is_refused(
    mine, atoll_command, start: Start, number: signal.Signals, code: int
) -> None:
    """A second server on the same port or the same directory is refused."""
    # When a signal stops the server, it says how to continue the run. The same command then starts it again.
    server = start()
    by_port = ("--port", url_of(server).rsplit(":", 1)[1], "--dir", "other")
    for flags, refused in ((by_port, 3), (("--port", "0"), 4)):
        outcome = atoll_command("server", "mine/run.toml", *flags)
        assert outcome.returncode == refused, outcome.stderr
        assert outcome.stderr.startswith("atoll: ")
        assert len(outcome.stderr.splitlines()) == 1
    server.send(number)
    assert server.wait(60) == code
    last = server.output().splitlines()[-1]
    assert "to continue the run, start the same command again" in last
    assert "the model so far: atoll export model.safetensors --dir atoll-run" in last
    assert "Traceback" not in server.output()
    again = start()
    url_of(again)
    again.send(signal.SIGTERM)
    assert again.wait(60) == 0


def test_a_fresh_server_keeps_the_earlier_run_beside_the_new_one(
    mine, atoll_command, start: Start, tmp_path: Path
) -> None:
    """`atoll server --fresh` says where it puts the earlier run, unless a server uses that. Else it only starts."""
    first = start("--fresh")
    url_of(first)
    assert "is kept" not in first.output()
    refused = atoll_command("server", "mine/run.toml", "--port", "0", "--fresh")
    assert (refused.returncode, "is in use" in refused.stderr) == (4, True)
    first.send(signal.SIGTERM)
    assert first.wait(60) == 0
    before = (tmp_path / "mine" / "atoll-run" / "admin.token").read_text()
    again = start("--fresh")
    url_of(again)
    assert "the earlier run is kept in atoll-run-1" in again.output()
    assert "continuing the run" not in again.output()
    assert (tmp_path / "mine" / "atoll-run-1" / "admin.token").read_text() == before
    assert (tmp_path / "mine" / "atoll-run" / "admin.token").read_text() != before


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_stopping_a_server_after_its_run_exits_with_0(mine, start: Start, tmp_path, number: signal.Signals) -> None:
    """A server that is stopped after the end of its run ends with exit code 0 and does not offer to continue the run.

    The server was still waiting for a worker to download the result.
    """
    server = start("--rounds", "1", "--set", "rounds.sites=1", "--set", "rounds.min_sites=1")
    with atoll.join(url_of(server), site="a", folder=tmp_path / "w") as worker:
        fl_round = next(iter(worker))
        fl_round.submit(fl_round.state_dict(), weight=1)
        wait_for_words(server, "finished at version 1.*\n")
        server.send(number)
        assert server.wait(60) == 0
        last = server.output().splitlines()[-1]
        assert "to serve the result to sites that have not downloaded it yet" in last, server.output()


# -- what it says


@pytest.mark.covers("X4")
def test_the_server_logs_its_start_before_slow_imports(monkeypatch, caplog) -> None:
    """The server logs that it starts before it imports PyTorch and other slow modules."""
    from atoll import Settings
    from atoll.cli import server

    caplog.set_level("INFO", "atoll")
    monkeypatch.setattr(server, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(server, "log_lines_in_background", contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "atoll.server.serve", None)  # importing it fails: nothing before it needs it
    with pytest.raises(ImportError):
        server.run_until_finished(Settings.build({"run.name": "mine"}))
    assert caplog.messages == ["starting the run mine; loading PyTorch takes a few seconds"]


@pytest.mark.slow
def test_a_server_without_a_model_logs_only_workflows(start: Start, tmp_path) -> None:
    """A server that has only a workflow logs `only workflows` in place of a model, and how to start workers."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "flow.py").write_text("def main(controller):\n    controller.sites(at_least=1)\n")
    (tmp_path / "mine" / "run.toml").write_text('workflow.function = "flow.py:main"\n')
    server = start()
    wait_for_words(server, r"run .*\): only workflows; files in atoll-run\n")
    wait_for_words(server, r"starting the workflow .*flow\.py:main; start workers with a script that uses atoll\.tasks")


@contextlib.contextmanager
def on_a_terminal(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, bytearray]]:
    """`atoll server` on a terminal: its process, our end of the terminal, and what it says until it waits for sites."""
    terminal, theirs = pty.openpty()
    words = ["server", "run.toml", "--port", "0", "--set", "disk.min_free_bytes=0"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    ends = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs}
    with running(*words, cwd=folder, env=env, **ends) as process:
        os.close(theirs)
        said = bytearray()
        while b"no worker has joined yet" not in said:
            said += os.read(terminal, 4096)
        yield process, terminal, said
    os.close(terminal)


@pytest.mark.slow
@pytest.mark.covers("X4")
def test_ctrl_s_does_not_block_the_server(mine, tmp_path) -> None:
    """A terminal that Ctrl-S has paused blocks neither the server's work nor its shutdown."""
    with on_a_terminal(tmp_path / "mine") as (process, terminal, said):
        os.write(terminal, b"\x13")  # Ctrl-S
        url = re.search(rb"listening on (\S+)", said).group(1).decode()
        WireSite(url, "a")  # the server logs that it has joined
        assert [worker.site for worker in status(url).workers] == ["a"]
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.covers("X4")
def test_a_terminal_shows_the_status_table(mine, tmp_path) -> None:
    """On a terminal, the server shows its status table below the lines of its log."""
    with on_a_terminal(tmp_path / "mine") as (process, terminal, said):
        process.terminate()
        with contextlib.suppress(OSError):  # how a terminal says that no process writes to it any more
            while more := os.read(terminal, 4096):
                said += more
        assert process.wait(60) == 0
    text = said.decode()
    assert text.index("; loading PyTorch") < text.index("listening on") < text.index("no worker has joined yet")
    assert "to continue the run, start the same command again" in text[text.index("no worker has joined yet") :]
    assert "waits for 2 sites to join" in text


# -- an output that is not read


@pytest.mark.slow
@pytest.mark.covers("X4")
def test_an_unread_standard_output_blocks_no_server(nursery, tmp_path) -> None:
    """A full pipe at standard output, which no process reads, blocks neither the server's work nor its shutdown."""
    # A workflow logs more lines than the pipe and the server's queue can hold. The server still answers a request for
    # its status.
    (tmp_path / "flow.py").write_text(
        "import logging\n"
        "def main(controller):\n"
        "    for number in range(20_000):\n"
        "        logging.getLogger('atoll.flow').warning('line %05d', number)\n"
        "    open('said', 'w').close()\n"
        "    controller.sites(at_least=1)\n"
    )
    unread, output = os.pipe()
    words = ["server", "--port", "0", "--set", "disk.min_free_bytes=0", "--set", "workflow.function=flow.py:main"]
    with running(*words, cwd=tmp_path, stdout=output, stderr=subprocess.PIPE) as process:
        os.close(output)
        said = b""
        while b"listening on" not in said:
            said += os.read(unread, 1)
        while b"\n" not in said.partition(b"listening on")[2]:
            said += os.read(unread, 1)
        url = said.partition(b"listening on ")[2].decode().strip()
        wait_until(lambda: (tmp_path / "said").exists(), "all lines were logged", 50.0)
        assert not status(url).finished
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
    os.close(unread)


@pytest.mark.slow
@pytest.mark.covers("X3")
def test_an_unread_standard_error_blocks_no_exit(tmp_path) -> None:
    """A full pipe at standard error, which no process reads, does not keep a server with a wrong setting from
    exiting.
    """
    with unread_pipe() as output:
        words = ["server", "--set", "rounds.sites=none"]
        with running(*words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=output) as process:
            assert process.wait(60) == 2


def log_on(output: TextIO, monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Atoll's logger, which has no handlers yet; `output` is standard output."""
    monkeypatch.setattr(sys, "stdout", output)
    log = logging.getLogger("atoll")
    for name, value in (("handlers", []), ("level", log.level), ("propagate", log.propagate)):
        monkeypatch.setattr(log, name, value)
    return log


def test_a_broken_standard_output_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If standard output has no reader left, the server reports the lost log lines once and without a traceback."""
    from atoll.cli import text

    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "w")
    log = log_on(output, monkeypatch)
    with text.log_lines_in_background():
        for number in range(3):
            log.info("line %d", number)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), writer)  # the lines that are left can be written when the file is closed
    output.close()
    lost = "atoll: log lines are lost, because standard output cannot be written: [Errno 32] Broken pipe."
    assert capfd.readouterr().err.splitlines() == [lost]


def test_dropped_log_lines_are_counted(monkeypatch) -> None:
    """If standard output is not read in time, the log says how many lines were dropped. The other lines keep their
    order.
    """
    from atoll.cli import text

    class Output(io.StringIO):
        """It takes nothing until `read` is set."""

        waits, read = threading.Event(), threading.Event()

        def write(self, told: str) -> int:
            self.waits.set()
            self.read.wait(30)
            return super().write(told)

    monkeypatch.setattr(text, "MOST_LINES", 2)
    log = log_on(output := Output(), monkeypatch)
    with text.log_lines_in_background():
        log.info("line 0")
        assert output.waits.wait(30)
        for number in range(1, 6):
            log.info("line %d", number)
        output.read.set()
        wait_until(lambda: "line 2" in output.getvalue(), "the lines before the gap")
        log.info("line 6")
    told = [line.partition(" ")[2] for line in output.getvalue().splitlines()]
    gap = "3 log lines dropped here, because standard output was not read"
    assert told == ["line 0", "line 1", "line 2", gap, "line 6"]


# -- flags and settings


@pytest.mark.covers("L12", "L23")
def test_config_show_prints_the_values_that_were_set(atoll_command) -> None:
    """`atoll config show` prints the values given with `--set` in the TOML type of each setting."""
    given = {
        "algorithm.name": ("diloco", "diloco"),
        "algorithm.outer_optimizer": (
            '{name = "adam", lr = 0.5, betas = [0.9, 0.95]}',
            {"name": "adam", "lr": 0.5, "betas": [0.9, 0.95]},
        ),
        "network.insecure": ("yes", True),
        "model.buffers": ('{"*mean" = "mean", "*var" = "keep"}', {"*mean": "mean", "*var": "keep"}),
        "async.enabled": ("true", True),
        "async.max_staleness": ("3", 3),
        "aggregation.upload_codec": ('{name = "none"}', {"name": "none"}),
        "diloco.num_fragments": ("2", 2),
        "diloco.sync_every": ("30", 30),
        "diloco.fragment_update_alpha": ("0.5", 0.5),
        "disk.export_dir": ("out", "out"),
    }
    flags = [word for key, (text, _) in given.items() for word in ("--set", f"{key}={text}")]
    outcome = atoll_command("config", "show", *flags)
    assert outcome.returncode == 0, outcome.stderr
    found = tomllib.loads(outcome.stdout)
    for key, (_, value) in given.items():
        group, name = key.split(".")
        assert found[group][name] == value, key


@pytest.mark.covers("L12")
@pytest.mark.parametrize(
    ("algorithm", "chosen"),
    [
        (
            "diloco",
            {
                "algorithm.outer_optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9, "nesterov": True},
                "rounds.min_sites": 1,
                "aggregation.upload_codec": {"name": "bf16"},
            },
        ),
        ("fedprox", {"algorithm.mu": 0.01, "rounds.min_sites": 3, "aggregation.upload_codec": {"name": "none"}}),
        ("fednova", {"aggregation.reducer": {"name": "normalised_mean"}, "rounds.min_sites": 3}),
    ],
)
def test_config_show_marks_the_algorithms_defaults(
    atoll_command, tmp_path: Path, algorithm: str, chosen: dict[str, Any]
) -> None:
    """`atoll config show` marks each default that the algorithm chose. The output can be used as a run file."""
    flags = ("--set", "rounds.sites=3", "--set", "algorithm.outer_optimizer={lr = 0.5}")
    shown = atoll_command("config", "show", "--set", f"algorithm.name={algorithm}", *flags).stdout
    found = tomllib.loads(shown)
    assert {key: found[key.split(".")[0]][key.split(".")[1]] for key in chosen} == chosen
    assert re.search(rf"^min_sites = .*  # default of {algorithm}$", shown, re.MULTILINE)
    assert re.search(r"^outer_optimizer = .*  # command line$", shown, re.MULTILINE)
    assert "# best_metric is not set\n" in shown
    (tmp_path / "shown.toml").write_text(shown)
    assert tomllib.loads(atoll_command("config", "show", "shown.toml").stdout) == found


@pytest.mark.covers("L12")
def test_flags_override_the_run_file(start: Start, tmp_path: Path) -> None:
    """Flags of `atoll server` take precedence over the settings in the run file.

    The server can import modules that lie beside the run file or in the current folder.
    """
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "run.toml").write_text(
        'model.source = "own:build"\nalgorithm.name = "fedavg"\nrounds.total = 7\ndisk.state_dir = "state"\n'
    )
    (tmp_path / "there" / "own.py").write_text(
        "import beside\nfrom torch import nn\n\ndef build():\n    return nn.Linear(2, 2)\n"
    )
    (tmp_path / "beside.py").write_text("")
    where = {"run_file": "there/run.toml", "folder": tmp_path}
    assert status(url_of(start(**where))).rounds == 7
    assert (tmp_path / "there" / "state").is_dir()
    flags = ("--rounds", "9", "--dir", "here", "--host", "0.0.0.0", "--set", "network.insecure=true")
    said = status(url_of(start(*flags, **where)))
    assert said.rounds == 9
    assert (tmp_path / "here").is_dir()
    assert "127.0.0.1" not in said.address


@pytest.mark.parametrize("present", [True, False])
def test_the_server_suggests_a_run_file_in_its_folder(atoll_command, tmp_path, present: bool) -> None:
    """`atoll server` without a run file suggests `run.toml` if this file is in the current folder."""
    if present:
        (tmp_path / "run.toml").write_text('model.source = "model:build"\n')
    outcome = atoll_command("server", "--port", "0")
    assert outcome.returncode == 2
    assert ("Did you mean: atoll server run.toml?" in outcome.stderr) is present


def test_config_show_says_where_values_come_from(atoll_command, tmp_path) -> None:
    """`atoll config show` marks a value as a default if nothing set the value. It refuses an unknown algorithm name."""
    (tmp_path / "run.toml").write_text('[algorithm]\nname = "fedavgg"\n')
    outcome = atoll_command("config", "show", "run.toml")
    assert outcome.returncode == 2
    assert "algorithm.name = 'fedavgg' is not one of" in outcome.stderr
    assert "Did you mean 'fedavg'?" in outcome.stderr
    outcome = atoll_command("config", "show", "run.toml", "--set", "algorithm.name=fedavg")
    assert re.search(r"^state_dir = .*  # default$", outcome.stdout, re.MULTILINE)


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("algorithm.muu=0.5", "algorithm.muu is set, but fedavg has no such setting"),
        ('aggregation.upload_codec={name = "int8", bits = 3}', "'bits'. 'int8' has no options."),
        ('aggregation.download_codec={name = "topk", size = 3}', "'size'. The options of 'topk' are: density."),
        ('aggregation.reducer={name = "trimmed_mean", part = 3}', "'part'. The options of 'trimmed_mean' are: trim."),
        ('algorithm.outer_optimizer={name = "sgd", speed = 3}', "outer optimizer 'sgd' has no option 'speed'"),
    ],
)
def test_config_show_refuses_what_the_server_refuses(atoll_command, tmp_path, given: str, said: str) -> None:
    """`atoll config show` and `atoll server` refuse the same wrong options with the same error."""
    (tmp_path / "run.toml").write_text(
        'algorithm.name = "fedavg"\nrounds.total = 1\nnetwork.port = 0\n'
        '[model]\nsource = "torch.nn:Linear"\nargs = {in_features = 1, out_features = 1}\n'
    )
    for command in (["config", "show"], ["server"]):
        outcome = atoll_command(*command, "run.toml", "--set", given)
        assert outcome.returncode == 2
        assert said in outcome.stderr
