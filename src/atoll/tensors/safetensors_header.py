"""The head of a safetensors file from another program, read strictly: 8 bytes of length, JSON, then the tensors.

Everything is checked before memory is taken for a tensor: the head's size, its form, that names are there once, that
dtypes and shapes account for every range, and that the ranges cover the data once and without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from atoll.errors import BadRequest
from atoll.tensors.schema import ITEM_BYTES, TensorSpec

MOST_BYTES = 100 * 2**20
"""Of a head, as in safetensors itself; that of 5,000 tensors has half a MB."""
_LENGTH_BYTES = 8
_REMEDY = "Write it with safetensors."


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Attributes:
        tensors: (tensor, its first byte in the file), in file order; all in the group `params`.
        metadata: the strings of `__metadata__`.
        nbytes: of the head, length included: where the data begins.
    """

    tensors: tuple[tuple[TensorSpec, int], ...]
    metadata: dict[str, str]
    nbytes: int


def read_header(read: Callable[[int, int], bytes], file_bytes: int, what: str) -> Header:
    """Return the head of a file.

    Args:
        read: (offset, count) → that many bytes of the file, or fewer where it ends.
        file_bytes: its size.
        what: names it in errors.

    Raises:
        BadRequest: it is no safetensors file, or not all of one.
    """
    if file_bytes < _LENGTH_BYTES:
        raise _wrong(what, f"has {file_bytes} bytes, too few for a head")
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    if not 2 <= length <= MOST_BYTES:
        raise _wrong(what, f"claims a head of {length} bytes")
    begin = _LENGTH_BYTES + length
    if begin > file_bytes:
        raise _wrong(what, f"claims a head of {length} bytes, and has {file_bytes} in all")
    table = _table(read(_LENGTH_BYTES, length), what)
    metadata = _metadata(table.pop("__metadata__", {}), what)
    tensors = sorted(
        (read_tensor(name, entry, what) for name, entry in table.items()), key=lambda each: (each[1], each[2])
    )
    end = 0
    for spec, start, stop in tensors:
        if start != end:
            how = "overlaps the one before" if start < end else "leaves a gap before it"
            raise _wrong(what, f"has {spec.name!r} at byte {start} of its data, which {how}")
        end = stop
    if begin + end != file_bytes:
        raise _wrong(what, f"has {file_bytes - begin} bytes of data, where its head describes {end}")
    return Header(tuple((spec, begin + start) for spec, start, _ in tensors), metadata, begin)


def _table(text: bytes, what: str) -> dict[str, Any]:
    def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key, value in pairs:
            if key in built:
                raise _wrong(what, f"has {key!r} twice in its head")
            built[key] = value
        return built

    try:
        table = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _wrong(what, f"has a head that is no JSON ({error})") from None
    if not isinstance(table, dict):
        raise _wrong(what, f"has a head that is a JSON {type(table).__name__}, not an object")
    return table


def _metadata(given: Any, what: str) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise _wrong(what, "has a `__metadata__` that is not strings by name")
    return given


def read_tensor(name: str, entry: Any, what: str) -> tuple[TensorSpec, int, int]:
    """One entry of a head, as (tensor, first, last + 1 byte of the data).

    Raises:
        BadRequest: it is none.
    """
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _wrong(what, f"describes {name!r} by something else than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BadRequest(
            f"{what} has {name!r} in the dtype {dtype!r}, which does not travel.",
            f"Use one of {', '.join(ITEM_BYTES)}.",
        )
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _wrong(what, f"has {name!r} with the shape {shape!r} at {offsets!r}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise _wrong(what, f"has {name!r} at {offsets!r}, where {dtype}{shape} takes {nbytes} bytes")
    return TensorSpec(name, dtype, tuple(shape)), offsets[0], offsets[1]


def _counts(given: Any) -> bool:
    """Return whether it is a list of non-negative integers that fit 63 bits."""
    return isinstance(given, list) and all(type(count) is int and 0 <= count < 2**63 for count in given)


def _wrong(what: str, how: str) -> BadRequest:
    return BadRequest(f"{what} {how}.", _REMEDY)
