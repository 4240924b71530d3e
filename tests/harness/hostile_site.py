"""A site's own programs against a hostile server, many in one process, each of them watched.

The process gets jobs over a socket, runs each as a user's script or command would, and reports how it ended: the error,
the memory it took, and what it imported, opened, started or connected to that an undisturbed run does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.unicode_escape  # noqa: F401 (text with control characters imports it when it is shown)
import faulthandler
import gc
import io
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll
from atoll.errors import error_lines
from atoll.protocol.invitation import Invitation
from atoll.transport import credential_store, enrolment
from atoll.transport.http_client import Http
from harness.hostile_answers import FORGED

JOB_BYTES = 2**16
ROOM_BYTES = 3 * 2**30
"""Of addresses that a run may use beyond those of the process: what is endless must not take the machine's memory."""


def build() -> nn.Module:
    """A model of two parts of 64 KiB, with buffers."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 500), nn.BatchNorm1d(500), nn.Linear(500, 12))


def _step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01


# -- what sites do


def federated(url: str, folder: Path, ref: str) -> None:
    """A script that trains in round 1 and then sits out."""
    model = build()
    with atoll.join(url, site="a", folder=folder) as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            _step(model)
            fl_round.submit(model, weight=2.0 * (fl_round.number == 1), metrics={"loss": 1.0 / fl_round.number})
        worker.load_into(model)


def corrected(url: str, folder: Path, ref: str) -> None:
    """A script whose run has an algorithm with a state at the site."""
    model = build()
    with atoll.join(url, site="a", folder=folder) as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fl_round.correct(model, optimizer)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            fl_round.submit(model, steps=1)


def diloco(url: str, folder: Path, ref: str) -> None:
    """A DiLoCo loop, streaming."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, optimizer, server=url, site="a", folder=folder) as loop:
        for _ in range(40):
            if loop.finished:
                break
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()


def tasks(url: str, folder: Path, ref: str) -> None:
    """A site that answers tasks, with tensors both ways."""
    with atoll.tasks(url, "a") as worker:

        @worker.task("echo")
        def echo(payload: Any) -> Any:
            return payload

        @worker.task("fetch")
        def fetch(payload: Any) -> Any:
            return {key: value + 1 for key, value in payload.items()}

        worker.run()


def publish(url: str, folder: Path, ref: str) -> None:
    """Keep an object at the server, get it back, and withdraw it."""
    kept = atoll.objects.publish({"w": torch.ones(40_000)}, server=url, chunk_bytes=65_536, idle_timeout_s=1.0)
    atoll.objects.fetch(kept, idle_timeout_s=1.0)
    atoll.objects.withdraw(kept)


def fetch(url: str, folder: Path, ref: str) -> None:
    """Get an object of a publisher, into memory, onto disk and in place."""
    atoll.resolve(atoll.objects.fetch(ref, idle_timeout_s=1.0, to_disk=folder))
    atoll.objects.fetch(ref, idle_timeout_s=1.0)


def _command(*words: str) -> None:
    from atoll.cli.main import main

    sys.argv = ["atoll", *words]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


def status(url: str, folder: Path, ref: str) -> None:
    """`atoll status`."""
    _command("status", "--server", url)


def evaluate(url: str, folder: Path, ref: str) -> None:
    """`atoll evaluate` of a server's results."""
    _command("evaluate", "--server", url, "--out", str(folder / "evaluation.md"))


def export(url: str, folder: Path, ref: str) -> None:
    """`atoll export` from a server."""
    _command("export", str(folder / "model.safetensors"), "--server", url)


def enrol(url: str, folder: Path, ref: str) -> None:
    """Use an invitation, the secret of which is `ref`, and renew the credential."""
    credential = enrolment.enrol(Invitation(url, "a", ref), folder / "credential")
    note, token = credential.note, credential.token
    credential_store.store(
        credential.folder, replace(note, renew_at_s=1.0), secret=token.text.encode() if token else b""
    )
    with contextlib.closing(Http(url, credential=credential)) as http:
        enrolment.renew(http, credential, 1.0)


PROGRAMS: dict[str, Callable[[str, Path, str], None]] = {
    each.__name__: each
    for each in (federated, corrected, diloco, tasks, publish, fetch, status, evaluate, export, enrol)
}


# -- what no site does: shows that it would be noticed


def _spoil(how: str) -> None:
    if how == "imports":
        with contextlib.suppress(ImportError):
            __import__("hostile_canary")
    elif how == "writes":
        Path(tempfile.gettempdir()).parent.joinpath("outside").touch()
    elif how == "starts":
        subprocess.run(["true"], check=True)
    elif how == "connects":
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", 9), timeout=1.0)
    elif how == "grows":
        bytearray(100 * 10**6)[::4096] = bytes(len(range(0, 100 * 10**6, 4096)))
    elif how == "raises":
        raise ValueError("of a hostile answer")
    elif how == "forges":
        print(f"{FORGED} line", file=sys.stderr, flush=True)
    elif how == "in a thread":
        thread = threading.Thread(target=_spoil, args=("raises",))
        thread.start()
        thread.join()
    elif how == "stays":
        threading.Event().wait()


SPOILS = {
    "imports": "effects",
    "writes": "effects",
    "starts": "effects",
    "connects": "effects",
    "grows": "memory",
    "raises": "traceback",
    "in a thread": "traceback",
    "forges": "forged line",
    "stays": "hang or death",
}
"""What a program does → the kind of failure as which it has to be noticed."""
PROGRAMS |= {how: lambda url, folder, ref, how=how: _spoil(how) for how in SPOILS}  # type: ignore[misc]
SITES = [name for name in PROGRAMS if name not in SPOILS]


# -- what is watched

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "pty.spawn",
)
_CHANGES = {
    "os.chmod": 1, "os.chown": 1, "os.link": 2, "os.mkdir": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1,
    "os.symlink": 2, "os.truncate": 1, "os.utime": 1, "shutil.rmtree": 1, "shutil.copyfile": 2, "shutil.move": 2,
}  # fmt: skip
"""Event → how many of its first arguments are paths."""
_LOADS = ("pickle.find_class", "code.__new__", "ctypes.dlopen")
_SUSPECT = ("hostile_answers", "hostile_canary", "/etc/passwd", "..")


class Watch:
    """An audit hook that notes what only a hostile answer can lead to. It cannot be taken off, only switched off.

    Attributes:
        seen: what happened, in words.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._folder, self._port, self._on = "", 0, False
        self._temporary = tempfile.gettempdir()
        self._known: set[str] = set()
        sys.addaudithook(self._hook)

    def learn(self) -> None:
        """The modules that an undisturbed run imports are no surprise."""
        self._known |= {*sys.modules}

    def begin(self, folder: Path, port: int) -> None:
        """From now on, only `folder` may be written to, and only this port of the loopback may be connected to."""
        self.seen = []
        self._folder, self._port, self._on = str(folder), port, True

    def end(self) -> None:
        self._on = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open":
            self._opened(*args)
        elif event == "import":
            if args[0] not in self._known and args[0] not in sys.modules:
                self._see(f"import of {args[0]}")
        elif event in _STARTS:
            self._see(f"process: {event} {args[:2]!r}")
        elif event in _LOADS and args != (None,):  # the program itself, for functions of the C library
            self._see(f"load: {event} {args!r}"[:300])
        elif event in _CHANGES:
            for path in args[: _CHANGES[event]]:
                self._wrote(event, path)
        elif event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
            self._connected(event, args)

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, int):
            return
        writes = (isinstance(flags, int) and flags & _WRITES) or (isinstance(mode, str) and set(mode) & set("wax+"))
        if writes:
            self._wrote("open", path)
        elif any(word in os.fsdecode(path) for word in _SUSPECT):
            self._see(f"open of {path!r}")

    def _wrote(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            return
        full = os.path.abspath(os.fsdecode(path))
        if full != "/dev/null" and not f"{full}/".startswith((f"{self._folder}/", f"{self._temporary}/")):
            self._see(f"write: {event} {path!r}"[:300])

    def _connected(self, event: str, args: tuple[Any, ...]) -> None:
        where = args[1] if event != "socket.getaddrinfo" else (args[0], args[1])
        if event == "socket.bind":
            return
        if isinstance(where, tuple) and (where[0] not in ("127.0.0.1", b"127.0.0.1") or int(where[1]) != self._port):
            self._see(f"connect: {event} {where!r}")

    def _see(self, what: str) -> None:
        self.seen.append(what)


_libc = ctypes.CDLL(None)


def status_kb(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))


def _clean() -> int:
    """Give memory back, forget the peak of it, and return what is resident, in KiB."""
    gc.collect()
    _libc.malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status_kb("VmRSS")


def run(job: dict[str, Any], watch: Watch) -> dict[str, Any]:
    """Run one program against one server, and return how it ended."""
    folder = Path(job["folder"])
    folder.mkdir(parents=True)
    os.chdir(folder)
    failed: list[str] = []
    threading.excepthook = lambda args: failed.append(  # the traceback of a thread would be printed
        f"in {args.thread.name if args.thread else 'a thread'}: "
        + "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    )
    sys.unraisablehook = lambda args: failed.append(f"unraisable: {args.exc_value!r} in {args.object!r}")
    before_kb, begin_s = _clean(), time.monotonic()
    watch.begin(folder, job["port"])
    line, code, trace = "", 0, ""
    try:
        PROGRAMS[job["program"]](f"http://127.0.0.1:{job['port']}", folder, job["ref"])
    except atoll.AtollError as error:
        line, code = error_lines(error), error.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        trace = traceback.format_exc()
    seconds = time.monotonic() - begin_s
    watch.end()
    peak_kb = status_kb("VmHWM") - before_kb
    os.chdir("/")
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "line": line[:20_000],
        "code": code,
        "trace": (trace + "\n".join(failed))[-6_000:],
        "seconds": seconds,
        "peak_mb": peak_kb * 1024 / 1e6,
        "seen": watch.seen[:10],
    }


def main() -> None:
    """Serve jobs until the other end closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    used = status_kb("VmSize") * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    watch = Watch()
    while data := channel.recv(JOB_BYTES):
        job = json.loads(data)
        if job.get("learn"):
            watch.learn()
            gc.freeze()  # or each run would visit the objects of all modules
            channel.send(b"{}")
            continue
        channel.send(json.dumps(run(job, watch)).encode())


if __name__ == "__main__":
    main()
