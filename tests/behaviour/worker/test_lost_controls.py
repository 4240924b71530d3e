"""SCAFFOLD's c_i belongs to a site for the whole run: one that comes back without it is told so, and how to go on."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit.client import Client
from kit.servers import plain_server

import atoll
from atoll.errors import ConfigError

STEPS_DELTA = {"w": torch.tensor([1.0, 2.0])}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, {"w": torch.zeros(2)}, algorithm="scaffold", sites=1, rounds=9) as server:
        yield server


def take_part(server: atoll.Server, folder: Path, rounds: int = 1, site: str = "a") -> list[float]:
    """So many rounds with Δc = (1, 2) each; returns c_i as the last of them begins."""
    with Client(server.url, site=site, folder=folder) as client:
        for _ in range(rounds):
            assert client.next_round() is not None
            model = client.pull()
            own = client.round.own_state("control")["w"].tolist()
            client.submit(model, steps=1, groups={"control": STEPS_DELTA})
    return own


def run_folder(server: atoll.Server, folder: Path, site: str = "a") -> Path:
    return folder / site / server.status().run


def damage(file: Path) -> None:
    """One bit of every byte: small changes, no value becomes infinite."""
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


@pytest.mark.covers("S2", "F41")
@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ("algorithm-1.bin", r"2 updates of a count in this run.*ATOLL_NEW_STATE"),
        ("algorithm-0.bin", r"is lost, although updates of the site count.*algorithm\.json.*ATOLL_NEW_STATE"),
    ],
    ids=["current", "pending-and-counted"],
)
def test_a_control_that_the_disk_has_damaged_is_no_control(
    server: atoll.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damaged: str,
    said: str,
) -> None:
    """It would be a correction like any other, and train the site away from the rest."""
    take_part(server, tmp_path / "w", rounds=2)
    wait_until(lambda: server.status().fragments[0].version == 2, "the second update is in the controls")
    file = run_folder(server, tmp_path / "w") / damaged
    kept = file.read_bytes()
    for _ in range(2):  # nor is it one at the next start
        damage(file)
        with pytest.raises(ConfigError, match=said):
            take_part(server, tmp_path / "w")
        assert f"{damaged} is damaged and is not used: its digest differs. Check the disk." in caplog.text
        file.write_bytes(kept)
    assert take_part(server, tmp_path / "w") == [2.0, 4.0]  # from a backup
    wait_until(lambda: server.status().fragments[0].version == 3, "the third one, too")
    damage(file.with_name("algorithm-0.bin"))  # that counts by now
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")
    assert take_part(server, tmp_path / "w") == [0.0, 0.0]


@pytest.mark.covers("S2", "X3")
@pytest.mark.parametrize("lost", ["folder", "files", "note", "current", "pending"])
def test_a_site_without_the_control_that_the_run_counts_on_is_refused(
    server: atoll.Server, tmp_path: Path, lost: str
) -> None:
    assert take_part(server, tmp_path / "w", rounds=2) == [1.0, 2.0]
    folder = run_folder(server, tmp_path / "w")
    if lost == "folder":
        shutil.rmtree(folder)
    elif lost == "note":
        (folder / "algorithm.json").unlink()
    else:  # the second update was written beside the first, which has file 1
        names = {
            "files": ("algorithm-0.bin", "algorithm-1.bin"),
            "current": ("algorithm-1.bin",),
            "pending": ("algorithm-0.bin",),
        }
        for name in names[lost]:
            (folder / name).unlink()
    said = r"2 updates of a count in this run.*ATOLL_DIR.*a/[0-9a-f]{32}"
    if lost == "pending":  # which counts is known when the site is there
        said = r"although updates of the site count in the run.*a/[0-9a-f]{32}/algorithm\.json .*ATOLL_NEW_STATE"
    for _ in range(2):  # what the first attempt leaves in the folder does not pass for a control
        with pytest.raises(ConfigError, match=said):
            take_part(server, tmp_path / "w")
    if lost != "pending":
        assert [worker.state for worker in server.status().workers] == ["left"]  # it did not join


@pytest.mark.covers("S2")
def test_its_folder_may_move_to_another_machine(server: atoll.Server, tmp_path: Path) -> None:
    take_part(server, tmp_path / "w")
    with pytest.raises(ConfigError, match="1 update of a counts"):
        take_part(server, tmp_path / "other")
    shutil.rmtree(tmp_path / "other")
    shutil.copytree(tmp_path / "w", tmp_path / "other")
    assert take_part(server, tmp_path / "other") == [1.0, 2.0]


@pytest.mark.covers("S2")
def test_a_site_that_comes_late_begins_at_zero(server: atoll.Server, tmp_path: Path) -> None:
    take_part(server, tmp_path / "w", rounds=2)
    assert take_part(server, tmp_path / "w", site="late") == [0.0, 0.0]


@pytest.mark.covers("S2")
def test_a_site_without_counted_updates_may_come_from_anywhere(server: atoll.Server, tmp_path: Path) -> None:
    with Client(server.url, site="a", folder=tmp_path / "w") as client:
        client.next_round()
        client.pull()
    assert take_part(server, tmp_path / "other") == [0.0, 0.0]


@pytest.mark.covers("S2")
def test_an_update_that_is_accepted_and_not_yet_counted_counts(tmp_path: Path) -> None:
    """Two are awaited: a's update lies there, accepted, when a loses its files."""
    with plain_server(tmp_path, {"w": torch.zeros(2)}, algorithm="scaffold", sites=2, rounds=9) as server:
        with Client(server.url, site="b", folder=tmp_path / "w").register():
            take_part(server, tmp_path / "w")
            shutil.rmtree(tmp_path / "w" / "a")
            with pytest.raises(ConfigError, match="1 update of a counts"):
                take_part(server, tmp_path / "w")


@pytest.mark.covers("S2")
def test_the_server_remembers_it_over_a_restart(tmp_path: Path) -> None:
    run: dict[str, Any] = {"algorithm": "scaffold", "sites": 1, "rounds": 9}
    with plain_server(tmp_path, {"w": torch.zeros(2)}, **run) as server:
        take_part(server, tmp_path / "w", rounds=2)
    shutil.rmtree(tmp_path / "w")
    with plain_server(tmp_path, {"w": torch.zeros(2)}, **run) as server:
        with pytest.raises(ConfigError, match="2 updates of a count"):
            take_part(server, tmp_path / "w")


@pytest.mark.covers("S2")
def test_it_may_begin_at_zero_where_it_is_told_to(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the note is gone: what the files hold is not taken for c_i. Told so once, the site has a control again."""
    take_part(server, tmp_path / "w", rounds=2)
    (run_folder(server, tmp_path / "w") / "algorithm.json").unlink()
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")
    with caplog.at_level(logging.WARNING):
        assert take_part(server, tmp_path / "w") == [0.0, 0.0]
    assert "a: the site's state starts from zero" in caplog.text
    assert "2 updates of a count in this run, but the site has lost its algorithm's state" in caplog.text
    assert take_part(server, tmp_path / "w") == [1.0, 2.0]  # the variable does no harm to a control that is there
    monkeypatch.delenv("ATOLL_NEW_STATE")
    assert take_part(server, tmp_path / "w") == [2.0, 4.0]


def test_a_variable_that_is_neither_true_nor_false(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_NEW_STATE", "perhaps")
    with pytest.raises(ConfigError, match=r"ATOLL_NEW_STATE is 'perhaps'"):
        take_part(server, tmp_path / "w")
