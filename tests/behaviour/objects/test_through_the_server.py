"""Objects that the server keeps for processes that cannot reach each other: after a restart, and until they expire.

`flat()` in parts of 64 KiB is 18 parts: 1 of head, 16 of `w`, and one of the rest.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from harness.processes import Nursery, free_port, wait_until
from harness.proxy import Fault, Proxy
from kit import serve, write_run_file
from kit.payloads import manifest_of, plain
from kit.peers import Connection, Peer, Request
from kit.processes import url_of
from kit.requests import post, send
from object_world import PART, SCRIPT, flat, output_of, start_fetch, start_paused_fetch
from safetensors.torch import load_file

import atoll
from atoll import TensorRef
from atoll.errors import AtollError, AuthError, BadRequest, Busy, DiskFull, Gone, TransferAborted, TransferError

PUT = "PUT .*/parts/5 "


def files(folder: Path) -> list[str]:
    """Kinds of files that it keeps."""
    return sorted(path.suffix for path in (folder / "state" / "objects").glob("*"))


@pytest.mark.covers("P1", "P4")
def test_objects_at_a_server_outlive_its_restart(nursery: Nursery, tmp_path: Path) -> None:
    """Objects that the server keeps can be fetched by another process, also after the server has restarted."""
    port = free_port()
    with serve(tmp_path, **{"network.port": port}) as server:
        arguments = json.dumps({"what": "flat", "server": server.url, "chunk_bytes": PART})
        publisher = nursery.start(str(SCRIPT), "publish", arguments, cwd=tmp_path)
        ref = TensorRef.parse(output_of(publisher))  # it has ended
        assert (ref.host, ref.port) == ("127.0.0.1", port)
        assert output_of(start_fetch(nursery, tmp_path, ref)) == "same"
    with serve(tmp_path, **{"network.port": port}):
        assert output_of(start_fetch(nursery, tmp_path, ref, how="disk")) == "same"
        assert files(tmp_path) == [".json", ".safetensors"]
        assert atoll.objects.withdraw(ref)
        assert files(tmp_path) == []
        assert output_of(start_fetch(nursery, tmp_path, ref, optional=True)) == "none"


@pytest.mark.covers("P1", "P2")
def test_the_server_keeps_objects_as_safetensors_files(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        atoll.objects.publish(flat(), server=server.url)
        (path,) = (tmp_path / "state" / "objects").glob("*.safetensors")
        opened = load_file(path)
        assert plain({key: opened[key] for key in flat()}) == plain(
            {key: torch.as_tensor(value) for key, value in flat().items()}
        )
        inline = atoll.objects.publish(flat(), server=server.url, chunk_bytes=0)
        assert plain(atoll.objects.fetch(inline)) == plain(flat())


@pytest.mark.covers("F41")
def test_the_server_reports_an_unusable_objects_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the objects folder becomes unusable, publishing and fetching fail with an error that names it."""
    # The server goes on. Here, a file takes the place of the folder while the server runs.
    folder = tmp_path / "state" / "objects"
    with serve(tmp_path) as server:
        inline, kept = ({"w": torch.ones(count)} for count in (2, 2**17))
        refs = [atoll.objects.publish(each, server=server.url) for each in (inline, kept)]
        folder.rename(tmp_path / "away")
        folder.touch()
        for ref in refs:
            with pytest.raises(AtollError, match=f"{folder}.* cannot be used"):
                atoll.objects.fetch(ref)
        with pytest.raises(AtollError, match=f"{folder} cannot be used"):
            atoll.objects.publish(kept, server=server.url)
        assert atoll.objects.withdraw(refs[0])
        folder.unlink()
        (tmp_path / "away").rename(folder)
        assert plain(atoll.objects.fetch(refs[1])) == plain(kept)
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.covers("P14", "D4")
def test_expired_objects_are_removed(tmp_path: Path) -> None:
    """The server removes an expired object and keeps the others. The error of a later fetch says when the object
    expired.
    """
    with serve(tmp_path) as server:
        kept = atoll.objects.publish(flat(), server=server.url)
        ref = atoll.objects.publish(flat(), server=server.url, expires_s=0.2)
        wait_until(lambda: len(files(tmp_path)) == 2, "the end of the other")
        wait_until(lambda: time.time() > ref.expires_at + 1, "its time, in whole seconds")
        with pytest.raises(Gone, match=rf"{ref.object[:8]} .*it expired at .* longer expires_s"):
            atoll.objects.fetch(ref)
        assert atoll.objects.fetch(ref, optional=True) is None
        assert plain(atoll.objects.fetch(kept)) == plain(flat())


@pytest.mark.covers("P14", "D4")
def test_the_server_limits_how_long_objects_are_kept(tmp_path: Path) -> None:
    """The server keeps an object for at most `disk.objects_expire_s`, even if its publisher asks for longer."""
    with serve(tmp_path, **{"disk.objects_expire_s": 100.0}) as server:
        begin = time.time()
        ref = atoll.objects.publish(flat(), server=server.url, expires_s=1e6)
        assert begin + 98 <= ref.expires_at <= time.time() + 100


@pytest.mark.covers("D4", "P14")
def test_a_start_removes_expired_objects_and_leftovers(tmp_path: Path) -> None:
    """A starting server removes expired objects and the files that a killed server has left."""
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
        assert plain(atoll.objects.fetch(ref)) == plain(flat())


@pytest.mark.covers("D4", "X3")
def test_a_killed_server_leaves_no_upload(nursery: Nursery, tmp_path: Path) -> None:
    """If a server is killed during an upload of an object, its next start removes the incomplete file."""
    write_run_file(tmp_path, **{"network.port": 0})
    server = nursery.start("atoll", "server", "run.toml", cwd=tmp_path)
    with Proxy(int(url_of(server).rpartition(":")[2])) as proxy, ThreadPoolExecutor(1) as pool:
        fault = Fault(PUT, "up", at=1000, action="stall")
        proxy.faults.append(fault)
        upload = pool.submit(atoll.objects.publish, flat(), server=proxy.url, chunk_bytes=PART, idle_timeout_s=0.5)
        assert fault.reached.wait(30)
        assert files(tmp_path) == [".part"]
        server.kill()
        assert isinstance(upload.exception(30), TransferError)
    again = nursery.start("atoll", "server", "run.toml", cwd=tmp_path)
    url_of(again)
    assert files(tmp_path) == []
    again.kill()


@pytest.mark.covers("D4", "P5")
def test_an_aborted_upload_of_an_object_leaves_no_file(tmp_path: Path) -> None:
    abort = threading.Event()
    with serve(tmp_path) as server, Proxy(server.port) as proxy:
        proxy.faults.append(Fault(PUT, "up", at=1000, action="stall", wait=abort.set))
        with pytest.raises(TransferAborted):
            atoll.objects.publish(flat(), server=proxy.url, chunk_bytes=PART, abort=abort)
        assert files(tmp_path) == []


@pytest.mark.covers("D4", "P3")
def test_a_stalled_upload_of_an_object_is_removed(tmp_path: Path) -> None:
    """If no more bytes of an upload arrive within the idle timeout, the server removes the incomplete file."""
    with serve(tmp_path, **{"network.idle_timeout_s": 0.3}) as server:
        assert opened(server, 64, 128)[0] == 200
        assert files(tmp_path) == [".part"]
        wait_until(lambda: not files(tmp_path), "its end")


@pytest.mark.covers("P1", "P2")
@pytest.mark.parametrize("action", ["close", "reset", "flip"])
def test_a_broken_part_is_sent_again(tmp_path: Path, action: Any) -> None:
    """If a part breaks off or is damaged on its way to the server, only this part is sent again."""
    with serve(tmp_path) as server, Proxy(server.port) as proxy:
        fault = Fault(PUT, "up", at=30_000, action=action)
        proxy.faults.append(fault)
        ref = atoll.objects.publish(flat(), server=proxy.url, chunk_bytes=PART)
        assert fault.reached.is_set()
        assert proxy.count("PUT ") == 18 + 1
        assert proxy.count(PUT) == 2
        assert plain(atoll.objects.fetch(dataclasses.replace(ref, port=server.port))) == plain(flat())


@pytest.mark.covers("X3", "P14")
def test_the_quota_of_objects_is_enforced(tmp_path: Path) -> None:
    """The server refuses an object that exceeds the quota, and names the setting. Withdrawing an object makes room
    again.
    """
    with serve(tmp_path, **{"disk.objects_max_bytes": 2**20}) as server:
        with pytest.raises(BadRequest, match=r"keeps at most 1048576 bytes of objects.*objects_max_bytes"):
            atoll.objects.publish(flat(), server=server.url)
        half = {"w": torch.zeros(2**17)}  # 512 KiB and a head: two do not fit
        ref = atoll.objects.publish(half, server=server.url)
        with pytest.raises(Busy, match="cannot take another object"):
            atoll.objects.publish(half, server=server.url)
        atoll.objects.withdraw(ref)
        atoll.objects.publish(half, server=server.url)
    with serve(tmp_path, **{"disk.min_free_bytes": 2**60}) as server:
        with pytest.raises(DiskFull):
            atoll.objects.publish(half, server=server.url)


@pytest.mark.covers("X2", "P1")
def test_publishing_needs_a_token(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing at a server needs the server's token. Fetching and withdrawing need only the reference with its
    secret.
    """
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    with serve(tmp_path) as server:
        ref = atoll.objects.publish(flat(), server=server.url)
        monkeypatch.delenv("ATOLL_TOKEN")
        assert output_of(start_fetch(nursery, tmp_path, ref)) == "same"  # a process without a token
        with pytest.raises(AuthError, match="token"):
            atoll.objects.publish(flat(), server=server.url)
        for field in ("secret", "object"):
            foreign = dataclasses.replace(ref, **{field: "0" * 32})
            with pytest.raises((AuthError, Gone), match=foreign.object[:8]):
                atoll.objects.fetch(foreign)
            with suppress(AuthError):
                assert not atoll.objects.withdraw(foreign)
        assert plain(atoll.objects.fetch(ref)) == plain(flat())


@pytest.mark.covers("X2")
def test_the_token_is_not_sent_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fetch` sends a reference's secret to the host in the reference, but never the token of the run."""
    monkeypatch.setenv("ATOLL_TOKEN", "the-token-of-the-run")

    def answer(connection: Connection, _: Request) -> None:
        connection.answer(410)

    with Peer.answering(answer) as peer, pytest.raises(AtollError):
        atoll.objects.fetch(TensorRef("127.0.0.1", peer.port, False, "1" * 32, "2" * 32, "3" * 64, 1))
    (request,) = peer.requests
    assert request.headers["atoll-secret"] == "2" * 32
    assert not any("token" in text for text in (*request.headers, *request.headers.values()))


def opened(server: atoll.Server, head_bytes: int, nbytes: int, part_bytes: int = PART) -> tuple[int, dict[str, Any]]:
    """Ask for room for an object; status and body of the answer."""
    sizes = {"head_bytes": head_bytes, "nbytes": nbytes, "part_bytes": part_bytes}
    return post(server.url, "/v1/objects", {**sizes, "expires_s": 100.0})


@pytest.mark.covers("P1", "X3")
def test_an_object_is_usable_only_with_all_its_parts(tmp_path: Path) -> None:
    """The server completes an object only if all its parts and its digest are correct."""
    # The object has two parts: a head of 64 bytes, and 100 bytes. Its digest is computed from its sizes and both parts'
    # digests.
    data = bytes(range(164))
    parts = [data[:64], data[64:]]
    digests = [blake3(part).digest() for part in parts]
    whole = blake3(blake3(f"64 164 {PART}".encode()).digest() + b"".join(digests)).hexdigest()
    with serve(tmp_path) as server:
        status, place = opened(server, 64, 164)
        assert status == 200

        def ask(method: str, path: str = "", body: bytes | None = None) -> tuple[int, str]:
            """Status, and the message of a refusal."""
            path = f"/v1/objects/{place['object']}{path}"
            status, reply = send(server.url, method, path, body, secret=place["secret"])
            return status, reply.get("message", "")

        def put(index: int, digest: bytes) -> tuple[int, str]:
            return ask("PUT", f"/parts/{index}", parts[index] + digest)

        def complete(digest: str = whole) -> tuple[int, str]:
            return ask("POST", "/complete", json.dumps({"digest": digest}).encode())

        def refused(answer: tuple[int, str], words: str) -> bool:
            return answer[0] == 409 and words in answer[1]

        assert put(0, digests[0])[0] == 204
        assert refused(complete(), "lacks 1 of 2 parts")
        assert refused(ask("GET"), "is still being uploaded")
        assert put(1, digests[0])[0] == 422  # another digest than its own
        assert refused(complete(), "lacks 1")
        assert put(1, digests[1])[0] == 204
        assert refused(complete("0" * 64), "do not match its digest")
        for _ in range(2):  # the answer may have been lost
            assert complete()[0] == 204
        assert refused(put(1, digests[1]), "is already complete")
        ref = TensorRef("127.0.0.1", server.port, False, place["object"], place["secret"], whole, 0)
        assert manifest_of(ref)["part_digests"] == [digest.hex() for digest in digests]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[atoll.Server]:
    with serve(tmp_path_factory.mktemp("sizes")) as server:
        yield server


@pytest.mark.covers("D3")
@pytest.mark.parametrize(
    "sizes",
    [(63, 128, PART), (64, 63, PART), (64, 128, 2**15), (64, 128, 2**25), (64, 2**50, PART), (2**27, 2**28, PART)],
)
def test_an_object_with_impossible_sizes_is_refused(server: atoll.Server, sizes: tuple[int, int, int]) -> None:
    """The server refuses sizes that no object can have before it creates a file."""
    status, reply = opened(server, *sizes)
    assert (status, "The object" in reply["message"]) == (400, True)
    assert files(server.settings.disk.state_dir.parent) == []


@pytest.mark.covers("P5", "D4")
def test_withdrawing_an_object_ends_running_fetches(nursery: Nursery, tmp_path: Path) -> None:
    """If an object is withdrawn from the server during a fetch, the fetch ends with an error and the file is
    deleted.
    """
    with serve(tmp_path) as server:
        ref = atoll.objects.publish({"w": torch.zeros(2**25)}, server=server.url)
        process, go = start_paused_fetch(nursery, tmp_path, ref)
        assert atoll.objects.withdraw(ref)
        assert files(tmp_path) == []
        go.touch()
        assert re.match(rf"Gone: Reference {ref.object[:8]} ", output_of(process))
