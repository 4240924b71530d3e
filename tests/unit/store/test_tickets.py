"""Tickets, spools, slots and kept objects: one ticket, one update, one writer per part."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from store_world import (
    accept,
    audited,
    freeze,
    new_run,
    read,
    reopen,
    run_round,
    send_part,
    slot_files,
    submit,
    update_of,
    write_version,
)

from atoll.blobs.object_file import pack_object, write_object
from atoll.blobs.ways_to_send import Cut
from atoll.errors import BadRequest, Busy, Conflict, DiskFull, Gone, StoreError, TicketClosed, UpdateRefused
from atoll.store import update_spool
from atoll.store.file_slots import JOURNAL, PULL, READER, SPOOL, VERSION, WRITER, FileShape, SlotPool
from atoll.store.journal_tables import PartRow
from atoll.store.kept_objects import Entry, ObjectStore
from atoll.store.store import Store
from atoll.store.update_spool import PartWriter, WriterCancelled


@contextmanager
def write_under_way(
    monkeypatch: pytest.MonkeyPatch, writer: PartWriter, then: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Hold a write of this writer in the middle of its pwrite until the block ends; then it goes on, and is over."""
    entered, go_on, write_at = threading.Event(), threading.Event(), update_spool.write_at

    def slow(fd: int, data: bytes | memoryview, offset: int) -> None:
        entered.set()
        assert go_on.wait(30)
        write_at(fd, data, offset)
        then()

    with monkeypatch.context() as patch:
        patch.setattr(update_spool, "write_at", slow)
        late = threading.Thread(target=writer.write, args=(b"O" * writer.nbytes,))
        late.start()
        assert entered.wait(30)
        yield
    go_on.set()
    late.join()


def test_the_next_version_counts_accepted_updates(store: Store) -> None:
    """An accepted update counts in the next version, and its ticket gets the number of this version."""
    tickets = run_round(store, 0, commit=False)
    row = store.tickets.get(1)
    assert (row.state, row.report.weight, row.report.metrics, row.bytes) == ("accepted", 2.0, {"loss": 0.5}, 24)
    assert [store.tickets.get(ticket).accepted_order for ticket in tickets] == [1, 2]
    write_version(store, 1, tickets)
    row = store.tickets.get(1)
    assert (row.state, row.version) == ("counted", 1)


def test_an_undone_change_leaves_tickets_unchanged(store: Store) -> None:
    """If a transaction is undone, tickets, their states and their files are as before. After the store is closed,
    tickets cannot be read.
    """
    with pytest.raises(ZeroDivisionError), store.journal.transaction():  # noqa: PT012
        store.tickets.issue(1, "a", 0, 0)
        assert store.tickets.get(1).slot is None
        store.tickets.name_spool(store.tickets.spool(1))
        assert store.tickets.get(1).slot is not None
        raise ZeroDivisionError
    with pytest.raises(Gone):
        store.tickets.get(1)
    assert store.slots.holds()["spool-0-0.bin"] == {}

    store.tickets.issue(1, "b", 0, 0)
    spool = store.tickets.spool(1)
    with pytest.raises(ZeroDivisionError), store.journal.transaction():  # noqa: PT012
        send_part(store, 1, 0, update_of("b", 0))
        raise ZeroDivisionError
    assert (store.tickets.get(1).slot, store.tickets.parts(1)) == (None, {})
    assert store.tickets.spool(1) is spool  # it stays the ticket's
    send_part(store, 1, 0, update_of("b", 0))
    assert store.tickets.get(1).slot == spool.slot.number

    for part in (0, 1):
        send_part(store, 1, part, update_of("b", 0))
    with pytest.raises(ZeroDivisionError), store.journal.transaction():  # noqa: PT012
        accept(store, 1)
        assert store.tickets.get(1).state == "accepted"
        raise ZeroDivisionError
    assert store.tickets.get(1).state == "open"
    assert accept(store, 1) == store.tickets.get(1)
    store.close()
    for asked in (store.tickets.get, store.tickets.spool):
        with pytest.raises(StoreError):
            asked(1)


def test_a_site_has_one_ticket_per_round(store: Store) -> None:
    """A site has at most one open ticket in a round. If this ticket is refused, the site may get another one."""
    store.tickets.issue(1, "a", 0, 0)
    with pytest.raises(StoreError, match="UNIQUE"):
        store.tickets.issue(2, "a", 0, 0)
    store.tickets.refuse(1, "NaN in w")
    store.tickets.issue(2, "a", 0, 0)  # another try


def test_an_incomplete_update_is_not_accepted(store: Store) -> None:
    """If parts of an update are missing, it is not accepted and its ticket stays open."""
    store.tickets.issue(1, "a", 0, 0)
    send_part(store, 1, 1, update_of("a", 0))
    with pytest.raises(Conflict, match=r"lacks 1 of 2 parts \(first: part 0\)"):
        accept(store, 1)
    assert store.tickets.get(1).state == "open"


def test_the_last_part_is_recorded_with_the_acceptance(store: Store) -> None:
    """The part that came with the message about an update is recorded in the transaction that accepts the update."""
    store.tickets.issue(1, "a", 0, 0)
    send_part(store, 1, 0, update_of("a", 0))
    last = PartRow(1, 1, b"d" * 32, 1.0)
    with pytest.raises(ZeroDivisionError), store.journal.transaction():  # noqa: PT012
        accept(store, 1, last=last)
        raise ZeroDivisionError
    assert (store.tickets.get(1).state, list(store.tickets.parts(1))) == ("open", [0])
    assert accept(store, 1, last=last).state == "accepted"
    assert store.tickets.parts(1)[1] == last


def test_the_journal_is_asked_again_only_after_a_change(store: Store) -> None:
    """A row that was read is read from SQLite again only after a statement that names its table."""
    asked = list[str]()
    store.tickets.issue(1, "a", 0, 0)
    store.journal._db.set_trace_callback(lambda sql: asked.append(sql) if sql.startswith("SELECT") else None)
    assert store.tickets.get(1) == store.tickets.get(1)
    with store.journal.transaction():
        store.journal.count("versions")  # another table
    assert store.tickets.get(1).state == "open"
    assert len([sql for sql in asked if "FROM tickets" in sql]) == 1
    store.tickets.refuse(1, "NaN in w")
    assert store.tickets.get(1).state == "refused"
    assert store.facts.answers() == store.facts.answers() == []  # such rows have whole answers, so none is kept
    assert len([sql for sql in asked if "FROM workflow_facts" in sql]) == 2
    store.journal._db.set_trace_callback(None)


def test_a_closed_ticket_accepts_no_parts(store: Store) -> None:
    """A refused or expired ticket accepts no more parts, and the error says why."""
    for ticket, site in ((1, "a"), (2, "b")):
        store.tickets.issue(ticket, site, 0, 0)
        send_part(store, ticket, 0, update_of(site, 0))
    held = store.tickets.spool(1)
    store.tickets.refuse(1, "NaN in w")
    store.tickets.expire([2], "the round closed")
    for action in (lambda: store.tickets.spool(1), lambda: held.begin_part(0)):
        with pytest.raises(UpdateRefused, match="of a was refused: NaN in w"):
            action()
    with pytest.raises(TicketClosed, match="expired: the round closed"):
        store.tickets.spool(2)
    assert store.tickets.parts(1) == {}
    assert (store.run_log.totals().refused, store.run_log.totals().expired) == (1, 1)


def test_an_accepted_update_stays_accepted(store: Store) -> None:
    """An update that was accepted can be neither refused nor expired."""
    submit(store, 1, "a", 0)
    with pytest.raises(StoreError, match="accepted"):
        store.tickets.expire([1], "too late")
    with pytest.raises(StoreError, match="accepted"):
        store.tickets.refuse(1, "too late")


def test_an_accepted_update_cannot_be_overwritten(store: Store) -> None:
    """When an update was accepted, its parts cannot be written again, and its bytes stay."""
    submit(store, 1, "a", 0)
    with pytest.raises(TicketClosed, match="has an update already"):
        store.tickets.spool(1).begin_part(0)
    assert read(store.tickets.spool(1).fd) == update_of("a", 0)


def test_a_sites_last_ticket_shows_its_outcome(store: Store) -> None:
    """The last ticket of a site is found with its state and version. A site without tickets has none, and an unknown
    ticket raises `Gone`.
    """
    run_round(store, 0)
    before = store.tickets.last_of("a", 0)
    assert (before.ticket, before.state, before.version) == (1, "counted", 1)
    store.tickets.issue(3, "a", 0, 1)
    last = store.tickets.last_of("a", 0)
    assert last.ticket == 3
    assert store.tickets.last_of("nobody", 0) is None
    with pytest.raises(Gone):
        store.tickets.get(99)


def test_a_new_upload_waits_for_the_old_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second upload of a part cancels the first one. Its first write waits until the write that the first one has
    begun is over.
    """
    store.tickets.issue(1, "a", 0, 0)
    held, order = store.tickets.spool(1), list[str]()
    old = held.begin_part(0)

    def write() -> None:
        new.write(b"N" * 16)
        order.append("new write")

    writes, entered, go_on = threading.Thread(target=write), threading.Event(), threading.Event()

    def before_pwrite(_: str) -> None:  # which one lock of the file orders; this one is of the part
        if threading.current_thread() is late:
            entered.set()
            assert go_on.wait(30)
            order.append("old write")

    monkeypatch.setattr(update_spool, "failpoint", before_pwrite)
    late = threading.Thread(target=old.write, args=(b"O" * 16,))
    late.start()
    assert entered.wait(30)
    new = held.begin_part(0)
    assert old._cancelled
    writes.start()
    writes.join(0.1)  # a write that does not wait is over by then
    assert order == []
    go_on.set()
    late.join()
    writes.join()
    assert order == ["old write", "new write"]
    with pytest.raises(WriterCancelled):
        old.write(b"O")
    assert read(held.fd)[:16] == b"N" * 16


def test_a_replaced_upload_writes_nothing(store: Store) -> None:
    """If a second upload of a part begins just before the first one writes, the first one writes nothing."""
    store.tickets.issue(1, "a", 0, 0)
    held = store.tickets.spool(1)

    class OvertakenLock:
        """Lets a newer writer begin while the older one is about to take the lock."""

        def __init__(self) -> None:
            self.armed, real = False, threading.Lock()
            self.acquire, self.release = real.acquire, real.release

        def __enter__(self) -> None:
            if self.armed:
                self.armed = False
                held.begin_part(0).write(b"N" * 16)
            self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    lock = OvertakenLock()
    held._locks[0] = lock
    old = held.begin_part(0)
    lock.armed = True
    with pytest.raises(WriterCancelled):
        old.write(b"O" * 16)
    assert read(held.fd)[:16] == b"N" * 16


def test_rewriting_a_part_removes_its_record(store: Store) -> None:
    """When a part is written again, its record is removed. The part is recorded again only for the newest writer, with
    all bytes.
    """
    store.tickets.issue(1, "a", 0, 0)
    send_part(store, 1, 0, update_of("a", 0))
    assert list(store.tickets.parts(1)) == [0]
    old = store.tickets.spool(1).begin_part(0)
    assert store.tickets.parts(1) == {}
    with pytest.raises(WriterCancelled):  # not all bytes are there
        store.tickets.record_part(PartRow(1, 0, b"d" * 32, 1.0), old)
    new = store.tickets.spool(1).begin_part(0)
    new.write(b"N" * 16)
    with pytest.raises(WriterCancelled):  # a late inspection of what the old one wrote
        store.tickets.record_part(PartRow(1, 0, b"d" * 32, 1.0), old)
    store.tickets.record_part(PartRow(1, 0, blake3(b"N" * 16).digest(), 1.0), new)


def test_a_part_writes_only_its_own_range(store: Store) -> None:
    """A part of an update takes no more bytes than it has, and writes only to its own range of the file."""
    store.tickets.issue(1, "a", 0, 0)
    send_part(store, 1, 0, b"0" * 24)
    writer = store.tickets.spool(1).begin_part(1)
    writer.write(memoryview(b"11111"))
    with pytest.raises(BadRequest, match="has 8 bytes"):
        writer.write(b"1234")
    writer.write(b"222")
    assert read(store.tickets.spool(1).fd) == b"0" * 16 + b"11111222"
    with pytest.raises(BadRequest, match="has no part 2"):
        store.tickets.spool(1).begin_part(2)


@pytest.mark.parametrize("use", ["write", "read"])
def test_spools_in_use_are_not_reused(store: Store, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """A spool, the file of an update, is given to no other ticket while it is written or read. Afterwards it is used
    again.
    """
    store.tickets.issue(1, "a", 0, 0)
    spool = store.tickets.spool(1)
    reading = spool.pool.held(spool.slot, READER)
    with reading if use == "read" else write_under_way(monkeypatch, spool.begin_part(0)):
        store.tickets.expire([1], "the round closed")
        store.tickets.issue(2, "b", 0, 0)
        assert store.tickets.spool(2).slot is not spool.slot
    store.tickets.issue(3, "c", 0, 0)
    assert store.tickets.spool(3).slot is spool.slot  # rewritten, not made anew


@pytest.mark.covers("D4")
def test_unneeded_spools_are_removed(store: Store) -> None:
    """Spools that the next round cannot need are removed."""
    # Round 1 has four tickets, and two of them expire. As many spools are kept as updates have counted.
    store.run_log.open_round(0, 0, ("a", "b", "c", "d"))
    for ticket, site in enumerate("abcd", 1):
        store.tickets.issue(ticket, site, 0, 0)
        send_part(store, ticket, 0, update_of(site, 0))
    for ticket, site in ((1, "a"), (2, "b")):
        send_part(store, ticket, 1, update_of(site, 0))
        accept(store, ticket)
    store.run_log.freeze(0, 0, (1, 2))
    store.tickets.expire([3, 4], "the round closed")
    write_version(store, 1, (1, 2))
    assert [name for name in slot_files(store.directory) if name.startswith("spool")] == [
        "spool-0-0.bin",
        "spool-0-1.bin",
    ]
    assert [store.slots.holds()[f"spool-0-{n}.bin"] for n in (0, 1)] == [{}, {}]


def test_a_round_freezes_only_accepted_tickets(store: Store) -> None:
    """A round can be frozen only with accepted tickets of its own. Its version must be made from exactly these
    tickets.
    """
    store.run_log.open_round(0, 0, ("a", "b"))
    submit(store, 1, "a", 0)
    store.tickets.issue(2, "b", 0, 0)
    for tickets in ((1, 2), (), (1, 7)):
        with pytest.raises(StoreError, match="cannot close"):
            store.run_log.freeze(0, 0, tickets)
    store.run_log.open_round(0, 0, ("a",))
    store.run_log.freeze(0, 0, (1,))
    store.run_log.freeze(0, 0, (1,))
    (row,) = store.run_log.rounds()
    assert (row.state, row.expected, row.tickets) == ("frozen", ("a",), (1,))
    with pytest.raises(StoreError, match="is not open"):
        store.run_log.open_round(0, 0, ("b",))
    with pytest.raises(StoreError, match="made from the tickets"):
        write_version(store, 1, ())


def test_a_round_keeps_the_order_of_its_updates(store: Store) -> None:
    """When a round closes, its updates are kept in the order of the sites' names, not of the ticket numbers, which
    would give other bits.
    """
    freeze(store, 0, {2: "a", 1: "b"})
    assert [row.tickets for row in store.run_log.rounds()] == [(2, 1)]


def test_an_old_lease_cannot_end_a_member(store: Store) -> None:
    """The end of an old lease does not change a site with a newer lease. The end of the newer lease does."""
    store.run_log.put_member("a", 7, host="h", labels_json='{"gpu": "no"}')
    store.run_log.end_member("a", 1, "dead", "silent")  # an old lease
    assert store.run_log.member("a").state == "alive"
    store.run_log.end_member("a", 7, "failed", "OOM")
    assert (store.run_log.member("a").state, store.run_log.member("a").detail) == ("failed", "OOM")
    store.run_log.end_member("b", 2, "dead")
    assert store.run_log.totals().deaths == 1
    assert [member.site for member in store.run_log.members()] == ["a", "b"]


def test_all_threads_get_the_same_spool(store: Store) -> None:
    """If several threads ask for the spool of a ticket, all get one object, which is held once."""
    store.tickets.issue(1, "a", 0, 0)
    found: list[update_spool.Spool] = []
    threads = [threading.Thread(target=lambda: found.append(store.tickets.spool(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert [held for name, held in store.slots.holds().items() if name.startswith("spool") and held] == [{"journal": 1}]


@pytest.mark.covers("P10")
def test_a_frozen_round_can_be_reopened(store: Store) -> None:
    """When a frozen round is reopened, its tickets are open again, also after a restart."""
    # Tickets that have counted stay counted. Another update may come for a reopened ticket.
    tickets = run_round(store, 0, commit=False)
    store.tickets.reopen(0, 0, tickets, "it has gone")
    for restarted in (False, True):
        found = reopen(store)[0] if restarted else store
        assert [(row.state, row.digest) for row in map(found.tickets.get, tickets)] == [("open", None)] * 2
        assert [(row.state, row.tickets) for row in found.run_log.rounds()] == [("open", ())]
    assert audited(found)[-1].what == "reopened"
    for ticket, site in zip(tickets, ("z", "b"), strict=True):
        for part in (0, 1):
            send_part(found, ticket, part, update_of(site, 0))
        assert accept(found, ticket, update_of(site, 0)).state == "accepted"
    found.run_log.freeze(0, 0, tickets)
    write_version(found, 1, tickets)
    entries = audited(found)
    found.tickets.reopen(0, 0, tickets, "it has gone")
    assert audited(found) == entries
    assert [found.tickets.get(ticket).state for ticket in tickets] == ["counted", "counted"]


# -- slots: the lowest free one is taken


def test_slots_are_never_given_to_two_users(tmp_path: Path) -> None:
    """Over a thousand random steps, each slot has the users that a plain dict says, and no free slot is in use."""
    chance = random.Random(7)
    pool = SlotPool(tmp_path, SPOOL, 0, FileShape(8, b"", ()), threading.RLock())
    known: dict[int, list[str]] = {}
    for _ in range(1000):
        what = chance.choice(["take", "take", "hold", "drop", "drop", "drop", "trim"])
        held = [number for number, holders in known.items() if holders]
        if what == "take":
            free = [number for number, holders in known.items() if not holders]
            lowest = min(free, default=min(set(range(len(known) + 1)) - set(known)))
            assert pool.take(WRITER).number == lowest
            known.setdefault(lowest, []).append(WRITER)
        elif what == "hold" and held:
            number, why = chance.choice(held), chance.choice([JOURNAL, PULL, READER])
            pool.hold(pool[number], why)
            known[number].append(why)
        elif what == "drop" and held:
            holders = known[number := chance.choice(held)]
            pool.drop(pool[number], holders.pop(chance.randrange(len(holders))))
        elif what == "trim" and chance.random() < 0.1:
            pool.trim()
            known = {number: known[number] for number in held}
        assert pool.holds() == {pool.path(number).name: Counter(holders) for number, holders in known.items()}
    assert sorted(tmp_path.iterdir()) == sorted(map(pool.path, known))


def test_a_superfluous_slot_is_removed(tmp_path: Path) -> None:
    """If more slots are free than a pool may keep, one slot is removed."""
    # Three slots become free in a pool of at most two.
    pool = SlotPool(tmp_path, VERSION, 0, FileShape(8, b"", ()), threading.RLock(), most=2)
    slots = [pool.take(WRITER) for _ in range(3)]
    for slot in slots:
        pool.drop(slot, WRITER)
    assert sorted(pool.holds()) == [pool.path(1).name, pool.path(2).name]
    assert [pool.take(WRITER).number for _ in range(2)] == [1, 2]
    assert pool.take(WRITER).number == 0  # made anew


def test_a_removed_slot_does_not_free_its_successor(tmp_path: Path) -> None:
    """Code that still uses a removed slot cannot mark the new slot with the same number as used or free."""
    pool = SlotPool(tmp_path, VERSION, 0, FileShape(8, b"", ()), threading.RLock(), most=1)
    before, other = pool.take(WRITER), pool.take(WRITER)
    pool.drop(before, WRITER)  # one too many
    assert [slot.number for slot in (before, other)] == [0, 1]
    assert pool.take(WRITER).number == 0  # made anew
    pool.hold(before, READER)
    pool.drop(before, READER)
    assert pool.take(WRITER).number == 2  # the new one is held
    pool.drop(other, WRITER)
    pool.drop(pool[2], WRITER)
    pool.drop(pool[0], WRITER)
    assert list(pool.holds()) == [pool.path(0).name]  # the last of them, which stays
    pool.hold(before, READER)
    assert pool.take(WRITER).number == 0  # it is free


def test_slots_of_stored_files_are_not_overwritten(tmp_path: Path) -> None:
    """A slot whose file the journal refers to is not given to another writer."""
    pool = SlotPool(tmp_path, SPOOL, 0, FileShape(8, b"", ()), threading.RLock())
    pool.drop(pool.take(WRITER), WRITER)
    assert pool.adopt(0) is pool[0]
    assert pool.take(WRITER).number == 1
    pool.drop(pool[0], JOURNAL)
    pool.close()
    assert pool.take(WRITER).number == 0  # made anew, in place of what is closed


# -- published objects


def stored(objects: ObjectStore) -> tuple[Entry, str]:
    """Publish an object of 4,000 bytes of tensors."""
    object_id, fd = objects.draft()
    manifest = write_object(pack_object({"w": torch.ones(1000)}), fd, Cut(2**20))
    objects.discard(object_id)
    kept, secret = objects.open(manifest.cuts, inline=False, expires_s=60.0)
    objects.write(kept, memoryview(bytearray(manifest.nbytes)), 0)
    kept.digests.update(enumerate(manifest.part_digests))
    objects.complete(kept, manifest.id)
    return kept, secret


@pytest.mark.covers("P9", "F25")
def test_an_object_without_its_note_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the note of a published object cannot be written, the object is removed and its publisher gets the error."""
    # A restarted server would not know the object, so its publisher must not believe that it is kept.
    objects = ObjectStore(tmp_path, max_bytes=5000, max_expires_s=60.0, idle_timeout_s=60.0, least_bytes_per_s=1024.0)
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskFull):
        stored(objects)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    kept, secret = stored(objects)  # nothing is left of the first in the 5,000 bytes
    assert objects.complete_one(kept.object, secret) is kept


@pytest.mark.covers("P9")
def test_the_servers_own_objects_end_with_the_server(tmp_path: Path) -> None:
    """An object that belongs to the server does not count for the limit, does not expire, and is removed when the
    server ends.
    """
    # All other objects together may have 5,000 bytes. A second object fits when the first one belongs to the server.

    def opened() -> ObjectStore:
        return ObjectStore(tmp_path, max_bytes=5000, max_expires_s=60.0, idle_timeout_s=60.0, least_bytes_per_s=1024.0)

    objects = opened()
    first, secret = stored(objects)
    with pytest.raises(Busy):
        stored(objects)
    assert objects.make_own(first.object, secret) is first
    second, _ = stored(objects)
    with pytest.raises(Conflict, match="belongs to the server"):
        objects.remove(first.object, secret)
    assert first.expires_at - second.expires_at > 365 * 86400
    objects.close()
    opened()
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {second.object}


def test_a_file_system_without_hard_links_keeps_no_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `keep_updates`, a store on a file system without hard links is refused when it is opened."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"^disk.keep_updates needs hard links, but .*updates cannot have any: Oper"):
        Store(tmp_path, keep_updates=1)
    Store(tmp_path).close()


def test_a_kept_update_that_cannot_be_removed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the file of a kept update that is no longer needed cannot be removed, the log says so, and the run goes on."""
    store = new_run(tmp_path, keep_updates=1)
    run_round(store, 0)
    assert list((tmp_path / "updates").iterdir())
    real = Path.unlink

    def refuse(path: Path, **options: bool) -> None:
        if path.parent.name == "updates":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    with store.journal.transaction():
        store.tickets.drop_kept(0)
    assert "which is no longer needed, could not be removed: Permission denied" in caplog.text
    monkeypatch.undo()
    store.tickets.remove_unkept()
    assert list((tmp_path / "updates").iterdir()) == []
    store.close()
