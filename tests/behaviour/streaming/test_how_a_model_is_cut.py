"""How a model is cut into fragments, as a worker hears it from the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.requests import get
from streaming_world import serve
from torch import nn


def cut(folder: Path, model: Any, fragments: int) -> list[list[str]]:
    """The tensors of each fragment, by name."""
    with serve(folder / str(fragments), model, K=fragments, H=fragments) as server:
        schema = get(server.url, "/v1/schema")[1]
    places = schema["fragments"] or [0] * len(schema["tensors"])
    names = [entry["name"] for entry in schema["tensors"]]
    return [[name for name, place in zip(names, places, strict=True) if place == each] for each in range(fragments)]


@pytest.mark.covers("L8")
def test_equal_layers_are_shared_out_equally(tmp_path: Path) -> None:
    layers = cut(tmp_path, nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))), 4)
    assert [{name.partition(".")[0] for name in names} for names in layers] == [
        {"0", "1", "2"},
        {"3", "4", "5"},
        {"6", "7", "8"},
        {"9", "10", "11"},
    ]


@pytest.mark.covers("L8")
def test_fragments_are_balanced_by_bytes_not_by_tensors(tmp_path: Path) -> None:
    """One tensor of 8 elements is as large as the four behind it; by their number, the cut would be in the middle."""
    sizes = [8, 2, 2, 2, 2, 4]
    model = {f"{index}.weight": torch.zeros(size) for index, size in enumerate(sizes)}
    assert [len(names) for names in cut(tmp_path, model, 2)] == [2, 4]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.covers("L8")
def test_tied_tensors_and_the_buffers_of_a_module_stay_together(tmp_path: Path) -> None:
    place = {name: number for number, names in enumerate(cut(tmp_path, Tied(), 3)) for name in names}
    assert "head.weight" not in place, "it is embedding.weight"
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        assert place[f"body.1.{buffer}"] == place["body.1.weight"]
        assert place[f"body.3.{buffer}"] == place["body.2.bias"], "without parameters: with those before it"


def test_layers_of_mixed_width_stay_with_their_neighbours(tmp_path: Path) -> None:
    """A schema lists fp32 before bf16: the norms would all come first."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8).bfloat16()) for _ in range(4)))
    layers = cut(tmp_path, model, 4)
    assert [{name.partition(".")[0] for name in names} for names in layers] == [{"0"}, {"1"}, {"2"}, {"3"}]


def test_every_fragment_has_something_to_train(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    trained = {name for name, _ in model.named_parameters()}
    for count in range(1, 7):
        assert all(trained.intersection(names) for names in cut(tmp_path, model, count))
