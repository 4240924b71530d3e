"""The settings of a run, and where they come from."""

from atoll.config.run_file import ENV_PREFIX, NOT_SETTINGS, OTHER_NAMES
from atoll.config.settings import DEFAULT_PORT, IDLE_TIMEOUT_S, Settings
from atoll.config.workflow_settings import (
    TRAIN,
    Component,
    WorkflowEntry,
    component_at,
    components_of,
    entries_of,
    is_reference,
)

__all__ = [
    "DEFAULT_PORT",
    "ENV_PREFIX",
    "IDLE_TIMEOUT_S",
    "NOT_SETTINGS",
    "OTHER_NAMES",
    "TRAIN",
    "Component",
    "Settings",
    "WorkflowEntry",
    "component_at",
    "components_of",
    "entries_of",
    "is_reference",
]
