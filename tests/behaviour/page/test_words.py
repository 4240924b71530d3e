"""What a user of FedAvg reads has FedAvg's words: models, updates, rounds, sites."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.browser import browser, needs_browser
from kit.prepared_runs import START
from kit.world import World

from atoll.cli.logs import _known, line
from atoll.cli.status import plain
from atoll.store.reader import open_state

OF_OTHERS = re.compile(r"pseudo.?gradient|barrier|data.?parallel|\bouter\b|\bH = ", re.IGNORECASE)
"""Words of DiLoCo, and of the code."""
DOCS = Path(__file__).parents[3] / "docs"


def two_rounds(world: World) -> None:
    for number in (1, 2):
        world.ask(number=number)
        world.rounds(0.5, number, steps=2, metrics={"loss": 1.0 / number})
        world.wait(number)


def test_a_federated_run_speaks_of_models_and_updates(tmp_path: Path) -> None:
    """The log of the server, the status, and the events as `atoll logs` prints them; while it waits and at its end."""
    with World(tmp_path, START, "ab", rounds=2, **{"run.name": "triage"}) as world:
        texts = plain(world.status, world.url)
        two_rounds(world)
        texts += plain(world.status, world.url)
        world.finish()
        texts += [*plain(world.status, world.url), *world.log]
    with open_state(tmp_path / "state") as state:
        texts += map(line, _known(state.events()))
    assert any("round 2: version 2 from 2 updates (a and b)" in text for text in texts)
    assert [text for text in texts if OF_OTHERS.search(text)] == []


@pytest.mark.slow
@needs_browser
def test_its_page_speaks_of_models_and_updates(tmp_path: Path) -> None:
    with World(tmp_path, START, "ab", rounds=3, **{"run.name": "triage"}) as world, browser() as chrome:
        two_rounds(world)
        chrome.open(world.url)
        chrome.wait("#sentence", "in round 2")
        assert not OF_OTHERS.search(str(chrome.js("return document.body.innerText")))


@pytest.mark.parametrize("page", ["algorithms/fedavg.md", "tutorial-federated.md", "from-flower.md", "from-nvflare.md"])
def test_pages_for_users_of_fedavg_have_their_words(page: str) -> None:
    """`outer_optimizer`, the name of a setting, and a row that explains DiLoCo are all that they have of others."""
    assert not re.search(r"pseudo.?gradient|barrier|data.?parallel", (DOCS / page).read_text(), re.IGNORECASE)
