"""A run that is killed as a whole, at any failpoint, goes on to the bits of an undisturbed one; no update is lost."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from crash_images import (
    Image,
    Scenario,
    images_of,
    images_of_a_restart,
    recovered,
    sit_out_rounds,
    take_steps,
    undisturbed,
)
from harness.processes import Nursery
from kit import SETTINGS, SITES

from atoll.server.verify_state import verify_state

SRC = Path(__file__).parents[3] / "src"
AFTER = """
from pathlib import Path


def after(controller):
    with (Path(__file__).parent / "told.txt").open("a") as file:
        file.write("after\\n")
"""


def twice(*failpoints: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(failpoints, (1, 2))


def first(*failpoints: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(failpoints, (1,))


def second(*failpoints: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(failpoints, (2,))


def at_first_hits(scenario: Scenario) -> Scenario:
    return replace(scenario, server=first(*scenario.server), site=first(*scenario.site))


PARTS = second("part.received", "spool.write", "part.recorded")
ACCEPTS = ("accept.before", "accept.after")
CLOSING = ("pass.chunk", "pass.write", "head.before", "head.after")
SCENARIOS = {
    "beginning and receiving": Scenario(server=PARTS | second("slot.create", "journal.commit") | twice(*ACCEPTS)),
    "closing a round": Scenario(
        server=second(*CLOSING, "export.write", "fsync"), settings={"disk.export_every": 1, "disk.keep_updates": 2}
    ),
    "at a site": Scenario(
        site=second("worker.write", "outbox.seal", "outbox.sealed", "pull.part", "pull.done", "push.part")
        | second("worker.acknowledged"),
        settings={"aggregation.upload_codec.name": "int8"},
    ),
    "compressed both ways, through a filter": Scenario(
        server=second("pass.delta", "filters.write"),
        site=second("delta.part"),
        settings={
            "aggregation.upload_codec.name": "topk",
            "aggregation.upload_codec.density": 0.1,
            "aggregation.download_codec.name": "int8",
            "workflow.result_filters": [{"path": "norm_clip", "args": {"max_norm": 5.0}}],
        },
    ),
    "swarm": Scenario(
        server=second("swarm.asked"),
        site=second("swarm.held", "swarm.collected", "swarm.closed", "swarm.told"),
        settings={"swarm.enabled": True},
        observed=("a", "b"),
    ),
    "steps": Scenario(
        server=second("accept.after", "head.after"),
        site=second("outbox.seal", "outbox.sealed", "worker.acknowledged", "pull.done"),
        settings={"algorithm.name": "diloco", "diloco.sync_every": 3, "aggregation.upload_codec.name": "int8"},
        part=take_steps,
    ),
    "controls": Scenario(
        server=second("accept.after", "head.after"),
        site=second("outbox.seal", "outbox.sealed", "worker.acknowledged", "pull.done"),
        settings={
            "algorithm.name": "scaffold",
            "algorithm.outer_optimizer.momentum": 0.0,
            "aggregation.upload_codec.name": "int8",
        },
    ),
    "sitting out": Scenario(
        server=dict.fromkeys(("sit_out.before", "sit_out.after"), (1, 2, 3)),
        settings={"aggregation.upload_codec.name": "int8"},
        part=sit_out_rounds,
    ),
    "workflows": Scenario(
        server=twice("workflow.ended"),
        settings={"workflow.steps": [{"kind": "train"}, {"path": "flow.py:after", "name": "after"}]},
        files={"flow.py": AFTER},
    ),
}
EARLIER = {
    name: at_first_hits(SCENARIOS[name])
    for name in (
        *("beginning and receiving", "closing a round", "at a site", "compressed both ways, through a filter"),
        "swarm",
    )
}
"""The same runs, with images at the first hit of each failpoint."""
RESTART = Scenario(server={"epoch.raised": (1,)} | twice("recover.midway"))
SEALED = ("outbox.sealed", "worker.acknowledged", "accept.before", "accept.after")
"""Failpoints whose n-th hit comes when at least n updates lie in an outbox, whole."""


def problems_of(scenario: Scenario, image: Image, right: str) -> list[str]:
    """What is wrong with what comes of an image."""
    where = f"{image.places}: "
    before = image.said("submitted") | image.sealed()
    digest, trained = recovered(scenario, image.folder)
    problems = [] if digest == right else [f"{where}another result"]
    if again := before & trained.keys():
        problems.append(f"{where}{sorted(again)} were ready, and are trained again")
    sealed = max([hit for name, hit in image.places if name in SEALED], default=0)
    found = verify_state(image.folder / "state")
    wrong = [*found.changed, *(each for each in found.rounds if each.result == "differs")]
    problems += [f"{where}{each}" for each in wrong]
    if trained.total() > len(SITES) * SETTINGS["rounds.total"] - sealed:
        problems.append(f"{where}{sealed} updates were ready, and {trained.total()} are trained afterwards")
    return problems


@pytest.mark.slow
@pytest.mark.covers("F3", "F7", "F8", "F9", "F10", "F11", "F12")
@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(scenario, id=name) for name, scenario in SCENARIOS.items()),
        *(pytest.param(scenario, id=f"{name}, earlier", marks=pytest.mark.long) for name, scenario in EARLIER.items()),
    ],
)
def test_a_crash_at_any_failpoint_changes_no_bit(tmp_path: Path, nursery: Nursery, scenario: Scenario) -> None:
    """A run that crashes at any failpoint recovers to the bits of an undisturbed run. Finished updates are not trained
    again.
    """
    right = undisturbed(scenario, tmp_path / "undisturbed")
    digest, images = images_of(scenario, nursery, tmp_path)
    assert digest == right
    assert {place for image in images for place in image.places} == scenario.places
    assert [problem for image in images for problem in problems_of(scenario, image, right)] == []
    for image in images:
        if (told := image.folder / "told.txt").exists():
            assert told.read_text() == "after\n", image.places


@pytest.mark.slow
def test_a_second_crash_during_recovery_changes_no_bit(tmp_path: Path, nursery: Nursery) -> None:
    """A run that crashes a second time, while it recovers from a crash, still ends with the bits of an
    undisturbed run.
    """
    scenario = Scenario(server={"head.before": (2, 3), "accept.after": (3,)})
    right = undisturbed(scenario, tmp_path / "undisturbed")
    _, images = images_of(scenario, nursery, tmp_path)
    assert len(images) == 3
    for number, image in enumerate(images):
        restarted = images_of_a_restart(image, RESTART, nursery, tmp_path / str(number))
        assert {place for each in restarted for place in each.places} == RESTART.places
        assert [problem for each in restarted for problem in problems_of(scenario, each, right)] == []


UPGRADES = ('"journal.backup"', '"journal.migrate"')
"""Failpoints of the first start after an upgrade: `upgrades/test_upgrades.py` kills there."""
OF_APPS = ('"flower.kept"',)
"""Failpoints of other frameworks' apps: `integrations/test_flower_apps.py` kills there."""
OF_WORKFLOWS = ('"workflow.before"', '"workflow.fact"')
"""Failpoints around a fact that a workflow has got: `workflows/test_replay.py` kills there."""


def test_every_failpoint_belongs_to_a_scenario() -> None:
    """Each failpoint in the source code is covered by a crash scenario."""
    sources = [path.read_text() for path in SRC.rglob("*.py")]
    failpoints = {name for text in sources for name in re.findall(r"\bfailpoint\(([^)]*)\)", text)} - {
        "name: str",
        *UPGRADES,
        *OF_APPS,
        *OF_WORKFLOWS,
    }
    covered = {name for each in [*SCENARIOS.values(), RESTART] for name, _ in each.places}
    assert {f'"{name}"' for name in covered} == failpoints
