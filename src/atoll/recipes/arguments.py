"""What recipes and environments say of an argument that they do not have, or whose value is of a wrong type."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll import registry
from atoll.border import border
from atoll.config import Settings
from atoll.errors import UsageError


class _Strict(type):
    @border
    def __call__(cls, *args: Any, **given: Any) -> Any:
        """Refuse what `__init__` does not take, before Python would without saying what is meant."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # this very class's
        known = [name for name in signature.parameters if name != "self"]
        for name in given:
            if name not in known:
                raise _unknown(cls.__name__, name, given[name], known)
        try:
            signature.bind(None, *args, **given)
        except TypeError as error:
            wanted = [name for name in known if signature.parameters[name].default is inspect.Parameter.empty]
            raise UsageError(f"{cls.__name__}: {error}.", f"It needs {', '.join(wanted)}.") from None
        return super().__call__(*args, **given)


class Strict(metaclass=_Strict):
    """A class that refuses an unknown argument with the nearest one that it has, and says which are missing."""


def require_number(who: object, name: str, value: object, least: int) -> None:
    """Refuse what is no whole number, or a smaller one; a text or a truth value is none.

    Raises:
        UsageError: the argument is named.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{type(who).__name__}: {name} is {value!r}.", f"Give a whole number, at least {least}.")


def require_path(who: object, name: str, value: object) -> None:
    """Refuse what is no path.

    Raises:
        UsageError: the argument is named.
    """
    if not isinstance(value, str | Path):
        raise UsageError(f"{type(who).__name__}: {name} is {value!r}.", "Give a path, as text or a pathlib.Path.")


def script_arguments(who: object, given: object) -> list[str]:
    """`train_args` as a list.

    Raises:
        UsageError: it is neither a text that a shell would take nor a list of texts.
    """
    if isinstance(given, str):
        try:
            return shlex.split(given)
        except ValueError as error:
            raise UsageError(
                f"{type(who).__name__}: train_args is {given!r}: {str(error).lower()}.",
                "Quote it as for a shell, or give a list.",
            ) from None
    if isinstance(given, Sequence) and not isinstance(given, bytes | bytearray):
        return [str(each) for each in given]
    raise UsageError(
        f"{type(who).__name__}: train_args is {given!r}.", 'Give one text, "--epochs 2", or a list, ["--epochs", "2"].'
    )


def _unknown(who: str, name: str, value: Any, known: Sequence[str]) -> UsageError:
    if name in Settings.model_fields:
        return UsageError(
            f"{who} has no argument {name!r}, which is a setting of the run file.",
            f"Choose it with recipe.add_server_config({{{name!r}: {value!r}}}).",
        )
    return UsageError(f"{who} has no argument {name!r}.", registry.nearest(name, known, f"It has {', '.join(known)}."))
