"""What needs no torch works on Python 3.12 and 3.13, too; skipped by name where there is none. See tools/pythons.py."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("pythons", ROOT / "tools" / "pythons.py")
assert _spec is not None
assert _spec.loader is not None
pythons = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pythons)

FOLDERS = ("src", "tools", "bench", "baselines", "examples")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
GONE = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),  # in 3.12
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "lib2to3", "mailcap", "msilib", "nis", "nntplib"),
    *("ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),  # in 3.13
}

TORCH_FREE = [
    *("errors", "registry", "runtime", "posix", "config", "rounds", "protocol", "store", "codecs.base"),
    *(f"tensors.{name}" for name in ("safetensors_header", "layout", "schema", "fragments", "reference")),
    *(f"transport.{name}" for name in ("http_client", "tls")),
    *(f"algorithms.{name}" for name in ("base", "diloco", "fedavg", "fednova", "fedopt", "resolve")),
    *(f"cli.{name}" for name in ("main", "status", "server", "worker")),
]
"""Modules, and packages with all that is in them."""

PURE_TESTS = [
    "tests/test_architecture.py",
    *(f"tests/unit/base/test_{name}.py" for name in ("config", "processes")),
    *(f"tests/unit/rounds/test_{name}.py" for name in ("machine", "machine_recovery", "rules_of_rounds")),
    *(f"tests/unit/store/test_{name}.py" for name in ("journal_tables", "recovery", "versions")),
]
WITH_TORCH = "tests/test_architecture.py::test_what_a_quick_command_imports_is_light[atoll.integrations.lightning]"

COMPILES = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("error")
for name in sys.argv[1:]:
    compile(Path(name).read_bytes(), name, "exec", dont_inherit=True)
"""
IMPORTS = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module("atoll." + name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        importlib.import_module(found.name)
assert "torch" not in sys.modules
print(sum(name.startswith("atoll.") for name in sys.modules))
"""
COLLECTS = """
import sys
sys.modules["torch"] = None  # any import of it raises
import pytest
sys.exit(pytest.main(["--collect-only", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def run(python: Path, *argv: str) -> str:
    """What it prints; deprecations in Atoll's own code are errors."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), "-W", "error::SyntaxWarning", "-W", "error::DeprecationWarning:atoll", *argv]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def with_packages(version: str) -> Path:
    python: Path = pythons.environment(version)
    if not python.exists():
        pytest.skip(f"There is no .venv-{version}: `make pythons` makes it where Python {version} is found.")
    return python


@pytest.mark.covers("X6")
def test_sources_fit_python_3_11_to_3_13() -> None:
    """No source has syntax newer than Python 3.11, or imports a module that Python 3.13 no longer has."""
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 11))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            gone = GONE & {name.split(".")[0] for name in names}
            assert not gone, f"{path} imports {gone}"


@pytest.mark.covers("X6")
@pytest.mark.parametrize("version", pythons.VERSIONS)
def test_all_code_compiles_without_a_warning(version: str) -> None:
    python = pythons.interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not on this machine.")
    run(python, "-c", COMPILES, *map(str, SOURCES))


@pytest.mark.covers("X6")
def test_the_torch_free_lists_are_right() -> None:
    """With this Python, the modules in `TORCH_FREE` import no torch, and pytest collects `PURE_TESTS` without torch.

    So the lists stay right where no other Python is installed.
    """
    assert int(run(Path(sys.executable), "-c", IMPORTS, *TORCH_FREE)) > 70
    run(Path(sys.executable), "-c", COLLECTS, *PURE_TESTS)


@pytest.mark.slow
@pytest.mark.covers("X6")
@pytest.mark.parametrize("version", pythons.VERSIONS)
def test_torch_free_modules_import_without_torch(version: str) -> None:
    """Each other Python imports the modules in `TORCH_FREE` without torch."""
    assert int(run(with_packages(version), "-c", IMPORTS, *TORCH_FREE)) > 70


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.covers("X6")
@pytest.mark.parametrize("version", pythons.VERSIONS)
def test_torch_free_modules_pass_their_tests(version: str) -> None:
    """In an environment without torch, the tests of rounds, store, settings, processes and imports between files
    pass.
    """
    python = with_packages(version)
    run(python, "-m", "pytest", "-p", "no:cacheprovider", f"--deselect={WITH_TORCH}", *PURE_TESTS)
