"""One server a state directory, whatever becomes of the file that names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, exported, serve, tensors_digest, write_run_file

from atoll.errors import StateLocked


@pytest.mark.covers("F29")
@pytest.mark.parametrize("lock", ["there", "removed", "another file"])
def test_refuses_a_second_server_on_a_state_directory(tmp_path: Path, lock: str) -> None:
    with serve(tmp_path) as server:
        path = tmp_path / "state" / "lock"
        assert str(os.getpid()) in path.read_text()
        if lock != "there":
            path.unlink()
        if lock == "another file":
            path.write_text("process 1 on nowhere\n")
        with pytest.raises(StateLocked), serve(tmp_path):
            pass
        FederatedSites(server.url, tmp_path).join()
    with serve(tmp_path):  # the lock has ended with its server
        assert str(os.getpid()) in path.read_text()


@pytest.mark.covers("F29")
def test_a_second_process_without_the_lock_file_ends_with_its_exit_code(tmp_path: Path, nursery: Nursery) -> None:
    with ForkedServer(nursery, tmp_path) as server:
        wait_until(lambda: "listening on" in server.log.read_text(), "the server")
        (tmp_path / "state" / "lock").unlink()
        write_run_file(tmp_path, **{"network.port": 0})
        second = nursery.start("atoll", "server", "run.toml", cwd=tmp_path, log=tmp_path / "second.log")
        assert second.wait(60) == 4
        sites = FederatedSites(server.url, tmp_path)
        sites.join()
        wait_until((tmp_path / "state/exports/model.safetensors").exists, "the result")
    assert tensors_digest(exported(tmp_path))
