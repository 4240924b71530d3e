"""Processes that recipes start, from the nursery: they need no time to import torch."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from harness.processes import Nursery, Process

from atoll.child_processes import Children


class Forked:
    """A process of the nursery, as `subprocess.Popen` has it."""

    stdin = stdout = None

    def __init__(self, process: Process, *, prints: bool) -> None:
        self._process, self.pid, self._prints = process, process.pid, prints

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._prints:
            self._prints = False
            print(self._process.output())
        return code

    def wait(self, timeout: float = 100.0) -> int | None:
        try:
            self._process.wait(timeout)
            return self.poll()
        except TimeoutError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout) from None

    def terminate(self) -> None:
        self._process.send(signal.SIGTERM)

    def kill(self) -> None:
        self._process.send(signal.SIGKILL)


@pytest.fixture
def forked(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a recipe that is executed in this process start its server and its sites in the nursery."""

    def spawn(
        self: Children, name: str, argv: list[str], *, environment: dict[str, str], log: Path | None = None
    ) -> Forked:
        is_atoll = argv[:2] == ["-m", "atoll.cli.main"]
        words = ["atoll", *argv[2:]] if is_atoll else [str(Path(argv[0]).resolve()), *argv[1:]]
        file = (log or Path(f"{name}-{environment['ATOLL_SITE']}.log")).resolve()
        file.write_bytes(b"")
        process = Forked(nursery.start(*words, cwd=Path.cwd(), env=environment, log=file), prints=log is None)
        self.processes[name] = process  # type: ignore[assignment]
        return process

    monkeypatch.setattr(Children, "spawn", spawn)
