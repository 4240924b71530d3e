"""What the golden matrix leaves out, Atoll refuses, and names what does not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_axes import DEFAULTS, EXCLUSIONS, FEW, ROUNDS, STEPS, Exclusion, Row, is_valid, name_of, settings_of
from golden_model import build
from golden_runs import simulation
from harness.processes import Nursery
from kit import serve

import atoll
from atoll.errors import AtollError, ConfigError, StateLocked

RANKS = ("fsdp", "ddp")
EXCLUDED = [
    pytest.param(each, row, id=name_of({axis: row[axis] for axis in each.of}))
    for each in EXCLUSIONS
    for row in each.rows()
    if each.by
]


def is_of_settings(each: Exclusion) -> bool:
    """Whether the server or the simulation refuses it before a site has joined."""
    places, algorithms = each.of.get("place", ()), each.of.get("algorithm", ())
    if "simulation" in places:
        return not set(STEPS[:1]) & set(algorithms)
    return not set(places) & set(RANKS) or not set(algorithms) & set(ROUNDS) - {"scaffold"}


def begin(row: Row, folder: Path) -> None:
    """Build the simulation, or start the server."""
    if row["place"] == "simulation":
        simulation(row, folder)
        return
    with serve(folder, build(), **settings_of(row)):
        pass


@pytest.mark.parametrize(("each", "row"), [case for case in EXCLUDED if is_of_settings(case.values[0])])
def test_refuses_settings_that_the_matrix_leaves_out(tmp_path: Path, each: Exclusion, row: Row) -> None:
    with pytest.raises(ConfigError) as refused:
        begin(row, tmp_path)
    assert [word for word in each.by if word not in str(refused.value)] == []


@pytest.mark.parametrize("each", [each for each in EXCLUSIONS if not each.by], ids=lambda each: each.why)
def test_does_not_refuse_runs_with_bits_that_depend_on_time(tmp_path: Path, each: Exclusion) -> None:
    for number, row in enumerate(each.rows()):
        with serve(tmp_path / str(number), build(), **settings_of(row)) as server:
            assert server.status().fragments


def test_a_simulation_refuses_diloco_at_the_site(tmp_path: Path) -> None:
    row = DEFAULTS | {"place": "simulation", "algorithm": "diloco"}
    assert not is_valid(row)
    with pytest.raises(AtollError, match=r"DiLoCo"):
        simulation(row, tmp_path, client="enter_diloco").run()


SHARDED = """
import os, sys

sys.path.insert(0, {golden!r})
import torch.distributed as dist
from golden_model import build
from torch.distributed.fsdp import fully_shard

import atoll

dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + os.path.abspath("store"))
model = build()
fully_shard(model, ignored_params={{model.empty, model.scale}})
with atoll.join() as worker:
    for fl_round in worker:
        fl_round.load_into(model)
"""


def test_join_refuses_a_sharded_model(tmp_path: Path, nursery: Nursery) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED.format(golden=str(Path(__file__).parent)))
    with serve(tmp_path, build(), **{"rounds.sites": 1}) as server:
        env = {"ATOLL_SERVER": server.url, "ATOLL_SITE": "a", "ATOLL_DIR": str(tmp_path / "workers")}
        process = nursery.start(str(script), cwd=tmp_path, env=env)
        assert process.wait() != 0
    assert "DTensor" in process.output()
    assert "atoll.DiLoCo" in process.output()


def test_join_refuses_a_second_rank_of_a_site(tmp_path: Path) -> None:
    with serve(tmp_path, build(), **{"rounds.sites": 1}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers"):
            with pytest.raises(StateLocked):
                atoll.join(server.url, site="a", folder=tmp_path / "workers")


def test_every_exclusion_has_a_test() -> None:
    """Those of ranks and simulations that a site refuses have the tests above."""
    at_sites = [each for each in EXCLUSIONS if each.by and not is_of_settings(each)]
    assert {place for each in at_sites for place in each.of["place"]} == set(FEW)
