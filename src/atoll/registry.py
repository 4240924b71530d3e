"""The registry of named extensions: codecs, reducers, algorithms and other kinds.

There is one table per kind. An entry is `"module:attribute"`; the module is imported on first use. Other packages add
entries with an entry point in the group `atoll.<kind>` (`[project.entry-points."atoll.codecs"]`). A built-in name takes
precedence over a plugin's. In place of a name, users can write `module:attribute` or `file.py:attribute`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points, version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from atoll.errors import AtollError, ConfigError

T = TypeVar("T")
_OURS = ("<frozen importlib", str(importlib.__file__), str(Path(__file__).parent) + os.sep)
"""Prefixes of the file names of the import system and of Atoll. Tracebacks of user code leave out these files."""

_OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop"]
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
    "workflows": {
        "cross_site_evaluation": "atoll.server.tasks.cross_site_evaluation:cross_site_evaluation",
    },
}
"""kind → name → "module:attribute". To add a built-in extension, write its own file and one line here."""
PLURALS = {"outer": "outer optimizers", "staleness": "staleness weights"}
"""Kind → its plural for messages, if the kind itself is not a plural."""


def names(kind: str) -> list[str]:
    """Return all registered names of a kind: first the built-in ones, then those of plugins."""
    plugins = [point.name for point in entry_points(group=f"atoll.{kind}") if point.name not in TABLES[kind]]
    return [*TABLES[kind], *sorted(plugins)]


def is_known(kind: str, name: str) -> bool:
    """Return whether a name is registered. For a built-in name, this does not read the data of installed packages."""
    return name in TABLES[kind] or name in names(kind)


def package_of(kind: str, name: str) -> str:
    """Return name and version of the package that registered `name` for this kind; empty if no package did."""
    if name in TABLES[kind]:
        return f"atoll {version('atoll')}"
    dists = [point.dist for point in entry_points(group=f"atoll.{kind}", name=name)]
    return f"{dists[0].name} {dists[0].version}" if dists and dists[0] is not None else ""


OPTIONS = {
    "cross_site_evaluation": ("versions", "site_models", "sites", "evaluation_timeout_s"),
}
"""Name of a workflow → the arguments that a run file may set. So Atoll can check the file without an import."""


def load(kind: str, name: str) -> Any:
    """Return the object registered as `name`; if `name` is `module:attribute`, the object there.

    Raises:
        ConfigError: the name is not registered (the message suggests the nearest one), or importing it failed.
    """
    target = TABLES[kind].get(name)
    if target is None:
        plugins = {point.name: point.value for point in entry_points(group=f"atoll.{kind}")}
        target = plugins.get(name, name if ":" in name else None)
    if target is None:
        known, plural = names(kind), PLURALS.get(kind, kind)
        raise ConfigError(f"{name!r} is not one of the {plural}: {', '.join(known)}.", nearest(name, known))
    return load_attribute(target)


def load_attribute(target: str) -> Any:
    """Return the object at `module:attribute`, or at `file.py:attribute`.

    Raises:
        ConfigError: `target` has another form; the module, file or attribute does not exist; or the module's code
            raises or exits during the import.
    """
    module_name, separator, attribute = target.rpartition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{target!r} does not name a Python object.", "Use module:attribute, like my_models:build.")
    try:
        module = _load_file(Path(module_name)) if is_file(target) else importlib.import_module(module_name)
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
        if not is_file(target) and local.is_file() and Path(module_file) != local.resolve():
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


def require_known(kind: str, setting: str, name: str) -> None:
    """Check that a name is registered, without importing its module. Names with a colon (paths to code) pass.

    Args:
        kind: kind of extension, such as `codecs`.
        setting: key of the setting that contains the name, for the message.
        name: the name.

    Raises:
        ConfigError: the name is unknown. The message suggests the nearest known name.
    """
    if ":" not in name and not is_known(kind, name):
        known = names(kind)
        raise ConfigError(f"{setting} = {name!r} is not one of {', '.join(known)}.", nearest(name, known))


def options_of(build: Callable[..., Any], name: str) -> str:
    """Return advice after a wrong option: the options of the class or function `build`, which the text calls `name`."""
    try:
        known = [each.name for each in inspect.signature(build).parameters.values() if each.kind != each.VAR_KEYWORD]
    except (TypeError, ValueError):
        return f"Use only keyword arguments of {name!r}."
    return f"The options of {name!r} are: {', '.join(known)}." if known else f"{name!r} has no options."


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return advice after a wrong name: a question with the most similar known name.

    If no known name is similar, return `otherwise`.
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else otherwise
