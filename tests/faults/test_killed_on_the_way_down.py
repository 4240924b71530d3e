"""Server and workers are killed while versions go down as differences: same bits as without, and no wrong base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_world import (
    PART_BYTES,
    Result,
    ServerProcess,
    SiteProcess,
    Sites,
    beside,
    build,
    left_undisturbed,
    serving,
    told,
)
from harness.processes import Nursery

import atoll
from atoll.codecs.version_difference import Downlink
from atoll.tensors.layout import version_layout
from atoll.tensors.module_tensors import schema_of

CODECS = {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"}
WHOLE = version_layout(schema_of(build()), PART_BYTES)


def down() -> Downlink:
    found = Downlink.of(WHOLE, "int8", {})
    assert found is not None
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return left_undisturbed(tmp_path_factory.mktemp("undisturbed"), **CODECS)


LIVES = [
    pytest.param(["pass.delta=kill@3"], id="while-a-delta-is-written"),
    pytest.param(["pass.write=kill@9", "recover.midway=kill", "pass.delta=kill@2"], id="in-the-pass-and-again"),
    pytest.param(["head.before=kill@2"], id="before-a-head-with-a-delta-moves"),
    pytest.param(["head.after=kill@3"], id="after-a-head-with-a-delta-moves"),
]


@pytest.mark.covers("L16")
@pytest.mark.parametrize("lives", LIVES)
def test_the_server_is_killed(nursery: Nursery, tmp_path: Path, undisturbed: Result, lives: list[str]) -> None:
    with ServerProcess(nursery, tmp_path, tuple(lives), **CODECS) as server:
        sites = Sites(server.url, tmp_path)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == len(lives), "a failpoint did not fire"
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serving(tmp_path, **{"network.connections": 1}, **CODECS) as server:
        yield server


def test_a_worker_is_killed_while_it_adds_to_its_base(
    nursery: Nursery, tmp_path: Path, server: atoll.Server, undisturbed: Result
) -> None:
    """Three of the six parts are those of the next version: the base is neither, and the other three are pulled."""
    with beside(server, Sites(server.url, tmp_path, names=["b"])):
        again = SiteProcess(nursery, tmp_path, server.url, "a").killed_and_again("delta.part=kill@3")
    assert len(WHOLE.parts) == 6
    assert told(again, "trains", 2)["down"] == sum(part.nbytes for part in WHOLE.parts[3:])
    Result(tmp_path).require_same(undisturbed)


def test_a_worker_is_killed_while_a_difference_comes(
    nursery: Nursery, tmp_path: Path, server: atoll.Server, undisturbed: Result
) -> None:
    """The base is as it was, and what came of the difference is kept: the rest of it is asked for."""
    with beside(server, Sites(server.url, tmp_path, names=["b"])):
        # six parts of version 0, then two of the difference
        again = SiteProcess(nursery, tmp_path, server.url, "a").killed_and_again("pull.part=kill@8")
    assert told(again, "trains", 2)["down"] == sum(part.nbytes for part in down().parts[2:])
    Result(tmp_path).require_same(undisturbed)


def test_a_worker_that_missed_its_answer_goes_on(
    nursery: Nursery, tmp_path: Path, server: atoll.Server, undisturbed: Result
) -> None:
    """Killed while it trains from a base that was added to: that is believed, and nothing is pulled."""
    with beside(server, Sites(server.url, tmp_path, names=["b"])):
        again = SiteProcess(nursery, tmp_path, server.url, "a").killed_in_training_and_again(2)
    assert told(again, "trains", 2)["down"] == 0
    Result(tmp_path).require_same(undisturbed)
