"""The transition tables as Mermaid state diagrams, for the documentation."""

from __future__ import annotations

from atoll.rounds.transitions import MEMBER, ROUND, TICKET, Table

_SECTIONS: tuple[tuple[str, str, Table], ...] = (
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
    return "\n".join(f"## {title}\n\n```mermaid\n{mermaid(table, start)}```\n" for title, start, table in _SECTIONS)
