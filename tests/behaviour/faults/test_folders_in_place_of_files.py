"""A folder lies where the server keeps a file of its own: one error names it, and the run goes on once it is away."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.processes import Nursery
from kit import FederatedSites, exported, serve, write_run_file

from atoll.errors import StoreError


@pytest.mark.parametrize(
    "name", ["audit.head", "exports/best.json", "exports/best.safetensors"], ids=["audit", "note", "best"]
)
def test_names_the_folder_and_goes_on_once_it_is_away(tmp_path: Path, name: str) -> None:
    settings = {"rounds.best_metric": "loss", "rounds.best_mode": "min", "rounds.total": 2}
    with serve(tmp_path, **settings):
        pass
    path = tmp_path / "state" / name
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(StoreError) as refused, serve(tmp_path, **settings):
            pass
        assert str(path) in str(refused.value)
        assert refused.value.remedy
    path.rmdir()
    with serve(tmp_path, **settings) as server:
        FederatedSites(server.url, tmp_path).join()
        server.run()
    assert path.is_file()
    assert exported(tmp_path)


def test_the_command_ends_with_the_code_of_a_store_that_cannot_be_used(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "state" / "audit.head").mkdir(parents=True)
    write_run_file(tmp_path, **{"network.port": 0})
    process = nursery.start("atoll", "server", "run.toml", cwd=tmp_path, log=tmp_path / "log")
    assert process.wait(60) == StoreError.exit_code
    assert "Traceback" not in process.output()
    assert "Exception ignored" not in process.output()
