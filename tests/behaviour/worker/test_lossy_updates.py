"""What encoding loses of an update is sent later, once and not twice, or the site hears that it trains for nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.damage import damage_head
from kit.world import World
from torch import Tensor

import atoll
from atoll import registry
from atoll.codecs import NoneCodec
from atoll.errors import ConfigError
from atoll.filters import Filter

Warned = Callable[[], list[str]]
START = {"w": torch.zeros(2)}
FOUR_ROUNDS: dict[str, Any] = {"rounds": 4, "codec": "int8"}


@pytest.mark.parametrize("loses", [False, True], ids=["undisturbed", "a version is lost"])
def test_small_changes_arrive_in_later_updates(tmp_path: Path, loses: bool) -> None:
    """A change too small for the codec's scale is kept and arrives with a later update."""
    # Each round moves by (127, 0.28), so the scale is 1 and 0.28 alone would always be rounded to 0. With the rests,
    # 0.28, 0.56, −0.16 and 0.12 are rounded to 0, 1, 0 and 0. If the server loses version 2, the same bytes count again
    # and their rest stays. Otherwise, the third value would be −0.6 or 0.28.
    change = -torch.tensor([127.0, 0.28])
    with World(tmp_path, START, "a", **FOUR_ROUNDS) as world:
        world.rounds(change, 1, 2)
        if loses:
            world.wait(2)
            world.stop()
            damage_head(tmp_path)
            world.start()
            assert world.version == 1
        world.rounds(change, 3, 4)
        assert world.finish()["w"].tolist() == [-508.0, -1.0]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_everything_trained_arrives_in_the_end(tmp_path: Path, codec: str) -> None:
    """With a lossy codec, everything that was trained arrives after enough rounds."""
    # Tensors may not fill blocks or tiles, and one is of half precision. Four rounds train. In ten more, the site sends
    # only what is left over.
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5000,), "b": (33, 9), "c": (1,)}
    start = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    start["h"] = torch.randn(300, generator=generator).half()
    moved = {name: torch.zeros(tensor.shape) for name, tensor in start.items()}

    def train(_: str, number: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
        if number == 5:  # something was lost on the way
            assert (start["a"] - model["a"] - moved["a"]).abs().max() > 0.001
        if number > 4:
            return model
        trained = {}
        for name, tensor in model.items():
            trained[name] = (tensor.float() - torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
            moved[name] += tensor.float() - trained[name].float()
        return trained

    with World(tmp_path, start, "a", rounds=14, codec=codec) as world:
        world.rounds(train, *range(1, 15))
        last = world.finish()
    for name in shapes:
        torch.testing.assert_close(start[name] - last[name], moved[name], rtol=0, atol=1e-5)


def test_a_refused_update_leaves_no_rounding_error(tmp_path: Path) -> None:
    """If an update is refused, the site forgets the rounding error that this update would have left."""
    # The second update is refused. The third has 0.4 of the first: with 0.4 more, 0.8 is rounded to 1.
    with World(tmp_path, START, "a", **FOUR_ROUNDS, **{"aggregation.max_update_norm": 1000.0}) as world:
        world.move("a", 1, -torch.tensor([127.0, 0.4]))
        world.move("a", 2, -torch.tensor([12700.0, 49.0]))
        assert world.status.refused == 1
        world.move("a", 2, -torch.tensor([127.0, 0.4]))
        assert world.move("a", 3, 0.0)["w"].tolist() == [-254.0, -1.0]


# -- no site trains for nothing without hearing of it


class Thousandths:
    """A codec of whole multiples of 1/1000."""

    name = "thousandths"
    feedback = False
    elementwise = True
    raw = False

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def encode_(self, source: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        target.view(torch.int16).copy_(source.mul(1000).round())

    def decode_(self, source: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        target.copy_(source.view(torch.int16)).div_(1000)


class Later(Thousandths):
    name = "later"
    feedback = True


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    for codec in (Thousandths, Later):
        atoll.register("codecs", codec.name, codec)


def rounds_of(
    folder: Path, codec: str | type, start: dict[str, Tensor], changes: list[dict[str, Tensor]]
) -> list[list[str]]:
    """What the status warns of behind each of some rounds that move the model by so much."""
    own = {"aggregation.upload_codec.path": f"{__name__}:{codec.__name__}"} if isinstance(codec, type) else {}
    shown = []
    with World(folder, start, "a", rounds=len(changes), **own or {"codec": codec}) as world:
        for number, change in enumerate(changes, 1):
            world.move("a", number, lambda _, __, model: moved_by(model, change))  # noqa: B023 (called at once)
            assert world.sites["a"]._place.session.beat()
            shown.append(world.status.warnings)
    return shown


def moved_by(model: dict[str, Tensor], change: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (value - change[name]).to(value.dtype) for name, value in model.items()}


@pytest.mark.covers("L14")
def test_a_change_too_small_for_its_codec_warns(tmp_path: Path, warned: Warned) -> None:
    """If a codec loses all of a site's change, the log warns once, and the status shows the warning until the end."""
    start = {"big": torch.zeros(9000), "still": torch.zeros(3)}
    change = {"big": torch.full((9000,), 1e-4), "still": torch.zeros(3)}
    shown = rounds_of(tmp_path, Thousandths, start, [change] * 3)
    text = (
        "a: encoding as thousandths loses 100 % of the change that training made. The change is too small for this "
        "codec. Use more local steps or a larger learning rate, or set aggregation.upload_codec.name = 'none'."
    )
    assert warned() == [text]
    assert shown == [[text]] * 3


@pytest.mark.covers("L14")
def test_bf16_loses_very_small_changes(tmp_path: Path, warned: Warned) -> None:
    """If all changes are smaller than the smallest number of bf16, the log warns that bf16 loses 100 %
    of the change.
    """
    # 10⁻⁴² is a number of fp32, and 9.2·10⁻⁴¹ the smallest of bf16. Many small tensors are encoded as one.
    start = {f"w{index:02}": torch.zeros(7) for index in range(40)}
    rounds_of(tmp_path, "bf16", start, [{name: torch.full((7,), 1e-42) for name in start}])
    (line,) = warned()
    assert "encoding as bf16 loses 100 % of the change" in line


@pytest.mark.covers("L14")
def test_changes_too_large_are_not_reported_lost(tmp_path: Path) -> None:
    """A change that becomes infinite in bf16 causes no warning of a lost change: the server refuses it for another
    reason.
    """
    assert rounds_of(tmp_path, "bf16", {"w": torch.zeros(64)}, [{"w": torch.full((64,), 3.4e38)}]) == [[]]


@pytest.mark.covers("L14")
def test_a_change_lost_by_its_codec_is_reported(tmp_path: Path, warned: Warned) -> None:
    """If less than a hundredth of the change arrives, counted over all tensors, the log says how much
    the codec loses.
    """
    # Of a hundred values 0.0004 and one 0.0006, only the last arrives, as 0.001. So √(101·16) of √(100·16 + 36) is
    # lost, which is 99.4 %. The larger tensor is encoded in two pieces.
    start, few = {"v": torch.zeros(300_000), "w": torch.zeros(101)}, torch.full((101,), 4e-4)
    few[100] = 6e-4
    change = {"v": torch.zeros(300_000), "w": few}
    change["v"][-40:], change["w"][:40] = 4e-4, 0
    rounds_of(tmp_path / "1", Thousandths, start, [change])
    assert "loses 99.4 % of the change that training made." in warned()[0]
    change["w"][99] = 2e-3
    rounds_of(tmp_path / "2", Thousandths, start, [change])
    assert warned() == []


@pytest.mark.covers("L14")
def test_feedback_warns_after_three_losses(tmp_path: Path, warned: Warned) -> None:
    """With error feedback, the log warns only if nothing has arrived three times in a row."""
    # Of 0.3, 0.6 and 0.9 thousandths, the second arrives. Of 0.1, 0.2, 0.3 and 0.4, none does. If something of one
    # tensor arrives, there is no warning.
    start = {"w": torch.zeros(4), "v": torch.zeros(300_000)}
    soon = {"w": torch.full((4,), 3e-4), "v": torch.full((300_000,), 3e-4)}
    assert rounds_of(tmp_path / "1", Later, start, [soon] * 4) == [[]] * 4
    assert warned() == []
    late = {name: torch.full(tensor.shape, 1e-4) for name, tensor in start.items()}
    assert rounds_of(tmp_path / "2", Later, start, [soon | {"w": late["w"]}] * 4) == [[]] * 4
    assert warned() == []
    shown = rounds_of(tmp_path / "3", Later, start, [late] * 4)
    (line,) = warned()
    assert "encoding as later loses 100 % of the change that training made, 3 times in a row" in line
    assert shown == [[], [], [line], [line]]


@pytest.mark.covers("L14")
@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "topk"])
def test_usual_losses_of_codecs_cause_no_warning(tmp_path: Path, warned: Warned, codec: str) -> None:
    """Losses that a codec has in normal training cause no warning."""
    # There are a value far above its block, a tensor most of which stays, a single element, and the 98 % that top-k
    # leaves out.
    start = {"w": torch.ones(9000), "e": torch.ones(600_000), "s": torch.ones(()), "h": torch.ones(300).half()}
    generator = torch.Generator().manual_seed(0)
    change = {name: 1e-2 * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
    change["w"][17] = 1e6
    change["e"][:599_000] = 0
    assert rounds_of(tmp_path, codec, start, [change] * 4) == [[]] * 4
    assert warned() == []


@pytest.mark.covers("L14")
def test_bf16_weights_that_do_not_move_are_reported(tmp_path: Path, warned: Warned) -> None:
    """If a site's steps are too small to move bf16 weights, the status and the log say so, until the weights move."""
    # 1 − 1/1000 is 1 in bf16, and the next smaller number is 1 − 1/256.
    start = {"w": torch.ones(4, dtype=torch.bfloat16)}
    tiny, enough = {"w": torch.full((4,), 1e-3)}, {"w": torch.full((4,), 0.5)}
    shown = rounds_of(tmp_path, "bf16", start, [tiny, tiny, enough])
    said = warned()
    assert said == shown[0] * 2
    assert said[0].startswith("a: the update is all zero. Check that the optimizer has this model's parameters")
    assert "BF16 weights do not change if a step is smaller than about 1/256" in said[0]
    assert shown[1:] == [shown[0], []]


class Silence(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return torch.zeros_like(values)


@pytest.mark.covers("L14")
def test_filters_that_leave_nothing_cause_a_warning(tmp_path: Path, warned: Warned) -> None:
    """If a site's filters leave nothing of its change, the log warns that the pseudo-gradient is zero with the filters
    applied.
    """
    with World(tmp_path, START, "a", rounds=1) as world:
        world.join(filters=[Silence()])
        world.rounds(-1.0, 1)
    assert "the update is all zero (with this site's filters applied). Check" in warned()[0]


class Noted(NoneCodec):
    """A codec with an option that means nothing."""

    name = "noted"

    def __init__(self, note: Any = "") -> None:
        super().__init__()


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("note", "told"),
    [
        ("y" * 3000, "it has 3000 characters, but at most 256 are sent to sites"),
        (1e301, "input should be less than or equal to 1000"),
    ],
    ids=["text", "number"],
)
def test_a_codec_option_must_be_sendable(tmp_path: Path, note: Any, told: str) -> None:
    """The server refuses a codec option that it cannot send to sites, and names the option."""
    codec = {"path": f"{__name__}:Noted", "note": note}
    with pytest.raises(ConfigError, match=rf"^aggregation\.upload_codec\.note is .*, which sites cannot get: {told}"):
        World(tmp_path, START, "a", **{"aggregation.upload_codec": codec}).start()
