"""A site in the server's process: its files, its lease by the run's clock, what it submits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.local_run import LocalRun, read_tensors, write_update
from kit.world import require_equal

from atoll.errors import LeaseLost, PartCorrupt, Superseded, TicketClosed, UsageError
from atoll.protocol.messages import Report, Ticket
from atoll.protocol.values import Open, Wait
from atoll.server.local_site import LocalSite

MODEL = {"w": torch.linspace(-1.0, 1.0, 128)}
ONE = {"w": torch.ones(128)}


def play(folder: Path, story: Callable[[LocalRun], Awaitable[None]], **settings: Any) -> None:
    """A run of sites a and b, from its start to its stop."""

    async def main() -> None:
        given = {"sites": 2, "rounds": 0, "network.heartbeat_timeout_s": 30.0, "network.heartbeat_interval_s": 5.0}
        async with LocalRun(folder / "state", MODEL, given | settings) as run:
            await story(run)

    asyncio.run(main())


def ticket_of(site: LocalSite) -> Ticket:
    opened = site.open_round()
    assert opened is not None
    opened.release()
    return opened.ticket


def test_a_local_site_reads_and_submits_files(tmp_path: Path) -> None:
    """A site in the server's process reads its version from a file and submits an update from a file."""
    # An update is the old model minus the new model. The mean of 1 and 3 by their weights is (1 + 3·3)/4 = 2.5.

    async def story(run: LocalRun) -> None:
        sites = [await run.join("a"), await run.join("b")]
        for site, weight in zip(sites, (1.0, 3.0), strict=True):
            opened = site.open_round()
            assert opened is not None
            base = read_tensors(opened.base.fd, run.run.plan.fragments[0].version, MODEL)
            require_equal(base, MODEL)
            opened.release()
            await run.submit(site, opened.ticket, {"w": ONE["w"] * weight}, weight=weight)
        await run.settle()
        require_equal(run.model(), {"w": MODEL["w"] - 2.5})

    play(tmp_path, story)


def test_a_local_site_waits_for_its_round(tmp_path: Path) -> None:
    """A site in the server's process waits for a ticket until the round opens, when the second of two sites joins."""

    async def story(run: LocalRun) -> None:
        a = await run.join("a")
        assert isinstance(await a.next_ticket(0.0), Wait)
        waiting = asyncio.ensure_future(a.next_ticket(20.0))
        await asyncio.sleep(0)
        await run.join("b")
        reply = await waiting
        assert isinstance(reply, Open)
        opened = a.files_of(reply.ticket)
        assert (opened.ticket, opened.base.row.version) == (reply.ticket, 0)
        opened.release()

    play(tmp_path, story)


def test_a_silent_local_site_loses_its_lease(tmp_path: Path) -> None:
    """A site in the server's process loses its lease when it was silent for too long by the clock of the run."""
    # It can join again. The test moves the clock instead of waiting.

    async def story(run: LocalRun) -> None:
        a, b = await run.join("a"), await run.join("b")
        await run.advance(29)
        b.seen()
        await run.advance(1)
        with pytest.raises(LeaseLost, match="silent for too long"):
            a.open_round()
        b.seen()
        again = await run.join("a", "2")
        assert ticket_of(again).round == 1

    play(tmp_path, story)


def test_a_second_join_supersedes_the_first(tmp_path: Path) -> None:
    """If a local site joins a second time, its first participation can no longer submit, and the second can."""

    async def story(run: LocalRun) -> None:
        old, new = await run.join("a"), await run.join("a", "2")
        await run.join("b")
        ticket = ticket_of(new)
        with pytest.raises(Superseded):
            await run.submit(old, ticket, ONE)
        await run.submit(new, ticket, ONE)

    play(tmp_path, story)


def test_a_late_writers_file_is_not_reused(tmp_path: Path) -> None:
    """If a round closes while a site may still write its update, the site's file is given to no other update. The late
    update is refused.
    """

    async def story(run: LocalRun) -> None:
        a, b = await run.join("a"), await run.join("b")
        late = a.open_round()
        assert late is not None
        await run.submit(b, ticket_of(b), ONE)
        await run.advance(20)
        assert run.head == 1
        others = [site.open_round() for site in (a, b)]
        assert late.spool.slot not in [each.spool.slot for each in others if each is not None]
        with pytest.raises(TicketClosed):
            await run.submit(a, late.ticket, ONE)
        late.release()

    play(tmp_path, story, **{"rounds.quorum": 1, "rounds.deadline_s": 20.0})


def test_an_incomplete_update_file_can_be_resubmitted(tmp_path: Path) -> None:
    """A local site's update file that ends too early is refused. When the file is complete, the site can submit it
    again.
    """

    async def story(run: LocalRun) -> None:
        a = await run.join("a")
        await run.join("b")
        ticket, fd = ticket_of(a), os.open(tmp_path / "update", os.O_RDWR | os.O_CREAT)
        with pytest.raises(PartCorrupt, match="fewer than 512 bytes"):
            await a.submit_file(ticket, Report(), fd)
        write_update(fd, run.layout, ONE)
        assert (await a.submit_file(ticket, Report(), fd)).digest
        os.close(fd)

    play(tmp_path, story)


def test_calls_before_joining_are_refused(tmp_path: Path) -> None:
    """A call for a local site that has not joined is refused with its name."""

    async def story(run: LocalRun) -> None:
        with pytest.raises(UsageError, match="Site c has not joined"):
            LocalSite(run.served, "c", run.versions, "here").seen()

    play(tmp_path, story)
