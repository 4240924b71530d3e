"""What a simulation and the processes that train its sites tell each other, as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from atoll.aggregation.check_arriving_parts import PartStats
from atoll.protocol import messages
from atoll.store.journal_tables import VersionRow
from atoll.store.versions import Pin


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
