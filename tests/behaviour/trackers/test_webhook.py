"""The webhook: a real HTTP server hears of the end, the failure and the stall of a run, and cannot hold it up."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.local_run import LocalRun
from kit.world import World

from atoll.config import Settings
from atoll.errors import ConfigError
from atoll.server.coordinator import tracker_threads
from atoll.server.http import webhook
from atoll.testing.run import free_port, wait_until

START = {"w": torch.zeros(2)}


class Hook:
    """What a webhook gets, and what it answers: the next of `answers`, then 204."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[int] = []
        self.hangs = threading.Event()
        self.hangs.set()
        self.url = ""


@contextmanager
def hook() -> Iterator[Hook]:
    heard = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.got.append({"path": self.path, **json.loads(body)})
            heard.headers.append(dict(self.headers))
            heard.hangs.wait(30)
            code = heard.answers.pop(0) if heard.answers else 204
            self.send_response(code)
            if code == 307:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    heard.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield heard
    finally:
        heard.hangs.set()
        server.shutdown()
        thread.join()
        server.server_close()


def run_with(folder: Path, url: str) -> World:
    """A run of a round, which has ended."""
    with World(folder, START, "a", rounds=1, **{"server.webhook": url, "run.name": "pilot"}) as world:
        world.rounds(1.0, 1)
        world.finish()
    return world


def test_a_webhook_reports_the_end_of_a_run(tmp_path: Path) -> None:
    """A webhook gets the run's name and id when the run ends, and nothing of the model. No log shows the path of its
    address.
    """
    with hook() as heard:
        world = run_with(tmp_path, f"{heard.url}/secret?key=hidden")
    ((got,), (headers,)) = heard.got, heard.headers
    assert got.pop("at").startswith("20")
    assert got == {
        "path": "/secret?key=hidden",
        "event": "run finished",
        "run": world.status.run,
        "name": "pilot",
        "text": "The run pilot has finished",
    }
    assert headers["Content-Type"] == "application/json"
    assert f"told the webhook at {heard.url}: run finished" in world.text
    assert "secret" not in world.text
    assert "hidden" not in world.text


def test_a_webhook_reports_a_failed_run(tmp_path: Path) -> None:
    """A webhook gets the reason of a failed run before the server ends."""

    def fails(controller: Any) -> None:
        raise ValueError("no cohort")

    with hook() as heard:
        with World(tmp_path, START, "a", workflow=fails, **{"server.webhook": heard.url}) as world:
            wait_until(lambda: bool(world.status.failed), "the failure")
        (got,) = heard.got
    assert got["event"] == "run failed"
    assert "no cohort" in got["text"]


async def test_a_webhook_reports_a_stalled_run_once(tmp_path: Path) -> None:
    """If no update arrives for `server.stall_s`, a webhook is told once what the run waits for, and again only after
    progress.
    """
    with hook() as heard:
        settings = {"rounds.sites": 2, "rounds.total": 3, "server.webhook": heard.url, "server.stall_s": 60.0}
        async with LocalRun(tmp_path, START, settings | {"network.heartbeat_timeout_s": 0.0}) as run:
            a, b = await run.join("a"), await run.join("b")
            opened = a.open_round()
            await run.submit(a, opened.ticket, {"w": torch.ones(2)})
            await run.advance(59)
            assert not heard.got
            await run.advance(2)
            await run.advance(600)
            opened = b.open_round()
            await run.submit(b, opened.ticket, {"w": torch.ones(2)})
            await run.advance(50)
        (got,) = heard.got
    assert got["event"] == "run stalled"
    assert "nothing has arrived for 61 s; it waits for b" in got["text"]


@pytest.mark.parametrize(("answers", "times"), [([503, 429], 3), ([404], 1), ([307], 1), ([500, 500, 500], 3)])
def test_a_webhook_is_retried_only_if_useful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[int], times: int
) -> None:
    """A message to a webhook is tried at most three times, and not again after a refusal or a redirect. The log reports
    the failure once.
    """
    monkeypatch.setattr(webhook, "PAUSE_S", 0.01)
    with hook() as heard:
        heard.answers = list(answers)
        world = run_with(tmp_path, f"{heard.url}/secret")
    assert [got["path"] for got in heard.got] == ["/secret"] * times
    if times == len(answers):
        assert f"the webhook failed, and may lack something from now on: OSError: {heard.url} cannot be told" in (
            world.text
        )
    assert "secret" not in world.text


def test_a_webhook_gets_the_password_of_its_address(tmp_path: Path) -> None:
    """The password in a webhook's address is sent as Basic authentication, and is in no log and no printed setting."""
    with hook() as heard:
        url = heard.url.replace("//", "//me:p%40ss@")
        world = run_with(tmp_path, url)
    assert heard.headers[0]["Authorization"] == f"Basic {base64.b64encode(b'me:p@ss').decode()}"
    assert "p%40ss" not in world.text
    assert "ss" not in repr(world.server.settings.server)
    assert "me:" not in world.server.settings.model_dump_json()


def test_a_hanging_webhook_delays_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a webhook hangs or nothing listens at its address, the run still ends with its result."""
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(webhook, "PAUSE_S", 0.01)
    with hook() as heard:
        heard.hangs.clear()
        world = run_with(tmp_path / "hanging", heard.url)
        assert "cannot be told (timed out)" in world.text
    world = run_with(tmp_path / "closed", f"http://127.0.0.1:{free_port()}/x")
    assert "Connection refused" in world.text
    assert world.result["w"].tolist() == [1.0, 1.0]


def test_an_endless_answer_does_not_keep_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a webhook's answer never ends, the server still ends `CLOSE_S` seconds after the run."""
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ended = threading.Event()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 204 ")
                while not ended.wait(0.05):
                    connection.sendall(b"x")

        thread = threading.Thread(target=answer)
        thread.start()
        world = run_with(tmp_path, f"http://127.0.0.1:{listening.getsockname()[1]}")
        ended.set()
        thread.join()
    assert "the webhook had not written everything when the server ended" in world.text
    assert world.result["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("address", ["ftp://host/x", "host/x", "", "http://", "file:///etc/passwd"])
def test_a_wrong_webhook_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.webhook: it is not an address"):
        Settings.build({"algorithm.name": "fedavg", "rounds.total": 1, "server.webhook": address})
