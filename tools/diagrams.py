"""The state diagrams in docs/concepts.md, drawn from the round machine's transition tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from atoll.rounds.transitions import document

PAGE = Path(__file__).resolve().parents[1] / "docs" / "concepts.md"
BEGIN, END = "<!-- diagrams: written by tools/diagrams.py -->", "<!-- /diagrams -->"


def with_diagrams(text: str) -> str:
    """`text` with what lies between the two marks replaced by the diagrams of today's tables.

    Raises:
        SystemExit: the marks are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise SystemExit(f"diagrams: the page needs {BEGIN} and then {END}, once each.")
    return f"{before}{BEGIN}\n\n{document()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the state diagrams into a page.")
    parser.add_argument("--page", type=Path, default=PAGE)
    page: Path = parser.parse_args().page
    page.write_text(with_diagrams(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
