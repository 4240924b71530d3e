"""Report the sites that a run is short of: when one ends, and when a round closes without it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING

from atoll.rounds import events as fx
from atoll.rounds.closing_policy import listed
from atoll.server.coordinator.roster import Presence, note_end

if TYPE_CHECKING:
    from atoll.protocol import status_messages
    from atoll.rounds.state import State

LOG = logging.getLogger("atoll.server")


class Attendance:
    """Which sites of one run are away.

    Args:
        roster: of the run.
        deaths: workers that were declared dead before this start.
        asked: fragment → the sites that its round waited for before this start.

    Attributes:
        deaths: workers that were declared dead, in the whole run.
    """

    def __init__(
        self, roster: MutableMapping[str, Presence], deaths: int, asked: Mapping[int, Collection[str]] | None = None
    ) -> None:
        self._roster, self.deaths = roster, deaths
        self._asked = {fragment: set(sites) for fragment, sites in (asked or {}).items()}
        self._absent: dict[int, frozenset[str]] = {}  # of each fragment
        self._partial: dict[int, str] = {}

    def asks(self, effect: fx.RoundOpened | fx.ExpectedChanged, state: State) -> None:
        """A round opens for these sites, or waits for others: all that it ever waits for are asked."""
        fragment, sites = effect.fragment, effect.expected
        if isinstance(effect, fx.RoundOpened):
            LOG.debug(
                "round %d of fragment %d is open for %s", state.rounds[fragment].number, fragment, ", ".join(sites)
            )
            self._asked[fragment] = set()
        self._asked.setdefault(fragment, set()).update(sites)

    def ended(self, effect: fx.LeaseEnded, state: State) -> None:
        """A site takes part no more: report it, and at once whether rounds can close without it."""
        note_end(self._roster, effect)
        self.deaths += effect.why == "dead"
        if told := short_of(state, self._roster):
            (LOG.info if effect.why == "left" else LOG.warning)("%s", told)

    def closed(self, summary: status_messages.RoundSummary) -> None:
        """Report a round that closed without a site of the run; once for as long as the same sites are missing."""
        here, fragment = set(summary.workers), summary.fragment
        asked = self._asked.get(fragment, set())
        complete = len(here) >= summary.expected
        absent = {site for site in self._roster.keys() - here if self._is_missed(site, asked, complete)}
        told = frozenset[str]().union(*self._absent.values())
        # a site that is not drawn can neither be missing nor come back
        waits = {site for site in self._absent.get(fragment, ()) if site not in here | asked and self._is_alive(site)}
        self._absent[fragment] = frozenset(absent | waits)
        if absent:
            self._partial[fragment] = self._in_words(summary, sorted(absent), complete)
            if not absent <= told:
                LOG.warning("%s", self._partial[fragment])
        elif not waits:
            self._partial.pop(fragment, None)

    def _is_missed(self, site: str, asked: Collection[str], complete: bool) -> bool:
        state = self._roster[site].state
        if complete:  # with other sites in the place of those that broke off; a site that has left is not missed
            return state in ("dead", "failed")
        return site in asked or not self._is_alive(site)

    def _is_alive(self, site: str) -> bool:
        return self._roster[site].state == "alive"

    def _in_words(self, summary: status_messages.RoundSummary, absent: list[str], complete: bool) -> str:
        ended = [f"{site} {told}" for site in absent if (told := self._roster[site].ended)]
        of = summary.population if complete else summary.expected
        remedy = (
            f"Start {listed(absent)} again under the same name, to have it take part"
            if complete
            else f"Set min_workers = {summary.expected} to have rounds wait for all sites"
        )
        return (
            f"round {summary.round} closed with {len(summary.workers)} of {of} sites, "
            f"without {listed(absent)}{f' ({listed(ended)})' if ended else ''}: its version has learned nothing from "
            f"{listed(absent)}. {remedy}"
        )

    def warnings(self, state: State) -> list[str]:
        """What the status shows at this moment; fragments without the same sites as one."""
        partial = {self._absent[fragment]: text for fragment, text in self._partial.items()}
        return [text for text in (short_of(state, self._roster), *partial.values()) if text]


def short_of(state: State, roster: Mapping[str, Presence]) -> str:
    """Why no further round can close, and both remedies; empty where enough sites are there, or the run is over."""
    here, floor, name = len(state.active_s), state.rules.floor, state.rules.floor_name
    if here >= floor or all(round_.phase in ("gathering", "finished") for round_ in state.rounds):
        return ""
    away = {site: presence.ended for site, presence in sorted(roster.items()) if presence.ended}
    ended = f" ({listed([f'{site} {how}' for site, how in away.items()])})" if away else ""
    again = f"Start {listed(list(away))} again under the same name" if away else "Start another site"
    lower = f", or start the server again with {name} = {here}" if here else ""
    return (
        f"{here} of {floor} sites take part{ended}, and no round closes with fewer than {floor} ({name}): the run "
        f"waits. {again}{lower}"
    )
