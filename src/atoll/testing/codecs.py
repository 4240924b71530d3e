"""The contract suite of codecs. To test your codec, subclass the suite.

class TestMine(CodecContract):
    codec = MyCodec()
    relative_error = 2**-8
"""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from atoll.codecs.base import Codec
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import TILE
from atoll.tensors.schema import FLOATS, ITEM_BYTES

_FLOATS = ("F64", "F32", "F16", "BF16")
_SIZES = (0, 1, 63, TILE, TILE + 1, 3 * TILE + 517)


class CodecContract:
    """The tests that every codec must pass. Set `codec` and `relative_error` in a subclass."""

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
        """Check for every dtype that `encoded_bytes` adds up, so that a tile's offset depends only on its number."""
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
        """Decode ranges that start at tiles, each from its own bytes, and compare with decoding everything at once."""
        numel = 3 * TILE + 517
        encoded = self._encode(self._values(numel, dtype), dtype)
        whole = self._decode(encoded, numel, dtype)
        for start, stop in ((0, TILE), (TILE, 3 * TILE), (2 * TILE, numel), (3 * TILE, numel)):
            low, high = (self.codec.encoded_bytes(at, dtype) for at in (start, stop))
            alone = self._decode(encoded[low:high].clone(), stop - start, dtype)
            assert torch.equal(alone.view(torch.uint8), whole[start:stop].view(torch.uint8))

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_any_run_of_tiles_encodes_alone_to_the_same_bytes(self, dtype: str) -> None:
        """Encode tile by tile, and compare with encoding everything at once. Workers encode updates in such ranges."""
        values = self._values(3 * TILE + 517, dtype)
        runs = [self._encode(values[start : start + TILE], dtype) for start in range(0, values.numel(), TILE)]
        assert torch.equal(torch.cat(runs), self._encode(values, dtype))

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_segments_without_padding_decode_as_one_where_it_says_so(self, dtype: str) -> None:
        """Check that an elementwise codec gives the same bytes for two joined segments as for one; skip others."""
        if not self.codec.elementwise:
            pytest.skip("its elements are not written by themselves")
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
        """Set torch's default dtype to bf16 and device to meta, and check that the codec does not depend on them."""
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
        """Encode differences that exceed fp16's range; skip raw codecs, since Atoll widens fp16 with them."""
        if self.codec.raw:
            pytest.skip("it writes them as they are")
        values = torch.tensor([131008.0, -131008.0, 1.0])
        encoded = torch.empty(self.codec.encoded_bytes(3, "F16"), dtype=torch.uint8)
        self.codec.encode_(values, encoded, "F16")
        back = self._decode(encoded, 3, "F16", torch.float32)
        assert bool(back.isfinite().all())
        assert (back - values).abs().max() <= max(self.relative_error, 2**-8) * 131008.0

    @pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - FLOATS))
    def test_integers_come_back_as_they_were(self, dtype: str) -> None:
        """Check that every integer dtype and BOOL is encoded without loss, also by codecs that are lossy for floats."""
        values = torch.arange(300).remainder(2 if dtype == "BOOL" else 128).to(torch_dtype(dtype))
        assert torch.equal(self._decode(self._encode(values, dtype), 300, dtype), values)

    @pytest.mark.parametrize("dtype", _FLOATS)
    def test_what_it_says_are_raw_elements_are_their_bytes(self, dtype: str) -> None:
        """Check that a raw codec writes the elements' bytes, because readers do not decode them; skip other codecs."""
        if not self.codec.raw:
            pytest.skip("it writes them in another way")
        values = self._values(300, dtype)
        assert torch.equal(self._encode(values, dtype), values.view(torch.uint8))

    def test_it_decodes_straight_into_the_dtype_of_the_sum(self) -> None:
        """Decode fp16 data to fp32, round it to fp16, and compare with decoding to fp16."""
        values = self._values(100, "F16")
        encoded = self._encode(values, "F16")
        wide = self._decode(encoded, 100, "F16", torch.float32)
        assert torch.equal(wide.half(), self._decode(encoded, 100, "F16"))
