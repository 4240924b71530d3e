"""What commands print: reminders in the server's log, and tables of an evaluation."""

from __future__ import annotations

import logging
import math
import threading
import time

import pytest
from harness.processes import wait_until

from atoll.cli import evaluate, server
from atoll.cli import text as cli_text
from atoll.cli.logs import line
from atoll.cli.run_view import RunView
from atoll.cli.text import fitting, number_of, task_totals, time_left
from atoll.protocol import status_messages
from atoll.protocol.run_events import VersionEvaluated
from atoll.protocol.status_messages import FragmentStatus, RoundSummary, Status
from atoll.protocol.task_messages import Cell, EvaluatedModel, Evaluation, markdown, plain

# -- reminders of late sites


def fragment(
    reason: str = "", *, number: int = 0, phase: str = "open", **awaited_s: float
) -> status_messages.FragmentStatus:
    missing = [status_messages.Missing(site=site, for_s=seconds) for site, seconds in awaited_s.items()]
    return status_messages.FragmentStatus(fragment=number, version=1, phase=phase, waiting_for=missing, reason=reason)


def test_reminders_name_only_late_sites() -> None:
    """A reminder in the server's log names only the sites that the round has waited for for at least 15 s."""
    reminder = server.Reminder(0.0)
    assert reminder.line([fragment("waits for a and b", a=14.0, b=2.0)], 100.0) == ""
    assert reminder.line([fragment("waits for a and b", a=15.0, b=2.0)], 101.0) == "waiting for a (15 s)"
    assert server.Reminder(0.0).line([fragment("waits for 2 sites to join")], 20.0) == "waits for 2 sites to join"


def test_reminders_combine_the_waiting_fragments() -> None:
    """If all fragments wait for one reason, a reminder gives this reason once."""
    # If the reasons differ, it names the fragment that waits for a late site. A finished fragment is left out.
    joins = [fragment("waits for 2 sites to join"), fragment("waits for 2 sites to join", number=1)]
    assert server.Reminder(0.0).line(joins, 20.0) == "waits for 2 sites to join"
    one = [fragment("waits for a", a=20.0), fragment("waits for b", number=1, b=2.0)]
    assert server.Reminder(0.0).line(one, 20.0) == "fragment 0 waiting for a (20 s)"
    last = [fragment("is finished", phase="finished"), fragment("waits for a", number=1, a=20.0)]
    assert server.Reminder(0.0).line(last, 20.0) == "fragment 1 waiting for a (20 s)"


def test_reminder_pauses_double_up_to_ten_minutes() -> None:
    """The pause between two reminders of one site doubles, from 15 s up to ten minutes."""
    reminder = server.Reminder(0.0)
    said = [second for second in range(3000) if reminder.line([fragment(a=float(second))], float(second))]
    # pauses of 15, 30, 60, 120, 240, 480, then 600 s, not 960
    assert said == [15, 45, 105, 225, 465, 945, 1545, 2145, 2745]
    assert reminder.line([fragment(a=3000.0, b=20.0)], 3000.0) == "waiting for a (50 min 0 s), b (20 s)"


def test_reminders_cost_nothing_before_they_are_due() -> None:
    """The code of the server's log reminders reads the state of the rounds only when a reminder is due."""
    reminder, asked = server.Reminder(0.0), list[int]()
    for second in range(3000):
        assert (reminder.rest_s(second) == 0.0) == (reminder.due_s <= second)
        if reminder.due_s <= second:
            reminder.due_s = math.inf
            asked.append(second)
            assert reminder.line([fragment(a=float(second))], float(second)) != ""
    assert asked == [15, 45, 105, 225, 465, 945, 1545, 2145, 2745]


def test_reminders_look_again_in_time() -> None:
    """The next reminder in the server's log is due when the next missing site becomes late."""
    reminder = server.Reminder(0.0)
    reminder.due_s = math.inf
    assert reminder.line([fragment("waits for a and b", a=14.0, b=2.0)], 100.0) == ""
    assert reminder.due_s == 101.0
    reminder.due_s = math.inf
    assert reminder.line([fragment()], 101.0) == ""
    assert (reminder.due_s, reminder.rest_s(101.0)) == (math.inf, 15.0)
    before_s = time.monotonic()
    reminder.on_event(None)
    assert before_s + 15.0 <= reminder.due_s <= time.monotonic() + 15.0
    reminder.due_s = 1.0
    reminder.on_event(None)
    assert reminder.due_s == 1.0


# -- tables of an evaluation


def evaluation() -> Evaluation:
    return Evaluation(
        run="r",
        name="n",
        finished=True,
        sites=["a", "b"],
        models=[EvaluatedModel(name="version 1", kind="version"), EvaluatedModel(name="b", kind="site", error="gone")],
        cells=[
            Cell(model="version 1", site="a", metrics={"loss": 0.5}, not_finite=["f1"]),
            Cell(model="version 1", site="b", error="ValueError: a | b\n<script>`x`"),
        ],
    )


@pytest.mark.covers("P9")
def test_evaluation_tables_escape_the_text_of_sites() -> None:
    """An evaluation has one table for each metric. Text from a site is escaped, so that it cannot break a table."""
    text = markdown(evaluation())
    assert (
        "## f1\n\n| model | a | b | mean |\n| --- | ---: | ---: | ---: |\n| version 1 | not finite | — | — |\n"
        "| b | — | — | — |\n" in text
    )
    assert "- version 1 on b: ValueError: a \\| b &lt;script>\\`x\\`" in text
    assert "- b on every site: gone" in text
    assert plain(evaluation().with_means())[5:9] == [
        "loss (rows: models, columns: sites)",
        "model        a  b  mean",
        "version 1  0.5  —   0.5",
        "b            —  —     —",
    ]


@pytest.mark.covers("P9")
def test_an_evaluation_without_results_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """If no site has sent results yet, the evaluation prints a line that says so."""
    empty = evaluation().model_copy(update={"metrics": [], "cells": [], "models": []})
    evaluate.show(empty, as_json=False)
    assert capsys.readouterr().out == "no site has sent results yet\n"


@pytest.mark.covers("P9")
def test_a_terminal_shows_evaluations_as_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, an evaluation is shown as a table that fits into its width."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    evaluate.show(evaluation(), as_json=False)
    shown = capsys.readouterr().out
    assert "version 1  not finite  —  —" in shown
    assert "loss (rows: models, columns: sites)" in shown
    assert "empty: b on every site: gone" in shown


@pytest.mark.covers("T11")
@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({}, ""),
        ({"streamed": 1}, "1 task sent: 1 streamed"),
        ({"inline": 0, "without_tensors": 2}, "2 tasks sent: 0 inline, 2 without tensors"),
    ],
    ids=["none", "one", "two"],
)
def test_totals_of_tasks_are_in_plain_words(tasks: dict[str, int], said: str) -> None:
    """The status says in words how many tasks were sent, and how."""
    assert task_totals(tasks) == said


@pytest.mark.parametrize(
    ("count", "what", "said"),
    [(1, "round", "1 round"), (0, "round", "0 rounds"), (1, "retry", "1 retry"), (2, "retry", "2 retries")],
)
def test_a_count_has_its_noun_in_singular_or_plural(count: int, what: str, said: str) -> None:
    assert number_of(count, what) == said


PLACES = ("north", "of-the-university-of-bonn-radiology")
HOSPITALS = [f"hospital-{place}-{number}" for place in PLACES for number in "012"]


@pytest.mark.covers("P9")
@pytest.mark.parametrize("width", [20, 40, 80, 240])
def test_names_of_sites_are_never_cut(width: int) -> None:
    """Nor are numbers and names of models: a table that does not fit is turned, and then divided into lines."""
    cells = [Cell(model="version 12", site=name, metrics={"loss": 0.123456}, weight=8.0) for name in HOSPITALS]
    lost = Cell(model="version 1", site=HOSPITALS[0], error="it left the run before it had evaluated the model")
    models = [EvaluatedModel(name=f"version {number}", kind="version", means={"loss": 0.123456}) for number in (12, 1)]
    found = Evaluation(run="r", name="r", finished=True, sites=HOSPITALS, models=models, cells=[*cells, lost])
    lines = evaluate.lines_of(found, width)
    assert max(map(len, lines)) <= width
    table = [line.strip() for line in lines[: lines.index("")]]
    text = "".join(table)
    assert [text.count(name) for name in HOSPITALS] == [1] * len(HOSPITALS)
    assert text.count("0.123456") == len(HOSPITALS) + 2  # the mean of each model, too
    assert "…" not in "".join(lines)
    if width == 240:
        assert table[2].split()[:4] == ["version", "12", "0.123456", "0.123456"]
    if width == 80:
        assert f"{HOSPITALS[0]}  " in table[2]
    assert "it left the run" in " ".join(lines)


# -- what a command waits for


def test_silence_is_filled_with_what_is_awaited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a pause without lines, one says what is awaited and for how long; none comes between other lines."""
    monkeypatch.setattr(cli_text, "SILENT_S", 0.1)
    monkeypatch.setattr(cli_text, "EARLY_S", 0.0)
    logger = logging.getLogger("atoll.cli")
    monkeypatch.setattr(logging.getLogger("atoll"), "propagate", True)
    caplog.set_level(logging.INFO, "atoll")

    def own() -> list[str]:
        return [line for line in caplog.messages if line.startswith("PyTorch")]

    with cli_text.telling_what_is_awaited(lambda: "PyTorch is loaded"):
        wait_until(lambda: len(own()) == 3, "three lines")
        times = [record.created for record in caplog.records]
        assert own()[0].startswith("PyTorch is loaded (0.")
        assert times[2] - times[1] > 0.1  # the pauses double
        begin_s, said = time.monotonic(), 0
        while time.monotonic() - begin_s < 0.5:
            threading.Event().wait(0.02)
            logger.info("another line")
            said = max(said, len(own()))
        assert said == 3
    assert not [each for each in threading.enumerate() if each.name == "atoll-awaited"]


def test_a_table_fits_into_the_terminal() -> None:
    """A last column with enough room is folded; with less, each row is a block of lines."""
    titles, rows = ("run", "state", "metrics"), [("digits-1", "finished", "accuracy 0.9, loss 0.25, recall 0.75")]
    wide = fitting(titles, rows, 80)
    assert wide == ["run       state     metrics", "digits-1  finished  accuracy 0.9, loss 0.25, recall 0.75"]
    assert fitting(titles, rows, 46)[1:] == [
        "digits-1  finished  accuracy 0.9, loss 0.25,",
        "                    recall 0.75",
    ]
    assert fitting(titles, rows, 40) == [
        "digits-1",
        "  state: finished",
        "  metrics: accuracy 0.9, loss 0.25,",
        "    recall 0.75",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(None, ""), (0.04, "less than 1 s left"), (1.0, "about 1.0 s left")])
def test_no_time_left_is_told_as_zero(seconds: float | None, text: str) -> None:
    assert time_left(seconds) == text


def test_a_run_says_what_its_admin_does(capsys: pytest.CaptureFixture[str]) -> None:
    """A rollback, a pause and a stop each have a line in `atoll run`; rounds after a rollback are told again."""
    view = RunView(["a"], {}, "runs/x-1", quiet=False, verbose=False, json=False)
    ended = [
        RoundSummary(fragment=0, round=each, version=each, metrics={}, counts={}, seconds=0, grad_norm=0, bytes_up=0)
        for each in (1, 2)
    ]
    head = FragmentStatus(fragment=0, version=2, phase="open", waiting_for=[], reason="")
    status = Status(run="r", protocol=1, rounds=9, fragments=[head], history=ended)
    back = {"fragments": [head.model_copy(update={"version": 1})], "history": ended[:1]}
    for change in ({}, back, {"paused": True} | back, back, {}, {"stopping": True}):
        view.show(status.model_copy(update=change), "")
    said = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [each.partition(":")[0] for each in said if each.startswith("round")] == [
        *("round 1 of 9", "round 2 of 9", "round 2 of 9")
    ]
    assert [each for each in said if not each.startswith("round")] == [
        "the run went back to version 1; it goes on with round 2",
        "the admin has paused the run; to go on: atoll resume runs/x-1",
        "the admin lets the run go on",
        "the admin has stopped the run: it ends with this round",
    ]


def test_logs_name_the_values_of_an_evaluated_version() -> None:
    event = VersionEvaluated(number=1, at="", fragment=0, round=3, version=3, metrics={"accuracy": 0.5}, seconds=2.0)
    assert line(event) == "version 3 is evaluated: accuracy 0.5, 2.0 s"
