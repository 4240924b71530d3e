"""Without a server a script trains by itself: one round, or plain steps; at the end it hears that nothing was sent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from kit import diloco, take_steps
from torch import nn

import atoll

BEGIN = "no server is configured (ATOLL_SERVER): training alone"
END = "alone: nothing was sent, and Atoll saved nothing; the script keeps the model, or loses it"


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
