"""Runs whose file lists workflows, as processes; their functions write what they were told, a line each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from harness.processes import Nursery, Process, free_port, wait_until
from safetensors.torch import load_file, save_file

from atoll.testing.run import Status, status

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


def quick(controller):
    tell("quick begins")


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

TRAIN = '[[workflow.steps]]\nkind = "train"\n'


def step(function: str, more: str = "") -> str:
    """A step of the run file that calls a function of FLOW."""
    return f'[[workflow.steps]]\npath = "flow.py:{function}"\n{more}'


ASK_TRAIN_ASK = step("ask", 'name = "before"\nargs = {start = 10}\n') + TRAIN + step("ask", 'name = "after"\n')


class Run:
    """A run folder and its port; server and sites are processes.

    Args:
        workflows: the tables of the run file.
        settings: further lines of it, as TOML; None takes a key out.
    """

    def __init__(self, nursery: Nursery, folder: Path, workflows: str, **settings: Any) -> None:
        self.folder, self.port = folder, free_port()
        self._nursery = nursery
        save_file({"weight": torch.zeros(1, 1)}, folder / "zero.safetensors")
        (folder / "flow.py").write_text(FLOW)
        self.write(workflows, **settings)

    def write(self, workflows: str, **settings: Any) -> None:
        """Write the run file anew."""
        lines = {
            "algorithm.name": '"fedavg"',
            "model.source": '"zero.safetensors"',
            "rounds.total": 2,
            "rounds.sites": 2,
            "disk.min_free_bytes": 0,
            "disk.state_dir": '"state"',
        } | settings
        text = "".join(f"{key} = {value}\n" for key, value in lines.items() if value is not None)
        (self.folder / "run.toml").write_text(text + workflows)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, *, failpoints: str = "", ends: int | None = None) -> Process:
        """Start the server; with `ends`, wait for its end with this exit status."""
        words = ("atoll", "server", "run.toml", "--port", str(self.port))
        log = self.folder / f"server-{len(list(self.folder.glob('server-*.log')))}.log"
        server = self._nursery.start(*words, cwd=self.folder, failpoints=failpoints, log=log)
        wait_until(lambda: "listening on" in server.output() or server.poll() is not None, "the server")
        if ends is not None:
            assert server.wait(60) == ends, server.output()
        return server

    def sites(self, *words: str) -> list[Process]:
        return [self._nursery.start(SITE, self.url, name, *words, cwd=self.folder) for name in ("a", "b")]

    def play(self, *words: str, ends: int = 0) -> tuple[str, list[Process]]:
        """Server and sites, to their end; what the server said, and the sites."""
        server, sites = self.serve(), self.sites(*words)
        assert server.wait(60) == ends, server.output()
        assert [site.wait() for site in sites] == [0, 0]
        return server.output(), sites

    def until_held(self) -> None:
        """Wait until both sites are at the task `hold`."""
        held = [self.folder / f"{site}.holds" for site in "ab"]
        wait_until(lambda: all(path.exists() for path in held), "the task at both sites")

    def let_go(self) -> None:
        (self.folder / "hold.go").touch()

    def status(self) -> Status:
        return status(self.url)

    @property
    def told(self) -> list[str]:
        """What the functions of FLOW have written."""
        path = self.folder / "told.txt"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def exported(self) -> float:
        return load_file(self.folder / "state" / "exports" / "model.safetensors")["weight"].item()


def submitted(sites: list[Process]) -> list[list[str]]:
    """Numbers of the rounds that each site has submitted to, once it has ended."""
    assert [site.wait() for site in sites] == [0] * len(sites)
    return [re.findall(r"^submitted (.*)$", site.output(), re.MULTILINE) for site in sites]
