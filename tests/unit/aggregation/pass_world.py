"""A small run on real files, and the same run by the specification."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import specification as spec
import torch

from atoll.aggregation.make_version import ClosedRound, NextFiles, RoundFiles, UpdateInput, make_version
from atoll.aggregation.outer_state import state_layout, version_regions
from atoll.aggregation.plan import AggregationPlan, FragmentPlan
from atoll.aggregation.user_aggregator import Accumulated
from atoll.codecs import Bf16Codec, Int4Codec, Int8Codec, NoneCodec, TopKCodec, encoded_layout
from atoll.codecs.plain import WideCodec
from atoll.codecs.version_difference import Downlink
from atoll.outer_optimizers import build_outer
from atoll.protocol.values import FrozenRound, FrozenUpdate
from atoll.reducers import WeightedMean
from atoll.registry import OwnName
from atoll.store.file_slots import region_digest
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import version_header, version_layout
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec, extra_name

CODECS = {each.name: each for each in (NoneCodec(), WideCodec(), Bf16Codec(), Int8Codec(), Int4Codec(), TopKCodec())}
UP = {"none": spec.none, "bf16": spec.bf16, "int8": spec.quantized(127), "int4": spec.quantized(7), "topk": spec.topk()}
"""Codec of updates → the same by the specification."""
DOWN = {name: (C, {}) for name, C in UP.items() if name != "none"} | {"topk of all": (spec.topk(1.0), {"density": 1.0})}
"""Codec of versions → the same by the specification, and its options."""
MEAN = spec.Reducer()
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


def close_opened() -> None:
    while OPENED:
        os.close(OPENED.pop())


@dataclass
class World:
    """Files of a run in `folder`; `round` closes one and moves on."""

    folder: Path
    schema: Schema = MIXED
    target: object = "sgd"
    options: dict = field(default_factory=lambda: {"lr": 0.7, "momentum": 0.9, "nesterov": True})
    codec: str = "none"
    weights: tuple[float, ...] = (1.0, 2.5, 0.3)
    down: str = ""
    part_bytes: int = PART_BYTES

    def __post_init__(self):
        self.folder.mkdir(exist_ok=True)
        self.rule = build_outer(OwnName(self.target) if isinstance(self.target, str) else self.target, self.options)
        self.version_layout = version_layout(self.schema, self.part_bytes)
        down = OwnName(self.down.partition(" ")[0] or "none")
        self.downlink = Downlink.of(self.version_layout, down, DOWN[self.down][1] if self.down else {})
        self.state = state_layout(self.schema.tensors, self.rule, self.part_bytes, masters=bool(self.down))
        self.update_layout = encoded_layout(self.schema, self.codec, CODECS, self.part_bytes)
        self.number = 0
        self.base = self.open("v0")
        os.pwrite(self.base, version_header(self.schema), 0)
        for segment in self.version_layout.segments:
            value = values(segment.spec, 0)
            os.pwrite(self.base, raw(value.zero_() if segment.spec.is_extra else value), segment.offset)
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

    def updates(self) -> list[spec.Update]:
        """What arrives in the round that comes next, by the specification."""
        updates = []
        for site, weight in enumerate(self.weights):
            found, submitted = (
                spec.Update(f"site-{site}", {}, {}, {}, float(weight), 1 + site % 3),
                self.submitted(site, self.number),
            )
            for each in self.schema.tensors:
                x = submitted[each.name]
                if each.is_extra:
                    found.controls[each.name.removeprefix(extra_name(each.group, ""))] = x
                elif each.is_stepped:
                    found.params[each.name] = UP[self.codec](spec.wide(x), x.dtype)
                else:  # torch has no maximum of uint16
                    found.buffers[each.name] = x if each.is_float else x.to(torch.int64)
            updates.append(found)
        return updates

    def plan_of_fragment(self) -> FragmentPlan:
        """The layouts; kept from round to round, with the tables that follow from them."""
        header = version_header(self.schema)
        return FragmentPlan(self.schema, header, self.version_layout, self.update_layout, self.state, self.downlink)

    def frozen(self, norms: Sequence[float] = (), scales: Sequence[float] = (), **population: float) -> FrozenRound:
        count = len(self.weights)
        updates = [
            FrozenUpdate(
                ticket=site,
                site=f"site-{site}",
                digest="00" * 32,
                weight=weight,
                steps=1 + site % 3,
                norm=norm,
                scale=scale,
            )
            for site, (weight, norm, scale) in enumerate(
                zip(self.weights, norms or [0.0] * count, scales or [1.0] * count, strict=True)
            )
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
        version, state = self.open(f"v{number}"), self.open(f"s{number}") if self.state is not None else None
        if self.downlink is None:
            return NextFiles(version, state)
        delta = self.open(f"d{number}")
        os.ftruncate(delta, self.downlink.layout.nbytes)  # a slot is made of zeros
        return NextFiles(version, state, delta)

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


def specified(world: World, outer: spec.Outer, reducer: spec.Reducer = MEAN) -> spec.Fragment:
    """The same run by the specification."""
    tensors = world.schema.model.tensors
    rules = spec.Rules(
        outer,
        down=DOWN[world.down][0] if world.down else None,
        reducer=reducer,
        buffers={each.name: each.rule for each in tensors if each.is_buffer},
        controls=any(each.is_extra for each in world.schema.tensors),
    )
    return spec.Fragment(rules, {each.name: values(each, 0) for each in tensors})


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
