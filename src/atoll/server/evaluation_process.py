"""Evaluates versions with the user's function (`server.evaluate`) in a process of its own, which can be killed.

A function that the settings name is imported by a new process. A function or model that a program passes exists only in
that program, so the process is a fork of it: `Evaluator.fork` makes the fork before the server begins, and this fork
makes a new one for each process. The function gets the model, with the version's tensors loaded, in evaluation mode and
without gradients; if the server knows no code that builds the model, it gets a dict name → tensor.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from stat import S_ISSOCK
from typing import Any

import torch
from torch import nn

from atoll import registry
from atoll.child_processes import PipedProcess, ProcessPipe
from atoll.config import Settings
from atoll.errors import AtollError, ConfigError, UsageError
from atoll.protocol.messages import METRIC_CHARS, METRICS
from atoll.registry import OwnName
from atoll.server.coordinator.evaluate_versions import Result
from atoll.server.coordinator.user_code import LAZY
from atoll.server.initial_model import initial_model, is_code
from atoll.system_calls import cores
from atoll.tensors.module_tensors import Tensors, named_tensors

LOG = logging.getLogger("atoll.server")

Evaluate = Callable[[Any], Mapping[str, Any]]

START_S = 120.0
"""Maximum seconds that the process may take to import the function and build the model."""
HOW = 'Write a function that takes the model and returns its metrics: {"accuracy": 0.9}.'


# -- at the server


class Evaluator:
    """The process that evaluates versions. `evaluate` blocks, so call it in a thread; one call at a time.

    Args:
        settings: the run's settings.
        function: the function that a program passes; None: the one that `server.evaluate` names.
        model: the module that a program passes; None: `model.source` names the model.

    Raises:
        UsageError: `function` cannot be called with a model.
    """

    def __init__(self, settings: Settings, function: Evaluate | None, model: nn.Module | None) -> None:
        self.name = settings.server.evaluate or str(getattr(function, "__qualname__", function))
        if function is not None and (why := _unusable(function)):
            raise UsageError(f"evaluate is {self.name}, which {why}.", HOW)
        self.timeout_s, self.every = settings.server.evaluate_timeout_s, settings.server.evaluate_every
        self._settings, self._function, self._model = settings, function, model
        self._forks: _Forks | None = None
        self._process: PipedProcess | _Forks | None = None
        self._pipe: ProcessPipe | None = None
        self._lock, self._closed = threading.Lock(), False

    @staticmethod
    def of(settings: Settings, function: Evaluate | None, model: nn.Module | Tensors | None) -> Evaluator | None:
        """Return the evaluator of a run; None if the run has no function that evaluates its versions.

        Raises:
            ConfigError: `rounds.best_metric` needs such a function.
            UsageError: `function` cannot be called with a model, or the settings name another.
        """
        if function is not None and settings.server.function is not None:
            raise UsageError(
                f"The function evaluate is given, and server.evaluate is {settings.server.evaluate!r}.",
                "Use one of them.",
            )
        if function is None and settings.server.function is None:
            if (settings.rounds.best_metric or "").startswith("global."):
                raise ConfigError(
                    f"rounds.best_metric is {settings.rounds.best_metric!r}, a metric of the server's evaluation, but "
                    "server.evaluate is not set.",
                    "Set server.evaluate, or name a metric that sites report.",
                )
            return None
        return Evaluator(settings, function, model if isinstance(model, nn.Module) else None)

    def fork(self) -> None:
        """If a program has passed the function or the model, fork the program, as it is now."""
        if self._function is not None or self._model is not None:
            self._forks = _Forks(lambda pipe: _serve(pipe, self._function, self._model))

    def open(self) -> None:
        """Start the process, and wait until it has loaded the function.

        Raises:
            ConfigError: the function or the model cannot be loaded, or this takes longer than `START_S`.
        """
        server, model = self._settings.server, self._settings.model
        threads = self._settings.run.threads or min(8, cores())
        with self._lock:
            if self._closed:
                raise ConfigError("The server is stopping.")
            if self._forks is not None:
                self._process, self._pipe = self._forks, self._forks.start()
                threads = 1  # a fork has none of the threads that torch had
            else:
                environment = {key: value for key, value in os.environ.items() if key != "ATOLL_FAILPOINTS"}
                self._process = PipedProcess("atoll.server.evaluation_process", environment=environment)
                self._pipe = self._process.pipe
        answer = self._ask(
            {
                "function": None if server.function is None else server.function.text,
                "model": {"model.source": model.source, "model.args": model.args, "run.seed": self._settings.run.seed},
                "threads": threads,
            },
            START_S,
        )
        if "error" in answer:
            self.interrupt()
            raise ConfigError(
                f"server.evaluate: {answer['error']}", answer.get("remedy", "See the log for what its process printed.")
            )

    def evaluate(self, path: Path, version: int) -> Result:
        """Evaluate the model in a safetensors file. If the function fails or is stopped, the result says so.

        Args:
            path: the file.
            version: number of the version.
        """
        try:
            if self._pipe is None:  # it was stopped, or has ended
                self.open()
        except ConfigError as error:
            return Result({}, error.message)
        answer = self._ask({"path": str(path), "version": version}, self.timeout_s)
        if "ended" in answer:
            self.interrupt()
        return Result(answer.get("metrics", {}), answer.get("error", ""), answer.get("ended") == "stopped")

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer of the process. Kill the process if that takes longer than `timeout_s`."""
        process, pipe, stopped = self._process, self._pipe, threading.Event()
        assert process is not None
        assert pipe is not None

        def stop() -> None:
            stopped.set()
            process.kill()

        limit = threading.Timer(timeout_s, stop)
        limit.start()
        try:
            pipe.send(message)
            return pipe.receive()[0]
        except (EOFError, OSError, ValueError):  # also what the function has written into the pipe
            if stopped.is_set():
                return {"error": f"it did not end within {timeout_s:g} s, and was stopped", "ended": "stopped"}
            return {"error": "its process has ended", "ended": "by itself"}
        finally:
            limit.cancel()

    def interrupt(self) -> None:
        """End the process. The next evaluation starts another. Thread-safe."""
        with self._lock:
            process, self._process, pipe, self._pipe = self._process, None, self._pipe, None
            if process is not None and pipe is not None:
                process.kill()
                if isinstance(process, PipedProcess):
                    process.bury()
                pipe.close()

    def close(self) -> None:
        """End the process for good. Idempotent."""
        with self._lock:
            self._closed = True
        self.interrupt()
        if self._forks is not None:
            self._forks.close()


class _Forks:
    """A fork of this program that waits, and forks again for each process, one at a time.

    A later fork of the program itself could inherit a lock that another thread holds at that moment.

    Args:
        main: what each process does with its end of the pipe to the program.
    """

    def __init__(self, main: Callable[[ProcessPipe], None]) -> None:
        own_end, child_end = ProcessPipe.pair()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()  # else the fork would print the same again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of other threads
            self._pid = os.fork()
        if self._pid == 0:
            _wait_and_fork(child_end, main)
        child_end.close()
        self._pipe = ProcessPipe(own_end)

    def start(self) -> ProcessPipe:
        """Start a process, and end the one before it. Return the pipe to it."""
        own_end, child_end = ProcessPipe.pair()
        with child_end, contextlib.suppress(OSError):  # if the fork was killed, the pipe says so
            self._pipe.send({}, child_end.fileno())
        return ProcessPipe(own_end)

    def kill(self) -> None:
        """Kill the process that runs."""
        with contextlib.suppress(OSError):
            self._pipe.send({})

    def close(self) -> None:
        """End the process that runs, and the fork. Idempotent."""
        self._pipe.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _wait_and_fork(end: socket.socket, main: Callable[[ProcessPipe], None]) -> None:
    """Do what `_Forks` asks for, until it closes its end. Never return: the stack above is that of the program."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in map(int, os.listdir("/proc/self/fd")):  # connections of the program must end when it closes them
            with contextlib.suppress(OSError):
                if number > 2 and number != end.fileno() and S_ISSOCK(os.fstat(number).st_mode):
                    os.close(number)
        os.dup2(2, 1)
        pipe, child, fd = ProcessPipe(end), 0, None
        while True:
            try:
                fd = pipe.receive()[1]
            except EOFError:
                break
            finally:
                _end(child)
                child = 0
            if fd is None:
                continue
            child = os.fork()
            if child == 0:
                end.close()
                os.setsid()
                main(ProcessPipe(socket.socket(fileno=fd)))
                os._exit(0)
            os.close(fd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _end(child: int) -> None:
    if child:
        for kill in (os.killpg, os.kill):  # before the child has its own group, only the second reaches it
            with contextlib.suppress(OSError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# -- in the process


def main(fd: int) -> None:
    """Evaluate the versions that come through the pipe with this descriptor, until its other end is closed."""
    _serve(ProcessPipe(socket.socket(fileno=fd)))


def _serve(pipe: ProcessPipe, function: Evaluate | None = None, model: nn.Module | None = None) -> None:
    """Load the function and the model unless they are given; then answer each message with the metrics of a version."""
    threading.Thread(target=_end_with, args=(pipe.fileno(),), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        begin = pipe.receive()[0]
        torch.set_num_threads(begin["threads"])
        try:
            if function is None:
                function = registry.load_attribute(OwnName(begin["function"]))
                if why := _unusable(function):
                    raise ConfigError(f"{begin['function']!r} {why}.", HOW)
            settings = Settings.build({key: value for key, value in begin["model"].items() if value is not None})
            if model is None and is_code(settings):
                model = initial_model(settings, None)  # type: ignore[assignment]  # a mapping is checked below
        except AtollError as error:
            pipe.send({"error": error.message, "remedy": error.remedy})
            return
        except BaseException as error:
            traceback.print_exc()
            pipe.send({"error": f"{type(error).__name__}: {error}."})
            return
        pipe.send({})
        while True:
            message = pipe.receive()[0]
            try:
                answer = _answer(function, model, Path(message["path"]))
            except BaseException as error:  # SystemExit, too: the function's own
                traceback.print_exc()
                answer = {
                    "error": error.message if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
                }
            sys.stdout.flush()
            pipe.send(answer)


def _end_with(fd: int) -> None:
    """When the other end of the pipe is closed, end this process and its children, whatever the function does."""
    waits = select.poll()
    waits.register(fd, select.POLLRDHUP)
    waits.poll()
    os.killpg(0, signal.SIGKILL)


def _answer(function: Evaluate, model: Any, path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    state = load_file(path)
    with torch.no_grad():
        if isinstance(model, nn.Module):
            _load_(model, state)
            model.eval()
        found = function(model if isinstance(model, nn.Module) else state)
    if not isinstance(found, Mapping) or not 0 < len(found) <= METRICS:
        what = f"{len(found)} metrics" if isinstance(found, Mapping) else f"an object of type {type(found).__name__}"
        raise UsageError(f"it returned {what} instead of a dict of 1 to {METRICS} numbers", HOW)
    metrics = {str(name): _number(str(name), value) for name, value in found.items()}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    lost = [f"{name} = {value}" for name, value in metrics.items() if name not in finite]
    return {"metrics": finite, "error": f"it returned {', '.join(lost)[:200]}, which is not finite" if lost else ""}


def _number(name: str, value: Any) -> float:
    if not name.isprintable() or not 0 < len(name) <= METRIC_CHARS:
        raise UsageError(f"it returned a metric with the name {name[:50]!r}", f"Use 1 to {METRIC_CHARS} characters.")
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"it returned {name!r} as {str(value)[:50]!r}, which is not a number", HOW) from None


def _load_(model: nn.Module, state: Tensors) -> None:
    """Load a version into the module, in place. Tensors that the version lacks, since sites keep them, stay."""
    tensors, tied = named_tensors(model)
    if surplus := [name for name in state if name not in tensors and name not in tied]:
        raise UsageError(f"the model has no tensor {surplus[0]!r}, as the version has", "Build the run's own model.")
    for name, tensor in tensors.items():
        if name in state:
            tensor.copy_(state[name])


def _unusable(function: Any) -> str:
    """Return why a function cannot evaluate a model, as the end of a sentence; empty if it can."""
    if not callable(function):
        return f"is of type {type(function).__name__}, not a function"
    if any(kind(each) for kind in LAZY for each in (function, getattr(function, "__call__", None))):  # noqa: B004
        return "is a coroutine function or a generator"
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        return f"cannot be called with the model alone: {error}"
    except ValueError:  # a builtin without a signature
        pass
    return ""
