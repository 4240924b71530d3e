"""The ClientApp of a Flower app, unchanged, in the rounds of Atoll's algorithms."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.digests import exported
from kit.flower_apps import CLIENT, LEGACY_CLIENT, LEGACY_SERVER, PROJECT, write_app
from kit.processes import command
from kit.servers import plain_server
from safetensors.torch import load_file
from torch import nn

from atoll.errors import AtollError, ConfigError
from atoll.testing.run import history

pytest.importorskip("flwr")
pytestmark = [pytest.mark.timeout(180)]

TORCH_CLIENT = """\
from flwr.app import ArrayRecord, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from adds.task import Net

app = ClientApp()


@app.train()
def train(msg, context):
    net, place = Net(), context.node_config["partition-id"] + 1
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    assert dict(msg.content["config"]) == {"server-round": msg.content["config"]["server-round"], "optimizer.lr": 0.5}
    added = {name: (tensor + place).float() if tensor.is_floating_point() else tensor + 1
             for name, tensor in net.state_dict().items()}
    metrics = MetricRecord({"num-examples": place, "place": place, "pair": [1.0, 2.0], "scale": 0.0})
    return Message(RecordDict({"arrays": ArrayRecord(added), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    state = msg.content["arrays"].to_torch_state_dict(keep_input=False)
    numbers = {"num-examples": 1 + context.node_config["partition-id"], "scale": state["scale"].mean().item()}
    return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=msg)
"""
TASK = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.fc.weight)
        self.scale = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def arrays():
    import numpy as np

    return [np.zeros(3)]
"""
ROUNDS = """\
algorithm.name = "fedavg"
rounds.sites = 2
rounds.total = 2
rounds.config.optimizer.lr = 0.5
model.source = "adds.task:Net"

[[workflow.steps]]
kind = "train"

[[workflow.steps]]
kind = "cross_site_evaluation"
site_models = false
"""


def app_with_a_model(folder: Path, client: str) -> Path:
    """An app whose package has a model, too."""
    app = write_app(folder, LEGACY_SERVER, client)
    (app / "adds" / "task.py").write_text(TASK)
    return app


@pytest.mark.slow
def test_a_client_app_trains_with_fedavg(tmp_path: Path, nursery: Nursery) -> None:
    """`atoll run` with an app trains its model by name: bf16, buffers, weights, metrics, configuration, evaluation."""
    app_with_a_model(tmp_path, TORCH_CLIENT)
    (tmp_path / "run.toml").write_text(ROUNDS)
    found = command(nursery, tmp_path, "run", "run.toml", "--flower", "adds", "--quiet")
    assert found.returncode == 0, found.stderr
    state = tmp_path / "runs" / "adds-1" / "state"
    final = exported(state.parent)
    # site k adds k and weighs k: (1 · 1 + 2 · 2) / 3 = 5/3 a round
    torch.testing.assert_close(final["fc.weight"], torch.full((1, 2), 10 / 3), rtol=1e-6, atol=0)
    # bf16 near 5/3 is 1.6640625. Site k's sum, 1.6640625 + k, is a tie of bf16, to the even 1.65625 + k: differences
    # 127/128 and 255/128, whose mean (127 + 2 · 255) / 384 and 1.6640625 are 3.3229; the nearest is 3.328125
    assert final["scale"].tolist() == [3.328125] * 3
    assert final["scale"].dtype == torch.bfloat16
    assert final["count"].tolist() == 2
    assert found.stdout.split() == ["runs/adds-1/state/exports/model.safetensors"]
    # those of `evaluate` are of the received model; training's metric of the same name has another one
    rounds = [line["metrics"] for line in history(state)]
    assert [each["scale"] for each in rounds] == [0.0, 1.6640625]
    assert rounds[0] == {"scale": 0.0, "train.scale": 0.0, "place": pytest.approx(5 / 3), "pair.0": 1.0, "pair.1": 2.0}
    matrix = json.loads((state / "exports" / "cross_site_evaluation.json").read_text())
    assert [cell["metrics"] for cell in matrix["cells"]] == [{"scale": 3.328125}] * 2
    assert [cell["weight"] for cell in matrix["cells"]] == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            'algorithm.name = "diloco"\naggregation.upload_codec.name = "int8"', ["--kill-server"], id="diloco"
        ),
        pytest.param('algorithm.name = "fedavg"\nswarm.enabled = true', [], id="swarm", marks=pytest.mark.long),
    ],
)
def test_a_numpy_client_trains_in_other_runs(tmp_path: Path, nursery: Nursery, settings: str, words: list[str]) -> None:
    """A client with a list of arrays takes part in DiLoCo, with the same bits after a server's kill; or in a swarm."""
    app_with_a_model(tmp_path, LEGACY_CLIENT.replace("1.5)", "99.5)"))
    rounds = 30 if words else 2
    (tmp_path / "run.toml").write_text(
        f'{settings}\nrounds.sites = 2\nrounds.total = {rounds}\nmodel.source = "adds.task:arrays"\n'
    )
    found = command(nursery, tmp_path, "run", "run.toml", "--flower", "adds", "--json", *words)
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    if words:
        assert "the same bits" in found.stderr
    else:  # the mean of 1 and 2, twice
        assert load_file(tmp_path / summary["model"])["0"].tolist() == [3.0] * 3
    assert summary["metrics"]["place"] == 1.5


@pytest.mark.slow
@pytest.mark.parametrize("at", ["within", "flower.kept=kill@3", "outbox.sealed=kill@2"])
def test_a_killed_site_counts_each_round_once(tmp_path: Path, nursery: Nursery, at: str) -> None:
    """A site that is killed in a round begins it again with the state of before, unless its update is on its disk."""
    write_app(tmp_path, client=CLIENT)
    if at == "within":
        (tmp_path / "kill-1-2").touch()
    model = {"0": torch.zeros(2, 3), "1": torch.zeros(4)}
    with plain_server(tmp_path, model, rounds=3, **{"rounds.config": {"label": "plain"}}) as server:
        site = nursery.start(
            *("atoll", "worker", "--flower", "adds", "--restarts", "1", "--site", "a"),
            *("--node-config", "partition-id=0"),
            cwd=tmp_path,
            env={"ATOLL_SERVER": server.url, "ATOLL_DIR": str(tmp_path / "files")},
            failpoints="" if at == "within" else at,
        )
        assert site.wait(120) == 0, site.output()
        server.run()
    assert "restart 1 of 1" in site.output()
    assert [line["metrics"]["seen"] for line in history(tmp_path / "state")] == [1, 2, 3]
    assert exported(tmp_path)["1"].tolist() == [3.0] * 4


@pytest.fixture
def take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Runs an app as the only site of a server, in this process; returns the metrics of the rounds."""
    from atoll.integrations.flower.client_app import answer_messages

    def start(model: Any, client: str, *, keys: dict[str, Any] | None = None, **settings: Any) -> list[dict[str, Any]]:
        app = app_with_a_model(tmp_path, client)
        with plain_server(tmp_path, model, **{"rounds": 2} | settings) as server:
            for name, value in {"SERVER": server.url, "SITE": "a", "DIR": str(tmp_path / "sites")}.items():
                monkeypatch.setenv(f"ATOLL_{name}", value)
            answer_messages(app, {}, {}, keys or {})
            server.run()
        return [line["metrics"] for line in history(tmp_path / "state")]

    monkeypatch.setattr(sys, "path", list(sys.path))
    yield start
    for name in [name for name in sys.modules if name.partition(".")[0] == "adds"]:
        del sys.modules[name]


NAMED = """from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
import numpy as np

app = ClientApp()


@app.train()
def train(msg, context):
    arrays, config = msg.content["arrays"], msg.content["config"]
    added = ArrayRecord({name: Array(array.numpy() + 1.0) for name, array in arrays.items()})
    numbers = MetricRecord({"num-examples": 3})
    REPLY
    return Message(RecordDict({"arrays": added, "metrics": numbers}), reply_to=msg)
"""
W = {"w": torch.zeros(2)}


@pytest.mark.parametrize(
    ("line", "settings", "expected"),
    [
        pytest.param("", {"algorithm": "fedavg"}, 2.0, id="fedavg"),
        pytest.param(
            'added["w"] = Array(np.ones(2) * config["proximal-mu"])', {"algorithm": "fedprox"}, 0.01, id="prox"
        ),
        pytest.param('numbers["num-steps"] = 7', {"algorithm": "fednova"}, 2.0, id="fednova"),
        pytest.param("", {"async.enabled": True}, 2.0, id="async"),
        pytest.param("", {"codec": "topk"}, 2.0, id="topk"),
        # m = -1, then -1.9; the step is 0.7 · (Δ + 0.9 · m): 0.7 · 1.9 and 0.7 · (1 + 1.71)
        pytest.param("", {"algorithm": "diloco"}, 0.7 * (1.9 + 2.71), id="diloco"),
        pytest.param("numbers = MetricRecord({'num-examples': 0})", {"rounds": 1}, 0.0, id="sits-out"),
    ],
)
def test_a_client_app_takes_part_in_each_algorithm(
    take_part: Callable[..., list[dict[str, Any]]], tmp_path: Path, line: str, settings: dict[str, Any], expected: float
) -> None:
    """The app adds 1 to w in each of two rounds; the run decides what becomes of it."""
    take_part(W, NAMED.replace("REPLY", line), **settings)
    assert exported(tmp_path)["w"].tolist() == pytest.approx([expected] * 2, rel=1e-2 if "algorithm" in settings else 0)


def test_an_app_has_other_names_in_its_records(take_part: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    """`--record-keys` has the arguments of the app's own strategy."""
    client = NAMED.replace('content["arrays"]', 'content["model"]').replace('content["config"]', 'content["told"]')
    client = client.replace('"num-examples": 3', '"samples": 3, "loss": 0.25')
    keys = {"arrayrecord_key": "model", "configrecord_key": "told", "weighted_by_key": "samples"}
    assert take_part(W, client.replace("REPLY", ""), keys=keys) == [{"loss": 0.25}] * 2
    assert exported(tmp_path)["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("line", "settings", "words"),
    [
        ("1 / 0", {}, ["failed at a message of type 'train'", "ZeroDivisionError", "client_app.py, line 13"]),
        ("return None", {}, ["replied to 'train' with an object of type NoneType"]),
        ("return Message(Error(1, 'no data'), reply_to=msg)", {}, ["replied to 'train' with no data"]),
        ("added = ConfigRecord({})", {}, ["has 0 ArrayRecords, not one"]),
        ("added = ArrayRecord({'w': Array(np.array(['a', 'b']))})", {}, ["array 'w' has elements of <U1"]),
        ("added = ArrayRecord({'w': Array(np.zeros(3))})", {}, ["has w F32[3] in params, but the run has w F32[2]"]),
        (
            "added = ArrayRecord({'v': Array(np.zeros(2))})",
            {},
            ["has v F64[2] in params, but the run has no such tensor"],
        ),
        ("added = ArrayRecord([np.zeros(2)] * 2)", {}, ["2 arrays", "1 tensor: w"]),
        ("numbers = MetricRecord({'n': 3})", {}, ["no 'num-examples'", "it has 'n'", "--record-keys"]),
        ("numbers = MetricRecord({'num-examples': -3})", {}, ["The weight is -3"]),
        ("", {"algorithm": "scaffold"}, ["scaffold, corrects each local step", "fl_round.correct"]),
        ("", {"algorithm": "fedprox"}, ["has not read 'proximal-mu'", "run fedavg"]),
        ("", {"algorithm": "fednova"}, ["divides by the number of local steps", "no 'num-steps'", "steps_key"]),
        ("", {"algorithm": "diloco", "K": 2, "H": 2}, ["fragments", "trains whole models round by round"]),
    ],
)
def test_says_what_a_client_app_lacks(
    take_part: Callable[..., list[dict[str, Any]]], line: str, settings: dict[str, Any], words: list[str]
) -> None:
    """Each wrong reply, and each algorithm that an unchanged app cannot follow, ends the site with one sentence."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if "K" in settings else W
    with pytest.raises(AtollError) as refused:
        take_part(model, NAMED.replace("REPLY", line), **settings)
    assert [each for each in words if each not in str(refused.value)] == []


def test_refuses_a_list_of_arrays_for_a_tied_model(take_part: Callable[..., list[dict[str, Any]]]) -> None:
    """A list does not say which of two places a tied tensor has."""
    w = torch.zeros(2)
    with pytest.raises(ConfigError, match="does not say where 'again' is"):
        take_part({"w": w, "again": w}, LEGACY_CLIENT)


def test_says_in_which_order_a_list_is_taken(
    take_part: Callable[..., list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors by name, as a safetensors file has them, may be in another order than those of the app."""
    client = LEGACY_CLIENT.replace('context.node_config["partition-id"]', "0")
    take_part({"a": torch.zeros(3), "b": torch.zeros(3)}, client)
    assert "exchanges a list of arrays, in this order: a and b" in caplog.text


@pytest.mark.parametrize(
    ("words", "project", "said"),
    [
        ([], "", "model.source is not set. In a run with fedavg, the ServerApp of adds"),
        (["--set", "model.source=adds.task:Net"], "clientapp", "has no clientapp"),
        (
            ["--set", "model.source=adds.task:Net", "--record-keys", "weighted_key='n'"],
            "",
            "Did you mean 'weighted_by_key'?",
        ),
    ],
)
def test_refuses_before_the_start(tmp_path: Path, nursery: Nursery, words: list[str], project: str, said: str) -> None:
    """`atoll run` says at once what a run of an app with an algorithm lacks."""
    app = app_with_a_model(tmp_path, TORCH_CLIENT)
    if project:
        (app / "pyproject.toml").write_text(PROJECT.replace(project, "other"))
    (tmp_path / "run.toml").write_text('algorithm.name = "fedavg"\nrounds.total = 1\n')
    found = command(nursery, tmp_path, "run", "run.toml", "--flower", "adds", *words)
    assert found.returncode == 2
    assert said in found.stderr
