"""XGBoost by bagging: in every round each site adds trees to the common model, and the server joins the trees.

python train.py                                              trains alone, without a server
atoll worker --server URL --site NAME -- python train.py     takes part in a run

Models travel as XGBoost's own JSON, the bytes of which are an array. The result is model.ubj, beside this file.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

import atoll

RESULT = Path(__file__).with_name("model.ubj")
TREES = 2  # trees that each site adds in a round
RATE = 0.3  # learning rate of a round; each site's trees take their share of it
PARAMS = {"objective": "binary:logistic", "base_score": 0.5, "max_depth": 4, "subsample": 0.8, "nthread": 1, "seed": 7}

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""A model as XGBoost writes it; empty for the model without trees."""


# -- at the server


def main(controller: Any, rounds: int = 10) -> None:
    """Run the rounds. The server calls this; the run file names it, with its arguments."""
    model: Bytes = np.empty(0, np.uint8)
    for number in range(1, rounds + 1):
        sites = controller.sites(at_least=1)
        task = {"model": model, "rate": RATE / len(sites)}
        results = controller.broadcast("train", task, sites=sites, min_responses=1)
        answers = [result.payload for result in results if result.ok]
        accuracy = np.average([each["accuracy"] for each in answers], weights=[each["rows"] for each in answers])
        print(f"round {number}: accuracy {accuracy:.3f} of the model so far, {len(answers)} sites", flush=True)
        model = joined(model, [each["trees"] for each in answers])
    booster_of(model).save_model(RESULT)
    print(f"{booster_of(model).num_boosted_rounds()} boosting rounds in {RESULT}", flush=True)


def joined(model: Bytes, news: list[Bytes]) -> Bytes:
    """Append the trees of several models to those of `model`.

    Raises:
        ValueError: the models predict from other columns, or otherwise something else.
    """
    first, *others = [json.loads(each.tobytes()) for each in [model, *news] if each.size]
    ours = first["learner"]["gradient_booster"]["model"]
    for other in others:
        if other["learner"]["learner_model_param"] != first["learner"]["learner_model_param"]:
            both = other["learner"]["learner_model_param"], first["learner"]["learner_model_param"]
            raise ValueError("The sites' models differ: {}, and {}. Use the same columns and PARAMS.".format(*both))
        theirs = other["learner"]["gradient_booster"]["model"]
        for tree in theirs["trees"]:
            ours["trees"].append(tree | {"id": len(ours["trees"])})
        ours["tree_info"] += theirs["tree_info"]
        ours["iteration_indptr"] += [ours["iteration_indptr"][-1] + end for end in theirs["iteration_indptr"][1:]]
    ours["gbtree_model_param"]["num_trees"] = str(len(ours["trees"]))
    return np.frombuffer(json.dumps(first).encode(), np.uint8)


# -- at a site


def load_data(site: str) -> tuple[xgboost.DMatrix, xgboost.DMatrix]:
    """Return a site's training and test rows. Put your data here; in this example each site has another mix of rows."""
    own = np.random.default_rng(zlib.crc32(site.encode()))
    table = own.normal(own.normal(0, 0.5, 6), 1.0, (600, 6))
    score = table[:, 0] * table[:, 1] + np.sin(2 * table[:, 2]) + 0.5 * table[:, 3] + own.normal(0, 0.3, 600)
    train, test = atoll.data.holdout(score > 0, 0.2)
    return (xgboost.DMatrix(table[train], score[train] > 0), xgboost.DMatrix(table[test], score[test] > 0))


def booster_of(model: Bytes) -> xgboost.Booster:
    """Return the model as XGBoost's object."""
    booster = xgboost.Booster()
    booster.load_model(bytearray(model))
    return booster


def train(task: dict[str, Any], data: tuple[xgboost.DMatrix, xgboost.DMatrix]) -> dict[str, Any]:
    """Measure the model that came, boost it on the site's rows, and return the new trees alone."""
    rows, test = data
    model = booster_of(task["model"]) if task["model"].size else None
    guess = model.predict(test) if model is not None else np.full(test.num_row(), PARAMS["base_score"])
    before = model.num_boosted_rounds() if model is not None else 0
    boosted = xgboost.train(PARAMS | {"eta": task["rate"]}, rows, TREES, xgb_model=model)
    return {
        "trees": np.frombuffer(boosted[before:].save_raw("json"), np.uint8),
        "rows": rows.num_row(),
        "accuracy": float(np.mean((guess > 0.5) == test.get_label())),
    }


def alone(rounds: int = 10) -> None:
    """Train without a server, on the rows of one site."""
    data, model = load_data("alone"), np.empty(0, np.uint8)
    for number in range(1, rounds + 1):
        answer = train({"model": model, "rate": RATE}, data)
        print(f"round {number}: accuracy {answer['accuracy']:.3f} of the model so far", flush=True)
        model = joined(model, [answer["trees"]])


def take_part() -> None:
    """Answer the server's tasks until its workflow has ended."""
    with atoll.tasks() as worker:
        data = load_data(worker.site)
        worker.task("train")(lambda task: train(task, data))
        worker.run()


if __name__ == "__main__":
    if "ATOLL_SERVER" in os.environ:
        take_part()
    else:
        alone()
