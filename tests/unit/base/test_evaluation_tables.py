"""The matrix of an evaluation as text: Markdown, columns, and a table on a terminal."""

from __future__ import annotations

import pytest

from atoll.cli import evaluate
from atoll.protocol.task_messages import Cell, EvaluatedModel, Evaluation, markdown, plain


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
def test_tables_are_one_for_each_metric_and_nothing_that_a_site_says_breaks_them() -> None:
    text = markdown(evaluation())
    assert "## f1\n\n| model | a | b |\n| --- | ---: | ---: |\n| version 1 | not finite | — |\n| b | — | — |\n" in text
    assert "- version 1 on b: ValueError: a \\| b &lt;script>\\`x\\`" in text
    assert "- b on every site: gone" in text
    assert plain(evaluation())[5:9] == [
        "loss (rows: models, columns: sites)",
        "model        a  b",
        "version 1  0.5  —",
        "b            —  —",
    ]


@pytest.mark.covers("P9")
def test_on_a_terminal_it_is_a_table_of_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    evaluate.show(evaluation(), as_json=False)
    shown = capsys.readouterr().out
    assert "│ version 1 │" in shown
    assert "loss (rows: models, columns: sites)" in shown
    assert "empty: b on every site: gone" in shown
