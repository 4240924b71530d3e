"""The outer state: the state of the outer optimizer between rounds, in one file for each version.

The file is a safetensors file with tensors named `<tensor>.<key>`, such as `layer.weight.momentum_buffer` and
`layer.weight.step`. The key `master` is a parameter's fp32 master: its value before it is cast to the version's dtype.
A master exists if the version has the parameter in a dtype smaller than fp32, or if versions are downloaded through a
lossy codec.

The file is ordered by columns: all `momentum_buffer`, then all `step`, and so on. So a byte run of the version
corresponds to one byte run of each column. Each entry is in one of two groups:

    runs     one element per element of the tensor; cut, stepped and hashed like the parts of the version
    wholes   one value for the whole tensor (`step`), or all state of an optimizer that steps whole tensors
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import combinations

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
"""(key, dtype). The column consists of all entries of the state file with this key and dtype."""

Entries = Mapping[str, Mapping[str, Segment]]
"""Name of a tensor → key → segment of the state file."""


def state_layout(
    specs: Sequence[TensorSpec], rule: OuterRule, part_bytes: int = PART_BYTES, *, masters: bool = False
) -> tuple[bytes, Layout] | None:
    """Return the header and layout of the state file; None if the outer optimizer has no state and needs no masters.

    Args:
        specs: tensors of the version.
        rule: the outer optimizer.
        part_bytes: size of a part.
        masters: whether every parameter has a master, whatever its dtype.

    Raises:
        ConfigError: two entries would have the same name, or a key contains a dot.
    """
    columns: dict[tuple[str, str, str], list[TensorSpec]] = {}
    for spec in specs:
        for state_spec in _state_specs(spec, rule, masters):
            group = RUNS if state_spec.elementwise and rule.granularity == "chunk" else WHOLES
            shape = spec.shape if state_spec.shape is None else state_spec.shape
            entry = TensorSpec(f"{spec.name}.{state_spec.key}", state_spec.dtype, shape, group)
            columns.setdefault((state_spec.key, state_spec.dtype, group), []).append(entry)
    if not columns:
        return None
    ordered = [spec for column in sorted(columns.values(), key=lambda column: -column[0].item_bytes) for spec in column]
    if len({spec.name for spec in ordered}) != len(ordered) or any("." in key for key, _, _ in columns):
        raise ConfigError(f"algorithm.outer_optimizer {rule.label!r} has state keys that repeat or contain a dot.")
    header = safetensors_header(ordered, {"format": "pt", "atoll.outer": rule.label})
    return header, file_layout(ordered, header, part_bytes)


def _state_specs(spec: TensorSpec, rule: OuterRule, masters: bool) -> list[StateSpec]:
    specs = rule.state_specs(spec)
    if not (spec.is_stepped and spec.numel):
        return specs
    wide = dtype_name(accumulate_dtype(spec.dtype))
    return [StateSpec(MASTER, wide), *specs] if masters or wide != spec.dtype else specs


def entries(layout: Layout | None) -> Entries:
    """Return the segments (byte ranges) of a state file by tensor name, then by key; empty if `layout` is None."""
    table: dict[str, dict[str, Segment]] = {}
    for segment in layout.segments if layout else ():
        tensor, _, key = segment.spec.name.rpartition(".")
        table.setdefault(tensor, {})[key] = segment
    return table


def version_regions(version: Layout) -> tuple[Ranges, ...]:
    """Return, for each digest in `ClosedRound.part_digests`, the byte ranges that it covers: one part."""
    return tuple(((part.start, part.nbytes),) for part in version.parts)


def state_regions(version: Layout, state: Layout) -> tuple[Ranges, ...]:
    """Return, for each digest in `ClosedRound.state_digests`, the byte ranges of the state file that it covers.

    For each part of the version there is one digest per column. The last digest covers the header and all entries of
    the group `wholes`. The digests together cover the whole state file.
    """
    table = entries(state)
    regions = [tuple(joined(ranges)) for part in version.parts for ranges in columns_of(part, table).values()]
    return (*regions, tail_region(state))


def columns_of(part: Part, table: Entries) -> dict[Column, list[tuple[int, int]]]:
    """Return column → the byte ranges of the state file that belong to the elements of a part of the version."""
    columns: dict[Column, list[tuple[int, int]]] = {}
    for piece in part.pieces:
        for key, segment in table.get(piece.segment.spec.name, {}).items():
            if segment.spec.group == RUNS and piece.numel:
                item = segment.spec.item_bytes
                ranges = columns.setdefault((key, segment.spec.dtype), [])
                ranges.append((segment.offset + piece.start * item, piece.numel * item))
    return columns


def tail_region(state: Layout) -> Ranges:
    """Return the byte ranges that the last digest of a state file covers: header and all entries of group `wholes`."""
    wholes = [(segment.offset, segment.nbytes) for segment in state.segments if segment.spec.group == WHOLES]
    return tuple(joined([(0, state.header_bytes), *wholes]))


def is_whole(fd: int, version: Layout, digests: Sequence[bytes], in_chunks: bool) -> bool:
    """Return whether an outer state file matches its digests, without the outer optimizer's settings.

    The entries of a key count as those of the group `runs` if each has its tensor's shape in the file's header. If
    every tensor of the version is a scalar, shapes do not tell the groups apart: then try every possible grouping of
    the keys.

    Args:
        fd: the outer state file.
        version: layout of the version that the state belongs to.
        digests: the recorded digests, as in `state_regions`.
        in_chunks: whether the outer optimizer can step a tensor in pieces.
    """
    header = read_header(lambda at, count: os.pread(fd, count, at), os.fstat(fd).st_size, "the outer state")
    shapes = {segment.spec.name: segment.spec.shape for segment in version.segments}
    split = [(spec.name.rpartition("."), spec) for spec, _ in header.tensors]
    keys = {key for (_, _, key), _ in split}
    entries = {key: [(shapes.get(name), spec.shape) for (name, _, own), spec in split if own == key] for key in keys}
    cut = {
        key for key, each in entries.items() if in_chunks and all(a == b for a, b in each) and any(a for a, _ in each)
    }
    are_scalars = in_chunks and not any(shapes.get(name) for (name, _, _), _ in split)
    ways = [set(some) for n in range(len(keys) + 1) for some in combinations(keys, n)] if are_scalars else [cut]

    def matches(cut: Set[str]) -> bool:
        specs = [replace(spec, group=RUNS if key in cut else WHOLES) for (_, _, key), spec in split]
        regions = state_regions(version, file_layout(specs, os.pread(fd, header.nbytes, 0)))
        return len(regions) == len(digests) and all(
            region_digest(fd, region) == digest for region, digest in zip(regions, digests, strict=True)
        )

    return any(map(matches, ways))
