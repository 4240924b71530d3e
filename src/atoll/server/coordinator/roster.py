"""What the server knows about each site, for the status and for warnings: missing sites, staleness, remaining time.

Rounds depend on only three of these facts: leases, the number of refused updates in a row, and the speeds for DyLU.
Workers report most of the other facts, which may be wrong.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median

from atoll.aggregation.plan import Plan
from atoll.config.settings import Network
from atoll.errors import BadRequest, SchemaMismatch
from atoll.format_text import listed, number_of, of_fragment, visible
from atoll.protocol import messages, run_events, status_messages
from atoll.protocol.status_headline import is_late
from atoll.registry import nearest
from atoll.rounds import events
from atoll.rounds.state import State
from atoll.store.journal_tables import MemberRow, utc_text
from atoll.tensors.reference import hash_of_secret, new_id

LOG = logging.getLogger("atoll.server")

TRAINING = "training"
STILL = 4.0
"""Training counts as hanging only if it pauses for this many times the longest earlier pause between two steps."""

WARNINGS_LOGGED = 100
"""So many different warnings of each site are logged: a broken site may send others with every heartbeat."""


def _progress(beat: messages.Heartbeat) -> tuple[object, ...]:
    """Return the values of a heartbeat that change when a worker makes progress."""
    return beat.step, beat.version, beat.state, beat.bytes_up, beat.bytes_down


@dataclass
class Presence:
    """What the server knows about the worker of one site.

    Times are those of `time.monotonic`, in seconds.

    Attributes:
        sealed: hash of the lease's secret (BLAKE3); empty if the site has no lease.
        heard: whether the worker has sent a request since this server started.
        heard_s: time of the last request.
        beat: the last heartbeat.
        gradient_bytes: bytes that data-parallel training would have sent: fragment's size × local steps, summed over
            the updates accepted since the server started.
        waited_s: fragment → seconds in which training stood still until its last update since the server started.
        bases: fragment → base version of the worker's newest ticket. Restored after a restart of the server.
        refused: why the last update was refused; empty after an accepted one.
        moved_s: time of the last heartbeat that showed progress: another step, number of bytes, version or state.
        longest_s: longest time between two such heartbeats during training, in seconds.
        displaced: process → host, for older processes of this site that a newer one replaced before they left.
        rival: warning about a process that was replaced while it ran; empty if there is none.
        is_restored: whether the worker joined before this server started, so that its steps may be of earlier rounds.
        told: warnings of the site that were logged.
        metric_names: names of the metrics that the site has reported.
        many_metrics: warning that it reports too many different metrics; empty if it does not.
    """

    site: str
    host: str = ""
    process: str = ""
    sealed: str = field(default="", repr=False)
    joined_at: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    state: str = "alive"
    error: str = ""
    heard: bool = True
    heard_s: float = field(default_factory=time.monotonic)
    beat: messages.Heartbeat = field(default_factory=messages.Heartbeat)
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    gradient_bytes: int = 0
    waited_s: dict[int, float] = field(default_factory=dict)
    metric_names: set[str] = field(default_factory=set)
    many_metrics: str = ""
    bases: dict[int, int] = field(default_factory=dict)
    refused_in_a_row: int = 0
    refused: str = ""
    moved_s: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    displaced: dict[str, str] = field(default_factory=dict)
    rival: str = ""
    is_restored: bool = False
    told: set[str] = field(default_factory=set)

    @classmethod
    def joining(cls, message: messages.Join, before: Presence | None) -> tuple[Presence, str]:
        """Return the record of a worker process that joins, and the secret of its new lease.

        The site's counters are copied from `before`. If a process on another host takes part under this name, log a
        warning.

        Args:
            message: the message of the process.
            before: the record of the site so far; None for a new site.
        """
        secret = new_id()
        kept = (
            *("rounds", "bases", "refused_in_a_row", "refused", "bytes_up", "bytes_down", "gradient_bytes", "waited_s"),
            *("displaced", "rival"),
        )
        joined = cls(
            site=message.site,
            host=message.host,
            process=message.process,
            sealed=hash_of_secret(secret),
            joined_at=utc_text(),
            labels=_shown_labels(message),
            told=before.told if before is not None else set(),
            **{name: getattr(before, name) for name in kept if before is not None},
        )
        if before and before.state == "alive" and before.process and before.process != message.process:
            joined.displaced = {**before.displaced, before.process: before.host}
            if before.host != message.host:
                LOG.warning(
                    "%s joined from %s, but took part from %s until now: check that two machines do not have "
                    "the same site name",
                    message.site,
                    message.host or "an unnamed host",
                    before.host or "an unnamed host",
                )
        return joined, secret

    def meets(self, process: str) -> None:
        """Handle a request of `process`. If a newer process has replaced this one, log once that both ran."""
        if process not in self.displaced:
            return
        other_host, this_host = (host or "an unnamed host" for host in (self.displaced.pop(process), self.host))
        hosts = f"both on {this_host}" if other_host == this_host else f"on {other_host} and on {this_host}"
        self.rival = (
            f"two processes took part as {self.site}, {hosts}: the older one still ran when it was replaced. "
            "Use a different site name for each process"
        )
        LOG.warning("%s", self.rival)

    def note(self, beat: messages.Heartbeat) -> None:
        """Store a heartbeat. If it shows progress, also store the time. Log each of its warnings once."""
        for text in beat.warnings:
            if text not in self.told and len(self.told) < WARNINGS_LOGGED:
                self.told.add(text)
                LOG.warning("%s reports: %s", self.site, text)
        if _progress(beat) != _progress(self.beat):
            now_s = time.monotonic()
            if self.beat.state == TRAINING:
                self.longest_s = max(self.longest_s, now_s - self.moved_s)
            self.moved_s = now_s
        self.beat = beat

    def hangs_s(self, patience_s: float) -> float:
        """Return for how many seconds training has made no progress, if this time is unusually long; else 0.

        It is unusually long if it exceeds `patience_s`, and is at least `STILL` times as long as any earlier pause.
        """
        # a script may report no steps until its round ends, which may take long
        known = self.longest_s > 0 or (self.beat.step > 0 and not self.is_restored)
        still_s = time.monotonic() - self.moved_s
        hangs = known and self.beat.state == TRAINING and still_s >= max(patience_s, STILL * self.longest_s)
        return still_s if hangs else 0.0

    @property
    def holder(self) -> str:
        """The process id and the hash of the lease's secret, as one text for the journal."""
        return f"{self.process}:{self.sealed}"

    @property
    def ended(self) -> str:
        """How the worker ended, as words after its name, such as "has left"; empty while the worker takes part."""
        if self.state == "alive":
            return ""
        return {"dead": "is dead", "failed": "failed", "left": "has left"}.get(self.state, f"is {self.state}")


@dataclass(frozen=True)
class Lease:
    """A lease (the right of one worker process to act for a site), as stated in the header of a request.

    Attributes:
        site: name of the site.
        number: number of the lease. If the site has a lease with a higher number, this one is no longer valid.
        process: id of the process.
        secret: 128 random bits in hex that prove the sender. Only the process knows them; the server stores a hash.
    """

    site: str
    number: int
    process: str
    secret: str = field(default="", repr=False)

    @property
    def header(self) -> str:
        """The lease as text, for the header of a request."""
        return f"{self.site}:{self.number}:{self.process}:{self.secret}"

    def opens(self, presence: Presence) -> bool:
        """Return whether the lease's secret is the one that the site got. The comparison takes constant time."""
        return bool(presence.sealed) and hmac.compare_digest(hash_of_secret(self.secret), presence.sealed)

    @classmethod
    def parse(cls, text: str | None) -> Lease:
        """Parse the lease header of a request.

        Raises:
            BadRequest: the header is missing or malformed.
        """
        if text is None or not re.match(messages.LEASE_PATTERN, text):
            raise BadRequest(
                "The Atoll-Lease header is missing or malformed.", "Join first, and send the lease from the answer."
            )
        site, number, process, *secret = text.split(":")
        return cls(site, int(number), process, *secret)


def roster_of(members: Iterable[MemberRow], versions: Sequence[Mapping[str, int]]) -> dict[str, Presence]:
    """Return the records of all sites in the journal, when a server starts: site → what is known about its worker.

    Args:
        members: the journal's rows of the sites.
        versions: for each fragment, site → base version of the site's newest ticket.
    """
    return {
        member.site: Presence(
            site=member.site,
            host=visible(member.host),
            process=member.process.partition(":")[0],
            sealed=member.process.partition(":")[2],
            joined_at=member.joined_at,
            labels={visible(key): visible(value) for key, value in json.loads(member.labels_json).items()},
            state=member.state,
            error=visible(member.detail),
            rounds=member.rounds_counted,
            bases={index: bases[member.site] for index, bases in enumerate(versions) if member.site in bases},
            heard=False,
            is_restored=True,
        )
        for member in members
    }


# -- Warnings about missing sites: when a site ends, and when a round closes without a site.


class Attendance:
    """Finds the sites that are missing in a run, and warns about them.

    Args:
        roster: site → what the server knows about its worker.
        deaths: number of workers that were declared dead before the server started.
        expected: fragment → sites that its open round waited for before the server started.
        simulated: whether the sites are those of a simulation, which cannot be started one by one.

    Attributes:
        deaths: number of workers declared dead in the whole run.
    """

    def __init__(
        self,
        roster: MutableMapping[str, Presence],
        deaths: int,
        expected: Mapping[int, Collection[str]] | None = None,
        *,
        simulated: bool = False,
    ) -> None:
        self._roster, self.deaths, self._simulated = roster, deaths, simulated
        self._expected = {fragment: set(sites) for fragment, sites in (expected or {}).items()}
        self._absent: dict[int, frozenset[str]] = {}  # fragment → missing sites
        self._partial: dict[int, str] = {}
        self._late: frozenset[str] = frozenset()

    def expects(self, effect: events.RoundOpened | events.ExpectedChanged, state: State) -> None:
        """Record the sites that a round waits for. Sites that the round no longer waits for stay in the record."""
        fragment, sites = effect.fragment, effect.expected
        if isinstance(effect, events.RoundOpened):
            of = of_fragment(fragment if len(state.rounds) > 1 else None)
            LOG.debug("round %d%s is open for %s", state.rounds[fragment].number, of, ", ".join(sites))
            self._expected[fragment] = set()
        self._expected.setdefault(fragment, set()).update(sites)
        for site in sorted(state.late - self._late):
            LOG.warning("%s", _late(site, state))
        self._late = state.late

    def ended(self, effect: events.LeaseEnded, state: State) -> None:
        """Log that a site no longer takes part. If too few sites are left for a round, log that, too."""
        why, presence = effect.why, self._roster.setdefault(effect.site, Presence(effect.site))
        presence.state, presence.error = why, effect.detail if why != "left" else ""
        log = LOG.info if why == "left" else LOG.warning
        log("%s %s%s", effect.site, {"dead": "is dead"}.get(why, why), f": {effect.detail}" if effect.detail else "")
        self.deaths += why == "dead"
        if not self._simulated and (
            warning := short_of(state, self._roster)
        ):  # a simulation ends with an error instead
            log("%s", warning)

    def why_surplus(self, site: str, sites: int) -> str:
        """Return a warning if a new site is one more than the run has, so that its name may be misspelt; else empty.

        Args:
            site: name of the new site, which is in the roster.
            sites: the setting `rounds.sites`.
        """
        if self._simulated or len(self._roster) <= sites:
            return ""
        away = [other for other in self._roster if other != site and not self._is_alive(other)]
        meant = nearest(site, away)
        return (
            f"{site} is a new site, number {len(self._roster)} of a run with rounds.sites = {sites}. "
            f"{meant + ' ' if meant else ''}If the name is a mistake, start its worker again under the right one."
        )

    def all_sat_out(self, effect: events.RoundSatOut, state: State) -> None:
        """Log that all sites have sat out a round. If this is the third such round in a row, warn."""
        if effect.in_a_row == SAT_OUT_ROUNDS:
            LOG.warning("%s", _all_sat_out(effect.in_a_row))
        else:
            of = of_fragment(effect.fragment if len(state.rounds) > 1 else None)
            LOG.info("all sites sat out round %d%s, so it ended without a version", effect.number, of)

    def closed(self, summary: status_messages.RoundSummary) -> None:
        """Warn if a round was closed without an update of some site.

        If enough sites took part, only sites that are dead or failed count as missing. Sites that sat out the round are
        not missing. If only sites are missing that were missing before, do not warn again.
        """
        sites, fragment = {*summary.workers, *summary.sat_out}, summary.fragment
        asked = self._expected.get(fragment, set())
        complete = len(sites) >= summary.expected
        absent = {site for site in self._roster.keys() - sites if self._is_missed(site, asked, complete)}
        warned_of = frozenset[str]().union(*self._absent.values())
        # with sampling, a missing site that is alive again stays listed until a round waits for it
        waits = {site for site in self._absent.get(fragment, ()) if site not in sites | asked and self._is_alive(site)}
        self._absent[fragment] = frozenset(absent | waits)
        if absent:
            self._partial[fragment] = self._in_words(summary, sorted(absent), complete)
            if not absent <= warned_of:
                LOG.warning("%s", self._partial[fragment])
        elif not waits:
            self._partial.pop(fragment, None)

    def _is_missed(self, site: str, expected: Collection[str], complete: bool) -> bool:
        state = self._roster[site].state
        if complete:  # enough other sites took part, so a site that has left is not missed
            return state in ("dead", "failed")
        return site in expected or not self._is_alive(site)

    def _is_alive(self, site: str) -> bool:
        return self._roster[site].state == "alive"

    def _in_words(self, summary: status_messages.RoundSummary, absent: list[str], complete: bool) -> str:
        ended = [f"{site} {how}" for site in absent if (how := self._roster[site].ended)]
        of = summary.population if complete else summary.expected
        again = "the simulation again" if self._simulated else f"{listed(absent)} under the same name"
        remedy = (
            f"To include them again, start {again}"
            if complete
            else f"To make rounds wait for all sites, set rounds.min_sites = {summary.expected}"
        )
        return (
            f"round {summary.round} closed with {len(summary.sites)} of {of} sites, without "
            f"{listed(absent)}{f' ({listed(ended)})' if ended else ''}: its version contains no training of "
            f"{listed(absent)}. {remedy}"
        )

    def warnings(self, state: State) -> list[str]:
        """Return the warnings for the status. Fragments that miss the same sites share one warning."""
        partial = {self._absent[fragment]: text for fragment, text in self._partial.items()}
        short = "" if self._simulated else short_of(state, self._roster)
        in_a_row = max((round_.sat_out_in_a_row for round_ in state.rounds), default=0)
        all_out = _all_sat_out(in_a_row) if in_a_row >= SAT_OUT_ROUNDS else ""
        late = [_late(site, state) for site in sorted(state.late) if site in state.seen_s][:LATE_SHOWN]
        return [text for text in (short, all_out, *partial.values(), *late) if text]


LATE_SHOWN = 20
"""Number of sites that are late with their first update and of which the status warns."""


def _shown_labels(message: messages.Join) -> dict[str, str]:
    """Return the labels of a worker for the status, `MOST_LABEL_CHARS` in all, and warn of those left out."""
    kept, left = dict[str, str](), messages.MOST_LABEL_CHARS
    for name, value in message.labels.items():
        left -= len(name) + len(value)
        if left >= 0:
            kept[name] = value
    if left < 0:
        LOG.warning(
            "the labels of %s have %d characters in all, more than %d: the last ones are not shown",
            *(message.site, messages.MOST_LABEL_CHARS - left, messages.MOST_LABEL_CHARS),
        )
    return kept


def _late(site: str, state: State) -> str:
    return (
        f"{site} has never sent an update, so rounds that can close without it do not wait for it "
        f"(limits.first_update_s = "
        f"{state.rules.first_update_s:g}). It takes part from its first update on. If it only needs longer, set a "
        "higher limit"
    )


SAT_OUT_ROUNDS = 3
"""Number of rounds in a row that all sites have sat out after which to warn."""


def _all_sat_out(rounds: int) -> str:
    return (
        f"{rounds} rounds in a row ended without a version, because all sites sat out (weight 0): the model does not "
        "change. Check that the sites find their samples. Until one does, rounds begin after a pause of up to 10 s"
    )


_OTHER_MODEL = f"{SchemaMismatch.__module__}.{SchemaMismatch.__name__}"
"""Beginning of the error of a site with another model. To start such a site again, the user has to change its model."""


def short_of(state: State, roster: Mapping[str, Presence]) -> str:
    """Return a warning that too few sites take part for a round to close, with remedies.

    Return an empty text if enough sites take part. Before the first round and after the last one, the text is also
    empty.
    """
    present, floor, name = len(state.active_s), state.rules.floor, state.rules.floor_name
    if present >= floor:
        return _short_of_samples(state)
    if all(round_.phase in ("gathering", "paused", "finished") for round_ in state.rounds):
        return ""
    absent = {site: presence.ended for site, presence in sorted(roster.items()) if presence.ended}
    ended = f" ({listed([f'{site} {how}' for site, how in absent.items()])})" if absent else ""
    fit = [site for site in absent if not roster[site].error.startswith(_OTHER_MODEL)]
    again = f"Start {listed([*absent])} again after mending its error (see its log)" if absent else "Start another site"
    if fit:
        some = f"{floor - present} of " if len(fit) > floor - present else ""
        again = f"Start {some}{listed(fit)} again under the same name"
    lower = f", or start the run again with {name} = {present}" if present else ""
    return (
        f"{present} {'site takes' if present == 1 else 'sites take'} part{ended}, but a round needs at least "
        f"{floor} ({name}): the run waits. {again}{lower}"
    )


def _short_of_samples(state: State) -> str:
    """Return a warning about an open round that cannot close because too many sites sat out; empty if there is none."""
    floor, name = state.rules.floor, state.rules.floor_name
    for fragment, round_ in enumerate(state.rounds):
        if round_.phase == "open" and round_.sat_out and state.lacks_sites(fragment):
            here, sites = len(round_.expected), listed(round_.sat_out)
            lower = f", or start the run again with {name} = {here}" if here else ""
            return (
                f"round {round_.number} needs at least {number_of(floor, 'update')} ({name}), but {sites} sat out: "
                f"the run waits. Start another site, or start {sites} again with samples{lower}"
            )
    return ""


# -- Staleness of updates: how many versions the head was ahead of an update's base when the update was aggregated.


FAR_BEHIND = 5
"""Staleness above which an update causes a warning."""


class StalenessCounter:
    """Counts the staleness of updates: how many versions each was behind the newest. Warns about high values.

    Attributes:
        counts: staleness in versions → number of updates; only in an asynchronous run.
        warnings: warnings for the status.
    """

    def __init__(self, plan: Plan) -> None:
        self._is_async = plan.settings.async_.enabled
        self._worst = FAR_BEHIND
        self.warnings: list[str] = []
        self.counts: Counter[int] = Counter()

    def note_round(self, summary: status_messages.RoundSummary) -> None:
        """Count the staleness of a round's updates. Warn of a value above `FAR_BEHIND` and above all earlier values."""
        if self._is_async:
            self.counts.update(each.staleness for each in summary.sites)
        lags = {each.site: each.staleness for each in summary.sites}
        site = max(lags, key=lags.__getitem__, default="")
        worst = lags.get(site, 0)
        if worst <= self._worst:
            return
        self._worst = worst
        told = (
            f"an update of {site} was {number_of(worst, 'version')} old: old updates slow training down or undo it. "
            "Set diloco.dynamic_local_steps = true to give slow sites fewer steps, async.staleness_weight = "
            "'inverse_sqrt', async.momentum_every = number of sites, or async.max_staleness to refuse such "
            "updates. See docs/troubleshooting.md, Updates far behind"
        )
        self.warnings = [told]
        LOG.warning("%s", told)


# -- Problems of sites that a round waits for.

QUIET_BEATS = 2.5
"""A site that has sent nothing for this many heartbeat intervals is reported as silent."""
HANGS_S = 120.0
"""Seconds to use in place of `network.heartbeat_timeout_s` if this setting is 0. Training that makes no progress for
twice this time is reported."""


def why_silent(
    sites: Sequence[str],
    roster: Mapping[str, Presence],
    state: State,
    network: Network,
    now_s: float,
    moved_from: str = "",
) -> list[str]:
    """Return texts about sites with a problem: no request since the restart, no heartbeats, or no progress.

    Args:
        sites: names of the sites that a round waits for.
        roster: site → what the server knows about its worker.
        state: state of the run.
        network: the network settings, among them the times of heartbeats.
        now_s: current time of `time.monotonic`.
        moved_from: the server's address before its restart, if it is another one now.
    """
    interval_s, timeout_s, seen_s = network.heartbeat_interval_s, network.heartbeat_timeout_s, state.seen_s
    unheard = [site for site in sites if site in roster and not roster[site].heard]
    moved = f" elsewhere than at {moved_from}" if moved_from else ""
    reasons = [f"no request since the server restarted{moved}: {', '.join(unheard)}"] if unheard else []
    quiet = [site for site in sites if site not in unheard]
    quiet = [site for site in quiet if interval_s and now_s - seen_s.get(site, now_s) >= QUIET_BEATS * interval_s]
    if quiet:
        then = f" (declared dead after {timeout_s:g} s without a heartbeat)" if timeout_s else ""
        reasons.append(f"no heartbeat from {', '.join(quiet)}{then}")
    still = {site: roster[site].hangs_s(2 * (timeout_s or HANGS_S)) for site in sites if site in roster}
    return reasons + [
        f"{site} sends heartbeats, but its training has made no step for {still_s:.0f} s: check its process"
        for site, still_s in still.items()
        if still_s
    ]


# -- Estimate of a run's remaining time.


STEADY = 2.0
"""A first round that takes longer than so many medians of the later ones is not steady."""
ROUNDS = 20
"""Number of last rounds of each fragment in the estimate. Older rounds say little about the current workers."""


def left_s(commits_s: Sequence[float], commits_left: int, now_s: float) -> float | None:
    """Return the estimated seconds until `commits_left` more versions are committed.

    Return None without three times, and while the open round is late: how long it still takes is not known then.

    The estimate is `commits_left` × the mean time between commits, minus the time since the last commit. At most one
    mean is subtracted: a round that takes longer than the others does not make later rounds shorter. Rounds before the
    first steady one do not count: sites load data and compile in them.

    Args:
        commits_s: times of commits, in order.
        commits_left: number of commits until the end of the run.
        now_s: current time, by the same clock.
    """
    if len(commits_s) < 3:
        return None
    rounds_s = [after - before for before, after in pairwise(commits_s)]
    while len(rounds_s) > 1 and rounds_s[0] > STEADY * median(rounds_s[1:]):
        del rounds_s[0]
    each_s, spent_s = mean(rounds_s), max(0.0, now_s - commits_s[-1])
    if commits_left and is_late(spent_s, each_s):
        return None
    return max(0.0, commits_left * each_s - min(spent_s, each_s))


class TimeLeft:
    """Estimates a run's remaining time from the rounds since the server started.

    Args:
        rounds: the setting `rounds.total`; 0 if the run has no end.
        fragments: number of fragments of the model.
    """

    def __init__(self, rounds: int, fragments: int) -> None:
        self._rounds, self._fragments, self._count = rounds, fragments, 0
        self._commits_s: deque[float] = deque(maxlen=ROUNDS * fragments + 1)

    def committed(self, now_s: float) -> None:
        """Record a commit at time `now_s`.

        The first round of each fragment gives no time: it contains the start of the sites.
        """
        self._count += 1
        if self._count >= self._fragments:
            self._commits_s.append(now_s)

    def begin_again(self) -> None:
        """Forget the times so far, because the run was paused between them."""
        self._commits_s.clear()

    def of(self, state: State, now_s: float) -> float | None:
        """Return the estimated remaining seconds.

        Return None if the run has no end, is over, paused or being stopped, if too few sites take part, if the open
        round is late, or before this process has committed two rounds after the first.
        """
        stands_still = len(state.active_s) < state.rules.floor and any(each.phase == "open" for each in state.rounds)
        if not self._rounds or state.finished or state.paused or state.stopping or stands_still:
            return None
        return left_s(self._commits_s, sum(max(0, self._rounds - each.done) for each in state.rounds), now_s)


class TicketTimes:
    """For how long sites have their tickets: now, and usually. It follows the run's events.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._start_s = clock, clock()
        self._begun_s: dict[int, float] = {}  # ticket → when the site got it
        self._took_s: dict[str, deque[float]] = {}

    def on_event(self, event: run_events.Happened) -> None:
        """Note when a site gets a ticket, and how long it then takes until its update is complete."""
        match event:
            case run_events.TicketIssued(ticket=ticket):
                self._begun_s[ticket] = self._clock()
            case run_events.UpdateAccepted(site=site, ticket=ticket) if ticket in self._begun_s:
                self._took_s.setdefault(site, deque(maxlen=ROUNDS)).append(self._clock() - self._begun_s[ticket])

    def of(self, state: State, now_s: float) -> dict[str, float]:
        """Return site → seconds for which it has its oldest open ticket, and forget tickets that are over.

        For a ticket that is older than the server's start, return the seconds since then.
        """
        held = {
            each.id: each.site for round_ in state.rounds for each in round_.tickets.values() if each.state == "open"
        }
        self._begun_s = {ticket: self._begun_s.get(ticket, self._start_s) for ticket in held}
        return {held[ticket]: max(0.0, now_s - self._begun_s[ticket]) for ticket in sorted(held, reverse=True)}

    def usual_s(self, site: str) -> float:
        """Return the usual seconds from a site's ticket to its update; 0: not known yet."""
        return median(self._took_s.get(site, [0.0]))
