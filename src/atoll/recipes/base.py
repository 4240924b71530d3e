"""What every recipe is: a few names that people know, and the settings of a run that they stand for."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from atoll.algorithms.resolve import resolve
from atoll.border import bordered, say_interrupt_in_a_line
from atoll.config import DEFAULT_PORT, Settings
from atoll.config.text import settings_lines
from atoll.errors import ConfigError, UsageError
from atoll.recipes.arguments import Strict, require_number, require_path, script_arguments
from atoll.recipes.model import InitialModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from atoll.recipes.result import RunResult

HEADER = "# Written by "
"""How a run file begins that may be written anew."""

ARGUMENTS = {
    "name": "name",
    "model": "model",
    "model_args": "model",
    "rounds": "num_rounds",
    "num_workers": "min_clients",
    "min_workers": "min_clients",
    "client": "train_script",
}
"""Setting → the argument that it comes from."""

DEFAULTS_ONLY = ("num_workers", "min_workers")
"""Of those, what may be chosen apart from the argument, too."""


class Environment(Protocol):
    """Where a recipe is executed."""

    def run(self, recipe: Recipe) -> RunResult:
        """Execute it, and say what came of it."""
        ...


@bordered
@dataclass(eq=False)
class Recipe(Strict):
    """A run of one algorithm.

    Args:
        name: of the run, for people.
        model: the initial model: an `nn.Module`, `"module:function"`, `{"class_path": …, "args": …}`, or a safetensors
            file; None where `initial_ckpt` is one.
        min_clients: clients that round one waits for, and below which no round closes.
        num_rounds: after which the run is finished.
        train_script: what a client runs, `train.py`: a script that would be a worker under `atoll worker`.
        initial_ckpt: a safetensors file with the weights of `model`.
        train_args: of the script, as one text or a list.

    Raises:
        UsageError: an argument is unknown (the nearest is named), or two of them contradict each other.
        ConfigError: a value is wrong; the setting is named that it stands for.
    """

    algorithm: ClassVar[str]
    """Of the run file."""

    name: str
    model: nn.Module | str | Path | Mapping[str, Any] | None
    min_clients: int
    num_rounds: int
    train_script: str | Path
    initial_ckpt: str | Path | None = None
    train_args: str | Sequence[str] = ()
    _config: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.initial_ckpt is not None:
            require_path(self, "initial_ckpt", self.initial_ckpt)
        self._initial = InitialModel(self.model, self.initial_ckpt)
        require_path(self, "train_script", self.train_script)
        script_arguments(self, self.train_args)
        if isinstance(self.num_rounds, int) and self.num_rounds < 1:
            raise UsageError(
                f"{type(self).__name__}: num_rounds is {self.num_rounds}.", "A recipe ends by itself: give at least 1."
            )
        self.settings()
        require_number(self, "min_clients", self.min_clients, 1)
        require_number(self, "num_rounds", self.num_rounds, 1)
        if not Path(self.train_script).is_file():
            raise UsageError(
                f"{type(self).__name__}: there is no train_script {str(self.train_script)!r}.",
                f"A relative path is looked for in {str(Path.cwd())!r}.",
            )

    # -- the settings it stands for

    def choices(self) -> dict[str, Any]:
        """What the algorithm's own arguments say, as settings of the run file."""
        return {}

    def add_server_config(self, config: Mapping[str, Any] | None = None, **given: Any) -> Self:
        """Choose further settings of the run file (docs/reference/settings.md); what was chosen before gives way.

        Paths are relative to the current folder. Settings that make sense only together go into one call.

        Raises:
            ConfigError: there is no such setting (the nearest is named), a value is wrong, or contradicts another.
            UsageError: an argument of the recipe says it already, or settings came as keywords.
        """
        if given or not isinstance(config, Mapping):
            got = ", ".join([*([repr(config)] if config is not None else []), *(f"{key}=…" for key in given)])
            raise UsageError(
                f"add_server_config takes the settings as one mapping, and got {got or 'nothing'}.",
                f"Write recipe.add_server_config({given or {'codec': 'int8'}!r}).",
            )
        fixed = {"algorithm", *ARGUMENTS, *self.choices()} - {*DEFAULTS_ONLY}
        for key in config:
            if not isinstance(key, str):
                raise UsageError(
                    f"add_server_config got the key {key!r}, which is no name of a setting.",
                    "Names are texts: docs/reference/settings.md has them.",
                )
            if key in fixed:
                who = type(self).__name__
                argument = ARGUMENTS.get(key)
                raise UsageError(
                    f"add_server_config got {key!r}, which {who} decides.",
                    f"It is its argument {argument!r}."
                    if argument
                    else "See its other arguments, or take another one.",
                )
        before = self._config
        self._config = before | dict(config)
        try:
            self.settings()
        except BaseException:
            self._config = before
            raise
        return self

    def settings(self, num_clients: int | None = None, folder: Path = Path()) -> Settings:
        """The run's settings; paths in them are relative to the current folder.

        Args:
            num_clients: that round one waits for; by default `min_clients`.
            folder: where an initial model lies that `write` makes.

        Raises:
            ConfigError: a value is wrong, or contradicts another, or the algorithm does not take it.
        """
        who = type(self).__name__
        source = {key: f"{who}, {argument}" for key, argument in ARGUMENTS.items()}
        source |= dict.fromkeys(self.choices(), who) | dict.fromkeys(self._config, "add_server_config")
        settings = Settings.build(self._values(num_clients, folder), source)
        try:
            resolve(settings)
        except ConfigError as error:
            raise ConfigError(f"{who}: {error.message}", error.remedy, error.trace) from error
        return settings

    def _values(self, num_clients: int | None, folder: Path) -> dict[str, Any]:
        floor = {} if self._config.get("mode") == "async" else {"min_workers": self.min_clients}
        return {
            "name": self.name,
            **self._initial.settings(folder),
            "algorithm": self.algorithm,
            "rounds": self.num_rounds,
            "num_workers": self.min_clients if num_clients is None else num_clients,
            "client": str(self.train_script),
            **floor,  # nobody waits for others in an asynchronous run, so that there it is left at 1
            **self.choices(),
            **self._config,
        }

    def initial_tensors(self, settings: Settings) -> nn.Module | Mapping[str, Tensor]:
        """The initial model, as the server of this recipe would have it."""
        return self._initial.tensors(settings)

    @property
    def argv(self) -> list[str]:
        """The script and its arguments."""
        return [str(self.train_script), *script_arguments(self, self.train_args)]

    # -- what it does

    def write(self, path: str | Path, num_clients: int | None = None) -> Path:
        """Write the run file, and the initial model beside it where `model` is a module or has weights of its own.

        `atoll server` on that file and `atoll worker` with the script are the same run as `execute`, to the bit.

        Args:
            num_clients: that round one waits for; by default `min_clients`.

        Raises:
            UsageError: there is a file that no recipe wrote.
            ConfigError: a value is wrong, or the weights are not those of the model.
        """
        path = Path(path)
        if path.is_dir():
            raise UsageError(f"{str(path)!r} is a folder.", f"Name the run file: {path / 'run.toml'}.")
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
            raise UsageError(f"{str(path)!r} was not written by a recipe.", "Name another file, or remove that one.")
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = self.settings(num_clients, path.parent)
        self._initial.write(path.parent, settings)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(self.text(path, num_clients), encoding="utf-8")
        os.replace(temporary, path)
        return path

    def text(self, path: Path, num_clients: int | None = None) -> str:
        """What `write` writes at `path`."""
        settings = self.settings(num_clients, path.parent)
        chosen = {*self._values(num_clients, path.parent), *(["model_args"] if settings.model_args else [])}
        shown = min(settings.num_workers, 3)
        server = f"http://127.0.0.1:{settings.port or DEFAULT_PORT}"
        return "\n".join(
            [
                f"{HEADER}{type(self).__name__}. The same run without it, each line in a terminal of its own, where",
                f"# {self.train_script} lies (bits may hang on PyTorch's threads: a recipe sets OMP_NUM_THREADS=1):",
                f"#   atoll server {path.name}",
                *(
                    f"#   atoll worker --server {server} --site site-{number} -- python {shlex.join(self.argv)}"
                    for number in range(1, shown + 1)
                ),
                *([f"#   … and so on, to site-{settings.num_workers}"] if settings.num_workers > shown else []),
                "",
                *settings_lines(settings, chosen, path.parent),
                "",
            ]
        )

    def execute(self, env: Environment) -> RunResult:
        """Run it, and return when it is finished.

        Args:
            env: `SimEnv(num_clients=2)`, `LocalEnv(num_clients=2)` or `ServerEnv("http://host:8512")`.

        Raises:
            AtollError: it could not begin or failed; the message says how to go on.
        """
        if isinstance(env, type) or not callable(getattr(env, "run", None)):
            raise UsageError(
                f"execute got {env!r}, which is no environment.",
                'Give LocalEnv(num_clients=2), SimEnv(num_clients=2) or ServerEnv("http://host:8512").',
            )
        try:
            return env.run(self)
        except KeyboardInterrupt:
            say_interrupt_in_a_line()
            raise


def slug(name: str) -> str:
    """A run's name as that of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
