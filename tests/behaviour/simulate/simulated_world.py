"""Runs of a few sites that can be simulated, or trained by a server and real workers: the same file of client code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from harness.processes import Nursery
from kit.servers import new_simulation
from torch import nn

import atoll
from atoll.testing.run import history

SITES = ["site-0000", "site-0001", "site-0002", "site-0003"]

CLIENT = '''\
"""What a site trains; `train` for simulations, the file itself as a script for real workers, and as one for either."""

import zlib

import torch
from torch import nn

import atoll


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 150), nn.Linear(150, 3))


def train(worker) -> None:
    torch.set_num_threads(1)
    model = build()
    for fl_round in worker:
        fl_round.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draws = torch.Generator().manual_seed(zlib.crc32(f"{worker.site} {fl_round.number}".encode()))
        with fl_round.correct(model, optimizer):
            for _ in range(3):
                loss = (model(torch.randn(8, 6, generator=draws)) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        fl_round.submit(model, weight=10.0 + int(worker.site[-1]), metrics={"loss": loss.item()})


def main() -> None:
    with atoll.join() as worker:
        train(worker)


if __name__ == "__main__":
    main()
'''


def write(folder: Path, client: str = CLIENT, **settings: Any) -> Path:
    """A run file and its client; returns the run file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "client.py").write_text(client)
    told = {
        "model.source": "client:build",
        "run.script": "client.py:train",
        "algorithm.name": "fedavg",
        "rounds.total": 3,
    } | settings
    run_file = folder / "run.toml"
    run_file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items()))
    return run_file


RULES = {"algorithm.name": "scaffold", "aggregation.upload_codec.name": "int8"}
"""With both kinds of what a site keeps between its rounds."""

KILLS = """\
        import os, pathlib, signal
        marks = pathlib.Path(__file__).parent
        if worker.site == "site-0001" and fl_round.number == 2 and len(list(marks.glob("killed-*"))) < {times}:
            (marks / f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
SUBMITS = "        fl_round.submit("


def doing(more: str, **values: object) -> str:
    """CLIENT that does something more, in each round before it submits; `{name}` stands for one of the values."""
    for name, value in values.items():
        more = more.replace(f"{{{name}}}", str(value))
    return CLIENT.replace(SUBMITS, more + SUBMITS)


def simulation(
    folder: Path,
    client: str = CLIENT,
    *,
    script: str = "client.py:train",
    sites: int = 4,
    processes: int = 1,
    engine: str = "local",
    again: str = "resume",
    **settings: Any,
) -> atoll.Simulation:
    """A simulation in a program; the run file, the client and `state` are in `folder`.

    Args:
        again: "resume" goes on with a run in `state`, whatever it was begun with; "fresh" begins anew beside it; else
            the simulation decides.
    """
    given = {"disk.state_dir": folder / "state", "model.source": f"{folder / 'client.py'}:build"}
    read = atoll.Settings.read(write(folder, client, **{"rounds.sites": sites} | settings), given)
    return atoll.Simulation(
        settings=read,
        script=f"{folder / script}",
        sites=sites,
        processes=processes,
        engine=engine,
        fresh=again == "fresh",
        resume=again == "resume",
    )


def result_of(folder: Path, client: str = CLIENT, **how: Any) -> bytes:
    """The result of a simulation in which every site takes part to the end."""
    done = simulation(folder, client, **how).run()
    assert (done.failed, done.late) == ({}, 0)
    return model_of(folder / "state")


def simulate(nursery: Nursery, run_file: Path, *flags: str, code: int = 0, **env: str) -> str:
    """`atoll simulate`, to its end; returns what it said."""
    process = nursery.start("atoll", "simulate", run_file.name, *flags, cwd=run_file.parent, env=env)
    assert process.wait(100) == code, process.output()
    return process.output()


def told(output: str) -> dict[str, Any]:
    """The summary, of a run with `--json`."""
    return json.loads(output[output.index("\n{") :])


def model_of(folder: Path) -> bytes:
    """The result, to the byte."""
    return (folder / "exports" / "model.safetensors").read_bytes()


def workers_of(folder: Path) -> list[list[str]]:
    """The sites that took part in each round."""
    return [[each["site"][-1] for each in row["sites"]] for row in history(folder)]


# -- a model of which the result is derived by hand

MOVES = '''\
"""Every site moves each parameter by its number plus one, in each round."""

import os
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
with (HERE / "loaded").open("a") as file:
    file.write(f"{os.getpid()}\\n")


def build() -> nn.Module:
    return nn.Linear(3, 2)


def train(worker) -> None:
    model, number = build(), int(worker.site[-4:])
    for fl_round in worker:
        fl_round.load_into(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(number + 1.0)
        fl_round.submit(model, weight=1.0, metrics={"number": number, "threads": torch.get_num_threads()})


def measure(worker) -> None:
    """As `train`, and says how much memory its process has, and how many files it has open."""
    held = torch.ones(8 * 2**20)  # 32 MB of a simulated site's own, past what stays with the process when it is freed
    train(worker)
    status = Path("/proc/self/status").read_text().splitlines()
    anonymous = next(line.split()[1] for line in status if line.startswith("RssAnon:"))
    with (HERE / "measured").open("a") as file:
        file.write(f"{int(anonymous) * 1024 * int(held[0])} {len(os.listdir('/proc/self/fd'))}\\n")
'''


def start() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def run(folder: Path, client: Any, **options: Any) -> Any:
    """A simulation of four sites that train with `client`, to its end; state is in `folder`/state."""
    given = {
        "sites": 4,
        "processes": 1,
        "resume": True,
        "rounds.total": 2,
        "algorithm.name": "fedavg",
        "disk.state_dir": folder / "state",
    }
    return new_simulation(start(), script=client, **given | options).run()


def moved(done: Any) -> float:
    """By how much the first weight has moved."""
    result = safetensors.torch.load_file(done.model)
    return float(result["weight"][0, 0] - start().weight[0, 0].detach())
