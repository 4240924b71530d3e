"""A merge with alpha = 0 drops the tau local steps since an update was taken: refused where that is all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery
from kit import build_model, serve, write_run_file

import atoll
from atoll.errors import ConfigError

DILOCO: dict[str, Any] = {"algorithm": "diloco", "outer_optimizer": None, "outer_lr": None, "outer_momentum": None}
ALL_LOST: list[dict[str, Any]] = [
    {"sync_every": 6, "tau": 6},
    {"sync_every": 6, "tau": 6, "num_fragments": 3, "max_inflight": 3},
    {"sync_every": 6, "tau": 6, "mode": "async"},
    {"sync_every": 1, "tau": 1},
]


@pytest.mark.covers("L7")
@pytest.mark.parametrize("settings", ALL_LOST, ids=str)
def test_refuses_tau_of_a_whole_interval_with_alpha_zero(tmp_path: Path, settings: dict[str, Any]) -> None:
    merged = DILOCO | {"port": 0, "state_dir": tmp_path / "state"} | settings
    with pytest.raises(ConfigError) as caught:
        atoll.Server(build_model(), **merged).start()
    for named in (f"tau is {settings['tau']}", f"sync_every is {settings['sync_every']}", "alpha is 0"):
        assert named in str(caught.value)


def test_the_command_refuses_it_with_the_exit_code_of_a_wrong_setting(tmp_path: Path, nursery: Nursery) -> None:
    write_run_file(tmp_path, **DILOCO, sync_every=6, port=0)
    server = nursery.start("atoll", "server", "run.toml", "--tau", "6", cwd=tmp_path, log=tmp_path / "log")
    assert server.wait(60) == ConfigError.exit_code


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"sync_every": 6, "tau": 6, "alpha": 0.5}, "100%"),
        ({"sync_every": 10, "tau": 9}, "90%"),
        ({"sync_every": 9, "num_fragments": 3, "max_inflight": 2, "tau": 6}, "67%"),
        ({"sync_every": 10, "tau": 3}, "30%"),
        ({"sync_every": 10, "tau": 2}, ""),
        ({"sync_every": 10, "tau": 9, "alpha": 0.9}, ""),
        ({"sync_every": 10}, ""),
    ],
    ids=str,
)
def test_warns_with_the_share_of_local_steps_under_way(tmp_path: Path, settings: dict[str, Any], share: str) -> None:
    with serve(tmp_path, **DILOCO, **settings) as server:
        warned = [each for each in server.status().warnings if "tau" in each]
    assert [share in each for each in warned] == ([True] if share else [])


def test_warns_that_slow_workers_may_lose_all_steps(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sync_every": 20, "tau": 2, "mode": "async", "dylu": True}
    with serve(tmp_path / "zero", **DILOCO, **settings) as server:
        assert [each for each in server.status().warnings if "dylu" in each]
    with serve(tmp_path / "half", **DILOCO, **settings, alpha=0.5) as server:
        assert not [each for each in server.status().warnings if "dylu" in each]
