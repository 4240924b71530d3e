"""Disks that are full, that fail or are removed, and processes without memory: waited for, or named."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_world import ROUNDS, Result, ServerProcess, SiteProcess, Sites, serve_wide
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedSite, Gate, run_to_end, serve
from kit.wire import WireSite
from kit.workflows import workflow_server
from small_disk_site import Zeros

from atoll.errors import AtollError, DiskFull, StoreError
from atoll.server.coordinator import background_writes
from atoll.testing.run import failpoints
from atoll.worker.session import session

SMALL_DISK_SITE = Path(__file__).with_name("small_disk_site.py")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged of a server and sites that try again soon."""
    monkeypatch.setattr(background_writes, "RETRY_S", 0.05)
    monkeypatch.setattr(session, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(session, "LONGEST_BACKOFF_S", 0.05)
    caplog.set_level(logging.DEBUG, "atoll")
    return caplog


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (
            "spool.write=enospc@3;accept.before=enospc@2;slot.create=enospc@1,4",
            ["cannot submit", "round 1 cannot be written"],
        ),
        (
            "pass.write=enospc@2;head.before=enospc@3;export.write=enospc@1",
            ["round 1 cannot be written", "round 3 cannot be written", "the result could not be saved"],
        ),
        (f"journal.commit=enospc@{','.join(map(str, range(1, 60, 2)))}", ["is full"]),
        (
            "slot.create=emfile@1,4;pass.write=emfile@30;export.write=emfile@1",
            [
                "The server has too many files open",
                "round 1 cannot be written: too many files are open",
                "round 2 cannot be written: too many files are open",
                "the result could not be saved: too many files are open",
            ],
        ),
    ],
    ids=["receiving", "closing rounds", "every row", "open files"],
)
@pytest.mark.covers("F25")
def test_waits_for_disk_space_and_open_files(
    tmp_path: Path, quick: pytest.LogCaptureFixture, undisturbed: Result, points: str, said: list[str]
) -> None:
    """A server that lacks disk space or has too many open files tries again, and the run ends with the same bits."""
    # In one case, the first attempt fails for every second row that the journal writes. No attempt leaves a version
    # pinned.
    with serve_wide(tmp_path) as server, failpoints(points) as times_reached:
        versions = server._require_served().run.store.versions
        sites = Sites(server.url, tmp_path)
        run_to_end(server, sites)
        for point in points.split(";"):
            place, hits = point.split("=")
            assert times_reached(place) > 20 or times_reached(place) >= int(hits.split(",")[-1].split("@")[-1])
    assert [words for words in said if words not in quick.text] == []
    assert versions._pins == []
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("F25")
def test_logs_a_version_without_all_its_files(tmp_path: Path, quick: pytest.LogCaptureFixture) -> None:
    """If the files of a version could not all be exported, the log names the version, and says when
    exports work again.
    """
    with serve_wide(tmp_path, **{"disk.export_every": 1}) as server, failpoints("export.write=enospc@1"):
        run_to_end(server, Sites(server.url, tmp_path))
    told = r"not all files of version \d could be written: .* is full.* The files of the next version are "
    assert re.search(told, quick.text)
    assert (server.exports / "model-000003.safetensors").exists()


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
def test_a_run_waits_while_the_disk_is_full(
    tmp_path: Path, quick: pytest.LogCaptureFixture, undisturbed: Result, number: int
) -> None:
    """If the disk fills up during a round, the server waits for space, and the run ends with the same bits."""
    # In round 1 the disk has no space for a spool, and in round 2 it has none for a row of the journal.
    full: list[Path] = []

    def during(site: str, at: int) -> None:
        if (site, at) == ("a", number):
            full.append(fill(tmp_path / "state"))

    with small_disk(tmp_path / "state", 16 * 2**20), serve_wide(tmp_path) as server:
        sites = Sites(server.url, tmp_path, during=during)
        wait_until(lambda: "is full" in quick.text, "a word about it")
        assert server.status().fragments[0].version == number - 1
        full[0].unlink()
        run_to_end(server, sites)
        Result(tmp_path).require_same(undisturbed, sites)


def rounds_in(metrics: Path) -> list[int]:
    """The rounds that the metrics file has a line about; each line is a whole one."""
    return [json.loads(line)["round"] for line in metrics.read_text().splitlines()]


BEST: dict[str, Any] = {"rounds.best_metric": "loss", "rounds.best_mode": "min"}
"""The sites' loss falls from round to round."""


@pytest.mark.covers("F25")
def test_rounds_go_on_when_exports_fill_the_disk(tmp_path: Path, quick: pytest.LogCaptureFixture) -> None:
    """Rounds go on while the disk of the exports is full. Once it has space, the metrics file has a line for each
    round.
    """
    # The run has so many rounds that the end of a disk page cuts a line. A server restarted meanwhile goes on, too.
    disk, rounds, full = tmp_path / "disk", 20, list[Path]()
    settings: dict[str, Any] = {"disk.export_dir": disk / "results", "rounds.total": rounds}

    def during(site: str, at: int) -> None:
        if (site, at) == ("a", 2):
            full.append(fill(disk))

    with small_disk(disk, 64 * 2**10):
        with serve(tmp_path, **settings) as server:
            sites = FederatedSites(server.url, tmp_path, during=during)
            wait_until(lambda: "the result could not be saved: the disk is full" in quick.text, "a word at the end")
            written = rounds_in(server.exports / "metrics.jsonl")
            assert written == list(range(1, len(written) + 1))
            assert quick.text.count("not all files of version") == 1
            port = server.port
        quick.clear()
        with serve(tmp_path, **settings, **{"network.port": port}) as server:
            wait_until(lambda: "the result could not be saved" in quick.text, "a word again")
            assert rounds_in(server.exports / "metrics.jsonl") == written
            full[0].unlink()
            run_to_end(server, sites)
        assert rounds_in(server.exports / "metrics.jsonl") == list(range(1, rounds + 1))
        assert sorted(path.name for path in server.exports.iterdir()) == ["metrics.jsonl", "model.safetensors"]


@pytest.mark.parametrize("name", ["", "metrics.jsonl", "model.safetensors"])
def test_rounds_go_on_without_exports(
    tmp_path: Path, quick: pytest.LogCaptureFixture, undisturbed: Result, name: str
) -> None:
    """Rounds go on while exports cannot be written. Once the obstacle is removed, the server writes the exports."""
    # From round 1 on, a file stands in place of the exports folder, or a folder stands in place of a file in it.
    exports = tmp_path / "state" / "exports"

    def during(site: str, at: int) -> None:
        if (site, at) == ("a", 1):
            exports.rename(tmp_path / "away")
            (exports / name).mkdir(parents=True) if name else exports.write_text("")

    with serve_wide(tmp_path, **{"disk.export_every": 1}) as server:
        sites = Sites(server.url, tmp_path, during=during)
        last = "metrics.jsonl" if name == "metrics.jsonl" else "the result"
        wait_until(lambda: f"{last} could not be saved" in quick.text, "a word at the end")
        assert server.status().fragments[0].version == ROUNDS
        awaited = [line for line in server.status().warnings if line.startswith(f"{last} could not be saved: ")]
        assert "The server ends only after that, or with Ctrl-C." in awaited[0]
        export = f" Or: atoll export model.safetensors --dir {tmp_path / 'state'}."
        assert awaited[0].endswith("the next start writes the file." + (last == "the result") * export)
        assert quick.text.count("not all files of version 1 could be written") == 1
        assert f"{exports / name} cannot be {'used' if name else 'made'} (" in quick.text
        (exports / name).rmdir() if name else exports.unlink()
        run_to_end(server, sites)
        assert server.status().warnings == []
    assert rounds_in(exports / "metrics.jsonl") == list(range(1, ROUNDS + 1))
    result = Result(tmp_path)
    assert result.without_exports == undisturbed.without_exports
    assert result.exports["model.safetensors"] == undisturbed.exports["model.safetensors"]


async def test_logs_repeated_attempts_less_and_less_often(
    quick: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server logs a repeated failure less and less often."""
    # Of 20 attempts, attempts 1, 2, 4, 8 and 16.
    failures = iter(range(20))

    async def attempt() -> str:
        if next(failures, None) is not None:
            raise DiskFull("No space.")
        return "done"

    monkeypatch.setattr(background_writes, "RETRY_S", 0.0)
    assert await background_writes.until_passed(attempt, "it could not be saved", then=" All wait.") == "done"
    said = "it could not be saved: the disk is full: No space. Trying again every 0 s. All wait."
    assert [line for line in quick.messages if "saved" in line] == [said] * 5


def test_the_best_version_waits_for_its_export(tmp_path: Path, quick: pytest.LogCaptureFixture) -> None:
    """If the best version cannot be saved, the server keeps trying and saves it once the obstacle is removed."""
    # In round 2, a file takes the place of the exports folder.
    exports = tmp_path / "state" / "exports"

    def during(site: str, at: int) -> None:
        if (site, at) == ("a", 2):
            wait_until((exports / "best.json").exists, "the best version so far")
            exports.rename(tmp_path / "away")
            exports.write_text("")

    with serve_wide(tmp_path, **BEST) as server:
        sites = Sites(server.url, tmp_path, during=during)
        wait_until(lambda: "the best version could not be saved" in quick.text, "a word about it")
        exports.unlink()
        run_to_end(server, sites)
    assert json.loads((exports / "best.json").read_text())["version"] == ROUNDS - 1


def remove_folder(path: Path) -> None:
    """At once: a server that makes a file in it meanwhile would keep it there."""
    removed = path.with_name(path.name + ".removed")
    path.rename(removed)
    shutil.rmtree(removed)


@pytest.mark.parametrize(("what", "number"), [("state", 1), ("state", 2), ("slots", 1), ("journal.sqlite", 1)])
def test_reports_state_that_was_removed_during_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str, number: int
) -> None:
    """If the state directory or a part of it is removed during a round, the server ends with an error that names it.

    If the whole directory is removed, the error may name its folder `slots`.
    """
    state = tmp_path / "state"

    def during(site: str, at: int) -> None:
        if (site, at) != ("a", number):
            return
        if what == "journal.sqlite":
            for path in state.glob("journal.sqlite*"):
                path.unlink()
            for path in (state / "slots").iterdir():  # else it goes on with the open journal
                path.unlink()
        else:
            remove_folder(state if what == "state" else state / what)

    named = "state(/slots)?" if what == "state" else what
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.1")
    with serve_wide(tmp_path, **{"disk.export_every": 1}) as server:
        sites = Sites(server.url, tmp_path, during=during)
        with pytest.raises(StoreError, match=f"{named} was removed while the server was running"):
            server.run()
    with pytest.raises(AtollError):
        sites.join()
    assert not [record for record in caplog.records if record.name == "atoll.server" and record.exc_info]


@pytest.mark.covers("F25")
def test_a_failed_journal_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the journal can no longer be written, the server ends with an error that says so, instead of failing every
    upload.
    """
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.1")
    with serve_wide(tmp_path, sites=1) as server:

        def during(site: str, at: int) -> None:
            journal = server._require_served().run.store.journal
            journal.value("PRAGMA query_only = ON")  # every change fails from here on

        sites = Sites(server.url, tmp_path, during=during, names=["a"])
        with pytest.raises(StoreError, match=r"write a readonly database\. Check the disk, and that this user may"):
            server.run()
    with pytest.raises(AtollError):
        sites.join()


@pytest.mark.covers("F25")
def test_uploads_are_refused_below_min_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, undisturbed: Result
) -> None:
    """With less free disk than `disk.min_free_bytes`, the server answers an upload with 507 before it
    takes any byte.
    """
    # The site and the status report this. The server logs the refusal once, and logs once that uploads are accepted
    # again.
    told = (
        "The server has 100.0 kB of disk left, but must keep 1.0 MB free (disk.min_free_bytes). "
        "Free some space: the run then continues by itself, and nothing is lost."
    )
    with serve_wide(tmp_path, **{"disk.min_free_bytes": 10**6}) as server:
        store = server._require_served().run.store
        asked: list[int] = []

        def free_bytes() -> int:
            asked.append(server._require_served().run.bytes_up)
            return 10**9 if seen and len(asked) > 3 else 10**5

        seen: list[str] = []
        monkeypatch.setattr(store, "free_bytes", free_bytes)
        sites = Sites(server.url, tmp_path)
        seen += wait_until(lambda: server.status().warnings, "the warning")
        run_to_end(server, sites)
        assert server.status().warnings == []
    assert asked[:3] == [0, 0, 0]
    assert seen == [told]
    assert any(told in record.message for record in caplog.records if record.name == "atoll")
    state = tmp_path / "state"
    assert [record.message for record in caplog.records if record.message.startswith("uploads")] == [
        f"uploads to {state} are refused: {told}",
        f"uploads to {state} are accepted again",
    ]
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("F25")
def test_notices_new_space_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there is space on the disk again, the server's warning ends, though no site has tried again."""
    with serve_wide(tmp_path, sites=1, **{"disk.min_free_bytes": 10**6}) as server:
        run = server._require_served().run
        update = WireSite(server.url).train()
        with monkeypatch.context() as patch:
            patch.setattr(run.store, "free_bytes", lambda: 10**5)
            assert update.put(0)[0] == 507
            assert server.status().warnings
        wait_until(lambda: not server.status().warnings, "the end of the warning")


@pytest.mark.parametrize(
    ("durability", "nth"),
    [
        ("process", 3),
        *(pytest.param("power", nth, marks=pytest.mark.long if nth in (4, 18) else ()) for nth in (1, 4, 14, 18, 20)),
    ],
)
@pytest.mark.covers("F26")
def test_a_failed_fsync_ends_the_server(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, durability: str, nth: int
) -> None:
    """If an fsync fails, the server ends and tells no site of success. After a restart, the run ends with the same
    bits.
    """
    with ServerProcess(nursery, tmp_path, (f"fsync=eio@{nth}",), **{"disk.durability": durability}) as server:
        sites = Sites(server.url, tmp_path)
        assert server.process.wait() == 7
        last = server.process.now.output().splitlines()[-1]
    assert last.startswith("atoll: fsync of ")
    assert "what was written last may be lost. Check the disk, then start the run again" in last
    with ServerProcess(nursery, tmp_path, **{"disk.durability": durability}, port=server.port) as again:
        sites.join()
        assert again.process.wait() == 0
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("T14", "T13", "X3")
def test_a_site_reports_missing_space_for_a_payload(nursery: Nursery, tmp_path: Path) -> None:
    """A site without space for a task's payload reports the error and answers the next task.

    The payload has 8 MiB, and a file of this site may have at most 1 MiB.
    """

    def workflow(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        came.extend(controller.send("a", "count", payload, timeout_s=30) for payload in (Zeros(), None))

    came: list[Any] = []
    with workflow_server(tmp_path, workflow) as server:
        site = ForkedSite(nursery, tmp_path, server.url, "a", SMALL_DISK_SITE).start()
        assert server.wait(60)
        server.run()
        assert site.wait() == 0
    large, small = came
    assert "StoreError: A file in the folder of temporary files cannot be written: File too large." in large.error
    assert small.payload == 1


@pytest.mark.covers("F43")
def test_rounds_go_on_without_a_worker_with_a_failed_disk(nursery: Nursery, tmp_path: Path) -> None:
    """A worker whose disk fails ends, the status shows its error, and the rounds go on without it."""
    with serve_wide(tmp_path, **{"rounds.min_sites": 1}) as server:
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


def memory_bytes(pid: int) -> int:
    """The address space of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.covers("F27")
@pytest.mark.parametrize("spare_bytes", [-(100 << 20), 0, 1 << 20], ids=["less than it has", "what it has", "1 MiB"])
def test_a_server_without_memory_loses_nothing(
    tmp_path: Path, nursery: Nursery, undisturbed: Result, spare_bytes: int
) -> None:
    """A server that runs out of memory loses no update. After a restart, the run ends with the same bits."""
    # The server's memory is limited while both sites train in round 2. The server then ends, hangs or has just enough
    # memory.
    gate = Gate(2)
    with ServerProcess(nursery, tmp_path) as server:
        sites = Sites(server.url, tmp_path, during=gate)
        gate.wait()
        pid = server.process.now.pid
        resource.prlimit(pid, resource.RLIMIT_AS, (memory_bytes(pid) + spare_bytes, resource.RLIM_INFINITY))
        gate.open()
        with contextlib.suppress(TimeoutError):
            server.process.wait(3)  # whatever it does now is ended by SIGKILL
    with ServerProcess(nursery, tmp_path, port=server.port) as again:
        sites.join()
        assert again.process.wait(60) == 0  # it has exported the model
    Result(tmp_path).require_same(undisturbed, sites)
