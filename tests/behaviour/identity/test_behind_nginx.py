"""A run behind nginx, which ends TLS and serves the run under a path: each site has a token of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.credentials import Trusted
from kit.nginx import needs_nginx, nginx
from kit.servers import DEFAULT_OUTER_OPTIMIZER, serve
from kit.sites import FederatedSites, Gate, run_to_end
from kit.tls import write_certificate
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.errors import AtollError
from atoll.protocol import routes
from atoll.testing.run import free_port, wait_until
from atoll.transport.credential_store import credential_at
from atoll.transport.enrolment import enrol
from atoll.transport.http_client import http_to

pytestmark = needs_nginx
PATH = "/fl/run1"


def small_model() -> nn.Module:
    """A model of 8 MB, whose parts are larger than what nginx lets pass by default, 1 MB."""
    return nn.Linear(2000, 1000)


def large_model() -> nn.Module:
    """A model of 72 MB: it has parts of 16 MiB."""
    torch.manual_seed(1)
    return nn.Linear(4000, 4500)


def barely_train(model: nn.Module, site: str, number: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * number + (site == "b"))


@contextlib.contextmanager
def run_behind_nginx(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], nn.Module] = small_model,
    changes: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[tuple[Trusted, str, Path]]:
    """A server with sites a and b, which have enrolled through nginx; its address there, and nginx's access log."""
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    write_certificate(folder)
    monkeypatch.setenv("ATOLL_TLS_CA", str(folder / "ca.pem"))
    port = free_port()
    url = f"https://localhost:{port}{PATH}"
    settings = {"trust.address": url, "rounds.sites": 2, "network.part_bytes": 2**24} | settings
    with (
        serve(folder, build(), **settings) as server,
        nginx(folder, port, server.port, **changes or {}) as log,
    ):
        at = Trusted(folder, server)
        for site in "ab":
            enrol(at.invite(site))
        yield at, url, log


def asked(log: Path, text: str) -> int:
    """How many requests nginx has passed on whose line has this text."""
    return len(re.findall(text, log.read_text()))


@pytest.mark.slow
def test_whole_run_behind_nginx_with_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites with tokens of their own take part through nginx: long polls, parts of 16 MiB, versions; as without it."""
    monkeypatch.setattr(routes, "LONG_POLL_S", 0.5)
    gate = Gate(2, "b")
    with run_behind_nginx(tmp_path, monkeypatch, large_model, **DEFAULT_OUTER_OPTIMIZER | {"rounds.total": 2}) as (
        at,
        url,
        log,
    ):
        own = credential_at(url, "a")
        assert own is not None
        assert own.note.kind == "token"
        sites = FederatedSites(
            url, tmp_path, "ab", build=large_model, train=barely_train, weights={"a": 1.0, "b": 1.0}, before=gate
        )
        gate.wait()
        before = asked(log, f"POST {PATH}{routes.TICKETS} ")
        wait_until(lambda: asked(log, f"POST {PATH}{routes.TICKETS} ") >= before + 3, "long polls of a", 60)
        gate.open()
        run_to_end(at.server, sites)
    assert set(sites.trained.values()) == {1}
    assert asked(log, rf"PUT {PATH}/\S+ 20\d 1677\d{{4}}\n") >= 4, "a part of 16 MiB of each site and round"
    expected = large_model()
    for number in (1, 2):
        for parameter in expected.parameters():
            parameter.data.add_(0.1 * number + 0.5)
    result = load_file(at.server.exports / "model.safetensors")
    torch.testing.assert_close(result, dict(expected.state_dict()))


def test_token_behind_nginx_is_that_of_one_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through nginx, the token of site a is refused for site b; a revoked one is refused at once."""
    with run_behind_nginx(tmp_path, monkeypatch) as (at, url, _):
        own = credential_at(url, "a")
        assert own is not None
        assert own.token is not None
        host, _, path = url.removeprefix("https://").partition("/")
        connection = connection_to(host, tmp_path)
        body = json.dumps({"protocol": routes.PROTOCOL, "site": "b"})
        shown = {"Authorization": f"Bearer {own.token.text}", "Content-Type": "application/json"}
        connection.request("POST", f"/{path}{routes.WORKERS}", body, shown)
        answer = connection.getresponse()
        assert answer.status == 403
        assert "is that of site 'a', but the request is for site 'b'" in json.loads(answer.read())["message"]
        connection.close()
        at.revoke("a")
        with contextlib.closing(http_to(url, site="a")) as to_server, pytest.raises(AtollError, match="was revoked"):
            to_server.reach(routes.RUN, timeout_s=10)


def connection_to(host: str, folder: Path) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    return http.client.HTTPSConnection(host, timeout=20, context=context)


def test_page_and_events_under_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page, each file that it names, the status, and the events as they happen come from below the path."""
    with run_behind_nginx(tmp_path, monkeypatch) as (at, url, _):
        host, _, path = url.removeprefix("https://").partition("/")
        connection = connection_to(host, tmp_path)

        def get(name: str, **headers: str) -> str:
            connection.request("GET", f"/{path}/{name}", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200, name
            return answer.read().decode()

        page = get("")
        files = re.findall(r'(?:src|href)="(page/[^"]+)"', page)
        assert len(files) >= 4
        for name in files:
            assert get(name)
        shown = {"Authorization": f"Bearer {at.token_in('reader')}"}
        assert json.loads(get(routes.STATUS[1:], **shown))["run"]
        connection.request("GET", f"/{path}{routes.EVENTS}", headers=shown | {"Accept": "text/event-stream"})
        events = connection.getresponse()
        assert events.headers["Content-Type"].startswith("text/event-stream")
        assert events.readline()
        connection.close()


def test_too_small_body_size_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nginx refuses a part as too large, the site's error names the gateway's limit, and the site ends."""
    with run_behind_nginx(tmp_path, monkeypatch, changes={"client_max_body_size": "1m"}, **{"rounds.sites": 1}) as (
        _,
        url,
        _,
    ):
        with atoll.join(url, site="a", folder=tmp_path / "w") as worker:
            model = small_model()
            fl_round = next(iter(worker))
            fl_round.load_into(model)
            with pytest.raises(AtollError, match="413") as raised:
                fl_round.submit(model)
    assert "client_max_body_size" in str(raised.value)
