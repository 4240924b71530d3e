"""A site with a policy: the file, its egress log, and a run whose site and server are in the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

from atoll.transport.egress_log import NAME, Entry, read_log

Writes = Callable[[str], Path]
"""Writes a policy, which holds from then on; returns its path."""


def log_of(policy: Path) -> list[Entry]:
    """The egress log that belongs to a policy of `policy_of`."""
    return list(read_log(policy.parent / "log" / NAME))


def entries(policy: Path, what: str) -> list[dict[str, Any]]:
    """What the log has of one kind."""
    return [each.detail for each in log_of(policy) if each.what == what]


def write_policy(folder: Path, text: str) -> Path:
    """A policy with its log in `folder`/log."""
    folder.mkdir(exist_ok=True)
    path = folder / "policy.toml"
    path.write_text(dedent(text) + '\n[log]\nfolder = "log"\n')
    path.chmod(0o600)
    return path
