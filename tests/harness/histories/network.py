"""A virtual network between a server and its sites: requests and answers are late, lost, repeated and reordered.

A site's `VirtualHttp` and `VirtualConnection` take the places of its connections; `answer` calls the operation of a
request at the server, with the messages as their bytes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import urllib3

from atoll.aggregation.check_arriving_parts import PartChecker
from atoll.errors import AtollError, BadRequest, Gone, PartCorrupt, StoreError
from atoll.protocol import messages, routes
from atoll.protocol.openapi import OPERATIONS, Operation
from atoll.protocol.read_message import framed
from atoll.protocol.served_versions import in_protocol, protocol_of
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.http.byte_routes import ByteRoutes, PartReceiver
from atoll.store.journal import journal_failed
from atoll.transport.http_client import Http
from atoll.transport.serve_range import problem
from harness.histories.virtual_loop import Killed, current_green, wait_for

Answer = tuple[int, bytes]

_ROUTES = [
    (operation, re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", operation.path)))
    for operation in OPERATIONS
    if not operation.path.startswith((routes.PAGE_FILE[:5], routes.OBJECTS, routes.TASKS, routes.SWARM))
]


@functools.lru_cache(4096)
def route(method: str, path: str) -> tuple[Operation, dict[str, Any]]:
    """The operation of a request, and the parameters in its path."""
    for operation, pattern in _ROUTES:
        found = pattern.fullmatch(path) if operation.method == method else None
        if found is not None:
            named = found.groupdict()
            return operation, {
                name: int(text) if text.isdigit() and name != "digest" else text for name, text in named.items()
            }
    raise BadRequest(f"There is no {method} {path}.")


class Request(NamedTuple):
    """A request of a site."""

    site: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


async def answer(served: ServedRun, request: Request) -> Answer:
    """Carry out one request, as the server's HTTP side does: a status and a body."""
    _, method, path, headers, body = request
    try:
        operation, arguments = route(method, path)
        arguments = dict(arguments)
        lease = Lease.parse(headers[routes.LEASE_HEADER]) if routes.LEASE_HEADER in headers else None
        if (failed := served.failure.failure_for(lease)) is not None:
            raise failed
        if operation.lease:
            arguments["lease"] = served.leases.require_lease(Lease.parse(headers.get(routes.LEASE_HEADER)))
        if isinstance(operation.request, type) and issubclass(operation.request, messages.Message):
            arguments["message"] = operation.request.model_validate_json(body)
        if operation.name == "put_part":
            result: Any = await _put_part(served, body=body, **arguments)
        elif operation.name == "get_version":
            return 206, _range_of(served, headers, **arguments)
        elif operation.name == "get_health":
            return 200, b"ok\n"
        else:
            result = await _method(served, operation.name)(**arguments)
    except AtollError as error:
        if isinstance(error, StoreError) and journal_failed(error):
            served.run.fail(error)
        refused = problem(error.code, error.message, error.remedy, error.retry_after_s)
        return refused.status, bytes(refused.body)  # type: ignore[arg-type]
    if result is None:
        return 204, b""
    protocol = protocol_of(operation, headers.get(routes.PROTOCOL_HEADER))
    if isinstance(result, tuple):  # a ticket, and the bytes of its version
        message, data = result
        return 200, bytes(framed(in_protocol(message, protocol, exclude_defaults=True), data))
    return 200, in_protocol(result, protocol)


def _method(served: ServedRun, name: str) -> Callable[..., Any]:
    owners = (_byte_routes(served), served.sites, served.tickets, served.updates, served.admin)
    return next(getattr(owner, name) for owner in owners if hasattr(owner, name))


@functools.lru_cache(2)
def _byte_routes(served: ServedRun) -> ByteRoutes:
    return ByteRoutes(served)


async def _put_part(served: ServedRun, lease: Lease, ticket: int, part: int, body: bytes) -> messages.Receipt | None:
    run, loop, receiver = served.run, asyncio.get_running_loop(), PartReceiver(served)
    row = run.store.tickets.get(ticket)
    served.leases.require_open(lease, ticket)
    parts = run.plan.fragments[row.fragment].update.parts
    if part >= len(parts):
        raise BadRequest(f"Part {part} does not exist.")
    nbytes = parts[part].nbytes
    run.require_space()
    served.updates.begins(lease.site, ticket, row.fragment)

    async def receive(arriving: PartChecker) -> bytes:
        await loop.run_in_executor(run.io, arriving.take, _Bytes(body[:nbytes]).fill)
        rest = body[nbytes:]
        if not arriving.complete or arriving.digest != rest[: routes.DIGEST_BYTES]:
            raise PartCorrupt(f"Part {part} arrived damaged.", "Send this part again.")
        return rest[routes.DIGEST_BYTES :]

    return await receiver.after_part(lease, ticket, await receiver.take_part(lease, row, part, receive))


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def fill(self, memory: memoryview) -> int:
        count = min(len(memory), len(self._left))
        memory[:count], self._left = self._left[:count], self._left[count:]
        return count


def _range_of(served: ServedRun, headers: Mapping[str, str], fragment: int, version: int, digest: str) -> bytes:
    start, last = map(int, headers["Range"].removeprefix("bytes=").split("-"))
    with served.run.store.versions.pin(fragment, version) as pin:
        if pin.row.digest != digest:
            raise Gone(f"Version {version} no longer has the digest {digest[:12]}.", "Download the newest version.")
        return os.pread(pin.fd, last + 1 - start, start)


# -- the wire


@dataclass
class Faults:
    """How bad a network is: probabilities for each request or answer, and the mean delay."""

    delay_s: float = 0.02
    lost: float = 0.0
    twice: float = 0.0
    flipped: float = 0.0


class Network:
    """Carries requests to the server that is there, and answers back.

    Args:
        chance: what is lost, late or repeated.
        serve: carries out a request that has arrived; raises `ConnectionError` where no server is there.

    Attributes:
        away: sites that are cut off.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, chance: random.Random, faults: Faults, serve: Callable[..., Any]
    ) -> None:
        self._loop, self._chance, self.faults, self._serve = loop, chance, faults, serve
        self.away: set[str] = set()

    def delay_s(self) -> float:
        return self._chance.expovariate(1 / self.faults.delay_s)

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> Answer:
        """Send a request of the calling site, and wait for the answer.

        Raises:
            TimeoutError, ConnectionError: there is none.
        """
        green = current_green()
        assert green is not None
        if green.process.killed:
            raise Killed
        answered = self._loop.create_future()
        sent = Request(green.process.name, method, path, headers, body)
        tasks = [self._loop.create_task(self._carry(sent, answered))]
        if self._chance.random() < self.faults.twice:  # a proxy repeats it
            unread = self._loop.create_future()
            tasks.append(self._loop.create_task(self._carry(sent, unread)))
        if not wait_for(answered, timeout_s):
            raise urllib3.exceptions.ReadTimeoutError(None, path, "timed out")  # type: ignore[arg-type]
        found: Answer = answered.result()
        return found

    async def _carry(self, request: Request, answered: asyncio.Future[Any]) -> None:
        faults, chance = self.faults, self._chance
        await asyncio.sleep(self.delay_s())
        if request.site in self.away or chance.random() < faults.lost:
            if chance.random() < 0.5:
                _fail(answered)
            return  # else the site waits until its call times out
        try:
            status, data = await self._serve(_flipped(request, chance, faults))
        except ConnectionError:
            _fail(answered)
            return
        await asyncio.sleep(self.delay_s())
        if request.site in self.away or chance.random() < faults.lost:
            if chance.random() < 0.5:
                _fail(answered)
            return
        if not answered.done():
            answered.set_result((status, data))


def _fail(answered: asyncio.Future[Any]) -> None:
    if not answered.done():
        answered.set_exception(ConnectionResetError("the connection was reset"))
        answered.exception()  # the site may be dead


def _flipped(request: Request, chance: random.Random, faults: Faults) -> Request:
    """Flip a bit of a part, now and then."""
    body = request.body
    if request.method != "PUT" or chance.random() >= faults.flipped:
        return request
    at = chance.randrange(min(64, len(body)))
    return request._replace(body=body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])


NETWORK: list[Network] = []
"""The network of the history that is played."""


class VirtualHttp(Http):
    """The connections of a site, over the virtual network."""

    def _new_pool(self) -> Any:
        return _NoPool()

    def _answer(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None, timeout_s: float
    ) -> tuple[int, bytearray]:
        status, data = NETWORK[-1].request(method, path, self.headers(headers), body or b"", timeout_s)
        return status, bytearray(data)


class _NoPool:
    def close(self) -> None:
        pass


def http_to(server: str, **_: Any) -> Http:
    return VirtualHttp(server)


class VirtualConnection:
    """A `PartConnection` over the virtual network."""

    def __init__(self, host: str, port: int, context: Any, idle_timeout_s: float, *_: Any) -> None:
        self._timeout_s, self.is_cut = idle_timeout_s, False
        self.on_move: Callable[[], None] = lambda: None

    def close(self) -> None:
        pass

    def cut(self) -> None:
        self.is_cut = True

    def put(
        self,
        path: str,
        headers: Mapping[str, str],
        fd: int,
        span: tuple[int, int],
        trailer: bytes,
        on_bytes: Callable[[int], None],
    ) -> tuple[int, bytearray]:
        body = os.pread(fd, span[1] - span[0], span[0]) + trailer
        status, data = NETWORK[-1].request("PUT", path, headers, body, self._timeout_s)
        on_bytes(span[1] - span[0])
        return status, bytearray(data)

    def get(
        self,
        path: str,
        headers: Mapping[str, str],
        most_bytes: int,
        room: Callable[[memoryview], memoryview] = lambda scratch: scratch,
    ) -> tuple[int, bytearray, Iterator[memoryview]]:
        status, data = NETWORK[-1].request("GET", path, headers, b"", self._timeout_s)
        if status >= 300:
            return status, bytearray(data), iter(())
        return status, bytearray(), _runs(data, room)


def _runs(data: bytes, room: Callable[[memoryview], memoryview]) -> Iterator[memoryview]:
    scratch, left = memoryview(bytearray(max(1, len(data)))), memoryview(data)
    while left:
        run = room(scratch[: len(left)])
        run[:], left = left[: len(run)], left[len(run) :]
        yield run
