from __future__ import annotations

from collections.abc import Callable

import pytest
from round_story import Story

from atoll.rounds.state import Rules


@pytest.fixture
def story() -> Callable[..., Story]:
    """`story(sites=3, ...)` begins one."""

    def begin(sites: int = 2, heads: tuple[int, ...] | None = None, **rules: object) -> Story:
        return Story(Rules(sites, **rules), heads)  # type: ignore[arg-type]

    return begin
