"""What a server refuses to start with, and which requests it answers: one line with the remedy, and an exit code."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import EVERY_SITE_AND_ROUND, Result, Sites, serve_wide
from harness.processes import Nursery, free_port
from kit import FederatedSites, run_to_end, serve, write_run_file
from kit.servers import plain_server
from kit.tls import write_certificate
from kit.wire import WireSite

import atoll
from atoll.errors import AuthError, ConfigError, PortInUse, ServerUnreachable, StateLocked
from atoll.server import serve as server_module
from atoll.testing.run import status


def start(nursery: Nursery, folder: Path, *flags: str, **settings: object) -> tuple[int, str]:
    """Exit code of an `atoll server` that ends by itself, and all that it says after the word that it starts."""
    write_run_file(folder, **settings)
    process = nursery.start("atoll", "server", "run.toml", *flags, cwd=folder)
    code = process.wait(30)
    lines = process.output().strip().splitlines()
    return code, "\n".join(line for line in lines if "; loading PyTorch" not in line)


@pytest.mark.covers("F28")
def test_a_port_in_use_gives_exit_code_3(nursery: Nursery, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, output = start(nursery, tmp_path, **{"network.port": port})
    assert code == 3
    assert output == (
        f"atoll: Port {port} on 127.0.0.1 is in use. Stop the process that uses it, or choose another port with "
        "--port; 0: any free port."
    )


@pytest.mark.covers("F29")
@pytest.mark.parametrize("lock", ["there", "removed", "another file"])
def test_a_second_server_gives_exit_code_4(nursery: Nursery, tmp_path: Path, lock: str) -> None:
    """A second server on the same state directory ends with exit code 4, even if the lock file was removed or
    replaced.
    """
    with serve(tmp_path) as server:
        path = tmp_path / "state" / "lock"
        assert str(os.getpid()) in path.read_text()
        if lock != "there":
            path.unlink()
        if lock == "another file":
            path.write_text("process 1 on nowhere\n")
        code, output = start(nursery, tmp_path, **{"network.port": 0})
        assert (code, len(output.splitlines())) == (4, 1)
        assert output.startswith(f"atoll: The state directory {tmp_path / 'state'} is in use by ")
        assert lock != "there" or f"process {os.getpid()} on " in output
        assert output.endswith("Stop that server, or set another disk.state_dir for this one.")
        run_to_end(server, FederatedSites(server.url, tmp_path))
    with serve(tmp_path):  # the lock has ended with its server
        assert str(os.getpid()) in path.read_text()


@pytest.mark.covers("X3")
@pytest.mark.parametrize("export_dir", [None, "results"])
def test_a_new_run_replaces_no_older_exports(nursery: Nursery, tmp_path: Path, export_dir: str | None) -> None:
    """A new run refuses to start if it would replace another run's exports, and leaves these files unchanged.

    A second attempt is refused, too.
    """
    exports = Path(export_dir or "state/exports")
    (tmp_path / "state").mkdir(0o700)
    (tmp_path / exports).mkdir(exist_ok=True)
    files = {"metrics.jsonl": b'{"round": 1}\n', "model.safetensors": b"of another run"}
    for name, data in files.items():
        (tmp_path / exports / name).write_bytes(data)
    for _ in range(2):  # the first refusal must not leave what the second start takes for a run
        code, output = start(nursery, tmp_path, **{"network.port": 0, "disk.export_dir": export_dir})
        assert code == 2
        assert output == (
            f"atoll: A new run would replace metrics.jsonl, model.safetensors of another run in {tmp_path / exports}. "
            "Set another disk.export_dir, or move the old files away."
        )
    assert {path.name: path.read_bytes() for path in (tmp_path / exports).iterdir()} == files


@pytest.mark.covers("X3")
def test_a_continued_run_replaces_no_other_exports(tmp_path: Path) -> None:
    """A continued run refuses an export folder that holds the exports of another run.

    It accepts its own export folder, and a new one.
    """
    runs = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        with serve(folder, **{"disk.export_dir": folder / "results"}) as server:
            runs.append(server.status().run)
            FederatedSites(server.url, folder).join()
            server.run()
    one, other = tmp_path / "one/results", tmp_path / "other/results"
    files = {path: path.read_bytes() for path in other.iterdir()}
    words = f"{other} has the exports of run {runs[1][:8]}, which this run, {runs[0][:8]}, would replace"
    with pytest.raises(ConfigError, match=re.escape(words)), serve(tmp_path / "one", **{"disk.export_dir": other}):
        pass
    assert {path: path.read_bytes() for path in other.iterdir()} == files
    for folder in (one, tmp_path / "new"):
        with serve(tmp_path / "one", **{"disk.export_dir": folder}):
            assert (folder / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()


TOKEN = "correct-horse"


@pytest.fixture
def secured(tmp_path: Path) -> dict[str, Path]:
    """Settings of a run with a certificate and a token."""
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(TOKEN)
    return write_certificate(tmp_path, "127.0.0.1") | {"network.token_file": tmp_path / "token"}


@pytest.mark.covers("X2")
def test_a_run_works_over_tls_with_a_token(
    tmp_path: Path, secured: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_wide(tmp_path, **secured) as server:
        assert server.url.startswith("https://")
        monkeypatch.setenv("ATOLL_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
        asked: list[bool] = []
        run_to_end(server, Sites(server.url, tmp_path, during=lambda *_: asked.append(status(server.url).finished)))
    assert asked == [False] * len(EVERY_SITE_AND_ROUND)
    assert Result(tmp_path).counted() == EVERY_SITE_AND_ROUND


@pytest.mark.covers("F40", "X2")
def test_refuses_a_wrong_or_missing_token(
    tmp_path: Path, secured: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_wide(tmp_path, **secured) as server:
        monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
        with pytest.raises(AuthError, match=r"requires a token.*ATOLL_TOKEN"):
            atoll.join(server.url, site="a", folder=tmp_path / "workers")
        monkeypatch.setenv("ATOLL_TOKEN", "battery-staple")
        with pytest.raises(AuthError, match=r"no valid token\. The one in ATOLL_TOKEN is not the server's") as caught:
            atoll.join(server.url, site="a", folder=tmp_path / "workers")
        assert "battery-staple" not in str(caught.value)
        assert caught.value.exit_code == 8
        wrong = tmp_path / "wrong"
        wrong.touch(mode=0o600)
        wrong.write_text("battery-staple")
        monkeypatch.delenv("ATOLL_TOKEN")
        monkeypatch.setenv("ATOLL_TOKEN_FILE", str(wrong))
        with pytest.raises(AuthError, match=r"The one in the token file .*wrong.* is not the server's"):
            status(server.url)
        assert server.status().workers == []


@pytest.mark.covers("F40", "X2")
def test_refuses_a_certificate_of_another_authority(
    tmp_path: Path, secured: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site refuses a server whose certificate another authority has issued, before the site sends its token."""
    other = tmp_path / "other"
    other.mkdir()
    with serve_wide(tmp_path, **secured) as server:
        monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
        write_certificate(other)
        monkeypatch.setenv("ATOLL_TLS_CA", str(other / "ca.pem"))
        with pytest.raises(ServerUnreachable, match=r"cannot prove its identity.*ATOLL_TLS_CA"):
            atoll.join(server.url, site="a", folder=tmp_path / "workers")


NO_FOLDER = "atoll: The folder {folder}/file/out cannot be made (Not a directory). Use a %s that this user may write."
NO_TOKEN = (
    "which other machines can reach, but trust.required is false, and the server has no token",
    "set network.insecure = true",
)
ENDINGS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "state folder": ({"disk.state_dir": "file/out"}, 7, (NO_FOLDER % "disk.state_dir",)),
    "export folder": ({"disk.export_dir": "file/out"}, 7, (NO_FOLDER % "disk.export_dir",)),
    "module": ({"model.source": "no_such_module:build"}, 2, ("no_such_module",)),
    "function": ({"model.source": "kit_model:missing"}, 2, ("missing",)),
    "optimizer": ({"algorithm.outer_optimizer.name": "sdg"}, 2, ("sdg", "Did you mean 'sgd'?")),
    "algorithm": ({"algorithm.name": "fedavgg"}, 2, ("fedavgg", "fedavg")),
    "key": ({"rounds.site": 3}, 2, ("run.toml", "rounds.site", "Did you mean rounds.sites?")),
    "other machines": ({"network.host": "0.0.0.0", "trust.required": False}, 2, NO_TOKEN),
    "not insecure": (
        {"network.host": "0.0.0.0", "network.insecure": False, "trust.required": False},
        2,
        NO_TOKEN,
    ),
    "mode of a token": ({"network.token_file": "{folder}/wide"}, 2, ("has mode 0644: others can read it",)),
    "folder as a token": (
        {"network.token_file": "{folder}"},
        2,
        ("The token file '{folder}' is a folder. Give the path of a file with mode 0600.",),
    ),
    # a mended start would continue the run, and not read its own initial model
    "certificate": ({"network.tls_cert": "{folder}/token"}, 2, ("cannot be used with the TLS key",)),
}
"""Settings of a run with TLS and a token, the exit code of a server that cannot start with them, and its one line."""


@pytest.mark.covers("X2", "X3")
@pytest.mark.parametrize("case", ENDINGS)
def test_a_wrong_start_gives_one_line_and_an_exit_code(
    nursery: Nursery, tmp_path: Path, secured: dict[str, Path], case: str
) -> None:
    """A server with wrong settings ends with one line and the matching exit code. It starts no run and prints no
    token.
    """
    (tmp_path / "file").write_text("in a file, no folder can be made")
    (tmp_path / "wide").write_text(TOKEN)
    (tmp_path / "wide").chmod(0o644)
    settings, code, words = ENDINGS[case]
    given = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in settings.items()}
    found, output = start(nursery, tmp_path, **{"network.port": 0} | ({} if words is NO_TOKEN else secured) | given)
    assert (found, len(output.splitlines())) == (code, 1), output
    assert [word for word in words if word.format(folder=tmp_path) not in output] == []
    assert TOKEN not in output
    assert case == "export folder" or not (tmp_path / "state").exists()


def test_logs_that_the_default_port_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the default port is in use, the server listens on another port and logs this."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        usual = taken.getsockname()[1]
        monkeypatch.setattr(server_module, "DEFAULT_PORT", usual)
        with plain_server(tmp_path, {"w": torch.ones(2)}, **{"network.port": None}) as server:
            assert f"port {usual} cannot be used, so this server listens on {server.port}" in caplog.messages


def test_a_continued_run_keeps_its_port(tmp_path: Path) -> None:
    """A server that continues a run without a port in its settings uses the run's earlier port.

    If another program uses this port, the server refuses to start, since the sites wait there.
    """
    model = {"w": torch.ones(2)}
    with plain_server(tmp_path, model, **{"network.port": 0}) as server:
        url, port = server.url, server.port
        WireSite(url, "a")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(PortInUse, match=f"Sites of this run wait at {url}. Stop the process") as caught:
            plain_server(tmp_path, model, **{"network.port": None}).start()
        assert f"Port {port} on 127.0.0.1 is in use." in str(caught.value)
    with plain_server(tmp_path, model, **{"network.port": None}) as server:
        assert server.url == url


@pytest.mark.parametrize("port", [None, "same"])
def test_a_second_server_is_refused_by_the_lock(tmp_path: Path, port: str | None) -> None:
    """A second server on the same state directory is refused because the directory is locked, not because the port is
    in use.
    """
    model = {"w": torch.ones(2)}
    with plain_server(tmp_path, model, **{"network.port": 0}) as server:
        chosen = server.port if port == "same" else None
        with pytest.raises(StateLocked, match=rf"is in use by process {os.getpid()}"):
            plain_server(tmp_path, model, **{"network.port": chosen}).start()


@pytest.mark.covers("L13", "X4")
def test_a_moved_server_names_waiting_sites(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that continues its run at another address warns of the sites that wait at the old address."""
    # The log and the status name these sites until they have asked again. A site that has left does not wait.
    model = {"w": torch.ones(2)}
    silent = {"network.heartbeat_timeout_s": 0, "network.heartbeat_interval_s": 0}
    with plain_server(tmp_path, model, sites=2, **silent) as server:
        old = server.url
        a = WireSite(old, "a")
        b = WireSite(old, "b")
        WireSite(old, "c").leave()
        for site in (a, b):
            site.ticket()
    settings = silent | {"network.port": free_port()}
    with plain_server(tmp_path, model, sites=2, **settings) as server:
        (told,) = [line for line in caplog.messages if "before; sites that wait there" in line]
        assert told.startswith(f"the run was served at {old} before; sites that wait there (a and b) do not find")
        assert f"listens on {server.url}. Start them again with this address" in told
        waits = f"no request since the server restarted elsewhere than at {old}: a, b"
        assert server.status().fragments[0].reason.endswith(waits)
    caplog.clear()
    with plain_server(tmp_path, model, sites=2, **settings):
        assert "sites that wait there" not in caplog.text
