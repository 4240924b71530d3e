"""The matrix of an evaluation while it is filled: by one thread for each site, in whatever order models come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from atoll.protocol.task_messages import Cell
from atoll.protocol.task_messages import EvaluatedModel as Row
from atoll.server.coordinator.run import Run
from atoll.server.tasks import workflow_controller

__all__ = ["Board", "Row", "Source"]

LOOK_S = 0.2
RETURN_S = 10.0
"""For so long at least a site that has gone is waited for, once: a DiLoCo loop leaves before its script joins again."""


@dataclass(eq=False)
class Source:
    """A model, and where it is to be had.

    Attributes:
        owner: the site that serves it; empty: the server.
        place: what sites are told; None while it is not known, or where there is none.
        through_server: its owner has put it at the server.
        moving: held by who has it put elsewhere.
    """

    row: Row
    owner: str = ""
    place: Any = None
    settled: bool = False
    through_server: bool = False
    moving: threading.Lock = field(default_factory=threading.Lock)


class Board:
    """Thread-safe.

    Args:
        sites: its columns.
        look: called while something is waited for; ends the thread by what it raises.

    Attributes:
        hung: site → why it was given up, as long as nothing of it moves.
    """

    def __init__(self, sites: list[str], look: Callable[[], None] = lambda: None) -> None:
        self.sites, self.sources, self._look = sites, list[Source](), look
        self.hung: dict[str, str] = {}
        self._signs: dict[str, workflow_controller.Signs] = {}
        self._away_since_s: dict[str, float] = {}
        self._cells: dict[tuple[str, str], Cell] = {}
        self._news = threading.Condition()
        self._working, self._waiting = set(sites), set[str]()

    def add(self, source: Source) -> None:
        """A further row."""
        source.settled = source.settled or not source.owner
        self.sources.append(source)

    def source_of(self, site: str) -> Source:
        """The model of a site."""
        return next(source for source in self.sources if source.owner == site)

    def settle(self, source: Source, place: Any, error: str) -> None:
        """It is known where a model is, or why nowhere."""
        with self._news:
            source.place, source.settled = place, True
            digest = getattr(place, "digest", "") or (place.get("digest", "") if isinstance(place, dict) else "")
            source.row = source.row.model_copy(update={"error": error, "digest": str(digest)[:64]})
            self._news.notify_all()

    def next_for(self, site: str) -> Source | None:
        """A model that the site has not evaluated yet; waits for those that are to come. None: there is no other.

        Sites begin at different rows, so that they do not all pull one model at a time.
        """
        begin = self.sites.index(site)
        while True:
            with self._news:
                order = self.sources[begin:] + self.sources[:begin]
                left = [source for source in order if (source.row.name, site) not in self._cells]
                for source in [source for source in left if source.settled and source.row.error]:
                    cell = Cell(model=source.row.name, site=site, error=source.row.error)
                    self._cells[source.row.name, site] = cell
                    left.remove(source)
                ready = next((source for source in left if source.settled), None)
                if ready is not None or not left:
                    return ready
                with self._marked(site):
                    self._look()
                    self._news.wait(LOOK_S)  # whose it is settles it, or leaves

    def wait(self, site: str, until: Callable[[], bool]) -> bool:
        """Wait for a site to come back; False where all wait, and nobody is at work, and it is away for `RETURN_S`."""
        with self._news, self._marked(site):
            end_s = self._away_since_s.setdefault(site, time.monotonic()) + RETURN_S
            while not until():
                self._look()
                if self._working <= self._waiting and time.monotonic() >= end_s:
                    return until()
                self._news.wait(LOOK_S)
            del self._away_since_s[site]
            return True

    @contextmanager
    def _marked(self, site: str) -> Iterator[None]:
        self._waiting.add(site)
        self._news.notify_all()
        try:
            yield
        finally:
            self._waiting.discard(site)

    def leave(self, site: str) -> None:
        """The site's column is over: what it has not settled never is."""
        with self._news:
            for source in self.sources:
                if source.owner == site and not source.settled:
                    source.settled = True
                    source.row = source.row.model_copy(update={"error": "the site gave no model"})
            self._working.discard(site)
            self._news.notify_all()

    def put(self, cell: Cell) -> None:
        with self._news:
            self._cells[cell.model, cell.site] = cell
            self._news.notify_all()

    def hang(self, run: Run, site: str, why: str) -> None:
        """The site was given up; until it moves again it is asked for nothing."""
        self._signs[site] = workflow_controller.of_site(run, site)
        self.hung[site] = why

    def moved(self, run: Run, site: str) -> bool:
        """Whether a site that was given up has shown something since."""
        return workflow_controller.of_site(run, site) != self._signs.get(site)

    @property
    def count(self) -> int:
        """Of all cells."""
        return len(self.sources) * len(self.sites)

    @property
    def done(self) -> int:
        with self._news:
            return len(self._cells)

    def rows(self) -> list[Row]:
        with self._news:
            return [source.row for source in self.sources]

    def cells(self) -> list[Cell]:
        """In the order of rows and columns."""
        with self._news:
            keys = [(source.row.name, site) for source in self.sources for site in self.sites]
            return [self._cells[key] for key in keys if key in self._cells]
