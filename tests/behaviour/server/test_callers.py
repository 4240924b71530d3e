"""Which callers may use which operation: every operation of the HTTP interface, asked by every kind of caller."""

from __future__ import annotations

import http.client
import json
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kit.requests import joined, send
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import Forbidden, StoreError
from atoll.protocol import routes

SITES_TOKEN = "the-token-of-this-run"
FILES = ("reader.token", "admin.token")

CALLERS = {
    "site": "join leave heartbeat request_ticket get_ticket put_part complete sit_out get_delta open_object "
    "put_object_part complete_object request_task answer_task get_swarm_plan work_in_swarm renew",
    "site admin": "get_run get_schema get_manifest get_version get_model_part",
    "site peer": "get_object get_object_data remove_object",
    "site reader admin": "get_status get_events get_site_curves get_settings get_metrics get_evaluation get_openapi "
    "get_model get_updates_table",
    "admin": "pause_run stop_run roll_back invite revoke get_sites",
    "stranger site peer reader admin": "get_health get_readiness get_page get_page_file get_authority enrol",
}
"""Kinds of callers → the operations that they may use, at a server with a token."""
MAY = {name: set(kinds.split()) for kinds, names in CALLERS.items() for name in names.split()}

KINDS = ("stranger", "site", "peer", "reader", "admin")
IN_MESSAGES = {"site": "a site", "peer": "a holder of an object's secret", "reader": "a reader", "admin": "the admin"}
IN_PATHS = {"digest": "0" * 64, "object": "0" * 32, "task": "0" * 32}


@dataclass
class Asked:
    """A server, and what each kind of caller sends to it."""

    port: int
    is_open: bool
    headers: Mapping[str, dict[str, str]]

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def document(self) -> dict[str, Any]:
        """The server's description of its operations."""
        status, body = self.send("GET", routes.OPENAPI, self.headers["admin"])
        assert status == 200, body
        return json.loads(body)


def token_in(folder: Path, name: str) -> str:
    return (folder / "state" / name).read_text().strip()


def others_at(asked: Asked, name: str) -> set[str]:
    """The callers that an open server takes, too: not for what only the admin may do."""
    return {"stranger", "peer"} if asked.is_open and MAY[name] != {"admin"} else set()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module", params=["with a token", "open"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder, is_open = tmp_path_factory.mktemp("callers"), request.param == "open"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_TOKEN", "" if is_open else SITES_TOKEN)
        server = plain_server(folder, nn.Linear(2, 1)).start()
    try:
        site = {} if is_open else bearer(SITES_TOKEN)
        found = Asked(server.port, is_open, {})
        body = json.dumps({"protocol": routes.PROTOCOL, "site": "a"}).encode()
        lease = json.loads(found.send("POST", routes.WORKERS, site, body)[1])["lease"]
        found.headers = {
            "stranger": {},
            "site": {routes.LEASE_HEADER: lease, **site},
            "peer": {routes.SECRET_HEADER: "0" * 32},
            "reader": bearer(token_in(folder, "reader.token")),
            "admin": bearer(token_in(folder, "admin.token")),
        }
        yield found
    finally:
        server.stop()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(name, method, path, description) of each operation of a document, with values for the path's parameters."""
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            given = re.sub(r"{(\w+)}", lambda name: IN_PATHS.get(name[1], "9"), path)
            yield described["operationId"], method.upper(), given, described


@pytest.mark.covers("X2", "X3")
@pytest.mark.parametrize("kind", KINDS)
def test_each_http_operation_accepts_only_its_callers(asked: Asked, kind: str) -> None:
    """Each operation of the HTTP interface answers 401 to an unknown caller, and 403 to a known one that may not use
    it.
    """
    # The 403 names the kinds of callers that may use the operation.
    wrong = []
    for name, method, path, _ in operations(asked.document()):
        status, body = asked.send(method, path, asked.headers[kind], b"[]")
        may = MAY[name] | others_at(asked, name)
        text = body.decode()
        if kind in may:
            is_right = status not in (401, 403)
        elif kind == "stranger":
            is_right = status == 401 and "requires a token" in text
        else:
            said = re.search("request is that of (.*), but only (.*) may send it", text)
            names = {IN_MESSAGES[each] for each in MAY[name]}
            is_right = status == 403 and said is not None and said[1] == IN_MESSAGES[kind]
            is_right = is_right and said is not None and set(said[2].split(" or ")) == names
        if not is_right:
            wrong.append(f"{name} for {kind}: {status} {text[:300]}")
    assert wrong == []


def test_the_openapi_document_names_the_callers_of_each_operation(asked: Asked) -> None:
    """The OpenAPI document says for each operation which kinds of callers may use it."""
    # A new operation needs a place in the table `CALLERS` of this test.
    document = asked.document()
    said = {
        name: {scheme for option in described["security"] for scheme in (option or {"stranger": []})}
        for name, _, _, described in operations(document)
    }
    assert said == {name: kinds | others_at(asked, name) for name, kinds in MAY.items()}
    assert set().union(*said.values()) - {"stranger"} == document["components"]["securitySchemes"].keys()


@pytest.mark.covers("X2")
def test_a_forged_or_missing_lease_is_refused(asked: Asked) -> None:
    """A heartbeat with a forged lease gets 409, and a heartbeat without a lease gets 400."""
    lease = asked.headers["site"][routes.LEASE_HEADER]
    forged = {**asked.headers["site"], routes.LEASE_HEADER: f"{lease.rpartition(':')[0]}:{'0' * 32}"}
    assert asked.send("POST", routes.HEARTBEAT, forged, b"{}")[0] == 409
    del forged[routes.LEASE_HEADER]
    assert asked.send("POST", routes.HEARTBEAT, forged, b"{}")[0] == 400


HOSTILE = [b"", b" ", b"x" * 4097, b"x" * 8000, "tök".encode(), b"\xff" * 40, b"a\rb", b"a\nb", b"a\0b", b"\r"]


@pytest.mark.covers("X2", "X3")
@pytest.mark.parametrize("sent", HOSTILE)
def test_a_malformed_token_is_refused(asked: Asked, sent: bytes) -> None:
    """The server answers a malformed token shortly and goes on. An open server treats a wrong token like a missing
    one.
    """
    head = b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer "
    with socket.create_connection(("127.0.0.1", asked.port), timeout=30) as raw:
        raw.sendall(head + sent + b"\r\n\r\n")
        answer = raw.makefile("rb").read()
    status = int(answer.split()[1])
    assert status in (400, 401) or (asked.is_open and status == 200)
    assert status == 200 or len(answer) < 2000
    assert asked.send("GET", routes.HEALTH, {})[0] == 200


@pytest.mark.covers("X2")
def test_keeps_tokens_until_their_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server keeps its tokens in private files and out of its log. If such a file is deleted or damaged, the next
    start writes a new token.
    """
    monkeypatch.setenv("ATOLL_TOKEN", SITES_TOKEN)

    def tokens() -> list[str]:
        with plain_server(tmp_path, nn.Linear(2, 1)) as server:
            found = [token_in(tmp_path, name) for name in FILES]
            for token in found:
                assert Asked(server.port, False, {}).send("GET", routes.STATUS, bearer(token))[0] == 200
        return found

    first = tokens()
    paths = [tmp_path / "state" / name for name in FILES]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
    assert len({*first, SITES_TOKEN}) == 3
    assert all(re.fullmatch("[A-Za-z0-9_-]{43}", token) for token in first)
    assert tokens() == first
    paths[0].unlink()
    second = tokens()
    assert second[0] != first[0]
    assert second[1] == first[1]
    assert "is damaged" not in caplog.text
    paths[1].write_text(second[1][:20])
    assert tokens()[1] not in (first[1], second[1][:20])
    assert f"{paths[1]} is damaged: writing another token" in caplog.text
    assert not any(token in caplog.text for token in (*first, *second))


@pytest.mark.covers("X2")
@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_a_token_file_is_refused(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("0" * 43)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).symlink_to(outside)
    with pytest.raises(StoreError, match=f"{name} cannot be used"):
        plain_server(tmp_path, nn.Linear(2, 1)).start()
    assert outside.read_text() == "0" * 43


@pytest.mark.covers("X3")
def test_the_error_names_the_token_that_a_site_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site that shows a reader's token is refused, and the error names the token that it needs.

    The log and the metrics contain the refusal.
    """
    monkeypatch.setenv("ATOLL_TOKEN", SITES_TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        monkeypatch.setenv("ATOLL_TOKEN", token_in(tmp_path, "reader.token"))
        with pytest.raises(
            Forbidden, match=r"that of a reader, but only a site or the admin .*the run's token"
        ) as caught:
            atoll.join(server.url, "a", folder=tmp_path / "a")
        assert caught.value.exit_code == 8
        assert server.status().workers == []
        metrics = Asked(server.port, False, {}).send("GET", routes.METRICS, bearer(SITES_TOKEN))[1].decode()
        assert 'atoll_refused_requests_total{reason="caller"} 1.0' in metrics
        assert 'atoll_refused_requests_total{reason="token"} 0.0' in metrics
    assert "refused a request from 127.0.0.1: The request is that of a reader, but only" in caplog.text


def test_a_readers_token_only_reads_on_open_servers(tmp_path: Path) -> None:
    """With the reader's token, a program may only read, even at a server that requires no token."""
    # Without a token, the program may do more.
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        reader, http = bearer(token_in(tmp_path, "reader.token")), Asked(server.port, True, {})
        assert [http.send("GET", path, reader)[0] for path in (routes.STATUS, routes.SCHEMA)] == [200, 403]
        assert http.send("GET", routes.SCHEMA, {})[0] == 200
        lease = joined(server.url, "a")
        assert send(server.url, "POST", routes.HEARTBEAT, b"{}", lease)[0] == 200
