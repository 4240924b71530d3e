"""A site without its server: it starts first, or the run ends while the site is stopped. It waits as long as
ATOLL_GIVE_UP_S says, and says so.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_world import QUICK, SiteProcess, lines, serve_wide
from harness.processes import Nursery, free_port, wait_until
from harness.proxy import Proxy
from kit import FederatedSites, diloco, run_to_end, serve

import atoll
from atoll.errors import ConfigError, ServerLost

AFTER_15_S = 7
"""Attempts that earlier were all that a site made."""


@pytest.mark.parametrize(
    "start",
    [
        lambda url, folder: atoll.join(url, site="a", folder=folder),
        lambda url, folder: diloco(url, folder).start(),
        lambda url, _: atoll.tasks(url, "a"),
    ],
    ids=["join", "diloco", "tasks"],
)
@pytest.mark.covers("L10")
def test_a_site_gives_up_after_atoll_give_up_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start: Callable[..., object]
) -> None:
    """A site whose server does not answer gives up after the time in ATOLL_GIVE_UP_S. The first log line names this
    variable.
    """
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.2")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerLost, match=url) as caught:
        start(url, tmp_path)
    assert caught.value.exit_code == 5
    said = [record.getMessage() for record in caplog.records if record.name == "atoll"]
    assert url in said[0]
    assert "ATOLL_GIVE_UP_S" in said[0]


@pytest.mark.covers("L10")
def test_a_site_waits_for_its_server_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, a site keeps trying to reach its server for much longer than 15 s, and then takes part."""
    from atoll.worker.session import session as session_module

    monkeypatch.setattr(session_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(session_module, "LONGEST_BACKOFF_S", 0.01)
    with serve(tmp_path, sites=1, rounds=1) as server, Proxy(server.port) as proxy:
        proxy.cut()
        sites = FederatedSites(proxy.url, tmp_path, ["a"])
        wait_until(lambda: len(proxy.moved_bytes) > 3 * AFTER_15_S, "further attempts")
        proxy.heal()
        run_to_end(server, sites)
    assert sites.trained == {("a", 1): 1}


@pytest.mark.covers("L10")
@pytest.mark.parametrize("loop", ["federated", pytest.param("diloco", marks=pytest.mark.long)])
def test_a_site_that_missed_the_end_gives_up(nursery: Nursery, tmp_path: Path, loop: str) -> None:
    """A site that was stopped while its run ended and the server shut down gives up when it continues."""
    # The error says where the final model is. A DiLoCo script goes on after its loop with the model that it has.
    algorithm = {"algorithm": "fedavg"} if loop == "federated" else {"algorithm": "diloco", "H": 2, "codec": "none"}
    short = {"ATOLL_GIVE_UP_S": "1.5", "ATOLL_MAX_SYNC_RETRIES": "0", "STEPS": "1000000"}
    with serve_wide(tmp_path, **QUICK, **algorithm, rounds=40, **{"rounds.min_sites": 1}) as server:
        a, b = (SiteProcess(nursery, tmp_path, server.url, site, loop).start(**short) for site in "ab")
        wait_until(lambda: len(list(lines(a))) > 4, "that a trains", 60)
        a.send(signal.SIGSTOP)
        assert b.wait(60) == 0
        server.run()
        assert server.status().history[-1].workers == ["b"]
        server.stop()
        a.send(signal.SIGCONT)
        code = a.wait(30)
    assert "has not answered for" in a.output()
    assert "If the run has ended, its model is in the server's exports." in a.output()
    if loop == "federated":
        assert code == ServerLost.exit_code == 5
    else:  # whose script goes on behind its loop, with the model that it has
        assert code == 0
        *_, last = lines(a)
        assert (last["over"], last["lost"]) == (False, True)
        assert "only this script's model contains them" in a.output()


def test_each_answer_restarts_the_give_up_time() -> None:
    """A site gives its server up after 24 hours of silence. Each answer of the server restarts this time."""
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


def test_a_wrong_atoll_give_up_s_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("ATOLL_GIVE_UP_S", wrong)
        with pytest.raises(ConfigError, match=f"ATOLL_GIVE_UP_S is '{wrong}'"):
            atoll.join("http://127.0.0.1:9", site="a", folder=tmp_path)


@pytest.mark.parametrize("runs", [True, False])
def test_logs_leaving_only_if_the_server_was_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, runs: bool) -> None:
    """A site logs that it has left the run only if the server could be told."""
    caplog.set_level("INFO", "atoll")
    with serve(tmp_path, sites=1, rounds=0) as server:
        worker = atoll.join(server.url, site="a", folder=tmp_path / "w")
        if not runs:
            server.stop()
        worker.leave()
    (line,) = [each for each in caplog.messages if "after sending" in each]
    assert line.startswith("a: left the run" if runs else "a: ended (the server does not answer, and was not told)")
