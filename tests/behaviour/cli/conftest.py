"""A server of canned answers, and the command as users start it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from harness.processes import Nursery

from atoll.protocol import messages, routes, status_messages

ROOT = Path(__file__).parents[3]

RUN = messages.RunInfo(
    protocol=routes.PROTOCOL,
    run="r" * 32,
    name="canned",
    algorithm="fedavg",
    on_missed="reset",
    rounds=3,
    sync_every=0,
    schema_digest="0" * 64,
    schema_bytes=8,
    fragments=1,
    codec="none",
    part_bytes=65536,
    connections=1,
    heartbeat_interval_s=30,
    heartbeat_timeout_s=120,
    idle_timeout_s=60,
)

WORKER = status_messages.WorkerStatus(
    site="clinic-a",
    host="box",
    state="alive",
    doing="training",
    last_heartbeat_s=2.0,
    step=1250,
    steps_per_s=4.5,
    rounds=2,
    version=2,
    bytes_up=3_400_000,
    bytes_down=1_200_000_000,
    gradient_bytes=5_000_000_000,
    retries=1,
    metrics={"loss": 2.25},
)

STATUS = status_messages.Status(
    run="r" * 32,
    name="canned",
    algorithm="fedavg",
    policy="barrier",
    protocol=routes.PROTOCOL,
    epoch=1,
    rounds=3,
    uptime_s=200.0,
    model_bytes=4_000_000,
    fragments=[
        status_messages.FragmentStatus(
            fragment=0,
            version=2,
            phase="collecting",
            waiting_for=[status_messages.Missing(site="clinic-b", for_s=31.0)],
            reason="round 3 needs 2 updates",
        )
    ],
    workers=[
        WORKER,
        WORKER.model_copy(update={"site": "clinic-b", "state": "dead", "error": "no heartbeat for 120 s"}),
    ],
    history=[
        status_messages.RoundSummary(
            fragment=0,
            round=2,
            version=2,
            workers=["clinic-a", "clinic-b"],
            weights=[1.0, 3.0],
            metrics={"loss": 2.5},
            counts={"loss": 2},
            seconds=0.25,
            bytes_up=8_000_000,
        )
    ],
    bytes_up=16_000_000,
    bytes_down=24_000_000,
    deaths=1,
    durable_version=2,
)


class Canned:
    """Answers GET by path: (status, body). `asked` has the Authorization header of every request."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {
            routes.RUN: (200, RUN.model_dump_json()),
            routes.STATUS: (200, STATUS.model_dump_json()),
        }
        self.asked: list[str | None] = []
        canned = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                canned.asked.append(self.headers.get("Authorization"))
                status, body = canned.answers.get(self.path, (404, "nothing here"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def canned() -> Iterator[Canned]:
    server = Canned()
    thread = threading.Thread(target=server.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()
    thread.join()


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Outcome]


@pytest.fixture
def atoll_command(nursery: Nursery, tmp_path: Path) -> Command:
    """Run `atoll ARGS` in an empty folder, with further environment variables as keywords."""
    return partial(run_forked, nursery, tmp_path, "atoll")


@pytest.fixture
def script(nursery: Nursery, tmp_path: Path) -> Command:
    """Run a script of the project, by its path from the root, in an empty folder."""

    def run(path: str, *args: str) -> Outcome:
        return run_forked(nursery, tmp_path, str(ROOT / path), *args)

    return run


def run_forked(nursery: Nursery, folder: Path, *args: str, **environment: str) -> Outcome:
    with tempfile.TemporaryDirectory() as printed:
        log, errors = Path(printed) / "out", Path(printed) / "err"
        process = nursery.start(*args, cwd=folder, env={"COLUMNS": "120"} | environment, log=log, errors=errors)
        code = process.wait(100)
        return Outcome(code, log.read_text(), errors.read_text())
