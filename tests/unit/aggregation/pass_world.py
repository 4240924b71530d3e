"""A small run on real files, and the same run written down plainly: whole tensors, one torch optimizer kept alive."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atoll.aggregation.make_version import ClosedRound, NextFiles, RoundFiles, UpdateInput, make_version
from atoll.aggregation.outer_state import state_layout, version_regions
from atoll.aggregation.plan import AggregationPlan, FragmentPlan
from atoll.aggregation.user_aggregator import Accumulated
from atoll.codecs import Bf16Codec, NoneCodec
from atoll.outer_optimizers import build_outer
from atoll.protocol.values import FrozenRound, FrozenUpdate
from atoll.reducers import WeightedMean
from atoll.registry import OwnName
from atoll.store.file_slots import region_digest
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import update_layout, version_header, version_layout
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec

CODECS = {"none": NoneCodec(), "bf16": Bf16Codec()}
REDUCERS = {"params": WeightedMean(), "buffers": WeightedMean()}
PART_BYTES = 2**16

MIXED = Schema.build(
    [
        TensorSpec("embed", "F32", (70, 129)),  # 9,030 elements: crosses tiles, ends in the middle of one
        TensorSpec("large", "F32", (40_961,)),  # 164 kB: crosses parts
        TensorSpec("scale", "F32", ()),
        TensorSpec("nothing", "F32", (0, 3)),
        TensorSpec("exact", "F64", (5_000,)),
        TensorSpec("half", "F16", (5_003,)),
        TensorSpec("brain", "BF16", (3, 1_700)),
        TensorSpec("eight", "F8_E4M3", (33,)),
        *(TensorSpec(f"small.{index}", "F32", (index + 1,)) for index in range(40)),
        TensorSpec("mean", "F32", (4_100,), BUFFERS),
        TensorSpec("mean16", "BF16", (17,), BUFFERS),
        TensorSpec("batches", "I64", (), BUFFERS),
        TensorSpec("seen", "BOOL", (5,), BUFFERS),
        TensorSpec("wide", "U16", (3,), BUFFERS),
    ]
)


def values(spec: TensorSpec, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Numbers for one tensor, in its dtype."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(spec.name.encode()))
    if not spec.is_float:
        top = 2 if spec.dtype == "BOOL" else 1000
        return torch.randint(0, top, spec.shape, generator=generator).to(torch_dtype(spec.dtype))
    return (torch.randn(spec.shape, generator=generator, dtype=torch.float64) * scale).to(torch_dtype(spec.dtype))


OPENED: list[int] = []
"""Descriptors that the worlds of a test use; closed when it is over."""


@dataclass
class World:
    """Files of a run in `folder`; `round` closes one and moves on."""

    folder: Path
    schema: Schema = MIXED
    target: object = "sgd"
    options: dict = field(default_factory=lambda: {"lr": 0.7, "momentum": 0.9, "nesterov": True})
    codec: str = "none"
    weights: tuple[float, ...] = (1.0, 2.5, 0.3)

    def __post_init__(self):
        self.folder.mkdir(exist_ok=True)
        self.rule = build_outer(OwnName(self.target) if isinstance(self.target, str) else self.target, self.options)
        self.version_layout = version_layout(self.schema, PART_BYTES)
        self.state = state_layout(self.schema.tensors, self.rule, PART_BYTES)
        self.update_layout = update_layout(
            self.schema.tensors, lambda spec: CODECS[self.codec if spec.group == "params" else "none"], PART_BYTES
        )
        self.number = 0
        self.base = self.open("v0")
        os.pwrite(self.base, version_header(self.schema), 0)
        for segment in self.version_layout.segments:
            os.pwrite(self.base, raw(values(segment.spec, 0)), segment.offset)
        self.state_fd = None
        self.result: ClosedRound | None = None
        self.planned = self.plan_of_fragment()

    def open(self, name: str) -> int:
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT)
        OPENED.append(fd)
        return fd

    def submitted(self, site: int, number: int) -> dict[str, torch.Tensor]:
        """What a site submits in a round: pseudo-gradients, and raw buffers."""
        seed = 100 * (number + 1) + site
        return {spec.name: values(spec, seed, 0.1) for spec in self.schema.tensors}

    def plan_of_fragment(self, downlink=None) -> FragmentPlan:
        """The layouts; kept from round to round, with the tables that follow from them."""
        header = version_header(self.schema)
        return FragmentPlan(self.schema, header, self.version_layout, self.update_layout, self.state, downlink)

    def frozen(self, **population: float) -> FrozenRound:
        updates = [
            FrozenUpdate(
                ticket=site, site=f"site-{site}", digest="00" * 32, weight=float(weight), steps=1, norm=0.0, scale=1.0
            )
            for site, weight in enumerate(self.weights)
        ]
        number = self.number
        return FrozenRound(
            fragment=0, number=number + 1, base_version=number, version=number + 1, updates=updates, **population
        )

    def files(self) -> RoundFiles:
        """The files of the round that comes next, with new updates."""
        fds = []
        for site in range(len(self.weights)):
            fds.append(self.open(f"u{self.number}.{site}"))
            submitted = self.submitted(site, self.number)
            for segment in self.update_layout.segments:
                encoded = torch.zeros(segment.nbytes, dtype=torch.uint8)
                CODECS[segment.codec].encode_(submitted[segment.spec.name].reshape(-1), encoded, segment.spec.dtype)
                os.pwrite(fds[-1], raw(encoded), segment.offset)
            os.ftruncate(fds[-1], self.update_layout.nbytes)
        base = tuple(region_digest(self.base, region) for region in version_regions(self.version_layout))
        return RoundFiles(
            self.base,
            self.state_fd,
            {site: UpdateInput(fd) for site, fd in enumerate(fds)},
            base if self.result is None else self.result.part_digests,
            self.result and self.result.state_digests,
        )

    def out(self) -> NextFiles:
        number = self.number + 1
        return NextFiles(self.open(f"v{number}"), self.open(f"s{number}") if self.state is not None else None)

    def close(self, files=None, out=None, frozen=None, *, threads=1, reducers=None, **how) -> ClosedRound:
        """Run the pass; by default over new updates, into the files of the next version."""
        codecs = CODECS | {Accumulated.name: Accumulated()}
        plan = AggregationPlan(
            values=None,
            split=None,
            codecs=codecs,
            rule=self.rule,
            reducers=reducers or REDUCERS,
            fragments=(self.planned,),
            threads=threads,
        )
        return make_version(plan, frozen or self.frozen(), files or self.files(), out or self.out(), **how)

    def round(self, **how) -> ClosedRound:
        """Close a round; the next one starts from its result."""
        out = self.out()
        self.result = self.close(out=out, **how)
        self.number += 1
        self.base, self.state_fd = out.version, out.state
        return self.result

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}{self.number}"


class Reference:
    """The same run on whole tensors: architecture §7's expression, and optimizers over fp32 or fp64 masters."""

    def __init__(self, world: World):
        self.world = world
        self.version = {spec.name: values(spec, 0) for spec in world.schema.tensors}
        self.params = [spec for spec in world.schema.tensors if spec.group == "params"]
        self.masters = {
            spec.name: torch.nn.Parameter(self.version[spec.name].to(accumulate_dtype(spec.dtype)))
            for spec in self.params
        }
        dtypes = {master.dtype for master in self.masters.values()}
        # One per dtype: Adafactor of torch 2.13 takes the default eps of the first parameter's dtype for all.
        self.optimizers = {
            dtype: world.rule.make([m for m in self.masters.values() if m.dtype == dtype and m.numel()])
            for dtype in dtypes
        }

    def state(self, spec: TensorSpec) -> dict:
        """What torch keeps for a tensor."""
        master = self.masters[spec.name]
        return self.optimizers[master.dtype].state[master]

    def round(self, number: int) -> None:
        total = sum(self.world.weights)
        weights = [weight / total for weight in self.world.weights]
        updates = [self.world.submitted(site, number) for site in range(len(weights))]
        for spec in self.world.schema.tensors:
            rows = [update[spec.name] for update in updates]
            if not spec.is_float:
                self.version[spec.name] = torch.stack([row.to(torch.int64) for row in rows]).amax(0)
                continue
            if spec.group == "params" and self.world.codec == "bf16":
                rows = [row.to(torch.bfloat16) for row in rows]
            rows = [row.to(accumulate_dtype(spec.dtype)) for row in rows]
            acc = rows[0] * weights[0]
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                acc.add_(row, alpha=weight)
            if spec.group == "params":
                self.masters[spec.name].grad = acc
            else:
                self.version[spec.name] = acc.to(torch_dtype(spec.dtype))
        for optimizer in self.optimizers.values():
            optimizer.step()
        for spec in self.params:
            self.version[spec.name] = self.masters[spec.name].detach().to(torch_dtype(spec.dtype))


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
