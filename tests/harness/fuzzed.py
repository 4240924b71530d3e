"""What fuzzing has in common: damaged bytes, cases drawn for a while, and findings by their probable cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Literal, TypeVar, get_args, get_origin

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from harness.hostile_answers import (
    Place,
    containers,
    encode,
    is_table,
    numbers,
    others,
    places,
    put,
    texts,
    unwrapped,
)

Case = TypeVar("Case")
AT_ONCE = 20
"""Cases in one example of Hypothesis: an example costs more than what is drawn for it."""


@dataclass
class Findings:
    """What must not be. Cases with one cause are one group, of which the first is kept.

    Attributes:
        tried: part of the fuzzing → number of its cases.
        groups: name of a group → its first case, and how it ended.
        counts: name of a group → number of its cases.
    """

    tried: Counter[str] = field(default_factory=Counter)
    groups: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, group: str, case: object, what: str) -> None:
        """Add a finding."""
        self.counts[group] += 1
        self.groups.setdefault(group, f"{str(case)[:1500]}\n{what[-2500:]}")

    def text(self) -> str:
        """Return all groups, the largest first."""
        return "\n".join(f"== {count} times {name}\n{self.groups[name]}\n" for name, count in self.counts.most_common())


def drawn(strategy: st.SearchStrategy[Case], count: int) -> list[Case]:
    """Return so many cases of a strategy, always the same ones."""
    found: list[Case] = []

    @seed(0)
    @settings(max_examples=1 - (-count // AT_ONCE), database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @given(st.lists(strategy, min_size=AT_ONCE, max_size=AT_ONCE))
    def collect(some: list[Case]) -> None:
        found.extend(some)

    collect()
    return found[:count]


class Values:
    """Values for the fields of messages: drawn once by Hypothesis, then chosen at random, which is much faster."""

    def __init__(self, each: int = 300) -> None:
        self._texts, self._numbers, self._others, self._containers = (
            drawn(strategy, each) for strategy in (texts, numbers, others, containers)
        )

    def choose(self, place: Place, chance: Random) -> tuple[Any, ...]:
        """Return what to put into a place of a message: mostly of the right type, else anything."""
        kind = unwrapped(place.annotation)
        if get_origin(kind) is Literal and chance.random() < 0.5:
            return "is", chance.choice(get_args(kind))
        fitting = self._others
        if is_table(kind) or get_origin(kind) in (list, tuple):
            fitting = self._containers
        elif kind in (int, float):
            fitting = self._numbers
        elif kind is str:
            fitting = self._texts
        every = (fitting, fitting, self._texts, self._numbers, self._others, self._containers)
        return chance.choice(chance.choice(every))

    def message(self, kind: type[BaseModel], base: dict[str, Any], chance: Random) -> tuple[bytes, str]:
        """Return a message with wrong values in up to two places, as JSON, and these places."""
        found, message, shown = fields_of(kind), base, []
        for _ in range(chance.choice((0, 1, 1, 1, 2)) if found else 0):
            place = chance.choice(found)
            value = self.choose(place, chance)
            if shown and value[0] == "many":  # of what may be large
                continue
            with suppress(TypeError, ValueError, AttributeError, KeyError):  # the first one has left no place
                message = put(message, place.keys, value, kind)
                shown.append((place.keys, value))
        return encode(message).encode(errors="surrogatepass"), str(shown)[:700]


@cache
def fields_of(kind: type[BaseModel]) -> list[Place]:
    """Return the places of a message, but those that say how long an answer may take."""
    return [place for place in places(kind) if place.keys[-1] != "wait_s"]


def try_for(
    make: Callable[[Random], Case], run: Callable[[Case], Any], number: int, until_s: float, most: float = float("inf")
) -> int:
    """Make and run cases until a time (`time.monotonic`), or so many; for one seed the same. Return their number."""
    count, chance = 0, Random(number)
    while count < most and time.monotonic() < until_s:
        run(make(chance))
        count += 1
    return count


# -- damaged bytes

_TOKENS = (
    *(b"", b"\x00", b"\xff" * 8, b"\x80", b"\xed\xa0\x80", b'"', b"\\", b"\\u0000", b"\\ud800", b"{", b"}", b"[", b"]"),
    *(b",", b":", b"null", b"true", b"-1", b"0", b"1e400", b"-0.0", b"NaN", b"Infinity", b"9" * 400, b"1" * 5000),
    *(b"[" * 3000, b'{"a":' * 3000, b"a = [" * 500, b"[a.b]\n", b"# \xc3\xa9\n", b"'''", b"=", b"\n", b"\r\n"),
    *(b"__metadata__", b"1979-05-27T07:32:00Z", b"inf", b"x" * 70_000),
)


@dataclass(frozen=True)
class Damage:
    """One change of bytes: at a place, as a share of the whole, so many bytes are replaced by others."""

    at: float
    removed: int
    put: bytes

    def of(self, data: bytes) -> bytes:
        """Return the bytes with this change."""
        at = int(self.at * len(data))
        return data[:at] + self.put + data[at + self.removed :]


def damages(chance: Random) -> tuple[Damage, ...]:
    """Return one to three changes."""
    return tuple(
        Damage(
            chance.random(),
            chance.choice([0, 1, 1, 2, 4, 8, 64, 2**20]),
            chance.choice(_TOKENS) if chance.random() < 0.6 else chance.randbytes(chance.randrange(9)),
        )
        for _ in range(chance.randint(1, 3))
    )


def damaged(data: bytes, changes: tuple[Damage, ...]) -> bytes:
    """Return the bytes with all changes."""
    for change in changes:
        data = change.of(data)
    return data
