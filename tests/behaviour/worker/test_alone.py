"""Without a server a script trains by itself: one round, or plain steps; at the end it hears that nothing was sent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from kit import diloco, take_steps
from torch import nn

import atoll
from atoll.errors import UsageError

BEGIN = "no server is set in ATOLL_SERVER: training alone"
END = "training alone: nothing was sent or saved by Atoll; save the model in the script"


@pytest.fixture(autouse=True)
def _lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atoll")


@pytest.mark.covers("P6")
def test_join_gives_one_round_and_says_that_nothing_was_sent(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    numbers = []
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            numbers.append(fl_round.number)
            fl_round.submit(model, weight=3, metrics={"loss": 0.5})
        worker.load_into(model)
    assert numbers == [1]
    assert torch.equal(model.weight, before)
    assert caplog.messages == [BEGIN, "alone: trained without a server (loss 0.5)", END]
    assert list(tmp_path.iterdir()) == []


def test_refuses_alone_what_a_run_refuses_and_gives_tied_tensors() -> None:
    """So that a script that is tried without a server does not fail in its first run."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    with atoll.join() as worker:
        loop = iter(worker)
        fl_round = next(loop)
        fl_round.load_into(model)
        held = fl_round.state_dict()
        assert held.keys() == {"0.weight", "1.weight"}
        assert all(torch.equal(value, model[0].weight) for value in held.values())
        with pytest.raises(UsageError, match=r"'0\.weight' is a str"):
            fl_round.submit({"0.weight": "heavy"})
        with pytest.raises(UsageError, match="Site alone submitted no update in round 1"):
            next(loop)


@pytest.mark.covers("L2")
def test_diloco_alone_leaves_the_loop_as_it_is_and_says_so_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with diloco("", tmp_path) as loop:
        take_steps(loop, 1)
    loop.stop()
    assert caplog.messages == [BEGIN, END]


def test_after_an_error_the_error_is_the_last_word(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for place in (atoll.join(), diloco("", tmp_path)):
        with pytest.raises(ZeroDivisionError), place:
            raise ZeroDivisionError
    assert caplog.messages == [BEGIN, BEGIN]
