"""Objects that the server keeps for processes that cannot reach each other: after a restart, and until they expire.

`flat()` in parts of 64 KiB is 18 parts: 1 of head, 16 of `w`, and one of the rest.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from harness.processes import Nursery, free_port, wait_until
from harness.proxy import Fault, Proxy
from kit.servers import new_server
from object_world import PART, SCRIPT, differences, fetching, flat, said
from safetensors.torch import load_file, save_file
from torch import nn

import atoll
from atoll import TensorRef
from atoll.blobs.manifest import Cuts, Manifest
from atoll.errors import (
    AtollError,
    AuthError,
    BadRequest,
    Busy,
    Conflict,
    DiskFull,
    Gone,
    PartCorrupt,
    TransferAborted,
    TransferError,
)
from atoll.protocol import messages, routes
from atoll.transport.http_client import Http
from atoll.transport.part_transfer import HttpTransfer

PUT = "PUT .*/parts/5 "


def serve(folder: Path, **options: Any) -> atoll.Server:
    """A server whose only work is to keep objects."""
    return new_server(
        nn.Linear(2, 2),
        **{"algorithm.name": "fedavg"},
        **{"network.port": 0, "disk.state_dir": folder / "state", **options},
    )


def files(folder: Path) -> list[str]:
    """Kinds of files that it keeps."""
    return sorted(path.suffix for path in (folder / "state" / "objects").glob("*"))


@pytest.mark.covers("P1", "P4")
def test_what_a_process_left_at_the_server_another_one_gets_after_a_restart(nursery: Nursery, tmp_path: Path) -> None:
    port = free_port()
    with serve(tmp_path, **{"network.port": port}) as server:
        told = json.dumps({"what": "flat", "server": server.url, "chunk_bytes": PART})
        publisher = nursery.start(str(SCRIPT), "publish", told, cwd=tmp_path)
        ref = TensorRef.parse(said(publisher))  # it has ended
        assert (ref.host, ref.port) == ("127.0.0.1", port)
        assert said(fetching(nursery, tmp_path, ref)) == "same"
    with serve(tmp_path, **{"network.port": port}):
        assert said(fetching(nursery, tmp_path, ref, how="disk")) == "same"
        assert files(tmp_path) == [".json", ".safetensors"]
        assert atoll.objects.withdraw(ref)
        assert files(tmp_path) == []
        assert said(fetching(nursery, tmp_path, ref, optional=True)) == "none"


@pytest.mark.covers("P1", "P2")
def test_what_the_server_keeps_is_a_safetensors_file(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        atoll.objects.publish(flat(), server=server.url)
        (path,) = (tmp_path / "state" / "objects").glob("*.safetensors")
        opened = load_file(path)
        assert (
            differences({key: torch.as_tensor(value) for key, value in flat().items()}, {k: opened[k] for k in flat()})
            == []
        )
        inline = atoll.objects.publish(flat(), server=server.url, chunk_bytes=0)
        assert differences(flat(), atoll.objects.fetch(inline)) == []


@pytest.mark.covers("P14", "D4")
def test_what_expires_is_removed_and_the_reference_says_so(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        kept = atoll.objects.publish(flat(), server=server.url)
        ref = atoll.objects.publish(flat(), server=server.url, expires_s=0.2)
        wait_until(lambda: len(files(tmp_path)) == 2, "the end of the other")
        wait_until(lambda: time.time() > ref.expires_at + 1, "its time, in whole seconds")
        with pytest.raises(Gone, match=rf"{ref.object[:8]} .*it expired at .* longer expires_s"):
            atoll.objects.fetch(ref)
        assert atoll.objects.fetch(ref, optional=True) is None
        assert differences(flat(), atoll.objects.fetch(kept)) == []


@pytest.mark.covers("P14", "D4")
def test_the_server_keeps_nothing_longer_than_it_declares(tmp_path: Path) -> None:
    with serve(tmp_path, **{"disk.objects_expire_s": 100.0}) as server:
        begin = time.time()
        ref = atoll.objects.publish(flat(), server=server.url, expires_s=1e6)
        assert begin + 98 <= ref.expires_at <= time.time() + 100


@pytest.mark.covers("D4", "P14")
def test_a_start_removes_what_expired_meanwhile_and_what_a_killed_server_left(tmp_path: Path) -> None:
    folder, port = tmp_path / "state" / "objects", free_port()
    with serve(tmp_path, **{"network.port": port}) as server:
        ref = atoll.objects.publish(flat(), server=server.url)
        brief = atoll.objects.publish(flat(), server=server.url, expires_s=3600)
    note = folder / f"{brief.object}.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "expires_at": time.time() - 1}))
    for name in ("1" * 32 + ".part", "2" * 32 + ".safetensors", "3" * 32 + ".note", "4" * 32 + ".json"):
        (folder / name).write_text("[]")
    with serve(tmp_path, **{"network.port": port}):
        assert sorted(path.name for path in folder.iterdir()) == [f"{ref.object}.json", f"{ref.object}.safetensors"]
        assert differences(flat(), atoll.objects.fetch(ref)) == []


@pytest.mark.covers("D4", "X3")
def test_a_server_killed_within_an_upload_leaves_nothing_at_its_next_start(nursery: Nursery, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    settings = 'model.source = "model.safetensors"\nalgorithm.name = "fedavg"\nrounds.total = 1\n'
    (tmp_path / "run.toml").write_text(settings + 'network.port = 0\ndisk.state_dir = "state"\n')
    server = nursery.start("atoll", "server", "run.toml", cwd=tmp_path)
    listens = wait_until(lambda: re.search(r"listening on http://127\.0\.0\.1:(\d+)", server.output()), "the server")
    with Proxy(int(listens[1])) as proxy, ThreadPoolExecutor(1) as pool:
        fault = Fault(PUT, "up", at=1000, action="stall")
        proxy.faults.append(fault)
        upload = pool.submit(atoll.objects.publish, flat(), server=proxy.url, chunk_bytes=PART, idle_timeout_s=0.5)
        assert fault.reached.wait(30)
        assert files(tmp_path) == [".part"]
        server.kill()
        assert isinstance(upload.exception(30), TransferError)
    again = nursery.start("atoll", "server", "run.toml", cwd=tmp_path)
    wait_until(lambda: "listening on" in again.output(), "the next start")
    assert files(tmp_path) == []
    again.kill()


@pytest.mark.covers("D4", "P5")
def test_an_upload_that_was_told_to_stop_leaves_nothing(tmp_path: Path) -> None:
    abort = threading.Event()
    with serve(tmp_path) as server, Proxy(server.port) as proxy:
        fault = Fault(PUT, "up", at=1000, action="stall")
        proxy.faults.append(fault)
        setter = threading.Thread(target=lambda: (fault.reached.wait(30), abort.set()))
        setter.start()
        with pytest.raises(TransferAborted):
            atoll.objects.publish(flat(), server=proxy.url, chunk_bytes=PART, abort=abort)
        setter.join()
        assert files(tmp_path) == []


@pytest.mark.covers("D4", "P3")
def test_an_upload_of_which_nothing_comes_any_more_is_removed(tmp_path: Path) -> None:
    with serve(tmp_path, **{"network.idle_timeout_s": 0.3}) as server:
        http = Http(server.url)
        opening = messages.ObjectOpen(head_bytes=64, nbytes=128, part_bytes=PART, expires_s=1000.0)
        http.post(routes.OBJECTS, opening, messages.ObjectOpened)
        assert files(tmp_path) == [".part"]
        wait_until(lambda: not files(tmp_path), "its end")
        http.close()


@pytest.mark.covers("P1", "P2")
@pytest.mark.parametrize("action", ["close", "reset", "flip"])
def test_a_part_that_broke_on_its_way_up_is_sent_again_alone(tmp_path: Path, action: Any) -> None:
    with serve(tmp_path) as server, Proxy(server.port) as proxy:
        fault = Fault(PUT, "up", at=30_000, action=action)
        proxy.faults.append(fault)
        ref = atoll.objects.publish(flat(), server=proxy.url, chunk_bytes=PART)
        assert fault.reached.is_set()
        assert proxy.count("PUT ") == 18 + 1
        assert proxy.count(PUT) == 2
        assert differences(flat(), atoll.objects.fetch(dataclasses.replace(ref, port=server.port))) == []


@pytest.mark.covers("X3", "P14")
def test_quotas_are_declared_and_withdrawing_makes_room(tmp_path: Path) -> None:
    with serve(tmp_path, **{"disk.objects_max_bytes": 2**20}) as server:
        with pytest.raises(BadRequest, match=r"keeps at most 1048576 of objects.*objects_max_bytes"):
            atoll.objects.publish(flat(), server=server.url)
        half = {"w": torch.zeros(2**17)}  # 512 KiB and a head: two do not fit
        ref = atoll.objects.publish(half, server=server.url)
        with pytest.raises(Busy, match="has no room for"):
            atoll.objects.publish(half, server=server.url)
        atoll.objects.withdraw(ref)
        atoll.objects.publish(half, server=server.url)
    with serve(tmp_path, **{"disk.min_free_bytes": 2**60}) as server:
        with pytest.raises(DiskFull):
            atoll.objects.publish(half, server=server.url)


@pytest.mark.covers("X2", "P1")
def test_publishing_needs_the_token_and_fetching_the_reference_alone(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    with serve(tmp_path) as server:
        ref = atoll.objects.publish(flat(), server=server.url)
        monkeypatch.delenv("ATOLL_TOKEN")
        assert said(fetching(nursery, tmp_path, ref)) == "same"  # a process without a token
        with pytest.raises(AuthError, match="token"):
            atoll.objects.publish(flat(), server=server.url)
        for field in ("secret", "object"):
            foreign = dataclasses.replace(ref, **{field: "0" * 32})
            with pytest.raises((AuthError, Gone), match=foreign.object[:8]):
                atoll.objects.fetch(foreign)
            http = Http(server.url)
            http.secret = foreign.secret
            with pytest.raises((AuthError, Gone)):
                http.delete(routes.OBJECT.format(object=foreign.object))
        assert differences(flat(), atoll.objects.fetch(ref)) == []


@pytest.mark.covers("X2")
def test_a_token_does_not_go_where_somebodys_reference_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "the-token-of-the-run")
    came = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                while b"\r\n\r\n" not in came:
                    came.extend(client.recv(4096))
                client.sendall(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        ref = TensorRef("127.0.0.1", port, False, "1" * 32, "2" * 32, "3" * 64, 1)
        with pytest.raises(AtollError):
            atoll.objects.fetch(ref)
        thread.join()
    assert f"{routes.SECRET_HEADER}: {'2' * 32}".encode() in came
    assert b"token" not in came


def opened(server: atoll.Server, cuts: Cuts) -> tuple[Http, str]:
    """An object that takes parts, and who may send them."""
    http = Http(server.url)
    message = messages.ObjectOpen(
        head_bytes=cuts.head_bytes, nbytes=cuts.nbytes, part_bytes=cuts.part_bytes, expires_s=100.0
    )
    answer = http.post(routes.OBJECTS, message, messages.ObjectOpened)
    http.secret = answer.secret
    return http, answer.object


@pytest.mark.covers("P1", "X3")
def test_an_object_is_complete_with_all_its_parts_or_not_at_all(tmp_path: Path) -> None:
    cuts = Cuts(64, 64 + 100, PART)
    data = bytes(range(164))
    source = tmp_path / "source"
    source.write_bytes(data)
    digests = [blake3(data[:64]).digest(), blake3(data[64:]).digest()]
    with serve(tmp_path) as server, source.open("rb") as file:
        http, object_id = opened(server, cuts)
        parts, path_of = HttpTransfer(http, 1, 10.0), routes.parts_of_object(object_id)
        complete = routes.OBJECT_COMPLETE.format(object=object_id)
        whole = messages.ObjectComplete(digest=Manifest.of_cuts(cuts, digests).id)
        parts.push(path_of, file.fileno(), cuts.parts()[:1], digests)
        with pytest.raises(Conflict, match="lacks 1 of 2 parts"):
            http.send(complete, whole)
        with pytest.raises(Conflict, match="has not arrived yet"):
            http.get(routes.OBJECT.format(object=object_id), messages.BlobManifest)
        with pytest.raises(PartCorrupt):
            parts.push(path_of, file.fileno(), cuts.parts()[1:], digests[:1] * 2)  # another digest than its own
        with pytest.raises(Conflict, match="lacks 1"):
            http.send(complete, whole)
        parts.push(path_of, file.fileno(), cuts.parts()[1:], digests)
        with pytest.raises(Conflict, match="do not make up its digest"):
            http.send(complete, messages.ObjectComplete(digest="0" * 64))
        http.send(complete, whole)
        http.send(complete, whole)  # the answer may have been lost
        with pytest.raises(Conflict, match="is complete"):
            parts.push(path_of, file.fileno(), cuts.parts()[1:], digests)
        told = http.get(routes.OBJECT.format(object=object_id), messages.BlobManifest)
        assert told.part_digests == [digest.hex() for digest in digests]
        parts.close()
        http.close()


@pytest.mark.covers("D3")
@pytest.mark.parametrize(
    "sizes",
    [(63, 128, PART), (64, 63, PART), (64, 128, 2**15), (64, 128, 2**25), (64, 2**50, PART), (2**27, 2**28, PART)],
)
def test_sizes_that_no_object_has_are_refused_before_a_file_is_made(
    tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    with serve(tmp_path) as server, pytest.raises(BadRequest, match="The object"):
        opened(server, Cuts(*sizes))
    assert files(tmp_path) == []


@pytest.mark.covers("P5", "D4")
def test_withdrawing_breaks_off_pulls_from_the_server(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        ref = atoll.objects.publish({"w": torch.zeros(2**25)}, server=server.url)
        go = tmp_path / "go"
        process = fetching(nursery, tmp_path, ref, what="large", hold=str(go))
        wait_until(Path(f"{go}.reached").exists, "the first part of the tensors")
        assert atoll.objects.withdraw(ref)
        assert files(tmp_path) == []
        go.touch()
        assert re.match(rf"Gone: Reference {ref.object[:8]} ", said(process))
