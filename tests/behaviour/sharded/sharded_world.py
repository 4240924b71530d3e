"""A model in fp64 with tensors that are awkward to share, sites with data of their own, and the numbers of rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from harness.processes import Nursery, Process, free_port
from kit.diloco_specified import OUTER, Trace, data_of, inner, local_step, specified_traces
from kit.processes import ForkedServer
from torch import Tensor, nn

SCRIPT = Path(__file__).with_name("rank_of_a_sharded_site.py")
HEAD = 5000


class Awkward(nn.Module):
    """Between two ranks: 151 and 150 rows with the border within a tile, 4 and 3 rows, and 1 and none.

    `gain` is not sharded, and longer than a tile; `tied` is `down` under another name; `seen` counts forwards, `mean`
    is a float buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.Linear(97, 301)
        self.down = nn.Linear(301, 7)
        self.tied = nn.Linear(301, 7, bias=False)
        self.tied.weight = self.down.weight
        self.last = nn.Linear(7, 1)
        self.gain = nn.Parameter(torch.randn(HEAD))
        self.mean: Tensor
        self.seen: Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        self.mean += 0.25
        hidden = torch.tanh(self.wide(inputs))
        out: Tensor = self.last(torch.tanh(self.down(hidden) - 0.3 * self.tied(hidden.square())))
        return out * (1 + 0.1 * self.gain.mean()) + 1e-3 * self.gain.square().mean()


def build() -> Awkward:
    return Awkward().to(torch.float64)


def data(site: str) -> tuple[Tensor, Tensor]:
    return data_of(site, 97, 1)


def trained(site: str, steps: int) -> dict[str, Tensor]:
    """The parameters after so many local steps of a site, from the initial model."""
    model = build()
    optimizer = inner(model)
    for _ in range(steps):
        local_step(model, optimizer, data(site))
    return {name: value.detach() for name, value in model.named_parameters()}


def expected(sites: str, *, sync_every: int, rounds: int) -> dict[str, Trace]:
    """What each site's parameters are after every local step."""
    names = [name for name, _ in build().named_parameters()]
    return specified_traces(build, data, sites, [names], H=sync_every, rounds=rounds)


SETTINGS: dict[str, Any] = OUTER | {"algorithm": "diloco", "codec": "none", "model.ranks": 2}
SETTINGS["algorithm.outer_optimizer.name"] = None  # DiLoCo's, not that of the kit


def start_site(
    nursery: Nursery,
    folder: Path,
    url: str,
    site: str,
    *,
    ranks: int = 2,
    failpoints: tuple[str, ...] = (),
    **how: Any,
) -> list[Process]:
    """Start all ranks of a site; `how` is what the script is told, `failpoints` are those of each rank."""
    port = str(free_port())
    return [
        nursery.start(
            str(SCRIPT),
            json.dumps({"site": site, "out": str(folder), **how}),
            cwd=folder,
            env={"ATOLL_SERVER": url, "RANK": str(rank), "WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
            failpoints=failpoints[rank] if failpoints else "",
        )
        for rank in range(ranks)
    ]


class ShardedRun(ForkedServer):
    """A run, and its sites of ranks; `atoll server` is a process, started again whenever it was killed.

    Args:
        lives: failpoints of the server's first start, of its second, …
    """

    def __init__(self, nursery: Nursery, folder: Path, lives: tuple[str, ...] = (), **settings: Any) -> None:
        (folder / "sharded_model.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom sharded_world import build\n"
        )
        super().__init__(nursery, folder, lives, **SETTINGS | {"model.source": "sharded_model:build"} | settings)
        self._started_by = nursery

    def __enter__(self) -> ShardedRun:
        return self

    def site(self, site: str, **how: Any) -> list[Process]:
        """As `start_site`."""
        return start_site(self._started_by, self.folder, self.url, site, **how)

    def ended(self, *sites: list[Process]) -> None:
        """Wait until all ranks and the server have ended well."""
        for ranks in sites:
            for rank in ranks:
                assert rank.wait(90) == 0, rank.output()[-4000:]
        assert self.process.wait() == 0


def told(out: Path, site: str, rank: int) -> dict[str, Any]:
    """What a rank has said of itself."""
    return json.loads((out / f"{site}-{rank}.json").read_text())


def rows(value: Tensor, rank: int, ranks: int) -> Tensor:
    """What `Shard(0)` gives a rank: `torch.chunk`, and nothing where there are fewer chunks than ranks."""
    chunks = torch.chunk(value, ranks)
    return chunks[rank] if rank < len(chunks) else value[:0]


def steps_of(out: Path, site: str, rank: int) -> dict[str, Tensor]:
    """`step/parameter` → what a rank has of it after the step."""
    return safetensors.torch.load_file(out / f"{site}-{rank}.safetensors")


def share(name: str, value: Tensor, rank: int, ranks: int = 2) -> Tensor:
    """What a rank has of a parameter: `gain` is not sharded."""
    return value if name == "gain" else rows(value, rank, ranks)


def require_step(out: Path, site: str, step: int, right: dict[str, Tensor], ranks: int = 2) -> None:
    """Every rank has after this step the rows of these parameters that it has to have, to 1e-12."""
    for rank in range(ranks):
        mine = steps_of(out, site, rank)
        for name, value in right.items():
            want, got = share(name, value, rank, ranks), mine[f"{step}/{name}"]
            assert got.shape == want.shape, (site, rank, name)
            error = float((got - want).abs().max()) if want.numel() else 0.0
            assert error <= 1e-12, f"{site}, rank {rank}, step {step}, {name}: {error}"


def require_close(out: Path, right: dict[str, Trace], ranks: int = 2) -> None:
    """Every rank of every site has after every step the rows that it has to have."""
    for site, trace in right.items():
        for rank in range(ranks):
            assert len(steps_of(out, site, rank)) == len(trace) * len(trace[0]), (site, rank)
        for step, values in enumerate(trace):
            require_step(out, site, step, values, ranks)
