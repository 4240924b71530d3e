"""Small Flower apps, in the shapes of Flower's own examples: no line of them knows of Atoll."""

from __future__ import annotations

from pathlib import Path

PROJECT = """\
[project]
name = "adds"
version = "1.0.0"

[tool.flwr.app]
publisher = "example"

[tool.flwr.app.components]
serverapp = "adds.server_app:app"
clientapp = "adds.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 2
label = "plain"
"""
SERVER = """\
import json

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(min_train_nodes=2, min_evaluate_nodes=2, min_available_nodes=2)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros((2, 3)), np.zeros(4, np.float32)]),
        num_rounds=context.run_config["num-server-rounds"],
        train_config=ConfigRecord({"label": context.run_config["label"]}),
    )
    np.savez("final.npz", *result.arrays.to_numpy_ndarrays())
    metrics = {
        "train": {number: dict(each) for number, each in result.train_metrics_clientapp.items()},
        "evaluate": {number: dict(each) for number, each in result.evaluate_metrics_clientapp.items()},
    }
    with open("metrics.json", "w") as file:
        json.dump(metrics, file)
"""
CLIENT = """\
import os
import signal
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    seen = context.state.get("seen", ConfigRecord({"messages": 0}))["messages"] + 1
    context.state["seen"] = ConfigRecord({"messages": seen})
    assert msg.content["config"]["label"] == context.run_config["label"]
    place = context.node_config["partition-id"] + 1
    once = Path(f"kill-{place}-{seen}")
    if once.exists():
        once.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    arrays = [each + place for each in msg.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": place, "seen": seen, "mean": float(np.mean(arrays[0]))})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    value = float(msg.content["arrays"].to_numpy_ndarrays()[0].mean())
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "value": value})}), reply_to=msg)
"""
LEGACY_SERVER = """\
import json

from flwr.common import ndarrays_to_parameters
from flwr.app import Context
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
import numpy as np


class Saved(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        with open("fit.jsonl", "a") as file:
            sites = sorted(each.metrics["place"] for _, each in results)
            file.write(json.dumps({"round": server_round, "sites": sites, "failures": len(failures)}) + "\\n")
        return parameters, metrics

    def aggregate_evaluate(self, server_round, results, failures):
        loss, metrics = super().aggregate_evaluate(server_round, results, failures)
        with open("loss.jsonl", "a") as file:
            file.write(json.dumps(loss) + "\\n")
        return loss, metrics


def server_fn(context: Context):
    strategy = Saved(min_available_clients=2, initial_parameters=ndarrays_to_parameters([np.zeros(3)]))
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
"""
LEGACY_CLIENT = """\
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Adds(NumPyClient):
    def __init__(self, place):
        self.place = place

    def fit(self, parameters, config):
        if (self.place, parameters[0][0]) == (2, 1.5):
            raise RuntimeError("the scanner is off")
        return [each + self.place for each in parameters], 1, {"place": self.place}

    def evaluate(self, parameters, config):
        return float(parameters[0].mean()), 1, {}


def client_fn(context: Context):
    return Adds(context.node_config["partition-id"] + 1).to_client()


app = ClientApp(client_fn)
"""


def write_app(folder: Path, server: str = SERVER, client: str = CLIENT, project: str = PROJECT) -> Path:
    """An app in `folder`/adds."""
    app = folder / "adds"
    (app / "adds").mkdir(parents=True)
    (app / "pyproject.toml").write_text(project)
    for name, text in (("__init__", ""), ("server_app", server), ("client_app", client)):
        (app / "adds" / f"{name}.py").write_text(text)
    return app
