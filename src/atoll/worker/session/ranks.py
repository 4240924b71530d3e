"""The ranks of one worker: rank 0 decides and talks to the server, and the others learn from it what it learned.

Everything that is exchanged is text or tensors; nothing is pickled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.errors import BY_CODE, AtollError, RunFailed, UsageError

Said = dict[str, Any]
"""What came of something at a rank: `value`, or `error` and what belongs to it; as JSON."""


class Ranks:
    """The processes that train one model together by `torch.distributed`; often a single one.

    Args:
        rank: of this process, among `count`.
        device: where a collective may take place.
    """

    def __init__(self, rank: int, count: int, device: torch.device) -> None:
        self.rank, self.count = rank, count
        self.talks, self._device = rank == 0, device
        self.together = count > 1 and dist.is_available() and dist.is_initialized()
        self._asking: int | None = None  # the thread that asks, while the others listen for what rank 0 says next

    @classmethod
    def here(cls, model: nn.Module) -> Ranks:
        """The ranks that this process is one of: those of torchrun, where its process group has begun.

        Raises:
            UsageError: the model is sharded in a way that cannot be told from its parameters.
        """
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise UsageError(
                "The model is sharded by FullyShardedDataParallel (FSDP1), whose parameters are flat.",
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

    def agree(self, ask: Callable[[], Any], obey: Callable[[str, Said], Any] | None = None) -> Any:
        """What `ask` gives at rank 0, at every rank; as JSON has it where there are several.

        Args:
            obey: what the others do meanwhile when rank 0 gives an `order`: by its name and its arguments.

        Raises:
            RunFailed: rank 0 ended with an error; there it is the error itself.
        """
        if not self.together:
            return ask() if self.talks else None
        if not self.talks:
            return self._obey(obey)
        self._asking = threading.get_ident()
        try:
            value = ask()
        except BaseException as error:
            self._asking = None
            said = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
            with suppress(RunFailed):  # it may have been what ended this one
                self._text(json.dumps({"error": said}))
            raise
        self._asking = None
        self._text(json.dumps({"value": value}))
        return value

    def wait(self) -> None:
        """Within `agree` at rank 0, now and then where it waits for somebody else: the others do not give it up.

        From another thread it does nothing.
        """
        if self._asking == threading.get_ident():
            self._text(json.dumps({"wait": True}))

    def order(self, name: str, given: Said, work: Callable[[], Any]) -> list[Any]:
        """Within `agree` at rank 0: have every rank do something, rank 0 itself by `work`.

        Returns:
            What came of it at each: a value, or the error.
        """
        self._asking = None
        self._text(json.dumps({"order": name, "given": given}))
        own: BaseException | None = None
        try:
            said: Said = {"value": work()}
        except BaseException as error:
            said, own = _said(error), error
        results = [_heard(rank, json.loads(text)) for rank, text in enumerate(self._texts(json.dumps(said)))]
        self._asking = threading.get_ident()
        if own is not None:
            if not isinstance(own, Exception):
                raise own
            results[0] = own
        return results

    def _obey(self, obey: Callable[[str, Said], Any] | None) -> Any:
        own: BaseException | None = None
        while "order" in (heard := json.loads(self._text(""))) or "wait" in heard:
            if "wait" in heard:
                continue
            assert obey is not None
            try:
                said: Said = {"value": obey(heard["order"], heard["given"])}
                own = None
            except BaseException as error:
                said, own = _said(error), error
            self._texts(json.dumps(said))
        if "error" in heard:
            if own is not None and not isinstance(own, Exception):
                raise own
            raise RunFailed(f"Rank 0 of this worker ended: {heard['error']}") from own
        return heard["value"]

    def spread_(self, tensors: Iterable[Tensor]) -> None:
        """The values of rank 0, in place, wherever the tensors are."""
        if not self.together:
            return
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self.from_rank(tensor.detach(), 0))

    def from_rank(self, values: Tensor, rank: int) -> Tensor:
        """What a rank has of these values, at every rank."""
        there = values.to(self._device).contiguous()
        if self.together:
            with _with_others():
                dist.broadcast(there, src=rank)
        return there

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Give each rank bytes of its own, and get so many from each; all on the CPU."""
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        data = torch.cat(list(outgoing)).to(self._device)
        if self.together:
            with _with_others():
                dist.all_to_all_single(incoming, data, list(sizes), [each.numel() for each in outgoing])
        return list(torch.split(incoming.cpu(), list(sizes)))

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
        with _with_others():
            dist.broadcast(length, src=0)
            there = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
            if self.talks:
                there.copy_(torch.frombuffer(data, dtype=torch.uint8))
            dist.broadcast(there, src=0)
        return there.cpu().numpy().tobytes().decode()

    def _texts(self, text: str) -> list[str]:
        """The texts of all ranks."""
        data = bytearray(text.encode())
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.count)]
        with _with_others():
            dist.all_gather(lengths, length)
            there = torch.zeros(max(int(each) for each in lengths), dtype=torch.uint8, device=self._device)
            there[: len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
            texts = [torch.zeros_like(there) for _ in range(self.count)]
            dist.all_gather(texts, there)
        return [each[: int(size)].cpu().numpy().tobytes().decode() for each, size in zip(texts, lengths, strict=True)]


@contextmanager
def _with_others() -> Iterator[None]:
    """A collective; one that fails is told of in Atoll's words."""
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
    """The value, or the error as the same class."""
    if "error" not in said:
        return said["value"]
    kind = BY_CODE.get(said["error"])
    if kind is None:
        return RunFailed(f"Rank {rank} of this worker ended: {said['message']}", said["remedy"])
    error = kind(f"Rank {rank}: {said['message']}", said["remedy"])
    if said["retry_after_s"] is not None:
        error.retry_after_s = said["retry_after_s"]
    return error
