"""What happens to a run: the inputs of the round machine. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A process of `site` asks to take part; an older lease of the same site ends here."""

    site: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The holder of `lease` deregisters; `error` where its training failed."""

    site: str
    lease: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class WorkerEnds:
    """The holder of `lease` submits nothing more, and stays for the results of what it has submitted."""

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """The holder of `lease` gave a sign of life: a heartbeat, or bytes of a part."""

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class TicketRequested:
    """The holder of `lease` asks for its ticket of the open round of `fragment`."""

    site: str
    lease: int
    fragment: int


@dataclass(frozen=True, slots=True)
class UpdateAccepted:
    """The update of `ticket` is in the journal.

    Between `machine.may_submit` and the insert no other event may be handled: from the insert on, it counts. `order` is
    its place in the journal among all that were accepted.
    """

    ticket: int
    order: int = 0


@dataclass(frozen=True, slots=True)
class UpdateRefused:
    """The update of `ticket` cannot count: not finite, absurd norm, wrong weight. The journal says so."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    """The head of `fragment` moved to `version`: the next number, or a later one where versions were lost.

    Args:
        value: the tracked metric, as the workers of the round measured it; None where none reported it.
    """

    fragment: int
    version: int
    value: float | None = None


@dataclass(frozen=True, slots=True)
class AggregatorLost:
    """The worker that reduced the round of `fragment` has gone, and what it had collected with it: swarm runs only."""

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing else happened; deadlines and silences are judged."""


Event = (
    WorkerJoined
    | WorkerLeft
    | WorkerEnds
    | WorkerSeen
    | TicketRequested
    | UpdateAccepted
    | UpdateRefused
    | VersionCommitted
    | AggregatorLost
    | TimePassed
)
