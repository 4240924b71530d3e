"""A filter of the server's that does not come to an end: it holds up its own site, and is told of in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import atoll
from atoll.filters import Filter
from atoll.server import aside

START = {"w": torch.zeros(2)}


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Lets what hangs end; behind every test, however it ends."""
    event = threading.Event()
    yield event
    event.set()


class Hanging(Filter):
    """Hangs at every update until the event is set; a copy for each site has the same event."""

    def __init__(self, go: threading.Event) -> None:
        self.go, self.begun = go, threading.Event()

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        self.begun.set()
        assert self.go.wait(60)
        return values


def serving(folder: Path, **options: Any) -> atoll.Server:
    settings: dict[str, Any] = {"algorithm": "fedavg", "num_workers": 2, "port": 0, "min_free_bytes": 0, "threads": 1}
    return atoll.Server(START, state_dir=folder / "state", **(settings | options))


def client(server: atoll.Server, folder: Path, site: str) -> atoll.Client:
    return atoll.Client(server.url, site=site, folder=folder / "w").register()


@pytest.mark.covers("T8")
def test_the_rounds_go_on_without_its_site_and_the_server_ends(
    tmp_path: Path, go: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds are closed by their deadline, with b alone."""
    monkeypatch.setattr(aside, "SAY_S", 0.05)
    hanging, rounds = Hanging(go), 4
    options = {"rounds": rounds, "quorum": 1, "min_workers": 1, "round_deadline_s": 0.3}
    with serving(tmp_path, filters={"a": [hanging], "b": [Filter()]}, **options) as server:
        stuck, other = client(server, tmp_path, "a"), client(server, tmp_path, "b")
        assert (stuck.next_round(), other.next_round()) == (1, 1)
        stuck.pull()
        submitting = threading.Thread(target=lambda: stuck.submit({"w": torch.ones(2)}), daemon=True)
        submitting.start()
        assert hanging.begun.wait(30)
        for number in range(1, rounds + 1):
            other.pull()
            other.submit({"w": torch.full((2,), 1.0 + number)})
            assert other.next_round() == (number + 1 if number < rounds else None)
        other.close()
        lines = [entry.workers for entry in server.status().history]
        assert lines == [["b"]] * rounds
    assert not go.is_set()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "The server's filters at the update of a for round 1: not done after 0.05 s. Look at their code." in told


@pytest.mark.covers("T8")
def test_a_server_ends_while_it_hangs_at_what_was_accepted_before_a_restart(
    tmp_path: Path, go: threading.Event
) -> None:
    """a's update is in the journal when the server ends; the next one's filter hangs at it when the round closes."""
    with serving(tmp_path, rounds=1) as server:
        first, second = client(server, tmp_path, "a"), client(server, tmp_path, "b")
        assert (first.next_round(), second.next_round()) == (1, 1)
        first.pull()
        second.pull()
        first.submit({"w": torch.ones(2)})
        port = server.port
    hanging = Hanging(go)
    with serving(tmp_path, rounds=1, filters={"a": [hanging]}, port=port) as server:
        second.submit({"w": torch.ones(2)})
        assert hanging.begun.wait(30)
    assert not go.is_set()
