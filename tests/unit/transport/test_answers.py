"""What a client makes of answers that no server of Atoll sends: an error of Atoll, in bounded time and memory."""

from __future__ import annotations

import gc
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest
from blake3 import blake3
from harness.process_figures import Peaks
from kit.peers import Connection, Peer
from pydantic import BaseModel

import atoll
import atoll.objects
from atoll.errors import AtollError, BadRequest, Busy, PartCorrupt, ServerUnreachable, TransferStalled, VersionSkew
from atoll.protocol import messages, routes, status_messages, swarm_messages, task_messages
from atoll.protocol.messages import VersionManifest
from atoll.protocol.openapi import OPERATIONS
from atoll.protocol.read_message import read_message
from atoll.tensors.fragments import Split
from atoll.tensors.layout import Part
from atoll.tensors.schema import Schema, TensorSpec
from atoll.transport import answer, object_client
from atoll.transport.answer import Pace, TooSlow
from atoll.transport.http_client import Http
from atoll.transport.part_connection import PartConnection
from atoll.transport.part_transfer import HttpTransfer

pytestmark = pytest.mark.covers("X9")

MOST_MB = 64


def raw(data: bytes) -> Callable[[Connection], None]:
    """Answer every request with these bytes, and end the connection."""

    def serve(connection: Connection) -> None:
        if connection.request():
            connection.sock.sendall(data)

    return serve


def endless(head: bytes, piece: bytes) -> Callable[[Connection], None]:
    """Answer with a beginning, then with the same piece for ever."""

    def serve(connection: Connection) -> None:
        if connection.request():
            connection.sock.sendall(head)
            for _ in count():
                connection.sock.sendall(piece)

    return serve


def trickling(data: bytes) -> Callable[[Connection], None]:
    """Answer with these bytes, then with a space now and then, more often than the timeout of a read."""

    def serve(connection: Connection) -> None:
        if connection.request():
            connection.sock.sendall(data)
            while not peers[-1].ended.wait(0.02):
                connection.sock.sendall(b" ")

    return serve


def ok(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = "".join(f"{each}\r\n" for each in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers))
    return head.encode() + b"\r\n" + body


peers: list[Peer] = []


@contextmanager
def client(serve: Callable[[Connection], None]) -> Iterator[Http]:
    """A client of a peer that serves its connections in this way."""
    with Peer(serve) as peer, closing(Http(peer.url)) as http:
        peers.append(peer)
        yield http


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
NO_SERVER = "There is no Atoll server at"

ANSWERS: dict[str, tuple[Callable[[Connection], None], type[AtollError], str]] = {
    "ssh": (raw(b"SSH-2.0-OpenSSH_9.2p1\r\n"), ServerUnreachable, f"{NO_SERVER} .*'SSH-2.0-OpenSSH_9.2p1'"),
    "TLS alert": (raw(b"\x15\x03\x01\x00\x02\x02\x46"), ServerUnreachable, f"{NO_SERVER} .* needs https://"),
    "smtp": (raw(b"220 mail ESMTP\r\n"), ServerUnreachable, NO_SERVER),
    "one flipped bit": (raw(b"HTTQ/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"), ServerUnreachable, NO_SERVER),
    "binary": (raw(bytes(range(256)) + b"\n"), ServerUnreachable, NO_SERVER),
    "line feeds": (raw(b"\n\n\n\n"), ServerUnreachable, NO_SERVER),
    "no status": (raw(b"HTTP/1.1\r\n\r\n"), ServerUnreachable, NO_SERVER),
    "status of letters": (raw(b"HTTP/1.1 abc OK\r\n\r\n"), ServerUnreachable, NO_SERVER),
    "status 2000": (raw(b"HTTP/1.1 2000 OK\r\n\r\n"), ServerUnreachable, NO_SERVER),
    "HTTP/3": (raw(b"HTTP/3 200 OK\r\n\r\n"), ServerUnreachable, NO_SERVER),
    "nothing": (raw(b""), ServerUnreachable, "does not answer"),
    "cut status line": (raw(b"HTTP/1.1 2"), ServerUnreachable, "does not answer"),
    "cut head": (raw(HEAD + b"Content-Le"), ServerUnreachable, "does not answer"),
    "cut body": (raw(HEAD + b"Content-Length: 9\r\n\r\n{"), ServerUnreachable, "does not answer"),
    "cut chunk": (raw(CHUNKED + b"9\r\n{"), ServerUnreachable, "does not answer"),
    "chunk of no number": (raw(CHUNKED + b"xyz\r\n{}\r\n0\r\n\r\n"), ServerUnreachable, "does not answer"),
    "chunk of -5": (raw(CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n"), BadRequest, "malformed chunks"),
    "chunk of -1": (endless(CHUNKED + b"-1\r\n", b"x" * 65536), BadRequest, "too long"),
    "huge chunk": (raw(CHUNKED + b"7" + b"f" * 15 + b"\r\n{}"), ServerUnreachable, "does not answer"),
    "endless chunks": (
        endless(CHUNKED, b"4000\r\n" + b" " * 16384 + b"\r\n"),
        BadRequest,
        "more than 65536 bytes|too long",
    ),
    "endless trailers": (endless(CHUNKED + b"0\r\n", b"a: b\r\n" * 99), BadRequest, "too long"),
    "endless chunk line": (endless(CHUNKED + b"1;", b"x" * 4096), BadRequest, "malformed chunks|too long"),
    "endless body": (endless(HEAD + b"\r\n", b" " * 65536), BadRequest, "more than 65536 bytes|too long"),
    "endless line": (endless(b"HTTP/1.1 200 ", b"x" * 4096), BadRequest, "too long"),
    "endless header": (endless(HEAD + b"A: ", b"x" * 4096), BadRequest, "too long"),
    "endless headers": (endless(HEAD, b"A: b\r\n" * 999), BadRequest, "malformed head"),
    "endless status 100": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99), BadRequest, "too long"),
    "early hints": (raw(b"HTTP/1.1 103 Early Hints\r\n\r\n"), BadRequest, "malformed head"),
    "header without a colon": (raw(HEAD + b"what is this\r\n\r\n"), BadRequest, "malformed head"),
    "length -5": (raw(HEAD + b"Content-Length: -5\r\n\r\n{}"), BadRequest, "unclear length .'-5'"),
    "length of letters": (raw(HEAD + b"Content-Length: two\r\n\r\n{}"), BadRequest, "unclear length .'two'"),
    "length of 5,000 digits": (raw(HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}"), BadRequest, "unclear"),
    "two lengths": (raw(ok(b"{}", "Content-Length: 3")), BadRequest, "unclear length .'2, 3'"),
    "length and chunks": (raw(ok(b"{}", "Transfer-Encoding: chunked")), BadRequest, "unclear length"),
    "huge length": (raw(HEAD + b"Content-Length: 99999999999\r\n\r\n{}"), BadRequest, "of 99999999999 bytes"),
    "unknown coding": (raw(HEAD + b"Transfer-Encoding: gzip\r\n\r\n"), BadRequest, "transfer encoding 'gzip'"),
    "gzip": (raw(ok(b"\x1f\x8b" * 9, "Content-Encoding: gzip")), BadRequest, "encoding 'gzip', which was not asked"),
    "zstd": (raw(ok(b"{}", "Content-Encoding: zstd")), BadRequest, "encoding 'zstd', which was not asked"),
    "redirect": (
        raw(ok(b"", "Location: https://evil.example/\x1b[2J", status="301 Moved")),
        BadRequest,
        r"redirects to 'https://evil.example/\\x1b\[2J'. Atoll follows no redirects",
    ),
    "redirect to nowhere": (raw(ok(b"", status="302 Found")), BadRequest, "HTTP status 302"),
    "long redirect": (raw(ok(b"", f"Location: /{'x' * 9000}", status="307 No")), BadRequest, "redirects to"),
    "long error": (raw(ok(b"x" * 70000, status="500 No")), BadRequest, "of 70000 bytes"),
    "endless error": (endless(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 4096), BadRequest, "more than 65536 bytes|too long"),
    "trickling head": (trickling(HEAD + b"A: "), TransferStalled, "too slow"),
    "trickling body": (trickling(HEAD + b"Content-Length: 9999\r\n\r\n{"), TransferStalled, "too slow"),
    "trickling error": (trickling(b"HTTP/1.1 500 No\r\n\r\n"), TransferStalled, "too slow"),
}


def refused(ask: Callable[[], object]) -> AtollError:
    """The error that a call raises. It is one short line, and the call takes little memory."""
    peaks = Peaks()
    peaks.begin(os.getpid())
    try:
        with pytest.raises(AtollError) as caught:
            ask()
    finally:
        peaks.close()
    assert peaks.peak_mb(os.getpid()) < MOST_MB
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 5000
    return caught.value


@pytest.mark.parametrize("case", ANSWERS)
def test_a_malformed_answer_is_a_short_error(case: str) -> None:
    """A malformed, endless or very slow answer raises an error of one short line and takes little memory."""
    serve, kind, text = ANSWERS[case]
    with client(serve) as http:
        error = refused(lambda: http.get(routes.HEARTBEAT, messages.HeartbeatReply, timeout_s=0.3))
    assert type(error) is kind, error
    assert re.search(text, str(error)), error


def test_a_body_in_very_small_chunks_is_refused() -> None:
    """A body in very small chunks is refused. The manifest of an object may have 24 MiB."""
    # In chunks of one byte, it would take a minute to read.
    with client(raw(CHUNKED + b"1\r\n \r\n" * 500_000 + b"0\r\n\r\n")) as http:
        error = refused(lambda: http.get(routes.OBJECT.format(object="0" * 32), messages.BlobManifest))
    assert type(error) is BadRequest
    assert "very small chunks" in str(error)


def test_a_large_body_in_chunks_is_read() -> None:
    """A client reads a large HTTP body that is sent in chunks."""
    text = b'{"finished":true,"durable_versions":[]' + b" " * 5_000_000 + b"}"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in pieces(text, 1000))
    with client(raw(CHUNKED + chunks + b"0\r\n\r\n")) as http:
        reply = http.fetch(routes.SCHEMA, messages.HeartbeatReply.model_validate_json, "HeartbeatReply")
    assert reply.finished


def pieces(text: bytes, nbytes: int) -> list[bytes]:
    return [text[start : start + nbytes] for start in range(0, len(text), nbytes)]


# -- bodies that are no message


DEEP = 10_000
MEGABYTE = 2**20


def filled(text: bytes, begin: bytes, end: bytes, nbytes: int) -> bytes:
    """A JSON list with as many repetitions of a text as fit."""
    return begin + b",".join([text] * (nbytes // (len(text) + 1))) + end


BODIES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"<html>",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "nested lists": b'{"finished":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "nested objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "huge number": b'{"finished":' + b"9" * 60_000 + b"}",
    "NaN": b'{"finished":NaN,"durable_versions":[NaN]}',
    "infinity": b'{"finished":true,"durable_versions":[1e999]}',
    "negative": b'{"finished":true,"durable_versions":[-1]}',
    "invalid UTF-8": b'{"finished":true,"durable_versions":[],"\xff\xfe":1}',
    "lone surrogate": b'{"finished":true,"durable_versions":["\\ud800"]}',
    "escapes": b'{"\\u001b[2J\\nforged":1,"finished":true,"durable_versions":[]}',
    "long key": b'{"' + b"k" * 60_000 + b'":1,"finished":true,"durable_versions":[]}',
    "wrong type": b'{"finished":"yes","durable_versions":{}}',
    "many keys": b"{" + b",".join(b'"%d":1' % number for number in range(7000)) + b"}",
    "many wrong values": filled(b"{}", b'{"finished":true,"durable_versions":[', b"]}", 60_000),
    "unknown key": b'{"finished":true,"durable_versions":[],"more":1}',
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_without_message_is_a_short_error(case: str) -> None:
    """A body that is not a valid message raises `VersionSkew` with one short line."""
    with client(raw(ok(BODIES[case]))) as http:
        error = refused(lambda: http.get(routes.HEARTBEAT, messages.HeartbeatReply))
    assert type(error) is VersionSkew
    assert "is not a valid HeartbeatReply" in str(error)


LARGE = {
    "manifest of lists": (routes.MANIFEST, VersionManifest, b"[]", b'{"part_digests":[', b"]}"),
    "manifest of numbers": (routes.MANIFEST, VersionManifest, b"1", b'{"part_digests":[', b"]}"),
    "manifest of keys": (routes.MANIFEST, VersionManifest, b'"a":1', b"{", b"}"),
    "ticket of objects": (routes.TICKET, messages.TicketState, b"{}", b'{"parts":[', b"]}"),
    "object of strings": (routes.OBJECT, messages.BlobManifest, b'"a"', b'{"part_digests":[', b"]}"),
    "status of workers": (routes.STATUS, status_messages.Status, b"{}", b'{"workers":[', b"]}"),
    "status of metrics": (routes.STATUS, status_messages.Status, b'"a":""', b'{"tasks":{', b"}}"),
    "status of strings": (routes.STATUS, status_messages.Status, b'"a"', b'{"warnings":[', b"]}"),
    "task of keys": (routes.TASKS, task_messages.TaskReply, b'"a":1', b"{", b"}"),
    "orders of orders": (routes.SWARM, swarm_messages.PeerWork, b"{}", b'{"hold":[', b"]}"),
    "string without an end": (routes.TASKS, task_messages.TaskReply, b'\\"', b'{"a":"', b""),
}


@pytest.mark.parametrize("case", LARGE)
def test_large_answers_take_little_memory(case: str) -> None:
    """A large answer with many wrong values is refused and takes little memory.

    pydantic takes up to 3 kB for an empty object that is wrong, so 8 MB of them would take 8 GB.
    """
    path, kind, text, begin, end = LARGE[case]
    body = ok(filled(text, begin, end, 7 * MEGABYTE))
    with client(raw(body)) as http:
        error = refused(lambda: http.get(path.format(ticket=1, fragment=0, version=1, object="0" * 32), kind))
    assert type(error) in (VersionSkew, BadRequest)


ENTRY = '{{"name":"model.layers.{0}.weight","dtype":"BF16","shape":[4096,4096],"group":"params"}}'


def schema_body(count: int, *, aliases: str = "[]", fragments: str = "[]", entry: str = ENTRY) -> bytes:
    tensors = ",".join(entry.format(number) for number in range(count))
    return f'{{"tensors":[{tensors}],"aliases":{aliases},"fragments":{fragments}}}'.encode()


def test_large_schemas_take_little_memory() -> None:
    """Reading a schema of 100,000 tensors takes little memory."""
    body = schema_body(100_000)
    peaks = Peaks()
    peaks.begin(os.getpid())
    split = messages.SchemaMessage.split_in(body)
    digest = split.schema.digest
    peaks.close()
    assert peaks.peak_mb(os.getpid()) < MOST_MB
    assert len(split.schema.tensors) == 100_000
    assert split.schema.tensors[7] == TensorSpec("model.layers.7.weight", "BF16", (4096, 4096))
    assert digest == Schema(split.schema.tensors).digest


def test_a_schema_is_read_as_it_is_written() -> None:
    """A schema is equal after it was written as JSON and read, with and without indentation."""
    schema = Schema.build(
        [TensorSpec('a"b{}[],\\:é', "F32", (2, 3)), TensorSpec("c", "I64", (), "buffers")], {"tied": "c"}
    )
    for split in (Split.whole(schema), Split(schema, (1, 0))):
        message = messages.SchemaMessage.of(split)
        for text in (message.model_dump_json(), message.model_dump_json(indent=2)):
            assert messages.SchemaMessage.split_in(text.encode()) == split


MILLION = b""
"""Stands for the schema of a million tensors, which takes a second to make: not in each process that collects tests."""
BAD_SCHEMAS = {
    "tensors twice": (b'{"tensors":[],"tensors":[]}', VersionSkew, "the key tensors occurs twice"),
    "a name twice": (
        schema_body(1, entry=ENTRY.replace("{{", '{{"name":"x",', 1)),
        VersionSkew,
        'key "name" occurs twice',
    ),
    "a million tensors": (MILLION, BadRequest, "at most 16777216 are allowed"),
    "unknown dtype": (schema_body(1, entry=ENTRY.replace("BF16", "X\\n99")), VersionSkew, "dtype 'X.*99' is not"),
    "name of two lines": (schema_body(1, entry=ENTRY.replace("model", "a\\nb")), VersionSkew, "unprintable"),
    "long name": (schema_body(1, entry=ENTRY.replace("model", "m" * 2000)), VersionSkew, "name: "),
    "overflowing shape": (schema_body(1, entry=ENTRY.replace("4096", str(2**40))), VersionSkew, "too many elements"),
    "negative shape": (schema_body(1, entry=ENTRY.replace("4096", "-1")), VersionSkew, "shape.0"),
    "1,000 dimensions": (schema_body(1, entry=ENTRY.replace("4096", "1" + ",1" * 999)), VersionSkew, "shape"),
    "fragment 2^61": (schema_body(2, fragments=f"[0,{2**61}]"), VersionSkew, "fragment of each tensor"),
    "fragment of 5,000 digits": (schema_body(1, fragments="[" + "9" * 5000 + "]"), VersionSkew, "fragments"),
    "nested": (b'{"tensors":' + b"[" * DEEP, VersionSkew, "tensors"),
    "deep entry": (b'{"tensors":[{"name":' + b"[" * DEEP, VersionSkew, "tensors"),
    "cut": (schema_body(3)[:-20], VersionSkew, "list"),
    "no object": (b"[]", VersionSkew, "object of lists"),
    "more behind": (schema_body(1) + b"{}", VersionSkew, "object of lists"),
    "unknown key": (b'{"more":[1]}', VersionSkew, "more"),
    "one large entry": (schema_body(1, entry=ENTRY.replace("model", "m" * 70_000)), VersionSkew, "tensors"),
}


@pytest.mark.parametrize("case", BAD_SCHEMAS)
def test_an_impossible_schema_is_a_short_error(case: str) -> None:
    """A schema that no server sends raises an error of one short line."""
    body, kind, text = BAD_SCHEMAS[case]
    with client(raw(ok(body or schema_body(1_000_000)))) as http:
        error = refused(lambda: http.fetch(routes.SCHEMA, messages.SchemaMessage.split_in, "SchemaMessage"))
    assert type(error) is kind
    assert re.search(text, str(error)), error


RETRIES = {"NaN": None, "Infinity": 300.0, "-1": None, "1e308": 300.0, "7.5": 7.5, '"soon"': None, "null": None}


@pytest.mark.parametrize("text", RETRIES)
def test_requested_pauses_are_bounded(text: str) -> None:
    """A pause that an answer asks for is at most 300 s. An invalid pause is ignored."""
    body = f'{{"code":"busy","message":"later","retry_after_s":{text}}}'.encode()
    with client(raw(ok(body, status="429 Busy"))) as http:
        with pytest.raises(Busy) as caught:
            http.get(routes.HEARTBEAT, messages.HeartbeatReply)
    assert caught.value.retry_after_s == RETRIES[text]


PROBLEMS = {
    "no JSON": b"\x1b[2J\nforged",
    "nested": b"[" * DEEP,
    "long": b'{"code":"busy","message":"' + b"m" * 60_000 + b'"}',
    "unknown code": b'{"code":"\\u001b","message":"m"}',
    "code of another error": b'{"code":"sync_failed","message":"m"}',
}


@pytest.mark.parametrize("case", PROBLEMS)
@pytest.mark.parametrize("status", [400, 404, 409, 500, 507, 999])
def test_a_malformed_error_body_is_a_short_error(case: str, status: int) -> None:
    """If the body of an error answer is malformed, the client raises an error of one short line, whatever the HTTP
    status.
    """
    with client(raw(ok(PROBLEMS[case], status=f"{status} No"))) as http:
        refused(lambda: http.get(routes.HEARTBEAT, messages.HeartbeatReply))


# -- fields of messages


RUN_INFO: dict[str, object] = {
    "protocol": 1,
    "run": "r",
    "name": "n",
    "algorithm": "fedavg",
    "on_missed": "rebase",
    "rounds": 1,
    "sync_every": 1,
    "schema_digest": "0" * 64,
    "fragments": 1,
    "codec": "none",
    "part_bytes": 2**20,
    "connections": 2,
    "heartbeat_interval_s": 1.0,
    "heartbeat_timeout_s": 1.0,
    "idle_timeout_s": 1.0,
}
TICKET = {"id": 1, "fragment": 0, "round": 1, "base_version": 0, "base_digest": "0" * 64, "layout_digest": "0" * 64}
OUTCOME = {"ticket": 1, "state": "counted", "base_version": 3}
REPLY = {"status": "wait", "head_version": 1, "head_digest": "0" * 64}
MANIFEST = {"version": 2, "digest": "0" * 64, "part_digests": []}
DELTA = {"base_version": 2, "base_digest": "0" * 64, "digest": "0" * 64, "part_digests": []}

TIMES = [-1.0, 1e-300, 1e308]
FIELDS: list[tuple[type[BaseModel], dict[str, object], str, list[object]]] = [
    (messages.RunInfo, RUN_INFO, "heartbeat_interval_s", TIMES),
    (messages.RunInfo, RUN_INFO, "heartbeat_timeout_s", [-1.0, 1e308]),
    (messages.RunInfo, RUN_INFO, "idle_timeout_s", [0.0, *TIMES]),
    (messages.RunInfo, RUN_INFO, "connections", [0, 2**40]),
    (messages.RunInfo, RUN_INFO, "part_bytes", [1, 2**40]),
    (messages.RunInfo, RUN_INFO, "ranks", [0, 2**40]),
    (messages.RunInfo, RUN_INFO, "fragments", [0, 1025, 2**70]),
    (messages.RunInfo, RUN_INFO, "max_inflight", [0, 1025, 2**70]),
    (messages.RunInfo, RUN_INFO, "sync_every", [-1, 10**13]),
    (messages.RunInfo, RUN_INFO, "tau", [-1, 10**13]),
    (messages.RunInfo, RUN_INFO, "codec_options", [{"a b": 1}, {"k": "x" * 2000}, {"k": 1e301}, {"k": [[1]]}]),
    (messages.Ticket, TICKET, "local_steps", [-1, 10**13]),
    (messages.RunInfo, RUN_INFO, "protocol", [-1, 2**70]),
    (messages.RunInfo, RUN_INFO, "local", [{"k" * 65: 1.0}, {str(key): 1.0 for key in range(65)}]),
    (messages.RunInfo, RUN_INFO, "run", ["../x", "a\nb", ""]),
    (messages.Joined, {}, "lease", ["a:1:x\r\nHost: evil", "a:1:x\n", "é:1:x", "x" * 300]),
    (messages.TicketReply, REPLY, "status", ["ticket", "other"]),
    (messages.TicketReply, REPLY, "ticket", [TICKET]),
    (messages.Outcome, OUTCOME, "version", [3, 2]),
    (messages.TicketState, {"outcome": OUTCOME, "part_digests": []}, "parts", [[1]]),
    (messages.VersionManifest, MANIFEST, "delta", [DELTA, DELTA | {"base_version": 2**61}]),
    (messages.ObjectOpened, {"object": "0" * 32, "secret": "0" * 32}, "expires_s", [-1.0, 1e308]),
    (task_messages.TaskReply, {}, "status", ["task", "other"]),
]


@pytest.mark.parametrize(
    ("kind", "others", "name", "values"), FIELDS, ids=[f"{row[0].__name__}.{row[2]}" for row in FIELDS]
)
def test_a_value_out_of_bounds_is_refused(
    kind: type[BaseModel], others: dict[str, object], name: str, values: list[object]
) -> None:
    """If a server's answer has a number or a list beyond its bound, the client refuses the answer."""
    for value in values:
        with pytest.raises(ValueError, match=r"\w"):
            read_message(kind, json.dumps(others | {name: value}).encode())


REPLIES = {each.reply for each in OPERATIONS if isinstance(each.reply, type) and issubclass(each.reply, BaseModel)}


@pytest.mark.parametrize("kind", sorted(REPLIES, key=lambda kind: kind.__name__))
def test_all_values_in_answers_have_bounds(kind: type[BaseModel]) -> None:
    """Each integer, list and table in the answers of a server has a bound."""

    def unbounded(value: object, place: str) -> Iterator[str]:
        if isinstance(value, list):
            for number, each in enumerate(value):
                yield from unbounded(each, f"{place}.{number}")
        if not isinstance(value, dict):
            return
        limits = {"integer": {"maximum", "exclusiveMaximum"}, "array": {"maxItems"}}.get(value.get("type"), set())
        if isinstance(value.get("additionalProperties"), dict):
            limits = {"maxProperties"}
        if limits and not limits & value.keys():
            yield place
        for key, each in value.items():
            yield from unbounded(each, f"{place}.{key}")

    assert [*unbounded(kind.model_json_schema(), kind.__name__)] == []


@pytest.mark.parametrize("number", [1e13, 1e308, -1.0])
def test_estimates_are_read_within_bounds(number: float) -> None:
    """An estimated time outside its bounds is read as the nearest bound."""
    body = json.dumps(REPLY | {"left_s": number}).encode()
    assert read_message(messages.TicketReply, body).left_s == (1e12 if number > 0 else 0.0)


TWICE = ['"name":"n","name":"n"', '"name":"n","n\\u0061me":"m"', '"name":"n","local":{"mu":1.0,"mu":2.0}']


@pytest.mark.parametrize("fields", TWICE)
def test_a_message_with_repeated_keys_is_refused(fields: str) -> None:
    """A message with a key twice in one object is refused, also if one of them is escaped."""
    others = json.dumps({key: value for key, value in RUN_INFO.items() if key != "name"})
    assert read_message(messages.RunInfo, f'{others[:-1]},"name":"na\\"me\\":{{"}}'.encode()).name == 'na"me":{'
    with pytest.raises(ValueError, match="occurs twice in an object"):
        read_message(messages.RunInfo, f"{others[:-1]},{fields}}}".encode())


def test_texts_of_servers_are_cut_and_cleaned() -> None:
    """Long texts of a server are cut, and they have no line breaks or control characters."""
    body = json.dumps(RUN_INFO | {"name": "n\n" * 9000, "local_package": "\x1b[2J" * 9000}).encode()
    info = read_message(messages.RunInfo, body)
    for text in (info.name, info.local_package):
        assert text.isprintable()
        assert len(text) <= 2000


# -- parts


DIGEST = blake3(b"x" * 8).digest()
PARTIAL = "206 Partial"
PARTS: dict[str, tuple[Callable[[Connection], None], type[AtollError], str]] = {
    **{case: ANSWERS[case] for case in ("ssh", "TLS alert", "gzip", "redirect", "two lengths", "endless status 100")},
    "no length": (raw(b"HTTP/1.1 206 Partial\r\n\r\nxxxxxxxx"), BadRequest, "without saying how long"),
    "chunked": (raw(CHUNKED.replace(b"200 OK", b"206 Partial")), BadRequest, "without saying how long"),
    "too long": (raw(ok(b"x" * 9, status=PARTIAL)), BadRequest, "of 9 bytes, where at most 8"),
    "too short": (raw(ok(b"x" * 7, status=PARTIAL)), PartCorrupt, "arrived damaged 4 times"),
    "empty": (raw(ok(b"", status=PARTIAL)), PartCorrupt, "arrived damaged 4 times"),
    "damaged": (raw(ok(b"y" * 8, status=PARTIAL)), PartCorrupt, "arrived damaged 4 times"),
    "whole file": (raw(ok(b"x" * 99)), BadRequest, "ignores the header Range"),
    "no content": (raw(ok(b"xxxxxxxx", status="204 No")), BadRequest, "HTTP status 204"),
    "accepted": (raw(ok(b"x" * 8, status="202 Later")), BadRequest, "HTTP status 202"),
    "cut": (raw(HEAD.replace(b"200", b"206") + b"Content-Length: 8\r\n\r\nxx"), ServerUnreachable, "does not answer"),
    "endless error": ANSWERS["endless error"],
}


@pytest.mark.parametrize("case", PARTS)
def test_a_malformed_part_is_a_short_error(case: str) -> None:
    """If the answer with a part is malformed, the download raises an error of one short line."""
    serve, kind, text = PARTS[case]
    with client(serve) as http, closing(HttpTransfer(http, 2, 1.0)) as transfer:
        error = refused(lambda: transfer.pull("/x", [DIGEST], [Part(0, 0, 8, ())], []))
    assert type(error) is kind
    assert re.search(text, str(error)), error


def test_a_slow_part_is_given_up() -> None:
    """If the bytes of a part arrive one by one, now and then, the download is given up."""
    head = b"HTTP/1.1 206 Partial\r\nContent-Length: 9999\r\n\r\n"
    with client(trickling(head)) as http, closing(HttpTransfer(http, 2, 0.1)) as transfer:
        error = refused(lambda: transfer.pull("/x", [DIGEST], [Part(0, 0, 9999, ())], []))
    assert type(error) is TransferStalled


def test_a_given_up_part_leaves_no_socket() -> None:
    """A download that stops within a part leaves no socket open."""
    # The server says that the connection ends. The reader stops within the part, and an error still refers to the
    # reader.
    gc.collect()
    with Peer(raw(b"HTTP/1.0 206 P\r\nContent-Length: 8\r\n\r\n" + b"x" * 8)) as peer:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", ResourceWarning)
            connection = PartConnection("127.0.0.1", peer.port, None, 0.3)
            kept: list[object] = [connection.get("/", {}, 8, lambda scratch: scratch[:2])[2]]
            next(kept[0])
            kept.append(kept)  # as the traceback of an error does
            connection.close()
            del connection, kept
            gc.collect()
    assert [str(each.message) for each in found if issubclass(each.category, ResourceWarning)] == []


def test_a_fast_start_does_not_excuse_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that starts fast and then becomes too slow is given up.

    At 1,024 bytes a second, 8 MB in the first minute would allow more than two hours without a further byte.
    """
    now_s = [0.0]
    monkeypatch.setattr(answer.time, "monotonic", lambda: now_s[0])
    pace = Pace(60.0)
    now_s[0] = 60.0
    pace.moved(8 * 10**6)
    now_s[0] = 120.0
    with pytest.raises(TooSlow, match=r"only 1 bytes moved in 60\.0 s"):
        pace.moved(1)


@pytest.mark.parametrize("case", ["ssh", "gzip", "redirect", "two lengths", "endless error", "trickling body"])
def test_a_malformed_upload_answer_is_a_short_error(case: str, tmp_path: Path) -> None:
    """If the answer to an upload is malformed, the upload raises an error of one short line."""
    (tmp_path / "file").write_bytes(b"x" * 8)
    with (
        (tmp_path / "file").open("rb") as file,
        client(ANSWERS[case][0]) as http,
        closing(HttpTransfer(http, 2, 0.3)) as transfer,
    ):
        error = refused(lambda: transfer.push("/x/{}".format, file.fileno(), [Part(0, 0, 8, ())], [DIGEST]))
    assert re.search(ANSWERS[case][2], str(error)), error


@pytest.mark.parametrize("case", sorted(ANSWERS.keys() - {name for name in ANSWERS if name.startswith("trickling")}))
def test_a_malformed_answer_ends_a_fetch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the answer to `atoll.objects.fetch` is malformed, the fetch raises an error of one short line."""
    monkeypatch.setattr(object_client, "PAUSES_S", (0.0,))
    with Peer(ANSWERS[case][0]) as peer:
        reference = f"atoll-ref://127.0.0.1:{peer.port}/{'1' * 32}?expires=9999999999#{'0' * 32}.{'2' * 64}"
        refused(lambda: atoll.objects.fetch(reference, idle_timeout_s=1.0))


def test_a_request_may_run_within_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may be sent while another one is being prepared in the same thread."""
    # Garbage collection may end a site at any moment of another request. The site then leaves its run.
    with Peer(lambda connection: connection.answer(200) if connection.request() else None) as peer:
        http, other = Http(peer.url), Http(peer.url)

        def headers(given: dict[str, str] | None = None) -> dict[str, str]:
            other.reach(routes.HEALTH, timeout_s=10.0)
            return dict(given or {})

        monkeypatch.setattr(http, "headers", headers)
        http.reach(routes.HEALTH, timeout_s=10.0)
    assert len(peer.connections) == 2
