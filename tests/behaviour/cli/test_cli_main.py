"""The command as a whole: quick to answer, one line for an error, documented exit codes."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from atoll.cli import main as cli
from atoll.errors import PortInUse

COMMANDS = ["server", "worker", "simulate", "status", "export", "evaluate", "audit", "new"]


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_every_command_explains_itself(arguments: list[str]) -> None:
    outcome = CliRunner().invoke(cli.app, [*arguments, "--help"])
    assert outcome.exit_code == 0, outcome.output
    assert "Usage" in outcome.output


def test_every_command_is_listed() -> None:
    listing = CliRunner().invoke(cli.app, ["--help"]).output
    assert [command for command in COMMANDS if command not in listing] == []


def test_version(atoll_command) -> None:
    import atoll

    outcome = atoll_command("--version")
    assert outcome.stdout == f"atoll {atoll.__version__}\n"


@pytest.mark.covers("X3")
def test_an_error_is_one_line_with_the_remedy_and_its_exit_code(monkeypatch, capsys) -> None:
    def fail() -> None:
        raise PortInUse("Port 8512 on 127.0.0.1 is in use.", "Choose another\nwith --port.")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == PortInUse.exit_code == 3
    assert capsys.readouterr().err == "atoll: Port 8512 on 127.0.0.1 is in use. Choose another with --port.\n"


def test_ctrl_c_is_130(monkeypatch, capsys) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


WRONG = [
    ("server --roudns 5", "--rounds"),
    ("server --port 0 --set algorithm.name=diloco", "my_models:build"),
    ("worker --server {url} --restarts 1 -- true", "--site"),
    ("worker --server {url} -- no-such-command", "no-such-command"),
    *((f"status --server {address}", repr(address)) for address in ("h:8512", "ftp://h", "http://", "http://h:port")),
    ("export x.safetensors --server http://127.0.0.1:9 --dir state", "Give one: a running server"),
    ("audit .", "holds no run"),
    ("new mine --algorithm fedproxy", "Atoll has no algorithm 'fedproxy'. Did you mean 'fedprox'?"),
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
