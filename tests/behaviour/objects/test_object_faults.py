"""Transfers of objects that break, stand still, are told to stop, or bring what is not what it should be.

`flat()` in parts of 64 KiB is 1 part of head and 17 of tensors: `w` has 2^18 x 4 bytes = 16 parts, and the rest is one
more. With two connections the 17 are asked for in runs of 17 // 4 = 4: 5 requests, and one for the head.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from harness.processes import Nursery, Process, wait_until
from harness.proxy import Fault, Proxy
from object_world import PART, differences, fetching, flat, large, publishing, said

import atoll
from atoll import TensorRef
from atoll.blobs.manifest import MOST_PARTS, Cuts, Manifest
from atoll.blobs.object_file import Contents, write_object
from atoll.blobs.payload_cut import Cut
from atoll.errors import AuthError, BadRequest, Gone, PartCorrupt, TransferAborted, TransferStalled
from atoll.posix import write_at
from atoll.protocol import routes
from atoll.protocol.messages import BlobManifest
from atoll.tensors.payload import pack
from atoll.transport import part_transfer
from atoll.transport.object_server import ServedBlob, nameless
from atoll.transport.part_connection import PartConnection

DATA = "GET .*/data"
UNDISTURBED = 1 + 17
"""Requests for the part of the head and for those of the tensors."""


def served(publisher: atoll.objects.Publisher, ref: TensorRef) -> ServedBlob:
    return publisher._host._objects[ref.object]


@pytest.mark.covers("P1", "P2")
@pytest.mark.parametrize("action", ["close", "reset", "flip"])
def test_what_broke_in_the_middle_is_asked_for_again_alone(nursery: Nursery, tmp_path: Path, action: Any) -> None:
    publisher, ref = publishing(nursery, tmp_path, "flat", chunk_bytes=PART)
    with Proxy(ref.port) as proxy:
        through = dataclasses.replace(ref, port=proxy.port)
        assert differences(flat(), atoll.objects.fetch(through)) == []
        assert proxy.count(DATA) == UNDISTURBED
        proxy.requests.clear()
        fault = Fault(DATA, "down", at=50_000, action=action)
        proxy.faults.append(fault)
        assert said(fetching(nursery, tmp_path, through)) == "same"
        assert fault.reached.is_set()
        assert proxy.count(DATA) == UNDISTURBED + 1
    publisher.kill()


@pytest.mark.covers("P1", "X3")
def test_damage_that_lasts_is_an_error_that_names_the_reference() -> None:
    ref = atoll.objects.publish(flat(), chunk_bytes=PART)
    with Proxy(ref.port) as proxy:
        proxy.faults += [Fault(DATA, "down", at=10, action="flip") for _ in range(4)]
        with pytest.raises(PartCorrupt, match=rf"Reference {ref.object[:8]} .*Part 0 .*damaged"):
            atoll.objects.fetch(dataclasses.replace(ref, port=proxy.port))


@pytest.mark.covers("P5")
def test_a_transfer_that_moves_no_byte_ends_by_the_idle_timeout() -> None:
    ref = atoll.objects.publish(flat(), chunk_bytes=PART)
    with Proxy(ref.port) as proxy:
        proxy.faults += [Fault(DATA, "down", at=1000, action="stall") for _ in range(40)]
        with pytest.raises(TransferStalled, match=rf"{ref.object[:8]} .*moved no byte for 0\.2 s"):
            atoll.objects.fetch(dataclasses.replace(ref, port=proxy.port), idle_timeout_s=0.2)


@contextmanager
def silent() -> Iterator[tuple[int, list[socket.socket]]]:
    """A port that takes connections and says nothing, and the connections that came."""
    came: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    came.append(listener.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1], came
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in came:
                sock.close()


@pytest.mark.covers("P5")
def test_a_peer_that_never_answers_is_asked_once() -> None:
    ref = atoll.objects.publish(flat(), chunk_bytes=PART)
    with silent() as (port, came):
        with pytest.raises(TransferStalled, match=rf"{ref.object[:8]} .*moved no byte for 0\.2 s"):
            atoll.objects.fetch(dataclasses.replace(ref, port=port), idle_timeout_s=0.2)
        assert len(came) == 1
    with silent() as (port, came):
        with pytest.raises(TransferStalled, match=r"moved no byte for 0\.2 s"):
            atoll.objects.publish(flat(), server=f"http://127.0.0.1:{port}", idle_timeout_s=0.2)
        assert len(came) == 1


@pytest.mark.covers("P5")
def test_a_publisher_that_falls_silent_in_the_middle_is_not_asked_again_and_again(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, not killed: connections stay, new ones are taken. Of the two that stand still, the first one may
    be tried again, as the other has moved later; and either may have had the end of a run in its buffer before."""
    publisher, ref = publishing(nursery, tmp_path, "large")
    arrived: list[str] = []
    asked: list[str] = []
    get = PartConnection.get

    def stop(name: str) -> None:
        arrived.append(name)
        if len(arrived) == 2:  # the first part is that of the head
            os.kill(publisher.pid, signal.SIGSTOP)

    def spy(lane: PartConnection, path: str, *given: Any) -> Any:
        if len(arrived) >= 2 and ref.object in path:  # a worker that another test left behind may ask for others
            asked.append(path)
        return get(lane, path, *given)

    monkeypatch.setattr(part_transfer, "failpoint", stop)
    monkeypatch.setattr(PartConnection, "get", spy)
    with pytest.raises(TransferStalled, match=rf"{ref.object[:8]} .*moved no byte for 0\.5 s"):
        atoll.objects.fetch(ref, idle_timeout_s=0.5, to_disk=tmp_path)
    assert len(asked) <= 3  # four attempts each would be 6 more at least
    publisher.kill()


@pytest.mark.covers("P5", "D4")
def test_an_abort_ends_a_transfer_that_stands_still(tmp_path: Path) -> None:
    ref, abort = atoll.objects.publish(flat(), chunk_bytes=PART), threading.Event()
    with Proxy(ref.port) as proxy:
        fault = Fault(DATA, "down", at=50_000, action="stall")
        proxy.faults.append(fault)
        setter = threading.Thread(target=lambda: (fault.reached.wait(30), abort.set()))
        setter.start()
        with pytest.raises(TransferAborted):  # far below the idle timeout of 60 s, and the test's limit
            atoll.objects.fetch(dataclasses.replace(ref, port=proxy.port), abort=abort, to_disk=tmp_path)
        setter.join()
        asked = len(proxy.requests)
        with pytest.raises(TransferAborted):
            atoll.objects.fetch(dataclasses.replace(ref, port=proxy.port), abort=abort)
        assert len(proxy.requests) == asked
    assert list(tmp_path.iterdir()) == []


def paused(nursery: Nursery, folder: Path, ref: TensorRef, **options: Any) -> tuple[Process, Path]:
    """A process that fetches `large()` and stands still in the middle, and the file that lets it go on."""
    go = folder / "go"
    process = fetching(nursery, folder, ref, what="large", hold=str(go), **options)
    wait_until(Path(f"{go}.reached").exists, "the first part of the tensors")
    return process, go


@pytest.mark.covers("P5")
def test_a_receivers_abort_ends_the_sending_too(nursery: Nursery, tmp_path: Path) -> None:
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish(large(), chunk_bytes=16 * 2**20)
        process, go = paused(nursery, tmp_path, ref, abort=str(tmp_path / "abort"))
        assert served(publisher, ref).readers > 0
        (tmp_path / "abort").touch()
        wait_until(lambda: not served(publisher, ref).readers, "the end of the sending")
        go.touch()
        assert said(process).startswith("TransferAborted")


@pytest.mark.covers("P5")
def test_withdrawing_ends_the_receiving_too(nursery: Nursery, tmp_path: Path) -> None:
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish(large(), chunk_bytes=16 * 2**20)
        process, go = paused(nursery, tmp_path, ref)
        held = served(publisher, ref)
        assert held.readers > 0
        assert publisher.withdraw(ref)
        go.touch()
        assert re.match(rf"Gone: Reference {ref.object[:8]} .*withdrawn", said(process))
        wait_until(lambda: held.fd == -1, "the end of its file")


@pytest.mark.covers("P5", "X3")
def test_a_publisher_killed_in_the_middle_is_named(nursery: Nursery, tmp_path: Path) -> None:
    publisher, ref = publishing(nursery, tmp_path, "large")
    process, go = paused(nursery, tmp_path, ref, idle_timeout_s=0.2)
    publisher.kill()
    go.touch()
    words = rf"ServerUnreachable: Nothing serves reference {ref.object[:8]}.*look whether it runs"
    assert re.match(words, said(process))
    assert process.returncode == 5


@pytest.mark.covers("P3", "T3")
def test_stalled_receivers_hold_up_no_others() -> None:
    big = {"w": torch.arange(2**23, dtype=torch.int32)}  # 32 MiB: more than sockets hold
    with atoll.objects.Publisher(idle_timeout_s=0.5) as publisher:
        ref = publisher.publish(big)
        path = routes.OBJECT_DATA.format(object=ref.object)
        stalled = [socket.create_connection(("127.0.0.1", ref.port), timeout=20) for _ in range(12)]
        try:
            for sock in stalled:  # three times as many as the publisher has threads; they read nothing
                sock.sendall(
                    f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{routes.SECRET_HEADER}: {ref.secret}\r\n\r\n".encode()
                )
            wait_until(lambda: served(publisher, ref).readers == 12, "all of them")
            assert torch.equal(atoll.objects.fetch(ref)["w"], big["w"])
            wait_until(lambda: not served(publisher, ref).readers, "the end of those that stand still")
            held = served(publisher, ref)
            publisher.withdraw(ref)
            assert held.fd == -1
        finally:
            for sock in stalled:
                sock.close()


# -- what is not what it should be


def sound() -> tuple[Manifest, bytes]:
    """A manifest and all bytes of its object."""
    fd = nameless(None)
    with open(fd, "rb") as file:
        packed = pack({"a": torch.arange(4.0), "b": torch.arange(3, dtype=torch.int8)})
        return write_object(packed, fd, Cut(PART)), file.read()


def checked(body: bytes, wanted_id: str) -> None:
    """What a receiver asks of the manifest in an answer."""
    manifest = BlobManifest.read(body, "Object x").manifest()
    manifest.require_object("Object x")
    manifest.require_id(wanted_id, "Object x")


@pytest.mark.covers("D3")
@pytest.mark.parametrize("case", ["json", "list", "field", "text", "huge_part", "head", "count", "parts", "other"])
def test_a_manifest_that_is_none_is_refused(case: str) -> None:
    manifest, _ = sound()
    told = json.loads(BlobManifest.of(manifest).model_dump_json())
    change: dict[str, Callable[[], object]] = {
        "json": lambda: None,
        "list": lambda: None,
        "field": lambda: told.update(extra=1),
        "text": lambda: told.update(nbytes="12"),
        "huge_part": lambda: told.update(part_bytes=2**40),
        "head": lambda: told.update(head_bytes=2**30),
        "count": lambda: told["part_digests"].append("0" * 64),
        "parts": lambda: told.update(nbytes=PART * (MOST_PARTS + 2)),
        "other": lambda: told["part_digests"].reverse(),
    }
    change[case]()
    body = {"json": b"<html>", "list": b"[]"}.get(case, json.dumps(told).encode())
    with pytest.raises(PartCorrupt if case == "other" else BadRequest, match="Object x"):
        checked(body, manifest.id)


@pytest.mark.covers("D3")
def test_damaged_bytes_within_a_manifest_are_refused() -> None:
    manifest, data = sound()
    for wrong, error in ((data[:-1], BadRequest), (data[:-1] + b"\xff", PartCorrupt)):
        with pytest.raises(error):
            BlobManifest.of(manifest, wrong).inline_bytes(manifest, "Object x")
    told = BlobManifest.of(manifest).model_copy(update={"inline": "!" + base64.b64encode(data).decode()})
    with pytest.raises(BadRequest, match="base64"):
        told.inline_bytes(manifest, "Object x")


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


@pytest.mark.covers("D3")
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_head_is_refused_by_name_before_memory_is_taken(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = HOSTILE[case]
    data = head + bytes(8)
    cuts = Cuts(len(head), len(data), PART)
    fd = nameless(None)
    write_at(fd, data, 0)
    digests = tuple(blake3(data[part.start : part.stop]).digest() for part in cuts.parts())
    manifest = Manifest.of_cuts(cuts, digests)
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish({})
        publisher._host._objects[ref.object] = dataclasses.replace(served(publisher, ref), manifest=manifest, fd=fd)
        made: list[object] = []
        monkeypatch.setattr(torch, "empty", lambda *shape, **_: made.append(shape))
        with pytest.raises(BadRequest, match=ref.object[:8]):
            atoll.objects.fetch(dataclasses.replace(ref, digest=manifest.id))
        assert made == []


@pytest.mark.covers("D3")
def test_a_head_that_is_not_as_long_as_its_manifest_says_is_refused() -> None:
    head = head_of(ONE, FITS)
    assert Contents.read(head, Cuts(len(head), len(head) + 8, PART), "Object x").names == ("a",)
    for cuts in (Cuts(len(head) + 64, len(head) + 72, PART), Cuts(len(head), len(head) + 9, PART)):
        with pytest.raises(BadRequest, match="Object x"):
            Contents.read(head + bytes(64), cuts, "Object x")


@pytest.mark.covers("P1")
def test_a_publisher_refuses_what_it_does_not_publish() -> None:
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish({})
        with socket.create_connection(("127.0.0.1", publisher.port), timeout=20) as raw:
            raw.sendall(b"GET /v1/run HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(AuthError):
            publisher.withdraw(dataclasses.replace(ref, secret="0" * 32))
        assert not publisher.withdraw(dataclasses.replace(ref, object="0" * 32))
    with pytest.raises(Gone):
        atoll.objects.fetch(dataclasses.replace(atoll.objects.publish({}), object="0" * 32))
