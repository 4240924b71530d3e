"""The public API: to add, drop or rename a name is a decision, so it fails here first."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import atoll

PUBLIC = [
    "AtollError",
    "DiLoCo",
    "Server",
    "Settings",
    "Simulation",
    "TensorRef",
    "__version__",
    "join",
    "register",
    "resolve",
    "run",
    "tasks",
]


def test_exactly_these_names_are_public() -> None:
    """`import atoll` offers exactly the public names that `PUBLIC` in this file lists."""
    assert sorted(atoll.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(atoll))


@pytest.mark.covers("X5")
@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("__")])
def test_public_names_and_methods_have_docstrings(name: str) -> None:
    value = getattr(atoll, name)
    assert inspect.getdoc(value), f"atoll.{name} has no docstring"
    if inspect.isclass(value) and value.__module__.startswith("atoll."):
        members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
        callables = {key: member for key, member in members.items() if callable(member) or isinstance(member, property)}
        missing = [key for key, member in callables.items() if not inspect.getdoc(member)]
        assert not missing, f"atoll.{name}: no docstring at {', '.join(missing)}"


ONE_LEVEL_DOWN = {
    "algorithms": ["Algorithm", "ChangeReader", "Correction", "ElementReader", "LocalContext", "LocalRule"],
    "codecs": [
        "Bf16Codec",
        "Codec",
        "Elementwise",
        "Int4Codec",
        "Int8Codec",
        "Narrowing",
        "NoneCodec",
        "TILE",
        "TopKCodec",
        "build_codecs",
    ],
    "filters": ["About", "CHUNK_ELEMENTS", "Cast", "Drop", "Filter", "NormClip", "Outgoing"],
    "functional": ["init", "is_running", "receive", "send", "skip", "state"],
    "integrations": ["lightning", "nvflare", "peft", "transformers"],
    "objects": ["LazyTensor", "Publisher", "Stream", "fetch", "publish", "register", "withdraw"],
    "outer_optimizers": ["DelayedNesterov", "EachTensor", "OuterRule", "Yogi", "build_outer"],
    "reducers": [
        "ClippedMean",
        "Maximum",
        "Median",
        "NormalisedMean",
        "Reducer",
        "RoundFacts",
        "Share",
        "TrimmedMean",
        "WeightedMean",
        "build_reducers",
        "normalised",
    ],
}


@pytest.mark.parametrize("module", ONE_LEVEL_DOWN)
def test_public_modules_export_exactly_these_names(module: str) -> None:
    """Each public module exports exactly the names that `ONE_LEVEL_DOWN` in this file lists."""
    names = getattr(atoll, module).__all__
    assert sorted(names) == ONE_LEVEL_DOWN[module]
    values = [getattr(getattr(atoll, module), name) for name in names]
    assert all(inspect.getdoc(value) for value in values if inspect.isclass(value) or inspect.isroutine(value))


def test_the_version_matches_the_installed_package() -> None:
    from importlib.metadata import version

    assert atoll.__version__ == version("atoll")


def test_an_unknown_name_is_an_attribute_error() -> None:
    """An unknown name of the package, such as the misspelt `DiLoco`, raises an `AttributeError` with the name."""
    with pytest.raises(AttributeError, match="DiLoco"):
        atoll.DiLoco  # noqa: B018


@pytest.mark.usefixtures("fresh_processes")
def test_the_public_names_do_not_import_torchs_compiler() -> None:
    """Access to every public name does not import torch's compiler.

    The import of the compiler takes seconds, and each process of a run would spend them at its start.
    """
    script = "import sys, atoll; print([getattr(atoll, each) for each in atoll.__all__], *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "atoll.worker.training.diloco_loop" in done.stdout
    assert "torch._dynamo" not in done.stdout.split()
