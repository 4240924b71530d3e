"""A trainer's checkpoint resumes DiLoCo only in its own run, with the folder that it was written beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import build_model, serve

import atoll
from atoll.errors import UsageError

RUN: dict[str, Any] = {
    "algorithm.name": "diloco",
    "diloco.sync_every": 1,
    "rounds.total": 4,
    "rounds.sites": 1,
    "rounds.min_sites": 1,
}


def diloco(url: str, folder: Path, site: str = "a") -> atoll.DiLoCo:
    model = build_model()
    return atoll.DiLoCo(
        model, torch.optim.SGD(model.parameters(), lr=0.1), server=url, site=site, folder=folder / "workers"
    )


def train(part: atoll.DiLoCo, steps: int) -> dict[str, Any]:
    """Return the state after some steps; each is a round."""
    with part:
        for _ in range(steps):
            for parameter in part.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            part.optimizer.step()  # type: ignore[union-attr]
        return part.state_dict()


def test_resumes_where_the_folder_has_come_as_far_as_the_checkpoint(tmp_path: Path) -> None:
    with serve(tmp_path, **RUN) as server:
        early = train(diloco(server.url, tmp_path), 1)
        late = train(diloco(server.url, tmp_path), 1)
        assert (early["versions"], late["versions"]) == ([1], [2])
        for state in (early, late):
            part = diloco(server.url, tmp_path)
            part.load_state_dict(json.loads(json.dumps(state)))
            train(part, 1)
        assert server.status().fragments[0].version == 4


@pytest.mark.covers("X3")
def test_refuses_a_checkpoint_that_disagrees_with_the_folder(tmp_path: Path) -> None:
    with serve(tmp_path, **RUN) as server:
        state = train(diloco(server.url, tmp_path), 2)
        for part, changed, words in [
            (diloco(server.url, tmp_path / "new"), {}, r"trains from version 2 of fragment 0, .* has no version"),
            (diloco(server.url, tmp_path), {"versions": [3]}, r"trains from version 3 of fragment 0, .* has version 2"),
            (diloco(server.url, tmp_path), {"run": "f" * 32}, "is of site 'a' in run ffffffff, and this is site 'a'"),
            (diloco(server.url, tmp_path, site="b"), {}, "is of site 'a' in run .*, and this is site 'b'"),
        ]:
            part.load_state_dict(state | changed)
            with pytest.raises(UsageError, match=words):
                part.start()
        assert server.status().fragments[0].version == 2


def test_refuses_what_is_no_state(tmp_path: Path) -> None:
    with serve(tmp_path, **RUN) as server:
        part = diloco(server.url, tmp_path)
        with pytest.raises(UsageError, match="is no state_dict of Atoll's: it has 'epoch'"):
            part.load_state_dict({"epoch": 3})
        with part, pytest.raises(UsageError, match="This DiLoCo has started"):
            part.load_state_dict({})


def test_has_no_state_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model()
    with atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1)) as part:
        assert part.state_dict() == {}
