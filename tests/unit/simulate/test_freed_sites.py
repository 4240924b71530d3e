"""What a process of a simulation still holds of a round that is over."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_here import simulate_here
from torch import nn

import atoll
from atoll.simulate import simulated_site


def train(worker: Any) -> None:
    for fl_round in worker:
        fl_round.submit(fl_round.load_into(nn.Linear(2, 1)))


def test_frees_each_site_when_its_round_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulate_here(monkeypatch)
    sites: list[weakref.ref[Any]] = []
    make = simulated_site.SimulatedSite.__init__

    def made(self: Any, *given: Any) -> None:
        make(self, *given)
        sites.append(weakref.ref(self))

    monkeypatch.setattr(simulated_site.SimulatedSite, "__init__", made)
    settings = {"algorithm.name": "fedavg", "rounds.total": 2, "disk.state_dir": tmp_path}
    torch.manual_seed(0)
    gc.disable()  # what only the collector frees counts as held
    try:
        atoll.Simulation(nn.Linear(2, 1), settings, script=train, sites=3).run()
        assert [site() for site in sites] == [None] * 6
    finally:
        gc.enable()
