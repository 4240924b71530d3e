"""Where settings come from: the run file and the environment, each as key → (value, what named it)."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from atoll import registry
from atoll.errors import ConfigError

ENV_PREFIX = "ATOLL_"

Fields = Mapping[str, FieldInfo]
"""The settings that there are, by name."""
Layer = dict[str, tuple[Any, str]]
"""Key → its value, and the file or the variable that has it."""

NOT_SETTINGS = frozenset(
    {
        "ATOLL_SERVER",
        "ATOLL_SITE",
        "ATOLL_TOKEN",
        "ATOLL_DIR",
        "ATOLL_MAX_SYNC_RETRIES",
        "ATOLL_GIVE_UP_S",
        "ATOLL_TLS_CA",
        "ATOLL_NEW_STATE",
        "ATOLL_PEER_HOST",
        "ATOLL_PEER_PORT",
        "ATOLL_PEER_NAME",
        "ATOLL_PEER_TLS_CERT",
        "ATOLL_PEER_TLS_KEY",
        "ATOLL_PEER_INSECURE",
        "ATOLL_LAST_STATUS",
        "ATOLL_LEASES",
        "ATOLL_FAILPOINTS",
    }
)
"""ATOLL_* variables that are no setting of a run: they belong to a worker, are secret, are for tests, or
Atoll sets them itself."""

FOLDERS = ("tls_cert", "tls_key", "token_file", "state_dir", "save_dir")
CODE = ("aggregator", "persistor", "workflow")
FILTERS = ("task_result_filters", "task_data_filters")
"""Settings that may be paths: files and folders, code in a file, tables of which each names code."""

OTHER_NAMES = {"ATOLL_TENSOR_DOWNLOAD_TO_DISK": "download_to_disk"}
"""Variables that are not named after their setting."""


def require_known(environ: Mapping[str, str], fields: Fields) -> None:
    """Refuse a variable that Atoll does not have: it would be ignored, and a script without a server train alone.

    Raises:
        ConfigError: there is one; the nearest name is offered.
    """
    known = NOT_SETTINGS | OTHER_NAMES.keys() | {ENV_PREFIX + key.upper() for key in fields}
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in known:
            names = [name.removeprefix(ENV_PREFIX) for name in sorted(known)]
            close = difflib.get_close_matches(variable.removeprefix(ENV_PREFIX), names, n=1)
            meant = f"Did you mean {ENV_PREFIX}{close[0]}? Else give yours" if close else "Give yours"
            raise ConfigError(
                f"The environment has {variable}, which is no variable of Atoll.",
                f"{meant} a name that does not begin with {ENV_PREFIX}, or remove it.",
            )


def file_layer(path: Path, fields: Fields) -> Layer:
    """What a run file says; paths in it are relative to its folder.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no run file {str(path)!r}.", "`atoll new` writes one.") from None
    except IsADirectoryError:
        raise ConfigError(f"{str(path)!r} is a folder.", f"Name the run file in it: {path / 'run.toml'}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}.", "A run file is TOML: key = value, one a line.") from None
    layer = {key: (value, str(path)) for key, value in table.items()}
    for key in FOLDERS:
        if isinstance(table.get(key), str):
            layer[key] = (path.parent / table[key], str(path))
    layer.setdefault("state_dir", (path.parent / fields["state_dir"].default, str(path)))
    for key in CODE:
        if isinstance(table.get(key), str) and registry.is_file(table[key]):
            layer[key] = (str(path.parent / table[key]), str(path))
    if isinstance(client := table.get("client"), str) and (client.endswith(".py") or registry.is_file(client)):
        layer["client"] = (str(path.parent / client), str(path))
    for key in (*FILTERS, "workflows", "components"):
        if isinstance(table.get(key), list):
            layer[key] = ([_beside(key, each, path) for each in table[key]], str(path))
    model = table.get("model")
    if isinstance(model, str) and (model.endswith(".safetensors") or (path.parent / model).is_dir()):
        layer["model"] = (str(path.parent / model), str(path))
    return layer


def _beside(key: str, entry: Any, path: Path) -> Any:
    """A table whose `path` names a file relative to the run file, relative to the current folder.

    A workflow is called what the run file says, so that it is the same one when the folder has been moved.
    """
    target = entry.get("path") if isinstance(entry, dict) else None
    if isinstance(target, str) and registry.is_file(target):
        name = {"name": target} if key == "workflows" else {}
        entry = {**name, **entry, "path": str(path.parent / target)}
    versions = entry.get("versions") if isinstance(entry, dict) else None
    if isinstance(versions, list):
        entry = {
            **entry,
            "versions": [
                str(path.parent / each) if isinstance(each, str) and each.endswith(".safetensors") else each
                for each in versions
            ],
        }
    return entry


def environment_layer(environ: Mapping[str, str], fields: Fields) -> Layer:
    """What the variables say that are settings.

    Raises:
        ConfigError: a table in one is none.
    """
    layer: Layer = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable in NOT_SETTINGS:
            continue
        key = OTHER_NAMES.get(variable, variable.removeprefix(ENV_PREFIX).lower())
        value: Any = environ[variable]
        kind = str(fields[key].annotation) if key in fields else ""
        if "dict" in kind:
            try:
                value = tomllib.loads(f"value = {value}")["value"]
            except tomllib.TOMLDecodeError:
                raise ConfigError(f"{variable} is {value!r}.", "Write a TOML table: {key = value}.") from None
        elif "tuple" in kind:
            value = tuple(filter(None, value.split(",")))
        layer[key] = (value, variable)
    return layer
