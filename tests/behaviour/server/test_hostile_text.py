"""What peers write is data: in logs, in status, on a terminal and in names nothing of it is obeyed or makes a line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit import build_model, joined, post, serve
from kit.manual_site import ManualSite
from kit.peers import Connection, Peer, Request
from kit.requests import get
from torch import nn

import atoll
from atoll.errors import AuthError, ConfigError

pytestmark = pytest.mark.covers("F39")

HOSTILE = {
    "escape": "\x1b[2J\x1b]0;owned\x07",
    "newline": "x\n09:31:10 round 9: version 9 from 9 updates",
    "carriage": "secret\rshown",
    "backspace": "evil\b\b\b\bgood",
    "c1": "\x9b31m",
    "delete": "a\x7fb",
    "bidi": "\u202egnp.exe\u2066\u200f",
    "separators": "a\u2028b\u2029c\x85d",
    "zero width": "a\u200b\ufeffb",
    "null": "a\x00b",
}


ALL = "".join(HOSTILE.values())


MARKUP = "[bold red]m[/bold red][link=http://evil.example]l[/link]"


def strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    return [value] if isinstance(value, str) else []


def on_terminal(url: str) -> str:
    """What `atoll status` writes to a terminal."""
    ours, theirs = pty.openpty()
    script = (
        "import sys; from atoll.cli.main import main; sys.argv = ['atoll', 'status', '--server', sys.argv[1]]; main()"
    )
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "4000", "PYTHONPATH": ":".join(sys.path)}
    shown = b""
    with subprocess.Popen([sys.executable, "-c", script, url], stdout=theirs, env=environment) as command:
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO: its last descriptor is closed
            while chunk := os.read(ours, 2**16):
                shown += chunk
    os.close(ours)
    assert command.returncode == 0
    return re.sub("\x1b\\[[0-9;]*m", "", shown.decode())  # styles of the table itself


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[atoll.Server]:
    """A server that waits for more sites than join; each test has a site of its own."""
    with serve(tmp_path_factory.mktemp("hostile"), sites=100) as server:
        yield server


def worker_of(server: atoll.Server, site: str) -> Any:
    return next(worker for worker in server.status().workers if worker.site == site)


@pytest.mark.parametrize("kind", [*HOSTILE, "all"])
def test_escapes_texts_of_sites(server: atoll.Server, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """The server escapes control characters in the hosts, labels, states, warnings, metrics and errors that sites
    send.
    """
    caplog.set_level(logging.DEBUG, "atoll")
    text, site = HOSTILE.get(kind, ALL), kind.replace(" ", "-")
    lease = joined(server.url, site, host=f"h{text}", labels={f"k{text[:40]}": f"v{text}"})
    beat = {"state": f"s{text}"[:64], "warnings": [f"w{text}"], "metrics": {f"m{text}": 1.0}}
    assert post(server.url, "/v1/heartbeat", beat, lease)[0] == 200
    worker = worker_of(server, site)
    told = [worker.host, worker.doing, *strings(dict(worker.labels)), *worker.metrics, *server.status().warnings]
    assert [each[0] for each in (worker.host, worker.doing, *worker.metrics)] == ["h", "s", "m"]
    assert post(server.url, "/v1/workers/leave", {"error": f"e{text}"}, lease)[0] == 204
    told += strings(get(server.url, "/v1/status")[1])
    assert all(each.isprintable() for each in told), told
    assert any("e" + text[:1] in each or "\\" in each for each in told)
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_cuts_a_long_hostile_text(server: atoll.Server) -> None:
    """A text of allowed length is not refused if escaping makes it longer: the server cuts it."""
    lease = joined(server.url, "long", host="\x1b" * 256, labels={"\x1b" * 64: "\x1b" * 256})
    assert post(server.url, "/v1/workers/leave", {"error": "\x00" * 2000}, lease)[0] == 204
    worker = worker_of(server, "long")
    assert worker.host == "\\x1b" * 64
    assert worker.labels == {"\\x1b" * 16: "\\x1b" * 64}
    assert worker.error == "\\x00" * 500


def test_plain_text_of_all_languages_stays_unchanged(server: atoll.Server) -> None:
    """The server does not escape names and texts in any language, only control characters."""
    labels = {"Ort": "Göttingen", "場所": "東京", "место": "Москва", "موقع": "القاهرة", "math": "∂L/∂θ ≤ 1e-3 \\ [x]"}
    joined(server.url, "plain", host="höst", labels=labels)
    worker = worker_of(server, "plain")
    assert worker.labels == labels
    assert worker.host == "höst"


def test_hostile_texts_of_scripts_are_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Control characters in the metrics, labels and the final error of a training script are escaped in the status and
    in the log.
    """
    caplog.set_level(logging.DEBUG, "atoll")
    model = build_model()
    with serve(tmp_path, sites=1) as server:
        with (
            contextlib.suppress(RuntimeError),
            atoll.join(server.url, site="a", folder=tmp_path / "w", labels={"l": ALL}) as worker,
        ):
            for fl_round in worker:
                fl_round.load_into(model)
                if fl_round.number == 2:
                    raise RuntimeError(f"boom {ALL}")
                fl_round.submit(model, metrics={f"loss{ALL}": 0.5})
        wait_until(lambda: server.status().history, "the round")
        status = server.status()
        assert "boom" in status.workers[0].error
        assert [key[:4] for key in status.history[0].metrics] == ["loss"]
        assert all(each.isprintable() for each in strings(json.loads(status.model_dump_json())))
    assert all(each.isprintable() for record in caplog.records for each in record.getMessage().split("\n")[:1])
    ours = [record for record in caplog.records if record.name.startswith("atoll.server")]
    assert all(record.getMessage().isprintable() for record in ours)


def test_requests_cannot_forge_log_lines(server: atoll.Server, caplog: pytest.LogCaptureFixture) -> None:
    """Line breaks and control characters in a request's path or user agent reach neither the log nor the answer
    unescaped.
    """
    caplog.set_level(logging.DEBUG, "atoll")
    post(server.url, "/v1/nothing", {})
    for path in ("/nothing%0a09:31:10%20round%209%1b%5b2J", "/v1/tickets/%0a%1b", "/v1/status%E2%80%AE"):
        request = urllib.request.Request(server.url + path, headers={"User-Agent": "evil\x1b[2J\x9b"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        if refused.value.headers.get_content_type() == "application/json":
            assert all(each.isprintable() for each in strings(json.loads(refused.value.read())))
    assert all(record.getMessage().isprintable() for record in caplog.records if record.name.startswith("atoll"))


def test_the_status_command_shows_hostile_text_as_text(tmp_path: Path) -> None:
    """`atoll status` shows terminal markup that a site sends as plain text, and writes its control characters
    escaped.
    """
    with serve(tmp_path) as server:
        lease = joined(server.url, "a", host=MARKUP)
        beat = {"state": f"{MARKUP}"[:64], "warnings": [MARKUP + ALL], "metrics": {MARKUP: 1.0}}
        post(server.url, "/v1/heartbeat", beat, lease)
        shown = on_terminal(server.url)
    assert f"warning: a: {MARKUP}" in shown
    assert f"{MARKUP} 1" in shown
    for line in shown.splitlines():
        assert line.isprintable(), line


def test_a_site_escapes_its_servers_texts(tmp_path: Path) -> None:
    """If a server's error answer has control characters, the error that the site raises shows them escaped."""

    def answer(connection: Connection, _: Request) -> None:
        problem = {"code": "auth", "message": f"m{ALL}", "remedy": f"r{ALL}"}
        connection.answer(401, json.dumps(problem).encode())

    with Peer.answering(answer) as peer, pytest.raises(AuthError) as refused:
        atoll.join(peer.url, site="a", folder=tmp_path)
    assert refused.value.message.startswith("m\\x1b")
    assert str(refused.value).isprintable()


HOSTILE_NAMES = {
    "slash": "a/b",
    "parent": "../a",
    "absolute": "/tmp/a",
    "backslash": "a\\b",
    "dot": ".",
    "dots": "..",
    "hidden": ".a",
    "option": "-a",
    "underscore": "_a",
    "space": "a b",
    "padded": " a",
    "newline": "a\n",
    "line within": "a\nb",
    "return": "a\r",
    "nul": "a\x00b",
    "escape": "a\x1b[31m",
    "colon": "a:1",
    "percent": "a%2fb",
    "quote": "a'b",
    "markup": "<b>a",
    "pipe": "a|b",
    "letter of Latin-1": "klinikä",
    "full-width letter": "\uff41",
    "Arabic digit": "\u0663",
    "zero width": "a\u200bb",
    "65 letters": "a" * 65,
}


FINE = ["a", "0", "A-1_b.c", "a..b", "a-", "a" * 64]


def test_the_server_refuses_hostile_site_names(tmp_path: Path) -> None:
    """A server answers 400 to a program that joins with an empty or hostile site name. Names that are fine are
    accepted.
    """
    with serve(tmp_path) as server:

        def join(site: str) -> int:
            """As a program that checks nothing would."""
            return post(server.url, "/v1/workers", {"protocol": 1, "site": site})[0]

        answers = {case: join(site) for case, site in {"empty": "", **HOSTILE_NAMES}.items()}
        assert answers == dict.fromkeys(answers, 400)
        assert server.status().workers == []
        assert [join(site) for site in FINE] == [200] * len(FINE)
        assert [worker.site for worker in server.status().workers] == sorted(FINE)


@pytest.mark.parametrize("site", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES.keys())
def test_the_library_refuses_hostile_site_names(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site with a hostile name is refused before the library sends any request or writes any file.

    No server is at the address.
    """
    nowhere, folder = "http://127.0.0.1:1", tmp_path / "workers"
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "1")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    starts: list[Callable[[], object]] = [
        lambda: atoll.join(nowhere, site=site, folder=folder),
        lambda: atoll.DiLoCo(model, optimizer, server=nowhere, site=site, folder=folder).start(),
        lambda: ManualSite(nowhere, site=site, folder=folder).join(),
        lambda: atoll.tasks(nowhere, site),
    ]
    if "\x00" not in site:  # no environment can hold it
        monkeypatch.setenv("ATOLL_SITE", site)
        starts.append(lambda: atoll.join(nowhere, folder=folder))
    for start in starts:
        with pytest.raises(ConfigError) as refused:
            start()
        assert repr(site) in str(refused.value)
    assert list(tmp_path.iterdir()) == []
