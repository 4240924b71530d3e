"""What each operation does. Names are those of `protocol/openapi.py`; errors are raised, `app.py` writes them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace

from aiohttp import web

from atoll.aggregation.check_arriving_parts import PartStats
from atoll.aggregation.plan import placed_settings
from atoll.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    Gone,
    TicketClosed,
)
from atoll.protocol import messages, routes, status_messages, swarm_messages, task_messages
from atoll.rounds import events as ev
from atoll.rounds import events as fx
from atoll.rounds import machine
from atoll.runtime import failpoint
from atoll.server.coordinator.admission import counted_of, require_fit, run_info
from atoll.server.coordinator.build_status import status_of, why
from atoll.server.coordinator.ledger_rows import outcome_of
from atoll.server.coordinator.receive_parts import Uploads
from atoll.server.coordinator.roster import Lease, Presence, now_text, replaced
from atoll.server.coordinator.run import Run
from atoll.server.http.auth import IDENTITY
from atoll.server.http.byte_routes import ObjectHandlers, VersionHandlers
from atoll.server.http.prometheus import prometheus
from atoll.server.swarm.assignments import Swarm
from atoll.server.tasks.task_queue import TaskHandlers
from atoll.server.transient_errors import require_space
from atoll.store.journal_tables import PartRow, TicketRow, VersionRow
from atoll.store.tickets import why_closed
from atoll.store.update_spool import PartWriter
from atoll.tensors.layout import Layout
from atoll.transport.receive_upload import require_part_bytes

LOG = logging.getLogger("atoll.server")

COMMIT_S = 1.0
"""How long a ticket waits for a commit that is under way, whatever its worker has asked for."""


class Handlers(ObjectHandlers, TaskHandlers, VersionHandlers):
    """The operations on one run."""

    def __init__(self, run: Run) -> None:
        ObjectHandlers.__init__(self)
        TaskHandlers.__init__(self, run.task_queue, run.changed, run.require_lease, run.io)
        self.run, self.store, self.plan = run, run.store, run.plan
        self._uploads = Uploads(run)

    # -- what a run is

    async def get_run(self) -> messages.RunInfo:
        queue, schedule = self.run.task_queue, self.run.workflows
        return run_info(self.plan, self.store.run_log.run_id).model_copy(
            update={
                "trains": queue.trains,
                "sends_tasks": queue.active,
                "keeps_local": schedule is not None and schedule.keeps_local,
            }
        )

    async def get_schema(self) -> messages.SchemaMessage:
        return messages.SchemaMessage.of(self.plan.split)

    async def get_status(self) -> status_messages.Status:
        self.run.watched_s = time.monotonic()
        return status_of(self.run)

    async def get_evaluation(self) -> task_messages.Evaluation:
        schedule = self.run.workflows
        if schedule is None or schedule.evaluated is None:
            raise Gone(
                "This server has evaluated nothing across sites.",
                'Add {kind = "cross_site_evaluation"} to the workflows of the run, or use atoll evaluate RUN.TOML.',
            )
        return schedule.evaluated()

    async def get_metrics(self) -> web.Response:
        return web.Response(
            body=prometheus(self.run), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def get_health(self) -> str:
        return "ok\n"

    # -- who takes part

    async def join(self, message: messages.Join, request: web.Request) -> messages.Joined:
        require_fit(message, request[IDENTITY], self.plan, self.store)
        if self.run.swarm is not None:
            self.run.swarm.peers.joins(message)
        previous = self.run.roster.get(message.site)
        presence = Presence(
            site=message.site,
            host=message.host,
            process=message.process,
            joined_at=now_text(),
            labels=dict(message.labels),
            rounds=previous.rounds if previous else 0,
            bases=previous.bases if previous else {},
            refused_in_a_row=previous.refused_in_a_row if previous else 0,
            bytes_up=previous.bytes_up if previous else 0,
            bytes_down=previous.bytes_down if previous else 0,
            gradient_bytes=previous.gradient_bytes if previous else 0,
        )
        secret = presence.grant()
        presence.replaces(previous)
        with replaced(self.run.roster, presence):
            granted = [e for e in self.run.apply(ev.WorkerJoined(message.site)) if isinstance(e, fx.LeaseGranted)]
        LOG.info("%s joined%s", message.site, " again" if previous else "")
        return messages.Joined(
            lease=Lease(message.site, granted[0].lease, message.process, secret).header,
            due=machine.due(self.run.state, message.site),
            evaluates=self.run.workflows is not None and self.run.workflows.will_evaluate(message.site),
        )

    async def leave(self, lease: Lease, message: messages.Leave) -> None:
        self.run.apply(ev.WorkerLeft(lease.site, lease.number, message.error or ""))

    async def heartbeat(self, lease: Lease, message: messages.Heartbeat) -> messages.HeartbeatReply:
        presence = self.run.roster.get(lease.site)
        if presence is not None:
            presence.note(message)
        if message.ends and lease.site not in self.run.state.ending:
            self.run.apply(ev.WorkerEnds(lease.site, lease.number))
        return messages.HeartbeatReply(
            durable_versions=[self.store.versions.durable(index) for index in range(len(self.run.state.rounds))],
            finished=self.run.state.finished,
        )

    # -- tickets

    async def request_ticket(self, lease: Lease, message: messages.TicketRequest) -> messages.TicketReply:
        if message.fragment >= len(self.run.state.rounds):
            raise Gone(
                f"There is no fragment {message.fragment}.",
                f"The run has {len(self.plan.fragments)}, the first is 0.",
            )
        self.run.task_queue.require_rounds()
        until_s = time.monotonic() + message.wait_s
        previous = self.store.tickets.last_of(lease.site, message.fragment)
        while True:
            if message.tasks and self.run.task_queue.rounds == "to come":
                return self._wait_reply(message.fragment, "tasks come before the rounds", previous)
            if self.run.swarm is not None and (reason := self.run.swarm.waits(lease.site, message.fragment)):
                if time.monotonic() >= until_s:
                    return self._wait_reply(message.fragment, reason, previous)
                await self.run.changed(min(1.0, until_s - time.monotonic()))
                continue
            effects = self.run.apply(ev.TicketRequested(lease.site, lease.number, message.fragment))
            for effect in effects:
                match effect:
                    case fx.LeaseRefused():
                        self.run.refuse_lease(lease, effect)
                    case fx.TicketIssued(_, ticket, fragment, base_version, _):
                        # read once: an asynchronous step may move it at any time, from a thread of its own
                        if (head := self.store.versions.head(fragment)).version == base_version:
                            return self._ticket_reply(lease, ticket, head, previous)
                        # such a step is in the journal, and the machine is about to hear of it
                        until_s = max(until_s, time.monotonic() + COMMIT_S)
                    case fx.TicketWithheld(_, fragment, reason):
                        # a finished run answers at once; its result is the head; so does a step for who ends with it
                        moved = previous is None or self.store.versions.head(fragment).version > previous.base_version
                        ended = reason == fx.ENDS and moved
                        if reason == fx.FINISHED or ended or time.monotonic() >= until_s:
                            return self._wait_reply(fragment, reason, previous, ended=ended)
            await self.run.changed(until_s - time.monotonic())

    def _ticket_reply(
        self, lease: Lease, ticket: int, head: VersionRow, previous: TicketRow | None
    ) -> messages.TicketReply:
        fragment = head.fragment
        return messages.TicketReply(
            status="ticket",
            ticket=self.given(lease.site, ticket, fragment, head.version, head.digest),
            previous=self._previous(previous, ticket),
            counted=counted_of(lease.site, self.store) if self.run.plan.algorithm.keeps else None,
            head_version=head.version,
            head_digest=head.digest,
            durable_version=self.store.versions.durable(fragment),
            round=self.run.state.rounds[fragment].number,
        )

    def given(self, site: str, ticket: int, fragment: int, base_version: int, digest: str) -> messages.Ticket:
        """A ticket that the machine has issued, as its site is given it."""
        presence = self.run.roster.get(site)
        if presence is not None:
            presence.bases[fragment] = base_version
        return messages.Ticket(
            ticket=ticket,
            fragment=fragment,
            round=self.run.state.rounds[fragment].number,
            base_version=base_version,
            base_digest=digest,
            layout_digest=self.plan.fragments[fragment].update.digest,
            local_steps=self.run.local_steps(site),
        )

    def _wait_reply(
        self, fragment: int, reason: str, previous: TicketRow | None, *, ended: bool = False
    ) -> messages.TicketReply:
        head = self.store.versions.head(fragment)
        state, queue = self.run.state, self.run.task_queue
        if reason == fx.FINISHED:
            told = state.rules.tracking.why(state.progress) or reason
        else:
            now_s = time.monotonic()
            rest, known = why(self.run, fragment, now_s), machine.why(state, fragment, now_s)
            if reason.endswith(known):  # "its update is in; the round waits for b" has it already
                told = reason + rest.removeprefix(known)
            else:
                told = rest if rest.startswith(reason) else f"{reason}; the round {rest}"
        return messages.TicketReply(
            status="finished" if reason == fx.FINISHED else "ended" if ended else "wait",
            previous=self._previous(previous, None),
            head_version=head.version,
            head_digest=head.digest,
            durable_version=self.store.versions.durable(fragment),
            round=self.run.state.rounds[fragment].number,
            waiting_for=[site for site, _ in machine.missing(state, fragment)],
            reason=told,
            tasks=queue.follows and not queue.finished if reason == fx.FINISHED else queue.rounds == "to come",
            left_s=self.run.left.of(state, time.monotonic()),
        )

    def _previous(self, row: TicketRow | None, ticket: int | None) -> messages.Outcome | None:
        if row is None or row.ticket == ticket:
            return None
        return outcome_of(self.store, self.store.tickets.get(row.ticket))

    async def get_ticket(self, ticket: int) -> messages.TicketState:
        row = self.store.tickets.get(ticket)
        parts = self.store.tickets.parts(ticket) if row.is_live else {}
        return messages.TicketState(
            outcome=outcome_of(self.store, row),
            parts=list(parts),
            part_digests=[part.digest.hex() for part in parts.values()],
        )

    # -- updates

    async def put_part(self, lease: Lease, ticket: int, part: int, request: web.Request) -> messages.PartReceipt:
        fragment = self.store.tickets.get(ticket).fragment
        layout = self.plan.fragments[fragment].update
        if part >= len(layout.parts):
            raise BadRequest(
                f"There is no part {part}; the update has {len(layout.parts)}.",
                "Cut it as the ticket's layout says.",
            )
        self._require_open(lease, ticket)
        planned = layout.parts[part]
        require_part_bytes(request, planned.nbytes)
        require_space(self.store, self.plan.settings)
        async with self._uploads.received(request, lease.site, ticket, fragment, planned) as (writer, stats):
            self.record_part(lease, ticket, part, stats, writer)
        self.run.apply(ev.WorkerSeen(lease.site, lease.number))
        return messages.PartReceipt(ticket=ticket, part=part, digest=stats.digest.hex())

    def record_part(
        self, lease: Lease, ticket: int, part: int, stats: PartStats, writer: PartWriter | None = None
    ) -> None:
        """A part is in its spool, and was looked at; `writer` is who wrote it, where others may, too."""
        self._require_open(lease, ticket)
        if stats.bad is not None:
            self.run.judge.refuse(lease.site, ticket, stats.bad)
        failpoint("part.received")
        self.store.tickets.record_part(ticket, part, stats.digest, stats.sumsq, writer)

    def _require_open(self, lease: Lease, ticket: int) -> None:
        refusal = machine.may_submit(self.run.state, lease.site, lease.number, ticket)
        if isinstance(refusal, fx.LeaseRefused):
            self.run.refuse_lease(lease, refusal)
        elif refusal is not None:
            row = self.store.tickets.get(ticket)  # the journal's: the machine forgets tickets that have ended
            if row.state == "refused":
                raise why_closed(row)
            told = refusal if row.reason in refusal else f"Ticket {ticket} is over: {row.reason}."
            raise TicketClosed(told, "Ask for the next ticket.")

    async def complete(self, lease: Lease, ticket: int, message: messages.Complete) -> messages.Receipt:
        row = self.store.tickets.get(ticket)
        if row.site != lease.site:
            raise TicketClosed(f"Ticket {ticket} was not issued to {lease.site!r}.", "Ask for a ticket.")
        if row.is_in:
            return self._receipt(
                self.store.tickets.accept(
                    ticket, message.digest, message.weight, message.steps, dict(message.metrics), row.norm
                )
            )
        self._require_open(lease, ticket)
        self._require_its_base(row, message)
        message = self.run.judge.with_kept_weight(lease.site, message)
        if self.run.swarm is not None:
            return await self._offer(self.run.swarm, lease, row, message)
        parts, layout = self.store.tickets.parts(ticket), self.plan.fragments[row.fragment].update
        missing = [part.index for part in layout.parts if part.index not in parts]
        if missing:
            raise Conflict(
                f"Ticket {ticket} lacks {len(missing)} of {len(layout.parts)} parts, first {missing[0]}.",
                "Send them, then complete it again.",
            )
        digest = _digest(layout, parts)
        if digest != message.digest:
            raise Conflict(
                f"The parts of ticket {ticket} do not make up the digest that completes it.",
                "Send them again.",
            )
        norm = math.sqrt(sum(part.sumsq for part in parts.values()))
        self.run.judge.require_plausible(lease.site, ticket, message, norm)
        if self.run.filtering.has(lease.site):
            said = replace(row, digest=digest, weight=message.weight, steps=message.steps, metrics=message.metrics)
            reason = await self.run.filtering.refusal(said, self.run.state.rounds[row.fragment].number)
            if self.store.tickets.get(ticket).is_in:  # the word came twice, and was taken once
                return await self.complete(lease, ticket, message)
            self._require_open(lease, ticket)
            if _digest(layout, self.store.tickets.parts(ticket)) != digest:
                raise Conflict(f"A part of ticket {ticket} came anew meanwhile.", "Complete it again.")
            if reason:
                self.run.judge.refuse(lease.site, ticket, reason, "the filter is the server's.")
        accepted = self.run.judge.accept(lease.site, ticket, message, norm)
        return self._receipt(accepted)

    def _require_its_base(self, row: TicketRow, message: messages.Complete) -> None:
        if message.base_digest not in (None, self.store.run_log.version_digest(row.fragment, row.base_version)):
            raise TicketClosed(
                f"The update for ticket {row.ticket} was trained from another version {row.base_version} than the "
                "run's.",
                "The server's state was restored; ask for the next ticket.",
            )

    async def _offer(self, swarm: Swarm, lease: Lease, row: TicketRow, message: messages.Complete) -> messages.Receipt:
        """In a swarm another worker pulls the update: this waits for it, for some time."""
        if message.source is None:
            raise BadRequest(
                f"The update of {lease.site} has no source, and in a swarm another worker pulls it.",
                "Use the same Atoll version on both sides.",
            )
        until_s = time.monotonic() + routes.LONG_POLL_S
        swarm.offer(lease.site, row.ticket, row.fragment, message)
        while True:
            row = self.store.tickets.get(row.ticket)
            if row.state == "refused":
                raise why_closed(row)
            if row.is_in:
                return self._receipt(row)
            self._require_open(lease, row.ticket)
            unpulled = row.ticket not in swarm.offers
            if unpulled or time.monotonic() >= until_s:
                return messages.Receipt(
                    ticket=row.ticket,
                    digest=message.digest,
                    fragment=row.fragment,
                    base_version=row.base_version,
                    accepted=False,
                    unpulled=unpulled,
                )
            await swarm.news(until_s - time.monotonic())

    # -- swarms

    async def get_swarm_plan(self) -> swarm_messages.SwarmPlan:
        self._swarm()
        return swarm_messages.SwarmPlan(settings=placed_settings(self.plan.settings))

    async def work_in_swarm(self, lease: Lease, message: swarm_messages.PeerReport) -> swarm_messages.PeerWork:
        return await self._swarm().report(lease, message)

    def _swarm(self) -> Swarm:
        if self.run.swarm is None:
            raise ConfigError("The run is no swarm: the server aggregates.", "Set placement = 'swarm' at the server.")
        return self.run.swarm

    def _receipt(self, row: TicketRow) -> messages.Receipt:
        assert row.digest is not None
        return messages.Receipt(
            ticket=row.ticket, digest=row.digest, fragment=row.fragment, base_version=row.base_version
        )


def _digest(layout: Layout, parts: Mapping[int, PartRow]) -> str:
    return layout.blob_id([parts[part.index].digest for part in layout.parts])
