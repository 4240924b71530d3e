"""Read and check the tables `[[workflow.steps]]` and `[[workflow.components]]` of a run file.

The steps are the run's workflows, in order. A component is an object that other settings refer to by its id.

[[workflow.components]]
id = "schedule"
path = "parts.py:Schedule"
args = {first = 0.1}

[[workflow.steps]]
kind = "train"

[[workflow.steps]]
path = "flow.py:main"
args = {schedule = "@schedule"}
progress_timeout_s = 3600
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll import registry
from atoll.errors import ConfigError
from atoll.registry import OwnName

TRAIN = "train"
"""The kind of the step that executes the run's rounds."""
EVALUATES = "cross_site_evaluation"
"""The kind of the step in which sites evaluate models."""

LIMITS = ("start_timeout_s", "progress_timeout_s")
_KEYS = ("kind", "path", "name", "args", *LIMITS)
_COMPONENT_KEYS = ("id", "path", "args")
REFERS = "@"
"""Prefix of a reference to a component: "@schedule" refers to the component with the id "schedule"."""


@dataclass(frozen=True)
class WorkflowEntry:
    """One workflow of the run: a table of `[[workflow.steps]]`.

    Attributes:
        name: the name in logs and the status.
        kind: `train`, or the name of a registered kind; empty if `path` is set.
        path: the workflow function, or its place: `module:function`, `file.py:function` or `@id`; None if `kind` is
            set.
        args: keyword arguments of the workflow function.
        start_timeout_s: seconds for which the workflow's start waits for sites; 0: no limit; None: the kind's default.
        progress_timeout_s: the workflow fails after this many seconds in which no answer, byte or training step
            comes from a site; 0: never.
    """

    name: str
    kind: str = ""
    path: OwnName | Callable[..., Any] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float | None = None
    progress_timeout_s: float = 0.0

    @property
    def registered(self) -> OwnName:
        """The kind as a name to look up; only if `kind` is set."""
        return OwnName(self.kind)

    @property
    def file_name(self) -> str:
        """The name, without a suffix, of the files that this workflow writes."""
        return file_name_of(self.name)


@dataclass(frozen=True)
class Component:
    """A component of the run file: the object that the class or function at `path` returns when called with `args`.

    A function without `args` is not called: it is the component itself.
    """

    path: OwnName
    args: Mapping[str, Any]


def function_of(path: str | Callable[..., Any] | None) -> OwnName | Callable[..., Any] | None:
    """Return a function that settings or a call name, with its path as a name of this program; None if it is empty."""
    return path if callable(path) else OwnName(path) if path else None


def filter_of(table: Mapping[str, Any]) -> OwnName:
    """Return the name or path of the filter in a filter table of the run file or of a call."""
    return OwnName(str(table["path"]))


def file_name_of(workflow: str) -> str:
    """Return the name, without a suffix, of the files that a workflow writes. Two workflows may get the same name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", workflow).lstrip(".") or "evaluation"


def kinds() -> list[str]:
    """Return the names of all kinds of workflows: `train` and the registered ones."""
    return [TRAIN, *registry.names("workflows")]


def entries_of(tables: Sequence[Mapping[str, Any]]) -> tuple[WorkflowEntry, ...]:
    """Return the workflows in the tables `[[workflow.steps]]`.

    Raises:
        ConfigError: a table is wrong, or two tables are of the kind `train`. The message names the table.
    """
    entries = tuple(_entry(number, table) for number, table in enumerate(tables, start=1))
    trains = [number for number, entry in enumerate(entries, start=1) if entry.kind == TRAIN]
    if len(trains) > 1:
        raise ConfigError(
            f"Workflows {' and '.join(map(str, trains))} are both of the kind 'train', but a run trains only once.",
            "Leave one out, and set the number of rounds with rounds.total.",
        )
    return entries


def _entry(number: int, table: Mapping[str, Any]) -> WorkflowEntry:
    where = f"Workflow {number}"
    kind, path = table.get("kind", ""), table.get("path", "")
    if not isinstance(kind, str) or not (isinstance(path, str) or callable(path)) or bool(kind) == bool(path):
        raise ConfigError(
            f"{where} is {dict(table)!r}, which does not have exactly one of kind and path.",
            f'Set either kind ({", ".join(kinds())}) or path = "my_file.py:function".',
        )
    if kind and kind not in kinds():
        raise ConfigError(
            f"{where} has the unknown kind {kind!r}; the kinds are {', '.join(kinds())}.",
            registry.nearest(kind, kinds(), 'For your own function, use path = "my_file.py:function".'),
        )
    args = table.get("args", {})
    if kind == TRAIN and args:
        raise ConfigError(
            f"{where} has args = {args!r}, but the kind 'train' takes no arguments.",
            "Use the settings of the run file instead (rounds, algorithm and so on).",
        )
    if not isinstance(args, Mapping) or not all(isinstance(key, str) for key in args):
        raise ConfigError(f"{where} has args = {args!r}, which is not a table.", "Write a table: args = {rounds = 3}.")
    name = table.get("name", kind or (path if isinstance(path, str) else getattr(path, "__name__", "workflow")))
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise ConfigError(f"{where} has name = {name!r}.", "Use 1 to 200 characters.")
    limits = {key: _limit(where, key, table[key]) for key in LIMITS if key in table}
    return WorkflowEntry(name, kind, function_of(path), {**_own_keys(where, kind, table), **args}, **limits)


def _own_keys(where: str, kind: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in a table: the keys, with values, that only this kind of workflow has.

    Raises:
        ConfigError: the table has an unknown key.
    """
    own_keys = {key: value for key, value in table.items() if key not in _KEYS}
    known = registry.OPTIONS.get(kind, ())
    for key in own_keys:
        if key not in known:
            of = f"of the kind {kind!r}" if kind else "with a path"
            known_keys = [*_KEYS, *known]
            raise ConfigError(
                f"{where}, {of}, has the unknown key {key!r}; the keys are {', '.join(known_keys)}.",
                registry.nearest(key, known_keys, "Put the arguments of a function into args."),
            )
    return own_keys


def _limit(where: str, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ConfigError(f"{where} has {key} = {value!r}.", "Give a number of seconds; 0: no limit.")
    return float(value)


def components_of(tables: Sequence[Mapping[str, Any]]) -> dict[str, Component]:
    """Return the components in the tables `[[workflow.components]]`, by id.

    Raises:
        ConfigError: a table is wrong, or two tables have the same id.
    """
    found: dict[str, Component] = {}
    for number, table in enumerate(tables, start=1):
        for key in table:
            if key not in _COMPONENT_KEYS:
                raise ConfigError(
                    f"Component {number} has the unknown key {key!r}; the keys are {', '.join(_COMPONENT_KEYS)}.",
                    registry.nearest(key, _COMPONENT_KEYS, "Put the arguments of the component into args."),
                )
        name, path, args = table.get("id"), table.get("path"), table.get("args", {})
        if not isinstance(name, str) or not name or not isinstance(path, str) or not isinstance(args, Mapping):
            raise ConfigError(
                f"Component {number} is {dict(table)!r}, which is not a valid table.",
                'Write {id = "schedule", path = "my_file.py:Schedule", args = {first = 0.1}}; args is optional.',
            )
        if name in found:
            raise ConfigError(f"Two components have the id {name!r}.", "Use a different id for each component.")
        found[name] = Component(OwnName(path), dict(args))
    return found


def component_at(reference: str, components: Mapping[str, Component], where: str) -> Component:
    """Return the component with the id in a reference "@id".

    Args:
        reference: the reference.
        components: id → component.
        where: the place of the reference, for the message.

    Raises:
        ConfigError: no component has that id. The message suggests the nearest id.
    """
    name = reference.removeprefix(REFERS)
    if name not in components:
        known = ", ".join(components) or "none"
        raise ConfigError(
            f"{where} refers to the unknown component {name!r}; the components are: {known}.",
            registry.nearest(name, components, f'Add [[workflow.components]] with id = "{name}".'),
        )
    return components[name]


def is_reference(value: Any) -> bool:
    """Return whether a value of the run file is a reference to a component."""
    return isinstance(value, str) and value.startswith(REFERS) and len(value) > 1


def with_components(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Replace references to components by the components' paths and arguments, and return all groups of settings.

    Filters, the aggregator and the persistor (your own storage for models) may refer to components. References in
    `workflow.steps` are not replaced here: they are resolved when a workflow starts.

    Raises:
        ConfigError: a component does not exist, or a table that refers to a component has arguments, too.
    """
    groups = {group: dict(table) if isinstance(table, Mapping) else table for group, table in tables.items()}
    workflow = groups.get("workflow")
    listed = workflow.get("components", ()) if isinstance(workflow, dict) else ()
    if not isinstance(listed, list | tuple) or not all(isinstance(table, Mapping) for table in listed):
        return groups  # pydantic will refuse the value
    components = components_of(listed)
    for key in ("result_filters", "payload_filters"):
        if isinstance(workflow, dict) and isinstance(workflow.get(key), list | tuple):
            workflow[key] = tuple(_filter(entry, components, f"workflow.{key}") for entry in workflow[key])
    for group, key in (("aggregation", "aggregator"), ("model", "persistor")):
        table = groups[group].get(key) if isinstance(groups.get(group), dict) else None
        if isinstance(table, Mapping) and is_reference(table.get("path")):
            found = _component(table, len(table) > 1, components, f"{group}.{key}")
            groups[group][key] = {**found.args, "path": found.path.text}
    return groups


def _filter(entry: Any, components: Mapping[str, Component], key: str) -> Any:
    if not isinstance(entry, Mapping) or not is_reference(entry.get("path")):
        return entry
    found = _component(entry, bool(entry.get("args")), components, key)
    return {**entry, "path": found.path.text, "args": dict(found.args)}


def _component(table: Mapping[str, Any], has_args: bool, components: Mapping[str, Component], key: str) -> Component:
    """Return the component that a table of the setting `key` refers to.

    Raises:
        ConfigError: the component does not exist, or the table has arguments, too.
    """
    found = component_at(table["path"], components, key)
    if has_args:
        raise ConfigError(
            f"{key} has {dict(table)!r}, but its path refers to a component, which has its own arguments.",
            "Put the arguments into the args of the component.",
        )
    return found
