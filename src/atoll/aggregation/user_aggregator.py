"""Aggregators that users write: their two forms, their input and their result.

    (a)  aggregate(updates) → (name, pseudo-gradient) pairs, or a mapping
    (b)  accept(update) when an update arrives, then aggregate() → as in (a), then reset()

The pseudo-gradient of a tensor is base − local. The outer optimizer uses it as a gradient.

The result is written to a file with `params` only. Each element has the accumulation dtype (at least fp32), so that
nothing is rounded before the outer step. The user's code runs in a child process (`main`); its counterpart at
the server is `server/coordinator/user_aggregator_process`.
"""

from __future__ import annotations

import functools
import os
import queue
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from atoll import registry
from atoll.child_processes import ProcessPipe
from atoll.codecs import build_codecs, encoded_layout
from atoll.codecs.plain import Elementwise
from atoll.errors import AtollError, ConfigError
from atoll.posix import read_at, write_at
from atoll.registry import OwnName
from atoll.tensors.chunks import bytes_of
from atoll.tensors.dtypes import accumulate_dtype, dtype_name, torch_dtype
from atoll.tensors.layout import Layout, Segment, update_layout
from atoll.tensors.lazy_tensors import Handle, LazyState, LazyTensor
from atoll.tensors.schema import Schema, TensorSpec


@dataclass(frozen=True)
class Update:
    """One accepted update, as a user's aggregator gets it. Its tensors are read from disk.

    An aggregator may keep at most `aggregation.max_kept_updates` updates after the round. If it keeps more, the tensors
    of the oldest ones can no longer be read.

    Attributes:
        site: name of the site.
        round: number of the round that the update was submitted for.
        weight: the update's weight, as the site sent it; finite and positive.
        steps: number of local steps; 0 if the site did not report them.
        metrics: metrics that the site reported.
        tensors: name → pseudo-gradient, for every tensor of `params`. Each access reads the tensor from disk.
        buffers: name → value, for every buffer, but for the rule `sum` the change. The server reduces buffers itself.
    """

    site: str
    round: int
    weight: float
    steps: int
    metrics: Mapping[str, float]
    tensors: LazyState
    buffers: LazyState


class AllAtOnce:
    """Wraps a user's function `aggregate(updates)`: collects a round's updates, then passes them to the function."""

    incremental = False

    def __init__(self, aggregate: Callable[[Sequence[Update]], object]) -> None:
        self._aggregate = aggregate
        self._updates: list[Update] = []

    def accept(self, update: Update) -> None:
        """Keep an update until `reset`. The user's code does not run yet."""
        self._updates.append(update)

    def aggregate(self) -> object:
        """Call the user's function with all updates since the last `reset`, in the order of `accept`."""
        return self._aggregate(tuple(self._updates))

    def reset(self) -> None:
        """Forget the collected updates."""
        self._updates.clear()


class Incremental:
    """Wraps a user's object with `accept`, `aggregate` and `reset`, which gets updates one by one as they arrive."""

    incremental = True

    def __init__(self, user: Any) -> None:
        self.accept: Callable[[Update], object] = user.accept
        self.aggregate: Callable[[], object] = user.aggregate
        self.reset: Callable[[], object] = user.reset


def load(target: OwnName, options: Mapping[str, Any]) -> AllAtOnce | Incremental:
    """Load the user's aggregator that the setting `aggregation.aggregator` names.

    Args:
        target: `module:attribute` or `file.py:attribute`. The attribute is a class, an object or a function.
        options: keyword arguments for the class, or for the function in addition to the updates.

    Raises:
        ConfigError: the attribute does not exist, cannot be created with these options, or is not an aggregator.
    """
    aggregator = kind = registry.load_attribute(target)
    if isinstance(aggregator, type):
        aggregator = registry.construct(
            lambda: kind(**options),
            f"The aggregator {target!r} cannot be created",
            "Write its keyword arguments next to the path in aggregation.aggregator.",
        )
    elif options and hasattr(aggregator, "aggregate"):
        raise ConfigError(
            f"aggregation.aggregator has arguments, but {target!r} is an object, not a class.",
            "Use its class, or leave the arguments out.",
        )
    if callable(getattr(aggregator, "accept", None)):
        missing = [name for name in ("aggregate", "reset") if not callable(getattr(aggregator, name, None))]
        if missing:
            raise ConfigError(
                f"The aggregator {target!r} has a method accept, but no {' and no '.join(missing)}.",
                "Give it accept(update), aggregate() and reset(), or only aggregate(updates).",
            )
        return Incremental(aggregator)
    if callable(getattr(aggregator, "aggregate", None)):
        return AllAtOnce(aggregator.aggregate)
    if callable(aggregator):
        return AllAtOnce(lambda updates: aggregator(updates, **options))
    raise ConfigError(
        f"The aggregator {target!r} is of type {type(aggregator).__name__}, which has no method aggregate.",
        "Use a function of the updates, or a class with aggregate(updates).",
    )


@dataclass(frozen=True)
class Accumulated(Elementwise):
    """The codec of an aggregator's result file: it stores each element in the accumulation dtype (at least fp32)."""

    name: ClassVar[str] = "accumulated"

    @staticmethod
    def stored(dtype: str) -> str:
        """Return the safetensors name of the dtype in which elements of `dtype` are accumulated."""
        return dtype_name(accumulate_dtype(dtype))


def result_layout(schema: Schema, part_bytes: int) -> Layout:
    """Return the layout of an aggregator's result file: all parameters that the outer optimizer steps."""
    codec = Accumulated()
    return update_layout([spec for spec in schema.tensors if spec.is_stepped], lambda _: codec, part_bytes)


class BadResult(Exception):
    """Raised if the result of a user's aggregator cannot be used."""


def write_result(fd: int, layout: Layout, result: object, progress: Callable[[], None]) -> None:
    """Write an aggregator's result to a file, one tensor at a time.

    Args:
        fd: the file.
        layout: layout of the file, from `result_layout`.
        result: the result: (name, tensor) pairs or a mapping. It may be a generator; its errors are raised unchanged.
        progress: callback after each tensor.

    Raises:
        BadResult: `result` does not consist of pairs; a name is unknown, missing or repeated; or a tensor has the wrong
            shape or dtype, or is not finite.
        OSError: the write failed.
    """
    if isinstance(result, Mapping):
        result = result.items()
    if not isinstance(result, Iterable):
        raise BadResult(f"the aggregator returned {_kind(result)}, not (name, tensor) pairs or a mapping")
    missing = dict(layout.by_name)
    for pair in result:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise BadResult(f"the aggregator returned {_kind(pair)} instead of a (name, tensor) pair")
        name, value = pair
        segment = missing.pop(name, None)
        if segment is None:
            if name in layout.by_name:
                raise BadResult(f"the aggregator returned {name!r} twice")
            hint = registry.nearest(name, layout.by_name, "Return only parameters.")
            raise BadResult(f"the aggregator returned {name!r}, which is not a parameter ({hint.rstrip('.')})")
        write_at(fd, bytes_of(_checked(segment, value)), segment.offset)
        progress()
    if missing:
        raise BadResult(
            f"the aggregator left out {next(iter(missing))!r} ({len(missing)} of {len(layout.by_name)} are missing)"
        )


def _checked(segment: Segment, value: object) -> Tensor:
    """Check one tensor of a result, and return it on the CPU, contiguous and in the accumulation dtype (at least fp32).

    Raises:
        BadResult: the value is not a dense tensor, has the wrong shape or dtype, or is not finite.
    """
    spec = segment.spec
    if isinstance(value, LazyTensor):
        value = value.resolve()
    if not isinstance(value, Tensor):
        raise BadResult(f"the aggregator returned {_kind(value)} for {spec.name!r}, not a tensor")
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        raise BadResult(f"the aggregator returned {spec.name!r} as a tensor that is not dense or has no values")
    if tuple(value.shape) != tuple(spec.shape):
        raise BadResult(
            f"the aggregator returned {spec.name!r} in the shape {list(value.shape)}, not {list(spec.shape)}"
        )
    allowed = {torch_dtype(spec.dtype), accumulate_dtype(spec.dtype)}
    if value.dtype not in allowed:
        names = " or ".join(sorted(dtype_name(dtype) for dtype in allowed))
        raise BadResult(f"the aggregator returned {spec.name!r} as {dtype_name(value.dtype)}, but must return {names}")
    tensor = value.detach().to("cpu", accumulate_dtype(spec.dtype)).contiguous()
    if not bool(torch.isfinite(tensor).all()):
        raise BadResult(f"the aggregator returned NaN or Inf in {spec.name!r}")
    return tensor


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


PROGRESS_S = 0.1
"""Minimum seconds between two `progress` messages."""
END_S = 2.0
"""Maximum seconds that the user's code may continue after the server has closed the connection."""


# -- the child process that runs a user's aggregator


def main(fd: int) -> None:
    """Run the child process: carry out the server's messages from the socket `fd` until the connection ends."""
    _AggregatingProcess(ProcessPipe(socket.socket(fileno=fd))).run()


class _AggregatingProcess:
    """The child process: it carries out the server's messages one by one.

    from the server                           to the server
    begin      load the aggregator            ready | bad    loaded | loading failed
    file       write results to this file
    update     one update, with its file      progress       a tensor was read or written
    aggregate  write the result               done | error   the result is written | the user's code failed
    reset      forget the updates
    release    close an update's file         released       an update's file is closed

    The user's code runs in the main thread. A second thread reads messages, so that `release` works while the user's
    code runs. A third thread sends messages: `released` is sent when Python deletes an update, which may happen during
    a send.
    """

    def __init__(self, channel: ProcessPipe) -> None:
        self._channel = channel
        self._jobs: queue.SimpleQueue[tuple[dict[str, Any], int | None] | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        self._ended = threading.Event()
        self._progress_s = 0.0
        self._user: AllAtOnce | Incremental
        self._result_fd: int | None = None

    # -- threads

    def run(self) -> None:
        threading.Thread(target=self._read, name="atoll-read", daemon=True).start()
        threading.Thread(target=self._write, name="atoll-write", daemon=True).start()
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job
        self._ended.set()

    def _read(self) -> None:
        while True:
            try:
                message, fd = self._channel.receive()
            except EOFError:
                self._jobs.put(None)
                self._ended.wait(END_S)
                os._exit(0)
            if message["what"] == "release":
                handle = self._handles.get(message["id"])
                if handle is not None:
                    handle.release()
                del handle
            else:
                self._jobs.put((message, fd))

    def _write(self) -> None:
        while True:
            try:
                self._channel.send(self._outgoing.get())
            except OSError:
                return  # the connection is closed; the reading thread ends the process

    def _progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self._progress_s >= PROGRESS_S:
            self._progress_s = now_s
            self._outgoing.put({"what": "progress"})

    # -- one method for each message of the server

    def _do(self, message: dict[str, Any], fd: int | None) -> None:
        try:
            with torch.no_grad():
                getattr(self, f"_{message['what']}")(message, fd)
        except BadResult as error:
            self._tell_error(message, str(error))
        except MemoryError:
            self._tell_error(message, "the machine does not have enough memory for the aggregator", is_final=False)
        except Exception as error:
            if isinstance(error, AtollError) and message["what"] == "begin":
                if error.trace:
                    print(error.trace, file=sys.stderr)
                self._outgoing.put({"what": "bad", "message": error.message, "remedy": error.remedy})
                return
            traceback.print_exc()
            self._tell_error(message, f"{type(error).__name__}: {error} ({_where(error)})")

    def _tell_error(self, message: dict[str, Any], text: str, *, is_final: bool = True) -> None:
        """Tell the server that the aggregator has failed, and whether it would probably fail again."""
        number = message.get("round", 0)
        self._outgoing.put({"what": "error", "message": text, "round": number, "is_final": is_final})

    def _begin(self, message: dict[str, Any], _: int | None) -> None:
        torch.set_num_threads(message["threads"])
        schema = Schema.from_json(message["schema"])
        self._user = load(OwnName(message["aggregator"]), message["options"])  # its module may register the codec
        self._codecs = build_codecs(OwnName(message["codec"]), message["codec_options"])
        self._layout = encoded_layout(schema, message["codec"], self._codecs, message["part_bytes"])
        self._result = result_layout(schema, message["part_bytes"])
        self._outgoing.put({"what": "ready", "incremental": self._user.incremental})

    def _file(self, _: dict[str, Any], fd: int | None) -> None:
        self._result_fd = fd

    def _update(self, message: dict[str, Any], fd: int | None) -> None:
        assert fd is not None
        number = message["id"]

        def read(offset: int, memory: memoryview) -> None:
            read_at(fd, memory, offset)
            self._progress()

        handle = Handle(read, functools.partial(self._give_back, fd, number))
        self._handles[number] = handle
        self._user.accept(
            Update(
                site=message["site"],
                round=message["round"],
                weight=message["weight"],
                steps=message["steps"],
                metrics=message["metrics"],
                tensors=self._state(handle, lambda spec: spec.is_stepped),
                buffers=self._state(handle, lambda spec: spec.is_buffer),
            )
        )
        self._progress()

    def _state(self, handle: Handle, which: Callable[[TensorSpec], bool]) -> LazyState:
        codecs = self._codecs

        def decode(encoded: torch.Tensor, target: torch.Tensor, segment: Segment) -> None:
            codecs[segment.codec].decode_(encoded, target, segment.spec.dtype)

        segments = {name: each for name, each in self._layout.by_name.items() if which(each.spec)}
        return LazyState(handle, segments, decode)

    def _give_back(self, fd: int, number: int) -> None:
        os.close(fd)
        self._outgoing.put({"what": "released", "id": number})

    def _aggregate(self, message: dict[str, Any], _: int | None) -> None:
        assert self._result_fd is not None
        write_result(self._result_fd, self._result, self._user.aggregate(), self._progress)
        self._user.reset()
        self._outgoing.put({"what": "done", "round": message["round"]})

    def _reset(self, _: dict[str, Any], __: int | None) -> None:
        self._user.reset()


def _where(error: BaseException) -> str:
    """Return the file and line of the user's code at which an error was raised.

    The innermost frame outside Atoll and the Python installation counts; if there is none, the innermost frame of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    package = os.path.join(folder, "atoll") + os.sep
    own = [
        frame
        for frame in frames
        if not os.path.abspath(frame.filename).startswith((package, sys.base_prefix + os.sep, sys.prefix + os.sep))
    ]
    frame = (own or list(frames))[-1]
    return f"{frame.filename}, line {frame.lineno}"
