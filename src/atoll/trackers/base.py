"""The base classes of trackers, and what a tracker knows of its run."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from atoll.protocol import run_events
from atoll.protocol.status_messages import RoundSummary

CONNECT_S = 5.0
"""Seconds that a tracking server has to accept a connection."""
OWN = "atoll/"
"""Beginning of the names of values that Atoll measures: a site's own metric cannot be taken for one of them."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of its run.

    Attributes:
        id: id of the run. It stays the same when the server is restarted, so a tracker can find what it has begun.
        name: the setting `run.name`.
        settings: the settings in effect: `group.key` → value as text.
        folder: folder for the tracker's files, beside the run's exports. It may not exist yet.
        rounds: fragment → number of the last round that the tracker has got, before the server was restarted.
    """

    id: str
    name: str
    settings: Mapping[str, str]
    folder: Path
    rounds: Sequence[int]


class Tracker:
    """Base class of trackers. The options in the run file are further keyword arguments of the constructor.

    A thread of its own makes the tracker and calls its methods, so all of them may block. The tracker gets each event
    once and in order, also those that happened while it was slow, or that it had not got when the server was killed. If
    a method raises, the log and the status say so once, and the run goes on.

    Attributes:
        module: module that has to be installed; empty if Atoll has all that the tracker needs.
        package: what to give `pip install` if the module is missing.
    """

    module: ClassVar[str] = ""
    package: ClassVar[str] = ""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    @classmethod
    def needs(cls, options: Mapping[str, object]) -> dict[str, str]:
        """Return the modules that have to be installed for these options: module → what to give `pip install`."""
        return {cls.module: cls.package or cls.module} if cls.module else {}

    def on_event(self, event: run_events.Happened) -> None:
        """Follow an event of the run."""

    def close(self) -> None:
        """Write what is left, because the server ends. The run may go on when it is started again."""


class PointTracker(Tracker):
    """Base class of trackers that draw curves: each round that ends gives points of the run and of its sites.

    The x-axis is the number of the round; with several fragments, the sum of the numbers of their last rounds.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._rounds = list(run.rounds)

    @property
    def step(self) -> int:
        """The place on the x-axis of the last points."""
        return sum(self._rounds)

    def on_event(self, event: run_events.Happened) -> None:
        """Write the points of a round that has ended, and how the run has ended."""
        match event:
            case run_events.RoundEnded(fragment=fragment, round=number, summary=summary):
                self._rounds[fragment] = number
                if summary.version is not None:
                    self.write(self.step, seconds_of(event), of_run(summary), of_sites(summary))
            case run_events.RunFinished():
                self.end(None)
            case run_events.RunFailed(reason=reason):
                self.end(reason)

    def write(self, step: int, at_s: float, run: Mapping[str, float], sites: Mapping[str, Mapping[str, float]]) -> None:
        """Write the points of a round.

        Args:
            step: the place on the x-axis.
            at_s: when the round ended (Unix time).
            run: name → value, of the whole run.
            sites: site → name → value.
        """
        raise NotImplementedError

    def end(self, failure: str | None) -> None:
        """Note that the run has ended. A run that failed, or that gets more rounds, may go on later.

        Args:
            failure: why the run has failed; None: it has finished.
        """


def require_reachable(address: str) -> None:
    """Check that something listens at an HTTP address. Other addresses pass.

    Raises:
        OSError: nothing accepts a connection within `CONNECT_S` seconds.
    """
    parts = urlsplit(address)
    if parts.scheme in ("http", "https") and parts.hostname:
        where = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection(where, CONNECT_S).close()
        except OSError as error:
            raise OSError(f"{where[0]}:{where[1]} cannot be reached ({error.strerror or error})") from error


def seconds_of(event: run_events.Happened) -> float:
    """Return when an event happened, as Unix time."""
    return datetime.fromisoformat(event.at).timestamp()


def of_run(summary: RoundSummary) -> dict[str, float]:
    """Return the values of the whole run in a round: the means of its metrics, and what Atoll has measured."""
    norm = {} if summary.grad_norm is None else {"update_norm": summary.grad_norm}
    own = {"updates": len(summary.sites), "aggregation_s": summary.seconds, "bytes": summary.bytes_up, **norm}
    return {**summary.metrics, **{f"{OWN}{name}": float(value) for name, value in own.items()}}


def of_sites(summary: RoundSummary) -> dict[str, dict[str, float]]:
    """Return the values of each site in a round: site → name → value."""
    found = {}
    for each in summary.sites:
        own = {
            "weight": each.weight,
            "steps": each.steps,
            "train_s": each.train_seconds,
            "wait_s": each.wait_seconds,
            "bytes": each.nbytes,
            "staleness": each.staleness,
        }
        found[each.site] = {**each.metrics, **{f"{OWN}{name}": float(value) for name, value in own.items()}}
    return found


def in_one(run: Mapping[str, float], sites: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return all values of a round under one name each: `loss` for the run, `loss/NAME` for a site."""
    return {**run, **{f"{name}/{site}": value for site, values in sites.items() for name, value in values.items()}}
