"""The interface of carriers, which move the bytes of versions and updates for an `Exchange`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from atoll.protocol.messages import Receipt
from atoll.protocol.values import Lost
from atoll.tensors.layout import Layout
from atoll.transport.object_server import PartSource
from atoll.transport.part_transfer import Pushing
from atoll.worker.exchange.base_and_outbox import Outbox, OutboxNote
from atoll.worker.log_lines import TransferProgress

SendEarly = Callable[[int, int, Callable[[int], None]], AbstractContextManager[Pushing]]
"""A function: takes a ticket's id, the descriptor of the outbox, and a callback with the number of bytes sent. In the
`with` block of its result, pass each part of the update to `Pushing.add` as soon as it is in the outbox."""


class Upload(NamedTuple):
    """An update to send.

    Attributes:
        outbox: the file of the update.
        note: the update's note.
        bar: the progress of the transfer.
        sent: indices of the parts that were sent early; None: not known, because an earlier process may have sent some.
        failure: the error that ended sending early. The failed attempt then counts as the first attempt of
            `Carrier.send`. None: no attempt has failed.
        retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
    """

    outbox: Outbox
    note: OutboxNote
    bar: TransferProgress
    sent: Collection[int] | None
    failure: BaseException | None
    retries: int | None


class Carrier(Protocol):
    """Moves the bytes of versions and updates between this worker and the run. All fragments use the same carrier.

    Attributes:
        resend_line: the line of the log when the server needs an update again that it had, with places for the site and
            the number of the version that the update is then submitted against.
    """

    resend_line: str

    def fetch(self, fragment: int, version: int, path: str, pull: Callable[[PartSource, str], None]) -> None:
        """Download the parts of a version, or of a difference between versions, from where they are.

        Args:
            fragment: the fragment's number.
            version: number of the version.
            path: URL path of the bytes at the server.
            pull: downloads the parts that are still missing from a source, given the URL path there.

        Raises:
            Gone: the version is no longer kept.
            PartCorrupt: a part arrived damaged several times.
            TRANSIENT: the bytes cannot be reached at this moment.
        """

    def send_early(self, layout: Layout) -> SendEarly | None:
        """Return the function that sends parts of an update while later ones are still being formed.

        None: the update is sent by `send` alone.

        Args:
            layout: layout of the update.
        """

    def send(self, upload: Upload) -> Receipt | Lost:
        """Bring the outbox's update to where it is aggregated, and tell the server that it is complete.

        Raises:
            UpdateRefused: the server refuses the update.
            TicketClosed, Gone: the update came too late.
        """

    def retract(self, fragment: int) -> None:
        """Stop using the file of the fragment's update. Called before the outbox is overwritten."""

    def break_off(self) -> None:
        """End all running transfers at once. Any thread may call this."""
