"""docs/reference/ from the code: the settings of a run and their JSON Schema, the variables of a worker, errors and
exit codes.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from atoll import config, errors
from atoll.cli.config import run_file_schema
from atoll.config import settings

KINDS: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
KINDS[SecretStr] = "text"
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

WORKER = {
    "ATOLL_SERVER": "Address of the server, `http://host:8512`, with the path of a gateway if there is one; "
    "without it a script trains alone.",
    "ATOLL_SITE": "Name of the site: letters, digits, `.`, `_`, `-`; by default made from host and process. "
    "Without a server, the default is `alone`.",
    "ATOLL_SITE_NUMBER": "The site's place among all sites, from 1. Only `atoll run` and simulations set it.",
    "ATOLL_SITES": "The number of all sites. Only `atoll run` and simulations set it.",
    "ATOLL_TOKEN": "Bearer token, at the server and its workers; or a 0600 file named by `ATOLL_TOKEN_FILE`.",
    "ATOLL_MAX_SYNC_RETRIES": "Retries to reach the server before DiLoCo skips a synchronisation; by default 6.",
    "ATOLL_GIVE_UP_S": "Seconds without an answer, or without success, after which a worker gives up; by default "
    "86400, a day; 0: never.",
    "ATOLL_DIR": "Folder of the base and outbox files, each as large as the model; by default `.atoll`.",
    "ATOLL_LOG_JSON": "1: print log lines as JSON objects, as `--log-json` does.",
    "ATOLL_LOG_LEVEL": "The least level of log lines: warning, info or debug; `-q` and `-v` set it. By default info.",
    "ATOLL_NEW_STATE": "1: a site that lost its algorithm's state starts at zero instead of being refused.",
    "ATOLL_TLS_CA": "PEM file with the authority of the server's certificate. Default: the one that `atoll enrol` has "
    "stored, else the system's.",
    "ATOLL_CREDENTIAL": "Folder with the site's credential, if `atoll enrol --dir` has put it there.",
    "ATOLL_INVITATION": "Invitation for `atoll enrol`, in place of its argument.",
    "ATOLL_SWARM": "1: this site may take part in a [swarm](../swarm.md); 0: it may not, whatever its script and "
    "`ATOLL_PEER_*` say.",
    "ATOLL_PEER_HOST": "In a swarm, the address on which a worker listens for the others; by default 127.0.0.1.",
    "ATOLL_PEER_PORT": "Its port there; by default any free one.",
    "ATOLL_PEER_NAME": "The name or address by which the others reach it; by default `ATOLL_PEER_HOST`.",
    "ATOLL_PEER_TLS_CERT": "PEM file with its certificate for the others.",
    "ATOLL_PEER_TLS_KEY": "PEM file with the key of that certificate.",
    "ATOLL_PEER_INSECURE": "1: listen beyond this machine without TLS. A false value is as if it were unset.",
    "ATOLL_POLICY": "The site's [policy](../policy.md); by default `policy.toml` in `$XDG_CONFIG_HOME/atoll`, else in "
    "/etc/atoll.",
    "ATOLL_FLARE_PARAMS": "What a [script on NVFlare's Client API](../nvflare-scripts.md) receives: torch or numpy; by "
    "default torch if the script has imported it.",
    "ATOLL_DRY_RUN": "Folder for what would leave. Only `atoll worker --dry-run` sets it.",
}
"""Variables that a worker reads. `config.NOT_SETTINGS` has the same names, and those for tests."""

EXIT_CODES = {
    0: "Success.",
    1: "An unexpected error; please report the traceback.",
    2: "The command line, the run file, a variable or a call is wrong.",
    3: "The port is in use.",
    4: "Another process owns the state directory.",
    5: "A network error: no server answers, or no byte moves.",
    6: "The two sides do not match: another model or protocol, or a refused update.",
    7: "A disk error on this machine: full, damaged, or a failed fsync.",
    8: "A missing or wrong token or certificate.",
    9: "The run cannot continue.",
    10: "The run has failed at the server; a site ends with this code instead of waiting for the server.",
    130: "Ended by Ctrl-C.",
    143: "Ended by SIGTERM; a running server shuts down and ends with 0.",
}


LASTING = {
    "free": ("yes", "valid from this start on, also for running sites"),
    "sites": ("sites: later", "each site uses the value from its own start"),
    "beginning": ("not read", "it defines the initial model; another model is refused"),
    "frozen": ("no", "refused, with both values"),
    "run": ("another run", "the folder identifies the run"),
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
        "`--set group.key=value` on the command line, or the variable `ATOLL_<GROUP>__<KEY>`. The command line wins",
        "over the environment, the environment over the file. A key or an `ATOLL_` variable that does not exist is",
        "refused. Units: `_s` seconds, `_bytes` bytes. `atoll config show` prints the values in effect and their",
        "sources; `atoll config schema` prints the [JSON Schema](run-file.schema.json) of run files. `atoll new`",
        "writes it beside the run file, which names it in its first line, so that editors complete and check settings.",
        "",
        "A *choice* is a table: `{name = …}` for a part of Atoll or of an installed package, or `{path = …}` for",
        "your own (`my_file.py:attribute` or `module:attribute`). Its options are further keys.",
        "",
        "The column *changed* says what a [restart](../operations.md#what-may-change) with another value does:",
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
        "In a variable and after `--set`, numbers are written as in TOML, and a boolean as true, yes, on or 1, or as",
        'false, no, off or 0. In the file, types are strict: `"1"` is not a number, and `true` is not 1.',
        "",
        "In a variable, tables and lists of tables are written as in TOML (`{weight_decay = 0.1}`); a list of text",
        "uses commas (`bn.*,ema.*`). An option of a choice may be set alone:",
        "`ATOLL_AGGREGATION__UPLOAD_CODEC__DENSITY=0.01`, `--set aggregation.upload_codec.density=0.01`.",
        "Relative paths in a run file are relative to its folder, others to the current folder.",
        "",
        "## Variables of a worker",
        "",
        "| variable | meaning |",
        "|---|---|",
        *(_row([f"`{name}`", meaning]) for name, meaning in WORKER.items()),
        "",
        "Sites and commands reach the server through the proxy of `HTTPS_PROXY`, `HTTP_PROXY` or `ALL_PROXY`, except",
        "the hosts of `NO_PROXY`: [proxies](../deployment.md#sites-behind-an-http-proxy).",
    ]
    return "\n".join(lines) + "\n"


def exit_codes_page() -> str:
    meanings = dict(re.findall(r"── (\w+) {2,}(?:[\d↻]+ +)?(\S.*)$", errors.__doc__ or "", re.MULTILINE))
    lines = [
        "# Exit codes and errors",
        "",
        "Written by `make reference`. A command that fails prints one line with the cause, the value and the remedy,",
        "and ends with one of these codes. So does a training script that does not catch such an error; its line",
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
        "Errors are subclasses of `atoll.errors.AtollError`. The code travels on the wire.",
        "",
        "| code | class | base | exit code | meaning |",
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
        SystemExit: a variable, an exit code or a setting without a description.
    """
    variables = config.NOT_SETTINGS - {"ATOLL_FAILPOINTS", "ATOLL_LEASES"}
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
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # Literal | None is a Union
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
    (out / "run-file.schema.json").write_text(run_file_schema() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
