"""Disks that are full, that fail, or that give back other bytes than they were given."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from fault_world import Result, ServerProcess, SiteProcess, Sites, serving
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, ask_journal, flip_bit
from kit.workflows import workflow_server
from small_disk_site import Zeros

from atoll.errors import StoreError


def remove_folder(path: Path) -> None:
    """At once: a server that makes a file in it meanwhile would keep it there."""
    removed = path.with_name(path.name + ".removed")
    path.rename(removed)
    shutil.rmtree(removed)


@pytest.mark.parametrize("number", [1, 2])
def test_a_state_directory_that_is_removed_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """While a round is trained. The server may look when the slots are gone, and not yet the rest."""

    def during(site: str, at: int) -> None:
        if (site, at) == ("a", number):
            remove_folder(tmp_path / "state")

    with serving(tmp_path) as server:
        Sites(server.url, tmp_path, during=during)
        with pytest.raises(StoreError, match=r"state(/slots)? was removed while the server was running"):
            server.run()
    assert not [record for record in caplog.records if record.name == "atoll.server" and record.exc_info]


@pytest.mark.parametrize("what", ["slots", "journal.sqlite"])
def test_what_is_removed_of_a_state_directory_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """The directory is cleared, and stays."""

    def during(site: str, at: int) -> None:
        if (site, at) == ("a", 1):
            if what == "journal.sqlite":
                for path in (tmp_path / "state").glob("journal.sqlite*"):
                    path.unlink()
                for path in (tmp_path / "state" / "slots").iterdir():  # else it goes on with the open journal
                    path.unlink()
            else:
                remove_folder(tmp_path / "state" / "slots")

    with serving(tmp_path, **{"disk.export_every": 1}) as server:
        Sites(server.url, tmp_path, during=during)
        with pytest.raises(StoreError, match=f"{what} was removed while the server was running"):
            server.run()
    assert not [record for record in caplog.records if record.name == "atoll.server" and record.exc_info]


@pytest.mark.covers("F25")
def test_a_journal_that_fails_while_parts_arrive_ends_the_server(tmp_path: Path) -> None:
    """Guards against a server that answers every part with 500, says nothing and never ends."""
    with serving(tmp_path, **{"rounds.sites": 1}) as server:

        def during(site: str, at: int) -> None:
            server._require_run().store.journal.value("PRAGMA query_only = ON")  # every change fails from here on

        Sites(server.url, tmp_path, during=during, names=["a"])
        with pytest.raises(StoreError, match="attempt to write a readonly database"):
            server.run()


@pytest.mark.covers("F25")
def test_less_space_than_min_free_bytes_is_507_before_a_byte_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, undisturbed: Result
) -> None:
    with serving(tmp_path, **{"disk.min_free_bytes": 10**6}) as server:
        store = server._require_run().store
        asked: list[int] = []

        def free_bytes() -> int:
            asked.append(server._require_run().bytes_up)
            return 10**5 if len(asked) < 3 else 10**9

        monkeypatch.setattr(store, "free_bytes", free_bytes)
        sites = Sites(server.url, tmp_path)
        sites.join()
        server.run()
    assert asked[:2] == [0, 0]
    assert (
        "The server has 0 MB of disk left, but must keep 1 MB free. Free space; then the run continues by itself"
        in caplog.text
    )
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.parametrize(
    ("durability", "nth"), [("process", 3), ("power", 1), ("power", 4), ("power", 14), ("power", 18), ("power", 20)]
)
@pytest.mark.covers("F26")
def test_a_failed_fsync_ends_the_server_with_the_reason(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, durability: str, nth: int
) -> None:
    """No site is told of success; the next start goes on, and the workers with it."""
    with ServerProcess(nursery, tmp_path, (f"fsync=eio@{nth}",), **{"disk.durability": durability}) as server:
        sites = Sites(server.url, tmp_path)
        assert server.kept.wait() == 7
        last = server.kept.now.output().splitlines()[-1]
    assert last.startswith("atoll: fsync of ")
    assert "what was written last may be lost. Check the disk, then start the server again" in last
    with ServerProcess(nursery, tmp_path, **{"disk.durability": durability}, port=server.port) as again:
        sites.join()
        assert again.kept.wait() == 0
    Result(tmp_path).require_same(undisturbed, sites)


def waiting_in_round_3(server: ForkedServer, folder: Path) -> tuple[FederatedSites, threading.Event]:
    """Both sites have pulled the third round's version, and wait for the event before they train."""
    go_on = threading.Event()

    def during(site: str, number: int) -> None:
        if number == 3:
            wait_until(go_on.is_set, "the damage")

    sites = Sites(server.url, folder, during=during)
    wait_until(lambda: sum(number == 3 for _, number in sites.trained) == 2, "the third round")
    return sites, go_on


def slots_of_head(folder: Path) -> tuple[Path, Path]:
    """Files of the newest version and of its outer state."""
    row = "SELECT slot, state_slot FROM versions ORDER BY version DESC LIMIT 1"
    ((slot, state),) = ask_journal(folder, row)
    slots = folder / "state/slots"
    return slots / f"version-0-{slot}.safetensors", slots / f"state-0-{state}.safetensors"


@pytest.mark.parametrize(("which", "damage"), [(0, "flip"), (1, "flip"), (0, "truncate"), (0, "remove")])
@pytest.mark.covers("F41")
def test_a_damaged_version_falls_back_to_the_one_before_and_the_run_goes_on(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, which: int, damage: str
) -> None:
    with ServerProcess(nursery, tmp_path) as server:
        sites, go_on = waiting_in_round_3(server, tmp_path)
        server.kept.close()
        victim = slots_of_head(tmp_path)[which]
        if damage == "flip":
            flip_bit(victim, 2000)
        elif damage == "truncate":
            os.truncate(victim, 1000)
        else:
            victim.unlink()
        with ServerProcess(nursery, tmp_path, port=server.port) as again:
            wait_until(lambda: "listening" in again.log.read_text(), "the second start")
            go_on.set()
            sites.join()
            assert again.kept.wait() == 0
            assert "Version 2 of fragment 0 was lost; the run continues from version 1" in again.log.read_text()
    result = Result(tmp_path)
    assert result.exports == undisturbed.exports
    assert [version for _, version, _ in result.versions] == [0, 1, 3, 4]  # no number is used again
    assert result.digests == undisturbed.digests
    # A site that knew version 2 to be durable had let go of its update, and trained the second round again; perhaps the
    # third too, whose update came before it knew.
    assert all(sites.trained[site, 2] in (1, 2) for site in "ab")


@pytest.mark.parametrize("which", [0, 1], ids=["version", "outer state"])
@pytest.mark.covers("F41")
def test_a_version_that_is_damaged_while_the_server_runs_ends_it_and_the_next_start_falls_back(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, which: int
) -> None:
    """A bit that the disk has changed does not go into the next version."""
    with ServerProcess(nursery, tmp_path) as server:
        sites, go_on = waiting_in_round_3(server, tmp_path)
        flip_bit(slots_of_head(tmp_path)[which], 2000)
        go_on.set()
        assert server.kept.wait() == 7
        last = server.kept.now.output().splitlines()[-1]
        assert last.startswith("atoll: Version 2 of fragment 0 was damaged on disk while the server was running: The ")
        assert "start the server again: it continues from the newest undamaged version" in last
        with ServerProcess(nursery, tmp_path, port=server.port) as again:
            sites.join()
            assert again.kept.wait() == 0
            assert "Version 2 of fragment 0 was lost; the run continues from version 1" in again.log.read_text()
    result = Result(tmp_path)
    assert result.exports == undisturbed.exports
    assert result.digests == undisturbed.digests


@pytest.mark.covers("F41")
def test_when_every_version_is_damaged_the_server_refuses_to_start(nursery: Nursery, tmp_path: Path) -> None:
    with ServerProcess(nursery, tmp_path) as server:
        Sites(server.url, tmp_path).join()
        assert server.kept.wait() == 0
    for path in (tmp_path / "state/slots").glob("version-*"):
        flip_bit(path, 2000)
    with ServerProcess(nursery, tmp_path) as server:
        assert server.kept.wait() == 7
        last = server.kept.now.output().splitlines()[-1]
    assert last.startswith("atoll: All versions of fragment 0 in state are damaged (their digests differ)")
    assert "Restore the whole directory from a backup" in last


@pytest.mark.covers("F41")
def test_a_damaged_journal_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    with ServerProcess(nursery, tmp_path) as server:
        Sites(server.url, tmp_path).join()
        assert server.kept.wait() == 0
    journal = tmp_path / "state/journal.sqlite"
    journal.write_bytes(b"x" * 100 + journal.read_bytes()[100:])
    with ServerProcess(nursery, tmp_path) as server:
        assert server.kept.wait() == 7
        last = server.kept.now.output().splitlines()[-1]
    assert "journal.sqlite is damaged" in last


@pytest.mark.covers("T14", "T13", "X3")
def test_a_site_without_space_for_a_payload_says_so_and_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    """8 MiB of a payload that belongs on disk; a file of this site has 1 MiB at most."""

    def workflow(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        came.extend(controller.send("a", "count", payload, timeout_s=30) for payload in (Zeros(), None))

    came: list[Any] = []
    with workflow_server(tmp_path, workflow) as server:
        site = SiteProcess(nursery, tmp_path, server.url, "a", "small_disk_site.py").start()
        assert server.wait(60)
        server.run()
        assert site.wait() == 0
    large, small = came
    assert "StoreError: A file in the folder of temporary files failed: File too large." in large.error
    assert small.payload == 1


@pytest.mark.covers("F43")
def test_releases_and_names_a_worker_with_a_failing_disk(nursery: Nursery, tmp_path: Path) -> None:
    with serving(tmp_path, **{"rounds.min_sites": 1}) as server:
        other = Sites(server.url, tmp_path, names=["b"])
        site = SiteProcess(nursery, tmp_path, server.url, "a").start("worker.write=enospc@3")
        assert site.wait() == StoreError.exit_code == 7
        other.join()
        worker = next(worker for worker in server.status().workers if worker.site == "a")
        server.run()
    assert worker.state == "failed"
    assert "cannot be written (failpoint worker.write: no space left on device). Check the disk" in worker.error
    (said,) = [line for line in site.output().splitlines() if "no space left on device" in line]
    assert said.startswith("atoll: ")
    assert Result(tmp_path).counted() == [("b", 1), ("b", 2), ("b", 3)]
