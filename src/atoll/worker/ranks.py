"""The ranks of one worker: rank 0 talks to the server, and the others learn from it what it learned.

Everything that is exchanged is text or tensors; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.errors import AtollError, RunFailed, UsageError


class Ranks:
    """The processes that train one model together by `torch.distributed`; often a single one.

    Args:
        rank: of this process, among `world`.
        device: where a collective may take place.
    """

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.talks, self._device = rank == 0, device
        self.together = world > 1 and dist.is_available() and dist.is_initialized()

    @classmethod
    def here(cls, model: nn.Module) -> Ranks:
        """The ranks that this process is one of: those of torchrun, where its process group has begun.

        Raises:
            UsageError: the model is sharded over the ranks.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return cls(0, 1, torch.device("cpu"))
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "placements"):
                raise UsageError(
                    f"{name} is sharded over the ranks of this worker (FSDP), which is not there yet.",
                    "Train with DistributedDataParallel, whose ranks have the whole model each.",
                )
        device = next(model.parameters()).device if dist.get_backend() == "nccl" else torch.device("cpu")
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def agree(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives at rank 0, at every rank; as JSON has it where there are several.

        Raises:
            RunFailed: rank 0 ended with an error; there it is the error itself.
        """
        if not self.together:
            return ask() if self.talks else None
        if not self.talks:
            said = json.loads(self._text(""))
            if "error" in said:
                raise RunFailed(f"Rank 0 of this worker ended: {said['error']}")
            return said["value"]
        try:
            value = ask()
        except BaseException as error:
            said = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
            self._text(json.dumps({"error": said}))
            raise
        self._text(json.dumps({"value": value}))
        return value

    def spread_(self, tensors: Iterable[Tensor]) -> None:
        """The values of rank 0, in place, wherever the tensors are."""
        if not self.together:
            return
        with torch.no_grad():
            for tensor in tensors:
                there = tensor.detach().to(self._device).contiguous()
                dist.broadcast(there, src=0)
                tensor.copy_(there)

    def total(self, count: int) -> int:
        """The sum over the ranks."""
        if not self.together:
            return count
        there = torch.tensor([count], dtype=torch.int64, device=self._device)
        dist.all_reduce(there)
        return int(there.item())

    def _text(self, text: str) -> str:
        """The text of rank 0."""
        data = bytearray(text.encode())
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        dist.broadcast(length, src=0)
        there = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
        if self.talks:
            there.copy_(torch.frombuffer(data, dtype=torch.uint8))
        dist.broadcast(there, src=0)
        return bytes(there.cpu().tolist()).decode()
