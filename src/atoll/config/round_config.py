"""What a run tells its sites for each round: plain values by name, such as a learning rate, from a table or a function.

[rounds.config]
epochs = 2                        # the same in every round
lr = {1 = 0.1, 10 = 0.01}         # a schedule: from round 1 on 0.1, from round 10 on 0.01
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from atoll.errors import NotTold, public_api

CONFIG_BYTES = 16 * 1024
"""Largest size of a configuration as JSON, in bytes."""


class RoundConfig(dict[str, Any]):
    """What a site is told for a round. A name that it lacks raises an error that says what it has, and the remedy.

    Args:
        values: name → value.
        is_alone: whether nothing is told, since there is no server, or no round yet.
    """

    def __init__(self, values: Mapping[str, Any], *, is_alone: bool = False) -> None:
        super().__init__(values)
        self._is_alone = is_alone

    @public_api
    def __missing__(self, name: object) -> Any:
        default = f"give a default: config.get({name!r}, …)"
        if self._is_alone:
            raise NotTold(
                f"The configuration of the round has no {name!r}: without a server, or before the first round, a "
                "script is told nothing.",
                f"For a script that also runs alone, {default}.",
            )
        told = ", ".join(map(repr, self)) or "nothing"
        raise NotTold(
            f"The configuration of the round has no {name!r}; it has {told}.",
            f"Set it at the server, in rounds.config or by the configuration function, or {default}.",
        )


_DEPTH = 8
_LARGEST_INT = 2**62


def fault_in(config: Any) -> str:
    """Return why sites cannot get a configuration, as the end of a sentence; empty if they can.

    Args:
        config: a mapping of names to JSON values.
    """
    if not isinstance(config, Mapping):
        return f"it is of type {type(config).__name__}, not a dict"
    if fault := _fault(config, "", _DEPTH):
        return fault
    nbytes = len(json.dumps(config).encode())
    return f"it has {nbytes} bytes as JSON, but at most {CONFIG_BYTES} are sent" if nbytes > CONFIG_BYTES else ""


def _fault(value: Any, at: str, depth: int) -> str:
    name = at or "it"
    if depth < 0:
        return f"{name} is nested too deeply"
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str) or not key.isprintable()), None)
        if wrong is not None:
            return f"{name} has the key {wrong!r}, but keys are printable texts"
        found = (_fault(each, f"{at}.{key}" if at else key, depth - 1) for key, each in value.items())
        return next(filter(None, found), "")
    if isinstance(value, list | tuple):
        return next(filter(None, (_fault(each, f"{at}[{n}]", depth - 1) for n, each in enumerate(value))), "")
    if isinstance(value, bool | None):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{name} is {value!r}, which is not a finite number"
    if isinstance(value, int):
        return "" if abs(value) < _LARGEST_INT else f"{name} is a whole number beyond 2⁶²"
    if isinstance(value, str):
        return "" if value.isascii() or value.encode(errors="replace").decode() == value else f"{name} is no UTF-8 text"
    return f"{name} is of type {type(value).__name__}, but JSON has only numbers, texts, true, false, lists and tables"


def is_schedule(value: Any) -> bool:
    """Return whether a value of the table is a schedule: a table with numbers of rounds as keys."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(key, str) and key.isdecimal() for key in value)


def fault_in_table(table: Mapping[str, Any]) -> str:
    """Return what is wrong with the setting `rounds.config`, as the end of a sentence; empty if it is right."""
    for name, value in table.items():
        if is_schedule(value) and "1" not in value:
            return f"{name} has no value for round 1: its first key is {min(value, key=int)}"
    return fault_in(table)


def config_of_round(table: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the configuration of a round by the setting `rounds.config`.

    Args:
        table: the setting.
        number: number of the round, from 1.
    """

    def now(value: Any) -> Any:
        return value[max((key for key in value if int(key) <= number), key=int)] if is_schedule(value) else value

    return {name: now(value) for name, value in table.items()}
