"""For every test: no ATOLL_* from outside, one thread of torch, and marks that name real behaviours."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import fork_server, processes
from hypothesis import HealthCheck, settings

for _variable in [name for name in os.environ if name.startswith("ATOLL_")]:
    del os.environ[_variable]  # before any test module reads it: a shell's settings must not decide a test
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores; also inherited by the ones tests start

gc.disable()  # until all test modules are imported

# The time an example takes depends on what else the machine does, so it decides nothing.
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")

# Processes that tests start import the harness and the kit, too.
_paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, _paths)))
fork_server.install()  # also for the processes of pytest-xdist

BEHAVIOURS = Path(__file__).parents[1] / "docs" / "behaviours.toml"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a mark that names no behaviour, also one built while tests are collected; begin with slow files."""
    known = tomllib.loads(BEHAVIOURS.read_text(encoding="utf-8"))["behaviours"]
    for item in items:
        for mark in item.iter_markers("covers"):
            unknown = [name for name in mark.args if name not in known]
            if unknown or not mark.args:
                raise pytest.UsageError(f"{item.nodeid}: covers{mark.args} names no line of docs/behaviours.toml.")
    items[:] = slow_files_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def slow_files_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Tests in an order of which each process takes an equal run: its share of the slow files, then of the others.

    A slow test that begins last runs alone. The tests of a file stay together, for they share fixtures.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    by_slow = {path: sum(item.get_closest_marker("slow") is not None for item in own) for path, own in files.items()}
    slow = sorted((path for path, count in by_slow.items() if count), key=lambda path: -by_slow[path])
    others = [item for path, own in files.items() if not by_slow[path] for item in own]
    ordered: list[pytest.Item] = []
    for process in range(processes):
        ordered += [item for path in slow[process::processes] for item in files[path]]
        stop = max(0, len(items) * (process + 1) // processes - len(ordered))
        ordered += others[:stop]
        others = others[stop:]
    return ordered + others


def pytest_collection_finish() -> None:
    """Collect no garbage while modules are imported, and let no later collection visit them: 1.5 s in each process."""
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in the test's process ends at once, though the test has asked it for its status (else after 3 s)."""
    if "atoll.server.serve" in sys.modules:
        monkeypatch.setattr("atoll.server.serve.WATCHED_S", 0.0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """For tests of Ctrl-C: the suite may run where SIGINT is ignored."""
    with processes.interruptible():
        yield


@pytest.fixture
def fresh_processes() -> Iterator[None]:
    """For tests of imports, or of a start itself: Python processes are not forked from one that has imported all."""
    with fork_server.fresh_processes():
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[processes.Nursery]:
    """Starts processes that end with the tests."""
    nursery = processes.Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def pulled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no version come with its ticket in this process: each is a download of its own, as a large one is."""
    monkeypatch.setattr("atoll.worker.exchange.base_and_outbox.BaseFile.digest_of", lambda self, run: None)
