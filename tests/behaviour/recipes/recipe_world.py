"""A model, a script and a recipe on them: small, real, and the same bits whenever it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.recipes import FedAvgRecipe, Recipe

MODEL = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden=5):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 4)
        self.head = nn.Linear(hidden, 4)
        self.head.weight = self.two.weight  # tied

    def forward(self, x):
        return self.two(self.norm(self.one(x))) + self.head(self.norm(self.one(x)))

def build(hidden=5):
    return Net(hidden)
"""

TRAIN = """\
import sys, zlib
import torch
import atoll
from my_model import Net

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.join() as worker:
    for fl_round in worker:
        data = torch.Generator().manual_seed(zlib.crc32(f"{worker.site} {fl_round.number}".encode()))
        fl_round.load_into(model)
        with fl_round.correct(model, optimizer):
            for _ in range(3):
                x = torch.randn(8, 4, generator=data)
                loss = (model(x) - x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        pass
        fl_round.submit(model, weight=8, metrics={"loss": loss.item()})
print("done", *sys.argv[1:])
"""

DILOCO = """\
import zlib
import torch
import atoll
from my_model import Net

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with atoll.DiLoCo(model, optimizer) as diloco:
    data = torch.Generator().manual_seed(3)
    while not diloco.finished:
        x = torch.randn(8, 4, generator=data)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
"""


def train_and(more: str) -> None:
    """Let the project's clients do more behind their steps."""
    Path("train.py").write_text(TRAIN.replace("        pass\n", f"        {more}\n"))


def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `folder` the current one, with the model and a script in it."""
    (folder / "my_model.py").write_text(MODEL)
    (folder / "train.py").write_text(TRAIN)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "my_model", raising=False)


def recipe(kind: type[Recipe] = FedAvgRecipe, **given: Any) -> Any:
    """A recipe of two clients and two rounds."""
    return kind(
        **{"name": "small", "model": "my_model:build", "min_sites": 2, "num_rounds": 2, "train_script": "train.py"}
        | given
    )


def module() -> nn.Module:
    """A model with a seed of its own, so that it is not what a function would build."""
    import importlib

    torch.manual_seed(11)
    return importlib.import_module("my_model").Net()
