"""Report the sites that a run is short of: when one ends, and when a round closes without it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from atoll.rounds import effects as fx
from atoll.rounds.policy import listed
from atoll.server.roster import Presence, note_end

if TYPE_CHECKING:
    from atoll.rounds.state import State
    from atoll.wire import status_messages

LOG = logging.getLogger("atoll.server")


class Attendance:
    """Which sites of one run are away.

    Args:
        roster: of the run.
        deaths: workers that were declared dead before this start.

    Attributes:
        deaths: workers that were declared dead, in the whole run.
    """

    def __init__(self, roster: MutableMapping[str, Presence], deaths: int) -> None:
        self._roster, self.deaths = roster, deaths
        self._absent: tuple[str, ...] = ()
        self._partial = ""

    def ended(self, effect: fx.LeaseEnded, state: State) -> None:
        """A site takes part no more: report it, and at once whether rounds can close without it."""
        note_end(self._roster, effect)
        self.deaths += effect.why == "dead"
        if told := short_of(state, self._roster):
            (LOG.info if effect.why == "left" else LOG.warning)("%s", told)

    def closed(self, summary: status_messages.RoundSummary) -> None:
        """Report a round that closed without a site of the run; once for as long as the same sites are missing."""
        absent = tuple(sorted(self._roster.keys() - set(summary.workers)))
        complete = len(summary.workers) >= summary.expected
        if complete:  # with other sites in the place of those that broke off; a site that has left is not missed
            absent = tuple(site for site in absent if self._roster[site].state in ("dead", "failed"))
        if not absent:
            self._absent, self._partial = (), ""
            return
        ended = [f"{site} {told}" for site in absent if (told := self._roster[site].ended)]
        of = summary.population if complete else summary.expected
        remedy = (
            f"Start {listed(absent)} again under the same name, to have it take part"
            if complete
            else f"Set min_workers = {summary.expected} to have rounds wait for all sites"
        )
        self._partial = (
            f"round {summary.round} closed with {len(summary.workers)} of {of} sites, "
            f"without {listed(absent)}{f' ({listed(ended)})' if ended else ''}: its version has learned nothing from "
            f"{listed(absent)}. {remedy}"
        )
        if absent != self._absent:
            self._absent = absent
            LOG.warning("%s", self._partial)

    def warnings(self, state: State) -> list[str]:
        """What the status shows at this moment."""
        return [text for text in (short_of(state, self._roster), self._partial) if text]


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
