from __future__ import annotations

from collections.abc import Callable

import pytest
from round_story import Story

from atoll.rounds.state import Rules


@pytest.fixture
def story() -> Callable[..., Story]:
    """`story(sites=3, ...)` begins one; `story("abc", ...)` one of three sites that have joined."""

    def begin(sites: int | str, **rules: object) -> Story:
        joined = sites if isinstance(sites, str) else ""
        run = Story(Rules(len(sites) if isinstance(sites, str) else sites, **rules))  # type: ignore[arg-type]
        for site in joined:
            run.join(site)
        return run

    return begin
