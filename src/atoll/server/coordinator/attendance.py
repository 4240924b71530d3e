"""Which sites are missing, late or silent: warnings when a site ends and when a round closes, and why a round waits."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, MutableMapping, Sequence

from atoll.config.settings import Network
from atoll.errors import SchemaMismatch
from atoll.format_text import listed, number_of, of_fragment
from atoll.protocol import status_messages
from atoll.registry import nearest
from atoll.rounds import events
from atoll.rounds.state import State
from atoll.server.coordinator.roster import Presence

LOG = logging.getLogger("atoll.server")


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
            LOG.warning("%s", ALL_SAT_OUT)
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
        all_out = ALL_SAT_OUT if in_a_row >= SAT_OUT_ROUNDS else ""
        late = [_late(site, state) for site in sorted(state.late) if site in state.seen_s][:LATE_SHOWN]
        return [text for text in (short, all_out, *partial.values(), *late) if text]


LATE_SHOWN = 20
"""Number of sites that are late with their first update and of which the status warns."""


def _late(site: str, state: State) -> str:
    return (
        f"{site} has never sent an update, so rounds that can close without it do not wait for it "
        f"(limits.first_update_s = "
        f"{state.rules.first_update_s:g}). It takes part from its first update on. If it only needs longer, set a "
        "higher limit"
    )


SAT_OUT_ROUNDS = 3
"""Number of rounds in a row that all sites have sat out after which to warn."""


ALL_SAT_OUT = (  # the same text at each further round: it is told once
    f"at least {SAT_OUT_ROUNDS} rounds in a row ended without a version, because all sites sat out (weight 0): the "
    "model does not change. Check that the sites find their samples. Until one does, rounds begin after a pause of up "
    "to 10 s"
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
