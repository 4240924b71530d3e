"""The work of a worker in a swarm: exchange files with other workers, check them, and aggregate rounds.

In a swarm, the workers aggregate the updates, not the server. The server sends each worker the full list of what this
worker should have and do. The worker reports the full list of what it has and has done (`protocol/swarm_messages`). The
worker compares the two lists, starts a job for each missing item, and drops items that are no longer wanted. So the
order of messages does not matter, and a lost message does no harm.

    hold      download a version and the outer optimizer's state from a worker that has both, and check every byte
    collect   download an update, check that its values are finite, and compute its norm
    close     aggregate the updates of a closed round into the next version, with the same code as a server
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from atoll import registry
from atoll.aggregation.check_arriving_parts import Overflow
from atoll.aggregation.make_version import NextFiles, RoundFiles, UpdateInput, make_version
from atoll.aggregation.plan import AggregationPlan, PlanValues
from atoll.blobs.manifest import state_id
from atoll.blobs.model_file import model_header, model_runs
from atoll.config.bounds import MAX_WEIGHT
from atoll.errors import (
    TRANSIENT,
    UNPULLED,
    AtollError,
    ConfigError,
    LeaseLost,
    PeerError,
    ServerFailed,
    StateCorrupt,
    Superseded,
    VersionSkew,
    is_transient,
    out_of_memory,
)
from atoll.posix import file_error, replace_file
from atoll.protocol import routes
from atoll.protocol.swarm_messages import (
    MOST_PEERS,
    MOST_UPDATES,
    Collect,
    CollectedUpdate,
    Held,
    Hold,
    PeerReport,
    PeerWork,
    ReducedRound,
    SwarmPlan,
    Unreached,
    in_text,
)
from atoll.protocol.values import FrozenRound, FrozenUpdate
from atoll.runtime import failpoint, run_jobs
from atoll.store.file_slots import SPOOL, STATE, VERSION, Slot, region_digest
from atoll.tensors.fragments import Split
from atoll.tensors.layout import Part
from atoll.worker.log_lines import LOG, Troubles, error_text
from atoll.worker.peer.peer_store import PeerStore
from atoll.worker.peer.peer_transfers import PeerServer, PeerTransfers, PulledUpdate, Version
from atoll.worker.session.session import Repeats, Session

Key = tuple[object, ...]
"""The key of a job: the kind of job, then what identifies its item: numbers, or the address of a worker."""


class UpdateDamaged(StateCorrupt):
    """The error for an update that has changed on disk since this worker downloaded it.

    Attributes:
        ticket: the ticket under which the update was submitted.
    """

    def __init__(self, share: FrozenUpdate) -> None:
        super().__init__(
            f"The stored update of {share.site} differs from the one received: the disk has changed it.",
            "Check the disk.",
        )
        self.ticket = share.ticket


def failed(work: FrozenRound, why: str, *, overflows: bool = False, raised: bool = False) -> ReducedRound:
    """Return the report that tells the server that this worker could not aggregate a round.

    Args:
        work: the round, with the list of its updates.
        why: the reason.
        overflows: whether the reason is that the next version would contain Inf or NaN.
        raised: whether the code of the run raised an error, which it would probably raise at other workers, too.
    """
    return ReducedRound(
        fragment=work.fragment,
        version=work.version,
        tickets=work.tickets,
        failed=why,
        overflows=overflows,
        raised=raised,
    )


def is_of_run(error: Exception) -> bool:
    """Return whether the code of the run raised an error, such as its codec; if not, it is an error of a machine."""
    if isinstance(error, AtollError):
        return error.is_final and not isinstance(error, PeerError)
    return out_of_memory(error) is None and not isinstance(error, CancelledError | OSError)


def failed_by(error: Exception, work: FrozenRound, folder: Path) -> ReducedRound:
    """Return the report that tells the server that an error ended the aggregation of a round. Log unexpected errors.

    Args:
        error: the error.
        work: the round, with the list of its updates.
        folder: the folder of the version's file, for the message.
    """
    if isinstance(error, OSError):
        error = file_error(error, folder / f"version {work.version}")
    if not isinstance(error, AtollError):
        LOG.error("a round could not be aggregated because of an unexpected error", exc_info=error)
    if isinstance(error, Overflow):
        return failed(work, error.message, overflows=True)
    return failed(work, error_text(error, 500), raised=is_of_run(error))


def keep_result(site: str, plan: AggregationPlan, work: PeerWork, store: PeerStore, target: Path) -> None:
    """If the run is finished, write its final model to a file, and log the path or the failure.

    Args:
        site: the site's name, for the log.
        plan: the run's plan, as for `SwarmPeer`.
        work: the last list of work from the server.
        store: the versions at this worker.
        target: the file to write.
    """
    if not work.finished:
        return
    newest: dict[int, int] = {}
    for hold in work.hold:
        newest[hold.fragment] = max(hold.version, newest.get(hold.fragment, 0))
    found = [store.get(fragment, newest.get(fragment, -1)) for fragment in range(len(plan.fragments))]
    versions, why = [each for each in found if each is not None], "some of its fragments are not at this worker"
    if len(versions) == len(found):
        header, owners = model_header(plan.schema)
        sources = [(layout, each.slot.fd, None) for layout, each in zip(plan.versions, versions, strict=True)]
        try:
            with store.reading(*versions):
                replace_file(target, itertools.chain([header], model_runs(owners, sources)))
            LOG.info("%s: the run's final model is in %s", site, target)
            return
        except OSError as error:
            why = str(file_error(error, target))
        except AtollError as error:
            why = str(error)
    LOG.warning("%s: the final model is NOT in %s: %s; the other sites have it", site, target, why)


def plan_of(message: SwarmPlan, split: Split) -> AggregationPlan:
    """Return the run's plan for aggregation, made from the values that the server has sent.

    Args:
        message: the server's message with the values.
        split: the schema of the model and its division into fragments.

    Raises:
        ConfigError: the run's algorithm, codec, outer optimizer or a reducer is neither registered nor installed here,
            or cannot be used with the values.
    """
    try:
        registry.resolve_received(
            "algorithms", message.algorithm
        )  # not used; but its site must trust what it is part of
        return AggregationPlan.of_values(PlanValues.received(message), split)
    except AtollError as error:
        raise ConfigError(f"This site cannot aggregate rounds of the swarm: {error.message}", error.remedy) from error


def require_fitting(work: PeerWork, plan: AggregationPlan) -> None:
    """Check that the server's orders fit the run: fragments, numbers of versions, and updates of rounds.

    Raises:
        VersionSkew: an order does not fit, so none is followed.
    """
    what = ""
    versions, tickets = Counter(hold.fragment for hold in work.hold), [each.ticket for each in work.collect]
    fragments = {*versions, *(each.fragment for each in work.collect), *(each.fragment for each in work.close)}
    if fragments and max(fragments) >= len(plan.fragments):
        what = f"they name fragment {max(fragments)}, but the run has {len(plan.fragments)}"
    elif versions and max(versions.values()) > plan.values.versions:
        what = f"they name {max(versions.values())} versions of a fragment, but the run keeps {plan.values.versions}"
    elif len(set(tickets)) < len(tickets):
        what = "they name an update twice"
    elif not all(map(_is_sound, work.close)):
        what = "a closed round in them has no updates, too many, or wrong numbers"
    if what:
        raise VersionSkew(
            f"The server's orders for this worker of the swarm do not fit the run: {what}.",
            "Use the same Atoll version on both sides.",
        )


def _is_sound(work: FrozenRound) -> bool:
    """Return whether the numbers of a closed round are those of an honest server."""
    updates = work.updates
    return (
        0 < len(updates) <= MOST_UPDATES
        and len(set(work.tickets)) == len(updates)
        and work.base_version < work.version
        and all(each.weight <= MAX_WEIGHT and each.scale <= 1 for each in updates)
    )


def key_of(work: FrozenRound) -> Key:
    """Return the key of the job that aggregates this round."""
    return ("close", work.fragment, work.version, *work.tickets)


RESULT = "model.safetensors"
"""Name of the file with the model of a finished run, in the site's folder."""
JOBS, MOST_JOBS = 3, 1024
"""Number of jobs that run at the same time, and that run or wait."""
PACE_S, LONGEST_PACE_S = 0.02, 0.5
"""Shortest time between two requests for work; and longest pause before a report that says nothing new, if the server
answers each at once: it does not keep this worker busy."""
KNOWN, UNREACHED = MOST_PEERS, 64
"""Largest number of reached addresses in a report, and of unreached ones."""
BUSY_S = 1.0
"""Seconds between two reports while jobs run, so that the server sees progress."""
ANSWER_S = 10.0
"""Seconds by which the timeout of a report exceeds the wait at the server."""


class SwarmPeer:
    """Does the work of one worker in a swarm, and reports to the server. Call `start` after the worker has joined.

    Args:
        session: the worker's session.
        peer_server: serves this worker's files to other workers.
        plan: file layouts, reducers and outer optimizer of the run, the same as at the server.
        folder: the worker's folder in the run; locked by the caller.
    """

    def __init__(self, session: Session, peer_server: PeerServer, plan: AggregationPlan, folder: Path) -> None:
        self.site, self._http, self._peer_server, self._plan = session.site, session.http, peer_server, plan
        self._idle_timeout_s, self._rejoin = session.info.idle_timeout_s, session.rejoin
        self._has_ended = partial(session.closing_wait, 0.0)
        assert session.peer_proof is not None
        self._proof = session.peer_proof
        self._store = PeerStore(plan, folder, session.info.run, peer_server)
        self._result = folder.parent / RESULT
        self._transfers = PeerTransfers(plan, self._http, peer_server, self._idle_timeout_s, self._move)
        self._lock = threading.RLock()  # guards the fields below
        self._work = PeerWork(stamp=0)
        self._number = self._moved = 0
        self._hurried, self._told = Repeats(session, longest_s=LONGEST_PACE_S), PeerReport(peer=self._proof, number=0)
        self._pulled: dict[int, PulledUpdate] = {}  # by ticket
        self._collected: dict[int, CollectedUpdate] = {}
        self._closed: dict[Key, ReducedRound] = {}
        self._reached: dict[str, None] = {}  # addresses, oldest first
        self._unreached: dict[str, str] = {}
        self._jobs: set[Key] = set()
        self._troubles = Troubles()
        self._leaving = False
        self._stopping, self._stayed = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(JOBS, thread_name_prefix="atoll-swarm")
        self._thread = threading.Thread(target=self._main, name="atoll-swarm", daemon=True)

    # -- life

    def start(self) -> None:
        """Start the thread that asks the server for work and does the work."""
        self._thread.start()

    def leave(self) -> None:
        """Stop as soon as other workers have downloaded the files that only this worker has. Idempotent.

        Stop earlier if no data has moved for the run's idle timeout, or if an error such as `ServerFailed` has ended
        this worker. If the run is finished, write its model to a file before stopping.
        """
        if not self._stopping.is_set() and self._thread.is_alive():
            self._leaving = True
            self._stayed.clear()
            self._say()
            moved, at_s = -1, time.monotonic()
            while self._thread.is_alive() and not self._has_ended() and not self._stayed.wait(BUSY_S / 4):
                if (now := self._moved + self._peer_server.served) != moved:
                    moved, at_s = now, time.monotonic()
                if time.monotonic() - at_s > self._idle_timeout_s:
                    LOG.warning(
                        "%s: leaves the run: other workers may still need its data, but none has downloaded data "
                        "for a long time",
                        self.site,
                    )
                    break
            keep_result(self.site, self._plan, self._work, self._store, self._result)
        self._stopping.set()

    def close(self) -> None:
        """Stop all threads and close all files. Call this after `leave`."""
        self._stopping.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join(ANSWER_S + 5.0 if self._thread is not threading.current_thread() else 0)
        self._pool.shutdown(wait=True)
        self._store.close()

    # -- reports and work

    def _main(self) -> None:
        pause_s = 0.25
        while not self._stopping.wait(PACE_S):
            lease = self._http.lease
            if self._leaving and self._stayed.is_set():
                return
            try:
                self._ask(BUSY_S if self._jobs or self._leaving else routes.LONG_POLL_S / 4)
                pause_s = 0.25
                self._troubles.end("work")
            except LeaseLost:
                try:
                    self._rejoin(lease)
                except TRANSIENT:
                    pass
                except AtollError as error:  # the worker's own next request raises it, too
                    LOG.debug("%s: no longer takes part in the run: %s", self.site, error)
                    return
                self._stopping.wait(pause_s)
            except (Superseded, ServerFailed):
                return
            except AtollError as error:
                text = f"{self.site}: cannot ask the server for work: {error}"
                if is_transient(error):
                    LOG.debug("%s", text)
                else:
                    self._troubles.say("work", text, level=logging.WARNING)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, 8.0)

    def _say(self) -> None:
        """Send a report at once. A failure is ignored, because the next report has the same content."""
        with contextlib.suppress(AtollError):
            self._ask(0.0)

    def _ask(self, wait_s: float) -> None:
        with self._lock:
            self._number += 1
            report = self._report(wait_s)
        told = report.model_copy(update={"number": 0, "seen": 0, "wait_s": 0.0})
        if told == self._told:
            self._hurried.again()
        else:
            self._hurried.reset()
        asked_s = time.monotonic()
        work = self._http.post(routes.SWARM, report, PeerWork, timeout_s=wait_s + ANSWER_S)
        self._told = told
        if wait_s and time.monotonic() - asked_s >= wait_s / 2:  # it was a long poll
            self._hurried.reset()
        require_fitting(work, self._plan)
        with self._lock:
            if work.server != self._work.server or work.order > self._work.order:  # else a newer answer came before
                self._work = work
            for address in self._peer_server.learn(self._work.peers, self._work.sites, self._work.ended):
                LOG.info("%s: connects to the worker of another site at %s", self.site, address)
            self._follow(self._work)
            if self._leaving and report.leaving and not self._work.stay:
                self._stayed.set()

    def _report(self, wait_s: float) -> PeerReport:
        return PeerReport(
            peer=self._proof,
            number=self._number,
            seen=self._work.stamp,
            wait_s=wait_s,
            moved=self._moved,
            leaving=self._leaving,
            held=[
                Held(
                    fragment=each.fragment,
                    version=each.version,
                    digest=each.digest,
                    state_digest=state_id(each.state_digests),
                    source=each.source,
                )
                for each in self._store.versions()
                if each.source is not None
            ],
            collected=list(self._collected.values()),
            closed=list(self._closed.values()),
            reached=sorted(self._reached),
            unreached=[Unreached(address=address, why=why) for address, why in self._unreached.items()],
        )

    def _follow(self, work: PeerWork) -> None:
        """Drop the items that the server no longer wants at this worker, and start a job for each missing item."""
        if not self._stopping.is_set():
            self._drop_unwanted(work)
            self._begin_missing(work)

    def _drop_unwanted(self, work: PeerWork) -> None:
        rounds = {key_of(each) for each in work.close}
        self._closed = {key: closed for key, closed in self._closed.items() if key in rounds}
        wanted = {(hold.fragment, hold.version, hold.digest) for hold in work.hold}
        wanted |= {(closed.fragment, closed.version, closed.digest or "") for closed in self._closed.values()}
        for version in self._store.versions():
            if (version.fragment, version.version, version.digest) not in wanted:
                self._store.drop(version)
        collect = {each.ticket: each for each in work.collect}
        for ticket, known in list(self._collected.items()):
            now = collect.get(ticket)
            if now is None or known.digest != now.digest or (known.failed and known.source != now.source):
                self._forget(ticket)

    def _begin_missing(self, work: PeerWork) -> None:
        for address in work.probe:
            self._begin(("probe", address), partial(self._probe, address))
        for hold in work.hold:
            if self._store.get(hold.fragment, hold.version) is None and (hold.sources or not hold.version):
                self._begin(("hold", hold.fragment, hold.version), partial(self._hold, hold))
        for collect in work.collect:
            if collect.ticket not in self._collected:
                self._begin(("collect", collect.ticket), partial(self._collect, collect))
        for closing in work.close:
            if key_of(closing) not in self._closed and all(map(self._is_collected, closing.updates)):
                self._begin(key_of(closing), partial(self._close, closing))

    def _is_collected(self, share: FrozenUpdate) -> bool:
        """Return whether this worker has downloaded an update of a round, with the digest that the round names."""
        collected = self._collected.get(share.ticket)
        return collected is not None and not collected.failed and collected.digest == share.digest

    def _begin(self, key: Key, job: Callable[[], None]) -> None:
        if key in self._jobs or len(self._jobs) >= MOST_JOBS:  # the next answer of the server has the job again
            return
        self._jobs.add(key)
        try:
            self._pool.submit(self._do, key, job)
        except RuntimeError:  # the pool is being closed
            self._jobs.discard(key)

    def _do(self, key: Key, job: Callable[[], None]) -> None:
        try:
            job()
        except CancelledError:
            pass
        except AtollError as error:
            self._troubles.say(key, f"{self.site}: {' '.join(map(str, key))}: {error}")
            self._stopping.wait(BUSY_S)
        except Exception:
            LOG.exception("%s: %s failed", self.site, " ".join(map(str, key)))
            self._stopping.wait(BUSY_S)
        else:
            self._troubles.end(key)
        finally:
            with self._lock:
                self._jobs.discard(key)
        if not self._stopping.is_set():
            self._say()
            if key[0] == "close":
                failpoint("swarm.told")

    def _move(self, count: int) -> None:
        with self._lock:
            self._moved += count

    # -- jobs

    def _probe(self, address: str) -> None:
        """Try to reach another worker. The next report tells the server whether this succeeded."""
        why = self._peer_server.why_unreached(address, self._stopping.wait)
        with self._lock:
            if why:
                self._unreached[address] = why
            elif not self._stopping.is_set():
                self._reached[address] = None
                self._unreached.pop(address, None)
            while len(self._reached) > KNOWN:  # drop the oldest; the server asks again for an address that is missing
                del self._reached[next(iter(self._reached))]
            while len(self._unreached) > UNREACHED:
                del self._unreached[next(iter(self._unreached))]

    def _hold(self, hold: Hold) -> None:
        """Download a version and the outer optimizer's state after it, and serve both to other workers."""
        kinds = (VERSION, STATE) if hold.state_digest else (VERSION,)
        with self._store.new_slots(hold.fragment, *kinds) as (slot, *state):
            assert slot is not None
            version = self._store.served(self._transfers.version(hold, slot, state[0] if state else None))
            failpoint("swarm.held")
            with self._lock:
                self._store.put(version)
        nbytes = self._plan.fragments[hold.fragment].version.nbytes
        LOG.debug("%s: stored version %d (%d bytes)", self.site, hold.version, nbytes)

    def _collect(self, collect: Collect) -> None:
        """Download an update, and store the result for the next report to the server.

        The result is the update's norm, or the reason why the update is not valid or could not be downloaded.
        """
        ticket = collect.ticket
        report = CollectedUpdate(ticket=ticket, digest=collect.digest, source=collect.source)
        with self._store.new_slots(collect.fragment, SPOOL) as (slot,):
            assert slot is not None
            update: PulledUpdate | None
            try:
                update, norm, bad = self._transfers.update(collect, slot)
                failpoint("swarm.collected")
                report = report.model_copy(update={"norm": norm, "bad": bad})
            except Exception as error:
                raised = not isinstance(error, AtollError) and is_of_run(error)
                if not (raised or isinstance(error, UNPULLED)):  # after an error of this machine, the job runs again
                    raise
                if raised:
                    LOG.error("the update of %s could not be checked because of an error", collect.site, exc_info=error)
                self._store.give_back(PulledUpdate(collect.fragment, slot, ()))
                failed = {"failed": error_text(error, 500), "raised": raised}
                update, report = None, report.model_copy(update=failed)
        with self._lock:
            self._collected[ticket] = report
            if update is not None:
                self._pulled[ticket] = update

    def _close(self, work: FrozenRound) -> None:
        """Aggregate the updates of a round into the next version, serve this version, and store the round's report."""
        base = self._store.get(work.fragment, work.base_version)
        with self._lock:
            pulled = {each.ticket: self._pulled[each.ticket] for each in work.updates if each.ticket in self._pulled}
        lacking = [share.site for share in work.updates if share.ticket not in pulled]
        if base is None or lacking:
            what = f"version {work.base_version}" if base is None else f"the update of {lacking[0]}"
            self._ended(failed(work, f"this worker has lost {what}"), work)
            return
        try:
            with (
                self._store.new_slots(work.fragment, VERSION, STATE) as (version, state),
                self._store.reading(base, *pulled.values()),
            ):
                assert version is not None
                version_made, closed = self._reduce(work, base, pulled, version, state)
                failpoint("swarm.closed")
                version_made = self._store.served(version_made)
                with self._lock:
                    if (known := self._store.get(work.fragment, work.version)) is not None:
                        self._store.drop(known)
                    self._store.put(version_made)
                    self._ended(closed, work)
        except CancelledError:
            raise
        except Exception as error:
            ended = failed_by(error, work, self._store.folder)
            with self._lock:  # one report has to contain the failure and the dropped file
                if isinstance(error, StateCorrupt):  # drop the damaged file, so that it is pulled again
                    LOG.warning("%s: a downloaded file is damaged: %s", self.site, error)
                    self._forget(error.ticket) if isinstance(error, UpdateDamaged) else self._store.drop(base)
                self._ended(ended, work)

    def _reduce(
        self, work: FrozenRound, base: Version, pulled: Mapping[int, PulledUpdate], version: Slot, state: Slot | None
    ) -> tuple[Version, ReducedRound]:
        """Aggregate the updates of a round with the same code as a server, and write the next version into the slots.

        A slot is a reused file of fixed size.

        Args:
            work: the round, with the list of its updates.
            base: the version that the round starts from.
            pulled: the downloaded updates of the round, by ticket.
            version: the slot for the next version.
            state: the slot for the outer optimizer's next state; None: this optimizer has no state.

        Returns:
            The next version, and the report of the round.

        Raises:
            CancelledError: (concurrent.futures) the worker stops.
            OSError: the disk is full, or fails.
            Overflow: the next version would contain Inf or NaN.
            UpdateDamaged: the stored bytes of an update have changed.
            StateCorrupt: the stored bytes of `base` have changed.
        """
        begin, done = time.monotonic(), 0
        self._require_whole(work, pulled)

        def on_progress(nbytes: int) -> None:
            nonlocal done
            self._move(nbytes - done)
            done = nbytes

        base_state = base.state.fd if base.state is not None else None
        updates = {ticket: UpdateInput(update.slot.fd) for ticket, update in pulled.items()}
        files = RoundFiles(base.slot.fd, base_state, updates, base.part_digests, base.state_digests)
        out = NextFiles(version.fd, state.fd if state is not None else None)
        result = make_version(self._plan, work, files, out, self._stopping, on_progress=on_progress)
        made = Version(
            work.fragment,
            work.version,
            result.digest,
            version,
            state if result.state_digests else None,
            result.part_digests,
            result.state_digests,
        )
        closed = ReducedRound(
            fragment=work.fragment,
            version=work.version,
            tickets=work.tickets,
            digest=result.digest,
            part_digests=in_text(result.part_digests),
            state_digests=in_text(result.state_digests),
            grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
            seconds=time.monotonic() - begin,
        )
        return made, closed

    def _require_whole(self, work: FrozenRound, pulled: Mapping[int, PulledUpdate]) -> None:
        """Check again that every part of every downloaded update matches its digest.

        Raises:
            UpdateDamaged: the stored bytes of an update have changed since it was downloaded.
        """
        parts = self._plan.fragments[work.fragment].update.parts

        def check_part(job: tuple[FrozenUpdate, Part]) -> None:
            share, part = job
            update = pulled[share.ticket]
            if region_digest(update.slot.fd, ((part.start, part.nbytes),)) != update.part_digests[part.index]:
                raise UpdateDamaged(share)
            self._move(part.nbytes)

        jobs = [(share, part) for share in work.updates for part in parts]
        run_jobs(jobs, self._plan.threads, lambda: check_part, self._stopping)

    def _ended(self, closed: ReducedRound, work: FrozenRound) -> None:
        with self._lock:
            self._closed[key_of(work)] = closed

    def _forget(self, ticket: int) -> None:
        self._collected.pop(ticket, None)
        update = self._pulled.pop(ticket, None)
        if update is not None:
            self._store.give_back(update)
