"""What the server knows of one worker: whether its training hangs."""

from __future__ import annotations

import pytest

from atoll.protocol import messages
from atoll.server.coordinator import roster
from atoll.server.coordinator.roster import STILL, Presence


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
