"""A run with another reducer than the mean, over the real path: what hostile sites can do to the global model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from kit.sites import clients, finish, play_round

from atoll.errors import ConfigError

# θ₀ = 0 and the outer step is w ← w − g, so the new model is the reduction of what the sites became.
SITES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 1e3, "e": -1e3}
START = {"w": torch.zeros(1), "bn.running_mean": torch.zeros(1)}


def after_one_round(folder: Path, **reducer: Any) -> tuple[float, float]:
    """What the sites' models become together: a parameter and a buffer."""
    settings = {f"aggregation.reducer.{key}": value for key, value in reducer.items()}
    with plain_server(folder, START, **settings, **{"rounds.sites": len(SITES), "rounds.total": 1}) as server:
        sites = clients(server, folder, SITES)
        play_round(sites, 1, lambda site, state: {name: torch.tensor([SITES[site]]) for name in state})
        model = finish(server, sites)
    return model["w"].item(), model["bn.running_mean"].item()


@pytest.mark.parametrize(
    ("reducer", "parameter", "buffer"),
    [
        ({"name": "median"}, 2.0, 2.0),  # of −1e3, 1, 2, 3, 1e3
        ({"name": "trimmed_mean", "trim": 0.2}, 2.0, 2.0),  # one at each end goes, 1 + 2 + 3 over three is left
        # norms 1, 2, 3, 1e3, 1e3; C = 3: (1 + 2 + 3 + 3 − 3) / 5. Buffers are not clipped: the hostile two cancel
        ({"name": "clipped_mean"}, 6 / 5, pytest.approx(6 / 5, rel=1e-4)),  # fp32 beside a thousand
    ],
    ids=["median", "trimmed", "clipped"],
)
def test_two_hostile_sites_of_five_are_bounded(
    tmp_path: Path, reducer: dict[str, Any], parameter: float, buffer: float
) -> None:
    assert after_one_round(tmp_path, **reducer) == (pytest.approx(parameter), buffer)


@pytest.mark.parametrize(
    ("reducer", "told"), [({"name": "median", "trim": 0.1}, r"aggregation\.reducer"), ({"name": "medain"}, "median")]
)
def test_a_wrong_reducer_ends_the_start_and_is_named(tmp_path: Path, reducer: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plain_server(tmp_path, START, **{f"aggregation.reducer.{key}": value for key, value in reducer.items()}).start()
