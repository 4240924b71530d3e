"""The child process that runs a user's aggregator, and its messages to and from the server.

    from the server                           to the server
    begin      load the aggregator            ready | bad    loaded | loading failed
    file       write results to this file
    update     one update, with its file      progress       a tensor was read or written
    aggregate  write the result               done | error   the result is written | the user's code failed
    reset      forget the updates
    release    close an update's file         released       an update's file is closed

The user's code runs in the main thread. A second thread reads messages, so that `release` works while the user's code
runs. A third thread sends messages: `released` is sent when Python deletes an update, which may happen during a send.
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
from collections.abc import Callable
from typing import Any

import torch

from atoll.aggregation.user_aggregator import (
    AllAtOnce,
    BadResult,
    Incremental,
    Update,
    load,
    result_layout,
    write_result,
)
from atoll.child_processes import ProcessPipe
from atoll.codecs.encoded_layout import build_codecs, encoded_layout
from atoll.errors import AtollError
from atoll.posix import read_at
from atoll.tensors.layout import Segment
from atoll.tensors.lazy_tensors import Handle, LazyState
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec

PROGRESS_S = 0.1
"""Minimum seconds between two `progress` messages."""
END_S = 2.0
"""Maximum seconds that the user's code may continue after the server has closed the connection."""


def main(fd: int) -> None:
    """Run the child process: carry out the server's messages from the socket `fd` until the connection ends."""
    _Child(ProcessPipe(socket.socket(fileno=fd))).run()


class _Child:
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
            self._tell_error(message, "the machine does not have enough memory for the aggregator")
        except Exception as error:
            if isinstance(error, AtollError) and message["what"] == "begin":
                if error.trace:
                    print(error.trace, file=sys.stderr)
                self._outgoing.put({"what": "bad", "message": error.message, "remedy": error.remedy})
                return
            traceback.print_exc()
            self._tell_error(message, f"{type(error).__name__}: {error} ({_where(error)})")

    def _tell_error(self, message: dict[str, Any], text: str) -> None:
        self._outgoing.put({"what": "error", "message": text, "round": message.get("round", 0)})

    def _begin(self, message: dict[str, Any], _: int | None) -> None:
        torch.set_num_threads(message["threads"])
        schema = Schema.from_json(message["schema"])
        self._codecs = build_codecs(message["codec"], message["codec_options"])
        self._layout = encoded_layout(schema, message["codec"], self._codecs, message["part_bytes"])
        self._result = result_layout(schema, message["part_bytes"])
        self._user = load(message["aggregator"], message["options"])
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
                buffers=self._state(handle, lambda spec: spec.group == BUFFERS),
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
