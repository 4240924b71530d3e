"""`atoll audit`: the log of a run, read beside its server, and what it says of a log that was changed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import torch
from kit.client import Client

import atoll


def one_round(folder: Path) -> atoll.Server:
    """A server whose only round is done, still running."""
    server = atoll.Server(
        {"w": torch.zeros(2)},
        settings={
            "algorithm.name": "fedavg",
            "rounds.total": 1,
            "network.port": 0,
            "disk.min_free_bytes": 0,
            "disk.state_dir": folder / "state",
        },
    ).start()
    with Client(server.url, site="clinic-a", folder=folder / "w") as client:
        client.next_round()
        client.pull()
        client.submit({"w": torch.ones(2)}, weight=3)
        client.next_round()
    assert server.wait(60)
    return server


def test_it_tells_what_was_decided_beside_a_running_server_and_behind_a_stopped_one(atoll_command, tmp_path) -> None:
    server = one_round(tmp_path)
    running = json.loads(atoll_command("audit", "state", "--json").stdout)
    assert [entry["what"] for entry in running["last"]] == ["committed", "accepted", "committed", "finished"]
    assert running["last"][1]["site"] == "clinic-a"
    server.stop()
    stopped = atoll_command("audit", "state", "--last", "1")
    assert stopped.returncode == 0
    lines = stopped.stdout.splitlines()
    assert "finished" in lines[0]
    assert lines[1:] == [f"4 entries checked, none changed or removed; the last hash is {running['last_hash']}"]


def test_a_changed_entry_is_found_and_named(atoll_command, tmp_path) -> None:
    one_round(tmp_path).stop()
    with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite")) as db:
        db.execute("UPDATE audit SET detail_json = replace(detail_json, 'clinic-a', 'clinic-z') WHERE seq = 2")
        db.commit()
    outcome = atoll_command("audit", "state")
    assert outcome.returncode == atoll.errors.StateCorrupt.exit_code
    assert "broken at entry 2" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
