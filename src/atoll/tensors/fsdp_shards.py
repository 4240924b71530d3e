"""One rank's view of a model that FSDP2 has sharded: the rank's rows of every parameter, without copies.

A rank's rows may end anywhere. But models are sent in units of tiles (`layout.TILE` elements of a tensor). So each rank
sends and pulls the tiles that begin in its rows. The last of these tiles may end in the rows of the next ranks. The
rank keeps copies of those elements in a `tail`, which is shorter than a tile:

    rows     | rank 0         | rank 1         | rank 2         |
    tiles    |     |     |     |     |     |     |     |     |  |
    sent by  | rank 0          | rank 1          | rank 2       |
                               ^ the tail of rank 0 is in rank 1's rows

Before a rank sends its elements, it gets the current values of its tails from the ranks that own them. After it has
pulled new values, it sends its tails back. No other elements of a shard are exchanged between ranks. Rows are computed
from the DTensor's placements and shape, not from its storage, which is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import UsageError
from atoll.format_text import number_of
from atoll.tensors.chunks import CHUNK_ELEMENTS, InPieces, assign_run_, run_of
from atoll.tensors.layout import rows_of, tiles_of
from atoll.tensors.module_tensors import is_sharded, named_tensors, schema_of
from atoll.tensors.schema import PARAMS, Schema, TensorSpec

Swap = Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
"""An all-to-all exchange: (bytes for each rank, number of bytes from each rank) → bytes from each rank, on the CPU."""

Spread = Callable[[Tensor, int], Tensor]
"""A broadcast: (values, source rank) → the source rank's values. All ranks call it together."""

ShardRun = tuple["Shard", int, int]
"""(shard, start, stop): elements [start, stop) of a shard's tensor."""


class Shard:
    """The elements of one sharded tensor that a rank has or sends.

    Attributes:
        local: the rank's rows; this is the model's own tensor.
        start, stop: range of the rank's rows, in elements of the whole tensor.
        first, end: range that the rank sends, in elements of the whole tensor; empty if `first == end`.
        tail: copies of the elements [stop, end), which other ranks have.
    """

    def __init__(self, spec: TensorSpec, local: Tensor, rank: int, ranks: int) -> None:
        self.local = local
        self.start, self.stop = rows_of(spec, rank, ranks)
        self.first, self.end = tiles_of(spec, rank, ranks)
        self.tail = local.new_empty(self.end - self.stop if self.first < self.end else 0)

    def run(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the whole tensor, from the rank's rows and its tail, as a 1-D tensor."""
        if stop <= self.stop:
            return run_of(self.local, start - self.start, stop - self.start)
        if start >= self.stop:
            return self.tail[start - self.stop : stop - self.stop]
        return torch.cat((self.run(start, self.stop), self.run(self.stop, stop)))

    def assign_(self, start: int, values: Tensor) -> None:
        """Write 1-D values into the elements of the whole tensor from `start` on, in the rank's rows and its tail."""
        in_local = max(0, min(self.stop - start, values.numel()))
        if in_local:
            assign_run_(self.local, start - self.start, values[:in_local])
        if in_local < values.numel():
            offset = start + in_local - self.stop
            self.tail[offset : offset + values.numel() - in_local].copy_(values[in_local:])


class Shards(Mapping[str, "Tensor | InPieces"]):
    """A mapping name → `Shard` for the sharded tensors of a rank's model, and name → tensor for the others.

    Args:
        schema: schema of the whole model.
        tensors: name → the model's own tensor; sharded ones are DTensors.
        rank: this process's rank.
        ranks: number of ranks.
    """

    def __init__(self, schema: Schema, tensors: Mapping[str, Tensor], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._specs = schema.tensors
        self._tensors: dict[str, Tensor | Shard] = {}
        for spec in self._specs:
            tensor = tensors[spec.name]
            if is_sharded(tensor):
                self._tensors[spec.name] = Shard(spec, _local_of(spec, tensor, rank, ranks), rank, ranks)
            else:
                self._tensors[spec.name] = tensor

    @classmethod
    def of(cls, model: nn.Module, rank: int, ranks: int) -> tuple[Schema, Shards]:
        """Return the schema of the whole model, and this rank's tensors.

        Raises:
            UsageError: a tensor is not sharded by rows over all ranks, or Atoll cannot send it.
        """
        tensors, _ = named_tensors(model, sharded=True)
        schema = schema_of(model, sharded=True)
        return schema, cls(schema, tensors, rank, ranks)

    def __getitem__(self, name: str) -> Tensor | Shard:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def locals(self) -> dict[str, Tensor]:
        """Name → this rank's rows of the tensor; the whole tensor if it is not sharded."""
        return {name: held.local if isinstance(held, Shard) else held for name, held in self._tensors.items()}

    def gather_(self, swap: Swap) -> None:
        """Fill this rank's tails with the current values, which are in the rows of other ranks.

        All ranks must call this method together.
        """
        _move(self._heads(), self._tails(), swap)

    def scatter_(self, swap: Swap, spread: Spread) -> None:
        """Send pulled values to the ranks that need them.

        Each tail is sent to the ranks that have its elements in their rows. Tensors that are not sharded are broadcast
        to all ranks. All ranks must call this method together.
        """
        _move(self._tails(), self._heads(), swap)
        for spec in self._specs:
            tensor = self._tensors[spec.name]
            if isinstance(tensor, Shard):
                continue
            for rank in range(self.ranks):
                first, end = tiles_of(spec, rank, self.ranks)
                for start in range(first, end, CHUNK_ELEMENTS):
                    run = run_of(tensor, start, min(start + CHUNK_ELEMENTS, end))
                    assign_run_(tensor, start, spread(run, rank))

    def _heads(self) -> list[list[ShardRun]]:
        """Return, for each other rank, the ranges of this rank's rows that the other rank encodes.

        For each tensor, there is at most one such range, which is shorter than a tile.
        """
        heads: list[list[ShardRun]] = [[] for _ in range(self.ranks)]
        for spec, shard in self._shards():
            stop = min(shard.first, shard.stop)
            if shard.start < stop:
                owner = self.rank - 1  # or an earlier rank, if no tile begins in the rows of the ranks between
                while tiles_of(spec, owner, self.ranks)[0] > shard.start:
                    owner -= 1
                heads[owner].append((shard, shard.start, stop))
        return heads

    def _tails(self) -> list[list[ShardRun]]:
        """Return, for each other rank, the ranges of the other rank's rows that this rank encodes."""
        tails: list[list[ShardRun]] = [[] for _ in range(self.ranks)]
        for spec, shard in self._shards():
            for rank in range(self.rank + 1, self.ranks if shard.tail.numel() else 0):
                start, stop = rows_of(spec, rank, self.ranks)
                if start >= shard.end:
                    break
                if start < stop:
                    tails[rank].append((shard, start, min(stop, shard.end)))
        return tails

    def _shards(self) -> Iterator[tuple[TensorSpec, Shard]]:
        for spec in self._specs:
            shard = self._tensors[spec.name]
            if isinstance(shard, Shard):
                yield spec, shard


def _move(sent: Sequence[Sequence[ShardRun]], into: Sequence[Sequence[ShardRun]], swap: Swap) -> None:
    """Exchange elements between all ranks in one all-to-all call.

    Args:
        sent: for each rank, the elements to send.
        into: for each rank, the elements that receive the data from that rank.
        swap: the all-to-all exchange.
    """
    outgoing = [
        torch.cat([_NOTHING, *(shard.run(*span).view(torch.uint8).cpu() for shard, *span in to)]) for to in sent
    ]
    sizes = [sum((stop - start) * shard.local.itemsize for shard, start, stop in runs) for runs in into]
    for runs, data in zip(into, swap(outgoing, sizes), strict=True):
        offset = 0
        for shard, start, stop in runs:
            nbytes = (stop - start) * shard.local.itemsize
            values = data[offset : offset + nbytes].clone()  # `view` needs aligned memory
            shard.assign_(start, values.view(shard.local.dtype))
            offset += nbytes


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _local_of(spec: TensorSpec, tensor: Any, rank: int, ranks: int) -> Tensor:
    """Return this rank's rows of a DTensor, in the model's memory.

    Raises:
        UsageError: the tensor is not sharded as `Shard(0)` over all ranks, is not a float parameter, or has another
            number of elements on this rank than Atoll expects.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    members = mesh.mesh.flatten().tolist()
    by_rows = [type(each).__name__ for each in placements] == ["Shard"] and placements[0].dim == 0
    if mesh.ndim != 1 or not by_rows or members != list(range(ranks)):
        raise UsageError(
            f"{spec.name} has the placements {tuple(map(str, placements))} over a mesh of {tuple(mesh.shape)} "
            f"ranks, but the worker has {number_of(ranks, 'rank')}.",
            "Shard it by rows over all ranks: fully_shard(module), with one mesh dimension and no "
            "shard_placement_fn. Replicated, hybrid and tensor-parallel placements are not supported.",
        )
    local: Tensor = tensor.to_local()
    start, stop = rows_of(spec, rank, ranks)
    if spec.group != PARAMS or local.numel() != stop - start:
        raise UsageError(
            f"The sharded tensor {spec.name} is in group {spec.group}, with {local.numel()} elements on rank {rank}; "
            f"Atoll expects group {PARAMS} (float parameters), with {stop - start} elements on this rank.",
            "Shard only float parameters, with torch.distributed.fsdp.fully_shard.",
        )
    return local.detach()
