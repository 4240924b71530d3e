"""A Flower app as a folder: its pyproject.toml, the objects that it names, its configuration and its records' keys."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from atoll.format_text import shown
from atoll.registry import nearest

PROJECT = "pyproject.toml"
Config = dict[str, bool | int | float | str]


@dataclass(frozen=True)
class AppFolder:
    """A Flower app.

    Attributes:
        path: its folder.
        name: name of its project.
        components: `serverapp` and `clientapp` → where it is, `module:object`.
        config: its configuration; keys of tables are joined by dots, as Flower does.
    """

    path: Path
    name: str
    components: Mapping[str, str]
    config: Config

    @classmethod
    def read(cls, path: Path) -> AppFolder:
        """Read the app in a folder.

        Raises:
            ConfigError: there is no Flower app in the folder. The message says what is missing.
        """
        file = path / PROJECT
        try:
            project = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path} has no Flower app: {file} cannot be read: {error.strerror}.",
                "Give the folder with the app's pyproject.toml.",
            ) from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{file} is not valid TOML: {error}.", "Mend it.") from None
        app = project.get("tool", {}).get("flwr", {}).get("app", {})
        components = app.get("components")
        if not isinstance(components, dict):
            raise ConfigError(
                f"{file} names no parts of a Flower app.",
                'Add [tool.flwr.app.components] with serverapp = "module:app" and clientapp = "module:app".',
            )
        return cls(
            path.absolute(),
            str(project.get("project", {}).get("name", path.absolute().name)),
            components,
            flat(app.get("config", {})),
        )

    def require(self, kind: str) -> str:
        """Return where an object of the app is, as the app names it.

        Raises:
            ConfigError: the app does not name it.
        """
        place = self.components.get(kind)
        if not isinstance(place, str):
            raise ConfigError(
                f"The app in {self.path} has no {kind}.",
                f'Add {kind} = "module:app" to [tool.flwr.app.components] in its {PROJECT}.',
            )
        return place

    def component(self, kind: str) -> Any:
        """Import an object of the app.

        Args:
            kind: `serverapp` or `clientapp`.

        Raises:
            ConfigError: the app does not name it, or it is not there.
        """
        place = self.require(kind)
        module, _, attribute = place.partition(":")
        if str(self.path) not in sys.path:
            sys.path.insert(0, str(self.path))
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{kind} = {place!r} of the app in {self.path} cannot be imported: {error}.",
                "Install what the app needs, or correct the name.",
            ) from error
        try:
            return getattr(found, attribute or "app")
        except AttributeError:
            raise ConfigError(
                f"{kind} = {place!r} of the app in {self.path}: the module has no {attribute!r}.",
                nearest(attribute, [name for name in vars(found) if not name.startswith("_")], "Correct the name."),
            ) from None

    def configured(self, changes: Mapping[str, Any]) -> Config:
        """Return the app's configuration with changes.

        Raises:
            ConfigError: the app has no such key. The message names the nearest one.
        """
        for key in changes:
            if key not in self.config:
                raise ConfigError(
                    f"The app {self.name} has no key {key!r} in its configuration.",
                    nearest(key, self.config, f"It has {', '.join(self.config) or 'none'}."),
                )
        return self.config | dict(changes)


@dataclass(frozen=True)
class RecordKeys:
    """Names in an app's records: arguments of Flower's strategies, which only the ServerApp knows.

    Attributes:
        arrayrecord_key, configrecord_key: names of the records of a message.
        weighted_by_key: name of the metric that is the update's weight.
        steps_key: name of the metric with the number of local steps, for algorithms that divide by it.
    """

    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    weighted_by_key: str = "num-examples"
    steps_key: str = "num-steps"

    @classmethod
    def of(cls, given: Config) -> RecordKeys:
        """Return the keys with those that a command line gives.

        Raises:
            ConfigError: there is no such key. The message names the nearest one.
        """
        known = [each.name for each in dataclasses.fields(cls)]
        for key, value in given.items():
            if key not in known or not isinstance(value, str):
                raise ConfigError(
                    f"--record-keys has {key} = {shown(value)}.",
                    nearest(key, known, f"Give texts by these names: {', '.join(known)}."),
                )
        return cls(**{key: str(value) for key, value in given.items()})


def flat(table: Mapping[str, Any], before: str = "") -> Config:
    """Return a table of a configuration without tables in it: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    found: Config = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def read_pairs(texts: Iterable[str], option: str) -> Config:
    """Return the values of a command line, `num-server-rounds=5 name='a'`, as Flower reads them; or of a TOML file.

    Raises:
        ConfigError: a text is neither.
    """
    found: Config = {}
    for text in texts:
        try:
            if text.endswith(".toml"):
                found |= flat(tomllib.loads(Path(text).read_text(encoding="utf-8")))
            else:
                found |= flat(tomllib.loads(text if "\n" in text else "\n".join(_pairs(text))))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(
                f"{option} {text!r} cannot be read: {error}.",
                f"Write pairs: {option} \"rounds=5 name='a'\", or name a TOML file.",
            ) from None
    return found


def _pairs(text: str) -> list[str]:
    """Split `a=1 b='x y'` at the spaces that are not within quotes."""
    pairs, quote, begin = [], "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == " ":
            pairs.append(text[begin:index])
            begin = index + 1
    return [pair for pair in (*pairs, text[begin:]) if pair]
