"""Wrong answers of a server, as values that can be printed, counted and repeated.

An `Answer` names a fault and what was drawn for it. `pieces` turns it into bytes, given what the true server answered.
`answers` is the Hypothesis strategy of all answers of an operation. It follows from the operation's row in the table
of the HTTP interface and from the fields of its message, so that a new operation or field is covered at once.
"""

from __future__ import annotations

import functools
import gzip
import json
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel

from atoll.errors import BY_CODE
from atoll.protocol.openapi import OPERATIONS, STATUS_OF, Operation

FLOOD_BYTES = 160 * 2**20
"""Size of an "endless" body. A site must refuse it after 64 MB."""
CANARY = "hostile_canary"
"""Name of a module that nothing may import."""
THIS_FILE = str(Path(__file__))
FORGED = "atoll: FORGED"
"""Start of a line that appears only in a log that does not escape received text."""

KEEP, RESET = b"KEEP", b"RESET"
"""Instead of the last piece: the connection stays for further requests; it ends with RST. Otherwise it is closed."""

OPERATION_NAMED = {operation.name: operation for operation in OPERATIONS}


@dataclass(frozen=True)
class Truth:
    """What the true server answered to a request of an operation."""

    operation: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """A wrong answer: the name of its fault, and what was drawn for it."""

    fault: str
    given: tuple[Any, ...] = ()

    def __str__(self) -> str:
        text = ", ".join(repr(each) for each in self.given)
        return f"{self.fault}({text if len(text) <= 200 else text[:200] + '…'})"


Piece = bytes | float
"""Bytes to send, or seconds to wait."""


def pieces(answer: Answer, truth: Truth, others: Sequence[Truth]) -> Iterator[Piece]:
    """Yield what to send instead of the truth.

    Args:
        answer: the wrong answer.
        truth: what the true server answered to the request.
        others: all that the true server answered, oldest first.
    """
    fault = FAULTS[answer.fault]
    if fault.needs_others:
        return iter(fault.pieces(truth, others, *answer.given))
    return iter(fault.pieces(truth, *answer.given))


def answers(operation: Operation) -> st.SearchStrategy[Answer]:
    """Return the strategy of wrong answers of an operation: about half are wrong contents, half are wrong HTTP."""
    contents, http = [], []
    for name, fault in FAULTS.items():
        if not fault.fits(operation):
            continue
        drawn = fault.drawn(operation) if callable(fault.drawn) else fault.drawn
        each = drawn.map(functools.partial(Answer, name))
        (contents if fault.is_content else http).extend([each] * fault.share)
    return st.one_of(st.one_of(contents), st.one_of(http)) if contents else st.one_of(http)


# -- the table of faults


@dataclass(frozen=True)
class Fault:
    """One kind of wrong answer.

    Attributes:
        pieces: truth and what was drawn → what to send.
        drawn: strategy of tuples, or a function operation → strategy.
        fits: whether an operation can have it.
        is_content: whether the HTTP message is right, and only what is in it is wrong.
        needs_others: whether `pieces` gets all true answers, too.
        share: how often it is drawn, compared with others.
    """

    pieces: Callable[..., Iterator[Piece]]
    drawn: Any
    fits: Callable[[Operation], bool]
    is_content: bool
    needs_others: bool
    share: int


FAULTS: dict[str, Fault] = {}


def has_message(operation: Operation) -> bool:
    """Return whether the operation answers with a typed message."""
    return isinstance(operation.reply, type) and issubclass(operation.reply, BaseModel)


def has_bytes(operation: Operation) -> bool:
    """Return whether the operation answers with bytes of a file."""
    return operation.reply is bytes


def fault(
    drawn: Any,
    *,
    fits: Callable[[Operation], bool] = lambda _: True,
    content: bool = False,
    others: bool = False,
    share: int = 1,
) -> Callable[[Callable[..., Iterator[Piece]]], Callable[..., Iterator[Piece]]]:
    """Put a function into the table of faults, under its own name."""

    def add(function: Callable[..., Iterator[Piece]]) -> Callable[..., Iterator[Piece]]:
        name = function.__name__.strip("_").replace("_", " ")
        FAULTS[name] = Fault(function, drawn, fits, content, others, share)
        return function

    return add


def head(status: object, headers: Sequence[tuple[str, str]], reason: str = "So") -> bytes:
    """Return the first line and the headers of an answer."""
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def right(truth: Truth, body: bytes | None = None, status: object = None, **changed: str | None) -> bytes:
    """Return an answer in right HTTP: the truth, with some of it changed.

    Args:
        truth: what the true server answered.
        body: the body; by default the true one. Content-Length follows.
        status: the status; by default the true one.
        changed: headers, with `_` for `-`; None leaves one out.
    """
    body = truth.body if body is None else body
    names = {name.replace("_", "-"): value for name, value in changed.items()}
    kept = [(name, value) for name, value in truth.headers if name.lower() not in {key.lower() for key in names}]
    added = [(name, value) for name, value in names.items() if value is not None]
    length = [] if "Content-Length" in names else [("Content-Length", str(len(body)))]
    return head(truth.status if status is None else status, [*kept, *added, *length]) + body


def just(*given: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return the strategy of these values, each as what is drawn for a fault."""
    return st.sampled_from([(value,) for value in given])


# -- values for the fields of messages
#
# A value is drawn as a short description, which `expand` turns into JSON: a list of a million elements is drawn as
# ("repeat", element, 1_000_000).

NAMES = (
    f"{CANARY}:run",
    f"{THIS_FILE}:Answer",
    "../../../../tmp/outside.py:run",
    "subprocess:getoutput",
    THIS_FILE,
    f"{CANARY}.part",
    "../../../../tmp/outside",
    "file:///etc/passwd",
    "$(touch outside)",
    "http://127.0.0.1:9/elsewhere",
    f"x\r\n{FORGED} line",
)
"""Texts that import, open or start something, each in another way, if they are used as a name or a path."""
REF = "atoll-ref://127.0.0.1:9/00000000000000000000000000000000?expires=9999999999#" + "0" * 32 + "." + "0" * 64
TEXTS = (
    *("", *NAMES, REF, "os:system", "/tmp/outside/absolute", "..", ".", "a/b", "C:\\outside", "~", "con"),
    *("https://192.0.2.1/elsewhere", f"x\n{FORGED} line", f"a:1:p:{'0' * 32}\r\nX-Injected: 1"),
    *("\x00", "a\x00b", "\x1b[2J\x1b]0;title\x07", "\x85\u2028\u2029", "\u202eevil", "\ud800", "é" * 40, "\U0001f600"),
    *("%s%n%d{0}{x}", "{__class__}", "`touch outside`", "nan", "1e400", "0" * 64, "f" * 32),
    *("none", "int8", "topk", "F32", "F64", "F8_E5M2", "fedavg", "scaffold"),
)
NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 255, 65_535, 65_536),
    *(2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**61 - 1, 2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**70),
    *(-(2**63), -(2**70), 10**400, 0.5, 1.0, -0.0, -1.5, 1e-300, 5e-324, 1e18, 1e300, 1e308, -1e308),
    *("raw:NaN", "raw:Infinity", "raw:-Infinity", "raw:1e400", "raw:-1e400", "raw:1e-400"),
    *("raw:00", "raw:0x10", "raw:1_000"),
)


def _plain(values: Sequence[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.sampled_from(
        [
            ("raw", value[4:]) if isinstance(value, str) and value.startswith("raw:") else ("is", value)
            for value in values
        ]
    )


texts = st.one_of(
    _plain(TEXTS),
    st.tuples(st.just("text"), st.sampled_from(["a", "\x1b", "\u202e", "../"]), st.sampled_from([300, 70_000, 2**23])),
    st.tuples(st.just("is"), st.text(max_size=20)),
)
numbers = st.one_of(
    _plain(NUMBERS),
    st.tuples(st.just("is"), st.integers(-(2**70), 2**70)),
    st.tuples(st.just("is"), st.floats(allow_nan=False, allow_infinity=False)),
)
others = st.one_of(
    _plain([None, True, False, "", "1", 0, 1, 0.5, "raw:[", "raw:}", "raw:'a'", "raw:undefined"]),
    _plain([[], {}, [None], [[]], {"": None}, ["a"], [0], {"$": "tensor"}]),
    st.tuples(st.just("deep"), st.sampled_from(["[", '{"a":']), st.sampled_from([100, 5_000, 100_000])),
)
containers = st.one_of(
    st.tuples(st.just("repeat"), st.sampled_from([0, -1, "0" * 64, "a", None]), st.sampled_from([1_000, 300_000])),
    st.tuples(st.just("keys"), st.sampled_from([300, 100_000])),
    st.sampled_from([("doubled",), ("reversed",), ("shorter",), ("longer",), ("many", 1_000), ("many", 100_000)]),
    st.dictionaries(st.sampled_from(TEXTS), st.sampled_from([0, 1.5, "x", None, "subprocess:call"]), max_size=3).map(
        lambda value: ("is", value)
    ),
)
anything = st.one_of(texts, numbers, others, containers)


class Raw(str):
    """JSON, or what should be JSON, that is written as it is."""


def expand(value: tuple[Any, ...], truth: Any) -> Any:
    """Return what a drawn value is, given what stands in its place in the true answer."""
    kind, *given = value
    if kind == "is":
        return given[0]
    if kind == "raw":
        return Raw(given[0])
    if kind == "text":
        return given[0] * (given[1] // len(given[0]))
    if kind == "deep":
        return Raw(given[0] * given[1] + ("0" if given[0] != "[" else "") + {"[": "]"}.get(given[0], "}") * given[1])
    if kind == "repeat":
        return Raw("[" + ",".join([encode(given[0])] * given[1]) + "]")
    if kind == "keys":
        return Raw("{" + ",".join(f'"k{index}":{index}' for index in range(given[0])) + "}")
    items = truth if isinstance(truth, list) else [truth]
    if kind == "many":
        text = encode(items[0] if items else None)
        return Raw("[" + ",".join([text] * given[0]) + "]")
    return {
        "doubled": items + items,
        "reversed": items[::-1],
        "shorter": items[:-1],
        "longer": [*items, items[-1] if items else None],
    }[kind]


def encode(value: Any) -> str:
    """Return JSON; a `Raw` value is written as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{encode(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    return json.dumps(value)


# -- fields of messages


@dataclass(frozen=True)
class Place:
    """A place in a message: the keys that lead to it, and the type that belongs there."""

    keys: tuple[str | int, ...]
    annotation: Any


def places(message: type[BaseModel], above: tuple[str | int, ...] = ()) -> Iterator[Place]:
    """Yield every place of a message: its fields, the elements of lists and mappings, and those of messages in it."""
    for name, info in message.model_fields.items():
        yield from _places_below(info.annotation, (*above, name))


def _places_below(annotation: Any, keys: tuple[str | int, ...]) -> Iterator[Place]:
    yield Place(keys, annotation)
    kind = unwrapped(annotation)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from places(kind, keys)
    elif get_origin(kind) in (list, tuple):
        yield from _places_below(get_args(kind)[0], (*keys, 0))
    elif get_origin(kind) is dict:
        yield from _places_below(get_args(kind)[1], (*keys, "key"))


def unwrapped(annotation: Any) -> Any:
    """Return a type without `Annotated` and without None."""
    while True:
        arguments = get_args(annotation)
        if hasattr(annotation, "__metadata__"):
            annotation = annotation.__origin__
        elif get_origin(annotation) in (Union, types.UnionType):
            annotation = next(each for each in arguments if each is not type(None))
        else:
            return annotation


def is_table(annotation: Any) -> bool:
    """Return whether a type is a message or a mapping."""
    kind = unwrapped(annotation)
    return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))


def example(annotation: Any) -> Any:
    """Return a small value of a type, for a place that the true answer leaves empty."""
    kind = unwrapped(annotation)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: example(field.annotation) for name, field in kind.model_fields.items() if field.is_required()}
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) in (list, dict):
        return [] if get_origin(kind) is list else {}
    pattern = next((each.pattern for each in getattr(annotation, "__metadata__", ()) if hasattr(each, "pattern")), "")
    text = "0" * 64 if "{64}" in str(pattern) else "0" * 32 if "{32}" in str(pattern) else "a"
    return {bool: False, int: 1, float: 1.0}.get(kind, text)


def drawn_for(place: Place) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return the strategy of what to put into a place: mostly of the right type, else anything."""
    kind = unwrapped(place.annotation)
    if place.keys[-1] == "plain":
        return st.one_of(payload_texts, payload_texts, anything)
    if get_origin(kind) is Literal:
        return st.one_of(st.sampled_from(get_args(kind)).map(lambda each: ("is", each)), anything)
    if kind is bool:
        return st.one_of(_plain([True, False]), others)
    fitting = (
        containers
        if is_table(kind) or get_origin(kind) in (list, tuple)
        else numbers
        if kind in (int, float)
        else texts
    )
    return st.one_of(fitting, fitting, anything)


def _fields(operation: Operation) -> st.SearchStrategy[tuple[Any, ...]]:
    assert has_message(operation)
    found = [*places(operation.reply)]  # type: ignore[arg-type]
    return st.one_of([st.tuples(st.just(place.keys), drawn_for(place)) for place in found])


def _two_fields(operation: Operation) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(_fields(operation), _fields(operation))


def put(message: Any, keys: Sequence[str | int], value: tuple[Any, ...], annotation: Any) -> Any:
    """Return a message with a drawn value in a place; what is missing on the way there is filled with examples."""
    if not keys:
        return expand(value, message)
    key, *rest = keys
    kind = unwrapped(annotation)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        below: Any = kind.model_fields[str(key)].annotation
        message = dict(message) if isinstance(message, dict) else example(annotation)
        message[key] = put(message.get(key), rest, value, below)
        return message
    below = get_args(kind)[0 if isinstance(key, int) else 1]
    if isinstance(key, int):
        items = list(message) if isinstance(message, list) else []
        return [put(items[0] if items else example(below), rest, value, below), *items[1:]]
    mapping = dict(message) if isinstance(message, dict) else {}
    mapping["key"] = put(mapping.get("key"), rest, value, below)
    return mapping


def parsed(truth: Truth) -> Any:
    """Return the JSON of a true answer; {} of one without."""
    try:
        return json.loads(truth.body)
    except ValueError:
        return {}


@fault(_fields, fits=has_message, content=True, share=8)
def field(truth: Truth, keys: tuple[str | int, ...], value: tuple[Any, ...]) -> Iterator[Piece]:
    """One field of the message is wrong."""
    reply = OPERATION_NAMED[truth.operation].reply
    yield right(truth, encode(put(parsed(truth), keys, value, reply)).encode(), 200)
    yield KEEP


@fault(_two_fields, fits=has_message, content=True, share=2)
def two_fields(truth: Truth, one: tuple[Any, ...], other: tuple[Any, ...]) -> Iterator[Piece]:
    """Two fields are wrong, perhaps the same one."""
    reply, message = OPERATION_NAMED[truth.operation].reply, parsed(truth)
    for keys, value in (one, other):
        try:
            message = put(message, keys, value, reply)
        except (TypeError, ValueError, AttributeError, KeyError):  # the first one has left no place for the second
            continue
    yield right(truth, encode(message).encode(), 200)
    yield KEEP


def _names(operation: Operation) -> st.SearchStrategy[tuple[Any, ...]]:
    assert has_message(operation)
    return st.tuples(st.sampled_from([*operation.reply.model_fields]))  # type: ignore[union-attr]


@fault(_names, fits=has_message, content=True)
def missing_field(truth: Truth, name: str) -> Iterator[Piece]:
    """A field is left out."""
    message = parsed(truth)
    yield right(truth, encode({key: value for key, value in message.items() if key != name}).encode())
    yield KEEP


@fault(st.tuples(st.sampled_from(TEXTS), anything), fits=has_message, content=True)
def extra_field(truth: Truth, name: str, value: tuple[Any, ...]) -> Iterator[Piece]:
    """There is a field that the message does not have."""
    yield right(truth, encode({**parsed(truth), name: expand(value, None)}).encode())
    yield KEEP


@fault(_fields, fits=has_message, content=True)
def field_twice(truth: Truth, keys: tuple[str | int, ...], value: tuple[Any, ...]) -> Iterator[Piece]:
    """A field stands twice in the message, with two values."""
    text = encode(parsed(truth))
    yield right(truth, (text[:-1] + f",{json.dumps(keys[0])}:{encode(expand(value, None))}" + "}").encode())
    yield KEEP


# -- payloads of tasks and of objects

SKELETONS = (
    {"$": "tensor", "index": 0},
    {"$": "tensor", "index": -1},
    {"$": "tensor", "index": 2**70},
    {"$": "array", "index": 10**6},
    {"$": "scalar", "index": None},
    {"$": "stream", "index": 0},
    {"$": "registered", "type": "subprocess:Popen", "as": ["touch", "outside"]},
    {"$": "registered", "type": f"{CANARY}:run", "as": None},
    {"$": "registered", "type": f"{THIS_FILE}:Answer", "as": {}},
    {"$": "registered", "type": 1, "as": []},
    {"$": "tuple", "items": "abc"},
    {"$": "tuple"},
    {"$": "dict", "items": [[[], 1]]},
    {"$": "dict", "items": [[{"$": "dict", "items": []}, 1]]},
    {"$": "dict", "items": [[1]]},
    {"$": "dict", "items": [[{"$": "float", "value": "nan"}, 1]] * 3},
    {"$": "float", "value": "1e400"},
    {"$": "float", "value": 1},
    {"$": "bytes", "base64": "é"},
    {"$": "bytes", "base64": "A"},
    {"$": "bytearray", "base64": None},
    {"$": "ref", "text": REF},
    {"$": "ref", "text": "atoll-ref://[::1]:99999/x"},
    {"$": "ref", "text": "file:///etc/passwd"},
    {"$": "pickle", "base64": "gASVAAAAAAAAAAA="},
    {"$": ["tensor"]},
    {"$": {}},
    {"$": None},
    {"__reduce__": ["os.system", "touch outside"]},
)
payload_texts = st.one_of(
    st.sampled_from(SKELETONS).map(lambda each: ("is", json.dumps(each))),
    st.sampled_from(SKELETONS).map(lambda each: ("is", json.dumps({"w": each, "n": [each]}))),
    st.sampled_from(["[" * 90_000, '{"a":' * 90_000, "[" * 99 + "]" * 99, "[" * 102 + "]" * 102, "1" * 9_000]).map(
        lambda text: ("is", text)
    ),
    st.sampled_from(["", "NaN", "1e400", "-1e400", "{", "\x00", '"\\ud800"', "[1,]", '{"a":1,"a":2}']).map(
        lambda text: ("is", text)
    ),
)


# -- whole bodies

BODIES: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "text": b'"text"',
    "number": b"1" * 6_000,
    "html": b"<!doctype html><html><body>Welcome to nginx!</body></html>",
    "lines": b"x\r\n" + FORGED.encode() + b" line\r\n\x1b[2J",
    "zeros": bytes(70_000),
    "invalid UTF-8": b'{"a":"\xff\xfe"}',
    "UTF-16": json.dumps({"a": 1}).encode("utf-16"),
    "BOM": b"\xef\xbb\xbf{}",
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
    "open lists": b"[" * 100_000,
    "long text": b'"' + b"a" * 2**22 + b'"',
    "long list": b"[" + b"0," * 2**21 + b"0]",
    "many keys": b"{" + b",".join(b'"%d":0' % index for index in range(200_000)) + b"}",
    "spaces": b" " * 2**22 + b"{}",
    "pickle": b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
}


@fault(just(*BODIES), content=True)
def body(truth: Truth, name: str) -> Iterator[Piece]:
    """Another body, with the true status."""
    yield right(truth, BODIES[name])
    yield KEEP


@fault(st.tuples(st.floats(0, 1)), content=True)
def shorter_body(truth: Truth, at: float) -> Iterator[Piece]:
    """The body ends early, and Content-Length says so."""
    yield right(truth, truth.body[: int(at * len(truth.body))])
    yield KEEP


@fault(just(b" ", b"\x00", b"{}", b"]", b"a" * 65_536), content=True)
def longer_body(truth: Truth, more: bytes) -> Iterator[Piece]:
    """The body has more at its end, and Content-Length says so."""
    yield right(truth, truth.body + more)
    yield KEEP


@fault(st.tuples(st.floats(0, 1), st.integers(0, 7)), content=True, share=2)
def flipped_bit(truth: Truth, at: float, bit: int) -> Iterator[Piece]:
    """A bit of the body is flipped."""
    changed = bytearray(truth.body)
    if changed:
        changed[min(int(at * len(changed)), len(changed) - 1)] ^= 1 << bit
    yield right(truth, bytes(changed))
    yield KEEP


@fault(st.tuples(st.sampled_from(sorted(OPERATION_NAMED)), st.integers(0, 3)), content=True, others=True, share=2)
def swapped(truth: Truth, others: Sequence[Truth], name: str, number: int) -> Iterator[Piece]:
    """A true answer of another operation, or an older or later one of this operation."""
    found = [each for each in others if each.operation == name] or list(others)
    yield right(found[number % len(found)])
    yield KEEP


@fault(
    st.tuples(
        st.sampled_from([*sorted(BY_CODE), "unknown", "", "\x00", *NAMES[:4]]),
        st.sampled_from([*sorted({*STATUS_OF.values()}), 400, 500, 502, 503, 504, 599, 300, 399]),
        st.one_of(_plain([None, 0, 0.001, 1e-300, -1, 1e308, "raw:NaN", "raw:Infinity", 2**70, 1e9, 3600]), anything),
        st.one_of(_plain(["The server says so."]), texts),
    ),
    content=True,
    share=4,
)
def problem(truth: Truth, code: str, status: int, retry: tuple[Any, ...], text: tuple[Any, ...]) -> Iterator[Piece]:
    """An error, with a pause that is too long or no number, and a text that no terminal should see."""
    told = {
        "code": code,
        "message": expand(text, None),
        "remedy": expand(text, None),
        "retry_after_s": expand(retry, None),
    }
    yield right(truth, encode(told).encode(), status)
    yield KEEP


@fault(just(*sorted(STATUS_OF)), content=True)
def usual_problem(truth: Truth, code: str) -> Iterator[Piece]:
    """An error as the true server sends it, where it has no reason to."""
    told = {"code": code, "message": "The server says so.", "remedy": "Do something."}
    yield right(truth, encode(told).encode(), STATUS_OF[code])
    yield KEEP


# -- bytes of files


@fault(st.tuples(st.sampled_from([b"\x00", b"\xff", b"\x7f", b"{"])), fits=has_bytes, content=True, share=2)
def other_bytes(truth: Truth, byte: bytes) -> Iterator[Piece]:
    """As many bytes, all of them another one."""
    yield right(truth, byte * len(truth.body))
    yield KEEP


@fault(
    just("bytes 0-0/1", "bytes 5-4/3", "bytes */*", "bytes 0-18446744073709551615/*", "lines 1-2/3", "", "-" * 9_000),
    fits=has_bytes,
    content=True,
)
def content_range(truth: Truth, text: str) -> Iterator[Piece]:
    """The range is another one than was asked for."""
    yield right(truth, status=206, Content_Range=text)
    yield KEEP


@fault(just('"x"', "x", 'W/"x"', "", '"' + "0" * 64 + '"', "\t"), fits=has_bytes, content=True)
def etag(truth: Truth, text: str) -> Iterator[Piece]:
    """The file is another one than was asked for."""
    yield right(truth, ETag=text)
    yield KEEP


# -- status lines and headers

STATUSES = (
    *(0, -1, 99, 100, 101, 102, 103, 199, 200, 201, 202, 203, 204, 205, 206, 207, 226, 300, 301, 304, 305, 306, 399),
    *(400, 401, 402, 403, 404, 405, 407, 408, 409, 410, 411, 413, 416, 418, 421, 422, 425, 426, 429, 431, 451),
    *(500, 501, 502, 503, 504, 505, 507, 511, 520, 599, 600, 999, 1000, "abc", "", "2OO", "200.5", "+200"),
)


@fault(st.tuples(st.sampled_from(STATUSES), st.sampled_from(["true", "empty", "html", "list"])), share=2)
def status(truth: Truth, code: object, name: str) -> Iterator[Piece]:
    """Another status, with the true body or another one."""
    yield right(truth, truth.body if name == "true" else BODIES[name], code)


LOCATIONS = (
    "file:///etc/passwd",
    "http://127.0.0.1:9/v1/run",
    "https://127.0.0.1:9/v1/run",
    "//127.0.0.1:9/",
    "ftp://127.0.0.1:9/",
    "gopher://127.0.0.1:9/_x",
    "/",
    "",
    "?",
    "http://[::1",
    "http://",
    "http://user:secret@127.0.0.1:9/",
    f"{CANARY}:run",
    "\x01\x02",
    "a" * 60_000,
)


@fault(st.tuples(st.sampled_from([300, 301, 302, 303, 307, 308, 201]), st.sampled_from(LOCATIONS)), share=2)
def redirect(truth: Truth, code: int, location: str) -> Iterator[Piece]:
    """The answer is somewhere else."""
    yield right(truth, b"", code, Location=location)


FIRST_LINES: dict[str, bytes] = {
    "SSH": b"SSH-2.0-OpenSSH_9.6p1 Ubuntu-3ubuntu13\r\n",
    "TLS alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "SMTP": b"220 mail.example ESMTP Postfix\r\n",
    "Redis": b"-ERR unknown command\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 status": b"HTTP/2 200\r\ncontent-length: 2\r\n\r\n{}",
    "HTTP/0.9": b"{}",
    "HTTP/9.9": b"HTTP/9.9 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "ICY": b"ICY 200 OK\r\n\r\n",
    "RTSP": b"RTSP/1.0 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "spaces": b"HTTP/1.1   200   OK\r\nContent-Length: 2\r\n\r\n{}",
    "blank lines": b"\r\n" * 50 + b"HTTP/1.1 200 OK\r\n\r\n",
    "zeros": bytes(500),
    "lines feeds": b"\n\n\n\n",
    "one long line": b"A" * 2**20,
    "long reason": b"HTTP/1.1 200 " + b"A" * 70_000 + b"\r\n\r\n",
    "forged": b"HTTP/1.1 500 x\x1b[2J\r\n" + FORGED.encode() + b" line\r\n\r\n",
    "not ASCII": "HTTP/1.1 200 été\r\n\r\n".encode(),
    "NUL": b"HTTP/1.1\x00200\x00OK\r\n\r\n",
    "carriage returns": b"HTTP/1.1 200 OK\rContent-Length: 2\r\r{}",
    "only a feed": b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
}


@fault(st.tuples(st.sampled_from([*FIRST_LINES]), st.booleans()), share=2)
def first_line(truth: Truth, name: str, stays: bool) -> Iterator[Piece]:
    """What answers is no HTTP, or not the HTTP of the request."""
    yield FIRST_LINES[name]
    if stays:
        yield 1.0


@fault(st.tuples(st.integers(0, 20), st.integers(0, 7)), share=2)
def flipped_bit_of_the_head(truth: Truth, at: int, bit: int) -> Iterator[Piece]:
    """A bit of the first line or of a header is flipped."""
    message = bytearray(right(truth))
    message[at] ^= 1 << bit
    yield bytes(message)


LENGTHS = (
    *("0", "1", "-1", "-0", "+5", "abc", "", " ", "1e3", "0x10", "5, 5", "5,6", "5 5", "1" * 40, "9" * 5_000, "٣", "²"),
    *("-9223372036854775808", "9223372036854775807", "9223372036854775808", "18446744073709551616", "NaN", "1.0"),
)


@fault(st.one_of(just(*LENGTHS), st.integers(-3, 3).map(lambda more: (more,))), share=3)
def length(truth: Truth, value: str | int) -> Iterator[Piece]:
    """Content-Length is wrong, or no number."""
    value = str(len(truth.body) + value) if isinstance(value, int) else value
    yield right(truth, Content_Length=value)


@fault(st.tuples(st.integers(0, 70_000), st.integers(0, 70_000)))
def two_lengths(truth: Truth, one: int, other: int) -> Iterator[Piece]:
    """There are two of Content-Length."""
    kept = [*truth.headers, ("Content-Length", str(one)), ("Content-Length", str(other))]
    yield head(truth.status, kept) + truth.body


@fault(just("gzip", "gzip, chunked", "chunked, chunked", "identity", "Chunked ", "xchunked", "", "chunked\x0b"))
def transfer_encoding(truth: Truth, text: str) -> Iterator[Piece]:
    """The body travels in a way that was not asked for."""
    yield right(truth, Transfer_Encoding=text)


HEADERS: dict[str, list[bytes]] = {
    "many": [b"X-%d: 1\r\n" % index for index in range(5_000)],
    "a hundred": [b"X-%d: 1\r\n" % index for index in range(99)],
    "long": [b"X: " + b"a" * 2**20 + b"\r\n"],
    "64 KiB": [b"X: " + b"a" * 65_500 + b"\r\n"],
    "folded": [b"X: a\r\n", b" b\r\n" * 1_000],
    "no colon": [b"nonsense\r\n"],
    "no name": [b": 1\r\n"],
    "NUL": [b"X: a\x00b\r\n"],
    "not ASCII": [b"X: \xff\xfe\r\n", b"\xff: 1\r\n"],
    "cookies": [b"Set-Cookie: a=b; Domain=127.0.0.1\r\n"] * 90,
    "close": [b"Connection: close\r\n", b"Connection: keep-alive\r\n"],
    "upgrade": [b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n"],
    "retry": [b"Retry-After: 99999999999999999999\r\n"],
    "refresh": [b"Refresh: 0; url=http://127.0.0.1:9/\r\n"],
    "type": [b"Content-Type: application/x-python-pickle\r\n"],
    "charset": [b"Content-Type: application/json; charset=" + CANARY.encode() + b"\r\n"],
}


@fault(st.tuples(st.sampled_from([*HEADERS]), st.sampled_from([None, 500])))
def header(truth: Truth, name: str, code: int | None) -> Iterator[Piece]:
    """There are headers that no server sends."""
    message = right(truth, status=code)
    first, _, rest = message.partition(b"\r\n")
    yield first + b"\r\n" + b"".join(HEADERS[name]) + rest


@fault(st.just(()))
def endless_headers(truth: Truth) -> Iterator[Piece]:
    """Header follows header, without an end."""
    yield head(truth.status, truth.headers)[:-2]
    for _ in range(FLOOD_BYTES // 2**16):
        yield b"X-Header: " + b"a" * (2**16 - 12) + b"\r\n"


@fault(st.tuples(st.sampled_from([1, 50, 300_000]), st.sampled_from([100, 102, 103])))
def interim(truth: Truth, count: int, code: int) -> Iterator[Piece]:
    """Interim answers come before the answer, few or without an end."""
    for _ in range(0, count, 50):
        yield head(code, [], "Continue") * min(count, 50)
    yield right(truth)
    yield KEEP


# -- bodies that are cut, slow, endless or compressed


@fault(st.tuples(st.floats(0, 1), st.booleans()), share=3)
def cut(truth: Truth, at: float, resets: bool) -> Iterator[Piece]:
    """The connection ends within the answer, at any place."""
    message = right(truth)
    yield message[: int(at * len(message))]
    if resets:
        yield RESET


@fault(just(True, False))
def no_answer(truth: Truth, resets: bool) -> Iterator[Piece]:
    """The connection ends instead of an answer."""
    if resets:
        yield RESET


@fault(st.tuples(st.sampled_from(["head", "body"]), st.sampled_from([0.02, 0.3])), share=2)
def slow(truth: Truth, what: str, pause_s: float) -> Iterator[Piece]:
    """The answer comes byte by byte."""
    message = right(truth)
    begin = len(message) - len(truth.body) if what == "body" else 0
    yield message[:begin]
    for offset in range(begin, len(message)):
        yield message[offset : offset + 1]
        yield pause_s


@fault(st.tuples(st.floats(0, 1)))
def silent(truth: Truth, at: float) -> Iterator[Piece]:
    """The answer stops, and the connection stays."""
    message = right(truth)
    yield message[: int(at * len(message))]
    yield 1e9


@fault(just("length", "chunks", "small chunks", "until the end"), share=2)
def endless(truth: Truth, how: str) -> Iterator[Piece]:
    """The body has no end."""
    headers = {"length": ("Content-Length", str(2**40)), "until the end": ("Connection", "close")}
    yield head(truth.status, [*truth.headers, headers.get(how, ("Transfer-Encoding", "chunked"))])
    block = b" " * 2**16
    if how == "chunks":
        block = b"10000\r\n" + block + b"\r\n"
    if how == "small chunks":
        block = b"1\r\n \r\n" * 10_000
    for _ in range((FLOOD_BYTES if how != "small chunks" else 2**24) // len(block)):
        yield block


CHUNKS = (
    *(b"FFFFFFFFFFFFFFFF\r\n", b"F" * 40 + b"\r\n", b"-5\r\n{}", b"zz\r\n{}", b"\r\n\r\n", b"0x5\r\n{}", b" 5 \r\n{}"),
    *(b"2;ext=" + b"a" * 100_000 + b"\r\n{}\r\n0\r\n\r\n", b"2\r\n{}", b"2\r\n{}XX0\r\n\r\n"),
    *(b"0\r\n" + b"T: x\r\n" * 5_000, b"2\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n", b"1" * 70_000),
)


@fault(just(*CHUNKS))
def chunks(truth: Truth, data: bytes) -> Iterator[Piece]:
    """A chunked body with wrong sizes."""
    yield head(truth.status, [*truth.headers, ("Transfer-Encoding", "chunked")]) + data


@functools.cache
def bomb(encoding: str, nbytes: int) -> bytes:
    """Return few bytes that become many spaces."""
    block = b" " * 2**20
    if encoding == "deflate":
        packer: Any = zlib.compressobj(9)
        return b"".join([*(packer.compress(block) for _ in range(nbytes >> 20)), packer.flush()])
    packed = gzip.compress(block, 9)
    return packed * (nbytes >> 20)  # members of one file follow each other


@fault(
    st.tuples(
        st.sampled_from(["gzip", "deflate", "br", "zstd", "x-gzip", "gzip, gzip", "gzip, " * 50 + "gzip", "identity"]),
        st.sampled_from([0, FLOOD_BYTES]),
        st.sampled_from([None, 404, 500]),
    ),
    share=2,
)
def content_encoding(truth: Truth, encoding: str, nbytes: int, code: int | None) -> Iterator[Piece]:
    """The body is compressed, which was not asked for; perhaps very much."""
    data = b""
    if nbytes:
        data = bomb("deflate" if encoding == "deflate" else "gzip", nbytes)
    data += gzip.compress(truth.body)
    yield right(truth, data, code, Content_Encoding=encoding)


@fault(just(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"{}", b"\x00" * 70_000))
def unasked(truth: Truth, more: bytes) -> Iterator[Piece]:
    """Behind the answer stands what was not asked for."""
    yield right(truth) + more
    yield KEEP


def every_fault(operation: Operation) -> Mapping[str, Fault]:
    """Return the faults that an operation can have."""
    return {name: each for name, each in FAULTS.items() if each.fits(operation)}
