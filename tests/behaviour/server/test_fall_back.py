"""A server whose newest version did not reach the disk falls back; workers send again what they have."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit import ask_journal, flip_bit
from kit.client import Client
from kit.servers import new_server, plain_server
from kit.wire import WireSite
from torch import nn

import atoll


def begun_at(folder: Path) -> dict[str, Any]:
    """Settings of a run of three rounds whose server is started again at the same port."""
    where = {"network.port": free_port(), "disk.state_dir": folder / "state"}
    return {"algorithm.name": "fedavg", "rounds.total": 3} | where


def damage_head(state: Path) -> None:
    """Flip a byte of the newest version, as a page that never reached the disk would."""
    ((slot,),) = ask_journal(state.parent, "SELECT slot FROM versions ORDER BY version DESC LIMIT 1")
    (path,) = (state / "slots").glob(f"version-*-{slot}.safetensors")
    flip_bit(path, -1)


@pytest.mark.covers("F41")
def test_updates_of_a_lost_version_are_submitted_again_from_the_outbox(tmp_path: Path) -> None:
    options = begun_at(tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trained: list[int] = []
    with Client(f"http://127.0.0.1:{options['network.port']}", site="a", folder=tmp_path / "w") as client:
        server = new_server(model, **options).start()

        def train() -> dict[str, torch.Tensor]:
            state = client.pull()
            return {name: tensor + 1.0 for name, tensor in state.items()}

        for number in (1, 2):
            assert client.next_round() == number
            trained.append(number)
            client.submit(train())
        wait_until(lambda: server.status().fragments[0].version == 2, "version 2")
        counted = server.save_state(tmp_path / "two.safetensors").read_bytes()
        server.stop()
        damage_head(tmp_path / "state")
        server = new_server(None, **options).start()
        assert server.status().fragments[0].version == 1
        number = client.next_round()  # round 2 is open again; it is served from the outbox
        assert number == 3
        assert server.status().fragments[0].version == 3  # a number is never used again, a round is
        assert server.save_state(tmp_path / "again.safetensors").read_bytes() == counted
        trained.append(number)
        client.submit(train())
        assert client.next_round() is None
    server.run()
    assert trained == [1, 2, 3]
    status = server.status()
    assert [(row.round, row.version) for row in status.history] == [(1, 1), (2, 3), (3, 4)]
    server = new_server(None, **options).start()  # it still knows that three rounds are done, not four
    assert (server.status().finished, server.status().fragments[0].version) == (True, 4)
    assert [(worker.version, worker.staleness) for worker in server.status().workers] == [(3, 1)]
    server.stop()
    server = new_server(None, **options | {"rounds.total": 4}).start()
    assert not server.status().finished
    server.stop()


def wait_until_durable(server: atoll.Server, version: int) -> None:
    wait_until(lambda: server.status().durable_version == version, f"version {version} to be durable")


@pytest.mark.covers("F42")
def test_an_update_that_the_journal_has_forgotten_is_sent_again_under_the_same_ticket(tmp_path: Path) -> None:
    """As after a power loss that took the journal's last rows: the ticket is open, and its update was acknowledged."""
    options = begun_at(tmp_path)
    model, journal, kept = nn.Linear(1, 1), tmp_path / "state" / "journal.sqlite", tmp_path / "kept.sqlite"
    with Client(f"http://127.0.0.1:{options['network.port']}", site="a", folder=tmp_path / "w") as client:
        server = new_server(model, **options).start()
        for number in (1, 2):
            assert client.next_round() == number
            if number == 2:
                with closing(sqlite3.connect(journal)) as source, closing(sqlite3.connect(kept)) as target:
                    source.backup(target)
            client.submit({name: tensor + 1.0 for name, tensor in client.pull().items()})
        wait_until(lambda: server.status().fragments[0].version == 2, "version 2")
        server.stop()
        for path in tmp_path.glob("state/journal.sqlite*"):
            path.unlink()
        (tmp_path / "state" / "audit.head").unlink()  # on the same boot, a journal that ends before it is refused
        kept.rename(journal)
        server = new_server(None, **options).start()
        assert server.status().fragments[0].version == 1
        assert client.next_round() == 3
        client.submit({name: tensor + 1.0 for name, tensor in client.pull().items()})
        assert client.next_round() is None
    server.run()


@pytest.mark.covers("F42")
def test_an_update_trained_from_another_version_than_the_runs_is_not_taken(tmp_path: Path) -> None:
    """As after an old backup: the ticket's number is right, and the base is not what the server has."""
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        update = WireSite(server.url).train(1.0).push()
        status, told = update.complete(base_digest="0" * 64)
        assert (status, update.state()["outcome"]["state"]) == (410, "open"), told
        update.submit()
