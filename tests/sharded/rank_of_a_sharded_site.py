"""One rank of a site whose model is sharded by FSDP2: trains on its share of the site's data, and writes what it has.

python rank_of_a_sharded_site.py '{"site": "a", "out": "folder", …}', with torchrun's variables and ATOLL_SERVER.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from sharded_world import WEIGHTS, Awkward, build, data, inner
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import atoll


def local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def shard(model: Awkward) -> None:
    ignored = {model.gain}
    for layer in (model.wide, model.down, model.last):
        fully_shard(layer)
    fully_shard(model, ignored_params=ignored)


def main(site: str, out: Path, steps: int = 100, sharded: bool = True, poison: int = -1, **more: Any) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    if sharded:
        shard(model)
    optimizer = inner(model)
    each = 16 // ranks
    inputs, targets = (values[each * rank : each * (rank + 1)] for values in data(site))
    trace: dict[str, Tensor] = {}
    with atoll.DiLoCo(model, optimizer, site=site, weight=WEIGHTS[site], folder=out / "workers", **more) as diloco:
        for step in range(steps):
            if diloco.finished:
                break
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            grad = model.gain.grad
            assert grad is not None
            if sharded:  # FSDP leaves what it ignores to the script
                dist.all_reduce(grad)
                grad /= ranks
            if step == poison and rank == ranks - 1:
                with torch.no_grad():
                    local(model.wide.weight).fill_(float("nan"))
            optimizer.step()
            trace |= {f"{step}/{name}": local(p).detach().clone() for name, p in model.named_parameters()}
        told = diloco.sync_metrics | {"finished": diloco.finished, "step": diloco.step}
        told |= {"mean": model.mean.tolist(), "seen": int(model.seen)}
    out.mkdir(exist_ok=True)
    safetensors.torch.save_file(trace, out / f"{site}-{rank}.safetensors")
    (out / f"{site}-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    given = json.loads(sys.argv[1])
    main(**given | {"out": Path(given["out"])})
