"""The settings of a run, and how they are read from a run file, the environment and the command line.

Each name is imported on first use: commands that only read a run need no settings, which take long to import.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from atoll.config import run_file, settings, workflow_settings

    homes = (run_file, settings, workflow_settings)
    value = globals()[name] = next(vars(each)[name] for each in homes if name in vars(each))
    return value
