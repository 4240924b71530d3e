"""docs/api/ has every public name; `make docs` makes a page of each, without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"


def listed(page: Path) -> list[str]:
    """The names that a page lists."""
    return re.findall(r"^   (\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_api_pages_match_the_code(tmp_path: Path) -> None:
    """The API pages in the docs are those that `make reference` would write now."""
    subprocess.run([sys.executable, ROOT / "tools" / "api_pages.py", "--out", tmp_path], check=True)
    assert sorted(path.name for path in API.glob("*.md")) == sorted(path.name for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():
        assert path.read_text() == (API / path.name).read_text(), f"{path.name}: run make reference"


def test_every_public_name_has_an_api_page() -> None:
    """Every name in `__all__`, at the top level and one level down, has an entry on an API page."""
    assert set(listed(API / "atoll.md")) == set(atoll.__all__) - {"__version__"}
    for module in atoll._MODULES:
        pages = list(API.glob(f"atoll.{module}*.md"))
        assert pages, module
        names = set(getattr(getattr(atoll, module), "__all__", ()))
        assert names <= {name for page in pages for name in (*listed(page), page.stem.rpartition(".")[2])}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees"]
    done = subprocess.run([*command, ROOT / "docs", tmp_path / "site"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in API.glob("atoll*.md"):
        for name in listed(page):
            assert (tmp_path / "site" / "api" / "generated" / f"{page.stem}.{name}.html").exists()
    server = (tmp_path / "site" / "api" / "generated" / "atoll.Server.html").read_text()
    assert 'href="atoll.errors.ConfigError.html#atoll.errors.ConfigError"' in server
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert not any(re.search(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?:", page) for page in pages)
