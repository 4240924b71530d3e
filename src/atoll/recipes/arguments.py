"""What recipes and environments say of an argument that they do not have."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

from atoll import registry
from atoll.config import Settings
from atoll.errors import UsageError


class Strict:
    """A class that refuses an unknown argument with the nearest one that it has."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse what `__init__` does not take, before Python would without saying what is meant."""
        known = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
        for name in given:
            if name not in known:
                raise _unknown(cls.__name__, name, given[name], known)
        return super().__new__(cls)


def _unknown(who: str, name: str, value: Any, known: Sequence[str]) -> UsageError:
    if name in Settings.model_fields:
        return UsageError(
            f"{who} has no argument {name!r}, which is a setting of the run file.",
            f"Choose it with recipe.add_server_config({{{name!r}: {value!r}}}).",
        )
    return UsageError(f"{who} has no argument {name!r}.", registry.nearest(name, known, f"It has {', '.join(known)}."))
