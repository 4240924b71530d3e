"""docs/reference/ from the code: the settings of a run, the variables of a worker, errors and exit codes."""

from __future__ import annotations

import argparse
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from atoll import config, errors
from atoll.config import settings

KINDS: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

WORKER = {
    "ATOLL_SERVER": "Address of the server, `http://host:8512`; without it a script trains alone.",
    "ATOLL_SITE": "Name of this worker: letters, digits, `.`, `_`, `-`; by default made of host and process.",
    "ATOLL_TOKEN": "Bearer token, at the server and its workers; or a 0600 file named by `ATOLL_TOKEN_FILE`.",
    "ATOLL_MAX_SYNC_RETRIES": "Attempts before DiLoCo skips a synchronisation with a lost server; by default 6.",
    "ATOLL_GIVE_UP_S": "Seconds without an answer of the server after which it is not waited for any more; by default "
    "86400, a day; 0: for ever.",
    "ATOLL_DIR": "Folder of the base and outbox files, each as large as the model; by default `.atoll`.",
    "ATOLL_NEW_STATE": "1: a site that has lost what its algorithm keeps there begins at zero, and is not refused.",
    "ATOLL_TLS_CA": "PEM file with the authority of the server's certificate; by default the system's.",
    "ATOLL_PEER_HOST": "In a swarm, the address that a worker listens on for the others; by default 127.0.0.1.",
    "ATOLL_PEER_PORT": "Its port there; by default any free one.",
    "ATOLL_PEER_NAME": "The name or address that others reach it under; by default that of `ATOLL_PEER_HOST`.",
    "ATOLL_PEER_TLS_CERT": "PEM file with the certificate that it shows them.",
    "ATOLL_PEER_TLS_KEY": "PEM file with the key of that certificate.",
    "ATOLL_PEER_INSECURE": "1: it may listen beyond this machine without TLS.",
}
"""What a worker reads beside its arguments. `config.NOT_SETTINGS` has the same names, and those for tests."""

EXIT_CODES = {
    0: "It did what was asked.",
    1: "Something unforeseen; the traceback belongs into a report.",
    2: "The command line, the run file, a variable or a call is wrong.",
    3: "The port is taken.",
    4: "Another process owns the state directory.",
    5: "The network: no server answers, or no byte moves.",
    6: "The two sides do not fit each other: another model, another protocol, a refused update.",
    7: "This machine's disk: full, damaged, or an fsync failed.",
    8: "The token or the certificate is not accepted.",
    9: "The run cannot go on.",
    130: "Ended by Ctrl-C.",
    143: "Ended by SIGTERM; a server that has begun puts everything away and ends with 0.",
}


LASTING = {
    "free": ("yes", "holds from that start on, for sites that are running, too"),
    "sites": ("sites: later", "every site has the value of its own start"),
    "beginning": ("not read", "it is of the initial model, and another model is refused"),
    "frozen": ("no", "it is refused, with both values"),
    "run": ("another run", "the folder says which run it is"),
}
"""How long a value lasts → what the table says, and what that means."""


def _lasts(key: str) -> str:
    """The key of `LASTING` for a setting."""
    tables = {"frozen": settings.FROZEN + settings.FROZEN_OUTER, "beginning": settings.AT_THE_BEGINNING}
    tables |= {"sites": settings.FOR_SITES, "run": ("disk.state_dir",)}
    return next((how for how, keys in tables.items() if key in keys or key.partition(".")[0] in keys), "free")


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Written by `make reference`. A setting is `group.key`: a key in a table of the run file (TOML),",
        "`--set group.key=value` of a command, and the variable `ATOLL_<GROUP>__<KEY>`. The command line wins over",
        "the environment, the environment over the file. A key or an `ATOLL_` variable that does not exist is",
        "refused. Units: `_s` seconds, `_bytes` bytes. `atoll config show` prints the values in effect with what",
        "named each, `atoll config schema` a JSON Schema for editors.",
        "",
        "A *choice* is one table: `{name = …}` for what Atoll or an installed package has, `{path = …}` for your own",
        "(`my_file.py:attribute` or `module:attribute`), and its options beside it.",
        "",
        "What becomes of another value when the server of a run is [started again](../operations.md#what-may-change):",
        "",
        *(f"- **{words}**: {what}." for words, what in LASTING.values()),
    ]
    for group, kind in config.GROUPS.items():
        lines += [
            "",
            f"## `[{group}]`",
            "",
            kind.__doc__ or "",
            "",
            "| key | type | default | meaning | changed |",
            "|---|---|---|---|---|",
        ]
        for key, field in config.FIELDS.items():
            if key.startswith(f"{group}."):
                changed = LASTING[_lasts(key)][0]
                lines.append(_row([f"`{key}`", _kind(field), _default(key), field.description or "", changed]))
    lines += [
        "",
        "In a variable, a table is as in TOML (`{weight_decay = 0.1}`), so is a list of tables; a list of text",
        "has commas (`bn.*,ema.*`). An option of a choice may be given alone:",
        "`ATOLL_AGGREGATION__UPLOAD_CODEC__DENSITY=0.01`, `--set aggregation.upload_codec.density=0.01`.",
        "Relative paths in a run file are relative to its folder, others to the current one.",
        "",
        "## Variables of a worker",
        "",
        "| variable | meaning |",
        "|---|---|",
        *(_row([f"`{name}`", meaning]) for name, meaning in WORKER.items()),
    ]
    return "\n".join(lines) + "\n"


def exit_codes_page() -> str:
    meanings = dict(re.findall(r"── (\w+) {2,}(?:[\d↻] +)?(\S.*)$", errors.__doc__ or "", re.MULTILINE))
    lines = [
        "# Exit codes and errors",
        "",
        "Written by `make reference`. A command that fails prints one line with the cause, the value and the remedy,",
        "and ends with one of these codes. So does a training script that does not catch such an error: its line",
        "names the line of the script. The exit code of `atoll worker` is its script's.",
        "",
        "| exit code | meaning | errors |",
        "|---|---|---|",
    ]
    kinds = list(errors.BY_CODE.values())
    for code, meaning in EXIT_CODES.items():
        names = [f"`{kind.__name__}`" for kind in kinds if kind.exit_code == code]
        lines.append(_row([str(code), meaning, ", ".join(names)]))
    lines += [
        "",
        "Errors are classes of `atoll.errors`, all of them `AtollError`; the code travels on the wire.",
        "",
        "| code | class | base | exit code | who or what |",
        "|---|---|---|---|---|",
    ]
    for kind in kinds[1:]:
        base = kind.__bases__[0].__name__
        cells = [f"`{kind.code}`", f"`{kind.__name__}`", f"`{base}`", str(kind.exit_code)]
        lines.append(_row([*cells, meanings.get(kind.__name__, "")]))
    return "\n".join(lines) + "\n"


def check_complete() -> None:
    """Refuse to write pages that leave something out.

    Raises:
        SystemExit: a variable, an exit code or a setting that nobody has described.
    """
    variables = config.NOT_SETTINGS - {"ATOLL_FAILPOINTS", "ATOLL_LAST_STATUS", "ATOLL_LEASES"}
    if variables != set(WORKER):
        raise SystemExit(f"reference: describe {sorted(variables ^ set(WORKER))} in WORKER.")
    unknown = {kind.exit_code for kind in errors.BY_CODE.values()} - set(EXIT_CODES)
    if unknown:
        raise SystemExit(f"reference: describe the exit codes {sorted(unknown)} in EXIT_CODES.")
    undescribed = [key for key, field in config.FIELDS.items() if not field.description]
    if undescribed:
        raise SystemExit(f"reference: give {', '.join(undescribed)} a description in config/settings.py.")


def _kind(field: FieldInfo) -> str:
    """`int | None` with `ge=0` → "integer ≥ 0"."""
    annotation: Any = field.annotation
    if isinstance(annotation, types.UnionType):
        annotation = next(option for option in typing.get_args(annotation) if option is not types.NoneType)
    if annotation is settings.Choice:
        return "choice"
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (dict, tuple):
        if origin is tuple:
            return "list of tables" if typing.get_origin(typing.get_args(annotation)[0]) is dict else "list of text"
        return "table"
    limits = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in SIGNS.items()
        if hasattr(bound, name)
    ]
    return f"{KINDS[annotation]} {', '.join(limits)}".rstrip()


def _default(key: str) -> str:
    value = config.default_of(key)
    if value is None or value == () or value == {} or isinstance(value, settings.Choice):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference/.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "reference")
    out: Path = parser.parse_args().out
    check_complete()
    out.mkdir(parents=True, exist_ok=True)
    (out / "settings.md").write_text(settings_page(), encoding="utf-8")
    (out / "exit-codes.md").write_text(exit_codes_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
