"""What happens in a run, as typed events with numbers. Status, log lines, watchers and other programs follow them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from atoll.protocol.messages import Count, Estimate, Many, Message, Shown, Table
from atoll.protocol.status_messages import RoundSummary


class Happened(Message):
    """Base class of events. The server sets the number and the time when it records an event in the journal."""

    what: str = ""
    number: Count = Field(0, description="1, 2, 3 …: position among all events of the run.")
    at: Shown = Field("", description="Time in UTC, as ISO 8601.")


class SiteJoined(Happened):
    """A process of a site has joined, for the first time or again."""

    what: Literal["site joined"] = "site joined"
    site: Shown
    again: bool = False


class SiteLeft(Happened):
    """A site has left. If its training failed, `reason` is the error."""

    what: Literal["site left"] = "site left"
    site: Shown
    reason: Shown = ""


class SiteSilent(Happened):
    """A site has sent nothing for so long that rounds no longer wait for it."""

    what: Literal["site silent"] = "site silent"
    site: Shown
    reason: Shown


class _OfRound(Happened):
    fragment: Count
    round: Count = Field(description="Number of the round.")


class RoundOpened(_OfRound):
    """A round that trains from `version` is open."""

    what: Literal["round opened"] = "round opened"
    version: Count
    expected: Many[Shown] = Field(description="Sites that the round waits for; they may change.")


class TicketIssued(_OfRound):
    """A site may submit an update for a round, trained from `version`."""

    what: Literal["ticket issued"] = "ticket issued"
    site: Shown
    ticket: Count
    version: Count


class UpdateAccepted(_OfRound):
    """A site's update is in the journal, and will be aggregated."""

    what: Literal["update accepted"] = "update accepted"
    site: Shown
    ticket: Count
    send_seconds: Estimate = Field(0.0, description="Seconds since the server got the update's first byte; 0: unknown.")


class UpdateRefused(_OfRound):
    """A site's update was refused for good."""

    what: Literal["update refused"] = "update refused"
    site: Shown
    ticket: Count
    reason: Shown


class SiteSatOut(_OfRound):
    """A site sits out a round: it sends no update."""

    what: Literal["site sat out"] = "site sat out"
    site: Shown
    ticket: Count


class RoundClosed(_OfRound):
    """A round is closed: these sites' updates are being aggregated."""

    what: Literal["round closed"] = "round closed"
    sites: Many[Shown]


class RoundReopened(_OfRound):
    """A closed or open round collects updates again."""

    what: Literal["round reopened"] = "round reopened"
    reason: Shown


class RoundEnded(_OfRound):
    """A round has ended with a version, or without one because all sites sat out."""

    what: Literal["round ended"] = "round ended"
    summary: RoundSummary


class VersionEvaluated(_OfRound):
    """The server has evaluated the version of a round, or could not."""

    what: Literal["version evaluated"] = "version evaluated"
    version: Count
    metrics: Table[float] = Field(default_factory=dict)
    seconds: Estimate = Field(0.0, description="Seconds that the evaluation took.")
    problem: Shown = Field("", description="Why there is no result, or no complete one; else empty.")


class TaskOpened(Happened):
    """A workflow has sent a task to sites."""

    what: Literal["task opened"] = "task opened"
    task: Shown = Field(description="Name of the task.")
    sites: Many[Shown]


class TaskAnswered(Happened):
    """A site has answered a task, or could not."""

    what: Literal["task answered"] = "task answered"
    task: Shown = Field(description="Name of the task.")
    site: Shown
    error: Shown = ""


class Warned(Happened):
    """The status has a new warning."""

    what: Literal["warning"] = "warning"
    text: Shown


class RunPaused(Happened):
    """The admin has paused the run."""

    what: Literal["run paused"] = "run paused"


class RunResumed(Happened):
    """The admin lets a paused run go on."""

    what: Literal["run resumed"] = "run resumed"


class RunStopping(Happened):
    """The admin has ended the run: no further round opens."""

    what: Literal["run stopping"] = "run stopping"


class WentBack(Happened):
    """The run goes on from an earlier version, as its admin asked."""

    what: Literal["went back"] = "went back"
    fragment: Count
    version: Count = Field(description="Version from which the run goes on.")
    lost: Count = Field(description="Newest version before.")


class RunFinished(Happened):
    """The last round has ended."""

    what: Literal["run finished"] = "run finished"
    reason: Shown = Field("", description="Why the run ended before its last round; else empty.")


class RunFailed(Happened):
    """The run cannot go on."""

    what: Literal["run failed"] = "run failed"
    reason: Shown


class RunStalled(Happened):
    """For an unusually long time, no update has arrived and no round has ended. It is told once until one does."""

    what: Literal["run stalled"] = "run stalled"
    reason: Shown = Field(description="What the rounds wait for.")
    seconds: Estimate = Field(description="Seconds since the last update or version.")


RunEvent = Annotated[
    SiteJoined
    | SiteLeft
    | SiteSilent
    | RoundOpened
    | TicketIssued
    | UpdateAccepted
    | UpdateRefused
    | SiteSatOut
    | RoundClosed
    | RoundReopened
    | RoundEnded
    | VersionEvaluated
    | TaskOpened
    | TaskAnswered
    | Warned
    | RunPaused
    | RunResumed
    | RunStopping
    | WentBack
    | RunFinished
    | RunFailed
    | RunStalled,
    Field(discriminator="what"),
]


class EventQuery(Message):
    """Which events a client asks for."""

    after: Count = Field(0, description="Number of the last event that the client knows; 0: from the oldest on.")
    last: int = Field(0, ge=0, le=1000, description="If not 0: instead of `after`, so many of the newest events.")
    within: Count = Field(0, description="Number of sites of the next event's summary that the client knows.")
    wait_s: float = Field(0.0, ge=0, le=15.0, description="Seconds to wait if there is no later event.")


class EventPage(Message):
    """Events in order, as many as fit into an answer.

    The events of sites and those of the run are kept apart, the newest of each. So numbers may be missing between the
    oldest events: those of events of sites, or of the run, that are no longer kept.
    """

    events: Many[RunEvent]
    oldest: Count = Field(description="Number of the oldest event that the server keeps; 0: there is none.")
    newest: Count = Field(description="Number of the newest event; 0: there is none.")
    within: Count = Field(
        0,
        description="If the last event's summary is cut: number of its sites that were sent so far. To go on, ask with "
        "this number, and with `after` one below the number of that event.",
    )
