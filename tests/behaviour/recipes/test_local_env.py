"""LocalEnv: a real server and real clients, the same bits as the written run file, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import trustme
from harness.processes import Nursery, wait_until
from recipe_world import CORRECTED, DILOCO, PLAIN, module, project, recipe, train
from safetensors.torch import load_file

from atoll.errors import ConfigError, RunFailed, UsageError
from atoll.recipes import (
    DiLoCoRecipe,
    FedAvgRecipe,
    LocalEnv,
    Recipe,
    ScaffoldRecipe,
    SimEnv,
    SwarmRecipe,
)

pytestmark = pytest.mark.slow


def running(folder: Path) -> list[str]:
    """Command lines of the processes whose current folder is `folder`, apart from this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if (entry / "cwd").readlink() == folder:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def by_hand(nursery: Nursery, run_file: Path, sites: list[str]) -> Path:
    """What people type: `atoll server`, and `atoll worker` for each site; the folder of the results."""
    folder = Path.cwd()
    address = run_file.parent / "address"
    server = nursery.start("atoll", "server", str(run_file), "--port=0", cwd=folder, log=address)
    found = wait_until(
        lambda: [
            line.split("listening on ")[1].split()[0] for line in server.output().splitlines() if "listening" in line
        ],
        "the server's address",
    )
    workers = [
        nursery.start(
            *("atoll", "worker", "--server", found[0], "--site", site, "--", sys.executable, "train.py"),
            cwd=folder,
            env={"ATOLL_DIR": str(run_file.parent / "workers")},
            log=run_file.parent / f"{site}.log",
        )
        for site in sites
    ]
    assert [worker.wait(60) for worker in workers] == [0] * len(sites), [worker.output() for worker in workers]
    assert server.wait(60) == 0, server.output()
    return run_file.parent / "atoll-run" / "exports"


@pytest.mark.covers("P11")
@pytest.mark.parametrize(
    "kind",
    [FedAvgRecipe, *(pytest.param(each, marks=pytest.mark.long) for each in (ScaffoldRecipe, DiLoCoRecipe))],
    ids=lambda kind: kind.__name__,
)
def test_execute_and_the_written_file_and_a_simulation_have_the_same_bits(
    nursery: Nursery,
    kind: type[Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    is_diloco = kind is DiLoCoRecipe
    project(tmp_path, monkeypatch, {DiLoCoRecipe: DILOCO, ScaffoldRecipe: train(CORRECTED)}.get(kind, PLAIN))
    made = recipe(kind, model=module(), train_args="--epochs 3", **({"sync_every": 5} if is_diloco else {}))
    result = made.execute(LocalEnv(sites=2, folder="here"))
    assert result.finished
    assert result.status is not None
    assert result.status.finished
    assert result.folder == Path("here")
    assert result.model == Path("here/atoll-run/exports/model.safetensors")
    assert result.state_dir == Path("here/atoll-run")
    if not is_diloco:
        assert result.metrics.keys() == {"loss"}
        assert Path("here/site-2.log").read_text().splitlines()[-1] == "done --epochs 3"
    assert running(tmp_path) == []
    said = capfd.readouterr().out
    assert "round 2 of 2, 2 updates" in said
    assert said.endswith("small is finished: here/atoll-run/exports/model.safetensors\n")

    made.write("there/run.toml")
    exports = by_hand(nursery, Path("there/run.toml").resolve(), ["site-1", "site-2"])
    assert result.model.read_bytes() == (exports / "model.safetensors").read_bytes()
    if not is_diloco:
        simulated = made.execute(SimEnv(sites=2, folder="simulated", quiet=True))
        assert simulated.model is not None
        assert result.model.read_bytes() == simulated.model.read_bytes()
        assert result.metrics == simulated.metrics
    begin, end = load_file("there/initial.safetensors"), load_file(result.model)
    assert not torch.equal(begin["one.weight"], end["one.weight"])


@pytest.mark.covers("P11")
def test_a_folder_that_has_the_run_goes_on_and_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project(
        tmp_path,
        monkeypatch,
        train(
            more="""if (worker.site, fl_round.number) == ("site-2", 2) and not open("marks", "a+").tell():
            raise SystemExit(3)"""
        ),
    )
    with pytest.raises(UsageError, match="sites is 1, but min_sites of small is 2"):
        recipe().execute(LocalEnv(sites=1, folder="here", quiet=True))
    with pytest.raises(
        RunFailed,
        match=r"site-2 ended with exit code 3 .* before the run was finished. A round needs 2 sites, but only 1 of 2",
    ) as failed:
        recipe().execute(LocalEnv(sites=2, folder="here", quiet=True))
    assert "To continue, repeat the call with folder='here'." in str(failed.value)
    assert failed.value.exit_code == 9
    assert running(tmp_path) == []
    Path("marks").write_text("now it works")
    result = recipe().execute(LocalEnv(sites=2, folder="here", quiet=True))
    assert [row.round for row in result.history] == [1, 2]
    assert "continuing at version 1" in Path("here/server.log").read_text()
    again = recipe().execute(LocalEnv(sites=2, folder="here"))  # it is finished already
    assert (again.model, again.history, again.finished) == (result.model, result.history, True)
    assert "small was already finished; nothing was trained" in capfd.readouterr().out
    with pytest.raises(UsageError, match=r"folder 'here' contains another run"):
        recipe(num_rounds=3).execute(LocalEnv(sites=2, folder="here"))
    Path("full").mkdir()
    Path("full/mine").touch()
    with pytest.raises(UsageError, match=r"folder 'full' is not empty, and contains no run.toml"):
        recipe(min_sites=1).execute(LocalEnv(sites=1, folder="full"))


@pytest.mark.long
@pytest.mark.covers("P11")
def test_one_client_more_than_needed_may_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three clients, of which a round takes two: the third is killed in round 2, and the run ends without it."""
    project(
        tmp_path,
        monkeypatch,
        train(more='if (worker.site, fl_round.number) == ("site-3", 2): import os; os.kill(os.getpid(), 9)'),
    )
    made = recipe(num_rounds=3).add_server_config(
        {"network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 2}
    )
    result = made.execute(LocalEnv(sites=3))
    assert [row.workers for row in result.history][::2] == [["site-1", "site-2", "site-3"], ["site-1", "site-2"]]
    assert "site-3 was killed (SIGKILL)" in capfd.readouterr().out
    assert result.folder is not None
    assert result.folder.parent == Path("atoll-recipes")
    assert running(tmp_path) == []


@pytest.mark.covers("P11")
def test_a_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"The server ended with exit code 2: .*my_modle.* here/server\.log"
    ) as failed:
        recipe(model="my_modle:build").execute(LocalEnv(sites=2, folder="here", quiet=True))
    assert failed.value.exit_code == 2
    assert running(tmp_path) == []


@pytest.mark.covers("P11")
def test_a_server_that_fails_in_the_middle_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, monkeypatch)
    Path("mine.py").write_text("def mean(updates):\n    raise ValueError('no quorum of ours')\n")
    made = recipe(min_sites=1).add_server_config({"aggregation.aggregator.path": "mine.py:mean"})
    with pytest.raises(RunFailed, match=r"The server ended with exit code 9: .*no quorum of ours.* here/server\.log"):
        made.execute(LocalEnv(sites=1, folder="here", quiet=True))
    assert running(tmp_path) == []


@pytest.mark.covers("P11")
@pytest.mark.usefixtures("fresh_processes")  # the site knows the server by its command line
def test_a_server_that_is_stopped_in_the_middle_is_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM stops a server with the exit code 0. The same call goes on where it was."""
    stop = """if fl_round.number == 2 and not open("marks", "a+").tell():
            import os, pathlib, signal
            here = pathlib.Path.cwd()
            for process in filter(lambda each: each.name.isdigit(), pathlib.Path("/proc").iterdir()):
                if b"atoll.cli.main" in (process / "cmdline").read_bytes() and (process / "cwd").readlink() == here:
                    os.kill(int(process.name), signal.SIGTERM)"""
    project(tmp_path, monkeypatch, train(more=stop))
    with pytest.raises(RunFailed, match=r"The server ended with exit code 0: .* stopping; to continue the run"):
        recipe(min_sites=1).execute(LocalEnv(sites=1, folder="here", quiet=True))
    Path("marks").write_text("now it works")
    result = recipe(min_sites=1).execute(LocalEnv(sites=1, folder="here", quiet=True))
    assert [row.round for row in result.history] == [1, 2]


@pytest.mark.covers("P11")
def test_a_token_and_a_certificate_of_the_settings_are_the_clients_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that wants both; the certificate is of no authority that this machine knows."""
    project(tmp_path, monkeypatch)
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path("key.pem")
    for blob in (*issued.cert_chain_pems, authority.cert_pem):
        blob.write_to_path("chain.pem", append=True)
    Path("token").write_text("secret-of-the-run")
    for name in ("key.pem", "token"):
        Path(name).chmod(0o600)
    made = recipe(min_sites=1).add_server_config(
        {"network.tls_cert": "chain.pem", "network.tls_key": "key.pem", "network.token_file": "token"}
    )
    result = made.execute(LocalEnv(sites=1, folder="here", quiet=True))
    assert len(result.history) == 2
    assert "listening on https://" in Path("here/server.log").read_text()


@pytest.mark.covers("P11")
@pytest.mark.parametrize(
    "number",
    [*(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
    ids=lambda number: number.name,
)
@pytest.mark.usefixtures("interruptible")
def test_whatever_ends_the_program_ends_what_it_started(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, monkeypatch, train(more='import time; print("here", flush=True); time.sleep(600)'))
    (tmp_path / "job.py").write_text(
        "from atoll.recipes import FedAvgRecipe, LocalEnv\n"
        'FedAvgRecipe("small", "my_model:build", 2, 2, "train.py").execute(LocalEnv(2, folder="here"))\n'
    )
    job = subprocess.Popen([sys.executable, "job.py"], stderr=subprocess.PIPE, text=True)
    logs = [tmp_path / "here" / f"site-{site}.log" for site in (1, 2)]
    wait_until(lambda: all(log.exists() and "here" in log.read_text() for log in logs), "training at both sites", 90)
    assert len(running(tmp_path)) >= 3
    begin_s = time.monotonic()
    job.send_signal(number)
    job.communicate(timeout=60)
    assert job.returncode == -number
    assert time.monotonic() - begin_s < 30
    wait_until(lambda: running(tmp_path) == [], "the end of everything", 15)


@pytest.mark.long
@pytest.mark.covers("P11", "P10")
def test_a_swarm_has_the_bits_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, monkeypatch)
    swarm = recipe(SwarmRecipe, model=module()).execute(LocalEnv(sites=2, folder="swarm"))
    assert swarm.model == Path("swarm/workers/site-1/model.safetensors")
    assert [summary.aggregator for summary in swarm.history] != ["", ""]
    plain = recipe(FedAvgRecipe, model=module()).execute(LocalEnv(sites=2, folder="plain"))
    assert swarm.model is not None
    assert plain.model is not None
    one, other = load_file(swarm.model), load_file(plain.model)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    simulated = recipe(SwarmRecipe, model=module()).execute(SimEnv(sites=2, folder="simulated"))
    assert simulated.model is not None
    other = load_file(simulated.model)
    assert all(torch.equal(one[name], other[name]) for name in one)
