"""ServerEnv: a script takes part in the run of a server that is there, where it is the recipe's run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from harness.processes import free_port, wait_until
from recipe_world import module, project, recipe, train

import atoll
from atoll import Settings
from atoll.errors import ConfigError, RunFailed, ServerUnreachable, UsageError
from atoll.recipes import DiLoCoRecipe, FedAvgRecipe, RunResult, ServerEnv


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, monkeypatch)


def serving(made: Any) -> atoll.Server:
    """A server on the run file that a recipe writes, in this process."""
    settings = Settings.read(made.write("served/run.toml"), environ={})
    return atoll.Server(settings=settings.changed({"network.port": 0}))


@pytest.mark.slow
@pytest.mark.covers("P11")
def test_two_sites_take_part_by_recipe(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.recipes.environments.SCRIPT_POLL_S", 60.0)  # asked once the script has ended
    made = recipe(model=module(), num_rounds=3)
    results: dict[str, RunResult] = {}
    with serving(made) as server:

        def take_part(site: str) -> None:
            results[site] = made.execute(ServerEnv(server.url, site=site))

        sites = [threading.Thread(target=take_part, args=(site,)) for site in ("a", "b")]
        for thread in sites:
            thread.start()
        for thread in sites:
            thread.join(90)
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


@pytest.mark.covers("P11")
def test_another_run_is_refused_with_every_difference() -> None:
    with serving(recipe(FedAvgRecipe, model=module())) as server:
        other = recipe(
            DiLoCoRecipe,
            model={"class_path": "my_model.Net", "args": {"hidden": 9}},
            num_rounds=7,
            sync_every=30,
        )
        with pytest.raises(ConfigError) as refused:
            other.execute(ServerEnv(server.url, site="a"))
        assert server.status().workers == []
    said = str(refused.value)
    for expected in (
        "algorithm.name is 'fedavg' there, 'diloco' here",
        "rounds.total is 2 there, 7 here",
        "sync_every is 0 there, 30 here",
        "aggregation.upload_codec is 'none' there, 'bf16' here",
        "model.source is with digest ",
        "outer optimizer is 'sgd(lr=1.0, momentum=0.0)' there, 'sgd(lr=0.7, momentum=0.9, nesterov=True)' here",
        "Change the recipe, or start another server with the file that recipe.write() writes",
    ):
        assert expected in said
    assert "heartbeat" not in said
    assert refused.value.exit_code == 2


@pytest.mark.covers("P11")
def test_the_same_recipe_with_another_deadline_or_filter_of_the_algorithm_is_another_run() -> None:
    with serving(recipe().add_server_config({"rounds.quorum": 2, "rounds.deadline_s": 60})) as server:
        with pytest.raises(ConfigError, match=r"policy is 'quorum 2 .*' there, 'barrier' here\. "):
            recipe().execute(ServerEnv(server.url))


@pytest.mark.slow
@pytest.mark.covers("P11")
def test_a_script_that_fails_and_a_run_that_is_over(capfd: pytest.CaptureFixture[str]) -> None:
    made = recipe(min_sites=1, num_rounds=1)
    with serving(made) as server:
        made.execute(ServerEnv(server.url, site="a"))
        assert server.wait(30)
    again = recipe(min_sites=1, num_rounds=2)
    with serving(again) as server:
        Path("train.py").write_text("raise SystemExit(4)")
        with pytest.raises(RunFailed, match=r"train\.py ended with exit code 4\. See its output above"):
            again.execute(ServerEnv(server.url, site="a"))
        assert not server.finished


@pytest.mark.slow
@pytest.mark.covers("P11")
def test_a_script_has_what_a_worker_finds_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in a file, which the server asks for, and what else is a setting of a server, too."""
    Path("token").write_text("secret-of-the-run")
    Path("token").chmod(0o600)
    monkeypatch.setenv("ATOLL_TOKEN_FILE", "token")
    monkeypatch.setenv("ATOLL_NETWORK__IDLE_TIMEOUT_S", "7.5")
    Path("train.py").write_text(train(more='import json, os; json.dump(dict(os.environ), open("found.json", "w"))'))
    made = recipe(min_sites=1).add_server_config({"network.token_file": "token"})
    with serving(made) as server:
        made.execute(ServerEnv(server.url, site="a", threads=2, quiet=True))
        assert server.wait(30)
    found = json.loads(Path("found.json").read_text())
    expected = {
        "ATOLL_TOKEN_FILE": str(Path("token").resolve()),
        "ATOLL_NETWORK__IDLE_TIMEOUT_S": "7.5",
        "ATOLL_SITE": "a",
    }
    assert expected | {"OMP_NUM_THREADS": "2"} == {key: found[key] for key in (*expected, "OMP_NUM_THREADS")}


@pytest.mark.slow
@pytest.mark.covers("P11")
@pytest.mark.usefixtures("interruptible")
def test_sigterm_ends_the_script_too() -> None:
    slow = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(0)))"
    told = 'open("pid.tmp", "w").write(str(os.getpid())); os.rename("pid.tmp", "pid")'
    Path("train.py").write_text(train(more=f"import os, signal, time; {slow}; {told}; time.sleep(600)"))
    made = recipe(min_sites=1)
    with serving(made) as server:
        Path("job.py").write_text(
            "from atoll.recipes import FedAvgRecipe, ServerEnv\n"
            f'FedAvgRecipe("small", "my_model:build", 1, 2, "train.py").execute(ServerEnv({server.url!r}, site="a"))\n'
        )
        job = subprocess.Popen([sys.executable, "job.py"])
        wait_until(lambda: Path("pid").exists(), "training", 90)
        job.terminate()
        assert job.wait(30) == -signal.SIGTERM
    assert not Path("/proc", Path("pid").read_text()).exists()  # it is waited for, not only told


@pytest.mark.covers("P11")
def test_no_server_answers() -> None:
    with pytest.raises(ServerUnreachable, match="does not answer") as failed:
        recipe().execute(ServerEnv(f"http://127.0.0.1:{free_port()}"))
    assert failed.value.exit_code == 5
    with pytest.raises(UsageError, match="is not a valid server address"):
        recipe().execute(ServerEnv("host:8512"))
