"""What a user's aggregator is given, and the two forms that it may have.

    (a)  aggregate(updates) → (name, pseudo-gradient) pairs, or a mapping
    (b)  accept(update) as each arrives, then aggregate() → the same, then reset()

The pseudo-gradient of a tensor is pulled − local: the outer optimizer goes against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll import registry
from atoll.errors import ConfigError
from atoll.tensors.lazy_tensors import LazyState


@dataclass(frozen=True)
class Update:
    """One accepted update. It may be kept: its tensors stay on disk until it is dropped (`max_kept_updates`).

    Attributes:
        site: who submitted it.
        round: for which it was submitted.
        weight: as the site gave it; finite and above zero.
        steps: local ones, 0 where the site did not say.
        metrics: as the site gave them.
        tensors: name → pseudo-gradient, of every tensor of `params`; each is read and decoded when it is asked for.
        buffers: name → value, of every buffer. The server averages them itself.
    """

    site: str
    round: int
    weight: float
    steps: int
    metrics: Mapping[str, float]
    tensors: LazyState
    buffers: LazyState


class Collected:
    """Form (a) behind the interface of form (b): updates are collected, and given at once."""

    incremental = False

    def __init__(self, aggregate: Callable[[Sequence[Update]], object]) -> None:
        self._aggregate = aggregate
        self._updates: list[Update] = []

    def accept(self, update: Update) -> None:
        self._updates.append(update)

    def aggregate(self) -> object:
        return self._aggregate(tuple(self._updates))

    def reset(self) -> None:
        self._updates.clear()


class Incremental:
    """Form (b), as it is."""

    incremental = True

    def __init__(self, user: Any) -> None:
        self.accept: Callable[[Update], object] = user.accept
        self.aggregate: Callable[[], object] = user.aggregate
        self.reset: Callable[[], object] = user.reset


def load(target: str, options: Mapping[str, Any]) -> Collected | Incremental:
    """The aggregator that the run file names.

    Args:
        target: `module:attribute` or `file.py:attribute`: a class, an object, or a function of the updates.
        options: keyword arguments of the class, or of the function beside its updates.

    Raises:
        ConfigError: it is not there, cannot be made with these options, or has neither form.
    """
    found = kind = registry.load_attribute(target)
    if isinstance(found, type):
        found = registry.made(
            lambda: kind(**options),
            f"The aggregator {target!r} cannot be made",
            "Set aggregator_options to its keyword arguments.",
        )
    elif options and hasattr(found, "aggregate"):
        raise ConfigError(
            f"aggregator_options are given, but {target!r} is an object already.", "Name its class, or give none."
        )
    if callable(getattr(found, "accept", None)):
        missing = [name for name in ("aggregate", "reset") if not callable(getattr(found, name, None))]
        if missing:
            raise ConfigError(
                f"The aggregator {target!r} has accept, but no {' and no '.join(missing)}.",
                "It takes accept(update), aggregate() and reset(); or aggregate(updates) alone.",
            )
        return Incremental(found)
    if callable(getattr(found, "aggregate", None)):
        return Collected(found.aggregate)
    if callable(found):
        return Collected(lambda updates: found(updates, **options))
    raise ConfigError(
        f"The aggregator {target!r} is a {type(found).__name__}, which has no aggregate.",
        "Name a function of the updates, or a class with aggregate(updates).",
    )
