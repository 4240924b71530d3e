"""Functions that weigh a stale update down: staleness s (in versions) ↦ a factor above 0 and at most 1.

The factor multiplies the update's weight after normalisation. So a stale update makes the step shorter, even if it is
the only update of the step (FedBuff, arXiv 2106.06639, section 5.2; FedAsync, arXiv 1903.03934).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from atoll import registry
from atoll.errors import ConfigError

StalenessWeight = Callable[[int], float]


def constant(s: int) -> float:
    """Return 1 for every staleness."""
    return 1.0


def inverse_sqrt(s: int) -> float:
    """Return 1/√(1+s)."""
    return 1 / math.sqrt(1 + s)


def staleness_weight(name: str) -> StalenessWeight:
    """Return the staleness function of this name, with a check of its results.

    Raises:
        ConfigError: the name is unknown or is not a function, or the function fails or returns a number that is not
            above 0 and at most 1 for s = 0. For other s, the returned function raises this error when called.
    """
    function = registry.load("staleness", name)
    if not callable(function):
        raise ConfigError(f"async.staleness_weight = {name!r} is a {type(function).__name__}, not a function.")

    def checked(s: int) -> float:
        try:
            value = float(function(s))
        except Exception as error:
            raise ConfigError(
                f"async.staleness_weight = {name!r} failed for {s}: {type(error).__name__}: {error}."
            ) from error
        if not 0 < value <= 1:
            raise ConfigError(
                f"async.staleness_weight = {name!r} gives {value!r} for {s} versions.",
                "It has to be above 0, at most 1.",
            )
        return value

    checked(0)
    return checked
