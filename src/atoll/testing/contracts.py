"""Suites of tests that every codec, reducer, outer optimizer and payload type, including your own, must pass.

To test your own implementation, subclass the suite for it:

    class TestMyCodec(CodecContract):
        codec = MyCodec()
        relative_error = 2**-8

    class TestMyReducer(ReducerContract):
        reducer = MyReducer()
        dtypes = (torch.float32,)

    class TestMyOptimizer(OuterContract):
        target = MyOptimizer                    # or a name, or "module:attribute"
        options = {"lr": 0.1}
        granularity = "chunk"

    class TestMyFile(PayloadTypeContract):
        in_memory = False

        def make(self, folder, nbytes): ...
        def same(self, one, other): ...
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.blobs.object_file import Contents, Stored, write_object
from atoll.blobs.ways_to_send import Cut
from atoll.codecs import Codec
from atoll.errors import UsageError
from atoll.outer_optimizers import OuterRule, build_outer
from atoll.outer_optimizers.torch_optimizer import Granularity, OuterState
from atoll.posix import read_at
from atoll.reducers import Reducer, RoundFacts, normalised
from atoll.registry import OwnName
from atoll.tensors.custom_types import kind_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import TILE
from atoll.tensors.payload import pack
from atoll.tensors.schema import BUFFERS, FLOATS, ITEM_BYTES, TensorSpec

_FLOATS = ("F64", "F32", "F16", "BF16")
_SIZES = (0, 1, 63, TILE, TILE + 1, 3 * TILE + 517)


class CodecContract:
    """The tests that every codec must pass. Set `codec` and `relative_error` in a subclass.

    A tile is a fixed number of consecutive elements, which are encoded independently of other tiles.
    """

    codec: ClassVar[Codec]
    relative_error: ClassVar[float]
    """Maximum error of a decoded element, divided by the largest magnitude in its tile."""

    def _encode(self, values: Tensor, dtype: str) -> Tensor:
        target = torch.zeros(self.codec.encoded_bytes(values.numel(), dtype), dtype=torch.uint8)
        self.codec.encode_(values, target, dtype)
        return target

    def _decode(self, encoded: Tensor, numel: int, dtype: str, out: torch.dtype | None = None) -> Tensor:
        target = torch.empty(numel, dtype=out or torch_dtype(dtype))
        self.codec.decode_(encoded, target, dtype)
        return target

    def _values(self, numel: int, dtype: str) -> Tensor:
        generator = torch.Generator().manual_seed(numel)
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(torch_dtype(dtype))

    def test_it_is_a_codec(self) -> None:
        """Check that the codec has all members of `Codec`, and equals a copy of itself."""
        assert isinstance(self.codec, Codec)
        assert self.codec == copy.deepcopy(self.codec)  # the codec is a value: it has no state between calls

    @pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
    def test_the_rate_is_fixed_and_additive_over_whole_tiles(self, dtype: str) -> None:
        """Check for every dtype that the encoded size of whole tiles adds up, so that each tile has a known offset."""
        size = self.codec.encoded_bytes
        assert size(0, dtype) == 0
        for rest in _SIZES:
            assert size(2 * TILE + rest, dtype) == 2 * size(TILE, dtype) + size(rest, dtype)

    @pytest.mark.parametrize("numel", _SIZES)
    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_a_round_trip_stays_within_the_bound(self, dtype: str, numel: int) -> None:
        """Decode to fp64, and check that each tile's error is at most `relative_error` × its largest magnitude."""
        values = self._values(numel, dtype)
        back = self._decode(self._encode(values, dtype), numel, dtype, torch.float64)
        for start in range(0, numel, TILE):
            tile = values[start : start + TILE].double()
            error = (back[start : start + TILE] - tile).abs().max()
            assert error <= self.relative_error * tile.abs().max()

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_any_run_of_tiles_decodes_alone_to_the_same_bits(self, dtype: str) -> None:
        """Decode ranges of whole tiles, each from its own bytes, and compare with decoding everything at once."""
        numel = 3 * TILE + 517
        encoded = self._encode(self._values(numel, dtype), dtype)
        whole = self._decode(encoded, numel, dtype)
        for start, stop in ((0, TILE), (TILE, 3 * TILE), (2 * TILE, numel), (3 * TILE, numel)):
            low, high = (self.codec.encoded_bytes(at, dtype) for at in (start, stop))
            alone = self._decode(encoded[low:high].clone(), stop - start, dtype)
            assert torch.equal(alone.view(torch.uint8), whole[start:stop].view(torch.uint8))

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_any_run_of_tiles_encodes_alone_to_the_same_bytes(self, dtype: str) -> None:
        """Encode tile by tile, and compare with encoding everything at once. Workers encode updates piece by piece."""
        values = self._values(3 * TILE + 517, dtype)
        runs = [self._encode(values[start : start + TILE], dtype) for start in range(0, values.numel(), TILE)]
        assert torch.equal(torch.cat(runs), self._encode(values, dtype))

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_segments_without_padding_decode_as_one_where_it_says_so(self, dtype: str) -> None:
        """Encode two segments separately and joined, and check that an elementwise codec gives the same bytes.

        Skip codecs that are not elementwise.
        """
        if not self.codec.elementwise:
            pytest.skip("the codec is not elementwise")
        one, two = self._values(63, dtype), self._values(130, dtype)
        joined = torch.cat([self._encode(one, dtype), self._encode(two, dtype)])
        assert torch.equal(joined, self._encode(torch.cat([one, two]), dtype))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_what_is_not_finite_stays_so_and_can_be_detected(self, dtype: str, bad: float) -> None:
        """Put NaN or Inf into the second of two tiles, and check that only this tile decodes to a non-finite value."""
        values = self._values(TILE + 5, dtype)
        values[TILE + 3] = bad
        back = self._decode(self._encode(values, dtype), values.numel(), dtype)
        assert not bool(back[TILE:].isfinite().all())
        assert bool(back[:TILE].isfinite().all())

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_nan_among_equals_is_not_passed_over(self, dtype: str) -> None:
        """Put one NaN among many equal values, and check that it does not get lost. Codecs that sort can lose it."""
        for equals in (1, 15, 63, 64, TILE - 1):
            values = torch.zeros(TILE, dtype=torch_dtype(dtype))
            values[:equals] = 2.0
            values[TILE - 1] = float("nan")
            assert not bool(self._decode(self._encode(values, dtype), TILE, dtype).isfinite().all())

    @pytest.mark.parametrize("numel", _SIZES)
    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_what_is_encoded_stays_and_what_is_decoded_overwrites(self, dtype: str, numel: int) -> None:
        """Check that encoding and decoding keep the source, overwrite the whole target, and write nothing else."""
        values = self._values(numel, dtype)
        encoded = self._encode(values, dtype)
        assert torch.equal(values, self._values(numel, dtype))
        kept = encoded.clone()
        around = torch.full((numel + 2,), float("nan"), dtype=torch.float32)
        self.codec.decode_(encoded, around[1:-1], dtype)
        assert torch.equal(around[1:-1], self._decode(encoded, numel, dtype, torch.float32))
        assert bool(around[[0, -1]].isnan().all())
        assert torch.equal(encoded, kept)
        again = torch.full_like(encoded, 255)
        self.codec.encode_(values, again, dtype)
        assert torch.equal(again, encoded)  # padding included

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_a_program_may_have_another_default_dtype_and_device(self, dtype: str) -> None:
        """Check that the codec does not depend on torch's default dtype and device, which a program may change."""
        values = self._values(TILE + 517, dtype)
        encoded = self._encode(values, dtype)
        wide = self._decode(encoded, values.numel(), dtype, torch.float64)
        target, source = torch.empty_like(wide), torch.zeros_like(encoded)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"):
                self.codec.encode_(values, source, dtype)
                self.codec.decode_(encoded, target, dtype)
        finally:
            torch.set_default_dtype(before)
        assert torch.equal(source, encoded)
        assert torch.equal(target, wide)

    def test_the_difference_of_two_fp16_values_stays_finite(self) -> None:
        """Check that differences beyond fp16's range stay finite. Skip raw codecs: fp16 updates do not use them."""
        if self.codec.raw:
            pytest.skip("the codec is raw")
        values = torch.tensor([131008.0, -131008.0, 1.0])
        encoded = torch.empty(self.codec.encoded_bytes(3, "F16"), dtype=torch.uint8)
        self.codec.encode_(values, encoded, "F16")
        back = self._decode(encoded, 3, "F16", torch.float32)
        assert bool(back.isfinite().all())
        assert (back - values).abs().max() <= max(self.relative_error, 2**-8) * 131008.0

    @pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - FLOATS))
    def test_integers_come_back_as_they_were(self, dtype: str) -> None:
        """Check that every integer dtype and BOOL is encoded without loss, even by codecs that are lossy for floats."""
        values = torch.arange(300).remainder(2 if dtype == "BOOL" else 128).to(torch_dtype(dtype))
        assert torch.equal(self._decode(self._encode(values, dtype), 300, dtype), values)

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_what_it_says_are_raw_elements_are_their_bytes(self, dtype: str) -> None:
        """Check that a raw codec writes the elements' bytes, because readers do not decode them; skip other codecs."""
        if not self.codec.raw:
            pytest.skip("the codec is not raw")
        values = self._values(300, dtype)
        assert torch.equal(self._encode(values, dtype), values.view(torch.uint8))

    def test_it_decodes_straight_into_the_dtype_of_the_sum(self) -> None:
        """Decode fp16 data to fp32, round the result to fp16, and compare with decoding to fp16 directly."""
        values = self._values(100, "F16")
        encoded = self._encode(values, "F16")
        wide = self._decode(encoded, 100, "F16", torch.float32)
        assert torch.equal(wide.half(), self._decode(encoded, 100, "F16"))


class ReducerContract:
    """The tests that every reducer must pass. A reducer combines a round's updates. Set `reducer` in a subclass."""

    reducer: ClassVar[Reducer]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64)

    def _reduce(self, rows: list[Tensor], weights: list[float]) -> Tensor:
        out = torch.empty_like(rows[0])
        given = torch.stack(rows) if self.reducer.needs_all else iter([row.clone() for row in rows])
        self.reducer.reduce_(given, weights, out)
        return out

    def _cut(self, rows: list[Tensor], at: int, size: int) -> list[Tensor]:
        return [row[at : at + size].clone() for row in rows]

    def _rows(self, dtype: torch.dtype, k: int = 4, n: int = 1237) -> list[Tensor]:
        generator = torch.Generator().manual_seed(k)
        rows = [torch.randn(n, generator=generator, dtype=torch.float64) * 100 for _ in range(k)]
        return [row.to(dtype) for row in rows]

    def test_it_is_a_reducer(self) -> None:
        """Check that the reducer is an instance of `Reducer`."""
        assert isinstance(self.reducer, Reducer)

    def test_one_update_is_its_own_reduction(self) -> None:
        """Reduce one update with weight 1, for each of `dtypes`, and check that the result is bit-identical to it."""
        for dtype in self.dtypes:
            (row,) = self._rows(dtype, k=1)
            assert torch.equal(self._reduce([row], [1.0]), row)

    def test_equal_updates_are_their_own_reduction(self) -> None:
        """Reduce four equal updates with weight 1/4, for each of `dtypes`, and check that the result equals them."""
        for dtype in self.dtypes:
            (row,) = self._rows(dtype, k=1)
            reduced = self._reduce([row] * 4, [0.25] * 4)  # quarters add up without rounding
            assert torch.equal(reduced, row)

    def test_it_weighs_every_update_and_none_twice_as_much_as_its_share(self) -> None:
        """Weigh three updates with equal norms and steps: each share must be the weight / the sum of weights."""
        facts = RoundFacts([1.0, 2.0, 1.0], [3.0, 3.0, 3.0], [5, 5, 5])  # equal norms, so that nothing is clipped
        weights = self.reducer.weigh(facts)
        assert weights == [0.25, 0.5, 0.25]

    @pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
    def test_it_refuses_a_weight_that_is_none(self, weight: float) -> None:
        """Expect `UsageError` for a weight that is zero, negative or not finite."""
        with pytest.raises(UsageError, match="above zero"):
            self.reducer.weigh(RoundFacts([1.0, weight], [1.0, 1.0], [1, 1]))

    @pytest.mark.parametrize("size", [1, 7, 64, 1000])
    def test_no_cut_changes_a_bit(self, size: int) -> None:
        """Reduce updates in chunks of `size` elements and as a whole, and compare. A server may use any chunk size."""
        for dtype in self.dtypes:
            rows, weights = self._rows(dtype), normalised([1.0, 2.0, 3.5, 0.1])
            cut = [self._reduce(self._cut(rows, at, size), weights) for at in range(0, rows[0].numel(), size)]
            assert torch.equal(torch.cat(cut), self._reduce(rows, weights))

    @pytest.mark.parametrize("size", [1, 7, 64, 1000])
    def test_no_cut_changes_the_sign_of_a_zero(self, size: int) -> None:
        """Reduce four updates of ±0 with all combinations of signs, in chunks and as a whole; compare the signs."""
        for dtype in self.dtypes:
            if not dtype.is_floating_point:
                continue
            zeros = torch.zeros(1237 if size > 7 else 137, dtype=dtype)  # fills several vector registers and a part
            weights = normalised([1.0, 2.0, 3.5, 0.1])
            for signs in itertools.product([zeros, -zeros], repeat=4):
                rows = list(signs)
                cut = [self._reduce(self._cut(rows, at, size), weights) for at in range(0, zeros.numel(), size)]
                assert torch.equal(torch.signbit(torch.cat(cut)), torch.signbit(self._reduce(rows, weights)))

    def test_a_row_may_be_overwritten_by_the_next(self) -> None:
        """Check a reducer that gets the updates one by one in the same buffer. Skip reducers that need all rows."""
        if self.reducer.needs_all:
            pytest.skip("the reducer gets all rows at once")
        for dtype in self.dtypes:
            rows, weights = self._rows(dtype), normalised([1.0, 2.0, 3.5, 0.1])
            buffer, out = torch.empty_like(rows[0]), torch.empty_like(rows[0])
            self.reducer.reduce_((buffer.copy_(row) for row in rows), weights, out)
            assert torch.equal(out, self._reduce(rows, weights))


class OuterContract:
    """The tests that every outer optimizer must pass. Set `target` and the other attributes in a subclass.

    An outer optimizer is the torch optimizer with which the server applies the averaged update to the global model.

    The expected results come from the same torch optimizer on whole tensors.
    """

    target: ClassVar[str | Callable[..., Optimizer]]
    options: ClassVar[Mapping[str, Any]] = {}
    granularity: ClassVar[Granularity] = "chunk"
    shape: ClassVar[tuple[int, ...]] = (130, 1001)
    rounds: ClassVar[int] = 4

    @pytest.fixture
    def rule(self) -> OuterRule:
        """Build `target` with `options`, as a server does: a trial run shows whether the optimizer can step chunks."""
        return build_outer(OwnName(self.target) if isinstance(self.target, str) else self.target, self.options)

    def _numbers(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        return [torch.randn(self.shape, generator=generator, dtype=dtype) for _ in range(1 + self.rounds)]

    def _whole(self, rule: OuterRule, values: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        parameter = torch.nn.Parameter(values[0].clone())
        optimizer = rule.make([parameter])
        for gradient in values[1:]:
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach(), dict(optimizer.state[parameter])

    def _chunked(self, rule: OuterRule, values: list[Tensor], size: int) -> tuple[Tensor, list[OuterState]]:
        """Step chunk by chunk in each round, as the server does. Each chunk has its own state, 0-d tensors included."""
        flat = [value.clone().reshape(-1) for value in values]
        starts = range(0, flat[0].numel(), size)
        states: list[OuterState] = []
        stepper = rule.stepper()
        for gradient in flat[1:]:
            before = states
            states = []
            for index, start in enumerate(starts):
                run = slice(start, start + size)
                state = {key: value.clone() for key, value in before[index].items()} if before else None
                states += stepper.step_([flat[0][run]], [gradient[run]], None if state is None else [state])
        return flat[0].reshape(self.shape), states

    def test_it_runs_as_expected(self, rule: OuterRule) -> None:
        """Check that a trial run finds the same granularity (chunks or whole tensors) as the subclass states."""
        assert rule.granularity == self.granularity

    @pytest.mark.parametrize("size", [7 * 64, 4096, 5 * 4096])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_chunks_come_to_the_bits_of_the_whole_tensor(self, rule: OuterRule, dtype: torch.dtype, size: int) -> None:
        """Step chunks and whole tensors, and compare parameters and state. Skip optimizers that need whole tensors."""
        if rule.granularity == "tensor":
            pytest.skip("the optimizer needs whole tensors")
        values = self._numbers(dtype)
        expected, state = self._whole(rule, values)
        result, states = self._chunked(rule, values, size)
        assert torch.equal(result, expected)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                assert torch.equal(torch.cat([chunk[key] for chunk in states]), value.reshape(-1))
            elif value is not None:
                assert all(chunk[key].item() == float(value) for chunk in states)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_state_put_away_between_rounds_changes_nothing(self, rule: OuterRule, dtype: torch.dtype) -> None:
        """Step each round with a new stepper and a copy of the state; compare with a single optimizer object."""
        values = self._numbers(dtype)
        parameter, state = values[0].clone(), None
        for gradient in values[1:]:
            stepper = rule.stepper()  # a server restart also makes a new stepper
            (after,) = stepper.step_([parameter], [gradient.clone()], None if state is None else [state])
            state = {key: value.clone() for key, value in after.items()}
        assert torch.equal(parameter, self._whole(rule, values)[0])

    def test_many_tensors_in_one_step_are_stepped_each_for_itself(self, rule: OuterRule) -> None:
        """Step two tensors together and alone, and check that the results are bit-identical."""
        values = self._numbers(torch.float32)
        one, two = values[0].clone(), values[1].clone()
        rule.stepper().step_([one, two], [values[2].clone(), values[3].clone()], None)
        for start, gradient, result in ((values[0], values[2], one), (values[1], values[3], two)):
            alone = start.clone()
            rule.stepper().step_([alone], [gradient.clone()], None)
            assert torch.equal(alone, result)

    def test_the_state_is_declared_as_it_is(self, rule: OuterRule) -> None:
        """Compare the declared state (`state_specs`) with the real one after a step: keys, their order, and shapes."""
        (state,) = rule.stepper().step_([torch.ones(6, 8)], [torch.ones(6, 8)], None)
        declared = rule.state_specs(TensorSpec("w", "BF16", (6, 8)))
        assert [spec.key for spec in declared] == list(state)
        for spec in declared:
            assert state[spec.key].shape == torch.Size((6, 8) if spec.shape is None else spec.shape)

    def test_buffers_and_integers_have_no_state(self, rule: OuterRule) -> None:
        """Check that no state is declared for a float buffer or for an int8 parameter."""
        assert rule.state_specs(TensorSpec("m", "F32", (3,), BUFFERS)) == []
        assert rule.state_specs(TensorSpec("q", "I8", (3,))) == []

    def test_what_decides_the_bits_is_said_outright(self, rule: OuterRule) -> None:
        """Check that `fused` and `foreach` are set. If they were None, torch would choose, and results could differ."""
        described = rule.describe()
        assert described["foreach"] is not None or "foreach" not in described["options"]
        assert described["fused"] is not None or "fused" not in described["options"]
        assert described["granularity"] == rule.granularity


PART_BYTES = 2**20
LARGE_BYTES = 96 * 2**20
MORE_BYTES = 32 * 2**20
"""Allowed memory growth while sending or receiving a value of `LARGE_BYTES`, beyond the value itself."""


class PayloadTypeContract:
    """The tests that a type registered with `atoll.objects.register` must pass. Override `make` and `same`.

    Attributes:
        in_memory: whether a value's data is in memory, as for a tensor; False for a file.
    """

    in_memory: ClassVar[bool] = True

    def make(self, folder: Path, nbytes: int) -> Any:
        """Return a value of about `nbytes` bytes, equal in each such call. Create files only in `folder`."""
        raise NotImplementedError

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two values are bit-identical."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _large_files_go(self, tmp_path: Path) -> Iterator[None]:
        yield
        shutil.rmtree(tmp_path)

    @pytest.mark.parametrize("nbytes", [0, 1000, 5_000_001])
    def test_it_arrives_as_it_was_sent(self, tmp_path: Path, nbytes: int) -> None:
        """Send a value of no bytes, of a few bytes, or of several parts, and compare the received value with it."""
        value = self.make(tmp_path, nbytes)
        arrived = there_and_back(value)
        assert type(arrived) is type(value)
        assert self.same(arrived, value)

    def test_values_differ(self, tmp_path: Path) -> None:
        """Check that `same` finds a difference; otherwise the other tests would prove nothing."""
        assert not self.same(self.make(tmp_path, 1000), self.make(tmp_path, 2000))

    def test_sending_does_not_change_it(self, tmp_path: Path) -> None:
        """Send a value, then compare it with an equal value that was not sent."""
        value = self.make(tmp_path, 1000)
        there_and_back(value)
        assert self.same(value, self.make(tmp_path, 1000))

    def test_it_can_be_sent_again_and_is_the_same_bytes(self, tmp_path: Path) -> None:
        """Check that sending a value twice gives the same bytes, because an interrupted transfer starts again."""
        value = self.make(tmp_path, 100_000)
        assert _digest(value) == _digest(value)

    def test_it_lies_among_other_things_and_twice(self, tmp_path: Path) -> None:
        """Send values nested in dicts, lists and tuples, one of them in two places."""
        value, other = self.make(tmp_path, 1000), self.make(tmp_path, 70_000)
        tree = {"a": value, "b": [other, {"w": torch.arange(3)}, (value, None)]}
        arrived = there_and_back(tree)
        assert torch.equal(arrived["b"][1]["w"], torch.arange(3))
        assert arrived["b"][2][1] is None
        found = (arrived["a"], arrived["b"][2][0], arrived["b"][0])
        assert all(self.same(*pair) for pair in zip(found, (value, value, other), strict=True))

    def test_what_stands_for_it_is_small(self, tmp_path: Path) -> None:
        """Check that a packed value has its data in streams and tensors: the rest is in memory, and must be small."""
        packed = pack(self.make(tmp_path, LARGE_BYTES))
        assert len(json.dumps(packed.skeleton)) < 2**16
        assert sum(part.nbytes for part in packed.tensors) >= LARGE_BYTES / 2

    def test_sending_it_takes_a_few_chunks_of_memory(self, tmp_path: Path) -> None:
        """Write a value of `LARGE_BYTES` to a file, and check that memory use grows by less than `MORE_BYTES`."""
        value = self.make(tmp_path, LARGE_BYTES)
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            assert peak_growth(lambda: write_object(pack(value), file.fileno(), Cut(PART_BYTES))) < MORE_BYTES

    def test_receiving_it_takes_a_few_chunks_beyond_the_value(self, tmp_path: Path) -> None:
        """Read a value of `LARGE_BYTES`. Memory use may grow by `MORE_BYTES`, plus the value's size if `in_memory`."""
        stored, arrived = written(self.make(tmp_path, LARGE_BYTES)), []
        growth = peak_growth(lambda: arrived.append(stored.tree()))
        assert growth < MORE_BYTES + (LARGE_BYTES if self.in_memory else 0)

    def test_the_file_that_it_came_in_goes_with_it(self, tmp_path: Path) -> None:
        """Check that the file in which a value was received is released when the value is deleted."""
        stored = written(self.make(tmp_path, 1000))
        handle, arrived = weakref.ref(stored.handle), stored.tree()
        del stored, arrived
        gc.collect()
        assert handle() is None

    def test_it_is_registered(self, tmp_path: Path) -> None:
        """Check that the value's type is registered with `atoll.objects.register`."""
        assert kind_of(self.make(tmp_path, 1000)) is not None


def written(tree: Any) -> Stored:
    """Write a value to a file, and return the file as if another process had sent it."""
    with tempfile.TemporaryFile() as file:
        cuts = write_object(pack(tree), file.fileno(), Cut(PART_BYTES)).cuts
        fd = os.dup(file.fileno())
    contents = Contents.read(os.pread(fd, cuts.head_bytes, 0), cuts, "The value")
    return Stored(contents, lambda offset, memory: read_at(fd, memory, offset), lambda: os.close(fd))


def there_and_back(tree: Any) -> Any:
    """Return a value after sending and receiving it."""
    return written(tree).tree()


def peak_growth(work: Callable[[], Any]) -> int:
    """Return the maximum growth of this process's memory during `work`, in bytes. Linux only."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _kib("VmRSS")
    work()
    return (_kib("VmHWM") - before) * 1024


def _kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _digest(value: Any) -> str:
    with tempfile.TemporaryFile() as file:
        return write_object(pack(value), file.fileno(), Cut(PART_BYTES)).id
