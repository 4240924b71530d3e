"""The facts of a workflow: what its function has asked its controller, and what it has got, in order.

    answers/ID    the payload of an answer, as long as a fact names it

A restarted server runs the function again, and gives it these facts (`server/tasks/workflow_journal`). They are kept
until the workflow ends, or until they take more than `max_bytes`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from atoll.errors import StateCorrupt
from atoll.posix import file_error, open_own, own_folder, usable
from atoll.runtime import failpoint
from atoll.store.journal import Journal
from atoll.store.journal_tables import FACTS, FactRow
from atoll.tensors.reference import new_id

LOG = logging.getLogger("atoll.server")

ROW_BYTES = 200
"""What a row takes besides its texts, about."""
RUN_BYTES = 2**20


class WorkflowFacts:
    """The facts of the workflow that runs now.

    Attributes:
        max_bytes: most bytes that they may take, with the files of answers; 0: none are kept.
        why_dropped: why the facts are no longer kept, for the status; empty if they are.
    """

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal, self._folder = journal, folder
        self._place, self._taken_bytes = -1, 0
        self.max_bytes, self.why_dropped = 0, ""

    @property
    def kept(self) -> bool:
        """Whether facts are kept now."""
        return self._place >= 0 and self.max_bytes > 0 and not self.why_dropped

    def begin(self, place: int, name: str) -> None:
        """Begin or continue with a workflow.

        Args:
            place: position of the workflow in the run's list.
            name: name of the workflow, for the log.
        """
        self._place, self.why_dropped = place, ""
        if dropped := self._select("AND kind = 'dropped'"):
            LOG.warning("the workflow %s begins again from its beginning: %s", name, dropped[0].value_json)
            self.forget()
        files, self._taken_bytes = set[str](), 0
        for row in self._select():
            files.add(row.file)
            self._taken_bytes += _bytes_of(row)
        with usable(self._folder):
            for file in set(os.listdir(self._folder)) - files if self._folder.is_dir() else ():
                (self._folder / file).unlink(missing_ok=True)

    def end(self) -> None:
        """Keep no more facts from now on; those that are there stay."""
        self._place = -1

    # -- reading

    def calls(self) -> tuple[list[FactRow], set[int]]:
        """Return the calls, and the numbers of those calls that are over."""
        rows = self._journal.rows(
            "SELECT of_call FROM workflow_facts WHERE place = ? AND kind = 'end' ORDER BY number", self._place
        )
        return self._select("AND kind = 'call' ORDER BY number"), {number for (number,) in rows}

    def of_call(self, number: int) -> list[FactRow]:
        """Return what came of a call: answers, then its end, in order."""
        return self._select("AND of_call = ? AND kind != 'call' ORDER BY number", number)

    def answers(self) -> list[FactRow]:
        """Return all answers."""
        return self._select("AND kind = 'answer' ORDER BY number")

    def open(self, row: FactRow) -> int:
        """Return a descriptor of the file with an answer's payload; the caller closes it.

        Raises:
            StateCorrupt: the file is missing, or has another size.
        """
        path = self._folder / row.file
        try:
            fd = open_own(path)
        except OSError as error:
            raise StateCorrupt(f"The answer of a site in {path} cannot be read: {error.strerror}.", ANEW) from None
        if (nbytes := os.fstat(fd).st_size) != row.nbytes:
            os.close(fd)
            raise StateCorrupt(f"The answer of a site in {path} has {nbytes} bytes instead of {row.nbytes}.", ANEW)
        return fd

    def _select(self, where: str = "", *values: Any) -> list[FactRow]:
        return self._journal.select(FACTS, f"WHERE place = ? {where}", self._place, *values)

    # -- writing

    def keep(self, fd: int, linked: Path | None) -> str:
        """Keep the file of an answer, which no fact names yet. Return its name. Any thread may call it.

        Args:
            fd: descriptor of the file.
            linked: path of this file; None: it has none, so it is copied.

        Raises:
            DiskFull, StoreError: the disk is full, or fails.
        """
        path = self._folder / new_id()
        try:
            own_folder(self._folder, self._folder.parent)
            try:
                if linked is None:
                    raise FileNotFoundError
                os.link(linked, path)
            except OSError:  # also a disk without hard links
                _copy(fd, path)
            if self._journal.durability == "power":
                self._journal.sync(fd, str(path))
                self._journal.sync_folder(self._folder)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise file_error(error, path) from error
        return path.name

    def discard(self, file: str) -> None:
        """Remove a file from `keep` that no fact names."""
        if file:
            (self._folder / file).unlink(missing_ok=True)

    def add(self, kind: Any, of_call: int = -1, **values: Any) -> int:
        """Record a fact, and return its number. If facts are not kept, do nothing. Joins the outer transaction.

        Args:
            kind, of_call: as in `FactRow`; a call needs no `of_call`.
            values: further fields of the row.
        """
        if not self.kept:
            return -1
        with self._journal.transaction():
            newest = self._journal.value("SELECT max(number) FROM workflow_facts WHERE place = ?", self._place)
            number = 0 if newest is None else int(newest) + 1
            row = FactRow(self._place, number, number if of_call < 0 else of_call, kind, **values)
            if self._taken_bytes + _bytes_of(row) > self.max_bytes:
                self.discard(row.file)
                self.drop(
                    f"its answers and other facts take more than {self.max_bytes} bytes (disk.workflow_max_bytes)"
                )
                return -1
            failpoint("workflow.before")
            self._journal.insert(FACTS, row)
            self._journal.after_commit(lambda: self._added(row))
        return number

    def _added(self, row: FactRow) -> None:
        self._taken_bytes += _bytes_of(row)
        failpoint("workflow.fact")

    def forget(self, then: FactRow | None = None) -> None:
        """Remove all facts of the workflow, and their files. Then insert a row, if one is given."""
        with self._journal.transaction():
            files = [row.file for row in self._select("AND file != ''")]
            self._journal.execute("DELETE FROM workflow_facts WHERE place = ?", self._place)
            if then is not None:
                self._journal.insert(FACTS, then)
            self._journal.after_commit(lambda: self._forgotten(files))

    def _forgotten(self, files: list[str]) -> None:
        self._taken_bytes = 0
        for file in files:
            (self._folder / file).unlink(missing_ok=True)

    def make_room(self, why: str) -> bool:
        """Drop the facts if they have files, because the disk has too little space. Return whether they had."""
        if not self.kept or not self._select("AND file != '' LIMIT 1"):
            return False
        self.drop(f"the disk has too little space. {why.rstrip('.')}")
        return True

    def drop(self, why: str) -> None:
        """Keep the facts no longer: the run goes on, but a restart begins the workflow from its beginning."""
        why = f"what it has got is no longer kept: {why}"
        row = FactRow(self._place, 0, 0, "dropped", value_json=why)
        self.forget(then=row)
        self.why_dropped = f"A restart of the server would begin the workflow from its beginning: {why}."
        LOG.warning("%s To go on after a restart, raise the setting, or free disk space.", self.why_dropped)


ANEW = "Restore the state directory from a backup, or begin anew with --fresh."


def _bytes_of(row: FactRow) -> int:
    return ROW_BYTES + len(row.asked_json) + len(row.value_json) + row.nbytes


def _copy(fd: int, path: Path) -> None:
    with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as target:
        offset = 0
        while run := os.pread(fd, RUN_BYTES, offset):
            target.write(run)
            offset += len(run)
