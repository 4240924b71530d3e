"""A policy that holds in the test's process."""

from __future__ import annotations

from pathlib import Path

import pytest
from policy_world import Writes, write_policy


@pytest.fixture
def policy_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writes:
    """Write a policy, and let it hold in this process: each in a folder of its own, since it is read once."""
    count = iter(range(100))

    def write(text: str) -> Path:
        path = write_policy(tmp_path / f"policy-{next(count)}", text)
        monkeypatch.setenv("ATOLL_POLICY", str(path))
        return path

    return write
