"""A name and options from the run file → a rule that is safe to run, or an error that says what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from atoll import registry
from atoll.errors import ConfigError
from atoll.outer_optimizers.chunk_exactness import granularity_of
from atoll.outer_optimizers.torch_optimizer import OuterRule


def build_outer(
    target: str | Callable[..., Optimizer],
    options: Mapping[str, Any] | None = None,
    lrs: Mapping[str, float] | None = None,
) -> OuterRule:
    """The outer optimizer `target` with `options`, put through the chunk contract.

    Args:
        target: a name of `registry.TABLES["outer"]`, `module:attribute`, or the thing itself: a class of
            `torch.optim`, or a function (parameters, **options) → optimizer.
        options: keyword arguments. `fused` and `foreach` may be among them; by default `fused` where the class has it
            for CPU tensors, and never `foreach`.
        lrs: pattern of names → the learning rate of these parameters.

    Raises:
        ConfigError: the name, an option or a value is wrong; or the optimizer cannot be an outer one: it couples
            tensors, needs a closure or sparse gradients, draws random numbers, or keeps state that cannot be stored.
    """
    label = target if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
    factory = registry.load("outer", target) if isinstance(target, str) else target
    if not callable(factory):
        raise ConfigError(f"algorithm.outer_optimizer {label!r} is a {type(factory).__name__}, not something to call.")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
    known = _arguments(factory)
    if known is not None:
        _require_known(label, given, known)
    given = _explicit_flags(label, factory, given, known or set())
    rule = OuterRule(label, factory, given)
    granularity = granularity_of(rule)
    if lrs and "lr" not in rule.make([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]:
        raise ConfigError(
            f"algorithm.outer_lr_of is set, but the outer optimizer {label!r} has no lr.",
            "Leave algorithm.outer_lr_of out.",
        )
    return OuterRule(label, factory, given, granularity, lrs)


def _arguments(factory: Callable[..., Optimizer]) -> set[str] | None:
    """The keyword arguments of an optimizer beside the parameters; None where it takes any."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters[1:]}


def _require_known(label: str, options: Mapping[str, Any], known: set[str]) -> None:
    for key in options:
        if key not in known:
            remedy = registry.nearest(key, known, f"It has {', '.join(sorted(known))}.")
            raise ConfigError(f"The outer optimizer {label!r} has no option {key!r}.", remedy)


def _explicit_flags(
    label: str, factory: Callable[..., Optimizer], options: dict[str, Any], known: set[str]
) -> dict[str, Any]:
    """`options` with `fused` and `foreach` said outright: torch's own choice between them depends on its version."""
    flags: dict[str, Any] = {}
    if "foreach" in known:
        flags["foreach"] = False
    if "fused" in known:
        flags["fused"] = not options.get("foreach")
    if flags.get("fused") and not options.get("fused"):
        try:
            _try(factory, flags | options)
        except Exception:  # no fused form for CPU tensors or with these options; other errors come again below
            flags["fused"] = False
    try:
        _try(factory, flags | options, step=False)
    except Exception as error:
        raise ConfigError(f"The outer optimizer {label!r} does not accept its options: {error}.") from error
    return flags | options


def _try(factory: Callable[..., Optimizer], options: Mapping[str, Any], step: bool = True) -> None:
    leaf = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = factory([leaf], **options)
    leaf.grad = torch.zeros(2, 2)
    if step:
        optimizer.step()
