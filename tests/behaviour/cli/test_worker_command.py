"""`atoll worker`: the environment of the script, its exit code, its restarts, and what it says while it waits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery, free_port, wait_until
from kit import serve
from kit.peers import Connection, Peer
from kit.processes import running, unread_pipe
from kit.wire import WireSite
from torch import nn

import atoll
from atoll.errors import ConfigError, ServerUnreachable, VersionSkew

SHOW = """
import json, os, sys
found = {key: value for key, value in os.environ.items() if key.startswith('ATOLL_') and key != 'ATOLL_LEASES'}
print(json.dumps([found, sys.argv[1:]]))
"""


@pytest.mark.covers("P6", "L23", "X2", "X4")
def test_a_script_gets_its_server_and_arguments(canned, atoll_command, tmp_path) -> None:
    """`atoll worker` gives its script the server's address in the environment, and passes the script's own arguments
    on.
    """
    # The command prints neither the arguments nor the token, since both may be secret. No flag takes a token.
    flags = ("--server", canned.url, "--site", "a", "--dir", "files", "--max-sync-retries", "2")
    script = (sys.executable, "-c", SHOW, "--site", "x", "--help")
    outcome = atoll_command("worker", *flags, *script, ATOLL_TOKEN="secret")
    assert outcome.returncode == 0, outcome.stderr
    found, arguments = json.loads(outcome.stdout)
    assert found == {
        "ATOLL_SERVER": canned.url,
        "ATOLL_SITE": "a",
        "ATOLL_DIR": str(tmp_path / "files"),
        "ATOLL_MAX_SYNC_RETRIES": "2",
        "ATOLL_TOKEN": "secret",
    }
    assert arguments == ["--site", "x", "--help"]
    assert outcome.stderr == f"atoll: {canned.url} answers, run canned; starting {sys.executable}\n"
    assert [request.headers["authorization"] for request in canned.requests] == ["Bearer secret"]
    said = atoll_command("worker", "--help").stdout.replace("ATOLL_TOKEN", "").replace("A token comes", "")
    assert "token" not in said  # no flag takes one


@pytest.mark.covers("L23")
def test_a_wrong_number_of_sync_retries_is_refused(canned, monkeypatch) -> None:
    monkeypatch.setenv("ATOLL_MAX_SYNC_RETRIES", "few")
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="ATOLL_MAX_SYNC_RETRIES is 'few'"):
        atoll.DiLoCo(model, torch.optim.SGD(model.parameters()), server=canned.url, site="a")


@pytest.mark.parametrize(("end", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_atoll_worker_has_the_exit_code_of_its_command(canned, atoll_command, end: str, code: int) -> None:
    assert atoll_command("worker", "--server", canned.url, "--", sys.executable, "-c", end).returncode == code


@pytest.mark.slow
@pytest.mark.covers("X3")
def test_an_unread_standard_error_does_not_block_a_worker(canned, tmp_path) -> None:
    """A full pipe at standard error, which no process reads, blocks neither the restarts of `atoll worker` nor its
    exit.
    """
    script = "open('run', 'a').write('x'); raise SystemExit(7)"
    words = ["worker", "--server", canned.url, "--site", "a", "--restarts", "1", "--", sys.executable, "-c", script]
    with unread_pipe() as output:
        with running(*words, cwd=tmp_path, stderr=output) as process:
            assert process.wait(60) == 7
    assert (tmp_path / "run").read_text() == "xx"


def test_a_worker_waits_until_the_server_starts(nursery, tmp_path) -> None:
    """`atoll worker` waits for a server that is not up yet, and then starts its command."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    script = ("--", sys.executable, "-c", "raise SystemExit(3)")
    process = nursery.start("atoll", "worker", "--server", url, *script, cwd=tmp_path)
    wait_until(process.output, "that it waits")
    with serve(tmp_path, **{"network.port": port, "run.name": "late"}):
        assert process.wait() == 3
    waiting, *_, started = process.output().splitlines()
    assert waiting.startswith(f"atoll: waiting for {url} ")
    assert started == f"atoll: {url} answers, run late; starting {sys.executable}"


def test_an_unreachable_server_uses_up_a_restart(atoll_command) -> None:
    """If the server does not answer, `atoll worker` counts this as one of its restarts."""
    argv = ["worker", "--server", "http://127.0.0.1:9", "--site", "a", "--restarts", "1", "--", "true"]
    outcome = atoll_command(*argv, ATOLL_GIVE_UP_S="0.01")
    assert outcome.returncode == 5
    lines = outcome.stderr.splitlines()
    assert len([line for line in lines if "does not answer" in line and "; restart 1 of 1" in line]) == 1


def test_a_worker_reports_a_server_that_is_not_atoll(canned, atoll_command) -> None:
    """If the address belongs to another web server, `atoll worker` ends with an error that contains the address."""
    canned.answers["/v1/run"] = (200, "<html>hello</html>")
    outcome = atoll_command("worker", "--server", canned.url, "--", "true")
    assert outcome.returncode == 6
    assert canned.url in outcome.stderr


@pytest.mark.covers("F32")
def test_another_protocol_version_says_which_side_to_upgrade(canned, tmp_path) -> None:
    """If the server has a newer protocol version, the error tells the user to upgrade Atoll at the worker."""
    status, body = canned.answers["/v1/run"]
    canned.answers["/v1/run"] = (status, body.replace('"protocol": 2', '"protocol": 3'))
    with pytest.raises(VersionSkew, match="Upgrade Atoll at this worker"):
        atoll.join(canned.url, site="a", folder=tmp_path)


def test_a_worker_restarts_a_failed_command(canned, atoll_command) -> None:
    """With `--restarts 5`, `atoll worker` starts a failed command again until it succeeds."""
    script = (
        "from pathlib import Path; mark = Path('tried'); tried = mark.exists(); mark.touch(); print('run');"
        "raise SystemExit(0 if tried else 9)"
    )
    outcome = atoll_command(
        "worker", "--server", canned.url, "--site", "a", "--restarts", "5", "--", sys.executable, "-c", script
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split() == ["run", "run"]
    assert "restart 1 of 5" in outcome.stderr


@contextmanager
def started(
    url: str, handled: Sequence[int], *flags: str, ignored: Sequence[int] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`atoll worker` with a command that says `told N` for each of these signals, and ends with 4."""
    script = (
        "import os, signal, time\n"
        "def end(number, _):\n    os.write(1, f'told {number}\\n'.encode()); os._exit(4)\n"
        f"for number in {[*map(int, handled)]}:\n    signal.signal(number, end)\n"
        "os.write(1, b'ready\\n')\n"  # print() may not be called again in the middle of itself
        "time.sleep(60)"
    )
    argv = [sys.executable, "-m", "atoll.cli.main", "worker", "--server", url, "--site", "a", *flags]
    wanted = {signal.SIGHUP: signal.SIG_DFL} | dict.fromkeys(ignored, signal.SIG_IGN)  # nohup may have started pytest
    before = {number: signal.signal(number, action) for number, action in wanted.items()}
    try:
        process = subprocess.Popen([*argv, "--", sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    finally:
        for number, action in before.items():
            signal.signal(number, action)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.wait(20)
    process.stdout.close()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_and_ends_restarts(canned, number: signal.Signals) -> None:
    """`atoll worker` forwards a signal to its command, and does not restart the command afterwards."""
    with started(canned.url, [number], "--restarts", "3") as process:
        process.send_signal(number)
        assert process.stdout.read() == f"told {int(number)}\n"
    assert process.returncode == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ignored_signals_stay_ignored(canned, number: signal.Signals) -> None:
    """`atoll worker` does not forward a signal that it was started to ignore, as `nohup` and shell scripts do."""
    with started(canned.url, [number, signal.SIGTERM], ignored=[number]) as process:
        process.send_signal(number)  # it is not forwarded, or this would be the first that the command tells
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == f"told {int(signal.SIGTERM)}\n"
    assert process.returncode == 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children")
def test_killing_atoll_worker_also_ends_its_command(canned) -> None:
    """If `atoll worker` is killed, its command receives SIGTERM."""
    with started(canned.url, [signal.SIGTERM]) as process:
        process.kill()
        assert process.stdout.readline() == f"told {int(signal.SIGTERM)}\n"


# -- a server that does not answer: why, and again when the reason changes


def words(address: str) -> tuple[str, ...]:
    return ("worker", "--server", address, "--", "touch", "ran")


@pytest.mark.covers("X3", "X4")
@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_worker_says_why_it_waits_or_gives_up(host: str, atoll_command, tmp_path: Path) -> None:
    """If the server cannot be reached, `atoll worker` prints the reason and the advice as it waits, and again as it
    gives up.
    """
    outcome = atoll_command(*words(f"http://{host}:{free_port()}"), ATOLL_GIVE_UP_S="0.3")
    assert outcome.returncode == ServerUnreachable.exit_code
    waits, gives_up = outcome.stderr.splitlines()
    assert gives_up.removeprefix("atoll: ") in waits
    assert not (tmp_path / "ran").exists()


@pytest.mark.covers("X3", "X4")
def test_a_waiting_worker_reports_a_new_cause(nursery: Nursery, tmp_path: Path) -> None:
    """While `atoll worker` waits for the server, it prints a new line when the reason for waiting changes."""
    port = free_port()
    process = nursery.start("atoll", *words(f"http://127.0.0.1:{port}"), cwd=tmp_path, env={"ATOLL_GIVE_UP_S": "0"})
    wait_until(lambda: "refused" in process.output(), "the first cause")
    with Peer(Connection.request, port=port):  # closes every connection, as a TLS server does with plain HTTP
        wait_until(lambda: "https://" in process.output(), "the second cause")
    process.send(signal.SIGTERM)
    process.wait()


def test_a_waiting_worker_repeats_the_same_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While `atoll worker` waits for the server, it prints the same reason again after some time."""
    from atoll.cli import text, worker

    for module in (text, worker):
        monkeypatch.setattr(module, "SILENT_S", 0.1)
    monkeypatch.setattr(worker, "SERVER_PAUSE_S", 0.05)
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.5")
    with pytest.raises(ServerUnreachable):
        worker._require_server(f"http://127.0.0.1:{free_port()}", [])
    assert len(capsys.readouterr().err.splitlines()) > 1


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("name", "advice"),
    [("pyhton", "Did you mean 'python'?"), ("qqqqzzzz", "for example: -- python train.py")],
)
def test_a_missing_program_is_reported_before_any_request(atoll_command, tmp_path, name: str, advice: str) -> None:
    """`atoll worker` reports a command that does not exist before it sends a request to the server."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    outcome = atoll_command("worker", "--server", "http://127.0.0.1:9", "--", name, "train.py", PATH=str(programs))
    assert outcome.returncode == 2
    assert f"The command {name!r} was not found. " in outcome.stderr
    assert advice in outcome.stderr
    assert "waiting for" not in outcome.stderr


@pytest.mark.slow
@pytest.mark.covers("X3")
def test_does_not_restart_a_replaced_worker(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll worker` does not restart its command if another process has taken its site."""
    # Two such workers would otherwise take the site from each other in turn.
    script = tmp_path / "train.py"
    script.write_text(
        "import time, atoll\n"
        "with atoll.join() as worker:\n"
        "    open('begun', 'a').write('x')\n"
        "    for fl_round in worker:\n"
        "        pass\n"
    )
    with serve(tmp_path, sites=2) as server:
        words = ("--server", server.url, "--site", "a", "--restarts", "3", "--", sys.executable, str(script))
        process = nursery.start("atoll", "worker", *words, cwd=tmp_path)
        wait_until(lambda: any(each.site == "a" for each in server.status().workers), "that it has joined", 60)
        WireSite(server.url, "a", process="another")
        assert process.wait(60) == 6
    assert "not restarted, because another process takes part as its site" in process.output()
    assert (tmp_path / "begun").read_text() == "x"
