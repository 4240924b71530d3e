"""The site that `make docs` builds with Sphinx: the pages of docs/, and a page for each public name from its docstring.

The pages are written for GitHub, too. So this file adapts them as they are read: links to files outside of docs/ become
plain text, diagrams are shown as their source, and the list of pages is appended to index.md.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent

project, author = "Atoll", "the Atoll authors"
release = version = version_of("atoll")
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "myst_parser"]
html_theme, html_title = "furo", "Atoll"
html_show_copyright = False
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["templates"]
templates_path = ["templates"]
root_doc = "index"

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "py:obj"
add_function_parentheses = False
myst_heading_anchors = 6

CAPTIONS = {
    "Start": "tutorial-* recipes simulation from-*",
    "Understand": "concepts walkthrough algorithms/README algorithms/* memory-and-speed",
    "Features": "low-communication asynchronous compression streaming sharded swarm filters custom-aggregators "
    "best-version evaluation tasks workflows cross-site-evaluation references testing",
    "Operate": "operations troubleshooting reference/*",
    "API": "api/README api/*",
    "Measurements": "results/README results/*",
    "Change Atoll": "layout decisions/README decisions/* behaviours",
    "More": "*",
}
"""Heading in the list of pages → its pages. Each page is in the first list that names it; "More" has the others."""


def _lists_of_pages() -> str:
    pages = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md"))
    pages, text = [page for page in pages if page != "index" and "generated" not in page], ""
    for caption, patterns in CAPTIONS.items():
        found = [page for pattern in patterns.split() for page in pages if _fits(page, pattern)]
        found = list(dict.fromkeys(found))
        pages = [page for page in pages if page not in found]
        if found:
            text += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *found, "```", ""])
    return text


def _fits(page: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*" if pattern == "*" else "[^/]*"), page) is not None


def _adapt_page(_: Any, name: str, source: list[str]) -> None:
    folder = DOCS / os.path.dirname(name)

    def link(found: re.Match[str]) -> str:
        text, target = found["text"], found["target"].partition("#")[0]
        is_page = not target or "://" in target or (folder / target).resolve().is_relative_to(DOCS)
        return found[0] if is_page else f"{text} (`{os.path.relpath(folder / target, DOCS.parent)}`)"

    text = re.sub(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", link, source[0])
    source[0] = text.replace("```mermaid", "```text") + (_lists_of_pages() if name == "index" else "")


def _adapt_docstring(_: Any, kind: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: `*` and `_` mean nothing in them, and an indented block is code."""
    out: list[str] = []
    is_code = False
    for line in lines:
        is_indented = line.startswith("    ")
        before = next((each for each in reversed(out) if each.strip()), "")
        if is_indented and out and not out[-1].strip() and before and not before.startswith(" ") and not is_code:
            is_code = True
            out += ["::", ""]
        elif line.strip() and not is_indented:
            is_code = False
        out.append(line if is_code else _escaped(line))
    lines[:] = out


def _escaped(line: str) -> str:
    parts = line.split("`")
    parts[::2] = [re.sub(r"(?<=\w)_(?!\w)|[*|]", lambda found: "\\" + found[0], part) for part in parts[::2]]
    return "`".join(parts)


def setup(app: Any) -> None:
    """Adapt what Sphinx reads."""
    app.connect("source-read", _adapt_page)
    app.connect("autodoc-process-docstring", _adapt_docstring, priority=400)  # before napoleon
