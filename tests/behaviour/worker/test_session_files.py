"""What the notes beside base and outbox say at the moments a process may die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import rewrite_note
from kit.servers import plain_server
from torch import Tensor, nn

import atoll
from atoll.errors import UsageError
from atoll.filters import Filter


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        yield server


class Fails(Filter):
    """Breaks off while the second update is formed."""

    def __init__(self) -> None:
        self.updates = 0

    def begin(self, update: Any) -> None:
        self.updates += 1

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        if self.updates > 1:
            raise KeyboardInterrupt
        return values


@pytest.mark.covers("F3")
def test_while_an_update_is_formed_no_note_names_the_one_before(server: atoll.Server, tmp_path: Path) -> None:
    """Guards against a kill in the middle that leaves half of a new update under an old note."""
    with atoll.join(server.url, "a", folder=tmp_path / "w", filters=[Fails()]) as worker:
        rounds = iter(worker)
        fl_round = next(rounds)
        fl_round.submit(fl_round.load_into(nn.Linear(8, 4)))
        assert list(tmp_path.rglob("outbox.json"))
        fl_round = next(rounds)
        model = fl_round.load_into(nn.Linear(8, 4))
        with pytest.raises(KeyboardInterrupt):
            fl_round.submit(model)
        assert not list(tmp_path.rglob("outbox.json"))


def pulled_once(server: atoll.Server, folder: Path) -> Path:
    """A site pulls a version, and ends; the note beside its base."""
    with atoll.join(server.url, site="a", folder=folder) as worker:
        worker.next_round().load_into(nn.Linear(8, 4))
    (note,) = folder.rglob("base.json")
    return note


@pytest.mark.parametrize("change", [{"complete": False}, {"digest": "0" * 64}])
@pytest.mark.covers("P6")
def test_a_round_is_not_submitted_against_a_base_that_is_not_its_own(
    server: atoll.Server, tmp_path: Path, change: dict[str, object]
) -> None:
    """Guards against an update without the look whether the base is complete, or at its digest."""
    rewrite_note(pulled_once(server, tmp_path / "w"), **change)
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        fl_round = worker.next_round()
        with pytest.raises(UsageError, match="was not downloaded"):
            fl_round.submit(nn.Linear(8, 4))


@pytest.mark.covers("F42")
def test_a_server_that_went_back_is_noticed_and_said(
    server: atoll.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is at version 0; the worker has trained from version 5 of the same run, which no journal knows now."""
    rewrite_note(pulled_once(server, tmp_path / "w"), version=5, digest="0" * 64)
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        worker.next_round().load_into(nn.Linear(8, 4))
    assert "the server went back from version 5 to 0" in caplog.text
