"""Streaming DiLoCo at a worker: one fragment after the other is synchronised, while training goes on.

Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch (Douillard et al., arXiv 2501.18512),
Algorithm 2. Every H/K local steps one fragment p is due:

    Δ_p ← b_p − w_p        taken at once, on the training thread, into the fragment's outbox
    b_p ← outer step       a thread of its own sends Δ_p, waits for the result and pulls it to disk
    w_p ← (1−α)·b_p + α·w_p     τ steps later, on the training thread

Between taking and merging, local steps change w_p further; what α leaves of them is in the next Δ_p. Nothing but the
fragment's own tensors changes; the inner optimizer keeps its state.

Which fragment is due: in rounds that wait for their workers, the one with the lowest (round, number) of those that this
worker has not submitted. In the undisturbed run that is the cycle 0 … K−1. Where a synchronisation was skipped, or the
worker came later, all still go by the same order; so nobody ever waits for somebody who waits for him.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from atoll.latch import Latch
from atoll.protocol.values import (
    Accepted,
    Closed,
    Finished,
    Lost,
    Next,
    Open,
    Refused,
    Ticket,
    UpdateInfo,
    VersionRef,
    Wait,
    require,
)
from atoll.tensors.module_tensors import Tensors
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.exchange.participation import Participation
from atoll.worker.log_lines import LOG, why_skipped
from atoll.worker.metrics import Measured
from atoll.worker.training.outage import Outage

# -- An update of one fragment on its way, and what a worker knows of the fragment: everything that needs the network.


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
        self.ticket: Ticket | None = None
        self.local_steps = 0
        self.base_step = self.version = 0
        self.finished = False

    @property
    def counted_step(self) -> int:
        """The last step after which an update was taken that the server has."""
        return self.exchange.counted_step(self.base_step)

    def heard(self, reply: Next) -> None:
        """Take over what the server said of the next round."""
        self.finished = isinstance(reply, Finished)
        self.ticket = reply.ticket if isinstance(reply, Open) else None
        self.number = self.ticket.round if self.ticket else reply.round
        self.local_steps = self.ticket.local_steps if self.ticket else self.local_steps


class Flight:
    """An update on its way, and its result: everything that needs the network, in a thread or where `run` is called.

    Attributes:
        step: after which it was taken.
        sent: set once the server has the update, or all is over.
        pulled: the result, in the file beside the base.
        reply: what the server said of the next round.
        broke_off: what became of it instead, where it did not come to a result.
        error: what ended its thread.
    """

    def __init__(self, fragment: Fragment, step: int, retries: int) -> None:
        self.fragment, self.step, self._retries = fragment, step, retries
        self.reply: Next | None = None
        self.refusal: Refused | None = None
        self.broke_off: Closed | Lost | None = None
        self.error: BaseException | None = None
        self.sent, self.done = Latch(), Latch()
        self.late = False

    def start(self) -> None:
        name = f"atoll-fragment-{self.fragment.index}"
        threading.Thread(target=self.run, name=name, daemon=True).start()

    def run(self) -> None:
        """Send, wait, pull; whatever happens is found in the attributes."""
        try:
            match self.fragment.exchange.deliver(self._retries):
                case Accepted():
                    self.sent.set()
                    self._fetch()
                case Refused() as refusal:
                    self.refusal = refusal
                    self.fragment.exchange.outbox.clear()  # or the next ticket would have it sent once more
                    self._fetch()
                case broke_off:
                    self.broke_off = broke_off
        except BaseException as error:
            self.error = error
        finally:
            self.sent.set()
            self.done.set()

    def _fetch(self) -> None:
        exchange = self.fragment.exchange
        reply = exchange.next(retries=self._retries)
        if isinstance(reply, Lost):
            self.broke_off = reply
            return
        pulled = exchange.pull_newest(reply.head, None, beside=True, retries=self._retries)
        if isinstance(pulled, Lost):
            self.broke_off = pulled
            exchange.files.drop_beside()
            return
        self.reply = pulled.newer or reply


def begin_from(fragments: Sequence[Fragment], *, waits: bool) -> list[Next]:
    """Send what an earlier process left; what each fragment is to begin from.

    A round that such an update is in is waited for: what was trained from the version before it would count as new, and
    be a round old. It waits for nothing of this worker: all that comes before it in the order that all workers go by is
    in, too. Where an update before it is not, or may be asked for yet, other workers may wait for that one.

    Args:
        waits: whether the run's rounds wait for their workers.
    """
    is_in = [each.exchange.recover() is not None for each in fragments]
    replies = [require(each.exchange.next(0.0)) for each in fragments]
    waited, others = list[tuple[int, int]](), list[tuple[int, int]]()
    for place, (fragment, reply) in enumerate(zip(fragments, replies, strict=True)):
        fragment.heard(reply)
        note = fragment.exchange.outbox.note
        if waits and is_in[place] and isinstance(reply, Wait) and note is not None and note.round == reply.round:
            waited.append((note.round, place))
        elif not fragment.finished:  # without a ticket it may be taken into the open round, when others end
            others.append((fragment.number, place) if fragment.ticket else (0, place))
    for number, place in sorted(waited):
        if others and (number, place) > min(others):
            break
        while isinstance(replies[place], Wait) and replies[place].round == number:  # not into a round of another worker
            replies[place] = require(fragments[place].exchange.next(LOOK_S))
        fragments[place].heard(replies[place])
    return replies


DRAIN_S = 60.0
"""At the end, how long what is under way is waited for."""


class Streaming:
    """The synchronisations of one worker, driven by its optimizer steps.

    Args:
        place: of the worker in the run.
        tensors: gives the model's own, by name.
        info: what the update says that is about to be formed from a version, after so many steps.
        measured: is shown the global model after each merge.
        sync_every: H.
        max_retries: attempts before a synchronisation with a lost server is skipped.

    Attributes:
        rounds: results that were merged.
        skipped: turns that broke off.
        merges_waited: results that were not there when they were to be merged, so that training waited.
        merges_late: those that were merged later instead, as in asynchronous runs.
        newest_step: the last step after which something was taken.
    """

    def __init__(
        self,
        place: Participation,
        tensors: Callable[[], Tensors],
        info_of: Callable[[VersionRef, int], UpdateInfo],
        measured: Measured,
        *,
        sync_every: int,
        max_retries: int,
    ) -> None:
        self._session = session = place.session
        self._tensors, self._info_of, self._max_retries = tensors, info_of, max_retries
        self._measured = measured
        self._outage = Outage()  # in it a turn tries once, and holds up nothing
        info = session.info
        self._tau, self._alpha, self._max_inflight = info.tau, info.alpha, info.max_inflight
        self._waits = info.mode == "sync"
        self._sync_every = sync_every
        self._fragments = [Fragment(exchange) for exchange in place.exchanges]
        self._next = session.due  # fragment, where nobody waits
        self._step = self._due_step = 0  # the last one, and the last after which a fragment had its turn
        self._flights: list[Flight] = []  # oldest first
        self.rounds = self.skipped = self.merges_waited = self.merges_late = self.newest_step = 0
        self.finished = False

    @property
    def under_way(self) -> int:
        return len(self._flights)

    @property
    def counted_step(self) -> int:
        """The last step after which an update was taken that the server has, of any fragment."""
        return max(each.counted_step for each in self._fragments)

    @property
    def merges_in_words(self) -> str:
        """How many results were late: whether tau is long enough."""
        late = f", {self.merges_late} merged late" if self.merges_late else ""
        return f"fragments merged; {self.merges_waited} of them waited for{late}"

    @property
    def _retries(self) -> int:
        return 0 if self._outage.is_on else self._max_retries

    # -- life

    def begin(self) -> None:
        """Send what an earlier process left, and pull every fragment into the model."""
        replies = begin_from(self._fragments, waits=self._waits)
        for fragment, reply in zip(self._fragments, replies, strict=True):
            lost = self._reset(fragment, reply, 0, begins=True)
            if lost is not None:
                raise lost.error
        self._begins_anew()

    def drain(self) -> None:
        """Finish what is under way, within `DRAIN_S`, and merge it.

        Nobody may wait for a next update of this worker meanwhile: it would wait for them in turn.
        """
        end_s = time.monotonic() + DRAIN_S
        for flight in self._flights:
            flight.sent.wait(max(0.0, end_s - time.monotonic()))
        if not all(flight.done.is_set() for flight in self._flights):
            self._session.end()
        for flight in list(self._flights):
            if not flight.done.wait(max(0.0, end_s - time.monotonic())):
                LOG.warning(
                    "%s: the result of fragment %d did not come in %g s; it is not in this model",
                    self._session.site,
                    flight.fragment.index,
                    DRAIN_S,
                )
                self.abandon()
                return
            self._land(flight)

    def abandon(self) -> None:
        """Leave what is under way as it is: its threads move no byte any more, and end."""
        if self._flights:
            self._fragments[0].exchange.break_off()

    # -- one step

    def after_step(self, step: int) -> bool:
        """A local step was made: merge what is to be merged, and take what is due; returns whether anything was."""
        self._step = step
        ready = [flight for flight in self._flights if self._is_ready(flight)]
        for flight in ready:
            if flight in self._flights:  # else it was landed while another one was waited for
                self._land(flight)
        due = not self.finished and self._is_due()
        if due:
            self._due_step = step
            self._turn()
        return due or bool(ready)

    def _is_due(self) -> bool:
        """Whether a fragment's turn has come: every H/K steps, or H_w/K where this worker has an H_w of its own."""
        h = min((each.local_steps for each in self._fragments if each.local_steps), default=self._sync_every)
        return self._step - self._due_step >= max(1, h // len(self._fragments))

    def _is_ready(self, flight: Flight) -> bool:
        """Whether a result is to be merged now; where the run waits for its workers, it then is waited for."""
        if self._step < flight.step + self._tau:
            return flight in self._broken()  # its turn comes again, before what is later in the order
        if flight.done.is_set():
            return True
        if not self._waits and not flight.late:
            flight.late = True
            self.merges_late += 1
        return self._waits

    def _turn(self) -> None:
        while len(self._flights) >= self._max_inflight:
            if not self._waits:
                return  # what is local stays, and is in the fragment's next update
            self._land(self._flights[0])
        self._submit_next()

    def _submit_next(self) -> None:
        """Take the fragment whose turn it is."""
        for _ in range(2 * len(self._fragments)):  # a fragment may turn out to be further than was known
            fragment = self._pick()
            if fragment is None:
                break
            goes_on = self._prepare(fragment)
            if isinstance(goes_on, Lost):
                self._skip(fragment, goes_on)
                break
            if not goes_on:
                break
            self._outage.ended(self._session.site, f"synchronising again from step {self._step} on")
            if fragment is self._pick():
                self._take(fragment)
                break
        self._look_whether_finished()

    def _pick(self) -> Fragment | None:
        """The fragment whose turn it is; None where each is finished or under way."""
        busy = {flight.fragment.index for flight in self._flights}
        free = [each for each in self._fragments if not each.finished and each.index not in busy]
        waits = [each for each in free if self._waits or each.number <= self._session.info.sync_rounds_first]
        if waits:
            return min(waits, key=lambda each: (each.number, each.index))
        return min(free, key=lambda each: (each.index - self._next) % len(self._fragments), default=None)

    def _prepare(self, fragment: Fragment) -> bool | Lost:
        """Have a ticket against the base, in the order that all go by.

        Returns:
            Whether the turn goes on, with whichever fragment it then is. Else what is local comes in a later one.
        """
        exchange, waited = fragment.exchange, False
        steps = exchange.settle(self._retries)
        if isinstance(steps, Lost):
            return steps
        if steps is not None:
            fragment.base_step += steps
            fragment.ticket = None
        elif fragment.ticket is not None:
            is_over = exchange.is_over(fragment.ticket, self._retries)
            if isinstance(is_over, Lost):
                return is_over
            fragment.ticket = None if is_over else fragment.ticket
        heard: Next | None = None
        if fragment.ticket is None:
            reply = exchange.next(0.0, retries=self._retries)
            waited = isinstance(reply, Wait)
            while isinstance(reply, Wait):
                if self._broken():
                    return False  # others may wait for it, and we for them
                reply = exchange.next(LOOK_S if self._flights else None, retries=self._retries)
            if isinstance(reply, Lost):
                return reply
            heard = reply
            fragment.heard(heard)
            if fragment.finished:
                return self._reset(fragment, heard, fragment.base_step) or True
        ticket, base = fragment.ticket, exchange.base.note
        if ticket is not None and base is not None and ticket.base.digest == base.digest:
            return True
        if heard is None:
            reply = exchange.next(0.0, retries=self._retries)
            if isinstance(reply, Lost):
                return reply
            heard = reply
            fragment.heard(heard)
        caught_up = self._catch_up(fragment, heard)
        return caught_up if isinstance(caught_up, Lost) else caught_up and not waited  # while waiting others had turns

    def _catch_up(self, fragment: Fragment, reply: Next) -> bool | Lost:
        """The head moved without us; return whether what is local was carried over to it."""
        if self._session.info.on_missed == "reset":
            return self._reset(fragment, reply, self.newest_step) or False
        return self._rebase(fragment, reply) or True

    def _take(self, fragment: Fragment) -> None:
        """Form the update, and send it on its way."""
        ticket, exchange = fragment.ticket, fragment.exchange
        if fragment.finished or ticket is None:  # none where the head moved while it was pulled, and moves again
            return
        exchange.form(ticket, self._own(fragment), self._info_of(ticket.base, self._step - fragment.base_step))
        fragment.ticket = None
        self._next = (fragment.index + 1) % len(self._fragments)
        self.newest_step = self._step
        flight = Flight(fragment, self._step, self._retries)
        self._flights.append(flight)
        if self._tau == 0:
            flight.run()
            self._land(flight)
        else:
            flight.start()

    def _land(self, flight: Flight) -> None:
        """Merge a result, once it is there."""
        fragment = flight.fragment
        exchange = fragment.exchange
        if not flight.done.is_set():
            self.merges_waited += 1
            self._session.tell(state="waiting for the others")
            self._await(flight)
        self._flights.remove(flight)
        if flight.error is not None:
            raise flight.error
        if flight.refusal is not None:  # the server named what is wrong; begin again from the global model
            LOG.warning(
                "%s: local steps of fragment %d since version %d are lost",
                self._session.site,
                fragment.index,
                fragment.version,
            )
            exchange.refused(flight.refusal)
        if flight.broke_off is not None:
            self._skip(fragment, flight.broke_off)
            return
        assert flight.reply is not None
        alpha = 0.0 if flight.refusal is not None else self._alpha
        apply_version.merge_(self._own(fragment), exchange.files.beside(), alpha)
        if flight.refusal is None:
            self.rounds += 1
        fragment.heard(flight.reply)
        exchange.files.move_up()
        self._begins_from(fragment, flight.step)
        self._begins_anew()

    def _await(self, flight: Flight) -> None:
        """Wait for a result.

        An update that is before it in the order that all go by, and broke off, is submitted meanwhile: others may wait
        for that one, and have not come to this one yet.
        """
        while not flight.done.wait(LOOK_S):
            for broken in self._broken():
                self._land(broken)
            may = self._waits and len(self._flights) < self._max_inflight
            due, mine = self._pick() if may else None, flight.fragment
            if due is not None and (due.number, due.index) < (mine.number, mine.index):
                self._submit_next()

    def _broken(self) -> list[Flight]:
        """Updates whose way broke off, so that they may have to be submitted anew."""
        return [flight for flight in self._flights if flight.done.is_set() and flight.broke_off is not None]

    # -- what else may come

    def _rebase(self, fragment: Fragment, reply: Next) -> Lost | None:
        """The head moved without us: carry local progress over to it."""
        exchange = fragment.exchange
        pulled = exchange.pull_newest(reply.head, None, beside=True, retries=self._retries)
        if isinstance(pulled, Lost):
            exchange.files.drop_beside()
            return pulled
        apply_version.rebase_(self._own(fragment), exchange.base, exchange.files.beside())
        exchange.files.move_up()
        fragment.heard(pulled.newer or reply)
        self._begins_from(fragment, fragment.base_step)
        LOG.info(
            "%s: fragment %d moved on to version %d; local steps were carried over",
            self._session.site,
            fragment.index,
            fragment.version,
        )
        return None

    def _reset(self, fragment: Fragment, reply: Next, step: int, *, begins: bool = False) -> Lost | None:
        """The fragment becomes the head's; at the begin the server is waited for."""
        exchange, own, retries = fragment.exchange, self._own(fragment), None if begins else self._retries
        was_coming = exchange.is_beside(reply.head)  # an earlier process was about to merge it
        into = None if was_coming else own
        pulled = exchange.pull_newest(reply.head, into, beside=was_coming, retries=retries)
        if isinstance(pulled, Lost):
            exchange.files.drop_beside()
            return pulled
        if was_coming:
            apply_version.load_(own, exchange.files.beside())
            exchange.files.move_up()
        fragment.heard(pulled.newer or reply)
        self._begins_from(fragment, step)
        return None

    def _begins_from(self, fragment: Fragment, step: int) -> None:
        """The fragment's local progress is what comes after `step`, beyond what the base holds."""
        note = fragment.exchange.base.note
        assert note is not None
        fragment.exchange.begin_from_base()
        fragment.base_step, fragment.version = step, note.version
        version = min(each.version for each in self._fragments)
        self._session.tell(version=version, state="training")

    def _skip(self, fragment: Fragment, broke_off: Closed | Lost) -> None:
        """A turn broke off: training goes on, and the next update of the fragment holds it all."""
        if isinstance(broke_off, Closed) and self._ended_without_us(fragment):
            self._look_whether_finished()
            return
        self.skipped += 1
        fragment.ticket, fragment.finished = None, False  # its last version is not here yet
        why = why_skipped(broke_off.error, self._session.info)
        self._outage.skipped(broke_off.error, self._session.site, f"of fragment {fragment.index}", why)

    def _ended_without_us(self, fragment: Fragment) -> bool:
        """Return whether a ticket was over because the run is: an asynchronous one ends without some updates."""
        reply = fragment.exchange.ask(0.0, retries=0)
        return isinstance(reply, Finished) and self._reset(fragment, reply, fragment.base_step) is None

    def _begins_anew(self) -> None:
        self._look_whether_finished()
        if not self.finished:  # the global model is measured, as far as it is here
            parts = [(self._own(each), each.exchange.base) for each in self._fragments]
            self._measured.look_at(parts, local=self._alpha > 0)

    def _look_whether_finished(self) -> None:
        """Where the run is over: the model becomes the run's, with every fragment as the last round left it."""
        if self.finished or self._flights or not all(fragment.finished for fragment in self._fragments):
            return
        self.finished = True
        for fragment in self._fragments:
            apply_version.load_(self._own(fragment), fragment.exchange.base)
        LOG.info(
            "%s: the run is finished at version %d; further steps stay local",
            self._session.site,
            min(fragment.version for fragment in self._fragments),
        )

    def _own(self, fragment: Fragment) -> Tensors:
        tensors = self._tensors()
        return {spec.name: tensors[spec.name] for spec in fragment.exchange.layouts.schema.tensors}
