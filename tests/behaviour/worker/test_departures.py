"""A process that ends, or hangs, without leaving its run: the server learns of it before the lease is over."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from harness.processes import Nursery, wait_until
from kit import DiLoCoSites, FederatedSites, ForkedSite, atoll_worker, serve
from kit.models import local_step
from torch import nn, optim

import atoll

AT_ONCE = {"rounds.sites": 2, "rounds.min_sites": 1, "network.heartbeat_timeout_s": 600.0}
"""No test lives as long as the lease: what goes on within it was told, not found out."""

JOINS = """
import os, signal, time
import atoll
from kit.models import build_model, train_
with atoll.join() as worker:
    for fl_round in worker:
        model = fl_round.load_into(build_model())
        train_(model, "a", fl_round.number)
        if fl_round.number == 2:
            print("trains", flush=True)
            {then}
        fl_round.submit(model)
"""

STARTS = """
import time
import torch
import atoll
from kit.models import build_model, local_step
model = build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loop = atoll.DiLoCo(model, optimizer)
loop.start()
for step in range(3):
    local_step(model, optimizer, "a", step)
print("trains", flush=True)
{then}
"""

WAITS = "time.sleep(100)"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"


def state_of(server: atoll.Server, site: str) -> str:
    return next((worker.state for worker in server.status().workers if worker.site == site), "")


@pytest.mark.covers("L9")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_site_that_is_told_to_end_leaves_at_once(tmp_path: Path, nursery: Nursery, number: signal.Signals) -> None:
    with serve(tmp_path, **AT_ONCE) as server:
        script = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n{JOINS.format(then=WAITS)}"
        site = ForkedSite(nursery, tmp_path, server.url, "a", script).start()
        other = FederatedSites(server.url, tmp_path, ["b"])
        wait_until(lambda: "trains" in site.output(), "round 2 at a")
        site.send(number)
        assert site.wait() == 128 + number
        assert state_of(server, "a") == "failed"
        other.join()
    assert other.trained["b", 3] == 1


IGNORES = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
"""


def test_a_site_under_nohup_trains_on_after_sighup(tmp_path: Path, nursery: Nursery) -> None:
    with serve(tmp_path, **AT_ONCE) as server:
        hangs_up = "signal.raise_signal(signal.SIGHUP)"
        site = ForkedSite(nursery, tmp_path, server.url, "a", IGNORES + JOINS.format(then=hangs_up)).start()
        other = FederatedSites(server.url, tmp_path, ["b"])
        assert site.wait() == 0
        other.join()
        assert state_of(server, "a") == "left"


@pytest.mark.covers("L9", "P6")
def test_a_script_that_is_killed_is_taken_out_of_the_run_by_atoll_worker(tmp_path: Path) -> None:
    with serve(tmp_path, **AT_ONCE) as server:
        other = FederatedSites(server.url, tmp_path, ["b"])
        with atoll_worker(tmp_path, server.url, JOINS.format(then=DIES)) as process:
            _, said = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGKILL
        assert state_of(server, "a") == "failed"
        other.join()
    assert "SIGKILL" in said.splitlines()[-1]
    assert other.trained["b", 3] == 1


@pytest.mark.covers("L9")
@pytest.mark.parametrize(
    ("then", "code", "state"), [(WAITS, 128 + signal.SIGTERM, "failed"), ("", 0, "left")], ids=["sigterm", "ends well"]
)
def test_a_loop_that_is_never_stopped_leaves_when_its_process_ends(
    tmp_path: Path, then: str, code: int, state: str
) -> None:
    with serve(tmp_path, **AT_ONCE | {"rounds.sites": 1}, algorithm="diloco", H=100) as server:
        with atoll_worker(tmp_path, server.url, STARTS.format(then=then)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n"
            if then:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        assert process.returncode == code
        assert state_of(server, "a") == state


@pytest.mark.covers("L13")
def test_a_training_thread_that_hangs_while_heartbeats_go_on_is_reported(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def hangs(model: nn.Module, optimizer: optim.Optimizer, site: str, step: int) -> None:
        if (site, step) == ("a", 3):
            assert goes_on.wait(60)
        local_step(model, optimizer, site, step)

    beats = {"network.heartbeat_interval_s": 0.1, "network.heartbeat_timeout_s": 0.5}
    with serve(tmp_path, algorithm="diloco", H=2, **beats) as server:
        sites = DiLoCoSites(server.url, tmp_path, 20, step=hangs)
        reason = "a sends heartbeats, but its training has made no step"
        wait_until(lambda: reason in server.status().fragments[0].reason, "the report")
        assert state_of(server, "a") == "alive"
        goes_on.set()
        sites.join()
        server.run()
        assert reason not in server.status().fragments[0].reason
