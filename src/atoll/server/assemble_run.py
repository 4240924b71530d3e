"""Puts the parts together that serve a run: where its rounds become versions, its tasks, and what clients may call."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.server.coordinator.accept_update import UpdateAdmission
from atoll.server.coordinator.admin_operations import AdminOperations
from atoll.server.coordinator.aggregate_round import LocalRounds
from atoll.server.coordinator.background_writes import BackgroundWriter
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.evaluate_versions import Evaluates, VersionEvaluation
from atoll.server.coordinator.extension import Extensions
from atoll.server.coordinator.failure_notices import FailureNotices
from atoll.server.coordinator.first_shapes import FirstShapes
from atoll.server.coordinator.lease_checks import LeaseChecks
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.ports import RoundPlace
from atoll.server.coordinator.published_objects import PublishedObjects
from atoll.server.coordinator.round_configs import ConfigFunction, RoundConfigs
from atoll.server.coordinator.round_history import RoundHistory
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.run_warnings import RunWarnings
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.coordinator.site_credentials import SiteCredentials
from atoll.server.coordinator.site_operations import SiteOperations
from atoll.server.coordinator.stalls import Stalls
from atoll.server.coordinator.ticket_operations import TicketOperations
from atoll.server.coordinator.tracker_threads import Trackers, makers_of
from atoll.server.coordinator.update_filters import Filtering
from atoll.server.coordinator.update_operations import UpdateOperations
from atoll.server.http.webhook import Webhook
from atoll.server.recorded_rules import record_rules
from atoll.server.startup import OpenedRun
from atoll.server.swarm.assignments import SwarmRounds
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.server.tasks.task_queue import TaskQueue
from atoll.server.tasks.workflow_schedule import WorkflowSchedule

LOG = logging.getLogger("atoll.server")


@dataclass(frozen=True)
class UserCode:
    """The user's code that a run calls at its server.

    Attributes:
        persistor: reads the initial model, and writes versions.
        filters: the server's filters of what sites send, and of the payloads of tasks.
        workflows: the run's workflows; None: the run only trains.
        config: the function for the configurations of sites; None: there is none.
        evaluator: the process that evaluates versions by the user's function; None: there is no such function.
    """

    persistor: Persistor
    filters: TaskFilters
    workflows: WorkflowSchedule | None = None
    config: ConfigFunction | None = None
    evaluator: Evaluates | None = None


def assemble(
    opened: OpenedRun,
    code: UserCode,
    *,
    simulated: bool = False,
    clock: Callable[[], float] = time.monotonic,
    before: ServedRun | None = None,
) -> ServedRun:
    """Return a run that was opened, with all parts that serve it. `Coordinator.start` starts it.

    Args:
        opened: what `open_run` has returned.
        code: the user's code.
        simulated: whether the sites are those of a simulation.
        clock: returns the time in seconds, as `time.monotonic` does.
        before: the run before it began again within this server: its followers stay. None: the server starts now.
    """
    (plan, store, lost), filters, workflows = opened, code.filters, code.workflows
    events_before = None if before is None else before.run.events
    run = RunCore(plan, store, has_workflows=workflows is not None, clock=clock, before=events_before)
    background = BackgroundWriter(plan, store, run.io, code.persistor)
    history, shapes = RoundHistory(run, simulated=simulated), FirstShapes(run)
    evaluation = VersionEvaluation(run, history, code.evaluator)
    leases, admission, configs = LeaseChecks(run, shapes), UpdateAdmission(run), RoundConfigs(run, code.config)
    run.events.subscribe("the reported numbers", admission.reports.on_event)

    filtering = Filtering(filters.results, plan, store, run.user_threads)
    record_rules(plan, store, has_filters=bool(filters.results))
    place: RoundPlace = SwarmRounds(run, admission, leases) if plan.is_swarm else LocalRounds(run, filtering)

    objects, answer_filter = PublishedObjects(run), None
    if filters.results and workflows is not None and workflows.sends_tasks:  # else no answer needs a thread
        answer_filter = functools.partial(filters.received_in_thread, run.user_threads)
    tasks = TaskQueue(run, leases, objects.store, workflows, answer_filter)
    extensions_before = None if before is None else before.extensions
    trackers = _trackers(run) if extensions_before is None else extensions_before.trackers
    extensions = Extensions(run, [tasks, objects, Stalls(run)], trackers, extensions_before)

    warnings = RunWarnings(
        run,
        [
            lambda: background.unsaved.values(),
            history.warnings,
            evaluation.warnings,
            lambda: [*admission.reports.warnings, *admission.metric_warnings],
            extensions.warnings,
        ],
    )
    for sentence in lost:
        LOG.warning("%s", sentence)
    return ServedRun(
        run=run,
        coordinator=Coordinator(run, place, history, background, evaluation, extensions, warnings),
        place=place,
        tasks=tasks,
        objects=objects,
        extensions=extensions,
        leases=leases,
        configs=configs,
        shapes=shapes,
        sites=SiteOperations(run, place, tasks, history.attendance),
        tickets=TicketOperations(run, leases, shapes, place, tasks, history.time_left, configs),
        updates=UpdateOperations(run, leases, place, admission, filtering),
        admin=AdminOperations(run, place, tasks),
        credentials=SiteCredentials(run),
        admission=admission,
        history=history,
        background=background,
        evaluation=evaluation,
        warnings=warnings,
        failure=FailureNotices(run, leases),
    )


def _trackers(run: RunCore) -> Trackers:
    webhook = run.settings.server.webhook
    live = {"webhook": functools.partial(Webhook, address=webhook)} if webhook else {}
    return Trackers(run, makers_of(run.settings), live)
