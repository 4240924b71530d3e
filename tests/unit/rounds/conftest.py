from __future__ import annotations

from collections.abc import Callable

import pytest
from round_story import Story

from atoll.rounds.state import Rules


@pytest.fixture
def story() -> Callable[..., Story]:
    """`story(num_workers=3, ...)` begins one."""

    def begin(num_workers: int = 2, heads: tuple[int, ...] | None = None, **rules: object) -> Story:
        return Story(Rules(num_workers, **rules), heads)  # type: ignore[arg-type]

    return begin
