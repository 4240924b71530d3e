"""A server whose newest version did not reach the disk falls back; workers send again what they have."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.testing.processes import free_port, wait_until
from atoll.worker.files import OutboxNote


def damage_head(state: Path) -> None:
    """Flip a byte of the newest version, as a page that never reached the disk would."""
    with sqlite3.connect(state / "journal.sqlite") as journal:
        (slot,) = journal.execute("SELECT slot FROM versions ORDER BY version DESC LIMIT 1").fetchone()
    (path,) = [path for path in (state / "slots").iterdir() if "version" in path.name and path.stem.endswith(str(slot))]
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.covers("F41")
def test_updates_of_a_lost_version_are_submitted_again_from_the_outbox(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "algorithm": "fedavg",
        "port": free_port(),
        "state_dir": tmp_path / "state",
        "rounds": 3,
    }
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trained: list[int] = []
    with atoll.Client(f"http://127.0.0.1:{options['port']}", site="a", folder=tmp_path / "w") as client:
        server = atoll.Server(model, **options).start()

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
        server = atoll.Server(None, **options).start()
        assert server.status().fragments[0].version == 1
        number = client.next_round()  # round 2 is open again; it is served from the outbox
        assert number == 3
        assert server.status().fragments[0].version == 2
        assert server.save_state(tmp_path / "again.safetensors").read_bytes() == counted
        trained.append(number)
        client.submit(train())
        assert client.next_round() is None
    server.run()
    assert trained == [1, 2, 3]


@pytest.mark.covers("F42")
def test_an_update_trained_from_another_version_than_the_runs_is_not_taken(tmp_path: Path) -> None:
    """As after an old backup: the ticket's number is right, and the base is not what the server has."""
    with atoll.Server(nn.Linear(2, 2), port=0, state_dir=tmp_path / "state", algorithm="fedavg") as server:
        with atoll.Client(server.url, site="a", folder=tmp_path / "w") as client:
            assert client.next_round() == 1
            client.pull()
            session = client.register()._session
            assert session is not None
            seal = session.outbox.seal
            session.outbox.seal = lambda note: seal(  # type: ignore[method-assign]
                OutboxNote(**{**vars(note), "base_digest": "0" * 64})
            )
            client.submit({name: tensor + 1.0 for name, tensor in client.pull().items()})
            assert server.status().fragments[0].version == 0
            assert server.status().bytes_up > 0
