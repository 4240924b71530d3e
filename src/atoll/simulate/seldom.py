"""Log what hundreds of simulated sites say alike a few times."""

from __future__ import annotations

import logging
from collections import Counter

TIMES_SAID = 3


class Seldom(logging.Filter):
    """Passes on what one line of code says, `TIMES_SAID` times."""

    def __init__(self) -> None:
        super().__init__()
        self._said: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Count a record by its file and line; the last one that passes says that more are not shown."""
        place = record.pathname, record.lineno
        self._said[place] += 1
        if self._said[place] == TIMES_SAID:
            record.msg = f"{record.msg} (what follows of this kind is not shown)"
        return self._said[place] <= TIMES_SAID
