"""The notebooks in docs/notebooks run from top to bottom, and come to what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[3] / "docs" / "notebooks"
MOST_BYTES = 20_000
"""Of all outputs of a notebook."""


def texts(cell: Any) -> str:
    """All that a cell has printed and shown, as text."""
    return "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", ())
    )


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each code cell comes to, of a notebook in a kernel of its own."""
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(folder / variable))
    book = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(book, timeout=100, resources={"metadata": {"path": str(folder)}}).execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert len(nbformat.writes(book)) - len((NOTEBOOKS / name).read_text(encoding="utf-8")) < MOST_BYTES
    assert [each for cell in cells for each in cell.outputs if each.get("name") == "stderr"] == []
    return [texts(cell) for cell in cells]


@pytest.mark.slow
def test_federated_digits_beat_each_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of all sites is better than that of the best site alone, and good at each site."""
    shown = executed("federate_digits.ipynb", tmp_path, monkeypatch)
    assert shown[0].splitlines()[0].split() == ["site", "examples", *"0123456789"]
    assert "round 20 of 20, 5 updates" in shown[3]
    together, alone = (float(words.split()[-1]) for words in shown[-1].split(","))
    assert together > max(alone + 0.05, 0.9)
    assert all(float(line.split()[-1]) > 0.8 for line in shown[4].splitlines())


@pytest.mark.slow
def test_personal_heads_beat_a_shared_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the notebook about personal layers, sites with heads of their own have better models than with one shared
    head.
    """
    shown = executed("personal_layers.ipynb", tmp_path, monkeypatch)
    shared, personal = (
        [float(each.split(": ")[1].strip("}")) for each in shown[at].split("{")[1].split(", ")] for at in (3, 4)
    )
    assert max(shared) < 0.6
    assert min(personal) > 0.85
    assert "['1.bias', '1.weight', '3.bias', '3.weight']" in shown[-1]
    assert "17.2 kB for each update" in shown[-1]  # (64·48 + 48 + 48·24 + 24) · 4 bytes, without a head


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    """The stored notebooks have no outputs, so that their differences in git are those of the text."""
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")
