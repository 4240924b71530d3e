"""Trains in every way with models on one device, and writes what each has come to.

python every_way.py cpu|far LIBRARY OUT
python every_way.py touched LIBRARY OUT        # takes memory of the device for the CPU's, and is killed
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from far_device import FarDevice
from harness.proxy import Proxy, lost_receipt
from kit.servers import plain_server
from kit.workflows import workflow_server
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import atoll
from atoll.filters import NormClip

SITES = {"a": 3.0, "b": 1.0}
"""Site → weight of its updates."""
Tensors = dict[str, Tensor]


class Awkward(nn.Module):
    """Tied weights, a transposed parameter, a narrow one, one of several chunks, one without elements, a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.wide = nn.Linear(16, 300)
        self.back = nn.Linear(300, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.mixing = nn.Parameter(torch.randn(16, 24))
        self.narrow = nn.Parameter(torch.randn(700, dtype=torch.bfloat16))
        self.long = nn.Parameter(0.01 * torch.randn(600_000))  # more than a chunk
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.mean: Tensor
        self.seen: Tensor
        self.register_buffer("mean", torch.zeros(300))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.wide(self.embedding(inputs))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.seen += 1
        hidden = self.back(torch.relu(hidden - self.mean))
        mixed = (hidden @ self.mixing).sum(-1, keepdim=True) * self.narrow.float().mean() * self.scale
        return self.head(hidden + 0.01 * mixed + self.long.mean())


def build(device: str = "cpu") -> Awkward:
    """Tied and transposed on the device: torch moves tensors to one that is not its own one by one, in a row."""
    model = Awkward().to(device)
    model.head.weight = model.embedding.weight
    model.mixing = nn.Parameter(model.mixing.detach().t().contiguous().t())
    return model


def data(site: str, device: str) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(50, (32,), generator=torch.Generator().manual_seed(ord(site)))
    return inputs.to(device), ((inputs * 7 + 3) % 50).to(device)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def state_of(model: nn.Module) -> Tensors:
    return {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


def everywhere(train: Callable[[str], Tensors]) -> Tensors:
    """What the sites have, which train at the same time."""
    with ThreadPoolExecutor(len(SITES)) as pool:
        states = dict(zip(SITES, pool.map(train, SITES), strict=True))
    return {f"{site}.{name}": tensor for site, state in states.items() for name, tensor in state.items()}


ROUNDS = 3


def diloco(device: str, folder: Path, sites: int = 2, **settings: Any) -> Tensors:
    """What the sites have at the end, and with one of them, whose run does not end, what the server has."""
    options = {"algorithm": "diloco", "H": 2, "sites": sites, "rounds": ROUNDS if sites > 1 else 0} | settings
    server = plain_server(folder, build(), **options).start()
    steps = ROUNDS * server.settings.diloco.sync_every + 2

    def train(site: str) -> Tensors:
        model = build(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with atoll.DiLoCo(
            model, optimizer, server=server.url, site=site, folder=folder / "workers", swarm=True
        ) as loop:
            for _ in range(steps):
                if not loop.finished:
                    step(model, optimizer, *data(site, device))
        return state_of(model)

    if sites == 1:
        left = train("a")
        path = server.save_state(folder / "version.safetensors")
        server.stop()
        return left | {f"server.{name}": tensor for name, tensor in load_file(path).items()}
    left = everywhere(train)
    server.run()
    return left


def federated(device: str, folder: Path, *, clip: bool = False, **settings: Any) -> Tensors:
    server = plain_server(folder, build(device), sites=len(SITES), rounds=ROUNDS, **settings).start()

    def train(site: str) -> Tensors:
        model = build(device)
        filters = [NormClip(0.5)] if clip else []
        with atoll.join(server.url, site=site, folder=folder / "workers", filters=filters) as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                fl_round.correct(model, optimizer)
                for _ in range(3):
                    loss = step(model, optimizer, *data(site, device))
                fl_round.submit(model, weight=SITES[site], metrics={"loss": loss})
        return state_of(model)

    left = everywhere(train)
    server.run()
    return left | {f"server.{name}": tensor for name, tensor in load_file(server.exports / "model.safetensors").items()}


def by_itself(device: str, folder: Path) -> Tensors:
    """SCAFFOLD by a loop that computes the site's part itself, of one site with one step a round."""
    with plain_server(folder, build(), algorithm="scaffold", sites=1, rounds=ROUNDS) as server:
        model = build(device)
        with atoll.join(server.url, site="a", folder=folder / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                c, c_i = fl_round.global_state("control"), fl_round.own_state("control")
                y = dict(model.named_parameters())
                x = {name: value.detach().float() for name, value in y.items()}
                step(model, torch.optim.SGD(model.parameters(), lr=0.05), *data("a", device))
                with torch.no_grad():
                    for name, value in y.items():
                        value.sub_((c[name] - c_i[name]).to(value), alpha=0.05)
                    difference = {name: (x[name] - y[name]) / 0.05 - c[name].to(device) for name in c}
                fl_round.submit(model, groups={"control": difference}, steps=1)
        assert server.wait(60)
        return state_of(model)


def moved_on(device: str, folder: Path) -> Tensors:
    """A site that is not told that its first update counts: it carries its next steps over to the version after it."""
    with (
        plain_server(folder, build(), algorithm="diloco", sites=1, rounds=ROUNDS, H=2) as server,
        Proxy(server.port) as proxy,
    ):
        model = build(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        place = {"site": "a", "folder": folder / "workers"}
        with atoll.DiLoCo(model, optimizer, server=proxy.url, max_sync_retries=0, **place) as loop:
            proxy.faults += lost_receipt()
            while not loop.finished:
                step(model, optimizer, *data("a", device))
            assert loop.step == 6
            assert loop.sync_metrics["skipped"] == 1
        return state_of(model)


def tasks(device: str, folder: Path) -> Tensors:
    """A workflow sends tensors of the device, and is sent some."""
    answers: list[Tensors] = []

    def workflow(controller: Any) -> None:
        payload = {name: tensor.to(device) for name, tensor in state_of(build()).items()}
        answers.append(controller.send("a", "add", payload, timeout_s=60).payload)

    with workflow_server(folder, workflow) as server:
        with atoll.tasks(server.url, "a") as worker:
            for task in worker.tasks():
                task.answer({name: tensor.to(device) + 1 for name, tensor in task.payload.items()})
        assert server.wait(60)
    return answers[0]


def objects(device: str, folder: Path) -> Tensors:
    """Objects of tensors on the device are fetched into a model on it, and lazily."""
    del folder
    model, other = build(device), build(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ref = atoll.objects.publish(dict(model.state_dict()))
    atoll.objects.fetch(ref, into=other)
    found = {f"into.{name}": tensor for name, tensor in state_of(other).items()}
    lazy = atoll.objects.fetch(atoll.objects.publish(model.state_dict()), to_disk=True)
    return found | {f"lazy.{name}": atoll.resolve(tensor).clone() for name, tensor in lazy.items()}


INT8 = {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"}
WAYS: dict[str, Callable[[str, Path], Tensors]] = {
    "diloco": diloco,
    "bf16": partial(diloco, codec="bf16", **{"aggregation.download_codec.name": "bf16"}),
    "top-k": partial(diloco, codec="topk", **{"aggregation.download_codec.name": "topk"}),
    "streaming": partial(
        diloco, codec="int4", K=4, H=8, tau=1, alpha=0.5, **{"aggregation.download_codec.name": "int4"}
    ),
    "swarm": partial(diloco, **{"swarm.enabled": True}),
    "async": partial(diloco, sites=1, **{"async.enabled": True, "async.momentum_every": 2}, **INT8),
    "fedavg": partial(federated, clip=True),
    "fedprox": partial(federated, algorithm="fedprox", **INT8),
    "scaffold": partial(federated, algorithm="scaffold"),
    "by itself": by_itself,
    "moved on": moved_on,
    "tasks": tasks,
    "objects": objects,
}


def main(device: str, library: Path, out: Path) -> None:
    far = FarDevice(library)
    torch.set_num_threads(1)
    if device == "touched":
        ctypes.string_at(torch.ones(1).to("far").data_ptr(), 4)
        return
    from_pinned = dict[str, int]()
    for name, way in WAYS.items():
        before = far.from_pinned_bytes()
        (folder := out / name).mkdir(parents=True)
        save_file(
            {key: tensor.contiguous() for key, tensor in way(device, folder).items()}, out / f"{name}.safetensors"
        )
        from_pinned[name] = far.from_pinned_bytes() - before
    (out / "from_pinned.json").write_text(json.dumps(from_pinned))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
