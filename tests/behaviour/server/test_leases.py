"""A lease speaks for its site by 128 secret bits: the site's name and the number alone open nothing."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from harness.processes import free_port, wait_until
from kit import joined, post, serve

import atoll
from atoll.testing.run import failpoints

SECRET_DIGITS = 32


def state_of(server: atoll.Server, site: str) -> str:
    return next(worker.state for worker in server.status().workers if worker.site == site)


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
def test_refuses_a_lease_without_its_secret(tmp_path: Path, process: str) -> None:
    with serve(tmp_path) as server:
        lease = joined(server.url, "a", process=process)
        for what, guess in guesses(lease).items():
            for path, body in (("/v1/workers/leave", {}), ("/v1/heartbeat", {"state": "x"}), ("/v1/tickets", {})):
                status, reply = post(server.url, path, body, guess)
                assert status in (400, 409), (what, path, reply)
                assert reply["code"] in ("lease_lost", "superseded", "bad_request"), (what, reply)
        assert state_of(server, "a") == "alive"
        assert all(worker.doing != "x" for worker in server.status().workers)
        assert post(server.url, "/v1/workers/leave", {}, lease)[0] == 204
        assert state_of(server, "a") == "left"


@pytest.mark.covers("F19")
def test_honours_a_lease_after_the_server_was_started_again(tmp_path: Path) -> None:
    port = free_port()
    with serve(tmp_path, **{"network.port": port}) as server:
        lease = joined(server.url, "a", process="1")
    with serve(tmp_path, **{"network.port": port}) as server:
        for guess in guesses(lease).values():
            assert post(server.url, "/v1/heartbeat", {}, guess)[0] in (400, 409)
        assert post(server.url, "/v1/heartbeat", {}, lease)[0] == 200


def test_counts_what_a_site_pulls_only_under_its_lease(tmp_path: Path) -> None:
    with serve(tmp_path, **{"rounds.sites": 1}) as server:
        lease = joined(server.url, "a", process="1")
        _, reply = post(server.url, "/v1/tickets", {"wait_s": 5.0}, lease)
        path = f"{server.url}/v1/fragments/0/versions/0/{reply['ticket']['base_digest']}"

        def pull(sent: str) -> int:
            with urllib.request.urlopen(urllib.request.Request(path, headers={"Atoll-Lease": sent}), timeout=30) as got:
                return len(got.read())

        def counted() -> int:
            return server.status().workers[0].bytes_down

        for guess in guesses(lease).values():
            assert pull(guess) > 0
        assert counted() == 0
        nbytes = pull(lease)
        wait_until(lambda: counted() == nbytes, "the bytes to be counted")


def test_the_secret_is_in_no_log_status_or_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_a_join_that_the_journal_cannot_take_leaves_the_lease_before_it(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        lease = joined(server.url, "a", process="1")
        with failpoints("journal.commit=enospc"):
            status, _ = post(server.url, "/v1/workers", {"protocol": 1, "site": "a", "process": "2"})
        assert status == 507
        assert post(server.url, "/v1/heartbeat", {}, lease)[0] == 200
