"""Follows a run with trackers and the webhook: each reads the run's events in a thread of its own, from the journal.

So a slow tracker holds up nothing, and needs no memory: the events that it has not got yet are rows of the journal,
which keeps a bounded number of them. A note in the state directory says which event a tracker got last. After a
restart, it goes on behind that one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atoll import registry
from atoll.config import Settings, to_toml
from atoll.errors import AtollError, ConfigError
from atoll.format_text import visible, without_credentials
from atoll.json_files import read_note, write_note
from atoll.protocol import run_events
from atoll.server.coordinator.extension import Extension, RunView
from atoll.server.coordinator.run_core import RunCore
from atoll.store.kept_events import newest_event
from atoll.store.reader import open_state
from atoll.trackers.base import TrackedRun, Tracker

LOG = logging.getLogger("atoll.server")

MakeTracker = Callable[[TrackedRun], Tracker]

PAGE_EVENTS = 100
"""Number of events that are read at a time."""
GATHER_S = 0.2
"""Seconds that a thread waits for further events after the first one, so that short rounds are read together."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""First and longest pause before a tracker that cannot begin is tried again, in seconds."""
CLOSE_S, BEGIN_S = 10.0, 60.0
"""Seconds at the server's end in which trackers write what is left, and in which a tracker that is still starting may
finish."""
MOST_LOST = 100
"""Number of events that are kept in memory if the journal cannot be written."""


@dataclass
class Position:
    """What a tracker has got: the note in the state directory.

    Attributes:
        event: number of the last event.
        rounds: fragment → number of its last round.
    """

    event: int = 0
    rounds: list[int] = field(default_factory=list)


def makers_of(settings: Settings) -> dict[str, MakeTracker]:
    """Return the trackers that the settings name: name → function that begins it. Nothing is begun here.

    Raises:
        ConfigError: there is no such tracker, its library is not installed, or an option is wrong.
    """
    found = dict[str, MakeTracker]()
    for name, options in settings.server.options_of_trackers.items():
        kind = registry.load("trackers", name)
        if not (isinstance(kind, type) and issubclass(kind, Tracker)):
            raise ConfigError(
                f"The tracker {name!r} is {kind!r}, which is no tracker.",
                "Let its entry point lead to a subclass of atoll.trackers.Tracker.",
            )
        for module, package in kind.needs(options).items():
            if not _is_installed(module):
                raise ConfigError(
                    f"server.trackers names {name!r}, but {module} is not installed.",
                    f"Run: pip install '{package}'",
                )
        try:
            inspect.signature(kind).bind(None, **options)
        except TypeError as error:
            remedy = registry.options_of(partial(kind, None), str(name))  # type: ignore[arg-type]
            raise ConfigError(f"server.trackers.{name}: {error}.", remedy) from None
        registry.require_kinds(kind, options, f"server.trackers.{name}")
        found[str(name)] = partial(kind, **options)
    return found


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


class Trackers(Extension):
    """The trackers of a run, each with its thread. It is one of the extensions that Atoll brings.

    They live as long as the server: if the run begins again within it, nothing waits for a tracker.

    Args:
        run: the run.
        makers: name → function that begins the tracker. It goes on behind its note; without one, it gets all events.
        live: the same for those that get only what happens from now on, and leave no note.
    """

    name = "trackers"

    def __init__(self, run: RunCore, makers: Mapping[str, MakeTracker], live: Mapping[str, MakeTracker]) -> None:
        super().__init__(run)
        assert run.store.run_log.run is not None
        newest, fragments = newest_event(run.store.journal.rows), len(run.plan.fragments)
        about = partial(TrackedRun, run.store.run_log.run.run_id, run.settings.run.name)
        self._followers = list[_Follower]()
        for name, make in {**makers, **live}.items():
            label = name if name in live else f"tracker {name}"
            note = None if name in live else run.store.directory / f"tracker-{name.replace('/', '-')}.json"
            position = (read_note(note, Position) if note else None) or Position(newest if name in live else 0)
            position.event = min(position.event, newest)  # the journal may have lost its end
            position.rounds = (position.rounds + [0] * fragments)[:fragments]
            begin = partial(make, about(_as_texts(run.settings), run.settings.exports, tuple(position.rounds)))
            follower = _Follower(label, begin, position, note, run.store.directory)
            self._followers.append(follower)
            if position.event < newest:  # also if the run is finished, and nothing more happens
                follower.begin()
        self._subscribe(run)

    def _subscribe(self, run: RunView) -> None:
        for each in self._followers:
            run.events.subscribe(f"the {each.name}", each.notice)

    def follow(self, run: RunView) -> None:
        """Go on with the run, which begins again, behind the events that each tracker has got."""
        super().follow(run)
        self._subscribe(run)
        for each in self._followers:
            each.read_on()

    async def rest(self) -> None:
        """Read no events until `follow`: the journal is closed. What a tracker does at this moment goes on."""

        def rest() -> None:
            for each in self._followers:
                each.rest()

        await asyncio.to_thread(rest)

    def warnings(self) -> Iterable[str]:
        """Return the problems with trackers."""
        return [each.problem for each in self._followers if each.problem]

    def tick(self, now_s: float) -> None:
        """Begin what is not begun yet, so that it is said early if that is not possible."""
        for each in self._followers if not self.run.state.finished else ():
            each.begin()

    async def close(self) -> None:
        """Let the trackers write what is left, `CLOSE_S` seconds after all have begun (`BEGIN_S`). Idempotent."""
        for each in self._followers:
            each.end()
        until_s = time.monotonic() + BEGIN_S

        def join() -> None:
            for each in self._followers:
                each.wait_begun(until_s)
            last_s = time.monotonic() + CLOSE_S
            for each in self._followers:
                each.join(last_s)

        await asyncio.to_thread(join)


SHOWN = ("run", "model", "algorithm", "diloco", "rounds", "async", "swarm", "aggregation")
"""The groups of settings that trackers get: what a run computes, and not where, nor options of the user's own code."""
OWN_CODE = ("model.persistor", "aggregation.aggregator")


def _as_texts(settings: Settings) -> dict[str, str]:
    """Return the settings in effect as texts."""
    values = {key: value for key, value in settings.by_key().items() if key.partition(".")[0] in SHOWN}
    return {
        key: str(value) if isinstance(value, str) or key in OWN_CODE else "" if value is None else to_toml(value)
        for key, value in values.items()
    }


class _Follower:
    """Passes the events of a run to one tracker, in a thread.

    Args:
        name: what it is called in messages, such as `tracker mlflow`.
        make: begins the tracker.
        position: what the tracker has got.
        note: file of the position; None: there is none.
        state_dir: state directory of the run.

    Attributes:
        problem: why the tracker lacks something, as a warning for the status; empty if it does not.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], position: Position, note: Path | None, state_dir: Path
    ) -> None:
        self.name, self.problem = name, ""
        self._make, self._position, self._note, self._state_dir = make, position, note, state_dir
        self._news, self._ending = threading.Event(), threading.Event()
        self._tried = threading.Event()  # whether a first attempt to begin the tracker is over
        self._reading, self._may_read = threading.Lock(), True  # whether the journal is open; it changes under the lock
        self._has_failed = self._is_late = self._is_over = False
        self._has_all = True  # whether the tracker took the last event
        self._unwritten = deque[run_events.Happened](maxlen=MOST_LOST)  # events that are not in the journal
        self._thread: threading.Thread | None = None

    # -- on the server's event loop

    def begin(self) -> None:
        """Start the thread, if it is not there yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name=f"atoll-{self.name}", daemon=True)
            self._thread.start()

    def notice(self, event: run_events.Happened) -> None:
        """Wake the thread for an event."""
        if not event.number:
            self._unwritten.append(event)
        self._news.set()
        self.begin()

    def read_on(self) -> None:
        """Read the journal again, which is open now."""
        self._may_read = True
        self._news.set()

    def end(self) -> None:
        """Let the thread end once the tracker has got all events."""
        self._ending.set()
        self._news.set()

    # -- in a thread of the server

    def rest(self) -> None:
        """Read no more in the journal until `read_on`. Wait for the page of events that is being read."""
        with self._reading:
            self._may_read = False

    def wait_begun(self, until_s: float) -> None:
        """Wait until the tracker has begun, or could not, or until a time of `time.monotonic`."""
        if self._thread is not None and not self._tried.wait(CLOSE_S):
            LOG.info("waiting for the %s to begin, for %g s at most", self.name, max(0.0, until_s - time.monotonic()))
            self._tried.wait(max(0.0, until_s - time.monotonic()))

    def join(self, until_s: float) -> None:
        """Wait for the thread's end until a time of `time.monotonic`; then let the tracker get nothing more."""
        if self._thread is not None and not self._is_late:
            self._thread.join(max(0.0, until_s - time.monotonic()))
            self._is_late = self._thread.is_alive()
            if self._is_late:
                LOG.warning("the %s had not written everything when the server ended", self.name)

    # -- in the thread

    def _follow(self) -> None:
        tracker = self._begun()
        if tracker is None:
            return
        self._news.set()  # for the events from before the start
        try:
            while True:
                self._news.wait()
                self._ending.wait(GATHER_S)
                is_last = self._ending.is_set()
                self._news.clear()
                self._pass_all(tracker)
                if is_last:
                    return
        finally:
            self._try(tracker.close)
            if self._is_over:  # else what belongs to the open round comes again
                self._write_note()

    def _begun(self) -> Tracker | None:
        """Return the tracker, begun; None if the server ends before that is possible."""
        pause_s = RETRY_S
        while True:
            try:
                tracker = self._make()
            except (Exception, SystemExit) as error:
                self._say(error)
            else:
                if self.problem:
                    LOG.info("the %s works now", self.name)
                    self.problem, self._has_failed = "", False
                return tracker
            finally:
                self._tried.set()
            if self._ending.wait(pause_s):
                return None
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    def _pass_all(self, tracker: Tracker) -> None:
        while events := self._next_events():
            for event in events:
                if self._is_late:  # the server has ended, and another one may use the state directory
                    return
                self._has_all = self._try(partial(tracker.on_event, event))
                self._position.event = max(self._position.event, event.number)
                if isinstance(event, run_events.RoundEnded):
                    self._position.rounds[event.fragment] = event.round
                self._is_over = self._is_over or isinstance(event, run_events.RunFinished)
                if isinstance(event, run_events.RoundEnded | run_events.RunFinished | run_events.RunFailed):
                    self._write_note()

    def _write_note(self) -> None:
        if self._note is not None and self._has_all and not self._is_late:
            self._try(partial(write_note, self._note, self._position))

    def _next_events(self) -> list[run_events.Happened]:
        found: list[run_events.Happened] = []
        try:
            with self._reading:
                if self._may_read:
                    with open_state(self._state_dir, in_server=True) as state:
                        found = state.events_after(self._position.event, PAGE_EVENTS)
        except AtollError as error:  # such as a damaged row
            if not self._is_late:
                self._say(error)
        while self._unwritten and not found:
            found.append(self._unwritten.popleft())
        return found

    def _try(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except (Exception, SystemExit) as error:
            self._say(error)
            return False
        return True

    def _say(self, error: BaseException) -> None:
        if not self._has_failed:
            self._has_failed = True
            why = visible(without_credentials(f"{type(error).__name__}: {error}"), 500)
            self.problem = f"the {self.name} failed, and may lack something from now on: {why}"
            LOG.warning("%s. Training goes on", self.problem)
            LOG.debug("the %s failed", self.name, exc_info=error)
