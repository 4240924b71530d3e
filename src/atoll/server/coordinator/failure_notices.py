"""Tells the sites of a run that it has failed with a final error, so that a restart of the server does not help."""

from __future__ import annotations

import contextlib

from atoll.errors import AtollError, ServerFailed
from atoll.format_text import visible
from atoll.protocol import messages
from atoll.server.coordinator.lease_checks import LeaseChecks
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.run_core import RunCore


class FailureNotices:
    """Answers the requests of sites after a final failure, and knows which sites take part and were not told of it."""

    def __init__(self, run: RunCore, leases: LeaseChecks) -> None:
        self._run, self._leases = run, leases
        self._told: set[str] = set()

    def failure_for(self, lease: Lease | None) -> ServerFailed | None:
        """If the run has failed with a final error, return the error that answers a site's request; else None.

        Record that the site is told.

        Args:
            lease: the lease in the site's request; None if it has none.
        """
        if self._run.failed is None or not self._run.failed.is_final:
            return None
        if lease is not None:
            with contextlib.suppress(AtollError):
                site = self._leases.require_lease(lease).site
                self._told.add(site)
                self._run.roster[site].state = "ended"
        return failure_for_sites(self._run.settings.run.name, self._run.failed.message)

    @property
    def untold(self) -> list[str]:
        """After a failure: the sites that take part and were not told of it yet."""
        return [site for site in self._run.alive() if site not in self._told]

    def stop_telling(self) -> list[str]:
        """After a failure, just before the server ends, return the sites that take part and were not told of it."""
        untold = self.untold
        for site in untold:
            self._run.roster[site].state = "not told"
        return untold


def failure_for_sites(run: str, why: str) -> ServerFailed:
    """Return the error that the sites of a failed run get.

    Args:
        run: name of the run.
        why: message of the error that ended the run at the server.
    """
    most = messages.SHOWN_CHARS // 2
    return ServerFailed(
        f"The run {run} has failed at the server: {visible(' '.join(why.split()), most)}",
        "When the cause is mended there and the server runs again, start this site again: it continues from its files.",
    )
