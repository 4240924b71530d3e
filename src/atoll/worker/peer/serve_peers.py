"""What a worker of a swarm serves to the others: its updates, and the versions that it holds."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence

from atoll.aggregation.plan import Plan
from atoll.aggregation.version_digests import digest_of
from atoll.errors import AtollError
from atoll.protocol import routes
from atoll.protocol.swarm_messages import Source
from atoll.store.file_slots import region_digest
from atoll.tensors.layout import Part
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import Counters, Http
from atoll.transport.object_server import ObjectHost, Ranges
from atoll.worker.exchange.base_and_outbox import Outbox
from atoll.worker.log_lines import told
from atoll.worker.peer.peer_store import Version
from atoll.worker.peer.peer_transfers import connected, spans

AGAIN_S = (0.5, 1.0, 2.0)
"""Before a worker that could not be reached is tried again."""
PROBE_S = 10.0
"""A probe that is not answered by then has failed."""


class Outlet:
    """Files of this worker, under references that its server passes on.

    Args:
        counters: that what others pull is added to.
        ca: PEM file with the authority of other workers' certificates.
    """

    def __init__(self, host: ObjectHost, counters: Counters, ca: str | None) -> None:
        self._host, self._counters, self._ca = host, counters, ca
        self._lock = threading.Lock()
        self._updates: dict[int, tuple[str, TensorRef]] = {}  # fragment → digest and reference
        self.served = 0
        self._watching: dict[int, Callable[[int], None]] = {}  # fragment → who is told of its update's bytes

    @property
    def address(self) -> str:
        """Where other workers reach this one."""
        return self._host.address

    def _count(self, count: int) -> None:
        self.served += count
        self._counters.add(up=count)

    def serve(self, fd: int, nbytes: int, digest: str, digests: Sequence[bytes]) -> TensorRef:
        """As `ObjectHost.serve`."""
        return self._host.serve(fd, nbytes, digest, digests, self._count)

    def withdraw(self, ref: TensorRef) -> None:
        """Serve it no more."""
        with contextlib.suppress(AtollError):
            self._host.withdraw(ref)

    def offer(self, fragment: int, outbox: Outbox, on_bytes: Callable[[int], None]) -> TensorRef:
        """Serve what an outbox holds, until another is offered or it is `retract`ed; say what others pull of it."""
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
        ref = self._host.serve(outbox.fd, outbox.nbytes, note.digest, digests, count)
        with self._lock:
            self._updates[fragment] = note.digest, ref
        return ref

    def retract(self, fragment: int) -> None:
        """The outbox is about to hold something else."""
        with self._lock:
            known = self._updates.pop(fragment, None)
        if known is not None:
            self.withdraw(known[1])

    @contextlib.contextmanager
    def connected(self, text: str, idle_timeout_s: float) -> Iterator[tuple[TensorRef, Ranges]]:
        """What a reference names: read here where it is this worker's own, else over connections to who serves it."""
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
        """Who waits for his update to be taken sees that it is, also where it is he who takes it."""
        with self._lock:
            at = next((fragment for fragment, (_, mine) in self._updates.items() if mine.object == ref.object), None)
        if at is not None:
            self._watching[at](nbytes)

    def in_order(self, sources: Sequence[str]) -> list[str]:
        """References to the same in the order in which they are tried: this worker's own, then any."""
        return sorted(sources, key=lambda text: (TensorRef.parse(text).server != self.address, random.random()))

    def probe(self, address: str) -> None:
        """Find out whether another worker is to be reached.

        Raises:
            ServerUnreachable, TransferStalled: it is not. BadRequest: somebody else is there.
        """
        http = Http(address, ca=self._ca)
        try:
            http.reach(routes.HEALTH, timeout_s=PROBE_S)
        finally:
            http.close()

    def why_unreached(self, address: str, wait: Callable[[float], bool]) -> str:
        """As `probe`, a few times; why not, empty where it is reached or `wait` says that it is over."""
        why = ""
        for pause_s in (*AGAIN_S, 0.0):
            try:
                self.probe(address)
                return ""
            except AtollError as error:
                why = told(error, 300)
                if wait(pause_s):
                    return ""
        return why

    def close(self) -> None:
        self._host.close()


class ServedVersions:
    """Versions that others may pull, each with the outer state beside it."""

    def __init__(self, plan: Plan, outlet: Outlet) -> None:
        self._plan, self._outlet = plan, outlet
        self._sources: dict[tuple[int, int], Source] = {}

    def source_of(self, version: Version) -> Source | None:
        """Where others pull it."""
        return self._sources.get((version.fragment, version.version))

    def state_parts(self, version: Version) -> list[bytes]:
        """BLAKE3 of the parts in which its outer state travels: reads all of it, so hold no lock."""
        if version.state is None:
            return []
        return [region_digest(version.state.fd, ((part.start, part.nbytes),)) for part in self._spans(version)]

    def add(self, version: Version, state_parts: Sequence[bytes]) -> None:
        """Let others pull it."""
        planned, beside = self._plan.fragments[version.fragment], None
        at = self._outlet.serve(version.slot.fd, planned.version.nbytes, version.digest, version.part_digests)
        if version.state is not None:
            nbytes = self._spans(version)[-1].stop
            beside = self._outlet.serve(version.state.fd, nbytes, digest_of(version.state_digests), state_parts)
        source = Source(version=str(at), state=str(beside) if beside is not None else None)
        self._sources[version.fragment, version.version] = source

    def remove(self, version: Version) -> None:
        """Serve it no more."""
        source = self._sources.pop((version.fragment, version.version), None)
        for text in (source.version, source.state) if source is not None else ():
            if text is not None:
                self._outlet.withdraw(TensorRef.parse(text))

    def _spans(self, version: Version) -> list[Part]:
        shape = self._plan.fragments[version.fragment].shapes().state
        assert shape is not None
        return spans(shape.nbytes)
