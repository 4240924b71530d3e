"""One rank of a site with a model sharded by FSDP2: trains on its share of the site's data, and writes what it has.

python rank_of_a_sharded_site.py '{"site": "a", "out": "folder", …}', with torchrun's variables and ATOLL_SERVER.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from kit.diloco_specified import WEIGHTS, inner
from sharded_world import Awkward, build, data
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import atoll
from atoll.filters import NormClip
from atoll.protocol import routes
from atoll.worker.session import session
from atoll.worker.session.ranks import RankGroup
from atoll.worker.training import diloco_loop as diloco_module


def local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def shard(model: Awkward, how: str) -> Awkward:
    """`rows` is as it should be; the others are refused."""
    ignored: set[nn.Parameter] = {model.gain}
    ranks = dist.get_world_size()
    if how in ("replicated", "columns"):
        mesh, placement = init_device_mesh("cpu", (ranks,)), Replicate() if how == "replicated" else Shard(1)
        model.wide.weight = nn.Parameter(distribute_tensor(model.wide.weight.detach(), mesh, [placement]))
    elif how == "hybrid":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("over", "within"))
        fully_shard(model, ignored_params=ignored, mesh=mesh)
    elif how == "rows":
        for layer in (model.wide, model.last):  # tied parameters have to be in one group, here that of the whole
            fully_shard(layer)
        fully_shard(model, ignored_params=ignored)
    return model


class Counted(RankGroup):
    """Counts the bytes that this rank gives to the others, each to one of them."""

    given = 0

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        Counted.given += sum(each.numel() for rank, each in enumerate(outgoing) if rank != self.rank)
        return super().swap(outgoing, sizes)


def hold(until: str | None) -> None:
    """Wait for a file, and say so by one beside it."""
    if until is not None:
        Path(f"{until}.awaited-{dist.get_rank()}").touch()
    while until is not None and not Path(until).exists():
        time.sleep(0.01)


@dataclass
class How:
    """How the ranks train.

    Attributes:
        sharded: how; "" trains the whole model on every rank, as it is.
        poison: the step in which the last rank's rows of a tensor become NaN.
        held: step → file that has to be there before it.
        otherwise: what is done with the model in place of training it with DiLoCo.
        patience_to_join_s: of the ranks with each other until rank 0 has joined.
        patience_s: of the ranks with each other in training; a request of rank 0 to the server takes a tenth of it.
    """

    sharded: str = "rows"
    steps: int = 100
    poison: int = -1
    held: dict[str, str] = field(default_factory=dict)
    filters: bool = False
    otherwise: str = ""
    patience_to_join_s: float = 60.0
    patience_s: float = 60.0


def main(site: str, out: Path, how: How, **more: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    routes.LONG_POLL_S = min(routes.LONG_POLL_S, how.patience_s / 10)
    session.LONGEST_BACKOFF_S = min(session.LONGEST_BACKOFF_S, how.patience_to_join_s / 4)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    trained = shard(model, how.sharded)
    dist.barrier()  # a rank that is refused ends, and with rank 0 the store by which others make their groups
    if how.otherwise == "publish":
        atoll.objects.publish(model)
    elif how.otherwise == "join":
        with atoll.join(site=site, folder=out / "workers") as worker:
            next(iter(worker)).load_into(model)
    optimizer = inner(trained)
    each = 16 // ranks
    last = 16 if rank == ranks - 1 else each * (rank + 1)
    inputs, targets = (values[each * rank : last] for values in data(site))
    share = len(inputs) * ranks / 16  # FSDP takes the mean over ranks, which may have more or fewer samples
    trace: dict[str, Tensor] = {}
    diloco_module.RankGroup = Counted
    more = {"site": site, "weight": WEIGHTS[site], "folder": out / "workers"} | more
    distributed_c10d._set_pg_timeout(timedelta(seconds=how.patience_to_join_s))
    with atoll.DiLoCo(trained, optimizer, filters=[NormClip(1.0)] if how.filters else (), **more) as diloco:
        distributed_c10d._set_pg_timeout(timedelta(seconds=how.patience_s))
        for step in range(how.steps):
            if diloco.finished:
                break
            hold(how.held.get(str(step)))
            optimizer.zero_grad()
            ((model(inputs) - targets).square().mean() * share).backward()
            grad = model.gain.grad
            assert grad is not None
            if ranks > 1:  # FSDP leaves what it ignores to the script
                dist.all_reduce(grad)
                grad /= ranks
            if step == how.poison and rank == ranks - 1:
                with torch.no_grad():
                    local(model.wide.weight).fill_(float("nan"))
            optimizer.step()
            trace |= {f"{step}/{name}": local(p).detach().clone() for name, p in model.named_parameters()}
        told = diloco.sync_metrics | {"finished": diloco.finished, "step": diloco.step}
    told |= {"mean": model.mean.tolist(), "seen": int(model.seen), "given": Counted.given}
    safetensors.torch.save_file(trace, out / f"{site}-{rank}.safetensors")
    (out / f"{site}-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    how = How(**{each.name: given.pop(each.name) for each in fields(How) if each.name in given})
    main(**given | {"out": Path(given["out"])}, how=how)
