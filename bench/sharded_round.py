"""A synchronisation of one worker, whole and sharded over ranks by FSDP2: seconds, parts, bytes of each rank.

The server is this process, the ranks are processes of their own, all on one machine; a step of training is one of SGD.
Seconds are those of rank 0's step, from its gradient to the next version: sending, the round, pulling.

    python bench/sharded_round.py                        # 200 MB in 50 layers; one process, two ranks
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from harness.processes import free_port
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import atoll
from atoll.codecs import build_codecs, encoded_layout
from atoll.registry import OwnName
from atoll.tensors.module_tensors import schema_of

ROWS, COLUMNS = 1000, 1001


def build(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(layers)))


def work(rank: int, ranks: int, layers: int, url: str, port: int, folder: Path, told: Any) -> None:
    """One rank, until the run is finished."""
    torch.set_num_threads(1)
    logging.getLogger("atoll").setLevel(logging.WARNING)
    model = build(layers)
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    seconds = []
    with atoll.DiLoCo(model, optimizer, server=url, site="a", folder=folder) as diloco:
        while not diloco.finished:
            begin = time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - begin)
    told.put((rank, seconds, diloco.sync_metrics["bytes_up"], diloco.sync_metrics["bytes_down"]))
    if ranks > 1:
        dist.destroy_process_group()


def measure(ranks: int, layers: int, rounds: int, folder: Path) -> str:
    """A line of the table."""
    settings = {
        "algorithm.name": "diloco",
        "aggregation.upload_codec.name": "none",
        "diloco.sync_every": 1,
        "rounds.total": rounds,
        "rounds.sites": 1,
    }
    if ranks > 1:
        settings["model.ranks"] = ranks
    model, context = build(layers), mp.get_context("spawn")
    parts = encoded_layout(schema_of(model), "none", build_codecs(OwnName("none"), {}), 16 * 2**20, ranks).parts
    told = context.Queue()
    with atoll.Server(
        model,
        settings={
            "algorithm.name": "diloco",
            "network.port": 0,
            "disk.state_dir": folder / f"state-{ranks}",
            **settings,
        },
    ) as server:
        del model
        port, workers = free_port(), folder / f"workers-{ranks}"
        processes = [
            context.Process(target=work, args=(rank, ranks, layers, server.url, port, workers, told), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = sorted(told.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
    each = "; ".join(f"{up / 1e6:.0f} MB up, {down / 1e6:.0f} MB down" for _, _, up, down in found)
    return f"{ranks} rank{'s' * (ranks > 1)}: {len(parts)} parts, {statistics.median(found[0][1]):.2f} s, {each}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=50, help=f"of {ROWS} × {COLUMNS} in fp32, 4 MB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--dir", type=Path, default=None, help="for files while it runs")
    options = parser.parse_args()
    logging.getLogger("atoll").setLevel(logging.WARNING)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            print(measure(ranks, options.layers, options.rounds, Path(name)), flush=True)


if __name__ == "__main__":
    main()
