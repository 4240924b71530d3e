"""Runs that cells of a notebook start, in a real kernel: functions of a cell, the table of progress, an interrupt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from atoll.testing.run import wait_until

pytestmark = pytest.mark.slow

BEGIN = """\
import functools, itertools, os, sys
from pathlib import Path

import torch

import atoll

def settings(name):
    return {"rounds.total": 3, "algorithm.name": "fedavg", "disk.min_free_bytes": 0, "disk.state_dir": name}

moves = {"a": 1.0, "b": 3.0}

def train(worker, more=0.0):
    for fl_round in worker:
        weights = fl_round.state_dict()["w"] + moves[worker.site] + more
        fl_round.submit({"w": weights}, weight=1.0, metrics={"move": moves[worker.site]})

def weight_of(done):
    from safetensors.torch import load_file
    return load_file(done.model)["w"].tolist()
"""


class Kernel:
    """A kernel, and the messages that came out of its last cell."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.out: list[dict[str, Any]] = []

    def run(self, code: str) -> str:
        """Run a cell to its end; returns what it has printed, or its error."""
        self.out = []
        reply = self.client.execute_interactive(code, timeout=100, output_hook=self.out.append, store_history=False)
        if reply["content"]["status"] == "error":
            return f"{reply['content']['ename']}: {reply['content']['evalue']}"
        return "".join(each["content"]["text"] for each in self.of("stream") if each["content"]["name"] == "stdout")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The messages of a kind."""
        return [each for each in self.out if each["msg_type"] == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name))
        kernel = Kernel(folder)
    try:
        assert kernel.run(BEGIN) == ""
        yield kernel
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)


RUNS = {
    "simulation": "atoll.Simulation({{'w': torch.zeros(1)}}, settings('{0}'), script={1}, sites=['a', 'b']).run()",
    "threads": "atoll.run({{'w': torch.zeros(1)}}, {1}, sites=['a', 'b'], settings=settings('{0}'))",
}


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize(
    ("script", "moved"),
    [("train", 6.0), ("lambda worker: train(worker, 1.0)", 9.0), ("functools.partial(train, more=1.0)", 9.0)],
    ids=["function", "lambda", "partial"],
)
def test_functions_of_a_notebook_cell_train(kernel: Kernel, how: str, script: str, moved: float) -> None:
    """A function that is defined in a notebook's cell can be trained at simulated sites."""
    # The mean of 1 and 3 in each of three rounds; the event loop of the kernel runs meanwhile.
    code = RUNS[how].format(f"{how}-{script}", script)
    assert kernel.run(f"done = {code}; print(weight_of(done), done.failed)") == f"[{moved}] {{}}\n"


@pytest.mark.parametrize("how", RUNS)
def test_a_notebook_shows_one_updated_table(kernel: Kernel, how: str) -> None:
    """A notebook shows the progress as one table that is updated. At the end, it shows the last round with a row for
    each site.
    """
    kernel.run(f"done = {RUNS[how].format(f'{how}-shown', 'train')}")
    (shown,) = kernel.of("display_data")
    updates = kernel.of("update_display_data")
    assert {each["content"]["transient"]["display_id"] for each in [shown, *updates]} == {
        shown["content"]["transient"]["display_id"]
    }
    last = updates[-1]["content"]["data"]
    assert last["text/plain"].endswith("round 3 of 3, 2 updates: move 2")
    rows = "<tr><td>a</td><td>1</td><td>1</td></tr><tr><td>b</td><td>1</td><td>3</td></tr>"
    assert f"<tr><th>site</th><th>weight</th><th>move</th></tr>{rows}" in last["text/html"]
    assert kernel.of("stream") == []


def test_scripts_in_a_cell_see_no_kernel_arguments(kernel: Kernel) -> None:
    """A script in a notebook's cell does not see the command line of the Jupyter kernel, `-f connection.json`."""
    kernel.run("def says(worker):\n    Path('argv').write_text(repr(sys.argv[1:]))\n    train(worker)")
    code = RUNS["simulation"].format("argv-run", "says")
    assert kernel.run(f"done = {code}; print(Path('argv').read_text())") == "[]\n"


@pytest.mark.parametrize("how", RUNS)
def test_an_interrupted_cell_can_continue(kernel: Kernel, folder: Path, how: str) -> None:
    """If the user interrupts a cell during a round and runs it again, the run continues from there."""
    kernel.run(
        "def waits(worker):\n"
        "    for fl_round in worker:\n"
        f"        if fl_round.number == 2 and not Path('{how}-go').exists():\n"
        f"            Path('{how}-here').touch()\n"
        "            for number in itertools.count():\n"
        "                pass\n"
        "        fl_round.submit({'w': fl_round.state_dict()['w'] + 1.0}, weight=1.0)\n"
    )
    cell = f"done = {RUNS[how].format(f'{how}-ended', 'waits')}; print(done.rounds, weight_of(done))"

    def interrupt() -> None:
        wait_until((folder / f"{how}-here").exists, "round 2")
        kernel.manager.interrupt_kernel()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    assert kernel.run(cell).startswith("KeyboardInterrupt")
    interrupting.join()
    (folder / f"{how}-go").touch()
    left = "import subprocess, threading\nprint([each.name for each in threading.enumerate() if each.name in LEFT], "
    left += "subprocess.run(['pgrep', '-P', str(os.getpid())], capture_output=True, text=True).stdout.split()[:-1])"
    assert kernel.run(f"LEFT = ('a', 'b', 'atoll-server', 'atoll-simulation')\n{left}") == "[] []\n"
    assert kernel.run(cell) == "2 [3.0]\n"


@pytest.mark.parametrize("how", RUNS)
def test_a_cell_interrupted_as_it_starts_can_be_run_again(kernel: Kernel, folder: Path, how: str) -> None:
    """Before the server or the simulation is ready: its thread ends, and frees the state directory."""
    kernel.run(
        "import signal, threading\n"
        "from atoll.transport.loop_thread import LoopThread\n"
        "ready = LoopThread.ready\n"
        "def interrupts(self):\n"
        "    LoopThread.ready = ready\n"
        "    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)\n"
        "    threading.Event().wait(0.5)\n"
        "    ready(self)\n"
        "LoopThread.ready = interrupts\n"
    )
    cell = f"done = {RUNS[how].format(f'{how}-begun', 'train')}; print(done.version, weight_of(done))"
    assert kernel.run(cell).startswith("KeyboardInterrupt")
    assert kernel.run(cell) == "3 [6.0]\n"


def test_a_notebook_shows_site_names_as_text(kernel: Kernel) -> None:
    kernel.run(
        "from atoll.simulate.progress import Progress\n"
        "from atoll.protocol.status_messages import RoundSummary, SiteRound\n"
        "sites = [SiteRound(site='<b>x</b>', metrics={'<i>': 1.0})] * 30\n"
        "progress = Progress(atoll.Settings.build(settings('x') | {'run.name': '<script>'}))\n"
        "progress.show(RoundSummary(fragment=0, round=1, version=1, metrics={}, counts={}, seconds=0.0, bytes_up=0, "
        "sites=sites))\n"
        "display(progress)"
    )
    (shown,) = kernel.of("display_data")
    text = shown["content"]["data"]["text/html"]
    assert "&lt;b&gt;x&lt;/b&gt;" in text
    assert not [tag for tag in ("<script>", "<b>x", "<i>") if tag in text]
    assert "… and 10 more sites" in text
