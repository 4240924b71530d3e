"""Filters: what leaves a site is what they made of its change, for every element, a run at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from torch import Tensor

import atoll
from atoll.errors import UsageError
from atoll.filters import CHUNK_ELEMENTS, About, Cast, Drop, Filter, NormClip, Outgoing

START = {"w": torch.zeros(2), "head": torch.ones(2), "bn.running_mean": torch.tensor([0.0]), "n": torch.tensor(7)}
State = dict[str, Tensor]
LOCAL = {
    "w": torch.tensor([3.0, 4.0]),
    "head": torch.ones(2),
    "bn.running_mean": torch.tensor([12.0]),
    "n": torch.tensor(9),
}


def versions(folder: Path, filters: Any, start: State = START, local: State = LOCAL, **settings: Any) -> list[State]:
    """What a run of one site makes of `start`: in each round the site moves by local − start, and filters that."""
    found = []
    with plain_server(folder, start, **{"sites": 1, "rounds": 1, "codec": "none"} | settings) as server:
        with atoll.join(server.url, "a", folder=folder / "w", filters=filters) as worker:
            for fl_round in worker:
                model = fl_round.state_dict()
                found.append(model)
                moved = {name: model[name] + (local[name] - start[name]) for name in model}
                fl_round.submit(moved, weight=5.0, steps=4, metrics={"loss": 0.5})
            found.append(worker.load_into({name: torch.empty_like(value) for name, value in start.items()}))
    return found


def sent(folder: Path, filters: Any, *states: State, **settings: Any) -> State:
    """The first version that is made of the update: of plain averages with one site, what the site has sent."""
    return versions(folder, filters, *states, **settings)[-1]


@pytest.mark.covers("T8")
def test_a_dropped_tensor_stays_unchanged(tmp_path: Path) -> None:
    """A tensor that a filter drops keeps its value in the new version.

    The filters may come from a generator, which can be read only once.
    """
    filters = (each for each in [Drop("w", "*.running_mean", "n")])
    found = sent(tmp_path, filters, START, LOCAL | {"head": torch.tensor([0.5, 1.0])})
    assert found["w"].tolist() == [0.0, 0.0]
    assert found["head"].tolist() == [0.5, 1.0]
    assert (found["bn.running_mean"].item(), found["n"].item()) == (0.0, 7)


@pytest.mark.covers("T8")
@pytest.mark.parametrize(
    ("filters", "w", "mean"),
    [
        # √(3² + 4² + 12²) = 13, so everything is scaled by 6.5 / 13
        pytest.param([NormClip(6.5)], [1.5, 2.0], 6.0, id="parameters and float buffers"),
        pytest.param([NormClip(13.5)], [3.0, 4.0], 12.0, id="a short update stays"),
        pytest.param([Drop("bn.*"), NormClip(2.5)], [1.5, 2.0], 0.0, id="without the buffer the norm is 5"),
        pytest.param([NormClip(6.5), Drop("bn.*")], [1.5, 2.0], 0.0, id="the buffer still counted"),
    ],
)
def test_norm_clip_ignores_dropped_tensors(tmp_path: Path, filters: list[Filter], w: list[float], mean: float) -> None:
    """`NormClip` clips by the norm of all parameters and floating-point buffers that the filters before it have
    left.
    """
    found = sent(tmp_path, filters)
    assert found["w"].tolist() == w
    assert (found["bn.running_mean"].item(), found["n"].item()) == (mean, 9)


@pytest.mark.covers("T8")
@pytest.mark.parametrize(
    ("w", "v"),
    [
        pytest.param([3e200, 4e200], [12e200], id="every square overflows"),
        pytest.param([3.21e153, 4.28e153], [12.84e153], id="only the sum of the squares of both tensors overflows"),
        pytest.param([4.2e307, 5.6e307], [16.8e307], id="the norm itself overflows too"),
    ],
)
def test_norm_clip_handles_fp64_squares_that_overflow(tmp_path: Path, w: list[float], v: list[float]) -> None:
    """`NormClip` clips fp64 values correctly even if their squares, the sum of the squares or the norm
    itself overflow.
    """
    # In the proportion 3 : 4 : 12, the norm is 13 parts, here clipped to 6.5.
    local = {"w": torch.tensor(w, dtype=torch.float64), "v": torch.tensor(v, dtype=torch.float64)}
    start = {name: torch.zeros_like(values) for name, values in local.items()}
    found = sent(tmp_path, [NormClip(6.5)], start, local)
    assert found["w"].tolist() == pytest.approx([1.5, 2.0], rel=1e-14)
    assert found["v"].tolist() == pytest.approx([6.0], rel=1e-14)


def test_cast_rounds_and_keeps_the_dtype(tmp_path: Path) -> None:
    """`Cast` rounds the values to bf16 and keeps the tensor's dtype. bf16 has 8 bits of significand, so 1 + 2⁻⁹ becomes
    1.
    """
    found = sent(tmp_path, [Cast("bf16")], START, LOCAL | {"w": torch.tensor([1.0 + 2.0**-9, 0.0])})
    assert found["w"].tolist() == [1.0, 0.0]


@pytest.mark.covers("T8")
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_filter_that_changes_nothing_changes_no_bit(tmp_path: Path, codec: str) -> None:
    """A filter that returns every value unchanged does not change a bit of the update."""
    # The update has small neighbouring tensors that are encoded together, a tensor of several chunks, and every kind of
    # dtype.
    generator = torch.Generator().manual_seed(0)
    start: dict[str, Tensor] = {f"s{index}": torch.randn(index + 1, generator=generator) for index in range(20)}
    start["large"] = torch.randn(2 * CHUNK_ELEMENTS + 5, generator=generator)
    start["half"] = torch.randn(7, generator=generator).half()
    start["double"] = torch.randn(7, generator=generator).double()
    start["x.running_var"] = torch.rand(9, generator=generator)
    start["x.count"], start["scalar"] = torch.tensor(3), torch.tensor(1.5)
    local = {name: value + 1 for name, value in start.items()}
    plain = sent(tmp_path / "plain", [], start, local, codec=codec)
    filtered = sent(tmp_path / "filtered", [Filter()], start, local, codec=codec)
    assert plain.keys() == filtered.keys()
    assert [name for name in plain if not torch.equal(plain[name], filtered[name])] == []


@pytest.mark.covers("T8")
def test_a_filter_gets_every_element_once(tmp_path: Path) -> None:
    """A filter gets each element of a large tensor once, in chunks of at most `CHUNK_ELEMENTS`."""

    class Spy(Filter):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, int]] = []

        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            self.seen.append((name, start, len(values)))
            return values

    numel = 2 * CHUNK_ELEMENTS + 5
    spy = Spy()
    sent(tmp_path, [spy], {"w": torch.zeros(numel)}, {"w": torch.ones(numel)})
    assert spy.seen == [("w", 0, CHUNK_ELEMENTS), ("w", CHUNK_ELEMENTS, CHUNK_ELEMENTS), ("w", 2 * CHUNK_ELEMENTS, 5)]


@pytest.mark.covers("T8")
def test_a_filter_may_read_the_whole_update(tmp_path: Path) -> None:
    """Before a filter handles an update, it may read its whole tensors and its metadata. Dropped tensors are not among
    them.
    """

    class Curious(Filter):
        def begin(self, update: Outgoing) -> None:
            self.about, self.names = update.about, list(update.tensors)
            self.head, self.w = update.tensor("head"), update.tensor("w")
            self.runs = [(name, start, values.tolist()) for name, start, values in update.runs()]

    curious = Curious()
    sent(tmp_path, [Drop("n"), curious])
    assert curious.about == About("a", round=1, version=0, weight=5.0, steps=4, metrics={"loss": 0.5})
    assert sorted(curious.names) == ["bn.running_mean", "head", "w"]
    assert (curious.w.tolist(), curious.head.tolist()) == ([-3.0, -4.0], [0.0, 0.0])
    assert sorted(curious.runs) == [("bn.running_mean", 0, [-12.0]), ("head", 0, [0.0, 0.0]), ("w", 0, [-3.0, -4.0])]


def test_noise_differs_by_tensor_chunk_and_round(tmp_path: Path) -> None:
    """The noise of `NormClip` has the expected size and differs between tensors, between chunks and between rounds."""
    # The same seed gives the same noise. The standard deviation is z·C = 2 · 1.5 = 3, here within 1 %, which is more
    # than 6 standard errors.
    numel = 2 * CHUNK_ELEMENTS  # two runs of each tensor
    start = {"v": torch.zeros(numel), "w": torch.zeros(numel)}
    filters = [NormClip(1.5, noise=2.0, seed=bytes(range(32)))]
    start, first, second = versions(tmp_path / "run", filters, start, start, rounds=2)
    again = sent(tmp_path / "again", filters, start, start)
    second = {name: second[name] - first[name] for name in first}
    assert first["v"].std().item() == pytest.approx(3.0, rel=0.01)
    assert abs(first["v"].mean().item()) < 6 * 3 / math.sqrt(numel)
    assert torch.equal(first["v"], again["v"])
    assert not torch.equal(first["v"], second["v"])
    assert not torch.equal(first["v"], first["w"])
    assert not torch.equal(first["v"][:CHUNK_ELEMENTS], first["v"][CHUNK_ELEMENTS:])


class Spoils(Filter):
    """Keeps what it has seen of each update, and spoils the first one, which the server refuses."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def begin(self, update: Outgoing) -> None:
        self.seen.append(update.tensor("w"))

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return values * math.nan if len(self.seen) == 1 else values


def test_two_updates_of_a_round_get_different_noise(tmp_path: Path) -> None:
    """If a round's first update is refused and the site trains again, the second update gets other noise.

    With equal noise, the difference of the two would show the change without noise.
    """
    spoils = Spoils()
    assert len(versions(tmp_path, [NormClip(1.0, noise=1.0), spoils])) == 3  # the first round is given twice
    assert not torch.equal(*spoils.seen)


def test_filters_without_a_seed_have_different_noise(tmp_path: Path) -> None:
    """Two filters without a seed have different noise.

    With equal noise, two sites could cancel it in each other's updates.
    """
    found = [sent(tmp_path / name, [NormClip(1.0, noise=1.0)])["w"] for name in ("a", "b")]
    assert not torch.equal(*found)


class Applies(Filter):
    """Does what it is given to one run."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change = change

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return self.change(values)


class Undecided(Filter):
    def keeps(self, spec: Any) -> bool:
        raise KeyError("salt")


@pytest.mark.covers("T8")
@pytest.mark.parametrize(
    ("filters", "told"),
    [
        ([Undecided()], r"Undecided\(\) failed at '[\w.]+': KeyError: 'salt'"),
        (
            [Applies(lambda values: values[1:])],
            r"Applies.* changed 'w' from torch.float32 \[2\] to torch.float32 \[1\]",
        ),
        ([Applies(Tensor.double)], r"Applies.* changed 'w' from torch.float32 \[2\] to torch.float64"),
        ([Applies(lambda values: None)], r"Applies.* changed 'w' from torch.float32 \[2\] to NoneType"),
        ([Applies(lambda values: 1 / 0)], r"Applies.* failed at 'w': ZeroDivisionError: division by zero"),
        ([Drop("haed")], r"no tensor of the model matches 'haed'.*nothing was sent.*Did you mean 'head'"),
        ([lambda values: values], "is not a filter"),
        (Drop("w"), r"filters is Drop\('w'\), not a list.*Pass a list: \[Drop\('w'\)\]"),
    ],
    ids=["undecided", "shorter", "wider", "forgetful", "broken", "unknown name", "function", "alone"],
)
def test_a_filter_that_breaks_its_contract_is_refused(tmp_path: Path, filters: Any, told: str) -> None:
    """If a filter raises, changes a tensor's shape or dtype, or names an unknown tensor, `submit` raises an error with
    the filter's name.

    An object that is no filter, or no list of filters, is refused too.
    """
    with pytest.raises(UsageError, match=told):
        sent(tmp_path, filters)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Drop(), "needs at least one tensor name"),
        (lambda: Cast("fp8"), "only bf16 and fp16 are possible"),
        (lambda: NormClip(0.0), "not positive and finite"),
        (lambda: NormClip(math.nan), "not positive and finite"),
        (lambda: NormClip(1.0, noise=-1.0), "negative or not finite"),
    ],
    ids=["drop", "cast", "zero", "nan", "noise"],
)
def test_wrong_filter_options_are_refused_at_once(make, told: str) -> None:
    """A filter with wrong options raises when it is created."""
    with pytest.raises(UsageError, match=told):
        make()


def test_a_filter_may_drop_integers(tmp_path: Path) -> None:
    """A filter may drop an integer tensor from the update. It gets only floating-point values to change."""

    class OnlyFloats(Filter):
        def keeps(self, spec: Any) -> bool:
            return spec.name != "n"

        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            assert values.is_floating_point()
            return values

    assert sent(tmp_path, [OnlyFloats()])["n"].item() == 7
