"""The note of a lease, by which `atoll worker` takes a site out of its run when the script did not do so itself."""

from __future__ import annotations

import shutil
import signal
import stat
from itertools import pairwise
from pathlib import Path

import pytest
from harness.processes import Nursery, wait_until
from kit import ForkedSite, atoll_worker, serve

import atoll

AT_ONCE = {"rounds.sites": 1, "network.heartbeat_timeout_s": 600.0}
"""No test lives as long as the lease: what the server knows of an end, it was told."""

DIES = """
import os, signal
import atoll
from kit.models import build_model
with atoll.join() as worker:
    for fl_round in worker:
        fl_round.load_into(build_model())
        {first}
        print("joined", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""

WAITS = """
import threading
import atoll
with atoll.join():
    threading.Event().wait(100)
"""


def states(server: atoll.Server) -> dict[str, str]:
    return {worker.site: worker.state for worker in server.status().workers}


@pytest.mark.covers("L9")
def test_a_site_takes_part_though_its_lease_cannot_be_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_LEASES", str(tmp_path / "gone"))
    with serve(tmp_path, **AT_ONCE) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers"):
            assert states(server) == {"a": "alive"}
        assert states(server) == {"a": "left"}


@pytest.mark.covers("L9")
def test_heartbeats_go_on_when_a_new_lease_cannot_be_noted(tmp_path: Path, nursery: Nursery) -> None:
    leases = tmp_path / "leases"
    leases.mkdir()
    quick = {"network.heartbeat_interval_s": 0.1, "network.heartbeat_timeout_s": 2.0, "rounds.sites": 1}
    ages: list[float] = []

    def is_heard_again_and_again() -> bool:
        (worker,) = server.status().workers
        ages.append(worker.last_heartbeat_s if worker.state == "alive" else 0.0)
        return sum(later < earlier for earlier, later in pairwise(ages)) >= 5

    with serve(tmp_path, **quick) as server:
        site = ForkedSite(nursery, tmp_path, server.url, "a", WAITS).start(ATOLL_LEASES=str(leases))
        wait_until(lambda: states(server) == {"a": "alive"}, "the site has joined")
        site.send(signal.SIGSTOP)
        wait_until(lambda: states(server) == {"a": "dead"}, "its lease is over")
        shutil.rmtree(leases)
        site.send(signal.SIGCONT)
        wait_until(is_heard_again_and_again, "heartbeats under the new lease")
        site.send(signal.SIGTERM)
        site.wait()


def test_only_the_user_can_read_a_lease_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_LEASES", str(tmp_path))
    with serve(tmp_path, **AT_ONCE) as server, atoll.join(server.url, site="a", folder=tmp_path / "workers"):
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_process_that_leaves_keeps_the_note_of_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older one leaves the run of another server: both are of one script, under one name."""
    monkeypatch.setenv("ATOLL_LEASES", str(tmp_path))
    (tmp_path / "two").mkdir()
    with serve(tmp_path, **AT_ONCE) as one, serve(tmp_path / "two", **AT_ONCE) as two:
        older = atoll.join(one.url, site="a", folder=tmp_path / "workers")
        newer = atoll.join(two.url, site="a", folder=tmp_path / "others")
        noted = (tmp_path / "a").read_text()
        older.leave()
        assert (tmp_path / "a").read_text() == noted
        newer.leave()
        assert not (tmp_path / "a").exists()


@pytest.mark.covers("L9", "P6")
def test_a_killed_script_is_taken_out_of_the_run_when_a_signal_ends_its_restarts(tmp_path: Path) -> None:
    with serve(tmp_path, **AT_ONCE) as server:
        with atoll_worker(tmp_path, server.url, DIES.format(first=""), "--restarts", "9") as process:
            assert process.stderr is not None
            assert any("; restart 1 of 9" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)  # in the pause before the restart
            process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert states(server) == {"a": "failed"}


@pytest.mark.covers("P6")
@pytest.mark.parametrize("lost", ["token", "folder"])
def test_atoll_worker_ends_with_the_scripts_code_when_it_cannot_leave_for_it(tmp_path: Path, lost: str) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    first = {
        "token": "os.unlink(os.environ['ATOLL_TOKEN_FILE'])",
        "folder": "import shutil; shutil.rmtree(os.environ['ATOLL_LEASES'])",
    }[lost]
    with serve(tmp_path, **AT_ONCE) as server:
        env = {"ATOLL_TOKEN_FILE": str(token)}
        with atoll_worker(tmp_path, server.url, DIES.format(first=first), env=env) as process:
            out, _ = process.communicate(timeout=60)
    assert out == "joined\n"
    assert process.returncode == 128 + signal.SIGKILL
