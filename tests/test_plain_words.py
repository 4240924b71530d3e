"""tools/plain_words.py: no word for people stands for a process, in source, names of tests and documents."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import plain_words


def test_each_planted_word_for_people_is_found(tmp_path: Path) -> None:
    """The tool finds each word for people in comments, strings, test names and documents, with its file and line."""
    for name, text in {
        "src/atoll/a.py": 'x = "fine"  # for whoever waits\nwhose = 1\nMESSAGE = f"""\n{x} Nobody answers."""\n',
        "tests/test_a.py": 'def test_who_leaves_is_told() -> None:\n    """Who may stand here."""\n',
        "docs/a.md": "The whole\nrun is for everybody.\n",
        "README.md": "Plain.\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert plain_words.found(tmp_path) == [
        "src/atoll/a.py:1: whoever",
        "src/atoll/a.py:4: Nobody",
        "tests/test_a.py:1: who",
        "docs/a.md:2: everybody",
    ]
