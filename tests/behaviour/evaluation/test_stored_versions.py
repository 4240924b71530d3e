"""`atoll evaluate`: versions that are kept, the best one, exports and files, without going on with the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from evaluation_world import losses, matrix_of, serve, start_site
from harness.processes import Nursery, Process, free_port, wait_until
from safetensors.torch import save_file

RUN = """
algorithm.name = "fedavg"
model.source = "zero.safetensors"
rounds.total = {rounds}
rounds.sites = 2
disk.min_free_bytes = 0
disk.state_dir = "state"
disk.export_every = 1
disk.keep_versions = 2
rounds.best_metric = "loss"
rounds.best_mode = "min"
"""

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


def url_of(server: Process) -> str:
    wait_until(lambda: "listening on" in server.output() or server.poll() is not None, "the server")
    found = re.search(r"listening on (http://[0-9.:]+)", server.output())
    assert found, server.output()
    return found[1]


def trained(nursery: Nursery, folder: Path, rounds: int) -> None:
    """Version n of the run is w = n, and the best one is the second."""
    save_file({"weight": torch.zeros(1, 1)}, folder / "zero.safetensors")
    (folder / "run.toml").write_text(RUN.format(rounds=rounds))
    (folder / "train.py").write_text(TRAINER)
    server = nursery.start("atoll", "server", "run.toml", "--port", "0", cwd=folder)
    url = url_of(server)
    sites = [nursery.start(str(folder / "train.py"), url, name, cwd=folder) for name in "ab"]
    assert server.wait(60) == 0, server.output()
    assert [site.wait() for site in sites] == [0, 0]


@pytest.mark.covers("P9")
def test_versions_of_a_finished_run_are_evaluated_beside_it(nursery: Nursery, tmp_path: Path) -> None:
    """w is the number of the version, and 10 in the file; a has t = 0, b has t = 3. Version 9 there never was."""
    trained(nursery, tmp_path, 5)
    save_file({"weight": torch.full((1, 1), 10.0)}, tmp_path / "other.safetensors")
    asked = [
        "--versions",
        "latest,1,best,9,other.safetensors,nope.safetensors",
        "--no-site-models",
        "--port",
        "0",
        "--out",
        "m/found.json",
    ]
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
    assert re.search(r"^version 5 +25 +4$", printed, re.MULTILINE)
    assert "empty: version 9 on every site: Version 9 does not exist: the newest is 5." in printed
    assert "waiting for 2 sites; " in printed
    assert f"nope.safetensors is not in {tmp_path} yet; without it, its row stays" in printed  # before a site joins
    missing = f"No such file or directory, at the server: {tmp_path / 'nope.safetensors'}"
    assert f"empty: nope.safetensors on every site: {missing}" in printed
    assert losses(matrix_of(tmp_path)) == losses(found)
    again = nursery.start("atoll", "server", "run.toml", "--port", "0", cwd=tmp_path)
    assert again.wait(30) == 0  # the run is where it was: finished
    assert "finished at version 5" in again.output()


@pytest.mark.covers("P9")
def test_a_run_that_is_not_finished_goes_on_after_an_evaluation(nursery: Nursery, tmp_path: Path) -> None:
    trained(nursery, tmp_path, 2)
    (tmp_path / "run.toml").write_text(RUN.format(rounds=4))
    asked = ["--no-site-models", "--sites", "b", "--port", "0", "--json", "--out", "found.md"]
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
    assert "| version 2 | 2 |" in (tmp_path / "found.md").read_text()
    trained(nursery, tmp_path, 4)
    exported = nursery.start("atoll", "export", "out.safetensors", "--dir", "state", cwd=tmp_path)
    assert exported.wait() == 0
    assert "version 4" in exported.output()


@pytest.mark.covers("P9")
def test_a_server_that_runs_is_asked_for_its_matrix(nursery: Nursery, tmp_path: Path) -> None:
    """While c stands still, what the others have measured is there already."""
    with serve(tmp_path) as server:
        early = nursery.start("atoll", "evaluate", "--server", server.url, cwd=tmp_path)
        assert early.wait() == 6
        assert "has no results of a cross-site evaluation" in early.output()
        sites = [start_site(nursery, tmp_path, server.url, name) for name in "ab"]
        sites.append(start_site(nursery, tmp_path, server.url, "c", "hangs"))
        wait_until((tmp_path / "c.hangs").exists, "an evaluation at c")
        wait_until(lambda: server.evaluation is not None and len(server.evaluation.cells) == 8, "the others' cells")
        shown = nursery.start("atoll", "evaluate", "--server", server.url, cwd=tmp_path)
        assert shown.wait() == 0
        assert re.search(r"^a +0 +18 +—$", shown.output(), re.MULTILINE)
        (tmp_path / "c.go").touch()
        assert server.wait(60)
        server.run()
    assert [site.wait() for site in sites] == [0, 0, 0]


@pytest.mark.covers("P9", "X3")
def test_what_cannot_be_evaluated_is_named(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('disk.state_dir = "state"\n')
    for arguments, code, words in (
        ([], 2, "Give either a run file or --server."),
        (["run.toml"], 2, "There is no run in"),
        (["run.toml", "--server", "http://127.0.0.1:1"], 2, "Give either"),
        (["--server", f"http://127.0.0.1:{free_port()}"], 5, "does not answer"),
    ):
        command = nursery.start("atoll", "evaluate", *arguments, cwd=tmp_path)
        assert command.wait() == code, command.output()
        assert words in command.output()
