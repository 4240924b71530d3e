"""Input and output of the round machine as plain values: events of a run, and effects, the actions to take.

The ledger writes effects of the class `Decision` to the journal in one transaction with the row of the event itself,
and carries all effects out after the commit. From the journal, `machine.restore` restores the state after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.rounds.early_stopping import Measurement


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A process of `site` joins the run. A lease that the site already had becomes void.

    A site that the admin has not `invited` takes the room of others when the run has its most sites.
    """

    site: str
    invited: bool = False


@dataclass(frozen=True, slots=True)
class Leased:
    """Base class of events from the process that holds `lease` of `site`.

    Such an event is refused if the site has a newer lease or is not alive.
    """

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class WorkerLeft(Leased):
    """The process that holds `lease` leaves the run. If its training failed, `error` is the reason."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class WorkerEnds(Leased):
    """The process that holds `lease` submits no more updates, but waits for the results of its submitted ones."""


@dataclass(frozen=True, slots=True)
class WorkerSeen(Leased):
    """The process that holds `lease` gave a sign of life: a heartbeat or any other request."""


@dataclass(frozen=True, slots=True)
class TicketRequested(Leased):
    """The process that holds `lease` requests its site's ticket for the open round of `fragment`."""

    fragment: int


@dataclass(frozen=True, slots=True)
class UpdateAccepted:
    """The update of `ticket` is accepted. `order` is its position among all accepted updates."""

    ticket: int
    order: int = 0


@dataclass(frozen=True, slots=True)
class RefusedUpdate:
    """The update of `ticket` is refused, for example because it is not finite or its norm is too large."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class SatOut:
    """The site of `ticket` sits out the round: it sends no update."""

    ticket: int


@dataclass(frozen=True, slots=True)
class VersionEvaluated:
    """The server has evaluated the version that a round made.

    Args:
        version: the version.
        round: number of the round.
        value: tracked metric; None if it is not one of the evaluation, or the evaluation has no such value.
    """

    version: int
    round: int
    value: float | None = None


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    """A new version of `fragment` is made. It becomes the head, the newest version.

    Args:
        fragment: index of the fragment (part of the model); 0 if the model is not divided.
        version: number of the new version: the next number, or a later one if versions were lost.
        value: tracked metric, measured by the workers of the round; None if no worker reported it.
    """

    fragment: int
    version: int
    value: float | None = None


@dataclass(frozen=True, slots=True)
class AggregatorLost:
    """The worker that aggregates `fragment` is lost, with the updates that it has collected. Only in swarms."""

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateLost:
    """The algorithm's state at a site and that of the newest version do not fit together. Both must begin anew.

    Without effect unless a round is open: while a round is aggregated, its version comes first.
    """

    why: str


@dataclass(frozen=True, slots=True)
class TrainingBegins:
    """All workflows that come before the rounds have ended. The first round opens once enough sites have joined."""


@dataclass(frozen=True, slots=True)
class RunPaused:
    """The admin pauses the run: no round opens and no ticket is issued, but updates under way are still accepted."""


@dataclass(frozen=True, slots=True)
class RunResumed:
    """The admin lets a paused run go on."""


@dataclass(frozen=True, slots=True)
class RunStopped:
    """The admin ends the run: after the current round; or at once (`now`), without the updates of an open round."""

    now: bool = False


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed.

    Workers that were silent for too long are declared dead. Rounds past their deadline are closed if they have enough
    updates.
    """


Event = (
    WorkerJoined
    | WorkerLeft
    | WorkerEnds
    | WorkerSeen
    | TicketRequested
    | UpdateAccepted
    | RefusedUpdate
    | SatOut
    | VersionCommitted
    | VersionEvaluated
    | AggregatorLost
    | StateLost
    | TrainingBegins
    | RunPaused
    | RunResumed
    | RunStopped
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Effect:
    """Base class of effects: actions that the round machine requests."""


@dataclass(frozen=True, slots=True)
class Decision(Effect):
    """Base class of effects that the ledger writes to the journal, before any request is answered."""


@dataclass(frozen=True, slots=True)
class LeaseGranted(Decision):
    """The process that holds `lease` has joined and may act for `site`. Every earlier lease of the site is void."""

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class LeaseEnded(Decision):
    """`site` no longer takes part. `why` is `dead`, `left` or `failed`.

    The parts of an update that the server has not acknowledged may be deleted. An open ticket of the site stays valid
    until its round closes.
    """

    site: str
    lease: int
    why: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SitesForgotten(Decision):
    """The run forgets these sites, which left without an update, to make room for a new one."""

    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseRefused(Effect):
    """The sender's lease is void. The sender may join again unless its site has a newer process (`superseded`)."""

    site: str
    reason: str
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class RoundOpened(Decision):
    """A round that trains from `base_version` of `fragment` is open, and waits for updates of the `expected` sites."""

    fragment: int
    base_version: int
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpectedChanged(Decision):
    """The expected sites of an open round have changed, for example because a site died or rejoined."""

    fragment: int
    base_version: int
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TicketIssued(Decision):
    """`site` gets `ticket`, the right to submit one update. If it already had this open ticket, `new` is False."""

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

    `reason` is `FINISHED`, `ENDS` or a text that explains it: the site's update was accepted or refused, no round is
    open, or the site does not take part in the round.
    """

    site: str
    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class TicketsExpired(Decision):
    """These tickets have expired. Delete the parts of their updates that have arrived."""

    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundReopened(Decision):
    """The round from `base_version` is open again, with these tickets. Their sites must submit their updates again."""

    fragment: int
    base_version: int
    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationBegun(Decision):
    """The algorithm's state begins at zero again, in the round from `base_version` and at all sites."""

    base_version: int
    why: str


@dataclass(frozen=True, slots=True)
class RoundClosed(Decision):
    """The round is closed. Aggregate exactly the updates of these tickets, in this order (by site name)."""

    fragment: int
    base_version: int
    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundSatOut(Decision):
    """All sites have sat out the round from `base_version`, so it ends without a version.

    Args:
        fragment: index of the fragment.
        base_version: version that the round started from. The next round starts from the same one.
        in_a_row: number of rounds, this one included, that ended so since `base_version` was committed.
        next_ticket: tickets with this number or a later one belong to later rounds.
        number: number of the round.
        sites: the sites, sorted.
    """

    fragment: int
    base_version: int
    in_a_row: int
    next_ticket: int
    number: int
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ControlsChanged(Decision):
    """The admin has paused, resumed or stopped the run."""

    paused: bool
    stopping: bool


@dataclass(frozen=True, slots=True)
class RoundStopped(Decision):
    """The open round from `base_version` ends without a version, because the admin stopped the run at once."""

    fragment: int
    base_version: int


@dataclass(frozen=True, slots=True)
class BestFound(Effect):
    """The measured version is the best so far: keep it until a better one is found.

    The journal needs no entry for this, because the best version follows from the metrics in the journal.
    """

    measured: Measurement


@dataclass(frozen=True, slots=True)
class RunFinished(Decision):
    """The last round has ended. Inform the workers and export the result."""


@dataclass(frozen=True, slots=True)
class Woken(Effect):
    """The state has changed: wake the requests that wait for a change, so that they check the state again."""
