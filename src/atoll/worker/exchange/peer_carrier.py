"""Carries versions and updates in a swarm: between this worker and the other workers, not through the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from atoll.blobs.manifest import Manifest
from atoll.errors import UNPULLED, Busy
from atoll.protocol import messages, routes
from atoll.protocol.values import Lost
from atoll.tensors.layout import Layout
from atoll.transport.object_server import PartSource
from atoll.worker.exchange.carrier import Upload
from atoll.worker.log_lines import LOG
from atoll.worker.peer.peer_transfers import PeerServer
from atoll.worker.session.ranks import keep_ranks_waiting
from atoll.worker.session.session import Repeats, Session

QUIET_S, LOOK_S = 5.0, 0.1
"""Seconds to wait for a worker that has a version, and seconds between two requests meanwhile."""
AGAIN_S = 1.0
"""Seconds to wait after another worker could not pull an update, before the update is offered again."""


class PeerCarrier:
    """The `Carrier` of a worker in a swarm: other workers download its updates, and have the versions that it needs.

    Args:
        session: the worker's session, which makes calls to the server.
        peers: serves this worker's updates, and finds versions at other workers.
    """

    resend_line = "%s: the updates against version %d are collected again; submitting this site's update again"

    def __init__(self, session: Session, peers: PeerServer) -> None:
        self._session, self._peers = session, peers

    def fetch(self, fragment: int, version: int, path: str, pull: Callable[[PartSource, str], None]) -> None:
        """Try the workers that have a version, one after the other, until a download succeeds.

        If this worker itself serves the version to others, its own file is tried first.

        Args:
            fragment: the fragment's number.
            version: number of the version.
            path: not used: each worker has its own path.
            pull: downloads the parts from an open connection, given the URL path.

        Raises:
            Busy: no worker can send the version at this moment.
            Gone: the server says that the version is no longer kept.
        """
        session, until_s = self._session, time.monotonic() + QUIET_S
        ask = partial(session.manifest, fragment, version)
        while not (sources := ask().sources) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            keep_ranks_waiting()
        why = "no connected worker has it."
        for source in self._peers.in_order(sources):
            try:
                with self._peers.connected(source, session.info.idle_timeout_s) as (ref, parts):
                    return pull(parts, routes.OBJECT_DATA.format(object=ref.object))
            except UNPULLED as error:  # the worker may just have dropped the version, or ended
                why = error.message
                LOG.info("%s: asking another worker for version %d: %s", session.site, version, why)
        raise Busy(
            f"No worker can send version {version} at this moment: {why}",
            "Atoll tries again; training continues once a worker with this version is back.",
        )

    def send_early(self, layout: Layout) -> None:
        """Return None: other workers download an update once it is complete."""

    def send(self, upload: Upload) -> messages.Receipt | Lost:
        """Tell the server where to download the update. Repeat this until another worker has downloaded it."""
        outbox, note = upload.outbox, upload.note
        manifest = Manifest.of_layout(outbox.layout, [bytes.fromhex(text) for text in note.part_digests])

        def offered() -> messages.Complete:
            return note.complete(source=str(self._peers.offer(note.fragment, outbox.fd, manifest, upload.bar.add)))

        message, early = offered(), Repeats(self._session)
        while True:
            asked_s = time.monotonic()
            ask = partial(self._session.complete, note.ticket, message)
            receipt = self._session.call(ask, "submit", retries=upload.retries, kind=messages.Receipt)
            if isinstance(receipt, Lost) or receipt.accepted:
                return receipt
            keep_ranks_waiting()  # the call was a long poll
            if time.monotonic() - asked_s < routes.LONG_POLL_S / 2:
                early.again()
            if receipt.unpulled:
                time.sleep(AGAIN_S)
                self.retract(note.fragment)
                message = offered()

    def retract(self, fragment: int) -> None:
        """Stop serving the fragment's update."""
        self._peers.retract(fragment)

    def break_off(self) -> None:
        """Do nothing: a download from another worker ends with its own timeout."""
