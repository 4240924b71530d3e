"""The stream of what happens in a run: numbered, resumable, in the transaction of what it tells, for all followers."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.damage import flip_column
from kit.requests import get
from kit.servers import plain_server
from kit.wire import WireSite
from kit.world import World

from atoll.errors import DiskFull, UsageError
from atoll.protocol.run_events import (
    EventPage,
    EventQuery,
    Happened,
    RoundEnded,
    RoundReopened,
    RunFailed,
    SiteJoined,
    Warned,
)
from atoll.protocol.site_curves import SiteCurvesQuery
from atoll.protocol.status_messages import RoundSummary, SiteRound
from atoll.server.coordinator.event_log import EventLog
from atoll.store import kept_events as kept
from atoll.store.reader import open_state
from atoll.store.store import Store
from atoll.testing.run import wait_until

pytestmark = pytest.mark.covers("X13")

START = {"w": torch.zeros(2)}


def events_of(url: str, after: int = 0, **query: float) -> dict[str, Any]:
    """The page of events that follows."""
    asked = "&".join(f"{name}={value}" for name, value in {"after": after, **query}.items())
    status, page = get(url, f"/v1/events?{asked}")
    assert status == 200, page
    return dict(page)


def told(page: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of each event what it is, the site if there is one, and the round."""
    return [(each["what"], each.get("site", ""), each.get("round", 0)) for each in page["events"]]


def test_events_are_numbered_from_one(tmp_path: Path) -> None:
    """The server numbers the events of a run from 1 in the order in which they happen. A restart keeps them and
    continues the numbers.
    """
    with World(tmp_path, START, "ab", rounds=2) as world:
        world.rounds(1.0, 1)
        world.wait(1)
        page = events_of(world.url)
        assert [each["number"] for each in page["events"]] == list(range(1, page["newest"] + 1))
        assert (page["oldest"], page["within"]) == (1, 0)
        assert told(page) == [
            ("site joined", "a", 0),
            ("site joined", "b", 0),
            ("round opened", "", 1),
            ("ticket issued", "a", 1),
            ("ticket issued", "b", 1),
            ("update accepted", "a", 1),
            ("update accepted", "b", 1),
            ("round closed", "", 1),
            ("round ended", "", 1),
            ("round opened", "", 2),
        ]
        summary = page["events"][8]["summary"]
        assert summary == world.status.history[0].model_dump()
        assert [site["site"] for site in summary["sites"]] == ["a", "b"]
        assert events_of(world.url, page["newest"])["events"] == []
        world.restart()
        again = events_of(world.url)
        assert again["events"][:10] == page["events"]
        world.rounds(1.0, 2)
        world.finish()
    assert world.status.finished


def test_a_failing_follower_is_reported_once(tmp_path: Path) -> None:
    """If a follower of the events raises at every event, the run goes on. The status has one warning and the log has
    one line.
    """

    def fails(event: Happened) -> None:
        raise ZeroDivisionError(event.number)

    with World(tmp_path, START, "a", rounds=1) as world:
        world.server._require_served().run.events.subscribe("a follower", fails)
        world.pull("a")
        world.submit("a", float("nan"))
        (refused,) = [each for each in events_of(world.url)["events"] if each["what"] == "update refused"]
        assert (refused["site"], refused["ticket"], refused["round"]) == ("a", 1, 1)
        assert "NaN" in refused["reason"]
        world.rounds(1.0, 1)
        world.wait(1)
        (problem,) = [text for text in world.status.warnings if text.startswith("a follower failed")]
        assert "ZeroDivisionError" in problem
        assert world.text.count("a follower failed") == 1
        world.finish()


def test_a_filling_disk_causes_one_warning_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While uploads are refused because of a full disk, each check finds another amount of free space. The bounded
    stream of events gets only one warning.
    """
    with World(tmp_path, START, "a", rounds=1) as world:
        run, free = world.server._require_served().run, iter(range(10_000, 0, -1))

        def lacks(_: int) -> None:
            raise DiskFull(f"only {next(free)} MB are left")

        def warned(word: str) -> list[str]:
            return [each["text"] for each in events_of(world.url)["events"] if word in each.get("text", "")]

        world.pull("a")
        with monkeypatch.context() as full:
            full.setattr(run.store, "require_space", lacks)
            submits = threading.Thread(target=world.submit, args=("a", 1.0))
            submits.start()
            wait_until(lambda: len(warned("MB")) > 0, "uploads to be refused")
            for mark in ("one check", "another check"):  # the checks of a second tell it, after the disk's warning
                run.trouble[0] = mark
                wait_until(lambda mark=mark: warned(mark) == [mark], mark)
        submits.join()
        assert len(warned("MB")) == 1
        world.finish()


def test_a_request_waits_for_the_next_event(tmp_path: Path) -> None:
    """A client that waits for events with `wait_s` is answered as soon as a new event happens."""
    with World(tmp_path, START, "ab", rounds=1) as world:
        world.join("a")
        newest, pages = events_of(world.url)["newest"], list[dict[str, Any]]()
        waits = threading.Thread(target=lambda: pages.append(events_of(world.url, newest, wait_s=15)))
        waits.start()
        world.join("b")
        waits.join()
        assert told(pages[0])[0] == ("site joined", "b", 0)
        world.close()


BAD = {
    "after=-1": "after",
    "after=x": "numbers",
    "after=1&after=2": "twice",
    "after=1.5": "after",
    "after=true": "after",
    f"after={2**62}": "after",
    "after=NaN": "after",
    "since=1": "since",
    "wait_s=1e308": "wait_s",
    f"after={'[' * 30}": "numbers",
    "within=-1": "within",
}


def test_refuses_a_wrong_query(tmp_path: Path) -> None:
    """The server answers a malformed request for events with 400, and a number beyond the newest event with 410."""
    with World(tmp_path, START, "a", rounds=1) as world:
        for query, word in BAD.items():
            status, problem = get(world.url, f"/v1/events?{query}")
            assert status == 400, query
            assert word in problem["message"], query
        status, problem = get(world.url, "/v1/events?after=9")
        assert (status, problem["code"]) == (410, "gone")
        assert "the newest is 0" in problem["message"]


def test_a_request_for_deleted_events_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps only the newest events. A request for older ones gets 410 with the number of the oldest event
    that is kept.
    """
    # The server keeps the newest events of sites and the newest of the run. Here it keeps 5 of each kind, and up to 2
    # more until it deletes the oldest again.
    monkeypatch.setattr(kept, "KEPT", 5)
    monkeypatch.setattr(kept, "_SLACK", 3)
    with World(tmp_path, START, "a", rounds=6) as world:
        world.rounds(1.0, 1, 2, 3, 4, 5)
        world.wait(5)
        page = events_of(world.url)
        numbers = [each["number"] for each in page["events"]]
        assert (numbers[0], numbers[-1]) == (page["oldest"], page["newest"])
        # the site joins; the first round opens; each round has 5 events, of which the site causes 2
        assert page["newest"] == 27
        of_site = [each["number"] for each in page["events"] if "site" in each]
        of_run = sorted(set(numbers) - set(of_site))
        assert of_site == [3, 4, 8, 9, 13, 14, 18, 19, 23, 24][-len(of_site) :]
        assert of_run == [2, 5, 6, 7, 10, 11, 12, 15, 16, 17, 20, 21, 22, 25, 26, 27][-len(of_run) :]
        assert {len(of_site), len(of_run)} <= {5, 6, 7}
        status, problem = get(world.url, "/v1/events?after=1")
        assert (status, problem["code"]) == (410, "gone")
        assert f"the oldest is {page['oldest']}" in problem["message"]
        assert events_of(world.url, page["oldest"] - 1)["events"] == page["events"]
        world.rounds(1.0, 6)
        world.finish()


def test_many_join_events_delete_no_run_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a site joins again and again, only events of sites are deleted. The events of rounds stay."""
    monkeypatch.setattr(kept, "KEPT", 5)
    monkeypatch.setattr(kept, "_SLACK", 3)
    with Store(tmp_path) as store:
        log = EventLog(store)
        for number in (1, 2, 3):
            log.tell(RoundReopened(fragment=0, round=number, reason="a site left"))
        for _ in range(100):
            log.tell(SiteJoined(site="a", again=True))
        numbers = [event.number for event in log.page(EventQuery()).events]
        assert numbers == [1, 2, 3, 98, 99, 100, 101, 102, 103]  # 103 events; at 102, all but 5 joins went


def test_a_damaged_event_is_reported(tmp_path: Path) -> None:
    """The server leaves a damaged event out of its answer. If the damaged event is the next one asked for, the answer
    is 500 and says how to skip it.
    """
    with World(tmp_path, START, "ab", rounds=1) as world:
        world.join("a", "b")
        assert flip_column(tmp_path / "state" / "journal.sqlite", "events", "event_json")
        page = events_of(world.url)
        newest = page["newest"]
        assert [each["number"] for each in page["events"]] == list(range(1, newest))  # the last one is damaged
        status, problem = get(world.url, f"/v1/events?after={newest - 1}")
        assert (status, problem["code"]) == (500, "state_corrupt")
        assert f"the content of events (number = {newest}) does not match its checksum" in problem["message"]
        assert problem["remedy"].endswith(f"ask for the events behind it with after={newest}.")
        world.rounds(1.0, 1)
        world.wait(1)
        assert events_of(world.url, newest)["events"][0]["number"] == newest + 1
        world.finish()


def test_a_follower_learns_of_a_restored_backup(tmp_path: Path) -> None:
    """After the server was restored from a backup, a client that asks for later events gets 410 and is told how to go
    on.
    """
    with World(tmp_path, START, "a", rounds=3) as world:
        world.rounds(1.0, 1)
        world.wait(1)
        world.stop()
        backup = world.backup()
        world.start()
        before = events_of(world.url)["newest"]
        world.rounds(1.0, 2)
        world.wait(2)
        newest = events_of(world.url)["newest"]
        assert newest > before
        world.stop()
        world.put_back(backup)
        world.start()
        now = events_of(world.url)["newest"]
        status, problem = get(world.url, f"/v1/events?after={newest}")
        assert (status, problem["code"]) == (410, "gone")
        assert f"There is no event {newest}: the newest is {now}." in problem["message"]
        assert "restored from a backup" in problem["remedy"]
        assert f"after={now} for new ones alone" in problem["remedy"]


def test_a_large_round_summary_spans_several_pages(tmp_path: Path) -> None:
    """The events of a round with 9,000 sites are split over several answers of at most 1 MiB, with every site once and
    in order.
    """
    sites = [SiteRound(site=f"site-{number:05}", metrics={"loss": 0.5}) for number in range(9000)]
    summary = RoundSummary(fragment=0, round=1, version=1, metrics={}, counts={}, seconds=1.0, bytes_up=0, sites=sites)
    with Store(tmp_path) as store:
        log = EventLog(store)
        with store.journal.transaction():
            store.journal.execute_many(
                "INSERT INTO site_rounds (fragment, version, site, summary_json) VALUES (0, 1, ?, ?)",
                [(site.site, site.model_dump_json()) for site in sites],
            )
        log.tell(RoundEnded(fragment=0, round=1, summary=summary))
        pages, within = list[EventPage](), 0
        while not pages or within:
            pages.append(log.page(EventQuery(within=within)))
            within = pages[-1].within
            assert len(pages[-1].model_dump_json()) <= 2**20
        assert [len(page.events) for page in pages] == [1] * len(pages)
        assert len(pages) > 1
        ended = [page.events[0] for page in pages]
        assert [site for each in ended if isinstance(each, RoundEnded) for site in each.summary.sites] == sites


def test_many_status_requests_share_one_computed_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers many status requests with one computed status, until it gets too old or an event happens."""
    from atoll.server.http import run_routes

    built, status_of, now_s = [], run_routes.status_of, [0.0]

    def counted(run: Any) -> Any:
        built.append(now_s[0])
        return status_of(run)

    monkeypatch.setattr(run_routes, "status_of", counted)
    with World(tmp_path, START, "ab", rounds=1) as world:
        world.join("a")
        monkeypatch.setattr(run_routes, "STATUS_S", 3600.0)
        before = get(world.url, "/v1/status")[1]
        built.clear()
        assert [get(world.url, "/v1/status")[1] for _ in range(20)] == [before] * 20
        with urllib.request.urlopen(f"{world.url}/metrics") as answer:
            assert b"atoll_workers 1.0" in answer.read()
        assert built == []
        world.join("b")  # an event
        assert len(get(world.url, "/v1/status")[1]["workers"]) == 2
        assert len(built) == 1
        world.close()


async def test_followers_get_events_in_order(tmp_path: Path) -> None:
    """If a program that follows the events causes another event, all followers get both events once and in order."""
    with Store(tmp_path) as store:
        log, seen = EventLog(store), list[int]()
        log.subscribe("adds", lambda event: log.tell(Warned(text="second")) if event.number == 1 else None)
        log.subscribe("follows", lambda event: seen.append(event.number))
        log.tell(Warned(text="first"))
        await asyncio.sleep(0)
    assert seen == [1, 2]


def test_a_program_follows_its_server(tmp_path: Path) -> None:
    """A program that starts a server can follow its events, from the first one on.

    `atoll server` does so for its reminders.
    """
    heard = list[str]()
    server = plain_server(tmp_path, START, sites=1, rounds=1)
    server.follow("follows", lambda event: heard.append(event.what))
    with server:
        WireSite(server.url, "a").train(1.0, weight=1.0).submit()
        assert server.wait(30)
    assert heard == [
        "site joined",
        "round opened",
        "ticket issued",
        "update accepted",
        "round closed",
        "round ended",
        "run finished",
    ]


def test_an_event_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    """The event log refuses an event of an unknown class, because it could not be read from the journal later."""

    class Own(Happened):
        pass

    with Store(tmp_path) as store:
        log = EventLog(store)
        with pytest.raises(UsageError, match="Own is not an event"):
            log.tell(Own())
        assert log.page(EventQuery()).newest == 0


def test_followers_learn_of_a_failure_without_a_record(tmp_path: Path) -> None:
    """If a run fails because nothing can be written to the disk, programs that follow its events still get the event of
    the failure.
    """
    # With number 0.
    with Store(tmp_path) as store:
        log, heard = EventLog(store), list[Happened]()
        log.subscribe("follows", heard.append)
        store.journal.sync_failed("the journal", OSError(5, "input/output error"))
        log.tell(RunFailed(reason="fsync failed"))
        assert [(each.what, each.number) for each in heard] == [("run failed", 0)]
        assert log.page(EventQuery()).events == []


def test_an_answer_has_at_most_1_mib_of_events(tmp_path: Path) -> None:
    """An answer with events has at most 1 MiB, counted in bytes of UTF-8, not in characters."""
    with Store(tmp_path) as store:
        log = EventLog(store)
        for _ in range(200):
            log.tell(Warned(text="中" * 2000))
        page = log.page(EventQuery())
        assert 100 < len(page.events) < 200
        assert len(page.model_dump_json().encode()) <= 2**20


def test_an_event_keeps_its_own_time(tmp_path: Path) -> None:
    """An event that already has a time keeps it when it is recorded; any other event gets the present time."""
    # A round's event has the time of its version, which `metrics.jsonl` has again after a restart.
    with Store(tmp_path) as store:
        log = EventLog(store)
        log.tell(Warned(text="then", at="2026-01-01T00:00:00+00:00"))
        log.tell(Warned(text="now"))
        then, now = log.page(EventQuery()).events
        assert then.at == "2026-01-01T00:00:00+00:00"
        assert now.at > then.at


BAD_CURVES = {
    "points=1": "points",
    "points=1001": "points",
    "points=x": "numbers",
    "value=loss": "metrics",
    "value=metrics.": "metrics",
    f"value=metrics.{'x' * 129}": "value",
    "site=../x": "site",
    f"after={'x' * 65}": "after",
    "site=absent": "absent",
    "fragment=1": "the run has 1 fragment",
    "fragment=-1": "fragment",
    "first=2&last=1": "first = 2 is above last = 1",
    f"last={2**62}": "last",
    "sites=a": "sites",
}


def test_site_curves_have_each_sites_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers `/v1/site-curves` with each site's values over the rounds, and refuses wrong queries."""
    # The reader that the commands use gives the same curves. A separate thread reads the curves, not the event loop.
    from atoll.server.http import run_routes

    readers, open_it = list[str](), run_routes.open_state

    def opened(*folder: Path, **how: bool) -> Any:
        readers.append(threading.current_thread().name)
        return open_it(*folder, **how)

    monkeypatch.setattr(run_routes, "open_state", opened)
    with World(tmp_path, START, "ab", rounds=3) as world:
        for number in (1, 2):
            world.pull(number=number)
            for site, loss in {"a": 0.5, "b": 0.25}.items():
                world.submit(site, 1.0, metrics={"loss": loss * number, "f 1/x": 3.0})
            world.wait(number)
        status, found = get(world.url, "/v1/site-curves")
        assert (status, found) == (
            200,
            {
                "versions": [1, 2],
                "rounds": [1, 2],
                "mean": [0.375, 0.75],
                "curves": [{"site": "a", "values": [0.5, 1.0]}, {"site": "b", "values": [0.25, 0.5]}],
                "after": "",
            },
        )
        with open_state(tmp_path / "state") as state:
            assert state.site_curves(SiteCurvesQuery()).model_dump() == found
        (of_b,) = get(world.url, "/v1/site-curves?value=metrics.f%201/x&site=b&first=2")[1]["curves"]
        assert of_b == {"site": "b", "values": [3.0]}
        for query, word in BAD_CURVES.items():
            status, problem = get(world.url, f"/v1/site-curves?{query}")
            assert (status, problem["code"]) == (400, "bad_request"), query
            assert word in problem["message"], query
        assert readers
        assert not [name for name in readers if name.startswith("atoll-server")]
        world.rounds(1.0, 3)
        world.finish()
