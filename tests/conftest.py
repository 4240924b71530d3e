"""For every test: no ATOLL_* from outside, one thread of torch, and marks that name real behaviours."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import processes
from hypothesis import HealthCheck, settings

for _variable in [name for name in os.environ if name.startswith("ATOLL_")]:
    del os.environ[_variable]  # before any test module reads it: a shell's settings must not decide a test
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores; also inherited by the ones tests start

# The time an example takes depends on what else the machine does, so it decides nothing.
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")

# Processes that tests start import the harness and the kit, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))

BEHAVIOURS = Path(__file__).parents[1] / "docs" / "behaviours.toml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a mark that names no behaviour, also one that is built while tests are collected."""
    known = tomllib.loads(BEHAVIOURS.read_text(encoding="utf-8"))["behaviours"]
    for item in items:
        for mark in item.iter_markers("covers"):
            unknown = [name for name in mark.args if name not in known]
            if unknown or not mark.args:
                raise pytest.UsageError(f"{item.nodeid}: covers{mark.args} names no line of docs/behaviours.toml.")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """For tests of Ctrl-C: the suite may run where SIGINT is ignored."""
    with processes.interruptible():
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[processes.Nursery]:
    """One for all tests of this process: what it starts takes milliseconds instead of seconds of importing."""
    sharded = ("torch.distributed.fsdp", "torch.distributed.tensor")
    with processes.Nursery((*processes.PRELOAD, *sharded)) as nursery:
        yield nursery
