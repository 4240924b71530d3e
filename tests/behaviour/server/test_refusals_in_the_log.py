"""What the operator of a server learns of refused requests, refused sites, and sites that the run does not expect."""

from __future__ import annotations

import logging
import re
import urllib.request
from pathlib import Path

import pytest
from kit.requests import get, joined, post
from kit.servers import plain_server
from torch import nn

from atoll.protocol import routes
from atoll.server.http.gate import MOST_SAID, REPEAT_S, Refusals
from atoll.testing.run import failpoints

TOKEN = "0123456789abcdef0123456789abcdef"


def metric(url: str, reason: str, token: str = "") -> float:
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(rf'^atoll_refused_requests_total{{reason="{reason}"}} (\S+)$', text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def refused_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


@pytest.mark.covers("X3")
def test_logs_and_counts_requests_without_the_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests with a wrong token and two without one are five in the metrics, and one line each in the log."""
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        for sent in 3 * ["Bearer wrong"] + 2 * [""]:
            assert get(server.url, routes.RUN, Authorization=sent)[0] == 401
        assert metric(server.url, "token", TOKEN) == 5
    lines = refused_lines(caplog)
    assert len(lines) == 2
    assert lines[0] == "refused a request from 127.0.0.1: The request has no valid token."
    assert "wrong" not in caplog.text  # a secret of somewhere else


@pytest.mark.covers("X3")
def test_logs_and_counts_a_site_that_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A site with another model is named in the server's log with the reason, once, and counted each time."""
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        for _ in range(3):
            body = {"protocol": routes.PROTOCOL, "site": "a", "schema_digest": "0" * 64}
            assert post(server.url, routes.WORKERS, body)[0] == 409
        assert metric(server.url, "join") == 3
    assert len(refused_lines(caplog)) == 1
    assert "refused to let a site join from 127.0.0.1: The model of worker a (schema 000000000000)" in caplog.text


@pytest.mark.covers("X3")
def test_logs_and_counts_requests_for_a_foreign_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two requests of a web page with its own host name are counted by themselves, and one line of the log."""
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        for _ in range(2):
            assert get(server.url, routes.RUN, Host="evil.example")[0] == 401
        assert [metric(server.url, reason) for reason in ("host", "token")] == [2, 0]
    (line,) = refused_lines(caplog)
    assert line.startswith("refused a request from 127.0.0.1: The request is for host 'evil.example'")


@pytest.mark.covers("X3")
def test_a_site_that_waits_is_not_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk is full while a site joins: it joins at its next attempt, and the log has no refusal."""
    body = {"protocol": routes.PROTOCOL, "site": "a"}
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        with failpoints("journal.commit=enospc@1"):
            assert [post(server.url, routes.WORKERS, body)[0] for _ in range(2)] == [507, 200]
        assert metric(server.url, "join") == 0
    assert refused_lines(caplog) == []


def test_says_the_same_refusal_again_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Within a minute a refusal is only counted; the next line says how many there were since the last one."""
    now_s = 0.0
    refusals = Refusals(lambda: now_s)
    for second in (0.0, 1.0, REPEAT_S - 1, REPEAT_S, REPEAT_S + 1, 2 * REPEAT_S):
        now_s = second
        refusals.note("token", "refused it")
    more = [f"refused it ({count} more since the last such line)" for count in (2, 1)]
    assert caplog.messages == ["refused it", *more]
    assert refusals.counts["token"] == 6


def test_a_flood_of_refusals_makes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A scanner from many addresses gets a hundred lines a minute, and every request is counted."""
    refusals = Refusals(lambda: 0.0)
    for number in range(10 * MOST_SAID):
        refusals.note("token", f"refused a request from 10.0.0.{number}")
    assert len(caplog.messages) == MOST_SAID
    assert refusals.counts["token"] == 10 * MOST_SAID


def test_reports_a_site_beyond_the_expected_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With two expected sites, a third name is reported, with the name of a silent site that it resembles."""
    caplog.set_level(logging.WARNING)
    with plain_server(tmp_path, nn.Linear(2, 1), **{"rounds.sites": 2}) as server:
        lease = joined(server.url, "clinic-a")
        joined(server.url, "clinic-b")
        post(server.url, routes.LEAVE, {}, lease)
        assert "is a new site" not in caplog.text
        joined(server.url, "clinc-a")
        joined(server.url, "clinc-a")
    lines = [line for line in caplog.messages if "is a new site" in line]
    assert lines == [
        "clinc-a is a new site, number 3 of a run with rounds.sites = 2. Did you mean 'clinic-a'? "
        "If the name is a mistake, start its worker again under the right one."
    ]


@pytest.mark.parametrize(("method", "body"), [("HEAD", b""), ("GET", b"ok\n")])
def test_answers_health_checks_without_naming_its_software(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, body: bytes
) -> None:
    """Load balancers ask with HEAD or GET and no token; no answer says which versions of Python and aiohttp run."""
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        request = urllib.request.Request(server.url + routes.HEALTH, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, body)
            assert answer.headers["Server"] is None
        request = urllib.request.Request(server.url + routes.RUN, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Server"] is None
