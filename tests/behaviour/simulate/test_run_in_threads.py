"""`atoll.run`: a server and its sites in threads of one program."""

from __future__ import annotations

import functools
import math
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.models import build_model
from kit.servers import PLAIN, long
from kit.world import require_equal
from safetensors.torch import load_file
from simulated_world import model_of, workers_of

import atoll
from atoll.errors import ConfigError, RunFailed, UsageError
from atoll.testing.run import wait_until

ZERO = {"w": torch.zeros(3)}
MOVES = {"a": 1.0, "b": 3.0}


def move(worker: Any, moves: dict[str, float] = MOVES) -> None:
    """Each site adds its number to each element, in each round."""
    for fl_round in worker:
        weights = fl_round.state_dict()["w"] + moves[worker.site]
        fl_round.submit({"w": weights}, weight=1.0, metrics={"move": moves[worker.site]})


def run(folder: Path, script: Any = move, sites: Any = "ab", **settings: Any) -> Any:
    """A run of two rounds by default; options of `atoll.run` stand among its settings."""
    given = PLAIN | {"disk.state_dir": folder / "state", "rounds.total": 2, "rounds.sites": len(sites)} | long(settings)
    options = {name: given.pop(name) for name in [*given] if "." not in name}
    return atoll.run(ZERO, script, sites=[*sites], settings=given, **options)


def weights_of(done: Any) -> list[float]:
    return load_file(done.model)["w"].tolist()


def test_a_run_in_threads_ends_with_the_right_model(tmp_path: Path) -> None:
    """`atoll.run` trains sites in threads of the program to the end of the run."""
    # The mean of 1 and 3 in each of two rounds.
    seen: list[int] = []
    done = run(tmp_path, on_round=lambda summary: seen.append(summary.round))
    assert weights_of(done) == [4.0] * 3
    assert (done.version, done.rounds, done.worker_rounds, done.metrics) == (2, 2, 4, {"move": 2.0})
    assert done.bytes_up == 4 * 64  # the file of an update is aligned
    assert (done.failed, done.refused) == ({}, {})
    assert seen == [1, 2]
    assert done.metrics_file.read_text().count("\n") == 2


@pytest.mark.parametrize(
    "script",
    [lambda worker: move(worker), functools.partial(move, moves=MOVES)],
    ids=["lambda", "partial"],
)
def test_any_function_can_train_in_threads(tmp_path: Path, script: Any) -> None:
    """`atoll.run` trains any function, such as a lambda or a `functools.partial`."""
    assert weights_of(run(tmp_path, script)) == [4.0] * 3


def test_local_variables_last_over_all_rounds(tmp_path: Path) -> None:
    """In `atoll.run`, the function is called once for each site, so its local variables last from round to round."""
    # It counts 1, 2, 3.
    threads: dict[str, set[str]] = {"a": set(), "b": set()}

    def train(worker: Any) -> None:
        for count, fl_round in enumerate(worker, 1):
            threads[worker.site].add(threading.current_thread().name)
            fl_round.submit({"w": fl_round.state_dict()["w"] + count}, weight=1.0)

    assert weights_of(run(tmp_path, train, rounds=3)) == [6.0] * 3
    assert threads == {"a": {"a"}, "b": {"b"}}


def test_threads_give_the_bits_of_a_simulation(tmp_path: Path) -> None:
    """`atoll.run` gives the same bits in threads as a simulation, also with the state that SCAFFOLD and int8 keep at a
    site.
    """
    # The script draws from a generator of site and round.

    def train(worker: Any) -> None:
        torch.set_num_threads(1)
        model = build_model()
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            draws = torch.Generator().manual_seed(10 * fl_round.number + ord(worker.site))
            with fl_round.correct(model, optimizer):
                for _ in range(2):
                    optimizer.zero_grad()
                    shape = next(model.parameters()).shape
                    (next(model.parameters()) * torch.randn(shape, generator=draws)).sum().backward()
                    optimizer.step()
            fl_round.submit(model, weight=1.0)

    rules = {"algorithm.name": "scaffold", "aggregation.upload_codec.name": "int8", "rounds.total": 3}
    settings = {name: PLAIN | rules | {"disk.state_dir": tmp_path / name} for name in ("threads", "forks")}
    model = build_model()
    atoll.run(model, train, sites=["a", "b"], settings=settings["threads"])
    atoll.Simulation(model, settings["forks"], script=train, sites=["a", "b"], processes=1).run()
    assert model_of(tmp_path / "threads") == model_of(tmp_path / "forks")


def move_as_told(worker: Any) -> None:
    for fl_round in worker:
        weights = fl_round.state_dict()["w"] + fl_round.config["move"]
        fl_round.submit({"w": weights}, weight=1.0)


def test_a_run_tells_its_sites_and_is_evaluated(tmp_path: Path) -> None:
    """The function tells a 1 and b 3 in round 1, and twice that in round 2: 2, then 2 + 4."""
    done = run(
        tmp_path,
        move_as_told,
        config=lambda number, site: {"move": number * MOVES[site]},
        evaluate=lambda model: {"size": float(model["w"].sum())},
    )
    assert weights_of(done) == [6.0] * 3
    assert done.global_metrics == {"size": 18.0}
    assert [each["global_metrics"] for each in done.history] == [{"size": 6.0}, {"size": 18.0}]


def fails_at_first(model: Any) -> dict[str, float]:
    """Version 1 is all 2."""
    if float(model["w"][0]) == 2.0:
        raise ValueError("no data here")
    return {"size": float(model["w"].sum())}


@pytest.mark.parametrize("engine", ["threads", "forks"])
def test_a_failed_evaluation_names_its_version(engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If an evaluation raises an error, the run goes on. The log and the result name the version and the error."""
    if engine == "threads":
        done = run(tmp_path, move, evaluate=fails_at_first)
    else:
        settings = PLAIN | {"rounds.total": 2, "disk.state_dir": tmp_path / "state"}
        done = atoll.Simulation(
            ZERO, settings, script=move, sites=["a", "b"], evaluate=fails_at_first, processes=1
        ).run()
    assert done.not_evaluated == {1: "ValueError: no data here"}
    assert done.global_metrics == {"size": 12.0}
    assert "(fails_at_first) at version 1: ValueError: no data here. Training goes on" in caplog.text


def test_another_config_function_is_another_run(tmp_path: Path) -> None:
    """An interrupted run is not continued with another `config` function, because its values decide the result."""

    def told(rate: float) -> Any:
        def config(number: int, site: str) -> dict[str, float]:
            if number == 2 and rate == 1.0:
                raise ValueError("no rate")
            return {"move": rate}

        return config

    with pytest.raises(RunFailed, match=r"no rate.*Correct the function, and start the run again"):
        run(tmp_path, move_as_told, config=told(1.0))
    with pytest.raises(UsageError, match=r"begun otherwise: rate of .*config has changed"):
        run(tmp_path, move_as_told, config=told(2.0))
    assert weights_of(run(tmp_path, move_as_told, config=told(2.0), resume=True)) == [3.0] * 3


def test_a_finished_run_is_not_returned_as_new(tmp_path: Path) -> None:
    """`atoll.run` refuses a finished run in its folder. With `resume` it returns its result, and with `fresh` it starts
    a new run.
    """
    # Also one of other code.
    first = run(tmp_path)
    with pytest.raises(UsageError, match="finished at version 2"):
        run(tmp_path)
    with pytest.raises(UsageError, match="finished at version 2"):
        run(tmp_path, lambda worker: None)
    second = run(tmp_path, resume=True)
    assert (second.rounds, second.worker_rounds, second.version) == (0, 0, 2)
    assert weights_of(first) == weights_of(second)
    assert weights_of(run(tmp_path, rounds=3, resume=True)) == [6.0] * 3  # more rounds go on
    assert weights_of(run(tmp_path, fresh=True)) == weights_of(first)


def raise_in_round_2(worker: Any) -> None:
    for fl_round in worker:
        if fl_round.number == 2 and worker.site == "b":
            raise ValueError("no data at b")
        fl_round.submit({"w": fl_round.state_dict()["w"] + MOVES[worker.site]}, weight=1.0)


def return_in_round_2(worker: Any) -> None:
    for fl_round in worker:
        if fl_round.number == 2 and worker.site == "b":
            return
        fl_round.submit({"w": fl_round.state_dict()["w"] + MOVES[worker.site]}, weight=1.0)


@pytest.mark.parametrize(
    ("script", "why"),
    [(raise_in_round_2, "ValueError: no data at b"), (return_in_round_2, "returned before the end of the run")],
    ids=["raises", "returns"],
)
def test_a_run_that_lacks_a_site_can_continue(tmp_path: Path, script: Any, why: str) -> None:
    """If `atoll.run` ends because a site failed that its rounds need, a second call continues the run."""
    with pytest.raises(RunFailed, match=f"Only 1 of 2 sites are left, and a round needs 2; .* is b: .*{why}") as failed:
        run(tmp_path, script)
    assert failed.value.exit_code == 9
    assert ("in raise_in_round_2" in failed.value.trace) == (script is raise_in_round_2)
    assert weights_of(run(tmp_path)) == [4.0] * 3
    assert workers_of(tmp_path / "state") == [["a", "b"]] * 2


def test_a_run_goes_on_without_an_unneeded_site(tmp_path: Path) -> None:
    """If a site fails that the rounds do not need, `atoll.run` goes on with the others."""
    # Round 2 is that of a alone: 2, then 2 + 1.
    begun = threading.Event()

    def train(worker: Any) -> None:
        for fl_round in worker:
            if fl_round.number == 2 and worker.site == "b":
                begun.set()
                raise ValueError("no data at b")
            assert fl_round.number == 1 or begun.wait(60)  # else the run could end before b has begun its round 2
            fl_round.submit({"w": fl_round.state_dict()["w"] + MOVES[worker.site]}, weight=1.0)

    done = run(tmp_path, train, **{"rounds.min_sites": 1})
    assert done.failed == {"b": "ValueError: no data at b"}
    assert weights_of(done) == [3.0] * 3


def test_an_error_after_the_last_round_is_told(tmp_path: Path) -> None:
    """If a site's function raises after the run has finished, the result says so, and has the model."""

    def train(worker: Any) -> None:
        move(worker)
        if worker.site == "b":
            raise ValueError("no summary")

    done = run(tmp_path, train)
    assert done.failed == {"b": "ValueError: no summary"}
    assert weights_of(done) == [4.0] * 3


def test_the_result_counts_refused_updates(tmp_path: Path) -> None:
    """The result of `atoll.run` says how many updates of each site were refused."""
    tried: list[int] = []

    def train(worker: Any) -> None:
        for fl_round in worker:
            is_bad = worker.site == "b" and not tried
            tried.extend([1] * is_bad)
            value = math.nan if is_bad else MOVES[worker.site]
            fl_round.submit({"w": fl_round.state_dict()["w"] + value}, weight=1.0)

    done = run(tmp_path, train)
    assert done.refused == {"b": 1}
    require_equal(load_file(done.model), {"w": torch.full((3,), 4.0)})


PROGRAM = """\
import itertools, sys, threading
from pathlib import Path

import torch

import atoll

def train(worker):
    for fl_round in worker:
        if fl_round.number == 2 and not Path("go").exists():
            Path(f"here-{worker.site}").touch()
            for number in itertools.count():  # never asks Atoll, so it must be ended
                pass
        fl_round.submit({"w": fl_round.state_dict()["w"] + 1.0}, weight=1.0)

def run():
    settings = {"rounds.total": 3, "algorithm.name": "fedavg", "disk.min_free_bytes": 0}
    return atoll.run({"w": torch.zeros(3)}, train, sites=2, settings=settings)

try:
    run()
except KeyboardInterrupt:
    print("interrupted", [each.name for each in threading.enumerate() if each.name.startswith("site")])
Path("go").touch()
done = run()
print("rounds", done.rounds, "version", done.version)
"""


@pytest.mark.slow
def test_an_interrupted_run_can_continue_in_one_program(nursery: Nursery, tmp_path: Path) -> None:
    """After Ctrl-C has ended `atoll.run`, with all threads of its sites, the same program can continue the run."""
    (tmp_path / "program.py").write_text(PROGRAM)
    program = nursery.start("program.py", cwd=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 2, "both sites in round 2")
    program.send(signal.SIGINT)
    assert program.wait() == 0, program.output()
    assert "interrupted []" in program.output()
    assert "rounds 2 version 3" in program.output()


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"script": "train.py:train"}, UsageError, "Give a function"),
        ({"sites": ["a", "a"]}, ConfigError, "each with its own name"),
        ({"sites": ["a b"]}, ConfigError, "not a site name"),
        ({"rounds.sites": 5}, ConfigError, "rounds.sites is 5, but sites gives 2"),
        ({"rounds.total": 0}, ConfigError, "the run would never end"),
        ({"diloco.sync_every": 5, "algorithm": "diloco"}, ConfigError, "cannot take part in the run"),
    ],
    ids=["a name", "one name twice", "no name", "more sites", "no end", "diloco"],
)
def test_atoll_run_refuses_wrong_arguments(tmp_path: Path, given: dict[str, Any], kind: Any, said: str) -> None:
    """`atoll.run` refuses arguments that it cannot use, such as a script's path or two sites of one name."""
    with pytest.raises(kind, match=said):
        run(tmp_path, **given)
