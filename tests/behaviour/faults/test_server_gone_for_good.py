"""A run ends, and its server with it, while a site is stopped: the site finds no server, and ends by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.processes import wait_until
from kit.models import wide_model
from kit.servers import new_server

import atoll
from atoll.errors import ConfigError, ServerLost

SCRIPT = str(Path(__file__).with_name("lost_worker.py"))


@contextmanager
def site(folder: Path, name: str, url: str, loop: str) -> Iterator[subprocess.Popen[bytes]]:
    """As a user starts it: what a script leaves uncaught decides its exit code."""
    env = os.environ | {"ATOLL_SERVER": url, "ATOLL_SITE": name, "ATOLL_DIR": str(folder / "w"), "LOOP": loop}
    env |= {"ATOLL_GIVE_UP_S": "1.5", "ATOLL_MAX_SYNC_RETRIES": "0"}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, SCRIPT], cwd=folder, env=env, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def said(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / f"{name}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"done"') and line.endswith("}")]


@pytest.mark.covers("L10")
@pytest.mark.parametrize("loop", ["federated", pytest.param("diloco", marks=pytest.mark.long)])
def test_a_site_that_was_stopped_meanwhile_ends_in_bounded_time(tmp_path: Path, loop: str) -> None:
    options: dict[str, Any] = {"algorithm.name": "fedavg" if loop == "federated" else "diloco", "diloco.sync_every": 2}
    options |= {
        "rounds.sites": 2,
        "rounds.min_sites": 1,
        "rounds.total": 40,
        "network.heartbeat_interval_s": 0.2,
        "network.heartbeat_timeout_s": 1.0,
    }
    with ExitStack() as stack:
        server = stack.enter_context(
            new_server(wide_model(), **{"network.port": 0, "disk.state_dir": tmp_path / "state"}, **options)
        )
        a, b = (stack.enter_context(site(tmp_path, name, server.url, loop)) for name in ("a", "b"))
        wait_until(lambda: len(said(tmp_path, "a")) > 2, "that a trains", 60)
        a.send_signal(signal.SIGSTOP)
        assert b.wait(60) == 0
        server.run()
        assert server.status().history[-1].workers == ["b"]
        server.stop()
        a.send_signal(signal.SIGCONT)
        code, told = a.wait(30), (tmp_path / "a.log").read_text()
    assert "has not answered for" in told
    assert "If the run has ended, its model is in the server's exports." in told
    if loop == "federated":
        assert code == ServerLost.exit_code == 5
    else:  # whose script goes on behind its loop, with the model that it has
        assert code == 0
        last = said(tmp_path, "a")[-1]
        assert (last["over"], last["lost"]) == (False, True)
        assert "only this script's model contains them" in told


def test_a_server_that_is_back_in_time_is_no_lost_one() -> None:
    from atoll.worker.session.session import OutageTimer

    now_s = 0.0
    silence = OutageTimer("http://there", lambda: now_s)
    silence.failed()
    now_s = 86399.0
    silence.failed()
    assert (silence.seconds, silence.is_too_long) == (86399.0, False)
    silence.answered()
    silence.failed()
    now_s += 86399.0
    assert not silence.is_too_long
    now_s += 1.0
    assert silence.is_too_long
    assert "http://there has not answered for 24 h 0 min" in str(silence.error())


def test_how_long_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("ATOLL_GIVE_UP_S", wrong)
        with pytest.raises(ConfigError, match=f"ATOLL_GIVE_UP_S is '{wrong}'"):
            atoll.join("http://127.0.0.1:9", site="a", folder=tmp_path)
