"""Where the tensors of a payload lie, under names that a person would write, and payloads with some of them left out.

    {"model": {"w": t, "layers": [a, {"b": t}]}, "n": 3}      model.w and model.layers.1.b are t, model.layers.0 is a

A flat dict has its keys for names; a payload that is a tensor is called `payload`. What is within a registered type is
called by its place in what the producer makes of it. NumPy scalars are numbers, and have no name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from atoll.errors import UsageError
from atoll.tensors.collector import no_collections
from atoll.tensors.payload import Packed, Plain

ROOT = "payload"

_NAMED = ("tensor", "array", "stream")


def names_of(packed: Packed) -> dict[int, tuple[str, ...]]:
    """Number of each tensor → its names, one for each place, in the order of the payload.

    Raises:
        UsageError: two tensors have the same name.
    """
    found: dict[int, dict[str, None]] = {}
    owner: dict[str, int] = {}
    with no_collections():
        for path, index in _places(packed.skeleton, ""):
            name = path or ROOT
            if owner.setdefault(name, index) != index:
                raise UsageError(
                    f"Two tensors of the payload are called {name!r}, so that filters cannot tell them apart.",
                    "Give them other keys.",
                )
            found.setdefault(index, {})[name] = None
    return {index: tuple(names) for index, names in found.items()}


def without(packed: Packed, numbers: frozenset[int]) -> Packed:
    """The payload with None in the places of these tensors, which are not in it any more."""
    if not numbers:
        return packed
    kept = [index for index in range(len(packed.tensors)) if index not in numbers]
    new = {index: number for number, index in enumerate(kept)}
    with no_collections():
        skeleton = _renumbered(packed.skeleton, new)
    arrays = frozenset(new[index] for index in packed.arrays if index in new)
    return Packed(skeleton, tuple(packed.tensors[index] for index in kept), arrays)


def _places(node: Plain, path: str) -> Iterator[tuple[str, int]]:
    """(path, number) of every place of a tensor; the skeleton is one that `unpack` takes."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _places(item, _join(path, str(index)))
    elif isinstance(node, dict):
        kind = node.get("$")
        if kind is None:
            for key, item in node.items():
                yield from _places(item, _join(path, key))
        elif kind in _NAMED:
            yield path, node["index"]
        elif kind == "registered":
            yield from _places(node["as"], path)
        elif kind == "tuple":
            yield from _places(node["items"], path)
        elif kind == "dict":
            for key, item in node["items"]:
                yield from _places(item, _join(path, str(key["value"] if isinstance(key, dict) else key)))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _renumbered(node: Plain, new: Mapping[int, int]) -> Plain:
    if isinstance(node, list):
        return [_renumbered(item, new) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("$")
    if kind in (*_NAMED, "scalar"):
        return {**node, "index": new[node["index"]]} if node["index"] in new else None
    return {key: item if key == "$" else _renumbered(item, new) for key, item in node.items()}
