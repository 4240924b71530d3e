"""Events of a run, and effects: the actions that the round machine requests. Values only.

Effects that are a `Decision` go to the journal, and `machine.restore` restores the state from them. They may be
written one by one, in order: if a crash comes between two, `restore` completes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.rounds.early_stopping import Measured


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A process of `site` joins. An older lease of the site becomes void."""

    site: str


@dataclass(frozen=True, slots=True)
class Leased:
    """Base class of events from the holder of `lease`. They are refused if `site` has a newer lease or is not alive."""

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class WorkerLeft(Leased):
    """The holder of `lease` deregisters. If its training failed, `error` says why."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class WorkerEnds(Leased):
    """The holder of `lease` submits no more updates, but stays for the results of its submitted updates."""


@dataclass(frozen=True, slots=True)
class WorkerSeen(Leased):
    """The holder of `lease` gave a sign of life: a heartbeat, or a part of an update."""


@dataclass(frozen=True, slots=True)
class TicketRequested(Leased):
    """The holder of `lease` requests its ticket of the open round of `fragment`."""

    fragment: int


@dataclass(frozen=True, slots=True)
class UpdateAccepted:
    """The update of `ticket` is in the journal. `order` is its position among all accepted updates.

    Handle no other event between `waiting.may_submit` and the insert into the journal.
    """

    ticket: int
    order: int = 0


@dataclass(frozen=True, slots=True)
class UpdateRefused:
    """The update of `ticket` cannot count: it is not finite, its norm is too large, or its weight is wrong.

    The journal has the refusal already.
    """

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    """The head of `fragment` moved to `version`.

    Args:
        fragment: index of the fragment.
        version: the new head: the next number, or a later number if versions were lost.
        value: tracked metric, measured by the workers of the round; None if no worker reported it.
    """

    fragment: int
    version: int
    value: float | None = None


@dataclass(frozen=True, slots=True)
class AggregatorLost:
    """The aggregating worker of `fragment` and its collected updates are lost. Only in swarms."""

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingBegins:
    """All workflows that come before the rounds have ended. The first round opens when all sites have joined."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed: check the deadlines of rounds and the silence of workers."""


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
    | TrainingBegins
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Effect:
    """Base class of effects: actions that the round machine requests."""


@dataclass(frozen=True, slots=True)
class Decision(Effect):
    """Base class of effects for the journal.

    Write them before you answer a request and before you handle the next event.
    """


@dataclass(frozen=True, slots=True)
class LeaseGranted(Decision):
    """`site` takes part with `lease`. Every earlier lease of the site is void."""

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class LeaseEnded(Decision):
    """`site` no longer takes part. `why` is `dead`, `left` or `failed`.

    Parts of an update that was not acknowledged may be dropped. The open ticket of the site stays until its round
    closes.
    """

    site: str
    lease: int
    why: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRefused(Effect):
    """The sender's lease is void. The sender may join again if it was not replaced by a newer one (`superseded`)."""

    site: str
    reason: str
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class RoundOpened(Decision):
    """The round from `base_version` of `fragment` is open and expects these sites."""

    fragment: int
    base_version: int
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpectedChanged(Decision):
    """The expected sites of an open round have changed, for example after a death, a refusal or a return."""

    fragment: int
    base_version: int
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TicketIssued(Decision):
    """`site` gets this ticket. If the ticket was issued before and is still open, `new` is False."""

    site: str
    ticket: int
    fragment: int
    base_version: int
    new: bool


FINISHED = "finished"
"""Reason of a `TicketWithheld`: there is no further round."""


ENDS = "it submits nothing more"
"""Reason of a `TicketWithheld`: the site has announced that it submits no more updates (`WorkerEnds`)."""


@dataclass(frozen=True, slots=True)
class TicketWithheld(Effect):
    """`site` gets no ticket now.

    `reason` says why: the site's update is accepted, no round is open, or the site takes part from the next round on.
    It can also be `FINISHED` or `ENDS`.
    """

    site: str
    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class TicketsExpired(Decision):
    """These tickets have expired. Their spooled parts are dropped."""

    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundReopened(Decision):
    """The round that starts from `base_version` is open again, with these tickets. Their sites submit updates again."""

    fragment: int
    base_version: int
    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundClosed(Decision):
    """The round is closed. Reduce exactly the updates of these tickets, in this order (by site name)."""

    fragment: int
    base_version: int
    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BestFound(Effect):
    """The measured version is the best so far. Keep it until a better version is found.

    The journal needs no entry for this, because the best version follows from the metrics in the journal.
    """

    measured: Measured


@dataclass(frozen=True, slots=True)
class RunFinished(Decision):
    """The last round is committed. Inform the workers and export the result."""


@dataclass(frozen=True, slots=True)
class Woken(Effect):
    """Requests that wait for `fragment` should check its state again."""

    fragment: int
