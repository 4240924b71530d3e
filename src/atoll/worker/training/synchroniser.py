"""The synchronisations of DiLoCo, driven by the optimizer's steps: of the whole model, or of one fragment at a time.

DiLoCo: Distributed Low-Communication Training of Language Models (Douillard et al., arXiv 2311.08105), Algorithm 1, and
Streaming DiLoCo with overlapping communication (Douillard et al., arXiv 2501.18512), Algorithm 2. Every H/K local steps
one fragment p is due:

    Δ_p ← b_p − w_p        formed on the training thread, into the fragment's outbox
    b_p ← outer step       at the server
    w_p ← (1−α)·b_p + α·w_p     τ steps later, on the training thread

With τ = 0 the update is sent while it is formed, and the new version is pulled into the parameters. With τ > 0 a thread
sends the update, waits for the result and pulls it to disk, while training goes on. Nothing but the fragment's own
tensors changes; the inner optimizer keeps its state. What becomes of a synchronisation that breaks off:
docs/decisions/0005. docs/walkthrough.md follows one update from here to the next version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from atoll.errors import is_transient
from atoll.protocol.messages import Ticket, VersionRef
from atoll.protocol.values import Accepted, Finished, Lost, Next, Open, Refused, TooLate, UpdateInfo, Wait, require
from atoll.runtime import Latch
from atoll.tensors.module_tensors import Tensors
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.exchange.pull_version import WAITS, Patience
from atoll.worker.log_lines import LOG, why_skipped
from atoll.worker.metrics import Measured
from atoll.worker.session.session import Session
from atoll.worker.training.fragment_order import FragmentOrder, Place, SyncRules

LOOK_S = 1.0
"""While other workers are waited for, how often it is looked whether that is still right."""
DRAIN_S = 60.0
"""At the end, how long what is under way is waited for."""
REPEAT_S = 300.0
"""While an outage lasts, a line about it is repeated after this time at the earliest."""


class Outage:
    """The time from the first synchronisation that is skipped for the network to the next one that is not.

    Args:
        clock: seconds, from any origin.

    Attributes:
        is_on: whether the last synchronisation was skipped for the network: the next ones try once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_on = False
        self._skipped, self._said_s = 0, 0.0

    def skipped(self, error: BaseException, site: str, what: str, why: str) -> None:
        """A synchronisation was skipped: log it, unless the same outage was logged in the last `REPEAT_S`.

        Args:
            what: the synchronisation, as the log names it.
            why: the reason, as a sentence.
        """
        was_on, self.is_on = self.is_on, is_transient(error)
        now_s = self._clock()
        if not (was_on and self.is_on):
            self._skipped, self._said_s = 1, now_s
            LOG.warning("%s: synchronisation %s skipped; training goes on. %s", site, what, why)
            return
        self._skipped += 1
        if now_s - self._said_s >= REPEAT_S:
            self._said_s = now_s
            LOG.warning(
                "%s: synchronisation %s skipped, number %d since the server was lost; training goes on. %s",
                site,
                what,
                self._skipped,
                why,
            )

    def ended(self, site: str, told: str) -> None:
        """The server has answered.

        Args:
            told: what happens now; follows "the server is back".
        """
        if self.is_on:
            more = f" ({self._skipped} were skipped)" if self._skipped > 1 else ""
            LOG.info("%s: the server is back; %s%s", site, told, more)
        self.is_on = False


class FragmentState:
    """Where a worker is with one fragment.

    Attributes:
        round: that it takes part in next.
        ticket: for that round, where there is one.
        local_steps: H_w, where the run has given this worker one (DyLU); else 0.
        base_step: the local step after which what is local now began.
        version: that the base holds.
        ended: why the run has ended; empty while it goes on.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.index = exchange, exchange.fragment
        self.round = 1
        self.ticket: Ticket | None = None
        self.local_steps = self.base_step = self.version = 0
        self.ended = ""

    @property
    def counted_step(self) -> int:
        """The last local step with progress that is in an update at the server."""
        return self.exchange.counted_step(self.base_step)

    def heard(self, reply: Next) -> None:
        """Take over what the server said of the next round."""
        self.ended = reply.reason or "finished" if isinstance(reply, Finished) else ""
        self.ticket = reply.ticket if isinstance(reply, Open) else None
        self.round = self.ticket.round if self.ticket else reply.round
        self.local_steps = self.ticket.local_steps if self.ticket else self.local_steps


class PendingSync:
    """An update on its way, and its result, in a thread of their own.

    Attributes:
        step: after which the update was formed.
        sent: set once the server has the update, or all is over.
        done: set once all is over.
        reply: what the server said of the result, which is in the file beside the base.
        refusal: of the update; the result is the head then.
        broke_off: what became of it, where it did not come to a result.
        error: what ended the thread.
        late: whether the result was not there when it was to be merged.
    """

    def __init__(self, fragment: FragmentState, step: int, retries: int) -> None:
        self.fragment, self.step, self._retries = fragment, step, retries
        self.reply: Next | None = None
        self.refusal: Refused | None = None
        self.broke_off: TooLate | Lost | None = None
        self.error: BaseException | None = None
        self.sent, self.done = Latch(), Latch()
        self.late = False
        threading.Thread(target=self._run, name=f"atoll-fragment-{fragment.index}", daemon=True).start()

    def _run(self) -> None:
        try:
            match self.fragment.exchange.deliver(self._retries):
                case Accepted():
                    self.sent.set()
                    self._fetch()
                case Refused() as refusal:
                    self.refusal = refusal
                    self.fragment.exchange.outbox.clear()  # or the next ticket would have it sent once more
                    self._fetch()
                case TooLate() | Lost() as broke_off:
                    self.broke_off = broke_off
        except BaseException as error:
            self.error = error
        finally:
            self.sent.set()
            self.done.set()

    def _fetch(self) -> None:
        exchange = self.fragment.exchange
        reply = exchange.ask_and_resend(retries=self._retries)
        if isinstance(reply, Lost):
            self.broke_off = reply
            return
        pulled = exchange.pull_newest(reply.head, None, Patience(self._retries), beside=True)
        if isinstance(pulled, Lost):
            self.broke_off = pulled
            exchange.files.drop_beside()
            return
        self.reply = pulled.newer or reply


class Synchroniser:
    """The synchronisations of one worker.

    Args:
        session: of the worker.
        exchanges: of the fragments.
        tensors: gives the model's own, by name.
        rules: of the run.
        info_of: what the update says that is about to be formed from a version, after so many steps.
        measured: is shown the global model after each synchronisation.
        max_retries: attempts before a synchronisation with a lost server is skipped.

    Attributes:
        rounds: results that this worker went on from.
        skipped: synchronisations that broke off.
        merges_waited: results that were not there when they were to be merged, so that training waited.
        merges_late: those that were merged later instead, as in asynchronous runs.
        newest_step: the last step after which an update was formed, or a whole model's synchronisation was skipped.
        staleness: versions between the base of the last update that counts and its version.
        finished: whether the run is over, and its result is the model.
    """

    def __init__(
        self,
        session: Session,
        exchanges: Sequence[Exchange],
        tensors: Callable[[], Tensors],
        rules: SyncRules,
        info_of: Callable[[VersionRef, int], UpdateInfo],
        measured: Measured,
        *,
        max_retries: int,
    ) -> None:
        self._session, self._tensors, self._rules = session, tensors, rules
        self._info_of, self._measured, self._max_retries = info_of, measured, max_retries
        self._fragments = [FragmentState(exchange) for exchange in exchanges]
        self._is_whole = len(self._fragments) == 1
        self._order = FragmentOrder(rules, session.due)
        self._outage = Outage()  # in it a turn tries once, and holds up nothing
        self._step = self._due_step = 0  # the last one, and the last after which a fragment had its turn
        self._pending: list[PendingSync] = []  # oldest first
        self.rounds = self.skipped = self.merges_waited = self.merges_late = self.newest_step = self.staleness = 0
        self.finished = False

    @property
    def under_way(self) -> int:
        """Updates on their way."""
        return len(self._pending)

    @property
    def counted_step(self) -> int:
        """The last step after which an update was formed that the server has, of any fragment."""
        return max(each.counted_step for each in self._fragments)

    @property
    def base_step(self) -> int:
        """The step after which what is local of the first fragment began."""
        return self._fragments[0].base_step

    @property
    def steps_between(self) -> int:
        """Local steps between two turns."""
        return self._order.steps_between(self._places)

    @property
    def next_step(self) -> int:
        """The first step after which something may have to be done, so far as is known now."""
        soon = self._step + 1
        at = [max(soon, each.step + self._rules.tau) for each in self._pending]
        return min([max(soon, self._due_step + self.steps_between), *at])

    @property
    def merges_in_words(self) -> str:
        """How many results were late: whether tau is long enough; empty where none is merged."""
        if self._is_whole and not self._merges:
            return ""
        late = f", {self.merges_late} merged late" if self.merges_late else ""
        return f" (fragments merged; {self.merges_waited} of them waited for{late})"

    @property
    def _merges(self) -> bool:
        """Whether results come into a file, and from there into the model."""
        return self._rules.overlap or self._rules.alpha > 0

    @property
    def _retries(self) -> int:
        return 0 if self._outage.is_on else self._max_retries

    @property
    def _places(self) -> list[Place]:
        busy = {each.fragment.index for each in self._pending}
        return [
            Place(each.round, not each.ended and each.index not in busy, each.local_steps) for each in self._fragments
        ]

    # -- begin and end

    def start(self) -> None:
        """Send what an earlier process left, and pull every fragment into the model; the server is waited for."""
        for fragment, reply in zip(self._fragments, self._send_earlier_updates(), strict=True):
            lost = self._load(fragment, reply, 0, WAITS)
            if lost is not None:
                raise lost.error
        self._after_new_version()

    def _send_earlier_updates(self) -> list[Next]:
        """Send what an earlier process left; return what each fragment is to begin from.

        A round that such an update is in is waited for: what was trained from the version before it would count as new,
        and be a round old. That round waits for nothing of this worker: all that comes before it in the order that all
        workers follow is in, too. Where an update before it is not, or may still be asked for, other workers may wait
        for that one.
        """
        fragments = self._fragments
        is_in = [each.exchange.recover() is not None for each in fragments]
        if self._is_whole:
            replies = [require(fragments[0].exchange.ask_and_resend(None if is_in[0] else 0.0))]
            fragments[0].heard(replies[0])
            return replies
        replies = [require(each.exchange.ask_and_resend(0.0)) for each in fragments]
        waited, others = list[tuple[int, int]](), list[tuple[int, int]]()
        for place, (fragment, reply) in enumerate(zip(fragments, replies, strict=True)):
            fragment.heard(reply)
            note = fragment.exchange.outbox.note
            is_waited = is_in[place] and isinstance(reply, Wait) and note is not None and note.round == reply.round
            if self._rules.waits and is_waited:
                waited.append((reply.round, place))
            elif not fragment.ended:  # without a ticket it may be taken into the open round, when others end
                others.append((fragment.round, place) if fragment.ticket else (0, place))
        for number, place in sorted(waited):
            if others and (number, place) > min(others):
                break
            while isinstance(replies[place], Wait) and replies[place].round == number:  # not into another one
                replies[place] = require(fragments[place].exchange.ask_and_resend(LOOK_S))
            fragments[place].heard(replies[place])
        return replies

    def drain(self) -> None:
        """Finish what is under way, within `DRAIN_S`, and merge it.

        The end is announced first, so that no round waits for a next update of this worker meanwhile.
        """
        end_s = time.monotonic() + DRAIN_S
        for pending in self._pending:
            pending.sent.wait(max(0.0, end_s - time.monotonic()))
        if not all(pending.done.is_set() for pending in self._pending):
            self._session.end()
        for pending in list(self._pending):
            if not pending.done.wait(max(0.0, end_s - time.monotonic())):
                LOG.warning(
                    "%s: the result of fragment %d did not come in %g s; it is not in this model",
                    self._session.site,
                    pending.fragment.index,
                    DRAIN_S,
                )
                self.abandon()
                return
            self._land(pending)

    def abandon(self) -> None:
        """Leave what is under way as it is: its threads move no byte any more, and end."""
        if self._pending:
            self._fragments[0].exchange.break_off()

    # -- one step

    def after_step(self, step: int) -> bool:
        """A local step was made: merge what is ready, and submit what is due; return whether anything was."""
        self._step = step
        ready = [pending for pending in self._pending if self._is_ready(pending)]
        for pending in ready:
            if pending in self._pending:  # else it was landed while another one was waited for
                self._land(pending)
        due = not self.finished and step - self._due_step >= self.steps_between
        if due:
            self._due_step = step
            self._turn()
        return due or bool(ready)

    def _is_ready(self, pending: PendingSync) -> bool:
        """Return whether a result is to be merged now; where the run waits for its workers, it then is waited for."""
        if self._step < pending.step + self._rules.tau:
            return pending in self._broken()  # its turn comes again, before what is later in the order
        if pending.done.is_set():
            return True
        if not self._rules.waits and not pending.late:
            pending.late = True
            self.merges_late += 1
        return self._rules.waits

    def _turn(self) -> None:
        while len(self._pending) >= self._rules.max_inflight:
            if not self._rules.waits:
                return  # what is local stays, and is in the fragment's next update
            self._land(self._pending[0])
        self._submit_next()

    def _submit_next(self) -> None:
        """Submit the fragment that is due."""
        for _ in range(2 * len(self._fragments)):  # a fragment may turn out to be further than was known
            index = self._order.pick(self._places)
            if index is None:
                break
            fragment = self._fragments[index]
            goes_on = self._prepare(fragment)
            if isinstance(goes_on, TooLate | Lost):
                self._skip(fragment, goes_on)
                break
            if not goes_on:
                break
            if index == self._order.pick(self._places):
                self._submit(fragment)
                break
        self._look_whether_finished()

    def _prepare(self, fragment: FragmentState) -> bool | Lost:
        """Have a ticket against the base, in the order that all workers follow.

        Returns:
            Whether the turn goes on, with the fragment that is then due. Else what is local comes in a later one.
        """
        exchange, waited = fragment.exchange, False
        lost = self._settle(fragment)
        if lost is not None:
            return lost
        reply: Next | Lost | None = None
        if fragment.ticket is None:
            reply, waited = self._next_round(exchange)
            if reply is None:
                return False
            if isinstance(reply, Lost):
                return reply
            fragment.heard(reply)
            if fragment.ended:
                return self._load(fragment, reply, self._step if self._is_whole else fragment.base_step) or True
        ticket, base = fragment.ticket, exchange.base.note
        if ticket is not None and base is not None and ticket.base.digest == base.digest:
            return True
        if reply is None:
            reply = exchange.ask_and_resend(0.0, retries=self._retries)
            if isinstance(reply, Lost):
                return reply
            fragment.heard(reply)
        assert not isinstance(reply, Lost)
        caught_up = self._catch_up(fragment, reply)
        if isinstance(caught_up, Lost):
            return caught_up
        return caught_up and (self._is_whole or not waited)  # while it was waited for, others had turns of theirs

    def _settle(self, fragment: FragmentState) -> Lost | None:
        """Take from the local steps what turns out to be in, and forget a ticket that is over."""
        steps = fragment.exchange.settle(self._retries)
        if isinstance(steps, Lost):
            return steps
        if steps is not None:
            fragment.base_step += steps
            fragment.ticket = None
        elif fragment.ticket is not None:
            is_over = fragment.exchange.is_over(fragment.ticket, self._retries)
            if isinstance(is_over, Lost):
                return is_over
            fragment.ticket = None if is_over else fragment.ticket
        return None

    def _next_round(self, exchange: Exchange) -> tuple[Next | Lost | None, bool]:
        """Wait for the next round of a fragment; None where something else has to be done first.

        Returns:
            What the server said, and whether it was waited for.
        """
        if self._is_whole:
            return exchange.ask_and_resend(retries=self._retries), False
        reply = exchange.ask_and_resend(0.0, retries=self._retries)
        waited = isinstance(reply, Wait)
        while isinstance(reply, Wait):
            if self._broken():
                return None, True  # other workers may wait for it, and this one for them
            reply = exchange.ask_and_resend(LOOK_S if self._pending else None, retries=self._retries)
        return reply, waited

    def _catch_up(self, fragment: FragmentState, reply: Next) -> bool | Lost:
        """The head moved on without this worker; return whether what is local was carried over to it."""
        site, name, version = self._session.site, self._name(fragment), fragment.version
        if self._rules.on_missed == "reset":
            missed = self._step - fragment.base_step
            lost = self._load(fragment, reply, self._step if self._is_whole else self.newest_step)
            if lost is not None:
                return lost
            LOG.warning(
                "%s: %s moved on to version %d; %d local steps since version %d are lost",
                site,
                name,
                fragment.version,
                missed,
                version,
            )
            self._after_new_version()
            return False
        pulled = fragment.exchange.rebase(reply.head, self._own(fragment), retries=self._retries)
        if isinstance(pulled, Lost):
            return pulled
        fragment.heard(pulled.newer or reply)
        self._count_steps_from(fragment, fragment.base_step)
        LOG.info("%s: %s moved on to version %d; local steps were carried over", site, name, fragment.version)
        return True

    def _submit(self, fragment: FragmentState) -> None:
        """Form the update, and send it on its way."""
        ticket, exchange = fragment.ticket, fragment.exchange
        if fragment.ended or ticket is None:  # none where the head moved while it was pulled, and moves again
            return
        info = self._info_of(ticket.base, self._step - fragment.base_step)
        self._order.took(fragment.index)
        self.newest_step = self._step
        if self._rules.overlap:
            exchange.form(ticket, self._own(fragment), info)
            fragment.ticket = None
            self._answered()
            self._pending.append(PendingSync(fragment, self._step, self._retries))
            return
        match exchange.submit(ticket, self._own(fragment), info, retries=self._retries):
            case Accepted():
                fragment.ticket = None
                broke_off: TooLate | Lost | None = self._await_result(fragment)
            case Refused() as refusal:
                self._refused(fragment, refusal)
                reply = exchange.ask_and_resend(0.0, retries=self._retries)
                broke_off = reply if isinstance(reply, Lost) else self._load(fragment, reply, self._step)
            case TooLate() | Lost() as broke_off:
                pass
        if broke_off is None:
            self._answered()
            self._after_new_version()
        else:
            self._skip(fragment, broke_off)

    def _await_result(self, fragment: FragmentState) -> Lost | None:
        """Wait until the round is committed, and go on from its result."""
        self._session.tell(state="waiting for the others")
        reply = fragment.exchange.ask_and_resend(retries=self._retries)
        if isinstance(reply, Lost):
            return reply
        self._counted(reply)
        # where a round begins from the global model, steps from a part of it would be lost
        waits = isinstance(reply, Finished) or self._rules.on_missed == "reset"
        patience = Patience(self._retries, None if waits else self._retries)
        return self._load(fragment, reply, self._step, patience, alpha=self._rules.alpha)

    def _counted(self, reply: Next) -> None:
        self.rounds += 1
        self.staleness = reply.previous.staleness if reply.previous is not None else 0

    def _land(self, pending: PendingSync) -> None:
        """Merge a result, once it is there."""
        fragment = pending.fragment
        if not pending.done.is_set():
            self.merges_waited += 1
            self._session.tell(state="waiting for the others")
            self._await(pending)
        self._pending.remove(pending)
        if pending.error is not None:
            raise pending.error
        if pending.refusal is not None:
            self._refused(fragment, pending.refusal)
        if pending.broke_off is not None:
            self._skip(fragment, pending.broke_off)
            return
        assert pending.reply is not None
        if pending.refusal is None:
            self._counted(pending.reply)
        alpha = self._rules.alpha if pending.refusal is None else 0.0
        self._merge(fragment, pending.reply, pending.step, alpha)
        self._after_new_version()

    def _await(self, pending: PendingSync) -> None:
        """Wait for a result.

        An update that is before it in the order that all workers follow, and broke off, is submitted meanwhile: others
        may wait for that one, and have not come to this one yet.
        """
        while not pending.done.wait(LOOK_S):
            for broken in self._broken():
                self._land(broken)
            may = self._rules.waits and len(self._pending) < self._rules.max_inflight
            due, mine = self._order.pick(self._places) if may else None, pending.fragment
            if due is not None and (self._fragments[due].round, due) < (mine.round, mine.index):
                self._submit_next()

    def _broken(self) -> list[PendingSync]:
        """Return the updates that broke off on their way, so that they may have to be submitted anew."""
        return [each for each in self._pending if each.done.is_set() and each.broke_off is not None]

    # -- versions into the model

    def _load(
        self,
        fragment: FragmentState,
        reply: Next,
        step: int,
        patience: Patience | None = None,
        *,
        alpha: float = 0.0,
    ) -> Lost | None:
        """The fragment becomes the head, or is merged with it.

        Args:
            step: after which what is local begins then.
            patience: with a lost server; None: as in a synchronisation, but a pull that has begun is waited for. Where
                it ends within a pull, training goes on from a model that is the version in part; the next
                synchronisation carries what it makes of it over to the head.
        """
        exchange, own, before = fragment.exchange, self._own(fragment), fragment.exchange.base.note
        patience = patience or Patience(self._retries)
        # beside the base, too, where an earlier process was about to merge it
        beside = alpha > 0 or (self._merges and exchange.is_beside(reply.head))
        into = None if beside else own
        pulled = exchange.pull_newest(reply.head, into, patience, beside=beside)
        if isinstance(pulled, Lost):
            exchange.files.drop_beside()
            if not beside and patience.within is not None and exchange.base.note is not before:
                self._go_on_from_a_part(fragment, own, reply.head.number)
            return pulled
        reply = pulled.newer or reply
        if beside:
            self._merge(fragment, reply, step, alpha)
        else:
            fragment.heard(reply)
            self._count_steps_from(fragment, step)
        return None

    def _merge(self, fragment: FragmentState, reply: Next, step: int, alpha: float) -> None:
        """Merge the version beside the base into the model; it becomes the base."""
        files = fragment.exchange.files
        apply_version.merge_(self._own(fragment), files.beside(), alpha)
        fragment.heard(reply)
        files.move_up()
        self._count_steps_from(fragment, step)

    def _go_on_from_a_part(self, fragment: FragmentState, own: Tensors, version: int) -> None:
        LOG.warning(
            "%s: the pull of version %d broke off: the model is that version in part, and training goes on from it",
            self._session.site,
            version,
        )
        fragment.exchange.make_base_of(own)
        fragment.exchange.forget_outbox_progress()
        fragment.base_step = self._step

    def _count_steps_from(self, fragment: FragmentState, step: int) -> None:
        """The fragment's local progress is what comes after `step`, beyond what the base holds."""
        note = fragment.exchange.base.note
        assert note is not None
        fragment.exchange.forget_outbox_progress()
        fragment.base_step, fragment.version = step, note.version
        self._session.tell(version=min(each.version for each in self._fragments), state="training")

    def _after_new_version(self) -> None:
        self._look_whether_finished()
        if not self.finished:  # the global model is measured, as far as it is here
            parts = [(self._own(each), each.exchange.base) for each in self._fragments]
            self._measured.look_at(parts, local=self._rules.alpha > 0)

    def _own(self, fragment: FragmentState) -> Tensors:
        tensors = self._tensors()
        return {spec.name: tensors[spec.name] for spec in fragment.exchange.layouts.schema.tensors}

    # -- what else may come

    def _refused(self, fragment: FragmentState, refusal: Refused) -> None:
        """The server named what is wrong; begin again from the global model."""
        of = "" if self._is_whole else f" of fragment {fragment.index}"
        LOG.warning("%s: local steps%s since version %d are lost", self._session.site, of, fragment.version)
        fragment.exchange.refused(refusal)

    def _skip(self, fragment: FragmentState, broke_off: TooLate | Lost) -> None:
        """A turn broke off: training goes on, and the next update of the fragment holds it all."""
        if isinstance(broke_off, TooLate) and self._ended_without_us(fragment):
            self._look_whether_finished()
            return
        self.skipped += 1
        fragment.ticket, fragment.ended = None, ""  # its last version is not here yet
        what = f"of fragment {fragment.index}"
        if self._is_whole:
            what, self.newest_step = f"at step {self._step}", self._step
        why = why_skipped(broke_off.error, self._session.info)
        self._outage.skipped(broke_off.error, self._session.site, what, why)

    def _ended_without_us(self, fragment: FragmentState) -> bool:
        """Return whether a ticket was over because the run is: an asynchronous one ends without some updates.

        It is no skipped synchronisation then. Where the network is lost on the way, a later turn finds out.
        """
        reply = fragment.exchange.ask(0.0, retries=0)
        step = self._step if self._is_whole else fragment.base_step
        return isinstance(reply, Finished) and self._load(fragment, reply, step) is None

    def _answered(self) -> None:
        """The server is there."""
        told = f"synchronised at step {self._step}"
        if self._rules.overlap:
            told = f"synchronising again from step {self._step} on"
        self._outage.ended(self._session.site, told)

    def _look_whether_finished(self) -> None:
        """Where the run is over: the model becomes the run's, with every fragment as the last round left it."""
        if self.finished or self._pending or not all(fragment.ended for fragment in self._fragments):
            return
        self.finished = True
        if self._merges or not self._is_whole:  # else nothing has changed since it was pulled into the model
            for fragment in self._fragments:
                apply_version.load_(self._own(fragment), fragment.exchange.base)
        ended = self._fragments[0].ended
        LOG.info(
            "%s: the run is finished at version %d%s; further steps stay local",
            self._session.site,
            min(fragment.version for fragment in self._fragments),
            f" ({ended})" if ended != "finished" else "",
        )

    def _name(self, fragment: FragmentState) -> str:
        return "the run" if self._is_whole else f"fragment {fragment.index}"
