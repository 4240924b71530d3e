"""Peers and servers of a swarm that say what no honest one would: a worker goes on, and nothing of it is kept."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit import SETTINGS
from kit.models import wide_model
from kit.peers import Connection, Peer, Request
from kit.swarm_peers import peer_server
from pydantic import ValidationError

from atoll import Settings
from atoll.aggregation.plan import AggregationPlan
from atoll.blobs.manifest import Manifest
from atoll.errors import AtollError, Gone, ServerUnreachable, VersionSkew
from atoll.protocol import routes
from atoll.protocol.messages import BlobManifest
from atoll.protocol.swarm_messages import MOST_PEERS, Collect, Hold, PeerWork, Source, SwarmPlan
from atoll.protocol.values import FrozenRound, FrozenUpdate
from atoll.server.startup import plan_of
from atoll.store.file_slots import SPOOL
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import Counters, Http
from atoll.transport.object_client import object_http
from atoll.transport.part_transfer import HttpTransfer
from atoll.transport.peer_address import ANY_PEER, require_peer, why_no_peer
from atoll.worker.peer.agent import require_fitting
from atoll.worker.peer.peer_store import PeerStore
from atoll.worker.peer.peer_transfers import MOST_ADDRESSES, PeerServer, PeerTransfers, connected

pytestmark = pytest.mark.covers("P10", "X9")

DIGEST = "1" * 64
IDLE_S = 0.3


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> AggregationPlan:
    folder = tmp_path_factory.mktemp("state")
    given = SETTINGS | {"swarm.enabled": True, "rounds.sites": 3, "disk.state_dir": folder}
    return plan_of(Settings.build(given), wide_model(), None)


@pytest.fixture
def served() -> Iterator[PeerServer]:
    server = peer_server()
    yield server
    server.close()


class Lies:
    """A peer that offers an update honestly, apart from what it is told to do for one of the two requests."""

    def __init__(self, plan: AggregationPlan, of: str, lie: Callable[[Connection, bytes], object]) -> None:
        layout = plan.fragments[0].update
        digests = [bytes([index]) * 32 for index in range(len(layout.parts))]
        self.manifest = Manifest.of_layout(layout, digests)
        self.data, self._of, self._lie = bytes(layout.nbytes), of, lie

    def __call__(self, connection: Connection, request: Request) -> None:
        of, body = "manifest", BlobManifest.of(self.manifest).model_dump_json().encode()
        if request.path.endswith("/data"):
            of, body = "data", self.data[request.range]
        if of == self._of:
            self._lie(connection, body)
        elif of == "data":
            head = f"HTTP/1.1 206 So\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sock.sendall(head.encode() + body)
        else:
            connection.answer(200, body)


def head(connection: Connection, *lines: str, status: str = "200 So") -> None:
    connection.sock.sendall("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode())


def changed(**fields: Any) -> Callable[[Connection, bytes], None]:
    return lambda connection, body: connection.answer(200, json.dumps(json.loads(body) | fields).encode())


def endless(connection: Connection, _: bytes) -> None:
    head(connection, "Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    with suppress(OSError):
        while True:
            connection.sock.sendall(chunk)


def zipped(connection: Connection, _: bytes) -> None:
    body = gzip.compress(b" " * 2**26)
    head(connection, "Content-Encoding: gzip", f"Content-Length: {len(body)}")
    connection.sock.sendall(body)


def cut(connection: Connection, body: bytes) -> None:
    head(connection, f"Content-Length: {len(body)}")
    connection.sock.sendall(body[: len(body) // 2])
    connection.sock.close()


def silent(connection: Connection, body: bytes) -> None:
    head(connection, f"Content-Length: {len(body)}")
    threading.Event().wait(3 * IDLE_S)  # the reader has given up before
    connection.sock.close()


MESSAGES: dict[str, Callable[[Connection, bytes], object]] = {
    "NaN": changed(nbytes=float("nan")),
    "negative": changed(nbytes=-1),
    "huge": changed(nbytes=2**61, part_bytes=1),
    "no parts": changed(part_digests=[]),
    "other parts": changed(part_digests=[DIGEST]),
    "too many parts": changed(part_digests=[DIGEST] * 10_000),
    "path as digest": changed(layout_digest="../../etc/passwd"),
    "more fields": changed(settings={"path": "os:system"}),
}
"""Manifests that name other facts than the true one."""
LIES: dict[str, Callable[[Connection, bytes], object]] = {
    "nothing": lambda connection, _: connection.sock.close(),
    "no JSON": lambda connection, _: connection.answer(200, b"\xff\xfe\0"),
    "a list": lambda connection, _: connection.answer(200, b"[]"),
    "nested": lambda connection, _: connection.answer(200, b"[" * 1_000),
    "gone": lambda connection, _: connection.answer(410, b"{}"),
    "error of an error": lambda connection, _: connection.answer(500, b"<html>" + b"x" * 100_000),
    "no status": lambda connection, _: head(connection, status="999 ?"),
    "to elsewhere": lambda connection, _: head(
        connection, "Location: http://127.0.0.1:1/", "Content-Length: 0", status="302 Found"
    ),
    "a huge length": lambda connection, _: head(connection, "Content-Length: 99999999999999"),
    "a negative length": lambda connection, _: head(connection, "Content-Length: -5"),
    "cut": cut,
    "endless": endless,
    "zipped": zipped,
    "silent": silent,
    "shorter": lambda connection, body: connection.answer(200, body[:-1]),
    "longer": lambda connection, body: connection.answer(200, body + b" " * 10_000),
}


@pytest.mark.parametrize(
    ("of", "lie"), [*(("manifest", lie) for lie in (*LIES, *MESSAGES)), *(("data", lie) for lie in LIES)]
)
def test_an_update_of_a_lying_peer_fails(
    tmp_path: Path, plan: AggregationPlan, served: PeerServer, of: str, lie: str
) -> None:
    """If a peer sends a wrong manifest or wrong data, the download of its update raises an error, and the worker's file
    keeps its size.
    """
    # The honest manifest has digests that no data has, so any data is wrong too. After a wrong manifest, no data is
    # requested.
    lies, store = Lies(plan, of, (LIES | MESSAGES)[lie]), PeerStore(plan, tmp_path, "run", served)
    transfers = PeerTransfers(plan, Http("http://127.0.0.1:1"), served, IDLE_S, lambda _: None)
    with Peer.answering(lies) as peer, store.new_slots(0, SPOOL) as (slot,):
        assert slot is not None
        served.learn([peer.url])
        ref = TensorRef("127.0.0.1", peer.port, False, "0" * 32, "0" * 32, lies.manifest.id, 1)
        collect = Collect(ticket=1, fragment=0, site="b", digest=lies.manifest.id, source=str(ref))
        with pytest.raises(AtollError):
            transfers.update(collect, slot)
        assert of == "data" or not any(request.path.endswith("/data") for request in peer.requests)
        assert slot.path.stat().st_size == plan.fragments[0].update.nbytes
    store.close()


def test_a_worker_connects_only_to_named_addresses(served: PeerServer) -> None:
    """A worker connects only to addresses that the server has named. When an address is no longer named, it is no
    longer used.
    """
    with Peer.answering(lambda connection, _: connection.answer(200, b"{}")) as peer:
        ref = str(TensorRef("127.0.0.1", peer.port, False, "0" * 32, "0" * 32, DIGEST, 1))
        assert served.in_order([ref, "atoll-ref://nonsense"]) == []
        assert "has not named a worker" in served.why_unreached(peer.url, lambda _: True)
        with pytest.raises(Gone, match="has not named a worker"), served.connected(ref, IDLE_S):
            pass
        assert served.learn([peer.url]) == [peer.url]
        assert served.learn([peer.url]) == []
        assert served.in_order([ref]) == [ref]
        assert served.why_unreached(peer.url, lambda _: True) == ""
        served.learn([])  # it has left
        assert served.in_order([ref]) == []
        assert len(peer.requests) == 1


def test_the_number_of_learned_addresses_is_bounded(served: PeerServer) -> None:
    """A worker learns a bounded number of addresses, each once."""
    # Each new address is a line in the log. A server that names ever more addresses, or one twice, adds no more lines.
    addresses = [f"http://b:{port}" for port in range(1, MOST_ADDRESSES + 3)]
    assert served.learn(addresses[:2] * 2) == addresses[:2]
    assert served.learn(addresses[:-1]) == addresses[2:-2]
    assert served.learn(addresses) == []


def test_a_peers_reference_with_path_is_refused() -> None:
    """A worker does not follow a reference to another worker if the reference has a path."""
    with Peer.answering(lambda connection, _: connection.answer(200, b"{}")) as peer:
        ref = str(TensorRef("127.0.0.1", peer.port, False, "0" * 32, "0" * 32, DIGEST, 1, "/admin"))
        with pytest.raises(Gone, match="is not followed"), connected(ref, IDLE_S, Counters(), loopback=True):
            pass


@pytest.fixture
def moving_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name leads to another machine when it is checked, and to this machine itself when it is connected to."""
    honest, elsewhere = socket.getaddrinfo, ["192.0.2.1"]

    def lookup(host: str, *args: Any, **options: Any) -> Any:
        if host == "worker.test":
            host = elsewhere.pop() if elsewhere else "127.0.0.1"
        return honest("192.0.2.2" if host == "this.test" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.mark.usefixtures("moving_name")
@pytest.mark.parametrize("way", ["message", "part"])
def test_a_name_is_checked_again_when_connecting(way: str) -> None:
    """If the name of another worker leads to this machine when the connection is made, nothing is sent, although an
    earlier check found another machine.
    """
    with Peer.answering(lambda connection, _: connection.answer(200, b"{}")) as peer:
        assert why_no_peer("worker.test", loopback=False) == ""
        ref = TensorRef("worker.test", peer.port, False, "0" * 32, "0" * 32, DIGEST, 1)
        http = object_http(ref, require_ip=partial(require_peer, loopback=False))
        transfer = HttpTransfer(http, 1, IDLE_S)
        with ExitStack() as stack:
            stack.callback(http.close)
            stack.callback(transfer.close)
            ask = partial(http.reach, timeout_s=IDLE_S) if way == "message" else partial(transfer.read, most_bytes=100)
            with pytest.raises(ServerUnreachable, match="leads to this machine itself"):
                ask(routes.HEALTH)
        assert peer.requests == []


@pytest.mark.usefixtures("moving_name")
@pytest.mark.parametrize("way", ["attempt", "file"])
def test_a_worker_sends_nothing_to_its_own_machine(way: str) -> None:
    """If another worker's name leads to this machine, the worker neither tries to reach it nor reads a file from it."""
    server = peer_server(name="this.test")
    with Peer.answering(lambda connection, _: connection.answer(200, b"{}")) as peer, ExitStack() as stack:
        stack.callback(server.close)
        server.learn([address := f"http://worker.test:{peer.port}"])
        if way == "attempt":
            assert "leads to this machine itself" in server.why_unreached(address, lambda _: False)
        else:
            ref = TensorRef("worker.test", peer.port, False, "0" * 32, "0" * 32, DIGEST, 1)
            with pytest.raises(ServerUnreachable, match="leads to this machine itself"):
                with server.connected(str(ref), IDLE_S) as (_, source):
                    source.read(routes.HEALTH, 100)
        assert peer.requests == []


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "2852039166",
        "0xA9.0xFE.0xA9.0xFE",
        "::ffff:169.254.169.254",
        "fe80::1",
        "0.0.0.0",
        "0.1.2.3",
        "::",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
        "240.0.0.1",
    ],
)
def test_special_addresses_are_refused_for_workers(host: str) -> None:
    """Addresses of a cloud's metadata service, of many machines or of no machine are refused as the address of a
    worker.
    """
    assert "cannot be the address of a worker" in why_no_peer(host, loopback=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "::ffff:127.0.0.1", "127.1"])
def test_loopback_is_refused_across_machines(host: str) -> None:
    """A loopback address is accepted for a worker only if all workers are on one machine. Ordinary addresses are always
    accepted.
    """
    assert why_no_peer(host, loopback=True) == ""
    assert "leads to this machine itself" in why_no_peer(host, loopback=False)
    for ordinary in ("10.0.0.1", "192.168.7.7", "203.0.113.5", "2001:db8::1", "no-such-host.invalid"):
        assert why_no_peer(ordinary, loopback=False) == ""


@pytest.mark.parametrize(
    "address",
    [
        "http://a:80/",
        "http://a:80/x",
        "http://a:80?x",
        "http://a:80#x",
        "http://u@a:80",
        "http://u:p@a:80",
        "ftp://a:80",
        "file:///etc/passwd",
        "http://a",
        "http://a:0",
        "http://a:80\r\nX: y",
        "http://a:80\n",
        "http://[fe80::1%25eth0]:80",
        "http://-a:80",
        "http://" + "a" * 300 + ":80",
    ],
)
def test_a_peers_address_has_only_host_and_port(address: str) -> None:
    """The address of a peer has only a scheme, a host and a port. Any other form is refused."""
    assert PeerWork(stamp=0, peers=["http://a-b.example:80", "https://[::1]:65535"])
    for field in ("peers", "probe"):
        with pytest.raises(ValidationError):
            PeerWork.model_validate({"stamp": 0, field: [address]})


def hold(fragment: int = 0, version: int = 1) -> Hold:
    return Hold(fragment=fragment, version=version, digest=DIGEST, sources=[])


def collect(ticket: int = 1, fragment: int = 0) -> Collect:
    return Collect(ticket=ticket, fragment=fragment, site="b", digest=DIGEST, source="atoll-ref://b")


def closing(base: int = 0, fragment: int = 0, updates: int = 1, **numbers: Any) -> FrozenRound:
    facts: dict[str, Any] = {"site": "b", "digest": DIGEST, "weight": 1.0, "steps": 1, "norm": 1.0, "scale": 1.0}
    each = [FrozenUpdate(**{"ticket": index, **facts, **numbers}) for index in range(updates)]
    return FrozenRound(fragment=fragment, number=1, base_version=base, version=1, updates=each)


ORDERS: dict[str, tuple[PeerWork, str]] = {
    "a fragment to hold": (PeerWork(stamp=0, hold=[hold(fragment=1)]), "they name fragment 1, but the run has 1"),
    "a fragment to collect": (PeerWork(stamp=0, collect=[collect(fragment=10**6)]), "they name fragment 1000000"),
    "a fragment to close": (PeerWork(stamp=0, close=[closing(fragment=2**61)]), "they name fragment"),
    "versions": (PeerWork(stamp=0, hold=[hold(version=v) for v in range(9)]), "9 versions of a fragment, .* keeps 8"),
    "tickets": (PeerWork(stamp=0, collect=[collect(), collect()]), "an update twice"),
    "no updates": (PeerWork(stamp=0, close=[closing(updates=0)]), "a closed round in them has"),
    "one ticket twice": (PeerWork(stamp=0, close=[closing(updates=2, ticket=7)]), "a closed round in them has"),
    "many updates": (PeerWork(stamp=0, close=[closing(updates=5000)]), "a closed round in them has"),
    "a weight": (PeerWork(stamp=0, close=[closing(weight=1e308)]), "a closed round in them has"),
    "a scale": (PeerWork(stamp=0, close=[closing(scale=1.5)]), "a closed round in them has"),
    "a later base": (PeerWork(stamp=0, close=[closing(base=2**61)]), "a closed round in them has"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_orders_that_do_not_fit_are_refused(plan: AggregationPlan, order: str) -> None:
    """A worker refuses orders of the server that do not fit the run, such as an unknown fragment or too
    many versions.
    """
    # The run keeps two versions, pins four, and makes one while another one is removed, so there are at most eight.
    work, named = ORDERS[order]
    with pytest.raises(VersionSkew, match=named):
        require_fitting(work, plan)
    fits = PeerWork(stamp=0, hold=[hold(version=v) for v in range(8)], collect=[collect()], close=[closing(updates=3)])
    require_fitting(fits, plan)


@pytest.mark.parametrize(
    "fields",
    [
        {"hold": [hold().model_dump()] * 4097},
        {"hold": [hold().model_dump() | {"sources": [Source(version="atoll-ref://b").model_dump()] * 17}]},
        {"hold": [hold().model_dump() | {"state_digest": "../x"}]},
        {"hold": [hold().model_dump() | {"version": -1}]},
        {"hold": [hold().model_dump() | {"version": 2**62}]},
        {"collect": [collect().model_dump()] * 4097},
        {"collect": [collect().model_dump() | {"site": "../b"}]},
        {"peers": ["http://b:1"] * (MOST_PEERS + 1)},
        {"probe": ["http://b:1"] * (MOST_PEERS + 1)},
        {"close": [closing().model_dump() | {"population_scale": float("inf")}]},
    ],
)
def test_lists_and_numbers_of_orders_are_bounded(fields: dict[str, Any]) -> None:
    """A worker refuses orders of the server with a list that is too long, or with a number or name outside its
    bounds.
    """
    with pytest.raises(ValidationError):
        PeerWork.model_validate({"stamp": 0} | fields)


@pytest.mark.covers("X8")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("settings", {}),
        ("part_bytes", 1),
        ("part_bytes", 2**40),
        ("versions", 10**9),
        ("reduce", {"params": "../mean"}),
        ("reduce", {f"g{n}": "mean" for n in range(17)}),
        ("outer_lr_of", {"a": 0.0}),
        ("outer_lr_of", {"a": 1e308}),
        ("reducer", {"name": "/folder/file.py:C"}),
        ("reducer", {"name": "mean", "options": {"a b": 1}}),
        ("reducer", {"name": "mean", "options": {"a": "x" * 257}}),
        ("reducer", {"name": "mean", "options": {"a": {"path": "os:system"}}}),
        ("reducer", {"name": "mean", "options": {"a": [[1]]}}),
        ("reducer", {"name": "mean", "options": {"a": [1] * 17}}),
        ("reducer", {"name": "mean", "options": {"a": 10**301}}),
        ("reducer", {"name": "mean", "options": {"a": float("nan")}}),
        ("reducer", {"name": "mean", "options": {f"a{n}": 1 for n in range(65)}}),
        ("codec", {"name": "mean", "path": "x"}),
    ],
)
def test_a_plan_has_only_bounded_values(plan: AggregationPlan, key: str, value: Any) -> None:
    """A worker refuses a plan of the run with an unknown key, a value outside its bounds, or an option that could name
    code.
    """
    honest = plan.values.message().model_dump()
    SwarmPlan.model_validate(honest)
    with pytest.raises(ValidationError):
        SwarmPlan.model_validate(honest | {key: value})


def test_workers_connect_to_each_other_without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers connect to each other without the proxy of the environment."""
    # That proxy is for servers. A worker cannot check which address a proxy reaches.
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "")
    ref = TensorRef("10.0.0.7", 8513, False, "0" * 32, "0" * 32, DIGEST, 2_000_000_000)
    assert object_http(ref).proxy is not None
    assert object_http(ref, require_ip=ANY_PEER).proxy is None
