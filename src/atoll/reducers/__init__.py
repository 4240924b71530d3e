"""Reducers: rules that combine the updates of a round into one. To write a reducer, derive it from `Reducer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from atoll import registry
from atoll.errors import ConfigError
from atoll.reducers.base import Reducer, RoundFacts, normalised
from atoll.reducers.means import First, Maximum, NormalisedMean, Share, Sum, WeightedMean
from atoll.reducers.robust import ClippedMean, Median, TrimmedMean
from atoll.registry import Name, OwnName
from atoll.tensors.schema import BUFFERS, PARAMS

__all__ = [
    "ClippedMean",
    "Maximum",
    "Median",
    "NormalisedMean",
    "Reducer",
    "RoundFacts",
    "Share",
    "TrimmedMean",
    "WeightedMean",
    "build_reducers",
    "normalised",
]


def build_reducers(groups: Mapping[str, Name], name: Name, options: Mapping[str, Any]) -> dict[str, Reducer]:
    """Build the reducers of a run: `name` for the group `params`, usually the algorithm's own for the other groups.

    Args:
        groups: the algorithm's own reducers: group of tensors → name of the group's reducer.
        name: name of the reducer of `params`. If it is not the algorithm's own one, it also determines the reducer of
            buffers (`Reducer.buffers`).
        options: keyword arguments of the reducer of `params`.

    Returns:
        Group → reducer of the group's floating point tensors.

    Raises:
        ConfigError: an option is unknown or has a wrong value, or the name is not the name of a reducer.
    """
    params = _construct(name, options)
    reducers = {group: _construct(other, {}) for group, other in groups.items()} | {PARAMS: params}
    if name.text != groups[PARAMS].text and BUFFERS in groups:
        reducers[BUFFERS] = _construct(OwnName(params.buffers), {}) if params.buffers else params
    return reducers


def with_rules(reducers: Mapping[str, Reducer]) -> dict[str, Reducer]:
    """Return the reducers of a run, and those of the groups of buffers that do not have the usual rule of their dtype.

    Args:
        reducers: group → reducer of its floats, from `build_reducers`.
    """
    usual = reducers.get(BUFFERS, WeightedMean())
    rules = {"max": Maximum(), "sum": Sum(), "first": First(), "flags": usual}
    return {f"{BUFFERS}.{rule}": reducer for rule, reducer in rules.items()} | dict(reducers)


def _construct(name: Name, options: Mapping[str, Any]) -> Reducer:
    kind = registry.find("reducers", name)
    registry.require_kinds(kind, options, "aggregation.reducer")
    reducer = registry.construct(
        lambda: kind(**options),
        f"aggregation.reducer = {dict(options)!r}",
        registry.options_of(kind, name.text),
    )
    if not isinstance(reducer, Reducer):
        raise ConfigError(
            f"reducer = {name!r} creates an object of type {type(reducer).__name__}, not a reducer.",
            "Derive the class from `atoll.reducers.Reducer`.",
        )
    return reducer


# -- weights of stale updates, for asynchronous runs

StalenessWeight = Callable[[int], float]
"""Staleness s of an update (in versions) → a factor for its weight, above 0 and at most 1.

The factor multiplies the weight after normalisation. So a stale update makes the step shorter, even if it is the only
update of the step (FedBuff, arXiv 2106.06639, section 5.2; FedAsync, arXiv 1903.03934).
"""


def constant(s: int) -> float:
    """Return 1: an update keeps its full weight, however large its staleness s is."""
    return 1.0


def inverse_sqrt(s: int) -> float:
    """Return 1/√(1+s), the factor for the weight of an update with the staleness s (in versions)."""
    return 1 / math.sqrt(1 + s)


def staleness_weight(name: Name) -> StalenessWeight:
    """Return the function `name`, which maps an update's staleness (in versions) to a factor for its weight.

    Raises:
        ConfigError: the name is unknown, or does not name a function; or the function raises for the staleness 0, or
            does not return a number above 0 and at most 1. The returned function checks each later result in this way.
    """
    function = registry.find("staleness", name)
    if not callable(function):
        raise ConfigError(f"async.staleness_weight = {name!r} is of type {type(function).__name__}, not a function.")

    def checked(s: int) -> float:
        try:
            value = float(function(s))
        except Exception as error:
            raise ConfigError(
                f"async.staleness_weight = {name!r} failed for a staleness of {s}: {type(error).__name__}: {error}."
            ) from error
        if not 0 < value <= 1:
            raise ConfigError(
                f"async.staleness_weight = {name!r} returned {value!r} for a staleness of {s}.",
                "Return a number above 0 and at most 1.",
            )
        return value

    checked(0)
    return checked
