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

import pytest
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, ForkedSite, serve

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

FEDERATED = """
with atoll.join() as worker:
    for fl_round in worker:
        fl_round.load_into(model)
        exec(end)
"""

DILOCO = """
with atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1)):
    exec(end)
"""

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
ENDS = [
    ("sys.exit(3)", 3, "failed", "3"),
    ("sys.exit('no data')", 1, "failed", "no data"),
    ("raise ValueError('bad rows')", 1, "failed", "ValueError: bad rows"),
    ("sys.exit(0)", 0, "left", ""),
    ("sys.exit()", 0, "left", ""),
]
SIGNALLED = [
    ("sys.exit(130)", 130, "left", ""),
    ("sys.exit(143)", 143, "failed", "SIGTERM"),
    ("raise KeyboardInterrupt", -signal.SIGINT, "left", ""),
]
OPEN = [("pass", 0, "left", "")]
WAYS = {
    "federated": (FEDERATED, "fedavg", ENDS + SIGNALLED),
    "diloco": (DILOCO, "diloco", ENDS + SIGNALLED),
    "functional": (FUNCTIONAL, "fedavg", ENDS + OPEN),
    "started": (STARTED, "diloco", ENDS + OPEN),
    "trainer": (TRAINER, "fedavg", ENDS),
}
"""Loop, algorithm, and for each end the exit code, the state of the worker and its error; `OPEN`: nothing leaves."""


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


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.timeout(400)  # each way imports torch anew
@pytest.mark.covers("F43")
@pytest.mark.parametrize("way", WAYS)
def test_a_script_that_exits_with_an_error_code_has_failed(tmp_path: Path, way: str) -> None:
    """Inside its loop, or in a loop that it has started and does not leave."""
    if way == "trainer":
        pytest.importorskip("transformers")
    loop, algorithm, expected = WAYS[way]
    ends = [(f"s{number}", end) for number, (end, *_) in enumerate(expected)]
    script = tmp_path / "script.py"
    tests, imports = str(Path(__file__).parents[2]), TRAINER_IMPORTS if way == "trainer" else ""
    script.write_text(FORKS.format(tests=tests, imports=imports, ends=ends, loop=loop))
    settings = {
        "algorithm.name": algorithm,
        "diloco.sync_every": 100 if algorithm == "diloco" else None,
        "rounds.sites": len(ends),
        "aggregation.upload_codec.name": "none",
    }
    with serve(tmp_path, **settings) as server:
        environment = os.environ | {"ATOLL_SERVER": server.url, "ATOLL_DIR": str(tmp_path / "workers")}
        codes = _exit_codes(script, environment)
        wait_until(lambda: all(worker.state != "alive" for worker in server.status().workers), "their ends")
        found = {worker.site: worker for worker in server.status().workers}
    assert codes == [code for _, code, _, _ in expected]
    for (site, end), (_, _, state, error) in zip(ends, expected, strict=True):
        assert found[site].state == state, end
        assert error in found[site].error, end


FAILING = """
import atoll

with atoll.join() as worker:
    for fl_round in worker:
        raise SystemExit(3)
"""


@pytest.mark.covers("F43")
def test_the_summary_names_a_site_that_failed_and_never_contributed(nursery: Nursery, tmp_path: Path) -> None:
    with ForkedServer(nursery, tmp_path, **{"rounds.min_sites": 1}) as server:
        site = ForkedSite(nursery, tmp_path, server.url, "b", FAILING)
        failing = site.start()
        FederatedSites(server.url, tmp_path, ["a"]).join()
        assert failing.wait() == 3
        assert server.kept.wait() == 0
        said = server.kept.now.output()
    (summary,) = [line for line in said.splitlines() if " finished at version 3 after" in line]
    assert "1 failed" in summary
    assert "b took part in 0 of 3 rounds" in summary
    assert "a took part in" not in summary


def test_the_summary_says_nothing_of_rounds_where_every_site_was_in_all(nursery: Nursery, tmp_path: Path) -> None:
    with ForkedServer(nursery, tmp_path) as server:
        FederatedSites(server.url, tmp_path).join()
        assert server.kept.wait() == 0
        said = server.kept.now.output()
    (summary,) = [line for line in said.splitlines() if " finished at version 3 after" in line]
    assert "2 workers, 0 deaths, 0 updates refused" in summary
    assert "of 3 rounds" not in summary
    assert "failed" not in summary
