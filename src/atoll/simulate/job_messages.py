"""The messages between a simulation and the processes that train its sites. They travel as JSON."""

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
    """The first message to a process: all that the process needs before it trains a site.

    Attributes:
        script: the name of the user's code, as `name_of` returns it.
        arguments: the script's arguments, which it finds in `sys.argv`.
        path: folders to import from; they come first in `sys.path`.
        info: the run, as the server describes it to every worker.
        schema_message: the schema of the model, as the server sends it to every worker.
        threads: number of torch's threads in each process.
        seed: the run's seed, for the random numbers of simulated sites.
        sites: the folder that holds a folder of local state for each site.
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
    """One round of one simulated site, as the process gets it.

    Attributes:
        site: name of the site.
        ticket: the site's ticket for the round.
        outcomes: outcomes of the earlier updates that the site's local state may depend on.
        counts: whether an earlier update of this site has been accepted in the run.
    """

    site: str
    ticket: messages.Ticket
    outcomes: tuple[messages.Outcome, ...]
    counts: bool

    def to_json(self) -> dict[str, Any]:
        """Return this round as JSON values, for a process."""
        outcomes = [each.model_dump() for each in self.outcomes]
        return {"site": self.site, "ticket": self.ticket.model_dump(), "outcomes": outcomes, "counts": self.counts}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> SiteRound:
        """Return the round that `to_json` encoded."""
        outcomes = tuple(messages.Outcome(**each) for each in told["outcomes"])
        return cls(told["site"], messages.Ticket(**told["ticket"]), outcomes, told["counts"])


@dataclass(eq=False)
class Job:
    """The round of one simulated site, as the engine handles it.

    Attributes:
        round: the message for the process.
        base: the version to train from, pinned while a process trains from it.
        spool_fd: the file descriptor to which the update is written; belongs to the store.
        update_bytes: size of an update, in bytes.
        release: gives the spool back; called when no process writes to it any more.
        attempts: number of processes that have begun this job and ended before they answered.
    """

    round: SiteRound
    base: Pin[VersionRow]
    spool_fd: int
    update_bytes: int
    release: Callable[[], object]
    attempts: int = 0

    @property
    def site(self) -> str:
        """Name of the site to train."""
        return self.round.site

    @property
    def ticket(self) -> messages.Ticket:
        """The ticket of the round, which names the version to train from."""
        return self.round.ticket


@dataclass(frozen=True)
class Answer:
    """The result of a job.

    Attributes:
        update: the message with which the site submitted; None if the script raised or returned without an update.
        stats: statistics of each part of the update. The update itself is in the spool.
        error: the last line of the script's error; empty if the script raised nothing.
        trace: the whole traceback of that error.
        bytes_down: bytes of tensors that the site has loaded.
        stuck: whether the process was killed because the script did not return while other sites waited.
        disk: whether `error` is about a full or failing disk, and not about this site.
    """

    update: messages.Complete | None = None
    stats: tuple[PartStats, ...] = ()
    error: str = ""
    trace: str = ""
    bytes_down: int = 0
    stuck: bool = False
    disk: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return this answer as JSON values, for the simulation."""
        update = self.update.model_dump() if self.update is not None else None
        stats = [(each.digest.hex(), each.sumsq.hex(), each.bad) for each in self.stats]
        return {**vars(self), "update": update, "stats": stats}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Answer:
        """Return the answer that `to_json` encoded."""
        update = messages.Complete(**told["update"]) if told["update"] is not None else None
        stats = tuple(PartStats(bytes.fromhex(d), float.fromhex(s), bad) for d, s, bad in told["stats"])
        return cls(**{**told, "update": update, "stats": stats})
