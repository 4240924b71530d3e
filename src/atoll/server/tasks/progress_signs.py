"""Signs that something moves: what limits go by, in place of total time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.registry import nearest

if TYPE_CHECKING:
    from atoll.server.coordinator.run import Run

Signs = tuple[object, ...]


def of_site(run: Run, site: str) -> Signs:
    """What changes while a site does something: bytes, steps, what it says that it is doing. That it lives is none."""
    presence = run.roster.get(site)
    if presence is None:
        return ()
    beat = presence.beat
    return (
        presence.process,
        presence.bytes_up,
        presence.bytes_down,
        beat.state,
        beat.step,
        beat.bytes_up,
        beat.bytes_down,
    )


def of_run(run: Run) -> Signs:
    """What changes while anything of a run moves, at the server or at a site."""
    return (
        run.desk.moves,
        run.bytes_up,
        run.bytes_down,
        tuple(round_.head for round_ in run.state.rounds),
        run.state.next_ticket,
        *(of_site(run, site) for site in sorted(run.roster)),
    )


def why_gone(run: Run, site: str) -> str:
    """Why a site cannot be asked, in words without a subject; empty where it takes part."""
    member = run.state.members.get(site)
    if member is not None and member.alive:
        return ""
    presence = run.roster.get(site)
    if member is None or presence is None:
        return f"has never joined. {nearest(site, sorted(run.roster))}".rstrip(" .")
    return f"{presence.ended}: {presence.error}" if presence.error else presence.ended


@dataclass
class Patience:
    """How long an answer of a site is waited for.

    Args:
        progress_timeout_s: without a sign of the site; 0: for ever.
        gone_too: whether a site that has gone is given up at once.
    """

    progress_timeout_s: float
    gone_too: bool = False
    _seen: dict[str, tuple[Signs, float]] = field(default_factory=dict)

    def over(self, run: Run, site: str) -> tuple[str, str]:
        """(`gone` or `stuck`, why) where it is given up, else two empty texts."""
        if self.gone_too and (why := why_gone(run, site)):
            return "gone", f"the site {why}"
        now_s, signs = time.monotonic(), of_site(run, site)
        before, since_s = self._seen.setdefault(site, (signs, now_s))
        if before != signs:
            self._seen[site] = (signs, now_s)
        elif self.progress_timeout_s and now_s - since_s >= self.progress_timeout_s:
            doing = run.roster[site].beat.state if site in run.roster else ""
            told = f" (it said: {doing})" if doing else ""
            return "stuck", f"the site moved nothing for {self.progress_timeout_s:g} s{told}"
        return "", ""
