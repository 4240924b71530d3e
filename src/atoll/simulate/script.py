"""The training code of simulated sites: a function or script, by a name that every process can load.

train.py:train      a function with one argument, the worker that `atoll.join` would return
train.py:main       a function without arguments, which calls `atoll.join`
train.py            a script, which calls `atoll.join`
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll import registry
from atoll.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from atoll.worker.training.federated_loop import Worker

inside = False
"""Whether this process trains sites of a simulation. A script in it must not start another simulation."""

FORMS = "Write it as train.py:train, as my_package.module:train, or as the script train.py."


def require_outside() -> None:
    """Refuse to start a simulation inside a process that trains sites of a simulation.

    Raises:
        ConfigError: this process is such a process.
    """
    if inside:
        raise ConfigError(
            "A process of a simulation begins a simulation, when it imports the script's file.",
            "Put what begins it behind: if __name__ == '__main__':",
        )


def name_of(script: str | Callable[..., Any]) -> str:
    """Return the name by which another process can load a script; paths of files become absolute.

    Args:
        script: a function, or a name of code as above.

    Raises:
        ConfigError: the file does not exist, or the name names no code.
        UsageError: the function is not at the top level of a file.
    """
    if callable(script):
        return _name_of_function(script)
    file, colon, attribute = (script, "", "") if script.endswith(".py") else script.rpartition(":")
    if not script.endswith(".py") and not file.endswith(".py"):
        if not colon or not file or not attribute:
            raise ConfigError(f"The script {script!r} does not name code.", FORMS)
        return script
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"The script {script!r}: there is no file {str(path)!r}.", FORMS)
    return f"{path}{colon}{attribute}"


def _name_of_function(function: Callable[..., Any]) -> str:
    name, module_name = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if not name.isidentifier() or getattr(module, name, None) is not function or not file or not Path(file).is_file():
        raise UsageError(
            f"The script {name or function!r} cannot be found by another process.",
            "Give a function at the top level of a file; what differs between runs can be its module's, or a setting.",
        )
    return f"{Path(file).resolve() if module_name == '__main__' else module_name}:{name}"


class Script:
    """The user's training code in one process of a simulation. A function is loaded once; a script runs each time.

    Args:
        name: the name that `name_of` returned.
        arguments: the arguments that the code finds in `sys.argv`.

    Raises:
        ConfigError: the code cannot be loaded, or takes more arguments than a worker.
    """

    def __init__(self, name: str, arguments: Sequence[str] = ()) -> None:
        global inside
        inside, self.name = True, name
        file = name if name.endswith(".py") else name.rpartition(":")[0]
        self._argv = [file, *arguments]
        sys.argv = list(self._argv)
        self._function: Callable[..., Any] | None = None
        if not name.endswith(".py"):
            self._function = registry.load_attribute(name)
            self._takes_worker = _takes_worker(name, self._function)

    def train(self, worker: Worker) -> None:
        """Run the script for one simulated site; in it, `atoll.join` returns that site's worker."""
        sys.argv = list(self._argv)
        if self._function is None:
            runpy.run_path(self.name, run_name="__main__")
        elif self._takes_worker:
            self._function(worker)
        else:
            self._function()


def _takes_worker(name: str, function: Any) -> bool:
    if not callable(function):
        raise ConfigError(f"The script {name!r} is a {type(function).__name__}.", "Name a function of a worker.")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    needed = [each for each in given if each.default is each.empty and each.kind in kinds]
    if len(needed) > 1:
        raise ConfigError(
            f"The script {name!r} takes {', '.join(each.name for each in needed)}.", "It is called with a worker alone."
        )
    return bool(needed)
