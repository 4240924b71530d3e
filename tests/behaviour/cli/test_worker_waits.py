"""`atoll worker` while its server does not answer: it prints why, and again when the reason changes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness.processes import free_port, wait_until

from atoll.cli import worker
from atoll.errors import ServerUnreachable


def waits(address: str, monkeypatch: pytest.MonkeyPatch, give_up_s: str = "0.3") -> ServerUnreachable:
    monkeypatch.setenv("ATOLL_GIVE_UP_S", give_up_s)
    monkeypatch.setattr(worker, "SERVER_PAUSE_S", 0.05)
    with pytest.raises(ServerUnreachable) as ended:
        worker._require_server(address, [])
    return ended.value


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


@pytest.mark.covers("X3", "X4")
@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_prints_the_cause_and_the_advice_once(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = waits(f"http://{host}:{free_port()}", monkeypatch)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.message in line
    assert error.remedy in line


@pytest.mark.covers("X3", "X4")
def test_prints_again_when_the_cause_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, lines = free_port(), list[str]()
    told: list[int] = []
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0")
    monkeypatch.setattr(worker, "SERVER_PAUSE_S", 0.05)

    def printed(count: int) -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return len(lines) >= count

    def wait() -> None:
        with pytest.raises(ServerUnreachable):
            worker._require_server(f"http://127.0.0.1:{port}", told)

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        wait_until(lambda: printed(1), "the first cause")
        with closes_every_connection(port):
            wait_until(lambda: printed(2), "the second cause")
    finally:
        told.append(15)
        waiting.join(30)
    assert "refused" in lines[0]
    assert "https://" in lines[1]


def test_prints_the_same_cause_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "REPEAT_S", 0.0)
    waits(f"http://127.0.0.1:{free_port()}", monkeypatch)
    assert len(capsys.readouterr().err.splitlines()) > 1
