"""`Recipe`, the base class of recipes: turns a few arguments into a file with a run's settings and its model."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from atoll import registry
from atoll.algorithms.resolve import resolve
from atoll.config import DEFAULT_PORT, FIELDS, Settings, toml_lines
from atoll.config.run_file import flat, merged, moved
from atoll.errors import ConfigError, UsageError, print_interrupt_in_a_line, public_api
from atoll.posix import NAMED_FILE, no_sync, read_named, replace_file
from atoll.protocol.status_messages import RoundSummary, Status

if TYPE_CHECKING:
    from torch import Tensor, nn

    from atoll.tensors.module_tensors import Tensors


class _Strict(type):
    @public_api
    def __call__(cls, *args: Any, **arguments: Any) -> Any:
        """Check the arguments against the signature of `__init__`, then create the instance.

        Raises:
            UsageError: an argument is unknown or missing. The message names it and the nearest known argument.
        """
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # of this very class
        known = [name for name in signature.parameters if name != "self"]
        for name in arguments:
            if name not in known:
                raise _unknown(cls.__name__, name, arguments[name], known)
        try:
            signature.bind(None, *args, **arguments)
        except TypeError as error:
            wanted = [name for name in known if signature.parameters[name].default is inspect.Parameter.empty]
            raise UsageError(f"{cls.__name__}: {error}.", f"The required arguments are {', '.join(wanted)}.") from None
        return super().__call__(*args, **arguments)


class Strict(metaclass=_Strict):
    """Base class of classes that raise a helpful error for arguments that are unknown or missing."""


def require_number(owner: object, name: str, value: object, least: int) -> None:
    """Check that a value is a whole number of at least `least`.

    Raises:
        UsageError: the value is something else. The message names the class of `owner` and the argument `name`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{type(owner).__name__}: {name} is {value!r}.", f"Give a whole number, at least {least}.")


def require_path(owner: object, name: str, value: object) -> None:
    """Check that a value is a path.

    Raises:
        UsageError: the value is something else. The message names the class of `owner` and the argument `name`.
    """
    if not isinstance(value, str | Path):
        raise UsageError(f"{type(owner).__name__}: {name} is {value!r}.", "Give a path as a string or a pathlib.Path.")


def script_arguments(owner: object, train_args: object) -> list[str]:
    """Return the argument `train_args` of a recipe as a list.

    Args:
        owner: the recipe, for the message.
        train_args: the argument.

    Raises:
        UsageError: `train_args` is neither a list nor a text that a shell could split.
    """
    if isinstance(train_args, str):
        try:
            return shlex.split(train_args)
        except ValueError as error:
            raise UsageError(
                f"{type(owner).__name__}: train_args is {train_args!r}: {str(error).lower()}.",
                "Quote it as for a shell, or pass a list.",
            ) from None
    if isinstance(train_args, Sequence) and not isinstance(train_args, bytes | bytearray):
        return [str(each) for each in train_args]
    raise UsageError(
        f"{type(owner).__name__}: train_args is {train_args!r}.",
        'Use one string, "--epochs 2", or a list of strings, ["--epochs", "2"].',
    )


MORE_SETTINGS = "Further settings of the run file: recipe.add_server_config({'group.key': value})."


def _unknown(owner: str, name: str, value: Any, known: Sequence[str]) -> UsageError:
    if (key := next((each for each in FIELDS if each.endswith(f".{name}")), "")) and name not in known:
        return UsageError(
            f"{owner} has no argument {name!r}; it is the setting {key} of the run file.",
            f"Set it with recipe.add_server_config({{{key!r}: {value!r}}}).",
        )
    meant = name.replace("client", "site")
    return UsageError(
        f"{owner} has no argument {name!r}.",
        registry.nearest(meant, known, f"Its arguments are {', '.join(known)}. {MORE_SETTINGS}"),
    )


INITIAL_FILE = "initial.safetensors"
"""Name of the file with the initial model, beside the run file."""

HOW = 'Give an nn.Module, "my_models:build", {"class_path": "my_models.Net"} or a safetensors file.'


class InitialModel:
    """The initial model of a run.

    Args:
        model: an `nn.Module`; a text for the setting `model.source`, such as "module:function"; a mapping
            `{"class_path": …, "args": …}`; or None.
        checkpoint: a safetensors file with the model's weights, or None.

    Raises:
        UsageError: both are None, both name a file, or `model` is something else.
    """

    def __init__(self, model: Any, checkpoint: str | Path | None) -> None:
        if model is None and checkpoint is None:
            raise UsageError("The recipe has no initial model: model and initial_ckpt are None.", HOW)
        if isinstance(model, type):
            raise UsageError(f"model is the class {model.__name__}, not a model.", f"Pass {model.__name__}().")
        if isinstance(model, Path):
            model = str(model)
        path = model.get("class_path") if isinstance(model, Mapping) else model
        if isinstance(path, str) and path.startswith("__main__"):
            raise UsageError(
                f"model is {path!r}, which the server cannot import: the server's __main__ is another program.",
                "Put the model into a separate module, and import that in the train script, too.",
            )
        if checkpoint is not None and isinstance(model, str) and ":" not in model:
            raise UsageError(
                f"Both model ({model!r}) and initial_ckpt ({str(checkpoint)!r}) name a file.", "Use one of them."
            )
        self._model, self._checkpoint = model, None if checkpoint is None else str(checkpoint)
        self._is_module = not isinstance(model, str | Mapping | None)
        if self._is_module and not callable(getattr(model, "state_dict", None)):
            raise UsageError(f"model is of type {type(model).__name__}.", HOW)

    @property
    def _is_written(self) -> bool:
        """Whether `write` has to create a file for this model. If so, the run file names this file."""
        return self._is_module or (self._checkpoint is not None and self._model is not None)

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return this model's settings for a run file in `folder`. Paths are relative to the current folder."""
        if self._is_written or not isinstance(self._model, Mapping):
            return {"model.source": str(folder / INITIAL_FILE) if self._is_written else self._checkpoint or self._model}
        return _source(self._model)

    def write(self, folder: Path, settings: Settings) -> None:
        """Write the initial model into `folder`, unless the settings refer to code or to an existing file.

        Args:
            folder: the folder of the run file.
            settings: the run's settings.

        Raises:
            ConfigError: the weights do not fit the model, or the checkpoint is not a safetensors file.
        """
        if self._is_written:
            save(folder / INITIAL_FILE, self.tensors(settings), self._weights())

    def tensors(self, settings: Settings) -> nn.Module | Tensors:
        """Return the initial model as the server would load it.

        If the recipe has a model and a checkpoint, return the model with its own weights, not the checkpoint's.
        """
        from atoll.server.initial_model import initial_model

        if self._is_module:
            module: nn.Module = self._model
            return module
        own = self._model or self._checkpoint
        source = _source(own) if isinstance(own, Mapping) else {"model.source": own, "model.args": settings.model.args}
        return initial_model(Settings.build({**source, "run.seed": settings.run.seed}), None)

    def _weights(self) -> Tensors | None:
        if self._checkpoint is None:
            return None
        from atoll.server.initial_model import initial_model

        state = initial_model(Settings.build({"model.source": self._checkpoint}), None)
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"initial_ckpt is {self._checkpoint!r}, which is code, not a file.",
                "Give a safetensors file, or use model for code.",
            )
        return state


def _place_of(owner: str, function: Callable[..., Any]) -> str:
    """Return the import path of the function that evaluates versions.

    Raises:
        UsageError: another process cannot import the function.
    """
    if getattr(function, "__module__", "") != "__main__" and (place := registry.importable_place(function)):
        return place
    raise UsageError(
        f"{owner}: the server cannot import evaluate, which is {getattr(function, '__qualname__', function)!r}.",
        "Put the function at the top level of a separate module, or pass its path, 'my_eval.py:evaluate'.",
    )


def _source(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for a model that is given as `{"class_path": "my_models.Net", "args": {…}}`.

    Raises:
        ConfigError: the mapping has other keys, or a value of the wrong type.
    """
    path, args = model.get("class_path"), model.get("args", {})
    if not isinstance(path, str) or not isinstance(args, Mapping) or not model.keys() <= {"class_path", "args"}:
        raise ConfigError(f"model = {dict(model)!r} does not have a valid form.", HOW)
    module, _, attribute = path.rpartition("." if ":" not in path else ":")
    return {"model.source": f"{module}:{attribute}", "model.args": dict(args)}


def save(path: Path, model: nn.Module | Tensors, weights: Tensors | None = None) -> None:
    """Write a model as a safetensors file, with a header that marks buffers and tied tensors.

    The file appears only when it is complete.

    Args:
        path: the file to write.
        model: the model, which determines the names, dtypes and shapes.
        weights: values to write instead of the model's own; None: the model's own.

    Raises:
        ConfigError: the weights do not fit the model.
    """
    from torch import nn

    from atoll.blobs.model_file import model_header
    from atoll.tensors.chunks import bytes_of
    from atoll.tensors.module_tensors import Marked, named_tensors, schema_of, unwrapped

    model = model if isinstance(model, nn.Module) else unwrapped(model)
    schema, (owners, aliases) = schema_of(model), named_tensors(model)
    if weights is not None:
        given = {name: weights[name] for name in owners if name in weights}  # in the model's order
        given |= {name: weights[name] for name in weights if name not in given and name not in aliases}
        found = Marked(given, {spec.name: spec.is_buffer for spec in schema.tensors})
        found |= {name: found[owner] for name, owner in aliases.items() if owner in found}
        schema_of(found).require_equal(schema, mine="initial_ckpt", theirs="model")
        owners = given
    header, order = model_header(schema)
    runs = (bytes_of(owners[spec.name].detach().cpu().contiguous()) for spec in order)
    replace_file(path, itertools.chain([header], runs), mode=NAMED_FILE)


HEADER = "# Written by "
"""Beginning of a run file that a recipe wrote. Only such a file is overwritten."""

ARGUMENTS = {
    "run.name": "name",
    "model.source": "model",
    "model.args": "model",
    "rounds.total": "num_rounds",
    "rounds.sites": "min_sites",
    "rounds.min_sites": "min_sites",
    "run.script": "train_script",
    "rounds.config": "config",
    "rounds.config_function": "config",
}
"""Setting → the argument of a recipe that sets it."""

ALSO_CHOSEN = ("rounds.sites", "rounds.min_sites", "rounds.config", "rounds.config_function")
"""The settings of `ARGUMENTS` that `add_server_config` may override."""


@public_api
@dataclass(frozen=True)
class RunResult:
    """The result of executing a recipe.

    Attributes:
        model: path of the trained model, a safetensors file; None if it is on another machine.
        history: summaries of the rounds, oldest first. With `ServerEnv`, only the last rounds.
        finished: whether the run is finished. False if, with `ServerEnv`, the script ended before the run did.
        state_dir: the run's state directory; None if it is on another machine.
        folder: the folder of the run file and the logs; None with `ServerEnv`.
        status: the server's last status: sites, bytes, warnings. None for a simulation, and for a run that was finished
            before this call.
    """

    model: Path | None
    history: list[RoundSummary]
    finished: bool
    state_dir: Path | None
    folder: Path | None
    status: Status | None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last round: for each, the weighted mean over the sites that reported it."""
        return dict(self.history[-1].metrics) if self.history else {}


def setting(key: str, default: Any = None) -> Any:
    """Return a dataclass field for an argument of a recipe. The argument's value, unless None, becomes a setting.

    Args:
        key: the name of the setting, `group.key`.
        default: the default of the argument.
    """
    return field(default=default, kw_only=True, metadata={"setting": key})


class Environment(Protocol):
    """A place to execute a recipe: `LocalEnv`, `SimEnv` or `ServerEnv`."""

    def run(self, recipe: Recipe) -> RunResult:
        """Execute the recipe, and return the result."""
        ...


@public_api
@dataclass(eq=False)
class Recipe(Strict):
    """A run with one algorithm, described by a few arguments.

    Args:
        name: name of the run, shown in logs and the status.
        model: the initial model: an `nn.Module`, `"module:function"`, `{"class_path": …, "args": …}`, or the path of a
            safetensors file; None if `initial_ckpt` has the whole model.
        min_sites: number of sites that round 1 waits for, and the least number of updates with which a round can end.
        num_rounds: number of rounds after which the run is finished.
        train_script: path of the training script that each site runs, such as `train.py`.
        initial_ckpt: a safetensors file with weights to load into `model`.
        train_args: arguments of the script, as one text or a list.
        config: what sites are told for each round, as `fl_round.config`: a dict of values and schedules, as in the
            setting `rounds.config`; or a function of a round and a site that returns a dict, or its import path.
        evaluate: a function that evaluates versions at the server, at the top level of a module; or its import path.

    Raises:
        UsageError: an argument is unknown, or two arguments contradict each other.
        ConfigError: a value is wrong. The message names the setting that the argument sets.
    """

    algorithm: ClassVar[str]
    """The algorithm in the run file."""

    name: str
    model: nn.Module | str | Path | Mapping[str, Any] | None
    min_sites: int
    num_rounds: int
    train_script: str | Path
    initial_ckpt: str | Path | None = None
    train_args: str | Sequence[str] = ()
    config: Mapping[str, Any] | str | Callable[..., Any] | None = field(default=None, kw_only=True)
    evaluate: str | Callable[..., Any] | None = field(
        default=None, kw_only=True, metadata={"setting": "server.evaluate"}
    )
    _config: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.initial_ckpt is not None:
            require_path(self, "initial_ckpt", self.initial_ckpt)
        self._initial = InitialModel(self.model, self.initial_ckpt)
        require_path(self, "train_script", self.train_script)
        script_arguments(self, self.train_args)
        if callable(self.evaluate):
            self.evaluate = _place_of(type(self).__name__, self.evaluate)
        if isinstance(self.num_rounds, int) and self.num_rounds < 1:
            raise UsageError(
                f"{type(self).__name__}: num_rounds is {self.num_rounds}.", "Use at least 1: a recipe must end."
            )
        require_number(self, "min_sites", self.min_sites, 1)
        require_number(self, "num_rounds", self.num_rounds, 1)
        self.settings()
        if not Path(self.train_script).is_file():
            raise UsageError(
                f"{type(self).__name__}: the train_script {str(self.train_script)!r} does not exist.",
                f"A relative path is relative to the current folder, {str(Path.cwd())!r}.",
            )

    # -- settings

    def choices(self) -> dict[str, Any]:
        """Return the settings that this recipe's arguments determine. An argument that is None determines nothing."""
        values = {each.metadata["setting"]: getattr(self, each.name) for each in fields(self) if each.metadata}
        return {key: value for key, value in values.items() if value is not None}

    def _told(self) -> dict[str, Any]:
        """Return the setting for the argument `config`.

        Raises:
            UsageError: it is a function that the server cannot import.
        """
        config = self.config
        if callable(config) and not (config := registry.importable_place(config)):
            raise UsageError(
                f"{type(self).__name__}: config is {self.config!r}, which another process cannot import.",
                "Use a function at the top level of a file, or a dict.",
            )
        if config is None:
            return {}
        return {"rounds.config_function": config} if isinstance(config, str) else {"rounds.config": config}

    def add_server_config(self, config: Mapping[str, Any] | None = None, **given: Any) -> Self:
        """Add settings to the run file (docs/reference/settings.md lists them). A later call overrides earlier ones.

        Paths are relative to the current folder. The settings are checked in each call, so give settings that depend
        on each other in one call.

        Args:
            config: the settings, as `{"group.key": value}` or `{"group": {"key": value}}`.
            given: no keyword is allowed; keywords raise an error that shows the right form.

        Returns:
            This recipe.

        Raises:
            ConfigError: a setting is unknown, a value is wrong, or values contradict each other.
            UsageError: an argument of the recipe sets the same setting, or the settings are not one mapping with text
                keys.
        """
        if given or not isinstance(config, Mapping):
            got = ", ".join([*([repr(config)] if config is not None else []), *(f"{key}=…" for key in given)])
            raise UsageError(
                f"add_server_config needs the settings as one mapping, but got {got or 'nothing'}.",
                f"Write recipe.add_server_config({given or {'aggregation.upload_codec': {'name': 'int8'}}!r}).",
            )
        fixed = {"algorithm.name", *ARGUMENTS, *self.choices()} - {*ALSO_CHOSEN}
        if wrong := [key for key in config if not isinstance(key, str)]:
            raise UsageError(
                f"add_server_config got the key {wrong[0]!r}, which is not a string.",
                "Use names of settings; docs/reference/settings.md lists them.",
            )
        settings = flat(config)
        for key in settings:
            if key in fixed:
                owner = type(self).__name__
                argument = ARGUMENTS.get(key)
                raise UsageError(
                    f"add_server_config got {key!r}, but {owner} sets this key itself.",
                    f"Use the argument {argument!r} of the recipe."
                    if argument
                    else "See the arguments of the recipe, or use another recipe.",
                )
        before = self._config
        self._config = before | settings
        try:
            self.settings()
        except BaseException:
            self._config = before
            raise
        return self

    def settings(self, sites: int | None = None, folder: Path = Path()) -> Settings:
        """Return the run's settings; the paths in them are relative to the current folder.

        Args:
            sites: number of sites that round 1 waits for; by default `min_sites`.
            folder: the folder in which `write` creates the file of the initial model, if it creates one.

        Raises:
            ConfigError: a value is wrong, values contradict each other, or the algorithm does not support an option.
        """
        owner = type(self).__name__
        source = {key: f"{owner}, {argument}" for key, argument in ARGUMENTS.items()}
        source |= dict.fromkeys(self.choices(), owner) | dict.fromkeys(self._config, "add_server_config")
        settings = Settings.build(self._values(sites, folder), source)
        try:
            resolve(settings)
        except ConfigError as error:
            raise ConfigError(f"{owner}: {error.message}", error.remedy, error.trace) from error
        return settings

    def _values(self, sites: int | None, folder: Path) -> dict[str, Any]:
        floor = {} if self._config.get("async.enabled") else {"rounds.min_sites": self.min_sites}
        return {
            "run.name": self.name,
            **self._initial.settings(folder),
            "algorithm.name": self.algorithm,
            "rounds.total": self.num_rounds,
            "rounds.sites": self.min_sites if sites is None else sites,
            "run.script": str(self.train_script),
            **self._told(),
            **floor,  # an asynchronous run keeps its default of 1: no site waits for another
            **self.choices(),
            **self._config,
        }

    def initial_tensors(self, settings: Settings) -> nn.Module | Mapping[str, Tensor]:
        """Return the initial model as this recipe's server would load it.

        If `model` and `initial_ckpt` are both set, return the model with its own weights, not those of `initial_ckpt`.
        """
        return self._initial.tensors(settings)

    @property
    def argv(self) -> list[str]:
        """The script and its arguments, as a list."""
        return [str(self.train_script), *script_arguments(self, self.train_args)]

    # -- run file and execution

    def write(self, path: str | Path, sites: int | None = None) -> Path:
        """Write the run file and, if needed, the initial model into the same folder. Return the path of the run file.

        The command `atoll server` with this file, and `atoll worker` at each site, give results that are bit-identical
        to those of `execute`.

        Args:
            path: the run file to write.
            sites: number of sites that round 1 waits for; by default `min_sites`.

        Raises:
            UsageError: `path` is a folder, or a file that no recipe wrote.
            ConfigError: a value is wrong, or the weights do not fit the model.
        """
        path = Path(path)
        if path.is_dir():
            raise UsageError(f"{str(path)!r} is a folder.", f"Give the run file: {path / 'run.toml'}.")
        if path.exists() and not _text_of(path).startswith(HEADER):
            raise UsageError(f"{str(path)!r} was not written by a recipe.", "Give another path, or delete this file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = self.settings(sites, path.parent)
        self._initial.write(path.parent, settings)
        temporary = path.with_name(f".{path.name}.tmp")
        replace_file(path, [self.text(path, sites).encode()], temporary=temporary, sync=no_sync, mode=NAMED_FILE)
        return path

    def text(self, path: Path, sites: int | None = None) -> str:
        """Return the text of the run file that `write` would write at `path`."""
        settings = self.settings(sites, path.parent)
        chosen = merged(self._values(sites, path.parent))
        written = {
            key: moved(key, value, lambda file: os.path.relpath(file, path.parent))
            for key, value in settings.by_key().items()
            if value is not None and key.partition(".")[2] in chosen.get(key.partition(".")[0], {})
        }
        shown = min(settings.rounds.sites, 3)
        script = Path(self.train_script)
        run_file = shlex.quote(os.path.relpath(path, script.parent))
        work = shlex.join([script.name, *self.argv[1:]])
        server = f"http://127.0.0.1:{settings.network.port or DEFAULT_PORT}"
        return "\n".join(
            [
                f"{HEADER}{type(self).__name__}. To start the same run without the recipe, run each line in "
                "its own terminal, in the",
                f"# folder of {self.train_script} (bits may depend on PyTorch's threads: a recipe sets "
                "OMP_NUM_THREADS=1):",
                f"#   atoll server {run_file}",
                *(
                    f"#   atoll worker --server {server} --site site-{number} -- python {work}"
                    for number in range(1, shown + 1)
                ),
                *([f"#   … and so on, to site-{settings.rounds.sites}"] if settings.rounds.sites > shown else []),
                "",
                *toml_lines(written),
                "",
            ]
        )

    def execute(self, env: Environment) -> RunResult:
        """Execute the run in an environment, wait for its end, and return the result.

        Args:
            env: `SimEnv(sites=2)`, `LocalEnv(sites=2)` or `ServerEnv("http://host:8512")`.

        Raises:
            AtollError: the run could not start, or it failed. The message has the remedy.
        """
        if isinstance(env, type) or not callable(getattr(env, "run", None)):
            raise UsageError(
                f"execute got {env!r}, which is not an environment.",
                'Use LocalEnv(sites=2), SimEnv(sites=2) or ServerEnv("http://host:8512").',
            )
        try:
            return env.run(self)
        except KeyboardInterrupt:
            print_interrupt_in_a_line()
            raise


def _text_of(path: Path) -> str:
    """Return the text of a run file.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return read_named(path).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read ({error.strerror}).", "Give another path.") from error


def slug(name: str) -> str:
    """Return a run's name for a folder: characters other than ASCII letters, digits, ".", "_" and "-" become "-"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
