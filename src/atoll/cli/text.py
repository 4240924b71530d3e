"""Format numbers and lines of text in the same way for every command."""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import os
import queue
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from atoll.errors import UsageError
from atoll.format_text import LOG_JSON, LOG_LEVEL, JsonLines, VisibleLines, json_line, listed
from atoll.format_text import duration as duration
from atoll.format_text import log_level as log_level
from atoll.format_text import logs_json as logs_json
from atoll.format_text import number_of as number_of
from atoll.format_text import numbers as numbers
from atoll.format_text import size as size
from atoll.format_text import time_left as time_left

if TYPE_CHECKING:
    from atoll.protocol import status_messages

LogJson = Annotated[
    bool, typer.Option("--log-json", help="Print each line as a JSON object, for programs that collect logs.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print what helps to find a fault, too.")]
ELSEWHERE = "Give a file in a folder that this user may write."
"""Remedy for an output file that cannot be written."""
QUIET_S = 30.0
"""Seconds without progress after which the line about a workflow says how long nothing has moved."""
MOST_LINES = 1000
"""Largest number of log lines that wait for standard output; further lines are dropped."""
UNREAD_S = 2.0
"""Seconds that a command waits for standard output to take its last lines, or for standard error to take a line."""
SILENT_S = 1.5
"""Seconds without a line after which a line says what is awaited. Later pauses double, up to `LONGEST_S`."""
FIRST_S = 0.2
"""Seconds of its imports after which a command says that it loads: with the time before them, half a second."""
EARLY_S = 30.0
"""Seconds of one wait in which the pauses do not double: a person may be watching the start."""
LONGEST_S = 60.0

UNTRAINED = "no round made a version, so the model is as it began"

SOME = 3
"""Number of names that `some` shows."""
MOST_NAMED = 20
"""Largest number of sites that a line names."""
NAME_BYTES = 255
"""Maximum length of a file name on usual file systems, in bytes."""


def require_short(path: Path) -> None:
    """Check the length of the name of a file or folder that a command is going to create.

    Raises:
        UsageError: the name is too long.
    """
    if len(os.fsencode(path.name)) > NAME_BYTES:
        raise UsageError(f"The name {path.name!r} has more than {NAME_BYTES} bytes.", "Give a shorter one.")


def require_file(out: Path, example: str) -> None:
    """Check, before the work begins, that a command can write its result to `out`.

    Args:
        out: the path from the command line.
        example: a file name for the remedy.

    Raises:
        UsageError: `out` is a folder, or its name is too long.
        StoreError: the folder of `out` cannot be made, or this user may not write into it.
    """
    from atoll.posix import require_writable_folder

    require_short(out)
    if out.is_dir():
        raise UsageError(f"{str(out)!r} is a folder, not a file.", f"Give a file name: {out / example}.")
    require_writable_folder(out.parent, ELSEWHERE)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


WIDE = 10_000
"""Width of a table that no terminal shows: a program that reads it gets each row in one line."""
FOLD_CHARS = 24
"""Least width of a column with folded texts."""


def width_of_output() -> int:
    """Return the width of the terminal on standard output in characters; `WIDE` if it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else WIDE


def fitting(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return a table as lines of text that fit into a width.

    If its last column has too little room beside the others, it is folded; if it has none, each row becomes a block of
    lines: its first cell, and below that one line a column.

    Args:
        titles: the titles of the columns.
        rows: the cells.
        width: the width in characters.
    """
    lines = aligned([titles, *rows])
    if max(map(len, lines)) <= width:
        return lines
    heads = aligned([titles[:-1], *(row[:-1] for row in rows)])
    begin = max(map(len, heads)) + 2
    if width - begin >= FOLD_CHARS:
        return [
            f"{head if not number else '':{begin}}{part}".rstrip()
            for head, cells in zip(heads, (titles, *rows), strict=True)
            for number, part in enumerate(textwrap.wrap(cells[-1], width - begin) or [""])
        ]
    return [
        line
        for row in rows
        for title, cell in zip(titles, row, strict=True)
        for line in textwrap.wrap(
            cell if title == titles[0] else f"{title}: {cell}",
            max(width, FOLD_CHARS // 2),
            initial_indent="" if title == titles[0] else "  ",
            subsequent_indent="    ",
        )
    ]


def staleness(counts: Mapping[str, int]) -> str:
    """Return how outdated the aggregated updates were, as text: "staleness 1.3 on average, at most 4".

    The staleness of an update is the number of versions that were committed between the update's base version and the
    version that contains the update.

    Args:
        counts: staleness → number of updates with this staleness. If empty, the text is empty.
    """
    total = sum(counts.values())
    if not total:
        return ""
    mean = sum(int(behind) * count for behind, count in counts.items()) / total
    return f"staleness {mean:.2g} on average, at most {max(map(int, counts))}"


def some(names: Collection[str]) -> str:
    """Return a text with the first `SOME` names, and the number of the others."""
    more = len(names) - SOME
    return ", ".join(list(names)[:SOME]) + (f" and {more} more" if more > 0 else "")


def awaited(fragment: status_messages.FragmentStatus, *, has_times: bool = True) -> str:
    """Return a text about what a round waits for: which sites, how long, and why; empty if there is nothing to say.

    Args:
        fragment: the status of a fragment.
        has_times: whether each site is followed by the time for which it is awaited.
    """
    shown = [
        f"{missing.site} ({duration(missing.for_s)})" if has_times else missing.site
        for missing in fragment.waiting_for[:MOST_NAMED]
    ]
    more = len(fragment.waiting_for) - len(shown)
    sites = ", ".join([*shown, *([f"and {more} more"] if more else [])])
    reason = fragment.reason.removeprefix("is finished").removeprefix("; ")  # the line already names the phase
    if sites and reason.startswith("waits for "):  # the reason names the same sites, but without the times
        reason = reason.partition("; ")[2]
    return "; ".join(filter(None, [f"waiting for {sites}" if sites else "", reason]))


def after_run(named: str) -> str:
    """Return the commands that show the result of a run that is over. `named`: the run, quoted for a shell."""
    return f"atoll page {named}; for its model: atoll export model.safetensors {named}"


def faults_of_evaluation(failed: Mapping[str, str], failures: int) -> str:
    """Return a text about versions without a complete evaluation, with the last problem; empty if there is none.

    Args:
        failed: version → the problem of its evaluation, for the last ones.
        failures: number of such versions.
    """
    if not failed:
        return ""
    last, problem = [*failed.items()][-1]
    many = f"{failures} versions without a complete evaluation, the last one"
    return f"{many if failures > 1 else 'no complete evaluation of'} version {last}: {problem}"


def task_totals(tasks: Mapping[str, int]) -> str:
    """Return a text that says how many tasks were sent, and in which ways; empty if none was sent.

    Args:
        tasks: way of sending (`streamed`, `inline` or `without_tensors`) → number of tasks.
    """
    return f"{number_of(sum(tasks.values()), 'task')} sent: {_ways(tasks)}" if tasks else ""


def _ways(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {way.replace('_', ' ')}" for way, count in counts.items())


def task_line(task: status_messages.TaskStatus) -> str:
    """Return one line about a task: its sites, its answers, and which sites have not answered."""
    count = sum(task.answers.values())
    ways = f" ({_ways(task.answers)})" if task.answers else ""
    waits = f"; {'waiting for' if task.open else 'none from'} {listed(task.missing)}" if task.missing else ""
    return (
        f"task {task.number} {task.name}: {task.way.replace('_', ' ')} to {listed(task.sites)}; "
        f"{count} of {number_of(len(task.sites), 'answer')}{ways}{waits}, {duration(task.seconds)}"
    )


def workflow_lines(workflows: Sequence[status_messages.WorkflowStatus]) -> list[str]:
    """Return a line for each workflow of the run; an empty list if `workflow.steps` is not set."""
    lines = []
    for number, each in enumerate(workflows, start=1):
        detail = f"; {each.detail}" if each.detail and each.state != "done" else ""
        quiet = f"; nothing has moved for {duration(each.quiet_s)}" if each.quiet_s >= QUIET_S else ""
        time = f", {duration(each.seconds)}" if each.seconds else ""
        lines.append(f"workflow {number} of {len(workflows)} {each.name}: {each.state}{time}{detail}{quiet}")
    return lines


def best_line(best: status_messages.BestStatus) -> str:
    """Return one line about the version that is the best so far by the setting `rounds.best_metric`."""
    if best.value is None:
        return f"best {best.metric}: not reported yet"
    return f"best {best.metric} {best.value:.6g}: version {best.version}, measured in round {best.round}"


def evaluation_line(evaluation: status_messages.EvaluationStatus) -> str:
    """Return a line about the version that the server has evaluated last, and the one that it evaluates now."""
    parts = []
    if evaluation.version is not None:
        parts.append(f"version {evaluation.version}: {numbers(evaluation.metrics) or 'no result'}")
    if evaluation.running is not None:
        parts.append(f"now version {evaluation.running}")
    return f"evaluated by {evaluation.function}: {'; '.join(parts)}" if parts else ""


def codecs(status: status_messages.Status) -> str:
    """Return the codecs as text: "codec int4 up, int8 down"; or "codec bf16" if downloads are not encoded."""
    return f"codec {status.codec}" + (f" up, {status.downlink_codec} down" if status.downlink_codec != "none" else "")


def streaming(status: status_messages.Status) -> str:
    """Return the settings of Streaming DiLoCo: "streaming: 2 fragments, tau 1, alpha 0.5"; empty for other runs."""
    count = len(status.fragments)
    if count == 1 and not status.tau and not status.alpha:
        return ""
    return f"streaming: {count} fragment{'s' * (count > 1)}, tau {status.tau}, alpha {status.alpha:g}"


def optimizer(status: status_messages.Status) -> str:
    """Return the outer optimizer as text. In federated runs, it is called "server optimizer"."""
    return f"{'outer' if status.sync_every else 'server'} optimizer {status.outer}"


def against_data_parallel(status: status_messages.Status) -> str:
    """Return a text that compares the bytes sent and received with those of a ring all-reduce for the same steps.

    The text is empty for federated runs, where data-parallel training is no alternative, and if fewer than two workers
    have trained. Only updates that arrived since the server started are compared.
    """
    trained = [worker for worker in status.workers if worker.gradient_bytes]
    sent, received = (sum(getattr(worker, key) for worker in trained) for key in ("bytes_up", "bytes_down"))
    if not status.sync_every or len(trained) < 2 or not sent or not received:
        return ""
    count = len(trained)
    ring = 2 * (count - 1) / count * sum(worker.gradient_bytes for worker in trained)  # each way, all workers
    return (
        f"data-parallel training would have moved {size(ring)} each way for the same steps: "
        f"{_times(ring / sent)} the bytes of the updates, {_times(ring / received)} those of the versions"
    )


def _times(ratio: float) -> str:
    return f"{ratio:.0f} ×" if ratio >= 10 else f"{ratio:.1f} ×"


class _Lines(logging.StreamHandler[TextIO]):
    """A log handler that looks up `sys.stdout` for every line, because a live table replaces `sys.stdout`."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self._failed = False

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say once on standard error why a log line could not be printed: a full disk, or a reader that has ended."""
        if not self._failed:
            self._failed = True
            why = str(sys.exc_info()[1]).rstrip(".")
            print_line(f"atoll: log lines are lost, because standard output cannot be written: {why}.")


def log_lines(stream: TextIO | None = None) -> None:
    """Print Atoll's log with the time of day before each line, or as JSON; by default on standard output."""
    handler = _Lines() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if logs_json() else VisibleLines())
    logger = logging.getLogger("atoll")
    logger.handlers[:] = [handler]
    logger.setLevel(log_level())
    logger.propagate = False


class _LastLine(logging.Handler):
    """A log handler that notes when the last line came."""

    at_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        self.at_s = time.monotonic()


class Ticker:
    """Tells what is awaited, and for how long, after each `SILENT_S` seconds without a line, if `look` is called often.

    While the same is awaited for longer than `EARLY_S` seconds, the pauses double, up to `LONGEST_S`.

    Args:
        what: returns what is awaited; an empty text tells nothing.
        tell: prints a line.
        last: notes lines of others, which put the next one off.
        first_s: seconds until the first line; None: as until the next ones.
    """

    def __init__(
        self,
        what: Callable[[], str],
        tell: Callable[[str], object],
        last: _LastLine | None = None,
        first_s: float | None = None,
    ) -> None:
        self._what, self._tell, self._last = what, tell, last or _LastLine()
        self._last.at_s = self._last.at_s or time.monotonic()
        self._begin_s = self._own_s = self._last.at_s  # of the wait; of the last line that this has printed
        self._text, self._pause_s = what(), first_s or SILENT_S

    @property
    def step_s(self) -> float:
        """How soon to look again, in seconds."""
        return min(self._pause_s, SILENT_S) / 10

    def look(self) -> None:
        """Tell what is awaited if the last line is long enough ago."""
        now_s, last = time.monotonic(), self._last
        if last.at_s != self._own_s:  # another line
            self._pause_s = SILENT_S
        if now_s - last.at_s < self._pause_s:
            return
        if (new := self._what()) != self._text:
            self._text, self._begin_s, self._pause_s = new, last.at_s, SILENT_S
        elif now_s - self._begin_s > EARLY_S:
            self._pause_s = min(2 * self._pause_s, LONGEST_S)
        if self._text:
            self._tell(f"{self._text} ({duration(now_s - self._begin_s)})")
            last.at_s, self._pause_s = time.monotonic(), max(self._pause_s, SILENT_S)
        self._own_s = last.at_s


def _log(line: str) -> None:
    logging.getLogger("atoll.cli").info("%s", line)


@contextmanager
def telling_what_is_awaited(
    what: Callable[[], str], tell: Callable[[str], object] | None = None, first_s: float | None = None
) -> Iterator[None]:
    """Within the block, let a `Ticker` tell what is awaited, in a thread.

    Args:
        what: as for `Ticker`; the thread calls it.
        tell: prints a line. By default, the line is logged: call this after `log_lines`.
        first_s: as for `Ticker`.
    """
    ended, last, logger = threading.Event(), _LastLine(), logging.getLogger("atoll")

    def follow() -> None:
        ticker = Ticker(what, lambda line: ended.is_set() or (tell or _log)(line), last, first_s)
        while not ended.wait(ticker.step_s):
            ticker.look()

    thread = threading.Thread(target=follow, name="atoll-awaited", daemon=True)
    last.at_s = time.monotonic()
    logger.addHandler(last)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(UNREAD_S)
        logger.removeHandler(last)


def still(text: str, first_s: float | None = None) -> AbstractContextManager[None]:
    """Within the block, print on standard error what a command is still at, by default from `SILENT_S` seconds on."""
    return telling_what_is_awaited(lambda: text, lambda line: print_line(f"atoll: {line}"), first_s)


TOLD = "atoll has said it"


def say_stopping(asked: BaseException, line: str) -> None:
    """Log what follows from Ctrl-C or SIGTERM, which the command then raises again without a further line.

    Args:
        asked: the exception of the signal.
        line: the line.
    """
    _log(line)
    asked.add_note(TOLD)


def is_told(asked: BaseException) -> bool:
    """Return whether the command has said what follows from a signal."""
    return TOLD in getattr(asked, "__notes__", ())


def choose_json(wanted: bool) -> None:
    """Let this command, and the processes that it starts, print each line as a JSON object."""
    if wanted:
        os.environ[LOG_JSON] = "1"


def choose_level(*, quiet: bool, verbose: bool) -> None:
    """Let this command, and the processes that it starts, print fewer lines or more.

    Raises:
        UsageError: both are wanted.
    """
    if quiet and verbose:
        raise UsageError("Both --quiet and --verbose are given.", "Use one of them.")
    if quiet or verbose:
        os.environ[LOG_LEVEL] = "warning" if quiet else "debug"


_last_line: threading.Thread | None = None
"""The thread that prints, or has printed, the last line of `print_line`."""


def print_line(text: str) -> None:
    """Print a text on standard error. A thread prints it, so that the command goes on if nothing reads that output.

    If the previous text is still unread, wait up to `UNREAD_S` seconds; if it is unread even then, drop this text.
    """
    global _last_line
    if logs_json() and not text.startswith("{"):  # errors are JSON already
        text = json_line("atoll.cli", text)
    before = _last_line
    if before is not None:
        before.join(UNREAD_S)
        if before.is_alive():
            return
    line = threading.Thread(
        target=print, args=(f"{text}\n",), kwargs={"file": sys.stderr, "flush": True, "end": ""}, daemon=True
    )
    line.start()
    _last_line = line  # once it runs: another thread that prints at the same time may wait for it
    line.join(UNREAD_S)
    if line.is_alive():
        atexit.register(_leave_unread, line)


def _leave_unread(line: threading.Thread) -> None:
    if line.is_alive():  # else Python waits for the thread's write when it flushes standard error at its exit
        sys.stderr = sys.__stderr__ = None  # type: ignore[misc]


def next_step(command: str) -> None:
    """Print what to do next, on standard error, if that is a terminal: a program that reads the output gets no more."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stdout.flush()
        print_line(f"next: {command}")


class _DropsLines(logging.handlers.QueueHandler):
    """A log handler that never waits: if its queue is full, it drops records. A later line says how many."""

    queue: queue.Queue[logging.LogRecord | None]
    _dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put a record into the queue, or drop it."""
        try:
            if self._dropped:
                text = f"{number_of(self._dropped, 'log line')} dropped here, because standard output was not read"
                self.queue.put_nowait(logging.makeLogRecord({"msg": text}))
                self._dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1


@contextmanager
def log_lines_in_background() -> Iterator[None]:
    """Print Atoll's log on standard output, as `log_lines` does, but from a thread, until the end of the block.

    If standard output is a pipe or a terminal that nothing reads, a write to it waits. With this function only the
    printing thread waits, and not the thread that logs, such as the one that serves all sites. At the end of the block,
    wait for unread lines for at most `UNREAD_S` seconds.
    """
    log_lines()
    logger = logging.getLogger("atoll")
    (lines,) = logger.handlers
    waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(MOST_LINES)
    logger.handlers[:] = [_DropsLines(waiting)]
    listener = logging.handlers.QueueListener(waiting, lines)
    listener.start()
    try:
        yield
    finally:
        with waiting.all_tasks_done:
            is_read = waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, UNREAD_S)
        if is_read:  # else `stop` would wait forever
            listener.stop()
            logger.handlers[:] = [lines]
        else:  # the listener is in a write; at its exit Python would wait for it, to flush the handler and the output
            lines.createLock()
            sys.stdout = sys.__stdout__ = None  # type: ignore[misc]
