"""`server.evaluate`: a function evaluates versions at the server, in a process of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, wait_until
from kit import write_run_file
from kit.admin import stop
from kit.processes import command, url_of
from kit.servers import DEFAULT_OUTER_OPTIMIZER, new_simulation, plain_server
from kit.sites import logged
from torch import nn

import atoll
from atoll.errors import ConfigError, PortInUse, UsageError
from atoll.recipes import FedAvgRecipe
from atoll.testing.run import Status

MODULE = """
import os, time
from pathlib import Path
import torch
from torch import nn

class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

def evaluate(model):
    hold = Path(__file__).with_name("hold")
    if hold.exists():
        hold.rename(hold.with_name("held"))
        time.sleep(600)
    w = model.w if isinstance(model, nn.Module) else model["w"]
    return {"value": w.sum() / 2, "threads": torch.get_num_threads(), "pid": os.getpid(), "ppid": os.getppid(),
            "is_training": getattr(model, "training", 0), "grad": torch.is_grad_enabled()}

def asks_for_two(model, data):
    return {}

async def later(model):
    return {}

def train(worker):
    model = Weight()
    for fl_round in worker:
        fl_round.load_into(model)
        with torch.no_grad():
            model.w.add_(1)
        fl_round.submit(model)
"""


def value(model: Any) -> dict[str, float]:
    """Version v is all v."""
    return {"value": float((model.w if isinstance(model, nn.Module) else model["w"])[0])}


def evaluating_server(folder: Path, evaluate: Any = value, **settings: Any) -> atoll.Server:
    settings = {"rounds.total": 3} | settings
    return plain_server(folder, {"w": torch.zeros(2)}, evaluate=evaluate, **settings)


def run_rounds(server: atoll.Server, folder: Path, most: int = 100) -> None:
    """One site adds 1 to what it pulls, until the run is finished or it has submitted `most` updates."""
    with atoll.join(server.url, site="a", folder=folder / "site") as worker:
        for number, fl_round in enumerate(worker, 1):
            fl_round.submit({"w": fl_round.state_dict()["w"] + 1}, metrics={"value": -1.0})
            if number == most:
                break


def finished(server: atoll.Server, folder: Path) -> Status:
    """The status after all rounds."""
    with server:
        run_rounds(server, folder)
        assert server.wait(60)
    return server.status()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "state/exports/metrics.jsonl").read_text().splitlines()]


def test_server_metrics_belong_to_the_rounds_version(tmp_path: Path) -> None:
    """The summary of a round has the server's own evaluation of the version that this round made, beside the mean of
    the sites' metrics.
    """
    events: list[Any] = []
    server = evaluating_server(tmp_path)
    server.follow("the test", events.append)
    status = finished(server, tmp_path)
    assert [(each.version, each.global_metrics, each.metrics) for each in status.history] == [
        (number, {"value": float(number)}, {"value": -1.0}) for number in (1, 2, 3)
    ]
    assert [(line["version"], line["global_metrics"]) for line in lines_of(tmp_path)] == [
        (number, {"value": float(number)}) for number in (1, 2, 3)
    ]
    told = [(each.version, each.metrics) for each in events if each.what == "version evaluated"]
    assert told == [(number, {"value": float(number)}) for number in (1, 2, 3)]
    assert status.evaluation is not None
    assert (status.evaluation.version, status.evaluation.metrics) == (3, {"value": 3.0})
    assert list((tmp_path / "state/objects").glob("*")) == []


def test_evaluates_each_nth_version_and_the_last(tmp_path: Path) -> None:
    """With `server.evaluate_every = 2`, the server evaluates each second version and the last one."""
    status = finished(evaluating_server(tmp_path, **{"server.evaluate_every": 2, "rounds.total": 5}), tmp_path)
    assert [each.version for each in status.history if each.global_metrics] == [2, 4, 5]


def test_a_stopped_run_evaluates_its_last_version(tmp_path: Path) -> None:
    """Every second version is evaluated, and the last one: version 1, once the admin has stopped the run."""
    settings = {"server.evaluate_every": 2, "rounds.total": 5, "rounds.best_metric": "global.value"}
    with evaluating_server(tmp_path, **settings) as server:
        run_rounds(server, tmp_path, 1)
        stop(server, now=True)
        assert server.wait(60)
    status = server.status()
    assert [(each.version, each.global_metrics) for each in status.history] == [(1, {"value": 1.0})]
    assert [line["global_metrics"] for line in lines_of(tmp_path)] == [{"value": 1.0}]
    assert status.best is not None
    assert (status.best.version, status.best.value) == (1, 1.0)


def test_evaluates_the_version_before_a_round_without_one(tmp_path: Path) -> None:
    """All sites sit out the last round, so version 1 turns out to be the last one. It is evaluated once."""
    events: list[Any] = []
    server = evaluating_server(tmp_path, **{"server.evaluate_every": 2, "rounds.total": 2})
    server.follow("the test", events.append)
    with server, atoll.join(server.url, site="a", folder=tmp_path / "site") as worker:
        for number, fl_round in enumerate(worker, 1):
            fl_round.submit({"w": fl_round.state_dict()["w"] + 1}, weight=2 - number)
        assert server.wait(60)
    assert [line["global_metrics"] for line in lines_of(tmp_path)] == [{"value": 1.0}, {}]
    assert [each.version for each in events if each.what == "version evaluated"] == [1]


def test_a_server_metric_can_choose_the_best_version(tmp_path: Path) -> None:
    """The server's own evaluation can decide which version is best, the last one included. A restarted server still
    knows it.
    """
    settings = {"rounds.best_metric": "global.value"}
    for is_first in (True, False):
        with evaluating_server(tmp_path, **settings) as server:
            if is_first:
                run_rounds(server, tmp_path)
            assert server.wait(60)
        best = server.status().best
        assert best is not None
        assert (best.version, best.round, best.value) == (3, 3, 3.0)
        assert json.loads((tmp_path / "state/exports/best.json").read_text())["version"] == 3


def test_a_server_metric_can_stop_the_run(tmp_path: Path) -> None:
    """If the server's own metric does not improve for a number of rounds, the run stops early."""
    # Version 1 is the best; version 3 is the second without a gain, and the round after it is the last.
    settings = {"rounds.best_metric": "global.value", "rounds.best_mode": "min", "rounds.early_stop_after": 2}
    status = finished(evaluating_server(tmp_path, **settings, **{"rounds.total": 9}), tmp_path)
    assert status.version == 4
    assert "has not improved" in status.stopped
    assert status.best is not None
    assert status.best.version == 1


def raises(_: Any) -> dict[str, float]:
    raise ValueError("no data here")


def raises_broken_text(_: Any) -> dict[str, float]:
    raise ValueError("no file \udc80" + "x" * 10**6)


def gives(result: Any) -> Callable[[Any], Any]:
    return lambda model: result


FAULTS = [
    (raises, "ValueError: no data here"),
    (raises_broken_text, "ValueError: no file"),
    (gives("good"), "it returned an object of type str instead of a dict"),
    (gives({}), "it returned 0 metrics instead of a dict"),
    (gives({"loss": "0.5"}), "it returned 'loss' as '0.5', which is not a number"),
    (gives({"loss": float("nan")}), "it returned loss = nan, which is not finite"),
    (gives({"a\nb": 1}), "it returned a metric with the name 'a\\nb'"),
    (gives({str(number): 1 for number in range(300)}), "it returned 300 metrics"),
    (lambda model: os._exit(3), "its process has ended"),
    (lambda model: exit(3), "SystemExit: 3"),
]


@pytest.mark.parametrize(("function", "problem"), FAULTS, ids=[problem[:30] for _, problem in FAULTS])
def test_training_goes_on_if_the_evaluation_fails(
    function: Callable[[Any], Any], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the server's evaluation function fails, training goes on. The log says so once, and the status warns as long
    as the fault lasts.
    """
    status = finished(evaluating_server(tmp_path, function), tmp_path)
    assert status.finished
    assert status.version == 3
    (warning,) = [text for text in status.warnings if "server.evaluate" in text]
    assert problem in warning
    assert "at version 3" in warning
    assert "The run ends without metrics of that version" in warning or len(warning) > 1000
    assert status.evaluation is not None
    assert [*status.evaluation.failed] == ["1", "2", "3"]
    assert status.evaluation.failures == 3
    assert len([line for line in logged(caplog) if problem in line and "server.evaluate" in line]) == 1
    assert [each.global_metrics for each in status.history] == [{}, {}, {}]


def test_an_evaluation_fault_that_ends_is_not_shown(tmp_path: Path) -> None:
    """If the server's evaluation function fails only once, the status no longer warns at the end. A metric with NaN is
    left out.
    """
    # The function fails at version 2 alone; the finite numbers of one with NaN count.

    def twice(model: Any) -> dict[str, float]:
        number = value(model)["value"]
        if number == 2:
            raise ValueError
        return {"value": number, **({"nan": float("nan")} if number == 1 else {})}

    status = finished(evaluating_server(tmp_path, twice), tmp_path)
    assert [each.global_metrics for each in status.history] == [{"value": 1.0}, {}, {"value": 3.0}]
    assert [text for text in status.warnings if "server.evaluate" in text] == []


def test_the_server_stops_a_hanging_evaluation(tmp_path: Path) -> None:
    """The server stops an evaluation function that hangs, and answers status requests meanwhile. After two such
    failures in a row, it evaluates no more, so that no round waits again.
    """

    def hangs(model: Any) -> dict[str, float]:
        (tmp_path / f"hangs {os.getpid()}").touch()
        time.sleep(600)
        return {}

    seen: list[float] = []
    server = evaluating_server(tmp_path, hangs, **{"server.evaluate_timeout_s": 0.5})

    def on_event(event: Any) -> None:
        if event.what == "version evaluated":
            seen.append(event.seconds)

    server.follow("the test", on_event)
    with server:
        run_rounds(server, tmp_path, 1)
        wait_until(lambda: list(tmp_path.glob("hangs *")), "the function hangs")
        begin_s = time.monotonic()
        running = server.status().evaluation
        assert time.monotonic() - begin_s < 0.4
        assert running is not None
        run_rounds(server, tmp_path)
        assert server.wait(60)
    status = server.status()
    assert status.finished
    assert len(seen) == 2
    assert min(seen) >= 0.5
    assert any("was stopped. No further version is evaluated" in text for text in status.warnings)
    pids = [each.name.split()[1] for each in tmp_path.glob("hangs *")]
    assert len(pids) == 2
    wait_until(lambda: not any(Path("/proc", pid).exists() for pid in pids), "the processes have ended")


def test_a_restart_completes_the_missing_evaluation(tmp_path: Path) -> None:
    """If the server stops during an evaluation, its next start evaluates the newest version and adds the metrics to the
    round.
    """

    def hangs(model: Any) -> dict[str, float]:
        (tmp_path / "hangs").touch()
        time.sleep(600)
        return {}

    with evaluating_server(tmp_path, hangs) as server:
        run_rounds(server, tmp_path, 1)
        wait_until((tmp_path / "hangs").exists, "the evaluation of version 1")
    assert [each.global_metrics for each in server.status().history] == [{}]
    status = finished(evaluating_server(tmp_path), tmp_path)
    assert [each.global_metrics["value"] for each in status.history] == [1.0, 2.0, 3.0]
    assert [line["global_metrics"]["value"] for line in lines_of(tmp_path)] == [1.0, 2.0, 3.0]


def run_file(folder: Path, **settings: Any) -> Path:
    (folder / "mine.py").write_text(MODULE)
    chosen = {"server.evaluate": "mine.py:evaluate", "model.source": "mine.py:Weight", "rounds.total": 2}
    return write_run_file(folder, **DEFAULT_OUTER_OPTIMIZER | {"rounds.sites": 1} | chosen | settings)


def test_a_killed_server_repeats_its_evaluation(nursery: Nursery, tmp_path: Path) -> None:
    """If the server is killed during an evaluation, its next start repeats the evaluation."""
    # The function is imported by a process that ends with the server; it gets the model that `model.source` builds.
    path = run_file(tmp_path)
    (tmp_path / "hold").touch()
    for is_killed in (True, False):
        server = nursery.start("atoll", "server", str(path), cwd=tmp_path)
        url = url_of(server)
        with atoll.join(url, site="a", folder=tmp_path / "site") as worker:
            for fl_round in worker:
                fl_round.submit({"w": fl_round.state_dict()["w"] + 1})
                if is_killed:
                    break
        if is_killed:
            wait_until((tmp_path / "held").exists, "the evaluation of version 1")
            server.kill()
    assert server.wait() == 0, server.output()
    assert "version 1 was not evaluated yet" in server.output()
    lines = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [line["global_metrics"]["value"] for line in lines] == [1.0, 2.0]
    found = lines[-1]["global_metrics"]
    assert (found["threads"], found["is_training"], found["grad"]) == (1.0, 0.0, 0.0)
    assert found["pid"] == lines[0]["global_metrics"]["pid"] != server.pid
    shown = command(nursery, tmp_path, "status", "--dir", "state").stdout
    assert "mine.py:evaluate: version 2: value 2, threads 1" in shown
    wait_until(lambda: not Path(f"/proc/{int(found['pid'])}").exists(), "the process has ended")


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"server.evaluate": "mine.py:evaluat"}, "mine.py has no 'evaluat'"),
    ({"server.evaluate": "not_there:evaluate"}, "no module named 'not_there'"),
    ({"server.evaluate": "evaluate"}, "does not name a Python object"),
    ({"server.evaluate": "mine.py:os"}, "is of type module, not a function"),
    ({"server.evaluate": "mine.py:asks_for_two"}, "cannot be called with the model alone"),
    ({"server.evaluate": "mine.py:later"}, "is a coroutine function"),
    ({"server.evaluate_timeout_s": 0.0}, "evaluate_timeout_s"),
    ({"server.evaluate": None, "rounds.best_metric": "global.value"}, "server.evaluate is not set"),
    ({"swarm.enabled": True, "rounds.sites": 2}, "swarm.enabled is true"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_a_wrong_evaluation_setting_refuses_the_start(
    settings: Mapping[str, Any], message: str, tmp_path: Path, nursery: Nursery
) -> None:
    """A wrong setting of the server's evaluation ends `atoll server` with exit code 2 and one line, before it writes a
    state directory.
    """
    path = run_file(tmp_path, **settings)
    outcome = command(nursery, tmp_path, "server", str(path))
    assert outcome.returncode == 2
    assert message in outcome.stderr
    assert not (tmp_path / "state").exists()


def test_refuses_an_evaluation_function_of_two_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be called with the model alone"):
        evaluating_server(tmp_path, lambda model, data: {})
    with pytest.raises(UsageError, match="Use one of them"):
        evaluating_server(tmp_path, **{"server.evaluate": "mine:evaluate"})


def test_a_refused_start_leaves_no_evaluation_process(tmp_path: Path) -> None:
    """If a server with an evaluation function cannot start, here because its port is in use, no child
    process is left.
    """

    def children() -> str:
        return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()

    with evaluating_server(tmp_path) as server:
        before = children()
        with pytest.raises(PortInUse):
            evaluating_server(tmp_path / "other", **{"network.port": server.port}).start()
        assert children() == before


def test_an_evaluation_gets_the_programs_own_module(tmp_path: Path) -> None:
    """If a program gives the server a module, the evaluation function gets a module of this class with the version's
    weights. The program's own module stays unchanged.
    """
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()

    def evaluate(other: nn.Linear) -> dict[str, float]:
        return {"w": other.weight.item(), "is_module": isinstance(other, nn.Linear), "is_training": other.training}

    settings = {"algorithm.name": "fedavg", "rounds.total": 1, "network.port": 0, "disk.state_dir": tmp_path / "state"}
    server = atoll.Server(model, settings, evaluate=evaluate)
    with server, atoll.join(server.url, site="a") as worker:
        for fl_round in worker:
            fl_round.load_into(nn.Linear(1, 1, bias=False))
            fl_round.submit({"weight": torch.full((1, 1), 7.0)})
    assert server.status().history[0].global_metrics == {"w": 7.0, "is_module": 1.0, "is_training": 0.0}
    assert model.weight.item() == before


def test_a_simulation_evaluates_at_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation calls the server's evaluation function, whether it is given as a path or as a function."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    settings = {"algorithm.name": "fedavg", "rounds.total": 3, "disk.min_free_bytes": 0}
    for name, evaluate in (("path", "mine.py:evaluate"), ("function", value)):
        simulation = new_simulation(
            "mine.py:Weight",
            **settings,
            **{"disk.state_dir": tmp_path / name},
            script="mine.py:train",
            sites=2,
            processes=1,
            evaluate=evaluate,
        )
        result = simulation.run()
        assert result.global_metrics["value"] == 3.0
        lines = [json.loads(line) for line in result.metrics_file.read_text().splitlines()]
        assert [line["global_metrics"]["value"] for line in lines] == [1.0, 2.0, 3.0]


def test_a_recipe_accepts_an_evaluation_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe writes the path of its evaluation function into the run file, and refuses a function that no process can
    import.
    """
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    about: dict[str, Any] = {"name": "r", "model": nn.Linear(1, 1), "min_sites": 1, "num_rounds": 1}
    recipe = FedAvgRecipe(**about, train_script="train.py", evaluate=os.path.exists)
    assert recipe.settings().server.evaluate == "genericpath:exists"
    with pytest.raises(UsageError, match="the server cannot import evaluate"):
        FedAvgRecipe(**about, train_script="train.py", evaluate=lambda model: {})
    with pytest.raises(ConfigError, match=r"server\.evaluate"):
        FedAvgRecipe(**about, train_script="train.py", evaluate=3)
