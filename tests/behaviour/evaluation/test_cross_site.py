"""Every site's model and the run's on every site's data: numbers derived by hand; kills; `atoll evaluate`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_world import (
    AFTER,
    ALONE,
    MATRIX,
    TARGETS,
    errors,
    evaluated,
    evaluation_server,
    losses,
    matrix_of,
    run_settings,
    start_site,
)
from harness.processes import Nursery, Process, free_port, wait_until
from kit import ForkedServer, Threads, together, write_run_file
from kit.processes import url_of
from kit.servers import PLAIN_DILOCO
from safetensors.torch import save_file

import atoll
from atoll.errors import RunFailed
from atoll.simulate import INPUTS_FILE
from atoll.tensors.lazy_tensors import LazyState
from atoll.testing.contracts import peak_growth
from atoll.testing.run import Status

pytestmark = pytest.mark.covers("P9")

C_HANGS = {"a": (), "b": (), "c": ("hangs",)}


def until_it_hangs(folder: Path) -> None:
    wait_until((folder / "c.hangs").exists, "an evaluation at c")


@pytest.mark.covers("P12")
def test_each_model_is_evaluated_at_each_site(nursery: Nursery, tmp_path: Path) -> None:
    """After training, each site's model and the run's model are evaluated at each site."""
    seen: list[Status] = []

    def during(server: atoll.Server, _: object) -> None:
        assert server.wait(60)
        seen.append(server.status())

    matrix, _ = evaluated(nursery, tmp_path, during=during)
    (status,) = seen
    assert losses(matrix) == MATRIX
    assert matrix["sites"] == ["a", "b", "c"]
    assert [(model["name"], model["kind"], model["version"]) for model in matrix["models"]] == [
        ("version 1", "version", 1),
        ("a", "site", None),
        ("b", "site", None),
        ("c", "site", None),
    ]
    assert matrix["finished"]
    assert all(model["digest"] for model in matrix["models"])
    assert [(each.name, each.state) for each in status.workflows] == [
        ("train", "done"),
        ("cross_site_evaluation", "done"),
    ]
    assert status.finished
    assert status.workflows[1].detail == "12 of 12 evaluations"
    text = (tmp_path / "state" / "exports" / "cross_site_evaluation.md").read_text()
    assert "| model | a | b | c |" in text
    assert "| c | 36 | 9 | 0 |" in text
    assert "Empty cells" not in text
    assert list((tmp_path / "state" / "objects").glob("*")) == []


@pytest.mark.parametrize(("of_b", "mean"), [("weight=1", 4.5), ("weight=0", 0.0), ("", 9.0)])
def test_an_evaluations_mean_weighs_the_sites(of_b: str, mean: float, nursery: Nursery, tmp_path: Path) -> None:
    """The mean of a cross-site evaluation uses the sites' weights; if a site reports none, all sites count equally."""
    # The loss of version 0 is 0 at a, with 3 samples, and 18 at b.
    settings = ALONE | {"workflow.steps": ({"kind": "cross_site_evaluation", "site_models": False},)}
    words = {"a": ["weight=3"], "b": [of_b]}
    matrix, _ = evaluated(nursery, tmp_path, words, **settings, **{"rounds.sites": 2})
    (model,) = matrix["models"]
    assert model["means"]["loss"] == mean
    assert [cell["weight"] for cell in matrix["cells"]] == [3.0, float(of_b[-1]) if of_b else None]
    text = (tmp_path / "state" / "exports" / "cross_site_evaluation.md").read_text()
    assert f"| version 0 | 0 | 18 | {mean:g} |" in text
    assert ("| weight | 3 | 1 | 4 |" in text) == (of_b == "weight=1")


@pytest.mark.covers("P12")
def test_an_evaluation_works_without_training(nursery: Nursery, tmp_path: Path) -> None:
    """Without any training, sites can evaluate the models that they bring themselves."""
    only = ({"kind": "cross_site_evaluation", "name": "own models"},)
    words = dict.fromkeys("abc", ("tasks",))
    matrix, _ = evaluated(nursery, tmp_path, words, **ALONE | {"workflow.steps": only}, has_model=False)
    assert losses(matrix) == {name: MATRIX[name] for name in "abc"}
    assert losses(matrix, "distance")["c"] == {"a": 6.0, "b": 3.0, "c": 0.0}


def test_a_failed_measurement_has_its_reason(nursery: Nursery, tmp_path: Path) -> None:
    """The cell of a failed evaluation gives the reason."""
    # Site `a` gives no model, site `b` raises an error, and site `c` measures a value that is not finite.
    matrix, _ = evaluated(nursery, tmp_path, {"a": ["refuses"], "b": ["raises"], "c": ["nan"]})
    found = losses(matrix)
    assert found == {name: {"a": MATRIX[name]["a"]} for name in ("version 1", "b", "c")}
    # of the two metrics of c one is no number, and is shown as such
    assert losses(matrix, "distance")["c"] == {"a": 6.0, "c": 0.0}
    assert {tuple(cell["not_finite"]) for cell in matrix["cells"] if cell["site"] == "c" and cell["metrics"]} == {
        ("loss",)
    }
    told = errors(matrix)
    assert told["b", "b"] == told["version 1", "b"] == "ValueError: no data here"
    assert {told["a", site] for site in "abc"} == {
        "UsageError: The function given to worker.submits at site a returned None, not a model."
    }
    text = (tmp_path / "state" / "exports" / "cross_site_evaluation.md").read_text()
    assert (
        "- a on every site: UsageError: The function given to worker.submits at site a returned None, not a "
        "model." in text
    )
    assert "- every model on b: ValueError: no data here" in text
    assert "| c | 36 | — | not finite |" in text


@pytest.mark.covers("P12")
def test_an_evaluation_without_any_value_fails(nursery: Nursery, tmp_path: Path) -> None:
    """If no evaluation gives a value, the run fails with the reason."""
    with evaluation_server(tmp_path, **ALONE, **{"rounds.sites": 1}) as server:
        start_site(nursery, tmp_path, server.url, "a", "tasks", "refuses", "raises")
        with pytest.raises(RunFailed, match="evaluated nothing: every model on a: ValueError: no data here"):
            server.run()
    assert matrix_of(tmp_path)["finished"]


@pytest.fixture
def no_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that has left, or hangs, is not waited for."""
    monkeypatch.setattr("atoll.server.tasks.cross_site_evaluation.RETURN_S", 0.1)


@pytest.mark.usefixtures("no_return")
def test_a_killed_site_leaves_its_cells_empty(nursery: Nursery, tmp_path: Path) -> None:
    """If a site is killed during an evaluation, its remaining cells are empty and give the reason. The other sites go
    on.
    """

    def during(_: atoll.Server, sites: list[Process]) -> None:
        until_it_hangs(tmp_path)
        sites.pop().kill()

    silent = {"network.heartbeat_interval_s": 0.5, "network.heartbeat_timeout_s": 2.0}
    matrix, _ = evaluated(nursery, tmp_path, C_HANGS, during, **silent)
    found, told = losses(matrix), errors(matrix)
    for model in ("version 1", "a", "b"):
        assert found[model] == {site: MATRIX[model][site] for site in "ab"}
    assert {site for _, site in told if _ != "c"} == {"c"}
    assert "is dead: silent for 2 s" in told["a", "c"]
    assert len(matrix["cells"]) == 12  # each is named


@pytest.mark.covers("P12")
@pytest.mark.usefixtures("no_return")
def test_an_evaluation_gives_up_a_stuck_site(nursery: Nursery, tmp_path: Path) -> None:
    """If a site makes no progress within the evaluation timeout, its cell says so and the evaluation ends without
    it.
    """

    def during(server: atoll.Server, _: object) -> None:
        assert server.wait(60)
        (tmp_path / "c.go").touch()

    workflows = ({"kind": "train"}, {"kind": "cross_site_evaluation", "evaluation_timeout_s": 1.5})
    matrix, _ = evaluated(nursery, tmp_path, C_HANGS, during, **{"workflow.steps": workflows})
    assert losses(matrix)["c"] == {"a": 36.0, "b": 9.0}
    (why,) = {why for (_, site), why in errors(matrix).items() if site == "c"}  # of the one model that it was at
    assert re.fullmatch(r"the site made no progress for 1\.5 s \(its last report: evaluating .+\)", why)


# -- servers and sites that are killed, and where the bytes go


@pytest.mark.covers("P12")
def test_a_killed_server_repeats_only_the_evaluation(nursery: Nursery, tmp_path: Path) -> None:
    """A server that is killed while sites evaluate repeats the evaluation after its restart, but not the training."""
    save_file({"weight": torch.zeros(1, 1)}, tmp_path / "zero.safetensors")
    with ForkedServer(nursery, tmp_path, **run_settings(**{"rounds.total": 1, "workflow.steps": AFTER})) as server:
        sites = [start_site(nursery, tmp_path, server.url, name, *words) for name, words in C_HANGS.items()]
        until_it_hangs(tmp_path)
        server.process.now.kill()
        began_again = "workflow 1 of 2, train, ended before this start"
        wait_until(lambda: began_again in server.log.read_text(), "the next start")
        (tmp_path / "c.go").touch()
        assert server.process.wait() == 0
    assert [site.wait() for site in sites] == [0, 0, 0]
    assert losses(matrix_of(tmp_path)) == MATRIX
    assert [site.output().count("submitted") for site in sites] == [1, 1, 1]
    assert "round 1" not in server.log.read_text().partition(began_again)[2]


def test_a_restarted_site_still_has_its_submitted_model(nursery: Nursery, tmp_path: Path) -> None:
    """A site that is killed during an evaluation and restarted still has the model that it submitted in training."""
    # The restarted site cannot submit a new model, because the run has no round for it.

    def during(server: atoll.Server, sites: list[Process]) -> None:
        until_it_hangs(tmp_path)
        sites.pop().kill()
        sites.append(start_site(nursery, tmp_path, server.url, "c"))

    matrix, sites = evaluated(nursery, tmp_path, C_HANGS, during)
    assert losses(matrix) == MATRIX
    assert "submitted" not in sites[2].output()


def big_models(folder: Path, nbytes: int, names: Iterable[str]) -> None:
    """A model of each site in a file: all its elements are the site's target."""
    for name in names:
        save_file({"weight": torch.full((1, nbytes // 4), TARGETS[name])}, folder / f"{name}.safetensors")


def evaluate_big(server: atoll.Server, folder: Path, name: str) -> None:
    """A site that gives its model from the file, and measures others by their last element, run by run."""
    target = TARGETS[name]

    def measure(state: LazyState) -> dict[str, float]:
        *_, last = (run[-1].item() for run in state.ref("weight").runs())
        return {"loss": (last - target) ** 2 * (2.0 if last < target else 1.0)}

    with atoll.tasks(server.url, name) as worker:
        worker.evaluates(measure)
        worker.submits(lambda: LazyState.open(folder / f"{name}.safetensors"))
        worker.run()


def test_sends_each_model_to_the_server_once(tmp_path: Path) -> None:
    """Each site sends its model to the server only once, though all sites evaluate it."""
    # Three models of 8 MB make 3 · 8 MB to the server and 9 · 8 MB from the server. The last transfer may not be
    # counted in full when the run ends.
    nbytes = 8_000_000
    big_models(tmp_path, nbytes, "abc")
    with evaluation_server(tmp_path, **ALONE, has_model=False) as server:
        together(*(partial(evaluate_big, server, tmp_path, name) for name in "abc"))
        server.run()
    assert losses(matrix_of(tmp_path)) == {name: MATRIX[name] for name in "abc"}
    run = server._require_served().run
    assert 3 * nbytes <= run.bytes_up < 3.03 * nbytes
    assert 8 * nbytes <= run.bytes_down < 9.09 * nbytes
    assert list((tmp_path / "state" / "objects").glob("*")) == []


@pytest.mark.parametrize("name", ["", "cross_site_evaluation.md"])
def test_an_evaluation_waits_for_writable_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """If the server cannot write the exports folder or the report in it, the log says so.

    The server saves the result once it can, and does not evaluate again.
    """
    monkeypatch.setattr("atoll.server.coordinator.background_writes.RETRY_S", 0.05)
    big_models(tmp_path, 4, "a")
    with evaluation_server(tmp_path, **ALONE, **{"rounds.sites": 1}, has_model=False) as server:
        server.exports.rename(tmp_path / "away")
        (server.exports / name).mkdir(parents=True) if name else server.exports.write_text("")
        site = Threads(partial(evaluate_big, server, tmp_path, "a"))
        said = f"the evaluation could not be saved: {server.exports / name} cannot be used ("
        said = said if name else f"the evaluation could not be saved: The folder {server.exports} cannot be made ("
        wait_until(lambda: said in caplog.text, "a word at the end")
        (server.exports / name).rmdir() if name else server.exports.unlink()
        server.run()
        site.join()
    assert losses(matrix_of(tmp_path)) == {"a": {"a": 0.0}}


@pytest.mark.covers("D1")
def test_evaluations_take_little_memory(tmp_path: Path) -> None:
    """An evaluation needs little memory at the server and at the sites, whatever the size of the models."""
    # The server and two sites run in this process and evaluate three models of 192 MB. Memory grows by less than 160
    # MB, so no model is held whole. Two models are files of the sites, and one is a file at the server.

    def evaluate(folder: Path, megabytes: int) -> int:
        folder.mkdir()
        big_models(folder, megabytes * 2**20, "abc")
        only = ({"kind": "cross_site_evaluation", "versions": [str(folder / "c.safetensors")]},)
        with evaluation_server(
            folder, **ALONE | {"workflow.steps": only, "rounds.sites": 2}, has_model=False
        ) as server:
            growth = peak_growth(lambda: together(*(partial(evaluate_big, server, folder, name) for name in "ab")))
            server.run()
        return growth

    evaluate(tmp_path / "small", 1)  # what is loaded once
    assert evaluate(tmp_path / "large", 192) < 160 * 2**20
    found = losses(matrix_of(tmp_path / "large"))
    assert found["a"] == {"a": 0.0, "b": 18.0}
    assert len(found) == 3


# -- behind other ways to train


@pytest.mark.covers("P12")
def test_sites_evaluate_after_a_diloco_run(nursery: Nursery, tmp_path: Path) -> None:
    """After a DiLoCo run, sites join again for the evaluation and give the run's result as their own model."""
    # By hand, with one round of two steps and outer SGD of rate 1: w ← (w + t)/2, twice from 0, is 3/4·t. That is 0 at
    # site `a` and 4.5 at site `c`, with the mean 2.25.
    words = {"a": ["diloco"], "c": ["diloco"]}
    matrix, _ = evaluated(nursery, tmp_path, words, **PLAIN_DILOCO, **{"rounds.sites": 2, "diloco.sync_every": 2})
    assert losses(matrix, "w") == {name: {"a": 2.25, "c": 2.25} for name in ("version 1", "a", "c")}


@pytest.mark.covers("P12")
@pytest.mark.parametrize(
    "settings",
    [{"algorithm.name": "scaffold"}, {"async.enabled": True}],
    ids=["scaffold", "async"],
)
def test_evaluations_may_follow_scaffold_and_async_rounds(
    nursery: Nursery, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """An evaluation can follow rounds of SCAFFOLD and asynchronous rounds."""
    # By hand, one step of rate 1/2 leads from 0 to t/2 = 1.5. This is the model of the only site and that of the run.
    matrix, _ = evaluated(nursery, tmp_path, {"b": ["sgd"]}, **{"rounds.sites": 1}, **settings)
    assert losses(matrix, "w") == {"version 1": {"b": 1.5}, "b": {"b": 1.5}}


@pytest.mark.covers("T8")
def test_a_sites_filters_change_its_evaluated_model(nursery: Nursery, tmp_path: Path) -> None:
    """A site's filters are applied to its own model before another site evaluates it."""
    # The filter of site `b` rounds to bfloat16, which has 8 bits: 1 + 2⁻⁹ becomes 1. The stored model of site `a` is
    # refused, since it was saved before its filters were applied.
    words = {"a": ["filters"], "b": ["filters", "own"]}
    matrix, _ = evaluated(nursery, tmp_path, words, **{"rounds.sites": 2})
    assert losses(matrix, "w")["b"] == {"a": 1.0, "b": 1.0}
    assert "a" not in losses(matrix)
    assert "its stored model was saved before they were applied" in errors(matrix)["a", "b"]
    assert not list(tmp_path.rglob("local.safetensors"))


# -- `atoll evaluate`


KEPT_VERSIONS = {
    "rounds.sites": 2,
    "rounds.best_metric": "loss",
    "rounds.best_mode": "min",
    "disk.export_every": 1,
    "disk.keep_versions": 2,
}

TRAINER = """
import sys
import torch
from torch import nn
import atoll

net = nn.Linear(1, 1, bias=False)
with atoll.join(sys.argv[1], sys.argv[2]) as worker:
    for fl_round in worker:
        fl_round.load_into(net)
        loss = abs(net.weight.item() - 2.0)
        with torch.no_grad():
            net.weight += 1
        fl_round.submit(net, metrics={"loss": loss})
"""


def trained(nursery: Nursery, folder: Path, rounds: int) -> None:
    """Version n of the run is w = n, and the best one is the second."""
    save_file({"weight": torch.zeros(1, 1)}, folder / "zero.safetensors")
    write_run_file(folder, **run_settings(**KEPT_VERSIONS, **{"rounds.total": rounds}))
    (folder / "train.py").write_text(TRAINER)
    server = nursery.start("atoll", "server", "run.toml", "--port", "0", cwd=folder)
    url = url_of(server)
    sites = [nursery.start(str(folder / "train.py"), url, name, cwd=folder) for name in "ab"]
    assert server.wait(60) == 0, server.output()
    assert [site.wait() for site in sites] == [0, 0]


def test_evaluates_versions_of_a_finished_run(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll evaluate` evaluates versions of a finished run and other models."""
    # The run's own matrix stays unchanged. The weight is n in version n, and 10 in the file. Site `a` has the target 0
    # and site `b` the target 3. Version 9 never existed.
    trained(nursery, tmp_path, 5)
    own = tmp_path / "state" / "exports" / "cross_site_evaluation.md"
    own.write_text("the matrix of the run")
    save_file({"weight": torch.full((1, 1), 10.0)}, tmp_path / "other.safetensors")
    versions = "--versions=latest,1,best,9,other.safetensors,nope.safetensors"
    asked = (versions, "--port=0", "--out=m/found.json")
    server = nursery.start("atoll", "evaluate", "run.toml", *asked, cwd=tmp_path)
    url = url_of(server)
    sites = [start_site(nursery, tmp_path, url, "a"), start_site(nursery, tmp_path, url, "b", "tasks")]
    assert server.wait(60) == 0, server.output()
    assert [site.wait() for site in sites] == [0, 0]
    found = json.loads((tmp_path / "m" / "found.json").read_text())
    assert losses(found) == {
        "version 5": {"a": 25.0, "b": 4.0},
        "version 1": {"a": 1.0, "b": 8.0},
        "best (version 2)": {"a": 4.0, "b": 2.0},
        "other.safetensors": {"a": 100.0, "b": 49.0},
    }
    printed = server.output()
    assert re.search(r"^version 5 +25 +4 +14.5$", printed, re.MULTILINE)
    assert "empty: version 9 on every site: Version 9 does not exist: the newest is 5." in printed
    assert "waiting for 2 sites; " in printed
    assert f"nope.safetensors is not in {tmp_path}: put it there before the sites join" in printed
    missing = f"No such file or directory, at the server: {tmp_path / 'nope.safetensors'}"
    assert f"empty: nope.safetensors on every site: {missing}" in printed
    assert losses(matrix_of(tmp_path, "cross_site_evaluation-2")) == losses(found)
    assert own.read_text() == "the matrix of the run"
    again = nursery.start("atoll", "server", "run.toml", "--port", "0", cwd=tmp_path)
    assert again.wait(30) == 0  # the run is where it was: finished
    assert "finished at version 5" in again.output()


def test_evaluates_a_run_that_is_named(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll evaluate NAME` takes the run file in the folder of an `atoll run`. Without one, it asks for a run file."""
    folder = tmp_path / "runs" / "trip-1"
    folder.mkdir(parents=True)
    trained(nursery, folder, 1)
    refused = nursery.start("atoll", "evaluate", "trip-1", "--port=0", cwd=tmp_path)
    assert refused.wait(30) == 2
    assert "'trip-1' has no run file. Give the run file: atoll evaluate run.toml." in refused.output()
    (folder / INPUTS_FILE).write_text("{}")  # as `atoll run` leaves it
    server = nursery.start("atoll", "evaluate", "trip-1", "--port=0", "--out=found.json", cwd=tmp_path)
    url = url_of(server)
    sites = [start_site(nursery, tmp_path, url, name) for name in "ab"]
    assert server.wait(60) == 0, server.output()
    assert [site.wait() for site in sites] == [0, 0]
    assert losses(json.loads((tmp_path / "found.json").read_text())) == {"version 1": {"a": 1.0, "b": 8.0}}


def test_an_unfinished_run_can_continue_after_an_evaluation(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll evaluate` evaluates the newest version of an unfinished run. Afterwards, the run continues to its end."""
    trained(nursery, tmp_path, 2)
    write_run_file(tmp_path, **run_settings(**KEPT_VERSIONS, **{"rounds.total": 4}))
    asked = ["--sites", "b", "--port", "0", "--json", "--out", "found.md"]
    server = nursery.start("atoll", "evaluate", "run.toml", *asked, cwd=tmp_path)
    url = url_of(server)
    # the script of training takes no part in it: there are no rounds now
    refused = nursery.start(str(tmp_path / "train.py"), url, "a", cwd=tmp_path)
    assert refused.wait() != 0
    assert "This server has a workflow and no rounds" in refused.output()
    sites = [start_site(nursery, tmp_path, url, name) for name in "ab"]
    assert server.wait(60) == 0, server.output()
    assert [site.wait() for site in sites] == [0, 0]
    text = server.output()
    assert losses(json.loads(text[text.index("\n{\n") :])) == {"version 2": {"b": 2.0}}
    assert "| version 2 | 2 | 2 |" in (tmp_path / "found.md").read_text()
    trained(nursery, tmp_path, 4)
    exported = nursery.start("atoll", "export", "out.safetensors", "--dir", "state", cwd=tmp_path)
    assert exported.wait() == 0
    assert "version 4" in exported.output()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_evaluation_says_what_it_waits_for(nursery: Nursery, tmp_path: Path, number: int, code: int) -> None:
    """`atoll evaluate` says what it waits for, from its first second on. After a signal, its last line says that it was
    stopped.
    """
    trained(nursery, tmp_path, 1)
    server = nursery.start("atoll", "evaluate", "run.toml", "--port=0", cwd=tmp_path)
    wait_until(lambda: "waits for sites: 0 of 2 take part (" in server.output(), "the line about the sites", 60)
    first, *lines = server.output().splitlines()
    assert "starting the evaluation of " in first
    assert any("waiting for 2 sites; " in line for line in lines)
    os.kill(server.pid, number)
    assert server.wait(30) == code, server.output()
    assert server.output().splitlines()[-1].endswith("the evaluation was stopped; the run and its models are unchanged")


def test_a_running_server_shows_its_matrix(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll evaluate --server` shows the matrix of a server while the evaluation is running."""
    # Site `c` hangs, and the cells of the other sites are already shown.

    def asked(server: atoll.Server) -> Process:
        return nursery.start("atoll", "evaluate", "--server", server.url, cwd=tmp_path)

    def during(server: atoll.Server, sites: list[Process]) -> None:
        early = asked(server)
        assert early.wait() == 6
        assert "has no results of a cross-site evaluation" in early.output()
        sites.append(start_site(nursery, tmp_path, server.url, "c", "hangs"))
        until_it_hangs(tmp_path)
        wait_until(lambda: server.evaluation is not None and len(server.evaluation.cells) == 8, "the others' cells")
        shown = asked(server)
        assert shown.wait() == 0
        assert re.search(r"^a +0 +18 +— +9$", shown.output(), re.MULTILINE)
        (tmp_path / "c.go").touch()

    evaluated(nursery, tmp_path, {"a": (), "b": ()}, during)


@pytest.mark.covers("X3")
def test_evaluate_refuses_wrong_arguments(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll evaluate` refuses wrong or missing arguments and says what is wrong."""
    (tmp_path / "run.toml").write_text('disk.state_dir = "state"\n')
    for arguments, code, words in (
        ([], 2, "Give either a run file or --server."),
        (["--server", "http://127.0.0.1:1", "--versions", "12"], 2, "--versions: only for an evaluation that this"),
        (["run.toml"], 2, "There is no run in"),
        (["run.toml", "--server", "http://127.0.0.1:1"], 2, "Give either"),
        (["--server", f"http://127.0.0.1:{free_port()}"], 5, "does not answer"),
    ):
        command = nursery.start("atoll", "evaluate", *arguments, cwd=tmp_path)
        assert command.wait() == code, command.output()
        assert words in command.output()
