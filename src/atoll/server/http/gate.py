"""The gate of a server: the credentials that it knows, the Host header, and the log of refusals."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.config import Settings
from atoll.config.settings import Limits
from atoll.errors import AuthError, ConfigError
from atoll.server.http.caller import Caller, ShownCredentials, Tokens, require_own
from atoll.server.http.caller_limits import CallerRates, SiteConnections
from atoll.store.identities import KnownSites
from atoll.transport.tls import is_loopback, read_token

LOG = logging.getLogger("atoll.server")

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
