"""The options `--flower APP`, `--run-config`, `--record-keys` of `atoll run` and `atoll worker`: a Flower app as it is.

If the run file names an algorithm, the ClientApp trains in its rounds; else the app's ServerApp decides.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.config import Settings
from atoll.errors import ConfigError, UsageError

Flower = Annotated[
    Path | None,
    typer.Option(
        help="Run a Flower app: the folder with its pyproject.toml. Of a run with an algorithm, only its ClientApp.",
        metavar="APP",
    ),
]
RunConfig = Annotated[
    list[str] | None,
    typer.Option(help="Change the configuration of a Flower app: num-server-rounds=5.", metavar="PAIRS"),
]
GivenKeys = Annotated[
    list[str] | None,
    typer.Option(
        help="Names in a Flower app's records, as its strategy has them: weighted_by_key='samples'.", metavar="PAIRS"
    ),
]
MODULE = "atoll.integrations.flower"
SCRIPT = f"{MODULE}.__main__:main"


def of_flower_app(
    settings: Settings, app: Path, run_config: list[str], record_keys: list[str]
) -> tuple[Settings, list[str]]:
    """Return the settings of a run of a Flower app, and the arguments of its sites.

    Raises:
        UsageError: the run has workflows of its own, although the ServerApp decides.
        ConfigError: there is no app in the folder, it has no such key of its configuration, or it cannot train in the
            run's algorithm.
    """
    from atoll.integrations.flower.app_folder import AppFolder, RecordKeys, read_pairs

    if settings.algorithm.target is not None:
        folder = AppFolder.read(app)
        folder.configured(read_pairs(run_config, "--run-config"))
        folder.require("clientapp")
        RecordKeys.of(read_pairs(record_keys, "--record-keys"))
        if settings.model.source is None:
            raise ConfigError(
                f"model.source is not set. In a run with {settings.algorithm}, the ServerApp of {folder.name}, which "
                "makes the initial model, does not run.",
                'Set it to the function that makes the model, such as model.source = "my_app.task:Net", or to a '
                ".safetensors file.",
            )
        named = {"run.name": folder.name} if "name" not in settings.run.model_fields_set else {}
        options = [*_options("--run-config", run_config), *_options("--record-keys", record_keys)]
        return settings.changed(named | {"run.script": SCRIPT}), [str(folder.path), *options]
    if settings.workflow.steps or settings.workflow.function is not None:
        raise UsageError(
            "Both --flower and the workflows of a run file are given.",
            f'Leave out one, or add {{kind = "flower", app = "{app}"}} to workflow.steps.',
        )
    folder, changes = AppFolder.read(app), read_pairs(run_config, "--run-config")
    folder.configured(changes)
    step = {"kind": "flower", "app": str(folder.path), "run_config": changes}
    own = {"workflow.steps": (step,), "run.script": SCRIPT, "run.name": folder.name}
    return settings.changed(own), [str(folder.path), *_options("--run-config", run_config)]


def folder_of_app(script: str, arguments: list[str]) -> list[Path]:
    """Return the folder of the app that the sites of a run have, from which its code is imported; empty if none."""
    return [Path(arguments[0])] if script == SCRIPT and arguments else []


def flower_worker(app: Path, run_config: list[str], node_config: list[str], record_keys: list[str]) -> list[str]:
    """Return the command that answers as the ClientApp of a Flower app.

    Raises:
        ConfigError: there is no app in the folder.
    """
    from atoll.integrations.flower.app_folder import AppFolder

    folder = AppFolder.read(app)
    options = [*_options("--run-config", run_config), *_options("--node-config", node_config)]
    options += _options("--record-keys", record_keys)
    return [sys.executable, "-m", MODULE, str(folder.path), *options]


def _options(name: str, values: list[str]) -> list[str]:
    return [name, *values] if values else []
