"""Which steps of several optimizers end a cycle, in which each of them steps."""

from __future__ import annotations

import pytest

from atoll.algorithms.optimizer_hooks import PATIENCE_STEPS, Cycles


def ends(steps: str, optimizers: str = "AB") -> list[int]:
    """For each step, how many cycles end with it. Each optimizer is a letter."""
    cycles = Cycles(map(ord, optimizers))
    return [cycles.count(ord(each)) for each in steps]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("ABABAB", [0, 1, 0, 1, 0, 1]),
        ("BABABA", [0, 1, 0, 1, 0, 1]),
        ("AABAAB", [0, 0, 1, 0, 0, 1]),
        # the first cycle of B AA cannot tell that A steps once more; the others end with its second step
        ("BAABAABAA", [0, 1, 0, 0, 0, 1, 0, 0, 1]),
        # A steps three times in the first cycle, then twice: the second cycle is counted with the third
        ("AAABAABAAB", [0, 0, 0, 1, 0, 0, 0, 0, 0, 2]),
    ],
)
def test_a_cycle_ends_with_the_last_step(steps: str, expected: list[int]) -> None:
    """A cycle ends when all have stepped as often as before."""
    assert ends(steps) == expected


def test_a_cycle_of_three_ends_in_any_order() -> None:
    for order in ("ABC", "ACB", "BAC", "BCA", "CAB", "CBA"):
        assert ends(4 * order, "ABC") == 4 * [0, 0, 1]


def test_stopped_optimizers_are_not_awaited() -> None:
    """B steps twice; after A's step number PATIENCE_STEPS without it, each further step of A is a cycle."""
    found = ends("ABAB" + 2 * PATIENCE_STEPS * "A")
    assert found[:4] == [0, 1, 0, 1]
    assert found[4:] == (1 + PATIENCE_STEPS) * [0] + (PATIENCE_STEPS - 1) * [1]


def test_idle_optimizers_are_not_awaited() -> None:
    """An optimizer that never steps is not waited for for ever."""
    assert sum(ends(2 * PATIENCE_STEPS * "A")) == PATIENCE_STEPS - 1


def test_random_steps_end_cycles() -> None:
    """Optimizers that step at random end cycles all the time.

    As those of experts: each is missing now and then, and no cycle waits for one that does not come.
    """
    found = ends("ABCD" + "AB" + "ACD" + "AD" + "ABC" + "ABD" + "AC" + "ABCD" + "A", "ABCD")
    assert sum(found) >= 7
