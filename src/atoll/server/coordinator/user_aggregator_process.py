"""The server's side of a user's aggregator, which runs in a separate process and combines a round's updates.

The process reads the files of the updates. The server does not reuse such a file until the process releases the file
or ends: user code may keep an update, and each access to one of its tensors reads the file. The result is an unnamed
file in the state directory, which is lost when the server ends. The next start aggregates the round again.

If another program kills the process, the server starts it again and sends it the round's updates again.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll import registry
from atoll.aggregation.plan import Plan
from atoll.aggregation.user_aggregator import result_layout
from atoll.child_processes import PipedProcess
from atoll.errors import AtollError, ConfigError, RunFailed
from atoll.posix import file_error
from atoll.server.coordinator.update_filters import Filtering
from atoll.store.file_slots import Slot, SlotPool
from atoll.store.journal_tables import TicketRow
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")

HELD_BY_PROCESS = "aggregator"
"""Kind of hold (see `Slot.holds`) on the file of an update that the process may read."""
START_S = 120.0
"""Maximum seconds that the process may take to load the aggregator."""
END_S = 5.0
"""Seconds after which a process that does not end is killed."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which other programs end a process. A restart helps then, as it does not after a crash of the process."""
STARTS = 3
"""How often the process is started, and killed by another program, before the server ends: it needs a person then."""
LOOK_S = 0.2
"""Seconds between two checks of whether the server is stopping."""


class _Killed(Exception):
    """Raised while the server waits for the process, if another program has killed it, and it may be started again."""


@dataclass
class _Pin:
    """The file of an update that the process of the user's aggregator may still read.

    Attributes:
        pool: pool that the file's slot belongs to.
        slot: slot with the update.
        is_recalled: whether the server has asked the process to release the file.
    """

    pool: SlotPool
    slot: Slot
    is_recalled: bool = False


class Aggregator:
    """The process that runs the user's aggregator. The constructor waits until the aggregator is loaded.

    Args:
        plan: plan of the run.
        on_failed: callback with an error of the aggregator that comes while the server is not waiting for a result. It
            is called in another thread.
        filtering: the server's filters of updates. Its `source` returns the filtered file of an update.

    Raises:
        ConfigError: the aggregator cannot be loaded; the message says why.
        RunFailed: the process fails before the aggregator is loaded, or loading takes longer than `START_S`.
    """

    def __init__(self, plan: Plan, on_failed: Callable[[AtollError], object], filtering: Filtering) -> None:
        self._filtering = filtering
        self._plan, self._settings, self._on_failed = plan, plan.settings, on_failed
        self.name = str(plan.settings.aggregation.aggregator.path)
        self._layout = result_layout(plan.schema, plan.settings.network.part_bytes)
        self._result_fd: int | None = None
        self._busy = threading.Lock()  # held while updates are sent or a result is made
        self._heard = threading.Condition()  # guards the fields below
        self._heard_s, self._killed, self._kills = 0.0, False, 0
        self._answer: dict[str, Any] | None = None
        self._failed: AtollError | None = None
        self._waiting = self._closing = False
        self._pins: dict[int, _Pin] = {}
        self._sent_tickets: set[int] = set()
        self._closed: set[int] = set()
        self._next_id, self._incremental = 0, False
        self._offers = ThreadPoolExecutor(1, thread_name_prefix="atoll-offer")
        self._process, self._is_loaded = self._new_process(), False
        try:
            self._with_process(lambda: None, threading.Event())
        except BaseException:
            self.close()
            raise

    # -- life

    def _new_process(self) -> PipedProcess:
        environment = {key: value for key, value in os.environ.items() if key != "ATOLL_FAILPOINTS"}
        process = PipedProcess("atoll.aggregation.user_aggregator", environment=environment)
        threading.Thread(target=self._listen, args=(process,), name="atoll-aggregator", daemon=True).start()
        return process

    def _with_process(self, work: Callable[[], T], cancelled: threading.Event) -> T:
        """Return the result of `work`, which needs the process. If another program kills the process, repeat `work`.

        Args:
            work: function that sends everything that the process needs.
            cancelled: event that ends the call early.

        Raises:
            RunFailed: the process was killed `STARTS` times without a result in between.
        """
        while True:
            try:
                if self._killed:
                    self._sent_tickets.clear()
                    self._drop_all()
                    self._killed = self._is_loaded = False
                    self._process = self._new_process()
                if not self._is_loaded:
                    self._load(cancelled)
                    self._is_loaded = True
                    if self._result_fd is not None:
                        self._send({"what": "file"}, self._result_fd)
                return work()
            except _Killed:
                continue

    def _load(self, cancelled: threading.Event) -> None:
        codec = self._plan.algorithm.codec
        begin = {
            "what": "begin",
            "schema": self._plan.schema.to_json(),
            "codec": registry.place_of("codecs", codec) or codec.text,
            "codec_options": self._plan.algorithm.codec_options,
            "part_bytes": self._settings.network.part_bytes,
            "threads": self._plan.threads,
            "aggregator": self.name,
            "options": self._settings.aggregation.aggregator.options,
        }
        answer = self._ask(begin, 0, cancelled, START_S)
        if answer["what"] == "bad":
            raise ConfigError(answer["message"], answer["remedy"])
        self._incremental = answer["incremental"]

    def close(self) -> None:
        """End the process, and let the store reuse the files of the updates. Idempotent."""
        with self._heard:
            self._closing = True
        self._offers.shutdown(wait=True, cancel_futures=True)
        self._process.pipe.close()
        slow = threading.Timer(END_S, self._process.kill)
        slow.start()
        self._process.bury()
        slow.cancel()
        self._drop_all()
        if self._result_fd is not None:
            os.close(self._result_fd)
            self._result_fd = None

    # -- updates

    def offer(self, store: Store, row: TicketRow, number: int) -> None:
        """Queue an accepted update for the aggregator, if the aggregator wants updates as they arrive.

        Args:
            store: store of the run.
            row: ticket of the update.
            number: number of the round.
        """
        if self._incremental:
            self._offers.submit(self._offer, store, row.ticket, number)

    def _offer(self, store: Store, ticket: int, number: int) -> None:
        with self._busy:
            row = store.tickets.get(ticket)
            if row.state == "accepted" and ticket not in self._closed and ticket not in self._sent_tickets:
                self._send_update(store, row, number)

    def aggregate(self, store: Store, rows: Sequence[TicketRow], number: int, cancelled: threading.Event) -> int:
        """Let the aggregator combine the updates of a closed round into one.

        Updates that the aggregator's process got on arrival are not sent again. But if one of them is not in `rows`,
        the process is reset first, and gets all updates of `rows`.

        Args:
            store: store of the run.
            rows: tickets of the updates to aggregate, in this order.
            number: number of the round.
            cancelled: event that ends the call early.

        Returns:
            Descriptor of a file with the pseudo-gradient of `params`, in the layout of `result_layout`. The next call
            overwrites the file.

        Raises:
            CancelledError: `cancelled` was set.
            DiskFull: no space for the result; the same call can be repeated.
            RunFailed: the aggregator raised, returned an unusable result, did nothing for too long, or its process
                ended or was killed too often. The message says which.
        """
        with self._busy:
            if self._failed is not None:
                raise self._failed
            return self._with_process(lambda: self._aggregate(store, rows, number, cancelled), cancelled)

    def _aggregate(self, store: Store, rows: Sequence[TicketRow], number: int, cancelled: threading.Event) -> int:
        fd = self._result_file()
        tickets = {row.ticket for row in rows}
        if not self._sent_tickets <= tickets:
            self._send({"what": "reset", "round": number})
            self._sent_tickets.clear()
        for row in rows:
            if row.ticket not in self._sent_tickets:
                self._send_update(store, row, number)
        timeout_s = self._settings.aggregation.aggregator_timeout_s or None
        self._ask({"what": "aggregate", "round": number}, number, cancelled, timeout_s)
        self._sent_tickets.clear()
        self._closed, self._kills = tickets, 0
        self._limit_kept()
        return fd

    def _send_update(self, store: Store, row: TicketRow, number: int) -> None:
        spool, source = store.tickets.spool(row.ticket), self._filtering.source(row)
        fd = os.open(f"/proc/self/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with self._heard:
                identity, self._next_id = self._next_id, self._next_id + 1
                spool.pool.hold(spool.slot, HELD_BY_PROCESS)
                self._pins[identity] = _Pin(spool.pool, spool.slot)
            self._sent_tickets.add(row.ticket)
            self._send(
                {
                    "what": "update",
                    "id": identity,
                    "site": row.site,
                    "round": number,
                    "weight": row.report.weight,
                    "steps": row.report.steps,
                    "metrics": dict(row.report.metrics),
                },
                fd,
            )
        finally:
            os.close(fd)

    def _limit_kept(self) -> None:
        """Ask the aggregator to release its oldest updates, if it keeps more than `aggregation.max_kept_updates`."""
        with self._heard:
            kept = [identity for identity, pin in self._pins.items() if not pin.is_recalled]
            most = self._settings.aggregation.max_kept_updates
            surplus = kept[: max(0, len(kept) - most)]
            for identity in surplus:
                self._pins[identity].is_recalled = True
        for identity in surplus:
            self._send({"what": "release", "id": identity})

    def _result_file(self) -> int:
        if self._result_fd is None:
            try:
                self._result_fd = self._plan.new_file("aggregate", self._layout.nbytes)
            except OSError as error:
                raise file_error(error, self._settings.disk.state_dir / "aggregate") from error
            self._send({"what": "file"}, self._result_fd)
        return self._result_fd

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send a message to the process. If that fails, kill the process; `_listen` reports its end."""
        try:
            self._process.pipe.send(message, fd)
        except OSError:
            self._process.kill()

    # -- answers

    def _ask(
        self, message: dict[str, Any], number: int, cancelled: threading.Event, timeout_s: float | None
    ) -> dict[str, Any]:
        with self._heard:
            self._answer, self._waiting, self._heard_s = None, True, time.monotonic()
        try:
            self._send(message)
            with self._heard:
                while self._answer is None and self._failed is None and not self._killed:
                    if cancelled.is_set():
                        raise CancelledError
                    if timeout_s is not None and time.monotonic() - self._heard_s > timeout_s:
                        self._failed = self._failure(
                            number, f"it neither read nor returned a tensor for {timeout_s:g} s, and was stopped"
                        )
                        self._process.kill()
                        break
                    self._heard.wait(LOOK_S)
                if self._failed is not None:
                    raise self._failed
                if self._answer is None:
                    raise _Killed
                return self._answer
        finally:
            with self._heard:
                self._waiting = False

    def _listen(self, process: PipedProcess) -> None:
        while True:
            try:
                message, _ = process.pipe.receive()
            except (EOFError, OSError):
                break
            self._hear(message)
        code = process.bury()
        self._drop_all()
        if -code in FROM_OUTSIDE:
            self._note_kill(f"was killed from outside, by {signal.Signals(-code).name}")
        else:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._fail(0, f"its process ended with {how}")

    def _note_kill(self, how: str) -> None:
        """Let the process be started again for the next result, unless it was killed too often."""
        with self._heard:
            if self._failed is not None or self._closing:
                return
            self._kills += 1
            if self._kills < STARTS:
                self._killed = True
                LOG.warning(
                    "the process of the aggregator %r %s. It is started again, and gets the updates of the round again",
                    self.name,
                    how,
                )
                self._heard.notify_all()
                return
        self._fail(0, f"its process {how}, {self._kills} times without a result", is_final=False)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["what"] == "error":
            self._fail(message["round"], message["message"], is_final=message["is_final"])
            return
        with self._heard:
            self._heard_s = time.monotonic()
            if message["what"] == "released":
                self._drop(message["id"])
            elif message["what"] != "progress":
                self._answer = message
            self._heard.notify_all()

    def _fail(self, number: int, what: str, *, is_final: bool = True) -> None:
        with self._heard:
            if self._failed is not None or self._closing:
                return
            self._failed = error = self._failure(number, what, is_final=is_final)
            waiting = self._waiting
            self._heard.notify_all()
        if not waiting:
            self._on_failed(error)

    def _failure(self, number: int, what: str, *, is_final: bool = True) -> RunFailed:
        """Return the error with which the run fails.

        Args:
            number: number of the round; 0 if unknown.
            what: what happened.
            is_final: whether the aggregator is at fault, so that it would fail again; if not, the machine is.
        """
        when = f" in round {number}" if number else ""
        error = RunFailed(
            f"The aggregator {self.name!r} failed{when}: {what}.",
            "Correct the aggregator, and start the run again: it continues with the same updates."
            if is_final
            else "Start the run again: it continues with the same updates. If memory ran out (the log of the Linux "
            "kernel, dmesg, shows it), give the server more memory first.",
        )
        error.is_final = is_final
        return error

    # -- pins

    def _drop(self, identity: int) -> None:
        pin = self._pins.pop(identity, None)
        if pin is not None:
            pin.pool.drop(pin.slot, HELD_BY_PROCESS)

    def _drop_all(self) -> None:
        with self._heard:
            for identity in list(self._pins):
                self._drop(identity)
