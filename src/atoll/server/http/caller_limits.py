"""Limits of what a caller may send: requests, wrong credentials, joins, and the connections of each site."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

from atoll.config.settings import Limits
from atoll.errors import AtollError, AuthError, Busy, Forbidden
from atoll.protocol import routes
from atoll.server.http.caller import Caller
from atoll.transport.rates import Rates, network_of

REQUEST_WAIT_S = 2.0
"""Maximum seconds for which a request waits because its caller sends too many."""
WORTH: Mapping[str, float] = {
    routes.OPENAPI: 100,
    routes.UPDATES_TABLE: 100,
    routes.METRICS: 25,
    routes.SITE_CURVES: 25,
    routes.SETTINGS: 25,
    routes.MODEL: 25,
    routes.SCHEMA: 10,
    routes.EVALUATION: 10,
}
"""Path → number of usual requests that one for it counts as, because of its time at the server."""
REFUSED_S = 0.5
"""Seconds before the answer to a refused request of an address that has sent too many."""


class CallerRates:
    """How often callers may send requests. A caller is a site, or else an address.

    A request over the rate waits, so that its connection sends no other one meanwhile; if the wait were longer than
    `REQUEST_WAIT_S`, the request is refused. Those without a credential, or with a wrong one, count for their address,
    but keep no right one out.

    Args:
        limits: the settings.
    """

    def __init__(self, limits: Limits) -> None:
        self._requests = Rates(limits.site_requests_per_s, 2 * limits.site_requests_per_s, REQUEST_WAIT_S)
        self._strangers = Rates(limits.site_requests_per_s, 2 * limits.site_requests_per_s, REQUEST_WAIT_S)
        self._joins = Rates(limits.joins_per_minute / 60, limits.joins_per_minute, REQUEST_WAIT_S)
        self._wrong = Rates(limits.wrong_credentials / 60, limits.wrong_credentials)

    async def admit(self, caller: Caller, path: str, held: str = "") -> None:
        """Wait until a caller may send a request for this path.

        Args:
            caller: the caller.
            path: the path of the operation.
            held: the object of which the caller has shown the secret; empty if there is none.

        Raises:
            Busy: it sends too many.
        """
        rates, key, setting = self._requests, caller.key, "site_requests_per_s"
        if path == routes.WORKERS:  # with each lease, a process could else join under a new name
            rates, key, setting = self._joins, caller.payer, "joins_per_minute"
        elif held:
            key = f"{key} for object {held[:8]}"
        elif caller.kind in ("stranger", "peer"):
            rates = self._strangers
        wait_s, fits = rates.use(key, WORTH.get(path, 1.0))
        if wait_s:
            await asyncio.sleep(min(wait_s, REQUEST_WAIT_S))
        if not fits:
            what = "joins" if rates is self._joins else "requests"
            raise busy(f"{key} sends too many {what} (limits.{setting}).", wait_s, f"Send fewer {what}")

    async def refuse(self, address: str, refused: AuthError, *, has_credential: bool) -> AtollError:
        """Return the error for a refused request: that of too many wrong credentials, slowly, after so many of them."""
        is_wrong = has_credential and not isinstance(refused, Forbidden)
        key = network_of(address)
        wait_s, fits = (self._wrong if is_wrong else self._strangers).use(key)
        if fits:
            await asyncio.sleep(wait_s)
            return refused
        await asyncio.sleep(REFUSED_S)
        setting = "wrong_credentials" if is_wrong else "site_requests_per_s"
        told = f"{refused.message} {key} has sent too many requests that were refused (limits.{setting})."
        return busy(told, wait_s, refused.remedy.rstrip(".") or "Send fewer requests")


class TooManyConnections(Busy):
    """A site has too many connections. The server ends this one, because it counts for no site."""


def busy(message: str, wait_s: float, remedy: str, kind: type[Busy] = Busy) -> Busy:
    """Return the error that asks a caller to come again later; `remedy` is a sentence without its full stop."""
    error = kind(message, f"{remedy}; requests of other callers are answered.")
    error.retry_after_s = max(1.0, wait_s)
    return error


class SiteConnections:
    """The open connections of sites, to be closed when a site is revoked.

    Args:
        most: maximum number of connections of a site.
    """

    def __init__(self, most: int) -> None:
        self._most, self._open = most, dict[str, WeakSet[asyncio.Transport]]()
        self._site_of: WeakKeyDictionary[asyncio.Transport, str] = WeakKeyDictionary()
        self._to_abort: WeakSet[asyncio.Transport] = WeakSet()

    @contextmanager
    def during(self, caller: Caller, transport: asyncio.Transport | None) -> Iterator[None]:
        """Note that a connection has a request of a site. It counts for it until it ends, or another site uses it.

        Without the site's certificate, it may be that of a proxy. So a revocation ends it only during the request.

        Raises:
            TooManyConnections: the site has too many.
        """
        if not caller.site or transport is None:
            yield
            return
        if self._site_of.get(transport) != caller.site:
            self._take(caller.site, transport)
        self._to_abort.add(transport)
        try:
            yield
        finally:
            if not caller.by_certificate:
                self._to_abort.discard(transport)

    def _take(self, site: str, transport: asyncio.Transport) -> None:
        if site not in self._open:
            self._open = {other: theirs for other, theirs in self._open.items() if theirs}
        of_site = self._open.setdefault(site, WeakSet())
        is_over = len(of_site) >= self._most and sum(not each.is_closing() for each in of_site) >= self._most
        if is_over:
            told = f"Site {site} has {self._most} connections (limits.site_connections)."
            raise busy(told, 1.0, "Close some of them, or use them for further requests", TooManyConnections)
        before = self._site_of.get(transport)
        if before in self._open:
            self._open[before].discard(transport)
        of_site.add(transport)
        self._site_of[transport] = site

    def close(self, site: str) -> None:
        """Close the connections of a site at once. Requests under way are cancelled."""
        for transport in self._open.pop(site, WeakSet()):
            self._site_of.pop(transport, None)
            if transport in self._to_abort:
                transport.abort()
