"""Strict reader of a safetensors file's header: 8 bytes of length, then JSON; the tensors follow.

The file may come from another program, so everything is checked before memory is allocated for a tensor: the size and
form of the header, duplicate names, dtypes, and that each range has the size of its tensor. The ranges must cover the
data without gaps or overlaps.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from atoll.errors import BadRequest
from atoll.tensors.schema import ITEM_BYTES, TensorSpec

MOST_HEAD_BYTES = 100 * 2**20
"""Maximum size of a header, as in safetensors itself. A header of 5,000 tensors has half a MB."""
MOST_DIMS = 64
"""Maximum number of dimensions of a tensor, as in torch."""
_LENGTH_BYTES = 8
_REMEDY = "Write the file with safetensors."
_SHORT = reprlib.Repr()
"""Shortens values of a header in errors, since a header may have any content."""
_SHORT.maxstring, _SHORT.maxlist = 200, MOST_DIMS


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a safetensors header.

    Attributes:
        tensors: (tensor, offset of its first byte in the file), in file order; all in the group `params`.
        metadata: the strings of `__metadata__`.
        nbytes: size of the header, with its 8 length bytes; the tensors' data begins at this offset.
    """

    tensors: tuple[tuple[TensorSpec, int], ...]
    metadata: dict[str, str]
    nbytes: int


def read_header(read: Callable[[int, int], bytes | str], file_bytes: int, what: str) -> Header:
    """Read and check the header of a safetensors file.

    Args:
        read: function (offset, count) → `count` bytes of the file from `offset` on, or fewer at the end of the file;
            the JSON may be text.
        file_bytes: size of the file.
        what: name of the file for errors.

    Raises:
        BadRequest: the file is not a valid safetensors file, or is truncated.
    """
    if file_bytes < _LENGTH_BYTES:
        raise _wrong(f"{what} has only {file_bytes} bytes, too few for a safetensors header")
    length = int.from_bytes(_bytes(read(0, _LENGTH_BYTES)), "little")
    if not 2 <= length <= MOST_HEAD_BYTES:
        raise _wrong(f"{what} claims to have a header of {length} bytes, but 2 to {MOST_HEAD_BYTES} bytes are allowed")
    begin = _LENGTH_BYTES + length
    if begin > file_bytes:
        raise _wrong(f"{what} claims to have a header of {length} bytes, but has only {file_bytes} bytes in all")
    table = _table(read(_LENGTH_BYTES, length), what)
    metadata = _metadata(table.pop("__metadata__", {}), what)
    tensors = sorted(
        (read_tensor(name, entry, what) for name, entry in table.items()), key=lambda each: (each[1], each[2])
    )
    end = 0
    for spec, start, stop in tensors:
        if start != end:
            how = "overlaps the previous tensor" if start < end else "leaves a gap after the previous tensor"
            raise _wrong(f"{what} has tensor {_SHORT.repr(spec.name)} at byte {start} of the data, where it {how}")
        end = stop
    if begin + end != file_bytes:
        raise _wrong(f"{what} has {file_bytes - begin} bytes of tensors, but its header describes {end} bytes")
    return Header(tuple((spec, begin + start) for spec, start, _ in tensors), metadata, begin)


def _bytes(data: bytes | str) -> bytes:
    assert isinstance(data, bytes)
    return data


def _table(text: bytes | str, what: str) -> dict[str, Any]:
    def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key, value in pairs:
            if key in built:
                raise _wrong(f"{what} has {_SHORT.repr(key)} twice in its header")
            built[key] = value
        return built

    try:
        table = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{what} has a header that is not JSON ({error})") from None
    if not isinstance(table, dict):
        raise _wrong(f"{what} has a header that is a JSON {type(table).__name__}, not an object")
    return table


def _metadata(metadata: Any, what: str) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _wrong(f"{what} has a `__metadata__` that is not a mapping of strings")
    return metadata


def read_tensor(name: str, entry: Any, what: str) -> tuple[TensorSpec, int, int]:
    """Read and check the entry of one tensor in the header.

    Args:
        name: name of the tensor.
        entry: JSON value of the entry.
        what: name of the file for errors.

    Returns:
        (tensor, start, stop): the tensor's bytes are [start, stop) of the data that follows the header.

    Raises:
        BadRequest: the entry is invalid.
    """
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _wrong(
            f"{what} does not describe tensor {_SHORT.repr(name)} with exactly the keys dtype, shape, data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BadRequest(
            f"{what} has tensor {_SHORT.repr(name)} in the dtype {_SHORT.repr(dtype)}, which Atoll does not support.",
            f"Use one of {', '.join(ITEM_BYTES)}.",
        )
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _wrong(
            f"{what} has tensor {_SHORT.repr(name)} with the invalid shape {_SHORT.repr(shape)} "
            f"or offsets {_SHORT.repr(offsets)}"
        )
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise _wrong(
            f"{what} has tensor {_SHORT.repr(name)} at the offsets {_SHORT.repr(offsets)}, "
            f"but {dtype}{shape} needs {nbytes} bytes"
        )
    return TensorSpec(name, dtype, tuple(shape)), offsets[0], offsets[1]


def _counts(counts: Any) -> bool:
    """Return whether a JSON value is a list of at most `MOST_DIMS` non-negative integers below 2**63."""
    few = isinstance(counts, list) and len(counts) <= MOST_DIMS
    return few and all(type(count) is int and 0 <= count < 2**63 for count in counts)


def _wrong(message: str) -> BadRequest:
    return BadRequest(f"{message}.", _REMEDY)
