"""One rank of a site of a golden run, as a process: its models go to files.

python golden_site.py '{"site": "a", "out": "folder", "place": "fsdp", "dtype": …}', with torchrun's variables.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from golden_model import WEIGHTS, build, inner, train_steps
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import atoll


def whole(model: nn.Module) -> dict[str, Tensor]:
    """A sharded model's tensors; every rank has to ask at once."""
    state: dict[str, Any] = model.state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def main(how: dict[str, str]) -> None:
    dist.init_process_group("gloo")
    site, out, model = how["site"], Path(how["out"]), build(how["dtype"])
    if how["place"] == "fsdp":
        trained: nn.Module = fully_shard(model, ignored_params={model.empty, model.scale})
    else:
        trained = DistributedDataParallel(model)
    options = {"site": site, "weight": WEIGHTS[how["weights"]][site], "folder": out / "workers"}
    with atoll.DiLoCo(trained, inner(model), **options) as diloco:
        before = train_steps(diloco, model, site, whole)
    states = {"before": before, "end": whole(model)}
    if dist.get_rank() == 0:
        for name, state in states.items():
            save_file(state, out / f"{site}-{name}.safetensors")
    dist.barrier()
    os._exit(0)  # DDP that ends after its process group waits, now and then for ever (pytorch issue 56297)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
