"""Workers of a swarm know each other by the certificates of their sites."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from http.client import HTTPSConnection, IncompleteRead
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from blake3 import blake3
from kit.enrolling_server import EnrollingServer

from atoll.blobs.manifest import Cuts, Manifest
from atoll.errors import AtollError, AuthError, ServerUnreachable
from atoll.protocol import routes
from atoll.store.identities import NEVER
from atoll.tensors.layout import PART_BYTES
from atoll.tensors.reference import TensorRef
from atoll.transport.credential_store import SiteCredential
from atoll.transport.enrolment import enrol
from atoll.transport.http_client import Counters
from atoll.transport.object_client import object_http
from atoll.transport.tls import client_context, fixed
from atoll.worker.peer.peer_transfers import PeerServer, open_host


@contextlib.contextmanager
def peer_of(site: str, credential: SiteCredential | None) -> Iterator[PeerServer]:
    server = PeerServer(open_host(site, "127.0.0.1", 10.0, credential), Counters(), None, credential)
    try:
        yield server
    finally:
        server.close()


def enrolled(server: EnrollingServer, site: str) -> SiteCredential:
    server.invited[site.ljust(43, "-")] = site
    return enrol(server.invitation(site, site.ljust(43, "-")))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def offered(peer: PeerServer) -> tuple[TensorRef, bytes]:
    """A small file that a worker serves, and its content."""
    content = b"of this site" * 100
    fd = os.memfd_create("update", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        return peer.serve(fd, Manifest.of_cuts(Cuts(0, len(content), PART_BYTES), [blake3(content).digest()])), content
    finally:
        os.close(fd)


def test_sites_of_one_run_reach_each_other_by_certificate(tmp_path: Path) -> None:
    """A worker reads another's file over TLS, both with the certificate of their site, without any ATOLL_PEER_TLS_*."""
    with EnrollingServer(tmp_path / "server") as server:
        a, b = enrolled(server, "a"), enrolled(server, "b")
        with peer_of("a", a) as mine, peer_of("b", b) as other:
            ref, content = offered(other)
            assert other.address.startswith("https://")
            mine.learn([other.address], ["b"])
            assert mine.why_unreached(other.address, lambda _: False) == ""
            with mine.connected(str(ref), 10.0) as (_, source):
                assert content in bytes(source.read(routes.OBJECT_DATA.format(object=ref.object), 10_000))


def test_worker_of_another_site_is_not_believed(tmp_path: Path) -> None:
    """If another site answers at the address that the server named for a site, nothing is read from it."""
    with EnrollingServer(tmp_path / "server") as server:
        a, b = enrolled(server, "a"), enrolled(server, "b")
        with peer_of("a", a) as mine, peer_of("b", b) as other:
            ref, _ = offered(other)
            mine.learn([other.address], ["c"])
            assert "the certificate of site b, not of site c" in mine.why_unreached(other.address, lambda _: False)
            with pytest.raises(ServerUnreachable, match="not of site c"):
                with mine.connected(str(ref), 10.0) as (_, source):
                    source.read(routes.OBJECT_DATA.format(object=ref.object), 10_000)


@pytest.mark.parametrize("kind", ["no certificate", "another authority"])
def test_stranger_reads_nothing_from_a_worker(tmp_path: Path, kind: str) -> None:
    """A worker sends nothing without a certificate of the run, even to a holder of the file's reference."""
    with EnrollingServer(tmp_path / "server") as server, EnrollingServer(tmp_path / "other") as foreign:
        b, stranger = enrolled(server, "b"), enrolled(foreign, "a")
        with peer_of("b", b) as other:
            ref, _ = offered(other)
            (tmp_path / "ca.pem").write_bytes(server.authority.certificate)
            context = stranger.context_to_peer("b") if kind == "another authority" else client_context(None)
            context.check_hostname = False
            context.load_verify_locations(tmp_path / "ca.pem")  # it knows which server it wants to reach
            http = object_http(ref, require_ip=lambda _: None, context=fixed(context))
            with contextlib.closing(http), pytest.raises(AtollError):
                http.reach(routes.OBJECT.format(object=ref.object), timeout_s=10)
            assert other.served == 0


def test_download_with_an_ended_certificate_is_broken_off(tmp_path: Path) -> None:
    """When a worker learns that a site was revoked, a running download of that site ends, and the next is refused."""
    content = os.urandom(2**20) * 64  # more than what sockets hold
    with EnrollingServer(tmp_path / "server") as server:
        a, b = enrolled(server, "a"), enrolled(server, "b")
        with peer_of("b", b) as other:
            fd = os.memfd_create("version", os.MFD_CLOEXEC)
            os.write(fd, content)
            cuts = Cuts(0, len(content), PART_BYTES)
            ref = other.serve(fd, Manifest.of_cuts(cuts, [blake3(each).digest() for each in parts_of(content)]))
            os.close(fd)
            http = object_http(ref, require_ip=lambda _: None, context=lambda: a.context_to_peer("b"))
            connection = HTTPSConnection("127.0.0.1", urlsplit(ref.server).port, context=a.context_to_peer("b"))
            connection.request("GET", routes.OBJECT_DATA.format(object=ref.object), headers=http.headers())
            answer = connection.getresponse()
            assert len(answer.read(2**16)) == 2**16
            other.learn([], ended={"a": NEVER})
            with pytest.raises((IncompleteRead, ConnectionError)):
                answer.read()
            connection.close()
            with contextlib.closing(http), pytest.raises(AuthError, match="was revoked, or has enrolled again"):
                http.reach(routes.OBJECT.format(object=ref.object), timeout_s=10)


def test_kept_connection_ends_with_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was opened before the certificate expired reads nothing after; no session can be resumed."""
    with EnrollingServer(tmp_path / "server") as server:
        a, b = enrolled(server, "a"), enrolled(server, "b")
        with peer_of("b", b) as other:
            ref, _ = offered(other)
            headers = object_http(ref, require_ip=lambda _: None, context=lambda: a.context_to_peer("b")).headers()
            connection = HTTPSConnection("127.0.0.1", urlsplit(ref.server).port, context=a.context_to_peer("b"))
            statuses = list[int]()
            for ahead_s in (0.0, 8 * 86400.0):  # the certificate lasts seven days
                now_s = time.time() + ahead_s
                monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
                connection.request("GET", routes.OBJECT.format(object=ref.object), headers=headers)
                answer = connection.getresponse()
                answer.read()
                statuses.append(answer.status)
            assert statuses == [200, 401]
            assert connection.sock.session is None or not connection.sock.session.has_ticket
            connection.close()


def parts_of(content: bytes) -> list[bytes]:
    return [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]


def test_certificate_of_a_new_enrolment_is_accepted(tmp_path: Path) -> None:
    """After a site has enrolled again, its new certificate is valid and its earlier ones are not. Other sites' stay
    valid.
    """
    with EnrollingServer(tmp_path / "server") as server:
        a, b, c = (enrolled(server, site) for site in "abc")
        with peer_of("b", b) as other:
            ref, _ = offered(other)

            def reach(own: SiteCredential) -> None:
                http = object_http(ref, require_ip=lambda _: None, context=lambda: own.context_to_peer("b"))
                with contextlib.closing(http):
                    http.reach(routes.OBJECT.format(object=ref.object), timeout_s=10)

            other.learn([], ended={"a": int(time.time()) - 60})
            reach(a)
            other.learn([], ended={"a": int(time.time()) + 60})
            with pytest.raises(AuthError):
                reach(a)
            reach(c)
