"""A lease, and the tickets and parts under it, belong to one process of a site, which has the secret of the lease."""

from __future__ import annotations

import json
import logging
import re
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.processes import free_port, wait_until
from kit import joined, post, serve
from kit.requests import answer, begin_request
from kit.wire import WireSite, WireUpdate, heard

import atoll
from atoll.errors import Superseded
from atoll.testing.run import failpoints

SECRET_DIGITS = 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serve(tmp_path) as server:
        yield server


@pytest.fixture
def update(server: atoll.Server) -> WireUpdate:
    """Of a, not sent yet."""
    a, _ = WireSite(server.url, "a", process="one"), WireSite(server.url, "b")
    return a.train()


def guesses(lease: str) -> dict[str, str]:
    """What a stranger can make up, and what differs from the true lease in one digit only."""
    site, number, process, *_ = lease.split(":")
    last = "0" if lease[-1] != "0" else "1"
    return {
        "name and number": f"{site}:{number}:",
        "the id of the process, too": f"{site}:{number}:{process}",
        "an empty secret": f"{site}:{number}:{process}:",
        "a secret of zeros": f"{site}:{number}:{process}:{'0' * SECRET_DIGITS}",
        "one wrong digit": lease[:-1] + last,
        "one digit less": lease[:-1],
        "another id": f"{site}:{number}:x:{lease.rpartition(':')[2]}"[:-1] + last,
    }


@pytest.mark.covers("F19")
@pytest.mark.parametrize("process", ["", "0123456789abcdef"], ids=["no id", "an id"])
def test_refuses_a_lease_without_its_secret(server: atoll.Server, process: str) -> None:
    """The server refuses a heartbeat, a leave message and a request for a ticket whose lease lacks the right secret.
    The true lease stays valid.
    """
    lease = joined(server.url, "a", process=process)
    for what, guess in guesses(lease).items():
        for path, body in (("/v1/workers/leave", {}), ("/v1/heartbeat", {"state": "x"}), ("/v1/tickets", {})):
            status, reply = post(server.url, path, body, guess)
            assert status in (400, 409), (what, path, reply)
            assert reply["code"] in ("lease_lost", "superseded", "bad_request"), (what, reply)
    (worker,) = server.status().workers
    assert (worker.state, worker.doing != "x") == ("alive", True)
    assert post(server.url, "/v1/workers/leave", {}, lease)[0] == 204
    assert server.status().workers[0].state == "left"


def test_only_downloads_under_the_lease_are_counted(tmp_path: Path) -> None:
    """The server counts a site's downloaded bytes only if the request has the site's true lease."""
    # Without it, the version is served, but not counted.
    with serve(tmp_path, sites=1) as server:
        site = WireSite(server.url, process="1")
        path = f"{server.url}/v1/fragments/0/versions/0/{site.ticket()['base_digest']}"

        def pull(lease: str) -> int:
            request = urllib.request.Request(path, headers={"Atoll-Lease": lease})
            with urllib.request.urlopen(request, timeout=30) as reply:
                return len(reply.read())

        def counted() -> int:
            return server.status().workers[0].bytes_down

        for guess in guesses(site.lease).values():
            assert pull(guess) > 0
        assert counted() == 0
        nbytes = pull(site.lease)
        wait_until(lambda: counted() == nbytes, "the bytes to be counted")


def test_lease_secrets_are_never_logged_shown_or_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the log, the status, the metrics nor a file of the server contains the secret of a lease."""
    caplog.set_level("DEBUG")
    with serve(tmp_path) as server:
        leases = [joined(server.url, site, process="1") for site in ("a", "b", "a")]
        post(server.url, "/v1/heartbeat", {}, leases[0])
        post(server.url, "/v1/workers/leave", {"error": "x"}, leases[1])
        shown = [server.status().model_dump_json()]
        for path in ("/v1/status", "/metrics", "/v1/run"):
            with urllib.request.urlopen(server.url + path, timeout=30) as reply:
                shown.append(reply.read().decode())
    files = b"".join(path.read_bytes() for path in sorted((tmp_path / "state").rglob("*")) if path.is_file())
    secrets = [lease.rpartition(":")[2] for lease in leases]
    assert len(set(secrets)) == 3
    for secret in secrets:
        assert re.fullmatch(f"[0-9a-f]{{{SECRET_DIGITS}}}", secret)
        assert secret not in caplog.text
        assert not any(secret in each for each in shown)
        assert secret.encode() not in files


@pytest.mark.covers("F25")
def test_a_failed_join_keeps_the_earlier_lease_valid(server: atoll.Server) -> None:
    """If the join of a second process fails because the disk is full, the lease of the first process stays valid."""
    lease = joined(server.url, "a", process="1")
    with failpoints("journal.commit=enospc"):
        assert post(server.url, "/v1/workers", {"protocol": 1, "site": "a", "process": "2"})[0] == 507
    assert post(server.url, "/v1/heartbeat", {}, lease)[0] == 200


def begun(server: atoll.Server, update: WireUpdate) -> socket.socket:
    """The request of part 0, of which 1000 bytes have arrived."""
    raw = update.begin(0, update.body(0)[:1000])
    wait_until(lambda: server.status().bytes_up == 1000, "the first bytes")
    return raw


@pytest.mark.covers("F19")
def test_a_site_cannot_overwrite_another_sites_part(server: atoll.Server, update: WireUpdate) -> None:
    """If site `b` sends a part for the ticket of site `a`, the server refuses, and keeps the part that `a` has sent."""
    # Guards against `put_part` without its first `require_open`: `begin_part` would forget the part before the check.
    assert update.put(0)[0] == 204
    assert replace(update, site=WireSite(server.url, "b")).put(0)[1]["code"] == "ticket_closed"
    assert update.state()["parts"] == [0]


@pytest.mark.covers("F19")
def test_a_superseded_process_stores_no_part(server: atoll.Server, update: WireUpdate) -> None:
    """If a newer process of the site joins while the older one uploads a part, the server refuses this part and stores
    nothing.
    """
    # Guards against `put_part` without its second `require_open`.
    raw = begun(server, update)
    newer = WireSite(server.url, "a", process="two")
    raw.sendall(update.body(0)[1000:])
    assert answer(raw)[1]["code"] == "superseded"
    assert replace(update, site=newer).state()["parts"] == []


def test_a_broken_upload_frees_its_file(tmp_path: Path) -> None:
    """If the upload of a part breaks off, the server frees its file: the update is sent again, and later rounds need no
    second file.
    """
    # Guards against `put_part` without `writer.abandon()`.
    with serve(tmp_path, sites=1, rounds=0) as server:
        a = WireSite(server.url)
        update = a.train()
        begun(server, update).close()
        update.submit()
        for _ in range(3):
            a.train().submit()
        assert len(list((tmp_path / "state" / "slots").glob("spool-*"))) == 1, "rounds later need no other file"


@pytest.mark.covers("F19")
def test_a_superseded_process_cannot_complete_its_update(server: atoll.Server, update: WireUpdate) -> None:
    """If a newer process of the site joins while the older one sends its completion, the server refuses."""
    # The ticket stays open. Guards against `complete` without `require_open`.
    message = json.dumps(update.push().message).encode()
    headers = {"Atoll_Lease": update.site.lease, "Content_Type": "application/json", "Content_Length": len(message)}
    line = f"POST /v1/tickets/{update.ticket}/complete"
    raw = heard(server, "a", lambda: begin_request(server.port, line, **headers))  # the lease was looked at
    newer = WireSite(server.url, "a", process="two")
    raw.sendall(message)
    assert answer(raw)[1]["code"] == "superseded"
    assert replace(update, site=newer).state()["outcome"]["state"] == "open"


@pytest.mark.covers("F19")
def test_a_superseded_process_stays_refused_after_restarts(tmp_path: Path) -> None:
    """After a restart, the server still refuses a process that a newer process of its site has replaced."""
    # If the server dies before the answer to a further join arrives, it knows that new lease after its restart.
    port = free_port()

    def beat(site: WireSite) -> tuple[int, str]:
        status, reply = site.post("/v1/heartbeat", {})
        return status, reply.get("code", "")

    with serve(tmp_path, **{"network.port": port}) as server:
        older, newer = (WireSite(server.url, "a", process=16 * digit) for digit in "0f")
    with serve(tmp_path, **{"network.port": port}):
        assert beat(older) == (409, "superseded")
        assert beat(newer) == (200, "")
        # granted, and the server dies before its answer is read
        unheard = WireSite(server.url, "a", process=16 * "f")
    with serve(tmp_path, **{"network.port": port}):
        assert beat(newer) == (409, "lease_lost")
        assert beat(unheard) == (200, "")


@pytest.mark.covers("F19")
def test_two_hosts_with_one_site_name_are_reported(server: atoll.Server, caplog: pytest.LogCaptureFixture) -> None:
    """When a second process joins under the same site name, the log says both hosts.

    Once the superseded process sends a heartbeat, the status warns that it still runs.
    """
    caplog.set_level(logging.WARNING, "atoll.server")
    first = WireSite(server.url, host="ward-1", process="one")
    first.beat()
    second = WireSite(server.url, host="ward-2", process="two")
    (report,) = [record.message for record in caplog.records if "ward-1" in record.message]
    assert "ward-2" in report
    assert server.status().warnings == []  # the first one may have ended
    status, refused = first.post("/v1/heartbeat", {})
    assert (status, refused["code"]) == (409, "superseded")
    assert "ward-2" in refused["message"]
    second.beat()
    (told,) = server.status().warnings
    assert "ward-1" in told
    assert "ward-2" in told
    assert first.post("/v1/heartbeat", {})[1]["code"] == "superseded"
    assert [record.message for record in caplog.records].count(told) == 1


def test_a_restarted_site_causes_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a site is started again on the same host, or leaves and joins again, neither the log nor the status has a
    warning.
    """
    caplog.set_level(logging.WARNING, "atoll.server")
    with serve(tmp_path, sites=3) as server:
        WireSite(server.url, host="ward-1", process="one")
        WireSite(server.url, host="ward-1", process="two").beat()
        for _ in range(2):
            with atoll.join(server.url, "b", folder=tmp_path / "w"):
                pass
        assert server.status().warnings == []
    assert caplog.records == []


def test_each_replaced_process_is_reported_with_its_host(server: atoll.Server) -> None:
    """If two processes of one site have been replaced and one still sends heartbeats, the status names that process's
    own host.
    """
    first, second, _ = (WireSite(server.url, host=f"ward-{each}", process=each) for each in ("one", "two", "three"))
    for displaced, host in ((first, "ward-one"), (second, "ward-two")):
        displaced.post("/v1/heartbeat", {})
        assert f"on {host} and on ward-three" in server.status().warnings[0]


def test_two_processes_on_one_machine_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If two processes on one machine join as the same site, the log of the second says that it replaces the first."""
    # The first process gets an error, and the status of the server warns.
    caplog.set_level(logging.INFO, "atoll")
    with serve(tmp_path, **{"network.heartbeat_interval_s": 0.1}) as server:
        with atoll.join(server.url, "a", folder=tmp_path / "one") as first:
            assert "replaces the one on host" not in caplog.text
            with atoll.join(server.url, "a", folder=tmp_path / "two"):
                assert "a: this process replaces the one on host " in caplog.text, "in the log of the newer one"
                with pytest.raises(Superseded):
                    next(iter(first))
            (told,) = server.status().warnings
    assert "a" in told
