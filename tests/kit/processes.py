"""Servers and sites as processes, forked from a parent that has imported torch (the fixture `nursery`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, Process, RestartedProcess, free_port, wait_until

from kit.servers import SETTINGS, long

_KIT_ON_PATH = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"


def write_run_file(folder: Path, **settings: Any) -> Path:
    """`run.toml` of the small run in `folder`; the initial model is `build_model`. Settings are those of `serve`."""
    (folder / "kit_model.py").write_text(_KIT_ON_PATH + "from kit.models import build_model, wide_model\n")
    values = SETTINGS | {"model.source": "kit_model:build_model", "disk.state_dir": "state"} | long(settings)
    path = folder / "run.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items() if value is not None))
    return path


def toml(value: Any) -> str:
    """A value as a run file has it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml(each)}' for key, each in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else f'"{value}"'


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def command(nursery: Nursery, folder: Path, *words: str, program: str = "atoll", **environment: str) -> Outcome:
    """Run `atoll WORDS` in a folder to its end.

    Args:
        program: the path of a script, to run that.
        environment: further environment variables.
    """
    with tempfile.TemporaryDirectory() as printed:
        log, errors = Path(printed) / "out", Path(printed) / "err"
        process = nursery.start(
            program, *words, cwd=folder, env={"COLUMNS": "120"} | environment, log=log, errors=errors
        )
        code = process.wait(100)
        return Outcome(code, log.read_text(), errors.read_text())


AS_ANOTHER_USER = """
import ctypes
from atoll.cli.main import main

# Version 3 of capset(2): the process that asks; effective, permitted and inheritable sets of 32 capabilities each.
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc = ctypes.CDLL(None, use_errno=True)
assert libc.capget(header, sets) == 0, ctypes.get_errno()
for number in (0, 1):
    sets[number] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
assert libc.capset(header, sets) == 0, ctypes.get_errno()
main()
"""


def without_permission(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`atoll WORDS` of a user for which the modes of files hold: root without the capabilities that override them."""
    if sys.platform == "linux":
        program = [sys.executable, "-c", AS_ANOTHER_USER]
    elif os.geteuid():
        program = [str(Path(sys.executable).with_name("atoll"))]
    else:
        pytest.skip("root may read every file, and only Linux can take that away")
    return subprocess.run(
        [*program, *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def export(nursery: Nursery, out: Path, *words: str) -> int | str:
    """The version that `atoll export OUT WORDS` wrote; where it is refused, its exit code and the reason."""
    outcome = command(nursery, out.parent, "export", str(out), *words)
    if outcome.returncode:
        return f"exit {outcome.returncode}: {outcome.stderr}"
    found = re.fullmatch(rf"version (\d+): {re.escape(str(out))}\n", outcome.stdout)
    assert found, outcome.stdout
    return int(found[1])


class ForkedServer:
    """`atoll server run.toml` in `folder`, on one port; started again each time SIGKILL has ended it.

    Use it as a context manager: it is killed at the end of the block.
    """

    def __init__(
        self, nursery: Nursery, folder: Path, lives: tuple[str, ...] = (), *, port: int = 0, **settings: Any
    ) -> None:
        """`lives`: failpoints of the first start, the second, …; later starts have none."""
        self.folder, self.port, self.log = folder, port or free_port(), folder / "server.log"
        self._nursery = nursery
        write_run_file(folder, **{"network.port": self.port}, **settings)
        self.process = RestartedProcess(self._start, lives)

    def _start(self, failpoints: str) -> Process:
        return self._nursery.start("atoll", "server", "run.toml", cwd=self.folder, failpoints=failpoints, log=self.log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ForkedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()


class ForkedSite:
    """A site that runs a script, which may import `kit`; `start` may be called again after its process has ended."""

    def __init__(self, nursery: Nursery, folder: Path, url: str, site: str, script: str | Path) -> None:
        """`script`: a file, or source text."""
        self._nursery, self._folder = nursery, folder
        self._script = script if isinstance(script, Path) else folder / f"site-{site}.py"
        if isinstance(script, str):
            self._script.write_text(_KIT_ON_PATH + script)
        self._env = {
            "ATOLL_SERVER": url,
            "ATOLL_SITE": site,
            "ATOLL_DIR": str(folder / "workers"),
        }
        self.starts = 0

    def start(self, failpoints: str = "", **env: str) -> Process:
        """Start the script, with further environment variables."""
        self.starts += 1
        log = self._folder / f"site-{self._env['ATOLL_SITE']}-{self.starts}.log"
        return self._nursery.start(
            str(self._script), cwd=self._folder, env=self._env | env, failpoints=failpoints, log=log
        )


def wait_for_words(process: Process, pattern: str) -> re.Match[str]:
    """Wait until a process has said what matches; the first match."""

    def look() -> Any:
        ended = process.poll() is not None
        found = re.search(pattern, process.output())
        assert found or not ended, f"{pattern!r} was never said:\n{process.output()}"
        return found

    return wait_until(look, repr(pattern), 60)


def url_of(server: Process) -> str:
    """The address of a server that starts, as soon as it listens."""
    return wait_for_words(server, r"listening on ([^\s;]+)[\s;]")[1]


def run_commands(
    nursery: Nursery, folder: Path, serve: Sequence[str], work: Sequence[str], sites: Iterable[str] = "ab"
) -> Process:
    """Type the command of a server, and for each site that of a worker: all of them end well. The server.

    The server gets any free port, and the worker's words its address, the site and this Python.
    """
    server = nursery.start(*serve, "--port=0", cwd=folder)
    url, workers = url_of(server), []
    for site in sites:
        words = [*work]
        words[words.index("--server") + 1], words[words.index("--site") + 1] = url, site
        words[words.index("python")] = sys.executable
        workers.append(nursery.start(*words, cwd=folder, env={"OMP_NUM_THREADS": "1"}))
    assert [worker.wait(100) for worker in workers] == [0] * len(workers), [worker.output() for worker in workers]
    assert server.wait(60) == 0, server.output()
    return server


def running_in(folder: Path) -> list[str]:
    """Command lines of the processes whose current folder this is, apart from the test's own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if (entry / "cwd").readlink() == folder:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@contextmanager
def running(*words: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """`atoll WORDS`, killed at the end of the block; the options are those of `subprocess.Popen`."""
    with subprocess.Popen([sys.executable, "-m", "atoll.cli.main", *words], **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def atoll_worker(
    folder: Path, url: str, script: str, *options: str, site: str = "a", env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`atoll worker OPTIONS -- python SCRIPT`, killed at the end of the block; both its outputs are pipes."""
    path = folder / f"worker-{site}.py"
    path.write_text(_KIT_ON_PATH + script)
    words = ["worker", "--server", url, "--site", site, *options, "--dir", str(folder / "workers")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with running(*words, "--", sys.executable, str(path), env=os.environ | (env or {}), **pipes) as process:
        yield process


@contextmanager
def unread_pipe() -> Iterator[int]:
    """The writing end of a pipe that is full, and that nothing reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        with suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        os.set_blocking(writing, True)
        yield writing
    finally:
        os.close(reading)
        os.close(writing)
