"""How many unanswered heartbeats mean that the network is lost."""

from __future__ import annotations

import threading
import time

from atoll.transport.http_client import Watch


class Waits:
    """A call that nothing answers."""

    def __init__(self) -> None:
        self.moved_s = time.monotonic()
        self.ended = threading.Event()

    def give_up(self) -> None:
        self.ended.set()


def lost_after(*answers: bool) -> tuple[int, bool]:
    """How many heartbeats were sent until a waiting call was ended, and whether the network was lost then."""
    watch, call, left = Watch(), Waits(), list(answers)

    def heartbeat() -> bool:
        answered = left.pop(0)
        if not answered:
            watch.missed()
        return answered

    with watch.waiting(call):
        watch.begin(heartbeat, every_s=0.05)
        assert call.ended.wait(60)
        lost = watch.is_lost
    watch.close()
    return len(answers) - len(left), lost


def test_one_unanswered_heartbeat_ends_older_calls_and_is_no_loss() -> None:
    assert lost_after(False, True) == (2, False)


def test_two_unanswered_heartbeats_in_a_row_are_a_loss() -> None:
    assert lost_after(False, False) == (2, True)
