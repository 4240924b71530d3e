"""The gate of a server: credentials, the connections of each site, the Host header, and the log of refusals."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from atoll.config import Settings
from atoll.config.settings import Limits
from atoll.errors import AtollError, AuthError, Busy, ConfigError, Forbidden
from atoll.protocol import routes
from atoll.server.http.caller import Caller, ShownCredentials, Tokens, require_own
from atoll.store.identities import KnownSites
from atoll.transport.rates import Rates, network_of
from atoll.transport.tls import is_loopback, read_token

LOG = logging.getLogger("atoll.server")

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
REPEAT_S = 60.0
"""Seconds within which the log says the same refusal only once."""
MOST_SAID = 100
"""Number of different refusals of the last `REPEAT_S` seconds in the log; more are only counted."""


class Refusals:
    """Counts refused requests by kind, and logs them, but no text more than once in `REPEAT_S` seconds.

    Args:
        now_s: the clock, in seconds.

    Attributes:
        counts: reason of refusal, such as `token` → number of refused requests.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.counts: Counter[str] = Counter({"token": 0, "caller": 0, "host": 0, "join": 0})
        self._said_s: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def note(self, kind: str, text: str) -> None:
        """Count a refused request, and log `text` if it is due."""
        self.counts[kind] += 1
        now_s = self._now_s()
        self._said_s = {said: at_s for said, at_s in self._said_s.items() if now_s - at_s < REPEAT_S}
        if text in self._said_s or len(self._said_s) >= MOST_SAID:
            self._unsaid[kind] += 1
            return
        more = self._unsaid.pop(kind, 0)
        LOG.warning("%s%s", text, f" ({more} more since the last such line)" if more else "")
        self._said_s[text] = now_s


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


class Gate:
    """The credentials that a server knows, and the check of the Host header of every request.

    Args:
        token: token of the run's sites; None if the server needs none of them.
        local: whether the server listens on loopback only. If so, and if there is no token, the Host header of every
            request must name a loopback address.
        own_credentials: whether each site needs a credential of its own.
        allowed: the setting `trust.sites`.
        limits: what each caller may take.

    Attributes:
        tokens: the tokens of sites, readers and the admin.
        refusals: counts and logs the requests that this server has refused.
        known: what the server knows of the credentials of sites.
        authority: common name of the run's own authority; empty if it has none.
        connections: the open connections of sites.
        rates: how often callers may send requests.
        clock: returns the Unix time in seconds.
    """

    def __init__(
        self,
        token: str | None,
        *,
        local: bool = False,
        own_credentials: bool = False,
        allowed: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self.refusals, self.tokens = Refusals(), Tokens(token, own_credentials=own_credentials)
        self._needs_local_name, self._allowed = local and self.tokens.is_open, allowed
        self.known, self.authority = KnownSites(), ""
        self.connections, self.rates = SiteConnections(limits.site_connections), CallerRates(limits)
        self.clock: Callable[[], float] = time.time

    def shown(self, certificate: Mapping[str, Any] | None) -> ShownCredentials:
        """Return what decides which site a request is from, for a connection with this certificate."""
        return ShownCredentials(self.known, self.clock(), certificate, self.authority)

    def may_refuse_names(self, caller: Caller) -> bool:
        """Return whether `require_own` can refuse a name at all. If not, the names in a request need no lookup."""
        has_rules = bool(self._allowed) or self.tokens.own_credentials or bool(self.known.rows)
        return has_rules or caller.identity is not None

    def require_own(self, caller: Caller, named: str) -> None:
        """Refuse a request for a site that its credential does not prove. See `caller.require_own`.

        Raises:
            Forbidden: as there.
        """
        require_own(caller, named, self.known, self.tokens, self._allowed)

    def require_host(self, hosts: Sequence[str]) -> None:
        """Refuse a request of a web page that reaches this server through a browser on this machine, by DNS rebinding.

        A web page can let its own host name resolve to 127.0.0.1. The browser then sends the page's requests to this
        server, and lets the page read the answers. But the Host header has the page's host name.

        Args:
            hosts: the Host headers of the request.

        Raises:
            AuthError: the request has no Host header, or one that does not name a loopback address.
        """
        if not self._needs_local_name or (hosts and all(map(_is_local_name, hosts))):
            return
        raise AuthError(
            f"The request is for host {', '.join(hosts)[:100]!r}, but a server without a token accepts only "
            "requests for its own machine.",
            "Use 127.0.0.1, [::1] or localhost as the host, or set ATOLL_TOKEN at the server and its workers.",
        )


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
"""A host name, an IPv4 address, or an IPv6 address in brackets; then optionally a port."""


def _is_local_name(host: str) -> bool:
    """Return whether a Host header names a loopback address. The port does not matter, because it may be forwarded."""
    match = _HOST.fullmatch(host.strip())
    return match is not None and is_loopback(match[1].lower().removesuffix("."))


def needs_credentials(settings: Settings) -> bool:
    """Return whether each site needs a credential of its own (`trust.required`)."""
    network, trust = settings.network, settings.trust
    if trust.required is not None:
        return trust.required
    is_open = not is_loopback(network.host) and not network.insecure
    return is_open or trust.address is not None or trust.authority is not None


def makes_tls(settings: Settings) -> bool:
    """Return whether the server makes a certificate of its own: it uses TLS, and no setting names a certificate."""
    network, trust = settings.network, settings.trust
    if network.tls_cert is not None or network.insecure:
        return False
    return not is_loopback(network.host) or (needs_credentials(settings) and trust.address is None)


def has_tls(settings: Settings) -> bool:
    """Return whether the server uses TLS."""
    return settings.network.tls_cert is not None or makes_tls(settings)


def open_gate(settings: Settings) -> Gate:
    """Return the check of requests for a server with these settings.

    Raises:
        ConfigError: other machines can reach the server, but its sites need neither credentials nor a token, and
            `network.insecure` is not set.
    """
    token, network, own = read_token(settings.network.token_file), settings.network, needs_credentials(settings)
    if not (is_loopback(network.host) or network.insecure or token or own):
        raise ConfigError(
            f"network.host is {network.host}, which other machines can reach, but trust.required is false, and the "
            "server has no token (ATOLL_TOKEN or network.token_file).",
            "Leave trust.required out, or listen on 127.0.0.1, or set network.insecure = true on a trusted network.",
        )
    return Gate(
        token.text if token else None,
        local=is_loopback(network.host),
        own_credentials=own,
        allowed=settings.trust.sites,
        limits=settings.limits,
    )
