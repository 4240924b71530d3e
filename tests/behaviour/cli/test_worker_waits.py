"""`atoll worker` while its server does not answer: it prints why, and again when the reason changes."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.processes import Nursery, free_port, wait_until
from kit.processes import command

from atoll.errors import ServerUnreachable


@contextmanager
def closes_every_connection(port: int) -> Iterator[None]:
    """What a TLS server does with plain HTTP."""
    with socket.create_server(("127.0.0.1", port)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.recv(65536)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def words(address: str) -> tuple[str, ...]:
    return ("worker", "--server", address, "--", "touch", "ran")


@pytest.mark.covers("X3", "X4")
@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_prints_the_cause_and_the_advice_once(host: str, nursery: Nursery, tmp_path: Path) -> None:
    """The reason is printed when it waits, and when it gives up: both have the advice."""
    outcome = command(nursery, tmp_path, *words(f"http://{host}:{free_port()}"), ATOLL_GIVE_UP_S="0.3")
    assert outcome.returncode == ServerUnreachable.exit_code
    waits, gives_up = outcome.stderr.splitlines()
    assert gives_up.removeprefix("atoll: ") in waits
    assert not (tmp_path / "ran").exists()


@pytest.mark.covers("X3", "X4")
def test_prints_again_when_the_cause_changes(nursery: Nursery, tmp_path: Path) -> None:
    port = free_port()
    process = nursery.start("atoll", *words(f"http://127.0.0.1:{port}"), cwd=tmp_path, env={"ATOLL_GIVE_UP_S": "0"})
    wait_until(lambda: len(process.output().splitlines()) == 1, "the first cause")
    with closes_every_connection(port):
        wait_until(lambda: len(process.output().splitlines()) == 2, "the second cause")
    process.send(signal.SIGTERM)
    process.wait()
    first, second, *_ = process.output().splitlines()
    assert "refused" in first
    assert "https://" in second


def test_prints_the_same_cause_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from atoll.cli import worker

    monkeypatch.setattr(worker, "REPEAT_S", 0.0)
    monkeypatch.setattr(worker, "SERVER_PAUSE_S", 0.05)
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.3")
    with pytest.raises(ServerUnreachable):
        worker._require_server(f"http://127.0.0.1:{free_port()}", [])
    assert len(capsys.readouterr().err.splitlines()) > 1
