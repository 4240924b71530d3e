"""A server whose newest version did not reach the disk falls back; workers send again what they have."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit import ask_journal, flip_bit
from kit.client import Client
from kit.servers import new_server, plain_server
from torch import nn

import atoll
from atoll.server.coordinator.accept_update import staleness
from atoll.store.store import Store
from atoll.store.versions import Versions
from atoll.worker.exchange.base_and_outbox import OutboxNote


def begun_at(folder: Path) -> dict[str, Any]:
    """Settings of a run of three rounds whose server is started again at the same port."""
    where = {"network.port": free_port(), "disk.state_dir": folder / "state"}
    return {"algorithm.name": "fedavg", "rounds.total": 3} | where


def damage_head(state: Path) -> None:
    """Flip a byte of the newest version, as a page that never reached the disk would."""
    ((slot,),) = ask_journal(state.parent, "SELECT slot FROM versions ORDER BY version DESC LIMIT 1")
    (path,) = (state / "slots").glob(f"version-*-{slot}.safetensors")
    flip_bit(path, -1)


@pytest.mark.covers("L13")
@pytest.mark.parametrize(("version", "rounds"), [(0, 3), (1, 2), (2, 2), (3, 1), (4, 0), (5, 0)])
def test_staleness_counts_rounds_not_numbers(version: int, rounds: int) -> None:
    """The run has the versions 0, 1, 3 and 4. A worker may still train from 2 or 5, which were lost."""
    assert staleness(4, version, lost=(2,)) == rounds


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
    with closing(Store(tmp_path / "state")) as store:  # a server of a finished run may have closed its own
        assert staleness(4, 0, store.run_log.lost_versions()) == 3  # from 0 on: 1, 3, 4
    server = new_server(None, **options | {"rounds.total": 4}).start()
    assert not server.status().finished
    server.stop()


@contextmanager
def slow_disk(newest: int) -> Iterator[None]:
    """While it lasts, no version above `newest` becomes durable."""
    write_durable = Versions.write_durable

    def write(self: Versions, fragment: int = 0) -> int | None:
        behind = self.head(fragment).version > newest
        return self.durable(fragment) if behind else write_durable(self, fragment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Versions, "write_durable", write)
        yield


def wait_until_durable(server: atoll.Server, version: int) -> None:
    wait_until(lambda: server.status().durable_version == version, f"version {version} to be durable")


def lose_power(server: atoll.Server, model: nn.Module, options: dict[str, Any]) -> atoll.Server:
    """End the server, lose its version 2, and start it again."""
    server.stop()
    damage_head(options["disk.state_dir"])
    server = new_server(model, **options).start()
    assert server.status().fragments[0].version == 1
    return server


@pytest.mark.covers("F41")
@pytest.mark.parametrize("disturbed", [False, True])
def test_a_diloco_worker_submits_again_what_was_not_durable_and_trains_nothing_again(
    tmp_path: Path, disturbed: bool
) -> None:
    """Guards against an outbox that is cleared when the next version is pulled, or rewritten for a lost one's ticket.

    H = 2 and steps of −1: 8 → 6 → 4 → 2. The power is lost in the middle of round 3, when version 2 is not durable.
    """
    options = begun_at(tmp_path) | {
        "algorithm.name": "diloco",
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "diloco.sync_every": 2,
    }
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen: list[float] = []
    with slow_disk(newest=1):
        server = new_server(model, **options).start()
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            for step in range(1, 7):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
                seen.append(model.weight.item())
                if step == 2:
                    wait_until_durable(server, 1)
                if step == 5 and disturbed:
                    server = lose_power(server, model, options)
            assert (diloco.finished, diloco.rounds, diloco.skipped) == (True, 3, 0)
        server.run()
    assert seen == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0]


@pytest.mark.covers("F41")
def test_a_round_from_a_lost_version_leaves_the_outbox_as_it_is(tmp_path: Path) -> None:
    """Guards against an outbox that is rewritten for the ticket of a version that the server has lost."""
    options = begun_at(tmp_path)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    trained: list[tuple[float, float]] = []
    with slow_disk(newest=1):
        server = new_server(model, **options).start()
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                before = model.weight.item()
                with torch.no_grad():
                    model.weight.add_(1.0 if trained else 16.0)
                trained.append((before, model.weight.item()))
                if len(trained) == 2:
                    wait_until_durable(server, 1)
                if len(trained) == 3:
                    server = lose_power(server, model, options)
                fl_round.submit(model)
            assert worker.load_into(model).weight.item() == 18.0
        server.run()
    assert trained == [(0.0, 16.0), (16.0, 17.0), (17.0, 18.0), (17.0, 18.0)]  # round 2 only once


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
        with Client(server.url, site="a", folder=tmp_path / "w") as client:
            assert client.next_round() == 1
            client.pull()
            place = client.register()._place
            assert place is not None
            seal = place.exchange.outbox.seal
            place.exchange.outbox.seal = lambda note: seal(  # type: ignore[method-assign]
                OutboxNote(**{**vars(note), "base_digest": "0" * 64})
            )
            client.submit({name: tensor + 1.0 for name, tensor in client.pull().items()})
            assert place.exchange.outbox.note is not None
            assert place.session.outcome(place.exchange.outbox.note.ticket).state == "open"
            assert server.status().bytes_up > 0
