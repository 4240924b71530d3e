"""What the server knows of one worker: the processes that had its name, and whether its training hangs."""

from __future__ import annotations

import pytest

from atoll.protocol import messages, routes
from atoll.server.coordinator import roster
from atoll.server.coordinator.roster import STILL, Presence


def test_every_displaced_process_is_known_also_after_a_third_join() -> None:
    third: Presence | None = None
    for name in ("p1", "p2", "p3"):
        join = messages.Join(protocol=routes.PROTOCOL, site="a", host=f"host-{name}", process=name)
        third, _ = Presence.joining(join, third)
    assert third is not None
    assert third.displaced == {"p1": "host-p1", "p2": "host-p2"}
    third.meets("p1")
    assert "host-p1" in third.rival
    assert third.displaced == {"p2": "host-p2"}


def test_a_training_hangs_after_four_times_as_long_as_a_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its longest step took 100 s: 399 s without a step are as usual, and 400 s are reported."""
    now = [1000.0]
    monkeypatch.setattr(roster.time, "monotonic", lambda: now[0])
    presence = Presence("a")
    presence.note(messages.Heartbeat(state=roster.TRAINING, step=1))
    now[0] += 100.0
    presence.note(messages.Heartbeat(state=roster.TRAINING, step=2))
    assert (presence.longest_s, STILL) == (100.0, 4.0)
    now[0] += 399.0
    assert presence.hangs_s(patience_s=60.0) == 0.0
    now[0] += 1.0
    assert presence.hangs_s(patience_s=60.0) == 400.0
    assert presence.hangs_s(patience_s=401.0) == 0.0
