"""Transfers between the workers of a swarm: of versions, updates, and states of the outer optimizer.

Each worker serves its files to the others over HTTP. Environment variables of the worker configure this:

    ATOLL_PEER_HOST, ATOLL_PEER_PORT           address to listen on
    ATOLL_PEER_NAME                            host name under which other workers reach this one
    ATOLL_PEER_TLS_CERT, ATOLL_PEER_TLS_KEY    certificate and its key, if the site has no credential of its own
    ATOLL_PEER_INSECURE                        true allows plain HTTP beyond this machine
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from blake3 import blake3

from atoll.aggregation.check_arriving_parts import Inspection, norm_of
from atoll.aggregation.plan import AggregationPlan
from atoll.blobs.manifest import Cuts, Manifest, state_id
from atoll.errors import UNPULLED, AtollError, ConfigError, Gone, PartCorrupt, PortInUse, UsageError
from atoll.posix import file_error, write_at
from atoll.protocol import messages, routes
from atoll.protocol.swarm_messages import Collect, Hold, Source
from atoll.runtime import OWN_RANDOM
from atoll.store.file_slots import SPOOL, STATE, VERSION, FileShape, Slot, region_digest
from atoll.system_calls import memory_file
from atoll.tensors.layout import PART_BYTES, Layout, Part
from atoll.tensors.reference import TensorRef
from atoll.transport.credential_store import SiteCredential
from atoll.transport.http_client import Counters, Http
from atoll.transport.object_client import object_http
from atoll.transport.object_server import ObjectHost, PartSource
from atoll.transport.part_transfer import HttpTransfer
from atoll.transport.peer_address import NO_PATH, is_this_machine, require_peer, why_no_peer
from atoll.transport.tls import ContextMaker, is_loopback
from atoll.transport.way_out import way_out
from atoll.worker.arguments import insecure_peers
from atoll.worker.log_lines import error_text

CONNECTIONS = 2
MOST_ADDRESSES = 4096
"""Largest number of addresses of other workers that a worker learns in a run: its memory and log stay bounded."""


def open_host(
    site: str, server_host: str, idle_timeout_s: float, credential: SiteCredential | None = None
) -> ObjectHost:
    """Start this worker's HTTP server. Other workers of the swarm download this worker's files from it.

    Args:
        site: the site's name, for messages.
        server_host: host of the run's server.
        idle_timeout_s: seconds without a byte after which a connection is closed.
        credential: the site's certificate, with which it takes connections of other sites of the run alone; None: it
            has none.

    Raises:
        ConfigError: the run's server is on another machine, and `ATOLL_PEER_HOST` is not set. Or the address needs TLS,
            or does not belong to this machine.
        PortInUse: another process has the port.
    """
    host = os.environ.get("ATOLL_PEER_HOST")
    if host is None and not is_loopback(server_host):
        raise ConfigError(
            f"Worker {site} joins a swarm at {server_host}, but no address is set at which the other workers "
            "can reach it.",
            "Set ATOLL_PEER_HOST (0.0.0.0: all addresses of this machine) and ATOLL_PEER_PORT. Also set "
            "ATOLL_PEER_TLS_CERT and ATOLL_PEER_TLS_KEY, or ATOLL_PEER_INSECURE=1 on a trusted network.",
        )
    try:
        return ObjectHost(
            host or "127.0.0.1",
            _port(),
            name=os.environ.get("ATOLL_PEER_NAME"),
            tls_cert=_path("ATOLL_PEER_TLS_CERT"),
            tls_key=_path("ATOLL_PEER_TLS_KEY"),
            insecure=insecure_peers(),
            idle_timeout_s=idle_timeout_s,
            folder=None,
            context=credential.context_for_peers if credential is not None else None,
        )
    except (ConfigError, PortInUse) as error:
        raise type(error)(
            f"Worker {site} cannot listen for the other workers: {error.message}",
            "Set ATOLL_PEER_HOST to an address of this machine or to 0.0.0.0, and ATOLL_PEER_PORT to a free "
            "port. Also set ATOLL_PEER_TLS_CERT and ATOLL_PEER_TLS_KEY, or ATOLL_PEER_INSECURE=1 on a "
            "trusted network.",
        ) from error


def _port() -> int:
    text = os.environ.get("ATOLL_PEER_PORT", "0")
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise ConfigError(f"ATOLL_PEER_PORT is {text!r}.", "Set it to a port number, or to 0 for any free port.")
    return int(text)


def _path(variable: str) -> Path | None:
    text = os.environ.get(variable)
    return Path(text) if text else None


class SlotWriter:
    """Writes downloaded bytes into a slot, a reused file of fixed size."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at byte `offset` of the slot.

        Raises:
            StoreError: the disk is full, or fails.
        """
        try:
            with self._slot.one_writes:
                write_at(self._slot.fd, data, offset)
        except OSError as error:
            raise file_error(error, self._slot.path) from error


def host_of(address: str) -> str:
    """Return the host of an address `http://host:port`; an IPv6 address without brackets."""
    return urlsplit(address).hostname or ""


@contextmanager
def connected(
    text: str,
    idle_timeout_s: float,
    counters: Counters,
    *,
    loopback: bool,
    context: ContextMaker | None = None,
) -> Iterator[tuple[TensorRef, HttpTransfer]]:
    """Connect to the worker that a reference names; the connections close at the end of the `with` block.

    Args:
        text: the reference to a file at that worker, as text.
        idle_timeout_s: seconds without a byte after which a transfer fails.
        counters: counters of the transferred bytes.
        loopback: whether that worker may be on this machine.
        context: returns the TLS context for the connection; None: one that trusts ATOLL_TLS_CA.

    Yields:
        The parsed reference, and the connections.

    Raises:
        Gone: the address has a path, as that of no worker.
    """
    ref = TensorRef.parse(text)
    if ref.path:
        raise Gone(f"The reference to {ref.server} is not followed: {NO_PATH}.", "Ask another worker.")
    http = object_http(ref, require_ip=partial(require_peer, loopback=loopback), context=context)
    http.counters = counters
    parts = HttpTransfer(http, CONNECTIONS, idle_timeout_s)
    try:
        yield ref, parts
    finally:
        parts.close()
        http.close()


# -- Serving files to other workers: this worker's updates, and the versions that it holds.


AGAIN_S = (0.5, 1.0, 2.0)
"""Seconds to wait before each further attempt to reach a worker."""
PROBE_S = 10.0
"""Timeout of a probe, in seconds."""


class PeerServer:
    """Serves this worker's files to other workers, which get this worker's address from the run's server.

    Args:
        host: serves files over HTTP.
        counters: counts the bytes that other workers download.
        ca: PEM file of the certificate authority that signed other workers' certificates; None: the system's
            authorities.
        credential: the site's certificate, for connections to other sites of the run; None: it has none.

    Attributes:
        served: number of bytes that other workers have downloaded.
    """

    def __init__(
        self, host: ObjectHost, counters: Counters, ca: str | None, credential: SiteCredential | None = None
    ) -> None:
        self._host, self._counters, self._ca, self._credential = host, counters, ca, credential
        self._lock = threading.Lock()
        self._peers: dict[str, str] = {}  # address → site
        self._learnt: set[str] = set()
        self._ended: Mapping[str, float] = {}  # site → its certificates that were issued before this time have ended
        host.refuses = self._refuses
        self._updates: dict[int, tuple[str, TensorRef]] = {}  # fragment → digest and reference
        self.served = 0
        self._watching: dict[int, Callable[[int], None]] = {}  # fragment → callback for its update's pulled bytes

    @property
    def address(self) -> str:
        """The address under which other workers reach this one."""
        return self._host.address

    def prove(self) -> TensorRef:
        """Serve a small object, and return the reference to it. With it, the server checks this worker's address."""
        content = os.urandom(2 * routes.DIGEST_BYTES)
        cuts, fd = Cuts(0, len(content), PART_BYTES), memory_file("atoll-proof")
        try:
            write_at(fd, content, 0)
            return self.serve(fd, Manifest.of_cuts(cuts, [blake3(content).digest()]))
        finally:
            os.close(fd)

    def learn(
        self, addresses: Sequence[str], sites: Sequence[str] = (), ended: Mapping[str, float] | None = None
    ) -> list[str]:
        """Allow connections to the workers at these addresses, and to no others. Return those that are new.

        Args:
            addresses: the addresses of all other workers, from the newest answer of the server.
            sites: the site of each, if the server names them.
            ended: as in `PeerWork`. Downloads with such a certificate are broken off.
        """
        self._ended = ended or {}
        new = [address for address in dict.fromkeys(addresses) if address not in self._learnt]
        new = new[: MOST_ADDRESSES - len(self._learnt)]
        self._learnt.update(new)
        self._peers = {
            address: site for address, site in zip_longest(addresses, sites, fillvalue="") if address in self._learnt
        }
        return new

    def _refuses(self, certificate: Mapping[str, Any]) -> bool:
        """Return whether the certificate of a connection, checked by TLS, has expired since, or ended before that."""
        if not certificate:
            return False
        # a library that takes a while to load
        from atoll.transport.certificates import ends_at_s, identity_in, issued_at_s

        if time.time() >= ends_at_s(certificate):
            return True
        found = identity_in(certificate)
        return found is not None and issued_at_s(certificate) < self._ended.get(found.site, 0.0)

    def _why_refused(self, address: str) -> str:
        """Return why this worker does not connect to an address; empty if it may.

        The server must have named the address. Some addresses are refused even then.
        """
        if address not in self._peers:
            return "the server has not named a worker at this address"
        return why_no_peer(host_of(address), loopback=self._on_loopback)

    def _context_to(self, address: str) -> ContextMaker | None:
        """Return what makes the TLS context for a connection to another worker; None: that of `ca`."""
        if self._credential is None or not address.startswith("https://"):
            return None
        return partial(self._credential.context_to_peer, self._peers.get(address, ""))

    @property
    def _on_loopback(self) -> bool:
        return is_this_machine(host_of(self.address))

    def is_known(self, text: str) -> bool:
        """Return whether a reference leads to this worker itself, or to a worker that `learn` was told of."""
        with contextlib.suppress(UsageError):
            return TensorRef.parse(text).server in (self.address, *self._peers)
        return False

    def _count(self, count: int) -> None:
        self.served += count
        self._counters.add(up=count)

    def serve(self, fd: int, manifest: Manifest) -> TensorRef:
        """Serve an open file to other workers, count the bytes that they download, and return a reference to the file.

        Args:
            fd: descriptor of the open file.
            manifest: the file's parts and digests.
        """
        way_out().clear(manifest.part_digests)  # of a version, or random: nothing of this site's own
        return self._host.serve(fd, manifest, self._count)

    def withdraw(self, ref: TensorRef) -> None:
        """Stop serving the file that a reference names."""
        with contextlib.suppress(AtollError):
            self._host.withdraw(ref)

    def offer(self, fragment: int, fd: int, manifest: Manifest, on_bytes: Callable[[int], None]) -> TensorRef:
        """Serve the file of an update, and return a reference to the update.

        The update is served until another update of the fragment is offered or `retract` is called.

        Args:
            fragment: the fragment's number.
            fd: descriptor of the update's file.
            manifest: the parts and digests of the update.
            on_bytes: called with the number of bytes each time a worker has downloaded some.
        """
        self._watching[fragment] = on_bytes

        def count(nbytes: int) -> None:
            self._count(nbytes)
            self._watching[fragment](nbytes)

        with self._lock:
            known = self._updates.get(fragment)
            if known is not None and known[0] == manifest.id:
                return known[1]
        self.retract(fragment)
        ref = self._host.serve(fd, manifest, count)
        with self._lock:
            self._updates[fragment] = manifest.id, ref
        return ref

    def retract(self, fragment: int) -> None:
        """Stop serving the fragment's update. Call this before its file is overwritten."""
        with self._lock:
            known = self._updates.pop(fragment, None)
        if known is not None:
            self.withdraw(known[1])

    @contextlib.contextmanager
    def connected(self, text: str, idle_timeout_s: float) -> Iterator[tuple[TensorRef, PartSource]]:
        """Open the file that a reference names; the file is closed at the end of the `with` block.

        If this worker serves the file itself, read from the disk. Otherwise, connect to the worker that serves the
        file.

        Yields:
            The parsed reference, and an object to read parts from.

        Raises:
            Gone: this worker does not connect to the reference's address, since no worker can have it, or the server
                has not named one there.
        """
        ref = TensorRef.parse(text)
        if ref.server != self.address and (why := self._why_refused(ref.server)):
            raise Gone(f"The reference to {ref.server} is not followed: {why}.", "Ask another worker.")
        own = self._host.opened(ref, lambda nbytes: self._read(ref, nbytes)) if ref.server == self.address else None
        if own is None:
            context = self._context_to(ref.server)
            with connected(
                text, idle_timeout_s, self._counters, loopback=self._on_loopback, context=context
            ) as reached:
                yield reached
            return
        try:
            yield ref, own
        finally:
            own.close()

    def _read(self, ref: TensorRef, nbytes: int) -> None:
        """If this worker itself has read bytes of an update that it offers, call the update's `on_bytes`."""
        with self._lock:
            at = next((fragment for fragment, (_, mine) in self._updates.items() if mine.object == ref.object), None)
        if at is not None:
            self._watching[at](nbytes)

    def in_order(self, sources: Sequence[str]) -> list[str]:
        """Return references to one version in the order of preference: first this worker's own, then the others.

        References to a worker that the server has not named are left out.
        """
        known = [text for text in sources if self.is_known(text)]
        return sorted(known, key=lambda text: (TensorRef.parse(text).server != self.address, OWN_RANDOM.random()))

    def why_unreached(self, address: str, wait: Callable[[float], bool]) -> str:
        """Try several times to reach another worker. Return why all attempts failed; an empty text if one succeeded.

        Args:
            address: the other worker's address.
            wait: waits for a number of seconds; returns True if this worker stops meanwhile. In this case, the method
                returns an empty text, too.
        """
        why, require_ip = "", partial(require_peer, loopback=self._on_loopback)
        for pause_s in (*AGAIN_S, 0.0):
            if why := self._why_refused(address):
                wait(sum(AGAIN_S))
                return why
            try:
                context = self._context_to(address)
                with contextlib.closing(Http(address, ca=self._ca, require_ip=require_ip, context=context)) as http:
                    http.reach(routes.HEALTH, timeout_s=PROBE_S)
                return ""
            except AtollError as error:
                why = error_text(error, 300)
                if wait(pause_s):
                    return ""
        return why

    def close(self) -> None:
        """Stop listening and stop serving all files. Idempotent."""
        self._host.close()


# -- Pulling files from other workers, and checking them: versions with their outer states, and updates.


@dataclass(frozen=True)
class Version:
    """A complete version at this worker, with the outer optimizer's state after it.

    Attributes:
        fragment: the fragment's number.
        version: number of the version.
        digest: digest of the version.
        slot: the file of the version.
        state: the file of the outer optimizer's state; None: there is no state yet.
        part_digests: BLAKE3 of each part of the version.
        state_digests: BLAKE3 of each region of the state's file.
        state_parts: BLAKE3 of each part in which the state's file is transferred; empty if not known.
        source: the references with which other workers download the files; None while the version is not served.
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
        """Return the version's files as pairs (kind of file, slot)."""
        return [(VERSION, self.slot), *([(STATE, self.state)] if self.state is not None else [])]


@dataclass(frozen=True)
class PulledUpdate:
    """A downloaded update: the slot (file) with its bytes, and the BLAKE3 digest of each of its parts."""

    fragment: int
    slot: Slot
    part_digests: tuple[bytes, ...]

    def slots(self) -> list[tuple[str, Slot]]:
        """Return the update's file as a list of one pair (kind of file, slot)."""
        return [(SPOOL, self.slot)]


BASE_MANIFEST_BYTES, DIGEST_TEXT_BYTES = 4096, 80
"""Bounds of the size of a manifest: of the message without digests, and of each digest in it."""


def state_cuts(shape: FileShape) -> Cuts:
    """Return how the file of an outer optimizer's state is divided for transfers: into parts of `PART_BYTES`."""
    return Cuts(0, shape.nbytes, PART_BYTES)


class PeerTransfers:
    """The downloads of one worker in a swarm.

    Args:
        plan: the run's plan, as for `SwarmPeer`.
        http: connections to the server.
        peer_server: this worker's own file server; a file that it serves is read from the disk.
        idle_timeout_s: seconds without a byte after which a transfer fails.
        on_bytes: called with the number of bytes each time some have arrived.
    """

    def __init__(
        self,
        plan: AggregationPlan,
        http: Http,
        peer_server: PeerServer,
        idle_timeout_s: float,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._plan, self._http, self._peer_server, self._move = plan, http, peer_server, on_bytes
        self._idle_timeout_s = idle_timeout_s
        self._inspections = [Inspection(fragment.update, plan.codecs) for fragment in plan.fragments]

    def version(self, hold: Hold, slot: Slot, state: Slot | None) -> Version:
        """Download a version and the outer optimizer's state after it into slots, and check every byte.

        Try the workers in the order of `hold.sources`. If the list is empty, download from the server, which has
        version 0.

        Args:
            hold: the version, its digests and its sources.
            slot: the slot for the version.
            state: the slot for the state; None: there is no state.

        Raises:
            AtollError: every source failed with one of `UNPULLED`; this is the last source's error. Or a download
                failed with another error, which ends the attempts.
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
        """Download two files from one worker at the same time: a version, and the outer optimizer's state after it."""
        layout = self._plan.fragments[hold.fragment].version
        if state is not None and source.state is None:
            raise Gone(f"The other worker lacks the optimizer state of version {hold.version}.", "Ask another worker.")
        with ThreadPoolExecutor(1, thread_name_prefix="atoll-swarm-state") as pool:
            coming = pool.submit(self._state_from, source.state, hold, state) if source.state and state else None
            digests = self._pulled(source.version, layout, slot, hold.digest)  # the end of the block waits for `coming`
            regions, parts = coming.result() if coming is not None else ((), ())
        return Version(hold.fragment, hold.version, hold.digest, slot, state, digests, regions, parts)

    def _state_from(self, source: str, hold: Hold, slot: Slot) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Download the outer optimizer's state from one worker, and compare it with the digest from the server.

        Returns:
            BLAKE3 of each region of the state, and BLAKE3 of each part in which it was transferred.

        Raises:
            PartCorrupt: the worker serves the state of another version.
        """
        shape = self._plan.fragments[hold.fragment].shapes().state
        assert shape is not None
        parts = self._pulled(source, state_cuts(shape), slot)
        regions = tuple(region_digest(slot.fd, region) for region in shape.regions)
        header = os.pread(slot.fd, len(shape.header), 0)
        if state_id(regions) != hold.state_digest or header != shape.header:
            raise PartCorrupt(f"The outer optimizer's state at {source} does not belong to version {hold.version}.")
        return regions, parts

    def _pulled(
        self,
        source: str,
        cut: Layout | Cuts,
        slot: Slot,
        digest: str = "",
        on_part: Callable[[Part], None] = lambda _: None,
    ) -> tuple[bytes, ...]:
        """Download a file from the worker that serves it. Return BLAKE3 of each part.

        Args:
            source: the reference to the file.
            cut: the expected division of the file into parts.
            slot: the slot to write into.
            digest: the expected digest of the file. If it is empty, only the digest in the reference is compared, and
                the caller has to check the content.
            on_part: called with each part after it was written.

        Raises:
            PartCorrupt: the worker serves a file with another digest or other parts.
        """
        with self._peer_server.connected(source, self._idle_timeout_s) as (ref, transfer):
            what = f"the file at {ref.server}"
            most_bytes = BASE_MANIFEST_BYTES + DIGEST_TEXT_BYTES * (
                len(cut.parts) if isinstance(cut, Layout) else cut.count
            )
            body = transfer.read(routes.OBJECT.format(object=ref.object), most_bytes)
            manifest = messages.BlobManifest.read(body, what).manifest()
            manifest.require_id(digest or ref.digest, what)
            digests = manifest.part_digests
            if isinstance(cut, Layout):
                expected, parts = Manifest.of_layout(cut, digests), list(cut.parts)
            else:
                expected, parts = Manifest.of_cuts(cut, digests), cut.parts()
            if manifest != expected:
                raise PartCorrupt(
                    f"The file at {ref.server} does not have the expected parts.", "Use one Atoll release at all sites."
                )
            path = routes.OBJECT_DATA.format(object=ref.object)
            transfer.pull(path, digests, parts, [SlotWriter(slot)], on_bytes=self._move, on_part=on_part)
        return digests

    def _initial(self, hold: Hold, slot: Slot) -> Version:
        """Download version 0, the initial model, from the server."""
        layout = self._plan.fragments[hold.fragment].version
        manifest = self._http.get(routes.MANIFEST.format(fragment=hold.fragment, version=0), messages.VersionManifest)
        digests = tuple(manifest.require_digest(hold.digest, layout, "version 0"))
        path = routes.VERSION_DATA.format(fragment=hold.fragment, version=0, digest=hold.digest)
        parts = HttpTransfer(self._http, CONNECTIONS, self._idle_timeout_s)
        try:
            parts.pull(path, digests, layout.parts, [SlotWriter(slot)], on_bytes=self._move)
        finally:
            parts.close()
        return Version(hold.fragment, 0, hold.digest, slot, None, digests, ())

    def update(self, collect: Collect, slot: Slot) -> tuple[PulledUpdate, float, str]:
        """Download an update into a slot, and check its values.

        Returns:
            The update, its norm, and a text. If the values are finite, the text is empty; otherwise the text says what
            is wrong, and the norm is 0.
        """
        layout, inspection = self._plan.fragments[collect.fragment].update, self._inspections[collect.fragment]
        sums, bad = list[float](), list[str]()

        def check_part(part: Part) -> None:
            stats = inspection.check(part, slot.fd)
            sums.append(stats.sumsq)
            if stats.bad is not None:
                bad.append(stats.bad)

        digests = self._pulled(collect.source, layout, slot, collect.digest, check_part)
        norm = min(norm_of(sums), sys.float_info.max) if not bad else 0.0
        return PulledUpdate(collect.fragment, slot, digests), norm, min(bad) if bad else ""
