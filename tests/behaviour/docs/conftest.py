"""The commands as a user finds them: what `--help` lists."""

from __future__ import annotations

import re

import pytest
from harness.processes import Nursery
from kit.processes import command
from pages import Commands


@pytest.fixture(scope="session")
def commands(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """What `--help` says of each command."""
    found: dict[str, frozenset[str]] = {}
    folder = tmp_path_factory.mktemp("help")

    def look(path: str) -> None:
        text = command(nursery, folder, *path.split(), "--help", COLUMNS="300").stdout
        options = re.findall(r"^│[ *]+((?:--?[\w-]+[ /]+)+)", text, re.MULTILINE)
        found[path] = frozenset(flag for line in options for flag in re.findall(r"--[\w-]+", line)) | {"--help"}
        for below in re.findall(r"^│ (\w+) ", text.partition("─ Commands ─")[2], re.MULTILINE):
            look(f"{path} {below}".strip())

    look("")
    return found
