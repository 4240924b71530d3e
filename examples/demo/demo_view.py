"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atoll.cli.text import awaited, size
from atoll.format_text import visible

if TYPE_CHECKING:
    from demo import Demo
    from rich.console import RenderableType

    from atoll.protocol import status_messages

SIGNS_OF_LIFE_S = 1.5
"""How often plain lines say how far a round is."""


class View(ABC):
    """Shows what happens. `status` is the server's last status."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo
        self.begin = time.monotonic()
        self.status: status_messages.Status | None = None
        self.rounds: dict[int, status_messages.RoundSummary] = {}

    @property
    def clock(self) -> str:
        return f"{time.monotonic() - self.begin:6.1f} s"

    @abstractmethod
    def say(self, text: str) -> None:
        """An event."""

    def update(self, status: status_messages.Status) -> None:
        """A new look at the run."""
        self.status = status
        self.rounds_done(status.history)

    def rounds_done(self, rounds: Iterable[status_messages.RoundSummary]) -> None:
        """Rounds that are over; those already shown are passed over."""
        for summary in rounds:
            if summary.round not in self.rounds:
                self.rounds[summary.round] = summary
                self.show_round(summary)

    @abstractmethod
    def show_round(self, summary: status_messages.RoundSummary) -> None:
        """A round is over."""


class Lines(View):
    """A line for every round, and one every few seconds in between."""

    def __init__(self, demo: Demo) -> None:
        super().__init__(demo)
        self.said = self.begin

    def say(self, text: str) -> None:
        self.said = time.monotonic()
        print(f"{self.clock}  {visible(text)}", flush=True)

    def update(self, status: status_messages.Status) -> None:
        super().update(status)
        if time.monotonic() - self.said >= SIGNS_OF_LIFE_S:
            workers = ", ".join(_short(worker) for worker in status.workers if worker.state == "alive")
            waiting = "; ".join(filter(None, map(awaited, status.fragments)))
            now = f"round {len(self.rounds) + 1}: {workers or 'the workers start'}"
            if len(self.rounds) >= self.demo.rounds:
                now, waiting = "all rounds are done; the processes end", ""
            self.say(f"{now}{f'; {waiting}' if waiting else ''}")

    def show_round(self, summary: status_messages.RoundSummary) -> None:
        self.say(round_text(self.demo, summary))


class Live(View):
    """A rich table that is drawn anew with every status."""

    def __init__(self, demo: Demo, live: Any) -> None:
        super().__init__(demo)
        self.live = live
        self.notes: list[str] = []

    def say(self, text: str) -> None:
        self.notes.append(f"{self.clock}  {text}")
        self._draw()

    def update(self, status: status_messages.Status) -> None:
        super().update(status)
        self._draw()

    def show_round(self, summary: status_messages.RoundSummary) -> None:
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.text import Text

        demo, status = self.demo, self.status
        number = min(len(self.rounds) + 1, demo.rounds)
        title = f"Atoll demo, {demo.algorithm}: round {number} of {demo.rounds}, {self.clock.strip()}"
        parts: list[RenderableType] = [Text(title, style="bold")]
        if status is not None:
            parts.append(self._table(status))
            if len(self.rounds) < demo.rounds:
                parts += [Text(line, style="yellow") for line in map(awaited, status.fragments) if line]
        parts += [Text(round_text(demo, summary)) for summary in list(self.rounds.values())[-6:]]
        parts += [Text(note, style="dim") for note in self.notes[-4:]]
        self.live.update(Group(*parts), refresh=True)

    def _table(self, status: status_messages.Status) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        waited = {missing.site for fragment in status.fragments for missing in fragment.waiting_for}
        steps = self.demo.algorithm == "diloco"
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in (
            "site",
            "doing",
            *(("step", "loss", "tokens/s") if steps else ("images", "version")),
            "up",
            "down",
        ):
            table.add_column(column, justify="left" if column in ("site", "doing") else "right", min_width=8)
        for worker in status.workers:
            doing = worker.doing if worker.state == "alive" else (worker.error or worker.state)
            colour = "red" if worker.state in ("dead", "failed") else "yellow" if worker.site in waited else "green"
            metrics = worker.metrics
            middle = (
                [str(worker.step), _number(metrics.get("loss"), ".3f"), _number(metrics.get("tokens_per_s"), ".0f")]
                if steps
                else [worker.labels.get("images", ""), str(worker.version)]
            )
            numbers = [*middle, size(worker.bytes_up), size(worker.bytes_down)]
            told = [Text(visible(each)) for each in (worker.site, *numbers)]
            table.add_row(told[0], Text(visible(doing), style=colour), *told[1:])
        return table


def round_text(demo: Demo, summary: status_messages.RoundSummary) -> str:
    """One round in one line; the global measure is that of the version it began with."""
    measure, loss = (_number(summary.metrics.get(key), ".4f") for key in (demo.metric, "loss"))
    return (
        f"round {summary.round:2d} of {demo.rounds}: {demo.metric_name} {measure} at version {summary.version - 1}, "
        f"local loss {loss}; {len(summary.workers)} workers, {size(summary.bytes_up)} up"
    )


def _short(worker: status_messages.WorkerStatus) -> str:
    loss = worker.metrics.get("loss")
    return f"{worker.site} step {worker.step}{f' loss {loss:.3f}' if loss is not None else ''}"


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else "—"


@contextmanager
def make_view(demo: Demo) -> Iterator[View]:
    """The view that fits standard output."""
    if not sys.stdout.isatty():
        yield Lines(demo)
        return
    from rich.console import Console
    from rich.live import Live as RichLive

    with RichLive(console=Console(), auto_refresh=False) as live:
        yield Live(demo, live)
