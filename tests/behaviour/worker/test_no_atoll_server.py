"""Another web server at the address: that is said at once, with the address, whatever it answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery
from torch import nn

import atoll
from atoll.errors import PeerError
from atoll.testing.run import status

ANSWERS = {
    "not found": (404, "text/html", b"<h1>Not Found</h1>"),
    "nothing": (404, "text/html", b""),
    "a page": (200, "text/html", b"<!doctype html><title>Router</title>"),
    "a login": (401, "text/plain", b"login, please"),
    "elsewhere": (301, "text/html", b"<h1>Moved</h1>"),
    "another interface": (404, "application/json", b'{"detail": "Not Found"}'),
    "a list": (200, "application/json", b"[]"),
    "failed": (500, "text/html", b"oops"),
}


@pytest.fixture(params=ANSWERS.values(), ids=ANSWERS)
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    status, kind, body = request.param

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if status == 301:
                self.send_header("Location", "https://elsewhere.example/")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()
        thread.join()


@pytest.mark.covers("X3")
def test_scripts_name_the_address_where_no_atoll_server_is(address: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for take_part in (
        lambda: atoll.join(address, site="a", folder=tmp_path),
        lambda: atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), server=address, site="a").start(),
        lambda: status(address),
    ):
        with pytest.raises(PeerError) as refused:
            take_part()
        assert type(refused.value) is PeerError, refused.value
        assert address in refused.value.message


@pytest.mark.covers("X3")
@pytest.mark.parametrize("arguments", [("status", "--server"), ("worker", "--server")], ids=["status", "worker"])
def test_commands_name_the_address_where_no_atoll_server_is(
    nursery: Nursery, tmp_path: Path, address: str, arguments: tuple[str, ...]
) -> None:
    log, begun = tmp_path / "log", tmp_path / "begun"
    command = () if arguments[0] == "status" else ("--", "touch", str(begun))
    ended = nursery.start("atoll", *arguments, address, *command, cwd=tmp_path, log=log)
    assert ended.wait(60.0) == PeerError.exit_code
    assert f"no Atoll server at {address}" in log.read_text()
    assert not begun.exists()
