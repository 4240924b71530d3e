"""`atoll.fetch`: the tensors behind a reference: into memory, lazily on disk, or in place.

    state = atoll.fetch(ref)                       # as it was published, in new memory
    state = atoll.fetch(ref, to_disk=True)         # on disk; a tensor is loaded when it is asked for
    atoll.fetch(ref, into=model)                   # in place, without a second copy

The manifest comes first and is held against the reference, then the head with names, dtypes and shapes, which is read
strictly; only then is memory taken for tensors. What has come stays when a connection breaks: only the rest is asked
for again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from atoll.blobs.object_file import Contents, Stored
from atoll.border import border
from atoll.errors import (
    AtollError,
    AuthError,
    BadRequest,
    Busy,
    Gone,
    PartCorrupt,
    SchemaMismatch,
    ServerUnreachable,
    TransferStalled,
    UsageError,
)
from atoll.posix import read_at, write_at
from atoll.protocol import routes
from atoll.protocol.object_manifest import Manifest
from atoll.tensors.chunks import Scatter
from atoll.tensors.collector import no_collections
from atoll.tensors.dtypes import dtype_name, torch_dtype
from atoll.tensors.layout import Part
from atoll.tensors.lazy_tensors import LazyState
from atoll.tensors.module_tensors import Tensors, named_tensors
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import Counters
from atoll.transport.object_server import disk_error, nameless
from atoll.transport.resumable_transfer import Memory, Parts, Sink
from atoll.worker.objects.object_transfer import LOOK_S, Abort, idle_timeout, object_http, watched
from atoll.worker.objects.publish import CONNECTIONS

PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Between attempts to reach who serves an object; from the first one again whenever something has come."""

T = TypeVar("T")


@border
def fetch(
    ref: TensorRef | str | None,
    *,
    idle_timeout_s: float | None = None,
    optional: bool = False,
    abort: Abort | None = None,
    to_disk: bool | str | os.PathLike[str] = False,
    into: nn.Module | Mapping[str, Any] | None = None,
) -> Any:
    """Get what a reference names, from whoever serves it.

    Args:
        ref: of `atoll.publish`, or its text.
        idle_timeout_s: a connection that moves no byte for so long is given up; by default `ATOLL_IDLE_TIMEOUT_S`,
            else 60.
        optional: whether None is returned where it is not there (no reference, expired, withdrawn, its process ended).
        abort: an event that ends the transfer in its middle.
        to_disk: True, or a folder: the bytes go to a file without a name, which goes with the last value that
            refers to it. A flat dict of tensors comes as a `LazyState`, another tree with `LazyTensor`s in it.
        into: a module, or a mapping name → tensor or array, with exactly the published names, dtypes and shapes: it is
            filled in place, and returned. A transfer that fails leaves it partly filled.

    Returns:
        What was published, with the same structure: torch where there was torch, NumPy where there was NumPy.

    Raises:
        Gone: it has expired, or was withdrawn. AuthError: the secret is another's.
        ServerUnreachable, TransferStalled: who serves it does not answer.
        TransferAborted: `abort` was set.
        PartCorrupt, BadRequest: what came is not what the reference says, or is no object.
        SchemaMismatch: it does not fit into `into`.
        DiskFull, StoreError: this machine's disk.
    """
    if ref is None:
        if optional:
            return None
        raise UsageError("There is no reference.", "Pass optional=True where it may be absent.")
    if into is not None and to_disk:
        raise UsageError("fetch got both into and to_disk.", "Give one of them.")
    ref = ref if isinstance(ref, TensorRef) else TensorRef.parse(ref)
    idle_timeout_s = idle_timeout(idle_timeout_s)
    folder = None if isinstance(to_disk, bool) else Path(to_disk)
    with no_collections():
        target = None if into is None else _targets(into)
    with _Fetching(ref, idle_timeout_s, abort) as fetching:
        if not fetching.begin(optional):
            return None
        if target is not None:
            fetching.fill(target)
            return into
        return fetching.to_disk(folder) if to_disk else fetching.to_memory()


def fetch_stored(ref: TensorRef, *, idle_timeout_s: float, abort: Abort) -> Stored:
    """As `fetch`, into a file from which the tree can be loaded later."""
    with _Fetching(ref, idle_timeout_s, abort) as fetching:
        fetching.begin(False)
        return fetching.stored(None)


def fetch_lazily(ref: TensorRef, folder: Path | None, *, idle_timeout_s: float, counters: Counters) -> Any:
    """As `fetch` to disk; what moves is counted as it comes."""
    with _Fetching(ref, idle_timeout_s, None, counters) as fetching:
        fetching.begin(False)
        return fetching.to_disk(folder)


class _Fetching:
    """One transfer of one object."""

    def __init__(
        self, ref: TensorRef, idle_timeout_s: float, abort: Abort | None, counters: Counters | None = None
    ) -> None:
        self._ref, self._abort, self._idle_timeout_s = ref, abort, idle_timeout_s
        self._what = f"Object {ref.name}"
        self._http = object_http(ref)
        self._http.counters = counters or self._http.counters
        self._parts = Parts(self._http, CONNECTIONS, idle_timeout_s)
        self._manifest: Manifest
        self._contents: Contents

    def __enter__(self) -> _Fetching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._parts.close()
        self._http.close()
        named = self._named(error) if isinstance(error, AtollError) else error
        if named is not None and named is not error:
            raise named from error

    def begin(self, optional: bool) -> bool:
        """Get manifest and head; False where it is not there, and need not be."""
        path = routes.OBJECT.format(object=self._ref.object)
        pauses = () if optional else PAUSES_S
        with watched(self._parts, self._abort):
            try:
                body = self._patiently(lambda: self._parts.read(path, routes.MANIFEST_BYTES), pauses)
            except (Gone, ServerUnreachable):
                if optional:
                    return False
                raise
            self._manifest = Manifest.read(body, self._ref.digest, self._what)
        extent = self._manifest.extent
        head = _Bytes(extent.head_bytes)
        self._pull([extent.part(index) for index in range(extent.head_count)], [head])
        self._contents = Contents.read(head.data, extent, self._what)
        return True

    def to_memory(self) -> Any:
        """All of it, in new memory; but what consumers read in runs is on disk."""
        if self._contents.streams:
            return self.stored(None).tree()
        specs = (segment.spec for segment in self._contents.layout.segments)
        try:
            tensors = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in specs}
        except (RuntimeError, MemoryError) as error:
            raise UsageError(
                f"{self._what} has {self._manifest.extent.nbytes} bytes, for which there is no memory.",
                "Fetch it with to_disk=True.",
            ) from error
        self._scatter(tensors)
        return self._contents.tree({**tensors, **self._contents.inline}.__getitem__)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """All of it, where it belongs."""
        with no_collections():
            chosen, copies = self._assign(targets)
        self._scatter(chosen)
        for name, source in self._contents.inline.items():
            chosen[name].copy_(source)
        for source, target in copies:
            target.copy_(source)

    def to_disk(self, folder: Path | None) -> Any:
        """All of it, in a file that the values share."""
        stored = self.stored(folder)
        keys = self._contents.by_key()
        if keys is not None:
            return LazyState(stored.handle, {key: stored.segments[name] for key, name in keys.items()})
        return self._contents.tree(stored.lazy.__getitem__)

    def stored(self, folder: Path | None) -> Stored:
        """All of it, in a file without a name."""
        fd = nameless(folder)
        try:
            file = _File(fd)
            self._pull(self._data_parts(), [file])
            file.write(self._manifest.extent.nbytes, memoryview(self._contents.behind))
        except BaseException:
            os.close(fd)
            raise
        return Stored(self._contents, lambda offset, memory: read_at(fd, memory, offset), lambda: os.close(fd))

    # -- bytes

    def _data_parts(self) -> list[Part]:
        extent = self._manifest.extent
        return [extent.part(index) for index in range(extent.head_count, extent.count)]

    def _scatter(self, tensors: Tensors) -> None:
        with no_collections():
            scatter = Scatter(self._contents.layout, tensors)
        self._pull(self._data_parts(), [], scatter)

    def _pull(self, parts: Sequence[Part], sinks: Sequence[Sink], into: Memory | None = None) -> None:
        """Get parts, each until it is whole."""
        inline = self._manifest.inline
        if inline is not None:
            for part in parts:
                for sink in [*([into] if into is not None else []), *sinks]:
                    sink.write(part.start, memoryview(inline)[part.start : part.stop])
            return
        path, done = routes.OBJECT_DATA.format(object=self._ref.object), set[int]()
        with watched(self._parts, self._abort):
            self._patiently(
                lambda: self._parts.pull(
                    path,
                    self._manifest.digests,
                    [part for part in parts if part.index not in done],
                    sinks,
                    into=into,
                    on_part=lambda part: done.add(part.index),
                ),
                PAUSES_S,
            )

    def _patiently(self, work: Any, pauses: Sequence[float]) -> Any:
        """Do it, again after a pause where nobody answered: as long as bytes come, or until no pause is left."""
        left, came = list(pauses), self._http.counters.bytes_down
        waited_s = 0.0
        while True:
            try:
                return work()
            except (ServerUnreachable, Busy):
                if self._http.counters.bytes_down > came:
                    left, waited_s, came = list(pauses), 0.0, self._http.counters.bytes_down
                if not left or waited_s >= self._idle_timeout_s:
                    raise
                pause_s = left.pop(0)
                until_s = time.monotonic() + pause_s
                while time.monotonic() < until_s and not (self._abort is not None and self._abort.is_set()):
                    time.sleep(min(LOOK_S, pause_s))
                waited_s += pause_s

    # -- in place

    def _assign(self, targets: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Which tensor each one of the file goes into, and what is copied afterwards because it was tied there.

        Raises:
            SchemaMismatch: names, dtypes, shapes or ties differ; the first difference is named.
        """
        keys = self._contents.by_key()
        if keys is None:
            raise SchemaMismatch(f"{self._what} is no flat dict of tensors.", "Fetch it without into.")
        for one, other, where in ((targets, keys, "the target has"), (keys, targets, "the object has")):
            lacking = next((name for name in one if name not in other), None)
            if lacking is not None:
                raise _mismatch(self._what, f"only {where} {lacking!r}")
        segments = self._contents.segments
        chosen: dict[str, Tensor] = {}
        taken: dict[int, str] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for key, name in keys.items():
            target, spec = targets[key], segments[name].spec
            if dtype_name(target.dtype) != spec.dtype or target.shape != spec.shape:
                mine = f"{dtype_name(target.dtype)}{list(target.shape)}"
                raise _mismatch(self._what, f"{key!r} is {spec.dtype}{list(spec.shape)} there, {mine} in the target")
            if taken.setdefault(id(target), name) != name:
                raise _mismatch(self._what, f"the target ties {key!r} to another tensor, the object does not")
            if chosen.setdefault(name, target) is not target:
                copies.append((chosen[name], target))
        return chosen, copies

    def _named(self, error: AtollError) -> AtollError:
        """The same error, with the reference in it."""
        ref = self._ref
        if isinstance(error, Gone):
            late = ref.expires_at <= time.time()
            why = f"it expired at {ref.expires}" if late else "it was withdrawn, or its publisher was started again"
            return Gone(
                f"Reference {ref.name} leads to nothing any more: {why}.",
                "Publish the tensors again, with a longer expires_s if they are fetched late.",
            )
        if isinstance(error, AuthError):
            return AuthError(
                f"Reference {ref.name} is refused there: its secret opens no such object.",
                "Use the reference as its publisher gave it.",
            )
        if isinstance(error, ServerUnreachable):
            return ServerUnreachable(
                f"Nobody serves reference {ref.name}: {error.message}",
                "What a process published ends with it: look whether it runs, and publish again; or let a server keep "
                "it, with publish(..., server=...).",
            )
        if isinstance(error, PartCorrupt | BadRequest | TransferStalled) and ref.name not in error.message:
            return type(error)(f"Reference {ref.name} cannot be fetched: {error.message}", error.remedy)
        return error


class _Bytes:
    """A sink for the head."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data


class _File:
    """A sink on disk."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, offset: int, data: memoryview) -> None:
        try:
            write_at(self._fd, data, offset)
        except OSError as error:  # as it is it would be taken for the network's
            raise disk_error(error) from error


def _targets(into: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """Name → tensor to be filled; tied names have the same one.

    Raises:
        UsageError: something in it cannot be filled.
    """
    given: nn.Module | Mapping[str, Any] = into
    if not isinstance(into, nn.Module | Mapping):
        raise UsageError(f"into is a {type(into).__name__}.", "Give a module, or a mapping name → tensor or array.")
    if not isinstance(into, nn.Module):
        given = {name: _writable(name, value) for name, value in into.items()}
    owners, aliases = named_tensors(given)
    return {**owners, **{alias: owners[owner] for alias, owner in aliases.items()}}


def _writable(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and _is_expanded(value):
        raise UsageError(f"The tensor {name!r} is expanded: its elements share memory.", "Give a clone of it.")
    if not isinstance(value, np.ndarray):
        return value
    if not value.flags.writeable:
        raise UsageError(f"The array {name!r} cannot be written to.", "Give a copy of it.")
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"The array {name!r} cannot be filled: {error}.", "Give a plain array of numbers.") from None


def _is_expanded(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(n > 1 and not stride for n, stride in pairs)


def _mismatch(what: str, how: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{what} does not fit: {how}.", "Give a target with the published names, dtypes and shapes, or leave into out."
    )
