"""Flower apps, unchanged, on Atoll: their ServerApp at the server, their ClientApp at real sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.processes import Nursery, Process, RestartedProcess, free_port
from kit.flower_apps import CLIENT, LEGACY_CLIENT, LEGACY_SERVER, SERVER, write_app
from kit.processes import Outcome, command, url_of
from kit.workflows import workflow_server

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run_app(nursery: Nursery, folder: Path, *words: str, **environment: str) -> Outcome:
    """`atoll run --flower` with two sites in a folder, to its end."""
    found = command(nursery, folder, "run", "--flower", "adds", "--sites", "2", *words, **environment)
    assert found.returncode == 0, found.stderr
    return found


def test_a_flower_app_runs_unchanged(tmp_path: Path, nursery: Nursery) -> None:
    """An app of messages trains with its own strategy: arrays, metrics, both configurations and its state arrive."""
    write_app(tmp_path)
    printed = run_app(nursery, tmp_path, "--run-config", "num-server-rounds=3 label='a b'").stdout
    assert "next: runs/adds-1/server.log has what the app printed" in printed
    # site k adds k and weighs k: (1 · 1 + 2 · 2) / 3 = 5/3 a round, 5 in three
    final = np.load(tmp_path / "final.npz")
    np.testing.assert_allclose(final["arr_0"], np.full((2, 3), 5.0), rtol=1e-12)
    np.testing.assert_allclose(final["arr_1"], np.full(4, 5.0, np.float32), rtol=1e-6)
    assert final["arr_1"].dtype == np.float32
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert [metrics["train"][str(number)]["seen"] for number in (1, 2, 3)] == [1, 2, 3]
    assert [metrics["evaluate"][str(number)]["value"] for number in (1, 2, 3)] == pytest.approx([5 / 3, 10 / 3, 5])


def test_a_legacy_app_sees_the_failure_of_a_client(tmp_path: Path, nursery: Nursery) -> None:
    """In an app of NumPyClients, a client that raises is one failure of its round, and the run goes on."""
    write_app(tmp_path, LEGACY_SERVER, LEGACY_CLIENT)
    run_app(nursery, tmp_path)
    rounds = [json.loads(line) for line in (tmp_path / "fit.jsonl").read_text().splitlines()]
    # round 1: (1 + 2) / 2 = 1.5; round 2: client 2 raises, so 1.5 + 1
    assert rounds == [{"round": 1, "sites": [1, 2], "failures": 0}, {"round": 2, "sites": [1], "failures": 1}]
    assert [float(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()] == [1.5, 2.5]


@pytest.mark.parametrize("at", ["within", "flower.kept=kill@3"], ids=["within-the-app", "before-the-reply"])
def test_a_killed_site_counts_each_message_once(tmp_path: Path, nursery: Nursery, at: str) -> None:
    """A site that is killed at a message gets it again, and begins it with the state of before."""
    write_app(tmp_path)
    (tmp_path / "run.toml").write_text('rounds.sites = 2\n[[workflow.steps]]\nkind = "flower"\napp = "adds"\n')
    server = nursery.start("atoll", "server", "run.toml", "--port", "0", cwd=tmp_path)
    if at == "within":
        (tmp_path / "kill-2-2").touch()
    words = ["worker", "--flower", "adds", "--restarts", "1", "--site"]
    url = url_of(server)
    sites = [
        nursery.start(
            "atoll",
            *words,
            f"site-{number}",
            "--node-config",
            f"partition-id={number - 1}",
            cwd=tmp_path,
            env={"ATOLL_SERVER": url, "ATOLL_DIR": str(tmp_path / "files")},
            failpoints=at if number == 2 and at != "within" else "",
        )
        for number in (1, 2)
    ]
    assert [each.wait(90) for each in (*sites, server)] == [0, 0, 0], sites[1].output() + server.output()
    assert "restart 1 of 1" in sites[1].output()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert [metrics["train"][str(number)]["seen"] for number in (1, 2)] == [1, 2]
    np.testing.assert_allclose(np.load(tmp_path / "final.npz")["arr_0"], np.full((2, 3), 10 / 3))


def test_an_app_goes_on_after_its_server_was_killed(tmp_path: Path, nursery: Nursery) -> None:
    """If the server is killed at each message, a ServerApp ends with the same bits. No client does a message twice."""
    client = CLIENT.replace(
        "    assert msg.content",
        """    with Path(f"done-{context.node_config['partition-id']}").open("a") as file:
        file.write(f"{seen}\\n")
    assert msg.content""",
    )
    # the values that clients begin with are drawn at random, as the weights of a new model are
    server = SERVER.replace("np.zeros(4, np.float32)", "np.random.rand(4)")
    server = server.replace(
        "    strategy = ", "    Path('drawn').open('a').write(f'{np.random.rand()}\\n')\n    strategy = "
    )
    write_app(tmp_path, server.replace("import json", "import json\nfrom pathlib import Path", 1), client)
    port = free_port()
    step = '[[workflow.steps]]\nkind = "flower"\napp = "adds"\nrun_config = {num-server-rounds = 1}\n'
    (tmp_path / "run.toml").write_text(f"rounds.sites = 2\nnetwork.port = {port}\n{step}")

    def start(failpoints: str) -> Process:
        log = tmp_path / "server.log"
        return nursery.start("atoll", "server", "run.toml", cwd=tmp_path, failpoints=failpoints, log=log)

    served = RestartedProcess(start, ["workflow.fact=kill@1"] * 40)
    env = {"ATOLL_SERVER": f"http://127.0.0.1:{port}", "ATOLL_DIR": str(tmp_path / "files")}
    sites = [
        nursery.start(
            *("atoll", "worker", "--flower", "adds", "--site", f"site-{number}"),
            *("--node-config", f"partition-id={number - 1}"),
            cwd=tmp_path,
            env=env,
        )
        for number in (1, 2)
    ]
    assert served.wait(150) == 0, (tmp_path / "server.log").read_text()
    assert [each.wait(60) for each in sites] == [0, 0]
    # begin; for `train` and `evaluate`: sites twice, the task, 2 answers, its end, the replies
    assert served.deaths == 1 + 2 * 7
    assert [(tmp_path / f"done-{place}").read_text() for place in (0, 1)] == ["1\n", "1\n"]
    assert len(set((tmp_path / "drawn").read_text().split())) == 1
    final = np.load(tmp_path / "final.npz")
    np.testing.assert_allclose(final["arr_0"], np.full((2, 3), 5 / 3), rtol=1e-15)


def test_a_task_that_is_no_message_fails_alone(tmp_path: Path, nursery: Nursery) -> None:
    """A Flower site answers a task of another kind of workflow with an error, and goes on to the next one."""
    write_app(tmp_path)
    errors: list[str] = []

    def two_tasks(controller: Any) -> None:
        for number in range(2):
            controller.sites(at_least=1, timeout_s=90)
            (found,) = controller.broadcast("train", {"number": number})
            errors.append(found.error)

    with workflow_server(tmp_path, two_tasks) as server:
        words = ("worker", "--flower", "adds", "--site", "a")
        site = nursery.start("atoll", *words, cwd=tmp_path, env={"ATOLL_SERVER": server.url})
        assert site.wait(120) == 0, site.output()
    assert ["The task holds no message of a Flower app" in error for error in errors] == [True, True]
