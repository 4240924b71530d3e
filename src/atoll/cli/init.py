"""`atoll init`: a commented run file, a model and a training script that work as they are."""

from __future__ import annotations

import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import PydanticUndefined

from atoll import registry
from atoll.config import DEFAULT_PORT, Settings
from atoll.errors import UsageError

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

ALGORITHMS = registry.TABLES["algorithms"]


def command(
    directory: Annotated[Path, typer.Argument(help="Folder to write into; made if need be.", metavar="[DIR]")] = Path(
        "."
    ),
    algorithm: Annotated[
        str, typer.Option(help=f"What the server is to run: {', '.join(ALGORITHMS)}.", metavar="NAME")
    ] = "fedavg",
) -> None:
    """Write run.toml, model.py and train.py: a run that works as it is, to be made your own."""
    if algorithm not in ALGORITHMS:
        hint = registry.nearest(algorithm, ALGORITHMS, f"Those that it has: {', '.join(ALGORITHMS)}.")
        raise UsageError(f"Atoll has no algorithm {algorithm!r}.", hint)
    name = directory.resolve().name or "atoll"
    templates = files("atoll.cli") / "templates"
    script = "train_diloco.py" if algorithm == "diloco" else "train_fedavg.py"  # every federated one has the same
    contents = {
        "run.toml": run_file(algorithm, name),
        "model.py": (templates / "model.py").read_text(encoding="utf-8"),
        "train.py": (templates / script).read_text(encoding="utf-8"),
    }
    present = [entry for entry in contents if (directory / entry).exists()]
    if present:
        raise UsageError(
            f"{str(directory)!r} has {', '.join(present)} already; nothing was written.",
            "Name another folder: atoll init my-run.",
        )
    directory.mkdir(parents=True, exist_ok=True)
    for entry, content in contents.items():
        (directory / entry).write_text(content, encoding="utf-8")
    print(f"Wrote {', '.join(contents)} in {directory}.\n")
    print(next_commands(directory))


def next_commands(directory: Path) -> str:
    """What to type next."""
    enter = "" if directory.resolve() == Path.cwd() else f"  cd {directory}\n"
    server = f"http://127.0.0.1:{DEFAULT_PORT}"
    return (
        f"{enter}  python train.py                  # alone: does the script train?\n"
        "  atoll server run.toml            # then the server, and in two more terminals:\n"
        f"  atoll worker --server {server} --site a -- python train.py\n"
        f"  atoll worker --server {server} --site b -- python train.py\n"
        "  atoll status --watch             # who does what, who is awaited"
    )


def run_file(algorithm: str, name: str) -> str:
    """The text of a run file: what is chosen stands as it is, every default as a comment."""
    chosen = {
        "name": name[:100],
        "model": "model:build",
        "num_workers": 2,
        "state_dir": "atoll-run",
        "algorithm": algorithm,
        "rounds": 10,
        **({"sync_every": 20} if algorithm == "diloco" else {}),
    }
    lines = [
        "# A run of Atoll: `atoll server run.toml`. Every key is also a flag (--sync-every 100) and an environment",
        "# variable (ATOLL_SYNC_EVERY=100). Lines that are commented out show the default. These are the usual",
        "# settings; all of them: `atoll server --help`.",
    ]
    for title, keys in (SECTIONS | (LOW_COMMUNICATION if algorithm == "diloco" else {})).items():
        lines += ["", f"# ---- {title} {'-' * (70 - len(title))}"]
        for key in keys:
            lines += ["", *_setting(key, chosen)]
    return "\n".join(lines) + "\n"


def _setting(key: str, chosen: dict[str, Any]) -> list[str]:
    field = Settings.model_fields[key]
    comment = [f"# {line}" for line in textwrap.wrap(field.description or "", 98)]
    if key in chosen:
        return [*comment, f"{key} = {_toml(chosen[key])}"]
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None:
        return [*comment, f"# {key} ="]
    return [*comment, f"# {key} = {_toml(default)}"]


def _toml(value: Any) -> str:
    """A setting's value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
