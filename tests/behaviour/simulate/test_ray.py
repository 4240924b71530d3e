"""The engine on Ray: the same bits as on this machine, actors that are killed, a Ray that is not there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.processes import Nursery, free_port, wait_until
from simulated_world import KILLS, RULES, doing, model_of, result_of, simulate, simulation, told, write

from atoll.errors import ConfigError, RunFailed

FOUR = ("--set", "rounds.sites=4", "--processes", "2", "--engine", "ray")


@pytest.fixture(scope="session")
def ray() -> Any:
    return pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")


@pytest.fixture(scope="module")
def ray_here(ray: Any) -> Iterator[Any]:
    """Ray in the test's process, which simulations use and leave as it is.

    Ray gives its workers niceness 15: beside other tests they would get next to no time, and not begin in 120 s.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.mark.covers("V1", "V2")
@pytest.mark.slow
@pytest.mark.timeout(400)  # it starts Ray
def test_another_ray_actor_trains_a_lost_sites_round(
    ray_here: Any, tmp_path: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a Ray actor is killed, another actor trains the site that it had, and the result is that of an undisturbed
    run.
    """
    # One is killed by the kernel, and one by Ray for lack of memory, which Ray reports when the result is asked for.
    get, short = ray_here.get, ["once"]

    def asked(ref: Any, timeout: float | None = None) -> Any:
        answer = get(ref, timeout=timeout)
        if isinstance(answer, tuple) and short:  # what a simulated site's round came to
            raise ray_here.exceptions.OutOfMemoryError(short.pop())
        return answer

    monkeypatch.setattr(ray_here, "get", asked)
    before = set(Path(tempfile.gettempdir()).glob("atoll-actor-*"))
    assert result_of(tmp_path, doing(KILLS, times=1), engine="ray", **RULES) == undisturbed
    left = set(Path(tempfile.gettempdir()).glob("atoll-actor-*")) - before
    assert len(left) <= 2, "of the two that were lost; the next simulation removes them"
    assert len(list(tmp_path.glob("killed-*"))) == 1
    assert not short
    assert ray_here.is_initialized()  # it is the program's, not the simulation's
    assert "was lost (its machine had too little memory) while it trained site-000" in caplog.text


@pytest.mark.covers("V5")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("OutOfDiskError", r"Ray failed: OutOfDiskError: .* To continue from the state directory"),
        (
            "GetTimeoutError",
            r"Within 3 s, Ray did not start a process that trains simulated sites\. Use fewer processes than 2",
        ),
    ],
)
def test_a_failing_ray_gives_a_remedy(ray: Any, monkeypatch: pytest.MonkeyPatch, error: str, said: str) -> None:
    """If Ray fails or does not start a process in time, the simulation ends with exit code 9 and an error that says
    what helps.
    """
    from atoll.simulate.ray_actors import RayHost

    def full(*_: Any, **__: Any) -> Any:
        raise getattr(ray.exceptions, error)("local disk is full")

    monkeypatch.setattr(ray, "get", full)
    with pytest.raises(RunFailed, match=said) as failed:
        RayHost(2, None).got(None, 3.0)
    assert failed.value.exit_code == 9


@pytest.mark.slow
@pytest.mark.long
def test_a_ray_simulation_continues_without_ray(ray_here: Any, tmp_path: Path, undisturbed: bytes) -> None:
    """A simulation that began on Ray continues in local processes, and gives the same bits as an undisturbed one."""
    result_of(tmp_path, engine="ray", **RULES, **{"rounds.total": 2})
    assert result_of(tmp_path, **RULES) == undisturbed


@pytest.mark.slow
@pytest.mark.long
def test_the_simulate_command_ends_its_own_ray(ray: Any, nursery: Nursery, tmp_path: Path) -> None:
    """`atoll simulate` starts a Ray of its own if none is given, and ends it, with no files left."""
    before = set(Path("/tmp").glob("atoll-ray-*"))
    done = told(simulate(nursery, write(tmp_path), *FOUR, "--json"))
    assert (done["worker_rounds"], done["failed"]) == (12, {})
    assert set(Path("/tmp").glob("atoll-ray-*")) <= before


@pytest.fixture
def cluster(ray: Any) -> Iterator[str]:
    """The address of a Ray that another program has started, and that wants its token."""
    port, folder = free_port(), tempfile.mkdtemp(dir="/tmp")  # paths of Ray's sockets have to be short
    start = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--num-cpus=2", "--block"]
    with open(Path(folder) / "said", "wb") as said:
        head = subprocess.Popen(
            [*start, "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"],
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: head.poll() is not None or _listens(port), "a Ray that listens", 60.0)
        assert head.poll() is None, (Path(folder) / "said").read_text()
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.covers("V1")
def test_a_running_ray_cluster_gives_the_same_bits(
    nursery: Nursery, tmp_path: Path, undisturbed: bytes, cluster: str
) -> None:
    """A simulation on a Ray cluster that runs already gives the same bits. The cluster is left running."""
    flags = (*FOUR, "--address", cluster, "--json")
    done = told(simulate(nursery, write(tmp_path, **RULES), *flags, RAY_AUTH_MODE="token"))
    assert (done["worker_rounds"], done["failed"]) == (12, {})
    assert model_of(tmp_path / "atoll-simulation") == undisturbed
    assert _listens(int(cluster.rpartition(":")[2]))


@pytest.mark.covers("V5")
def test_an_unreachable_ray_ends_with_exit_code_5(ray: Any, nursery: Nursery, tmp_path: Path) -> None:
    """If no Ray runs at the given address, `atoll simulate` ends with exit code 5 and says so."""
    address = f"127.0.0.1:{free_port()}"
    said = " ".join(simulate(nursery, write(tmp_path), *FOUR, "--address", address, code=5).split())
    assert f"Ray at {address} cannot be reached: Connection refused. Check that Ray runs there" in said


@pytest.mark.covers("V5")
def test_a_missing_ray_gives_an_install_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ray is not installed, a simulation on Ray is refused with exit code 2 and the command that installs it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    how = r"not installed here\. Install it with pip install 'atoll\[ray\]'"
    with pytest.raises(ConfigError, match=how) as refused:
        simulation(tmp_path, engine="ray")
    assert refused.value.exit_code == 2


def test_ray_folders_of_killed_simulations_are_removed() -> None:
    """A start removes the temporary Ray folders of simulations whose process no longer runs, and keeps those of running
    ones.
    """
    from atoll.simulate import ray_actors

    ended, alive = (Path(ray_actors.TEMPORARY) / f"{ray_actors.FOLDER}{pid}-test" for pid in (2**22 + 1, os.getpid()))
    for folder in (ended, alive):  # no process has a number above 2²²
        folder.mkdir()
    try:
        ray_actors.remove_left_behind(ray_actors.TEMPORARY, ray_actors.FOLDER)
        assert not ended.exists()
        assert alive.exists()
    finally:
        alive.rmdir()


def test_a_ray_actor_removes_folders_of_killed_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray actor removes the folders that killed actors of its own machine have left, and no folder of another
    machine.
    """
    # Two machines share the folder of temporary files. A process of one machine cannot be seen from the other.
    from atoll.simulate import ray_actors

    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(ray_actors, "Beginning", SimpleNamespace(model_validate=lambda _: None))
    monkeypatch.setattr(ray_actors, "SiteTrainer", lambda _: None)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # no process has a number above 2²²
    actors = {}
    for host in ("node-1", "node-2", "node-2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        actors[host] = ray_actors.Actor({}, str(tmp_path))  # node-2's first is never told to end
    assert sorted(path.name.partition("_")[0] for path in tmp_path.iterdir()) == [
        "atoll-actor-node-1",
        "atoll-actor-node-2",
    ]
    for actor in actors.values():
        actor.end()
    assert list(tmp_path.iterdir()) == []
