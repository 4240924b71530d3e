"""What a worker of a swarm pulls from the others, and checks: versions with their outer states, and updates."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from atoll.aggregation.check_arriving_parts import Inspection
from atoll.aggregation.plan import Plan
from atoll.aggregation.version_digests import digest_of
from atoll.errors import AtollError, Gone, PartCorrupt
from atoll.posix import read_at, write_at
from atoll.protocol import messages, routes
from atoll.protocol.swarm_messages import Collect, Hold, Source
from atoll.store.file_slots import Slot, disk_error, region_digest
from atoll.tensors.layout import Part
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import Http
from atoll.transport.object_server import Ranges
from atoll.transport.resumable_transfer import Parts
from atoll.worker.broken_off import UNPULLED
from atoll.worker.peer.peer_store import Spool, Version
from atoll.worker.peer.peer_transfers import CONNECTIONS, Pull, Writing, spans
from atoll.worker.peer.serve_peers import Outlet


class Errands:
    """Pulls what one worker is to have.

    Args:
        http: to the server.
        outlet: what the worker itself serves is taken from there.
        on_bytes: told what came.
    """

    def __init__(
        self, plan: Plan, http: Http, outlet: Outlet, idle_timeout_s: float, on_bytes: Callable[[int], None]
    ) -> None:
        self._plan, self._http, self._outlet, self._move = plan, http, outlet, on_bytes
        self._idle_timeout_s = idle_timeout_s
        self._inspections = [Inspection(fragment.update, plan.codecs) for fragment in plan.fragments]

    def version(self, hold: Hold, slot: Slot, state: Slot | None) -> tuple[Version, Sequence[bytes]]:
        """A version in these slots, every byte checked; from the server, where nobody else has it.

        Returns:
            The version, and the BLAKE3 of the parts in which its outer state came.

        Raises:
            AtollError: one of `UNPULLED`, where nobody could give it.
        """
        if not hold.sources:
            return self._initial(hold, slot), ()
        last: AtollError | None = None
        for source in hold.sources:
            try:
                return self._from(source, hold, slot, state)
            except UNPULLED as error:
                last = error
        assert last is not None
        raise last

    def _from(self, source: Source, hold: Hold, slot: Slot, state: Slot | None) -> tuple[Version, Sequence[bytes]]:
        """A version and the outer state beside it, both at once."""
        if state is None:
            digests = tuple(self._version_from(source, hold, slot))
            return Version(hold.fragment, hold.version, hold.digest, slot, None, digests, ()), ()
        if source.state is None:
            raise Gone(f"Version {hold.version} has no outer state there.", "Ask another worker.")
        with ThreadPoolExecutor(1, thread_name_prefix="atoll-swarm-state") as beside:
            coming = beside.submit(self._state_from, source.state, hold, state)  # left by an error, it is waited for
            digests = tuple(self._version_from(source, hold, slot))
            regions, state_parts = coming.result()
        return Version(hold.fragment, hold.version, hold.digest, slot, state, digests, regions), state_parts

    def _version_from(self, source: Source, hold: Hold, slot: Slot) -> Sequence[bytes]:
        layout = self._plan.fragments[hold.fragment].version
        with self._connected(source.version) as (ref, parts):
            pull = Pull(ref, parts)
            digests = pull.require(hold.digest)
            if layout.update_digest(digests) != hold.digest:
                raise PartCorrupt(f"{ref.server} serves a version whose parts make up another one.")
            pull.parts(digests, layout.parts, _into(slot), on_bytes=self._move)
        return digests

    def _state_from(self, source: str, hold: Hold, slot: Slot) -> tuple[tuple[bytes, ...], Sequence[bytes]]:
        """The outer state, checked as the version is: its regions' digests make up what the server was told.

        Returns:
            BLAKE3 of its regions, and of the parts in which it came.
        """
        shape = self._plan.fragments[hold.fragment].shapes().state
        assert shape is not None
        with self._connected(source) as (ref, parts):
            pull = Pull(ref, parts)
            parts_digests, cut = pull.require(hold.state_digest), spans(shape.nbytes)
            if len(parts_digests) != len(cut):
                raise PartCorrupt(f"{ref.server} serves an outer state in other parts than it has.")
            pull.parts(parts_digests, cut, _into(slot), on_bytes=self._move)
            digests = tuple(region_digest(slot.fd, region) for region in shape.regions)
            header = os.pread(slot.fd, len(shape.header), 0)
            if digest_of(digests) != hold.state_digest or header != shape.header:
                raise PartCorrupt(f"{ref.server} serves another outer state than that of version {hold.version}.")
        return digests, parts_digests

    def _initial(self, hold: Hold, slot: Slot) -> Version:
        """Version 0, which the server has."""
        layout = self._plan.fragments[hold.fragment].version
        manifest = self._http.get(routes.MANIFEST.format(fragment=hold.fragment, version=0), messages.Manifest)
        digests = tuple(bytes.fromhex(text) for text in manifest.part_digests)
        path = routes.VERSION_DATA.format(fragment=hold.fragment, version=0, digest=hold.digest)
        parts = Parts(self._http, CONNECTIONS, self._idle_timeout_s)
        try:
            parts.pull(path, digests, layout.parts, [Writing(_into(slot))], on_bytes=self._move)
        finally:
            parts.close()
        return Version(hold.fragment, 0, hold.digest, slot, None, digests, ())

    def update(self, collect: Collect, slot: Slot) -> tuple[Spool, float, str]:
        """An update in this slot; returns it, its norm, and what is wrong with it."""
        layout, inspection = self._plan.fragments[collect.fragment].update, self._inspections[collect.fragment]
        sums, bad = list[float](), list[str]()

        def look(part: Part) -> None:
            at = part.start

            def fill(room: memoryview) -> int:
                nonlocal at
                read_at(slot.fd, room, at)
                at += len(room)
                return len(room)

            with inspection.begin(part, lambda _: None) as inspector:
                inspector.take(fill)
                stats = inspector.stats()
            sums.append(stats.sumsq)
            if stats.bad is not None:
                bad.append(stats.bad)

        with self._connected(collect.source) as (ref, parts):
            pull = Pull(ref, parts)
            digests = pull.require(collect.digest)
            if layout.update_digest(digests) != collect.digest:
                raise PartCorrupt(f"{ref.server} serves an update whose parts make up another one.")
            pull.parts(digests, layout.parts, _into(slot), on_bytes=self._move, on_part=look)
        spool = Spool(collect.fragment, slot, tuple(digests))
        return spool, (math.sqrt(math.fsum(sums)) if not bad else 0.0), (min(bad) if bad else "")

    def _connected(self, text: str) -> AbstractContextManager[tuple[TensorRef, Ranges]]:
        return self._outlet.connected(text, self._idle_timeout_s)


def _into(slot: Slot) -> Callable[[int, memoryview], None]:
    def write(offset: int, data: memoryview) -> None:
        try:
            with slot.one_writes:
                write_at(slot.fd, data, offset)
        except OSError as error:
            raise disk_error(error, slot.path) from error

    return write
