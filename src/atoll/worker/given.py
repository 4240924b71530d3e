"""What a script hands over, checked before it travels: weights, metrics, the error that ended it."""

from __future__ import annotations

import math
import traceback

from atoll.errors import UsageError
from atoll.worker.reporting import LOG


def last_words(error: BaseException | None) -> str | None:
    """What the server is told of the error that ended training; None where its user ended it."""
    if error is None or isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return None
    return "".join(traceback.format_exception_only(error)).strip()


def positive(weight: float) -> float:
    """A weight that can count.

    Raises:
        UsageError: it is zero, negative or not finite.
    """
    try:
        value = math.nan if isinstance(weight, str) else float(weight)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < float("inf"):
        raise UsageError(f"The weight is {weight}.", "Give the number of samples or tokens: positive and finite.")
    return value


def finite_metrics(metrics: dict[str, float], site: str) -> dict[str, float]:
    """The finite ones as floats; the others are dropped with a warning."""
    values: dict[str, float] = {}
    for key, given in metrics.items():
        try:
            values[key] = float(given)
        except (TypeError, ValueError):
            raise UsageError(f"The metric {key!r} is {given!r}.", "Give a number.") from None
    for key, value in values.items():
        if not abs(value) < float("inf"):
            LOG.warning("%s: the metric %r is %s; it is left out", site, key, value)
    return {key: value for key, value in values.items() if abs(value) < float("inf")}
