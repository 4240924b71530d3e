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
def test_requests_without_a_valid_token_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with a wrong token or without one are counted in the metrics, give one log line for each kind, and never
    log the token.
    """
    # Three requests with a wrong token and two without one count as five.
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
def test_sites_with_another_model_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a site with another model tries to join three times, the log has one line with the reason, and the metrics
    count three.
    """
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        for _ in range(3):
            body = {"protocol": routes.PROTOCOL, "site": "a", "schema_digest": "0" * 64}
            assert post(server.url, routes.WORKERS, body)[0] == 409
        assert metric(server.url, "join") == 3
    assert len(refused_lines(caplog)) == 1
    assert "refused to let a site join from 127.0.0.1: The model of worker a (schema 000000000000)" in caplog.text


@pytest.mark.covers("X3")
def test_requests_for_another_host_are_counted_separately(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests whose host name is that of a foreign web page count separately in the metrics."""
    # Two of them give one log line.
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        for _ in range(2):
            assert get(server.url, routes.RUN, Host="evil.example")[0] == 401
        assert [metric(server.url, reason) for reason in ("host", "token")] == [2, 0]
    (line,) = refused_lines(caplog)
    assert line.startswith("refused a request from 127.0.0.1: The request is for host 'evil.example'")


@pytest.mark.covers("X3")
def test_a_join_that_waits_is_not_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the disk is full while a site joins, the site joins at its next attempt. Neither the log nor the metrics count
    a refusal.
    """
    body = {"protocol": routes.PROTOCOL, "site": "a"}
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        with failpoints("journal.commit=enospc@1"):
            assert [post(server.url, routes.WORKERS, body)[0] for _ in range(2)] == [507, 200]
        assert metric(server.url, "join") == 0
    assert refused_lines(caplog) == []


def test_a_repeated_refusal_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Within a minute, the same refusal is only counted, and the next log line says how many there were."""
    now_s = 0.0
    refusals = Refusals(lambda: now_s)
    for second in (0.0, 1.0, REPEAT_S - 1, REPEAT_S, REPEAT_S + 1, 2 * REPEAT_S):
        now_s = second
        refusals.note("token", "refused it")
    more = [f"refused it ({count} more since the last such line)" for count in (2, 1)]
    assert caplog.messages == ["refused it", *more]
    assert refusals.counts["token"] == 6


def test_many_refusals_cause_few_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals of many addresses give at most a fixed number of log lines a minute. Every request is counted."""
    refusals = Refusals(lambda: 0.0)
    for number in range(10 * MOST_SAID):
        refusals.note("token", f"refused a request from 10.0.0.{number}")
    assert len(caplog.messages) == MOST_SAID
    assert refusals.counts["token"] == 10 * MOST_SAID


def test_an_unexpected_third_site_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a third site joins a run of two expected sites, the log reports it once, and which silent site has a similar
    name.
    """
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
def test_health_checks_do_not_reveal_software_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, body: bytes
) -> None:
    """Load balancers get an answer to HEAD or GET without a token, and no answer shows the versions of Python and
    aiohttp.
    """
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        request = urllib.request.Request(server.url + routes.HEALTH, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, body)
            assert answer.headers["Server"] is None
        request = urllib.request.Request(server.url + routes.RUN, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Server"] is None
