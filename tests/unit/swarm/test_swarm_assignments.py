"""Which worker of a swarm aggregates a round, when it is replaced, which one checks, and which updates count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_swarm import ScriptedSwarm, scripted_swarm

from atoll.errors import DiskFull
from atoll.server.swarm import assignments
from atoll.server.swarm.assignments import PULLS, SLOWER, WARY

pytestmark = pytest.mark.covers("P10")

IDLE_S = 30.0
IN_TURN = {"swarm.aggregators": ["a", "b", "c"], "network.idle_timeout_s": IDLE_S}
"""Round 1 is aggregated by a, and a, b, c is the order of preference."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the swarm's decisions forward by some seconds; it stands still otherwise."""
    now_s = float(int(time.monotonic()))  # so that seconds are added without rounding

    def forward(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    fake = SimpleNamespace(monotonic=lambda: now_s, time=time.time)
    monkeypatch.setattr(assignments, "time", fake)
    monkeypatch.setattr("atoll.server.swarm.peer_reachability.time", fake)
    return forward


async def fails_to_pull(swarm: ScriptedSwarm, ticket: int, site: str, times: int = 1) -> None:
    """Let the aggregator fail to download a site's update; after each failure the site offers it again."""
    for number in range(times):
        offer = swarm.offer(site, ticket, 1000 + number)
        await swarm.collects(swarm.job.aggregator, {ticket: offer}, failed="connection refused")


async def test_three_failed_downloads_replace_an_aggregator(tmp_path: Path) -> None:
    """An aggregator is replaced at its third failed download of one update, and not before."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        ticket = swarm.ticket("c")
        assert (PULLS, swarm.job.aggregator) == (3, "a")
        await fails_to_pull(swarm, ticket, "c", 2)
        assert swarm.job.aggregator == "a"
        assert ticket not in swarm.swarm.view.offers  # c has to offer it again
        await fails_to_pull(swarm, ticket, "c")
        assert (swarm.job.aggregator, list(swarm.job.excluded)) == ("b", ["a"])


async def test_failed_downloads_are_counted_per_update(tmp_path: Path) -> None:
    """Two failed downloads of one update and two of another do not replace the aggregator."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        for site in ("b", "c"):
            await fails_to_pull(swarm, swarm.ticket(site), site, 2)
        assert swarm.job.aggregator == "a"


async def test_a_site_does_not_collect_its_own_update(tmp_path: Path) -> None:
    """If only the site itself has not failed to download an update, the update is refused, and the aggregator goes on.

    Sites `a` and `b` have failed to download the update of `c`.
    """
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        ticket = swarm.ticket("c")
        await fails_to_pull(swarm, ticket, "c", PULLS)
        assert swarm.job.aggregator == "b"
        await fails_to_pull(swarm, ticket, "c", PULLS)
        assert swarm.job.aggregator == "b"
        row = swarm.run.store.tickets.get(ticket)
        assert (row.state, "could not download it: connection refused" in row.reason) == ("refused", True)


async def test_a_failed_aggregator_is_avoided_for_ten_rounds(tmp_path: Path) -> None:
    """A worker that has failed as aggregator is chosen last for ten rounds, although its turn comes first."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        await fails_to_pull(swarm, swarm.ticket("c"), "c", PULLS)
        assert swarm.swarm._lost_at == {(0, "a"): 0}
        job, chosen = assignments.Assignment(version=0), swarm.swarm._aggregator_of
        assert chosen(0, job) == "b"
        swarm.swarm._lost_at[0, "a"] = -WARY - 1  # it failed eleven rounds ago
        assert chosen(0, job) == "a"
        swarm.swarm._lost_at[0, "a"] = -WARY
        assert chosen(0, job) == "b"


async def test_each_round_prefers_another_aggregator(tmp_path: Path) -> None:
    """The next round has an aggregator other than the one before, unless all other workers have failed."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        job = assignments.Assignment(version=0, before="a")
        assert swarm.swarm._aggregator_of(0, job) == "b"
        job = assignments.Assignment(version=0, before="a", excluded={"b": None, "c": None})
        assert swarm.swarm._aggregator_of(0, job) == "a"


@pytest.mark.parametrize(("losses", "pause_s"), [(2, 1.0), (3, 2.0), (10, IDLE_S), (100_000, IDLE_S)])
def test_pauses_after_failed_aggregators_double(clock: Callable[[float], None], losses: int, pause_s: float) -> None:
    """If all workers have failed, the pause before one of them is asked again doubles with each failure, up to the idle
    timeout.

    The pause is 1 s first, then 2 s.
    """
    lost_s = assignments.time.monotonic()
    job = assignments.Assignment(excluded={"a": None, "b": None}, losses=losses, lost_s=lost_s)
    assert job.pause_s(IDLE_S) == pause_s
    clock(pause_s)
    assert job.pause_s(IDLE_S) == 0.0


def test_the_next_aggregator_starts_without_old_marks() -> None:
    """If an aggregator is lost, the next one starts without its progress and without its list of workers that could not
    check it.
    """
    job = assignments.Assignment(aggregator="a", excluded={"a": None, "b": None}, checker="c", unable={"c"})
    job.since_s, job.busy_s = 1.0, 9.0
    job.lose("it is leaving")
    assert list(job.excluded) == ["b", "a"]  # a failed last
    assert (job.aggregator, job.checker, job.since_s, job.busy_s, job.unable) == ("", "", None, 0.0, set())
    assert (job.losses, job.lost) == (1, "a: it is leaving")


@pytest.mark.parametrize("silent_s", [IDLE_S, IDLE_S + 1])
async def test_an_aggregator_without_progress_is_replaced(
    tmp_path: Path, clock: Callable[[float], None], silent_s: float
) -> None:
    """If an aggregator with work moves no byte for longer than the idle timeout, it is replaced."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        swarm.offer("c", swarm.ticket("c"))  # work for a
        clock(silent_s)
        for site in "abc":
            await swarm.report(site)
        assert swarm.job.aggregator == ("a" if silent_s == IDLE_S else "b")


async def test_an_aggregator_with_progress_is_not_replaced(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """In the first round, an aggregator that moves bytes is not replaced, however long its work takes."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        swarm.offer("c", swarm.ticket("c"))
        for moved in range(1, 100):
            clock(IDLE_S / 2)
            for site in "bca":
                await swarm.report(site, moved=moved)
        assert (swarm.job.aggregator, swarm.job.losses) == ("a", 0)


async def test_an_idle_aggregator_is_not_replaced(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """If there is no update to collect, an aggregator has no byte to move and is not replaced."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        for _ in range(5):
            clock(IDLE_S - 1)
            for site in "abc":
                await swarm.report(site)
        assert swarm.job.aggregator == "a"


async def test_an_aggregator_ten_times_slower_is_replaced(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """An aggregator that works ten times as long as the longest round is replaced, but only once.

    The longest round took 4 s, so the aggregator is replaced after more than 40 s.
    """
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        swarm.swarm._longest_s[0] = 4.0
        ticket = swarm.ticket("c")
        swarm.offer("c", ticket)
        moved = 0
        for aggregator, seconds in (("a", 2 * SLOWER), ("a", 2 * SLOWER), ("b", 1), ("b", 9 * SLOWER)):
            for _ in range(seconds):
                clock(1)
                moved += 1
                await swarm.report("c", moved=moved)
                await swarm.report("b", moved=moved)
                await swarm.report("a", moved=moved)
            if ticket not in swarm.swarm.view.offers:
                swarm.offer("c", ticket)
            assert swarm.job.aggregator == aggregator, seconds


async def test_an_aggregator_without_the_version_is_replaced(tmp_path: Path) -> None:
    """If an aggregator says that it leaves or no longer has the version, it is replaced at once by another worker with
    the version.
    """
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        await swarm.report("a", leaving=True)
        assert (swarm.job.aggregator, swarm.job.lost) == ("b", "a: it is leaving")
        swarm.workers["b"].held.clear()
        await swarm.report("b")
        assert (swarm.job.aggregator, swarm.job.lost) == ("c", "b: it no longer has version 0")


async def test_a_leaving_aggregator_without_successor_stays(tmp_path: Path) -> None:
    """If no other worker has the version, a leaving aggregator stays the aggregator, and the server asks it to stay in
    the run.
    """
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        for site in "bc":
            swarm.workers[site].held.clear()
            await swarm.report(site)
        work = await swarm.report("a", leaving=True)
        assert (swarm.job.aggregator, work.stay) == ("a", True)


async def test_an_aggregator_that_lost_an_update_is_replaced(tmp_path: Path) -> None:
    """If an aggregator has lost an accepted update, it is replaced and the site's ticket opens again."""
    # Both happen only when the site no longer offers the update. Until then, the aggregator can collect the update
    # again.
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        ticket = swarm.ticket("c")
        offer = swarm.offer("c", ticket)
        await swarm.collects("a", {ticket: offer})
        assert swarm.run.store.tickets.get(ticket).state == "accepted"
        await swarm.collects("a", {})
        assert swarm.job.aggregator == "a"  # it can collect the update again: c still offers it
        await swarm.collects("a", {ticket: offer})
        swarm.swarm.view.offers.clear()  # c has the acknowledgement, and offers the update no more
        await swarm.report("b")
        assert swarm.job.aggregator == "a"  # which has it
        await swarm.collects("a", {})
        assert (swarm.job.aggregator, swarm.job.lost) == ("b", "a: the update of c is lost")
        assert swarm.run.store.tickets.get(ticket).state == "open"


async def test_an_update_that_the_aggregator_rejects_is_refused(tmp_path: Path) -> None:
    """If the aggregator finds an update bad, for example with NaN, the server refuses the update with the aggregator's
    reason.
    """
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        ticket = swarm.ticket("c")
        await swarm.collects("a", {ticket: swarm.offer("c", ticket)}, bad="weight contains NaN")
        row = swarm.run.store.tickets.get(ticket)
        assert (row.state, "weight contains NaN" in row.reason) == ("refused", True)
        assert ticket not in swarm.swarm.view.offers


UNDECODABLE = {"failed": "ZeroDivisionError: 3 of 0 rows", "raised": True}


async def test_an_undecodable_update_is_refused(tmp_path: Path) -> None:
    """If no worker can decode an update, the update is refused."""
    # The update of `b` was decoded, so the update of `c` is wrong, and not the codec. One worker after the other tries
    # it.
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        tickets = {site: swarm.ticket(site) for site in "bc"}
        offers = {site: swarm.offer(site, ticket) for site, ticket in tickets.items()}
        await swarm.collects("a", {tickets["b"]: offers["b"]})
        await swarm.collects("a", {tickets["c"]: offers["c"]}, **UNDECODABLE)
        assert (swarm.job.aggregator, list(swarm.job.excluded)) == ("b", ["a"])
        await swarm.collects("b", {tickets["c"]: offers["c"]}, **UNDECODABLE)
        row = swarm.run.store.tickets.get(tickets["c"])
        assert (row.state, row.reason) == ("refused", "b could not decode it: ZeroDivisionError: 3 of 0 rows")
        assert swarm.run.failed is None


@pytest.mark.covers("X9")
async def test_a_codec_that_decodes_nothing_fails_the_run(tmp_path: Path) -> None:
    """If the workers cannot decode a second update either, the run fails with an error that names the workers."""
    # A single update that both workers cannot decode may be damaged. A second one shows that the codec is wrong.
    async with scripted_swarm(tmp_path, "a", "b", **IN_TURN) as swarm:
        offers = {swarm.ticket("b"): swarm.offer("b", swarm.ticket("b"))}
        await swarm.collects("a", offers, **UNDECODABLE)
        assert swarm.job.aggregator == "b"
        await swarm.collects("b", offers, **UNDECODABLE)
        assert (swarm.job.aggregator, swarm.run.failed) == ("b", None)
        offers[swarm.ticket("a")] = swarm.offer("a", swarm.ticket("a"))
        await swarm.collects("b", offers, **UNDECODABLE)
        assert swarm.run.failed is not None
        assert "Round 1 failed at a, b" in swarm.run.failed.message
        assert "b: it could not decode the update of a: ZeroDivisionError: 3 of 0 rows" in swarm.run.failed.message


async def closed_round(swarm: ScriptedSwarm) -> None:
    """All updates are accepted; a has the round to aggregate."""
    tickets = {site: swarm.ticket(site) for site in "abc"}
    offers = {ticket: swarm.offer(site, ticket) for site, ticket in tickets.items()}
    await swarm.collects("a", offers)
    for _ in range(1000):
        if swarm.job.closing is not None:
            return
        await asyncio.sleep(0)
    raise AssertionError("the round did not close")


async def test_another_worker_checks_the_new_version(tmp_path: Path) -> None:
    """In a swarm, a new version becomes the newest only after a worker other than the aggregator has downloaded and
    checked it.
    """
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        await closed_round(swarm)
        reduced = swarm.reduced()
        await swarm.hold("a", version=1, digest=reduced.digest or "")
        await swarm.report("a", closed=[reduced])
        for _ in range(100):
            await asyncio.sleep(0)
        assert (swarm.job.aggregator, swarm.job.checker) == ("a", "b")
        assert swarm.run.store.versions.head(0).version == 0  # not checked yet
        assert [hold.version for hold in (await swarm.report("b")).hold] == [0, 1]
        assert [hold.version for hold in (await swarm.report("c")).hold] == [0]
        await swarm.hold("b", version=1, digest=reduced.digest or "")
        for _ in range(1000):
            await asyncio.sleep(0)
            if swarm.run.store.versions.head(0).version == 1:
                break
        head = swarm.run.store.versions.head(0)
        assert (head.version, head.digest) == (1, reduced.digest)
        assert '"aggregator":"a"' in head.summary_json
        assert '"checker":"b"' in head.summary_json


async def test_silent_checkers_are_replaced(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """If the worker that checks an aggregator's new version does not get it in time, another worker checks it. After
    the last one, the aggregator is replaced.
    """
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        await closed_round(swarm)
        reduced = swarm.reduced()
        await swarm.hold("a", version=1, digest=reduced.digest or "")
        await swarm.report("a", closed=[reduced])

        async def after(seconds: float) -> tuple[str, str]:
            clock(seconds)
            for site in "bca":
                await swarm.report(site, **({"moved": swarm.workers[site].number} if site == "a" else {}))
            for _ in range(100):
                await asyncio.sleep(0)
            return swarm.job.aggregator, swarm.job.checker

        assert await after(0) == ("a", "b")
        assert await after(IDLE_S) == ("a", "b")
        assert await after(1) == ("a", "c")
        assert await after(IDLE_S) == ("a", "c")
        await after(1)
        assert (await after(0))[0] == "b"
        assert swarm.job.lost == "a: no other worker could download version 1 from it"
        assert swarm.run.store.versions.head(0).version == 0


MISMATCH = "the digests of its report do not belong to a version"


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ({"digest": "3" * 64}, MISMATCH),
        ({"part_digests": ""}, MISMATCH),
        ({"digest": None, "failed": "its disk is full"}, "its disk is full"),
    ],
    ids=["other digest", "too few digests", "failed"],
)
async def test_an_aggregator_with_a_bad_result_is_replaced(tmp_path: Path, said: dict[str, Any], lost: str) -> None:
    """If an aggregator reports a failure or digests that do not fit each other, another worker aggregates the round."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        await closed_round(swarm)
        await swarm.report("a", closed=[swarm.reduced(**said)])
        assert (swarm.job.aggregator, swarm.job.lost) == ("b", f"a: {lost}")


async def test_a_full_disk_delays_the_next_aggregator(tmp_path: Path) -> None:
    """If a full disk prevents a round from being opened again, no other worker aggregates the round. The next report
    opens the round.
    """

    def no_space(*_: object) -> None:
        raise DiskFull("The disk is full.")

    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        await closed_round(swarm)
        with pytest.MonkeyPatch.context() as lacking:
            lacking.setattr(swarm.run.store.tickets, "reopen", no_space)
            with pytest.raises(DiskFull):
                await swarm.report("a", closed=[swarm.reduced(digest=None, failed="its disk is full")])
        assert (swarm.run.state.rounds[0].phase, swarm.job.aggregator) == ("closing", "a")
        await swarm.report("c")
        await asyncio.sleep(0)
        assert (swarm.run.state.rounds[0].phase, swarm.job.aggregator) == ("open", "b")


async def test_a_report_about_other_tickets_is_ignored(tmp_path: Path) -> None:
    """A late report with other tickets, from before the round was opened again, changes nothing."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        await closed_round(swarm)
        await swarm.report("a", closed=[swarm.reduced(tickets=[1, 2], digest=None, failed="its disk is full")])
        assert (swarm.job.aggregator, swarm.swarm.view.closed(swarm.job)) == ("a", None)


async def test_a_site_stays_until_its_update_is_collected(tmp_path: Path) -> None:
    """While no other worker has the update of a leaving worker, the server asks this worker to stay."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        ticket = swarm.ticket("c")
        offer = swarm.offer("c", ticket)
        assert (await swarm.report("c", leaving=True)).stay
        await swarm.collects("a", {ticket: offer})
        assert not (await swarm.report("c")).stay


async def test_two_workers_keep_the_newest_version(tmp_path: Path) -> None:
    """If fewer than two workers hold the newest version, the next worker in the order is asked to download it."""
    async with scripted_swarm(tmp_path, "a", "b", "c", **IN_TURN) as swarm:
        swarm.workers["c"].held.clear()
        assert [hold.version for hold in (await swarm.report("c")).hold] == []
        swarm.workers["b"].held.clear()
        asked = {site: [hold.version for hold in (await swarm.report(site)).hold] for site in "bc"}
        assert asked == {"b": [0], "c": []}  # b comes first in the order
