"""A run with all parts that serve it."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.server.coordinator.accept_update import UpdateAdmission
from atoll.server.coordinator.admin_operations import AdminOperations
from atoll.server.coordinator.background_writes import BackgroundWriter
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.coordinator.evaluate_versions import VersionEvaluation
from atoll.server.coordinator.extension import Extensions
from atoll.server.coordinator.failure_notices import FailureNotices
from atoll.server.coordinator.first_shapes import FirstShapes
from atoll.server.coordinator.lease_checks import LeaseChecks
from atoll.server.coordinator.ports import RoundPlace, Tasks
from atoll.server.coordinator.published_objects import PublishedObjects
from atoll.server.coordinator.round_configs import RoundConfigs
from atoll.server.coordinator.round_history import RoundHistory
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.run_warnings import RunWarnings
from atoll.server.coordinator.site_credentials import SiteCredentials
from atoll.server.coordinator.site_operations import SiteOperations
from atoll.server.coordinator.ticket_operations import TicketOperations
from atoll.server.coordinator.update_operations import UpdateOperations


@dataclass(frozen=True)
class ServedRun:
    """The parts of a run, as `server/assemble_run` puts them together. Each says in its class what it does."""

    run: RunCore
    coordinator: Coordinator
    place: RoundPlace
    tasks: Tasks
    objects: PublishedObjects
    extensions: Extensions
    leases: LeaseChecks
    configs: RoundConfigs
    shapes: FirstShapes
    sites: SiteOperations
    tickets: TicketOperations
    updates: UpdateOperations
    admin: AdminOperations
    credentials: SiteCredentials
    admission: UpdateAdmission
    history: RoundHistory
    background: BackgroundWriter
    evaluation: VersionEvaluation
    warnings: RunWarnings
    failure: FailureNotices

    @property
    def begins_again(self) -> bool:
        """Whether the run begins again: with other shapes, another codec, or from an earlier version."""
        return self.run.begins_again.is_set() and self.run.failed is None
