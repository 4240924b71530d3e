"""What each operation does. Names are those of `wire/operations.py`; errors are raised, `app.py` writes them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace

from aiohttp import web

from atoll.errors import (
    BadRequest,
    Conflict,
    DiskFull,
    Gone,
    StoreError,
    TicketClosed,
    UpdateRefused,
)
from atoll.failpoints import failpoint
from atoll.rounds import effects as fx
from atoll.rounds import events as ev
from atoll.rounds import machine
from atoll.server.auth import IDENTITY
from atoll.server.fit import require_fit
from atoll.server.metrics import prometheus
from atoll.server.objects import ObjectHandlers
from atoll.server.outcome import outcome_of
from atoll.server.roster import Lease, Presence, now_text
from atoll.server.run import Run
from atoll.server.space import require_space
from atoll.server.status import status_of, why
from atoll.server.tasks import TaskHandlers
from atoll.server.uploads import Uploads
from atoll.server.versions import VersionHandlers
from atoll.store.rows import PartRow, TicketRow
from atoll.tensors.layout import Layout
from atoll.transport.host import parts_within
from atoll.wire import messages, routes, status_messages

LOG = logging.getLogger("atoll.server")

COMMIT_S = 1.0
"""How long a ticket waits for a commit that is under way, whatever its worker has asked for."""

REFUSALS = 5
"""In a row, after which a site is sent away: it would train and be refused for ever."""
LOOK = "look at the learning rate, the data and the loss at this site."
STEPS = "report them: submit(model, steps=…), or round.correct(model, optimizer), which counts them."


class Handlers(ObjectHandlers, TaskHandlers, VersionHandlers):
    """The operations on one run."""

    def __init__(self, run: Run) -> None:
        ObjectHandlers.__init__(self)
        TaskHandlers.__init__(self)
        self.run, self.store, self.plan = run, run.store, run.plan
        self._uploads = Uploads(run)

    # -- what a run is

    async def get_run(self) -> messages.RunInfo:
        settings, algorithm = self.plan.settings, self.plan.algorithm
        assert self.store.run is not None
        return messages.RunInfo(
            protocol=routes.PROTOCOL,
            run=self.store.run.run_id,
            name=settings.name,
            algorithm=algorithm.name,
            local=dict(algorithm.local),
            on_missed=algorithm.algorithm.on_missed,
            rounds=settings.rounds,
            sync_every=algorithm.sync_every,
            mode=settings.mode,
            sync_rounds_first=settings.sync_rounds_first,
            schema_digest=self.plan.schema.digest,
            schema_bytes=self.plan.schema.nbytes,
            fragments=len(self.plan.fragments),
            tau=settings.tau,
            alpha=settings.alpha,
            max_inflight=settings.max_inflight,
            codec=algorithm.codec,
            codec_options=algorithm.codec_options,
            downlink_codec=settings.downlink_codec or "none",
            downlink_codec_options=settings.downlink_codec_options,
            part_bytes=settings.part_bytes,
            ranks=settings.ranks,
            connections=settings.connections,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
        )

    async def get_schema(self) -> messages.SchemaMessage:
        return messages.SchemaMessage.of(self.plan.split)

    async def get_status(self) -> status_messages.Status:
        self.run.watched_s = time.monotonic()
        return status_of(self.run)

    async def get_metrics(self) -> web.Response:
        return web.Response(
            body=prometheus(self.run), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def get_health(self) -> str:
        return "ok\n"

    # -- who takes part

    async def join(self, message: messages.Join, request: web.Request) -> messages.Joined:
        require_fit(message, request[IDENTITY], self.plan, self.store)
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
        self.run.roster[message.site] = presence
        granted = [e for e in self.run.apply(ev.WorkerJoined(message.site)) if isinstance(e, fx.LeaseGranted)]
        LOG.info("%s joined%s", message.site, " again" if previous else "")
        return messages.Joined(
            lease=str(Lease(message.site, granted[0].lease, message.process)),
            due=machine.due(self.run.state, message.site),
        )

    async def leave(self, lease: Lease, message: messages.Leave) -> None:
        self.run.apply(ev.WorkerLeft(lease.site, lease.number, message.error or ""))

    async def heartbeat(self, lease: Lease, message: messages.Heartbeat) -> messages.HeartbeatReply:
        presence = self.run.roster.get(lease.site)
        if presence is not None:
            presence.beat = message
        if message.ends and lease.site not in self.run.state.ending:
            self.run.apply(ev.WorkerEnds(lease.site, lease.number))
        return messages.HeartbeatReply(
            durable_versions=[self.store.durable_version(index) for index in range(len(self.run.state.rounds))],
            finished=self.run.state.finished,
        )

    # -- tickets

    async def request_ticket(self, lease: Lease, message: messages.TicketRequest) -> messages.TicketReply:
        if message.fragment >= len(self.run.state.rounds):
            raise Gone(
                f"There is no fragment {message.fragment}.",
                f"The run has {len(self.plan.fragments)}, the first is 0.",
            )
        self.run.desk.require_rounds()
        until_s = time.monotonic() + message.wait_s
        previous = self.store.last_ticket(lease.site, message.fragment)
        while True:
            effects = self.run.apply(ev.TicketRequested(lease.site, lease.number, message.fragment))
            for effect in effects:
                match effect:
                    case fx.LeaseRefused():
                        self.run.refuse_lease(lease, effect)
                    case fx.TicketIssued(_, ticket, fragment, base_version, _):
                        if base_version == self.store.head(fragment).version:
                            return self._ticket_reply(lease, ticket, fragment, base_version, previous)
                        # an asynchronous step is in the journal, and the machine is about to hear of it
                        until_s = max(until_s, time.monotonic() + COMMIT_S)
                    case fx.TicketWithheld(_, fragment, reason):
                        # a finished run answers at once; its result is the head; so does a step for who ends with it
                        moved = previous is None or self.store.head(fragment).version > previous.base_version
                        ended = reason == fx.ENDS and moved
                        if reason == fx.FINISHED or ended or time.monotonic() >= until_s:
                            return self._wait_reply(fragment, reason, previous, ended=ended)
            await self.run.changed(until_s - time.monotonic())

    def _ticket_reply(
        self, lease: Lease, ticket: int, fragment: int, base_version: int, previous: TicketRow | None
    ) -> messages.TicketReply:
        head = self.store.head(fragment)
        presence = self.run.roster.get(lease.site)
        if presence is not None:
            presence.bases[fragment] = base_version
        return messages.TicketReply(
            status="ticket",
            ticket=messages.Ticket(
                ticket=ticket,
                fragment=fragment,
                round=self.run.state.rounds[fragment].number,
                base_version=base_version,
                base_digest=head.digest,
                layout_digest=self.plan.fragments[fragment].update.digest,
                local_steps=self.run.local_steps(lease.site),
            ),
            previous=self._previous(previous, ticket),
            head_version=head.version,
            head_digest=head.digest,
            durable_version=self.store.durable_version(fragment),
            round=self.run.state.rounds[fragment].number,
        )

    def _wait_reply(
        self, fragment: int, reason: str, previous: TicketRow | None, *, ended: bool = False
    ) -> messages.TicketReply:
        head = self.store.head(fragment)
        state = self.run.state
        if reason == fx.FINISHED:
            told = state.rules.tracking.why(state.progress) or reason
        else:
            rest = why(self.run, fragment, time.monotonic())
            told = reason if rest == reason else f"{reason}; the round {rest}"
        return messages.TicketReply(
            status="finished" if reason == fx.FINISHED else "ended" if ended else "wait",
            previous=self._previous(previous, None),
            head_version=head.version,
            head_digest=head.digest,
            durable_version=self.store.durable_version(fragment),
            round=self.run.state.rounds[fragment].number,
            waiting_for=[site for site, _ in machine.missing(state, fragment)],
            reason=told,
        )

    def _previous(self, row: TicketRow | None, ticket: int | None) -> messages.Outcome | None:
        if row is None or row.ticket == ticket:
            return None
        return outcome_of(self.store, self.store.ticket(row.ticket))

    async def get_ticket(self, ticket: int) -> messages.TicketState:
        row = self.store.ticket(ticket)
        parts = self.store.parts(ticket) if row.is_live else {}
        return messages.TicketState(
            outcome=outcome_of(self.store, row),
            parts=list(parts),
            part_digests=[part.digest.hex() for part in parts.values()],
        )

    # -- updates

    async def put_part(self, lease: Lease, ticket: int, part: int, request: web.Request) -> messages.PartReceipt:
        fragment = self.store.ticket(ticket).fragment
        layout = self.plan.fragments[fragment].update
        if part >= len(layout.parts):
            raise BadRequest(
                f"There is no part {part}; the update has {len(layout.parts)}.",
                "Cut it as the ticket's layout says.",
            )
        self._require_open(lease, ticket)
        following = layout.parts[part : part + routes.PARTS_AT_ONCE]
        count = parts_within(request, [each.nbytes for each in following])
        require_space(self.store, self.plan.settings)
        incoming = self._uploads.incoming(request, lease.site)
        for each in following[:count]:
            async with self._uploads.received(incoming, lease.site, ticket, fragment, each) as (writer, stats):
                self._require_open(lease, ticket)
                if stats.bad is not None:
                    self._refuse(lease, ticket, stats.bad)
                failpoint("part.received")
                self.store.record_part(ticket, each.index, stats.digest, stats.sumsq, writer)
            self.run.apply(ev.WorkerSeen(lease.site, lease.number))
        return messages.PartReceipt(ticket=ticket, part=each.index, digest=stats.digest.hex())

    def _require_open(self, lease: Lease, ticket: int) -> None:
        refusal = machine.may_submit(self.run.state, lease.site, lease.number, ticket)
        if isinstance(refusal, fx.LeaseRefused):
            self.run.refuse_lease(lease, refusal)
        elif refusal is not None:
            reason = self.store.ticket(ticket).reason  # the journal's: the machine forgets tickets that have ended
            told = refusal if reason in refusal else f"Ticket {ticket} is over: {reason}."
            raise TicketClosed(told, "Ask for the next ticket.")

    def _refuse(self, lease: Lease, ticket: int, reason: str, remedy: str = LOOK) -> None:
        """Quarantine an update with its reason; the round goes on with the others."""
        self.store.refuse(ticket, reason)
        self.run.refused += 1
        self.run.apply(ev.UpdateRefused(ticket, reason))
        presence = self.run.roster.setdefault(lease.site, Presence(lease.site))
        presence.refused_in_a_row += 1
        LOG.warning("%s: update refused: %s", lease.site, reason)
        if presence.refused_in_a_row >= REFUSALS:
            told = f"{presence.refused_in_a_row} updates in a row were refused, the last because {reason}"
            self.run.apply(ev.WorkerLeft(lease.site, lease.number, told))
        raise UpdateRefused(
            f"The update of {lease.site} is refused: {reason}.",
            f"The round goes on with the others; {remedy}",
        )

    async def complete(self, lease: Lease, ticket: int, message: messages.Complete) -> messages.Receipt:
        row = self.store.ticket(ticket)
        if row.site != lease.site:
            raise TicketClosed(f"Ticket {ticket} was not issued to {lease.site!r}.", "Ask for a ticket.")
        if row.is_in:
            return self._receipt(
                self.store.accept(
                    ticket, message.digest, message.weight, message.steps, dict(message.metrics), row.norm
                )
            )
        self._require_open(lease, ticket)
        if message.base_digest not in (None, self.store.version_digest(row.fragment, row.base_version)):
            raise TicketClosed(
                f"The update for ticket {ticket} was trained from another version {row.base_version} than the run's.",
                "The server's state was restored; ask for the next ticket.",
            )
        parts, layout = self.store.parts(ticket), self.plan.fragments[row.fragment].update
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
        self._require_plausible(lease, ticket, norm, message)
        if self.run.filtering.has(lease.site):
            said = replace(row, digest=digest, weight=message.weight, steps=message.steps, metrics=message.metrics)
            reason = await self.run.filtering.refusal(said, self.run.state.rounds[row.fragment].number)
            if self.store.ticket(ticket).is_in:  # the word came twice, and was taken once
                return await self.complete(lease, ticket, message)
            self._require_open(lease, ticket)
            if _digest(layout, self.store.parts(ticket)) != digest:
                raise Conflict(f"A part of ticket {ticket} came anew meanwhile.", "Complete it again.")
            if reason:
                self._refuse(lease, ticket, reason, "the filter is the server's.")
        try:
            accepted = self.store.accept(ticket, digest, message.weight, message.steps, dict(message.metrics), norm)
        except DiskFull:
            raise
        except StoreError as error:
            self.run.fail(error)
            raise
        self.run.offer(accepted)
        self.run.apply(ev.UpdateAccepted(ticket, accepted.accepted_order))
        if lease.site in self.run.roster:
            presence = self.run.roster[lease.site]
            presence.refused_in_a_row = 0
            trained = message.steps * self.plan.fragments[row.fragment].schema.model.nbytes
            presence.gradient_bytes = min(presence.gradient_bytes + trained, messages.NUMBER_BELOW - 1)
        return self._receipt(accepted)

    def _require_plausible(self, lease: Lease, ticket: int, norm: float, message: messages.Complete) -> None:
        settings, weight = self.plan.settings, message.weight
        if self.plan.needs_steps and not message.steps:
            self._refuse(lease, ticket, "it reports no local steps, by which this run divides", STEPS)
        if weight > settings.max_weight:
            self._refuse(lease, ticket, f"its weight is {weight:g}, above max_weight {settings.max_weight:g}")
        if settings.max_update_norm and norm > settings.max_update_norm:
            self._refuse(lease, ticket, f"its norm is {norm:.4g}, above max_update_norm {settings.max_update_norm:g}")

    def _receipt(self, row: TicketRow) -> messages.Receipt:
        assert row.digest is not None
        return messages.Receipt(
            ticket=row.ticket, digest=row.digest, fragment=row.fragment, base_version=row.base_version
        )


def _digest(layout: Layout, parts: Mapping[int, PartRow]) -> str:
    return layout.update_digest([parts[part.index].digest for part in layout.parts])
