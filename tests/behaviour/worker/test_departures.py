"""What the server knows of a site: its heartbeats, its lease, and that its process has ended or hangs."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from harness.processes import Nursery, wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import DiLoCoSites, FederatedSites, ForkedSite, Gate, atoll_worker, diloco, run_to_end, serve, take_steps
from kit.models import build_model
from kit.servers import state_of

import atoll

AT_ONCE: dict[str, Any] = {"rounds.sites": 1, "network.heartbeat_timeout_s": 600.0}
"""No test lives as long as the lease: what goes on within it was told, not found out."""
TWO = AT_ONCE | {"rounds.sites": 2, "rounds.min_sites": 1}
SILENT = AT_ONCE | {"network.heartbeat_interval_s": 600.0, "network.heartbeat_timeout_s": 0}
"""A heartbeat that waits for its interval comes far behind the end of a test."""

JOINS = """
import os, signal, time
import atoll
from kit.models import build_model, train_
with atoll.join() as worker:
    for fl_round in worker:
        model = fl_round.load_into(build_model())
        train_(model, "a", fl_round.number)
        if fl_round.number == {round}:
            print("trains", flush=True)
            {then}
        fl_round.submit(model)
"""
WAITS = "time.sleep(100)"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
HANGS_UP = "signal.raise_signal(signal.SIGHUP)"


# -- processes that end, or hang, without leaving their run


def test_a_site_that_ignores_sighup_trains_on(tmp_path: Path, nursery: Nursery) -> None:
    """A script that ignores SIGHUP, as under nohup, trains to the end and leaves the run as usual."""
    with serve(tmp_path, **AT_ONCE) as server:
        script = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{JOINS.format(round=2, then=HANGS_UP)}"
        assert ForkedSite(nursery, tmp_path, server.url, "a", script).start().wait() == 0
        assert state_of(server) == "left"


@pytest.mark.covers("L9", "P6")
def test_atoll_worker_leaves_for_a_killed_script(tmp_path: Path) -> None:
    """If its script is killed, `atoll worker` takes the site out of the run. The other site's rounds go on."""
    with serve(tmp_path, **TWO) as server:
        other = FederatedSites(server.url, tmp_path, ["b"])
        with atoll_worker(tmp_path, server.url, JOINS.format(round=2, then=DIES)) as process:
            _, said = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGKILL
        assert state_of(server) == "failed"
        other.join()
    assert "SIGKILL" in said.splitlines()[-1]
    assert other.trained["b", 3] == 1


@pytest.mark.covers("L13")
def test_a_hanging_training_thread_is_reported(tmp_path: Path) -> None:
    """If a site's training hangs while its heartbeats go on, the status says that its training makes no step."""
    gate = Gate(3, "a")
    beats = {"network.heartbeat_interval_s": 0.1, "network.heartbeat_timeout_s": 0.5}
    with serve(tmp_path, algorithm="diloco", H=2, **beats) as server:
        sites = DiLoCoSites(server.url, tmp_path, 20, during=gate)
        reason = "a sends heartbeats, but its training has made no step"
        wait_until(lambda: reason in server.status().fragments[0].reason, "the report")
        assert state_of(server) == "alive"
        gate.open()
        run_to_end(server, sites)
        assert reason not in server.status().fragments[0].reason


# -- notes of leases: by them `atoll worker` takes a site out of its run when the script did not do so itself


@pytest.mark.covers("L9")
def test_a_site_trains_without_a_lease_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a site cannot write its lease to a file, it takes part in the run and leaves it as usual."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATOLL_LEASES", str(tmp_path / "file" / "leases"))
    with serve(tmp_path, **AT_ONCE) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers"):
            assert state_of(server) == "alive"
        assert state_of(server) == "left"


@pytest.mark.covers("L9")
def test_heartbeats_continue_without_a_lease_file(tmp_path: Path, nursery: Nursery) -> None:
    """If a site cannot write its new lease to a file, its heartbeats continue under the new lease."""
    leases = tmp_path / "made" / "leases"
    leases.parent.mkdir()
    ages: list[float] = []

    def is_heard_again_and_again() -> bool:
        (worker,) = server.status().workers
        ages.append(worker.last_heartbeat_s if worker.state == "alive" else 0.0)
        return sum(later < earlier for earlier, later in pairwise(ages)) >= 5

    beats = {"network.heartbeat_interval_s": 0.1, "network.heartbeat_timeout_s": 2.0}
    with serve(tmp_path, sites=1, **beats) as server:
        script = JOINS.format(round=1, then=WAITS)
        site = ForkedSite(nursery, tmp_path, server.url, "a", script).start(ATOLL_LEASES=str(leases))
        wait_until(lambda: state_of(server) == "alive", "the site has joined")
        site.send(signal.SIGSTOP)
        wait_until(lambda: state_of(server) == "dead", "its lease is over")
        shutil.rmtree(leases.parent)
        leases.parent.touch()
        site.send(signal.SIGCONT)
        wait_until(is_heard_again_and_again, "heartbeats under the new lease")
        site.send(signal.SIGTERM)
        site.wait()


def test_lease_files_do_not_follow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If links stand in place of a lease's file, its incomplete file or its folder, no file behind the links
    changes.
    """
    leases, victim = tmp_path / "leases", tmp_path / "victim"
    leases.mkdir()
    victim.write_text("mine")
    (leases / "a").symlink_to(victim)
    (leases / f".a.{os.getpid()}").symlink_to(victim)
    monkeypatch.setenv("ATOLL_LEASES", str(leases))
    with serve(tmp_path, **AT_ONCE) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers"):
            assert (leases / "a").read_text().startswith(server.url)
        (tmp_path / "elsewhere").mkdir()
        leases.symlink_to(tmp_path / "elsewhere")
        with atoll.join(server.url, site="a", folder=tmp_path / "workers"):
            assert not any((tmp_path / "elsewhere").iterdir())
    assert victim.read_text() == "mine"


def test_an_older_process_leaves_a_newer_lease_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an older process leaves, it does not remove the lease file that a newer process of the same site name has
    written.
    """
    # Only the user can read the file. The older process leaves the run of another server.
    monkeypatch.setenv("ATOLL_LEASES", str(tmp_path))
    with serve(tmp_path, **AT_ONCE) as one, serve(tmp_path / "two", **AT_ONCE) as two:
        older = atoll.join(one.url, site="a", folder=tmp_path / "workers")
        newer = atoll.join(two.url, site="a", folder=tmp_path / "others")
        noted = (tmp_path / "a").read_text()
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
        older.leave()
        assert (tmp_path / "a").read_text() == noted
        newer.leave()
        assert not (tmp_path / "a").exists()


@pytest.mark.covers("L9", "P6")
def test_a_signal_ends_restarts_and_the_membership(tmp_path: Path) -> None:
    """If `atoll worker` gets SIGTERM between two restarts of its killed script, it restarts no more and takes the site
    out of the run.
    """
    with serve(tmp_path, **AT_ONCE) as server:
        with atoll_worker(tmp_path, server.url, JOINS.format(round=1, then=DIES), "--restarts", "9") as process:
            assert process.stderr is not None
            assert any("; restart 1 of 9" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)  # in the pause before the restart
            process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert state_of(server) == "failed"


@pytest.mark.covers("P6")
def test_a_killed_atoll_worker_leaves_no_folder_behind(tmp_path: Path) -> None:
    """If `atoll worker` is killed, its script leaves the run and the temporary folder is removed."""
    (tmp_path / "temporary").mkdir()
    with serve(tmp_path, **AT_ONCE) as server:
        script, temporary = JOINS.format(round=1, then=WAITS), {"TMPDIR": str(tmp_path / "temporary")}
        with atoll_worker(tmp_path, server.url, script, env=temporary) as process:
            assert process.stdout.readline() == "trains\n"  # before, a signal can end the script by itself
            process.kill()
            wait_until(lambda: state_of(server) == "failed", "its script has left")
            wait_until(lambda: not list((tmp_path / "temporary").iterdir()), "the folder is removed")


@pytest.mark.covers("D4")
def test_atoll_worker_removes_files_of_killed_workers(tmp_path: Path) -> None:
    """A new `atoll worker` removes the lease file of an earlier one that was killed together with its script. It keeps
    those of active sites.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    kills = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getppid(), signal.SIGKILL); {DIES}"
    noted = []
    with serve(tmp_path, **TWO) as server:
        start = partial(atoll_worker, tmp_path, server.url, env={"TMPDIR": str(temporary)})
        with start(JOINS.format(round=1, then=WAITS), site="b"):
            wait_until(lambda: list(temporary.glob("*/b")), "b has joined", 60)
            for script in (JOINS.format(round=1, then=kills), ""):
                with start(script) as process:
                    process.communicate(timeout=60)
                noted.append(sorted(path.name for path in temporary.glob("*/*")))
            assert noted == [["a", "b"], ["b"]]  # b takes part
            assert len(list(temporary.iterdir())) == 1


BEHIND = """
import subprocess, sys, time
subprocess.run([sys.executable, "-c", "import atoll; atoll.functional.init(); atoll.functional.is_running()"])
print("ended", flush=True)
time.sleep(100)
"""


@pytest.mark.covers("P6")
def test_a_child_of_the_script_leaves_by_itself(tmp_path: Path) -> None:
    """If the script of `atoll worker` starts a process that joins and ends, the site leaves the run at the process's
    end.

    The script itself may go on for hours, and its exit code is not that of the process.
    """
    with serve(tmp_path, **AT_ONCE) as server:
        with atoll_worker(tmp_path, server.url, BEHIND) as process:
            assert process.stdout.readline() == "ended\n"
            assert state_of(server) == "left"


@pytest.mark.covers("P6")
@pytest.mark.parametrize(
    "loses",
    ["os.unlink(os.environ['ATOLL_TOKEN_FILE'])", "import shutil; shutil.rmtree(os.environ['ATOLL_LEASES'])"],
    ids=["token", "folder"],
)
def test_atoll_worker_ends_with_its_scripts_exit_code(tmp_path: Path, loses: str) -> None:
    """`atoll worker` ends with the exit code of its script, even if it cannot take the site out of the run."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    with serve(tmp_path, **AT_ONCE) as server:
        script = JOINS.format(round=1, then=f"{loses}; {DIES}")
        with atoll_worker(tmp_path, server.url, script, env={"ATOLL_TOKEN_FILE": str(token)}) as process:
            out, _ = process.communicate(timeout=60)
    assert out == "trains\n"
    assert process.returncode == 128 + signal.SIGKILL


# -- heartbeats: status is as fresh as what a worker does


def told(server: atoll.Server) -> tuple[str, str, int]:
    """State, what it does, and its step."""
    (worker,) = server.status().workers
    return worker.state, worker.doing, worker.step


@pytest.mark.covers("L9", "F22")
@pytest.mark.parametrize("action", ["reset", pytest.param("close", marks=pytest.mark.long)])
def test_an_unanswered_heartbeat_is_repeated_soon(tmp_path: Path, action: Literal["reset", "close"]) -> None:
    """If a heartbeat gets no answer, the worker repeats it at once, not after the interval of ten minutes.

    Until then, the server might take the worker for dead.
    """
    with serve(tmp_path, **SILENT) as server, Proxy(server.port) as proxy:
        faults = [Fault("POST .*heartbeat", "down", BEFORE_HEADER, action) for _ in range(2)]
        proxy.faults += faults
        worker = atoll.join(proxy.url, "a", folder=tmp_path / "w")
        wait_until(lambda: proxy.count("POST .*heartbeat") >= 3, "a third heartbeat")
        assert all(fault.reached.is_set() for fault in faults)
        worker.leave()


@pytest.mark.covers("L13")
def test_a_changed_state_is_reported_at_once(tmp_path: Path) -> None:
    """If a worker's state changes, it reports it to the server without waiting for the next heartbeat."""
    with (
        serve(tmp_path, **SILENT) as server,
        Proxy(server.port) as proxy,
        atoll.join(proxy.url, "a", folder=tmp_path / "w") as worker,
    ):
        fl_round = worker.next_round()
        model = fl_round.load_into(build_model())
        wait_until(lambda: told(server)[1] == "training", "training")
        before = proxy.count("POST .*heartbeat")
        fl_round.submit(model)
        wait_until(lambda: proxy.count("POST .*heartbeat") > before, "a report of the submission")


@pytest.mark.covers("L13")
@pytest.mark.parametrize("fails", [False, True])
def test_leaving_reports_the_last_figures(tmp_path: Path, fails: bool) -> None:
    """When a worker leaves, also by an error, it reports its number of steps.

    Steps alone do not change the state, so they would wait for the next heartbeat, here ten minutes.
    """
    with serve(tmp_path, algorithm="diloco", H=100, **SILENT) as server:
        loop = diloco(server, tmp_path).start()
        wait_until(lambda: told(server)[1] == "training", "a heartbeat")
        take_steps(loop, 41)
        assert told(server)[2] == 0
        error = ValueError("no data") if fails else None
        loop.__exit__(type(error) if error else None, error, None)
        assert told(server) == (("failed", "failed", 41) if fails else ("left", "left", 41))
