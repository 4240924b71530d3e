"""What does not go with fragments is refused, in settings and when joining."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.requests import get
from streaming_world import loop_of, names_of, serve

import atoll
from atoll.errors import ConfigError

THREE: dict[str, Any] = {"K": 3, "H": 9}
PLAIN: dict[str, Any] = {"algorithm.outer_optimizer.lr": None, "algorithm.outer_optimizer.momentum": None}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"K": 3, "H": 10}, "diloco.sync_every is 10 and diloco.num_fragments is 3", "9 or 12"),
    (THREE | {"rounds.best_metric": "loss"}, "rounds.best_metric is 'loss', but diloco.num_fragments is 3", "to 1"),
    (THREE | {"aggregation.aggregator.path": "a:b"}, "aggregator is 'a:b', but diloco.num_fragments is 3", "to 1"),
    (THREE | {"rounds.sample_fraction": 0.5}, "rounds.sample_fraction is 0.5, but diloco.num_fragments is 3", "to 1"),
    (THREE | {"workflow.function": "a:b"}, "workflow.function is 'a:b', but diloco.num_fragments is 3", "to 1"),
    ({"K": 2, "H": 8, "tau": 5}, "fragment_sync_delay is 5", "at most 4"),
    ({"K": 13, "H": 13}, "diloco.num_fragments is 13, but the model has only 12", "at most 12"),
    (
        PLAIN | {"algorithm.name": "fedavg", "K": 2},
        "diloco.num_fragments is 2, but in 'fedavg'",
        "diloco",
    ),
    (
        PLAIN | {"algorithm.name": "scaffold", "tau": 2},
        "fragment_sync_delay is 2, but in 'scaffold'",
        "diloco",
    ),
]


@pytest.mark.covers("L7")
@pytest.mark.parametrize(("settings", "told", "remedy"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_go_with_fragments_is_refused_with_the_remedy(
    tmp_path: Path, settings: dict[str, Any], told: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(tmp_path, **settings).start()
    assert told in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.covers("L7")
def test_refuses_at_the_join_a_worker_that_streams_otherwise(tmp_path: Path) -> None:
    with serve(tmp_path, K=3, H=9) as server:
        with pytest.raises(ConfigError, match="a has 2 fragments, but the run has 3"):
            loop_of(server.url, tmp_path, num_fragments=2).start()
        with pytest.raises(ConfigError, match="every 6 steps, but the run every 9"):
            loop_of(server.url, tmp_path, sync_every=6).start()
        with pytest.raises(ConfigError, match=r"streams .*, but this worker trains whole rounds"):
            atoll.join(server.url, site="a", folder=tmp_path / "w")


@pytest.mark.covers("L8")
def test_a_worker_hears_how_the_model_is_cut(tmp_path: Path) -> None:
    with serve(tmp_path, K=3, H=9, tau=2, alpha=0.5, inflight=2) as server:
        schema, info = (get(server.url, path)[1] for path in ("/v1/schema", "/v1/run"))
    cut: list[list[str]] = [[], [], []]
    for entry, fragment in zip(schema["tensors"], schema["fragments"], strict=True):
        cut[fragment].append(entry["name"])
    assert cut == names_of(3)
    assert (info["fragments"], info["tau"], info["alpha"], info["max_inflight"]) == (3, 2, 0.5, 2)
