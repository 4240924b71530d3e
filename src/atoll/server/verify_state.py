"""Compare every file of a state directory with its journal, and compute its last rounds again.

The journal's rows have checksums, its audit log is a chain of hashes, and it has a BLAKE3 digest of each part of each
version, outer state, difference and update. With `disk.keep_updates`, the updates of the last rounds are still there,
too: then their versions are made again, by the pass that the server uses, and have to get the digests in the journal.
Nothing is written into the directory; the versions that are made again are in unnamed temporary files.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from atoll.aggregation.make_version import NextFiles, RoundFiles, UpdateInput, make_version
from atoll.aggregation.outer_state import is_whole, version_regions
from atoll.aggregation.plan import FragmentPlan, Plan
from atoll.errors import AtollError, BadRequest, StateCorrupt
from atoll.format_text import listed, of_fragment
from atoll.posix import NAMED_FILE, open_own, write_at
from atoll.protocol.read_message import reason
from atoll.protocol.values import FrozenRound
from atoll.server.coordinator.aggregate_round import frozen_updates
from atoll.server.recorded_rules import CodeNeeded, made_by, recorded_plan
from atoll.store import journal_tables as tables
from atoll.store.file_slots import DELTA, READ_BYTES, SPOOL, STATE, VERSION, FileShape, Ranges, region_digest, slot_path
from atoll.store.reader import StateReader, compared_audit, open_state, permitted
from atoll.store.tickets import kept_name, kept_updates
from atoll.system_calls import allocate, nameless_file
from atoll.tensors.byte_runs import joined
from atoll.tensors.fragments import split_of
from atoll.tensors.layout import Layout, version_header, version_layout

MOST_SPANS = 16
"""Number of differing ranges of bytes that are named for one part."""


class Changed(NamedTuple):
    """Bytes that are not as the server wrote them.

    Attributes:
        file: path of the file, within the state directory.
        what: what the bytes are, in words.
        part: number of the part; None: the bytes are not of one part.
        offset, nbytes: where the bytes are in the file; of several ranges, where the first begins, and their sum.
        tensors: names of the tensors that have values in these bytes.
        spans: offset and number of exactly those bytes that differ, where the right ones are known.
    """

    file: str
    what: str
    part: int | None = None
    offset: int = 0
    nbytes: int = 0
    tensors: Sequence[str] = ()
    spans: Sequence[tuple[int, int]] = ()

    def __str__(self) -> str:
        where = f", bytes {self.offset} to {self.offset + self.nbytes - 1}" if self.nbytes else ""
        tensors = f" (of {listed(self.tensors)})" if self.tensors else ""
        spans = ", ".join(f"{at} to {at + count - 1}" if count > 1 else str(at) for at, count in self.spans)
        exactly = f"; of these, exactly {spans} differ" if spans else ""
        return f"{self.file}: {self.what}{where}{tensors}{exactly}"


class RoundResult(NamedTuple):
    """What became of the attempt to compute a round again. `why` says why it was not computed, or what differs."""

    fragment: int
    round: int
    version: int
    digest: str
    result: Literal["same", "differs", "not computed"]
    updates: int = 0
    why: str = ""


@dataclass
class Verified:
    """What a check of a state directory has found.

    Attributes:
        run: id of the run.
        entries, last_hash: number of entries of the audit log, and the last one's hash.
        files: number of files that were compared.
        changed: what is not as the server wrote it.
        rounds: the rounds of the versions that are kept.
        unchecked: what could not be compared, and why.
    """

    run: str
    entries: int = 0
    last_hash: str = ""
    files: int = 0
    changed: list[Changed] = field(default_factory=list)
    rounds: list[RoundResult] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


class _Made(NamedTuple):
    """An audit entry about a version: its tickets, the rules in effect, and from which base the state began anew."""

    tickets: list[int]
    rules: Mapping[str, Any] | None
    generation: int | None


class _Rows:
    """The rows of a journal that the check needs, at one moment."""

    def __init__(self, state: StateReader) -> None:
        self.run = state.run()
        self.versions = state.versions()
        self.deltas = state.select(tables.DELTAS)
        parts = state.select(tables.PARTS, "ORDER BY ticket, part")
        self.parts = {ticket: list(rows) for ticket, rows in groupby(parts, lambda part: part.ticket)}
        rows = state.select(tables.TICKETS, "WHERE ticket IN (SELECT ticket FROM parts)")
        self.tickets = {row.ticket: row for row in rows}
        known = "SELECT fragment, version, lost, summary_json FROM history ORDER BY seq"
        self.history = [(*each, json.loads(text or "{}")) for *each, text in state.rows(known)]
        ended = [json.loads(text or "{}") for (text,) in state.rows("SELECT summary_json FROM sat_out_rounds")]
        numbers = [each.get("round", 0) for each in (*(row[-1] for row in self.history), *ended)]
        self.next_round = max(numbers, default=0) + 1
        self.made: dict[tuple[int, int], _Made] = {}
        self.rules, generation = None, None
        which = "SELECT what, detail_json FROM audit WHERE what IN ('rules', 'generation', 'committed') ORDER BY seq"
        for what, text in state.rows(which):
            detail = json.loads(text)
            if what == "rules":
                self.rules = detail
            elif what == "generation":
                generation = detail["version"]
            else:
                made = _Made(detail["tickets"], self.rules, generation)
                self.made[detail["fragment"], detail["version"]] = made

    def keys(self) -> set[object]:
        """Return what names each file and part: what is missing later was deleted meanwhile by a server."""
        parts = [self.key(each) for rows in self.parts.values() for each in rows]
        return {*self.versions, *self.deltas, *parts}

    def key(self, part: tables.PartRow) -> object:
        """Return what names the bytes of a part of an update. Its file moves when its round ends."""
        return part, self.tickets[part.ticket].slot

    def summary(self, fragment: int, version: int) -> Mapping[str, Any]:
        found = [each for f, v, lost, each in self.history if (f, v, lost) == (fragment, version, 0)]
        return found[-1] if found else {}

    def base_of(self, fragment: int, version: int) -> tuple[int, tables.VersionRow | None]:
        """Return the version from which a version was made: the newest before it that was not lost; and its row."""
        before = [int(v) for f, v, lost, _ in self.history if f == fragment and v < version and not lost]
        number = max(before, default=0)
        rows = [each for each in self.versions if (each.fragment, each.version) == (fragment, number)]
        return number, rows[0] if rows else None

    def needs(self, row: tables.VersionRow) -> set[object]:
        """Return what names the files that it takes to make a version again, and its own."""
        _, base = self.base_of(row.fragment, row.version)
        tickets = self.made[row.fragment, row.version].tickets
        parts = [self.key(part) for ticket in tickets for part in self.parts.get(ticket, ())]
        return {row, *parts} | ({base} if base is not None else set())


class _Check:
    """One check of a state directory.

    Attributes:
        keys: for each finding, what names its row in the journal.
        why_no_plan: why the last plan could not be known.
    """

    def __init__(self, folder: Path, rows: _Rows, found: Verified) -> None:
        self.folder, self.rows, self.found = folder, rows, found
        self.split = split_of(json.loads(rows.run.schema_json))
        self.settings = json.loads(rows.run.settings_json)
        self.keys: list[object] = []
        self._bad: list[tuple[Path, int, Ranges]] = []  # file, position in `changed`, what was compared
        self.why_no_plan = ""

    def plan(self, number: int, rules: Mapping[str, Any] | None) -> Plan | None:
        """Return the plan of a round; None if it cannot be known here. `why_no_plan` then says why."""
        if rules is None:
            self.why_no_plan = "its rules were not recorded, as by earlier versions of Atoll"
            return None
        try:
            return recorded_plan(rules, self.split, number)
        except CodeNeeded as code:
            self.why_no_plan = f"the run has code of its own, which is never loaded here: {code}"
        except AtollError as error:
            self.why_no_plan = error.message
        return None

    # -- files

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def report(self, key: object, *changed: Changed) -> None:
        self.found.changed.extend(changed)
        self.keys.extend([key] * len(changed))

    @contextmanager
    def opened(self, path: Path, what: str, nbytes: int | None, key: object) -> Iterator[int | None]:
        """Open a file that is to be compared, and yield its descriptor; None if it is missing or has another size."""
        self.found.files += 1
        with ExitStack() as stack:
            fd = None
            try:
                fd = _open(path, stack)
            except FileNotFoundError:
                self.report(key, Changed(self.name(path), f"{what} is missing"))
            if fd is not None and nbytes is not None and (size := os.fstat(fd).st_size) != nbytes:
                self.report(key, Changed(self.name(path), f"{what} has {size} bytes, not {nbytes}"))
                fd = None
            yield fd

    def compare(
        self, path: Path, what: str, shape: FileShape, digests: Mapping[int, tuple[bytes, object]], layout: Layout
    ) -> None:
        """Compare a file with its digests, which cover all of its bytes.

        Args:
            path: path of the file.
            what: what it is, in words.
            shape: its size and regions.
            digests: number of a region → its digest, and what names its row in the journal.
            layout: where its tensors are.
        """
        row = next((key for _, key in digests.values()), None)
        with self.opened(path, what, shape.nbytes, row) as fd:
            if fd is None:
                return
            for number, (digest, key) in digests.items():
                ranges = shape.regions[number] if number < len(shape.regions) else ()
                if region_digest(fd, ranges) != digest:
                    self._bad.append((path, len(self.found.changed), ranges))
                    start, nbytes = (ranges[0][0] if ranges else 0), sum(count for _, count in ranges)
                    tensors, where = _tensors(layout, ranges), f"part {number} of {what}"
                    self.report(key, Changed(self.name(path), where, number, start, nbytes, tensors))

    def name_bytes(self, path: Path, right_fd: int) -> None:
        """Name exactly the bytes of a damaged file that differ from those of a file that is right."""
        for position, ranges in [(position, ranges) for bad, position, ranges in self._bad if bad == path]:
            spans: list[tuple[int, int]] = []
            with ExitStack() as stack:
                fd = _open(path, stack)
                for start, nbytes in ranges:
                    for at in range(start, start + nbytes, READ_BYTES):
                        count = min(READ_BYTES, start + nbytes - at)
                        spans += _spans(os.pread(fd, count, at), os.pread(right_fd, count, at), at)
            self.found.changed[position] = self.found.changed[position]._replace(spans=joined(spans)[:MOST_SPANS])

    def is_good(self, path: Path) -> bool:
        return all(each.file != self.name(path) for each in self.found.changed)

    def slot(self, kind: str, fragment: int, number: int) -> Path:
        return slot_path(self.folder / "slots", kind, fragment, number)

    def update_path(self, ticket: int) -> Path:
        row = self.rows.tickets[ticket]
        if row.slot is None:
            return kept_updates(self.folder) / kept_name(row)
        return self.slot(SPOOL, row.fragment, row.slot)

    def files(self) -> None:
        """Compare all files."""
        plan = self.plan(self.rows.next_round, self.rows.rules)
        if plan is None:
            why = f"outer states are compared as a whole, updates and differences not at all: {self.why_no_plan}"
            self.found.unchecked.append(why)
        for row in self.rows.versions:
            self._version(row, None if plan is None else plan.fragments[row.fragment])
        if plan is not None:
            for delta in self.rows.deltas:
                self._delta(delta, plan.fragments[delta.fragment])
        for ticket in self.rows.tickets.values():
            self._update(ticket)

    def _version(self, row: tables.VersionRow, planned: FragmentPlan | None) -> None:
        what, schema = f"version {row.version}{self.of(row.fragment)}", self.split.schemas[row.fragment]
        layout = version_layout(schema, int(self.settings["network.part_bytes"]), int(self.settings["model.ranks"]))
        shape = FileShape(layout.nbytes, version_header(schema), version_regions(layout))
        self.compare(self.slot(VERSION, row.fragment, row.slot), what, shape, _keyed(row.part_digests, row), layout)
        if row.state_slot is None:
            return
        path, what = self.slot(STATE, row.fragment, row.state_slot), f"the outer state of {what}"
        if planned is not None and planned.state is not None:
            state = planned.shapes().by_kind()[STATE]
            self.compare(path, what, state, _keyed(row.state_digests, row), planned.state[1])
            return
        with self.opened(path, what, None, row) as fd:
            if fd is None:
                return
            in_chunks, good = self.settings["algorithm.outer_optimizer"]["granularity"] == "chunk", False
            with suppress(BadRequest):  # the file's header is damaged
                good = is_whole(fd, layout, row.state_digests, in_chunks)
            if not good:
                self.report(row, Changed(self.name(path), what, None, 0, os.fstat(fd).st_size))

    def _delta(self, row: tables.DeltaRow, planned: FragmentPlan) -> None:
        what, shapes = f"the difference to version {row.version}{self.of(row.fragment)}", planned.shapes().by_kind()
        if planned.downlink is not None:
            path, digests = self.slot(DELTA, row.fragment, row.slot), _keyed(row.part_digests, row)
            self.compare(path, what, shapes[DELTA], digests, planned.downlink.layout)

    def _update(self, row: tables.TicketRow) -> None:
        number, rules = self.rows.next_round, self.rows.rules
        if row.version is not None and (made := self.rows.made.get((row.fragment, row.version))):
            number, rules = self.rows.summary(row.fragment, row.version).get("round", 0), made.rules
        if (plan := self.plan(number, rules)) is not None:
            planned, what = plan.fragments[row.fragment], f"the update of {row.site} for ticket {row.ticket}"
            parts = self.rows.parts[row.ticket]
            digests = {each.part: (each.digest, self.rows.key(each)) for each in parts}
            shape = planned.shapes().by_kind()[SPOOL]
            self.compare(self.update_path(row.ticket), what, shape, digests, planned.update)

    def of(self, fragment: int) -> str:
        return of_fragment(fragment if self.split.count > 1 else None)

    # -- rounds

    def again(self, row: tables.VersionRow) -> RoundResult:
        """Make a version again from its base and its updates, and compare its digests.

        Raises:
            AtollError, ValueError, TypeError, KeyError, FileNotFoundError: the pass cannot be made with these rows and
                files: a row was rewritten, or a file has changed since it was compared.
        """
        fragment, version = row.fragment, row.version
        summary, made = self.rows.summary(fragment, version), self.rows.made[fragment, version]
        number = summary.get("round", 0)

        def result(why: str) -> RoundResult:
            return RoundResult(fragment, number, version, row.digest, "not computed", why=why)

        base_number, base = self.rows.base_of(fragment, version)
        missing = [ticket for ticket in made.tickets if ticket not in self.rows.tickets]
        if missing:
            return result("its updates are not kept (disk.keep_updates)")
        if base is None or (base.state_digests and base.state_slot is None):
            return result(f"version {base_number}, from which it was made, is not kept")
        needed = {ticket: self.update_path(ticket) for ticket in made.tickets}
        base_paths = [self.slot(VERSION, fragment, base.slot)]
        base_paths += [self.slot(STATE, fragment, base.state_slot)] if base.state_slot is not None else []
        plan = self.plan(number, made.rules)
        if plan is None or made.rules is None:
            return result(self.why_no_plan)
        if plan.values.accumulates:
            return result("the aggregator is a program of the run's own")
        for path in (*base_paths, *needed.values()):
            if not self.is_good(path):
                return result(f"{self.name(path)} is damaged")
        rows, total = [self.rows.tickets[ticket] for ticket in made.tickets], summary.get("total_weight") or 0.0
        before = self.rows.summary(fragment, base_number).get("total_weight") or total
        lost = [v for f, v, is_lost, _ in self.rows.history if f == fragment and is_lost]
        frozen = FrozenRound(
            fragment=fragment,
            number=number,
            base_version=base_number,
            version=version,
            updates=frozen_updates(plan, rows, base_number, lost),
            population_weight=total,
            population_scale=before / total if total else 1.0,
            from_zero=made.generation == base_number,
        )
        shapes = plan.fragments[fragment].shapes()
        with ExitStack() as stack:
            base_fd, *state_fd = [_open(path, stack) for path in base_paths]
            updates = {ticket: UpdateInput(_open(path, stack)) for ticket, path in needed.items()}
            digests = base.part_digests, base.state_digests
            files = RoundFiles(base_fd, state_fd[0] if state_fd else None, updates, *digests)
            state, delta = (None if each is None else _empty(each, stack) for each in (shapes.state, shapes.delta))
            out = NextFiles(_empty(shapes.version, stack), state, delta)
            again = make_version(plan, frozen, files, out, threading.Event())
            differing = [
                what
                for what, old, new in (
                    ("version", row.part_digests, again.part_digests),
                    ("outer state", row.state_digests, again.state_digests),
                )
                if tuple(old) != tuple(new)
            ]
            if not differing:
                self.name_bytes(self.slot(VERSION, fragment, row.slot), out.version)
                if row.state_slot is not None and out.state is not None:
                    self.name_bytes(self.slot(STATE, fragment, row.state_slot), out.state)
                return RoundResult(fragment, number, version, row.digest, "same", len(rows))
        why, now = f"its {' and '.join(differing)} got other digests", made_by()
        if (build := {key: made.rules.get(key, "of unknown version") for key in now}) != now:
            why += "; it was made by atoll {atoll} with torch {torch} on {cpu}, which may be why".format(**build)
        return RoundResult(fragment, number, version, row.digest, "differs", len(rows), why)

    def failed(self, row: tables.VersionRow, error: Exception) -> RoundResult:
        """Return the result of a round that could not be made, because of an error."""
        fragment, version = row.fragment, row.version
        why = f"it cannot be made: {reason(error) if isinstance(error, ValidationError) else error}"
        number, made = self.rows.summary(fragment, version).get("round", 0), self.rows.made[fragment, version]
        return RoundResult(fragment, number, version, row.digest, "differs", len(made.tickets), why)


def verify_state(state_dir: Path, tell: Callable[[str], object] = lambda text: None) -> Verified:
    """Compare every file of a state directory with its journal, and compute again the rounds with kept updates.

    A running server is not held up: what it deletes meanwhile is left out.

    Args:
        state_dir: the state directory.
        tell: called with what is done next.

    Raises:
        UsageError: the directory contains no run.
        StoreError: this user has no permission to read a file, this process may open no more files, or there is no
            space for temporary files.
        StateCorrupt: the journal cannot be read at all.
    """
    tell("the journal and the audit log")
    with open_state(state_dir) as state:
        found, rows = Verified(state.run().run_id), None
        found.changed += [Changed(state.path.name, each) for each in state.changed()]
        with suppress(ValueError, TypeError, KeyError):  # a value that is damaged
            rows = _Rows(state)
    try:
        found.entries, found.last_hash = compared_audit(state_dir)
    except StateCorrupt as error:
        found.changed.append(Changed(state.path.name, error.message))
    except (ValueError, TypeError, KeyError) as error:
        found.changed.append(Changed(state.path.name, f"a row cannot be read: {error}"))
    if rows is None:
        found.unchecked.append("versions and updates: the journal's rows about them cannot be read")
        return found
    of_journal = len(found.changed)
    with permitted(state_dir):
        check = _Check(state_dir, rows, found)
        if (in_swarm := check.settings["swarm.enabled"]) or not check.settings["disk.in_files"]:
            why = "in a swarm, the sites have them, and the server only their digests"
            found.unchecked.append(
                "tensors of versions and updates, and whether the rounds' results are right: "
                + (why if in_swarm else "the server of this run keeps none in files")
            )
            return found
        tell("versions and updates")
        check.files()
        rounds: list[tuple[RoundResult, set[object]]] = []
        for row in rows.versions:
            if (made := rows.made.get((row.fragment, row.version))) is not None and made.tickets:
                tell(f"the round of version {row.version}")
                try:
                    result = check.again(row)
                except (AtollError, ValueError, TypeError, KeyError, FileNotFoundError) as error:
                    result = check.failed(row, error)
                rounds.append((result, rows.needs(row)))
    with open_state(state_dir) as state:
        kept = _Rows(state).keys()
    ours = zip(found.changed[of_journal:], check.keys, strict=True)
    found.changed[of_journal:] = [changed for changed, key in ours if key in kept]
    found.rounds = [result for result, needs in rounds if result.result == "same" or needs <= kept]
    return found


def _keyed(digests: Sequence[bytes], key: object) -> dict[int, tuple[bytes, object]]:
    return {number: (digest, key) for number, digest in enumerate(digests)}


def _open(path: Path, stack: ExitStack) -> int:
    fd = open_own(path, mode=NAMED_FILE)
    stack.callback(os.close, fd)
    return fd


def _empty(shape: FileShape, stack: ExitStack) -> int:
    """Return the descriptor of a temporary file for what a pass writes."""
    fd = nameless_file(None)
    stack.callback(os.close, fd)
    allocate(fd, 0, max(shape.nbytes, 1))
    write_at(fd, memoryview(shape.header), 0)
    return fd


def _tensors(layout: Layout, ranges: Ranges) -> list[str]:
    """Return the names of the tensors of which a file has bytes in these ranges."""
    return [
        each.spec.name
        for each in layout.segments
        if any(each.offset < at + count and at < each.offset + each.nbytes for at, count in ranges)
    ]


def _spans(found: bytes, right: bytes, offset: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each range in which two byte strings differ. `offset` is that of their first byte."""
    length = min(len(found), len(right))
    differ = np.frombuffer(found[:length], np.uint8) != np.frombuffer(right[:length], np.uint8)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], differ, [False])).astype(np.int8)))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        yield offset + int(begin), int(end - begin)
