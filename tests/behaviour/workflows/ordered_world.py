"""Runs whose file lists workflows, as processes; their functions write what they were told, a line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness.processes import Nursery, Process, wait_until
from safetensors.torch import save_file

SITE = str(Path(__file__).parent / "ordered_site.py")

FLOW = """
from pathlib import Path
import time

HERE = Path(__file__).parent


def tell(text):
    with (HERE / "told.txt").open("a") as file:
        file.write(text + "\\n")


def ask(controller, start=0):
    tell(f"{controller.name} begins")
    sites = controller.sites(at_least=2, timeout_s=60)
    answers = controller.broadcast("count", start, sites=sites, min_responses=2, timeout_s=60)
    tell(f"{controller.name} {[answer.payload for answer in answers]}")


def hold(controller):
    tell("hold begins")
    controller.broadcast("hold", sites=controller.sites(at_least=2, timeout_s=60), timeout_s=60)
    tell("hold ends")


def fail(controller):
    tell("fail begins")
    if not (HERE / "mended").exists():
        raise KeyError("w")


def never(controller):
    tell("never begins")
    while True:
        time.sleep(0.05)


def noted(controller):
    for number in range(8):
        controller.note(f"at {number}")
        time.sleep(0.25)


class Schedule:
    def __init__(self, first, more=()):
        self.first, self.more = first, more
        tell("a schedule is made")


def scheduled(controller, schedule, other=None):
    tell(f"scheduled {schedule.first} {[each.first for each in schedule.more]} {other}")
"""

ASK_TRAIN_ASK = """
[[workflow.steps]]
path = "flow.py:ask"
name = "before"
args = {start = 10}
[[workflow.steps]]
kind = "train"
[[workflow.steps]]
path = "flow.py:ask"
name = "after"
"""


def write_run(folder: Path, workflows: str, **settings: Any) -> None:
    folder.mkdir(exist_ok=True)
    save_file({"weight": torch.zeros(1, 1)}, folder / "zero.safetensors")
    (folder / "flow.py").write_text(FLOW)
    lines = {
        "algorithm.name": '"fedavg"',
        "model.source": '"zero.safetensors"',
        "rounds.total": 2,
        "rounds.sites": 2,
        "disk.min_free_bytes": 0,
    }
    lines |= {"disk.state_dir": '"state"', **settings}
    text = "".join(f"{key} = {value}\n" for key, value in lines.items() if value is not None)
    (folder / "run.toml").write_text(text + workflows)


def start_server(nursery: Nursery, folder: Path, port: int, *, failpoints: str = "") -> Process:
    server = nursery.start(
        "atoll", "server", "run.toml", "--port", str(port), cwd=folder, failpoints=failpoints, log=folder / new(folder)
    )
    wait_until(lambda: "listening on" in server.output() or server.poll() is not None, "the server")
    return server


def new(folder: Path) -> str:
    return f"server-{len(list(folder.glob('server-*.log')))}.log"


def start_sites(nursery: Nursery, folder: Path, port: int, *words: str) -> list[Process]:
    url = f"http://127.0.0.1:{port}"
    return [nursery.start(SITE, url, name, *words, cwd=folder) for name in ("a", "b")]


def told(folder: Path) -> list[str]:
    path = folder / "told.txt"
    return path.read_text().splitlines() if path.exists() else []


def submitted(site: Process) -> list[str]:
    return [line for line in site.output().splitlines() if line.startswith("submitted")]
