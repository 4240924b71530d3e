"""Logistic regression of scikit-learn over sites: columns are scaled by common moments, then coefficients averaged.

python train.py                                              trains alone, without a server
atoll worker --server URL --site NAME -- python train.py     takes part in a run

Only arrays travel: sums of columns, then coefficients. The result is model.npz, beside this file.
"""

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import SGDClassifier

import atoll

RESULT = Path(__file__).with_name("model.npz")
CLASSES = np.array([0, 1])
EPOCHS = 2  # passes over a site's rows in a round

Arrays = dict[str, np.ndarray[Any, Any]]
Data = tuple[tuple[Any, Any], tuple[Any, Any]]
"""Rows and labels to train with, then those to test with."""


# -- at the server


def main(controller: Any, rounds: int = 10) -> None:
    """Scale, then run the rounds. The server calls this; the run file names it, with its arguments."""
    controller.sites(at_least=1)
    moments = [result.payload for result in controller.broadcast("measure", min_responses=1) if result.ok]
    model = start(moments)
    for number in range(1, rounds + 1):
        answers = [r.payload for r in controller.broadcast("train", model, min_responses=1) if r.ok]
        rows = [each["rows"] for each in answers]
        accuracy = np.average([each["accuracy"] for each in answers], weights=rows)
        print(f"round {number}: accuracy {accuracy:.3f} of the model so far, {len(answers)} sites", flush=True)
        model |= {name: np.average([each[name] for each in answers], 0, rows) for name in ("coef", "intercept")}
    np.savez(RESULT, **model)
    print(f"the coefficients are in {RESULT}", flush=True)


def start(moments: list[dict[str, Any]]) -> Arrays:
    """Return the model to begin with: each column's mean and deviation over the rows of all sites, and zeros."""
    rows = sum(each["rows"] for each in moments)
    mean = sum(each["sum"] for each in moments) / rows
    variance = sum(each["squares"] for each in moments) / rows - mean**2
    scale = np.sqrt(np.where(variance > 0, variance, 1.0))
    return {"mean": mean, "scale": scale, "coef": np.zeros((1, len(mean))), "intercept": np.zeros(1)}


# -- at a site


def load_data(site: str) -> Data:
    """Return a site's rows and labels. Put your data here; in this example each site has another mix of rows."""
    own = np.random.default_rng(zlib.crc32(site.encode()))
    table = own.normal(own.normal(0, 0.5, 5), 1.0, (400, 5)) * [1, 10, 100, 0.1, 1]
    score = table @ [1.0, -0.1, 0.01, 5.0, 0.0] + own.normal(0, 0.3, 400)
    train, test = atoll.data.holdout(score > 0, 0.2)
    return (table[train], (score[train] > 0).astype(int)), (table[test], (score[test] > 0).astype(int))


def measure(data: Data) -> dict[str, Any]:
    """Return what the server needs to scale the columns of all sites alike."""
    table = data[0][0]
    return {"rows": len(table), "sum": table.sum(0), "squares": (table**2).sum(0)}


def classifier(model: Arrays) -> SGDClassifier:
    """Return scikit-learn's object with these coefficients. It predicts from rows that are scaled: `scaled`."""
    found = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.02, random_state=7)
    found.classes_, found.coef_, found.intercept_ = CLASSES, model["coef"].copy(), model["intercept"].copy()
    return found


def scaled(table: Any, model: Arrays) -> Any:
    """Return rows with the columns scaled as in training."""
    return (table - model["mean"]) / model["scale"]


def train(model: Arrays, data: Data) -> dict[str, Any]:
    """Measure the model that came, train it on the site's rows, and return its coefficients."""
    (table, labels), (test_table, test_labels) = data
    found = classifier(model)
    accuracy = float(found.score(scaled(test_table, model), test_labels))
    for _ in range(EPOCHS):
        found.partial_fit(scaled(table, model), labels, CLASSES)
    return {"coef": found.coef_, "intercept": found.intercept_, "rows": len(table), "accuracy": accuracy}


def alone(rounds: int = 10) -> None:
    """Train without a server, on the rows of one site."""
    data = load_data("alone")
    model = start([measure(data)])
    for number in range(1, rounds + 1):
        answer = train(model, data)
        print(f"round {number}: accuracy {answer['accuracy']:.3f} of the model so far", flush=True)
        model |= {name: answer[name] for name in ("coef", "intercept")}


def take_part() -> None:
    """Answer the server's tasks until its workflow has ended."""
    with atoll.tasks() as worker:
        data = load_data(worker.site)
        worker.task("measure")(lambda _: measure(data))
        worker.task("train")(lambda model: train(model, data))
        worker.run()


if __name__ == "__main__":
    if "ATOLL_SERVER" in os.environ:
        take_part()
    else:
        alone()
