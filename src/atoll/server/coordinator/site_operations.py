"""The operations of a site that takes part in a run: what it reads before it joins, join, leave and heartbeat."""

from __future__ import annotations

import logging

from atoll.errors import Busy
from atoll.protocol import messages
from atoll.rounds import events
from atoll.server.coordinator.attendance import Attendance
from atoll.server.coordinator.joining import require_fit, run_info
from atoll.server.coordinator.ports import RoundPlace, Tasks
from atoll.server.coordinator.roster import Lease, Presence
from atoll.server.coordinator.run_core import RunCore
from atoll.transport.certificates import SiteIdentity

LOG = logging.getLogger("atoll.server")


class SiteOperations:
    """Carries out the operations of `protocol/openapi.py` by which sites take part.

    Args:
        run: the run.
        place: where the versions are made.
        tasks: the tasks that sites do beside the rounds.
        attendance: which sites are missing or too many.
    """

    def __init__(self, run: RunCore, place: RoundPlace, tasks: Tasks, attendance: Attendance) -> None:
        self._run, self._place, self._tasks, self._attendance = run, place, tasks, attendance
        self._info = run_info(run.plan, run.store.run_log.run_id, run.store.receipt_key.public)

    async def get_run(self) -> messages.RunInfo:
        """Return the description of the run, which a worker reads before it joins."""
        tasks = self._tasks
        told = {"trains": tasks.trains, "sends_tasks": tasks.active, "keeps_local": tasks.keeps_local}
        return self._info.model_copy(update=told)

    async def get_schema(self) -> messages.SchemaMessage:
        """Return the name, dtype, shape and fragment of each tensor of the model."""
        return messages.SchemaMessage.of(self._run.plan.split)

    async def join(self, message: messages.Join, identity: SiteIdentity | None = None) -> messages.Joined:
        """Let a worker process take part: give it a new lease, the right to act for its site.

        An older process of the same site loses its lease.

        Raises:
            VersionSkew, ServerLost, SchemaMismatch, ConfigError: the worker does not fit the run, for example because
                it has another model. In a swarm, ConfigError also if the server or other workers cannot reach it.
        """
        require_fit(message, self._run.plan, self._run.store)
        await self._place.admit(message)
        previous = self._run.roster.get(message.site)
        self._run.roster[message.site], secret = Presence.joining(message, previous)
        try:
            self._run.ledger.record(events.WorkerJoined(message.site, self._is_invited(message.site, identity)))
        except BaseException:  # the previous process keeps its lease
            if previous is None:
                del self._run.roster[message.site]
            else:
                self._run.roster[message.site] = previous
            raise
        LOG.info("%s joined%s", message.site, " again" if previous else "")
        if previous is None and (
            surplus := self._attendance.why_surplus(message.site, self._run.settings.rounds.sites)
        ):
            LOG.warning("%s", surplus)
        return messages.Joined(
            lease=Lease(message.site, self._run.state.members[message.site].lease, message.process, secret).header,
            due=self._run.state.due(message.site),
            evaluates=self._tasks.will_evaluate(message.site),
            displaces=self._run.roster[message.site].displaced.get(previous.process) if previous is not None else None,
        )

    def _is_invited(self, site: str, identity: SiteIdentity | None) -> bool:
        return identity is not None or site in self._run.settings.trust.sites

    def require_room(self, site: str, identity: SiteIdentity | None) -> None:
        """Refuse a site with a new name if the run has `limits.sites` already, and none of them can be forgotten.

        Names that the admin has invited or written into `trust.sites` are not counted so.

        Raises:
            Busy: there is no room at present.
        """
        state, limits = self._run.state, self._run.settings.limits
        if site in state.members or self._is_invited(site, identity):
            return
        stays = [each for each in state.members.values() if each.alive or each.site in state.proven]
        if len(stays) >= limits.sites and not state.late:
            error = Busy(
                f"The run has {len(state.members)} sites, and takes no new name.",
                "Use the name of a site that takes part, or raise limits.sites at the server.",
            )
            error.retry_after_s = 30.0
            raise error

    async def leave(self, lease: Lease, message: messages.Leave) -> None:
        """End a site's lease, so that no round waits for the site. If training failed, the message has the error."""
        self._run.ledger.record(events.WorkerLeft(lease.site, lease.number, message.error or ""))

    async def heartbeat(self, lease: Lease, message: messages.Heartbeat) -> messages.HeartbeatReply:
        """Record the progress that a worker reports, and whether it will submit no more updates.

        `LeaseChecks.require_lease` has already recorded the time of the request.
        """
        presence = self._run.roster.get(lease.site)
        if presence is not None:
            presence.note(message)
        if message.ends and lease.site not in self._run.state.ending:
            self._run.ledger.record(events.WorkerEnds(lease.site, lease.number))
        return messages.HeartbeatReply(
            durable_versions=[self._run.store.versions.durable(index) for index in range(len(self._run.state.rounds))],
            finished=self._run.state.finished,
        )
