"""Modes: what Atoll keeps is for its owner alone, whatever the umask; what a user names follows the umask."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit import FederatedSites, diloco, run_to_end, serve, take_steps
from kit.servers import plain_server
from kit.sites import federated as trained
from torch import nn

import atoll
from atoll.cli.export import from_directory

pytestmark = pytest.mark.covers("X2")


@pytest.fixture(autouse=True)
def umask() -> Iterator[Callable[[int], int]]:
    """Sets the umask, which takes nothing away at first; afterwards it is as it was."""
    before = os.umask(0)
    yield os.umask
    os.umask(before)


def wide(*folders: Path) -> list[str]:
    """Folders that are not 0700 and files that are not 0600, among these folders and all in them."""
    every = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    assert len(every) > len(folders)
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in every}
    return [f"{path} {mode:04o}" for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def federated(folder: Path) -> None:
    """With every kind of export, and what a site keeps for lossy codecs."""
    settings = {"rounds.best_metric": "loss", "rounds.best_mode": "min", "disk.export_every": 1}
    int8 = {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"}
    with serve(folder, **settings, **int8) as server:
        sites = FederatedSites(server.url, folder)
        assert wide(folder / "state") == []  # with SQLite's other files
        run_to_end(server, sites)


def fragments(folder: Path) -> None:
    with serve(folder, algorithm="diloco", sites=1, rounds=2, K=2, H=4, tau=1) as server:
        with diloco(server, folder) as loop:
            take_steps(loop)
        server.run()


def swarm(folder: Path) -> None:
    with serve(folder, **{"swarm.enabled": True}) as server:
        run_to_end(server, FederatedSites(server.url, folder, swarm=True))
    assert list((folder / "workers").glob("*/model.safetensors"))


def functional(folder: Path) -> None:
    with plain_server(folder, nn.Linear(3, 2), sites=1, rounds=1) as server:
        atoll.functional.init(server.url, "a", folder=folder / "workers")
        while atoll.functional.receive(into=(model := nn.Linear(3, 2))) is not None:
            atoll.functional.send(model)
        server.run()


def evaluation(folder: Path) -> None:
    """Each site keeps its own model, and sends it."""
    steps = ({"kind": "train"}, {"kind": "cross_site_evaluation"})
    with plain_server(folder, nn.Linear(1, 1), sites=1, rounds=1, **{"workflow.steps": steps}) as server:
        with atoll.join(server.url, "a", folder=folder / "workers") as worker:
            worker.evaluates(lambda model: {"loss": 1.0})
            for fl_round in worker:
                fl_round.submit(fl_round.load_into(nn.Linear(1, 1)))
            worker.run()
        server.run()
    assert list((folder / "state" / "exports").glob("cross_site_evaluation.*"))


@pytest.mark.parametrize("run", [federated, fragments, swarm, functional, evaluation])
def test_a_runs_files_are_private(tmp_path: Path, run: Callable[[Path], None]) -> None:
    """In every kind of run, the folders of the server and the workers have mode 0700 and their files mode 0600."""
    run(tmp_path)
    assert wide(tmp_path / "state", tmp_path / "workers") == []


SCRIPT = """\
import torch
from torch import nn


def build():
    return nn.Linear(3, 2)


def train(worker):
    model = build()
    for fl_round in worker:
        fl_round.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fl_round.correct(model, optimizer):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        fl_round.submit(model)
"""


@pytest.mark.slow
def test_a_simulations_files_are_private(tmp_path: Path) -> None:
    """In a simulation, every folder and file of the run has mode 0700 or 0600.

    This includes the state of SCAFFOLD for each site, which processes of the simulation write.
    """
    (tmp_path / "client.py").write_text(SCRIPT)
    settings = {
        "disk.state_dir": tmp_path / "state",
        "model.source": f"{tmp_path / 'client.py'}:build",
        "algorithm.name": "scaffold",
        "aggregation.upload_codec.name": "int8",
        "rounds.total": 2,
        "rounds.sites": 2,
    }
    atoll.Simulation(settings=settings, script=f"{tmp_path / 'client.py'}:train", sites=2, processes=1).run()
    assert wide(tmp_path / "state") == []
    assert list((tmp_path / "state").rglob("algorithm-0.bin"))


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_files_that_a_user_names_follow_the_umask(tmp_path: Path, umask: Callable[[int], int], mask: int) -> None:
    """Exports into a folder that the user names, and the file of `atoll export`, get the usual modes of the umask."""
    # The state directory stays private.
    umask(mask)
    exports = tmp_path / "results" / "first"
    options = {"disk.export_dir": exports, "rounds.best_metric": "loss", "disk.export_every": 1}
    with serve(tmp_path, rounds=2, **options, **{"rounds.best_mode": "min"}) as server:
        run_to_end(server, FederatedSites(server.url, tmp_path))
    assert from_directory(tmp_path / "state", tmp_path / "out.safetensors") == 2
    assert {path.name for path in exports.iterdir()} >= {"metrics.jsonl", "best.json", "model-000001.safetensors"}
    assert {mode(path) for path in (*exports.iterdir(), tmp_path / "out.safetensors")} == {0o666 & ~mask}
    assert {mode(path) for path in (exports, exports.parent)} == {0o777 & ~mask}
    assert wide(tmp_path / "state", tmp_path / "workers" / "a") == []


def test_folders_with_wide_modes_become_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A start makes the folders and files of a run private again, if their modes had been widened, and logs each folder
    once.
    """
    # It makes files private when it opens them. The folder that `ATOLL_DIR` names belongs to the user and keeps its
    # mode.
    caplog.set_level(logging.INFO, "atoll")

    def play(rounds: int) -> list[str]:
        caplog.clear()
        with plain_server(tmp_path, nn.Linear(3, 2), sites=1, rounds=rounds) as server:
            trained(server, tmp_path, lambda model: None, lambda: nn.Linear(3, 2))
            server.run()
        return sorted(line.split(" had mode ")[0] for line in caplog.messages if " had mode " in line)

    assert play(1) == []
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (run,) = (path for path in (tmp_path / "w" / "a").iterdir())
    narrowed = [tmp_path / "state", *((tmp_path / "state" / name) for name in ("exports", "slots")), run.parent, run]
    assert play(2) == sorted(map(str, narrowed))
    assert play(3) == []
    assert wide(tmp_path / "state", tmp_path / "w" / "a") == []
    assert mode(tmp_path / "w") == 0o755


def test_a_shared_state_directory_keeps_its_mode(tmp_path: Path) -> None:
    """If the state directory is a shared folder like /tmp, it keeps its mode, and the files and folders in it are
    private.
    """
    # Mode 1777.
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o1777)
    with plain_server(tmp_path, nn.Linear(3, 2), sites=1, rounds=1):
        assert mode(tmp_path / "state") == 0o1777
    assert wide(*(tmp_path / "state").iterdir()) == []
