"""Run a row of the golden matrix, through public names only, and digest what it leaves."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from golden_axes import STEPS, Row, name_of, settings_of
from golden_model import WEIGHTS, build, inner, state_of, take_rounds, train_steps
from harness.processes import Nursery, free_port
from kit import SITES, ask_journal, exported, serve, tensors_digest, together
from kit.servers import new_simulation
from safetensors.torch import load_file
from torch import Tensor

import atoll

HERE = Path(__file__).parent
DIGESTS = HERE / "digests.json"
State = dict[str, Tensor]
RANKS = 2


def build_key() -> str:
    """What the same bits are promised for: the build of torch and the vector instructions that it uses."""
    return f"torch {torch.__version__}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def known() -> dict[str, dict[str, str]]:
    """Build → run → digests."""
    found: dict[str, dict[str, str]] = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    return found


def digests_of(row: Row, folder: Path, nursery: Callable[[], Nursery]) -> dict[str, str]:
    """Run it in a folder, and digest its models.

    Args:
        nursery: asked for where the run has processes.

    Returns:
        `result`: what the run exports; `a`, `b`: the sites' models before the last step, or as the last round's
        training left them; `end`: the model with which both sites end. A simulation has no `end`.
    """
    folder.mkdir()
    states = _simulated(row, folder) if row["place"] == "simulation" else _served(row, folder, nursery)
    if "b-end" in states:
        assert _same(states["a-end"], states.pop("b-end")), f"{name_of(row)}: the sites end with different models"
        states["end"] = states.pop("a-end")
    return {name: tensors_digest(state)[:16] for name, state in sorted(states.items())}


def norms_of(folder: Path) -> list[list[float]]:
    """The norms of the updates in each version, as the run's journal has them: by version, fragment and site."""
    rows = ask_journal(
        folder, "SELECT version, fragment, norm FROM tickets WHERE state = 'counted' ORDER BY 1, 2, site"
    )
    return [[norm for *_, norm in tickets] for _, tickets in groupby(rows, lambda row: row[:2])]


def replaced_by(recorded: list[list[float]]) -> Callable[[list[float]], list[float]]:
    """A function that gives the recorded norms of the next version for the specification's own, which must be near."""
    of_versions = iter(recorded)

    def norms(own: list[float]) -> list[float]:
        theirs = next(of_versions)
        assert all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(theirs, own, strict=True))
        return theirs

    return norms


def in_words(digests: dict[str, str]) -> str:
    """One line for a run."""
    return " ".join(f"{name} {digest}" for name, digest in digests.items())


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Of what both have, the models that differ."""
    return [name for name in one.keys() & other.keys() if one[name] != other[name]]


def _same(one: State, other: State) -> bool:
    return tensors_digest(one) == tensors_digest(other)


def _served(row: Row, folder: Path, nursery: Callable[[], Nursery]) -> dict[str, State]:
    states: dict[str, State] = {}
    with serve(folder, build(row["dtype"]), **settings_of(row)) as server:
        jobs: dict[str, Callable[[], None]] = {
            site: partial(_take_part, row, folder, server.url, site, states) for site in SITES
        }
        if row["place"] in ("fsdp", "ddp"):  # one site of several ranks, the other one in a thread
            jobs["a"] = partial(_take_part_in_ranks, row, folder, server.url, states, nursery())
        together(*jobs.values())
        server.run()
    if row["place"] == "swarm":
        results = [load_file(folder / "workers" / site / "model.safetensors") for site in SITES]
        assert _same(*results), f"{name_of(row)}: the sites keep different results"
        return states | {"result": results[0]}
    return states | {"result": exported(folder)}


def _take_part(row: Row, folder: Path, url: str, site: str, states: dict[str, State]) -> None:
    workers = folder / "workers"
    model = build(row["dtype"])
    if row["algorithm"] in STEPS:
        weight = WEIGHTS[row["weights"]][site]
        with atoll.DiLoCo(
            model, inner(model), server=url, site=site, folder=workers, weight=weight, swarm=True
        ) as diloco:
            states[site] = train_steps(diloco, model, site)
    else:
        with atoll.join(url, site=site, folder=workers, swarm=True) as worker:
            states[site] = take_rounds(worker, site, row)
            worker.load_into(model)
    states[f"{site}-end"] = state_of(model)


def _take_part_in_ranks(row: Row, folder: Path, url: str, states: dict[str, State], nursery: Nursery) -> None:
    how = {"site": "a", "out": str(folder), **row}
    env = {"ATOLL_SERVER": url, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        nursery.start(
            str(HERE / "golden_site.py"),
            json.dumps(how),
            cwd=folder,
            env=env | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            log=folder / f"rank-{rank}.log",
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        assert rank.wait(60) == 0, rank.output()[-4000:]
    states["a"] = load_file(folder / "a-before.safetensors")
    states["a-end"] = load_file(folder / "a-end.safetensors")


def _simulated(row: Row, folder: Path) -> dict[str, State]:
    simulation(row, folder).run()
    return {site: load_file(folder / f"{site}-before.safetensors") for site in SITES} | {"result": exported(folder)}


def simulation(row: Row, folder: Path, client: str = "train") -> atoll.Simulation:
    """One process trains both sites."""
    settings: dict[str, Any] = {key: value for key, value in settings_of(row).items() if value is not None}
    return new_simulation(
        build(row["dtype"]),
        script=f"{HERE / 'golden_model.py'}:{client}",
        arguments=[json.dumps({"out": str(folder), **row})],
        sites=list(SITES),
        processes=1,
        **{"rounds.total": 3, "disk.state_dir": folder / "state", "disk.min_free_bytes": 0, "run.threads": 1},
        **settings,
    )
