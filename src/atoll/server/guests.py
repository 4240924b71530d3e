"""What plugs into the coordinator of this server: the place of the rounds, and the queue of tasks."""

from __future__ import annotations

from atoll.server.coordinator.aggregate_round import LocalRounds
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.ports import Guests, RoundPlace
from atoll.server.swarm.assignments import SwarmRounds
from atoll.server.tasks.task_queue import TaskQueue


def guests(run: Coordinator) -> Guests:
    """Return the guests of a run: versions are made at the server or, in a swarm, at its workers."""
    place: RoundPlace = LocalRounds(run.plan, run.store, run.filtering, run.io)
    if run.plan.is_swarm:
        place = SwarmRounds(run.plan, run.store, run.ledger, run.admission, run.wake, run.require_open)
    return Guests(place, TaskQueue(run))
