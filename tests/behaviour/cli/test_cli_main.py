"""The command as a whole: quick to answer, one line for an error, documented exit codes."""

from __future__ import annotations

import signal
import sys

import pytest
from harness.processes import wait_until

COMMANDS = ["server", "worker", "simulate", "status", "export", "evaluate", "audit", "new"]


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_every_command_explains_itself(atoll_command, arguments: list[str]) -> None:
    outcome = atoll_command(*arguments, "--help")
    assert outcome.returncode == 0, outcome.stderr
    assert "Usage" in outcome.stdout
    if not arguments:
        assert [command for command in COMMANDS if command not in outcome.stdout] == []


def test_version(atoll_command) -> None:
    import atoll

    outcome = atoll_command("--version")
    assert outcome.stdout == f"atoll {atoll.__version__}\n"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_130(nursery, tmp_path) -> None:
    waiting = nursery.start("atoll", "status", "--server", "http://127.0.0.1:9", "--watch", cwd=tmp_path)
    wait_until(lambda: "does not answer" in waiting.output(), "that it waits")
    waiting.send(signal.SIGINT)
    assert waiting.wait() == 130
    assert "Traceback" not in waiting.output()


WRONG = [
    ("server --roudns 5", "--rounds"),
    ("server --port 0 --set algorithm.name=diloco", "my_models:build"),
    ("worker --server {url} --restarts 1 -- true", "--site"),
    ("worker --server {url} -- no-such-command", "no-such-command"),
    *((f"status --server {address}", repr(address)) for address in ("h:8512", "ftp://h", "http://", "http://h:port")),
    ("export x.safetensors --server http://127.0.0.1:9 --dir state", "Use only one of them"),
    ("audit .", "There is no run in"),
    ("new mine --algorithm fedproxy", "There is no algorithm 'fedproxy'. Did you mean 'fedprox'?"),
]


@pytest.mark.covers("X3")
@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words.split(" --")[0] + said[:12] for words, said in WRONG])
def test_a_wrong_command_line_is_exit_2_and_says_why(canned, atoll_command, words: str, said: str) -> None:
    outcome = atoll_command(*words.format(url=canned.url).split())
    assert outcome.returncode == 2
    assert said in " ".join(outcome.stderr.split())


@pytest.mark.usefixtures("fresh_processes")
def test_asking_for_status_imports_neither_torch_nor_aiohttp(canned, monkeypatch) -> None:
    import subprocess

    script = (
        "import sys; from atoll.cli.main import app; "
        f"app(['status', '--server', '{canned.url}'], standalone_mode=False); "
        "print([name for name in ('torch', 'aiohttp', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert outcome.stdout.splitlines()[-1] == "[]"
