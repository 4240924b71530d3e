"""The settings of a run, and how they are read from a run file, the environment and the command line.

Each name is imported on first use: commands that only read a run need no settings, which take long to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.config.bounds import DEFAULT_PORT, IDLE_TIMEOUT_S

if TYPE_CHECKING:
    from atoll.config.run_file import (
        NOT_SETTINGS,
        OTHER_NAMES,
        require_known_variables,
        set_values,
        to_toml,
        toml_lines,
        variable_of,
    )
    from atoll.config.settings import FIELDS, GROUPS, Settings, default_of
    from atoll.config.workflow_settings import (
        TRAIN,
        Component,
        WorkflowEntry,
        component_at,
        components_of,
        entries_of,
        filter_of,
        function_of,
        is_reference,
    )

__all__ = [
    "DEFAULT_PORT",
    "FIELDS",
    "GROUPS",
    "IDLE_TIMEOUT_S",
    "NOT_SETTINGS",
    "OTHER_NAMES",
    "TRAIN",
    "Component",
    "Settings",
    "WorkflowEntry",
    "component_at",
    "components_of",
    "default_of",
    "entries_of",
    "filter_of",
    "function_of",
    "is_reference",
    "require_known_variables",
    "set_values",
    "to_toml",
    "toml_lines",
    "variable_of",
]

_OF_RUN_FILE = {"NOT_SETTINGS", "OTHER_NAMES", "require_known_variables", "set_values", "to_toml", "toml_lines"}
_OF_RUN_FILE |= {"variable_of"}
_OF_SETTINGS = {"FIELDS", "GROUPS", "Settings", "default_of"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "run_file" if name in _OF_RUN_FILE else "settings" if name in _OF_SETTINGS else "workflow_settings"
    value = globals()[name] = getattr(import_module(f"atoll.config.{home}"), name)
    return value
