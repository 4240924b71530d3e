"""What workers of a swarm pull from each other and serve to each other: versions, outer states and updates.

Variables of the environment say where this worker listens, `ATOLL_PEER_HOST` and `ATOLL_PEER_PORT`, under which name
others reach it, `ATOLL_PEER_NAME`, and which certificate it shows, `ATOLL_PEER_TLS_CERT` and `ATOLL_PEER_TLS_KEY`.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.check_arriving_parts import Inspection
from atoll.aggregation.plan import Plan
from atoll.blobs.manifest import Cuts, Manifest, state_id
from atoll.errors import UNPULLED, AtollError, ConfigError, Gone, PartCorrupt, PortInUse
from atoll.posix import write_at
from atoll.protocol import messages, routes
from atoll.protocol.swarm_messages import Collect, Hold, Source
from atoll.store.file_slots import SPOOL, STATE, VERSION, FileShape, Slot, disk_error, region_digest
from atoll.tensors.layout import PART_BYTES, Layout, Part
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import Counters, Http
from atoll.transport.object_client import object_http
from atoll.transport.object_server import ObjectHost, Ranges
from atoll.transport.part_transfer import HttpTransfer
from atoll.transport.tls import is_loopback
from atoll.worker.exchange.base_and_outbox import Outbox
from atoll.worker.log_lines import told

CONNECTIONS = 2


def open_host(site: str, server_host: str, idle_timeout_s: float) -> ObjectHost:
    """Listen for the other workers.

    Raises:
        ConfigError: the run's server is on another machine, and no variable says where others reach this worker; or
            the address needs TLS, or is not this machine's. PortInUse: another process has the port.
    """
    host = os.environ.get("ATOLL_PEER_HOST")
    if host is None and not is_loopback(server_host):
        raise ConfigError(
            f"Worker {site} joins a swarm at {server_host}, and nothing says where the other workers reach it.",
            "Set ATOLL_PEER_HOST (0.0.0.0 listens everywhere), ATOLL_PEER_PORT, and ATOLL_PEER_TLS_CERT and "
            "ATOLL_PEER_TLS_KEY, or ATOLL_PEER_INSECURE=1 if the network is your own.",
        )
    try:
        return ObjectHost(
            host or "127.0.0.1",
            _port(),
            name=os.environ.get("ATOLL_PEER_NAME"),
            tls_cert=_path("ATOLL_PEER_TLS_CERT"),
            tls_key=_path("ATOLL_PEER_TLS_KEY"),
            insecure=os.environ.get("ATOLL_PEER_INSECURE", "").lower() in ("1", "true", "yes", "on"),
            idle_timeout_s=idle_timeout_s,
            folder=None,
        )
    except (ConfigError, PortInUse) as error:
        raise type(error)(
            f"Worker {site} cannot listen for the others: {error.message}",
            "Set ATOLL_PEER_HOST to an address of this machine, or 0.0.0.0, ATOLL_PEER_PORT to a free port, and "
            "ATOLL_PEER_TLS_CERT and ATOLL_PEER_TLS_KEY, or ATOLL_PEER_INSECURE=1 if the network is your own.",
        ) from error


def _port() -> int:
    text = os.environ.get("ATOLL_PEER_PORT", "0")
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise ConfigError(f"ATOLL_PEER_PORT is {text!r}.", "Give a port, or 0 for any free one.")
    return int(text)


def _path(variable: str) -> Path | None:
    text = os.environ.get(variable)
    return Path(text) if text else None


class SlotWriter:
    """Writes what is pulled into a slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at a byte offset of the slot; a failing disk raises `StoreError`."""
        try:
            with self._slot.one_writes:
                write_at(self._slot.fd, data, offset)
        except OSError as error:
            raise disk_error(error, self._slot.path) from error


@contextmanager
def connected(text: str, idle_timeout_s: float, counters: Counters) -> Iterator[tuple[TensorRef, HttpTransfer]]:
    """Connect to the worker that serves a reference, for as long as the block lasts.

    Args:
        counters: count the bytes.
    """
    ref = TensorRef.parse(text)
    http = object_http(ref)
    http.counters = counters
    parts = HttpTransfer(http, CONNECTIONS, idle_timeout_s)
    try:
        yield ref, parts
    finally:
        parts.close()
        http.close()


# -- What a worker serves to others: its updates, and the versions that it holds.


AGAIN_S = (0.5, 1.0, 2.0)
"""Seconds before a worker that was not reached is tried again."""
PROBE_S = 10.0
"""How long a probe waits for its answer."""


class PeerServer:
    """Serves files of this worker, under references that the server passes on.

    Args:
        counters: count the bytes that others pull.
        ca: PEM file with the authority of other workers' certificates.

    Attributes:
        served: bytes that others have pulled.
    """

    def __init__(self, host: ObjectHost, counters: Counters, ca: str | None) -> None:
        self._host, self._counters, self._ca = host, counters, ca
        self._lock = threading.Lock()
        self._updates: dict[int, tuple[str, TensorRef]] = {}  # fragment → digest and reference
        self.served = 0
        self._watching: dict[int, Callable[[int], None]] = {}  # fragment → is told of its update's bytes

    @property
    def address(self) -> str:
        """Where other workers reach this one."""
        return self._host.address

    def _count(self, count: int) -> None:
        self.served += count
        self._counters.add(up=count)

    def serve(self, fd: int, manifest: Manifest) -> TensorRef:
        """As `ObjectHost.serve`."""
        return self._host.serve(fd, manifest, self._count)

    def withdraw(self, ref: TensorRef) -> None:
        """Stop serving it."""
        with contextlib.suppress(AtollError):
            self._host.withdraw(ref)

    def offer(self, fragment: int, outbox: Outbox, on_bytes: Callable[[int], None]) -> TensorRef:
        """Serve the update of an outbox, until another is offered or `retract` is called; report what others pull."""
        self._watching[fragment] = on_bytes

        def count(nbytes: int) -> None:
            self._count(nbytes)
            self._watching[fragment](nbytes)

        note = outbox.note
        assert note is not None
        with self._lock:
            known = self._updates.get(fragment)
            if known is not None and known[0] == note.digest:
                return known[1]
        self.retract(fragment)
        digests = [bytes.fromhex(text) for text in note.part_digests]
        ref = self._host.serve(outbox.fd, Manifest.of_layout(outbox.layout, digests), count)
        with self._lock:
            self._updates[fragment] = note.digest, ref
        return ref

    def retract(self, fragment: int) -> None:
        """Stop serving the update: the outbox is about to change."""
        with self._lock:
            known = self._updates.pop(fragment, None)
        if known is not None:
            self.withdraw(known[1])

    @contextlib.contextmanager
    def connected(self, text: str, idle_timeout_s: float) -> Iterator[tuple[TensorRef, Ranges]]:
        """Open what a reference names: a file of this worker's own, or connections to the worker that serves it."""
        ref = TensorRef.parse(text)
        own = self._host.opened(ref, lambda nbytes: self._read(ref, nbytes)) if ref.server == self.address else None
        if own is None:
            with connected(text, idle_timeout_s, self._counters) as reached:
                yield reached
            return
        try:
            yield ref, own
        finally:
            own.close()

    def _read(self, ref: TensorRef, nbytes: int) -> None:
        """Report that this worker itself reads the update that it offers."""
        with self._lock:
            at = next((fragment for fragment, (_, mine) in self._updates.items() if mine.object == ref.object), None)
        if at is not None:
            self._watching[at](nbytes)

    def in_order(self, sources: Sequence[str]) -> list[str]:
        """Sort references to one version: this worker's own first, then the others at random."""
        return sorted(sources, key=lambda text: (TensorRef.parse(text).server != self.address, random.random()))

    def why_unreached(self, address: str, wait: Callable[[float], bool]) -> str:
        """Try to reach a worker. Return why it was not reached; empty if it was, or if `wait` returns true."""
        why = ""
        for pause_s in (*AGAIN_S, 0.0):
            try:
                with contextlib.closing(Http(address, ca=self._ca)) as http:
                    http.reach(routes.HEALTH, timeout_s=PROBE_S)
                return ""
            except AtollError as error:
                why = told(error, 300)
                if wait(pause_s):
                    return ""
        return why

    def close(self) -> None:
        """Stop listening, and withdraw everything that is served. Idempotent."""
        self._host.close()


# -- What a worker pulls from others, and checks: versions with their outer states, and updates.


@dataclass(frozen=True)
class Version:
    """A complete version, with its outer state.

    Attributes:
        state: None if there is no outer state yet.
        state_digests: BLAKE3 of the regions of the outer state.
        state_parts: BLAKE3 of the parts in which the outer state travels; empty if they are not known.
        source: where others pull it; None while it is not served.
    """

    fragment: int
    version: int
    digest: str
    slot: Slot
    state: Slot | None
    part_digests: tuple[bytes, ...]
    state_digests: tuple[bytes, ...]
    state_parts: tuple[bytes, ...] = ()
    source: Source | None = None

    def slots(self) -> list[tuple[str, Slot]]:
        """Return the kinds of its files, and the files."""
        return [(VERSION, self.slot), *([(STATE, self.state)] if self.state is not None else [])]


@dataclass(frozen=True)
class Spool:
    """An update that was collected: its slot, and BLAKE3 of each of its parts."""

    fragment: int
    slot: Slot
    part_digests: tuple[bytes, ...]

    def slots(self) -> list[tuple[str, Slot]]:
        """Return the kind of its file, and the file."""
        return [(SPOOL, self.slot)]


def state_cuts(shape: FileShape) -> Cuts:
    """Return where an outer state is cut to travel: every 16 MiB."""
    return Cuts(0, shape.nbytes, PART_BYTES)


class PeerTransfers:
    """Pulls what one worker is to have.

    Args:
        http: to the server.
        peer_server: has what this worker serves itself.
        on_bytes: called with the number of bytes that came.
    """

    def __init__(
        self, plan: Plan, http: Http, peer_server: PeerServer, idle_timeout_s: float, on_bytes: Callable[[int], None]
    ) -> None:
        self._plan, self._http, self._peer_server, self._move = plan, http, peer_server, on_bytes
        self._idle_timeout_s = idle_timeout_s
        self._inspections = [Inspection(fragment.update, plan.codecs) for fragment in plan.fragments]

    def version(self, hold: Hold, slot: Slot, state: Slot | None) -> Version:
        """Pull a version into these slots, and check every byte; from the server if no worker has it.

        Raises:
            AtollError: one of `UNPULLED`: no worker could give it.
        """
        if not hold.sources:
            return self._initial(hold, slot)
        last: AtollError | None = None
        for source in hold.sources:
            try:
                return self._from(source, hold, slot, state)
            except UNPULLED as error:
                last = error
        assert last is not None
        raise last

    def _from(self, source: Source, hold: Hold, slot: Slot, state: Slot | None) -> Version:
        """Pull a version and its outer state at the same time."""
        layout = self._plan.fragments[hold.fragment].version
        if state is not None and source.state is None:
            raise Gone(f"Version {hold.version} has no outer state there.", "Ask another worker.")
        with ThreadPoolExecutor(1, thread_name_prefix="atoll-swarm-state") as beside:
            coming = beside.submit(self._state_from, source.state, hold, state) if source.state and state else None
            digests = self._pulled(source.version, layout, slot, hold.digest)  # the block's end awaits the state, too
            regions, parts = coming.result() if coming is not None else ((), ())
        return Version(hold.fragment, hold.version, hold.digest, slot, state, digests, regions, parts)

    def _state_from(self, source: str, hold: Hold, slot: Slot) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Pull the outer state; the digests of its regions must make up the one that the server knows.

        Returns:
            BLAKE3 of its regions, and of the parts in which it came.
        """
        shape = self._plan.fragments[hold.fragment].shapes().state
        assert shape is not None
        parts = self._pulled(source, state_cuts(shape), slot)
        regions = tuple(region_digest(slot.fd, region) for region in shape.regions)
        header = os.pread(slot.fd, len(shape.header), 0)
        if state_id(regions) != hold.state_digest or header != shape.header:
            raise PartCorrupt(f"{source} is another outer state than that of version {hold.version}.")
        return regions, parts

    def _pulled(
        self,
        source: str,
        cut: Layout | Cuts,
        slot: Slot,
        digest: str = "",
        on_part: Callable[[Part], None] = lambda _: None,
    ) -> tuple[bytes, ...]:
        """Pull a file at the worker that serves it. Return the digests of its parts.

        Args:
            cut: where the file has to be cut.
            digest: that the digests of its parts have to make up; empty if the caller checks what came.

        Raises:
            PartCorrupt: the worker serves another file.
        """
        with self._peer_server.connected(source, self._idle_timeout_s) as (ref, transfer):
            what = f"what {ref.server} serves"
            body = transfer.read(routes.OBJECT.format(object=ref.object), routes.MANIFEST_BYTES)
            manifest = messages.BlobManifest.read(body, what).manifest()
            manifest.require_id(digest or ref.digest, what)
            digests = manifest.part_digests
            if isinstance(cut, Layout):
                expected, parts = Manifest.of_layout(cut, digests), list(cut.parts)
            else:
                expected, parts = Manifest.of_cuts(cut, digests), cut.parts()
            if manifest != expected:
                raise PartCorrupt(f"{ref.server} serves a file in other parts than it has.", "Look at that worker.")
            path = routes.OBJECT_DATA.format(object=ref.object)
            transfer.pull(path, digests, parts, [SlotWriter(slot)], on_bytes=self._move, on_part=on_part)
        return digests

    def _initial(self, hold: Hold, slot: Slot) -> Version:
        """Pull version 0 from the server."""
        layout = self._plan.fragments[hold.fragment].version
        manifest = self._http.get(routes.MANIFEST.format(fragment=hold.fragment, version=0), messages.Manifest)
        digests = tuple(bytes.fromhex(text) for text in manifest.part_digests)
        path = routes.VERSION_DATA.format(fragment=hold.fragment, version=0, digest=hold.digest)
        parts = HttpTransfer(self._http, CONNECTIONS, self._idle_timeout_s)
        try:
            parts.pull(path, digests, layout.parts, [SlotWriter(slot)], on_bytes=self._move)
        finally:
            parts.close()
        return Version(hold.fragment, 0, hold.digest, slot, None, digests, ())

    def update(self, collect: Collect, slot: Slot) -> tuple[Spool, float, str]:
        """Pull an update into this slot. Return it, its norm, and what is wrong with it."""
        layout, inspection = self._plan.fragments[collect.fragment].update, self._inspections[collect.fragment]
        sums, bad = list[float](), list[str]()

        def look(part: Part) -> None:
            stats = inspection.look(part, slot.fd)
            sums.append(stats.sumsq)
            if stats.bad is not None:
                bad.append(stats.bad)

        spool = Spool(collect.fragment, slot, self._pulled(collect.source, layout, slot, collect.digest, look))
        return spool, (math.sqrt(math.fsum(sums)) if not bad else 0.0), (min(bad) if bad else "")
