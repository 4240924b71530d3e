"""`atoll new`: write a commented run file and a training script that work without changes."""

from __future__ import annotations

import itertools
import os
import shlex
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll import registry
from atoll.algorithms.resolve import resolve
from atoll.cli.config import run_file_schema
from atoll.cli.text import require_short
from atoll.config import DEFAULT_PORT, FIELDS, GROUPS, Settings, default_of, to_toml
from atoll.config.settings import Choice
from atoll.errors import StoreError, UsageError

SCHEMA = "run.schema.json"
"""The file by which editors know the settings; the first line of the run file names it."""

USUAL = (
    "run.name",
    "run.seed",
    "model.source",
    "model.args",
    "algorithm.name",
    "algorithm.outer_optimizer",
    "rounds.total",
    "rounds.sites",
    "rounds.min_sites",
    "rounds.quorum",
    "rounds.deadline_s",
    "aggregation.upload_codec",
    "aggregation.max_update_norm",
    "network.host",
    "network.port",
    "network.tls_cert",
    "network.tls_key",
    "network.token_file",
    "network.connections",
    "network.heartbeat_interval_s",
    "network.heartbeat_timeout_s",
    "disk.state_dir",
    "disk.export_dir",
    "disk.export_every",
    "disk.durability",
    "disk.keep_versions",
)
"""The settings that `atoll new` writes into every run file; settings left at their defaults are commented out."""

LOW_COMMUNICATION = (
    "diloco.sync_every",
    "diloco.num_fragments",
    "diloco.fragment_sync_delay",
    "diloco.fragment_update_alpha",
    "diloco.dynamic_local_steps",
    "async.enabled",
    "async.momentum_every",
    "async.sync_rounds_first",
    "aggregation.download_codec",
)
"""Further settings for DiLoCo runs: docs/low-communication.md."""

SIMULATED = ("run.script",)
"""Further settings for federated runs, which `atoll simulate` can run, too."""

ALGORITHMS = registry.TABLES["algorithms"]


def command(
    directory: Annotated[
        Path, typer.Argument(help="Folder to write into; created if missing.", metavar="[DIR]")
    ] = Path("."),
    algorithm: Annotated[
        str, typer.Option(help=f"Algorithm of the run: {', '.join(ALGORITHMS)}.", metavar="NAME")
    ] = "fedavg",
) -> None:
    """Write run.toml and train.py: a complete run that works as it is, for you to change."""
    if algorithm not in ALGORITHMS:
        hint = registry.nearest(algorithm, ALGORITHMS, f"Use one of {', '.join(ALGORITHMS)}.")
        raise UsageError(f"There is no algorithm {algorithm!r}.", hint)
    script = "train_diloco.py" if algorithm == "diloco" else "train_fedavg.py"  # all federated algorithms share one
    contents = {
        "run.toml": run_file(algorithm, directory.resolve().name or "atoll"),
        SCHEMA: run_file_schema() + "\n",
        "train.py": (files("atoll.cli") / "templates" / script).read_text(encoding="utf-8"),
    }
    names = itertools.chain(["my-run"], (f"my-run-{number}" for number in itertools.count(2)))
    another = f"Give another folder: atoll new {next(name for name in names if not os.path.lexists(name))}."
    require_short(directory)
    try:
        if present := [name for name in contents if (directory / name).exists()]:
            raise UsageError(f"{str(directory)!r} already has {', '.join(present)}; nothing was written.", another)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (directory / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{error.filename or directory} cannot be written: {error.strerror}.", another) from error
    print(f"Wrote {', '.join(contents)} in {directory}.\n\n{next_commands(directory, algorithm)}")


def next_commands(directory: Path, algorithm: str) -> str:
    """Return the text that lists the commands to try next."""
    server = f"http://127.0.0.1:{DEFAULT_PORT}"
    lines = [
        *([] if directory.resolve() == Path.cwd() else [f"  cd {shlex.quote(str(directory))}"]),
        "  python train.py                  # try the script alone, without a server",
        *(
            []
            if algorithm == "diloco"
            else ["  atoll run run.toml --sites 3     # a server and three sites on this machine"]
        ),
        "  atoll server run.toml            # or start the server, then in two more terminals:",
        *(f"  atoll worker --server {server} --site {site} -- python train.py" for site in "ab"),
        "  atoll status --watch             # show what each site does and which sites the server waits for",
    ]
    if algorithm != "diloco":
        lines.append("  atoll simulate run.toml --set rounds.sites=20   # or simulate twenty sites on this machine")
    return "\n".join(lines)


def run_file(algorithm: str, name: str) -> str:
    """Return the text of a run file for an algorithm.

    Settings that `atoll new` chooses are written with their values. Other frequent settings and all options of the
    algorithm are added as comments, with their defaults.
    """
    is_diloco = algorithm == "diloco"
    chosen = {
        "run.name": name[:100],
        "model.source": "train:build",
        "algorithm.name": algorithm,
        "rounds.total": 10,
        "rounds.sites": 2,
        "disk.state_dir": "atoll-run",
        **({"diloco.sync_every": 20} if is_diloco else {"run.script": "train.py"}),
    }
    lines = [
        f"#:schema {SCHEMA}",
        "# A run of Atoll: `atoll server run.toml`. A setting can also be given as `--set rounds.total=10`, or as an",
        "# environment variable (ATOLL_ROUNDS__TOTAL=10). A line that is commented out shows the default. These are",
        "# the usual settings; `atoll config show run.toml` lists all.",
    ]
    from atoll.server.coordinator.effective_settings import chosen_by

    settings = Settings.build(chosen)
    defaults = {key: default_of(key) for key in FIELDS} | chosen_by(resolve(settings), settings)
    defaults["rounds.min_sites"] = None  # it depends on rounds.sites
    usual = {*USUAL, *(LOW_COMMUNICATION if is_diloco else SIMULATED), *(defaults.keys() - FIELDS)}
    for group in GROUPS:
        keys = [key for key in defaults if key.startswith(f"{group}.") and key in usual]
        lines += ["", "", f"[{group}]"] if keys else []
        for key in keys:
            lines += ["", *_setting(key, chosen, defaults[key])]
    return "\n".join(lines) + "\n"


def _setting(key: str, chosen: dict[str, Any], default: Any) -> list[str]:
    algorithm = chosen["algorithm.name"]
    option = f"Option of {algorithm}: docs/algorithms/{algorithm}.md."
    text = FIELDS[key].description if key in FIELDS else option
    comment = [f"# {line}" for line in textwrap.wrap(text or "", 98)]
    name = key.partition(".")[2]
    if key in chosen:
        return [*comment, f"{name} = {to_toml(chosen[key])}"]
    if default is None or default == Choice():
        return [*comment, f"# {name} is not set"]
    return [*comment, f"# {name} = {to_toml(default)}"]
