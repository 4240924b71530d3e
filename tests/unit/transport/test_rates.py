"""Rates by key: what fits, how long the rest waits, and what is remembered."""

from __future__ import annotations

import pytest

from atoll.transport import rates
from atoll.transport.rates import Rates, network_of


def test_a_rate_by_hand() -> None:
    """With 2 uses a second and 3 at once, the fourth waits half a second. A use that would wait too long is refused and
    does not count. Another key has a rate of its own.
    """
    now_s = [100.0]
    found = Rates(2.0, 3.0, most_wait_s=1.0, now_s=lambda: now_s[0])
    assert [found.use("a") for _ in range(3)] == [(0.0, True)] * 3
    assert [found.use("a") for _ in range(3)] == [(0.5, True), (1.0, True), (1.5, False)]
    assert found.use("b") == (0.0, True)
    now_s[0] += 0.5
    assert found.use("a") == (1.0, True)
    now_s[0] += 60.0  # a pause saves up 3 uses, not more
    assert [found.use("a") for _ in range(4)] == [(0.0, True)] * 3 + [(0.5, True)]
    assert [found.use("c", 2.0), found.use("c", 2.0)] == [(0.0, True), (0.5, True)]
    assert found.use("d", 1e9) == (0.0, True)  # worth as much as all at once
    found.give_back("d")
    assert [found.use("d"), found.use("d")] == [(0.0, True), (0.5, True)]


def test_the_memory_of_a_rate_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate remembers the keys that were used last, and no more than `MOST_KEYS`."""
    monkeypatch.setattr(rates, "MOST_KEYS", 2)
    found = Rates(1.0, 1.0, now_s=lambda: 0.0)
    for key in ("a", "b", "a", "c"):
        found.use(key)
    assert not found.use("c")[1]
    assert found.use("b")[1]  # it was forgotten
    assert len(found._used_s) == 2


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_one_machine_is_one_network(address: str, network: str) -> None:
    """All IPv6 addresses of a machine count together, and an IPv4 address in either spelling."""
    assert network_of(address) == network
