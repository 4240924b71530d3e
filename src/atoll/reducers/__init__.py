"""Reducers: what makes one update of the updates of a round. To write a reducer, derive it from `Reducer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll import registry
from atoll.errors import ConfigError
from atoll.reducers.base import Reducer, RoundFacts, normalised
from atoll.reducers.means import Maximum, NormalisedMean, Share, WeightedMean
from atoll.reducers.robust import ClippedMean, Median, TrimmedMean
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


def build_reducers(groups: Mapping[str, str], name: str, options: Mapping[str, Any]) -> dict[str, Reducer]:
    """Build the reducers of a run: those of its algorithm, with another one of `params` if the settings name one.

    Args:
        groups: the algorithm's own table, group → name of the reducer.
        name: name of the reducer of `params`. If it is not the algorithm's own, it also decides how buffers are reduced
            (`Reducer.buffers`).
        options: keyword arguments of the reducer of `params`.

    Returns:
        Group → its reducer, for floating point tensors.

    Raises:
        ConfigError: an option is unknown or has a wrong value, or the name is not the name of a reducer.
    """
    params = _made(name, options)
    reducers = {group: _made(other, {}) for group, other in groups.items()} | {PARAMS: params}
    if name != groups[PARAMS] and BUFFERS in groups:
        reducers[BUFFERS] = _made(params.buffers, {}) if params.buffers else params
    return reducers


def _made(name: str, options: Mapping[str, Any]) -> Reducer:
    kind = registry.load("reducers", name)
    reducer = registry.made(
        lambda: kind(**options),
        f"aggregation.reducer = {dict(options)!r}",
        f"They are the keyword arguments of {name!r}.",
    )
    if not isinstance(reducer, Reducer):
        raise ConfigError(
            f"reducer = {name!r} makes a {type(reducer).__name__}, not a reducer.",
            "Derive the class from `atoll.reducers.Reducer`.",
        )
    return reducer
