"""What `atoll run` shows: on a terminal a live table of the sites, elsewhere lines."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.text import (
    awaited,
    duration,
    log_lines,
    numbers,
    size,
    some,
    telling_what_is_awaited,
    time_left,
)
from atoll.format_text import visible
from atoll.protocol.status_messages import Status, WorkerStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

LOG = logging.getLogger("atoll.cli")

NARROW = 60
"""Columns of a terminal below which the table shows fewer columns."""
MANY = 20
"""Number of sites above which their joining is not told, and the table shows those first that need a look."""
AROUND = 8
"""Lines of a terminal that are not rows of the table."""
COLUMNS = ("site", "state", "round", "seconds", "bytes", "metrics")


class RunView:
    """Shows a run. Call `show` several times a second.

    Args:
        sites: the names of the sites.
        ended: site → how its process ended, as text; it grows.
        named: the run, for a command to copy.
        quiet: show errors and warnings alone.
        verbose: show what the processes print, too.
        json: standard output is for the summary; lines go to standard error.

    Attributes:
        phase: what happens before the server answers, as text.
        is_over: whether all processes of a finished run have ended.
    """

    def __init__(
        self, sites: Sequence[str], ended: Mapping[str, str], named: str, *, quiet: bool, verbose: bool, json: bool
    ) -> None:
        log_lines(sys.stderr if json else None)
        logging.getLogger("atoll").setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
        self._sites, self._verbose = sites, verbose
        self._wants_live = sys.stdout.isatty() and not (quiet or json) and os.environ.get("TERM") != "dumb"
        self._live: Live | None = None
        self._begin_s, self._round = time.monotonic(), 0
        self._status: Status | None = None
        self._telling = ExitStack()
        self._joined, self._warned = set[str](), set[str]()
        self._named, self._version, self._paused, self._stopping = named, 0, False, False
        self._read: dict[Path, int] = {}
        self.phase, self.ended, self.is_over = "", ended, False

    def __enter__(self) -> RunView:
        if self._wants_live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(), auto_refresh=False)
            self._live.start()
        else:
            self._telling.enter_context(telling_what_is_awaited(lambda: visible(self._sentence(self._status))))
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._telling.close()

    def say(self, line: str) -> None:
        """Print a line, above the table if there is one."""
        LOG.info("%s", visible(line))

    def begin_phase(self, text: str, still: str) -> None:
        """Say what happens now; while it takes longer, say `still`, and how long it has taken."""
        self.phase, self._begin_s = still, time.monotonic()
        self.say(text)

    def show(self, status: Status | None, where: str) -> None:
        """Show the status of the run; None before its server has answered.

        Args:
            status: the status.
            where: the server's address and the folder, for the line below the table.
        """
        if status is not None:
            self._tell_news(status)
        self._status = status
        if self._live is not None:
            self._live.update(self._table(status, where), refresh=True)

    def show_logs(self, logs: Mapping[str, Path]) -> None:
        """With `verbose`, print the new lines of the processes' logs, each with the name of its process."""
        for name, path in logs.items() if self._verbose else ():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(end)
            for line in whole.decode(errors="replace").splitlines():
                LOG.debug("%s", visible(f"{name} | {line}"))

    def skip_logs(self, logs: Mapping[str, Path]) -> None:
        """Leave out what the logs have already, from an earlier start."""
        self._read |= {path: path.stat().st_size for path in logs.values() if path.exists()}

    def skip_rounds(self, status: Status) -> None:
        """Leave out the rounds that a run has already, from an earlier start."""
        self._round, self._version = _last_round(status), status.version

    # -- lines

    def _tell_news(self, status: Status) -> None:
        for worker in status.workers:
            if worker.site not in self._joined and worker.state.startswith("alive") and worker.heard:
                self._joined.add(worker.site)
                if not self._round and len(self._sites) <= MANY:
                    self.say(f"{worker.site} has joined")
        for warning in status.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                LOG.warning("%s", visible(warning))
        self._tell_control(status)
        for summary in status.history:
            if summary.fragment == 0 and summary.round > self._round:
                self._round, self._begin_s = summary.round, time.monotonic()
                sent = size(summary.bytes_up) if summary.sites else ""
                told = ", ".join(filter(None, [summary.counted, numbers(summary.metrics), sent]))
                left = f"; {time_left(status.left_s)}" if status.left_s is not None and not status.finished else ""
                self.say(f"round {summary.round} of {status.rounds or '∞'}: {told}{left}")

    def _tell_control(self, status: Status) -> None:
        """Say what the admin has done with the run since the last look."""
        if status.version < self._version:
            self._round, self._begin_s = _last_round(status), time.monotonic()
            self.say(f"the run went back to version {status.version}; it goes on with round {self._round + 1}")
        self._version = status.version
        if status.stopping and not self._stopping:
            self.say("the admin has stopped the run: it ends with this round")
        elif status.paused != self._paused and not status.stopping:
            paused = f"the admin has paused the run; to go on: atoll resume {self._named}"
            self._begin_s = time.monotonic()
            self.say(paused if status.paused else "the admin lets the run go on")
        self._paused, self._stopping = status.paused, status.stopping

    def _sentence(self, status: Status | None) -> str:
        """Return what the run waits for; None: there is no status yet."""
        if status is None or not status.fragments:
            return self.phase
        if status.finished:
            last = status.evaluation.running if status.evaluation is not None else None
            then = "; its processes end" if last is None else f"; version {last} is being evaluated"
            return f"the run is finished{'' if self.is_over else then}"
        missing = [site for site in self._sites if site not in self._joined | self.ended.keys()]
        if missing and not self._round:
            imports = "imports" if len(missing) == 1 else "import"
            return f"waiting for {some(missing)}, which {imports} the script"
        if status.paused:
            return f"the run is paused; to go on: atoll resume {self._named}"
        fragment = status.fragments[0]
        what = awaited(fragment, has_times=False) or fragment.phase
        return f"round {self._round + 1} of {status.rounds or '∞'}: {what}"

    # -- the table

    def _table(self, status: Status | None, where: str) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        assert self._live is not None
        console = self._live.console
        is_narrow = console.width < NARROW
        shown = [0, 1, 5] if is_narrow else range(len(COLUMNS))
        grid = Table(box=None, pad_edge=False, header_style="bold")
        for column in shown:
            grid.add_column(
                COLUMNS[column],
                overflow="fold",  # a shortened name could be that of another site
                justify="right" if column in (2, 3, 4) else "left",
                min_width=4,
            )
        rows = self._rows(status)
        most = max(3, console.height - AROUND)
        for row in rows[:most]:
            cells = [Text(visible(row[column])) for column in shown]
            cells[1].stylize("red" if row[0] in self.ended else "green" if row[2] != "-" else "dim")
            grid.add_row(*cells)
        more = [Text(f"and {len(rows) - most} more sites", style="dim")] if len(rows) > most else []
        left = time_left(status.left_s) if status is not None else ""
        elapsed = duration(math.floor(time.monotonic() - self._begin_s))
        told = self._sentence(status)
        line = "; ".join(filter(None, [f"{told} ({elapsed})" if told and not self.is_over else told, left]))
        return Group(grid, *more, Text(visible(line)), Text(where, style="dim"))

    def _rows(self, status: Status | None) -> list[tuple[str, ...]]:
        """Return the cells of all sites: those that have ended first, then those that are awaited."""
        found = {worker.site: worker for worker in status.workers} if status is not None else {}
        late = [each.site for fragment in status.fragments for each in fragment.waiting_for] if status else []
        order = {site: 0 if site in self.ended else 1 if site in late else 2 for site in self._sites}
        is_whole = len(self._sites) <= MANY
        names = list(self._sites) if is_whole else sorted(self._sites, key=lambda site: order[site])
        return [self._row(site, found.get(site)) for site in names]

    def _row(self, site: str, worker: WorkerStatus | None) -> tuple[str, ...]:
        if worker is None or site in self.ended:
            return (site, self.ended.get(site, "starts"), "-", "-", "-", "")
        last, step = worker.last, f", step {worker.step}" if worker.step else ""
        nbytes = worker.bytes_up + worker.bytes_down or (last.nbytes if last else 0)
        return (
            site,
            worker.doing or worker.state if worker.state.startswith("alive") else worker.state,
            f"{worker.rounds}{step}",
            duration(last.train_seconds) if last else "-",
            size(nbytes),
            worker.error or numbers(last.metrics if last else worker.metrics),
        )


def _last_round(status: Status) -> int:
    return max((each.round for each in status.history if each.fragment == 0), default=0)
