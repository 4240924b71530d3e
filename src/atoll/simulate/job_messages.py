"""What a conductor and the processes that train tell each other: plain values, as JSON has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from atoll.aggregation.check_arriving_parts import PartStats
from atoll.protocol import messages
from atoll.store.journal_tables import VersionRow
from atoll.store.versions import Pin

ATTEMPTS = 3
"""Processes that may end under one simulated site, before it is the one that fails."""
START_S = 120.0
"""Until a process has loaded the script."""


@dataclass(frozen=True)
class Beginning:
    """What a process must know before it trains a worker.

    Attributes:
        script: the user's code, as `name_of` gives it.
        arguments: what it finds in `sys.argv`.
        path: where it may import from.
        info, schema: of the run, as its server tells every worker.
        threads: of torch, in each process.
        seed: of the random numbers that simulated sites draw.
        sites: folder of what sites keep between their rounds.
    """

    script: str
    arguments: tuple[str, ...]
    path: tuple[str, ...]
    info: messages.RunInfo
    schema: messages.SchemaMessage
    threads: int
    seed: int
    sites: str

    def to_json(self) -> dict[str, Any]:
        """For a process."""
        info, schema = self.info.model_dump(mode="json"), self.schema.model_dump(mode="json")
        return {**vars(self), "info": info, "schema": schema}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Beginning:
        """What `to_json` gave."""
        info, schema = messages.RunInfo(**told["info"]), messages.SchemaMessage(**told["schema"])
        lists = {key: tuple(told[key]) for key in ("arguments", "path")}
        return cls(**{**told, **lists, "info": info, "schema": schema})


@dataclass(eq=False)
class Job:
    """One simulated site's round.

    Attributes:
        outcomes: of updates that its files may speak of.
        counts: whether an update of it counts in the run already.
        base: the version to train from, pinned while a worker trains from it.
        spool_fd: where the update goes; belongs to the store.
        update_bytes: of an update.
        release: gives the spool back; it is no longer written.
        attempts: processes that have begun it and have ended.
    """

    site: str
    ticket: messages.Ticket
    outcomes: tuple[messages.Outcome, ...]
    counts: bool
    base: Pin[VersionRow]
    spool_fd: int
    update_bytes: int
    release: Callable[[], object]
    attempts: int = 0

    def to_json(self) -> dict[str, Any]:
        """For a process, without its files."""
        return {
            "site": self.site,
            "ticket": self.ticket.model_dump(),
            "outcomes": [each.model_dump() for each in self.outcomes],
            "counts": self.counts,
        }


def job_of(told: dict[str, Any]) -> tuple[str, messages.Ticket, list[messages.Outcome], bool]:
    """What `Job.to_json` gave."""
    outcomes = [messages.Outcome(**each) for each in told["outcomes"]]
    return told["site"], messages.Ticket(**told["ticket"]), outcomes, told["counts"]


@dataclass(frozen=True)
class Answer:
    """What became of a job.

    Attributes:
        update: what it submitted; None where it raised, or returned without an update.
        stats: of each part of the update, which is in the spool.
        error: the last line of what it raised; empty where it did not.
        trace: all of it.
        bytes_down: of tensors that it has loaded.
        stuck: whether it did not return, and its process was ended for those that wait.
        disk: whether `error` is of a disk that is full or fails: no fault of this simulated site's.
    """

    update: messages.Complete | None = None
    stats: tuple[PartStats, ...] = ()
    error: str = ""
    trace: str = ""
    bytes_down: int = 0
    stuck: bool = False
    disk: bool = False

    def to_json(self) -> dict[str, Any]:
        """From a process."""
        update = self.update.model_dump() if self.update is not None else None
        stats = [(each.digest.hex(), each.sumsq.hex(), each.bad) for each in self.stats]
        return {**vars(self), "update": update, "stats": stats}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Answer:
        """What `to_json` gave."""
        update = messages.Complete(**told["update"]) if told["update"] is not None else None
        stats = tuple(PartStats(bytes.fromhex(d), float.fromhex(s), bad) for d, s, bad in told["stats"])
        return cls(**{**told, "update": update, "stats": stats})


class Busy(Protocol):
    """A process that trains simulated sites; `since_s` is when it began with the one that it has."""

    since_s: float


B = TypeVar("B", bound=Busy)


def overdue(busy: Iterable[B], longer_s: float) -> B | None:
    """The process that has been at one for longest, and for longer than this."""
    longest = min(busy, key=lambda each: each.since_s, default=None)
    return longest if longest is not None and time.monotonic() - longest.since_s > longer_s else None


class Heard(Protocol):
    """Told what an engine's processes say, by whichever thread."""

    def answered(self, job: Job, answer: Answer) -> None:
        """A job is over, whatever became of it."""
        ...

    def failed_to_go_on(self, error: Exception) -> None:
        """The engine cannot go on."""
        ...


class Engine(Protocol):
    """Processes that train simulated sites, each one at a time."""

    name: str

    @property
    def capacity(self) -> int:
        """Jobs that it takes at a time: a few more than there are processes, so that none waits for the next."""
        ...

    def start(self, beginning: Beginning, heard: Heard) -> None:
        """Start the processes and let them load the script.

        Raises:
            ConfigError: the script cannot be loaded, or the engine cannot be used here.
            RunFailed: a process ended before it began.
        """
        ...

    def put(self, job: Job) -> None:
        """Train it soon; the answer is heard. When its process ends, another one begins the job again."""
        ...

    def free(self, longer_s: float) -> None:
        """End the process that has trained one simulated site for longest, and for longer than this, if others wait.

        The answer is heard as `stuck`; another process takes its place.
        """
        ...

    def pids(self) -> list[int]:
        """The processes, those of this machine."""
        ...

    def close(self) -> None:
        """End every process, whatever it does; nothing is heard any more. Idempotent."""
        ...
