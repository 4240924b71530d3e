"""What a run file's workflows are made of: functions, and components that they refer to as `@id`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from atoll import registry
from atoll.config import Settings, WorkflowEntry, component_at, components_of, is_reference
from atoll.errors import ConfigError
from atoll.server.tasks.workflow_controller import Function

LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""Whether a call of a function runs nothing of it."""


class Parts:
    """Components of a run, each made once, when it is first referred to.

    Raises:
        ConfigError: the tables are not understood.
    """

    def __init__(self, settings: Settings) -> None:
        self._components = components_of(settings.components)
        self._made: dict[str, Any] = {}
        self._making: list[str] = []

    def function_of(self, entry: WorkflowEntry) -> Function:
        """The function of a workflow, with its arguments; it takes the controller.

        Raises:
            ConfigError: it cannot be found, is none, or does not take these arguments.
        """
        where, found = f"workflow {entry.name!r}", entry.path
        if entry.kind:
            found = registry.load("workflows", entry.kind)
        elif isinstance(found, str):
            found = self._at(found, where) if is_reference(found) else registry.load_attribute(found)
        if not callable(found):
            raise ConfigError(f"{where} is a {type(found).__name__}.", "Name a function of one argument.")
        args = self._filled(dict(entry.args), where)
        if any(kind(each) for kind in LAZY for each in (found, getattr(found, "__call__", None))):  # noqa: B004
            raise ConfigError(
                f"{where} is {getattr(found, '__name__', found)!r}, a coroutine function or a generator: a call of it "
                "does nothing.",
                "Write it as a plain function: def without async and yield.",
            )
        try:
            inspect.signature(found).bind(None, **args)
        except ValueError:  # of a builtin nobody knows
            pass
        except TypeError as error:
            raise ConfigError(
                f"{where} cannot be called with args {sorted(args)}: {error}.",
                "Its function takes the controller, then args by their names.",
            ) from None
        require = getattr(found, "require", None)
        if require is not None:
            require(**args)
        return functools.partial(found, **args)

    def _filled(self, value: Any, where: str) -> Any:
        """A value of the run file with components in the places of references; `@@` is an `@` that is none."""
        if isinstance(value, dict):
            return {key: self._filled(item, where) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(item, where) for item in value]
        if isinstance(value, str) and value.startswith("@@"):
            return value[1:]
        return self._at(value, where) if is_reference(value) else value

    def _at(self, reference: str, where: str) -> Any:
        name = reference[1:]
        if name not in self._made:
            component = component_at(reference, self._components, where)
            if name in self._making:
                circle = " → ".join([*self._making[self._making.index(name) :], name])
                raise ConfigError(f"Components refer to each other in a circle: {circle}.", "Break it.")
            self._making.append(name)
            target = registry.load_attribute(component.path)
            args = self._filled(dict(component.args), f"component {name!r}")
            self._made[name] = (
                registry.made(
                    lambda: target(**args),
                    f"Component {name!r} is {component.path!r} with args = {args!r}",
                    "Give the arguments that it has.",
                )
                if isinstance(target, type) or args
                else target
            )
            self._making.pop()
        return self._made[name]
