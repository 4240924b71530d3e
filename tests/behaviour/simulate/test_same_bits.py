"""Simulated by one process or by two, on Ray, or trained by real workers over HTTP: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, free_port
from simulated_world import SITES, model_of, write

import atoll

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm.name": "fedavg"},
    "fedadam": {"algorithm.name": "fedadam"},
    "scaffold": {"algorithm.name": "scaffold", "network.part_bytes": 65536},  # several parts
    "int8": {"algorithm.name": "fedavg", "aggregation.upload_codec.name": "int8"},
}
SAMPLED = {"algorithm.name": "scaffold", "rounds.sample_fraction": 0.5, "rounds.sample_min": 2}


def trained(nursery: Nursery, folder: Path, **settings: Any) -> bytes:
    """By `atoll server` and a process for each site."""
    port = free_port()
    write(folder, **{"rounds.sites": len(SITES), "network.port": port, "disk.state_dir": "state"}, **settings)
    server = nursery.start("atoll", "server", "run.toml", cwd=folder)
    url = {"ATOLL_SERVER": f"http://127.0.0.1:{port}", "ATOLL_DIR": str(folder / "workers")}
    workers = [nursery.start("client.py", cwd=folder, env=url | {"ATOLL_SITE": site}) for site in SITES]
    assert [worker.wait(60) for worker in workers] == [0] * len(SITES), workers[0].output()
    assert server.wait(60) == 0
    return model_of(folder / "state")


def simulated(folder: Path, name: str, *, processes: int, client: str = "client.py:train", engine: str = "") -> bytes:
    """By a simulation, in a program."""
    file, colon, function = client.partition(":")
    given = {"disk.state_dir": folder / name, "model.source": f"{folder / 'client.py'}:build"}
    done = atoll.Simulation(
        settings=atoll.Settings.read(folder / "run.toml", given),
        script=f"{folder / file}{colon}{function}",
        sites=len(SITES),
        processes=processes,
        engine=engine or "local",
    ).run()
    assert (done.rounds, done.failed, done.late) == (3, {}, 0)
    assert (folder / name / "exports" / "metrics.jsonl").read_text().count("\n") == 3
    return model_of(folder / name)


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.long) if each in ("fedadam", "int8") else each for each in RUNS],
)
def real(request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of real workers, and its result in `state`."""
    folder = tmp_path_factory.mktemp(request.param)
    trained(nursery, folder, **RUNS[request.param])
    return folder


@pytest.mark.covers("V1")
@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_simulation_ends_with_the_bits_of_real_workers(
    real: Path, processes: int, request: pytest.FixtureRequest
) -> None:
    if real.name.startswith("fedavg"):  # as for users: each process imports torch, and has its own seed of hashes
        request.getfixturevalue("fresh_processes")
    assert simulated(real, f"simulated-{processes}", processes=processes) == model_of(real / "state")


@pytest.mark.covers("V1")
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("real", RUNS, indirect=True)
def test_a_simulation_on_ray_ends_with_the_bits_of_real_workers(ray_here: None, real: Path) -> None:
    assert simulated(real, "ray", processes=1, engine="ray") == model_of(real / "state")


@pytest.mark.slow
def test_same_bits_for_every_draw_and_form_of_the_script(nursery: Nursery, tmp_path: Path) -> None:
    result = trained(nursery, tmp_path, **SAMPLED)
    assert simulated(tmp_path, "main", processes=1, client="client.py:main") == result
    assert simulated(tmp_path, "script", processes=1, client="client.py") == result
