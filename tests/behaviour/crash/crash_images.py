"""Crash images: a run's folder as a kill of all its processes would leave it, taken while the run goes on.

A failpoint stops its process. Then all others are stopped, too, the folder is copied, and all go on. A copy is what
lies on disk when everything is killed at that moment; it is recovered in the test's process, and has to come to the
bits of a run that nothing disturbed.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, Process, wait_until
from kit import ForkedServer, ForkedSite, copy_folder, exported, tensors_digest, together, write_run_file
from kit.models import SITES, local_step, wide_model
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.errors import ServerLost
from atoll.protocol import routes

HERE = Path(__file__).parent
REACHED = re.compile(r"^failpoint (\S+) stops the process: (\d+)$", re.MULTILINE)

SITE_SCRIPT = """
import os
import sys

sys.path.insert(0, {here!r})
from crash_images import {part}

{part}(os.environ["ATOLL_SERVER"], os.environ["ATOLL_SITE"], "workers", lambda line: print(line, flush=True))
"""


def take_rounds(
    url: str, site: str, workers: str | Path, say: Callable[[str], object], idle: tuple[str, ...] = ()
) -> nn.Module:
    """A site's part in a federated run, corrected by its algorithm; says what it has trained and submitted.

    Args:
        idle: the `site round` that it sits out.

    Returns the run's model.
    """
    model = wide_model()
    with atoll.join(url, site=site, folder=workers, swarm=True) as worker:
        for fl_round in worker:
            if f"{site} {fl_round.number}" in idle:
                fl_round.submit(model, weight=0)
                continue
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with fl_round.correct(model, optimizer):
                for step in range(2):
                    local_step(model, optimizer, site, step)
            say(f"trained {site} {fl_round.number}")
            fl_round.submit(model, weight=SITES[site], metrics={"loss": 1.0 / fl_round.number})
            say(f"submitted {site} {fl_round.number}")
        return worker.load_into(model)


def sit_out_rounds(url: str, site: str, workers: str | Path, say: Callable[[str], object]) -> nn.Module:
    """The same, but all sites sit out round 2, and b sits out round 3, too."""
    return take_rounds(url, site, workers, say, ("a 2", "b 2", "b 3"))


def take_steps(url: str, site: str, workers: str | Path, say: Callable[[str], object]) -> nn.Module:
    """A site's part in a DiLoCo run. Its gradients are of site and parameters alone, as after a restart."""
    model = wide_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.DiLoCo(model, optimizer, server=url, site=site, folder=workers, weight=SITES[site]) as diloco:
        while not diloco.finished:
            local_step(model, optimizer, site, 0)
    return model


@dataclass(frozen=True)
class Scenario:
    """A run, and where images of it are taken.

    Attributes:
        server, site: failpoint → the hits at which an image is taken, of the server and of each of `observed`.
        files: further files of the run's folder, by name.
        part: a site's part in the run, a function of this file.
    """

    server: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    site: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    part: Callable[..., nn.Module] = take_rounds
    observed: tuple[str, ...] = ("a",)

    @property
    def places(self) -> set[tuple[str, int]]:
        """(failpoint, hit) of every image."""
        return {(name, hit) for each in (self.server, self.site) for name, hits in each.items() for hit in hits}

    def run_file(self, folder: Path, **more: Any) -> Path:
        """Write the run's files; the initial model is `wide_model`."""
        folder.mkdir(exist_ok=True)
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return write_run_file(folder, **self.all_settings | more)

    @property
    def all_settings(self) -> dict[str, Any]:
        return {"model.source": "kit_model:wide_model", **self.settings}


@dataclass(frozen=True)
class Image:
    """A copy of a run's folder.

    Attributes:
        places: (failpoint, hit) of each process that had just stopped.
    """

    folder: Path
    places: tuple[tuple[str, int], ...]

    def said(self, word: str) -> set[str]:
        """`site round` of what the sites had said by then: `trained` or `submitted`."""
        logs = self.folder.glob("site-*.log")
        return {rest for log in logs for rest in re.findall(rf"^{word} (\w+ \d+)$", log.read_text(), re.MULTILINE)}

    def sealed(self) -> set[str]:
        """`site round` of the updates that lay whole in an outbox by then, as `outbox.sealed` says where it stops."""
        found = set()
        for log in self.folder.glob("site-*.log"):
            site = log.name.split("-")[1]
            found |= {f"{site} {hit}" for name, hit in REACHED.findall(log.read_text()) if name == "outbox.sealed"}
        return found


def result_of(folder: Path) -> str:
    """Digest of the model that a finished run has left, at the server or at every site of a swarm."""
    if (folder / "state" / "exports" / "model.safetensors").exists():
        return tensors_digest(exported(folder))
    (digest,) = {tensors_digest(load_file(folder / "workers" / site / "model.safetensors")) for site in SITES}
    return digest


def undisturbed(scenario: Scenario, folder: Path) -> str:
    """The digest of the run in this process."""
    return recovered(scenario, folder)[0]


def recovered(scenario: Scenario, folder: Path) -> tuple[str, Counter[str]]:
    """Begin the run in a folder, or go on with it, in this process.

    Returns:
        The digest of its result, and how often each `site round` was trained now.
    """
    run_file = scenario.run_file(folder)
    said: list[str] = []
    models: dict[str, nn.Module] = {}

    def take_part(site: str) -> None:
        try:
            models[site] = scenario.part(server.url, site, folder / "workers", said.append)
        except ServerLost:  # the run was over in the image, and its server did not wait for sites that had left
            assert server.finished

    settings = atoll.Settings.read(run_file, {"network.port": 0})
    with pytest.MonkeyPatch.context() as patch, atoll.Server(wide_model(), settings) as server:
        patch.setenv("ATOLL_GIVE_UP_S", "10")
        patch.setattr(routes, "LONG_POLL_S", 2.0)  # a site that leaves a swarm waits for the end of its last request
        together(*(partial(take_part, site) for site in SITES))
        server.run()
    digests = {tensors_digest(dict(model.state_dict())) for model in models.values()}
    assert scenario.settings.get("aggregation.download_codec.name") or digests <= {result_of(folder)}
    trained = Counter(line.removeprefix("trained ") for line in said if line.startswith("trained "))
    return result_of(folder), trained


class Camera:
    """Takes images of a run in processes of its own, while it goes on.

    Attributes:
        images: in the order in which they were taken.
    """

    def __init__(self, folder: Path, images: Path) -> None:
        self._folder, self._images = folder, images
        self._seen = Counter({log: len(REACHED.findall(log.read_text())) for log in folder.glob("*.log")})
        self.images: list[Image] = []

    def follow(self, processes: list[Process], until: Callable[[], bool], what: str) -> None:
        """Take an image whenever one of them stops, until something is so."""

        def looked() -> bool:
            for process in processes:
                if process.stopped():
                    self._take(process, processes)
            return until()

        wait_until(looked, what, 100)

    def _take(self, stopped: Process, processes: list[Process]) -> None:
        for process in processes:
            if process is not stopped:
                process.stop()
        places = tuple(place for process in processes for place in self._reached(process.log))
        if places:  # else it was stopped on its way into the stop of which there is an image already
            name = "-".join([str(len(self.images)), *(failpoint for failpoint, _ in places)])
            self.images.append(Image(copy_folder(self._folder, self._images / name), places))
        for process in processes:
            process.go_on()

    def _reached(self, log: Path) -> Iterable[tuple[str, int]]:
        """What a process has reached since this was asked last."""
        found = [(name, int(hit)) for name, hit in REACHED.findall(log.read_text())]
        seen, self._seen[log] = self._seen[log], len(found)
        return found[seen:]


def images_of(scenario: Scenario, nursery: Nursery, folder: Path) -> tuple[str, list[Image]]:
    """Run it in processes, with all its failpoints; returns the digest of its result, and the images."""
    run = folder / "run"
    camera = Camera(run, folder / "images")
    scenario.run_file(run)
    script = SITE_SCRIPT.format(here=str(HERE), part=scenario.part.__name__)
    with ForkedServer(nursery, run, (stops(scenario.server),), **scenario.all_settings) as server:
        camera.follow([server.process.now], lambda: answers(server.url), "the start of the server")
        running = [server.process.now]
        for site in SITES:
            failpoints = stops(scenario.site) if site in scenario.observed else ""
            running.append(ForkedSite(nursery, run, server.url, site, script).start(failpoints))
        camera.follow(running, lambda: all(each.poll() is not None for each in running), "the end of the run")
        assert [each.returncode for each in running] == [0] * len(running), [each.output()[-2000:] for each in running]
    return result_of(run), camera.images


def images_of_a_restart(image: Image, scenario: Scenario, nursery: Nursery, folder: Path) -> list[Image]:
    """Start the server on an image, with failpoints, and kill it once it listens."""
    camera = Camera(image.folder, folder / "restarted")
    with ForkedServer(nursery, image.folder, (stops(scenario.server),), **scenario.all_settings) as server:
        camera.follow([server.process.now], lambda: answers(server.url), "the start of the server")
    return camera.images


def answers(url: str) -> bool:
    """Whether a server answers requests: it listens before it has recovered."""
    try:
        with urllib.request.urlopen(url, timeout=0.2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def stops(failpoints: Mapping[str, tuple[int, ...]]) -> str:
    """For ATOLL_FAILPOINTS."""
    return ";".join(f"{name}=stop@{','.join(map(str, hits))}" for name, hits in failpoints.items())
