"""The synthetic model of `bench/round.py`: written, trained and checked a run of elements at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from atoll.codecs import build_codecs
from atoll.reducers import normalised
from atoll.registry import OwnName

RUN_ELEMENTS = 2**18
STEP = 1e-3
_PERIOD = 8191


def names_and_sizes(total_bytes: int, tensors: int) -> dict[str, int]:
    """Name → elements of fp32; together `total_bytes`, as equal as can be."""
    elements = max(total_bytes // 4, tensors)
    return {f"layer.{index:05d}.weight": elements // tensors + (index < elements % tensors) for index in range(tensors)}


def initial(start: int, stop: int) -> Tensor:
    """Elements [start, stop) of any tensor: between 0.5 and 1.5, no two neighbours alike."""
    return torch.arange(start, stop).remainder_(_PERIOD).float().div_(_PERIOD).add_(0.5)


def write_initial(path: Path, sizes: Mapping[str, int]) -> None:
    """Write the initial model as a safetensors file, a run at a time."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, count in sizes.items():
        table[name] = {"dtype": "F32", "shape": [count], "data_offsets": [offset, offset + 4 * count]}
        offset += 4 * count
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for count in sizes.values():
            for start, stop in runs(count):
                file.write(initial(start, stop).numpy().tobytes())


def runs(count: int) -> Iterator[tuple[int, int]]:
    """[0, count) in runs of at most `RUN_ELEMENTS`."""
    for start in range(0, count, RUN_ELEMENTS):
        yield start, min(start + RUN_ELEMENTS, count)


def load(sizes: Mapping[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The initial model in memory: all of it as one tensor, and its tensors by name, which are views of it.

    So training costs the same however the model is cut, and memory lies alike.
    """
    flat = torch.empty(sum(sizes.values()))
    model = dict(zip(sizes, torch.split(flat, list(sizes.values())), strict=True))
    for tensor in model.values():
        for start, stop in runs(tensor.numel()):
            tensor[start:stop] = initial(start, stop)
    return flat, model


def step_of(worker: int) -> float:
    """What a worker adds to every element in a round; another for each."""
    return STEP * (worker + 1)


def weight_of(worker: int) -> float:
    return float(worker + 1)


def train_(flat: Tensor, worker: int) -> None:
    """Stands for local training: in place, and different at every site."""
    flat.add_(step_of(worker))


def is_exact(model: Mapping[str, Tensor], workers: Sequence[int], rounds: int, codec: str, down: str) -> bool:
    """Whether the model is bit for bit what `rounds` rounds of FedAvg make of the initial one.

    The expression of the reduction, in its order: u_k = b − w_k; acc = u_0·ŵ_0; acc += ŵ_k·u_k; θ ← θ − acc. With error
    feedback u_k + e_k is encoded, and e_k becomes what that has lost. With a codec downwards b ← b + dec(C(θ − b)),
    without one b = θ.
    """
    weights = normalised([weight_of(worker) for worker in workers])
    pack, pack_down = build_codecs(OwnName(codec), {})[codec], build_codecs(OwnName(down), {})[down]
    for tensor in model.values():
        for start, stop in runs(tensor.numel()):
            theta = initial(start, stop)
            held = theta if down == "none" else theta.clone()
            encoded = torch.empty(pack.encoded_bytes(stop - start, "F32"), dtype=torch.uint8)
            encoded_down = torch.empty(pack_down.encoded_bytes(stop - start, "F32"), dtype=torch.uint8)
            update, total = torch.empty_like(theta), torch.empty_like(theta)
            lost = [torch.zeros_like(theta) for _ in workers if pack.feedback]
            for _ in range(rounds):
                for index, (worker, weight) in enumerate(zip(workers, weights, strict=True)):
                    torch.sub(held, held + step_of(worker), out=update)
                    if lost:
                        lost[index] += update
                        update.copy_(lost[index])
                    pack.encode_(update, encoded, "F32")
                    pack.decode_(encoded, update, "F32")
                    if lost:
                        lost[index] -= update
                    if index == 0:
                        torch.mul(update, weight, out=total)
                    else:
                        total.add_(update, alpha=weight)
                theta.sub_(total)
                if held is not theta:
                    pack_down.encode_(theta - held, encoded_down, "F32")
                    pack_down.decode_(encoded_down, update, "F32")
                    held.add_(update)
            if not torch.equal(held, tensor[start:stop]):
                return False
    return True
