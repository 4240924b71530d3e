"""What Linux says of a process: anonymous memory and CPU time. Sampled from outside, so that nothing is disturbed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

SAMPLE_S = 0.025


def anonymous_kb(pid: int) -> int:
    """Anonymous resident memory in KiB: what is neither a file nor shared; 0 of a process that has ended."""
    try:
        fd = _open_status(pid)
    except OSError:
        return 0
    try:
        return _anonymous_kb_in(fd)
    finally:
        os.close(fd)


def _open_status(pid: int) -> int:
    return os.open(f"/proc/{pid}/status", os.O_RDONLY)


def _anonymous_kb_in(status_fd: int) -> int:
    try:
        text = os.pread(status_fd, 2**16, 0)
    except ProcessLookupError:  # it has ended meanwhile
        return 0
    line = next((line for line in text.splitlines() if line.startswith(b"RssAnon:")), b"RssAnon: 0")
    return int(line.split()[1])


def cpu_s(pid: int) -> float:
    """User and system time so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_files_bytes(pid: int) -> int:
    """Memory of the files without a disk (memfd) that the process has open; each counts once."""
    found: dict[int, int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link).startswith("/memfd:"):
                status = link.stat()
                found[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            continue  # closed meanwhile
    return sum(found.values())


class Peaks:
    """Samples the anonymous memory of processes; `peak_mb` is what each had at most above its baseline."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._baseline_kb: dict[int, int] = {}
        self._peak_kb: dict[int, int] = {}
        self._status_fds: dict[int, int] = {}  # kept open: a look at a process is then one system call
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="atoll-peaks", daemon=True)
        self._thread.start()

    def begin(self, pid: int) -> None:
        """What the process has now is its baseline."""
        with self._lock:
            self._status_fds[pid] = fd = _open_status(pid)
            self._baseline_kb[pid] = self._peak_kb[pid] = _anonymous_kb_in(fd)

    def end(self, pid: int) -> None:
        """What the process does from now on does not count."""
        with self._lock:
            os.close(self._status_fds.pop(pid))

    def peak_mb(self, pid: int) -> float:
        """In 10⁶ bytes."""
        with self._lock:
            return (self._peak_kb[pid] - self._baseline_kb[pid]) * 1024 / 1e6

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for pid in [*self._status_fds]:
            self.end(pid)

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_S):
            with self._lock:
                for pid, fd in self._status_fds.items():
                    self._peak_kb[pid] = max(self._peak_kb[pid], _anonymous_kb_in(fd))
