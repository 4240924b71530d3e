"""How often each of many callers may do something: rates by key, in bounded memory."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

MOST_KEYS = 10_000
"""Maximum number of keys of which a `Rates` knows. Without room, it forgets the one that was used longest ago."""


def network_of(address: str) -> str:
    """Return the address of a client; of IPv6 its network of 64 bits, because one machine has all addresses of it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a closed connection, or a socket of another family
        return address
    if found.version == 6 and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found.ipv4_mapped if found.version == 6 else found)


class Rates:
    """A rate for each key: on average `per_s` a second, and up to `burst` at once (a token bucket).

    Args:
        per_s: uses a second.
        burst: uses at once after a pause.
        most_wait_s: uses are refused if they would have to wait longer.
        now_s: the clock, in seconds.
    """

    def __init__(
        self, per_s: float, burst: float, most_wait_s: float = 0.0, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._each_s, self._burst_s = 1.0 / per_s, burst / per_s
        self._most_wait_s, self._now_s = most_wait_s, now_s
        self._used_s: OrderedDict[str, float] = OrderedDict()  # key → time at which its bucket is full again

    def use(self, key: str, count: float = 1.0) -> tuple[float, bool]:
        """Count a use, or one that is worth several, but no more than `burst`.

        Return the seconds after which there is room for it, and whether it may wait for that time.
        """
        now_s = self._now_s()
        full_s = max(now_s, self._used_s.get(key, now_s)) + min(count * self._each_s, self._burst_s)
        wait_s = full_s - now_s - self._burst_s
        fits = wait_s <= self._most_wait_s
        if fits:
            self._used_s[key] = full_s
        if key in self._used_s:
            self._used_s.move_to_end(key)
        if len(self._used_s) > MOST_KEYS:
            self._used_s.popitem(last=False)
        return max(0.0, wait_s), fits

    def give_back(self, key: str) -> None:
        """Take back a use that should not have been counted."""
        if key in self._used_s:
            self._used_s[key] -= self._each_s
