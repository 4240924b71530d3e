"""The settings of a run, and how they are read from a run file, the environment and the command line."""

from atoll.config.run_file import (
    NOT_SETTINGS,
    OTHER_NAMES,
    require_known_variables,
    set_values,
    to_toml,
    toml_lines,
    variable_of,
)
from atoll.config.settings import DEFAULT_PORT, FIELDS, GROUPS, IDLE_TIMEOUT_S, Settings, default_of
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
