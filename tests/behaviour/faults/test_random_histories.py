"""Random histories of the whole protocol: a real store, sites in the server's process, a clock that the test moves.

Each update that was acknowledged is in exactly one version, and each version has the specified value. An acknowledged
update gets its receipt again, and a wrong one is refused.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import specification as spec
import torch
from blake3 import blake3
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kit.local_run import LocalRun, write_update
from kit.world import require_equal

from atoll.aggregation.check_arriving_parts import Inspection, PartStats
from atoll.errors import AtollError, Conflict, LeaseLost, Superseded, TicketClosed, UpdateRefused
from atoll.protocol.messages import Complete, SitOut, Ticket
from atoll.server.coordinator.accept_update import REFUSALS
from atoll.server.local_site import LocalRound, LocalSite
from atoll.tensors.layout import Part

SITES = ("a", "b", "c")
RULES = {
    "sites": len(SITES),
    "rounds": 0,
    "part_bytes": 2**16,
    "rounds.quorum": 2,
    "rounds.deadline_s": 20.0,
    "network.heartbeat_interval_s": 10.0,
    "network.heartbeat_timeout_s": 30.0,
    "aggregation.max_weight": 100.0,
    "aggregation.max_update_norm": 1e5,
    "algorithm.outer_optimizer.name": "sgd",
    "algorithm.outer_optimizer.lr": 0.7,
    "algorithm.outer_optimizer.momentum": 0.9,
}
MODEL = {"w": torch.linspace(-1.0, 1.0, 20_000), "b": torch.ones(3)}  # in two parts

WEIGHTS = {"submit": 8, "copy": 4, "again": 2, "ask": 5, "time": 4, "sit out": 2, "kill": 2, "wrong": 8}
OTHERS = ("join", "leave", "old", "seen", "stop")
STEPS = [step for step, times in (WEIGHTS | dict.fromkeys(OTHERS, 1)).items() for _ in range(times)]
History = list[tuple[str, str, int]]
histories = st.lists(
    st.tuples(st.sampled_from(STEPS), st.sampled_from(SITES), st.integers(1, 40)), min_size=10, max_size=30
)
"""(step, site, seconds that pass or what the update is made from)."""


NONE = "0" * 64
"""No digest of anything."""
WRONG: tuple[tuple[str, type[AtollError]], ...] = (
    ("NaN", UpdateRefused),
    ("weight", UpdateRefused),
    ("norm", UpdateRefused),
    ("part", Conflict),  # one is missing
    ("digest", Conflict),
    ("base", TicketClosed),
    ("generation", TicketClosed),
    ("site", TicketClosed),  # the ticket is another one's
)
"""What may be wrong with an update, and its refusal."""

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # a failing history is short enough; to shrink it takes minutes


class Sent(NamedTuple):
    """An update that was submitted, its ticket, and the digest in its receipt."""

    ticket: Ticket
    update: spec.Update
    digest: str = ""


class Story:
    """What happens, step by step.

    Attributes:
        tickets: site → the ticket of what it trains.
        opened: site → its files in that round, while the server is there that has opened them.
        sent: site → its last update.
        acknowledged: ticket → update with a receipt.
        counted: ticket → the version that it is in.
        refused: how many updates were refused.
        in_a_row: site → how many of them after its last accepted one, as far as this server knows.
    """

    def __init__(self, run: LocalRun) -> None:
        self.run, self.processes = run, 0
        rules = spec.Rules(spec.of_torch(torch.optim.SGD, lr=0.7, momentum=0.9))
        self.specified = spec.Fragment(rules, MODEL)
        self.sites: dict[str, LocalSite] = {}
        self.older: dict[str, LocalSite] = {}
        self.tickets: dict[str, Ticket] = {}
        self.opened: dict[str, LocalRound] = {}
        self.sent: dict[str, Sent] = {}
        self.acknowledged: dict[int, Sent] = {}
        self.counted: dict[int, int] = {}
        self.refused, self.in_a_row = 0, Counter[str]()

    async def step(self, what: str, name: str, number: int) -> None:
        if what in ("stop", "kill"):
            await self.restart(killed=what == "kill")
        elif what == "time":
            await self.run.advance(number)
        elif what == "join" or name not in self.sites:
            await self.join(name)
        elif what == "old" and name in self.older and name in self.sent:
            with pytest.raises((Superseded, LeaseLost)):
                await self.run.submit(self.older[name], self.sent[name].ticket, MODEL)
        else:
            try:
                await self.act(what, name, number)
            except LeaseLost:  # it was silent for too long, or has left: it joins again, and goes on where it was
                await self.join(name)
            except (TicketClosed, UpdateRefused):
                self.close(name)

    async def act(self, what: str, name: str, number: int) -> None:
        site = self.sites[name]
        if what == "seen":
            site.seen()
        elif what == "leave":
            await site.leave("no data" if number % 2 else None)
        elif what == "again" and name in self.sent:
            await self.repeat(name, self.sent[name])
        elif self.tickets.get(name) is None or what == "ask":
            self.ask(name)
        if (ticket := self.tickets.get(name)) is None:
            return
        if what == "sit out":
            await site.sit_out(ticket, SitOut())
            self.close(name)
        elif what == "wrong":
            await self.submit_wrong(name, ticket, *WRONG[number % len(WRONG)])
        elif what in ("submit", "copy"):
            values = {key: torch.sin(x * number + ticket.id) for key, x in MODEL.items()}
            update = spec.Update(name, values, {}, {}, 1.0 + number % 4, 1)
            await self.submit(name, Sent(ticket, update), copies=what == "copy")
            self.close(name)

    def ask(self, name: str) -> None:
        opened = self.sites[name].open_round()
        if opened is None:
            return
        self.close(name)
        self.opened[name], self.tickets[name] = opened, opened.ticket
        assert opened.ticket.base_version == self.run.head

    async def submit(self, name: str, sent: Sent, *, copies: bool) -> None:
        self.sent[name] = sent
        (ticket, update, _), site = sent, self.sites[name]
        if copies or name not in self.opened:
            receipt = await self.run.submit(site, ticket, update.params, weight=update.weight, steps=1)
        else:  # as a simulated site: into the server's file, even if the round is over meanwhile
            message, stats = self.write(name, update.params, weight=update.weight, steps=1)
            receipt = await site.submit(ticket, message, stats)
            with pytest.raises(TicketClosed):
                self.opened[name].spool.begin_part(0)
            assert receipt.digest == message.digest
        self.sent[name] = sent._replace(digest=receipt.digest)
        self.acknowledged.setdefault(ticket.id, self.sent[name])
        self.in_a_row[name] = 0

    def write(self, name: str, values: spec.Tensors, **report: Any) -> tuple[Complete, list[PartStats]]:
        """Write an update into the server's file. Return the site's message about it, and the checks of its parts."""
        opened, layout = self.opened[name], self.run.layout
        fd, checks = opened.spool.fd, Inspection(layout, self.run.run.plan.codecs)
        write_update(fd, layout, values)
        stats = [checks.check(part, fd, digest_of(fd, part)) for part in layout.parts]
        digest = layout.blob_id([each.digest for each in stats])
        return Complete(digest=digest, base_digest=opened.ticket.base.digest, **report), stats

    async def repeat(self, name: str, sent: Sent) -> None:
        """An acknowledged update gets its receipt again, and another one under its ticket none."""
        complete, ticket = self.run.served.updates.complete, sent.ticket.id
        if self.run.run.store.tickets.get(ticket).is_in:
            message = Complete(weight=1.0, digest=sent.digest)
            assert (await complete(self.sites[name].lease, ticket, message)).digest == sent.digest
            with pytest.raises(Conflict):
                await complete(self.sites[name].lease, ticket, message.model_copy(update={"digest": NONE}))
        await self.submit(name, sent, copies=True)

    async def submit_wrong(self, name: str, ticket: Ticket, what: str, refusal: type[AtollError]) -> None:
        site, tickets = self.sites[name], self.run.run.store.tickets
        if what == "site":
            for other, sent in self.sent.items():
                if other != name:
                    message = Complete(weight=1.0, digest=sent.digest or NONE)
                    with pytest.raises(refusal, match="was not issued to"):
                        await self.run.served.updates.complete(site.lease, sent.ticket.id, message)
            return
        self.run.served.leases.require_open(site.lease, ticket.id)  # else it is refused for that
        if name not in self.opened or (what == "part" and tickets.parts(ticket.id)):
            return
        values = MODEL | {"b": torch.full((3,), {"NaN": torch.nan, "norm": 1e5}.get(what, 1.0))}
        message, stats = self.write(name, values, weight=200.0 if what == "weight" else 1.0)
        changes = {"digest": {"digest": NONE}, "base": {"base_digest": NONE}, "generation": {"generation": 1}}
        message = message.model_copy(update=changes.get(what, {}))
        with pytest.raises(refusal):
            await site.submit(ticket, message, stats[1:] if what == "part" else stats)
        if refusal is UpdateRefused:
            self.refused, self.in_a_row[name] = self.refused + 1, self.in_a_row[name] + 1
            assert self.run.run.state.members[name].alive == (self.in_a_row[name] < REFUSALS)
            self.close(name)

    def close(self, name: str) -> None:
        """The site is done with its ticket."""
        self.tickets.pop(name, None)
        if name in self.opened:
            self.opened.pop(name).release()

    async def join(self, name: str) -> None:
        self.processes += 1
        if name in self.sites:
            self.older[name] = self.sites[name]
        self.sites[name] = await self.run.join(name, str(self.processes))

    async def restart(self, *, killed: bool) -> None:
        self.opened.clear()
        await (self.run.kill() if killed else self.run.stop())
        await self.run.start()
        self.sites.clear()
        self.older.clear()
        self.in_a_row.clear()

    def check(self) -> None:
        """Follow the versions that were made since the last check."""
        while self.specified.version < self.run.head:
            base = self.specified.version
            rows = self.run.run.store.tickets.select("state = 'counted' AND version = ?", base + 1)
            due = {number: each for number, each in self.acknowledged.items() if each.ticket.base_version == base}
            assert {row.ticket for row in rows} == due.keys() != set()
            assert len({each.update.site for each in due.values()}) == len(due)
            assert not due.keys() & self.counted.keys()
            for row in rows:
                _, update, digest = due[row.ticket]
                expected = update.site, digest, update.weight, update.steps
                assert (row.site, row.digest, row.report.weight, row.report.steps) == expected
                assert row.norm == pytest.approx(spec.norm_of(update))
            self.counted |= dict.fromkeys(due, base + 1)
            self.specified.close([each.update for each in due.values()])
        require_equal(self.run.model(), self.specified.b)
        assert self.run.served.admission.refused == self.run.run.store.run_log.totals().refused == self.refused

    async def end(self) -> None:
        """All sites join and take part until each acknowledged update counts; one more round takes all of them."""
        for _ in range(2):
            for name in SITES:
                await self.join(name)
                self.close(name)
                self.ask(name)
                if name in self.opened:
                    values = {key: x + len(self.acknowledged) for key, x in MODEL.items()}
                    update = spec.Update(name, values, {}, {}, 1.0, 1)
                    await self.submit(name, Sent(self.tickets[name], update), copies=False)
            await self.run.settle()
            self.check()
        assert self.counted.keys() == self.acknowledged.keys()
        assert sum(version == self.run.head for version in self.counted.values()) == len(SITES)


def digest_of(fd: int, part: Part) -> bytes:
    return blake3(os.pread(fd, part.nbytes, part.start)).digest()


def play(history: History) -> None:
    async def main(folder: Path) -> None:
        async with LocalRun(folder / "state", MODEL, RULES) as run:
            story = Story(run)
            for what, site, number in history:
                if what != "kill":
                    await run.settle()
                await story.step(what, site, number)
                if what != "submit":
                    await run.settle()
                    story.check()
            await run.settle()
            story.check()
            await story.end()

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))


@pytest.mark.covers("F4", "F5")
@settings(max_examples=50, phases=PHASES)
@given(histories)
def test_every_acknowledged_update_counts_once(history: History) -> None:
    """In simulated runs with random faults, each acknowledged update is in exactly one version."""
    play(history)


@pytest.mark.long
@settings(max_examples=400, phases=PHASES)
@given(histories)
def test_updates_count_once_in_many_random_runs(history: History) -> None:
    """In many simulated runs with random faults, each acknowledged update is in exactly one version."""
    play(history)
