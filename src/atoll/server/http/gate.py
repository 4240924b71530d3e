"""The gate of a server: its tokens, the Host header of requests to one without a token, and the log of refusals."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

from atoll.config import Settings
from atoll.errors import AuthError, ConfigError
from atoll.server.http.caller import Tokens
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
    """The tokens of a server, and the check of the Host header of every request.

    Args:
        token: token of the run's sites; None if the server needs none of them.
        local: whether the server listens on loopback only. If so, and if there is no token, the Host header of every
            request must name a loopback address.

    Attributes:
        tokens: the tokens of sites, readers and the admin.
        refusals: counts and logs the requests that this server has refused.
    """

    def __init__(self, token: str | None, *, local: bool = False) -> None:
        self.refusals, self.tokens = Refusals(), Tokens(token)
        self._needs_local_name = local and self.tokens.is_open

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


def open_gate(settings: Settings) -> Gate:
    """Return the check of requests for a server with these settings.

    Raises:
        ConfigError: other machines can reach the server, but it has no TLS or no token, and `network.insecure` is not
            set.
    """
    token = read_token(settings.network.token_file)
    if not is_loopback(settings.network.host) and not settings.network.insecure:
        lacking = [
            name
            for name, is_set in (
                ("TLS (network.tls_cert, network.tls_key)", settings.network.tls_cert),
                ("a token (ATOLL_TOKEN or network.token_file)", token),
            )
            if not is_set
        ]
        if lacking:
            raise ConfigError(
                f"network.host is {settings.network.host}, which other machines can reach, but the server "
                f"lacks {' and '.join(lacking)}.",
                "Set them, or listen on 127.0.0.1, or set network.insecure = true on a trusted network.",
            )
    return Gate(token.text if token else None, local=is_loopback(settings.network.host))
