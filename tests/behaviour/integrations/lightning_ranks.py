"""A script that Lightning runs as two ranks: one site of a run. What each rank saw goes into a file of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from lightning_world import data, module_class, trainer_of

import atoll
import atoll.integrations.lightning


def main(package: str, out: Path, lr: float) -> None:
    trainer = trainer_of(package, devices=2, strategy="ddp", use_distributed_sampler=True)
    callback = atoll.integrations.lightning.patch(trainer, folder=out / f"files-{trainer.global_rank}")
    module, locals_ = module_class(package)(lr=lr), []
    for _ in atoll.integrations.lightning.rounds(trainer):
        trainer.fit(module, data())
        locals_.append(module.w.item())
    told = {
        "locals": locals_,
        "result": module.w.item(),
        "files": (out / f"files-{trainer.global_rank}").exists(),
        "device": str(module.w.device),
        "joined": callback.driver.info is not None,
    }
    (out / f"rank-{trainer.global_rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()  # else Gloo's threads may end the process with SIGABRT (pytorch issue 190489)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
