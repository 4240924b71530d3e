"""The processes (ranks) of one worker: rank 0 talks to the server, and every rank gets the same answer or error.

All ranks run the same code. They exchange only text and tensors; nothing is pickled.
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

RankMessage = dict[str, Any]
"""The result of a call at one rank, as JSON: either `value`, or `error` with the error's message and remedy."""


class RankGroup:
    """The processes of one worker, which use `torch.distributed` to train one model together; often only one process.

    Args:
        rank: rank of this process.
        size: number of ranks.
        device: the device on which tensors must be for collective operations, such as a GPU for NCCL.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.is_first, self._device = rank == 0, device
        self.is_distributed = size > 1 and dist.is_available() and dist.is_initialized()

    @classmethod
    def of_process(cls, model: nn.Module) -> RankGroup:
        """Return the worker's group: all ranks of `torch.distributed` if it is initialised, else this process alone.

        Args:
            model: the model that the worker trains.

        Raises:
            UsageError: the model is sharded by FSDP1, which hides the shapes of its parameters.
        """
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise UsageError(
                "The model is sharded by FullyShardedDataParallel (FSDP1), which Atoll does not support.",
                "Shard it with torch.distributed.fsdp.fully_shard(model), or train with DistributedDataParallel.",
            )
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return cls(0, 1, torch.device("cpu"))
        device = torch.device("cpu")
        if dist.get_backend() == "nccl":
            device = next(model.parameters()).device
            if device.type == "cpu":  # the parameters are offloaded to the CPU, and NCCL moves only GPU tensors
                device = torch.device("cuda", torch.cuda.current_device())
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def from_rank0(self, ask: Callable[[], T], kind: Any = Any) -> T:
        """Call `ask` at rank 0 only, and return its result at every rank.

        Args:
            ask: the function to call.
            kind: the type of the result if it is not plain JSON: a dataclass, a message, or a union of them.

        Raises:
            AtollError: `ask` raised an error at rank 0. Every rank raises the same error.
        """
        if not self.is_distributed:
            return ask() if self.is_first else cast(T, None)
        values = TypeAdapter(kind)
        if not self.is_first:
            while "wait" in (heard := json.loads(self._text(""))):
                pass
            value = _result(0, heard)
            if isinstance(value, Exception):
                raise value
            return values.validate_python(value, strict=False)  # type: ignore[no-any-return]
        before, _ASKING.group = getattr(_ASKING, "group", None), self
        try:
            value = ask()
        except BaseException as error:
            _ASKING.group = before
            with suppress(RunFailed):  # the other ranks may have ended, which may be why `ask` failed
                self._text(json.dumps(_message_of(error)))
            raise
        _ASKING.group = before
        self._text(json.dumps({"value": values.dump_python(value, mode="json")}))
        return value

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Call `work` at every rank. Return the list of all results, in order of rank, at every rank.

        Args:
            work: the function; its result must consist of JSON values.

        Raises:
            AtollError: `work` failed at one of the ranks. Every rank raises the error. If several ranks failed, every
                rank raises `UpdateRefused` if it is among the errors, and `LeaseLost` only if there is no other error.
        """
        if not self.is_distributed:
            return [work()]
        own: BaseException | None = None
        try:
            message: RankMessage = {"value": work()}
        except BaseException as error:
            message, own = _message_of(error), error
        results = [_result(rank, json.loads(text)) for rank, text in enumerate(self._texts(json.dumps(message)))]
        if own is not None:
            if not isinstance(own, Exception):
                raise own
            results[self.rank] = own
        errors = [each for each in results if isinstance(each, Exception)]
        if errors:
            raise min(errors, key=lambda error: (not isinstance(error, UpdateRefused), isinstance(error, LeaseLost)))
        return results

    def spread_(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of rank 0 into the tensors of every rank, in place."""
        if not self.is_distributed:
            return
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self.from_rank(tensor.detach(), 0))

    def from_rank(self, values: Tensor, rank: int) -> Tensor:
        """Send the values of one rank to all ranks. Return them at every rank, on the group's device.

        Args:
            values: at the sending rank, the values to send; at other ranks, any tensor of the same shape and dtype.
            rank: the rank that sends its values.
        """
        on_device = values.to(self._device).contiguous()
        if self.is_distributed:
            with _with_others():
                dist.broadcast(on_device, src=rank)
        return on_device

    def total(self, count: int) -> int:
        """Return the sum of `count` over all ranks, at every rank."""
        return sum(self.gather(lambda: count))

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send bytes from each rank to each other rank (all-to-all). Return the bytes that came from each rank.

        Args:
            outgoing: for each rank, a uint8 tensor with the bytes to send to it.
            sizes: for each rank, the number of bytes that it sends to this rank.

        Returns:
            For each rank, a uint8 tensor on the CPU.
        """
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        data = torch.cat(list(outgoing)).to(self._device)
        if self.is_distributed:
            with _with_others():
                dist.all_to_all_single(incoming, data, list(sizes), [each.numel() for each in outgoing])
        return list(torch.split(incoming.cpu(), list(sizes)))

    def _text(self, text: str) -> str:
        """Return the `text` of rank 0, at every rank."""
        data = bytearray(text.encode())
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        with _with_others():
            dist.broadcast(length, src=0)
            buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
            if self.is_first:
                buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))
            dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes().decode()

    def _texts(self, text: str) -> list[str]:
        """Gather `text` from all ranks: return the list, in the order of the ranks, at every rank."""
        data = bytearray(text.encode())
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        with _with_others():
            dist.all_gather(lengths, length)
            buffer = torch.zeros(max(int(each) for each in lengths), dtype=torch.uint8, device=self._device)
            buffer[: len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
            texts = [torch.zeros_like(buffer) for _ in range(self.size)]
            dist.all_gather(texts, buffer)
        return [each[: int(size)].cpu().numpy().tobytes().decode() for each, size in zip(texts, lengths, strict=True)]


ALONE = RankGroup(0, 1, torch.device("cpu"))
"""The group of a worker that is one process."""

_ASKING = threading.local()
"""`group`: the group for which this thread runs `ask` in `from_rank0`, while the other ranks wait; else None."""


def keep_ranks_waiting() -> None:
    """Prevent a timeout of `torch.distributed` at the other ranks, which wait in `from_rank0`.

    Call this from time to time during a long `ask`, in the thread that runs `ask` at rank 0. In other threads and at
    other ranks, it does nothing.
    """
    if (group := getattr(_ASKING, "group", None)) is not None:
        group._text(json.dumps({"wait": True}))


@contextmanager
def _with_others() -> Iterator[None]:
    """Turn a `RuntimeError` of `torch.distributed` in the `with` block into `RunFailed`: another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        raise RunFailed(
            f"Another rank of this worker ended or does not answer: {first}", "See the last output of the other ranks."
        ) from error


def _message_of(error: BaseException) -> RankMessage:
    if not isinstance(error, AtollError):
        return {"error": "", "message": f"{type(error).__name__}: {error}", "remedy": ""}
    message = {"error": error.code, "message": error.message, "remedy": error.remedy}
    return message | {"retry_after_s": error.retry_after_s}


def _result(rank: int, message: RankMessage) -> Any:
    """Return the value in a rank's message. If the message reports an error, return (do not raise) that error.

    Args:
        rank: the number of the rank, for the text of the error.
        message: the message.
    """
    if "error" not in message:
        return message["value"]
    kind = BY_CODE.get(message["error"])
    if kind is None:
        return RunFailed(f"Rank {rank} of this worker ended: {message['message']}", message["remedy"])
    error = kind(f"Rank {rank}: {message['message']}", message["remedy"])
    if message["retry_after_s"] is not None:
        error.retry_after_s = message["retry_after_s"]
    return error
