"""How long a server has not answered, and when its worker no longer waits for it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from atoll.errors import ConfigError, ServerLost
from atoll.format_text import duration

GIVE_UP_S = 86400.0
"""A night, and whoever mends the server in the morning, are to cost no site its place."""


def give_up_s() -> float:
    """`ATOLL_GIVE_UP_S`, else `GIVE_UP_S`; 0: never.

    Raises:
        ConfigError: it is no number of seconds.
    """
    text = os.environ.get("ATOLL_GIVE_UP_S", "")
    try:
        seconds = float(text) if text else GIVE_UP_S
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigError(f"ATOLL_GIVE_UP_S is {text!r}.", "Set it to seconds; 0: without an end.")
    return seconds or math.inf


class Silence:
    """Of one server towards one worker; several threads ask.

    It begins with the first attempt that failed since the last answer: in the time in which this process was stopped
    itself, nobody was asked.

    Attributes:
        was_answered: whether the server has ever answered.
    """

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock, self._most_s = server, clock, give_up_s()
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self.was_answered = False

    def answered(self) -> None:
        with self._lock:
            self._since_s, self.was_answered = None, True

    def failed(self) -> None:
        with self._lock:
            self._since_s = self._clock() if self._since_s is None else self._since_s

    @property
    def seconds(self) -> float:
        """Since when nobody has answered; 0 where the last attempt was answered."""
        with self._lock:
            return 0.0 if self._since_s is None else self._clock() - self._since_s

    @property
    def is_too_long(self) -> bool:
        """Whether the server is not waited for any more."""
        return self.seconds >= self._most_s

    @property
    def patience(self) -> str:
        """How long the server is waited for, as a sentence."""
        upto = "" if math.isinf(self._most_s) else f" for up to {duration(self._most_s)}"
        return f"This worker waits for it{upto} (ATOLL_GIVE_UP_S)."

    def error(self) -> ServerLost:
        return ServerLost(
            f"{self._server} has not answered for {duration(self.seconds)}: it is not waited for any more.",
            "If the run has ended meanwhile, its model is in the server's exports. Else start the server, then this "
            "worker again: it goes on from its files. ATOLL_GIVE_UP_S says how long one is waited for; 0: for ever.",
        )
