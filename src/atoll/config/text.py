"""Settings as the text of a run file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atoll import registry
from atoll.config.run_file import CODE, FILTERS, FOLDERS
from atoll.config.settings import Settings
from atoll.errors import ConfigError

BARE = re.compile(r"[A-Za-z0-9_-]+")
"""A key that TOML takes without quotes."""


def to_toml(value: Any) -> str:
    """A setting's value as TOML.

    Raises:
        ConfigError: TOML has no such value.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, str | Path):
        # TOML has the escapes of JSON, and forbids one character more
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ConfigError(
        f"{value!r} is a {type(value).__name__}, which a run file cannot say.",
        "Use numbers, text, true, false, lists and tables of them.",
    )


def _key(key: Any) -> str:
    return key if isinstance(key, str) and BARE.fullmatch(key) else to_toml(str(key))


def settings_lines(settings: Settings, chosen: Iterable[str], folder: Path) -> list[str]:
    """`key = value` for each chosen setting, in the order of the settings; what is a path, as seen from `folder`."""
    wanted = set(chosen)
    return [
        f"{key} = {to_toml(_from(folder, key, getattr(settings, key)))}"
        for key in Settings.model_fields
        if key in wanted and getattr(settings, key) is not None
    ]


def _from(folder: Path, key: str, value: Any) -> Any:
    """A value whose paths are relative to the current folder, as one whose paths are relative to `folder`."""
    if key in FOLDERS:
        return os.path.relpath(value, folder)
    if key in CODE:
        return _code_from(folder, value)
    if key in FILTERS:
        return [{**entry, "path": _code_from(folder, entry["path"])} if "path" in entry else entry for entry in value]
    if key == "client":
        return os.path.relpath(value, folder) if value.endswith(".py") else _code_from(folder, value)
    if key == "model" and (value.endswith(".safetensors") or Path(value).is_dir()):
        return os.path.relpath(value, folder)
    return value


def _code_from(folder: Path, target: Any) -> Any:
    if not isinstance(target, str) or not registry.is_file(target):
        return target
    file, _, attribute = target.rpartition(":")
    return f"{os.path.relpath(file, folder)}:{attribute}"
