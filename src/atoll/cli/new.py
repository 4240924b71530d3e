"""`atoll new`: write a commented run file and a training script that work without changes."""

from __future__ import annotations

import itertools
import os
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
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

WORKFLOW = (
    *(key for key in USUAL if key.partition(".")[0] in ("run", "network")),
    "run.script",
    "rounds.sites",
    "disk.state_dir",
    "disk.durability",
    "workflow.steps",
)
"""The settings of a run file for templates that work by tasks."""

ALGORITHMS = registry.TABLES["algorithms"]


@dataclass(frozen=True)
class Template:
    """A script for a kind of model or library, and its run file.

    Attributes:
        content: what the script does, for the help.
        packages: import name → what pip installs.
        sends_tasks: whether the script's own function runs the rounds, by tasks. Else it trains in rounds.
        further: commands to try besides those of every script.
    """

    content: str
    packages: Mapping[str, str]
    sends_tasks: bool = True
    further: tuple[str, ...] = ()


TEMPLATES = {
    "peft": Template(
        "fine-tune a language model with LoRA",
        {"peft": "peft", "transformers": "transformers"},
        sends_tasks=False,
        further=(
            "  python train.py folders          # write base/ and adapter/; after a run, what AutoPeftModel opens:",
            "  atoll export tuned --like adapter",
        ),
    ),
    "sklearn": Template("scikit-learn on tables", {"sklearn": "scikit-learn"}),
    "xgboost": Template("XGBoost on tables", {"xgboost": "xgboost"}),
}
"""Name → template; its script is train_NAME.py in `templates/`."""


def command(
    directory: Annotated[
        Path, typer.Argument(help="Folder to write into; created if missing.", metavar="[DIR]")
    ] = Path("."),
    algorithm: Annotated[
        str | None,
        typer.Option(
            help=f"Algorithm of the run: {', '.join(ALGORITHMS)}. Default: fedavg.", metavar="NAME", show_default=False
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help=f"Another script: {', '.join(f'{name} ({each.content})' for name, each in TEMPLATES.items())}.",
            metavar="NAME",
            show_default=False,
            autocompletion=lambda: sorted(TEMPLATES),
        ),
    ] = None,
) -> None:
    """Write run.toml and train.py: a complete run that works as it is, for you to change."""
    require_known("algorithm", algorithm, [*ALGORITHMS])
    require_known("template", template, [*TEMPLATES])
    chosen = TEMPLATES.get(template or "")
    if chosen is not None and algorithm and (chosen.sends_tasks or algorithm == "diloco"):
        why = "runs the rounds itself" if chosen.sends_tasks else "trains in rounds"
        raise UsageError(
            f"--algorithm is {algorithm}, but the script of --template {template} {why}.", "Leave --algorithm out."
        )
    algorithm = algorithm or "fedavg"
    script = template or ("diloco" if algorithm == "diloco" else "fedavg")  # all federated algorithms share one
    is_workflow = chosen is not None and chosen.sends_tasks
    name = directory.resolve().name or "atoll"
    contents = {
        "run.toml": workflow_file(name) if is_workflow else run_file(algorithm, name),
        SCHEMA: run_file_schema() + "\n",
        "train.py": (files("atoll.cli") / "templates" / f"train_{script}.py").read_text(encoding="utf-8"),
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
    print(f"Wrote {', '.join(contents)} in {directory}.\n\n{next_commands(directory, script)}")


def require_known(kind: str, name: str | None, known: list[str]) -> None:
    """Check the value of an option that is the name of something.

    Raises:
        UsageError: there is no such name.
    """
    if name is not None and name not in known:
        hint = registry.nearest(name, known, f"Use one of {', '.join(known)}.")
        raise UsageError(f"There is no {kind} {name!r}.", hint)


def next_commands(directory: Path, script: str) -> str:
    """Return the text that lists the commands to try next.

    Args:
        directory: the folder with the files.
        script: the name of the script among the templates, without `train_` and `.py`.
    """
    server = f"http://127.0.0.1:{DEFAULT_PORT}"
    template = TEMPLATES.get(script, Template("", {}, sends_tasks=False))
    missing = [package for module, package in template.packages.items() if find_spec(module) is None]
    lines = [
        *([] if directory.resolve() == Path.cwd() else [f"  cd {shlex.quote(str(directory))}"]),
        *([f"  pip install {' '.join(missing)}"] if missing else []),
        "  python train.py                  # try the script alone, without a server",
        *(["  atoll run run.toml --sites 3     # a server and three sites on this machine"] * (script != "diloco")),
        "  atoll server run.toml            # or start the server, then in two more terminals:",
        *(f"  atoll worker --server {server} --site {site} -- python train.py" for site in "ab"),
        "  atoll status --watch             # show what each site does and which sites the server waits for",
    ]
    if script != "diloco" and not template.sends_tasks:
        lines.append("  atoll simulate run.toml --set rounds.sites=20   # or simulate twenty sites on this machine")
    return "\n".join([*lines, *template.further])


def run_file(algorithm: str, name: str) -> str:
    """Return the text of a run file for an algorithm.

    Settings that `atoll new` chooses are written with their values. Other frequent settings and all options of the
    algorithm are added as comments, with their defaults.
    """
    is_diloco = algorithm == "diloco"
    chosen = _chosen_for(name) | {
        "model.source": "train:build",
        "algorithm.name": algorithm,
        "rounds.total": 10,
        **({"diloco.sync_every": 20} if is_diloco else {"run.script": "train.py"}),
    }
    from atoll.server.coordinator.effective_settings import chosen_by

    settings = Settings.build(chosen)
    defaults = {key: default_of(key) for key in FIELDS} | chosen_by(resolve(settings), settings)
    usual = {*USUAL, *(LOW_COMMUNICATION if is_diloco else SIMULATED), *(defaults.keys() - FIELDS)}
    return _text(chosen, defaults, usual)


def workflow_file(name: str) -> str:
    """Return the text of a run file for a template that works by tasks."""
    steps = [{"path": "train.py:main", "args": {"rounds": 10}, "start_timeout_s": 3600}]
    chosen = _chosen_for(name) | {"run.script": "train.py", "workflow.steps": steps}
    return _text(chosen, {key: default_of(key) for key in FIELDS}, {*WORKFLOW})


def _chosen_for(name: str) -> dict[str, Any]:
    return {"run.name": name[:100], "rounds.sites": 2, "disk.state_dir": "atoll-run"}


def _text(chosen: Mapping[str, Any], defaults: dict[str, Any], usual: set[str]) -> str:
    """Return a run file with the chosen settings, and with the usual ones as comments.

    Args:
        chosen: `group.key` → value.
        defaults: `group.key` → default, also of options of the algorithm.
        usual: the settings that the file shows.
    """
    lines = [
        f"#:schema {SCHEMA}",
        "# A run of Atoll: `atoll server run.toml`. A setting can also be given as `--set rounds.total=10`, or as an",
        "# environment variable (ATOLL_ROUNDS__TOTAL=10). A line that is commented out shows the default. These are",
        "# the usual settings; `atoll config show run.toml` lists all.",
    ]
    defaults = defaults | {"rounds.min_sites": None}  # it depends on rounds.sites
    for group in GROUPS:
        keys = [key for key in defaults if key.startswith(f"{group}.") and key in usual]
        lines += ["", "", f"[{group}]"] if keys else []
        for key in keys:
            lines += ["", *_setting(key, chosen, defaults[key])]
    return "\n".join(lines) + "\n"


def _setting(key: str, chosen: Mapping[str, Any], default: Any) -> list[str]:
    algorithm = chosen.get("algorithm.name", "")
    option = f"Option of {algorithm}: docs/algorithms/{algorithm}.md."
    text = FIELDS[key].description if key in FIELDS else option
    comment = [f"# {line}" for line in textwrap.wrap(text or "", 98)]
    name = key.partition(".")[2]
    if key in chosen:
        return [*comment, f"{name} = {to_toml(chosen[key])}"]
    if default is None or default == Choice():
        return [*comment, f"# {name} is not set"]
    return [*comment, f"# {name} = {to_toml(default)}"]
