"""Settings of fragments: which are refused, what the server warns of, and how a model is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.models import Tied
from kit.requests import get
from kit.servers import SHORT
from streaming_world import loop_of, names_of, new_server
from torch import nn

import atoll
from atoll.errors import ConfigError

THREE: dict[str, Any] = {"K": 3, "H": 9}
PLAIN: dict[str, Any] = {"algorithm.outer_optimizer.lr": None, "algorithm.outer_optimizer.momentum": None}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (THREE | {"rounds.best_metric": "loss"}, "rounds.best_metric is 'loss', but diloco.num_fragments is 3", "to 1"),
    (THREE | {"aggregation.aggregator.path": "a:b"}, "aggregator is 'a:b', but diloco.num_fragments is 3", "to 1"),
    (THREE | {"rounds.sample_fraction": 0.5}, "rounds.sample_fraction is 0.5, but diloco.num_fragments is 3", "to 1"),
    (THREE | {"workflow.function": "a:b"}, "workflow.function is 'a:b', but diloco.num_fragments is 3", "to 1"),
    (
        THREE | {"workflow": print},
        "by the argument workflow, but diloco.num_fragments is 3",
        "Leave the argument workfl",
    ),
    ({"K": 13, "H": 13}, "diloco.num_fragments is 13, but the model has only 12", "at most 12"),
    (PLAIN | {"algorithm.name": "fedavg", "K": 2}, "diloco.num_fragments is 2, but in 'fedavg'", "diloco"),
    (PLAIN | {"algorithm.name": "scaffold", "tau": 2}, "fragment_sync_delay is 2, but in 'scaffold'", "diloco"),
]


@pytest.mark.covers("L7")
@pytest.mark.parametrize(("settings", "told", "remedy"), REFUSED, ids=range(len(REFUSED)))
def test_refuses_settings_unfit_for_fragments(tmp_path: Path, settings: dict[str, Any], told: str, remedy: str) -> None:
    """With `diloco.num_fragments` above 1, the server refuses settings that do not go with fragments. The error says
    what to change.
    """
    with pytest.raises(ConfigError) as caught:
        new_server(tmp_path, **settings).start()
    assert told in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.covers("L7")
def test_a_worker_with_other_fragments_is_refused(tmp_path: Path) -> None:
    """A worker whose number of fragments or steps differs from the run's is refused. A worker that trains whole models
    is refused too.
    """
    with new_server(tmp_path, K=3, H=9, tau=2, alpha=0.5, inflight=2) as server:
        info = get(server.url, "/v1/run")[1]
        assert (info["fragments"], info["tau"], info["alpha"], info["max_inflight"]) == (3, 2, 0.5, 2)
        with pytest.raises(ConfigError, match="a has 2 fragments, but the run has 3"):
            loop_of(server.url, tmp_path, num_fragments=2).start()
        with pytest.raises(ConfigError, match="every 6 steps, but the run every 9"):
            loop_of(server.url, tmp_path, sync_every=6).start()
        with pytest.raises(ConfigError, match=r"uses streaming .*, but this worker trains whole models"):
            atoll.join(server.url, site="a", folder=tmp_path / "w")


# -- local steps under way: a merge with alpha = 0 drops the tau steps since an update was taken


@pytest.mark.covers("L7")
@pytest.mark.parametrize(
    "settings",
    [
        {"H": 6, "tau": 6},
        {"H": 6, "tau": 6, "K": 3, "inflight": 3},
        {"H": 6, "tau": 6, "async.enabled": True},
        {"H": 1, "tau": 1},
    ],
    ids=str,
)
def test_refuses_updates_that_are_always_in_flight(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The server refuses settings with which a site would always replace all its local steps by the
    received version.
    """
    # Updates would be in flight all the time and α is 0.
    with pytest.raises(ConfigError) as caught:
        new_server(tmp_path, **settings).start()
    for key in ("tau", "H"):
        assert f"{SHORT[key]} is {settings[key]}" in str(caught.value)
    assert "diloco.fragment_update_alpha is 0" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"H": 6, "tau": 6, "alpha": 0.5}, "100%"),
        ({"H": 10, "tau": 9}, "90%"),
        ({"H": 9, "K": 3, "inflight": 2, "tau": 6}, "67%"),
        ({"H": 10, "tau": 3}, "30%"),
        ({"H": 10, "tau": 2}, ""),
        ({"H": 10, "tau": 9, "alpha": 0.9}, ""),
        ({"H": 10}, ""),
    ],
    ids=str,
)
def test_warns_if_many_steps_run_during_the_transfer(tmp_path: Path, settings: dict[str, Any], share: str) -> None:
    """If `diloco.fragment_sync_delay` is 30 % or more of the steps between syncs, the status warns, unless α is large
    enough.
    """
    with new_server(tmp_path, **settings) as server:
        warned = [each for each in server.status().warnings if "fragment_sync_delay" in each]
    assert [share in each for each in warned] == ([True] if share else [])


@pytest.mark.parametrize(("alpha", "warned"), [(0.0, 1), (0.5, 0)])
def test_warns_that_slow_workers_may_lose_all_steps(tmp_path: Path, alpha: float, warned: int) -> None:
    """With dynamic local steps, a merge delay and α = 0, slow workers may lose all steps, and the status warns."""
    dynamic = {"async.enabled": True, "diloco.dynamic_local_steps": True}
    with new_server(tmp_path, H=20, tau=2, alpha=alpha, **dynamic) as server:
        assert sum("dynamic_local_steps" in each for each in server.status().warnings) == warned


# -- how a model is cut, as a worker hears it from the server


def cut(folder: Path, model: Any, fragments: int) -> list[list[str]]:
    """The tensors of each fragment, by name."""
    with new_server(folder / str(fragments), model, K=fragments, H=fragments) as server:
        schema = get(server.url, "/v1/schema")[1]
    places = schema["fragments"] or [0] * len(schema["tensors"])
    names = [entry["name"] for entry in schema["tensors"]]
    return [[name for name, place in zip(names, places, strict=True) if place == each] for each in range(fragments)]


def layers(names: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.covers("L8")
def test_equal_layers_are_shared_out_equally(tmp_path: Path) -> None:
    """A model of layers of equal size is divided into fragments with an equal number of layers, in their order."""
    assert cut(tmp_path, None, 3) == names_of(3)
    found = cut(tmp_path, nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))), 4)
    assert list(map(layers, found)) == [{"0", "1", "2"}, {"3", "4", "5"}, {"6", "7", "8"}, {"9", "10", "11"}]


@pytest.mark.covers("L8")
def test_fragments_are_balanced_by_bytes_not_by_tensors(tmp_path: Path) -> None:
    """Fragments are balanced by bytes, not by the number of tensors."""
    # One tensor of 8 elements is as large as the four behind it. By number of tensors, the cut would be in the middle.
    sizes = [8, 2, 2, 2, 2, 4]
    model = {f"{index}.weight": torch.zeros(size) for index, size in enumerate(sizes)}
    assert [len(names) for names in cut(tmp_path, model, 2)] == [2, 4]


@pytest.mark.covers("L8")
def test_tied_tensors_and_buffers_keep_their_fragment(tmp_path: Path) -> None:
    """Tied tensors are in one fragment, and the buffers of a layer are in the fragment of its parameters.

    Buffers of a layer without parameters are in the fragment of the parameters before them.
    """
    place = {name: number for number, names in enumerate(cut(tmp_path, Tied(), 3)) for name in names}
    assert "head.weight" not in place, "it is embedding.weight"
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        assert place[f"body.1.{buffer}"] == place["body.1.weight"]
        assert place[f"body.3.{buffer}"] == place["body.2.bias"], "without parameters: with those before it"


def test_layers_with_two_dtypes_stay_in_one_fragment(tmp_path: Path) -> None:
    """A layer with fp32 norms and bf16 weights is in one fragment, although the schema lists fp32 tensors before bf16
    tensors.
    """
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8).bfloat16()) for _ in range(4)))
    assert list(map(layers, cut(tmp_path, model, 4))) == [{"0"}, {"1"}, {"2"}, {"3"}]


def test_every_fragment_has_trainable_parameters(tmp_path: Path) -> None:
    """However a model is divided into fragments, each fragment has trainable parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    trained = {name for name, _ in model.named_parameters()}
    for count in range(1, 7):
        assert all(trained.intersection(names) for names in cut(tmp_path, model, count))
