"""What happens to a run (events), and what the round machine wants done (effects). Values only.

`state_rows.restore` starts from the decisions among the effects. They may be written one by one, in order: `restore`
mends what a crash left between two.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.rounds.early_stopping import Measured


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A process of `site` asks to take part; an older lease of the same site ends here."""

    site: str


@dataclass(frozen=True, slots=True)
class Leased:
    """What the holder of `lease` says for `site`; refused where it is no longer the site's newest."""

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class WorkerLeft(Leased):
    """The holder of `lease` deregisters; `error` where its training failed."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class WorkerEnds(Leased):
    """The holder of `lease` submits nothing more, and stays for the results of what it has submitted."""


@dataclass(frozen=True, slots=True)
class WorkerSeen(Leased):
    """The holder of `lease` gave a sign of life: a heartbeat, or bytes of a part."""


@dataclass(frozen=True, slots=True)
class TicketRequested(Leased):
    """The holder of `lease` asks for its ticket of the open round of `fragment`."""

    fragment: int


@dataclass(frozen=True, slots=True)
class UpdateAccepted:
    """The update of `ticket` is in the journal.

    Between `waiting.may_submit` and the insert no other event may be handled: from the insert on, it counts. `order` is
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
class TrainingBegins:
    """The workflows before the rounds have ended: a first round opens once all sites are there."""


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
    | TrainingBegins
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Effect:
    """What the machine wants done."""


@dataclass(frozen=True, slots=True)
class Decision(Effect):
    """An effect that is in the journal before any request is answered and before the next event is handled."""


@dataclass(frozen=True, slots=True)
class LeaseGranted(Decision):
    """`site` takes part under `lease`; every earlier lease of it is void."""

    site: str
    lease: int


@dataclass(frozen=True, slots=True)
class LeaseEnded(Decision):
    """`site` no longer takes part. `why` is `dead`, `left` or `failed`.

    Parts that it has not been acknowledged for may be dropped; its open ticket stays until the round closes.
    """

    site: str
    lease: int
    why: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRefused(Effect):
    """The sender's lease is void. It may join again, unless `superseded`: a newer process has its place."""

    site: str
    reason: str
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class RoundOpened(Decision):
    """The round from `base_version` of `fragment` waits for exactly `expected`."""

    fragment: int
    base_version: int
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpectedChanged(Decision):
    """The sites that an open round waits for changed: a death, a departure, a refusal, a return."""

    fragment: int
    base_version: int
    expected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TicketIssued(Decision):
    """Give `site` this ticket. As long as it is open, the same one is given again: not `new`, it is in the journal."""

    site: str
    ticket: int
    fragment: int
    base_version: int
    new: bool


FINISHED = "finished"
"""The reason of a `TicketWithheld` when there will be no further round."""


ENDS = "it submits nothing more"
"""The reason of a `TicketWithheld` to a site that has said so."""


@dataclass(frozen=True, slots=True)
class TicketWithheld(Effect):
    """`site` has to wait: its update is in, no round is open, it counts from the next one; or `FINISHED`, or `ENDS`."""

    site: str
    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class TicketsExpired(Decision):
    """These tickets can no longer be used; what was spooled for them is dropped."""

    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundReopened(Decision):
    """The round from `base_version` is open again, and so are these tickets: their updates come once more."""

    fragment: int
    base_version: int
    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundClosed(Decision):
    """Freeze the round and reduce exactly these tickets, in this order (by site name)."""

    fragment: int
    base_version: int
    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BestFound(Effect):
    """This version is better than all before it; it is kept until a better one is. The journal's metrics say it too."""

    measured: Measured


@dataclass(frozen=True, slots=True)
class RunFinished(Decision):
    """The last round is committed; workers are told, and the result is exported."""


@dataclass(frozen=True, slots=True)
class Woken(Effect):
    """Waiters on `fragment` should ask again."""

    fragment: int
