"""The policy of a site: `policy.toml`, which limits what any process of Atoll on this machine may send.

    [runs]                                 # which runs the site takes part in
    servers = ["https://fl.example:8512"]
    algorithms = ["fedavg"]
    max_rounds = 100

    [tensors]                              # what every update, answer and object must pass
    allow = ["backbone.*"]
    max_norm = 1.0

    [metadata]                             # what else may leave
    metrics = ["loss"]
    host_name = false

The file is at ATOLL_POLICY, else in `$XDG_CONFIG_HOME/atoll` or in /etc/atoll. A key that the file lacks limits
nothing. An unknown key is an error before anything leaves. No setting of a run, answer of a server or argument of a
script changes the policy, and a refusal names the line of the file.
"""

from __future__ import annotations

import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from atoll.errors import ConfigError
from atoll.posix import open_named
from atoll.registry import nearest

VARIABLE, NAME = "ATOLL_POLICY", "policy.toml"
SYSTEM_FOLDER = Path("/etc/atoll")
MOST_BYTES = 2**20
"""Largest size of a policy file, in bytes."""

_Pattern = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_Patterns = Annotated[tuple[_Pattern, ...], Field(strict=False)]
EVERYTHING = ("*",)


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Runs(_Group):
    """Which runs the site takes part in. Names are shell-style patterns, in lower and upper case."""

    servers: _Patterns = Field(EVERYTHING, description="Addresses of servers, as https://host:port.")
    names: _Patterns = Field(EVERYTHING, description="Names of runs.")
    algorithms: _Patterns = Field(EVERYTHING, description="Names of algorithms.")
    swarm: bool = Field(True, description="Whether the site may take part in swarms.")
    max_rounds: int | None = Field(None, ge=1, description="Most rounds of a run; a run without an end asks for more.")
    max_bytes: int | None = Field(None, ge=1, description="Most bytes of tensors that leave for one run.")


class Tensors(_Group):
    """What every update, answer to a task and published object must pass. Names are shell-style patterns."""

    allow: _Patterns = Field(EVERYTHING, description="Names of the tensors that may leave; another one is refused.")
    drop: _Patterns = Field((), description="Names of the tensors that are left out. They need not be allowed.")
    max_norm: float | None = Field(None, gt=0, description="L2 norm to which each update, answer and object is scaled.")
    noise: float = Field(0.0, ge=0, description="Gaussian noise of each element, as a multiple of max_norm.")

    @model_validator(mode="after")
    def _has_scale(self) -> Tensors:
        if self.noise and self.max_norm is None:
            raise ValueError("noise is a multiple of max_norm: set max_norm, too")
        return self


class Metadata(_Group):
    """What else may leave. Names are shell-style patterns."""

    metrics: _Patterns = Field(EVERYTHING, description="Names of metrics.")
    tasks: _Patterns = Field(EVERYTHING, description="Names of the tasks that the site answers.")
    labels: _Patterns = Field(EVERYTHING, description="Names of labels.")
    objects: bool = Field(True, description="Whether scripts may publish objects.")
    host_name: bool = Field(True, description="Whether servers learn the name of the machine.")
    errors: bool = Field(True, description="Whether texts of errors leave; they can quote data.")
    warnings: bool = Field(True, description="Whether warnings of the site leave.")
    notes: bool = Field(True, description="Whether what a script says of its work (`worker.note`) leaves.")


class Log(_Group):
    """The egress log."""

    folder: Path | None = Field(
        None, strict=False, description="Folder of the egress log. Default: `$XDG_STATE_HOME/atoll`."
    )


class _Content(_Group):
    runs: Runs = Runs()
    tensors: Tensors = Tensors()
    metadata: Metadata = Metadata()
    log: Log = Log()


@dataclass(frozen=True)
class Policy:
    """A policy that was read from its file.

    Attributes:
        path: the file.
        text: its content.
        content: the values.
        digest: BLAKE3 of the content, which the egress log and the notes of updates name.
    """

    path: Path
    text: str
    content: _Content
    digest: str

    @classmethod
    def empty(cls, path: Path) -> Policy:
        """Return a policy that limits nothing. `path` stands in messages."""
        return cls(path, "", _Content(), "")

    @property
    def runs(self) -> Runs:
        """Which runs the site takes part in."""
        return self.content.runs

    @property
    def tensors(self) -> Tensors:
        """What every update, answer and object must pass."""
        return self.content.tensors

    @property
    def metadata(self) -> Metadata:
        """What else may leave."""
        return self.content.metadata

    @property
    def log_folder(self) -> Path:
        """The folder of the egress log."""
        default = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return self.path.parent / (self.content.log.folder or Path(default, "atoll").absolute())

    def refusal(self, key: str, what: str, remedy: str = "") -> ConfigError:
        """Return the error of what the policy forbids. It names file and line.

        Args:
            key: `group.key` of the rule.
            what: what was refused, as a sentence without full stop.
            remedy: what to do; by default, that the owner of the policy may change it.
        """
        where = f"{self.path}:{line_of(self.text, key)}"
        return ConfigError(
            f"This site's policy forbids it: {what} ({where}, {key}). Nothing of it was sent.",
            remedy or "The owner of the policy may change this line. Then start again.",
        )


def allows(patterns: Iterable[str], name: str) -> bool:
    """Return whether a name matches one of the patterns. Upper and lower case differ."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def line_of(text: str, key: str) -> int:
    """Return the number of the line of a policy that sets `group.key`: of the key, else of its group, else 1."""
    group, _, name = key.partition(".")
    table, found = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([A-Za-z_]+)\s*\]", line):
            table = header[1]
            found = number if table == group else found
        if re.match(rf"\s*{re.escape(name if table == group else key)}\s*=", line):
            return number
    return found


def policy_path(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the site's policy; None if the site has none.

    Raises:
        ConfigError: `ATOLL_POLICY` names a file that does not exist.
    """
    if named := environ.get(VARIABLE):
        if not os.path.lexists(named):
            raise ConfigError(
                f"{VARIABLE} is {named!r}, which does not exist, so nothing is sent.", "Name the policy's file."
            )
        return Path(named).absolute()
    folders = [Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "atoll"), SYSTEM_FOLDER]
    return next((folder / NAME for folder in folders if os.path.lexists(folder / NAME)), None)


def read_policy(path: Path) -> Policy:
    """Read a policy, and check which users may change it.

    Raises:
        ConfigError: the file cannot be read; another user may change it; or it is not a policy. The message names the
            line, and for an unknown key the nearest one.
    """
    from blake3 import blake3

    try:
        with open(open_named(path), "rb") as file:
            _require_owner(path, os.fstat(file.fileno()), stat.S_IWGRP | stat.S_IWOTH)
            _require_owner(path.parent, os.stat(path.parent), stat.S_IWOTH)
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"The policy {path} cannot be read ({error.strerror}), so nothing is sent.",
            "Let this user read it, as a plain file.",
        ) from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"The policy {path} has more than {MOST_BYTES} bytes.", "Give names as patterns.")
    try:
        text = data.decode()
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # no TOML or UTF-8, a number of 5,000 digits, 3,000 brackets
        raise ConfigError(f"The policy {path} is not TOML: {error}.", "Correct it. Nothing is sent.") from None
    try:
        return Policy(path, text, _Content.model_validate(values), blake3(data).hexdigest())
    except ValidationError as error:
        raise _readable(path, text, error) from None


def _require_owner(path: Path, found: os.stat_result, forbidden: int) -> None:
    """Refuse a file or folder that another user may change. Folders with the sticky bit are meant for several users."""
    is_shared = bool(found.st_mode & forbidden) and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (0, os.geteuid()) or is_shared:
        raise ConfigError(
            f"Other users may change {path} (mode {stat.S_IMODE(found.st_mode):04o}, user {found.st_uid}), so the "
            "policy protects nothing. Nothing is sent.",
            f"chmod go-w {path}, and let it belong to root or to this user.",
        )


def _readable(path: Path, text: str, error: ValidationError) -> ConfigError:
    """Return pydantic's first error as an error that names the line."""
    first = error.errors(include_url=False)[0]
    names = [str(each) for each in first["loc"]]
    key = ".".join(names[:2])
    where = f"{path}:{line_of(text, key)}"
    if first["type"] == "extra_forbidden":
        groups: Any = _Content.model_fields
        known = groups if len(names) == 1 else groups[names[0]].annotation.model_fields
        remedy = nearest(names[-1], known, f"Known: {', '.join(known)}.")
        return ConfigError(f"{where}: the policy has no key {key!r}. Nothing is sent.", remedy)
    reason = first["msg"].removeprefix("Value error, ")
    given = "" if isinstance(first["input"], dict) else f" = {first['input']!r}"
    return ConfigError(f"{where}: {key}{given}: {reason[0].lower()}{reason[1:]}.", "Correct it; nothing is sent.")


def most(limit: int | None) -> float:
    """Return a limit as a number; infinity if there is none."""
    return math.inf if limit is None else limit
