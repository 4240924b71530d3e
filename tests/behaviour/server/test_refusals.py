"""What the server says no to: each refusal has a test that fails without it, and the interface documents it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from kit import serve
from kit.requests import answer, begin_request, get, post, send
from kit.servers import plain_server
from kit.wire import WireSite, WireUpdate
from schemathesis.specs.openapi.checks import positive_data_acceptance
from torch import nn

import atoll
from atoll.errors import UpdateRefused


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, nn.Linear(8, 4), sites=2) as server:
        yield server


@pytest.fixture
def a(server: atoll.Server) -> WireSite:
    return WireSite(server.url, "a", process="one")


@pytest.fixture
def b(server: atoll.Server, a: WireSite) -> WireSite:
    """Has joined, too, so that the round begins."""
    return WireSite(server.url, "b")


@pytest.fixture
def pushed(a: WireSite, b: WireSite) -> WireUpdate:
    """An update of a whose parts are all at the server."""
    return a.train(1.0).push()


@pytest.mark.covers("F18")
def test_refuses_parts_of_another_digest(pushed: WireUpdate) -> None:
    """If a site completes an update with a digest that does not match the parts, the server refuses."""
    # The ticket stays open. Guards against `complete` that accepts any digest.
    status, told = pushed.complete(digest="0" * 64)
    assert (status, told["code"]) == (409, "conflict")
    assert "does not match its parts" in told["message"]
    assert pushed.state()["outcome"]["state"] == "open"
    assert pushed.complete()[1]["digest"] == pushed.message["digest"]


@pytest.mark.covers("F19")
def test_only_the_tickets_own_site_may_complete_it(b: WireSite, pushed: WireUpdate) -> None:
    """A site cannot complete the ticket of another site, neither before nor after its update was accepted."""
    for _ in range(2):
        _, told = b.post(f"/v1/tickets/{pushed.ticket}/complete", pushed.message)
        assert told["code"] == "ticket_closed"
        assert "not issued to 'b'" in told["message"]
        assert pushed.complete()[0] == 200


@pytest.mark.covers("F19")
def test_only_a_tickets_own_site_learns_how_many_parts_its_update_has(b: WireSite, pushed: WireUpdate) -> None:
    """A part that does not exist is refused as a wrong request if the ticket is the site's own, else as closed."""
    # After a power loss, the ticket may be one of another fragment, with fewer parts. Its former site has to ask again.
    status, told = send(pushed.site.url, "PUT", f"/v1/tickets/{pushed.ticket}/parts/1", b"", pushed.site.lease)
    assert (status, told["code"]) == (400, "bad_request")
    assert "Part 1 does not exist; the update has 1 part." in told["message"]
    status, told = send(b.url, "PUT", f"/v1/tickets/{pushed.ticket}/parts/1", b"", b.lease)
    assert (status, told["code"]) == (410, "ticket_closed")


@pytest.mark.parametrize(
    ("limit", "most", "weight", "by", "told"),
    [
        ("max_update_norm", 5.9, 1.0, 1.0, "norm is 6, above aggregation.max_update_norm 5.9"),  # √(36 · 1²) = 6
        ("max_update_norm", 6.1, 1.0, 1.0, ""),
        ("max_update_norm", 1e12, 1.0, 1e12, "norm is 6e+12, above aggregation.max_update_norm 1e+12"),
        ("max_update_norm", 0.0, 1.0, 1e12, ""),
        ("max_weight", 10.0, 11.0, 1.0, "weight is 11, above aggregation.max_weight 10"),
        ("max_weight", 10.0, 10.0, 1.0, ""),
    ],
)
@pytest.mark.covers("F31")
def test_an_implausible_norm_or_weight_is_refused(
    tmp_path: Path, limit: str, most: float, weight: float, by: float, told: str
) -> None:
    """The server refuses an update whose norm or weight is above the limit in the settings."""
    # At the limit, the update is accepted. A limit of 0 for the norm means no limit.
    assert atoll.Settings().aggregation.max_update_norm == 1e12
    with plain_server(tmp_path, nn.Linear(8, 4), **{f"aggregation.{limit}": most}) as server:
        status, reply = WireSite(server.url).train(by, weight=weight).push().complete()
        assert status == (422 if told else 200)
        assert told in reply.get("message", "")
        assert server.status().refused == bool(told)


@pytest.mark.covers("P3")
def test_a_version_is_served_only_under_its_digest(server: atoll.Server) -> None:
    """The server answers 410 to a request for a version whose digest in the URL is not that of the stored version."""
    # Otherwise a site would read other bytes from an old URL, after the server fell back to an earlier version.
    status, told = get(server.url, f"/v1/fragments/0/versions/0/{'0' * 64}")
    assert (status, told["code"]) == (410, "gone")
    assert "no longer has the digest" in told["message"]


@pytest.mark.covers("F19")
def test_an_invalid_lease_is_refused_everywhere(server: atoll.Server, a: WireSite, b: WireSite) -> None:
    """The server refuses every request of a process that was replaced, that has left, or that has no lease."""
    WireSite(server.url, "a", process="two")
    leased = ("/v1/heartbeat", "/v1/workers/leave", "/v1/tickets", "/v1/tickets/1/complete")
    assert [a.post(path, {})[1]["code"] for path in leased[:2]] == ["superseded"] * 2
    b.leave()
    assert [b.post(path, {})[1]["code"] for path in leased[::2]] == ["lease_lost"] * 2
    assert all("Atoll-Lease header" in post(server.url, path, {})[1]["message"] for path in leased)


@pytest.mark.covers("X3", "F31")
def test_later_requests_of_a_refused_update_are_refused(tmp_path: Path) -> None:
    """If one part of an update has NaN, the server refuses every further part and the completion with
    the same error.
    """
    # Several parts may be sent at once, also from several ranks. The first answer must not decide what the worker does
    # next.
    with plain_server(tmp_path, nn.Linear(2000, 20), part_bytes=2**16) as server:
        site = WireSite(server.url)
        update = site.train(lambda tensors: tensors["weight"].fill_(float("nan")))
        assert len(update.parts) == 3
        replies = [update.put(part) for part in (0, 2, 1, 0)] + [update.complete()]
        assert {told["code"] for _, told in replies} == {"update_refused"}
        (message,) = {told["message"] for _, told in replies}
        assert "of a was refused: weight contains NaN or Inf" in message
        assert server.status().refused == 1


COUNTED: dict[str, Any] = {
    "rounds.total": 0,
    "aggregation.max_weight": 10.0,
    "network.heartbeat_interval_s": 0,
    "network.heartbeat_timeout_s": 0,
}


def refused(site: WireSite) -> str:
    """What the site hears of an update that is refused for its weight; then it asks for the next ticket."""
    status, told = site.train(weight=11.0).push().complete()
    assert (status, told["code"]) == (422, "update_refused")
    return str(told["message"]) + str(told["remedy"])


@pytest.mark.covers("X3")
@pytest.mark.parametrize(("min_sites", "waits"), [(None, True), (1, False)])
def test_a_refusal_says_whether_the_round_waits(tmp_path: Path, min_sites: int | None, waits: bool) -> None:
    """The error of a refused update tells the site whether the round waits for a new update from it."""
    with serve(tmp_path, **COUNTED, **{"rounds.min_sites": min_sites}) as server:
        a, _ = (WireSite(server.url, site) for site in "ab")
        told, status = refused(a), server.status().fragments[0]
    assert ("The round waits" in told, "continues with the other updates" in told) == (waits, not waits)
    assert (status.version, status.phase) == (0, "open")


def test_errors_have_a_full_stop_before_the_remedy() -> None:
    """The text of an error has a full stop before the remedy, unless the message already ends with punctuation."""
    assert str(UpdateRefused("it ended: no such column", "Look at the data.")) == (
        "it ended: no such column. Look at the data."
    )
    assert str(UpdateRefused("Is it there?", "Look.")) == "Is it there? Look."
    assert str(UpdateRefused("It is refused.", "Look.")) == "It is refused. Look."
    assert str(UpdateRefused("it is refused")) == "it is refused"


@pytest.mark.covers("F38")
def test_refuses_a_message_that_is_too_long(server: atoll.Server) -> None:
    """The server refuses an HTTP message that is longer than the limit for messages."""
    head = {"Content_Type": "application/json", "Content_Length": 2**30}
    status, told = answer(begin_request(server.port, "POST /v1/workers", **head))
    assert (status, told["code"], told["remedy"]) == (413, "too_large", "Send a smaller message.")
    assert re.fullmatch(r"Maximum request body size 65536 exceeded[^.]*\.", told["message"])


@pytest.mark.covers("F31", "F6")
def test_a_site_fails_after_five_consecutive_refusals(tmp_path: Path) -> None:
    """After five refused updates in a row, the status says that the site has failed."""
    # An accepted update starts a new count, a further join does not. The count of all refused updates continues after a
    # restart.

    def states_after(site: WireSite, count: int) -> list[str]:
        """The site's state at the server after each of so many refused updates."""
        states = []
        for _ in range(count):
            refused(site)
            states += [worker.state for worker in server.status().workers]
        return states

    with serve(tmp_path, sites=1, **COUNTED) as server:
        site = WireSite(server.url)
        assert "it needs 1 update (rounds.min_sites)" in refused(site)
        assert states_after(site, 3) == ["alive"] * 3
        assert "5 updates in a row were refused; check" in refused(site), "the last that the site hears"
        assert [worker.state for worker in server.status().workers] == ["failed"]
        assert server.status().refused == 5
        # to join again starts no new count: the next refusal is one too many
        assert states_after(WireSite(server.url), 1) == ["failed"]
        # an accepted update does: it is the updates in a row that count
        site = WireSite(server.url)
        site.train().submit()
        assert states_after(site, 5) == ["alive"] * 4 + ["failed"]
        assert server.status().refused == 11
    with serve(tmp_path, sites=1, **COUNTED) as server:
        assert server.status().refused == 11, "counted over restarts, too"


@pytest.mark.covers("F31")
def test_a_worker_ends_after_five_refusals_in_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker ends with an error after five refused updates in a row."""
    # Here three updates are refused, one is accepted, and five more are refused, so that the worker trains nine times.
    nan, trained = float("nan"), 0
    values = iter([nan] * 3 + [0.0] + [nan] * 5)

    def work() -> None:
        nonlocal trained
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                model = fl_round.load_into(nn.Linear(2, 2))
                nn.init.constant_(model.weight, next(values))
                trained += 1
                fl_round.submit(model)

    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        with pytest.raises(UpdateRefused, match="weight contains NaN or Inf"):
            work()
        assert (trained, server.status().refused) == (9, 8)
    said = [record.message for record in caplog.records if record.name == "atoll.server"]
    assert sum("a: update refused: weight contains NaN or Inf" in line for line in said) == 8


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openapi")
    # no heartbeat timeout: workers that schemathesis makes up come and go as it likes
    options = {"network.heartbeat_interval_s": 0, "network.heartbeat_timeout_s": 0, "rounds.sites": 10_000}
    with plain_server(folder, nn.Linear(2, 2), **options) as server:
        yield server.url


@pytest.fixture(scope="module")
def api(url: str) -> object:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


def few_cases(most: int) -> settings:
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.covers("F38", "F39")
@schema.parametrize()
@few_cases(4)
def test_every_answer_is_documented(case: schemathesis.Case) -> None:
    """Every answer of the server to generated requests is one that `/openapi.json` documents."""
    require_documented(case)


@pytest.mark.long
@schema.parametrize()
@few_cases(24)
def test_every_answer_to_many_requests_is_documented(case: schemathesis.Case) -> None:
    """Every answer of the server to many generated requests is one that `/openapi.json` documents."""
    require_documented(case)


def require_documented(case: schemathesis.Case) -> None:
    # a made-up lease, ticket or version is well-formed and still refused (409, 410): that is not a fault
    case.call_and_validate(timeout=30.0, excluded_checks=[positive_data_acceptance])


def test_every_problem_code_has_an_http_status() -> None:
    """Each error code that an operation of the HTTP interface may answer has an HTTP status."""
    from atoll.protocol.openapi import OPERATIONS, STATUS_OF

    assert {code for operation in OPERATIONS for code in operation.problems} <= STATUS_OF.keys()


def test_the_openapi_document_defines_all_used_schemas(url: str) -> None:
    """`/openapi.json` defines exactly the schemas that it refers to. Each operation has its own id."""
    _, document = get(url, "/openapi.json")
    referred = set(re.findall(r"'#/components/schemas/(\w+)'", str(document)))
    assert referred | {"Problem"} == set(document["components"]["schemas"])
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names)) >= len(document["paths"])
