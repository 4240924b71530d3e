"""What is probably wrong with a run at present: for the log, the status and the events."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from atoll.format_text import listed, number_of, size
from atoll.protocol import run_events
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.settings_advice import advice

MOST_OF_SITES = 200
"""Number of warnings of sites that the status shows."""

LOG = logging.getLogger("atoll.server")


class RunWarnings:
    """The warnings of all parts of a run.

    Args:
        run: the run.
        sources: functions that return the present warnings of other parts.
    """

    def __init__(self, run: RunCore, sources: Sequence[Callable[[], Iterable[str]]]) -> None:
        self._run, self._sources = run, sources
        self._advice = advice(run.plan)
        self._told = frozenset[str]()

    def now(self) -> list[str]:
        """Return what is probably wrong at present."""
        run = self._run
        present = [presence for _, presence in sorted(run.roster.items())]
        return [
            *filter(None, dict.fromkeys([*run.trouble.values(), run.no_space])),
            *filter(None, [run.store.run_log.generation.reason if run.plan.algorithm.state_groups else ""]),
            *self._advice,
            *(text for source in self._sources for text in source()),
            *run.events.problems.values(),
            *(presence.rival for presence in present if presence.rival),
            *itertools.islice(
                (f"{presence.site}: {text}" for presence in present for text in presence.beat.warnings), MOST_OF_SITES
            ),
        ]

    def tick(self) -> None:
        """Tell the followers of the events each new warning."""
        # `require_space` tells its own warning once: it has the free space, another number at each check
        now = [text for text in self.now() if text != self._run.no_space]
        for text in now:
            if text not in self._told:
                self._run.events.tell(run_events.Warned(text=text))
        self._told = frozenset(now)

    def say_advice(self) -> None:
        """Log the warnings about the settings."""
        for text in self._advice:
            LOG.warning("%s", text)

    def say_own_code(self) -> None:
        """Log which code of the user each site needs."""
        for kind, name, place in dict.fromkeys(self._run.plan.own_code):
            LOG.info(
                "sites look up %s by the name %r: register it in their scripts before they join, by "
                "atoll.register(%r, %r, …), or install it there with an entry point",
                place,
                name,
                kind,
                name,
            )

    def say_versions_kept(self) -> None:
        """As a run begins, log how many versions it can go back to, and what a further one takes on disk."""
        settings, shapes = self._run.settings.disk, [each.shapes() for each in self._run.plan.fragments]
        nbytes = sum(file.nbytes for each in shapes for file in (each.version, each.state) if file is not None)
        if settings.in_files and not any(each.done for each in self._run.state.rounds):
            LOG.info(
                "the newest %s stay on disk for `atoll rollback` (disk.keep_versions); each further one takes %s",
                number_of(settings.keep_versions, "version"),
                size(nbytes),
            )

    def say_moved(self) -> None:
        """If the server is at another address than before, log which sites wait at the earlier one."""
        moved_from, address = self._run.moved_from, self._run.address
        waiting = sorted(each.site for each in self._run.state.members.values() if each.state in ("alive", "dead"))
        if moved_from and waiting:
            LOG.warning(
                "the run was served at %s before; sites that wait there (%s) do not find this server, which listens on "
                "%s. Start them again with this address, or the server with the earlier one (network.host, "
                "network.port).",
                moved_from,
                listed(waiting),
                address,
            )
