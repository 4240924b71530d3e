"""Small stand-ins for the data sets that official programs load from a hub, under the names by which they load them.

`datasets.load_dataset("uoft-cs/cifar10")` reads a folder of this name if the current folder has one. So a program runs
unchanged and offline. Each class has its own mean, so that training on the stand-in learns something.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 480
"""Rows for training; a quarter as many for the test."""

IMAGES = {
    "uoft-cs/cifar10": ("img", (32, 32, 3), ROWS),
    "ylecun/mnist": ("image", (28, 28), 4_000),  # one program needs each class in a fifth of a tenth of it
    "zalando-datasets/fashion_mnist": ("image", (28, 28), ROWS),
}
"""Name → column, shape and rows for training."""

CENSUS = {
    "workclass": ["Private", "State-gov"],
    "education": ["Bachelors", "HS-grad"],
    "marital.status": ["Divorced", "Never-married"],
    "occupation": ["Sales", "Craft-repair"],
    "relationship": ["Husband", "Unmarried"],
    "race": ["Black", "White"],
    "sex": ["Female", "Male"],
    "native.country": ["Cuba", "Mexico"],
}
CENSUS_NUMBERS = ["age", "fnlwgt", "education.num", "capital.gain", "capital.loss", "hours.per.week"]


def numpy_model() -> dict[str, Any]:
    """Return the initial model of NVFlare's programs with NumPy: 1 to 9."""
    import torch

    return {"numpy_key": torch.arange(1.0, 10.0).reshape(3, 3)}


def write_data(folder: Path) -> None:
    """Write every stand-in into a folder, from which programs are then started."""
    draw = np.random.default_rng(0)
    for name, (column, shape, most) in IMAGES.items():
        for split, rows in (("train", most), ("test", most // 4)):
            _write_images(folder / name / f"{split}.parquet", column, shape, rows, draw)
    for split, rows in (("train", ROWS), ("test", ROWS // 4)):
        _write_parquet(folder / "jxie/higgs" / f"{split}.parquet", higgs(rows, draw))
    for name, columns in tables(draw).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _frame(columns).to_csv(path, index=False)


def tables(draw: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Return the tables: path of a CSV file → column → values."""
    return {
        "scikit-learn/iris/train.csv": iris(["SepalLengthCm", "SepalWidthCm", "PetalLengthCm", "PetalWidthCm"]),
        "hitorilabs/iris/train.csv": iris(["sepal_length", "sepal_width", "petal_length", "petal_width"]),
        "data/client.csv": iris(["sepal length (cm)", "sepal width (cm)", "petal length (cm)", "petal width (cm)"]),
        "scikit-learn/adult-census-income/train.csv": census(draw),
        "julien-c/titanic-survival/train.csv": titanic(draw),
    }


def iris(names: list[str]) -> dict[str, Any]:
    """Return scikit-learn's own iris data, with these names for its four columns."""
    from sklearn.datasets import load_iris

    data, species = load_iris(return_X_y=True)
    return dict(zip(names, data.T, strict=True)) | {"species": species}


def census(draw: np.random.Generator) -> dict[str, Any]:
    income = draw.integers(0, 2, ROWS)
    words = {name: [each[flag] for flag in draw.integers(0, 2, ROWS)] for name, each in CENSUS.items()}
    numbers = {name: (income * 10 + draw.integers(20, 60, ROWS)).tolist() for name in CENSUS_NUMBERS}
    return numbers | words | {"income": [("<=50K", ">50K")[flag] for flag in income]}


def higgs(rows: int, draw: np.random.Generator) -> dict[str, Any]:
    label = draw.integers(0, 2, rows)
    inputs = label[:, None] + draw.normal(size=(rows, 28))
    return {"label": label, "inputs": [row.tolist() for row in inputs]}


def titanic(draw: np.random.Generator) -> dict[str, Any]:
    survived = draw.integers(0, 2, ROWS)
    return {
        "Survived": survived,
        "Pclass": draw.integers(1, 4, ROWS),
        "Name": [("Mr. Owen Harris", "Mrs. Ada Cumings")[flag] for flag in survived],
        "Sex": [("male", "female")[flag] for flag in survived],
        "Age": draw.integers(1, 80, ROWS),
        "Siblings/Spouses Aboard": draw.integers(0, 4, ROWS),
        "Parents/Children Aboard": draw.integers(0, 3, ROWS),
        "Fare": draw.uniform(5, 100, ROWS).round(2),
    }


def _frame(columns: Mapping[str, Any]) -> Any:
    import pandas

    return pandas.DataFrame(columns)


def _write_images(path: Path, column: str, shape: tuple[int, ...], rows: int, draw: np.random.Generator) -> None:
    from datasets import ClassLabel, Features, Image

    labels = np.arange(rows) % 10
    means = 12 + 23 * labels.reshape(-1, *[1] * len(shape))
    pixels = np.clip(means + draw.normal(scale=10, size=(rows, *shape)), 0, 255).astype(np.uint8)
    features = Features({column: Image(), "label": ClassLabel(num_classes=10)})
    _write_parquet(path, {column: list(pixels), "label": labels.tolist()}, features)


def _write_parquet(path: Path, columns: Mapping[str, Any], features: Any = None) -> None:
    from datasets import Dataset

    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict(dict(columns), features).to_parquet(path)
