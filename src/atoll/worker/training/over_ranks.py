"""DiLoCo in one of several ranks: what this process has of the model, and how it comes to be where rank 0 is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from atoll.errors import UsageError
from atoll.filters.base import Filter
from atoll.tensors.fsdp_shards import Shards
from atoll.tensors.module_tensors import is_sharded, named_parameters, named_tensors, schema_of
from atoll.tensors.schema import Schema
from atoll.worker.exchange.participation import Participation, take_part
from atoll.worker.session.ranks import ALONE, RankGroup
from atoll.worker.training.optimizer_claims import claim, release
from atoll.worker.training.replaced_tensors import replaced
from atoll.worker.training.whole_model import WholeModel

T = TypeVar("T")


class OverRanks(WholeModel):
    """Part of `DiLoCo`."""

    model: nn.Module
    sync_every: int
    _ranks: RankGroup
    _optimizers: tuple[Optimizer, ...]
    _server: str | None
    _folder: Path | None
    _labels: dict[str, str] | None
    _filters: Sequence[Filter]
    _given_sync_every: int | None
    _given_fragments: int | None

    def __init__(self) -> None:
        super().__init__()
        self._told: Any = None  # what this rank has in common with the others; None before the start
        self._schema = Schema(())
        self._shards: Shards | None = None

    def _find_tensors(self) -> None:
        """What there is of the model in this process; no other loop may have it.

        Raises:
            UsageError: another one has.
        """
        claim(self, self._optimizers, named_parameters(self.model))
        self._shards = None
        if not any(map(is_sharded, self.model.parameters())):
            self._schema, self._tensors = schema_of(self.model), named_tensors(self.model)[0]
            return
        if self._filters:
            raise UsageError(
                "filters see whole tensors, and this model is sharded over ranks (FSDP2).",
                "Leave filters out, or train with DistributedDataParallel.",
            )
        self._schema, shards = Shards.of(self.model, self._ranks.rank, self._ranks.size)
        self._tensors = shards.locals
        self._shards = shards if self._ranks.together else None

    def _let_go(self) -> None:
        release(self)

    def _find_replaced_tensors(self) -> None:
        """Go on with the tensors that the model has now: scripts replace buffers, and move parameters.

        Raises:
            UsageError: the model, or what the optimizers train, is another one than that of the run.
        """
        acts = self._told["acts"]
        if acts is not None and self.step % acts["every"] and (self.step - acts["tau"]) % acts["every"]:
            return  # no fragment is due; to look costs as much as a state_dict()
        if not any(map(is_sharded, self.model.parameters())):
            self._tensors = replaced(self.model, self._tensors, self._optimizers)

    def _open(self, site: str) -> Participation:
        assert self._server
        place = take_part(
            self._server,
            site,
            folder=self._folder,
            schema=self._schema,
            sync_every=self._given_sync_every,
            num_fragments=self._given_fragments,
            labels=self._labels,
            filters=self._filters,
            streams=True,
            ranks=ALONE if self._shards is None else self._ranks,
            shards=None if self._shards is None else self._own_shards,
        )
        place.session.on_wait = self._ranks.tick
        return place

    def _own_shards(self) -> Shards:
        assert self._shards is not None
        return self._shards

    def _over_ranks(self, work: Callable[[], T]) -> T:
        """Do what needs the network: at every rank where the model is sharded, else at rank 0 for all of them."""
        return work() if self._shards is not None else self._ranks.from_rank0(work)

    def _learn(self) -> None:
        """Be where rank 0 is: its model, and when something is to be done next."""
        if self._ranks.together:
            self.sync_every, self.over = self._told["sync_every"], self._told["finished"]
            self._local_steps = self._told["local_steps"]
            self._spread()

    def _spread(self) -> None:
        """The whole model of rank 0, where every rank has one."""
        if self._shards is None:
            self._ranks.spread_(self._tensors.values())

    def _spread_the_end(self, error: BaseException | None) -> None:
        """What was merged while the loop ended is every rank's."""
        if error is None and self._told is not None and self._told["acts"] is not None:
            self._spread()
