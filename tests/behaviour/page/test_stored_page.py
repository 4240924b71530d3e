"""`atoll page STATE_DIR`: the page of runs that are over, dead, alive or damaged, and of folders that have none."""

from __future__ import annotations

import csv
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from harness.processes import Nursery, Process
from kit.browser import AXE_PACKAGE, browser, needs_browser
from kit.prepared_runs import START, falls, metrics_of
from kit.processes import command, wait_for_words
from kit.world import World

from atoll.testing.run import wait_until

pytestmark = pytest.mark.slow


def stored(folder: Path, rounds: int = 9) -> World:
    """A run of two rounds whose server has ended; with `rounds` = 2, it is finished."""
    world = World(folder, START, "ab", rounds=rounds, **{"run.name": "triage"})
    with world:
        for number in (1, 2):
            world.pull(number=number)
            for place, name in enumerate("ab"):
                world.submit(name, 0.5, metrics=metrics_of(number, falls, place))
        world.wait(2)
    return world


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Each file with its size and its time."""
    return {str(each): (each.stat().st_size, each.stat().st_mtime_ns) for each in sorted(folder.rglob("*"))}


def started(nursery: Nursery, folder: Path, *others: Path) -> tuple[Process, str]:
    """`atoll page` for a folder, and the address that it has printed."""
    process = nursery.start("atoll", "page", *map(str, [folder, *others]), cwd=folder.parent)
    return process, wait_for_words(process, r"http://127\.0\.0\.1:\d+/#token=\S+")[0]


@needs_browser
@pytest.mark.parametrize(
    ("rounds", "words"),
    [(2, "The run is finished after 2 rounds."), (9, "No server runs: the run stopped in round 3 of 9.")],
    ids=["finished", "dead"],
)
def test_atoll_page_shows_a_run_without_server(tmp_path: Path, nursery: Nursery, rounds: int, words: str) -> None:
    """`atoll page` shows a finished or interrupted run from its state directory, and changes nothing there."""
    stored(tmp_path, rounds)
    before = files_of(tmp_path / "state")
    _, address = started(nursery, tmp_path / "state")
    with browser() as chrome:
        chrome.open(address)
        assert words in chrome.wait("#sentence", " ")
        chrome.wait("#link", "stored in")
        assert chrome.text("#left") == ("ended" if rounds == 2 else "no server")
        chrome.wait("figcaption", "in round 2")
        assert chrome.texts("#version-table tbody th")[0].startswith("2")
        assert f"atoll export --dir {tmp_path / 'state'} model.safetensors" in chrome.text("#versions-hint")
        assert any("round 2 made version 2" in each for each in chrome.texts("#event-list span"))
        chrome.js("document.querySelector('#setting-table').closest('details').open = true")
        chrome.wait("#setting-table", "algorithm.name")
        assert [line for line in chrome.log() if "Failed to load" not in line] == []
    assert files_of(tmp_path / "state") == before


def test_atoll_page_needs_the_token_for_data(tmp_path: Path, nursery: Nursery) -> None:
    """Without the token from the address that it prints, `atoll page` gives out no data of the run."""
    stored(tmp_path)
    _, address = started(nursery, tmp_path / "state", tmp_path / "state")
    base = address.partition("#")[0]
    assert urllib.request.urlopen(base, timeout=10).status == 200
    for path in ("v1/status", "v1/events", "v1/site-curves", "v1/settings", "v1/updates.csv", "runs/1/v1/status"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(base + path, timeout=10)
        assert refused.value.code == 401


@needs_browser
def test_the_page_compares_runs(tmp_path: Path, nursery: Nursery) -> None:
    """`atoll page` of two runs has a chart with a line a run, and a table with the last and the best value of each. A
    run's name there leads to its own page.
    """
    for name, losses in {"first": (0.9, 0.4, 0.6), "second": (0.8, 0.2)}.items():
        with World(tmp_path / name, START, "a", rounds=len(losses)) as world:
            for number, loss in enumerate(losses, 1):
                world.pull(number=number)
                world.submit("a", 0.5, metrics={"loss": loss, "accuracy": 1 - loss})
            wait_until(lambda world=world: world.status.finished, "the end of the run")
    _, address = started(nursery, tmp_path / "first", tmp_path / "second/state")
    with browser() as chrome:
        chrome.set_look(width=390)
        chrome.open(f"{address}")
        chrome.wait("#run-table", "second")
        rows = "[...document.querySelectorAll('#run-table tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
        assert [[row[0].rsplit("/")[-1], row[2], *row[-2:]] for row in chrome.js(f"return {rows}")] == [
            ["first", "3", "0.6", "0.4 (2)"],
            ["second", "2", "0.2", "0.2 (2)"],
        ]
        assert chrome.js("return document.getElementById('run-plot').ariaLabel").startswith("loss over the rounds")
        assert chrome.js("return document.querySelectorAll('#run-plot canvas').length") == 1
        assert chrome.js("return document.documentElement.scrollWidth") <= 390
        if AXE_PACKAGE is not None:
            assert chrome.axe() == []
        chrome.js("const m = document.getElementById('metric'); m.value = 'accuracy'; m.onchange()")
        chrome.wait("#run-table", "0.8 (2)")
        chrome.js("document.querySelector('#run-table tbody tr:nth-child(2) a').click()")
        chrome.wait("#sentence", "The run is finished after 2 rounds. Loss 0.2 in round 2")
        assert "/runs/1/" in chrome.driver.current_url
        assert chrome.text("#runs") == ""
        assert [line for line in chrome.log() if "Failed to load" not in line] == []


def test_saves_versions_and_updates(tmp_path: Path, nursery: Nursery) -> None:
    """The stored page saves versions with the bytes of `atoll export`, and the table of all updates. It says if a
    version is gone.
    """
    stored(tmp_path)
    assert command(nursery, tmp_path, "export", "--dir", "state", "out.safetensors").returncode == 0
    _, address = started(nursery, tmp_path / "state")
    base, _, token = address.partition("#token=")

    def got(path: str) -> bytes:
        request = urllib.request.Request(base + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())

    assert got("v1/versions/2/model.safetensors") == (tmp_path / "out.safetensors").read_bytes()
    rows = list(csv.DictReader(got("v1/updates.csv").decode().splitlines()))
    assert [(row["round"], row["site"]) for row in rows] == [(each, site) for each in "12" for site in ("", "a", "b")]
    assert float(rows[1]["metrics.loss"]) == metrics_of(1, falls, 0)["loss"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        got("v1/versions/9/model.safetensors")
    assert refused.value.code == 410


def test_atoll_page_refers_to_a_running_server(tmp_path: Path, nursery: Nursery) -> None:
    """If the run's server is running, `atoll page` gives the address of the server's own page."""
    with World(tmp_path, START, "ab", rounds=9) as world:
        outcome = command(nursery, tmp_path, "page", "state")
        token = (tmp_path / "state" / "reader.token").read_text().strip()
        assert f"{world.url}/#token={token}" in str(outcome)


@pytest.mark.parametrize("kind", ["empty", "absent", "damaged"])
def test_atoll_page_says_what_is_wrong_with_a_folder(tmp_path: Path, nursery: Nursery, kind: str) -> None:
    folder = tmp_path / "state"
    if kind == "empty":
        folder.mkdir()
    elif kind == "damaged":
        stored(tmp_path)
        (folder / "journal.sqlite").write_bytes(b"x" * 4096)
    said = str(command(nursery, tmp_path, "page", "state"))
    assert re.search({"damaged": "state/journal.sqlite "}.get(kind, "There is no run in 'state'"), said), said
