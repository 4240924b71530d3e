"""What the page asks of a server: its files, the stream of events, the settings with their sources; headers of each."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.requests import get
from kit.world import World

import atoll
from atoll.protocol.routes import EVENTS
from atoll.server.http.page_files import page_files
from atoll.testing.run import wait_until

START = {"w": torch.zeros(2)}
FOLDER = Path(atoll.__file__).parent / "server" / "http" / "page"


def headers_of(world: World, path: str, **sent: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(world.url.rpartition(":")[2]), timeout=30)
    connection.request("GET", path, headers=sent)
    reply = connection.getresponse()
    return reply.status, dict(reply.getheaders()), reply.read()


class Stream:
    """A stream of events that is read in a thread, until it ends."""

    def __init__(self, world: World, after: int = 0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", int(world.url.rpartition(":")[2]), timeout=30)
        self._connection.request("GET", f"{EVENTS}?after={after}", headers={"Accept": "text/event-stream"})
        self.reply = self._connection.getresponse()

    def pages(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The id and the content of each message."""
        number = 0
        for line in self.reply:
            if line.startswith(b"id: "):
                number = int(line[4:])
            elif line.startswith(b"data: "):
                yield number, json.loads(line[6:])


def test_page_files_have_strict_security_headers(tmp_path: Path) -> None:
    """Each file of the page allows only scripts of this server, and no file tells the version of a library."""
    with World(tmp_path, START, "a") as world:
        for path in ("/", *(f"/page/{name}" for name in page_files())):
            status, headers, body = headers_of(world, path)
            assert status == 200, path
            assert body == page_files()[path.removeprefix("/page/") if path != "/" else "index.html"]
            assert headers["Content-Security-Policy"].startswith("default-src 'self'; ")
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-cache"
            assert "Server" not in headers


@pytest.mark.parametrize(
    "name", ["absent.js", "..%2Fapp.py", "%2e%2e%2fgate.py", "uplot.js.gz", "\u00e9.js", "x" * 3000]
)
def test_unknown_page_files_give_404(tmp_path: Path, name: str) -> None:
    """The server answers 404 to requests for page files that do not exist or lie outside the page's folder."""
    with World(tmp_path, START, "a") as world:
        status, headers, body = headers_of(
            world, f"/page/{name}".encode().decode("latin-1").replace("\u00c3\u00a9", "%C3%A9")
        )
        assert (status, json.loads(body)["code"]) == (404, "not_found")
        assert "Server" not in headers


def test_the_page_is_small_and_self_contained() -> None:
    """The page takes at most 90 kB, 50 kB compressed. It has no inline script or style, and loads nothing from another
    host.
    """
    nbytes = sum(path.stat().st_size for path in FOLDER.iterdir())
    assert nbytes <= 90_000
    assert sum(len(gzip.compress(content)) for content in page_files().values()) <= 50_000
    html = page_files()["index.html"].decode()
    assert " style=" not in html
    assert "<style" not in html
    assert html.count("<script") == html.count("<script src=")
    own = b"".join(content for name, content in page_files().items() if not name.startswith(("uplot", "icon")))
    assert b"http://" not in own
    assert b"https://" not in own
    assert b"innerHTML" not in own


def test_uplot_is_the_released_file() -> None:
    """The page's chart library has the digest of the file that its authors released."""
    # uPlot 1.6.32, dist/uPlot.iife.min.js, of the npm registry.
    assert hashlib.sha256(page_files()["uplot.js"]).hexdigest() == (
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    )
    assert b"MIT License" in page_files()["uplot-licence.txt"]


def test_a_stream_has_each_event_once(tmp_path: Path) -> None:
    """A stream of events has each event once and ends with the run. A second stream can resume in the middle."""
    with World(tmp_path, START, "ab", rounds=2) as world:
        stream = Stream(world)
        assert stream.reply.getheader("Content-Type") == "text/event-stream"
        found = list[tuple[int, dict[str, Any]]]()
        reading = threading.Thread(target=lambda: found.extend(stream.pages()))
        reading.start()
        world.rounds(1.0, 1, 2)
        world.finish()
        reading.join(30)
        assert not reading.is_alive()
    events = [event for _, page in found for event in page["events"]]
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    assert [number for number, page in found] == [page["events"][-1]["number"] for _, page in found]
    assert {"round ended", "run finished"} <= {event["what"] for event in events}
    assert all(event["send_seconds"] > 0 for event in events if event["what"] == "update accepted")


def test_a_stream_resumes_after_a_given_event(tmp_path: Path) -> None:
    with World(tmp_path, START, "ab", rounds=9) as world:
        world.rounds(1.0, 1)
        world.wait(1)
        newest = get(world.url, f"{EVENTS}?after=0")[1]["newest"]
        _, page = next(Stream(world, newest - 3).pages())
        assert [each["number"] for each in page["events"]] == [newest - 2, newest - 1, newest]
        assert get(world.url, f"{EVENTS}?last=3")[1]["events"] == page["events"]
        status, _, body = headers_of(world, f"{EVENTS}?after={newest + 1}", Accept="text/event-stream")
        assert (status, json.loads(body)["code"]) == (410, "gone")


def test_the_number_of_streams_is_limited(tmp_path: Path) -> None:
    """The server refuses one more stream of events than allowed, and accepts a new one when another has been closed."""
    with World(tmp_path, START, "a", **{"limits.event_streams": 8}) as world:  # of which an address gets 2
        streams = [Stream(world), Stream(world)]
        status, _, body = headers_of(world, EVENTS, Accept="text/event-stream")
        assert (status, json.loads(body)["code"]) == (429, "busy")
        streams[0]._connection.close()
        streams[0].reply.close()
        world.join("a")  # an event: the server finds that the client has gone
        wait_until(lambda: Stream(world).reply.status == 200, "room for a stream", 20)


def test_a_large_round_is_streamed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of a round with many sites is streamed in several parts, which together have all sites."""
    monkeypatch.setattr("atoll.store.event_pages.PAGE_BYTES", 1500)
    names = [f"site-{number}" for number in range(9)]
    with World(tmp_path, START, names, rounds=9) as world:
        world.rounds(1.0, 1)
        world.wait(1)
        sites = list[str]()
        for number, page in Stream(world).pages():
            for event in page["events"]:
                if event["what"] == "round ended":
                    sites += [each["site"] for each in event["summary"]["sites"]]
                    assert number == page["events"][-1]["number"] - (page["within"] > 0)
            if len(sites) == len(names):
                break
        assert sites == names


def test_the_settings_request_shows_sources(tmp_path: Path) -> None:
    """The server's list of settings says for each one where its value comes from: the program, the algorithm or a
    default.
    """
    with World(tmp_path, START, "ab", rounds=7) as world:
        found = {each["key"]: each for each in get(world.url, "/v1/settings")[1]["settings"]}
    assert found["rounds.total"] == {"key": "rounds.total", "value": "7", "source": "the program"}
    assert found["aggregation.reducer"]["source"] == "default of fedavg"
    assert found["network.idle_timeout_s"]["source"] == "default"
