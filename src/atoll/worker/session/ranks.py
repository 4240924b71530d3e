"""The ranks of one worker: rank 0 asks the server, and every rank gets the same answer or the same error.

All ranks run the same code. Everything that is exchanged is text or tensors; nothing is pickled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn

from atoll.errors import BY_CODE, AtollError, LeaseLost, RunFailed, UpdateRefused, UsageError

T = TypeVar("T")

Said = dict[str, Any]
"""What came of something at a rank: `value`, or `error` and what belongs to it; as JSON."""


class RankGroup:
    """The processes that train one model together by `torch.distributed`; often a single one.

    Args:
        rank: of this process, among `size`.
        device: where a collective may take place.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.is_first, self._device = rank == 0, device
        self.together = size > 1 and dist.is_available() and dist.is_initialized()
        self._asking: int | None = None  # the thread that asks, while the others wait for what rank 0 says next

    @classmethod
    def here(cls, model: nn.Module) -> RankGroup:
        """Return the ranks that this process is one of: those of torchrun, where its process group has begun.

        Raises:
            UsageError: the model is sharded in a way that cannot be told from its parameters.
        """
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise UsageError(
                "The model is sharded by FullyShardedDataParallel (FSDP1), and its parameters are flat.",
                "Shard it with torch.distributed.fsdp.fully_shard(model), or train with DistributedDataParallel.",
            )
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return cls(0, 1, torch.device("cpu"))
        device = torch.device("cpu")
        if dist.get_backend() == "nccl":
            device = next(model.parameters()).device
            if device.type == "cpu":  # parameters are offloaded, and NCCL moves nothing there
                device = torch.device("cuda", torch.cuda.current_device())
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def from_rank0(self, ask: Callable[[], T], kind: Any = Any) -> T:
        """Return at every rank what `ask` returns at rank 0.

        Args:
            kind: the type of the value, where it is not plain JSON: a dataclass, a message, or a union of them.

        Raises:
            AtollError: what `ask` raised at rank 0, at every rank.
        """
        if not self.together:
            return ask() if self.is_first else cast(T, None)
        values = TypeAdapter(kind)
        if not self.is_first:
            while "wait" in (heard := json.loads(self._text(""))):
                pass
            value = _heard(0, heard)
            if isinstance(value, Exception):
                raise value
            return values.validate_python(value, strict=False)  # type: ignore[no-any-return]
        before, self._asking = self._asking, threading.get_ident()
        try:
            value = ask()
        except BaseException as error:
            self._asking = before
            with suppress(RunFailed):  # it may have been what ended this one
                self._text(json.dumps(_said(error)))
            raise
        self._asking = before
        self._text(json.dumps({"value": values.dump_python(value, mode="json")}))
        return value

    def tick(self) -> None:
        """Within `from_rank0`, while rank 0 waits for other workers: keep the collective of the other ranks alive.

        From another thread, and at other ranks, it does nothing.
        """
        if self._asking == threading.get_ident():
            self._text(json.dumps({"wait": True}))

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Work at every rank at once; return what came of it at each, in order, as JSON has it.

        Raises:
            AtollError: what went wrong at one of the ranks, at every rank; a refusal before what else did.
        """
        if not self.together:
            return [work()]
        own: BaseException | None = None
        try:
            said: Said = {"value": work()}
        except BaseException as error:
            said, own = _said(error), error
        results = [_heard(rank, json.loads(text)) for rank, text in enumerate(self._texts(json.dumps(said)))]
        if own is not None:
            if not isinstance(own, Exception):
                raise own
            results[self.rank] = own
        errors = [each for each in results if isinstance(each, Exception)]
        if errors:
            raise min(errors, key=lambda error: (not isinstance(error, UpdateRefused), isinstance(error, LeaseLost)))
        return results

    def spread_(self, tensors: Iterable[Tensor]) -> None:
        """Give the tensors of every rank the values of rank 0, in place."""
        if not self.together:
            return
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self.from_rank(tensor.detach(), 0))

    def from_rank(self, values: Tensor, rank: int) -> Tensor:
        """Return at every rank what one rank has of these values."""
        there = values.to(self._device).contiguous()
        if self.together:
            with _with_others():
                dist.broadcast(there, src=rank)
        return there

    def total(self, count: int) -> int:
        """Return the sum over the ranks."""
        return sum(self.gather(lambda: count))

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send each rank bytes of its own, and return those from each, so many; all on the CPU."""
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        data = torch.cat(list(outgoing)).to(self._device)
        if self.together:
            with _with_others():
                dist.all_to_all_single(incoming, data, list(sizes), [each.numel() for each in outgoing])
        return list(torch.split(incoming.cpu(), list(sizes)))

    def _text(self, text: str) -> str:
        """Return the text of rank 0."""
        data = bytearray(text.encode())
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        with _with_others():
            dist.broadcast(length, src=0)
            there = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
            if self.is_first:
                there.copy_(torch.frombuffer(data, dtype=torch.uint8))
            dist.broadcast(there, src=0)
        return there.cpu().numpy().tobytes().decode()

    def _texts(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        data = bytearray(text.encode())
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        with _with_others():
            dist.all_gather(lengths, length)
            there = torch.zeros(max(int(each) for each in lengths), dtype=torch.uint8, device=self._device)
            there[: len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
            texts = [torch.zeros_like(there) for _ in range(self.size)]
            dist.all_gather(texts, there)
        return [each[: int(size)].cpu().numpy().tobytes().decode() for each, size in zip(texts, lengths, strict=True)]


ALONE = RankGroup(0, 1, torch.device("cpu"))
"""The group of a worker that is one process."""


@contextmanager
def _with_others() -> Iterator[None]:
    """Run a collective; say in Atoll's words what its failure means."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        raise RunFailed(
            f"Another rank of this worker has ended, or does not answer: {first}", "Look at what it said last."
        ) from error


def _said(error: BaseException) -> Said:
    if not isinstance(error, AtollError):
        return {"error": "", "message": f"{type(error).__name__}: {error}", "remedy": ""}
    said = {"error": error.code, "message": error.message, "remedy": error.remedy}
    return said | {"retry_after_s": error.retry_after_s}


def _heard(rank: int, said: Said) -> Any:
    """Return the value, or the error as the same class."""
    if "error" not in said:
        return said["value"]
    kind = BY_CODE.get(said["error"])
    if kind is None:
        return RunFailed(f"Rank {rank} of this worker ended: {said['message']}", said["remedy"])
    error = kind(f"Rank {rank}: {said['message']}", said["remedy"])
    if said["retry_after_s"] is not None:
        error.retry_after_s = said["retry_after_s"]
    return error
