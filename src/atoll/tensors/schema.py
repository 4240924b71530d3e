"""The schema of a model: names, dtypes, shapes and groups of its tensors, with a digest that both sides compare.

This module does not import torch, so that commands such as `atoll status` start fast. Dtypes have the names of
safetensors (`F32`, `BF16`, `I64`).
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from atoll.errors import SchemaMismatch, UsageError

ITEM_BYTES: dict[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""safetensors dtype → bytes of one element."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})

PARAMS = "params"
BUFFERS = "buffers"
KEPT = (f"{PARAMS}.keep", f"{BUFFERS}.keep")
"""Groups of tensors that each site keeps for itself: they are in versions with their initial values, never in updates.
"""
FLAGS = f"{BUFFERS}.flags"
"""Group of float buffers with the rule `first` in rounds in which all values at all sites are 0 or 1, else `mean`."""
RULES = ("max", "sum", "first", "keep", "flags")
"""The rules of buffers that the group of a tensor can name. Other buffers have the usual rule of their dtype."""
FIRST = f"{BUFFERS}.first"
"""Group of buffers that take the next value from one site. The first update decides their shapes, once."""
NOTHING = "nothing"
"""Name of the only tensor in a run without a model: a run that has only workflows."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor: name, safetensors dtype, shape and group. Each group may have its own reducer.

    The groups are `params` (parameters), `buffers`, and groups of extra tensors that an algorithm stores in versions
    besides the model, such as the control variates of SCAFFOLD. A buffer that does not have the usual rule for its
    dtype (see `rule`) is in a group with the rule in its name, such as `buffers.first`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: str = PARAMS

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise UsageError(
                f"Tensor {self.name!r} has the dtype {self.dtype}, which Atoll does not support.",
                f"Use one of {', '.join(ITEM_BYTES)}.",
            )

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor, 0 for an empty one."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, unencoded."""
        return self.numel * self.item_bytes

    @property
    def is_float(self) -> bool:
        """Whether the dtype is a float, including fp8."""
        return self.dtype in FLOATS

    @property
    def is_stepped(self) -> bool:
        """Whether the outer optimizer steps the tensor: it is a float in the group `params`."""
        return self.group == PARAMS and self.is_float

    @property
    def is_extra(self) -> bool:
        """Whether the tensor is one of the algorithm's extra tensors, which are not part of the model."""
        return self.group not in (PARAMS, BUFFERS) and not self.is_buffer and not self.is_kept

    @property
    def is_buffer(self) -> bool:
        """Whether the tensor is a buffer of the model, whatever its rule is."""
        return self.group.partition(".")[0] == BUFFERS

    @property
    def is_kept(self) -> bool:
        """Whether each site keeps its own values of the tensor, and sends none (the rule `keep`)."""
        return self.group in KEPT

    @property
    def is_copied(self) -> bool:
        """Whether the tensor's values are only copied, never computed with, so that they may contain Inf and NaN."""
        return self.is_kept or self.group == FIRST

    @property
    def rule(self) -> str:
        """How the next value of a buffer is made: `mean`, `max`, `sum`, `first`, `keep`, or `flags` (see `FLAGS`).

        In the group `buffers`, it is `mean` for floats, and `max` for all other dtypes.
        """
        return self.group.partition(".")[2] or ("mean" if self.is_float else "max")

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)} in {self.group}"


def extra_name(group: str, parameter: str) -> str:
    """Return the name of the algorithm's extra tensor for a parameter; `group` is the group of the extra tensor."""
    return f"atoll.{group}.{parameter}"


def extra_specs(group: str, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the algorithm's extra tensors in a group: one per parameter, in its shape, in fp32 (fp64 for fp64)."""
    return [
        TensorSpec(extra_name(group, spec.name), "F64" if spec.dtype == "F64" else "F32", spec.shape, group)
        for spec in specs
        if spec.group == PARAMS
    ]


@dataclass(frozen=True)
class Schema:
    """The tensors of a model in storage order, each once, and the further names of tied tensors.

    Storage order is by element size, widest first; within a size, it is the model's order. safetensors does not allow
    gaps between tensors, and in this order every tensor is aligned to its element size without gaps.

    Attributes:
        tensors: the tensors, in storage order; a tied tensor once, under its owner's name.
        aliases: (further name, owner's name) of tied tensors, sorted.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @classmethod
    def build(cls, specs: Iterable[TensorSpec], aliases: Mapping[str, str] | None = None) -> Schema:
        """Return a schema in storage order.

        Raises:
            UsageError: a name occurs twice, or is `__metadata__`; or an alias refers to a missing tensor.
        """
        ordered = tuple(sorted(specs, key=lambda spec: -spec.item_bytes))
        tied = tuple(sorted((aliases or {}).items()))
        owners = {spec.name for spec in ordered}
        everything = [spec.name for spec in ordered] + [alias for alias, _ in tied]
        if "__metadata__" in everything:
            raise UsageError("A tensor is named '__metadata__', a name that safetensors reserves.", "Rename it.")
        if len(everything) != len(set(everything)):
            double = next(name for name in everything if everything.count(name) > 1)
            raise UsageError(f"The tensor name {double!r} occurs twice.", "Use a different name for each tensor.")
        for alias, owner in tied:
            if owner not in owners:
                raise UsageError(f"Tensor {alias!r} is tied to {owner!r}, but there is no tensor {owner!r}.")
        return cls(ordered, tied)

    def with_groups(self, groups: Iterable[str]) -> Schema:
        """Return the schema with the algorithm's extra tensors added: one per parameter in each of these groups.

        Raises:
            UsageError: a tensor of the model has a name that is reserved for extra tensors.
        """
        known = [spec.name for spec in self.tensors] + [alias for alias, _ in self.aliases]
        specs = list(self.tensors)
        for group in groups:
            prefix = extra_name(group, "")
            for name in known:
                if name.startswith(prefix):
                    raise UsageError(
                        f"The model has a tensor named {name!r}, but names that begin with {prefix!r} are "
                        "reserved for tensors of the algorithm.",
                        "Rename it.",
                    )
            specs += extra_specs(group, self.tensors)
        return Schema.build(specs, dict(self.aliases))

    @functools.cached_property
    def model(self) -> Schema:
        """The schema without the algorithm's extra tensors: only the tensors of the user's model."""
        return Schema(tuple(spec for spec in self.tensors if not spec.is_extra), self.aliases)

    @functools.cached_property
    def kept(self) -> frozenset[str]:
        """The names of the tensors that each site keeps for itself."""
        return frozenset(spec.name for spec in self.tensors if spec.is_kept)

    @functools.cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """The name of each tensor → all its names: first its own, then the further ones if it is tied."""
        further: dict[str, tuple[str, ...]] = {spec.name: (spec.name,) for spec in self.tensors}
        for alias, owner in self.aliases:
            further[owner] += (alias,)
        return further

    @property
    def is_nothing(self) -> bool:
        """Whether this is the placeholder schema of a run without a model, which only sends tasks to the sites."""
        return [spec.name for spec in self.tensors] == [NOTHING]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, unencoded; a tied tensor counts once."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def numel(self) -> int:
        """Number of elements of all tensors; a tied tensor counts once."""
        return sum(spec.numel for spec in self.tensors)

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE3 hash of the schema as canonical JSON, in hex. Schemas with equal digests are equal."""
        return blake3(json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the schema as a JSON value, for `digest` and `from_json`."""
        return {
            "tensors": [[spec.name, spec.dtype, list(spec.shape), spec.group] for spec in self.tensors],
            "aliases": [list(pair) for pair in self.aliases],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Schema:
        """Return the schema from the JSON value that `to_json` returned.

        Raises:
            UsageError: a tensor has a dtype that Atoll cannot send.
        """
        return cls(
            tuple(TensorSpec(name, dtype, tuple(shape), group) for name, dtype, shape, group in value["tensors"]),
            tuple((alias, owner) for alias, owner in value["aliases"]),
        )

    @functools.cached_property
    def first(self) -> frozenset[str]:
        """The names of the buffers with the rule `first`. The first update decides their shapes."""
        return frozenset(spec.name for spec in self.tensors if spec.group == FIRST)

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> Schema:
        """Return the schema with other shapes of some tensors: name → shape."""
        specs = (replace(spec, shape=shapes.get(spec.name, spec.shape)) for spec in self.tensors)
        return Schema(tuple(specs), self.aliases)

    def in_order_of(self, other: Schema) -> Schema:
        """Return this schema in the order of `other` if both have the same names, else unchanged.

        The order may differ because a file may list its tensors in another order than the module.
        """
        own = {spec.name: spec for spec in self.tensors}
        names = [spec.name for spec in other.tensors]
        return Schema(tuple(own[name] for name in names), self.aliases) if own.keys() == set(names) else self

    def _compared(self, other: Schema, *, shapes: bool = False) -> Schema:
        """Return what two sides must agree on: all tensors but those that sites keep, and for buffers not their rules.

        Rules are chosen by the server, and a site's own tensors may have any shape. So may buffers with the rule
        `first`: their shapes are compared when a site submits, or if `shapes` is True. A further name of a tied tensor
        is compared only if the other side has that name, too: files often have a tied tensor under one name only.
        """
        named = {spec.name for spec in other.tensors} | dict(other.aliases).keys()
        kept, first = self.kept | other.kept, frozenset[str]() if shapes else self.first | other.first
        return Schema(
            tuple(
                replace(spec, group=BUFFERS, shape=() if spec.name in first else spec.shape) if spec.is_buffer else spec
                for spec in self.tensors
                if spec.name not in kept
            ),
            tuple(pair for pair in self.aliases if pair[0] in named),
        )

    def is_like(self, other: Schema, *, shapes: bool = False) -> bool:
        """Return whether both schemas have the same tensors, in any order; see `require_equal`."""
        one, two = self._compared(other, shapes=shapes), other._compared(self, shapes=shapes)
        return one.in_order_of(two) == two

    def require_equal(self, other: Schema, *, mine: str, theirs: str, shapes: bool = False) -> None:
        """Check that both schemas have the same tensors, in any order.

        The rules of buffers, the tensors that each site keeps for itself, and the shapes of buffers with the rule
        `first` may differ.

        Args:
            other: the other side's schema.
            mine: name of the side with this schema, for the message ("worker clinic-a").
            theirs: name of the side with the other schema ("the run").
            shapes: whether the shapes of buffers with the rule `first` must be the same, too.

        Raises:
            SchemaMismatch: they differ. The message has both digests and the first difference.
        """
        if self.is_like(other, shapes=shapes):
            return
        one, two = self._compared(other, shapes=shapes), other._compared(self, shapes=shapes)
        raise SchemaMismatch(
            f"The model of {mine} (schema {self.digest[:12]}) is not the model of {theirs} (schema "
            f"{other.digest[:12]}): {_first_difference(one, two, mine, theirs)}.",
            _shape_remedy(one, two)
            or _tie_remedy(one, two, theirs)
            or f"Use the same architecture and dtypes on both sides, or start {theirs} with the model of {mine}.",
        )


def _shape_remedy(one: Schema, two: Schema) -> str:
    """Return the remedy if only buffers differ, by their shapes; else nothing."""
    in_one, in_two = ({spec.name: spec for spec in schema.tensors} for schema in (one, two))
    differing = [name for name in in_one.keys() | in_two.keys() if in_one.get(name) != in_two.get(name)]
    for name in differing:
        mine, its = in_one.get(name), in_two.get(name)
        if mine is None or its is None or not mine.is_buffer or replace(mine, shape=its.shape) != its:
            return ""
    name = min(differing, default="")
    return name and (
        "If the shape comes from the data, let each site keep its own buffer: start a new run with "
        f'model.buffers = {{"{name}" = "keep"}}.'
    )


def _tie_remedy(one: Schema, two: Schema, theirs: str) -> str:
    """Return the remedy if a tensor that is tied in `one` is two tensors in `two`; else nothing."""
    free = {spec.name for spec in two.tensors}
    name = next((name for name, _ in one.aliases if name in free), "")
    return name and (
        f"If {name} is tied in the run's model as well, start {theirs} with a model that says so: an nn.Module, "
        'model.source = "module:function", or an export of Atoll.'
    )


def _first_difference(one: Schema, two: Schema, mine: str, theirs: str) -> str:
    in_one, in_two = ({spec.name: spec for spec in schema.tensors} for schema in (one, two))
    for holder, tied, other, free in ((mine, one, theirs, in_two), (theirs, two, mine, in_one)):
        for name, owner in tied.aliases:
            if name in free:
                has = "two tensors" if owner in free else f"only {name}"
                return f"{holder} ties {name} to {owner}, but {other} has {has}"
    for holder, longer, other, shorter in ((mine, in_one, theirs, in_two), (theirs, in_two, mine, in_one)):
        prefix = min(longer).removesuffix(min(shorter))
        if prefix and {prefix + name for name in shorter} == longer.keys():
            return f"the names of {holder}'s tensors begin with {prefix!r}, those of {other} do not"
    found = []
    for holder, held, other, others in ((mine, in_one, theirs, in_two), (theirs, in_two, mine, in_one)):
        for name, spec in held.items():
            there = others.get(name, "no such tensor")
            if spec != there:
                found.append((spec.group == BUFFERS, f"{holder} has {spec}, but {other} has {there}"))
    if found:
        return min(found, key=operator.itemgetter(0))[1]  # a parameter says more than a buffer
    pair = sorted(set(one.aliases) ^ set(two.aliases))[0]
    holder = mine if pair in one.aliases else theirs
    return f"only {holder} ties {pair[0]} to {pair[1]}"
