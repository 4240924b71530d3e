"""The outer state file: what the outer optimizer keeps between rounds, beside each version.

A safetensors file with the tensors `<tensor>.<key>`: `layer.weight.momentum_buffer`, `layer.weight.step`; and
`layer.weight.master`, the fp32 master of a parameter that the version holds in fewer bits (casts are never part of it),
or as workers hold it, where versions go down by a codec that loses.
It is written by columns (all `momentum_buffer`, then all `step`), so that a run of the version's tensors is one run of
each column. Entries are of two groups:

    runs     one element per element of the tensor: cut, stepped and hashed with the version's parts
    wholes   belongs to the tensor as a whole (`step`; everything of an optimizer that needs whole tensors)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from atoll.blobs.model_file import MASTER
from atoll.errors import ConfigError
from atoll.outer_optimizers.torch_optimizer import OuterRule, StateSpec
from atoll.store.file_slots import Ranges, region_digest
from atoll.tensors.byte_runs import joined
from atoll.tensors.dtypes import accumulate_dtype, dtype_name
from atoll.tensors.layout import PART_BYTES, Layout, Part, Segment, file_layout, safetensors_header
from atoll.tensors.safetensors_header import read_header
from atoll.tensors.schema import TensorSpec

RUNS = "runs"
WHOLES = "wholes"

Column = tuple[str, str]
"""(key, dtype)"""

Entries = Mapping[str, Mapping[str, Segment]]
"""tensor → key → where it lies in the state file"""


def state_layout(
    specs: Sequence[TensorSpec], rule: OuterRule, part_bytes: int = PART_BYTES, *, masters: bool = False
) -> tuple[bytes, Layout] | None:
    """Return the header and layout of the state file of `rule` for these tensors; None where nothing is kept.

    Args:
        masters: whether every parameter has one, whatever its dtype.

    Raises:
        ConfigError: two entries would have one name.
    """
    columns: dict[tuple[str, str, str], list[TensorSpec]] = {}
    for spec in specs:
        for kept in _kept(spec, rule, masters):
            group = RUNS if kept.elementwise and rule.granularity == "chunk" else WHOLES
            shape = spec.shape if kept.shape is None else kept.shape
            entry = TensorSpec(f"{spec.name}.{kept.key}", kept.dtype, shape, group)
            columns.setdefault((kept.key, kept.dtype, group), []).append(entry)
    if not columns:
        return None
    ordered = [spec for column in sorted(columns.values(), key=lambda column: -column[0].item_bytes) for spec in column]
    if len({spec.name for spec in ordered}) != len(ordered) or any("." in key for key, _, _ in columns):
        raise ConfigError(f"algorithm.outer_optimizer {rule.label!r} has ambiguous keys in its state.")
    header = safetensors_header(ordered, {"format": "pt", "atoll.outer": rule.label})
    return header, file_layout(ordered, header, part_bytes)


def _kept(spec: TensorSpec, rule: OuterRule, masters: bool) -> list[StateSpec]:
    kept = rule.state_specs(spec)
    if not (spec.is_stepped and spec.numel):
        return kept
    wide = dtype_name(accumulate_dtype(spec.dtype))
    return [StateSpec(MASTER, wide), *kept] if masters or wide != spec.dtype else kept


def entries(layout: Layout | None) -> Entries:
    """Return where each tensor's state lies."""
    table: dict[str, dict[str, Segment]] = {}
    for segment in layout.segments if layout else ():
        tensor, _, key = segment.spec.name.rpartition(".")
        table.setdefault(tensor, {})[key] = segment
    return table


def version_regions(version: Layout) -> tuple[Ranges, ...]:
    """Return the ranges of each digest of `ClosedRound.part_digests`: one a part."""
    return tuple(((part.start, part.nbytes),) for part in version.parts)


def state_regions(version: Layout, state: Layout) -> tuple[Ranges, ...]:
    """Return those of `ClosedRound.state_digests`: for each part of the version its run of each column; then the tail.

    Together they are every byte of the state file.
    """
    table = entries(state)
    regions = [tuple(joined(ranges)) for part in version.parts for ranges in columns_of(part, table).values()]
    return (*regions, tail_region(state))


def columns_of(part: Part, table: Entries) -> dict[Column, list[tuple[int, int]]]:
    """Return the byte ranges in the state file that go with a part of the version, by column."""
    columns: dict[Column, list[tuple[int, int]]] = {}
    for piece in part.pieces:
        for key, segment in table.get(piece.segment.spec.name, {}).items():
            if segment.spec.group == RUNS and piece.numel:
                item = segment.spec.item_bytes
                ranges = columns.setdefault((key, segment.spec.dtype), [])
                ranges.append((segment.offset + piece.start * item, piece.numel * item))
    return columns


def tail_region(state: Layout) -> Ranges:
    """Return the ranges of the header and all wholes."""
    wholes = [(segment.offset, segment.nbytes) for segment in state.segments if segment.spec.group == WHOLES]
    return tuple(joined([(0, state.header_bytes), *wholes]))


def is_whole(fd: int, version: Layout, digests: Sequence[bytes], *, in_chunks: bool) -> bool:
    """Return whether an outer state is what its digests say, as far as its own header tells how it was cut.

    Args:
        version: the layout of the version beside it.
        in_chunks: whether the outer optimizer steps tensors chunk by chunk.
    """
    header = read_header(lambda at, count: os.pread(fd, count, at), os.fstat(fd).st_size, "the outer state")
    shapes = {segment.spec.name: segment.spec.shape for segment in version.segments}
    split = [(spec.name.rpartition("."), spec) for spec, _ in header.tensors]
    if in_chunks and not any(shapes.get(name) for (name, _, _), _ in split):
        return True  # tensors without dimensions alone do not show it
    cut = {key for (name, _, key), spec in split if in_chunks and shapes.get(name) and spec.shape == shapes[name]}
    specs = [replace(spec, group=RUNS if key in cut else WHOLES) for (_, _, key), spec in split]
    layout = file_layout(specs, os.pread(fd, header.nbytes, 0))
    regions = state_regions(version, layout)
    return len(regions) == len(digests) and all(
        region_digest(fd, region) == digest for region, digest in zip(regions, digests, strict=True)
    )
