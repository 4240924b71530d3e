"""A recipe in each environment: simulated, in processes of this machine, and as a site of a server that is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, free_port, wait_until
from kit import tensors_digest, together
from kit.processes import command, run_commands, running_in
from kit.tls import write_certificate
from recipe_world import DILOCO, module, recipe, train_and
from safetensors.torch import load_file

import atoll
from atoll import Settings
from atoll.errors import AtollError, ConfigError, RunFailed, ServerUnreachable, StateLocked, UsageError
from atoll.recipes import (
    DiLoCoRecipe,
    FedAvgRecipe,
    FedOptRecipe,
    FedProxRecipe,
    LocalEnv,
    Recipe,
    RunResult,
    ScaffoldRecipe,
    ServerEnv,
    SimEnv,
    SwarmRecipe,
    environments,
)
from atoll.recipes.environments import prepared
from atoll.store.store import lock_directory

pytestmark = [pytest.mark.slow, pytest.mark.covers("P11")]

# -- the same bits


KINDS = [FedAvgRecipe, FedOptRecipe, FedProxRecipe, ScaffoldRecipe, DiLoCoRecipe]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind is not FedAvgRecipe else ()) for kind in KINDS],
    ids=lambda kind: kind.__name__,
)
def test_every_environment_of_a_recipe_gives_the_same_bits(
    nursery: Nursery, kind: type[Recipe], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A recipe gives the same bits in local processes, by the run file that it writes, and in a simulation."""
    is_diloco = kind is DiLoCoRecipe
    if is_diloco:
        Path("train.py").write_text(DILOCO)
    made = recipe(kind, model=module(), train_args="--epochs 3", **({"sync_every": 5} if is_diloco else {}))
    result = made.execute(LocalEnv(sites=2, folder="here"))
    assert result.finished
    assert result.status.finished
    assert result.folder == Path("here")
    assert result.model == Path("here/atoll-run/exports/model.safetensors")
    assert result.state_dir == Path("here/atoll-run")
    assert running_in(tmp_path) == []
    said = capfd.readouterr().out
    assert "round 2 of 2, 2 updates" in said
    assert said.endswith("small is finished: here/atoll-run/exports/model.safetensors\n")

    made.write("there/run.toml")
    work = "atoll worker --server URL --site SITE --dir there/workers -- python train.py"
    run_commands(nursery, tmp_path, ["atoll", "server", "there/run.toml"], work.split(), ["site-1", "site-2"])
    assert result.model.read_bytes() == Path("there/atoll-run/exports/model.safetensors").read_bytes()
    begin, end = load_file("there/initial.safetensors"), load_file(result.model)
    assert not torch.equal(begin["one.weight"], end["one.weight"])
    if is_diloco:  # a simulation has no DiLoCo
        return
    assert result.metrics.keys() == {"loss"}
    assert Path("here/site-2.log").read_text().splitlines()[-1] == "done --epochs 3"
    simulated = made.execute(SimEnv(sites=2, processes=2, folder="simulated"))
    assert "round 2 of 2, 2 updates: loss" in capfd.readouterr().out
    assert simulated.model == Path("simulated/atoll-simulation/exports/model.safetensors")
    assert simulated.state_dir == Path("simulated/atoll-simulation")
    assert simulated.finished
    assert [row.workers for row in simulated.history] == [["site-1", "site-2"]] * 2
    assert simulated.model.read_bytes() == result.model.read_bytes()
    assert simulated.metrics == result.metrics


@pytest.mark.long
@pytest.mark.covers("P10")
def test_a_swarm_gives_the_bits_of_a_server() -> None:
    swarm = recipe(SwarmRecipe, model=module()).execute(LocalEnv(sites=2, folder="swarm"))
    assert swarm.model == Path("swarm/workers/site-1/model.safetensors")
    assert [summary.aggregator for summary in swarm.history] != ["", ""]
    plain = recipe(model=module()).execute(LocalEnv(sites=2, folder="plain"))
    simulated = recipe(SwarmRecipe, model=module()).execute(SimEnv(sites=2, folder="simulated"))
    assert len({tensors_digest(load_file(each.model)) for each in (swarm, plain, simulated)}) == 1


# -- SimEnv


@pytest.mark.long
def test_atoll_simulate_runs_a_recipes_run_file(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll simulate` runs the run file that a recipe writes."""
    # Repeating the recipe's own simulation gives the same history. The command's sites have other names and so other
    # data: the numbers differ.
    made = recipe(model=module())
    simulated = made.execute(SimEnv(sites=2, processes=2, folder="simulated", quiet=True))
    made.write("there/run.toml")
    done = command(nursery, tmp_path, "simulate", "there/run.toml", "--processes", "2")
    assert done.returncode == 0, done.stderr
    # its workers have other names, and so other data: what is equal is the run, not the numbers
    assert Path("there/atoll-simulation/exports/model.safetensors").exists()
    assert [row.round for row in simulated.history] == [1, 2]
    assert made.execute(SimEnv(sites=2, folder="simulated", quiet=True)).history == simulated.history


def test_a_recipe_passes_its_options_to_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    class Asked:
        def __init__(self, **options: Any) -> None:
            given.append(options)

        def run(self) -> None:
            raise RunFailed("That is all.")

    monkeypatch.setattr("atoll.simulate.simulation.Simulation", Asked)
    env = SimEnv(sites=3, processes=2, engine="ray", address="head:6379", quiet=True)
    with pytest.raises(RunFailed, match="That is all"):
        recipe(train_args="--epochs 3", num_rounds=4).execute(env)
    (asked,) = given
    assert (asked["arguments"], asked["sites"]) == (["--epochs", "3"], ["site-1", "site-2", "site-3"])
    assert (asked["processes"], asked["engine"], asked["address"]) == (2, "ray", "head:6379")
    assert (asked["settings"].rounds.total, Path(asked["settings"].run.script).resolve()) == (4, tmp_path / "train.py")


def test_a_simulated_recipe_refuses_fragments_and_diloco_loops(caplog: pytest.LogCaptureFixture) -> None:
    """A recipe's simulation refuses several fragments, and a script that uses `atoll.DiLoCo`. The error says what to
    use.
    """
    Path("train.py").write_text(DILOCO)
    made = recipe(DiLoCoRecipe, sync_every=4).add_server_config({"diloco.num_fragments": 2})
    with pytest.raises(AtollError, match=r"diloco\.num_fragments is 2, but a simulation supports only"):
        made.execute(SimEnv(sites=2))
    with pytest.raises(UsageError, match=r"atoll\.DiLoCo cannot run in a simulation.*atoll\.join") as refused:
        recipe(DiLoCoRecipe, sync_every=4).execute(SimEnv(sites=2, processes=1))
    assert refused.value.exit_code == 2
    assert "Traceback" not in caplog.text
    assert "no longer takes part" not in caplog.text  # the script is at fault, not a site


# -- LocalEnv


def test_a_recipe_continues_only_its_own_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A recipe that is executed again in its folder continues its failed run."""
    # After the end it trains nothing. It refuses a folder that contains another run or other files.
    train_and("""if (worker.site, fl_round.number) == ("site-2", 2) and not open("marks", "a+").tell():
            raise SystemExit(3)""")
    with pytest.raises(
        RunFailed,
        match=r"site-2 ended with exit code 3 .* before the run was finished. A round needs 2 sites, but only 1 of 2",
    ) as failed:
        recipe().execute(LocalEnv(sites=2, folder="here", quiet=True))
    assert "To continue, repeat the call with folder='here'." in str(failed.value)
    assert failed.value.exit_code == 9
    assert running_in(tmp_path) == []
    Path("marks").write_text("now it works")
    result = recipe().execute(LocalEnv(sites=2, folder="here", quiet=True))
    assert [row.round for row in result.history] == [1, 2]
    assert "continuing the run at version 1" in Path("here/server.log").read_text()
    again = recipe().execute(LocalEnv(sites=2, folder="here"))  # it is finished already
    assert (again.model, again.history, again.finished) == (result.model, result.history, True)
    assert "small was already finished; nothing was trained" in capfd.readouterr().out
    with pytest.raises(UsageError, match=r"folder 'here' contains another run"):
        recipe(num_rounds=3).execute(LocalEnv(sites=2, folder="here"))
    Path("full").mkdir()
    Path("full/mine").touch()
    with pytest.raises(UsageError, match=r"folder 'full' is not empty, and contains no run.toml"):
        recipe(min_sites=1).execute(LocalEnv(sites=1, folder="full"))


def test_a_recipe_refuses_the_folder_of_a_running_run() -> None:
    """A recipe refuses the folder of a run that another process is running, and leaves the logs in it unchanged."""
    made = recipe()
    state = Settings.read(prepared(made, "here", 2) / "run.toml", environ={}).disk.state_dir
    state.mkdir()
    Path("here/server.log").write_text("line of the run\n")
    lock = lock_directory(state)
    try:
        with pytest.raises(StateLocked, match=f"here/atoll-run is in use by process {os.getpid()}"):
            made.execute(LocalEnv(sites=2, folder="here", quiet=True))
    finally:
        lock.close()
    assert Path("here/server.log").read_text() == "line of the run\n"


@pytest.mark.long
def test_a_run_survives_the_death_of_a_spare_site(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If a round needs two of three sites and the third site is killed, the run of a recipe ends without it."""
    train_and('if (worker.site, fl_round.number) == ("site-3", 2): import os; os.kill(os.getpid(), 9)')
    made = recipe(num_rounds=3).add_server_config(
        {"network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 2}
    )
    result = made.execute(LocalEnv(sites=3))
    assert [row.workers for row in result.history][::2] == [["site-1", "site-2", "site-3"], ["site-1", "site-2"]]
    assert "site-3 was killed (SIGKILL)" in capfd.readouterr().out
    assert result.folder.parent == Path("atoll-recipes")
    assert running_in(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "config", "error", "said"),
    [
        ({"model": "my_modle:build"}, {}, ConfigError, "exit code 2: .*my_modle"),
        ({}, {"aggregation.aggregator.path": "mine.py:mean"}, RunFailed, "exit code 9: .*no quorum of ours"),
    ],
    ids=["at its start", "in the middle"],
)
def test_a_recipe_reports_why_its_server_failed(
    tmp_path: Path, given: dict[str, Any], config: dict[str, Any], error: type[AtollError], said: str
) -> None:
    """If the server of a recipe fails at its start or during the run, the error gives its exit code, reason and log."""
    Path("mine.py").write_text("def mean(updates):\n    raise ValueError('no quorum of ours')\n")
    made = recipe(min_sites=1, **given).add_server_config(config)
    with pytest.raises(error, match=rf"The server ended with {said}.* here/server\.log") as failed:
        made.execute(LocalEnv(sites=1, folder="here", quiet=True))
    assert failed.value.exit_code == error.exit_code
    assert running_in(tmp_path) == []


ONCE = """
import os
def mean(updates):
    if not os.path.exists({mended!r}):
        raise ValueError("no quorum of ours")
    return dict(updates[0].tensors)
"""


@pytest.mark.covers("X9")
def test_a_failed_run_of_a_recipe_can_be_continued(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A recipe's run that failed at the server goes on when the cause is repaired and the recipe is executed again."""
    # If a run fails at the server, the error gives the server's reason. The error does not say that the sites have
    # ended, because the server told them to.
    Path("mine.py").write_text(ONCE.format(mended=str(tmp_path / "mended")))
    made = recipe().add_server_config({"aggregation.aggregator.path": "mine.py:mean"})
    with pytest.raises(RunFailed, match=r"The server ended with exit code 9: .*no quorum of ours") as failed:
        made.execute(LocalEnv(sites=2, folder="here"))
    assert "before the run was finished" not in failed.value.message
    assert running_in(tmp_path) == []
    for site in ("site-1", "site-2"):
        assert "has failed at the server: The aggregator" in Path(f"here/{site}.log").read_text()
    Path("mended").touch()
    result = made.execute(LocalEnv(sites=2, folder="here"))
    assert [row.workers for row in result.history] == [["site-1", "site-2"]] * 2
    assert result.status.failed == ""


def test_a_recipe_reports_a_server_stopped_before_the_end() -> None:
    """If a server is stopped before its run has finished, the recipe raises an error."""
    # The same call continues the run. SIGTERM stops a server with exit code 0. The site's script finds the server as
    # the only other process in its folder.
    stop = """if fl_round.number == 2 and not open("marks", "a+").tell():
            import contextlib, os, pathlib, signal, time
            for process in filter(lambda each: each.name.isdigit(), pathlib.Path("/proc").iterdir()):
                with contextlib.suppress(OSError):
                    number, here = int(process.name), (process / "cwd").readlink() == pathlib.Path.cwd()
                    if here and number not in (os.getpid(), os.getppid()):
                        os.kill(number, signal.SIGTERM)
                        until_s = time.monotonic() + 2  # it must not close round 2 before the signal has come
                        while time.monotonic() < until_s and (process / "cwd").readlink():
                            time.sleep(0.01)"""
    train_and(stop)
    with pytest.raises(RunFailed, match=r"The server ended with exit code 0: .* stopping; to continue the run"):
        recipe(min_sites=1).execute(LocalEnv(sites=1, folder="here", quiet=True))
    Path("marks").write_text("now it works")
    result = recipe(min_sites=1).execute(LocalEnv(sites=1, folder="here", quiet=True))
    assert [row.round for row in result.history] == [1, 2]


def test_a_recipes_sites_use_its_token_and_certificate(tmp_path: Path) -> None:
    """The sites of a recipe use the token and the certificate from the recipe's settings.

    The server requires both, and no authority that this machine knows has issued the certificate.
    """
    chain = write_certificate(tmp_path, "127.0.0.1")["network.tls_cert"]
    chain.write_bytes(chain.read_bytes() + (tmp_path / "ca.pem").read_bytes())
    Path("token").write_text("secret-of-the-run")
    Path("token").chmod(0o600)
    made = recipe(min_sites=1).add_server_config(
        {"network.tls_cert": "cert.pem", "network.tls_key": "key.pem", "network.token_file": "token"}
    )
    result = made.execute(LocalEnv(sites=1, folder="here", quiet=True))
    assert len(result.history) == 2
    assert "listening on https://" in Path("here/server.log").read_text()


@pytest.mark.parametrize(
    "number",
    [*(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
    ids=lambda number: number.name,
)
@pytest.mark.usefixtures("interruptible")
def test_a_signal_to_a_recipe_ends_all_its_processes(number: signal.Signals, tmp_path: Path) -> None:
    """If a signal ends the program that executes a recipe, its server and its sites end, too."""
    train_and('import time; print("here", flush=True); time.sleep(600)')
    (tmp_path / "job.py").write_text(
        "from atoll.recipes import FedAvgRecipe, LocalEnv\n"
        'FedAvgRecipe("small", "my_model:build", 2, 2, "train.py").execute(LocalEnv(2, folder="here"))\n'
    )
    job = subprocess.Popen([sys.executable, "job.py"], stderr=subprocess.PIPE, text=True)
    logs = [tmp_path / "here" / f"site-{site}.log" for site in (1, 2)]
    wait_until(lambda: all(log.exists() and "here" in log.read_text() for log in logs), "training at both sites", 90)
    assert len(running_in(tmp_path)) >= 3
    begin_s = time.monotonic()
    job.send_signal(number)
    job.communicate(timeout=60)
    assert job.returncode == -number
    assert time.monotonic() - begin_s < 30
    wait_until(lambda: running_in(tmp_path) == [], "the end of everything", 15)


# -- ServerEnv


def server_of(made: Any) -> atoll.Server:
    """A server on the run file that a recipe writes, in this process, not started."""
    settings = Settings.read(made.write("served/run.toml"), environ={})
    return atoll.Server(settings=settings.changed({"network.port": 0}))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stays for the recipes that ask for its status, as outside of the tests."""
    monkeypatch.setattr("atoll.server.serve.WATCHED_S", 3.0)


@pytest.mark.usefixtures("watched")
def test_two_sites_take_part_with_recipes(capfd: pytest.CaptureFixture[str]) -> None:
    """Two sites take part in a server's run with the same recipe, and both get the metrics of all rounds."""
    # The server ends after both scripts have left and both recipes have seen the end of the run.
    made = recipe(model=module(), num_rounds=3)
    results: dict[str, RunResult] = {}
    with server_of(made) as server:

        def take_part(site: str) -> None:
            results[site] = made.execute(ServerEnv(server.url, site=site))

        together(*(partial(take_part, site) for site in ("a", "b")), timeout_s=90)
        assert server.wait(30)
    for result in results.values():
        assert (result.model, result.state_dir, result.folder) == (None, None, None)
        assert result.metrics.keys() == {"loss"}
        assert result.finished
        assert len(result.history) == 3
    assert [row.workers for row in server.status().history] == [["a", "b"]] * 3
    said = capfd.readouterr().out
    assert f"small at {server.url} matches the recipe; starting train.py" in said
    assert said.count("done") == 2


def test_a_recipe_lists_all_differences_from_the_run() -> None:
    """If the server's run differs from a site's recipe, the recipe refuses to take part and lists every difference."""
    waits = {"rounds.quorum": 2, "rounds.deadline_s": 60}
    with server_of(recipe(FedAvgRecipe, model=module()).add_server_config(waits)) as server:
        model = {"class_path": "my_model.Net", "args": {"hidden": 9}}
        other = recipe(DiLoCoRecipe, model=model, num_rounds=7, sync_every=30)
        with pytest.raises(ConfigError) as refused:
            other.execute(ServerEnv(server.url, site="a"))
        assert server.status().workers == []
    said = str(refused.value)
    for expected in (
        "algorithm.name is 'fedavg' there, 'diloco' here",
        "rounds.total is 2 there, 7 here",
        "policy is 'quorum 2",
        "sync_every is 0 there, 30 here",
        "aggregation.upload_codec is 'none' there, 'bf16' here",
        "model.source is with digest ",
        "outer optimizer is 'sgd(lr=1.0, momentum=0.0)' there, 'sgd(lr=0.7, momentum=0.9, nesterov=True)' here",
        "Change the recipe, or start another server with the file that recipe.write() writes",
    ):
        assert expected in said
    assert "heartbeat" not in said
    assert refused.value.exit_code == 2


def test_a_failing_script_does_not_end_the_run() -> None:
    """If a site's script fails, its recipe raises an error, and the server's run goes on."""
    Path("train.py").write_text("raise SystemExit(4)")
    made = recipe(min_sites=1)
    with server_of(made) as server:
        with pytest.raises(RunFailed, match=r"train\.py ended with exit code 4\. See its output above"):
            made.execute(ServerEnv(server.url, site="a"))
        assert not server.finished


def gone(*_: object) -> None:
    """As `ask` where no server answers."""
    raise ServerUnreachable("Gone.")


@pytest.mark.covers("X9")
@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("reads_status", [True, False])
def test_a_recipe_at_a_site_reports_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], reads_status: bool
) -> None:
    """If the run fails at the server, the recipe at a site raises an error with the reason."""
    # If the server has already ended, the error refers to the output of the script, which has printed the reason.
    Path("mine.py").write_text(ONCE.format(mended=str(tmp_path / "mended")))
    if not reads_status:
        asked = iter([environments.ask] * 2)  # what the run is, and its status, before the script starts
        monkeypatch.setattr(environments, "ask", lambda *what: next(asked, gone)(*what))
    made = recipe(min_sites=1).add_server_config({"aggregation.aggregator.path": "mine.py:mean"})
    with server_of(made) as server:
        with pytest.raises(RunFailed, match=f"The run has failed at the server {server.url}: ") as failed:
            made.execute(ServerEnv(server.url, site="a"))
        with pytest.raises(RunFailed):
            server.run()
    reason = failed.value.message.partition(": ")[2]
    assert ("no quorum of ours" if reads_status else "the reason is in the output of the script above") in reason
    assert "has failed at the server" not in reason
    assert "no quorum of ours" in capfd.readouterr().out
    assert "repeat the same call" in failed.value.remedy


def test_a_recipe_gives_its_script_a_workers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe gives its script the environment of a worker: token file, site name, threads and further settings."""
    Path("token").write_text("secret-of-the-run")
    Path("token").chmod(0o600)
    monkeypatch.setenv("ATOLL_TOKEN_FILE", "token")
    monkeypatch.setenv("ATOLL_NETWORK__IDLE_TIMEOUT_S", "7.5")
    train_and('import json, os; json.dump(dict(os.environ), open("found.json", "w"))')
    made = recipe(min_sites=1).add_server_config({"network.token_file": "token"})
    with server_of(made) as server:
        made.execute(ServerEnv(server.url, site="a", threads=2, quiet=True))
        assert server.wait(30)
    found = json.loads(Path("found.json").read_text())
    expected = {
        "ATOLL_TOKEN_FILE": str(Path("token").resolve()),
        "ATOLL_NETWORK__IDLE_TIMEOUT_S": "7.5",
        "ATOLL_SITE": "a",
    }
    assert expected | {"OMP_NUM_THREADS": "2"} == {key: found[key] for key in (*expected, "OMP_NUM_THREADS")}


@pytest.mark.usefixtures("interruptible")
def test_sigterm_to_a_recipe_also_ends_its_script() -> None:
    """If SIGTERM ends the program that executes a recipe, the program first waits until its script has ended."""
    slow = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(0)))"
    told = 'open("pid.tmp", "w").write(str(os.getpid())); os.rename("pid.tmp", "pid")'
    train_and(f"import os, signal, time; {slow}; {told}; time.sleep(600)")
    made = recipe(min_sites=1)
    with server_of(made) as server:
        Path("job.py").write_text(
            "from atoll.recipes import FedAvgRecipe, ServerEnv\n"
            f'FedAvgRecipe("small", "my_model:build", 1, 2, "train.py").execute(ServerEnv({server.url!r}, site="a"))\n'
        )
        job = subprocess.Popen([sys.executable, "job.py"])
        wait_until(lambda: Path("pid").exists(), "training", 90)
        job.terminate()
        assert job.wait(30) == -signal.SIGTERM
    assert not Path("/proc", Path("pid").read_text()).exists()  # it is waited for, not only told


def test_a_recipe_reports_that_no_server_answers() -> None:
    with pytest.raises(ServerUnreachable, match="does not answer") as failed:
        recipe().execute(ServerEnv(f"http://127.0.0.1:{free_port()}"))
    assert failed.value.exit_code == 5
