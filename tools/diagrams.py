"""The state diagrams in docs/concepts.md, drawn from the round machine's transition tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from atoll.rounds.transitions import MEMBER, ROUND, TICKET, Table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "concepts.md"
BEGIN, END = "<!-- diagrams: written by tools/diagrams.py -->", "<!-- /diagrams -->"

SECTIONS: tuple[tuple[str, str, Table], ...] = (
    ("A worker", "unknown", MEMBER),
    ("The rounds of a fragment", "gathering", ROUND),
    ("A ticket", "open", TICKET),
)


def mermaid(table: Table, start: str) -> str:
    """One table as the text of a Mermaid `stateDiagram-v2`; states that nothing leaves are drawn as ends."""
    arrows = [f"    {state} --> {after} : {event}" for (state, event), after in table.items()]
    left = {state for (state, _), after in table.items() if after != state}
    ends = [f"    {state} --> [*]" for state in dict.fromkeys(table.values()) if state not in left]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {start}", *arrows, *ends]) + "\n"


def document() -> str:
    """All three diagrams as a piece of Markdown."""
    return "\n".join(f"### {title}\n\n```mermaid\n{mermaid(table, start)}```\n" for title, start, table in SECTIONS)


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
