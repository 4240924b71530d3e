"""No site trains for nothing without hearing of it: what encoding leaves of an update, and what training did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.client import Client
from kit.servers import plain_server
from torch import Tensor

import atoll
from atoll.filters import Filter

OWN = '''
from dataclasses import dataclass
import torch

@dataclass(frozen=True)
class Thousandths:
    """Whole multiples of 1/1000."""

    feedback: bool = False
    name = "thousandths"
    elementwise = True
    raw = False

    def encoded_bytes(self, numel, dtype):
        return 2 * numel

    def encode_(self, source, target, dtype):
        target.view(torch.int16).copy_(source.mul(1000).round())

    def decode_(self, source, target, dtype):
        target.copy_(source.view(torch.int16)).div_(1000)


class Later(Thousandths):
    name = "later"
    feedback = True

    def __init__(self):
        pass
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_lossy.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_lossy", None)


def rounds_of(
    folder: Path, codec: str, start: dict[str, Tensor], changes: list[dict[str, Tensor]], **options: Any
) -> list[list[str]]:
    """What the status warns of behind each of some rounds that move the model by so much."""
    how = {f"aggregation.upload_codec.{'path' if ':' in codec else 'name'}": codec} | options
    shown = []
    with plain_server(folder, start, sites=1, rounds=len(changes), **how) as server:
        site = Client(server.url, site="a", folder=folder / "w").register()
        for change in changes:
            site.next_round()
            model = site.pull()
            site.submit({name: (model[name] - change[name]).to(model[name].dtype) for name in model})
            assert site._place.session.beat()
            shown.append(server.status().warnings)
        site.close()
    return shown


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.covers("L14")
@pytest.mark.usefixtures("own")
def test_a_change_too_small_for_its_codec_is_told_at_once_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = {"big": torch.zeros(9000), "small": torch.zeros(5), "still": torch.zeros(3)}
    change = {"big": torch.full((9000,), 1e-4), "small": torch.full((5,), 0.25), "still": torch.zeros(3)}
    shown = rounds_of(tmp_path, "own_lossy:Thousandths", start, [change] * 3)
    text = (
        "a: 1 of the 2 tensors that training changed lose 100 % of their change when encoded as thousandths: big. "
        "The change is too small for this codec. Use more local steps or a larger learning rate, or set "
        "aggregation.upload_codec.name = 'none'."
    )
    assert lines(caplog) == [text]
    assert shown == [[text]] * 3


@pytest.mark.covers("L14")
def test_bf16_has_no_room_for_the_smallest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """10⁻⁴² is a number of fp32, and 9.2·10⁻⁴¹ the smallest of bf16. Many small tensors are encoded as one."""
    start = {f"w{index:02}": torch.zeros(7) for index in range(40)}
    change = {name: torch.full((7,), 1e-42 if name in ("w13", "w14") else 1e-3) for name in start}
    rounds_of(tmp_path, "bf16", start, [change])
    (line,) = lines(caplog)
    assert "2 of the 40 tensors that training changed lose 100 %" in line
    assert "when encoded as bf16: w13, w14." in line


@pytest.mark.covers("L14")
def test_a_change_too_large_for_its_codec_is_not_told_as_lost(tmp_path: Path) -> None:
    """Near the end of fp32, bf16 rounds to infinity: the server refuses it, and a larger rate is no remedy."""
    assert rounds_of(tmp_path, "bf16", {"w": torch.zeros(64)}, [{"w": torch.full((64,), 3.4e38)}]) == [[]]


@pytest.mark.covers("L14")
@pytest.mark.usefixtures("own")
def test_more_than_a_hundredth_arrives_or_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a hundred 0.0004 and one 0.0006 the last arrives, as 0.001: √(101·16) of √(100·16 + 36) is lost, 99.4 %."""
    start = {"w": torch.zeros(101)}
    change = torch.full((101,), 4e-4)
    change[100] = 6e-4
    rounds_of(tmp_path / "1", "own_lossy:Thousandths", start, [{"w": change}])
    assert "lose 99.4 % of their change when encoded as thousandths: w." in lines(caplog)[0]
    caplog.clear()
    change[99] = 2e-3
    rounds_of(tmp_path / "2", "own_lossy:Thousandths", start, [{"w": change}])
    assert lines(caplog) == []


@pytest.mark.covers("L14")
@pytest.mark.usefixtures("own")
def test_with_error_feedback_it_is_told_when_nothing_arrives_three_times_in_a_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """0.3, 0.6 and 0.9 thousandths: the second arrives. 0.1, 0.2, 0.3 and 0.4: nothing ever does."""
    start = {"w": torch.zeros(4), "v": torch.zeros(300_000)}
    soon = {"w": torch.full((4,), 3e-4), "v": torch.full((300_000,), 3e-4)}
    assert rounds_of(tmp_path / "1", "own_lossy:Later", start, [soon] * 4) == [[]] * 4
    assert lines(caplog) == []
    never = {"w": torch.full((4,), 1e-4), "v": soon["v"]}
    shown = rounds_of(tmp_path / "2", "own_lossy:Later", start, [never] * 4)
    (line,) = lines(caplog)
    assert "lose 100 % of their change when encoded as later, 3 times in a row" in line
    assert shown == [[], [], [line], [line]]


@pytest.mark.covers("L14")
@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "topk"])
def test_what_codecs_lose_every_day_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str) -> None:
    """One value far above the others in its block; a tensor most of which stays; a single element; top-k's 98 %."""
    start = {"w": torch.ones(9000), "e": torch.ones(600_000), "s": torch.ones(()), "h": torch.ones(300).half()}
    generator = torch.Generator().manual_seed(0)
    change = {name: 1e-2 * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
    change["w"][17] = 1e6
    change["e"][:599_000] = 0
    assert rounds_of(tmp_path, codec, start, [change] * 4) == [[]] * 4
    assert lines(caplog) == []


@pytest.mark.covers("L14")
def test_weights_that_steps_do_not_move_are_shown_until_they_move(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1 − 1/1000 is 1 in bf16, and the next smaller number there is 1 − 1/256."""
    start = {"w": torch.ones(4, dtype=torch.bfloat16)}
    tiny, enough = {"w": torch.full((4,), 1e-3)}, {"w": torch.full((4,), 0.5)}
    shown = rounds_of(tmp_path, "bf16", start, [tiny, tiny, enough])
    text = (
        "a: the pseudo-gradient is all zero. Check that the optimizer has this model's parameters, and a learning rate"
    )
    assert lines(caplog) == shown[0] * 2
    assert shown[0][0].startswith(text)
    assert "BF16 weights do not change if a step is smaller than about 1/256" in shown[0][0]
    assert shown[1:] == [shown[0], []]


class Silence(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return torch.zeros_like(values)


@pytest.mark.covers("L14")
def test_what_filters_have_made_nothing_of_is_said_to_be_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain_server(tmp_path, {"w": torch.zeros(3)}, sites=1, rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w", filters=[Silence()]) as worker:
            for fl_round in worker:
                model = fl_round.state_dict()
                fl_round.submit({"w": model["w"] - 1})
    assert "the pseudo-gradient is all zero after this site's filters. Check" in caplog.text
