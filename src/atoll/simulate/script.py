"""The training code of simulated sites: a function or a script, which each process loads by its name.

train.py:train      a function with one argument, the worker that `atoll.join` would return
train.py:main       a function without arguments, which calls `atoll.join`
train.py            a script, which calls `atoll.join`

A function that no name leads to, such as one of a notebook cell, is inherited by forked processes.
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll import registry
from atoll.errors import ConfigError, UsageError
from atoll.simulate.progress import in_notebook

if TYPE_CHECKING:
    from atoll.worker.training.federated_loop import Worker

inside = False
"""Whether this process trains sites of a simulation. A script in it must not start another simulation."""

FORMS = "Use the form train.py:train or my_package.module:train for a function, or train.py for a script."


def require_outside() -> None:
    """Raise an error if a simulation is started inside a process that trains sites of a simulation.

    Raises:
        ConfigError: this process trains simulated sites.
    """
    if inside:
        raise ConfigError(
            "The script starts a simulation when it is imported, but processes of the simulation import it, too.",
            "Put the code that starts the simulation behind: if __name__ == '__main__':",
        )


def name_of(script: str | Callable[..., Any]) -> str:
    """Return the name by which another process can load the training code; paths of files become absolute.

    Args:
        script: a function, or a name in one of the forms at the head of this file.

    Raises:
        ConfigError: the file does not exist, or the name has another form.
        UsageError: the function is not at the top level of a file.
    """
    if callable(script):
        return _name_of_function(script)
    file, colon, attribute = (script, "", "") if script.endswith(".py") else script.rpartition(":")
    if not script.endswith(".py") and not file.endswith(".py"):
        if not colon or not file or not attribute:
            raise ConfigError(f"The script {script!r} is neither the name of a function nor that of a file.", FORMS)
        return script
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"The file {str(path)!r} of the script {script!r} does not exist.", FORMS)
    return f"{path}{colon}{attribute}"


def _name_of_function(function: Callable[..., Any]) -> str:
    if not (place := registry.importable_place(function)):
        raise UsageError(
            f"The function {registry.label_of(function)} cannot be imported by another process.",
            "Use a function at the top level of a file, or engine 'local' on a system that can fork processes.",
        )
    return place


def given_function(script: object, engine: str) -> Callable[..., Any] | None:
    """Return the training code if it is a function that only a fork of this process has; else None."""
    if callable(script) and engine == "local" and hasattr(os, "fork") and not registry.importable_place(script):
        return script
    return None


def source_of(function: Callable[..., Any]) -> str:
    """Return a function's source text; where there is none, its bytecode. Of a partial, that of its function."""
    function = registry.without_arguments(function)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return str(code.co_code if code else type(function))


def arguments_of_program() -> tuple[str, ...]:
    """Return the arguments of this program; none in a notebook, where they are those of the kernel."""
    return () if in_notebook() else tuple(sys.argv[1:])


class Script:
    """The user's training code in one process of a simulation.

    A function is imported once and called for each site. A script is run from its beginning for each site.

    Args:
        name: the name that `name_of` returned; of a given function, its name for messages.
        arguments: the arguments that the code finds in `sys.argv`.
        function: the code; None: load it by its name.

    Raises:
        ConfigError: the code cannot be loaded, or is a function with several arguments.
    """

    def __init__(self, name: str, arguments: Sequence[str] = (), function: Callable[..., Any] | None = None) -> None:
        global inside
        inside, self.name = True, name
        file = name if name.endswith(".py") else name.rpartition(":")[0] or sys.argv[0]
        self._argv = [file, *arguments]
        sys.argv = list(self._argv)
        self._function = function
        if function is None and not name.endswith(".py"):
            self._function = registry.load_attribute(registry.OwnName(name))
        if self._function is not None:
            self._takes_worker = _takes_worker(name, self._function)

    def train(self, worker: Worker | None = None) -> None:
        """Run the training code for one site.

        Args:
            worker: the worker of a simulated site, which `atoll.join` returns in the code; None for a real site, which
                joins the run of ATOLL_SERVER.
        """
        sys.argv = list(self._argv)
        if self._function is None:
            runpy.run_path(self.name, run_name="__main__")
        elif not self._takes_worker:
            self._function()
        elif worker is not None:
            self._function(worker)
        else:
            from atoll.worker.training.federated_loop import join

            with join() as joined:
                self._function(joined)


def _takes_worker(name: str, function: Any) -> bool:
    if not callable(function):
        raise ConfigError(
            f"The script {name!r} is of type {type(function).__name__}, not a function.",
            "Use a function with one argument, the worker.",
        )
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    needed = [each for each in parameters if each.default is each.empty and each.kind in kinds]
    if len(needed) > 1:
        raise ConfigError(
            f"The script {name!r} takes several arguments: {', '.join(each.name for each in needed)}.",
            "Use a function with one argument, the worker.",
        )
    return bool(needed)
