"""Transfers of objects that break, stand still, are told to stop, or bring what is not what it should be.

`flat()` in parts of 64 KiB is 1 part of head and 17 of tensors: `w` has 2^18 x 4 bytes = 16 parts, and the rest is one
more. With two connections the 17 are asked for in runs of 17 // 4 = 4: 5 requests, and one for the head.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import signal
import socket
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch
from blake3 import blake3
from harness.processes import Nursery, wait_until
from harness.proxy import Fault
from kit.folders import nameless_files
from kit.payloads import plain
from kit.peers import Connection, Peer, Request
from kit.requests import begin_request
from object_world import (
    PART,
    connections_at,
    flat,
    large,
    output_of,
    start_fetch,
    start_paused_fetch,
    start_publisher,
    through_proxy,
)

import atoll
from atoll import TensorRef
from atoll.errors import AtollError, AuthError, BadRequest, PartCorrupt, TransferAborted, TransferStalled

DATA = "GET .*/data"
UNDISTURBED = 1 + 17
"""Requests for the part of the head and for those of the tensors."""


@pytest.mark.covers("P1", "P2")
@pytest.mark.parametrize("action", ["close", "reset", "flip"])
def test_only_a_broken_part_is_fetched_again(nursery: Nursery, tmp_path: Path, action: Any) -> None:
    """If a part breaks off or is damaged on its way, `fetch` asks for this part again, and for no other part."""
    publisher, ref = start_publisher(nursery, tmp_path, "flat", chunk_bytes=PART)
    with through_proxy(ref) as (proxy, through):
        assert plain(atoll.objects.fetch(through)) == plain(flat())
        assert proxy.count(DATA) == UNDISTURBED
        proxy.requests.clear()
        fault = Fault(DATA, "down", at=50_000, action=action)
        proxy.faults.append(fault)
        assert output_of(start_fetch(nursery, tmp_path, through)) == "same"
        assert fault.reached.is_set()
        assert proxy.count(DATA) == UNDISTURBED + 1
    publisher.kill()


@pytest.mark.covers("P1", "P5", "X3")
@pytest.mark.parametrize(
    ("at", "action", "error", "words"),
    [
        (10, "flip", PartCorrupt, "Part 0 .*damaged .* and the disk of"),
        (1000, "stall", TransferStalled, r"No byte .* for 0\.2 s"),
    ],
    ids=["damage", "silence"],
)
def test_the_error_of_a_lasting_fault_names_the_reference(
    at: int, action: Any, error: type[AtollError], words: str
) -> None:
    """If parts are damaged or stall again and again, the error of `fetch` names the reference."""
    ref = atoll.objects.publish(flat(), chunk_bytes=PART)
    with through_proxy(ref, *(Fault(DATA, "down", at, action) for _ in range(40))) as (_, through):
        with pytest.raises(error, match=rf"Reference {ref.object[:8]} .*{words}"):
            atoll.objects.fetch(through, idle_timeout_s=0.2)


@pytest.mark.covers("P5")
def test_a_peer_that_never_answers_is_asked_once() -> None:
    """`fetch` and `publish` send only one request to a peer that never answers, and then raise an error."""
    ref = atoll.objects.publish(flat(), chunk_bytes=PART)
    with Peer(lambda _: peer.ended.wait(60)) as peer:
        with pytest.raises(TransferStalled, match=rf"{ref.object[:8]} .*No byte .* for 0\.2 s"):
            atoll.objects.fetch(dataclasses.replace(ref, port=peer.port), idle_timeout_s=0.2)
        assert len(peer.connections) == 1
        with pytest.raises(TransferStalled, match=r"No byte .* for 0\.2 s"):
            atoll.objects.publish(flat(), server=peer.url, idle_timeout_s=0.2)
        assert len(peer.connections) == 2


@pytest.mark.covers("P5")
def test_fetch_soon_gives_up_a_silent_publisher(nursery: Nursery, tmp_path: Path) -> None:
    """If a publisher falls silent during a transfer, `fetch` gives up after at most three more requests."""
    # The publisher is stopped, not killed: its connections stay open, and it accepts new ones. Of the two stalled
    # connections, the first one may be tried again, as data has come on the other one later. Either connection may have
    # had the end of a run of parts in its buffer.
    publisher, ref = start_publisher(nursery, tmp_path, "large")
    asked: list[int] = []

    def stop() -> None:
        os.kill(publisher.pid, signal.SIGSTOP)
        asked.append(proxy.count(DATA))

    stall = Fault(DATA, "down", at=2**20, action="stall", wait=stop)  # the head is smaller
    with through_proxy(ref, stall) as (proxy, through):
        with pytest.raises(TransferStalled, match=rf"{ref.object[:8]} .*No byte .* for 0\.5 s"):
            atoll.objects.fetch(through, idle_timeout_s=0.5, to_disk=tmp_path)
        assert proxy.count(DATA) - asked[0] <= 3  # four attempts each would be 6 more at least
    publisher.kill()


@pytest.mark.covers("P5", "D4")
def test_an_abort_ends_a_stalled_transfer(tmp_path: Path) -> None:
    """A program can abort a stalled `fetch` at once, without waiting for the idle timeout of 60 s."""
    # A later `fetch` with this abort asks nothing.
    ref, abort = atoll.objects.publish(flat(), chunk_bytes=PART), threading.Event()
    stall = Fault(DATA, "down", at=50_000, action="stall", wait=abort.set)
    with through_proxy(ref, stall) as (proxy, through):
        with pytest.raises(TransferAborted):  # far below the idle timeout of 60 s, and the test's limit
            atoll.objects.fetch(through, abort=abort, to_disk=tmp_path)
        asked = len(proxy.requests)
        with pytest.raises(TransferAborted):
            atoll.objects.fetch(through, abort=abort)
        assert len(proxy.requests) == asked
    assert list(tmp_path.iterdir()) == []


@pytest.mark.covers("P5")
def test_an_aborted_fetch_also_ends_the_sending(nursery: Nursery, tmp_path: Path) -> None:
    """If a receiver aborts a `fetch`, the publisher stops sending, too."""
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish(large(), chunk_bytes=16 * 2**20)
        process, go = start_paused_fetch(nursery, tmp_path, ref, abort=str(tmp_path / "abort"))
        assert connections_at(ref.port) >= 2
        (tmp_path / "abort").touch()
        wait_until(lambda: not connections_at(ref.port), "the end of the sending")
        go.touch()
        assert output_of(process).startswith("TransferAborted")


@pytest.mark.covers("P5")
def test_withdrawing_an_object_ends_a_running_fetch(nursery: Nursery, tmp_path: Path) -> None:
    """If a publisher withdraws an object during a transfer, the receiver gets an error and the object's file is
    deleted.
    """
    with atoll.objects.Publisher(folder=tmp_path) as publisher:
        ref = publisher.publish(large(), chunk_bytes=16 * 2**20)
        process, go = start_paused_fetch(nursery, tmp_path, ref)
        assert len(nameless_files(tmp_path)) == 1
        assert publisher.withdraw(ref)
        go.touch()
        assert re.match(rf"Gone: Reference {ref.object[:8]} .*withdrawn", output_of(process))
        wait_until(lambda: not nameless_files(tmp_path), "the end of its file")


@pytest.mark.covers("P5", "X3")
def test_fetch_names_a_publisher_killed_during_a_transfer(nursery: Nursery, tmp_path: Path) -> None:
    publisher, ref = start_publisher(nursery, tmp_path, "large")
    process, go = start_paused_fetch(nursery, tmp_path, ref, idle_timeout_s=0.2)
    publisher.kill()
    go.touch()
    words = rf"ServerUnreachable: The publisher of reference {ref.object[:8]}.*only while its publisher runs"
    assert re.match(words, output_of(process))
    assert process.returncode == 5


@pytest.mark.covers("P3", "T3")
def test_stalled_receivers_do_not_block_others(tmp_path: Path) -> None:
    """Receivers that read nothing block no other receiver, though there are three times as many as the publisher has
    threads.

    The publisher closes their connections after its idle timeout.
    """
    big = {"w": torch.arange(2**23, dtype=torch.int32)}  # 32 MiB: more than sockets hold
    with atoll.objects.Publisher(idle_timeout_s=0.5, folder=tmp_path) as publisher:
        ref = publisher.publish(big)
        line = f"GET /v1/objects/{ref.object}/data"
        stalled = [begin_request(ref.port, line, Atoll_Secret=ref.secret) for _ in range(12)]
        try:  # three times as many as the publisher has threads
            for sock in stalled:
                assert sock.recv(1, socket.MSG_PEEK)  # it is being sent; no more of it is read
            assert torch.equal(atoll.objects.fetch(ref)["w"], big["w"])
            wait_until(lambda: not connections_at(ref.port), "the end of those that stand still")
            publisher.withdraw(ref)
            assert not nameless_files(tmp_path)
        finally:
            for sock in stalled:
                sock.close()


# -- what is not what it should be


OBJECT, SECRET = "1" * 32, "2" * 32


def make_manifest(head_bytes: int, data: bytes) -> dict[str, Any]:
    """That of an object with this head, and these bytes in all."""
    borders = [*range(0, head_bytes, PART), *range(head_bytes, len(data), PART), len(data)]
    return {
        "head_bytes": head_bytes,
        "nbytes": len(data),
        "part_bytes": PART,
        "layout_digest": blake3(f"{head_bytes} {len(data)} {PART}".encode()).hexdigest(),
        "part_digests": [blake3(data[start:stop]).hexdigest() for start, stop in pairwise(borders)],
    }


def fetched(manifest: Any, data: bytes, digest: str) -> Any:
    """What comes of a reference to a publisher that answers with this manifest and these bytes."""

    def answer(connection: Connection, request: Request) -> None:
        if request.path.endswith("/data"):
            connection.answer(206, data[request.range])
        else:
            connection.answer(200, manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode())

    with Peer.answering(answer) as peer:
        return atoll.objects.fetch(TensorRef("127.0.0.1", peer.port, False, OBJECT, SECRET, digest, 2**31))


def digest_of(manifest: dict[str, Any]) -> str:
    return blake3(bytes.fromhex(manifest["layout_digest"] + "".join(manifest["part_digests"]))).hexdigest()


def head_of(table: object, payload: object, *, raw: bytes | None = None) -> bytes:
    """A head as a hostile publisher would write it, padded to 64 bytes."""
    if isinstance(table, dict):
        table = {
            **table,
            "__metadata__": {"atoll.payload": payload if isinstance(payload, str) else json.dumps(payload)},
        }
    text = json.dumps(table).encode() if raw is None else raw
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
FITS = {"names": ["a"], "skeleton": {"a": {"$": "tensor", "index": 0}}}
U8_FIRST = {
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
}
B = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2], "base64": "AAA="}
HOSTILE: dict[str, bytes] = {
    "no json": head_of({}, {}, raw=b"{nonsense"),
    "a list": head_of([], {}),
    "overlap": head_of({**ONE, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, FITS),
    "beyond": head_of({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, FITS),
    "twice": head_of({}, {}, raw=b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":1}'),
    "enormous": head_of({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**62]}}, FITS),
    "order": head_of(U8_FIRST, {"names": ["a", "b"], "skeleton": None}),
    "no payload": head_of(ONE, "{"),
    "payload is a list": head_of(ONE, []),
    "no skeleton": head_of(ONE, {"names": ["a"]}),
    "names are numbers": head_of(ONE, {**FITS, "names": [1]}),
    "other names": head_of(ONE, {**FITS, "names": ["b"]}),
    "name twice": head_of(ONE, {**FITS, "names": ["a", "a"]}),
    "index": head_of(ONE, {**FITS, "skeleton": {"$": "tensor", "index": 1}}),
    "negative": head_of(ONE, {**FITS, "skeleton": {"$": "tensor", "index": -1}}),
    "unknown kind": head_of(ONE, {**FITS, "skeleton": {"$": "code", "text": "1"}}),
    "no reference": head_of(ONE, {**FITS, "skeleton": {"$": "ref", "text": "atoll-ref://"}}),
    "inline is a list": head_of(ONE, {**FITS, "inline": []}),
    "inline is text": head_of(ONE, {**FITS, "inline": {"b": "AAAA"}}),
    "inline dtype": head_of(ONE, {**FITS, "inline": {"b": {**B, "dtype": "C64"}}}),
    "inline without bytes": head_of(ONE, {**FITS, "inline": {"b": {**B, "base64": None}}}),
    "inline too short": head_of(ONE, {**FITS, "inline": {"b": {**B, "base64": "AA=="}}}),
    "inline enormous": head_of(ONE, {**FITS, "inline": {"b": {**B, "shape": [2**62], "data_offsets": [0, 2**62]}}}),
    "inline no base64": head_of(ONE, {**FITS, "inline": {"b": {**B, "base64": "!AA="}}}),
    "inline unnamed": head_of(ONE, {**FITS, "inline": {"b": B}}),
    "inline and in the file": head_of(ONE, {**FITS, "names": ["a", "a"], "inline": {"a": B}}),
    "deep": head_of(ONE, '{"names":["a"],"skeleton":' + "[" * 10**5 + "]" * 10**5 + "}"),
}


HEAD = head_of(ONE, FITS)
DATA_OF_ONE = HEAD + torch.arange(2.0).numpy().tobytes()
SOUND = make_manifest(len(HEAD), DATA_OF_ONE)


@pytest.mark.covers("D3")
@pytest.mark.parametrize(
    ("manifest", "error"),
    [
        (b"<html>", BadRequest),
        (b"[]", BadRequest),
        (SOUND | {"extra": 1}, BadRequest),
        (SOUND | {"nbytes": "12"}, BadRequest),
        (SOUND | {"part_bytes": 2**40}, BadRequest),
        (SOUND | {"head_bytes": 2**30}, BadRequest),
        (SOUND | {"part_digests": [*SOUND["part_digests"], "0" * 64]}, BadRequest),
        (SOUND | {"nbytes": PART * 400_002}, BadRequest),
        (SOUND | {"part_digests": SOUND["part_digests"][::-1]}, PartCorrupt),
        (SOUND | {"inline": base64.b64encode(DATA_OF_ONE[:-1]).decode()}, BadRequest),
        (SOUND | {"inline": base64.b64encode(DATA_OF_ONE[:-1] + b"\xff").decode()}, PartCorrupt),
        (SOUND | {"inline": "!" + base64.b64encode(DATA_OF_ONE).decode()}, BadRequest),
    ],
    ids=[
        *("json", "list", "field", "text", "huge part", "head", "count", "parts", "other"),
        *("inline short", "inline damaged", "inline no base64"),
    ],
)
def test_an_invalid_manifest_is_refused(manifest: Any, error: type[AtollError]) -> None:
    assert fetched(SOUND, DATA_OF_ONE, digest_of(SOUND))["a"].tolist() == [0.0, 1.0]
    with pytest.raises(error, match=OBJECT[:8]):
        fetched(manifest, DATA_OF_ONE, digest_of(SOUND))


@pytest.mark.covers("D3")
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_object_header_allocates_no_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fetch` refuses a hostile header of an object before it allocates memory, with an error that names the object."""
    data = HOSTILE[case] + bytes(8)
    manifest = make_manifest(len(HOSTILE[case]), data)
    made: list[object] = []
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: made.append(shape))
    with pytest.raises(BadRequest, match=OBJECT[:8]):
        fetched(manifest, data, digest_of(manifest))
    assert made == []


@pytest.mark.covers("D3")
@pytest.mark.parametrize(("head_bytes", "more"), [(64, 64), (0, 1)], ids=["head", "tensors"])
def test_refuses_an_object_header_of_another_length(head_bytes: int, more: int) -> None:
    """`fetch` refuses an object's header if its length differs from the manifest, and bytes that the header does not
    describe.
    """
    data = DATA_OF_ONE + bytes(more)
    manifest = make_manifest(len(HEAD) + head_bytes, data)
    with pytest.raises(BadRequest, match=OBJECT[:8]):
        fetched(manifest, data, digest_of(manifest))


@pytest.mark.covers("P1")
def test_a_publisher_serves_only_its_objects() -> None:
    """A publisher answers other paths with 404. Withdrawing an object needs the secret of the object."""
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish({})
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{publisher.port}/v1/run")
        with pytest.raises(AuthError):
            publisher.withdraw(dataclasses.replace(ref, secret="0" * 32))
        assert not publisher.withdraw(dataclasses.replace(ref, object="0" * 32))
