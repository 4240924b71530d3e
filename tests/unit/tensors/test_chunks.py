"""Runs of any tensor: the same elements as row-major order says, whatever the strides, in bounded copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.errors import UsageError
from atoll.tensors import chunks
from atoll.tensors.chunks import ROOM_BYTES, Scatter, assign_run_, bytes_of, run_of, runs_of
from atoll.tensors.layout import version_header, version_layout
from atoll.tensors.module_tensors import fits, memory_of, named_tensors, schema_of
from atoll.tensors.schema import Schema, TensorSpec


def strided() -> st.SearchStrategy[Tensor]:
    """Tensors of up to four dimensions, many of them transposed or sliced."""

    @st.composite
    def build(draw: st.DrawFn) -> Tensor:
        shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
        tensor = torch.arange(2 * int(torch.Size(shape).numel()), dtype=torch.float32)[::2].reshape(shape)
        if len(shape) > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, len(shape) - 1)
        if shape and tensor.shape[0] > 1 and draw(st.booleans()):
            tensor = tensor[1:]
        return tensor

    return build()


@given(strided(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_run_is_a_slice_in_row_major_order(tensor: Tensor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    flat = tensor.contiguous().reshape(-1)
    assert torch.equal(run_of(tensor, start, stop), flat[start:stop])
    target = torch.zeros_like(tensor)  # keeps the strides
    assign_run_(target, start, flat[start:stop])
    expected = torch.zeros(tensor.numel())
    expected[start:stop] = flat[start:stop]
    assert torch.equal(target.reshape(-1), expected)


@given(strided())
@settings(max_examples=100, deadline=None)
def test_runs_together_are_the_tensor(tensor: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 4 * 7)
        runs = [bytes(run) for run in runs_of(tensor)]
    assert b"".join(runs) == tensor.contiguous().numpy().tobytes()
    assert [len(run) for run in runs[:-1]] == [28] * (len(runs) - 1)


def test_scatter_fills_every_kind_of_tensor_from_one_stream() -> None:
    source = {
        "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "transposed": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        "scalar": torch.tensor(7.5),
        "empty": torch.zeros(0, 4),
        "half": torch.arange(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(3),
    }
    schema = schema_of(source)
    layout = version_layout(schema)
    stream = version_header(schema) + b"".join(
        bytes(bytes_of(run_of(source[spec.name], 0, spec.numel))) for spec in schema.tensors
    )
    assert len(stream) == layout.nbytes
    targets = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    sink = Scatter(layout, targets)
    for offset in range(0, len(stream), 16):  # cut at borders of whole elements, not of tensors
        sink.write(offset, memoryview(stream)[offset : offset + 16])
    for name, tensor in source.items():
        assert torch.equal(targets[name], tensor), name
        assert targets[name].stride() == torch.zeros_like(tensor).stride()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tensors_that_begin_at_one_place_are_tied_only_where_they_are_the_same_elements() -> None:
    row = torch.arange(12.0)
    tensors = {
        "row": row,
        "first": row[:6],
        "matrix": row.view(3, 4),
        "bits": row.view(torch.int32),
        "again": row[:12],
        "matrix again": row.view(3, 4),
        "empty": row[:0],
        "empty again": row[:0],
        "far": torch.empty(3, device="meta"),
    }
    tensors["far again"] = tensors["far"]
    owners, aliases = named_tensors(tensors, values=False)
    assert aliases == {"again": "row", "matrix again": "matrix", "far again": "far"}
    assert list(owners) == [name for name in tensors if name not in aliases]


def test_tied_tensors_travel_once_and_groups_follow_the_module() -> None:
    model = Tied()
    owners, aliases = named_tensors(model)
    assert aliases == {"head.weight": "embed.weight"}
    assert owners["embed.weight"].data_ptr() == model.embed.weight.data_ptr()
    groups = {spec.name: spec.group for spec in schema_of(model).tensors}
    assert groups == {
        "embed.weight": "params",
        "norm.weight": "params",
        "norm.bias": "params",
        "norm.running_mean": "buffers",
        "norm.running_var": "buffers",
        "norm.num_batches_tracked": "buffers",
    }


def test_on_a_device_that_tells_no_addresses_what_shares_memory_is_one_tensor_and_nothing_else_is() -> None:
    one, other = (torch.zeros(4, 3, device="meta") for _ in range(2))
    assert one.data_ptr() == other.data_ptr() == 0
    assert memory_of(one) != memory_of(other)
    assert memory_of(one) == memory_of(one.detach()) == memory_of(one.view(4, 3))
    assert memory_of(one[:2]) != memory_of(one[2:])


def test_a_plain_mapping_recognises_batch_norm_and_takes_patterns() -> None:
    state = {
        "a.running_mean": torch.zeros(2),
        "a.weight": torch.zeros(2),
        "ema.x": torch.zeros(1),
        "n": torch.tensor(1),
    }
    groups = {spec.name: spec.group for spec in schema_of(state, ["ema.*"]).tensors}
    assert groups == {"a.running_mean": "buffers", "a.weight": "params", "ema.x": "buffers", "n": "buffers"}


def test_a_model_fits_the_schema_that_it_has_and_no_other() -> None:
    model = Tied()
    schema = schema_of(model)
    fitting = fits(model, schema)
    assert fitting is not None
    assert list(fitting) == list(named_tensors(model)[0])
    assert fitting["embed.weight"].data_ptr() == model.embed.weight.data_ptr()
    assert fits(Tied().double(), schema) is None
    assert fits(nn.Sequential(Tied()), schema) is None
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 3))
    assert fits(untied, schema) is None
    other_group = Tied()
    other_group.norm.running_mean = nn.Parameter(other_group.norm._buffers.pop("running_mean"))
    assert fits(other_group, schema) is None
    # a mapping: groups and ties as the schema says, with and without the further names
    mapping = {spec.name: torch.zeros(spec.shape) for spec in schema.tensors}
    mapping["norm.num_batches_tracked"] = torch.tensor(0)
    for more in ({}, {"head.weight": torch.zeros(5, 3)}):
        fitting = fits({**mapping, **more}, schema)
        assert fitting is not None
        assert list(fitting) == list(mapping)
    assert fits({**mapping, "norm.bias": torch.zeros(4)}, schema) is None
    assert fits({**mapping, "more": torch.zeros(4)}, schema) is None
    assert fits({name: mapping[name] for name in reversed(mapping)}, schema) is not None  # in another order


class Frozen(nn.Linear):
    """Says that its bias is no parameter."""

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, each) for name, each in super().named_parameters(*args, **options) if name != "bias")


def test_parameters_are_those_that_a_model_says_it_has() -> None:
    told, plain = Frozen(2, 3), nn.Linear(2, 3)
    assert {spec.name: spec.group for spec in schema_of(told).tensors} == {"weight": "params", "bias": "buffers"}
    assert fits(told, schema_of(told)) is not None
    assert fits(told, schema_of(plain)) is None
    asked = nn.Linear(2, 3)
    asked.named_parameters = lambda **_: iter([("weight", asked.weight)])  # type: ignore[method-assign,assignment,misc]
    assert fits(asked, schema_of(told)) is not None
    members = nn.Linear(2, 3)
    members._named_members = lambda *_, **__: iter([("weight", members.weight)])  # type: ignore[method-assign,assignment]
    assert fits(members, schema_of(told)) is not None
    within = nn.Sequential(told)  # whose own word counts, as for torch
    assert {spec.group for spec in schema_of(within).tensors} == {"params"}
    assert fits(within, schema_of(within)) is not None


@pytest.mark.covers("P4")
@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex32), "complex32"),
        (torch.nested.nested_tensor([torch.zeros(2)]), "nested"),
        ("text", "str"),
    ],
)
def test_what_does_not_travel_is_refused_by_name(tensor: object, word: str) -> None:
    with pytest.raises(UsageError, match=rf"'bad'.*{word}"):
        schema_of({"good": torch.zeros(1), "bad": tensor})  # type: ignore[dict-item]


def test_large_tensors_have_room_and_the_rest_is_written() -> None:
    """fp32: `large` holds bytes [0, 2 MiB) after the header, `odd` 40 bytes, `turned` is not contiguous."""
    n = 2**19
    targets = {"large": torch.zeros(n), "odd": torch.zeros(10), "turned": torch.zeros(1024, 512).t()}
    layout = version_layout(schema_of(targets))
    large, odd, turned = (layout.by_name[name].offset for name in ("large", "odd", "turned"))
    sink = Scatter(layout, targets)
    room = sink.room(large + 4, 2**20)
    assert room is not None
    assert len(room) == 2**20
    room[:4] = torch.tensor([3.0]).numpy().tobytes()
    assert targets["large"][1] == 3.0
    last = sink.room(large + 4 * n - ROOM_BYTES, 2**20)
    assert last is not None
    assert len(last) == ROOM_BYTES  # it ends with its tensor
    assert sink.room(large + 4 * n - ROOM_BYTES + 4, 2**20) is None  # too few
    assert sink.room(0, 2**20) is None  # the header
    assert sink.room(odd, 2**20) is None
    assert sink.room(turned, 2**20) is None


def test_a_model_of_the_cpu_asks_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 raises where there is none."""

    def none() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    assert strided_from_a_file() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_memory_that_cannot_be_pinned_is_taken_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every backend of torch pins memory: they raise."""
    monkeypatch.setattr(chunks, "_copies_from_pinned", lambda device: True)
    empty, asked = torch.empty, []

    def unable(*size: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("not supported")
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", unable)
    assert strided_from_a_file() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert asked[-2:] == [True, False]


def strided_from_a_file() -> list[float]:
    """Two rows, placed into the transpose of three."""
    layout = version_layout(Schema.build([TensorSpec("w", "F32", (2, 3))]))
    target = torch.full((3, 2), -1.0).t()
    (segment,) = layout.segments
    Scatter(layout, {"w": target}).write(segment.offset, bytes_of(torch.arange(6.0)))
    return target.flatten().tolist()
