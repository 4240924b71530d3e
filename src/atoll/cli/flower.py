"""The options `--flower APP` and `--run-config` of `atoll run` and `atoll worker`: a Flower app as it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.config import Settings
from atoll.errors import UsageError

Flower = Annotated[
    Path | None,
    typer.Option(help="Run a Flower app instead: the folder with its pyproject.toml.", metavar="APP"),
]
RunConfig = Annotated[
    list[str] | None,
    typer.Option(help="Change the configuration of a Flower app: num-server-rounds=5.", metavar="PAIRS"),
]
MODULE = "atoll.integrations.flower"


def of_flower_app(settings: Settings, app: Path, run_config: list[str]) -> tuple[Settings, list[str]]:
    """Return the settings of a run of a Flower app, and the arguments of its sites.

    Raises:
        UsageError: the run has workflows of its own.
        ConfigError: there is no app in the folder, or it has no such key of its configuration.
    """
    from atoll.integrations.flower.app_folder import AppFolder, read_pairs

    if settings.workflow.steps or settings.workflow.function is not None:
        raise UsageError(
            "Both --flower and the workflows of a run file are given.",
            f'Leave out one, or add {{kind = "flower", app = "{app}"}} to workflow.steps.',
        )
    folder, changes = AppFolder.read(app), read_pairs(run_config, "--run-config")
    folder.configured(changes)
    step = {"kind": "flower", "app": str(folder.path), "run_config": changes}
    own = {"workflow.steps": (step,), "run.script": f"{MODULE}.__main__:main", "run.name": folder.name}
    return settings.changed(own), [str(folder.path), *_options("--run-config", run_config)]


def flower_worker(app: Path, run_config: list[str], node_config: list[str]) -> list[str]:
    """Return the command that answers as the ClientApp of a Flower app.

    Raises:
        ConfigError: there is no app in the folder.
    """
    from atoll.integrations.flower.app_folder import AppFolder

    folder = AppFolder.read(app)
    options = [*_options("--run-config", run_config), *_options("--node-config", node_config)]
    return [sys.executable, "-m", MODULE, str(folder.path), *options]


def _options(name: str, values: list[str]) -> list[str]:
    return [name, *values] if values else []
