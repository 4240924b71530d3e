"""A trial run of the outer optimizer before a run starts, on tensors of a few thousand elements.

The optimizer must give the same bits if it steps twice from the same numbers, if it steps one tensor or several at a
time, and if its state is stored and restored between steps. If it also gives the same bits when it steps a tensor chunk
by chunk, the server does so, in a few MB of memory (granularity `chunk`). If not, the server steps one whole tensor at
a time (granularity `tensor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.outer_optimizers.torch_optimizer import Granularity, OuterRule, OuterState

_SHAPE = (67, 129)
"""8,643 elements: more than two tiles (of 4,096), and a rest that fills neither a tile nor a vector register."""

_CUTS = ((0, 4096, 8192, 8643), (0, 8192, 8643), (0, 64, 8643))
_ROUNDS = 3
_INSTEAD = "Use sgd, adam, adamw, adagrad or rmsprop, or another optimizer that steps each tensor by itself."

Stepped = list[tuple[Tensor, OuterState]]
"""For each tensor: the parameter and its optimizer state after the last round."""


def granularity_of(rule: OuterRule) -> Granularity:
    """Return `chunk` if `rule` gives the same bits for the chunks of a tensor as for the whole tensor, else `tensor`.

    Raises:
        ConfigError: the optimizer cannot be an outer optimizer. The message gives the reason and alternatives.
    """
    verdicts = [_judge(rule, dtype) for dtype in (torch.float32, torch.float64)]
    return "chunk" if all(verdict == "chunk" for verdict in verdicts) else "tensor"


def _judge(rule: OuterRule, dtype: torch.dtype) -> Granularity:
    tensors = [_numbers(shape, dtype, seed) for seed, shape in enumerate([_SHAPE, (130,), ()])]
    try:
        together = _plain(rule, tensors)
        if not _equal(together, _plain(rule, tensors)):
            raise ConfigError("two steps from the same numbers give different results; the steps may be random.")
        one_by_one = [stepped for tensor in tensors for stepped in _plain(rule, [tensor])]
        if not _equal(together, one_by_one):
            raise ConfigError("the optimizer steps a tensor differently if another tensor is present.")
        if not _equal(one_by_one, [_with_stored_state(rule, tensor) for tensor in tensors]):
            raise ConfigError("between steps, the optimizer keeps data outside `optimizer.state`; these would be lost.")
    except Exception as error:
        reason = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}."
        raise ConfigError(f"{rule.label!r} cannot be an outer optimizer: {reason}", _INSTEAD) from error
    return "chunk" if all(_chunks_equal(rule, tensors[0], one_by_one[0], cuts) for cuts in _CUTS) else "tensor"


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return a random parameter, then a gradient for each step: of several magnitudes, with sign changes and zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(1 + _ROUNDS)]
    return [
        values[0],
        *(value * 10.0 ** (-index) * (value.abs() > 0.1) for index, value in enumerate(values[1:])),
    ]


def _plain(rule: OuterRule, tensors: Sequence[Sequence[Tensor]]) -> Stepped:
    """Step whole tensors as in plain torch, with one optimizer object for all steps.

    Raises:
        ConfigError: the optimizer makes several parameter groups, or its steps change `param_groups`.
    """
    leaves = [torch.nn.Parameter(parameter.clone()) for parameter, *_ in tensors]
    optimizer = rule.make(leaves)
    if len(optimizer.param_groups) != 1:
        raise ConfigError(f"the optimizer makes {len(optimizer.param_groups)} parameter groups from one list.")
    settings = _settings(optimizer)
    for index in range(1, 1 + _ROUNDS):
        for leaf, values in zip(leaves, tensors, strict=True):
            leaf.grad = values[index].clone()
        optimizer.step()
    if _settings(optimizer) != settings:
        raise ConfigError("the optimizer's steps change its `param_groups`, and this change would be lost.")
    return [(leaf.detach(), {k: v for k, v in optimizer.state[leaf].items() if v is not None}) for leaf in leaves]


def _settings(optimizer: torch.optim.Optimizer) -> str:
    return repr({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})


def _with_stored_state(rule: OuterRule, values: Sequence[Tensor]) -> tuple[Tensor, OuterState]:
    """Step one tensor as the server does: with the rule's `Stepper`, which gets the stored state at each step.

    `values` are the tensor's initial values, then the gradient of each step.

    Raises:
        ConfigError: the state's names, shapes or dtypes change after the first step.
    """
    parameter, state, stepper = values[0].clone(), None, rule.stepper()
    for gradient in values[1:]:
        (after,) = stepper.step_([parameter], [gradient.clone()], None if state is None else [state])
        if state is not None and [(k, v.shape, v.dtype) for k, v in state.items()] != [
            (k, v.shape, v.dtype) for k, v in after.items()
        ]:
            raise ConfigError("the names, shapes or dtypes of the optimizer's state change after the first step.")
        state = {key: value.clone() for key, value in after.items()}
    return parameter, state or {}


def _chunks_equal(
    rule: OuterRule, values: Sequence[Tensor], whole: tuple[Tensor, OuterState], cuts: Sequence[int]
) -> bool:
    """Return whether stepping 1-D chunks of the tensor gives the same bits as stepping the whole tensor.

    Args:
        rule: the outer optimizer.
        values: the parameter, then a gradient for each step.
        whole: the parameter and its state after stepping the whole tensor.
        cuts: first element of each chunk, in order, then the number of elements of the tensor.
    """
    pieces = [[value.reshape(-1)[start:stop] for value in values] for start, stop in pairwise(cuts)]
    try:
        stepped = [_with_stored_state(rule, piece) for piece in pieces]
    except Exception:
        return False  # for example: the optimizer only accepts matrices
    parameter, state = whole
    if any(set(chunk_state) != set(state) for _, chunk_state in stepped):
        return False
    joined: OuterState = {}
    for key, value in state.items():
        runs = [chunk_state[key] for _, chunk_state in stepped]
        if not isinstance(value, Tensor) or value.dim() == 0:
            if any(run.dim() != 0 or not _same(run, runs[0]) for run in runs):
                return False
            joined[key] = runs[0]
        elif value.shape != parameter.shape:
            return False
        else:
            joined[key] = torch.cat(runs).reshape(value.shape)
    return _equal([whole], [(torch.cat([run for run, _ in stepped]).reshape(parameter.shape), joined)])


def _equal(one: Stepped, two: Stepped) -> bool:
    return all(
        _same(a, b) and state_a.keys() == state_b.keys() and all(_same(state_a[key], state_b[key]) for key in state_a)
        for (a, state_a), (b, state_b) in zip(one, two, strict=True)
    )


def _same(one: object, two: object) -> bool:
    """Return whether two values are equal: tensors bit for bit, Python numbers by value."""
    if not isinstance(one, Tensor):
        one, two = two, one
    if not isinstance(one, Tensor):
        return one == two
    if not isinstance(two, Tensor):
        return one.dim() == 0 and one.item() == two
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)))
