"""A user's aggregator, seen from the server: a process of its own that gets spools and gives back one update.

A spool that it was given is pinned until the process says that nothing refers to it any more, or has ended; so the
slot is not rewritten under a lazy tensor that user code keeps. What comes back is a file without a name in the state
directory: it is gone with the server, and a frozen round that was not committed is aggregated again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from atoll.aggregation.aggregator_process import ProcessPipe
from atoll.aggregation.plan import Plan
from atoll.aggregation.user_aggregator import result_layout
from atoll.errors import AtollError, ConfigError, RunFailed
from atoll.server.update_filters import Filtering
from atoll.store.file_slots import Slot, SlotPool, disk_error
from atoll.store.journal_tables import TicketRow
from atoll.store.store import Store

HELD_BY_PROCESS = "aggregator"
"""Name of the process among the holders of a slot."""
START_S = 120.0
END_S = 5.0
LOOK_S = 0.2
"""How often to check whether the server is stopping."""

_MAIN = """
import sys
sys.path[:] = sys.argv[2:]
from atoll.aggregation.aggregator_process import main
main(int(sys.argv[1]))
"""


@dataclass
class _Pin:
    """A spool that the process has.

    Attributes:
        asked: whether the process was told to give it back.
    """

    pool: SlotPool
    slot: Slot
    asked: bool = False


class Aggregator:
    """The process of the run's aggregator, which is started and loads it.

    Args:
        on_failed: called, by any thread, when the aggregator fails while no round waits for it.

    Raises:
        ConfigError: it cannot be loaded; the message says why.
        RunFailed: it fails when it is made, or does not begin in two minutes.
    """

    _process: subprocess.Popen[bytes]
    _channel: ProcessPipe

    def __init__(self, plan: Plan, on_failed: Callable[[AtollError], object], filtering: Filtering) -> None:
        self._filtering = filtering
        self._plan, self._settings, self._on_failed = plan, plan.settings, on_failed
        self.name = str(plan.settings.aggregation.aggregator.path)
        self._layout = result_layout(plan.schema, plan.settings.network.part_bytes)
        self._result_fd: int | None = None
        self._busy = threading.Lock()  # held while it gets updates or makes its result
        self._heard = threading.Condition()  # guards the fields below
        self._heard_s = 0.0
        self._answer: dict[str, Any] | None = None
        self._failed: AtollError | None = None
        self._waiting = self._closing = False
        self._pins: dict[int, _Pin] = {}
        self._given: set[int] = set()
        self._closed: set[int] = set()
        self._next_id, self._incremental = 0, False
        self._offers = ThreadPoolExecutor(1, thread_name_prefix="atoll-offer")
        self._start()
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    # -- life

    def _start(self) -> None:
        mine, theirs = ProcessPipe.pair()
        environment = {key: value for key, value in os.environ.items() if key != "ATOLL_FAILPOINTS"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # keep its output apart from that of the server
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the server alone, which ends it
            )
        finally:
            theirs.close()
        self._channel = ProcessPipe(mine)
        threading.Thread(target=self._listen, name="atoll-aggregator", daemon=True).start()

    def _load(self) -> None:
        begin = {
            "what": "begin",
            "schema": self._plan.schema.to_json(),
            "codec": self._plan.algorithm.codec,
            "codec_options": self._plan.algorithm.codec_options,
            "part_bytes": self._settings.network.part_bytes,
            "threads": self._plan.threads,
            "aggregator": self.name,
            "options": self._settings.aggregation.aggregator.options,
        }
        answer = self._ask(begin, 0, threading.Event(), START_S)
        if answer["what"] == "bad":
            raise ConfigError(answer["message"], answer["remedy"])
        self._incremental = answer["incremental"]

    def close(self) -> None:
        """End the process, and give back every spool that it had. Idempotent."""
        with self._heard:
            self._closing = True
        self._offers.shutdown(wait=True, cancel_futures=True)
        self._channel.close()
        slow = threading.Timer(END_S, self._process.kill)
        slow.start()
        self._buried()
        slow.cancel()
        self._drop_all()
        if self._result_fd is not None:
            os.close(self._result_fd)
            self._result_fd = None

    # -- updates

    def offer(self, store: Store, row: TicketRow, number: int) -> None:
        """Give an accepted update, soon, to an aggregator that takes them as they arrive.

        Args:
            row: its ticket.
            number: of the round.
        """
        if self._incremental:
            self._offers.submit(self._offer, store, row.ticket, number)

    def _offer(self, store: Store, ticket: int, number: int) -> None:
        with self._busy:
            row = store.tickets.get(ticket)
            if row.state == "accepted" and ticket not in self._closed and ticket not in self._given:
                self._give(store, row, number)

    def aggregate(self, store: Store, rows: Sequence[TicketRow], number: int, cancelled: threading.Event) -> int:
        """Let it make one update of the updates of a frozen round.

        Args:
            rows: in the frozen order. It gets those that it has not had; if it has had others, too, it begins anew.
            number: of the round.

        Returns:
            The file of the pseudo-gradient of `params`, laid out by `result_layout`; the next call rewrites it.

        Raises:
            CancelledError: `cancelled` was set.
            DiskFull: no space for the result; the same call may be made again.
            RunFailed: it raised, gave what cannot be used, stood still or ended; the message says which.
        """
        with self._busy:
            if self._failed is not None:
                raise self._failed
            fd = self._result_file()
            tickets = {row.ticket for row in rows}
            if not self._given <= tickets:
                self._send({"what": "reset", "round": number})
                self._given.clear()
            for row in rows:
                if row.ticket not in self._given:
                    self._give(store, row, number)
            timeout_s = self._settings.aggregation.aggregator_timeout_s or None
            self._ask({"what": "aggregate", "round": number}, number, cancelled, timeout_s)
            self._given.clear()
            self._closed = tickets
            self._limit_kept()
            return fd

    def _give(self, store: Store, row: TicketRow, number: int) -> None:
        spool, source = store.tickets.spool(row.ticket), self._filtering.source(row)
        fd = os.open(f"/proc/self/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with self._heard:
                identity, self._next_id = self._next_id, self._next_id + 1
                spool.pool.hold(spool.slot, HELD_BY_PROCESS)
                self._pins[identity] = _Pin(spool.pool, spool.slot)
            self._given.add(row.ticket)
            self._send(
                {
                    "what": "update",
                    "id": identity,
                    "site": row.site,
                    "round": number,
                    "weight": row.weight,
                    "steps": row.steps,
                    "metrics": dict(row.metrics),
                },
                fd,
            )
        finally:
            os.close(fd)

    def _limit_kept(self) -> None:
        """Ask for the oldest updates that it keeps beyond their round, if they are too many."""
        with self._heard:
            kept = [identity for identity, pin in self._pins.items() if not pin.asked]
            most = self._settings.aggregation.max_kept_updates
            surplus = kept[: max(0, len(kept) - most)]
            for identity in surplus:
                self._pins[identity].asked = True
        for identity in surplus:
            self._send({"what": "release", "id": identity})

    def _result_file(self) -> int:
        if self._result_fd is None:
            try:
                self._result_fd = self._plan.new_file("aggregate", self._layout.nbytes)
            except OSError as error:
                raise disk_error(error, self._settings.disk.state_dir / "aggregate") from error
            self._send({"what": "file"}, self._result_fd)
        return self._result_fd

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """End a process that cannot be sent a message; `_listen` reports how it ended."""
        try:
            self._channel.send(message, fd)
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
                while self._answer is None and self._failed is None:
                    if cancelled.is_set():
                        raise CancelledError
                    if timeout_s is not None and time.monotonic() - self._heard_s > timeout_s:
                        self._failed = self._failure(
                            number, f"it has neither read nor given a tensor for {timeout_s:g} s and was ended"
                        )
                        self._process.kill()
                        break
                    self._heard.wait(LOOK_S)
                if self._failed is not None:
                    raise self._failed
                assert self._answer is not None
                return self._answer
        finally:
            with self._heard:
                self._waiting = False

    def _listen(self) -> None:
        while True:
            try:
                message, _ = self._channel.receive()
            except (EOFError, OSError):
                break
            self._hear(message)
        code = self._buried()
        self._drop_all()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._fail(0, f"its process ended with {how}")

    def _buried(self) -> int:
        """Wait for the end of the process; its forks end with it, since they may hold spools, too."""
        with contextlib.suppress(ChildProcessError, ProcessLookupError):  # another thread was first; no fork is left
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _hear(self, message: dict[str, Any]) -> None:
        if message["what"] == "error":
            self._fail(message["round"], message["message"])
            return
        with self._heard:
            self._heard_s = time.monotonic()
            if message["what"] == "released":
                self._drop(message["id"])
            elif message["what"] != "progress":
                self._answer = message
            self._heard.notify_all()

    def _fail(self, number: int, what: str) -> None:
        with self._heard:
            if self._failed is not None or self._closing:
                return
            self._failed = error = self._failure(number, what)
            waiting = self._waiting
            self._heard.notify_all()
        if not waiting:
            self._on_failed(error)

    def _failure(self, number: int, what: str) -> RunFailed:
        when = f" in round {number}" if number else ""
        return RunFailed(
            f"The aggregator {self.name!r} failed{when}: {what}.",
            "Nothing is lost: mend it and start the server again, which goes on with the same updates.",
        )

    # -- pins

    def _drop(self, identity: int) -> None:
        pin = self._pins.pop(identity, None)
        if pin is not None:
            pin.pool.drop(pin.slot, HELD_BY_PROCESS)

    def _drop_all(self) -> None:
        with self._heard:
            for identity in list(self._pins):
                self._drop(identity)
