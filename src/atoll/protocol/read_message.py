"""Read a message from the JSON text of an answer, in bounded memory, with an error of one short line.

A few bytes of JSON can become hundreds of bytes in memory: an empty object, or a wrong value that the error lists.
`MOST_LIGHT_BYTES` in `json_files` bounds what an answer may take, whatever it says. Deep nesting, huge numbers, invalid
UTF-8 and lone surrogates are refused by the parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from atoll.format_text import visible
from atoll.json_files import require_light

SMALL_BYTES = 64 * 2**10
"""Up to this size, an answer cannot take more than `MOST_LIGHT_BYTES`, so it is parsed without a check."""
WHY_CHARS = 300
"""Maximum length of the reason in an error, in characters."""

_COSTS = {":": 1000, "{": 600, "[": 300, ",": 40, '"': 100}
"""JSON character → memory in bytes of the value that it begins: a key with its error, an object, a list, a value, a
string. Measured with pydantic 2.14, rounded up."""

_TOKEN = re.compile(rb'(?P<key>"(?:[^"\\]++|\\.)*+")\s*+:|"(?:[^"\\]++|\\.)*+"|[{}]', re.DOTALL)
"""A key, another string, or the begin or end of an object. In valid JSON, other signs belong to no key."""

Kind = TypeVar("Kind", bound=BaseModel)


def read_message(kind: type[Kind], body: bytes | bytearray) -> Kind:
    """Return the message in the body of an answer.

    Args:
        kind: class of the message.
        body: JSON text.

    Raises:
        ValueError: the body is not a valid message, or would take too much memory. The text of the error is short and
            printable.
    """
    if len(body) > SMALL_BYTES:
        require_light(body, _COSTS)
    try:
        message = kind.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(reason(error)) from None
    require_keys_once(body)
    return message


LENGTH_BYTES = 4
"""Size of the number, big-endian, that tells the length of a framed message."""


def framed(message: BaseModel | bytes, data: bytes | memoryview = b"") -> bytes:
    """Return a message with bytes after it: the length of its JSON text in `LENGTH_BYTES`, the text, then `data`.

    Args:
        message: the message, or its JSON text.
        data: the bytes after it.
    """
    text = message if isinstance(message, bytes) else message.model_dump_json(exclude_defaults=True).encode()
    return b"".join((len(text).to_bytes(LENGTH_BYTES, "big"), text, data))


def read_framed(kind: type[Kind], body: bytes | bytearray) -> tuple[Kind, memoryview]:
    """Return the message in a body that `framed` has made, and the bytes after it.

    Raises:
        ValueError: as for `read_message`, or the body is shorter than it says.
    """
    stop = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "big")
    if not LENGTH_BYTES <= stop <= len(body):
        raise ValueError(f"it has {len(body)} bytes, but says that its message ends at byte {stop}")
    return read_message(kind, body[LENGTH_BYTES:stop]), memoryview(body)[stop:]


def require_keys_once(body: bytes | bytearray) -> None:
    """Check that no object in a valid JSON text has a key twice: programs disagree about which of the values counts.

    Raises:
        ValueError: there is such an object. The text of the error is short and printable.
    """
    objects: list[set[bytes]] = []
    for token in _TOKEN.finditer(body):
        if token.lastgroup == "key":
            key = (
                token["key"]
                if b"\\" not in token["key"]
                else json.dumps(json.loads(token["key"]), ensure_ascii=False).encode()
            )
            if key in objects[-1]:
                raise ValueError(f"the key {visible(key.decode(), 80)} occurs twice in an object")
            objects[-1].add(key)
        elif token[0] == b"{":
            objects.append(set())
        elif token[0] == b"}":
            objects.pop()


def reason(error: ValidationError) -> str:
    """Return why a message is not valid: the place and the text of the first error, short and printable."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return visible(f"{place}: {first['msg']}" if place else first["msg"], WHY_CHARS)


# -- Lists that are read one element at a time, so that only the result is in memory.

_ELEMENT = re.compile(rb'\s*+(\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+")*+\}|\d++)\s*+([,\]])', re.DOTALL)
_KEY = re.compile(rb'\s*+"(\w++)"\s*+:\s*+\[(\s*+\])?', re.DOTALL)
_END = re.compile(rb"\s*+([,}])\s*+")
_OPEN = re.compile(rb"\s*+\{")


def lists_in(body: bytes | bytearray) -> Iterator[tuple[str, bytes]]:
    """Yield (key, element) of every list in a JSON object of lists of flat objects or numbers.

    Each element is JSON text.

    Raises:
        ValueError: the text has another form.
    """
    begin = _OPEN.match(body)
    at, names = begin.end() if begin else -1, set[str]()
    while at >= 0 and (key := _KEY.match(body, at)):
        name, at, more = key[1].decode(), key.end(), not key[2]
        if name in names:
            raise ValueError(f"the key {visible(name, 80)} occurs twice in an object")
        names.add(name)
        while more:
            element = _ELEMENT.match(body, at)
            if element is None or len(element[1]) > SMALL_BYTES:
                raise ValueError(f"{name}: no list of objects or numbers")
            yield name, element[1]
            at, more = element.end(), element[2] == b","
        end = _END.match(body, at)
        at = end.end() if end else -1
        if end and end[1] == b"}":
            if at != len(body):
                break
            return
    raise ValueError("it is not a JSON object of lists")
