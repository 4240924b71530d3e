"""Outer optimizers: the server steps the global model with any torch optimizer that passes a trial run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from atoll import registry
from atoll.errors import ConfigError
from atoll.outer_optimizers.chunk_exactness import granularity_of
from atoll.outer_optimizers.delayed_nesterov import DelayedNesterov
from atoll.outer_optimizers.torch_optimizer import EachTensor, Granularity, OuterRule, not_compiled
from atoll.outer_optimizers.yogi import Yogi
from atoll.registry import Name

__all__ = ["DelayedNesterov", "EachTensor", "OuterRule", "Yogi", "build_outer"]

_granularities: dict[tuple[str, str] | None, Granularity] = {}
"""Results of trial runs in this process: (name of a built-in optimizer, its options) → granularity."""


def build_outer(
    target: Name | Callable[..., Optimizer],
    options: Mapping[str, Any] | None = None,
    lrs: Mapping[str, float] | None = None,
) -> OuterRule:
    """Return the outer optimizer `target` with `options`, if it passes a trial run (`chunk_exactness`).

    Args:
        target: a built-in, registered or installed name, the path of the user's own code, a class of `torch.optim`, or
            a function (parameters, **options) → optimizer.
        options: keyword arguments. They can include `fused` and `foreach`. By default, `fused` is used if the class
            supports it for CPU tensors, and `foreach` is not used.
        lrs: shell-style pattern of parameter names → learning rate of these parameters.

    Raises:
        ConfigError: the name, an option or a value is wrong. Or the optimizer is unsuitable: its step of a tensor
            depends on other tensors, it needs a closure or sparse gradients, it draws random numbers, or its state
            cannot be stored.
    """
    label = target.text if isinstance(target, Name) else getattr(target, "__qualname__", repr(target))
    factory = registry.find("outer", target) if isinstance(target, Name) else target
    if not callable(factory):
        raise ConfigError(f"algorithm.outer_optimizer {label!r} is of type {type(factory).__name__}, not callable.")
    if isinstance(factory, type) and getattr(torch.optim, factory.__name__, None) is factory:
        factory = not_compiled(factory)
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
    known = _arguments(factory)
    if known is not None:
        _require_options(label, arguments, known)
        registry.require_kinds(factory, options or {}, "algorithm.outer_optimizer")
    arguments = _explicit_flags(label, factory, arguments, known or set())
    rule = OuterRule(label, factory, arguments)
    key = (label, repr(arguments)) if isinstance(target, Name) and label in registry.TABLES["outer"] else None
    granularity = _granularities.get(key) or granularity_of(rule)
    if key is not None:
        _granularities[key] = granularity
    if lrs and "lr" not in rule.make([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]:
        raise ConfigError(
            f"algorithm.outer_lr_of is set, but the outer optimizer {label!r} has no lr.",
            "Leave algorithm.outer_lr_of out.",
        )
    return OuterRule(label, factory, arguments, granularity, lrs)


def _arguments(factory: Callable[..., Optimizer]) -> set[str] | None:
    """Return the names of the arguments of `factory` after `params`; None if unknown, or if it accepts any name."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters[1:]}


def _require_options(label: str, options: Mapping[str, Any], known: set[str]) -> None:
    for key in options:
        if key not in known:
            remedy = registry.nearest(key, known, f"Its options are {', '.join(sorted(known))}.")
            raise ConfigError(f"The outer optimizer {label!r} has no option {key!r}.", remedy)


def _explicit_flags(
    label: str, factory: Callable[..., Optimizer], options: dict[str, Any], known: set[str]
) -> dict[str, Any]:
    """Return `options` with values for `fused` and `foreach`, because torch's defaults depend on its version.

    Raises:
        ConfigError: the optimizer does not accept its options.
    """
    flags: dict[str, Any] = {}
    if "foreach" in known:
        flags["foreach"] = False
    if "fused" in known:  # SGD with momentum takes 0.4 of the time, Adam 0.26: one pass over the memory
        flags["fused"] = not options.get("foreach")
    if flags.get("fused") and not options.get("fused"):
        try:
            _try(factory, flags | options)
        except Exception:  # `fused` does not work on the CPU or with these options; other errors recur below
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
