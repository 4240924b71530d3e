"""Progress of a run in a notebook: one table, which is updated. Outside of a notebook, nothing is shown."""

from __future__ import annotations

import html
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from atoll.format_text import number_of, numbers

if TYPE_CHECKING:
    from atoll.config import Settings
    from atoll.protocol.status_messages import RoundSummary

PERIOD_S = 0.2
"""Minimum seconds between two updates."""
MOST_ROWS = 20
"""Sites that the table shows."""


def in_notebook() -> bool:
    """Return whether this program is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class Progress:
    """The table of a run: above, the round and the mean metrics; a row for each site of the last round.

    Args:
        settings: the run's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._name, self._total = settings.run.name, settings.rounds.total
        self._display: Any = None
        self._last: RoundSummary | None = None
        self._shown_s = 0.0

    def begin(self) -> None:
        """Show the table, in the cell that runs, and no log lines below WARNING. Call this in the cell's thread."""
        if in_notebook():
            import IPython.display as ipython

            show: Any = ipython.display  # untyped
            self._display = show(self, display_id=True)
            if (log := logging.getLogger("atoll")).level == logging.NOTSET:
                log.setLevel(logging.WARNING)  # the table has what the lines say

    def show(self, summary: RoundSummary) -> None:
        """Show a round that has ended, if the last update was `PERIOD_S` ago."""
        self._last = summary
        if self._display is not None and time.monotonic() - self._shown_s >= PERIOD_S:
            self._shown_s = time.monotonic()
            self._display.update(self)

    def end(self) -> None:
        """Show the last round."""
        if self._display is not None and self._last is not None:
            self._display.update(self)

    def __repr__(self) -> str:
        if (last := self._last) is None:
            return f"{self._name}: waiting for round 1"
        metrics = f": {numbers(last.metrics)}" if last.metrics else ""
        return f"{self._name}: round {last.round} of {self._total}, {number_of(len(last.sites), 'update')}{metrics}"

    def _repr_html_(self) -> str:
        head, rows = f"<b>{html.escape(repr(self))}</b>", []
        sites = self._last.sites if self._last is not None else []
        names = sorted({name for each in sites for name in each.metrics})
        for each in sites[:MOST_ROWS]:
            cells = [each.site, f"{each.weight:g}", *(f"{each.metrics.get(name, float('nan')):.4g}" for name in names)]
            rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
        if not rows:
            return head
        if (more := len(sites) - MOST_ROWS) > 0:
            rows.append(f"<td>… and {number_of(more, 'more site')}</td>")
        titles = "".join(f"<th>{html.escape(name)}</th>" for name in ("site", "weight", *names))
        return f"{head}<table><tr>{titles}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
