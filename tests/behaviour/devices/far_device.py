"""Another device than the CPU, on any machine: `far.cpp`, compiled and made known to torch as `far`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("far.cpp")


LIBRARIES = Path(__file__).parents[3] / ".pytest_cache" / "far_device"


def compiled() -> Path:
    """Return the library. Compiling takes a quarter of a minute, so what the same command has made is kept.

    Without a compiler, the test is skipped.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    torch_folder = cpp_extension.library_paths()[0]
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", "-w", abi, *include, str(SOURCE)]
    command += [f"-L{torch_folder}", "-ltorch_cpu", "-lc10"]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    made_from = "\n".join([*command, version, torch.__version__, SOURCE.read_text(encoding="utf-8")])
    library = LIBRARIES / f"{hashlib.sha256(made_from.encode()).hexdigest()}.so"
    if not library.exists():
        LIBRARIES.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        new.rename(library)
    return library


class FarDevice:
    """Makes the device known to this process, for good."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.far_init()
        torch.utils.rename_privateuse1_backend("far")
        module = ModuleType("torch.far")
        for name, value in (
            ("is_available", True),
            ("device_count", 1),
            ("current_device", 0),
            ("_is_in_bad_fork", False),
            ("get_amp_supported_dtype", [torch.bfloat16]),
            ("manual_seed_all", None),
        ):
            setattr(module, name, lambda *_, value=value: value)
        torch._register_device_module("far", module)

    def from_pinned_bytes(self) -> int:
        """What was copied there from pinned memory."""
        count = self._library.far_from_pinned_bytes
        count.restype = ctypes.c_size_t
        return int(count())
