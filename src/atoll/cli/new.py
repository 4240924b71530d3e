"""`atoll new`: a commented run file and a training script that work as they are."""

from __future__ import annotations

import textwrap
from importlib.resources import files
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
"""The settings that most run files choose among; `atoll server --help` lists all."""

LOW_COMMUNICATION = {
    "Fewer bytes, less waiting (docs/low-communication.md)": (
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
"""For DiLoCo."""

SIMULATED = {"Many sites on this machine: atoll simulate run.toml --workers 20": ("client",)}
"""For federated runs."""

ALGORITHMS = registry.TABLES["algorithms"]


def command(
    directory: Annotated[
        Path, typer.Argument(help="Folder to write into; it is created if it does not exist.", metavar="[DIR]")
    ] = Path("."),
    algorithm: Annotated[
        str, typer.Option(help=f"What the server is to run: {', '.join(ALGORITHMS)}.", metavar="NAME")
    ] = "fedavg",
) -> None:
    """Write run.toml and train.py: a run that works as it is, for you to change."""
    if algorithm not in ALGORITHMS:
        hint = registry.nearest(algorithm, ALGORITHMS, f"It has {', '.join(ALGORITHMS)}.")
        raise UsageError(f"Atoll has no algorithm {algorithm!r}.", hint)
    script = "train_diloco.py" if algorithm == "diloco" else "train_fedavg.py"  # all federated algorithms share one
    contents = {
        "run.toml": run_file(algorithm, directory.resolve().name or "atoll"),
        "train.py": (files("atoll.cli") / "templates" / script).read_text(encoding="utf-8"),
    }
    another = "Name another folder: atoll new my-run."
    if present := [name for name in contents if (directory / name).exists()]:
        raise UsageError(f"{str(directory)!r} has {', '.join(present)} already; nothing was written.", another)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (directory / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{error.filename or directory} cannot be written: {error.strerror}.", another) from error
    print(f"Wrote {', '.join(contents)} in {directory}.\n\n{next_commands(directory, algorithm)}")


def next_commands(directory: Path, algorithm: str) -> str:
    """Return the commands to type next."""
    server = f"http://127.0.0.1:{DEFAULT_PORT}"
    lines = [
        *([] if directory.resolve() == Path.cwd() else [f"  cd {directory}"]),
        "  python train.py                  # alone: does the script train?",
        "  atoll server run.toml            # then the server, and in two more terminals:",
        *(f"  atoll worker --server {server} --site {site} -- python train.py" for site in "ab"),
        "  atoll status --watch             # what each site does, and which sites the server waits for",
        *(
            []
            if algorithm == "diloco"
            else ["  atoll simulate run.toml --workers 20   # or twenty sites on this machine"]
        ),
    ]
    return "\n".join(lines)


def run_file(algorithm: str, name: str) -> str:
    """Return the text of a run file: chosen settings as they are, every other one as a comment with its default."""
    is_diloco = algorithm == "diloco"
    chosen = {
        "name": name[:100],
        "model": "train:build",
        "num_workers": 2,
        "state_dir": "atoll-run",
        "algorithm": algorithm,
        "rounds": 10,
        **({"sync_every": 20} if is_diloco else {"client": "train.py"}),
    }
    lines = [
        "# A run of Atoll: `atoll server run.toml`. Every key is also a flag (--sync-every 100) and an environment",
        "# variable (ATOLL_SYNC_EVERY=100). A line that is commented out shows the default. These are the usual",
        "# settings; `atoll server --help` lists all.",
    ]
    for title, keys in (SECTIONS | (LOW_COMMUNICATION if is_diloco else SIMULATED)).items():
        lines += ["", f"# ---- {title} {'-' * (70 - len(title))}"]
        for key in keys:
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
