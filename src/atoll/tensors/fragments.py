"""Divide a model into fragments. Streaming DiLoCo synchronises one fragment at a time.

In the paper (Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512, section 2.1), a
fragment is a sequence of neighbouring layers. In Atoll it is a sequence of neighbouring parameters, and all fragments
have similar sizes in bytes. A tied tensor is one tensor, so it is in one fragment under all its names. A buffer is in
the fragment of its module's first parameter. If its module has no parameter, the buffer is in the fragment of the
parameter that shares the longest module path with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import ConfigError
from atoll.format_text import number_of
from atoll.tensors.schema import PARAMS, Schema, TensorSpec


@dataclass(frozen=True)
class Split:
    """A model's schema, and the fragment of each of its tensors.

    Attributes:
        schema: schema of the whole model.
        places: for each tensor, in the schema's order, the index of its fragment.
    """

    schema: Schema
    places: tuple[int, ...]

    @classmethod
    def whole(cls, schema: Schema) -> Split:
        """Return a split with the whole model in one fragment."""
        return cls(schema, (0,) * len(schema.tensors))

    @property
    def count(self) -> int:
        """Number of fragments; 1 for a model that is not divided."""
        return max(self.places, default=0) + 1

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """The schema of each fragment. With one fragment, this is the model's own schema."""
        if self.count == 1:
            return (self.schema,)
        specs: list[list[TensorSpec]] = [[] for _ in range(self.count)]
        pairs: list[list[tuple[str, str]]] = [[] for _ in specs]
        place_of = {spec.name: place for spec, place in zip(self.schema.tensors, self.places, strict=True)}
        for spec in self.schema.tensors:
            specs[place_of[spec.name]].append(spec)
        for alias, owner in self.schema.aliases:
            pairs[place_of[owner]].append((alias, owner))
        return tuple(Schema(tuple(some), tuple(ties)) for some, ties in zip(specs, pairs, strict=True))


def split(schema: Schema, count: int) -> Split:
    """Divide a model into `count` fragments of neighbouring parameters. The largest fragment is as small as possible.

    Raises:
        ConfigError: the model has fewer than `count` parameters.
    """
    if count == 1:
        return Split.whole(schema)
    params = _in_order([spec for spec in schema.tensors if spec.group == PARAMS and spec.numel])
    if count > len(params):
        raise ConfigError(
            f"diloco.num_fragments is {count}, but the model has only {number_of(len(params), 'parameter')} to divide.",
            f"Set diloco.num_fragments to at most {max(1, len(params))}.",
        )
    neighbours = _Neighbours(params)
    piece_of = {spec.name: index for index, spec in enumerate(params)}
    sizes = [0] * len(params)
    for spec in schema.tensors:
        piece = piece_of.setdefault(spec.name, neighbours.index(spec.name))
        sizes[piece] += spec.nbytes
    ends = cut(sizes, count)
    fragment_of = [next(f for f, end in enumerate(ends) if index < end) for index in range(len(params))]
    return Split(schema, tuple(fragment_of[piece_of[spec.name]] for spec in schema.tensors))


def cut(sizes: Sequence[int], count: int) -> list[int]:
    """Divide a list of sizes into `count` consecutive, non-empty groups. Return the end index (exclusive) of each.

    The largest group's sum is as small as possible. Within this limit, each group in turn is as near as
    possible to an equal share of the remaining sizes.

    Args:
        sizes: at least `count` sizes.
        count: number of groups.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_from_the_end(sizes, middle)) <= count else (middle + 1, high)
    earliest = _from_the_end(sizes, low)  # a group that ended earlier would leave too much for the later groups
    earliest = [0] * (count - len(earliest)) + earliest
    before = [0, *itertools.accumulate(sizes)]
    ends: list[int] = []
    start = 0
    for run in range(count - 1):
        remaining = count - 1 - run
        target = before[start] + (before[-1] - before[start]) / (remaining + 1)
        choices = [
            end
            for end in range(max(start + 1, earliest[run]), len(sizes) - remaining + 1)
            if before[end] - before[start] <= low
        ]
        start = min(choices, key=lambda end: abs(before[end] - target))
        ends.append(start)
    return [*ends, len(sizes)]


def _from_the_end(sizes: Sequence[int], most: int) -> list[int]:
    """Divide sizes into as few consecutive groups as possible, each with a sum of at most `most`.

    Groups are filled from the last size backwards. Return the end index (exclusive) of each group, in ascending order.
    """
    ends, total = [len(sizes)], 0
    for index in range(len(sizes) - 1, -1, -1):
        if total + sizes[index] > most:
            ends.append(index + 1)
            total = 0
        total += sizes[index]
    return ends[::-1]


def _in_order(params: list[TensorSpec]) -> list[TensorSpec]:
    """Return parameters approximately in the model's order, although `params` is ordered by element size.

    Parameters of the main element size (the one with the most bytes in total) keep their order. Each other parameter is
    inserted next to its module: after the last parameter that shares the longest module path with it.
    """
    widths = {spec.item_bytes for spec in params}
    if len(widths) < 2:
        return params
    main = max(widths, key=lambda width: (sum(spec.nbytes for spec in params if spec.item_bytes == width), width))
    placed = [spec for spec in params if spec.item_bytes == main]
    neighbours = _Neighbours(placed)
    followers: dict[int, list[TensorSpec]] = {}
    for spec in params:
        if spec.item_bytes != main:
            followers.setdefault(neighbours.last(spec.name), []).append(spec)
    return [each for index, spec in enumerate(placed) for each in (spec, *followers.get(index, ()))]


class _Neighbours:
    """A list of parameters with an index of their module paths, to find the parameter nearest to a tensor."""

    def __init__(self, params: Sequence[TensorSpec]) -> None:
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        for index, spec in enumerate(params):
            prefixes = _prefixes(spec.name)
            self._first.setdefault(prefixes[0], index)
            for prefix in prefixes:
                self._last[prefix] = index

    def index(self, name: str) -> int:
        """Return the list index of the first parameter of the tensor's own module.

        If the module has no parameter, return what `last` returns.
        """
        return self._first.get(_prefixes(name)[0], self.last(name))

    def last(self, name: str) -> int:
        """Return the list index of the parameter that shares the longest module path with the tensor.

        If several share it, return the index of the last one.
        """
        return next(self._last[prefix] for prefix in _prefixes(name) if prefix in self._last)


def _prefixes(name: str) -> list[str]:
    """Return the paths of the modules that contain a tensor, innermost first: `a.b.weight` → `a.b`, `a`, ``."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def split_of(value: Mapping[str, Any]) -> Split:
    """Return the split that the journal has stored as a JSON value.

    Args:
        value: the result of `Schema.to_json`. If there are several fragments, the key `fragments` lists the fragment of
            each tensor.
    """
    schema = Schema.from_json(value)
    return Split(schema, tuple(value["fragments"])) if "fragments" in value else Split.whole(schema)
