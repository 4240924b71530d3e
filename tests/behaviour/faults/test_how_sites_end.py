"""How a site ended: its exit code, and what the server reports while the run goes on and in the summary at its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from fault_world import Result, ServerProcess, SiteProcess, Sites, serve_wide
from harness.processes import Nursery, wait_until
from kit import Gate, atoll_worker, run_to_end, serve
from kit.models import build_model

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


UNSEEN = [
    ("sys.exit(3)", 3, "left", ""),
    ("sys.exit('no data')", 1, "left", ""),
    ("raise ValueError('bad rows')", 1, "failed", "ValueError: bad rows"),
    ("sys.exit(0)", 0, "left", ""),
]
"""Outside of a `with` block. Python tells exit handlers an uncaught exception, but not the code of `sys.exit`."""


SIGNALLED = [
    ("sys.exit(130)", 130, "left", ""),
    ("sys.exit(143)", 143, "failed", "SIGTERM"),
    ("raise KeyboardInterrupt", -signal.SIGINT, "left", ""),
]
OPEN = [("pass", 0, "left", "")]


WAYS = {
    "federated": (FEDERATED, "fedavg", ENDS + SIGNALLED),
    "diloco": (DILOCO, "diloco", ENDS + SIGNALLED),
    "functional": (FUNCTIONAL, "fedavg", UNSEEN + OPEN),
    "started": (STARTED, "diloco", UNSEEN + OPEN),
    "trainer": (TRAINER, "fedavg", UNSEEN),
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
def test_the_server_hears_how_a_script_ended(tmp_path: Path, way: str) -> None:
    """The status shows how a site's script ended: the site has left, or has failed with an error.

    The script ends inside its loop, or after it has started a loop that it does not leave.
    """
    if way == "trainer":
        pytest.importorskip("transformers")
    loop, algorithm, expected = WAYS[way]
    ends = [(f"s{number}", end) for number, (end, *_) in enumerate(expected)]
    script = tmp_path / "script.py"
    tests, imports = str(Path(__file__).parents[2]), TRAINER_IMPORTS if way == "trainer" else ""
    script.write_text(FORKS.format(tests=tests, imports=imports, ends=ends, loop=loop))
    sync_every = 100 if algorithm == "diloco" else None
    with serve(tmp_path, algorithm=algorithm, H=sync_every, sites=len(ends), codec="none") as server:
        environment = os.environ | {"ATOLL_SERVER": server.url, "ATOLL_DIR": str(tmp_path / "workers")}
        codes = _exit_codes(script, environment)
        wait_until(lambda: all(worker.state != "alive" for worker in server.status().workers), "their ends")
        found = {worker.site: worker for worker in server.status().workers}
    assert codes == [code for _, code, _, _ in expected]
    for (site, end), (_, _, state, error) in zip(ends, expected, strict=True):
        assert found[site].state == state, end
        assert error in found[site].error, end


@pytest.mark.covers("F43", "P6")
@pytest.mark.parametrize("way", ["functional", "started"])
@pytest.mark.parametrize(("end", "code", "state"), [("sys.exit(3)", 3, "failed"), ("pass", 0, "left")])
def test_atoll_worker_tells_the_server_the_exit_code(tmp_path: Path, way: str, end: str, code: int, state: str) -> None:
    """`atoll worker` tells the server the exit code of its command.

    For a script without a `with` block, only `atoll worker` knows this code.
    """
    loop, algorithm, _ = WAYS[way]
    script = (
        f"import sys, torch, atoll\nfrom kit.models import build_model\nend, model = {end!r}, build_model()\n{loop}"
    )
    sync_every = 100 if algorithm == "diloco" else None
    beats = {"network.heartbeat_timeout_s": 600.0}
    with serve(tmp_path, algorithm=algorithm, H=sync_every, sites=1, codec="none", **beats) as server:
        with atoll_worker(tmp_path, server.url, script) as process:
            _, said = process.communicate(timeout=60)
        (worker,) = server.status().workers
    assert process.returncode == code
    words = f"the command ended with exit code {code}"
    assert (worker.state, worker.error) == (state, words if code else "")
    assert (f"atoll: {words}; a left the run" in said.splitlines()) == bool(code)


@pytest.mark.covers("F43")
@pytest.mark.parametrize("fails", [True, False])
def test_the_summary_names_sites_that_missed_rounds(nursery: Nursery, tmp_path: Path, fails: bool) -> None:
    """The server's summary counts the failed sites and names each site that missed rounds, and no other."""
    with ServerProcess(nursery, tmp_path, **{"rounds.min_sites": 1}) as server:
        if fails:
            failing = SiteProcess(nursery, tmp_path, server.url, "b").start(FAIL_IN="1")
        Sites(server.url, tmp_path, "a" if fails else "ab").join()
        assert not fails or failing.wait() == 1
        assert server.process.wait() == 0
        said = server.process.now.output()
    (summary,) = [line for line in said.splitlines() if " finished at version 3 after" in line]
    assert ("1 failed" in summary, "b took part in 0 of 3 rounds" in summary) == (fails, fails)
    assert "a took part in" not in summary
    assert "2 workers, 0 deaths, " in summary
    assert " 0 updates refused" in summary


@pytest.mark.covers("F43", "P6")
def test_an_exception_is_one_line_at_the_server(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a site's script raises an exception, the server logs one line. The site's own output has the whole
    traceback.
    """
    with serve_wide(tmp_path, **{"rounds.min_sites": 1}) as server:
        other = Sites(server.url, tmp_path, names=["b"])
        site = SiteProcess(nursery, tmp_path, server.url, "a").start(FAIL_IN="2")
        assert site.wait() == 1
        other.join()
        worker = next(worker for worker in server.status().workers if worker.site == "a")
        server.run()
    assert "Traceback" in site.output()
    assert "fault_site.py" in site.output()
    assert (worker.state, worker.error) == ("failed", "ValueError: no such column: age")
    lines = [record.getMessage() for record in caplog.records if "no such column" in record.getMessage()]
    assert lines == ["a failed: ValueError: no such column: age"]
    assert Result(tmp_path).counted() == [("a", 1), ("b", 1), ("b", 2), ("b", 3)]


@pytest.mark.covers("F36")
def test_pauses_between_restarts_grow_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """`atoll worker` waits longer before each restart of a failing command: 1 s, 2 s, 4 s and so on, up to 60 s."""
    from atoll.cli import worker

    pauses: list[float] = []
    monkeypatch.setattr(worker, "_pause", lambda told, seconds: pauses.append(seconds))
    monkeypatch.setattr(worker, "_require_server", lambda address, told, site: None)  # it answers each time
    assert worker._run(["false"], {"ATOLL_SERVER": "http://127.0.0.1:1"}, restarts=8) == 1
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.slow
@pytest.mark.covers("F36")
def test_a_flapping_site_comes_back_less_and_less_often(nursery: Nursery, tmp_path: Path) -> None:
    """A script that fails in each round is started again after 1 s, then after 2 s. The run goes on without it."""
    with serve(tmp_path, **{"rounds.min_sites": 1, "rounds.total": 3}) as server:
        gate = Gate(1, "b")
        other = Sites(server.url, tmp_path, names=["b"], build=build_model, during=gate)
        script = tmp_path / "flap.py"
        script.write_text("import time, atoll\nwith atoll.join() as worker:\n    print(time.time())\n    1 / 0\n")
        words = ("worker", "--server", server.url, "--site", "a", "--restarts", "2", "--", sys.executable, str(script))
        flapping = nursery.start("atoll", *words, cwd=tmp_path)
        gate.wait()  # the round has begun with both
        assert flapping.wait(90) != 0
        gate.open()
        run_to_end(server, other)
    began = [float(line) for line in flapping.output().splitlines() if re.fullmatch(r"\d+\.\d+", line)]
    assert len(began) == 3
    assert began[1] - began[0] >= 1.0
    assert began[2] - began[1] >= 2.0
    assert {("b", 1), ("b", 2), ("b", 3)} == set(Result(tmp_path).counted())


@pytest.mark.covers("F43")
def test_a_site_without_memory_is_released_from_its_round(nursery: Nursery, tmp_path: Path) -> None:
    """A site that may take no more memory ends with an error that the status shows, and the round closes without it."""
    with serve_wide(tmp_path, **{"rounds.min_sites": 1}) as server:
        other = Sites(server.url, tmp_path, names=["b"])
        script = tmp_path / "hungry.py"
        script.write_text(
            "import resource, torch, atoll\n"
            "with atoll.join() as worker:\n"
            "    for fl_round in worker:\n"
            "        used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            "        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))\n"
            "        torch.zeros(2**28).add_(1)\n"
        )
        site = nursery.start(
            str(script),
            cwd=tmp_path,
            env={"ATOLL_SERVER": server.url, "ATOLL_SITE": "a", "ATOLL_DIR": str(tmp_path / "a")},
        )
        assert site.wait(60) != 0
        other.join()
        (worker,) = [each for each in server.status().workers if each.site == "a"]
        server.run()
    assert worker.state == "failed"
    assert "allocate" in worker.error
    assert Result(tmp_path).counted() == [("b", 1), ("b", 2), ("b", 3)]
