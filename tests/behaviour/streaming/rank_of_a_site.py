"""One rank of a site: trains on its half of the site's data, and writes its parameters after every step to a file.

python rank_of_a_site.py SITE STEPS OUT, with torchrun's variables and ATOLL_SERVER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import safetensors.torch
import torch.distributed as dist
from six_layers import WEIGHTS, build, data, inner
from torch.nn.parallel import DistributedDataParallel

import atoll


def main(site: str, steps: int, out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(build())
    optimizer = inner(model.module)
    inputs, targets = (each[8 * rank : 8 * rank + 8] for each in data(site))
    trace = {}
    with atoll.DiLoCo(model, optimizer, site=site, weight=WEIGHTS[site], folder=out / "workers") as diloco:
        for step in range(steps):
            if diloco.finished:
                break
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            trace |= {f"{step}/{name}": p.detach().clone() for name, p in model.module.named_parameters()}
    assert diloco.finished
    safetensors.torch.save_file(trace, out / f"{site}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
