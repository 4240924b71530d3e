"""A disk that is slower than the rounds: versions become durable later, and no more of them are kept."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from harness.processes import wait_until
from kit import serve
from kit.client import Client
from torch import nn

from atoll.store.journal import Journal


@pytest.mark.covers("F26")
def test_rounds_that_overtake_the_disk_keep_no_more_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept are the head, the version before it, the durable one, the one on its way to disk, and the next, in work."""
    waits, writes = threading.Event(), threading.Lock()
    on_their_way: set[str] = set()
    most_at_once = synced = 0
    sync = Journal.sync

    def slow(journal: Journal, fd: int, what: str) -> None:
        nonlocal most_at_once, synced
        if Path(what).name.startswith("version-"):
            with writes:
                on_their_way.add(what)
                synced += 1
                most_at_once = max(most_at_once, len(on_their_way))
            assert waits.wait(60)
            with writes:
                on_their_way.discard(what)
        sync(journal, fd, what)

    monkeypatch.setattr(Journal, "sync", slow)
    waits.set()
    versions = set()
    with serve(
        tmp_path, nn.Linear(4, 3), **{"algorithm.name": "fedavg", "rounds.total": 7, "rounds.sites": 1}
    ) as server:
        with Client(server.url, site="a", folder=tmp_path / "workers") as client:
            while (number := client.next_round()) is not None:
                if number == 2:
                    wait_until(lambda: server.status().durable_version == 1, "version 1 to be durable")
                    waits.clear()
                state = client.pull()
                versions.add(len(list((tmp_path / "state" / "slots").glob("version-*"))))
                if number == 7:
                    assert server.status().durable_version == 1
                    waits.set()
                    wait_until(lambda: server.status().durable_version == 6, "the newest version to be durable")
                client.submit({name: tensor + 1.0 for name, tensor in state.items()})
    assert most_at_once == 1
    assert max(versions) <= 5
    assert synced <= 4  # versions 1, 2, 6 and 7; fewer where the first write begins late
