"""Disks that are full, and processes with too many files open: what lacks is waited for."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_world import Result, Sites, serving
from harness.processes import wait_until

from atoll.server.coordinator import background_writes
from atoll.testing.run import failpoints


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged of a server that tries again soon."""
    monkeypatch.setattr(background_writes, "RETRY_S", 0.05)
    caplog.set_level(logging.DEBUG, "atoll")
    return caplog


FULL, FILES = "enospc", "emfile"


@pytest.mark.parametrize(
    ("place", "error", "nth", "said"),
    [
        ("spool.write", FULL, 3, "cannot submit"),
        ("slot.create", FULL, 1, "cannot submit"),
        ("slot.create", FULL, 3, "round 1 cannot be written"),
        ("pass.write", FULL, 2, "round 1 cannot be written"),
        ("head.before", FULL, 2, "round 2 cannot be written"),
        ("accept.before", FULL, 2, "cannot submit"),
        ("export.write", FULL, 1, "the result could not be saved"),
        *(("journal.commit", FULL, n, "is full") for n in (1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 21, 22, 23, 24)),
        ("slot.create", FILES, 1, "The server has too many files open"),
        ("slot.create", FILES, 3, "round 1 cannot be written: too many files are open"),
        ("pass.write", FILES, 2, "round 1 cannot be written: too many files are open"),
        ("export.write", FILES, 1, "the result could not be saved: too many files are open"),
    ],
)
@pytest.mark.covers("F25")
def test_space_and_open_files_that_lack_are_waited_for(
    tmp_path: Path, quick: pytest.LogCaptureFixture, undisturbed: Result,
    place: str, error: str, nth: int, said: str,
) -> None:  # fmt: skip
    """Too many connections, which leave no descriptors, do not end a run either."""
    with serving(tmp_path) as server, failpoints(f"{place}={error}@{nth}") as times_reached:
        sites = Sites(server.url, tmp_path)
        sites.join()
        server.run()
        assert times_reached(place) >= nth
    assert said in quick.text
    Result(tmp_path).require_same(undisturbed, sites)


@contextlib.contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[Path]:
    """A disk of its own."""
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", path], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a tmpfs needs rights that this user does not have")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(disk: Path) -> Path:
    """Write until nothing more fits."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.covers("F25")
@pytest.mark.parametrize("number", [1, 2])
def test_a_disk_that_really_is_full(
    tmp_path: Path, quick: pytest.LogCaptureFixture, undisturbed: Result, number: int
) -> None:
    """It fills up while the round is trained: in the first there is no room for a spool, in the second for a row."""
    full: list[Path] = []

    def during(site: str, at: int) -> None:
        if (site, at) == ("a", number):
            full.append(fill(tmp_path / "state"))

    with small_disk(tmp_path / "state", 16 * 2**20), serving(tmp_path) as server:
        sites = Sites(server.url, tmp_path, during=during)
        wait_until(lambda: "is full" in quick.text, "a word about it")
        assert server.status().fragments[0].version == number - 1
        full[0].unlink()
        sites.join()
        server.run()
        Result(tmp_path).require_same(undisturbed, sites)
