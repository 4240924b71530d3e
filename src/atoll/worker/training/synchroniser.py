"""Synchronise the model of a DiLoCo worker during training: the whole model, or one fragment at a time.

DiLoCo: Distributed Low-Communication Training of Language Models (Douillard et al., arXiv 2311.08105), Algorithm 1, and
Streaming DiLoCo with overlapping communication (Douillard et al., arXiv 2501.18512), Algorithm 2. The model has K
fragments. Every H/K local steps, one fragment p with base b_p and local parameters w_p is due:

    Δ_p ← b_p − w_p        formed on the training thread, written into the fragment's outbox file
    b_p ← outer step       at the server
    w_p ← (1−α)·b_p + α·w_p     τ steps later, on the training thread

With τ = 0, training stops until the update is sent and the new version is loaded into the parameters. With τ > 0, a
thread sends the update, waits for the result and downloads it to disk, while training continues. A synchronisation
changes only the tensors of its fragment; the inner optimizer keeps its state. docs/decisions/0005 says what happens
when a synchronisation fails. docs/walkthrough.md follows one update from this file to the next version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from atoll.errors import TicketClosed, is_transient
from atoll.format_text import of_fragment
from atoll.protocol.messages import Report, Ticket, VersionRef
from atoll.protocol.values import (
    Accepted,
    Delivered,
    Finished,
    Lost,
    Next,
    Open,
    Refused,
    SatOut,
    TooLate,
    Wait,
    require,
)
from atoll.runtime import Latch
from atoll.tensors.module_tensors import Tensors
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.encode_update import LocalFragment
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.exchange.pull_version import WAITS, Patience
from atoll.worker.log_lines import LOG, why_skipped
from atoll.worker.session.session import OF_LOST_STEPS, Session
from atoll.worker.training.fragment_order import Candidate, FragmentOrder, SyncRules
from atoll.worker.training.metrics import GlobalModelMetrics

OTHERS_S = 15.0
"""Seconds for which a worker waits for a fragment's round before it looks whether another one has gone back."""
LOOK_S = 1.0
"""Seconds after which a worker that waits for other workers checks whether it must submit another update first."""
DRAIN_S = 60.0
"""Longest wait in seconds, at the end of training, for updates in flight and their results."""
REPEAT_S = 300.0
"""Least seconds between two log lines about the same outage."""


class Outage:
    """Logs outages of the server: from a synchronisation that fails (network error) to the next one that succeeds.

    Args:
        clock: returns the time in seconds.

    Attributes:
        is_on: whether there is an outage: the last synchronisation was skipped because of a network error. During an
            outage, each synchronisation tries to reach the server only once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_on = False
        self._skipped, self._said_s = 0, 0.0

    def skipped(self, error: BaseException, site: str, what: str, why: str) -> None:
        """Record a skipped synchronisation, and log it. Within an outage, log at most once in `REPEAT_S` seconds.

        Args:
            error: the error that caused the skip.
            site: the site's name.
            what: which synchronisation it was, for the log, such as "at step 500".
            why: the reason, as a sentence.
        """
        was_on, self.is_on = self.is_on, is_transient(error)
        now_s = self._clock()
        if not (was_on and self.is_on):
            self._skipped, self._said_s = 1, now_s
            LOG.warning("%s: synchronisation %s skipped; training continues. %s", site, what, why)
            return
        self._skipped += 1
        if now_s - self._said_s >= REPEAT_S:
            self._said_s = now_s
            LOG.warning(
                "%s: synchronisation %s skipped (%d skipped in this outage); training continues. %s",
                site,
                what,
                self._skipped,
                why,
            )

    def ended(self, site: str, text: str) -> None:
        """Record that the server has answered. If there was an outage, log that it is over.

        Args:
            site: the site's name.
            text: what to log after "the server answers again; ", such as "synchronised at step 500".
        """
        if self.is_on:
            skips = f" ({self._skipped} synchronisations were skipped)" if self._skipped > 1 else ""
            LOG.info("%s: the server answers again; %s%s", site, text, skips)
        self.is_on = False


class FragmentState:
    """The state of one fragment of the model at a worker.

    Args:
        exchange: the fragment's exchange with the server.

    Attributes:
        exchange: the fragment's exchange with the server.
        index: number of the fragment.
        round: the round that the worker takes part in next.
        ticket: the ticket for that round; None if there is none yet.
        local_steps: H_w, if the run has given this worker a number of local steps for this round; else 0.
        base_step: the last local step that the base includes; local progress consists of the later steps.
        version: the version in the base.
        config: what the run tells this site for its newest round.
        step_offset: local steps that the version in the base has behind it, along one site, minus those of this worker.
        ended: the reason why the run has ended; empty until then.
        went_back: whether the run has gone back to an earlier version, as its admin asked, since the base was loaded.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.index = exchange, exchange.fragment
        self.round = 1
        self.ticket: Ticket | None = None
        self.config: Mapping[str, Any] = {}
        self.local_steps = self.base_step = self.version = self.step_offset = self._head_steps = 0
        self.ended = ""
        self._generation: int | None = None
        self.went_back = False

    @property
    def counted_step(self) -> int:
        """The last local step of this fragment that an update at the server contains."""
        return self.exchange.counted_step(self.base_step)

    def loaded(self, step: int, version: int) -> None:
        """Record that the base is now the version that the last reply has named as the newest.

        Args:
            step: the last local step of this worker that it includes.
            version: its number.
        """
        self.base_step, self.version, self.step_offset = step, version, self._head_steps - step
        self.went_back = False

    def heard(self, reply: Next) -> None:
        """Store the server's reply about the next round: its ticket and number, or that the run has ended."""
        self._head_steps = reply.global_step
        self.ended = reply.reason or "finished" if isinstance(reply, Finished) else ""
        self.went_back = self.went_back or self.goes_back(reply)
        self.ticket = reply.ticket if isinstance(reply, Open) else None
        self.round = self.ticket.round if self.ticket else reply.round
        if isinstance(reply, Open | Wait):  # without a ticket, this worker trains for the round that comes
            told = self.ticket or reply
            self.local_steps, self.config = told.local_steps, told.config
        self._generation = self.ticket.generation if self.ticket else self._generation

    def goes_back(self, reply: Next) -> bool:
        """Return whether the run has gone back since the last reply, so that local steps since then do not count."""
        return isinstance(reply, Open) and self._generation not in (None, reply.ticket.generation)


class PendingSync:
    """An update in flight. A thread sends it, waits for the new version, and downloads this version to `base-next`.

    The thread runs from `start` on. If the worker sits out the round, the thread says so in place of sending an update.

    Args:
        fragment: the fragment of the update.
        step: the local step after which the update was formed.
        retries: how often to try again after a network error.
        deliver: sends the update, or the message that the worker sits out the round.

    Attributes:
        step: the local step after which the update was formed.
        sent: set once the server has the update, or the thread has ended.
        done: set once the thread has ended.
        reply: the server's reply about the next round; set once the new version is in the file `base-next`.
        refusal: the server's refusal of the update, if any. In this case, the newest version is downloaded instead.
        broke_off: why no new version was downloaded: the update came too late, or the server was lost. None: neither
            happened.
        error: the error that ended the thread, if any.
        late: in an asynchronous run, whether the new version had not arrived when it should have been merged.
        gives_way: set to let the thread end within `OTHERS_S` although the new version is not there, because another
            fragment comes first.
        sits_out: whether the worker sits out the round.
    """

    def __init__(
        self,
        fragment: FragmentState,
        step: int,
        retries: int,
        deliver: Callable[[], Delivered | SatOut],
        *,
        sits_out: bool,
    ) -> None:
        self.fragment, self.step, self._retries = fragment, step, retries
        self._deliver, self.sits_out = deliver, sits_out
        self.reply: Next | None = None
        self.refusal: Refused | None = None
        self.broke_off: TooLate | Lost | None = None
        self.error: BaseException | None = None
        self.sent, self.done = Latch(), Latch()
        self.late = self.gives_way = False
        self._thread = threading.Thread(target=self._run, name=f"atoll-fragment-{fragment.index}", daemon=True)

    def start(self) -> None:
        """Start the thread that sends the update."""
        self._thread.start()

    def _run(self) -> None:
        try:
            match self._deliver():
                case Accepted() | SatOut():
                    self.sent.set()
                    self._fetch()
                case Refused() as refusal:
                    self.refusal = refusal
                    self.fragment.exchange.outbox.clear()  # else the next ticket would resend the update
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
        reply = _ask_for_result(exchange, self._retries, lambda: self.gives_way)
        if isinstance(reply, TooLate | Lost):
            self.broke_off = reply
            return
        pulled = exchange.pull_newest(reply.head, None, Patience(self._retries), to_next=True)
        if isinstance(pulled, Lost):
            self.broke_off = pulled
            exchange.files.close_next_base()
            return
        self.reply = pulled.newer or reply


def _ask_for_result(exchange: Exchange, retries: int, gives_way: Callable[[], bool]) -> Next | TooLate | Lost:
    """Wait for the round after the one that the worker has submitted to. Return the server's reply.

    Args:
        exchange: exchange of the fragment.
        retries: how often to try again after a network error.
        gives_way: returns whether to wait no longer, because the run has gone back with another fragment, which comes
            first; asked every `OTHERS_S`.

    Returns:
        The reply; `TooLate` if the worker gives way: its update may count all the same; `Lost` if the server cannot be
        reached.
    """
    if exchange.local.number is None:  # there is no other fragment
        return exchange.ask_and_resend(retries=retries)
    reply = exchange.ask_and_resend(OTHERS_S, retries=retries)
    while isinstance(reply, Wait):
        if gives_way():
            return TooLate(TicketClosed("The run has gone back with another fragment, which comes before this one."))
        reply = exchange.ask_and_resend(OTHERS_S, retries=retries)
    return reply


class Synchroniser:
    """Synchronises the model of one worker with the run: call `after_step` after every local step.

    Args:
        session: the worker's session.
        exchanges: for each fragment of the model, its exchange with the server.
        tensors: returns the model's own tensors by name.
        rules: the run's rules for synchronising.
        report_of: returns the report of an update, given its base version and number of local steps.
        measured: calls the user's metrics function on the global model after each synchronisation.
        max_retries: how often to try again to reach a lost server before a synchronisation is skipped.

    Attributes:
        rounds: number of this worker's updates that went into a new version of the global model.
        skipped: number of skipped synchronisations.
        merges_waited: number of new versions for which training had to wait.
        merges_late: in an asynchronous run, number of new versions that had not arrived τ steps after the update.
        newest_step: the last step after which an update was formed or, in a run without fragments, a synchronisation
            was skipped.
        staleness: how many versions were made between the base of the last counted update and the version that includes
            this update.
        finished: whether the run is over, so that the model is the run's result.
        put_first_: gives the model the buffers with the rule `first` that were loaded.
    """

    def __init__(
        self,
        session: Session,
        exchanges: Sequence[Exchange],
        tensors: Callable[[], Tensors],
        rules: SyncRules,
        report_of: Callable[[VersionRef, int], Report],
        measured: GlobalModelMetrics,
        *,
        max_retries: int,
    ) -> None:
        self._session, self._tensors, self._rules = session, tensors, rules
        self._report_of, self._measured, self._max_retries = report_of, measured, max_retries
        self.put_first_: Callable[[LocalFragment, Tensors], None] = lambda local, loaded: None
        self._fragments = [FragmentState(exchange) for exchange in exchanges]
        self._is_whole = len(self._fragments) == 1
        self._order = FragmentOrder(rules, session.due)
        self._outage = Outage()
        self._step = self._due_step = 0  # the last local step, and the last one after which a fragment was due
        self._pending: list[PendingSync] = []  # oldest first
        self.rounds = self.skipped = self.merges_waited = self.merges_late = self.newest_step = self.staleness = 0
        self.finished = False

    @property
    def in_flight(self) -> int:
        """Number of updates in flight: formed, but their results not merged into the model yet."""
        return len(self._pending)

    @property
    def counted_step(self) -> int:
        """The highest local step, over all fragments, that an update at the server contains."""
        return max(each.counted_step for each in self._fragments)

    @property
    def base_step(self) -> int:
        """The last local step of this worker that the base of the first fragment includes."""
        return self._fragments[0].base_step

    @property
    def version(self) -> int:
        """The version of the global model that the model has; with several fragments, the oldest of their versions."""
        return min(each.version for each in self._fragments)

    @property
    def step_offset(self) -> int:
        """The difference between the global step and this worker's own step: 0 if it has been there from the start."""
        return max(each.step_offset for each in self._fragments)

    @property
    def config(self) -> dict[str, Any]:
        """What the run tells this site for the newest round that it takes part in."""
        return dict(max(self._fragments, key=lambda each: each.round).config)

    @property
    def sync_every(self) -> int:
        """Local steps between two synchronisations of one fragment now, H: the run may change it."""
        return self._order.steps_of_all(self._candidates)

    @property
    def steps_between(self) -> int:
        """Local steps between the synchronisation of one fragment and that of the next."""
        return self._order.steps_between(self._candidates)

    @property
    def next_step(self) -> int:
        """The next step after which, as far as is known now, an update is due or a result has to be merged."""
        soon = self._step + 1
        due_steps = [max(soon, each.step + self._rules.tau) for each in self._pending]
        return min([max(soon, self._due_step + self.steps_between), *due_steps])

    @property
    def merges_in_words(self) -> str:
        """A text for the log: how many new versions training waited for, and how many were merged late.

        If these numbers are high, τ is too small. The text is empty if the run has one fragment and no merging: τ = 0
        and α = 0.
        """
        if self._is_whole and not self._merges:
            return ""
        late = f"; late: {self.merges_late}" if self.merges_late else ""
        return f" (merges that training waited for: {self.merges_waited}{late})"

    @property
    def _merges(self) -> bool:
        """Whether a new version is first downloaded into a file and then merged, not loaded directly into the model."""
        return self._rules.overlap or self._rules.alpha > 0

    @property
    def _retries(self) -> int:
        return 0 if self._outage.is_on else self._max_retries

    @property
    def _candidates(self) -> list[Candidate]:
        busy = {each.fragment.index for each in self._pending}
        return [
            Candidate(each.round, not each.ended and each.index not in busy, each.local_steps)
            for each in self._fragments
        ]

    # -- start and end

    def start(self, load_kept: Sequence[Callable[[], None]] = ()) -> None:
        """Send the updates that an earlier process left, then load the newest version of every fragment into the model.

        If the server does not answer, keep trying for up to ATOLL_GIVE_UP_S.

        Args:
            load_kept: functions that load the tensors that the site keeps for itself, once the versions are there.
        """
        for fragment, reply in zip(self._fragments, self._send_earlier_updates(), strict=True):
            lost = self._load(fragment, reply, 0, WAITS)
            if lost is not None:
                raise lost.error
        for load in load_kept:
            load()
        self._after_new_version()

    def _send_earlier_updates(self) -> list[Next]:
        """Send the updates that an earlier process left. Return the server's reply for each fragment's next round.

        If a fragment's update went into an open round, wait for that round's result. Otherwise, this worker would train
        from the version before that round, and its next update would be one round too old.

        With several fragments, wait only if this worker's updates of all fragments that come earlier in `FragmentOrder`
        are at the server. Otherwise, another worker may be waiting for one of these updates, and the two workers would
        wait for each other.
        """
        fragments = self._fragments
        is_in = [each.exchange.recover() for each in fragments]
        if self._is_whole:
            replies = [require(fragments[0].exchange.ask_and_resend(None if is_in[0] else 0.0))]
            fragments[0].heard(replies[0])
            return replies
        replies = [require(each.exchange.ask_and_resend(0.0)) for each in fragments]
        waited, others = list[tuple[int, int]](), list[tuple[int, int]]()
        for index, (fragment, reply) in enumerate(zip(fragments, replies, strict=True)):
            fragment.heard(reply)
            note = fragment.exchange.outbox.note
            is_waited = is_in[index] and isinstance(reply, Wait) and note is not None and note.round == reply.round
            if self._rules.waits and is_waited:
                waited.append((reply.round, index))
            elif not fragment.ended:  # without a ticket, this worker may still get one for the open round
                others.append((fragment.round, index) if fragment.ticket else (0, index))
        for number, index in sorted(waited):
            if others and (number, index) > min(others):
                break
            while isinstance(replies[index], Wait) and replies[index].round == number:  # only this round
                replies[index] = require(fragments[index].exchange.ask_and_resend(LOOK_S))
            fragments[index].heard(replies[index])
        return replies

    def drain(self) -> None:
        """Wait, for up to `DRAIN_S` seconds, until the updates in flight are sent and their results have been merged.

        When the updates are sent, tell the server that no further update follows, so that no round waits for this
        worker.
        """
        end_s = time.monotonic() + DRAIN_S
        for pending in self._pending:
            pending.sent.wait(max(0.0, end_s - time.monotonic()))
        if not all(pending.done.is_set() for pending in self._pending):
            self._session.end()
        for pending in list(self._pending):
            if not pending.done.wait(max(0.0, end_s - time.monotonic())):
                of = of_fragment(pending.fragment.exchange.local.number)
                text = f"the new version{of} did not arrive within {DRAIN_S:g} s; the model does not contain it"
                self._session.report(OF_LOST_STEPS, text)
                self.abandon()
                return
            self._finish_sync(pending)

    def abandon(self) -> None:
        """Stop the threads that send the updates in flight. They send and receive nothing more."""
        if self._pending:
            self._fragments[0].exchange.break_off()

    # -- one step

    def begins(self, step: int) -> bool:
        """Record that a local step was made. Return whether `after_step` may now submit an update or change the model.

        Args:
            step: the number of the local step.

        Raises:
            AtollError: the error that a heartbeat got and that ends this worker, such as `ServerFailed`.
        """
        self._session.require_sound()
        self._step = step
        return self._is_due or any(each.done.is_set() or step >= each.step + self._rules.tau for each in self._pending)

    @property
    def _is_due(self) -> bool:
        return not self.finished and self._step - self._due_step >= self.steps_between

    def after_step(self, step: int) -> bool:
        """Merge new versions that are ready, and submit the fragment that is due.

        Args:
            step: the number of the local step that was just made.

        Returns:
            Whether the result of an update was ready or a fragment was due.
        """
        self._step = step
        ready = [pending for pending in self._pending if self._is_ready(pending)]
        for pending in ready:
            if pending in self._pending:  # else merged during the wait for another result
                self._finish_sync(pending)
        due = self._is_due
        if due:
            self._due_step = step
            self._submit_due()
        return due or bool(ready)

    def sync_now(self, step: int) -> None:
        """Submit the fragment that is due next, although its steps are not complete, and wait for all results.

        Args:
            step: the number of the last local step.
        """
        self._step = self._due_step = step
        self._submit_due()
        for pending in list(self._pending):
            if pending in self._pending:  # else merged during the wait for another result
                self._finish_sync(pending)

    def _is_ready(self, pending: PendingSync) -> bool:
        """Return whether to merge an update's result now: the new version is here and due, or the update failed.

        In a synchronous run, also return True when the new version is due but has not arrived: then training waits for
        it.
        """
        if self._step < pending.step + self._rules.tau:
            return pending in self._broken()  # handle a failed one at once: its fragment is due again
        if pending.done.is_set():
            return True
        if not self._rules.waits and not pending.late:
            pending.late = True
            self.merges_late += 1
        return self._rules.waits

    def _submit_due(self) -> None:
        """Submit the fragment that is due.

        If `max_inflight` updates are in flight, a synchronous run first waits for the result of the oldest one; an
        asynchronous run submits nothing this time.
        """
        while len(self._pending) >= self._rules.max_inflight:
            if not self._rules.waits:
                return  # the local steps stay, and will be in the fragment's next update
            self._finish_sync(self._pending[0])
        self._submit_next()

    def _submit_next(self) -> None:
        """Choose the fragment that is due, get a ticket (permission to submit) for its round, and submit its update."""
        for _ in range(2 * len(self._fragments)):  # if the server reports a later round, another fragment is due
            index = self._order.pick(self._candidates)
            if index is None:
                break
            fragment = self._fragments[index]
            goes_on = self._prepare(fragment)
            if isinstance(goes_on, TooLate | Lost):
                self._skip(fragment, goes_on)
                break
            if not goes_on:
                break
            if index == self._order.pick(self._candidates):
                self._submit(fragment)
                break
        self._look_whether_finished()

    def _prepare(self, fragment: FragmentState) -> bool | Lost:
        """Get a ticket (permission to submit) for a fragment. If a version newer than the base exists, catch up.

        Returns:
            True: continue with the fragment that is due now, which may be another one. False: submit nothing this time;
            the local steps will be in a later update. `Lost`: the server cannot be reached.
        """
        exchange, waited = fragment.exchange, False
        lost = self._settle_last_update(fragment)
        if lost is not None:
            return lost
        reply: Next | Lost | None = None
        if fragment.ticket is None:
            reply, waited = self._next_round(fragment)
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
        if isinstance(reply, Wait) and base is not None and reply.head.digest == base.digest:
            return True  # nothing to catch up with; another fragment is due
        if reply is None:
            reply = exchange.ask_and_resend(0.0, retries=self._retries)
            if isinstance(reply, Lost):
                return reply
            fragment.heard(reply)
        assert not isinstance(reply, Lost)
        caught_up = self._catch_up(fragment, reply)
        if isinstance(caught_up, Lost):
            return caught_up
        return caught_up and (self._is_whole or not waited)  # after a wait, other workers have had their turns

    def _settle_last_update(self, fragment: FragmentState) -> Lost | None:
        """If it is not known whether the server has accepted the fragment's last update, ask the server.

        If the server has accepted it, its steps no longer count as local progress. Drop the fragment's ticket if
        the server had to be asked, or if the ticket is useless (`Exchange.is_over`). Return `Lost` if the server cannot
        be reached, else None.
        """
        steps = fragment.exchange.settle_update(self._retries)
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

    def _next_round(self, fragment: FragmentState) -> tuple[Next | Lost | None, bool]:
        """Wait for the next round of a fragment.

        If rounds of the fragment have closed without this worker, so that another fragment comes first now, do not
        wait: other workers may need the update of that fragment before they submit one of this fragment.

        Returns:
            A pair. First the server's reply; `Lost` if the server cannot be reached; None if the update of another
            fragment has failed and must be submitted first. Second, whether this worker waited.
        """
        exchange = fragment.exchange
        if self._is_whole:
            return exchange.ask_and_resend(retries=self._retries), False
        reply = exchange.ask_and_resend(0.0, retries=self._retries)
        if isinstance(reply, Wait) and reply.round > fragment.round:
            fragment.heard(reply)
            if self._order.pick(self._candidates) != fragment.index:
                return reply, False
        waited, since_s = isinstance(reply, Wait), 0.0
        while isinstance(reply, Wait):
            if self._broken():
                return None, True  # waiting on could be a deadlock: other workers may wait for the failed update
            if since_s >= OTHERS_S:
                if self._others_went_back(fragment):
                    return reply, False
                since_s = 0.0
            look_s = LOOK_S if self._pending else OTHERS_S
            reply = exchange.ask_and_resend(look_s, retries=self._retries)
            since_s += look_s
        return reply, waited

    def _others_went_back(self, fragment: FragmentState) -> bool:
        """Return whether the run has gone back with other fragments, so that one of them is due before this one.

        Then other workers wait for this worker's update of that one, while this worker waits for theirs of this one.
        """
        states = zip(self._fragments, self._candidates, strict=True)
        others = [each for each, candidate in states if candidate.is_free and each is not fragment]
        for other in others:
            reply = other.exchange.ask_and_resend(0.0, retries=self._retries)
            if not isinstance(reply, Lost) and other.goes_back(reply):
                other.heard(reply)
        mine = fragment.round, fragment.index
        return self._rules.waits and any(each.went_back and (each.round, each.index) < mine for each in others)

    def _catch_up(self, fragment: FragmentState, reply: Next) -> bool | Lost:
        """Continue from a version that was made without this worker's local steps: add the steps to it or discard them.

        Args:
            fragment: the fragment.
            reply: the server's reply, which names the newest version.

        Returns:
            True if the local steps were added, False if they were discarded, `Lost` if the server cannot be reached.
        """
        site, name, version = self._session.site, self._name(fragment), fragment.version
        if self._rules.on_missed == "reset" or fragment.went_back:
            missed, went = self._step - fragment.base_step, "back" if fragment.went_back else "on"
            lost = self._load(fragment, reply, self._step if self._is_whole else self.newest_step)
            if lost is not None:
                return lost
            self._session.report(
                OF_LOST_STEPS,
                f"{name} went {went} to version {fragment.version} without this worker; its {missed} local steps since "
                f"version {version} are lost",
            )
            self._after_new_version()
            return False
        pulled = fragment.exchange.rebase(reply.head, self._own(fragment), retries=self._retries)
        if isinstance(pulled, Lost):
            return pulled
        fragment.heard(pulled.newer or reply)
        self._count_steps_from(fragment, fragment.base_step)
        LOG.info("%s: %s went on to version %d; the local steps were added to it", site, name, fragment.version)
        return True

    def _submit(self, fragment: FragmentState) -> None:
        """Form the update of a fragment. With τ = 0, send it and wait for the new version; else, a thread does both."""
        ticket, exchange = fragment.ticket, fragment.exchange
        if fragment.ended or ticket is None:  # no ticket: a newer head appeared during the download
            return
        report = self._report_of(ticket.base, self._step - fragment.base_step)
        sits_out, retries = not report.weight, self._retries
        self._order.took(fragment.index)
        self.newest_step = self._step
        if self._rules.overlap:
            deliver: Callable[[], Delivered | SatOut] = partial(exchange.sit_out, ticket, report, retries)
            if not sits_out:
                agreed = exchange.agree_on_shapes(ticket, self._own(fragment), retries)
                if isinstance(agreed, TooLate | Lost):
                    self._skip(fragment, agreed)
                    return
                exchange.form(agreed, self._own(fragment), report)
                deliver = partial(exchange.deliver, retries)
            fragment.ticket = None
            self._answered()
            pending = PendingSync(fragment, self._step, retries, deliver, sits_out=sits_out)
            self._pending.append(pending)  # before it starts: `abandon` must find it even if Ctrl-C comes just then
            pending.start()
            return
        broke_off: TooLate | Lost | None
        match (
            exchange.sit_out(ticket, report, retries)
            if sits_out
            else exchange.submit(ticket, self._own(fragment), report, retries=retries)
        ):
            case Accepted() | SatOut():
                fragment.ticket = None
                broke_off = self._await_result(fragment, sits_out=sits_out)
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
            self._skip(fragment, broke_off, sits_out=sits_out)

    def _await_result(self, fragment: FragmentState, *, sits_out: bool) -> TooLate | Lost | None:
        """Wait until the round has led to a new version, and load or merge that version into the model.

        If this worker has sat out the round, load the version as it is. Return `TooLate` or `Lost` if no new version
        came, as `_ask_for_result` does.
        """
        self._session.tell(state="waiting for the other sites")
        reply = _ask_for_result(fragment.exchange, self._retries, lambda: self._others_went_back(fragment))
        if isinstance(reply, TooLate | Lost):
            return reply
        if not sits_out:
            self._counted(reply)
        # if local steps may be discarded, wait for a whole version instead of training from a partial one
        waits = isinstance(reply, Finished) or self._rules.on_missed == "reset"
        patience = Patience(self._retries, None if waits else self._retries)
        alpha = 0.0 if sits_out or fragment.goes_back(reply) else self._rules.alpha
        return self._load(fragment, reply, self._step, patience, alpha=alpha)

    def _counted(self, reply: Next) -> None:
        self.rounds += 1
        self.staleness = reply.previous.staleness if reply.previous is not None else 0

    def _finish_sync(self, pending: PendingSync) -> None:
        """Wait for the new version after an update, and merge it. If no new version came, skip the synchronisation."""
        fragment = pending.fragment
        if not pending.done.is_set():
            self.merges_waited += 1
            self._session.tell(state="waiting for the other sites")
            self._await(pending)
        self._pending.remove(pending)
        if pending.error is not None:
            raise pending.error
        if pending.refusal is not None:
            self._refused(fragment, pending.refusal)
        if pending.broke_off is not None:
            self._skip(fragment, pending.broke_off, sits_out=pending.sits_out)
            return
        assert pending.reply is not None
        is_in = pending.refusal is None and not pending.sits_out
        if is_in:
            self._counted(pending.reply)
        alpha = self._rules.alpha if is_in and not fragment.goes_back(pending.reply) else 0.0
        self._merge(fragment, pending.reply, pending.step, alpha)
        self._after_new_version()

    def _await(self, pending: PendingSync) -> None:
        """Wait until the thread of an update in flight has ended.

        Meanwhile, if the update of a fragment that comes earlier in `FragmentOrder` fails, submit that fragment again.
        Other workers may need the failed update before they submit to the round that this worker waits for.
        """
        since_s = 0.0
        while not pending.done.wait(LOOK_S):
            since_s += LOOK_S
            for broken in self._broken():
                self._finish_sync(broken)
            if since_s >= OTHERS_S:
                pending.gives_way, since_s = pending.gives_way or self._others_went_back(pending.fragment), 0.0
            may = self._rules.waits and len(self._pending) < self._rules.max_inflight
            due, own = self._order.pick(self._candidates) if may else None, pending.fragment
            if due is not None and (self._fragments[due].round, due) < (own.round, own.index):
                self._submit_next()

    def _broken(self) -> list[PendingSync]:
        """Return the updates in flight that have failed and may have to be submitted again."""
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
        """Load the newest version of a fragment into the model, or merge it with the local parameters.

        Args:
            fragment: the fragment.
            reply: the server's reply, which names the newest version.
            step: the local step up to which the version includes this worker's training.
            patience: how often to try again to reach a lost server; None: the usual number of retries until a value is
                loaded into the model, then as many as fit into `ATOLL_GIVE_UP_S`. If a download is given up in the
                middle, the model has only a part of the version, and training continues from these values.
            alpha: share of the local parameters in a merge; 0: take the version as it is.

        Returns:
            None after success, `Lost` if the server cannot be reached.
        """
        exchange, before = fragment.exchange, fragment.exchange.base.note
        own = self._own(fragment)
        loaded: Tensors = {}

        def fill(version: int) -> Tensors:
            nonlocal loaded
            loaded = exchange.local.to_fill(own, version)
            return loaded

        patience = patience or Patience(self._retries)
        # if an earlier process had begun to pull the version beside the base, that file is continued
        to_next = alpha > 0 or (self._merges and exchange.is_next_base(reply.head))
        pulled = exchange.pull_newest(reply.head, None if to_next else fill, patience, to_next=to_next)
        if isinstance(pulled, Lost):
            exchange.files.close_next_base()
            if not to_next and patience.within is not None and exchange.base.note is not before:
                self._go_on_from_a_part(fragment, own, reply.head.number)
            return pulled
        reply = pulled.newer or reply
        if to_next:
            self._merge(fragment, reply, step, alpha)
        else:
            self.put_first_(exchange.local, loaded)
            fragment.heard(reply)
            self._count_steps_from(fragment, step)
        return None

    def _merge(self, fragment: FragmentState, reply: Next, step: int, alpha: float) -> None:
        """Merge the version in the file `base-next` into the model, then make that file the base file."""
        files = fragment.exchange.files
        apply_version.merge_(self._own(fragment), files.next_base(), alpha)
        fragment.heard(reply)
        files.move_up()
        self._count_steps_from(fragment, step)

    def _go_on_from_a_part(self, fragment: FragmentState, own: Tensors, version: int) -> None:
        """Use the model's current tensors as the base, after a download that stopped in the middle of the version."""
        self._session.report(
            OF_LOST_STEPS,
            f"the download of version {version} stopped in the middle: the model has only a part of that version; "
            "training continues",
        )
        fragment.exchange.make_base_of(own)
        fragment.exchange.forget_outbox_progress()
        fragment.base_step = self._step

    def _count_steps_from(self, fragment: FragmentState, step: int) -> None:
        """Record that the base is a new version. It includes this worker's training up to local step `step`."""
        note = fragment.exchange.base.note
        assert note is not None
        fragment.exchange.forget_outbox_progress()
        fragment.loaded(step, note.version)
        self._session.tell(version=self.version, state="training")

    def _after_new_version(self) -> None:
        self._look_whether_finished()
        if not self.finished:  # call the user's metrics function
            parts = [(self._own(each), each.exchange.base) for each in self._fragments]
            self._measured.measure(parts, local=self._rules.alpha > 0)

    def _own(self, fragment: FragmentState) -> Tensors:
        tensors = self._tensors()
        specs = fragment.exchange.local.layouts.schema.tensors
        return {spec.name: tensors[spec.name] for spec in specs if spec.name in tensors or not spec.is_kept}

    # -- failures and the end of the run

    def _refused(self, fragment: FragmentState, refusal: Refused) -> None:
        """Handle a refused update: log that its local steps are lost, and drop the update.

        Raises:
            UpdateRefused: too many updates in a row were refused.
        """
        of = of_fragment(fragment.exchange.local.number)
        LOG.warning("%s: update refused: steps%s since version %d are lost", self._session.site, of, fragment.version)
        fragment.exchange.refused(refusal)

    def _skip(self, fragment: FragmentState, broke_off: TooLate | Lost, *, sits_out: bool = False) -> None:
        """Skip a synchronisation that failed. The fragment's next update will contain all local steps.

        If the update came too late because the run has ended, load the run's result instead. If the worker wanted to
        sit out the round, its steps so far have no weight: the next update will contain only later ones.
        """
        if sits_out and fragment.exchange.processes.has_whole_model:
            fragment.exchange.make_base_of(self._own(fragment))
            fragment.base_step = self._step
        if isinstance(broke_off, TooLate) and self._ended_without_us(fragment):
            self._look_whether_finished()
            return
        self.skipped += 1
        fragment.ticket, fragment.ended = None, ""  # the fragment's newest version was not pulled
        what = f"of fragment {fragment.index}"
        if self._is_whole:
            what, self.newest_step = f"at step {self._step}", self._step
        why = why_skipped(broke_off.error, self._session.info)
        self._outage.skipped(broke_off.error, self._session.site, what, why)

    def _ended_without_us(self, fragment: FragmentState) -> bool:
        """If the run has ended without this worker's update, load the run's result and return True; else return False.

        Also return False if the server cannot be reached: a later synchronisation asks again.
        """
        reply = fragment.exchange.ask(0.0, retries=0)
        step = self._step if self._is_whole else fragment.base_step
        return isinstance(reply, Finished) and self._load(fragment, reply, step) is None

    def _answered(self) -> None:
        """Record that the server has answered, which ends an outage."""
        text = f"synchronised at step {self._step}"
        if self._rules.overlap:
            text = f"synchronising again from step {self._step} on"
        self._outage.ended(self._session.site, text)

    def _look_whether_finished(self) -> None:
        """If the rounds of every fragment are over and no update is in flight, load the run's result into the model."""
        if self.finished or self._pending or not all(fragment.ended for fragment in self._fragments):
            return
        self.finished = True
        if self._merges or not self._is_whole:  # else the model already is the result
            for fragment in self._fragments:
                apply_version.load_(self._own(fragment), fragment.exchange.base)
        ended = self._fragments[0].ended
        LOG.info(
            "%s: the run is finished at version %d%s; further steps change only the local model",
            self._session.site,
            self.version,
            f" ({ended})" if ended != "finished" else "",
        )
        self._measured.on_result()

    def _name(self, fragment: FragmentState) -> str:
        return "the run" if self._is_whole else f"fragment {fragment.index}"
