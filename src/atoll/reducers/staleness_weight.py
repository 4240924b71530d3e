"""How much less an update counts that was trained from an older version: s ↦ a number above 0, at most 1.

The update's normalised weight is multiplied by it, so that the step is shorter, not only shared out otherwise: with one
update a step, 1/√(1+s) takes that part of it (FedBuff, arXiv 2106.06639, section 5.2; FedAsync, arXiv 1903.03934).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from atoll import registry
from atoll.errors import ConfigError

StalenessWeight = Callable[[int], float]


def constant(s: int) -> float:
    """1, whatever the staleness."""
    return 1.0


def inverse_sqrt(s: int) -> float:
    """1/√(1+s)."""
    return 1 / math.sqrt(1 + s)


def staleness_weight(name: str) -> StalenessWeight:
    """The function of this name, which is asked once for each update that counts.

    Raises:
        ConfigError: there is none; or, when it is asked: it gives what is not above 0 and at most 1.
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
