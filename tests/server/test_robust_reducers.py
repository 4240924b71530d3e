"""A run with another reducer than the mean, over the real path: what hostile sites can do to the global model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import new_server
from safetensors.torch import load_file

import atoll

# θ₀ = 0 and the outer step is w ← w − g, so the new model is the reduction of what the sites became.
HONEST = {"a": 1.0, "b": 2.0, "c": 3.0}
HOSTILE = {"d": 1e3, "e": -1e3}


def after_one_round(folder: Path, **options: Any) -> tuple[float, float]:
    """What the sites' models become together: a parameter and a buffer."""
    start = {"w": torch.zeros(1), "bn.running_mean": torch.zeros(1)}
    sites = HONEST | HOSTILE
    settings = {
        "algorithm.name": "fedavg",
        "rounds.sites": len(sites),
        "rounds.total": 1,
        "network.port": 0,
        "disk.min_free_bytes": 0,
    }
    with new_server(start, **settings, **options, **{"disk.state_dir": folder / "state"}) as server:
        clients = [atoll.functional.Client(server.url, site=site, folder=folder / "w").register() for site in sites]
        for client, value in zip(clients, sites.values(), strict=True):
            assert client.next_round() == 1
            state = client.pull()
            assert set(state) == {"w", "bn.running_mean"}
            client.submit({"w": torch.tensor([value]), "bn.running_mean": torch.tensor([value])})
        for client in clients:
            assert client.next_round() is None
            client.close()
        assert server.wait(60)
        model = load_file(server.exports / "model.safetensors")
    return model["w"].item(), model["bn.running_mean"].item()


def test_the_median_of_five_sites_of_which_two_are_hostile(tmp_path: Path) -> None:
    assert after_one_round(tmp_path, **{"aggregation.reducer.name": "median"}) == (2.0, 2.0)  # of −1e3, 1, 2, 3, 1e3


def test_the_trimmed_mean_of_five_sites_of_which_two_are_hostile(tmp_path: Path) -> None:
    # one at each end goes, 1 + 2 + 3 over three is left
    assert after_one_round(
        tmp_path, **{"aggregation.reducer.name": "trimmed_mean", "aggregation.reducer.trim": 0.2}
    ) == (2.0, 2.0)


def test_the_clipped_mean_bounds_what_a_hostile_site_can_do(tmp_path: Path) -> None:
    # norms 1, 2, 3, 1e3, 1e3; C = 3: (1 + 2 + 3 + 3 − 3) / 5.  Buffers are not clipped: 6 / 5, the hostile two cancel
    parameter, buffer = after_one_round(tmp_path, **{"aggregation.reducer.name": "clipped_mean"})
    assert parameter == pytest.approx(6 / 5)
    assert buffer == pytest.approx(6 / 5, rel=1e-4)  # fp32 beside a thousand


def test_a_wrong_option_ends_the_start_and_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(atoll.errors.ConfigError, match=r"aggregation\.reducer"):
        atoll.Server(
            {"w": torch.zeros(1)},
            settings={
                "aggregation.reducer.name": "median",
                "aggregation.reducer.trim": 0.1,
                "disk.state_dir": tmp_path,
            },
        ).start()


def test_an_unknown_reducer_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(atoll.errors.ConfigError, match="median"):
        atoll.Server(
            {"w": torch.zeros(1)}, settings={"aggregation.reducer.name": "medain", "disk.state_dir": tmp_path}
        ).start()
