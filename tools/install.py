"""Make .venv and install Atoll with an extra into it; say what that is, how large, and how long it takes.

python3 tools/install.py demo       # `make demo` does it; with `uv` on the machine, uv does the work
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
ON_DISK = {"demo": "1.3 GB", "test": "2.8 GB"}
"""Extra → size of .venv with torch's build for CPUs, measured on Linux. Builds with CUDA have 4 GB more."""
QUIET_S = 1.2
"""Seconds without a line after which one says how far it is."""
SHOWN = re.compile(
    r" *(?:Downloading|Using cached) (?P<file>\S+\.whl) \((?P<size>[^)]+)\)"  # of pip
    r"|(?P<uv>(?:Using|Downloading|Resolved|Prepared|Installed) .*)"
)
LOST = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"}


def main(extra: str) -> int:
    """Install, and return the exit code."""
    uv, begin_s = shutil.which("uv"), time.monotonic()
    tool = f"uv ({uv})" if uv else "pip (uv would be faster; it is not on this machine)"
    size = f"about {ON_DISK[extra]} on disk" if extra in ON_DISK else "some GB on disk"
    print(f"Installing PyTorch, Atoll and its extra {extra!r} into .venv, once: {size}, with {tool}.", flush=True)
    if not PYTHON.exists():
        make = [uv, "venv", "--quiet", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        if code := run([*make, str(VENV)], "making .venv"):
            shutil.rmtree(VENV, ignore_errors=True)
            return code
    pip = [uv, "pip"] if uv else [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
    into = ["--python", str(PYTHON), *sources_of_pip()] if uv else ["--progress-bar=off"]
    install = [*pip, "install", *into, "-c", "constraints.txt"]
    # torch goes first and pinned: left to itself, pip takes the newest build and its gigabytes of CUDA
    for what in (["torch"], ["-e", f".[{extra}]"]):
        if code := run([*install, *what], f"installing {what[-1]}"):
            return code
    packages = len(list(VENV.glob("lib/python*/site-packages/*.dist-info")))
    took_s = time.monotonic() - begin_s
    print(f"Installed {packages} packages, {megabytes(VENV)} MB in .venv, in {took_s:.0f} s.", flush=True)
    return 0


def sources_of_pip() -> list[str]:
    """uv's flags for the indexes and folders that pip is set up to use here: it reads none of pip's files."""
    ask = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(ask, capture_output=True, text=True, check=False)
    found = re.findall(r"[.](index-url|extra-index-url|find-links)='([^']*)'", listed.stdout)
    flags = [part for key, values in dict(found).items() for value in values.split() for part in (f"--{key}", value)]
    return [*flags, "--index-strategy=unsafe-best-match"] if flags else []


def run(command: Sequence[str], what: str) -> int:
    """Run a command: show its lines about packages, how far it is when it is quiet, and all lines if it fails."""
    environment = {key: value for key, value in os.environ.items() if key not in LOST}
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert child.stdout is not None
    lines, begin_s, said_s, ended = list[str](), time.monotonic(), [time.monotonic()], threading.Event()

    def say_how_far() -> None:
        while not ended.wait(0.25):
            if time.monotonic() - said_s[0] >= QUIET_S:
                said_s[0] = time.monotonic()
                print(f"  {what}: {said_s[0] - begin_s:.0f} s, {megabytes(VENV)} MB in .venv", flush=True)

    quiet = threading.Thread(target=say_how_far, daemon=True)
    quiet.start()
    for line in child.stdout:
        lines.append(line)
        if found := SHOWN.match(line):
            file, size, of_uv = found["file"], found["size"], found["uv"]
            text = of_uv or f"{' '.join(Path(file).name.split('-')[:2])}, {size}"
            said_s[0] = time.monotonic()
            print(f"  {text}", flush=True)
    code = child.wait()
    ended.set()
    quiet.join()
    if code:
        print("".join(lines), file=sys.stderr)
    return code


def megabytes(folder: Path) -> int:
    """Megabytes of the files in a folder, which may change meanwhile."""
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue
    return round(total / 1e6)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
