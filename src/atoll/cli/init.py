"""`atoll init`: a commented run file, a model and a training script that work as they are."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import PydanticUndefined

from atoll import registry
from atoll.config import DEFAULT_PORT, Settings
from atoll.config.text import to_toml
from atoll.errors import StoreError, UsageError

SECTIONS: dict[str, tuple[str, ...]] = {
    "The model": ("name", "model", "model_args", "seed"),
    "The rounds": ("algorithm", "rounds", "num_workers", "min_workers", "quorum", "round_deadline_s", "sync_every"),
    "What the server does with updates": (
        "outer_optimizer",
        "outer_lr",
        "outer_momentum",
        "codec",
        "max_update_norm",
    ),
    "The network": (
        "host",
        "port",
        "tls_cert",
        "tls_key",
        "token_file",
        "connections",
        "heartbeat_interval_s",
        "heartbeat_timeout_s",
    ),
    "The disk": ("state_dir", "save_dir", "save_every", "durability", "keep_versions"),
}
"""The settings that a run file usually has an opinion on; `atoll server --help` lists them all."""

LOW_COMMUNICATION = {
    "Fewer bytes, less standing still (docs/low-communication.md)": (
        "downlink_codec",
        "num_fragments",
        "tau",
        "alpha",
        "mode",
        "dn_buffer_size",
        "sync_rounds_first",
        "dylu",
    )
}
"""Of runs that count local steps."""

SIMULATED = {"Many sites on this machine: atoll simulate run.toml --workers 20": ("client",)}
"""Of runs whose sites train by rounds."""

ALGORITHMS = registry.TABLES["algorithms"]


@dataclass(frozen=True)
class Template:
    """A project that runs as it is.

    Attributes:
        algorithm: of its run file.
        chosen: further settings that its run file chooses.
        algorithms: others that its script serves as well.
        module, extra: what it needs beyond Atoll, and what of Atoll brings it.
        like: another template, whose files it has, too.
    """

    algorithm: str
    chosen: Mapping[str, Any] = field(default_factory=dict)
    algorithms: tuple[str, ...] = ()
    module: str = ""
    extra: str = ""
    like: str = ""


TEMPLATES = {
    "fedavg": Template("fedavg"),
    "scaffold": Template("scaffold", like="fedavg"),
    "diloco": Template("diloco", {"sync_every": 20}),
    "lightning": Template(
        "fedavg",
        algorithms=tuple(name for name in ALGORITHMS if name != "diloco"),
        module="lightning",
        extra="lightning",
    ),
    "transformers": Template(
        "fedavg", {"rounds": 5}, algorithms=tuple(ALGORITHMS), module="transformers", extra="transformers"
    ),
    "swarm": Template(
        "fedavg",
        {"placement": "swarm"},
        algorithms=tuple(name for name in ALGORITHMS if name not in ("diloco", "scaffold", "fedprox")),
        like="fedavg",
    ),
    "custom": Template(
        "fedavg",
        {"aggregator": "aggregator.py:ByAgreement", "aggregator_options": {"sharpness": 1.0}},
        like="fedavg",
    ),
}
"""Folders of `cli/templates`."""


def command(
    directory: Annotated[Path, typer.Argument(help="Folder to write into; made if need be.", metavar="[DIR]")] = Path(
        "."
    ),
    algorithm: Annotated[
        str | None,
        typer.Option(
            help=f"What the server is to run: {', '.join(ALGORITHMS)}.", metavar="NAME", show_default="fedavg"
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help=f"A project with data and a README that runs as it is: {', '.join(TEMPLATES)}.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write run.toml, model.py and train.py: a run that works as it is, to be made your own."""
    if algorithm is not None and algorithm not in ALGORITHMS:
        hint = registry.nearest(algorithm, ALGORITHMS, f"Those that it has: {', '.join(ALGORITHMS)}.")
        raise UsageError(f"Atoll has no algorithm {algorithm!r}.", hint)
    name = directory.resolve().name or "atoll"
    contents = _plain(algorithm or "fedavg", name) if template is None else _project(template, algorithm, name)
    present = [entry for entry in contents if (directory / entry).exists()]
    if present:
        raise UsageError(
            f"{str(directory)!r} has {', '.join(present)} already; nothing was written.",
            "Name another folder: atoll init my-run.",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for entry, content in contents.items():
            (directory / entry).write_text(content, encoding="utf-8")
    except OSError as error:
        where = error.filename or directory
        raise StoreError(
            f"{where} cannot be written: {error.strerror}.", "Name another folder: atoll init my-run."
        ) from error
    print(f"Wrote {', '.join(contents)} in {directory}.\n")
    needs = TEMPLATES[template] if template else Template("")
    if needs.module and not find_spec(needs.module):
        print(f"It needs {needs.module}, which is not installed: pip install 'atoll[{needs.extra}]'\n")
    print(next_commands(directory, simulated="client" in tomllib.loads(contents["run.toml"])))


def _plain(algorithm: str, name: str) -> dict[str, str]:
    """The three files of a run, by their names."""
    templates = files("atoll.cli") / "templates"
    script = "train_diloco.py" if algorithm == "diloco" else "train_fedavg.py"  # every federated one has the same
    return {
        "run.toml": run_file(algorithm, name),
        "model.py": (templates / "model.py").read_text(encoding="utf-8"),
        "train.py": (templates / script).read_text(encoding="utf-8"),
    }


def _project(template: str, algorithm: str | None, name: str) -> dict[str, str]:
    """The files of a template, by their names.

    Raises:
        UsageError: there is no such template, or its script is of another algorithm.
    """
    if template not in TEMPLATES:
        near = registry.nearest(template, TEMPLATES)
        raise UsageError(f"Atoll has no template {template!r}; it has {', '.join(TEMPLATES)}.", near)
    made = TEMPLATES[template]
    if algorithm not in (None, made.algorithm, *made.algorithms):
        others = ", ".join(dict.fromkeys([made.algorithm, *made.algorithms]))
        raise UsageError(
            f"The template {template!r} is not of algorithm {algorithm!r}.",
            f"It may be {others}, or leave --template out.",
        )
    texts = {
        entry.name: entry.read_text(encoding="utf-8")
        for folder in filter(None, (made.like, template))
        for entry in sorted((files("atoll.cli") / "templates" / folder).iterdir(), key=lambda entry: entry.name)
        if entry.is_file()
    }
    return {"run.toml": run_file(algorithm or made.algorithm, name, made.chosen)} | texts


def next_commands(directory: Path, *, simulated: bool) -> str:
    """What to type next.

    Args:
        simulated: whether virtual workers can run the script, too.
    """
    enter = "" if directory.resolve() == Path.cwd() else f"  cd {directory}\n"
    server = f"http://127.0.0.1:{DEFAULT_PORT}"
    return (
        f"{enter}  python train.py                  # alone: does the script train?\n"
        "  atoll server run.toml            # then the server, and in two more terminals:\n"
        f"  atoll worker --server {server} --site a -- python train.py\n"
        f"  atoll worker --server {server} --site b -- python train.py\n"
        "  atoll status --watch             # who does what, who is awaited"
        + ("\n  atoll simulate run.toml --workers 20   # or twenty sites, on this machine alone" if simulated else "")
    )


def run_file(algorithm: str, name: str, more: Mapping[str, Any] | None = None) -> str:
    """The text of a run file: what is chosen stands as it is, every default as a comment.

    Args:
        more: further settings that are chosen.
    """
    chosen = {
        "name": name[:100],
        "model": "model:build",
        "num_workers": 2,
        "state_dir": "atoll-run",
        "algorithm": algorithm,
        "rounds": 10,
        **({"sync_every": 20} if algorithm == "diloco" else {"client": "train.py"}),
        **(more or {}),
    }
    lines = [
        "# A run of Atoll: `atoll server run.toml`. Every key is also a flag (--sync-every 100) and an environment",
        "# variable (ATOLL_SYNC_EVERY=100). Lines that are commented out show the default. These are the usual",
        "# settings; all of them: `atoll server --help`.",
    ]
    sections = SECTIONS | (LOW_COMMUNICATION if algorithm == "diloco" else SIMULATED)
    for title, keys in sections.items():
        lines += ["", f"# ---- {title} {'-' * (70 - len(title))}"]
        for key in keys:
            lines += ["", *_setting(key, chosen)]
    shown = {key for keys in sections.values() for key in keys}
    if others := [key for key in chosen if key not in shown]:
        lines += ["", f"# ---- Of this project {'-' * 53}"]
        for key in others:
            lines += ["", *_setting(key, chosen)]
    return "\n".join(lines) + "\n"


def _setting(key: str, chosen: dict[str, Any]) -> list[str]:
    field = Settings.model_fields[key]
    comment = [f"# {line}" for line in textwrap.wrap(field.description or "", 98)]
    if key in chosen:
        return [*comment, f"{key} = {to_toml(chosen[key])}"]
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None:
        return [*comment, f"# {key} ="]
    return [*comment, f"# {key} = {to_toml(default)}"]
