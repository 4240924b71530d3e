"""The contract suite of reducers. To test your reducer, subclass the suite.

class TestMine(ReducerContract):
    reducer = MyReducer()
    dtypes = (torch.float32,)
"""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.reducers.base import Reducer, RoundFacts, normalised


class ReducerContract:
    """The tests that every reducer must pass. Set `reducer` in a subclass."""

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
        """Reduce one row with weight 1, for each of `dtypes`, and check that the result has the row's bits."""
        for dtype in self.dtypes:
            (row,) = self._rows(dtype, k=1)
            assert torch.equal(self._reduce([row], [1.0]), row)

    def test_equal_updates_are_their_own_reduction(self) -> None:
        """Reduce four equal rows with weight 1/4, for each of `dtypes`, and check that the result has their bits."""
        for dtype in self.dtypes:
            (row,) = self._rows(dtype, k=1)
            reduced = self._reduce([row] * 4, [0.25] * 4)  # quarters add up without rounding
            assert torch.equal(reduced, row)

    def test_it_weighs_every_update_and_none_twice_as_much_as_its_share(self) -> None:
        """Weigh three updates with equal norms and steps, and check that each gets its weight divided by the sum."""
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
        """Reduce chunks of `size` elements and whole rows, and compare. Chunk sizes depend on the memory of a round."""
        for dtype in self.dtypes:
            rows, weights = self._rows(dtype), normalised([1.0, 2.0, 3.5, 0.1])
            cut = [self._reduce(self._cut(rows, at, size), weights) for at in range(0, rows[0].numel(), size)]
            assert torch.equal(torch.cat(cut), self._reduce(rows, weights))

    @pytest.mark.parametrize("size", [1, 7, 64, 1000])
    def test_no_cut_changes_the_sign_of_a_zero(self, size: int) -> None:
        """Do the same with four rows of zeros, for every combination of signs, and compare the signs of the results."""
        for dtype in self.dtypes:
            if not dtype.is_floating_point:
                continue
            zeros = torch.zeros(1237 if size > 7 else 137, dtype=dtype)  # several vector registers, and a rest
            weights = normalised([1.0, 2.0, 3.5, 0.1])
            for signs in itertools.product([zeros, -zeros], repeat=4):
                rows = list(signs)
                cut = [self._reduce(self._cut(rows, at, size), weights) for at in range(0, zeros.numel(), size)]
                assert torch.equal(torch.signbit(torch.cat(cut)), torch.signbit(self._reduce(rows, weights)))

    def test_a_row_may_be_overwritten_by_the_next(self) -> None:
        """Give all rows one after the other in one buffer; skip a reducer with `needs_all`."""
        if self.reducer.needs_all:
            pytest.skip("it is given the rows at once")
        for dtype in self.dtypes:
            rows, weights = self._rows(dtype), normalised([1.0, 2.0, 3.5, 0.1])
            buffer, out = torch.empty_like(rows[0]), torch.empty_like(rows[0])
            self.reducer.reduce_((buffer.copy_(row) for row in rows), weights, out)
            assert torch.equal(out, self._reduce(rows, weights))
