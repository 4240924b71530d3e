"""A run folder that is moved while no server runs goes on at its new place."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.processes import Nursery, free_port
from kit import FederatedSites, write_run_file

FLOW = """
from pathlib import Path


def first(controller):
    with (Path(__file__).parent / "ran").open("a") as file:
        file.write("x")
"""


@pytest.mark.parametrize("target", ["flow.py:first", "parts/flow.py:first"])
def test_a_moved_run_folder_goes_on_behind_the_workflow_that_has_ended(
    tmp_path: Path, nursery: Nursery, target: str
) -> None:
    port, before, after = free_port(), tmp_path / "before", tmp_path / "elsewhere" / "after"
    flow = before / target.partition(":")[0]
    flow.parent.mkdir(parents=True)
    flow.write_text(FLOW)
    write_run_file(
        before,
        **{
            "network.port": port,
            "rounds.total": 1,
            "rounds.sites": 1,
            "workflow.steps": [{"path": target}, {"kind": "train"}],
        },
    )
    first = nursery.start("atoll", "server", "run.toml", cwd=before, failpoints="workflow.ended=kill")
    assert first.wait(60) == -9
    after.parent.mkdir()
    before.rename(after)
    second = nursery.start("atoll", "server", "run.toml", cwd=after)
    FederatedSites(f"http://127.0.0.1:{port}", tmp_path, ["a"]).join()
    assert second.wait(60) == 0
    assert (after / target.partition(":")[0]).with_name("ran").read_text() == "x"
    assert (after / "state" / "exports" / "model.safetensors").exists()
