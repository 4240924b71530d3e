"""A small run for the store's tests: 40-byte versions in two parts, 20-byte outer states, 24-byte updates in two parts.

Content is a letter repeated, so that a byte of a wrong version is seen at once.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from atoll.protocol.messages import Report
from atoll.store.file_slots import VERSION
from atoll.store.journal_tables import AUDIT, AuditRow, PartRow, RunRow, TicketRow, VersionRow
from atoll.store.store import Files, FileShape, FragmentShapes, Store
from atoll.store.versions import VersionDigests

HEADER = b"version:"
STATE_HEADER = b"outer:"
SHAPES = FragmentShapes(
    version=FileShape(40, HEADER, (((0, 24),), ((24, 16),))),
    state=FileShape(20, STATE_HEADER, (((6, 14),), ((0, 6),))),
    update_bytes=24,
    update_parts=((0, 16), (16, 8)),
)
WITH_DELTA = replace(SHAPES, delta=FileShape(12, b"", (((0, 8),), ((8, 4),))))
RUN = RunRow("run-1", "{}", "{}", "00" * 32, "2.6", "AVX2", "2025-01-01T00:00:00+00:00")
SITES = ("a", "b")

OPENED: list[Store] = []
"""Stores of a test; closed when it is over."""


def begin(directory: Path, shapes: FragmentShapes = SHAPES, **options: Any) -> tuple[Store, tuple[str, ...]]:
    """Open, shape and recover, as a server does at its start."""
    store = Store(directory, **options)
    OPENED.append(store)
    try:
        if store.run_log.run is None:
            store.run_log.create_run(RUN)
        store.slots.shape([shapes])
        return store, store.recover()
    except BaseException:
        store.close()
        raise


def reopen(store: Store, shapes: FragmentShapes = SHAPES) -> tuple[Store, tuple[str, ...]]:
    """Close the store, and start again on its files."""
    store.close()
    return begin(store.directory, shapes)


def content(version: int) -> bytes:
    """The bytes of a version's file: its header, and its number as a letter."""
    return HEADER + bytes([65 + version]) * 32


def state_content(version: int) -> bytes:
    return STATE_HEADER + bytes([97 + version]) * 14


def delta_content(version: int) -> bytes:
    return bytes([48 + version]) * 12


def digests(data: bytes, shape: FileShape | None) -> tuple[bytes, ...]:
    return tuple(blake3(b"".join(data[at : at + n] for at, n in ranges)).digest() for ranges in shape.regions)


def write_version(store: Store, version: int, tickets: Sequence[int] = ()) -> VersionRow:
    """Write and commit a version; all but version 0 have outer state, and a difference where the run has those."""
    draft = store.versions.begin(0, version)
    try:
        os.pwrite(draft.slot.fd, content(version), 0)
        if draft.state and version:
            os.pwrite(draft.state.fd, state_content(version), 0)
        if draft.delta:
            os.pwrite(draft.delta.fd, delta_content(version), 0)
        row = store.versions.finish(
            draft,
            VersionDigests(
                digest=blake3(content(version)).hexdigest(),
                part_digests=digests(content(version), SHAPES.version),
                state_digests=digests(state_content(version), SHAPES.state) if version else (),
                delta_digest=blake3(delta_content(version)).hexdigest(),
                delta_digests=digests(delta_content(version), WITH_DELTA.delta) if draft.delta else (),
            ),
            summary_json=f'{{"version": {version}}}',
        )
        with store.journal.transaction():
            store.versions.commit(draft, tickets)
        return row
    except BaseException:
        draft.abandon()
        raise


def update_of(site: str, base_version: int) -> bytes:
    return f"{site}{base_version:07d}".encode() * 3


def send_part(store: Store, ticket: int, part: int, update: bytes) -> None:
    offset, nbytes = SHAPES.update_parts[part]
    writer = store.tickets.spool(ticket).begin_part(part)
    writer.write(update[offset : offset + nbytes])
    store.tickets.record_part(PartRow(ticket, part, blake3(update[offset : offset + nbytes]).digest(), 1.0), writer)
    writer.abandon()


def send_parts(store: Store, ticket: int, site: str, base_version: int) -> None:
    """Issue a ticket and send both parts of its update."""
    store.tickets.issue(ticket, site, 0, base_version)
    for part in (0, 1):
        send_part(store, ticket, part, update_of(site, base_version))


def accept(store: Store, ticket: int, update: bytes = b"", last: PartRow | None = None) -> TicketRow:
    """Have an update accepted: by default the one that its site has sent."""
    row = store.tickets.get(ticket)
    update = update or update_of(row.site, row.base_version)
    store.tickets.whole(row, last)
    store.tickets.make_durable(row)
    with store.journal.transaction():
        digest, order = blake3(update).hexdigest(), store.tickets.next_order()
        report = Report(weight=2.0, steps=10, metrics={"loss": 0.5})
        store.tickets.accept(
            replace(row, state="accepted", digest=digest, report=report, norm=3.0, accepted_order=order), last
        )
    return store.tickets.get(ticket)


def submit(store: Store, ticket: int, site: str, base_version: int) -> TicketRow:
    send_parts(store, ticket, site, base_version)
    return accept(store, ticket)


def freeze(store: Store, base_version: int, tickets: Mapping[int, str]) -> None:
    """Close a round of these tickets, each with its site."""
    store.run_log.open_round(0, base_version, tuple(tickets.values()))
    for ticket, site in tickets.items():
        submit(store, ticket, site, base_version)
    store.run_log.freeze(0, base_version, tuple(tickets))


def run_round(store: Store, base_version: int, *, commit: bool = True) -> tuple[int, int]:
    """A whole round of two sites; tickets are 1 and 2, 3 and 4, …"""
    tickets = (2 * base_version + 1, 2 * base_version + 2)
    freeze(store, base_version, dict(zip(tickets, SITES, strict=True)))
    if commit:
        write_version(store, base_version + 1, tickets)
    return tickets


def new_run(directory: Path, rounds: int = 0, **options: Any) -> Store:
    """A run with two members and version 0, and so many rounds."""
    store, _ = begin(directory, **options)
    for lease, site in enumerate(SITES, 1):
        store.run_log.put_member(site, lease)
    write_version(store, 0)
    run_rounds(store, range(rounds))
    return store


def run_rounds(store: Store, bases: Iterable[int], *, durable: bool = False) -> None:
    """Rounds from these versions; with `durable` each new version is made so."""
    for base in bases:
        run_round(store, base)
        if durable:
            store.versions.write_durable()


def lose(store: Store, *versions: int) -> tuple[Store, tuple[str, ...]]:
    """Damage these versions as a power loss would, and start again."""
    paths = [store.slots.pool(VERSION, 0)[store.versions.get(0, version).slot].path for version in versions]
    store.close()
    for path in paths:
        flip(path, 20)
    return begin(store.directory)


def read(fd: int | None) -> bytes:
    assert fd is not None
    return os.pread(fd, 1000, 0)


def export(store: Store, target: Path) -> Path:
    """The newest version as it is, as a file for people."""

    def contents(files: Files) -> Iterator[memoryview]:
        ((fd, _),) = files
        yield memoryview(read(fd))

    return store.export(target, store.versions.heads(), b"", contents)


def audited(store: Store) -> list[AuditRow]:
    """The entries of the audit log, oldest first."""
    return store.journal.select(AUDIT, "ORDER BY seq")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def slot_files(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "slots").iterdir())


def kill_during(directory: Path, failpoints: str, action: str) -> None:
    """Do `action` (an expression over `store_world` and `directory`) in a process that a failpoint kills."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-c", f"from store_world import *; directory = Path({str(directory)!r}); {action}"],
        env={**os.environ, "ATOLL_FAILPOINTS": failpoints, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


FSYNCS = {"x86_64": (74, 75), "aarch64": (82, 83)}
"""Kind of machine → the numbers of the system calls fsync and fdatasync."""


def fail_fsync() -> None:
    """From now on, the kernel answers each fsync of this thread with EIO, also those of SQLite (seccomp)."""
    fsync, fdatasync = FSYNCS[os.uname().machine]
    refused, allowed = (0x06, 0, 0, 0x50000 + errno.EIO), (0x06, 0, 0, 0x7FFF0000)
    code = ((0x20, 0, 0, 0), (0x15, 1, 0, fsync), (0x15, 0, 1, fdatasync), refused, allowed)
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "seccomp")


def output_of(directory: Path, action: str) -> str:
    """Do `action` (a program over `store_world` and `directory`) in a process, and return what it prints."""
    program = f"from store_world import *; directory = Path({str(directory)!r})\n{action}"
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
