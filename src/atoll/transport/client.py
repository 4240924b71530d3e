"""A worker's end of the HTTP interface: typed calls, parts pulled and pushed over a few connections.

Errors that the server names come back as the same classes; a network that fails becomes `ServerUnreachable` or
`TransferStalled`. Nothing is retried here but single parts: whoever calls knows what a failure means.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

import urllib3
from blake3 import blake3
from pydantic import BaseModel, ValidationError

from atoll.errors import (
    BY_CODE,
    AtollError,
    BadRequest,
    Busy,
    DiskFull,
    PartCorrupt,
    PeerError,
    ServerUnreachable,
    StoreError,
    TransferStalled,
    UsageError,
    VersionSkew,
)
from atoll.failpoints import failpoint
from atoll.tensors.chunks import CHUNK_BYTES
from atoll.tensors.layout import Layout, Part
from atoll.transport.tls import client_context
from atoll.wire import messages, routes

Reply = TypeVar("Reply", bound=BaseModel)

PART_ATTEMPTS = 4
"""A part that arrives damaged, or breaks off, is sent again alone, so often."""

_JSON = {"Content-Type": "application/json"}
_NETWORK_ERRORS = (urllib3.exceptions.HTTPError, OSError)


class Sink(Protocol):
    """Takes the bytes of a file at their offsets, from several threads."""

    def write(self, offset: int, data: memoryview) -> None: ...


class Counters:
    """Bytes and retries of a client, for status and summaries; written by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_up = 0
        self.bytes_down = 0
        self.retries = 0

    def add(self, *, up: int = 0, down: int = 0, retries: int = 0) -> None:
        with self._lock:
            self.bytes_up += up
            self.bytes_down += down
            self.retries += retries


class Http:
    """Connections to one server.

    Args:
        server: `http://host:port` or `https://host:port`.
        token: bearer token; sent with every request, never logged.
        ca: PEM file with the server's authority.
        connections: parallel connections for tensors.
        idle_timeout_s: a transfer that moves no byte for so long has failed.
    """

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        ca: str | None = None,
        connections: int = 2,
        idle_timeout_s: float = 60.0,
    ) -> None:
        url = urllib3.util.parse_url(server)
        if url.scheme not in ("http", "https") or not url.host:
            raise UsageError(
                f"{server!r} is not the address of a server.",
                "Write it as http://host:8512 or https://host:8512.",
            )
        self.server = f"{url.scheme}://{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}"
        self.counters = Counters()
        self.lease = ""
        self._connections = connections
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.idle_timeout_s = idle_timeout_s
        self._pool = urllib3.connection_from_url(
            self.server,
            maxsize=connections + 4,
            retries=False,
            blocksize=CHUNK_BYTES // 4,
            **({"ssl_context": client_context(ca)} if url.scheme == "https" else {}),
        )

    def close(self) -> None:
        self._pool.close()

    def resize(self, connections: int, idle_timeout_s: float) -> None:
        """Take over what the run says about connections, once it is known."""
        self._connections = connections
        self.idle_timeout_s = idle_timeout_s

    # -- control messages

    def get(self, path: str, reply: type[Reply]) -> Reply:
        """GET a typed message."""
        return self._read(self._request("GET", path), reply)

    def post(self, path: str, message: BaseModel, reply: type[Reply], *, timeout_s: float = 30.0) -> Reply:
        """POST a typed message and read the typed answer."""
        body = message.model_dump_json(exclude_defaults=True).encode()
        response = self._request("POST", path, body=body, timeout_s=timeout_s, headers=_JSON)
        return self._read(response, reply)

    def send(self, path: str, message: BaseModel) -> None:
        """POST a message whose answer has no body."""
        body = message.model_dump_json(exclude_defaults=True).encode()
        self._request("POST", path, body=body, headers=_JSON)

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        timeout_s: float = 30.0,
        headers: dict[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        try:
            response = self._pool.request(
                method,
                path,
                body=body,
                headers=self._all_headers(headers),
                timeout=urllib3.Timeout(connect=10.0, read=timeout_s),
            )
        except _NETWORK_ERRORS as error:
            raise self._network_error(error) from error
        if response.status >= 400:
            raise _problem(response.status, response.data)
        return response

    def _read(self, response: urllib3.BaseHTTPResponse, reply: type[Reply]) -> Reply:
        try:
            return reply.model_validate_json(response.data)
        except ValidationError as error:
            raise VersionSkew(
                f"{self.server} answered with something that is not a {reply.__name__}: {error.errors()[0]['msg']}.",
                "Look whether an Atoll server runs there, of the same version as this worker.",
            ) from error

    def _all_headers(self, more: dict[str, str] | None) -> dict[str, str]:
        lease = {routes.LEASE_HEADER: self.lease} if self.lease else {}
        return {**self._headers, **lease, **(more or {})}

    def _network_error(self, error: Exception) -> AtollError:
        if isinstance(error, urllib3.exceptions.SSLError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return ServerUnreachable(
                f"{self.server} cannot prove who it is: {error}.",
                "Set ATOLL_TLS_CA to a PEM file with the authority of its certificate.",
            )
        if isinstance(error, (urllib3.exceptions.ReadTimeoutError, TimeoutError)) and not isinstance(
            error, urllib3.exceptions.ConnectTimeoutError
        ):
            return TransferStalled(
                f"{self.server} moved no byte for {self.idle_timeout_s:g} s.",
                "Look at the network between the two.",
            )
        return ServerUnreachable(
            f"{self.server} does not answer ({_plain(error)}).",
            "Look whether the server runs and whether the address is right.",
        )

    # -- tensors

    def pull(
        self,
        path: str,
        layout: Layout,
        digests: Sequence[bytes],
        parts: Sequence[Part],
        sinks: Sequence[Sink],
        *,
        on_bytes: Callable[[int], None] | None = None,
        abort: threading.Event | None = None,
    ) -> None:
        """Fetch parts of a version by byte range into every sink; a part that is damaged is fetched again, alone.

        Args:
            path: of the version's bytes; it carries the digest, so it never means anything else.
            layout: of the version.
            digests: BLAKE3 of every part of the layout, by index.
            parts: those wanted.
            sinks: each gets the same bytes at their file offsets, whole elements at a time.

        Raises:
            Gone: the server no longer keeps the version; ask for the head again.
            TransferStalled, ServerUnreachable: the network; parts that are complete stay written.
        """

        def fetch(part: Part) -> None:
            self._pull_part(path, part, digests[part.index], sinks, on_bytes, abort)

        self._spread(fetch, parts, abort)

    def _pull_part(
        self,
        path: str,
        part: Part,
        digest: bytes,
        sinks: Sequence[Sink],
        on_bytes: Callable[[int], None] | None,
        abort: threading.Event | None,
    ) -> None:
        hasher = blake3()
        offset = part.start
        headers = self._all_headers({"Range": f"bytes={part.start}-{part.stop - 1}"})
        try:
            response = self._pool.request(
                "GET",
                path,
                headers=headers,
                preload_content=False,
                timeout=urllib3.Timeout(connect=10.0, read=self.idle_timeout_s),
            )
            try:
                if response.status >= 400:
                    raise _problem(response.status, response.read())
                while offset < part.stop:
                    data = response.read(min(CHUNK_BYTES, part.stop - offset))
                    if not data:
                        raise urllib3.exceptions.ProtocolError("the connection broke off")
                    hasher.update(data)
                    for sink in sinks:
                        sink.write(offset, memoryview(data))
                    offset += len(data)
                    self.counters.add(down=len(data))
                    if on_bytes:
                        on_bytes(len(data))
                    if abort is not None and abort.is_set():
                        raise UsageError("The transfer was aborted.")
            finally:
                if offset == part.stop:
                    response.drain_conn()
                    response.release_conn()
                else:
                    response.close()
        except _NETWORK_ERRORS as error:
            raise self._network_error(error) from error
        if hasher.digest() != digest:
            raise PartCorrupt(
                f"Part {part.index} from {self.server} arrived damaged {PART_ATTEMPTS} times.",
                "Look at the network.",
            )
        failpoint("pull.part")

    def push(
        self,
        path_of: Callable[[int], str],
        fd: int,
        parts: Sequence[Part],
        digests: Sequence[bytes],
        *,
        on_bytes: Callable[[int], None] | None = None,
        abort: threading.Event | None = None,
    ) -> None:
        """Send parts of the file `fd`, each followed by its BLAKE3; one that arrives damaged is sent again, alone."""

        def send(part: Part) -> None:
            self._push_part(path_of(part.index), fd, part, digests[part.index], on_bytes, abort)

        self._spread(send, parts, abort)

    def _push_part(
        self,
        path: str,
        fd: int,
        part: Part,
        digest: bytes,
        on_bytes: Callable[[int], None] | None,
        abort: threading.Event | None,
    ) -> None:
        def body() -> Iterator[bytes]:
            for offset in range(part.start, part.stop, CHUNK_BYTES):
                if abort is not None and abort.is_set():
                    raise UsageError("The transfer was aborted.")
                data = os.pread(fd, min(CHUNK_BYTES, part.stop - offset), offset)
                yield data
                self.counters.add(up=len(data))
                if on_bytes:
                    on_bytes(len(data))
            yield digest

        headers = self._all_headers(
            {
                "Content-Length": str(part.nbytes + routes.DIGEST_BYTES),
                "Content-Type": "application/octet-stream",
            }
        )
        try:
            response = self._pool.request(
                "PUT",
                path,
                body=body(),
                headers=headers,
                timeout=urllib3.Timeout(connect=self.idle_timeout_s, read=self.idle_timeout_s),
            )
        except _NETWORK_ERRORS as error:
            raise self._network_error(error) from error
        if response.status >= 400:
            raise _problem(response.status, response.data)
        failpoint("push.part")

    def _spread(self, work: Callable[[Part], None], parts: Sequence[Part], abort: threading.Event | None) -> None:
        """Run `work` for every part over the connections; the first lasting failure ends it, and is raised."""
        if not parts:
            return

        failed = threading.Event()

        def lane(part: Part) -> None:
            for attempt in range(1, PART_ATTEMPTS + 1):
                if failed.is_set():
                    return
                try:
                    work(part)
                    return
                except (PartCorrupt, ServerUnreachable, TransferStalled):
                    self.counters.add(retries=1)
                    if attempt == PART_ATTEMPTS:
                        failed.set()
                        raise
                except BaseException:
                    failed.set()
                    raise

        if len(parts) == 1:
            lane(parts[0])
            return
        with ThreadPoolExecutor(min(self._connections, len(parts)), thread_name_prefix="atoll-part") as pool:
            futures: list[Future[None]] = [pool.submit(lane, part) for part in parts]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception())]
            if errors:
                failed.set()
                for future in futures:
                    future.cancel()
                raise errors[0]


def _problem(status: int, body: bytes) -> AtollError:
    """The error that the server named, as the same class."""
    try:
        problem = messages.Problem.model_validate_json(body)
    except ValidationError:
        said = f"The server answered {status}: {body[:200].decode(errors='replace')!r}."
        if status in (502, 503, 504):  # a proxy in front of a server that is being started again
            return ServerUnreachable(said, "Look whether the server behind this address runs.")
        return PeerError(said)
    kind = BY_CODE.get(problem.code, BadRequest if status < 500 else PeerError)
    if issubclass(kind, StoreError) and kind is not DiskFull:
        kind = Busy  # its disk failed, not ours: it ends, and is there again
    error = kind(problem.message, problem.remedy)
    if problem.retry_after_s is not None:
        error.retry_after_s = problem.retry_after_s
    return error


def _plain(error: Exception) -> str:
    """The innermost cause of a urllib3 error, in a few words."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(cause) or type(cause).__name__
