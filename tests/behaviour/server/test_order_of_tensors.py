"""A model from a file, whose tensors are not in the order of the module that it was saved from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    SITES,
    DiLoCoSites,
    FederatedSites,
    Threads,
    build_model,
    exported,
    local_step,
    serve,
    tensors_digest,
    together,
)
from safetensors.torch import save_file

import atoll


def scaffold(url: str, folder: Path, site: str) -> None:
    model = build_model()
    with atoll.join(url, site=site, folder=folder / "workers") as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with fl_round.correct(model, optimizer):
                for step in range(3):
                    local_step(model, optimizer, site, step)
            fl_round.submit(model)


RUNS: dict[str, tuple[dict[str, Any], Callable[[str, Path], Any]]] = {
    "fedavg": ({}, FederatedSites),
    "scaffold": (
        {"algorithm.name": "scaffold", "algorithm.outer_optimizer.momentum": 0.0},
        lambda url, folder: Threads(*(partial(scaffold, url, folder, site) for site in SITES)),
    ),
    "diloco": ({"algorithm.name": "diloco", "diloco.sync_every": 2}, lambda url, folder: DiLoCoSites(url, folder, 6)),
    "streaming": (
        {
            "algorithm.name": "diloco",
            "diloco.sync_every": 4,
            "diloco.num_fragments": 2,
            "diloco.fragment_update_alpha": 0.5,
            "diloco.fragment_sync_delay": 1,
        },
        lambda url, folder: DiLoCoSites(url, folder, 12),
    ),
}


def saved(folder: Path) -> str:
    """The model as safetensors saves it: by size of the elements and then by name, biases before weights."""
    path = folder / "initial.safetensors"
    save_file(build_model().state_dict(), path)
    return str(path)


def run(folder: Path, model: str | None, name: str) -> str:
    settings, sites = RUNS[name]
    with serve(folder, model, **settings) as server:
        taking_part = sites(server.url, folder)
        together(server.run)
        taking_part.join()
    return tensors_digest(exported(folder))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "diloco"])
def test_sites_bring_the_module_of_a_run_that_began_with_its_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "module").mkdir()
    (tmp_path / "file").mkdir()
    assert run(tmp_path / "file", saved(tmp_path), name) == run(tmp_path / "module", None, name)


def test_sites_bring_the_module_where_the_file_is_split_into_fragments(tmp_path: Path) -> None:
    """Other tensors may be in a fragment than with the module, so the values may be others, too."""
    run(tmp_path, saved(tmp_path), "streaming")


def test_a_run_that_began_with_a_file_goes_on_with_its_module(tmp_path: Path) -> None:
    with serve(tmp_path, saved(tmp_path), **{"rounds.sites": 1}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            fl_round = next(iter(worker))
            fl_round.submit(fl_round.load_into(build_model()))
    with serve(tmp_path, build_model(), **{"rounds.sites": 1}) as server:
        sites = FederatedSites(server.url, tmp_path, ["a"])
        together(server.run)
        sites.join()
