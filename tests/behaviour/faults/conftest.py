"""The run of `fault_world` without a fault, for all tests of this folder."""

from __future__ import annotations

import pytest
from fault_world import Result, left_undisturbed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return left_undisturbed(tmp_path_factory.mktemp("undisturbed"))
