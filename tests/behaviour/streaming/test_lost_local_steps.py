"""A merge with alpha = 0 drops the tau local steps since an update was taken: refused where that is all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery
from kit import serve, write_run_file
from kit.servers import SHORT

from atoll.errors import ConfigError

DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "algorithm.outer_optimizer.name": None,
    "algorithm.outer_optimizer.lr": None,
    "algorithm.outer_optimizer.momentum": None,
}
ALL_LOST: list[dict[str, Any]] = [
    {"H": 6, "tau": 6},
    {"H": 6, "tau": 6, "K": 3, "inflight": 3},
    {"H": 6, "tau": 6, "async.enabled": True},
    {"H": 1, "tau": 1},
]


@pytest.mark.covers("L7")
@pytest.mark.parametrize("settings", ALL_LOST, ids=str)
def test_refuses_tau_of_a_whole_interval_with_alpha_zero(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught, serve(tmp_path, **DILOCO, **settings):
        pass
    for key in ("tau", "H"):
        assert f"{SHORT[key]} is {settings[key]}" in str(caught.value)
    assert "diloco.fragment_update_alpha is 0" in str(caught.value)


def test_the_command_refuses_it_with_the_exit_code_of_a_wrong_setting(tmp_path: Path, nursery: Nursery) -> None:
    write_run_file(tmp_path, **DILOCO, **{SHORT["H"]: 6, "network.port": 0})
    server = nursery.start(
        "atoll", "server", "run.toml", "--set", "diloco.fragment_sync_delay=6", cwd=tmp_path, log=tmp_path / "log"
    )
    assert server.wait(60) == ConfigError.exit_code


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
def test_warns_with_the_share_of_local_steps_under_way(tmp_path: Path, settings: dict[str, Any], share: str) -> None:
    with serve(tmp_path, **DILOCO, **settings) as server:
        warned = [each for each in server.status().warnings if "fragment_sync_delay" in each]
    assert [share in each for each in warned] == ([True] if share else [])


def test_warns_that_slow_workers_may_lose_all_steps(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"H": 20, "tau": 2, "async.enabled": True, "diloco.dynamic_local_steps": True}
    for alpha, warned in ((0.0, 1), (0.5, 0)):
        with serve(tmp_path / str(alpha), **DILOCO, **settings, alpha=alpha) as server:
            assert sum("dynamic_local_steps" in each for each in server.status().warnings) == warned
