"""The ledger over a real journal: an event is recorded as a whole, or not at all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from atoll.errors import DiskFull
from atoll.protocol import run_events
from atoll.rounds import events
from atoll.rounds.state import FragmentSnapshot, Rules, Snapshot
from atoll.server.coordinator.event_log import EventLog
from atoll.server.coordinator.ledger import Ledger, write_change
from atoll.store.journal_tables import PartRow, RunRow
from atoll.store.store import FileShape, FragmentShapes, Store

SHAPES = FragmentShapes(FileShape(8, b"", (((0, 8),),)), None, update_bytes=8, update_parts=((0, 8),))
RUN = RunRow("run-1", "{}", "{}", "00" * 32, "2.6", "AVX2", "2025-01-01T00:00:00+00:00")
TWO = Rules(sites=2, rounds=2)


WHAT = (
    *("site joined", "site joined", "round opened", "ticket issued", "ticket issued"),
    *("update accepted", "update accepted", "round closed"),
)


def no_space(*_: object, **__: object) -> None:
    raise DiskFull("The disk is full.")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.run_log.create_run(RUN)
    store.slots.shape([SHAPES])
    return store


@pytest.mark.covers("F25")
def test_an_event_refused_by_the_journal_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the journal cannot record an event, neither the state nor the journal changes, and no follower is told."""
    # Two sites join, and the disk is full when the second update closes the round. With new space, this event counts
    # once.
    acted, happened = list[events.Effect](), list[run_events.Happened]()
    log = EventLog(store)
    log.subscribe("the test", happened.append)
    ledger = Ledger(TWO, partial(write_change, store, {}, log), publish=log.publish)
    ledger.restore(Snapshot((FragmentSnapshot(head=0),)), acted.append)
    for site in "ab":
        ledger.record(events.WorkerJoined(site))
    for site, lease in (("a", 1), ("b", 2)):
        ledger.record(events.TicketRequested(site, lease, 0))
        store.tickets.record_part(PartRow(lease, 0, b"d" * 32, 1.0))

    def submit(ticket: int) -> None:
        row = store.tickets.get(ticket)
        ledger.record(
            events.UpdateAccepted(ticket, ticket),
            lambda: store.tickets.accept(replace(row, state="accepted", digest="ab" * 32, accepted_order=ticket)),
            run_events.UpdateAccepted(fragment=0, round=1, site=row.site, ticket=ticket),
        )

    submit(1)
    before = ledger.state, len(acted), store.tickets.get(2), store.run_log.rounds(), len(happened)
    with monkeypatch.context() as lacking:
        lacking.setattr(store.run_log, "freeze", no_space)
        with pytest.raises(DiskFull):
            submit(2)
    assert (ledger.state, len(acted), store.tickets.get(2), store.run_log.rounds(), len(happened)) == before
    submit(2)
    assert [row.state for row in store.run_log.rounds()] == ["frozen"]
    assert (store.tickets.get(2).state, store.tickets.get(2).accepted_order) == ("accepted", 2)
    assert [type(each) for each in acted[before[1] :]] == [events.RoundClosed]
    assert [(each.number, each.what) for each in happened] == list(enumerate(WHAT, 1))
    store.close()


def test_followers_are_told_after_the_outermost_commit(store: Store) -> None:
    """Followers are told of a change after the outermost transaction is committed."""
    # If the transaction is undone, they are told nothing. A simulation groups changes in one transaction, which may be
    # undone as a whole.
    happened = list[run_events.Happened]()
    log = EventLog(store)
    log.subscribe("the test", happened.append)
    with pytest.raises(ZeroDivisionError), store.journal.transaction():  # noqa: PT012
        log.tell(run_events.RunFinished())
        assert happened == []
        raise ZeroDivisionError
    assert happened == []
    with store.journal.transaction():
        log.tell(run_events.RunFinished())
        log.tell(run_events.RunFinished())
        assert happened == []
    assert [each.number for each in happened] == [1, 2]
    store.close()
