"""`atoll egress`: a log that was changed is noticed, receipts are checked, and both logs of a run are compared."""

from __future__ import annotations

import csv
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery
from kit.processes import Outcome, command
from kit.world import World
from policy_world import Writes, log_of

from atoll.cli.egress import command as show_egress
from atoll.cli.egress import require_genuine_receipts
from atoll.errors import StateCorrupt, StoreError, UsageError
from atoll.transport.egress_log import HEAD, NAME, EgressLog, Entry, read_head, read_log
from atoll.transport.way_out import way_out


@pytest.fixture
def egress(nursery: Nursery, tmp_path: Path) -> Callable[..., Outcome]:
    return partial(command, nursery, tmp_path)


def run_two_rounds(folder: Path) -> None:
    with World(folder, {"w": torch.zeros(2)}, "ab", rounds=2) as world:
        world.rounds(1.0, 1, 2)
        world.finish()


def test_egress_shows_exports_and_compares_the_log(
    tmp_path: Path, policy_of: Writes, egress: Callable[..., Outcome]
) -> None:
    """The command agrees with the server's audit log; with a digest changed there, it names site and ticket."""
    policy = policy_of("")
    run_two_rounds(tmp_path)
    env = {"ATOLL_POLICY": str(policy)}
    shown = egress("egress", **env)
    assert shown.returncode == 0, shown.stderr
    assert "receipts show that 4 updates counted" in shown.stdout
    lines = egress("egress", "--export", "jsonl", **env).stdout.splitlines()
    assert [json.loads(line)["hash"] for line in lines] == [each.hash for each in log_of(policy)]
    rows = list(csv.DictReader(egress("egress", "--export", "csv", **env).stdout.splitlines()))
    assert [row["what"] for row in rows] == [each.what for each in log_of(policy)]
    audit = tmp_path / "audit.json"
    audit.write_text(egress("audit", "state", "--json", "--last", "1000000").stdout)
    agreed = egress("egress", "--compare", str(audit), **env)
    assert agreed.stdout == "4 updates of this site in both logs, with the same digests; none in only one\n"
    document = json.loads(audit.read_text())
    entry = next(each for each in document["last"] if each["what"] == "accepted")
    original, entry["digest"] = entry["digest"], "0" * 64
    audit.write_text(json.dumps(document))
    differing = egress("egress", "--compare", str(audit), **env)
    assert differing.returncode == StateCorrupt.exit_code
    assert f"of {entry['site']} for ticket {entry['ticket']}" in differing.stderr
    entry["digest"] = original
    document["last"].remove(entry)
    document["entries"] -= 1
    audit.write_text(json.dumps(document))
    missing = egress("egress", "--compare", str(audit), **env)
    assert "The server signed that it has the update" in missing.stderr
    document["entries"] += 1
    audit.write_text(json.dumps(document))
    assert egress("egress", "--compare", str(audit), **env).returncode == UsageError.exit_code


def test_changed_removed_and_added_lines_are_noticed(tmp_path: Path) -> None:
    """Each change of a log of three entries names the line; a process that would write to it does not."""
    log = EgressLog(tmp_path)
    for number in range(3):
        log.append("part", run="r", bytes=number)
    path, lines = tmp_path / NAME, (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    for changed, line in (
        ([lines[0], lines[1].replace(b'"bytes": 1', b'"bytes": 9'), lines[2]], 2),
        ([lines[0], lines[2]], 2),
        ([lines[1], lines[2]], 1),
        ([*lines, lines[2]], 4),
        ([lines[0], b"[]\n", lines[2]], 2),
    ):
        path.write_bytes(b"".join(changed))
        with pytest.raises(StateCorrupt, match=f"Line {line} "):
            list(read_log(path))
        with pytest.raises(StateCorrupt, match=f"Line {line} "):
            EgressLog(tmp_path)


def test_line_cut_off_by_a_crash_is_removed(tmp_path: Path) -> None:
    """The next process says how many bytes were cut off; the entries before are intact."""
    log = EgressLog(tmp_path)
    log.append("part", run="r", bytes=5)
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"seq": 2, "at"')
    assert [each.what for each in read_log(tmp_path / NAME)] == ["part"]
    again = EgressLog(tmp_path)
    again.append("part", run="r", bytes=7)
    found = list(read_log(tmp_path / NAME))
    assert [(each.what, each.detail.get("lost_bytes")) for each in found] == [
        ("part", None),
        ("torn", 15),
        ("part", None),
    ]
    assert again.sent["r"].nbytes == 12


@pytest.mark.parametrize("cut", ["one line", "all lines", "half a line", "the head", "the chain made anew"])
def test_missing_end_is_noticed(tmp_path: Path, cut: str) -> None:
    """Of a log of three kept entries, no line can be removed from the end, and no chain can take its place."""
    log = EgressLog(tmp_path)
    for number in range(3):
        log.keep(log.append("part", run="r", bytes=number))
    path, head = tmp_path / NAME, tmp_path / HEAD
    lines = path.read_bytes().splitlines(keepends=True)
    match cut:
        case "one line":
            path.write_bytes(b"".join(lines[:2]))
        case "all lines":
            path.write_bytes(b"")
        case "half a line":
            path.write_bytes(b"".join(lines)[:-9])
        case "the head":
            head.unlink()
        case "the chain made anew":
            kept = head.read_bytes()
            path.unlink()
            head.unlink()
            log = EgressLog(tmp_path)
            for _ in range(4):
                log.append("part", run="r", bytes=0)
            head.write_bytes(kept)
    for look in (lambda: list(read_log(path)), lambda: EgressLog(tmp_path)):
        with pytest.raises(StateCorrupt, match=r"is missing|where the egress log|names another hash") as raised:
            look()
        assert "To begin a new log, move" in raised.value.remedy or "audit log" in raised.value.remedy


def test_comparison_names_what_a_cut_log_lacks(tmp_path: Path) -> None:
    """With its last update cut off, the comparison names that update; with a later line cut off, it names the end."""
    log = EgressLog(tmp_path)
    for ticket in range(3):
        log.append("update", run="r", site="a", ticket=ticket, fragment=0, round=ticket, digest=f"digest-{ticket}")
    log.keep(log.append("part", run="r", bytes=1))
    last = [{"what": "accepted", "site": "a", "ticket": each, "digest": f"digest-{each}"} for each in range(3)]
    audit = tmp_path / "audit.json"
    audit.write_text(json.dumps({"run": "r", "entries": 3, "last": last}))
    path, lines = tmp_path / NAME, (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    with pytest.raises(StateCorrupt, match=r"it has 2 lines.* an update of a for ticket 2 with the digest digest-2"):
        show_egress(path, 20, None, audit)
    path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(StateCorrupt, match=r"it has 3 lines, but egress\.head names line 4"):
        show_egress(path, 20, None, audit)


def test_deleted_log_is_noticed(tmp_path: Path) -> None:
    """Where `egress.head` names a line, a log that is gone is not one that never was."""
    log = EgressLog(tmp_path)
    with pytest.raises(UsageError, match="no egress log"):
        list(read_log(tmp_path / "other" / NAME))
    log.keep(log.append("part", run="r", bytes=1))
    (tmp_path / NAME).unlink()
    with pytest.raises(StateCorrupt, match=r"it has 0 lines, but egress\.head names line 1"):
        list(read_log(tmp_path / NAME))


def test_receipt_that_counts_and_the_end_are_kept(tmp_path: Path, policy_of: Writes) -> None:
    """The head names the line of each receipt that an update counts, and at the end of the process the last line."""
    policy = policy_of("")
    run_two_rounds(tmp_path)
    path, way = policy.parent / "log" / NAME, way_out()
    counted = [each.seq for each in read_log(path) if each.detail.get("state") == "counted"]
    assert read_head(path)[0] >= counted[-1]
    assert way.log is not None
    way.log.append("messages", Heartbeat=[1, 2])
    way.close()
    assert read_head(path)[0] == [*read_log(path)][-1].seq > counted[-1]


def test_messages_of_a_process_are_kept_at_its_end(policy_of: Writes) -> None:
    """A process that ends writes the small messages it has counted, and keeps them."""
    policy = policy_of("")
    code = "from atoll.transport.way_out import way_out; way_out()._count('Heartbeat', 7)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"ATOLL_POLICY": str(policy)})
    (entry,) = log_of(policy)
    assert entry.detail == {"Heartbeat": [1, 7]}
    assert read_head(policy.parent / "log" / NAME)[0] == 1


def test_nothing_is_kept_after_the_disk_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync the line may be lost, though the next sync succeeds: the head never names it."""
    log, sync, calls = EgressLog(tmp_path), os.fdatasync, list[int]()

    def fails_once(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    lost, waiting = (log.append("part", run="r", bytes=1) for _ in range(2))
    monkeypatch.setattr(os, "fdatasync", fails_once)
    for again in (lambda: log.keep(lost), lambda: log.keep(waiting), lambda: log.append("part", run="r", bytes=1)):
        with pytest.raises(StoreError, match="Input/output error"):
            again()
    assert read_head(tmp_path / NAME)[0] == 0


def test_crash_before_the_bytes_left_is_no_fault(tmp_path: Path) -> None:
    """Lines behind the head, and half a line, are what a crash leaves: the log is accepted, and goes on."""
    log = EgressLog(tmp_path)
    log.keep(log.append("part", run="r", bytes=5))
    log.append("update", run="r", fragment=0, round=1)  # killed before it was kept: nothing of it was sent
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"seq": 3')
    assert [each.what for each in read_log(tmp_path / NAME)] == ["part", "update"]
    again = EgressLog(tmp_path)
    again.keep(again.append("part", run="r", bytes=7))
    assert read_head(tmp_path / NAME)[0] == 4
    assert [each.what for each in read_log(tmp_path / NAME)] == ["part", "update", "torn", "part"]


def test_threads_share_a_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight threads that write a line each, one waits for its own; the other seven share the next wait."""
    log, waits, sync = EgressLog(tmp_path), list[int](), os.fdatasync
    begun, go_on = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        waits.append(fd)
        begun.set()
        assert go_on.wait(30)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(log.keep, log.append("part", run="r", bytes=1))
        assert begun.wait(30)
        others = [pool.submit(log.keep, log.append("part", run="r", bytes=1)) for _ in range(7)]
        go_on.set()
        for each in (first, *others):
            each.result()
    assert len(waits) == 2
    assert read_head(tmp_path / NAME)[0] == 8


def test_two_processes_write_one_chain(tmp_path: Path) -> None:
    """Two open logs append in turn; each follows the other's entries, and counts their bytes."""
    one, two = EgressLog(tmp_path), EgressLog(tmp_path)
    for log in (one, two, two, one):
        log.append("part", run="r", bytes=1)
    assert len(list(read_log(tmp_path / NAME))) == 4
    assert one.sent["r"].nbytes == 4


def test_forged_and_foreign_receipts_are_noticed(tmp_path: Path, policy_of: Writes) -> None:
    """A receipt whose weight was changed, or whose update is not in the log, is an error that names its entry."""
    policy = policy_of("")
    run_two_rounds(tmp_path)
    entries = log_of(policy)
    require_genuine_receipts(entries)
    at = next(index for index, each in enumerate(entries) if each.what == "receipt")
    forged = Entry(**{**vars(entries[at]), "detail": {**entries[at].detail, "weight": 9.0}})
    with pytest.raises(StateCorrupt, match=f"signature of the receipt in entry {forged.seq}"):
        require_genuine_receipts([*entries[:at], forged])
    without = [each for each in entries[: at + 1] if each.what != "update"]
    with pytest.raises(StateCorrupt, match="an update that this log does not have"):
        require_genuine_receipts(without)
