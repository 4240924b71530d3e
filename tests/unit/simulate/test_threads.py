"""How many threads each process of a simulation has."""

from __future__ import annotations

import os

import pytest

from atoll.simulate.simulation import threads_of


def test_processes_divide_the_cores_among_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [threads_of(processes) for processes in (1, 3, 8, 20)] == [8, 2, 1, 1]
    for told, threads in (("4", 4), ("4,2", 4), ("0", 2), ("many", 2), ("", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert threads_of(4) == threads
