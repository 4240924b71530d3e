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
    """A cycle of several optimizers ends when each has stepped as often as in the cycle before."""
    assert ends(steps) == expected


def test_a_cycle_of_three_ends_in_any_order() -> None:
    """A cycle of three optimizers ends with the third step, whatever their order."""
    for order in ("ABC", "ACB", "BAC", "BCA", "CAB", "CBA"):
        assert ends(4 * order, "ABC") == 4 * [0, 0, 1]


def test_stopped_optimizers_are_not_awaited() -> None:
    """If an optimizer stops, cycles end without it after `PATIENCE_STEPS` steps of the other one."""
    # B steps twice. After step number `PATIENCE_STEPS` of A without B, each further step of A is a cycle.
    found = ends("ABAB" + 2 * PATIENCE_STEPS * "A")
    assert found[:4] == [0, 1, 0, 1]
    assert found[4:] == (1 + PATIENCE_STEPS) * [0] + (PATIENCE_STEPS - 1) * [1]


def test_idle_optimizers_are_not_awaited() -> None:
    """If an optimizer never steps, cycles end without it after some steps of the other one."""
    assert sum(ends(2 * PATIENCE_STEPS * "A")) == PATIENCE_STEPS - 1


def test_random_steps_end_cycles() -> None:
    """Optimizers that step at random still end cycles all the time.

    The optimizers of experts do so: each is missing now and then, and no cycle waits for a missing one.
    """
    found = ends("ABCD" + "AB" + "ACD" + "AD" + "ABC" + "ABD" + "AC" + "ABCD" + "A", "ABCD")
    assert sum(found) >= 7
