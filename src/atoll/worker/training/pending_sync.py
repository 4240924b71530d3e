"""An update of one fragment on its way, and what a worker knows of the fragment: everything that needs the network."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from atoll.errors import UpdateRefused
from atoll.latch import Latch
from atoll.protocol import messages
from atoll.worker.exchange.base_and_outbox import BaseFile
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.exchange.settle import counted_step, pull_newest

LOOK_S = 1.0
"""While others are waited for, how often it is looked whether that is still right."""


class Fragment:
    """Where a worker is with one fragment.

    Attributes:
        number: of the round that it takes part in next.
        ticket: for that round, where there is one.
        local_steps: H_w, where the run has given this worker one (DyLU); else 0.
        base_step: the local step after which the last update that counts was taken.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.index = exchange, exchange.fragment
        self.number = 1
        self.ticket: messages.Ticket | None = None
        self.local_steps = 0
        self.base_step = self.version = 0
        self.finished = False

    @property
    def counted_step(self) -> int:
        """The last step after which an update was taken that the server has."""
        return counted_step(self.exchange, self.base_step)

    def heard(self, reply: messages.TicketReply) -> None:
        """Take over what the server said of the next round."""
        self.ticket, self.finished = reply.ticket, reply.status == "finished"
        self.number = reply.ticket.round if reply.ticket else reply.round
        self.local_steps = reply.ticket.local_steps if reply.ticket else self.local_steps


class Flight:
    """An update on its way, and its result: everything that needs the network, in a thread or where `run` is called.

    Attributes:
        step: after which it was taken.
        sent: set once the server has the update, or all is over.
        moved: the file with the result; None while there is none.
    """

    def __init__(self, fragment: Fragment, step: int, max_retries: int) -> None:
        self.fragment, self.step, self._max_retries = fragment, step, max_retries
        self.moved: BaseFile | None = None
        self.reply: messages.TicketReply | None = None
        self.error: BaseException | None = None
        self.sent, self.done = Latch(), Latch()
        self.late = False

    def start(self) -> None:
        name = f"atoll-fragment-{self.fragment.index}"
        threading.Thread(target=self.run, name=name, daemon=True).start()

    def run(self) -> None:
        """Send, wait, pull; whatever happens is found in the attributes."""
        try:
            self.fragment.exchange.send(self._max_retries)
            self.fragment.exchange.refusals = 0
            self.sent.set()
            self._fetch()
        except UpdateRefused as error:
            self.error = error
            self.fragment.exchange.outbox.clear()  # or the next ticket would have it sent once more
            try:
                self._fetch()
            except BaseException as worse:
                self.error = worse
        except BaseException as error:
            self.error = error
        finally:
            self.sent.set()
            self.done.set()

    def _fetch(self) -> None:
        exchange = self.fragment.exchange
        self.reply = exchange.next_round(max_retries=self._max_retries)
        self.reply, self.moved = pulled(exchange, self.reply, self._max_retries)


def pulled(
    exchange: Exchange, reply: messages.TicketReply, max_retries: int | None
) -> tuple[messages.TicketReply, BaseFile]:
    """The version that a reply names, in a file beside the base; and the reply, or a newer one where it is gone."""
    moved = exchange.following()
    try:
        newer = pull_newest(exchange, reply.head_version, reply.head_digest, None, moved, max_retries=max_retries)
        return newer or reply, moved
    except BaseException:
        moved.close()
        raise


def begin_from(fragments: Sequence[Fragment], *, waits: bool) -> list[messages.TicketReply]:
    """Send what an earlier process left; what each fragment is to begin from.

    A round that such an update is in is waited for: what was trained from the version before it would count as new, and
    be a round old. It waits for nothing of this worker: all that comes before it in the order that all workers go by is
    in, too. Where an update before it is not, or may be asked for yet, other workers may wait for that one.

    Args:
        waits: whether the run's rounds wait for their workers.
    """
    is_in = [each.exchange.resume_outbox() is not None for each in fragments]
    replies = [each.exchange.next_round(wait_s=0.0) for each in fragments]
    waited, others = list[tuple[int, int]](), list[tuple[int, int]]()
    for place, (fragment, reply) in enumerate(zip(fragments, replies, strict=True)):
        fragment.heard(reply)
        note = fragment.exchange.outbox.note
        if waits and is_in[place] and reply.status == "wait" and note is not None and note.round == reply.round:
            waited.append((note.round, place))
        elif not fragment.finished:  # without a ticket it may be taken into the open round, when others end
            others.append((fragment.number, place) if fragment.ticket else (0, place))
    for number, place in sorted(waited):
        if others and (number, place) > min(others):
            break
        while (replies[place].status, replies[place].round) == ("wait", number):  # not into a round that is another's
            replies[place] = fragments[place].exchange.next_round(wait_s=LOOK_S)
        fragments[place].heard(replies[place])
    return replies
