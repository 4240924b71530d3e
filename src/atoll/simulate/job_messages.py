"""What a simulation and the processes that train its sites tell each other, as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from atoll.aggregation.check_arriving_parts import PartStats
from atoll.protocol import messages
from atoll.store.journal_tables import VersionRow
from atoll.store.versions import Pin

ATTEMPTS = 3
"""A site fails once so many processes have ended while they trained it."""
START_S = 120.0
"""A process has to load the script within this time."""


class Beginning(BaseModel):
    """What a process must know before it trains a site.

    Attributes:
        script: the user's code, as `name_of` gives it.
        arguments: what it finds in `sys.argv`.
        path: where it may import from.
        info, schema_message: of the run, as its server tells every worker.
        threads: of torch, in each process.
        seed: of the random numbers that simulated sites draw.
        sites: folder of what sites keep between their rounds.
    """

    script: str
    arguments: tuple[str, ...]
    path: tuple[str, ...]
    info: messages.RunInfo
    schema_message: messages.SchemaMessage
    threads: int
    seed: int
    sites: str


@dataclass(frozen=True)
class SiteRound:
    """What a site is told of its round.

    Attributes:
        outcomes: of the updates that its files may speak of.
        counts: whether an update of it counts in the run already.
    """

    site: str
    ticket: messages.Ticket
    outcomes: tuple[messages.Outcome, ...]
    counts: bool

    def to_json(self) -> dict[str, Any]:
        """Return it for a process."""
        outcomes = [each.model_dump() for each in self.outcomes]
        return {"site": self.site, "ticket": self.ticket.model_dump(), "outcomes": outcomes, "counts": self.counts}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> SiteRound:
        """Return what `to_json` gave."""
        outcomes = tuple(messages.Outcome(**each) for each in told["outcomes"])
        return cls(told["site"], messages.Ticket(**told["ticket"]), outcomes, told["counts"])


@dataclass(eq=False)
class Job:
    """The round of one simulated site.

    Attributes:
        base: the version to train from, pinned while a process trains from it.
        spool_fd: where the update goes; belongs to the store.
        update_bytes: of an update.
        release: gives the spool back once no process writes it.
        attempts: how many processes have begun it and have ended.
    """

    round: SiteRound
    base: Pin[VersionRow]
    spool_fd: int
    update_bytes: int
    release: Callable[[], object]
    attempts: int = 0

    @property
    def site(self) -> str:
        """Name of the site that is to be trained."""
        return self.round.site

    @property
    def ticket(self) -> messages.Ticket:
        """The ticket of its round, which names the version to train from."""
        return self.round.ticket


@dataclass(frozen=True)
class Answer:
    """The result of a job.

    Attributes:
        update: what it submitted; None where it raised, or returned without an update.
        stats: of each part of the update, which is in the spool.
        error: the last line of what it raised; empty if it raised nothing.
        trace: the whole traceback.
        bytes_down: of tensors that it has loaded.
        stuck: it did not return, and its process was ended because other sites wait.
        disk: `error` is about a disk that is full or fails, not about this site.
    """

    update: messages.Complete | None = None
    stats: tuple[PartStats, ...] = ()
    error: str = ""
    trace: str = ""
    bytes_down: int = 0
    stuck: bool = False
    disk: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it for the simulation."""
        update = self.update.model_dump() if self.update is not None else None
        stats = [(each.digest.hex(), each.sumsq.hex(), each.bad) for each in self.stats]
        return {**vars(self), "update": update, "stats": stats}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Answer:
        """Return what `to_json` gave."""
        update = messages.Complete(**told["update"]) if told["update"] is not None else None
        stats = tuple(PartStats(bytes.fromhex(d), float.fromhex(s), bad) for d, s, bad in told["stats"])
        return cls(**{**told, "update": update, "stats": stats})


class Busy(Protocol):
    """A process that trains simulated sites. `since_s`: when it began its present one."""

    since_s: float


B = TypeVar("B", bound=Busy)


def overdue(busy: Iterable[B], longer_s: float) -> B | None:
    """Return the process that has trained one site for longest, if that is longer than `longer_s`."""
    longest = min(busy, key=lambda each: each.since_s, default=None)
    return longest if longest is not None and time.monotonic() - longest.since_s > longer_s else None


class Heard(Protocol):
    """Hears what the processes of an engine answer, in any thread."""

    def answered(self, job: Job, answer: Answer) -> None:
        """A job has ended, with this answer."""
        ...

    def failed_to_go_on(self, error: Exception) -> None:
        """The engine cannot go on."""
        ...


class Engine(Protocol):
    """Processes that train simulated sites, each one at a time."""

    name: str

    @property
    def capacity(self) -> int:
        """Jobs that it takes at a time: more than there are processes, so that none waits for the next job."""
        ...

    def start(self, beginning: Beginning, heard: Heard) -> None:
        """Start the processes and let them load the script.

        Raises:
            ConfigError: the script cannot be loaded, or the engine cannot be used here.
            RunFailed: a process ended before it began.
        """
        ...

    def put(self, job: Job) -> None:
        """Train it soon, and report the answer. When its process ends, another one begins the job again."""
        ...

    def free(self, longer_s: float) -> None:
        """If jobs wait, end the process that has trained one site for longest, and for longer than this.

        The answer of that job is `stuck`; another process takes its place.
        """
        ...

    def pids(self) -> list[int]:
        """Return the processes on this machine."""
        ...

    def close(self) -> None:
        """End every process, and report no further answer. Idempotent."""
        ...
