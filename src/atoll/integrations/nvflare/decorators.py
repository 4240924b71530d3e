"""NVFlare's older decorators: `@flare.train` and `@flare.evaluate` receive and send around a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from atoll.errors import UsageError

_measured: list[Any] = []
"""The metrics of the received model that the next trained model is sent with."""


def train(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Decorate a function that trains: it gets the received `FLModel` first, and what it returns is sent."""
    if function is None:
        return train

    @functools.wraps(function)
    def call(*_: Any, **kwargs: Any) -> Any:
        from atoll.integrations.nvflare import send

        model = _with_received(function, kwargs)
        if _measured and model is not None:
            model.metrics = _measured.pop()
        send(model)
        return model

    return call


def evaluate(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Decorate a function that evaluates: it gets the received `FLModel` first, and returns its metrics.

    Call it before the function that trains: the metrics are sent with the trained model.
    """
    if function is None:
        return evaluate

    @functools.wraps(function)
    def call(*_: Any, **kwargs: Any) -> Any:
        from atoll.integrations.nvflare import FLModel, is_train, send

        metrics = _with_received(function, kwargs)
        if metrics is None:
            raise UsageError(f"{function.__name__} returned no metrics.", 'Return a dict: {"accuracy": 0.9}.')
        if is_train():
            _measured[:] = [metrics]
        else:
            send(FLModel(metrics=metrics))
        return metrics

    return call


def _with_received(function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Call a function with the received model as its first argument, whatever that is called."""
    from atoll.integrations.nvflare import receive

    return function(**kwargs | {next(iter(inspect.signature(function).parameters)): receive()})
