"""Tensors and arrays without an element, at every place of every payload: they arrive with kind, dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import exported, serve
from kit.workflows import play
from object_world import PART, differences
from object_world import SIZES as VARIABLES
from torch import nn

import atoll
from atoll import resolve
from atoll.filters import Cast, NormClip
from atoll.objects import Stream, register

KEYS = ("workflow.tensor_part_bytes", "workflow.array_part_bytes")
SIZES = {
    "both streamed": (PART, PART),
    "torch inline": (0, PART),
    "numpy inline": (PART, 0),
    "both inline": (0, 0),
}
"""Bytes of a part of torch tensors, and of arrays; 0: inline."""

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool)
SHAPES = ((0,), (0, 3), (3, 0), (2, 0, 4))


@dataclass
class Scan:
    """A registered type whose data is a stream."""

    pixels: torch.Tensor
    label: str = "scan"


register(
    Scan,
    "tests.scan",
    lambda scan: {
        "pixels": Stream(scan.pixels.dtype, tuple(scan.pixels.shape), lambda: [scan.pixels]),
        "l": scan.label,
    },
    lambda sent: Scan(sent["pixels"].resolve(), sent["l"]),
)


def torch_full() -> torch.Tensor:
    return torch.arange(40_000, dtype=torch.float32)


def numpy_full() -> Any:
    return np.arange(30_000, dtype=np.int64)


def payloads() -> dict[str, Any]:
    """Empty ones alone, first, between others, last; flat and nested; of torch, of NumPy and of both."""
    empty, none = torch.empty(0, 3), np.empty((2, 0), np.float32)
    return {
        "torch alone": {"e": empty},
        "numpy alone": {"n": none},
        "both alone": {"e": empty, "n": none},
        "first": {"e": empty, "n": none, "w": torch_full(), "a": numpy_full()},
        "between": {"w": torch_full(), "e": empty, "n": none, "a": numpy_full()},
        "last": {"a": numpy_full(), "w": torch_full(), "n": none, "e": empty},
        "beside the other kind": {"e": empty, "a": numpy_full()},
        "beside the other kind, too": {"n": none, "w": torch_full()},
        "nested": [{"e": empty, "deep": (none, [empty, torch_full()], "text", None)}, numpy_full(), empty],
        "twice": {"e": empty, "again": empty, "w": torch_full()},
        "a tensor itself": empty,
        "an array itself": none,
        "every dtype": {f"{dtype} {shape}": torch.empty(shape, dtype=dtype) for dtype in DTYPES for shape in SHAPES},
        "across": {"e": torch.empty(4, 0, 2).transpose(0, 2), "w": torch_full()},
    }


def streams() -> dict[str, Any]:
    return {
        "a stream": {"s": Scan(torch.empty(0, 5)), "w": torch_full(), "n": np.empty(0)},
        "a stream alone": [Scan(torch.empty(0))],
        "a stream beside another": [Scan(torch.empty(0)), Scan(torch_full()), numpy_full(), torch.empty(0)],
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Scan):
        return isinstance(other, Scan) and differences(one.pixels, other.pixels) == []
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return differences(one, other) == []


def echoed(folder: Path, sent: dict[str, Any], settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What comes back of payloads from a site that answers with what it was sent."""

    def workflow(controller: Any) -> dict[str, Any]:
        return {key: controller.send("a", "echo", payload, timeout_s=30).payload for key, payload in sent.items()}

    came: dict[str, Any] = play(folder, workflow, {"echo": lambda payload: payload}, **settings, **options)
    return came


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("streamed", [True, False], ids=["a streamed task", "another task"])
def test_tasks_and_answers_carry_empty_tensors(tmp_path: Path, sizes: str, streamed: bool) -> None:
    sent = payloads() | streams()
    settings = dict(zip(KEYS, SIZES[sizes], strict=True)) | {"workflow.streamed_tasks": ("echo",) if streamed else ()}
    came = echoed(tmp_path, sent, settings)
    assert [key for key in sent if not same(sent[key], came[key])] == []


@pytest.mark.parametrize("sizes", SIZES)
def test_references_lead_to_empty_tensors(monkeypatch: pytest.MonkeyPatch, sizes: str, tmp_path: Path) -> None:
    """To memory, to disk as a whole and lazily, and in place."""
    for variable, size in zip(VARIABLES, SIZES[sizes], strict=True):
        monkeypatch.setenv(variable, str(size))
    with atoll.objects.Publisher() as publisher:
        for key, payload in (payloads() | streams()).items():
            ref = publisher.publish(payload)
            assert same(payload, atoll.objects.fetch(ref)), key
        for key, payload in payloads().items():
            ref = publisher.publish(payload)
            lazily = resolve(atoll.objects.fetch(ref, to_disk=tmp_path))
            assert differences(tensors_only(payload), tensors_only(lazily)) == [], key
            if isinstance(payload, dict):
                target = {name: filled(value) for name, value in payload.items()}
                if "again" in target:
                    target["again"] = target["e"]
                atoll.objects.fetch(ref, into=target)
                assert differences(payload, target) == [], key


def tensors_only(tree: Any) -> Any:
    """What lies on disk is given as torch tensors."""
    if isinstance(tree, dict):
        return {key: tensors_only(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [tensors_only(value) for value in tree]
    return torch.as_tensor(tree) if isinstance(tree, np.ndarray) else tree


def filled(value: Any) -> Any:
    return np.full_like(value, 7) if isinstance(value, np.ndarray) else torch.ones_like(value)


def test_filters_pass_empty_tensors_on(tmp_path: Path) -> None:
    """At the server before a task, at the site before its answer, at the server behind it."""
    sent = payloads()
    settings = {"workflow.streamed_tasks": ("echo",), KEYS[0]: 0}
    chains = {key: {"a": [NormClip(1e9), Cast("bf16")]} for key in ("data_filters", "filters")}
    came = echoed(tmp_path, sent, settings, options={"a": {"filters": [NormClip(1e9)]}}, **chains)
    assert [key for key in sent if described(sent[key]) != described(came[key])] == []


def described(tree: Any) -> Any:
    """A payload with kinds, dtypes and shapes in place of its tensors and arrays."""
    if isinstance(tree, dict):
        return {key: described(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [described(value) for value in tree]
    return (type(tree), tree.dtype, tuple(tree.shape)) if isinstance(tree, torch.Tensor | np.ndarray) else tree


class Sparse(nn.Module):
    """A model with empty parameters and buffers first, between others and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0))
        self.w = nn.Parameter(torch.zeros(70, 80))
        self.between = nn.Parameter(torch.empty(3, 0))
        self.narrow = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
        self.v = nn.Parameter(torch.zeros(5))
        self.register_buffer("none", torch.empty(0, 2))
        self.register_buffer("counts", torch.empty(0, dtype=torch.int64))
        self.last = nn.Parameter(torch.empty(2, 0, 2))


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation.upload_codec.name": "none"},
        {
            "aggregation.upload_codec.name": "bf16",
            "aggregation.download_codec.name": "int8",
            "algorithm.name": "fedadam",
        },
        {"aggregation.upload_codec.name": "int8", "aggregation.reducer.name": "median"},
        {"aggregation.upload_codec.name": "topk", "algorithm.name": "scaffold"},
        {"aggregation.upload_codec.name": "int4", "aggregation.aggregator.path": "first.py:first"},
    ],
    ids=["none", "way down", "median", "scaffold", "aggregator"],
)
def test_models_with_empty_tensors_train(tmp_path: Path, settings: dict[str, Any]) -> None:
    defaults = {
        "algorithm.outer_optimizer.name": None,
        "algorithm.outer_optimizer.lr": None,
        "algorithm.outer_optimizer.momentum": None,
        "rounds.sites": 1,
        "rounds.total": 2,
    }
    options = defaults | settings
    if "aggregation.aggregator.path" in settings:
        (tmp_path / "first.py").write_text("def first(updates):\n    return updates[0].tensors\n")
        options["aggregation.aggregator.path"] = f"{tmp_path}/first.py:first"
    else:
        options["filters"] = {"a": [NormClip(1e9)]}
    with serve(tmp_path, Sparse(), **options) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers", filters=[NormClip(1e9)]) as worker:
            for fl_round in worker:
                model = fl_round.load_into(Sparse())
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
                with fl_round.correct(model, optimizer):
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
                fl_round.submit(model)
        server.run()
    result = exported(tmp_path)
    assert described(result) == described({name: value.detach() for name, value in Sparse().state_dict().items()})
    assert bool(result["v"].all())
