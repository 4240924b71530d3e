"""What commands print: what they wait for, and tables of an evaluation."""

from __future__ import annotations

import logging
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

# -- what a server waits for


def fragment(
    reason: str = "", *, number: int = 0, phase: str = "open", **awaited_s: float
) -> status_messages.FragmentStatus:
    missing = [status_messages.Missing(site=site, for_s=seconds) for site, seconds in awaited_s.items()]
    return status_messages.FragmentStatus(
        fragment=number, version=1, round=1, phase=phase, waiting_for=missing, reason=reason
    )


def status(*fragments: status_messages.FragmentStatus, **more: object) -> Status:
    return Status(run="r", protocol=1, fragments=list(fragments)).model_copy(update=more)


def test_a_server_names_what_each_fragment_waits_for() -> None:
    """If all fragments wait for one reason, the line gives it once. A finished fragment is left out."""
    joins = [fragment("waits for 2 sites to join"), fragment("waits for 2 sites to join", number=1)]
    assert server.awaited_by(status(*joins)) == "round 1: waits for 2 sites to join"
    two = [fragment("waits for a", a=20.0), fragment("waits for b", number=1, b=2.0)]
    assert server.awaited_by(status(*two)) == "fragment 0 round 1: waiting for a; fragment 1 round 1: waiting for b"
    last = [fragment("is finished", phase="finished"), fragment("waits for a", number=1, a=20.0)]
    assert server.awaited_by(status(*last)) == "fragment 1 round 1: waiting for a"


def test_a_server_says_why_no_round_is_under_way() -> None:
    """A paused run, a finished one and a workflow have their own words."""
    one = fragment("waits for a", a=1.0)
    assert server.awaited_by(status(one, paused=True)) == "the run is paused; `atoll resume` lets it go on"
    assert server.awaited_by(status(one, finished=True)) == "the run is finished; its sites and its server end"
    work = status_messages.WorkflowStatus(name="median", kind="function", state="running", detail="asks a")
    assert server.awaited_by(status(one, workflows=[work])) == "the workflow median: asks a"


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
    """A table too wide for the terminal is turned or divided into lines; no name and no number is cut."""
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


# -- what a command waits for


def test_a_silent_command_says_what_it_awaits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a pause without output, a line says what the command waits for, and for how long."""
    caplog.set_level(logging.INFO, "atoll")  # as `log_lines` does; else the other lines are none
    monkeypatch.setattr(cli_text, "SILENT_S", 0.1)
    monkeypatch.setattr(cli_text, "EARLY_S", 0.0)
    said, texts, times = list[str](), ["PyTorch is loaded"], list[float]()

    def tell(line: str) -> None:
        said.append(line)
        times.append(time.monotonic())

    with cli_text.telling_what_is_awaited(lambda: texts[0], tell):
        wait_until(lambda: len(said) >= 3, "three lines")
        assert said[0].startswith("PyTorch is loaded (0.")
        assert times[2] - times[1] > 0.1  # the pauses double
        texts[0], count = "", len(said)
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < 0.5:
            threading.Event().wait(0.02)
        assert len(said) <= count + 1  # an empty text tells nothing
        texts[0], count, others = "the server starts", len(said), [time.monotonic()]
        while time.monotonic() - others[0] < 0.5:
            threading.Event().wait(0.02)
            logging.getLogger("atoll.cli").info("another line")
            others.append(time.monotonic())
        soon = [at for at in times[count + 1 :] if at - max(each for each in others if each <= at) < 0.05]
        assert soon == []
        wait_until(lambda: said[-1].startswith("the server starts ("), "the new text")
    assert not [each for each in threading.enumerate() if each.name == "atoll-awaited"]


def test_lines_of_two_threads_are_both_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line may be printed in the moment in which another one's thread begins."""

    class Begins(threading.Thread):
        def start(self) -> None:
            monkeypatch.undo()
            other = threading.Thread(target=cli_text.print_line, args=("from the other thread",))
            other.start()
            other.join()
            super().start()

    monkeypatch.setattr(cli_text.threading, "Thread", Begins)
    cli_text.print_line("from this thread")
    assert sorted(capsys.readouterr().err.splitlines()) == ["from the other thread", "from this thread"]
