"""The registry of named extensions: codecs, reducers, algorithms and other kinds.

There is one table per kind. An entry is `"module:attribute"`; the module is imported on first use. Other packages add
entries with an entry point in the group `atoll.<kind>` (`[project.entry-points."atoll.codecs"]`), and a program adds
its own objects with `register`. A built-in name takes precedence over both. Users can also give the path of an object
of their own: `module:attribute` or `file.py:attribute`.

There are two classes of names, and neither is a `str`. An `OwnName` comes from the user of this program, so the code at
it may be imported. A `ReceivedName` comes from a message, and is only looked up (`resolve_received`): otherwise, a
server could make a site run any code.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from atoll.errors import AtollError, ConfigError, UsageError, public_api
from atoll.format_text import number_of, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pydantic_core import CoreSchema

T = TypeVar("T")
_OURS = ("<frozen importlib", str(importlib.__file__), str(Path(__file__).parent) + os.sep)
"""Prefixes of the file names of the import system and of Atoll. Tracebacks of user code leave out these files."""

_OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "Rprop",
]
"""Optimizers of `torch.optim` that users can name, in lower case, as the outer optimizer."""

TABLES: dict[str, dict[str, str]] = {
    "codecs": {
        "none": "atoll.codecs.plain:NoneCodec",
        "bf16": "atoll.codecs.plain:Bf16Codec",
        "int8": "atoll.codecs.block_quantization:Int8Codec",
        "int4": "atoll.codecs.block_quantization:Int4Codec",
        "topk": "atoll.codecs.topk:TopKCodec",
    },
    "filters": {
        "drop": "atoll.filters.builtin:Drop",
        "norm_clip": "atoll.filters.builtin:NormClip",
        "cast": "atoll.filters.builtin:Cast",
    },
    "reducers": {
        "mean": "atoll.reducers.means:WeightedMean",
        "max": "atoll.reducers.means:Maximum",
        "clipped_mean": "atoll.reducers.robust:ClippedMean",
        "normalised_mean": "atoll.reducers.means:NormalisedMean",
        "median": "atoll.reducers.robust:Median",
        "share": "atoll.reducers.means:Share",
        "trimmed_mean": "atoll.reducers.robust:TrimmedMean",
    },
    "algorithms": {
        "fedavg": "atoll.algorithms.fedavg:fedavg",
        "diloco": "atoll.algorithms.diloco:diloco",
        "fedprox": "atoll.algorithms.fedprox:fedprox",
        "scaffold": "atoll.algorithms.scaffold:scaffold",
        "fednova": "atoll.algorithms.fednova:fednova",
        "fedavgm": "atoll.algorithms.fedopt:fedavgm",
        "fedadagrad": "atoll.algorithms.fedopt:fedadagrad",
        "fedadam": "atoll.algorithms.fedopt:fedadam",
        "fedyogi": "atoll.algorithms.fedopt:fedyogi",
    },
    "outer": {
        **{name.lower(): f"torch.optim:{name}" for name in _OPTIMIZERS},
        "yogi": "atoll.outer_optimizers.yogi:Yogi",
        "delayed_nesterov": "atoll.outer_optimizers.delayed_nesterov:DelayedNesterov",
    },
    "staleness": {
        "constant": "atoll.reducers:constant",
        "inverse_sqrt": "atoll.reducers:inverse_sqrt",
    },
    "extensions": {},
    "trackers": {
        "tensorboard": "atoll.trackers.tensorboard:TensorBoard",
        "mlflow": "atoll.trackers.mlflow:MLflow",
        "wandb": "atoll.trackers.wandb:WandB",
        "trackio": "atoll.trackers.trackio:Trackio",
        "opentelemetry": "atoll.trackers.opentelemetry:OpenTelemetry",
    },
    "workflows": {
        "cross_site_evaluation": "atoll.server.tasks.cross_site_evaluation:cross_site_evaluation",
        "flower": "atoll.integrations.flower.server_app:serve",
    },
}
"""kind → name → "module:attribute". To add a built-in extension, write its own file and one line here."""
_NOUNS = {"outer": "outer optimizer", "staleness": "staleness weight"}
"""Kind → its noun for messages, if it is not the kind's name without the s."""

REGISTRABLE = ("codecs", "filters", "reducers", "algorithms", "outer", "staleness")
"""The kinds to which a program may add objects (`register`)."""
_registered: dict[tuple[str, str], Any] = {}
"""The objects that this program has registered: (kind, name) → object."""


# -- The two classes of names


@dataclass(frozen=True, slots=True)
class OwnName:
    """A name that this program's own user gave, in settings or in a call: the code at it may be imported.

    It is never made from a message of another machine. The few files that make one are in `tests/test_architecture.py`:
    those that read settings or arguments, and children, which get the settings of their parent.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)  # in messages


MOST_NAME_CHARS = 128
NAME_PATTERN = rf"^[A-Za-z0-9_][A-Za-z0-9_.:+-]{{0,{MOST_NAME_CHARS - 1}}}$"
"""Pattern of names in messages: one word, without control characters, which could forge a line of a log."""


@dataclass(frozen=True, slots=True)
class ReceivedName:
    """A name in a message: it is looked up among registered and installed objects, and never imported or opened.

    The sender also makes one of its own name, to see that it can be sent. In messages it is text; it can be the type of
    a field of a pydantic model.

    Raises:
        ValueError: the text does not match `NAME_PATTERN`.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not is_sendable(self.text):
            raise ValueError(f"{str(self.text)[:MOST_NAME_CHARS]!r} is not a name of the form {NAME_PATTERN}")

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)  # in messages

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        from pydantic_core import core_schema as made

        text = made.str_schema(strict=True, pattern=NAME_PATTERN, max_length=MOST_NAME_CHARS)
        read = made.no_info_after_validator_function(cls, text)
        return made.json_or_python_schema(
            json_schema=read,
            python_schema=made.union_schema([made.is_instance_schema(cls), read]),
            serialization=made.to_string_ser_schema(),
        )


Name = OwnName | ReceivedName


SENDABLE = f"Use 1 to {MOST_NAME_CHARS} letters, digits and _ . : + -, beginning with a letter, a digit or _."
"""Advice for a name that messages cannot contain."""


def is_sendable(name: str) -> bool:
    """Return whether a message can contain this name."""
    return re.fullmatch(NAME_PATTERN.strip("^$"), name) is not None


# -- Looking up names


def _installed(kind: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # a slow import, which most commands do not need

    return entry_points(group=f"atoll.{kind}")


def names(kind: str) -> list[str]:
    """Return all registered names of a kind: the built-in ones, then those of this program and of plugins, sorted."""
    others = {point.name for point in _installed(kind)}
    others |= {name for of_kind, name in _registered if of_kind == kind}
    return [*TABLES[kind], *sorted(others - TABLES[kind].keys())]


def is_known(kind: str, name: str) -> bool:
    """Return whether a name is registered. For most names, this does not read the data of installed packages."""
    return name in TABLES[kind] or (kind, name) in _registered or name in names(kind)


def package_of(kind: str, name: str) -> str:
    """Return name and version of the package that registered `name` for this kind; empty if no package did."""
    if name in TABLES[kind]:
        from importlib.metadata import version

        return f"atoll {version('atoll')}"
    if (kind, name) in _registered:
        return ""
    dists = [point.dist for point in _installed(kind) if point.name == name]
    return f"{dists[0].name} {dists[0].version}" if dists and dists[0] is not None else ""


OPTIONS = {
    "cross_site_evaluation": ("versions", "site_models", "sites", "evaluation_timeout_s"),
    "flower": ("app", "run_config"),
}
"""Name of a workflow → the arguments that a run file may set. So Atoll can check the file without an import."""


@public_api
def register(kind: str, name: str, object: Any) -> None:  # noqa: A002  # the argument's name is public
    """Give an object of this program a name, by which settings of this program and the run's messages may choose it.

    A run names its codec, its algorithm and, in a swarm, its reducer and outer optimizer. A site uses them only if it
    has registered them, or has a package with an entry point installed. Call this before `atoll.join`. The last object
    of a name counts, so that a cell of a notebook can run again.

        atoll.register("codecs", "thousandths", Thousandths)

    Args:
        kind: `codecs`, `filters`, `reducers`, `algorithms`, `outer` (outer optimizers) or `staleness`.
        name: the name. For an algorithm, its attribute `name`; for a codec, usually as well: a server that names
            the codec by its path sends this attribute.
        object: the class or function that the name stands for; for `algorithms`, the algorithm.

    Raises:
        UsageError: the kind is unknown; the name is that of a part of Atoll, or no name that a message can contain; or
            the object is not callable, or is an algorithm of another name.
    """
    if kind not in REGISTRABLE:
        remedy = nearest(str(kind), REGISTRABLE, f"Use one of {', '.join(REGISTRABLE)}.")
        raise UsageError(f"{kind!r} is not a kind of object that can be registered.", remedy)
    if not isinstance(name, str) or not is_sendable(name):
        raise UsageError(f"{name!r} cannot be the name of a registered object.", SENDABLE)
    if name in TABLES[kind]:
        raise UsageError(f"{name!r} is already one of Atoll's {_noun(kind)}s.", "Choose another name.")
    if kind == "algorithms":
        if getattr(object, "name", None) != name:
            raise UsageError(
                f"The name {name!r} is not that of the algorithm {object!r}.",
                "Register a value of the class atoll.algorithms.Algorithm under its attribute name.",
            )
    elif not callable(object):
        raise UsageError(
            f"{name!r} would stand for {object!r}, which is of type {type(object).__name__}.",
            "Register a class or a function: the object itself, not its path and not its instance.",
        )
    _registered[kind, name] = object


def _noun(kind: str) -> str:
    return _NOUNS.get(kind, kind.removesuffix("s"))


def resolve_received(kind: str, name: ReceivedName) -> Any:
    """Return the object that a name in a message stands for in this process.

    The object is a part of Atoll, one that this program has registered, or an entry point of an installed package.
    Nothing else is imported, and no file is opened.

    Raises:
        ConfigError: this process has no such object. The remedy says how to add it.
    """
    target = _target(kind, name.text)
    if target is None:
        raise ConfigError(
            f"The run's {_noun(kind)} {name!r} is neither a part of Atoll nor registered or installed at this site.",
            f"If you trust its code, call atoll.register({kind!r}, {name!r}, …) in the script before it joins, or "
            f"install the package with this entry point of the group atoll.{kind}. A server cannot make a site run "
            "code.",
        )
    return target()


def find(kind: str, name: Name) -> Any:
    """Return the object that a name stands for: `load` for the user's own name, `resolve_received` for a received one.

    Raises:
        ConfigError: there is no such object, or importing it failed.
    """
    return resolve_received(kind, name) if isinstance(name, ReceivedName) else load(kind, name)


def _target(kind: str, name: str) -> Callable[[], Any] | None:
    """Return a function that returns the object of a built-in, registered or installed name; None: there is none."""
    if (built_in := TABLES[kind].get(name)) is not None:
        return lambda: load_attribute(OwnName(built_in))
    if (kind, name) in _registered:
        return lambda: _registered[kind, name]
    installed = {point.name: point.value for point in _installed(kind)}.get(name)
    return None if installed is None else lambda: load_attribute(OwnName(installed))


def place_of(kind: str, name: Name) -> str:
    """Return `module:attribute` or `file.py:attribute`, from which a child process can load the object of a name.

    Return an empty text if a child finds the object by its name, or if it cannot load the object at all.
    """
    if (kind, name.text) in _registered:
        return importable_place(_registered[kind, name.text])
    if isinstance(name, ReceivedName) or ":" not in name.text or is_known(kind, name.text):
        return ""
    file, _, attribute = name.text.rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if is_file(name.text) else name.text


def importable_place(code: Any) -> str:
    """Return the place from which another process can import a class or function; empty if there is none."""
    name, module_name = getattr(code, "__qualname__", ""), getattr(code, "__module__", "")
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if not name.isidentifier() or getattr(module, name, None) is not code or not file or not Path(file).is_file():
        return ""
    return f"{Path(file).resolve() if module_name == '__main__' else module_name}:{name}"


def without_arguments(code: Any) -> Any:
    """Return the code itself; of a partial, its function."""
    while isinstance(code, functools.partial):
        code = code.func
    return code


def label_of(code: Any) -> str:
    """Return the name of a class or function for messages; of a partial, that of its function; else that of its class.

    Other code may have the same name (see `importable_place`).
    """
    code = without_arguments(code)
    return str(getattr(code, "__qualname__", type(code).__qualname__))


def load(kind: str, name: OwnName) -> Any:
    """Return the object registered as `name`; if `name` is `module:attribute`, the object there.

    Raises:
        ConfigError: the name is not registered (the message suggests the nearest one), or importing it failed.
    """
    _require_own(name)
    target = _target(kind, name.text)
    if target is not None:
        return target()
    if ":" in name.text:
        return load_attribute(name)
    known = names(kind)
    raise ConfigError(f"{name!r} is not one of the {_noun(kind)}s: {', '.join(known)}.", nearest(name.text, known))


def _require_own(name: object) -> None:
    if not isinstance(name, OwnName):
        raise UsageError(
            f"{name!r} is of type {type(name).__name__}, and only an OwnName is imported.",
            "If the user of this program gave the name, write atoll.registry.OwnName(name).",
        )


def load_attribute(target: OwnName) -> Any:
    """Return the object at `module:attribute`, or at `file.py:attribute`.

    Raises:
        ConfigError: `target` has another form; the module, file or attribute does not exist; or the module's code
            raises or exits during the import.
    """
    _require_own(target)
    module_name, separator, attribute = target.text.rpartition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{target!r} does not name a Python object.", "Use module:attribute, like my_models:build.")
    try:
        module = _load_file(Path(module_name)) if is_file(target.text) else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{target!r}: no module named {error.name!r}.",
            "Start the command in the folder of the module, or install the package that contains it.",
        ) from error
    except AtollError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(f"{target!r} cannot be imported", error) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        local, module_file = Path(f"{module_name}.py"), getattr(module, "__file__", None) or "a part of Python"
        if not is_file(target.text) and local.is_file() and Path(module_file) != local.resolve():
            raise ConfigError(
                f"{target!r}: the module {module_name} is {module_file}, and has no {attribute!r}.",
                f"Use {local}:{attribute}, or rename {local}, because its name is used by another module.",
            ) from None
        public = [entry for entry in vars(module) if not entry.startswith("_")]
        raise ConfigError(f"{target!r}: {module_name} has no {attribute!r}.", nearest(attribute, public)) from None


def construct(build: Callable[[], T], what: str, remedy: str) -> T:
    """Call `build`, which runs user code, and return its result. Turn its errors into `ConfigError`.

    Args:
        build: a function without arguments that calls a class or function of the user.
        what: start of the error message, which says what failed.
        remedy: advice for the case that the class or function does not accept its arguments.

    Raises:
        ConfigError: `build` raised or exited. Errors of Atoll are not changed.
    """
    try:
        return build()
    except AtollError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(what, error, remedy) from error


def _raised(what: str, error: BaseException, remedy: str = "") -> ConfigError:
    """Return a `ConfigError` that reports an error from user code, with its place in that code and the traceback.

    Args:
        what: start of the message, which says what failed.
        error: the error.
        remedy: advice for the case that no user code ran, because the call did not accept its arguments.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    if trace is None and remedy:
        return ConfigError(f"{what}: {error}.", remedy)
    frames = traceback.extract_tb(trace)  # user code may have called Atoll: skip its frames
    lines = [(frame.filename, frame.lineno) for frame in frames if not frame.filename.startswith(_OURS)]
    if isinstance(error, SyntaxError):
        lines.append((error.filename or "", error.lineno))
    location = f" ({lines[-1][0]}, line {lines[-1][1]})" if lines else ""
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    traceback_text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return ConfigError(f"{what}: {last.rstrip('.')}{location}.", "Correct it, and start again.", traceback_text)


def is_file(target: str) -> bool:
    """Return whether `target` is of the form `file.py:attribute`."""
    return target.rpartition(":")[0].endswith(".py")


def _load_file(path: Path) -> ModuleType:
    """Return the module of a file. The file is executed only once, and its module is registered in `sys.modules`.

    Raises:
        ConfigError: the file does not exist.
    """
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    if not path.is_file():
        raise ConfigError(
            f"There is no file {str(path.absolute())!r}.",
            "In a run file, a path is relative to the run file; in an option or a variable, to the working directory.",
        )
    if known is not None:
        name = f"{name}_at_{abs(hash(path.resolve())):x}"  # another module already has the name
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def require_known(kind: str, setting: str, name: OwnName) -> None:
    """Check that a name is registered, without importing its module. Names with a colon (paths to code) pass.

    Args:
        kind: kind of extension, such as `codecs`.
        setting: key of the setting that contains the name, for the message.
        name: the name.

    Raises:
        ConfigError: the name is unknown. The message suggests the nearest known name.
    """
    if ":" not in name.text and not is_known(kind, name.text):
        known = names(kind)
        own = f"For code of your own, set {setting.removesuffix('.name')}.path, or call atoll.register."
        raise ConfigError(f"{setting} = {name!r} is not one of {', '.join(known)}.", nearest(name.text, known, own))


def options_of(build: Callable[..., Any], name: str) -> str:
    """Return advice after a wrong option: the options of the class or function `build`, which the text calls `name`."""
    try:
        known = [each.name for each in inspect.signature(build).parameters.values() if each.kind != each.VAR_KEYWORD]
    except (TypeError, ValueError):
        return f"Use only keyword arguments of {name!r}."
    return f"The options of {name!r} are: {', '.join(known)}." if known else f"{name!r} has no options."


def require_kinds(build: Callable[..., Any], options: Mapping[str, Any], where: str) -> None:
    """Check that numbers, lists of numbers, booleans and texts are given where a class or function expects them.

    What it expects is known from the default of each argument or, without a default, from the annotation.

    Args:
        build: the class or function.
        options: keyword arguments for it.
        where: the setting, for the message.

    Raises:
        ConfigError: an option has a value of another kind, such as `true` or `"0.1"` for a number.
    """
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):
        return
    for key, value in options.items():
        kind = _kind_of(parameters[key]) if key in parameters else ""
        fits = {
            "a number": isinstance(value, int | float) and not isinstance(value, bool),
            "true or false": isinstance(value, bool),
            "text": isinstance(value, str),
        }
        if not fits.get(kind, True):
            raise ConfigError(f"{where}: {key} is {shown(value)}, but must be {kind}.", f"Write {kind}, as in TOML.")
        if key in parameters:
            _require_list(key, value, parameters[key], where)


def _require_list(key: str, value: object, parameter: inspect.Parameter, where: str) -> None:
    """Check that an option is a list of numbers if its default is one; of the same length if its annotation says so.

    Raises:
        ConfigError: it is not.
    """
    usual, annotation = parameter.default, str(parameter.annotation)
    if not _is_numbers(usual) or re.search(r"\b(str|dict|Any)\b", annotation):
        return
    count = len(usual) if re.match(r"(typing\.)?tuple\[(?!.*\.\.\.)", annotation, re.IGNORECASE) else None
    if not _is_numbers(value) or (count is not None and len(value) != count):
        wanted = f"a list of {number_of(count, 'number')}" if count else "a list of numbers"
        numbers = ", ".join("0.1" if each is None else str(each) for each in usual)
        raise ConfigError(
            f"{where}: {key} is {shown(value)}, but must be {wanted}.", f"Write {wanted}, such as {key} = [{numbers}]."
        )


def _is_numbers(value: object) -> TypeGuard[Sequence[float | None]]:
    """Return whether a value is a list or tuple of numbers. None counts as a number: a default may have it."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(each is None or (isinstance(each, int | float) and not isinstance(each, bool)) for each in value)
    )


def _kind_of(parameter: inspect.Parameter) -> str:
    """Return "a number", "true or false" or "text"; an empty text if it is not known, or if several are accepted."""
    kinds = {"bool": "true or false", "int": "a number", "float": "a number", "str": "text"}
    words = set(re.findall(r"\w+", str(parameter.annotation))) & {*kinds, "Any", "tuple", "list", "dict"}
    if parameter.annotation is parameter.empty:
        words = {type(parameter.default).__name__}
    if words == {"int", "float"}:
        words = {"float"}
    return kinds.get(words.pop(), "") if len(words) == 1 else ""


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return advice after a wrong name: a question with the most similar known name.

    If no known name is similar, return `otherwise`.
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else otherwise
