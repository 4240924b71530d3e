"""`atoll config`: print the settings in effect, or their schema. Also the command-line options that set settings."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from atoll import registry
from atoll.cli.text import next_step
from atoll.config import FIELDS, Settings, default_of, set_values, to_toml
from atoll.config.run_file import meant_key
from atoll.config.settings import Choice
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from atoll.algorithms.resolve import ResolvedAlgorithm

app = typer.Typer(help="Settings of a run.", no_args_is_help=True, add_completion=False)

RunFile = Annotated[
    Path | None,
    typer.Argument(help="Run file (TOML); `atoll new` writes one.", show_default=False, metavar="[RUN.TOML]"),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="One setting, as group.key=value; can be repeated. `atoll config schema` lists all settings.",
        metavar="GROUP.KEY=VALUE",
        show_default=False,
        autocompletion=lambda incomplete: list(set_completions(incomplete)),
    ),
]
Rounds = Annotated[
    int | None, typer.Option(help="Number of rounds until the run is finished (rounds.total).", show_default=False)
]
Dir = Annotated[
    Path | None, typer.Option("--dir", help="Folder of the run's state (disk.state_dir).", show_default=False)
]
Host = Annotated[str | None, typer.Option(help="Address to listen on (network.host).", show_default=False)]
Port = Annotated[int | None, typer.Option(help="Port to listen on (network.port).", show_default=False)]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the bearer token (network.token_file).", show_default=False)
]


def set_completions(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield what a shell may complete after `--set`, each with its help: settings, then the values of one.

    If one setting is left, it comes with its values, its default or a placeholder: a shell that gets a single word
    would put a space after the equals sign.
    """
    key, equals, _ = incomplete.partition("=")
    helps = {
        f"{each}.name" if _is_choice(field) else each: (field.description or "").partition(". ")[0]
        for each, field in FIELDS.items()
    }
    found = [key] if equals else [each for each in helps if each.startswith(key)]
    for each in found:
        if not equals:
            yield f"{each}=", helps[each]
        for value in (values_of(each) or ["VALUE"] * (not equals)) if len(found) == 1 else ():
            yield f"{each}={value}", ""


def values_of(key: str) -> list[str]:
    """Return the values that a setting can have, by name; or its default, if it can have any of its type."""
    kinds = {f"{setting}.name": kind for kind, setting in NAMES} | {"server.trackers": "trackers"}
    if key in kinds:
        return registry.names(kinds[key])
    field = FIELDS.get(key)
    if field is None or _is_choice(field):
        return []
    options = [each for part in (field.annotation, *get_args(field.annotation)) for each in get_args(part)]
    if names := [each for each in options if isinstance(each, str)]:
        return names
    if bool in (field.annotation, *get_args(field.annotation)):
        return ["true", "false"]
    default = default_of(key)
    return [str(default)] if isinstance(default, (int, float, str, Path)) and str(default) else []


def _is_choice(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Choice)


def site_names(text: str) -> list[str]:
    """Return the names of sites from the option `--sites`: a number, or names with commas between them.

    Raises:
        ConfigError: a name is not valid, or there are none, or two sites have the same name.
    """
    if text.isdecimal() and int(text):
        return [f"site-{number}" for number in range(1, int(text) + 1)]
    from atoll.worker.arguments import require_site  # it takes a while

    names = [require_site(each.strip()) for each in text.split(",") if each.strip()]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ConfigError(f"--sites is {text!r}, which names {twice[0]} twice.", "Give each site a name of its own.")
    if "," not in text or not names:
        raise ConfigError(f"--sites is {text!r}.", "Give a number, such as 3, or different names: a,b,c.")
    return names


def setting_meant_by(word: str) -> str:
    """Return the setting that a name from another release or framework means, or that has this name; empty if none."""
    return meant_key(word, FIELDS)


def read_settings(run_file: Path | None, sets: Sequence[str] | None = None, **flags: Any) -> Settings:
    """Return the settings of a run, from a command's run file and options.

    The run file's folder and the current folder are added to `sys.path`, so that code named in the settings can be
    imported.

    Args:
        run_file: the run file, or None.
        sets: the values of the option `--set`, each as "group.key=value".
        flags: the values of the options `host`, `port`, `directory`, `token_file` and `rounds`; None for an option that
            was not given.

    Raises:
        ConfigError: a setting is unknown or has a wrong value.
    """
    for folder in filter(None, [os.getcwd(), str(run_file.parent.resolve()) if run_file else None]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return Settings.read(run_file, _settings_given(sets, flags))


_KEYS = {
    "host": "network.host",
    "port": "network.port",
    "directory": "disk.state_dir",
    "token_file": "network.token_file",
    "rounds": "rounds.total",
}
"""Command-line option → the setting that it sets."""


def _settings_given(sets: Sequence[str] | None, flags: dict[str, Any]) -> dict[str, Any]:
    return set_values(sets or (), FIELDS) | {_KEYS[flag]: value for flag, value in flags.items() if value is not None}


NAMES = (
    ("algorithms", "algorithm"),
    ("outer", "algorithm.outer_optimizer"),
    ("reducers", "aggregation.reducer"),
    ("codecs", "aggregation.upload_codec"),
    ("codecs", "aggregation.download_codec"),
)
"""(Kind of extension, setting that names an extension of this kind)."""


def require_names(settings: Settings) -> None:
    """Check the names of algorithms, codecs and other extensions, without importing PyTorch.

    Raises:
        ConfigError: a name is unknown.
    """
    for kind, key in NAMES:
        if (name := settings.at(key).target) and not settings.at(key).path:
            registry.require_known(kind, f"{key}.name", name)


def _require_accepted(settings: Settings) -> ResolvedAlgorithm | None:
    """Check the names of algorithms, codecs and other extensions, and their options, as the server does at its start.

    Code that a setting names by its path is not run.

    Returns:
        The algorithm; None if the settings name no algorithm.

    Raises:
        ConfigError: a name is unknown, or an option does not exist or has a wrong value.
    """
    from atoll.algorithms.resolve import resolve
    from atoll.codecs import build_codecs

    require_names(settings)
    for name in settings.server.options_of_trackers:
        registry.require_known("trackers", "server.trackers", name)
    algorithm = resolve(settings) if settings.algorithm.name else None
    if algorithm is not None:
        _require_options(settings, algorithm)
    for key in ("aggregation.upload_codec", "aggregation.download_codec"):
        if (name := settings.at(key).target) and not settings.at(key).path:
            build_codecs(name, settings.at(key).options, setting=key)
    return algorithm


def _require_options(settings: Settings, algorithm: ResolvedAlgorithm) -> None:
    """Check the options of reducer and outer optimizer. Import PyTorch, which is slow, only if options are set."""
    reducer, outer = settings.aggregation.reducer, settings.algorithm.outer_optimizer
    if reducer.options and not reducer.path:
        from atoll.reducers import build_reducers

        build_reducers(algorithm.reduce, algorithm.reducer, algorithm.reducer_options)
    if (outer.options or settings.algorithm.outer_lr_of) and not outer.path:
        from atoll.outer_optimizers import build_outer

        build_outer(algorithm.outer, algorithm.outer_options, settings.algorithm.outer_lr_of)


@app.command()
def show(
    run_file: RunFile = None,
    sets: Sets = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: each setting with its value and source.")
    ] = False,
) -> None:
    """Print the settings in effect as a run file, each with its source: a file, a variable or the command line."""
    from atoll.server.coordinator.effective_settings import settings_in_effect

    settings = read_settings(run_file, sets)
    effective = list(settings_in_effect(settings, _require_accepted(settings)))
    if as_json:
        found = {key: {"value": value, "source": source} for key, value, source in effective}
        print(json.dumps(found, indent=2, default=str))
        return
    group = ""
    for key, value, where in effective:
        if group != (group := key.partition(".")[0]):
            print(f"[{group}]")
        name = key.partition(".")[2]
        print(f"{name} = {to_toml(value)}  # {where}" if value is not None else f"# {name} is not set")
    next_step(f"atoll run {run_file}" if run_file else "atoll config show run.toml")


def run_file_schema() -> str:
    """Return the JSON Schema of run files, with descriptions, defaults and the names that Atoll brings."""
    made = _as_in_toml(Settings.model_json_schema())
    for kind, key in NAMES:  # packages and programs may add names, so that these are examples
        group, _, name = key.partition(".")
        table = made["$defs"][made["properties"][group]["$ref"].rpartition("/")[2]]["properties"]
        examples = {"examples": list(registry.TABLES[kind])}
        table.update(
            {name: table[name] | {"properties": {"name": examples}}} if name else {"name": table["name"] | examples}
        )
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | made, indent=1)


def _as_in_toml(schema: Any) -> Any:
    """Return a part of a schema without null, which TOML does not have."""
    if isinstance(schema, list):
        return [_as_in_toml(each) for each in schema if each != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    made = {key: _as_in_toml(value) for key, value in schema.items() if key != "title" and value is not None}
    if isinstance(made.get("default"), dict):  # of a table: its keys have their own
        del made["default"]
    options = made.pop("anyOf", [])
    return made | (options[0] if len(options) == 1 else {"anyOf": options} if options else {})


@app.command()
def schema() -> None:
    """Print a JSON Schema of run files, for editors."""
    print(run_file_schema())
    next_step("atoll config show run.toml, for the values in effect")
