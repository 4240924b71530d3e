"""What a package installed at every site adds by entry points: a swarm takes it by name, and makes a server's bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery
from swarm_world import SiteProcess, left_by, serve_swarm

PACKAGE = '''\
from dataclasses import dataclass, replace

from atoll.algorithms.base import Algorithm
from atoll.codecs import Bf16Codec
from atoll.reducers import WeightedMean


class Fp16Codec(Bf16Codec):
    name = "fp16"

    @staticmethod
    def _stored(dtype):
        return "F16" if dtype in ("F64", "F32") else dtype


@dataclass(frozen=True)
class Squared(WeightedMean):
    """Weights count squared."""

    def weigh(self, facts):
        return super().weigh(replace(facts, weights=[weight * weight for weight in facts.weights]))


half = Algorithm(name="half", citation="none", outer="rmsprop", outer_options={"lr": 0.01, "alpha": 0.5})
'''
ENTRY_POINTS = """\
[atoll.codecs]
fp16 = swarm_plugin:Fp16Codec
[atoll.reducers]
squared = swarm_plugin:Squared
[atoll.algorithms]
half = swarm_plugin:half
"""
OURS: dict[str, Any] = {
    "algorithm.name": "half",
    "aggregation.reducer.name": "squared",
    "aggregation.upload_codec.name": "fp16",
    "algorithm.outer_optimizer.name": None,
    "algorithm.outer_optimizer.lr": None,
    "algorithm.outer_optimizer.momentum": None,
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as an installer leaves it: a module, and beside it what says of it that it is there."""
    where = tmp_path / "packages"
    said = where / "swarm_plugin-1.0.dist-info"
    said.mkdir(parents=True)
    (where / "swarm_plugin.py").write_text(PACKAGE)
    (said / "METADATA").write_text("Metadata-Version: 2.1\nName: swarm-plugin\nVersion: 1.0\n")
    (said / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(where))
    monkeypatch.delitem(sys.modules, "swarm_plugin", raising=False)


@pytest.mark.usefixtures("installed")
@pytest.mark.covers("P10", "D10")
def test_the_same_bits_as_a_server_makes_with_code_of_a_package(tmp_path: Path) -> None:
    ours, _ = left_by(tmp_path / "swarm", **OURS)
    theirs, _ = left_by(tmp_path / "server", **OURS, **{"swarm.enabled": False})
    assert ours.bits == theirs.bits
    for name, stock in {
        "algorithm.name": "fedavg",
        "aggregation.reducer.name": "mean",
        "aggregation.upload_codec.name": "none",
    }.items():  # each has a part in them
        plain, _ = left_by(tmp_path / name, **OURS | {name: stock}, **{"swarm.enabled": False})
        assert plain.bits != ours.bits


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.covers("P10", "X3")
def test_a_site_without_the_package_is_refused_when_it_joins(nursery: Nursery, tmp_path: Path) -> None:
    with serve_swarm(tmp_path, **OURS | {"aggregation.upload_codec.name": "none"}) as server:
        site = SiteProcess(nursery, tmp_path, server.url, "c")  # a process has not got what is put on this one's path
        assert site.kept.wait() != 0
        assert server.status().workers == []
    said = site.kept.now.output()
    assert "This worker cannot aggregate with the server's settings: 'half' is not one of the algorithms" in said
    assert "and of plugins at all sites" in said
