"""Which versions are pinned while simulated sites train from them."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.simulate.schedule_sites import Bases


class Pin:
    def __init__(self, version: int, held: list[int]) -> None:
        self.row, self._held = self, held
        self.version = version
        held.append(version)

    def release(self) -> None:
        self._held.remove(self.version)


@pytest.fixture
def held() -> list[int]:
    """The versions that are pinned."""
    return []


@pytest.fixture
def bases(held: list[int]) -> Bases:
    class Pins:
        def pin(self, fragment: int, version: int) -> Pin:
            assert fragment == 0
            return Pin(version, held)

    versions: Any = Pins()
    return Bases(versions)


def test_a_version_is_pinned_once_and_until_the_last_has_trained_from_it(bases: Bases, held: list[int]) -> None:
    first, again = bases.take(0), bases.take(0)
    assert first is again
    assert held == [0]
    bases.give_back(first)
    other = bases.take(1)
    assert held == [0, 1]  # one still trains from the first
    bases.give_back(again)
    bases.give_back(other)
    bases.take(1)
    assert held == [0, 1]  # looked at when another is pinned
    bases.take(2)
    assert held == [1, 2]


def test_all_are_given_back_at_the_end(bases: Bases, held: list[int]) -> None:
    bases.take(0)
    bases.take(1)
    bases.release()
    assert held == []
