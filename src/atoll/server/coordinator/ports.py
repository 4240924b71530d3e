"""The ports of the coordinator: where rounds become versions, what evaluates versions, and the tasks of sites."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from atoll.errors import AtollError
from atoll.protocol import messages, status_messages
from atoll.protocol.run_events import Happened
from atoll.rounds import events
from atoll.server.coordinator.aggregate_round import MadeVersion
from atoll.server.coordinator.roster import Lease
from atoll.store.journal_tables import TicketRow


class RoundPlace(Protocol):
    """The place at which the versions of a run are made. All methods run on the server's event loop.

    Attributes:
        is_here: whether the server has the updates and the files of the versions.
    """

    is_here: bool

    def start(self, fail: Callable[[AtollError], None]) -> None:
        """Begin. `fail` is called if the run cannot go on.

        Raises:
            ConfigError, RunFailed: the place cannot begin.
        """

    async def admit(self, message: messages.Join) -> None:
        """Raise an error if the worker that wants to join cannot take part at this place.

        Raises:
            ConfigError: the worker cannot take part.
        """

    def why_withheld(self, site: str, fragment: int) -> str:
        """Return why a site gets no ticket yet; empty if it may get one."""

    def trouble(self, fragment: int) -> str:
        """Return why a fragment's next version is not made; empty if there is no problem."""

    def status(self, fragment: int) -> status_messages.PlaceStatus | None:
        """Return which workers make a fragment's versions; None: the server does."""

    def sources(self, fragment: int, version: int, digest: str) -> list[str]:
        """Return references to a version at workers that have it; empty: the server has it."""

    async def deliver(self, lease: Lease, row: TicketRow, message: messages.Complete) -> messages.Receipt | None:
        """Take in an update that its site has completed; None: its parts are at the server.

        Raises:
            BadRequest: the message does not say where the update is.
            TicketClosed, UpdateRefused: the update is not accepted.
        """

    def on_event(self, event: Happened) -> None:
        """Follow the events of the run. If this raises an error, the run fails."""

    async def aggregate(self, closed: events.RoundClosed, number: int) -> MadeVersion | None:
        """Make the next version from a closed round; None: the round is open again.

        Raises:
            DiskFull: the disk is full. Nothing is lost; the same call can be repeated.
            AtollError: the version cannot be made.
        """

    def tick(self) -> None:
        """Do what is due. This is called about once a second."""

    def cancel(self) -> None:
        """End what is under way, because the server is about to end."""

    def close(self) -> None:
        """Free what the place holds."""


class Evaluation(Protocol):
    """The evaluation of versions at the server. All methods run on the server's event loop.

    Attributes:
        task: the newest evaluation; None if there was none.
    """

    task: asyncio.Task[None] | None

    def begin(self, summary: status_messages.RoundSummary, heads: Sequence[int]) -> asyncio.Task[None] | None:
        """Begin to evaluate a version, if it is due. Return the evaluation as a task.

        Args:
            summary: summary of the round that completed the version.
            heads: number of the version of each fragment.
        """

    def resume(self) -> tuple[status_messages.RoundSummary, asyncio.Task[None]] | None:
        """If the newest version is to be evaluated and was not, begin that: at a server's start, and at the run's end.

        Return the summary of the version's round, and the evaluation as a task.
        """

    def stop(self) -> None:
        """End the evaluation that runs."""


class Tasks(Protocol):
    """The tasks of a run's workflows, which sites do before, after or in place of rounds.

    Attributes:
        active: whether the run sends tasks now or will send some later.
        trains: whether the run has rounds now or will have some later.
        rounds: state of the run's rounds: "to come", "now" or "over".
        follows: whether the run sends tasks after its rounds.
        finished: whether the last workflow has ended.
        keeps_local: whether sites must keep the models that they submit, because a later task needs them.
        counts: how a task's payload is sent → number of tasks so far.
    """

    active: bool
    trains: bool
    rounds: Literal["to come", "now", "over"]
    follows: bool
    finished: bool
    keeps_local: bool
    counts: dict[str, int]

    def will_evaluate(self, site: str) -> bool:
        """Return whether a later task will ask this site to evaluate models."""

    def require_rounds(self) -> None:
        """Raise an error if a site asks for a ticket, but the run has only tasks.

        Raises:
            ConfigError: the run has no rounds.
        """

    def workflows_status(self) -> list[status_messages.WorkflowStatus]:
        """Return the status of each workflow, in order."""

    def tasks_status(self) -> list[status_messages.TaskStatus]:
        """Return the status of the last tasks, oldest first."""
