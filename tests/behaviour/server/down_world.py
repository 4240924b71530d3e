"""A small federated run both ways by codecs, and the same run written down plainly: θ, b and e of whole tensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.client import Client
from kit.servers import plain_server
from kit.sites import clients, finish, play_round
from torch import Tensor

import atoll
from atoll.codecs import build_codecs

WEIGHTS = {"a": 1.0, "b": 2.5}
BUFFERS = ("bn.*",)
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""dtype → its name in safetensors."""


def start() -> dict[str, Tensor]:
    """Tensors that cross parts and tiles, none of whole blocks; buffers and integers among them."""
    generator = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(170, 301, generator=generator),
        "odd": torch.randn(5003, generator=generator),
        "one": torch.tensor(0.5),
        "none": torch.zeros(0, 3),
        "bn.running_mean": torch.randn(33, generator=generator),
        "bn.batches": torch.tensor(3),
    }


def mixed() -> dict[str, Tensor]:
    """The same in other dtypes, too."""
    generator = torch.Generator().manual_seed(4)
    more = {
        "double": torch.randn(4097, generator=generator, dtype=torch.float64),
        "brain": torch.randn(9000, generator=generator).bfloat16(),
        "half": torch.randn(17, 19, generator=generator).half(),
    }
    return more | start()


def serve(folder: Path, model: dict[str, Tensor] | None = None, **options: Any) -> atoll.Server:
    settings = {
        "rounds.sites": 2,
        "rounds.total": 4,
        "network.part_bytes": 2**16,
        "model.buffers": BUFFERS,
        "aggregation.download_codec.name": "int8",
    }
    return plain_server(folder, model or start(), **(settings | options))


def trained(state: dict[str, Tensor], site: str, number: int) -> dict[str, Tensor]:
    """What a site makes of what it pulled."""
    moved = {}
    for name, tensor in state.items():
        generator = torch.Generator().manual_seed(1000 * sum(name.encode()) + 100 * number + ord(site))
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            moved[name] = (tensor.double() + 0.01 * noise).to(tensor.dtype)
        else:
            moved[name] = tensor + ord(site)
    return moved


class Reference:
    """The run as the formulas have it; `round` plays one with every site, `held` is what they then hold.

    u_k = b − w_k       g_k = dec(C(u_k + e_k))       θ ← step of θ along Σ ŵ_k·g_k       b ← b + dec(D(θ − b))
    """

    def __init__(
        self, model: dict[str, Tensor], up: str = "none", down: str = "int8", options: dict[str, Any] | None = None
    ) -> None:
        self.held = {name: tensor.clone() for name, tensor in model.items()}
        self.up, self.down = build_codecs(up, {})[up], build_codecs(down, options or {})[down]
        self.theta = {
            name: torch.nn.Parameter(tensor.to(wide(tensor)))
            for name, tensor in model.items()
            if tensor.is_floating_point() and not name.startswith("bn.")
        }
        self.lost = {site: {name: torch.zeros_like(t.data) for name, t in self.theta.items()} for site in WEIGHTS}
        params = [parameter for parameter in self.theta.values() if parameter.numel()]
        self.optimizer = torch.optim.SGD(params, lr=1.0, foreach=False)

    def outer(self, optimizer: type[torch.optim.Optimizer], **options: Any) -> Reference:
        fused = {"fused": True} if optimizer is torch.optim.Adam else {}  # as the server has it
        self.optimizer = optimizer([p for p in self.theta.values() if p.numel()], foreach=False, **options, **fused)
        return self

    @property
    def exported(self) -> dict[str, Tensor]:
        """θ in the model's dtype; what else there is, as it is held."""
        return self.held | {
            name: theta.detach().clone().to(self.held[name].dtype) for name, theta in self.theta.items()
        }

    def round(self, number: int, sites: str = "ab") -> None:
        weights = [WEIGHTS[site] / sum(WEIGHTS[each] for each in sites) for site in sites]
        states = [trained(self.held, site, number) for site in sites]
        after = {}
        for name, held in self.held.items():
            rows = [state[name] for state in states]
            if name in self.theta:
                rows = [self._sent(site, name, row) for site, row in zip(sites, rows, strict=True)]
            if not held.is_floating_point():
                after[name] = torch.stack(rows).amax(0)
                continue
            mean = rows[0].to(wide(held)) * weights[0]
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                mean.add_(row.to(mean.dtype), alpha=weight)
            if name in self.theta:
                self.theta[name].grad = mean
            else:
                after[name] = mean.to(held.dtype)
        self.optimizer.step()
        for name, theta in self.theta.items():
            held = self.held[name]
            went_down = through(self.down, theta.detach() - held.to(theta.dtype), held.dtype)
            after[name] = (held.to(theta.dtype) + went_down).to(held.dtype)
        self.held = {name: after[name] for name in self.held}

    def _sent(self, site: str, name: str, local: Tensor) -> Tensor:
        held = self.held[name]
        update = held.to(wide(held)) - local.to(wide(held))
        if self.up.raw:  # fp16 travels as fp32: the difference of two of its values may be beyond its range
            return update if held.dtype is torch.float16 else update.to(held.dtype).to(update.dtype)
        update = update + self.lost[site][name]
        sent = through(self.up, update, held.dtype)
        self.lost[site][name] = update - sent
        return sent


def wide(tensor: Tensor) -> torch.dtype:
    """What a tensor is accumulated in."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def through(codec: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
    """What comes out of a codec at the other end."""
    flat = values.reshape(-1)
    encoded = torch.zeros(codec.encoded_bytes(flat.numel(), NAMES[dtype]), dtype=torch.uint8)
    if flat.numel():
        codec.encode_(flat, encoded, NAMES[dtype])
        flat = torch.empty_like(flat)
        codec.decode_(encoded, flat, NAMES[dtype])
    return flat.view(values.shape)


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def down_bytes(client: Client) -> int:
    """Of tensors, that this client's process has received so far."""
    received: int = client.worker.bytes_down
    return received


class Run:
    """A server and two sites, of which every one holds in each round what the reference says.

    Args:
        reference: of an earlier run in this folder, which goes on.
        options: of the server. The codecs of both ways are the reference's, too.
    """

    def __init__(
        self, folder: Path, model: dict[str, Tensor] | None = None, reference: Reference | None = None, **options: Any
    ) -> None:
        up, down = (options.get(f"aggregation.{way}load_codec.name") for way in ("up", "down"))
        self.folder = folder
        self.reference = reference or Reference(
            model or start(), up or "none", down or "int8", options.get("aggregation.download_codec")
        )
        self.server = serve(folder, model, **options)

    def __enter__(self) -> Run:
        self.server.start()
        self.sites = clients(self.server, self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.sites.values():
            client.close()
        self.server.stop()

    def play(self, *numbers: int, **about: Any) -> None:
        """These rounds; `about` goes to `submit`."""
        for number in numbers:
            play_round(self.sites, number, partial(self._train, number), WEIGHTS, **about)
            self.reference.round(number, "".join(self.sites))

    def _train(self, number: int, site: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        require_equal(state, self.reference.held)
        return trained(state, site, number)

    def begin(self, number: int) -> None:
        """Every site has a ticket of this round, and has pulled nothing."""
        for client in self.sites.values():
            assert client.next_round() == number

    def received(self) -> list[int]:
        """Bytes of tensors that each site has received."""
        return [down_bytes(client) for client in self.sites.values()]

    def finish(self) -> None:
        """The run is over, and what it exports is θ."""
        require_equal(finish(self.server, self.sites), self.reference.exported)
