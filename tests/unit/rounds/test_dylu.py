"""Local steps by speed (DyLU), by hand."""

from __future__ import annotations

import pytest

from atoll.rounds.dynamic_local_steps import local_steps


@pytest.mark.covers("L6", "L18")
@pytest.mark.parametrize(
    ("speed", "h", "k", "steps"),
    [
        (10.0, 500, 1, 500),  # the fastest
        (3.3333, 500, 1, 166),  # ⌊0.33333 · 500⌋
        (5.0, 30, 3, 15),  # 3 · ⌊0.5 · 10⌋
        (4.0, 50, 5, 20),  # 5 · ⌊0.4 · 10⌋
        (3.9, 50, 5, 15),  # 5 · ⌊0.39 · 10⌋ = 5 · 3
        (2.9, 100, 1, 29),  # though 2.9 / 10 · 100 is 28.999999999999996
        (0.001, 500, 1, 1),
        (0.001, 30, 3, 3),  # at least K
        (0.0, 500, 1, 500),  # not measured yet
    ],
)
def test_steps(speed, h, k, steps):
    assert local_steps({"a": 10.0, "b": speed}, "b", h, k) == steps


def test_gives_the_full_steps_before_any_measurement():
    assert local_steps({}, "b", 500) == 500
    assert local_steps({"a": 0.0, "b": 0.0}, "b", 500) == 500
