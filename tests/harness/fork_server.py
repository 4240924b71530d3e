"""Python processes that start in milliseconds, forked from one that has imported torch and Atoll.

`install()` changes how `subprocess.Popen` starts this Python with a script, `-c` or `-m`, and how it starts `atoll`: a
fork server does it. Other programs and other flags start as ever, and so does everything within `fresh_processes()`.

The process is an ordinary child of the one that starts it: with its own pid, environment, folder, descriptors, signals
and exit status. It may start further processes in the same way. Only what depends on a first import differs: modules
that are imported already, the seed of hashes, and what torch takes from the environment when it is imported.

The fork server forks twice, and the process between ends. Linux then gives the new process to the nearest ancestor that
adopts orphans. That is the one that asked: while it asks it is a subreaper, and the fork server is its child.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

PRELOAD = (
    "atoll.algorithms.fedavg",
    "atoll.cli.main",
    "atoll.cli.server",
    "atoll.recipes",
    "atoll.server.serve",
    "atoll.simulate.local_processes",
    "atoll.testing.run",
    "atoll.worker.peer.agent",
    "atoll.worker.training.diloco_loop",
    "atoll.worker.training.federated_loop",
    "encodings.idna",  # of the first name of a host that is looked up
    "kit",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",  # torch.optim imports it when the first optimizer is made
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
"""Imported once, for all processes."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MADV_COLLAPSE, _HUGE = 25, 2**21
_LIBC = ctypes.CDLL(None)
_prctl: Callable[..., int] = getattr(_LIBC, "prctl", lambda *_: 0)  # Linux alone has it
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MOST_BYTES, _MOST_FDS = 2**20, 64
_FREE_FD = 200
"""Descriptors of the fork server have at least this number: smaller ones belong to the program."""
_THREADS = "OMP_NUM_THREADS"
_OF_THE_START = ("PYTHON", "LD_", "LC_", "LANG", "ATEN_")
"""Variables that begin so have an effect only when Python starts or torch is imported …"""
_LATER = frozenset({"PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"})
"""… except these. The processes of a fork server have one seed of hashes, so sets have one order in all of them."""

_really_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_really_execute)


def end_with_test() -> None:
    """For `preexec_fn`: SIGKILL ends the process when its parent ends, and SIGINT interrupts it in any case.

    A shell without job control makes what it starts in the background ignore SIGINT, with all descendants.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


_KNOWN_PREEXEC: dict[str, Callable[[], object] | None] = {
    "none": None,
    "end_with_parent": functools.partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
    "end_with_test": end_with_test,
}


def _same_call(one: Callable[[], object] | None, other: Callable[[], object] | None) -> bool:
    """Whether both are one function, or call one C function with the same arguments, as Atoll does."""
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return (one.func.__name__, one.args) == (other.func.__name__, other.args)
    return one is other


class _Here:
    """What this process knows of its fork server."""

    preload: Sequence[str] = ()
    channel: socket.socket | None = None
    owner = 0
    lock = threading.Lock()
    asked = 0
    fresh = 0
    environment: Mapping[str, str] = {}
    path: Sequence[str] = ()


def install(preload: Sequence[str] = PRELOAD) -> None:
    """Let `subprocess.Popen` fork Python processes from now on, on Linux. The first one waits for the imports."""
    _Here.preload = _Here.preload or preload
    if sys.platform == "linux":
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


@contextmanager
def fresh_processes() -> Iterator[None]:
    """Start Python as ever within the block: for tests of what is imported, or of a start itself."""
    _Here.fresh += 1
    try:
        yield
    finally:
        _Here.fresh -= 1


# -- the process that asks


def _execute_child(popen: Any, *args: Any, **kwargs: Any) -> None:
    given = _parameters.bind(popen, *args, **kwargs).arguments
    pid = 0
    if not _Here.fresh and _Here.owner in (0, os.getpid()) and (request := _request(given)):
        with _Here.lock:
            pid = _ask(_channel(), request, given)
    if not pid:
        _really_execute(popen, *args, **kwargs)
        return
    popen.pid, popen._child_created = pid, True
    popen._close_pipe_fds(*(given[name] for name in _PIPES))


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _request(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the fork server has to know, or None if it cannot start the process."""
    argv = given["args"]
    if (
        isinstance(argv, str | bytes | os.PathLike)
        or given["shell"]
        or given["executable"] not in (None, sys.executable)
    ):
        return None
    argv = [os.fsdecode(word) for word in argv]
    env = {**os.environ} if given["env"] is None else {os.fsdecode(k): os.fsdecode(v) for k, v in given["env"].items()}
    cwd = os.fsdecode(given["cwd"] or os.getcwd())
    program = _program(argv, env, cwd)
    before = next((name for name, known in _KNOWN_PREEXEC.items() if _same_call(known, given["preexec_fn"])), None)
    if program is None or before is None or not given["close_fds"] or not _same_start(env):
        return None
    if any(given[name] not in (None, -1) for name in ("gid", "gids", "uid", "umask")) or not Path(cwd).is_dir():
        return None
    return {
        "program": program,
        "env": env,
        "cwd": cwd,
        "preexec": before,
        "session": given["start_new_session"],
        "group": given.get("process_group", -1),
        "ignored": [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }


def _program(argv: list[str], env: Mapping[str, str], cwd: str) -> list[str] | None:
    """Return the arguments of Python, or None if this is not Python or has flags that only a start can heed."""
    if argv[0] != sys.executable:
        command = shutil.which(argv[0], path=env.get("PATH")) if Path(argv[0]).name == "atoll" else None
        return None if command is None else [command, *argv[1:]]
    words = argv[1:]
    if words[:1] == ["-u"]:
        env["PYTHONUNBUFFERED"] = "1"  # type: ignore[index]
        words = words[1:]
    if len(words) > 1 and words[0] in ("-c", "-m"):
        return words
    return words if words and not words[0].startswith("-") and Path(cwd, words[0]).is_file() else None


def _same_start(env: Mapping[str, str]) -> bool:
    """Return whether the variables that only a start heeds are those of the fork server."""
    ours = _Here.environment or os.environ
    names = {name for name in (*env, *ours) if name.startswith(_OF_THE_START) and name not in _LATER}
    return all(env.get(name) == ours.get(name) for name in names) and env.get(_THREADS, "").isdecimal()


def _channel() -> socket.socket:
    """Return the connection to the fork server of this process, after it has been started."""
    if _Here.channel is None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _Here.channel, _Here.owner, _Here.environment = mine, os.getpid(), {**os.environ}
        code = f"from harness.fork_server import begin; begin({theirs.fileno()})"
        with theirs, fresh_processes():
            started = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                cwd=Path(__file__).parent,  # not a test's folder, where the test may look for processes
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process that forks has one thread
            )
        started.returncode = 0  # it ends with this process: not to be waited for
        mine.send(json.dumps(_Here.preload).encode())  # no arguments: a test may look for a process by its command line
    return _Here.channel


def _ask(channel: socket.socket, request: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """Have the fork server start a process, and return its pid; 0 if the fork server has ended."""
    wanted = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    fds = [number if fd == -1 else fd for number, fd in enumerate(wanted)] + sorted(given["pass_fds"])
    with open(os.devnull, "rb") as null:
        fds = [fd if _is_open(fd) else null.fileno() for fd in fds]
        _Here.asked += 1
        data = json.dumps({**request, "number": _Here.asked, "fds": [0, 1, 2, *sorted(given["pass_fds"])]}).encode()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(channel, [data], fds)
            while answer := channel.recv(64).split():
                if int(answer[0]) == _Here.asked:  # else one that Ctrl-C has kept an earlier call from reading
                    return int(answer[1])
            return 0
        except OSError:
            return 0
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


# -- the fork server, and the process that it starts


def begin(number: int) -> None:
    """Be the first fork server: import what the other end names, then serve. Never returns."""
    channel = socket.socket(fileno=_moved(number))
    _Here.preload = json.loads(channel.recv(_MOST_BYTES))
    for module in _Here.preload:
        importlib.import_module(module)
    _Here.environment, _Here.path = {**os.environ}, tuple(sys.path[1:])
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))  # the first one costs 20 ms
    for each in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        each.atexit = False  # torch would take back its kernels one by one: 40 ms of each process that ends
    gc.collect()
    gc.freeze()  # or each process would copy all objects when it collects garbage
    _gather_in_huge_pages()
    _serve(channel)


def _gather_in_huge_pages() -> None:
    """Make page tables small. A fork copies them, which was most of its cost: 16 ms of CPU time, with this 4 ms."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        where, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in where.split("-"))
            begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if begin < end:
                _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def _serve(channel: socket.socket) -> None:
    """Fork a process for each request, until the other end closes. Never returns."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(channel, _MOST_BYTES, _MOST_FDS)
        except ConnectionResetError:  # the process that asks was killed before it had read an answer
            os._exit(0)
        if not data:
            os._exit(0)
        request = json.loads(data)
        read_fd, write_fd = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            os.close(read_fd)
            channel.close()
            _become(request, fds, between, write_fd)
        for fd in (*fds, write_fd):
            os.close(fd)
        os.waitpid(between, 0)
        answer = os.read(read_fd, 64)  # its pid, once it is what was asked for: signals and its group may be used then
        os.close(read_fd)
        channel.send(b"%d %s" % (request["number"], answer or b"0"))


def _become(request: dict[str, Any], fds: list[int], between: int, tell: int) -> None:
    """Turn this fork into the process that was asked for, tell its pid, and end with it. Never returns."""
    while os.getppid() == between:  # until the process that asked has adopted this one
        time.sleep(0.0002)
    if request["session"]:
        os.setsid()
    elif request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    above = max(_FREE_FD, 1 + max(request["fds"]))  # a descriptor below could be replaced by one of the program
    tell, fds = _moved(tell, above), [_moved(fd, above) for fd in fds]
    _fork_own_server([*fds, tell], above)
    _take(request, fds)
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    code = _code_of(functools.partial(_run, request["program"]))
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _fork_own_server(fds: Sequence[int], above: int) -> None:
    """Fork the server of the processes that this one will start. Its descriptor here is at least `above`."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        mine.close()
        for fd in fds:
            os.close(fd)
        _serve(theirs)
    theirs.close()
    _Here.channel, _Here.owner = socket.socket(fileno=_moved(mine.detach(), above)), os.getpid()


def _moved(fd: int, above: int = _FREE_FD) -> int:
    """Return the descriptor under a free number of at least `above`, and close the old number."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(fd)
    return moved


def _take(request: dict[str, Any], fds: list[int]) -> None:
    """Take the environment, folder, descriptors, signals and paths of the request."""
    for fd, number in zip(fds, request["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # torch has asked for it when it was imported: by TMPDIR it may be another one here
    for number in _SIGNALS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    _prctl(_PR_SET_PDEATHSIG, 0)
    preexec = _KNOWN_PREEXEC[request["preexec"]]
    if preexec is not None:
        preexec()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _open_streams()
    _set_path(request["program"])
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # a random one, as when torch is imported
        if int(os.environ[_THREADS]) != torch.get_num_threads():
            torch.set_num_threads(int(os.environ[_THREADS]))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # the other generators do this by themselves
    runtime: Any = sys.modules.get("atoll.runtime")
    if runtime is not None:
        runtime.switch_failpoints_on(os.environ.get(runtime.FAILPOINTS_VARIABLE, ""))


def _open_streams() -> None:
    """Make standard streams on the new descriptors, as Python does when it starts."""
    direct = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = open(number, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2 or stream.isatty(), write_through=direct)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_path(program: Sequence[str]) -> None:
    """Set `sys.path` to what it would be in a new process."""
    first = {"-c": "", "-m": os.getcwd()}.get(program[0]) if program[0] in ("-c", "-m") else None
    first = str(Path(program[0]).resolve().parent) if first is None else first
    theirs, ours = (
        [str(Path(name).absolute()) for name in env.get("PYTHONPATH", "").split(os.pathsep) if name]
        for env in (_Here.environment, os.environ)
    )
    rest = [name for name in _Here.path if name not in ours and (name not in theirs or theirs == ours)]
    sys.path[:] = [first, *_Here.path] if theirs == ours else [first, *ours, *rest]
    importlib.invalidate_caches()


def _run(program: list[str]) -> None:
    """Run the program as Python's `__main__`."""
    main = sys.modules["__main__"]
    main.__dict__.clear()
    main.__dict__.update(__name__="__main__", __doc__=None, __package__=None, __loader__=None, __spec__=None)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    kind, *rest = program
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.modules.pop(rest[0], None)  # runpy warns of a module that is there already
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined] # what Python itself calls
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.argv = program
        path = main.__dict__["__file__"] = str(Path(kind).absolute())
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)  # noqa: S102


def _code_of(run: Callable[[], None]) -> int:
    """Run the program and return its exit code, −n if signal n ends it; print its error as Python does."""
    sys.excepthook = sys.__excepthook__ = _without_frames_of_this_file(sys.__excepthook__)
    try:
        return _code_without_exit(run)
    except SystemExit as error:  # of the program, or of its `sys.excepthook`
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1


def _code_without_exit(run: Callable[[], None]) -> int:
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _without_frames_of_this_file(hook: Hook) -> Hook:
    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        look, rest = trace, trace
        while look is not None:
            rest = look.tb_next if look.tb_frame.f_code.co_filename == __file__ else rest
            look = look.tb_next
        hook(kind, error.with_traceback(rest), rest)

    return shown
