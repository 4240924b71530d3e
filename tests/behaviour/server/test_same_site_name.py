"""Two machines take part under one site name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import serve

import atoll
from atoll.errors import Superseded
from atoll.protocol import messages, routes
from atoll.transport.http_client import Http


@contextlib.contextmanager
def joined(url: str, host: str, process: str) -> Iterator[Http]:
    """The requests of a process of site a on some machine, by hand."""
    with contextlib.closing(Http(url)) as http:
        join = messages.Join(protocol=routes.PROTOCOL, site="a", host=host, process=process)
        http.lease = http.post(routes.WORKERS, join, messages.Joined).lease
        yield http


def beat(http: Http) -> None:
    http.post(routes.HEARTBEAT, messages.Heartbeat(), messages.HeartbeatReply)


@pytest.mark.covers("F19")
def test_reports_both_hosts_of_one_site_name_and_that_a_living_process_was_displaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "atoll.server")
    with serve(tmp_path) as server, joined(server.url, "ward-1", "one") as first:
        beat(first)
        with joined(server.url, "ward-2", "two") as second:
            reports = [record.message for record in caplog.records if "ward-1" in record.message]
            assert len(reports) == 1
            assert "ward-2" in reports[0]
            assert server.status().warnings == []  # the first one may have ended
            with pytest.raises(Superseded) as refused:
                beat(first)
            assert "ward-2" in refused.value.message
            beat(second)
        (told,) = server.status().warnings
        assert "ward-1" in told
        assert "ward-2" in told
        with pytest.raises(Superseded):
            beat(first)
        assert [record.message for record in caplog.records].count(told) == 1


def test_a_site_that_is_started_again_on_its_machine_is_no_second_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "atoll.server")
    with serve(tmp_path, **{"rounds.sites": 3}) as server:
        with joined(server.url, "ward-1", "one"):
            pass
        with joined(server.url, "ward-1", "two") as http:
            beat(http)
        with atoll.join(server.url, "b", folder=tmp_path / "w"):
            pass
        with atoll.join(server.url, "b", folder=tmp_path / "w"):
            pass
        assert server.status().warnings == []
    assert caplog.records == []


def test_two_processes_of_one_machine_with_folders_of_their_own_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "atoll")
    with serve(tmp_path, **{"network.heartbeat_interval_s": 0.1}) as server:
        with atoll.join(server.url, "a", folder=tmp_path / "one") as first:
            assert "takes the place" not in caplog.text
            with atoll.join(server.url, "a", folder=tmp_path / "two"):
                assert "a: takes the place of another process, on " in caplog.text, "in the log of the newer one"
                with pytest.raises(Superseded):
                    next(iter(first))
            (told,) = server.status().warnings
    assert "a" in told
