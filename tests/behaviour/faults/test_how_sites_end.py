"""How a site ended, as the server reports it: while the run goes on, and in the summary of the whole run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, ForkedSite, serve

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
    ("SystemExit(143)", 143, "failed", "SIGTERM"),
    ("KeyboardInterrupt", 1, "left", ""),
]


@pytest.mark.covers("F43")
@pytest.mark.parametrize(("script", "algorithm"), [(FEDERATED, "fedavg"), (DILOCO, "diloco")], ids=["fedavg", "diloco"])
def test_a_script_that_exits_with_an_error_code_has_failed(
    nursery: Nursery, tmp_path: Path, script: str, algorithm: str
) -> None:
    with serve(
        tmp_path, **{"algorithm.name": algorithm, "rounds.sites": len(ENDS), "aggregation.upload_codec.name": "none"}
    ) as server:
        for number, (end, code, _, _) in enumerate(ENDS):
            site = ForkedSite(nursery, tmp_path, server.url, f"s{number}", script.replace("{end}", end))
            process = site.start()
            if algorithm == "diloco":
                assert process.wait() == code, end

        def ended() -> bool:
            workers = server.status().workers
            return len(workers) == len(ENDS) and all(worker.state != "alive" for worker in workers)

        wait_until(ended, "their ends", 120)
        found = {worker.site: worker for worker in server.status().workers}
    for number, (end, _, state, error) in enumerate(ENDS):
        assert (found[f"s{number}"].state, error in found[f"s{number}"].error) == (state, True), end


FORKS = """
import json, os, sys
sys.path.insert(0, {tests!r})
import torch
import atoll
from kit.models import build_model
{imports}
names, pids = [], []
for site, end in {ends!r}:
    pid = os.fork()
    if not pid:
        os.environ["ATOLL_SITE"] = site
        break
    pids.append(pid)
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
    os._exit(0)
model = build_model()
{loop}
"""
"""Imports once, and forks a process for each end; each of them ends as Python ends a script."""

FUNCTIONAL = """
atoll.functional.init()
assert atoll.functional.is_running()
atoll.functional.receive(into=model)
exec(end)
"""

STARTED = """
loop = atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1))
loop.start()
exec(end)
"""

TRAINER = """
class Ends(TrainerCallback):
    def on_step_end(self, *_, **__):
        exec(end)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x):
        return {"loss": self.inner(x).sum()}


arguments = TrainingArguments("out", max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
rows = [{"x": torch.zeros(model[0].in_features)}] * 8
Trainer(Model(), arguments, train_dataset=rows, callbacks=[AtollCallback(module=model), Ends()]).train()
"""
TRAINER_IMPORTS = """
from transformers import Trainer, TrainerCallback, TrainingArguments
from atoll.integrations.transformers import AtollCallback
"""
UNCLOSED_ENDS = [
    ("sys.exit(3)", 3, "failed", "3"),
    ("sys.exit('no data')", 1, "failed", "no data"),
    ("raise ValueError('bad rows')", 1, "failed", "ValueError: bad rows"),
    ("sys.exit(0)", 0, "left", ""),
    ("sys.exit()", 0, "left", ""),
    ("pass", 0, "left", ""),
]


def _exit_codes(script: Path, environment: Mapping[str, str]) -> list[int]:
    """Of the processes that a script of FORKS forks; none of them outlives this."""
    command = [sys.executable, str(script)]
    ran = subprocess.Popen(
        command, env=environment, cwd=script.parent, text=True, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        said, _ = ran.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
    codes: list[int] = json.loads(said.splitlines()[-1])
    return codes


@pytest.mark.timeout(400)  # each way imports torch anew
@pytest.mark.covers("F43")
@pytest.mark.parametrize("way", ["functional", "started", "trainer"])
def test_a_script_that_exits_without_leaving_has_failed_by_its_exit_code(tmp_path: Path, way: str) -> None:
    if way == "trainer":
        pytest.importorskip("transformers")
    loop = {"functional": FUNCTIONAL, "started": STARTED, "trainer": TRAINER}[way]
    imports = TRAINER_IMPORTS if way == "trainer" else ""
    expected = UNCLOSED_ENDS[:-1] if way == "trainer" else UNCLOSED_ENDS  # a Trainer that goes on waits for the others
    ends = [(f"s{number}", end) for number, (end, *_) in enumerate(expected)]
    settings: dict[str, Any] = (
        {"algorithm.name": "diloco", "diloco.sync_every": 100} if way == "started" else {"algorithm.name": "fedavg"}
    )
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parents[2])
    script.write_text(FORKS.format(tests=tests, imports=imports, ends=ends, loop=loop))
    with serve(tmp_path, **{"rounds.sites": len(ends), "aggregation.upload_codec.name": "none"}, **settings) as server:
        environment = os.environ | {"ATOLL_SERVER": server.url, "ATOLL_DIR": str(tmp_path / "workers")}
        codes = _exit_codes(script, environment)
        wait_until(lambda: all(worker.state != "alive" for worker in server.status().workers), "their ends")
        found = {worker.site: worker for worker in server.status().workers}
    assert codes == [code for _, code, _, _ in expected]
    for (site, end), (_, _, state, error) in zip(ends, expected, strict=True):
        assert found[site].state == state, end
        assert error in found[site].error, end


@pytest.mark.covers("F43")
def test_the_summary_names_a_site_that_failed_and_never_contributed(nursery: Nursery, tmp_path: Path) -> None:
    with ForkedServer(nursery, tmp_path, **{"rounds.min_sites": 1}) as server:
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
