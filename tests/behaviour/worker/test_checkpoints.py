"""A trainer's checkpoint resumes DiLoCo only in its own run, with the folder that it was written beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit import diloco, serve, take_steps

import atoll
from atoll.errors import UsageError

RUN: dict[str, Any] = {"algorithm": "diloco", "H": 1, "rounds": 4, "sites": 1}


def train(loop: atoll.DiLoCo, steps: int) -> dict[str, Any]:
    """Return the state after some steps; each is a round."""
    with loop:
        take_steps(loop, steps)
        return loop.state_dict()


def test_resumes_where_the_folder_has_come_as_far_as_the_checkpoint(tmp_path: Path) -> None:
    with serve(tmp_path, **RUN) as server:
        early, late = (train(diloco(server, tmp_path), 1) for _ in range(2))
        assert (early["versions"], late["versions"]) == ([1], [2])
        for state in (early, late):
            loop = diloco(server, tmp_path)
            loop.load_state_dict(json.loads(json.dumps(state)))
            train(loop, 1)
        assert server.status().fragments[0].version == 4


@pytest.mark.covers("X3")
def test_refuses_a_checkpoint_that_disagrees_with_the_folder(tmp_path: Path) -> None:
    with serve(tmp_path, **RUN) as server:
        state = train(diloco(server, tmp_path), 2)
        for loop, changed, words in [
            (diloco(server, tmp_path / "new"), {}, r"starts from version 2 of fragment 0, .* has no version"),
            (diloco(server, tmp_path), {"versions": [3]}, r"starts from version 3 of fragment 0, .* has version 2"),
            (diloco(server, tmp_path), {"run": "f" * 32}, "belongs to site 'a' in run ffffffff, not to site 'a'"),
            (diloco(server, tmp_path, "b"), {}, "belongs to site 'a' in run .*, not to site 'b'"),
        ]:
            loop.load_state_dict(state | changed)
            with pytest.raises(UsageError, match=words):
                loop.start()
        assert server.status().fragments[0].version == 2


def test_refuses_what_is_no_state_and_has_none_without_a_server(tmp_path: Path) -> None:
    with serve(tmp_path, **RUN) as server:
        loop = diloco(server, tmp_path)
        with pytest.raises(UsageError, match="state_dict does not come from Atoll: it has the keys 'epoch'"):
            loop.load_state_dict({"epoch": 3})
        with loop, pytest.raises(UsageError, match="This DiLoCo object has already started"):
            loop.load_state_dict({})
    with diloco("", tmp_path) as alone:
        assert alone.state_dict() == {}
