"""A model that FSDP2 has sharded over ranks, as one of them has it: its rows of every parameter, where they are.

Rows end anywhere, what travels ends at tiles. A rank sends and pulls the tiles with a first element in its rows; of
the last of them, its neighbours may have some elements, which a rank keeps in a `tail` of less than a tile:

    rows     | rank 0         | rank 1         | rank 2         |
    tiles    |     |     |     |     |     |     |     |     |  |
    sent by  | rank 0          | rank 1          | rank 2       |
                               ^ the tail of rank 0 is in rank 1's rows

Before an update is formed, tails are gathered from the ranks that have the elements; after a version was pulled, they
are given back. Nothing else of a tensor ever leaves its rank. Rows follow from placements and shapes, never from
storage, which is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import UsageError
from atoll.tensors.chunks import CHUNK_ELEMENTS, InPieces, assign_run_, run_of
from atoll.tensors.layout import rows_of, tiles_of
from atoll.tensors.module_tensors import is_sharded, named_tensors, schema_of
from atoll.tensors.schema import PARAMS, Schema, TensorSpec

Swap = Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
"""(bytes for each rank, how many come from each) → what came from each, on the CPU; by all ranks at once."""

Spread = Callable[[Tensor, int], Tensor]
"""(values, rank) → those of this rank, at every rank; by all ranks at once."""

Run = tuple["Shard", int, int]
"""Elements [start, stop) of a shard."""


class Shard:
    """The elements of one tensor that a rank has or sends.

    Attributes:
        local: its rows, the model's own.
        start, stop: the elements that they are.
        first, end: the elements that it sends; nothing where `first == end`.
        tail: those of them from `stop` on.
    """

    def __init__(self, spec: TensorSpec, local: Tensor, rank: int, ranks: int) -> None:
        self.local = local
        self.start, self.stop = rows_of(spec, rank, ranks)
        self.first, self.end = tiles_of(spec, rank, ranks)
        self.tail = local.new_empty(self.end - self.stop if self.first < self.end else 0)

    def run(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in a row, of the rows and the tail."""
        if stop <= self.stop:
            return run_of(self.local, start - self.start, stop - self.start)
        if start >= self.stop:
            return self.tail[start - self.stop : stop - self.stop]
        return torch.cat((self.run(start, self.stop), self.run(self.stop, stop)))

    def assign_(self, start: int, values: Tensor) -> None:
        """Write 1-D values into the elements from `start` on."""
        mine = max(0, min(self.stop - start, values.numel()))
        if mine:
            assign_run_(self.local, start - self.start, values[:mine])
        if mine < values.numel():
            at = start + mine - self.stop
            self.tail[at : at + values.numel() - mine].copy_(values[mine:])


class Shards(Mapping[str, "Tensor | InPieces"]):
    """The tensors of a model of one rank: those that are sharded as `Shard`, the others as they are.

    Args:
        schema: of the whole model.
        tensors: the model's own, by name; DTensors where they are sharded.
        rank: of this process, among `ranks`.
    """

    def __init__(self, schema: Schema, tensors: Mapping[str, Tensor], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._specs = schema.tensors
        self._held: dict[str, Tensor | Shard] = {}
        for spec in self._specs:
            tensor = tensors[spec.name]
            if is_sharded(tensor):
                self._held[spec.name] = Shard(spec, _local_of(spec, tensor, rank, ranks), rank, ranks)
            else:
                self._held[spec.name] = tensor

    @classmethod
    def of(cls, model: nn.Module, rank: int, ranks: int) -> tuple[Schema, Shards]:
        """Return the schema of the whole model, and what this rank has of it.

        Raises:
            UsageError: a tensor is sharded in another way than by rows over all ranks, or cannot travel.
        """
        tensors, _ = named_tensors(model, sharded=True)
        schema = schema_of(model, sharded=True)
        return schema, cls(schema, tensors, rank, ranks)

    def __getitem__(self, name: str) -> Tensor | Shard:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def locals(self) -> dict[str, Tensor]:
        """Name → what is here of each tensor; of a single rank, all of it."""
        return {name: held.local if isinstance(held, Shard) else held for name, held in self._held.items()}

    def gather_(self, swap: Swap) -> None:
        """Fill the tails with what their rows have now."""
        _move(self._heads(), self._tails(), swap)

    def scatter_(self, swap: Swap, spread: Spread) -> None:
        """Give what tails have to the ranks of these rows, and to all what every rank has whole."""
        _move(self._tails(), self._heads(), swap)
        for spec in self._specs:
            tensor = self._held[spec.name]
            if isinstance(tensor, Shard):
                continue
            for rank in range(self.ranks):
                first, end = tiles_of(spec, rank, self.ranks)
                for start in range(first, end, CHUNK_ELEMENTS):
                    run = run_of(tensor, start, min(start + CHUNK_ELEMENTS, end))
                    assign_run_(tensor, start, spread(run, rank))

    def _heads(self) -> list[list[Run]]:
        """For each rank, what it sends of our rows: at most one run of each tensor, less than a tile."""
        heads: list[list[Run]] = [[] for _ in range(self.ranks)]
        for spec, shard in self._shards():
            stop = min(shard.first, shard.stop)
            if shard.start < stop:
                owner = self.rank - 1  # or before, where those between begin no tile
                while tiles_of(spec, owner, self.ranks)[0] > shard.start:
                    owner -= 1
                heads[owner].append((shard, shard.start, stop))
        return heads

    def _tails(self) -> list[list[Run]]:
        """For each rank, what our tails have of its rows."""
        tails: list[list[Run]] = [[] for _ in range(self.ranks)]
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
            shard = self._held[spec.name]
            if isinstance(shard, Shard):
                yield spec, shard


def _move(sent: Sequence[Sequence[Run]], into: Sequence[Sequence[Run]], swap: Swap) -> None:
    """Bring runs to other ranks, and what they send into ours; all in one exchange."""
    outgoing = [
        torch.cat([_NOTHING, *(shard.run(*span).view(torch.uint8).cpu() for shard, *span in to)]) for to in sent
    ]
    sizes = [sum((stop - start) * shard.local.itemsize for shard, start, stop in runs) for runs in into]
    for runs, data in zip(into, swap(outgoing, sizes), strict=True):
        at = 0
        for shard, start, stop in runs:
            nbytes = (stop - start) * shard.local.itemsize
            values = data[at : at + nbytes].clone()  # a view has to be aligned
            shard.assign_(start, values.view(shard.local.dtype))
            at += nbytes


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _local_of(spec: TensorSpec, tensor: Any, rank: int, ranks: int) -> Tensor:
    """Return the rows of this rank, which share the memory of the model.

    Raises:
        UsageError: they are not what `Shard(0)` over all ranks gives.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    members = mesh.mesh.flatten().tolist()
    by_rows = [type(each).__name__ for each in placements] == ["Shard"] and placements[0].dim == 0
    if mesh.ndim != 1 or not by_rows or members != list(range(ranks)):
        raise UsageError(
            f"{spec.name} is laid out as {tuple(map(str, placements))} over a mesh of {tuple(mesh.shape)} ranks, and "
            f"{ranks} ranks are one worker.",
            "Shard it by rows over all of them: fully_shard(module), with one mesh dimension and no "
            "shard_placement_fn; replicated, hybrid and tensor-parallel layouts do not travel yet.",
        )
    local: Tensor = tensor.to_local()
    start, stop = rows_of(spec, rank, ranks)
    if spec.group != PARAMS or local.numel() != stop - start:
        raise UsageError(
            f"Rank {rank} has {local.numel()} elements of {spec.name} in {spec.group}, and not the parameter's "
            f"{stop - start}.",
            "Shard float parameters with torch.distributed.fsdp.fully_shard, and nothing else.",
        )
    return local.detach()
