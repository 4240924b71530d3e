"""A server that is started again does not know which versions it had promised: that costs a pull, and no update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness.processes import free_port, wait_until
from harness.proxy import Fault, Proxy
from kit.client import Client
from kit.servers import plain_server
from kit.sites import clients
from torch import nn

import atoll

SIZE = 200
"""320 kB in fp64 are five parts of 64 KiB."""
PULL = r"GET .*/versions/\d+/[0-9a-f]{64} "


class World:
    """An asynchronous run that adds updates up; b brings it on, and the line to a breaks in the midst of a pull.

    Attributes:
        moved: how far down every weight of the run should have moved.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.model = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
        self.start, self.moved = self.model.weight.detach().clone(), 0.0
        self.options: dict[str, Any] = {
            "algorithm.name": "diloco",
            "aggregation.upload_codec.name": "none",
            "async.enabled": True,
            "rounds.sites": 2,
            "algorithm.outer_optimizer.lr": 1.0,
            "algorithm.outer_optimizer.momentum": 0.0,
            "async.staleness_weight": "constant",
            "diloco.sync_every": 1,
            "disk.keep_versions": 1,
            "network.part_bytes": 2**16,
            "network.connections": 1,
            "network.port": free_port(),
        }
        self.folder, self._stack = folder, stack
        self._serve()
        self.line = stack.enter_context(Proxy(self.options["network.port"]))
        (self.b,) = clients(self.server, folder, "b").values()
        stack.callback(lambda: self.b.close())

    def _serve(self) -> None:
        self.server = plain_server(self.folder, self.model, **self.options).start()
        self._stack.callback(self.server.stop)

    def break_the_next_pull(self) -> Fault:
        """Some of it has come when b has brought the run on by four versions, and the server has started again."""
        fault = Fault(PULL, "down", at=1000, action="reset", wait=self._forget)
        self.line.faults.append(fault)
        return fault

    def _forget(self) -> None:
        at = self.version
        for further in range(1, 5):
            assert self.b.next_round() is not None
            self.submit(self.b, self.b.pull(), 0.25)
            wait_until(lambda: self.version == at + further, "b's update")  # noqa: B023
        self.server.stop()
        self._serve()

    def submit(self, client: Client, state: dict[str, torch.Tensor], by: float) -> None:
        client.submit({"weight": state["weight"] - by})
        self.moved += by

    @property
    def version(self) -> int:
        return self.server.status().version

    def require_sum(self, updates: int) -> None:
        wait_until(lambda: self.version == updates, f"{updates} updates")
        found = safetensors.torch.load_file(self.server.save_state(self.folder / "now.safetensors"))["weight"]
        assert torch.allclose(found, self.start - self.moved, rtol=0, atol=1e-12)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


@pytest.mark.covers("L3", "L10")
def test_a_federated_site_pulls_the_head_instead(world: World) -> None:
    broken = world.break_the_next_pull()
    with Client(world.line.url, site="a", folder=world.folder / "w") as a:
        a.register()
        assert a.next_round() is not None
        state = a.pull()
        assert broken.reached.is_set()
        assert torch.allclose(state["weight"], world.start - world.moved, rtol=0, atol=1e-12)
        world.submit(a, state, 1.0)
        wait_until(lambda: world.version == 5, "its update")
        assert world.server.status().history[-1].staleness == [0]
    world.require_sum(5)


@pytest.mark.covers("L3", "L10")
def test_a_loop_that_pulls_after_its_update_loses_no_step(world: World) -> None:
    """Each step takes 1 from every weight; none is lost or counted twice when the server ends."""
    model = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        model.weight.grad = torch.ones_like(model.weight)
        world.moved += 1.0
        optimizer.step()

    with atoll.DiLoCo(model, optimizer, server=world.line.url, site="a", folder=world.folder / "w") as diloco:
        step()
        broken = world.break_the_next_pull()
        step()
        assert broken.reached.is_set()
        assert torch.allclose(model.weight, world.start - world.moved, rtol=0, atol=1e-12)
        step()
        assert (diloco.rounds, diloco.skipped) == (3, 0)
    world.require_sum(7)
