"""What `atoll demo` shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atoll.cli.text import awaited, duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.cli.demo import Demo
    from atoll.wire import messages

SIGNS_OF_LIFE_S = 10.0
"""How often plain lines say how far a round is."""


class Lines:
    """A line for every round, and one every few seconds in between."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo
        self.begin = self.said = time.monotonic()
        self.rounds = 0

    def say(self, text: str) -> None:
        self.said = time.monotonic()
        print(f"{duration(self.said - self.begin):>8}  {text}", flush=True)

    def update(self, status: messages.Status) -> None:
        for summary in status.history:
            if summary.round > self.rounds:
                self.rounds = summary.round
                self.say(round_text(self.demo, summary))
        if time.monotonic() - self.said >= SIGNS_OF_LIFE_S:
            workers = ", ".join(_short(worker) for worker in status.workers if worker.state == "alive")
            self.say(f"round {self.rounds + 1}: {workers or 'no worker has joined yet'}")


class Live:
    """A rich table that is drawn anew with every status."""

    def __init__(self, demo: Demo, live: Any) -> None:
        self.demo, self.live = demo, live
        self.begin = time.monotonic()
        self.notes: list[str] = []
        self.rounds: dict[int, messages.RoundSummary] = {}
        self.status: messages.Status | None = None

    def say(self, text: str) -> None:
        self.notes.append(f"{duration(time.monotonic() - self.begin):>8}  {text}")
        self._draw()

    def update(self, status: messages.Status) -> None:
        self.rounds |= {summary.round: summary for summary in status.history}
        self.status = status
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.text import Text

        demo, status = self.demo, self.status
        clock = duration(time.monotonic() - self.begin)
        title = (
            f"atoll demo, {demo.algorithm}: round {min(len(self.rounds) + 1, demo.rounds)} of {demo.rounds}, {clock}"
        )
        parts: list[RenderableType] = [Text(title, style="bold")]
        if status is not None:
            parts += [
                self._table(status),
                *(Text(line, style="yellow") for line in map(awaited, status.fragments) if line),
            ]
        parts += [Text(round_text(demo, summary)) for summary in list(self.rounds.values())[-6:]]
        parts += [Text(note, style="dim") for note in self.notes[-4:]]
        self.live.update(Group(*parts), refresh=True)

    def _table(self, status: messages.Status) -> RenderableType:
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
            table.add_row(
                worker.site, Text(doing, style=colour), *middle, size(worker.bytes_up), size(worker.bytes_down)
            )
        return table


def round_text(demo: Demo, summary: messages.RoundSummary) -> str:
    """One round in one line; the global measure is that of the version it began with."""
    metrics = summary.metrics
    return (
        f"round {summary.round:2d} of {demo.rounds}: {demo.metric_name} of version {summary.version - 1} "
        f"{_number(metrics.get(demo.metric), '.4f')}, local loss {_number(metrics.get('loss'), '.3f')}, "
        f"{len(summary.workers)} workers, {size(summary.bytes_up)} up"
    )


def _short(worker: messages.WorkerStatus) -> str:
    loss = worker.metrics.get("loss")
    return f"{worker.site} step {worker.step}{f' loss {loss:.3f}' if loss is not None else ''}"


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else "—"


@contextmanager
def make_view(demo: Demo) -> Iterator[Lines | Live]:
    """The view that fits standard output."""
    if not sys.stdout.isatty():
        yield Lines(demo)
        return
    from rich.console import Console
    from rich.live import Live as RichLive

    with RichLive(console=Console(), auto_refresh=False) as live:
        yield Live(demo, live)
