"""The kill matrix: the server or a site is killed in each mode of a run, and the run leaves the undisturbed bits.

Rows are modes, columns are places. No update counts twice, and no site trains a round again while the server is away.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_world import (
    EVERY_SITE_AND_ROUND,
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

from atoll.codecs.version_difference import Downlink
from atoll.tensors.layout import version_layout
from atoll.tensors.module_tensors import schema_of

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "filter": {
        "workflow.result_filters": [
            {"path": "norm_clip", "args": {"max_norm": 3.0}},
            {"path": "drop", "args": ["2.bias"], "sites": ["b"]},
        ]
    },
    "residuals": {"aggregation.upload_codec.name": "int4"},
    "down": {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"},
}

Undisturbed = Callable[[str], Result]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Mode → what its run leaves where nothing is killed."""
    found: dict[str, Result] = {}

    def get(mode: str) -> Result:
        if mode not in found:
            found[mode] = left_undisturbed(tmp_path_factory.mktemp(mode), **MODES[mode])
        return found[mode]

    return get


def server_case(mode: str, name: str, *lives: str, deaths: int | None = None) -> Any:
    deaths = len(lives) if deaths is None else deaths
    return pytest.param(mode, lives, deaths, id=f"{mode}-{name}")


@pytest.mark.covers("F7", "F8", "F9", "F10", "F11", "F12", "F13", "L16", "T8")
@pytest.mark.parametrize(
    ("mode", "lives", "deaths"),
    [
        server_case("sync", "while-a-part-is-written", "spool.write=kill@5"),
        server_case("sync", "before-a-part-is-recorded", "part.received=kill@8"),
        server_case("sync", "after-a-part-is-recorded", "part.recorded=kill@8"),
        server_case("sync", "before-the-accept", "accept.before=kill@2"),
        server_case("sync", "after-the-accept", "accept.after=kill"),
        server_case("sync", "after-the-last-accept-of-a-round", "accept.after=kill@4"),
        server_case("sync", "mid-aggregation", "pass.chunk=kill@2"),
        server_case("sync", "mid-write", "pass.write=kill@3"),
        server_case("sync", "before-the-head-moves", "head.before=kill@3"),
        server_case("sync", "after-the-head-moves", "head.after=kill@3"),
        server_case("sync", "after-the-last-head-moves", "head.after=kill@4"),
        server_case(
            "sync",
            "during-recovery",
            "accept.after=kill@3",
            "recover.midway=kill",
            "recover.midway=kill@2",
            "pass.chunk=kill",
            "recover.midway=kill",
        ),
        server_case("sync", "while-it-begins", "journal.commit=kill@2", "slot.create=kill", "journal.commit=kill@3"),
        server_case("filter", "while-it-filters", "filters.write=kill@9"),
        server_case("filter", "after-the-accept", "accept.after=kill@3"),
        server_case("filter", "mid-aggregation", "pass.chunk=kill@2"),
        server_case("filter", "disk-full", "filters.write=enospc@9", deaths=0),
        server_case("down", "while-a-delta-is-written", "pass.delta=kill@3"),
        server_case("down", "in-the-pass-and-again", "pass.write=kill@9", "recover.midway=kill", "pass.delta=kill@2"),
        server_case("down", "before-the-head-moves", "head.before=kill@2"),
        server_case("down", "after-the-head-moves", "head.after=kill@3"),
    ],
)
def test_a_killed_server_comes_to_the_same_bits(
    nursery: Nursery, tmp_path: Path, undisturbed: Undisturbed, mode: str, lives: tuple[str, ...], deaths: int
) -> None:
    with ServerProcess(nursery, tmp_path, lives, **MODES[mode]) as server:
        sites = Sites(server.url, tmp_path)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == deaths, "a failpoint did not fire"
    Result(tmp_path).require_same(undisturbed(mode), sites)
    files = {path.name for path in (tmp_path / "state").iterdir() if path.is_file()}
    assert files == {"audit.head", "journal.sqlite", "lock", "status.json"}


WHOLE = version_layout(schema_of(build()), PART_BYTES)


def bytes_behind(parts: int, *, of_difference: bool = False) -> int:
    """Bytes of a version, or of the difference between two, behind its first parts."""
    if not of_difference:
        return sum(part.nbytes for part in WHOLE.parts[parts:])
    downlink = Downlink.of(WHOLE, "int8", {})
    assert downlink is not None
    return sum(part.nbytes for part in downlink.parts[parts:])


def site_case(mode: str, name: str, place: str, goes_on: tuple[str, int, str, int] | None = None) -> Any:
    """`goes_on`: what its next process says first, of which round, and the bytes that had gone up or come down then."""
    return pytest.param(mode, place, goes_on, id=f"{mode}-{name}")


@pytest.mark.covers("F1", "F2", "F3", "F4", "L10", "L16")
@pytest.mark.parametrize(
    ("mode", "place", "goes_on"),
    [
        # three of the six parts were there
        site_case("sync", "pulling", "pull.part=kill@3", ("trains", 1, "down", bytes_behind(3))),
        # the base was whole
        site_case("sync", "training", "training", ("trains", 2, "down", 0)),
        # the round is trained again
        site_case("sync", "before-its-update-is-whole", "outbox.seal=kill@2", ("begins", 2, "up", 0)),
        site_case("sync", "after-the-acknowledgement", "worker.acknowledged=kill@2", ("begins", 3, "up", 0)),
        # what the codec has left over is added once: amid the files, all written, all sent
        site_case("residuals", "forming-its-update", "worker.write=kill@20"),
        site_case("residuals", "before-its-update-is-whole", "outbox.seal=kill@2"),
        site_case("residuals", "after-the-acknowledgement", "worker.acknowledged=kill@2"),
        # three of six parts of its base are those of the next version: the other three are pulled
        site_case("down", "adding-to-its-base", "delta.part=kill@3", ("trains", 2, "down", bytes_behind(3))),
        # six parts of version 0, then two of the difference
        site_case(
            "down",
            "pulling-a-difference",
            "pull.part=kill@8",
            ("trains", 2, "down", bytes_behind(2, of_difference=True)),
        ),
        site_case("down", "training", "training", ("trains", 2, "down", 0)),
    ],
)
def test_a_killed_site_goes_on_where_it_was(
    nursery: Nursery,
    tmp_path: Path,
    undisturbed: Undisturbed,
    mode: str,
    place: str,
    goes_on: tuple[str, int, str, int] | None,
) -> None:
    settings = MODES[mode] | {"network.connections": 1, "rounds.min_sites": 1}
    with serving(tmp_path, **settings) as server, beside(server, Sites(server.url, tmp_path, names=["b"])):
        site = SiteProcess(nursery, tmp_path, server.url, "a")
        again = site.killed_in_training_and_again(2) if place == "training" else site.killed_and_again(place)
    if goes_on is not None:
        what, number, way, nbytes = goes_on
        line = told(again, what)
        assert (line["round"], line[way]) == (number, nbytes)
    result = Result(tmp_path)
    result.require_same(undisturbed(mode))
    assert len(result.tickets) == len(EVERY_SITE_AND_ROUND), "an open ticket is given again, not another one"
