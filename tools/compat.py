"""Run official programs of Flower and NVIDIA FLARE on Atoll, without a changed line, and say what comes out.

The programs are not ours to ship: COMPAT_DIR has checkouts of their repositories, `flower` and `nvflare`. They run in a
copy, offline, on the stand-ins of `compat_data`. `compat.toml` lists them: folder, sites, and what must be printed.

python tools/compat.py COMPAT_DIR                           # all of them
python tools/compat.py COMPAT_DIR --only quickstart-numpy
python tools/compat.py COMPAT_DIR --out docs/results/compat.md
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compat_data import write_data

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1"}
ATOLL = [sys.executable, "-m", "atoll.cli.main"]
LIMIT_S = 900.0
LOOK_S = 0.2


@dataclass(frozen=True)
class Program:
    """A program of another framework.

    Attributes:
        folder: its folder below COMPAT_DIR; the first part is the framework.
        sites: number of sites.
        says: regular expressions for what the server, a site or the terminal must print.
        needs: modules without which it is left out.
        run_config: values that take the place of a Flower app's own, for shorter runs.
        script: words of a FLARE script after `python`.
        run: run file of the server, for a FLARE script.
    """

    folder: str
    sites: int
    says: tuple[str, ...]
    needs: tuple[str, ...] = ()
    run_config: str = ""
    script: tuple[str, ...] = ()
    run: str = ""

    @property
    def name(self) -> str:
        return Path(self.folder).name

    @property
    def framework(self) -> str:
        return Path(self.folder).parts[0]


@dataclass
class Outcome:
    """What came out: empty `wrong` if all that it must print was printed, and no line of it was changed."""

    program: Program
    wrong: str = ""
    seconds: float = 0.0
    server_mb: float = 0.0


def programs() -> list[Program]:
    """Return the programs of the list."""
    listed = []
    for row in tomllib.loads(LIST.read_text(encoding="utf-8"))["programs"]:
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        listed.append(Program(**values))
    return listed


class PeakMemory(threading.Thread):
    """Most resident memory, in 10⁶ bytes, of the process below another one with this word in its command line."""

    def __init__(self, pid: int, word: str) -> None:
        super().__init__(daemon=True)
        self._pid, self._word, self.ended, self.mb = pid, word, threading.Event(), 0.0

    def run(self) -> None:
        while not self.ended.wait(LOOK_S):
            for pid in below(self._pid):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
                    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
                except OSError:  # it has ended
                    continue
                peak = re.search(r"VmHWM:\s+(\d+) kB", status)
                if self._word in words and peak:
                    self.mb = max(self.mb, int(peak[1]) * 1024 / 1e6)


def below(pid: int) -> list[int]:
    """Return a process and all below it."""
    parent_of: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent_of[int(path.parent.name)] = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parent_of.items() if parent == each]
    return found


def run_program(program: Program, compat_dir: Path, folder: Path) -> Outcome:
    """Run a program in an empty folder."""
    outcome, source, copy = Outcome(program), compat_dir / program.folder, folder / "work" / program.name
    shutil.copytree(source, copy)
    write_data(folder / "work")
    (folder / "work" / "data").rename(folder / "data")  # Flower's own tests have it one folder up
    commands = flare_commands(program) if program.script else [flower_command(program)]
    if program.script:
        (copy / "run.toml").write_text(program.run)
    begun_s = time.monotonic()
    where = copy if program.script else folder / "work"
    printed = run_together(commands, where, outcome)
    outcome.seconds = time.monotonic() - begun_s
    logs = [path.read_text(errors="replace") for path in sorted(where.glob("runs/*/*.log"))]
    text = "\n".join([printed, *logs])
    missing = [each for each in program.says if not re.search(each, text)]
    if missing and not outcome.wrong:
        outcome.wrong = f"did not print {missing[0]!r}"
    if outcome.wrong:
        outcome.wrong += "\n" + "\n".join(text.splitlines()[-60:])
    if changed := changed_files(source, copy):
        outcome.wrong += f"\nchanged: {', '.join(changed)}"
    return outcome


def flower_command(program: Program) -> list[str]:
    words = ["run", "--flower", program.name, "--sites", str(program.sites)]
    return [*ATOLL, *words, *(["--run-config", program.run_config] if program.run_config else [])]


def flare_commands(program: Program) -> list[list[str]]:
    """Return the commands of a server, and of each site with the script."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server, script = [*ATOLL, "server", "run.toml", "--port", port], ["--", sys.executable, *program.script]
    worker = [*ATOLL, "worker", "--flare", "--server", f"http://127.0.0.1:{port}", "--site"]
    return [server, *([*worker, f"site-{number + 1}", *script] for number in range(program.sites))]


def run_together(commands: Sequence[list[str]], folder: Path, outcome: Outcome) -> str:
    """Run commands at the same time to their ends, and return what they printed."""
    sources = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | OFFLINE | {"PYTHONPATH": sources}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        running = []
        for command in commands:
            running.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
        memory = PeakMemory(running[0].pid, "server")
        memory.start()
        try:
            outcome.wrong = awaited(running)
        finally:
            for process in running:
                process.terminate()
                process.wait()
            memory.ended.set()
            memory.join()
        outcome.server_mb = memory.mb
        log.seek(0)
        return log.read()


def awaited(running: Sequence[subprocess.Popen[bytes]]) -> str:
    """Await the ends of processes, and return what went wrong; once one has failed, the others do not count."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        codes = [process.poll() for process in running]
        if any(codes):
            return f"exit codes {codes}"
        if None not in codes:
            return ""
        time.sleep(LOOK_S)
    return f"did not end within {LIMIT_S:g} s"


def changed_files(source: Path, copy: Path) -> list[str]:
    """Return the files of a program that are not as they were."""
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    return sorted(set(names) - set(filecmp.cmpfiles(source, copy, names, shallow=False)[0]))


def table(outcomes: Sequence[Outcome], left_out: Sequence[tuple[Program, str]]) -> str:
    """Return the results as Markdown."""
    right = sum(not each.wrong for each in outcomes)
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in ("flwr", "nvflare", "torch") if name in installed)
    lines = [
        "# Official programs of other frameworks",
        "",
        f"{right} of {len(outcomes)} programs of the repositories of Flower and NVIDIA FLARE ran without a changed "
        f"line, and printed what they must ({versions}). They ran offline: data sets of a hub are small stand-ins",
        "(`tools/compat_data.py`). `make compat COMPAT_DIR=…` runs them again: the folder has checkouts of both",
        "repositories, `flower` and `nvflare`.",
        "",
        "| program | sites | result | seconds | server, most memory in MB |",
        "|---|---|---|---|---|",
    ]
    for each in outcomes:
        result = "right" if not each.wrong else each.wrong.splitlines()[0]
        lines.append(
            f"| {each.program.folder} | {each.program.sites} | {result} | {each.seconds:.0f} | {each.server_mb:.0f} |"
        )
    lines += [f"| {program.folder} | {program.sites} | not run: {why} | | |" for program, why in left_out]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the programs; the exit code is 1 if one of them came out wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compat_dir", type=Path, help="folder with checkouts: flower, nvflare")
    parser.add_argument("--only", nargs="+", default=[], help="names of programs")
    parser.add_argument("--out", type=Path, help="file for the table")
    given = parser.parse_args()
    outcomes: list[Outcome] = []
    left_out: list[tuple[Program, str]] = []
    for program in programs():
        if given.only and program.name not in given.only:
            continue
        absent = [name for name in program.needs if importlib.util.find_spec(name) is None]
        if not (given.compat_dir / program.folder).is_dir():
            absent = ["its folder"]
        if absent:
            left_out.append((program, f"{', '.join(absent)} missing"))
            continue
        with tempfile.TemporaryDirectory(prefix="atoll-compat-") as folder:
            outcomes.append(run_program(program, given.compat_dir, Path(folder)))
        print(f"{program.folder}: {outcomes[-1].wrong or 'right'} ({outcomes[-1].seconds:.0f} s)", flush=True)
    text = table(outcomes, left_out)
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    return int(any(each.wrong for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
