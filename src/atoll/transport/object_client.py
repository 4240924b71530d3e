"""`publish` and `fetch` of `atoll.objects`: publish tensors from this process or at a server, and download them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from atoll.blobs.manifest import Manifest
from atoll.blobs.object_file import Contents, Stored, pack_object
from atoll.blobs.ways_to_send import ChunkSizes, Cut, cut_of
from atoll.config import Settings, variable_of
from atoll.config.bounds import CHUNK_BYTES, CHUNK_STEP_BYTES, IDLE_TIMEOUT_S, LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES
from atoll.errors import (
    AtollError,
    AuthError,
    BadRequest,
    Busy,
    Gone,
    PartCorrupt,
    SchemaMismatch,
    ServerUnreachable,
    TransferAborted,
    TransferStalled,
    UsageError,
    public_api,
)
from atoll.posix import read_at
from atoll.protocol import messages, routes
from atoll.runtime import no_gc
from atoll.tensors.chunks import Scatter
from atoll.tensors.dtypes import dtype_name, torch_dtype
from atoll.tensors.layout import Part
from atoll.tensors.lazy_tensors import LazyState
from atoll.tensors.module_tensors import Tensors, is_expanded, named_tensors
from atoll.tensors.payload import Packed
from atoll.tensors.reference import TensorRef
from atoll.transport.credential_store import authority_at
from atoll.transport.http_client import Counters, Http, http_to
from atoll.transport.object_server import LONGEST_S, ObjectHost, UnnamedFile, UnpublishedObject, nameless, outgoing
from atoll.transport.part_transfer import HttpTransfer, Memory, Sink
from atoll.transport.tls import ContextMaker
from atoll.transport.way_out import way_out

LOG = logging.getLogger("atoll")

LOOK_S = 0.05
"""Seconds between two checks of an abort event."""


def chunk_sizes(default: ChunkSizes | None = None) -> ChunkSizes:
    """Return the part sizes of published objects, in bytes.

    The environment variables ATOLL_WORKFLOW__TENSOR_PART_BYTES and ATOLL_WORKFLOW__ARRAY_PART_BYTES override `default`.

    Raises:
        ConfigError: a variable has an invalid size.
    """
    default = default or ChunkSizes()
    return ChunkSizes(
        _setting("workflow.tensor_part_bytes", default.tensor), _setting("workflow.array_part_bytes", default.np)
    )


def idle_timeout(given_s: float | None, default_s: float = IDLE_TIMEOUT_S) -> float:
    """Return the number of seconds without a byte after which a transfer fails.

    Use the first that is set: `given_s`, the environment variable ATOLL_NETWORK__IDLE_TIMEOUT_S, `default_s`.

    Raises:
        UsageError: `given_s` is not a positive finite number.
        ConfigError: the variable has an invalid value.
    """
    if given_s is None:
        return float(_setting("network.idle_timeout_s", default_s))
    if type(given_s) not in (int, float) or not 0 < given_s < math.inf:
        raise UsageError(
            f"idle_timeout_s is {given_s!r}, not a positive number.",
            "Give the number of seconds without a byte after which a transfer fails.",
        )
    return float(given_s)


def _setting(key: str, default: Any) -> Any:
    variable = variable_of(key)
    if variable not in os.environ:
        return default
    return Settings.read(environ={variable: os.environ[variable]}).at(key)


class Abort(Protocol):
    """An event that aborts a transfer, for example a `threading.Event`."""

    def is_set(self) -> bool:
        """Return whether to abort the transfer. Called every `LOOK_S` seconds."""
        ...


def object_http(
    ref: TensorRef,
    *,
    require_ip: Callable[[str], None] | None = None,
    context: ContextMaker | None = None,
) -> Http:
    """Return a client for the server that a reference names.

    The client sends the reference's secret, but not ATOLL_TOKEN: the reference may name a server that is not trusted.

    Args:
        ref: the reference.
        require_ip: for one of a swarm's workers, the check of its IP address (see `Http`). They connect to each other
            without a proxy. None: another server.
        context: returns the TLS context for a connection to a swarm's worker; None: one that trusts ATOLL_TLS_CA, or
            the authority of a credential of this machine for that server.
    """
    ca = os.environ.get("ATOLL_TLS_CA") or (authority_at(ref.server) if require_ip is None else None)
    http = Http(ref.server, ca=ca, require_ip=require_ip, context=context)
    http.secret = ref.secret
    return http


@contextmanager
def watched(parts: HttpTransfer, abort: Abort | None) -> Iterator[None]:
    """End the transfers of the client `parts` if `abort` is set while the `with` block runs.

    Raises:
        TransferAborted: `abort` is set already.
        UsageError: `abort` is not an event.
    """
    if abort is None:
        yield
        return
    if not hasattr(abort, "is_set"):
        raise UsageError(f"abort is of type {type(abort).__name__}, not an event.", "Pass a threading.Event().")
    if abort.is_set():
        raise TransferAborted("The transfer was aborted before it began.")
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_S):
            if abort.is_set():
                parts.break_off()
                return

    thread = threading.Thread(target=watch, name="atoll-abort", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# -- `atoll.objects.publish`: publish tensors from this process or through the server.
#
# ref = atoll.objects.publish({"w": w, "step": 7})                  # served by this process, on this machine only
# ref = atoll.objects.publish(model, server="http://host:8512")     # kept by the server after this process has ended
#
# with atoll.objects.Publisher("0.0.0.0", tls_cert=..., tls_key=...) as publisher:
#     ref = publisher.publish(model)                        # served by this process, to other machines


EXPIRES_S = 3600.0
CONNECTIONS = 2


@public_api
class Publisher:
    """Serves published tensors from this process. Use it in a `with` statement.

    Every process that has the reference, and can connect to this process, can fetch the tensors.

    Args:
        host: address to listen on. An address other than loopback needs TLS, unless `insecure` is True.
        port: port to listen on; 0 takes any free port.
        name: host name of this machine in the references. Default: `host`, or the machine's name if `host` is a
            wildcard.
        tls_cert: path of the PEM certificate.
        tls_key: path of the PEM private key, with mode 0600.
        insecure: whether to allow an address other than loopback without TLS.
        idle_timeout_s: seconds after which a receiver that reads no byte is disconnected. Default:
            `ATOLL_NETWORK__IDLE_TIMEOUT_S`, else 60.
        folder: folder for the unnamed files with the published bytes. Default: the folder of temporary files.

    Raises:
        ConfigError: the address needs TLS, or is not an address of this machine.
        PortInUse: the port is in use.
    """

    @public_api
    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        name: str | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        insecure: bool = False,
        idle_timeout_s: float | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self._host = ObjectHost(
            host,
            port,
            name=name,
            tls_cert=Path(tls_cert) if tls_cert else None,
            tls_key=Path(tls_key) if tls_key else None,
            insecure=insecure,
            idle_timeout_s=idle_timeout(idle_timeout_s),
            folder=Path(folder) if folder else None,
        )

    @property
    def port(self) -> int:
        """The port that the publisher listens on."""
        return self._host.port

    @public_api
    def publish(self, tensors: Any, *, chunk_bytes: int | None = None, expires_s: float = EXPIRES_S) -> TensorRef:
        """Publish tensors with this publisher. Arguments, result and errors are those of `atoll.objects.publish`."""
        return self.publish_packed(pack_object(tensors), chunk_bytes=chunk_bytes, expires_s=expires_s)

    def publish_packed(
        self, packed: Packed, *, chunk_bytes: int | None = None, expires_s: float = EXPIRES_S
    ) -> TensorRef:
        """Publish an object that `pack_object` returned. Other arguments, result and errors are those of `publish`."""
        _require_objects()
        return self._host.publish(packed, chosen_cut(packed, chunk_bytes), expires_s=_lasting(expires_s))

    @public_api
    def withdraw(self, ref: TensorRef) -> bool:
        """Stop serving an object and free its disk space. Running downloads of it end with an error.

        Returns:
            False if this publisher does not serve the object.
        """
        return self._host.withdraw(ref)

    def close(self) -> None:
        """Withdraw all objects, and stop listening. Idempotent."""
        self._host.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@public_api
def publish(
    tensors: Any,
    *,
    chunk_bytes: int | None = None,
    expires_s: float = EXPIRES_S,
    server: str | None = None,
    abort: Abort | None = None,
    idle_timeout_s: float | None = None,
) -> TensorRef:
    """Publish tensors, and return a reference, with which another process can fetch them (`atoll.objects.fetch`).

    The tensors are copied to disk in pieces of 2 MiB. Afterwards Atoll keeps no tensor in memory.

    Args:
        tensors: a dict of tensors; or any nested dicts, lists and tuples of tensors, arrays, references and plain
            values; or a module, to publish its state.
        chunk_bytes: size of a part in bytes, 64 KiB to 16 MiB, a multiple of 64. Each part is checked by itself, and
            sent again if necessary. 0: one message carries the whole object, which must not exceed 16 MiB. Default:
            `ATOLL_WORKFLOW__TENSOR_PART_BYTES` for torch tensors and `ATOLL_WORKFLOW__ARRAY_PART_BYTES` for NumPy
            arrays, else 8 MiB.
        expires_s: seconds until the object expires. A server may expire it earlier.
        server: address of an Atoll server that is to keep the object, for receivers that cannot connect to this
            process. By default, this process serves the object on loopback. To serve it on another address, use
            `Publisher`.
        abort: event that ends the upload to a server.
        idle_timeout_s: seconds without a byte after which the upload fails. Default:
            `ATOLL_NETWORK__IDLE_TIMEOUT_S`, else 60.

    Returns:
        The reference. Only processes that have it can fetch the tensors.

    Raises:
        UsageError: a value cannot be published; the message names it.
        TransferAborted: `abort` was set.
        ServerUnreachable, AuthError, Busy, DiskFull, BadRequest: the server did not accept the object.
    """
    expires_s = _lasting(expires_s)
    idle_timeout_s = idle_timeout(idle_timeout_s)
    if server is None:
        return _own().publish(tensors, chunk_bytes=chunk_bytes, expires_s=expires_s)
    _require_objects()
    packed = pack_object(tensors)
    draft = outgoing(packed, chosen_cut(packed, chunk_bytes), None, "The object")
    del tensors, packed
    try:
        return send(draft, server, expires_s=expires_s, idle_timeout_s=idle_timeout_s, abort=abort)
    finally:
        draft.close()


def send(
    draft: UnpublishedObject,
    server: str,
    *,
    expires_s: float,
    idle_timeout_s: float,
    abort: Abort | None = None,
    key: str | None = None,
) -> TensorRef:
    """Upload a draft (an object that is written to disk) to a server, and return its reference.

    The errors are those of `publish`.

    Args:
        draft, server, expires_s, idle_timeout_s, abort: as for `publish`.
        key: an id of this upload, for repeated attempts: the server drops what an earlier one has left there.
    """
    http = http_to(server)
    parts, manifest = HttpTransfer(http, CONNECTIONS, idle_timeout_s), draft.manifest
    try:
        opening = messages.ObjectOpen(
            head_bytes=manifest.cuts.head_bytes,
            nbytes=manifest.nbytes,
            part_bytes=manifest.cuts.part_bytes,
            inline=draft.inline,
            expires_s=expires_s,
            key=key,
        )
        opened = http.post(routes.OBJECTS, opening, messages.ObjectOpened, timeout_s=idle_timeout_s)
        http.secret, path = opened.secret, routes.OBJECT.format(object=opened.object)
        try:
            with watched(parts, abort):
                parts.push(
                    routes.parts_of_object(opened.object), draft.fd, manifest.cuts.parts(), manifest.part_digests
                )
            complete = routes.OBJECT_COMPLETE.format(object=opened.object)
            http.send(complete, messages.ObjectComplete(digest=manifest.id), timeout_s=idle_timeout_s)
        except BaseException:
            _forget(http, path)
            raise
    finally:
        parts.close()
        http.close()
    expires_at = int(time.time() + opened.expires_s)
    return http.reference(opened.object, opened.secret, manifest.id, expires_at)


@public_api
def withdraw(ref: TensorRef | str) -> bool:
    """Delete a published object at the process or server that keeps it. Running downloads of it end with an error.

    Returns:
        False if the object no longer existed.

    Raises:
        AuthError: the reference's secret does not belong to the object.
        ServerUnreachable: the server of the reference does not answer.
    """
    ref = ref if isinstance(ref, TensorRef) else TensorRef.parse(ref)
    if _publisher is not None and _publisher[0] == os.getpid() and _publisher[1].withdraw(ref):
        return True
    http = object_http(ref)
    try:
        http.delete(routes.OBJECT.format(object=ref.object), timeout_s=min(30.0, idle_timeout(None)))
        return True
    except AtollError as error:
        if error.code != "gone":
            raise
        return False
    finally:
        http.close()


def _require_objects() -> None:
    policy = way_out().policy
    if policy is not None and not policy.metadata.objects:
        raise policy.refusal("metadata.objects", "no object may be published")


def _forget(http: Http, path: str) -> None:
    """Delete an incomplete object at the server, so that it does not take space until it expires."""
    with contextlib.suppress(AtollError):  # if this fails, the server drops the incomplete object later
        http.delete(path, timeout_s=2.0)


_publisher: tuple[int, Publisher] | None = None
_lock = threading.Lock()


def _own() -> Publisher:
    """Return this process's publisher on loopback. Create it at the first use in each process, also after a fork."""
    global _publisher
    with _lock:
        if _publisher is None or _publisher[0] != os.getpid():
            publisher = Publisher()
            _publisher = (os.getpid(), publisher)
            atexit.register(publisher.close)
        return _publisher[1]


def chosen_cut(packed: Packed, chunk_bytes: int | None) -> Cut:
    """Return how to divide an object into parts: by `chunk_bytes` or, if it is None, by environment variables.

    Raises:
        UsageError: `chunk_bytes` is invalid.
        ConfigError: one of the environment variables (see `chunk_sizes`) has an invalid size.
    """
    if chunk_bytes is None:
        cut = cut_of(packed, chunk_sizes())
        if cut.too_large:
            LOG.warning("the tensors have %d bytes, too many for one message, so they are sent in parts", cut.too_large)
        return cut
    if chunk_bytes == 0:
        return Cut(CHUNK_BYTES, inline=True)
    if type(chunk_bytes) is not int or not LEAST_CHUNK_BYTES <= chunk_bytes <= MOST_CHUNK_BYTES:
        raise UsageError(
            f"chunk_bytes is {chunk_bytes!r}, which is not a valid size.",
            f"Give {LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES} bytes, or 0 for no parts.",
        )
    if chunk_bytes % CHUNK_STEP_BYTES:
        raise UsageError(
            f"chunk_bytes is {chunk_bytes}, which is not a multiple of {CHUNK_STEP_BYTES}.",
            f"Use {chunk_bytes // CHUNK_STEP_BYTES * CHUNK_STEP_BYTES}.",
        )
    return Cut(chunk_bytes)


def _lasting(expires_s: float) -> float:
    if not isinstance(expires_s, int | float) or not 0 < expires_s < math.inf:
        raise UsageError(f"expires_s is {expires_s!r}.", "Give the number of seconds to keep the object, above 0.")
    return min(float(expires_s), LONGEST_S)


# -- `atoll.objects.fetch`: download published tensors into new memory, to disk, or in place.
#
#     state = atoll.objects.fetch(ref)                       # into new memory
#     state = atoll.objects.fetch(ref, to_disk=True)         # to disk; a tensor is loaded at its first use
#     atoll.objects.fetch(ref, into=model)                   # in place, without a second copy
#
# `fetch` downloads the manifest, and compares its digest with the reference. Then it downloads and checks the head of
# the object, which has names, dtypes and shapes. Only then does it allocate memory for the tensors. If a connection
# breaks, `fetch` keeps the complete parts, and requests only the others again.


PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt to reach an object. After an attempt that brought bytes, start from the first."""

T = TypeVar("T")


@public_api
def fetch(
    ref: TensorRef | str | None,
    *,
    idle_timeout_s: float | None = None,
    optional: bool = False,
    abort: Abort | None = None,
    to_disk: bool | str | os.PathLike[str] = False,
    into: nn.Module | Mapping[str, Any] | None = None,
) -> Any:
    """Download a published object from the process that serves it.

    Args:
        ref: the reference that `atoll.objects.publish` returned, or its text.
        idle_timeout_s: seconds without a byte after which a connection fails. Default:
            `ATOLL_NETWORK__IDLE_TIMEOUT_S`, else 60.
        optional: whether to return None if `ref` is None, if the object has expired or was withdrawn, or if the process
            that serves it does not answer.
        abort: event that ends the transfer.
        to_disk: True, or a folder, to download to an unnamed file, and read each tensor at its first use. The file is
            deleted with the last value that uses it. A flat dict of tensors becomes a `LazyState`. In any other object,
            each tensor becomes a `LazyTensor`.
        into: a module, or a mapping name → tensor or array, with exactly the published names, dtypes and shapes. It is
            filled in place and returned. If the transfer fails, it may be partly filled.

    Returns:
        The published object with the same structure: torch tensors as torch tensors, NumPy arrays as NumPy arrays.

    Raises:
        Gone: the object has expired or was withdrawn.
        AuthError: the reference's secret does not belong to the object.
        ServerUnreachable, TransferStalled: the server of the reference does not answer.
        TransferAborted: `abort` was set.
        PartCorrupt, BadRequest: the data do not match the reference, or are not an object.
        SchemaMismatch: the object does not fit into `into`.
        DiskFull, StoreError: the disk of this machine is full or fails.
    """
    if ref is None:
        if optional:
            return None
        raise UsageError("fetch got None instead of a reference.", "If there may be no reference, pass optional=True.")
    if into is not None and to_disk:
        raise UsageError("fetch got both into and to_disk.", "Use only one of them.")
    ref = ref if isinstance(ref, TensorRef) else TensorRef.parse(ref)
    idle_timeout_s = idle_timeout(idle_timeout_s)
    folder = None if isinstance(to_disk, bool) else Path(to_disk)
    with no_gc():
        target = None if into is None else _targets(into)
    try:
        with _Fetching(ref, idle_timeout_s, abort) as fetching:
            try:
                fetching.begin(() if optional else PAUSES_S)
            except ServerUnreachable:
                if optional:
                    return None
                raise
            if target is not None:
                fetching.fill(target)
                return into
            return fetching.to_disk(folder) if to_disk else fetching.to_memory()
    except Gone:  # raised at any moment, because an object may expire while it is downloaded
        if optional:
            return None
        raise


def fetch_stored(ref: TensorRef, *, idle_timeout_s: float, abort: Abort) -> Stored:
    """Download an object to an unnamed file, and return a handle that loads it later. Errors are those of `fetch`."""
    with _Fetching(ref, idle_timeout_s, abort) as fetching:
        fetching.begin()
        return fetching.stored(None)


def fetch_lazily(ref: TensorRef, folder: Path | None, *, idle_timeout_s: float, counters: Counters) -> Any:
    """Download an object to an unnamed file, and return it with tensors that are read at their first use.

    Errors are those of `fetch`.

    Args:
        ref: the reference.
        folder: folder of the file; None for the folder of temporary files.
        idle_timeout_s: seconds without a byte after which a connection fails.
        counters: counters to which the received bytes are added.
    """
    with _Fetching(ref, idle_timeout_s, None, counters) as fetching:
        fetching.begin()
        return fetching.to_disk(folder)


class _Fetching:
    """Downloads one object: into new memory, into existing tensors, or to an unnamed file."""

    def __init__(
        self, ref: TensorRef, idle_timeout_s: float, abort: Abort | None, counters: Counters | None = None
    ) -> None:
        self._ref, self._abort, self._idle_timeout_s = ref, abort, idle_timeout_s
        self._what = f"Object {ref.name}"
        self._http = object_http(ref)
        self._http.counters = counters or self._http.counters
        self._parts = HttpTransfer(self._http, CONNECTIONS, idle_timeout_s)
        self._manifest: Manifest
        self._inline: bytes | None = None
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

    def begin(self, pauses: Sequence[float] = PAUSES_S) -> None:
        """Download and check the object's manifest and its head, which describes the tensors.

        Args:
            pauses: seconds before each further attempt, if the server does not answer or is busy.
        """
        path = routes.OBJECT.format(object=self._ref.object)
        with watched(self._parts, self._abort):
            body = self._patiently(lambda: self._parts.read(path, routes.MANIFEST_BYTES), pauses)
            message = messages.BlobManifest.read(body, self._what)
            del body  # it may be as large as the object
            self._manifest = message.manifest()
            self._manifest.require_object(self._what)
            self._manifest.require_id(self._ref.digest, self._what)
            self._inline = message.inline_bytes(self._manifest, self._what)
        cuts = self._manifest.cuts
        head = _Bytes(cuts.head_bytes)
        self._pull([cuts.part(index) for index in range(cuts.head_count)], [head])
        self._contents = Contents.read(head.data, cuts, self._what)

    def to_memory(self) -> Any:
        """Download the object into new memory, and return it.

        If it has values of a user's own types, download it to an unnamed file first.
        """
        if self._contents.streams:
            return self.stored(None).tree()
        specs = (segment.spec for segment in self._contents.layout.segments)
        try:
            tensors = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in specs}
        except (RuntimeError, MemoryError) as error:
            raise UsageError(
                f"There is not enough memory for {self._what} ({self._manifest.nbytes} bytes).",
                "Fetch it with the argument to_disk=True.",
            ) from error
        self._scatter(tensors)
        return self._contents.tree({**tensors, **self._contents.inline}.__getitem__)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Download the object into the existing tensors in `targets`: name → tensor."""
        with no_gc():
            chosen, copies = self._assign(targets)
        self._scatter(chosen)
        for name, source in self._contents.inline.items():
            chosen[name].copy_(source)
        for source, target in copies:
            target.copy_(source)

    def to_disk(self, folder: Path | None) -> Any:
        """Download the object to an unnamed file, and return it with tensors that are read at their first use."""
        stored = self.stored(folder)
        keys = self._contents.by_key()
        if keys is not None:
            return LazyState(stored.handle, {key: stored.segments[name] for key, name in keys.items()})
        return self._contents.tree(stored.lazy.__getitem__)

    def stored(self, folder: Path | None) -> Stored:
        """Download the object to an unnamed file, and return a handle of the file."""
        fd = nameless(folder)
        try:
            file = UnnamedFile(fd, folder)
            self._pull(self._data_parts(), [file])
            file.write(self._manifest.nbytes, memoryview(self._contents.inline_bytes))
        except BaseException:
            os.close(fd)
            raise
        return Stored(self._contents, lambda offset, memory: read_at(fd, memory, offset), lambda: os.close(fd))

    # -- bytes

    def _data_parts(self) -> list[Part]:
        cuts = self._manifest.cuts
        return [cuts.part(index) for index in range(cuts.head_count, cuts.count)]

    def _scatter(self, tensors: Tensors) -> None:
        with no_gc():
            scatter = Scatter(self._contents.layout, tensors)
        self._pull(self._data_parts(), [], scatter)

    def _pull(self, parts: Sequence[Part], sinks: Sequence[Sink], into: Memory | None = None) -> None:
        """Download parts, and retry until all are complete. If the manifest contains the bytes, copy them from it."""
        inline = self._inline
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
                    self._manifest.part_digests,
                    [part for part in parts if part.index not in done],
                    sinks,
                    into=into,
                    on_part=lambda part: done.add(part.index),
                ),
                PAUSES_S,
            )

    def _patiently(self, work: Any, pauses: Sequence[float]) -> Any:
        """Call `work`. If the server does not answer or is busy, call `work` again after a pause.

        Raise the error after the last of `pauses`, or when the pauses add up to the idle timeout. After an attempt that
        received bytes, start with the first pause again.
        """
        remaining, bytes_before = list(pauses), self._http.counters.bytes_down
        waited_s = 0.0
        while True:
            try:
                return work()
            except (ServerUnreachable, Busy):
                if self._http.counters.bytes_down > bytes_before:
                    remaining, waited_s, bytes_before = list(pauses), 0.0, self._http.counters.bytes_down
                if not remaining or waited_s >= self._idle_timeout_s:
                    raise
                pause_s = remaining.pop(0)
                until_s = time.monotonic() + pause_s
                while time.monotonic() < until_s and not (self._abort is not None and self._abort.is_set()):
                    time.sleep(min(LOOK_S, pause_s))
                waited_s += pause_s

    # -- in place

    def _assign(self, targets: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Choose the target tensor for each tensor in the file.

        Returns:
            Name in the file → target tensor; and the copies (source, target) to make after the download. A copy is
            needed if two names are tied (one tensor) in the object, but not in the target.

        Raises:
            SchemaMismatch: names, dtypes, shapes or ties differ; the message names the first difference.
        """
        keys = self._contents.by_key()
        if keys is None:
            raise SchemaMismatch(f"{self._what} is not a flat dict of tensors.", "Omit the argument into=….")
        for one, other, where in ((targets, keys, "only the target has"), (keys, targets, "only the object has")):
            lacking = next((name for name in one if name not in other), None)
            if lacking is not None:
                raise _mismatch(self._what, f"{where} the tensor {lacking!r}")
        segments = self._contents.segments
        chosen: dict[str, Tensor] = {}
        name_of_target: dict[int, str] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for key, name in keys.items():
            target, spec = targets[key], segments[name].spec
            if dtype_name(target.dtype) != spec.dtype or target.shape != spec.shape:
                target_type = f"{dtype_name(target.dtype)}{list(target.shape)}"
                object_type = f"{spec.dtype}{list(spec.shape)}"
                raise _mismatch(self._what, f"{key!r} is {object_type} in the object, {target_type} in the target")
            if name_of_target.setdefault(id(target), name) != name:
                raise _mismatch(self._what, f"the target ties {key!r} to another tensor, but the object does not")
            if chosen.setdefault(name, target) is not target:
                copies.append((chosen[name], target))
        return chosen, copies

    def _named(self, error: AtollError) -> AtollError:
        """Return an error of the same class as `error`, with a message that names the object's reference."""
        ref = self._ref
        if isinstance(error, Gone):
            late = ref.expires_at <= time.time()
            why = f"it expired at {ref.expires}" if late else "it was withdrawn, or its publisher was restarted"
            return Gone(
                f"Reference {ref.name} is no longer valid: {why}.",
                "Publish the tensors again. Pass a longer expires_s if they are fetched late.",
            )
        if isinstance(error, AuthError):
            return AuthError(
                f"The publisher refuses the secret of reference {ref.name}.",
                "Use the reference exactly as its publisher gave it.",
            )
        if isinstance(error, ServerUnreachable):
            return ServerUnreachable(
                f"The publisher of reference {ref.name} does not answer: {error.message}",
                "An object exists only while its publisher runs. Start the publisher again, and publish again. Or let "
                "the server keep the object: publish(..., server=...).",
            )
        if isinstance(error, PartCorrupt | BadRequest | TransferStalled) and ref.name not in error.message:
            return type(error)(f"Reference {ref.name} cannot be fetched: {error.message}", error.remedy)
        return error


class _Bytes:
    """A destination of bytes in memory, for the head of an object (the description of its tensors)."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data


def _targets(into: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return name → tensor to fill with downloaded values. Tied names map to the same tensor.

    Raises:
        UsageError: `into` is neither a module nor a mapping, or one of its values cannot be filled.
    """
    targets: nn.Module | Mapping[str, Any] = into
    if not isinstance(into, nn.Module | Mapping):
        raise UsageError(
            f"into is of type {type(into).__name__}.", "Pass a module, or a mapping name → tensor or array."
        )
    if not isinstance(into, nn.Module):
        targets = {name: _writable(name, value) for name, value in into.items()}
    owners, aliases = named_tensors(targets)
    return {**owners, **{alias: owners[owner] for alias, owner in aliases.items()}}


def _writable(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and is_expanded(value):
        raise UsageError(
            f"The tensor {name!r} was made by expand(), so its elements share memory.", "Pass a clone of it."
        )
    if not isinstance(value, np.ndarray):
        return value
    if not value.flags.writeable:
        raise UsageError(f"The array {name!r} is read-only.", "Pass a copy of it.")
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"The array {name!r} cannot be filled: {error}.", "Pass a plain array of numbers.") from None


def _mismatch(what: str, how: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{what} does not fit: {how}.", "Pass a target with the object's names, dtypes and shapes, or omit into=…."
    )
