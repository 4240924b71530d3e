"""Slots: the lowest that nobody holds is taken, and no other file is made while there is one."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

from atoll.store.file_slots import JOURNAL, PULL, READER, SPOOL, VERSION, WRITER, FileShape, SlotPool


def test_holders_of_slots_are_as_in_a_plain_mapping(tmp_path: Path) -> None:
    """Against a plain mapping of files to who holds them, over a thousand random steps."""
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


def test_one_too_many_is_removed_when_it_becomes_free(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, VERSION, 0, FileShape(8, b"", ()), threading.RLock(), most=2)
    slots = [pool.take(WRITER) for _ in range(3)]
    for slot in slots:
        pool.drop(slot, WRITER)
    assert sorted(pool.holds()) == [pool.path(1).name, pool.path(2).name]
    assert [pool.take(WRITER).number for _ in range(2)] == [1, 2]
    assert pool.take(WRITER).number == 0  # made anew


def test_a_slot_that_was_removed_says_nothing_of_the_file_that_has_its_number_now(tmp_path: Path) -> None:
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


def test_a_slot_of_the_journal_is_given_to_no_writer(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, SPOOL, 0, FileShape(8, b"", ()), threading.RLock())
    pool.drop(pool.take(WRITER), WRITER)
    assert pool.adopt(0) is pool[0]
    assert pool.take(WRITER).number == 1
    pool.drop(pool[0], JOURNAL)
    pool.close()
    assert pool.take(WRITER).number == 0  # made anew, in place of what is closed
