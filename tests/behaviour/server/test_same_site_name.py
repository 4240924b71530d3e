"""Two machines take part under one site name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from kit import serve
from kit.wire import WireSite

import atoll
from atoll.errors import Superseded


@pytest.mark.covers("F19")
def test_reports_both_hosts_of_one_site_name_and_that_a_living_process_was_displaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "atoll.server")
    with serve(tmp_path) as server:
        first = WireSite(server.url, host="ward-1", process="one")
        first.beat()
        second = WireSite(server.url, host="ward-2", process="two")
        reports = [record.message for record in caplog.records if "ward-1" in record.message]
        assert len(reports) == 1
        assert "ward-2" in reports[0]
        assert server.status().warnings == []  # the first one may have ended
        status, refused = first.post("/v1/heartbeat", {})
        assert (status, refused["code"]) == (409, "superseded")
        assert "ward-2" in refused["message"]
        second.beat()
        (told,) = server.status().warnings
        assert "ward-1" in told
        assert "ward-2" in told
        assert first.post("/v1/heartbeat", {})[1]["code"] == "superseded"
        assert [record.message for record in caplog.records].count(told) == 1


def test_a_site_that_is_started_again_on_its_machine_is_no_second_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "atoll.server")
    with serve(tmp_path, **{"rounds.sites": 3}) as server:
        WireSite(server.url, host="ward-1", process="one")
        WireSite(server.url, host="ward-1", process="two").beat()
        with atoll.join(server.url, "b", folder=tmp_path / "w"):
            pass
        with atoll.join(server.url, "b", folder=tmp_path / "w"):
            pass
        assert server.status().warnings == []
    assert caplog.records == []


def test_each_displaced_process_is_known_also_after_a_third_join(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        first, second, _ = (
            WireSite(server.url, host=f"ward-{process}", process=process) for process in ("one", "two", "three")
        )
        for displaced, host in ((first, "ward-one"), (second, "ward-two")):
            displaced.post("/v1/heartbeat", {})
            assert f"on {host} and on ward-three" in server.status().warnings[0]


def test_two_processes_of_one_machine_with_folders_of_their_own_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "atoll")
    with serve(tmp_path, **{"network.heartbeat_interval_s": 0.1}) as server:
        with atoll.join(server.url, "a", folder=tmp_path / "one") as first:
            assert "replaces the process" not in caplog.text
            with atoll.join(server.url, "a", folder=tmp_path / "two"):
                assert "a: replaces the process on " in caplog.text, "in the log of the newer one"
                with pytest.raises(Superseded):
                    next(iter(first))
            (told,) = server.status().warnings
    assert "a" in told
