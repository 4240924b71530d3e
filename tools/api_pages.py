"""docs/api/ from the code: a page for each public module, which lists the module's public names.

python tools/api_pages.py                 write the pages
python tools/api_pages.py --out FOLDER    write them elsewhere

`make docs` makes a page for each of these names, from its docstring.
"""

from __future__ import annotations

import argparse
import inspect
from importlib import import_module
from pathlib import Path

import atoll
from atoll.errors import AtollError

DOCS = Path(__file__).parents[1] / "docs"

PARTS = {
    "integrations": (
        "integrations.lightning",
        "integrations.nvflare",
        "integrations.peft",
        "integrations.transformers",
    ),
    "testing": ("testing.contracts", "testing.run"),
}
"""Public module without names of its own → its public modules."""

WITHOUT_ALL = {
    "integrations.peft": ["AdapterFolder", "adapter", "export"],
    "integrations.transformers": ["AtollCallback"],
    "testing.contracts": ["CodecContract", "OuterContract", "PayloadTypeContract", "ReducerContract"],
}
"""Public module without `__all__` → its public names."""


def public_names() -> dict[str, list[str]]:
    """Public module → its public names, sorted."""
    modules = ["", *(part for each in sorted(atoll._MODULES) for part in PARTS.get(each, (each,)))]
    return {f"atoll.{module}".strip("."): names_of(module) for module in modules}


def names_of(module: str) -> list[str]:
    """The public names of a module, by its path below `atoll`."""
    found = import_module(f"atoll.{module}".strip("."))
    if module == "errors":
        errors = {name for name, each in vars(found).items() if inspect.isclass(each) and issubclass(each, AtollError)}
        return sorted(errors - {"AtollError"})  # which has its page as atoll.AtollError
    return sorted(set(WITHOUT_ALL.get(module) or found.__all__) - {"__version__"})


def page(module: str, names: list[str]) -> str:
    """The page of a module."""
    lines = [
        f"# {module}",
        "",
        "```{eval-rst}",
        f".. automodule:: {module}",
        "   :no-members:",
        "",
        f".. currentmodule:: {module}",
        "",
        ".. autosummary::",
        "   :toctree: generated",
        "   :nosignatures:",
        "",
        *(f"   {name}" for name in names),
        "```",
    ]
    return "\n".join(lines) + "\n"


def index(modules: list[str]) -> str:
    """The page that lists the modules."""
    first = {module: (import_module(module).__doc__ or "").strip().splitlines()[0] for module in modules}
    rows = [f"| [{module}]({module}.md) | {text.replace('|', '/')} |" for module, text in first.items()]
    about = "The public names, module by module. `make docs` builds a page for each name into `build/docs/`."
    return "\n".join(["# API", "", about, "", "| module | content |", "|---|---|", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/api/.")
    parser.add_argument("--out", type=Path, default=DOCS / "api")
    out: Path = parser.parse_args().out
    out.mkdir(exist_ok=True)
    names = public_names()
    pages = {f"{module}.md": page(module, found) for module, found in names.items()}
    pages["README.md"] = index(list(names))
    for file, text in pages.items():
        (out / file).write_text(text, encoding="utf-8")
    for old in set(out.glob("*.md")) - {out / file for file in pages}:
        old.unlink()


if __name__ == "__main__":
    main()
