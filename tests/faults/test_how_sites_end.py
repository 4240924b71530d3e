"""How a site ended, as the server reports it: while the run goes on, and in the summary of the whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import FederatedSites, ForkedServer, ForkedSite, serve

from atoll.testing.processes import Nursery, wait_until

FEDERATED = """
import sys
import atoll
from kit.models import build_model

with atoll.join() as worker:
    for fl_round in worker:
        fl_round.load_into(build_model())
        raise {end}
"""

DILOCO = """
import sys
import torch
import atoll
from kit.models import build_model

model = build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.DiLoCo(model, optimizer):
    raise {end}
"""

ENDS = [
    ("SystemExit(3)", 3, "failed", "3"),
    ("SystemExit('no data')", 1, "failed", "no data"),
    ("SystemExit(0)", 0, "left", ""),
    ("SystemExit()", 0, "left", ""),
    ("SystemExit(130)", 130, "left", ""),
    ("SystemExit(143)", 143, "left", ""),
    ("KeyboardInterrupt", 1, "left", ""),
]


@pytest.mark.covers("F43")
@pytest.mark.parametrize(("script", "algorithm"), [(FEDERATED, "fedavg"), (DILOCO, "diloco")], ids=["fedavg", "diloco"])
def test_a_script_that_exits_with_an_error_code_has_failed(
    nursery: Nursery, tmp_path: Path, script: str, algorithm: str
) -> None:
    with serve(tmp_path, algorithm=algorithm, num_workers=len(ENDS), codec="none") as server:
        for number, (end, code, _, _) in enumerate(ENDS):
            site = ForkedSite(nursery, tmp_path, server.url, f"s{number}", script.replace("{end}", end))
            process = site.start()
            if algorithm == "diloco":
                assert process.wait() == code, end
        wait_until(lambda: all(worker.state != "alive" for worker in server.status().workers), "their ends")
        found = {worker.site: worker for worker in server.status().workers}
    assert len(found) == len(ENDS)
    for number, (end, _, state, error) in enumerate(ENDS):
        assert (found[f"s{number}"].state, error in found[f"s{number}"].error) == (state, True), end


@pytest.mark.covers("F43")
def test_the_summary_names_a_site_that_failed_and_never_contributed(nursery: Nursery, tmp_path: Path) -> None:
    with ForkedServer(nursery, tmp_path, min_workers=1) as server:
        site = ForkedSite(nursery, tmp_path, server.url, "b", FEDERATED.replace("{end}", "SystemExit(3)"))
        failing = site.start()
        FederatedSites(server.url, tmp_path, ["a"]).join()
        assert failing.wait() == 3
        assert server.kept.wait() == 0
        said = server.kept.now.output()
    (summary,) = [line for line in said.splitlines() if " finished at version 3 after" in line]
    assert "1 failed" in summary
    assert "b was in 0 of 3 rounds" in summary
    assert "a was in" not in summary


def test_the_summary_says_nothing_of_rounds_where_every_site_was_in_all(nursery: Nursery, tmp_path: Path) -> None:
    with ForkedServer(nursery, tmp_path) as server:
        FederatedSites(server.url, tmp_path).join()
        assert server.kept.wait() == 0
        said = server.kept.now.output()
    (summary,) = [line for line in said.splitlines() if " finished at version 3 after" in line]
    assert "2 workers, 0 deaths, 0 updates refused" in summary
    assert "of 3 rounds" not in summary
    assert "failed" not in summary
