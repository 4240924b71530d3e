"""A run with its sites in the server's process, on the test's own event loop, with a clock that the test moves.

async with LocalRun(tmp_path, {"w": torch.zeros(3)}, {"rounds.sites": 2}) as run:
    a = await run.join("a")
    opened = a.open_round()
    await run.submit(a, opened.ticket, {"w": torch.ones(3)})
    await run.advance(30)  # seconds, at once
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from atoll.posix import write_at
from atoll.protocol import messages
from atoll.protocol.messages import Ticket
from atoll.server.assemble_run import UserCode, assemble
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.local_site import LocalSite, VersionsInUse
from atoll.server.startup import open_run, settings_beside
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.tensors.chunks import bytes_of
from atoll.tensors.layout import Layout
from kit.folders import copy_folder
from kit.servers import PLAIN, long

State = Mapping[str, Tensor]


class LocalRun:
    """A run in a folder, from its start to its stop, and again.

    Attributes:
        now_s: the time by the run's clock.
        served: the server's parts, while the run is open.
        versions: the versions that its sites train from.
    """

    served: ServedRun
    versions: VersionsInUse

    def __init__(self, folder: Path, model: State, settings: Mapping[str, Any]) -> None:
        """`settings` may have short names, and replace those of PLAIN."""
        self.folder, self._model, self._told = folder, model, PLAIN | long(dict(settings))
        self.now_s, self._starts = 0.0, 0

    # -- do

    async def start(self) -> None:
        """Begin the run, or continue it."""
        settings = settings_beside("Server", self._told | {"disk.state_dir": self.folder}).with_absolute_folders()
        persistor, self._starts = Persistor(settings), self._starts + 1
        opened = open_run(settings, dict(self._model), persistor)
        self.served = assemble(opened, UserCode(persistor, TaskFilters(settings)), clock=lambda: self.now_s)
        self.served.coordinator.start()
        self.versions = VersionsInUse(self.run.store.versions)

    async def stop(self) -> None:
        self.run.send_away()
        await self.served.coordinator.stop()

    async def kill(self) -> None:
        """What a server leaves that is killed now is where the run continues."""
        before, self.folder = self.folder, self.folder.with_name(f"{self.folder.name}-killed-{self._starts}")
        with self.run.store.journal.lock:
            copy_folder(before, self.folder)
        await self.stop()
        shutil.rmtree(before)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def join(self, name: str, process: str = "1") -> LocalSite:
        site = LocalSite(self.served, name, self.versions, "here")
        await site.join(process)
        return site

    async def advance(self, seconds: float) -> None:
        """Move the clock, and let the server do what is due then."""
        self.now_s += seconds
        self.served.coordinator.tick()
        await self.settle()

    async def settle(self) -> None:
        """Wait until no version is being made."""
        while any(each.phase == "closing" for each in self.run.state.rounds) and self.run.failed is None:
            await self.run.changed(1.0)
        if self.run.failed is not None:
            raise self.run.failed

    async def submit(self, site: LocalSite, ticket: Ticket, update: State, **report: Any) -> messages.Receipt:
        """The site submits an update from a file of its own."""
        with tempfile.TemporaryFile() as file:
            write_update(file.fileno(), self.layout, update)
            return await site.submit_file(ticket, messages.Report(**report), file.fileno())

    # -- look

    @property
    def run(self) -> RunCore:
        """What the server's parts share."""
        return self.served.run

    @property
    def layout(self) -> Layout:
        """That of an update."""
        return self.run.plan.fragments[0].update

    def model(self, version: int | None = None) -> dict[str, Tensor]:
        """A version, by default the newest, as its file has it."""
        with self.run.store.versions.pin(0, self.head if version is None else version) as pin:
            return read_tensors(pin.fd, self.run.plan.fragments[0].version, self._model)

    @property
    def head(self) -> int:
        """The number of the newest version."""
        return self.run.store.versions.head().version


def read_tensors(fd: int, layout: Layout, like: State) -> dict[str, Tensor]:
    """The tensors in a file of this layout, in dtype and shape as those of `like`."""
    found = {name: tensor.clone() for name, tensor in like.items()}
    for name, tensor in found.items():
        os.preadv(fd, [bytes_of(tensor.view(-1))], layout.by_name[name].offset)
    return found


def write_update(fd: int, layout: Layout, update: State) -> None:
    """Write an update that is not encoded into a file."""
    os.truncate(fd, layout.nbytes)
    for name, tensor in update.items():
        write_at(fd, bytes_of(tensor.view(-1)), layout.by_name[name].offset)
