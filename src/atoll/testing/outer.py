"""The contract suite of outer optimizers. To test your optimizer, subclass the suite.

class TestMine(OuterContract):
    target = MyOptimizer                    # or a name, or "module:attribute"
    options = {"lr": 0.1}
    granularity = "chunk"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.outer_optimizers import build_outer
from atoll.outer_optimizers.torch_optimizer import Granularity, OuterRule, State
from atoll.tensors.schema import BUFFERS, TensorSpec


class OuterContract:
    """The tests that every outer optimizer must pass. Set `target` and its options in a subclass.

    The expected results come from the same torch optimizer on whole tensors.
    """

    target: ClassVar[str | Callable[..., Optimizer]]
    options: ClassVar[Mapping[str, Any]] = {}
    granularity: ClassVar[Granularity] = "chunk"
    shape: ClassVar[tuple[int, ...]] = (130, 1001)
    rounds: ClassVar[int] = 4

    @pytest.fixture
    def rule(self) -> OuterRule:
        """Build `target` with `options`, as a server does, including the trial run that finds the granularity."""
        return build_outer(self.target, self.options)

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

    def _chunked(self, rule: OuterRule, values: list[Tensor], size: int) -> tuple[Tensor, list[State]]:
        """Step chunk by chunk in each round, as the server does: each chunk has its own state and 0-d state clones."""
        flat = [value.clone().reshape(-1) for value in values]
        starts = range(0, flat[0].numel(), size)
        states: list[State] = []
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
        """Compare the granularity that the trial run found with `granularity`."""
        assert rule.granularity == self.granularity

    @pytest.mark.parametrize("size", [7 * 64, 4096, 5 * 4096])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_chunks_come_to_the_bits_of_the_whole_tensor(self, rule: OuterRule, dtype: torch.dtype, size: int) -> None:
        """Step chunks and the whole tensor, and compare parameter and state; skip if optimizers need whole tensors."""
        if rule.granularity == "tensor":
            pytest.skip("it runs on whole tensors")
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
        """Step each round with a new stepper and a clone of the state, and compare with a single optimizer object."""
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
        """Compare `state_specs` with the state after one step: keys, order of keys, and shapes."""
        (state,) = rule.stepper().step_([torch.ones(6, 8)], [torch.ones(6, 8)], None)
        declared = rule.state_specs(TensorSpec("w", "BF16", (6, 8)))
        assert [spec.key for spec in declared] == list(state)
        for spec in declared:
            assert state[spec.key].shape == torch.Size((6, 8) if spec.shape is None else spec.shape)

    def test_buffers_and_integers_have_no_state(self, rule: OuterRule) -> None:
        """Check that `state_specs` is empty for a float buffer and for an int8 parameter."""
        assert rule.state_specs(TensorSpec("m", "F32", (3,), BUFFERS)) == []
        assert rule.state_specs(TensorSpec("q", "I8", (3,))) == []

    def test_what_decides_the_bits_is_said_outright(self, rule: OuterRule) -> None:
        """Check that `fused` and `foreach` are set if the optimizer has them. None would let torch choose."""
        described = rule.describe()
        assert described["foreach"] is not None or "foreach" not in described["options"]
        assert described["fused"] is not None or "fused" not in described["options"]
        assert described["granularity"] == rule.granularity
