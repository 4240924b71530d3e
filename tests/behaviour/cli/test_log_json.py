"""`--log-json`: each line of a command is one JSON object, whatever the line says."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until
from kit.processes import command, toml

from atoll.format_text import JsonLines

KEYS = {"time", "level", "logger", "message"}

SCRIPT = """
import atoll, torch
with atoll.join() as worker:
    for fl_round in worker:
        model = fl_round.load_into(torch.nn.Linear(2, 1))
        fl_round.submit(model, metrics={"loss": 1.0})
"""
FAILS = 'import atoll\nworker = atoll.join()\nraise ValueError("line one\\nline two")\n'


def objects(text: str) -> list[dict[str, Any]]:
    """Every line as the object that it is."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_log_json_writes_each_line_as_json(nursery: Nursery, tmp_path: Path) -> None:
    """With `--log-json`, every line of the server, of `atoll worker` and of its script is a JSON object. A traceback is
    a value in it.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "fails.py").write_text(FAILS)
    settings = {"model.source": "torch.nn:Linear", "model.args": {"in_features": 2, "out_features": 1}}
    settings |= {"algorithm.name": "fedavg", "rounds.total": 1, "disk.min_free_bytes": 0}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={toml(value)}")]
    server = nursery.start("atoll", "server", "--log-json", "--port", "0", *sets, cwd=tmp_path)
    url = wait_until(lambda: _url_in(server.output()), "the server's address")

    worker = ("worker", "--log-json", "--server", url, "--site", "a", "--", sys.executable)
    failed = command(nursery, tmp_path, *worker, "fails.py")
    said = objects(failed.stderr)
    assert failed.returncode == 1
    (error,) = [line for line in said if line["message"] == "ValueError: line one\nline two"]
    assert error["level"] == "error"
    assert error["traceback"].splitlines()[0] == "Traceback (most recent call last):"
    assert "fails.py" in error["traceback"]

    worked = command(nursery, tmp_path, *worker, "train.py")
    assert worked.returncode == 0, worked.stderr
    joined = [line for line in objects(worked.stderr) if "joined run" in line["message"]]
    assert joined[0]["logger"] == "atoll"
    assert server.wait() == 0
    lines = objects(server.output())
    assert all(line.keys() >= KEYS for line in lines)
    assert any(line["message"].startswith("round 1: version 1") for line in lines)
    assert {line["level"] for line in lines} <= {"info", "warning"}


@pytest.mark.slow
def test_log_json_writes_errors_as_json(nursery: Nursery, tmp_path: Path) -> None:
    """With `--log-json`, the error of a command is a JSON object, even if the command fails before its log starts."""
    refused = command(nursery, tmp_path, "server", "--log-json", "--set", "rounds.totl=1")
    (line,) = objects(refused.stderr)
    assert refused.returncode == 2
    assert (line["level"], "rounds.total" in line["message"]) == ("error", True)


def test_log_json_escapes_quoted_text() -> None:
    """With `--log-json`, line feeds, quotes and escape sequences in a message cannot end its JSON line, and the secret
    of a lease is hidden.
    """
    text = 'a\n{"level": "x"}\x1b[2J\ud800 "q" a:1:p:' + "0" * 32
    record = logging.LogRecord("atoll", logging.ERROR, "f", 1, "%s", (text,), None)
    line = JsonLines().format(record)
    assert "\n" not in line
    assert line.isascii()
    assert json.loads(line)["message"] == text.replace("0" * 32, "...")


def _url_in(text: str) -> str:
    told = [line["message"] for line in objects(text.rpartition("\n")[0])]
    return next((each.split()[-1] for each in told if each.startswith("listening on")), "")
