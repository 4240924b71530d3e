"""Another device than the CPU, on any machine: `far.cpp`, compiled and made known to torch as `far`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("far.cpp")


def compiled(folder: Path) -> Path:
    """The library, in a quarter of a minute; who has no compiler skips the test."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library, torch_folder = folder / "far.so", cpp_extension.library_paths()[0]
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", "-w", abi, *include, str(SOURCE), "-o", str(library)]
    done = subprocess.run([*command, f"-L{torch_folder}", "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
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
