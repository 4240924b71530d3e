"""A merge with alpha = 0 drops the tau local steps since an update was taken: refused where that is all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery
from kit import build_model, serve, write_run_file
from kit.servers import new_server

from atoll.errors import ConfigError

DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "algorithm.outer_optimizer.name": None,
    "algorithm.outer_optimizer.lr": None,
    "algorithm.outer_optimizer.momentum": None,
}
ALL_LOST: list[dict[str, Any]] = [
    {"diloco.sync_every": 6, "diloco.fragment_sync_delay": 6},
    {"diloco.sync_every": 6, "diloco.fragment_sync_delay": 6, "diloco.num_fragments": 3, "diloco.max_inflight": 3},
    {"diloco.sync_every": 6, "diloco.fragment_sync_delay": 6, "async.enabled": True},
    {"diloco.sync_every": 1, "diloco.fragment_sync_delay": 1},
]


@pytest.mark.covers("L7")
@pytest.mark.parametrize("settings", ALL_LOST, ids=str)
def test_refuses_tau_of_a_whole_interval_with_alpha_zero(tmp_path: Path, settings: dict[str, Any]) -> None:
    merged = DILOCO | {"network.port": 0, "disk.state_dir": tmp_path / "state"} | settings
    with pytest.raises(ConfigError) as caught:
        new_server(build_model(), **merged).start()
    for key in ("diloco.fragment_sync_delay", "diloco.sync_every"):
        assert f"{key} is {settings[key]}" in str(caught.value)
    assert "diloco.fragment_update_alpha is 0" in str(caught.value)


def test_the_command_refuses_it_with_the_exit_code_of_a_wrong_setting(tmp_path: Path, nursery: Nursery) -> None:
    write_run_file(tmp_path, **DILOCO, **{"diloco.sync_every": 6, "network.port": 0})
    server = nursery.start(
        "atoll", "server", "run.toml", "--set", "diloco.fragment_sync_delay=6", cwd=tmp_path, log=tmp_path / "log"
    )
    assert server.wait(60) == ConfigError.exit_code


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"diloco.sync_every": 6, "diloco.fragment_sync_delay": 6, "diloco.fragment_update_alpha": 0.5}, "100%"),
        ({"diloco.sync_every": 10, "diloco.fragment_sync_delay": 9}, "90%"),
        (
            {
                "diloco.sync_every": 9,
                "diloco.num_fragments": 3,
                "diloco.max_inflight": 2,
                "diloco.fragment_sync_delay": 6,
            },
            "67%",
        ),
        ({"diloco.sync_every": 10, "diloco.fragment_sync_delay": 3}, "30%"),
        ({"diloco.sync_every": 10, "diloco.fragment_sync_delay": 2}, ""),
        ({"diloco.sync_every": 10, "diloco.fragment_sync_delay": 9, "diloco.fragment_update_alpha": 0.9}, ""),
        ({"diloco.sync_every": 10}, ""),
    ],
    ids=str,
)
def test_warns_with_the_share_of_local_steps_under_way(tmp_path: Path, settings: dict[str, Any], share: str) -> None:
    with serve(tmp_path, **DILOCO, **settings) as server:
        warned = [each for each in server.status().warnings if "fragment_sync_delay" in each]
    assert [share in each for each in warned] == ([True] if share else [])


def test_warns_that_slow_workers_may_lose_all_steps(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "diloco.sync_every": 20,
        "diloco.fragment_sync_delay": 2,
        "async.enabled": True,
        "diloco.dynamic_local_steps": True,
    }
    with serve(tmp_path / "zero", **DILOCO, **settings) as server:
        assert [each for each in server.status().warnings if "dynamic_local_steps" in each]
    with serve(tmp_path / "half", **DILOCO, **settings, alpha=0.5) as server:
        assert not [each for each in server.status().warnings if "dynamic_local_steps" in each]
