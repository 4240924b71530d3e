"""Base and outbox: what is formed, merged and rebased, what a restart finds, and what encoding loses."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from specification import Rules, Site, yogi
from torch import Tensor

from atoll.codecs import Bf16Codec, Codec, NoneCodec, build_codecs, encoded_layout
from atoll.errors import DiskFull, StateLocked, StoreError, UsageError
from atoll.protocol.messages import Report
from atoll.registry import OwnName
from atoll.tensors.byte_runs import RunTable
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of, run_of
from atoll.tensors.dtypes import accumulate_dtype
from atoll.tensors.layout import TILE, Layout, update_layout, version_header, version_layout
from atoll.tensors.module_tensors import schema_of
from atoll.tensors.schema import Schema, TensorSpec
from atoll.worker.exchange.apply_version import advance_base_, load_, merge_, rebase_
from atoll.worker.exchange.base_and_outbox import BaseFile, BaseNote, Outbox, OutboxNote, locked
from atoll.worker.exchange.encode_update import Formed, UpdateFormer
from atoll.worker.exchange.local_state import Owner, Residuals

CODECS: dict[str, Codec] = {"none": NoneCodec(), "bf16": Bf16Codec()}


def base_with(
    folder: Path,
    tensors: dict[str, Tensor],
    version: int = 0,
    name: str = "base",
    part_bytes: int = 2**24,
    schema: Schema | None = None,
) -> BaseFile:
    """A complete base file that holds `tensors`."""
    schema = schema or schema_of(tensors)
    base = BaseFile(folder, version_layout(schema, part_bytes), name)
    stream = version_header(schema) + b"".join(
        bytes(bytes_of(run_of(tensors[spec.name], 0, spec.numel))) for spec in schema.tensors
    )
    base.begin(BaseNote("run", 0, version, f"{version:064x}", digests_of(base), complete=False))
    base.write(0, memoryview(stream))
    base.finish()
    return base


def form_update(
    outbox: Outbox, base: BaseFile, local: dict[str, Tensor], codecs: dict[str, Codec] = CODECS, **how: Any
) -> Formed:
    return UpdateFormer(outbox, base, local, codecs, RunTable(outbox.layout, CHUNK_ELEMENTS), **how).form()


def layout_of(tensors: dict[str, Tensor], codec: str = "none") -> Layout:
    return encoded_layout(schema_of(tensors), codec, CODECS, 2**24)


def read(outbox: Outbox, name: str, dtype: torch.dtype) -> Tensor:
    segment = outbox.layout.by_name[name]
    scratch = bytearray(segment.nbytes)
    outbox.read_into(segment.offset, memoryview(scratch))
    return torch.frombuffer(scratch, dtype=dtype)


def whole(outbox: Outbox) -> bytearray:
    content = bytearray(outbox.layout.nbytes)
    outbox.read_into(0, memoryview(content))
    return content


def digests_of(base: BaseFile) -> list[str]:
    return [base.digest(part).hex() for part in base.layout.parts]


def is_described_by(outbox: Outbox, formed: Formed) -> bool:
    """Whether the digests are those of the parts of the outbox, and of the whole."""
    parts = [outbox.digest(part) for part in outbox.layout.parts]
    return (formed.part_digests, formed.digest) == (parts, outbox.layout.blob_id(parts))


def test_parameters_are_sent_as_differences(tmp_path: Path) -> None:
    """An update has its parameters as base minus local, and its buffers as they are."""
    start = {"w": torch.tensor([1.0, 2.0, 3.0]), "a.running_mean": torch.tensor([5.0]), "n": torch.tensor(7)}
    local = {"w": torch.tensor([0.5, 2.0, 4.0]), "a.running_mean": torch.tensor([6.0]), "n": torch.tensor(9)}
    outbox = Outbox(tmp_path, layout_of(start))
    formed = form_update(outbox, base_with(tmp_path, start), local)
    # base − local = [1 − ½, 2 − 2, 3 − 4]
    assert read(outbox, "w", torch.float32).tolist() == [0.5, 0.0, -1.0]
    assert not formed.is_zero
    assert read(outbox, "a.running_mean", torch.float32).tolist() == [6.0]
    assert read(outbox, "n", torch.int64).tolist() == [9]
    assert is_described_by(outbox, formed)


@dataclass(frozen=True)
class Shifted(NoneCodec):
    """Its zero is not written as zeros."""

    name: str = "shifted"
    raw: bool = False

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        super().encode_(source + 1, target, dtype)


@pytest.mark.parametrize("codec", ["none", "bf16", "shifted"])
def test_small_neighbours_are_encoded_independently(tmp_path: Path, codec: str) -> None:
    """Many small tensors that are encoded together get the bytes that each would get alone."""
    # There are 1,300 tensors of odd sizes and of four dtypes, some of them strided. The update is formed twice, over
    # earlier bytes.
    generator = torch.Generator().manual_seed(0)
    codecs = {**CODECS, "shifted": Shifted()}
    start: dict[str, Tensor] = {}
    for index in range(1300):
        dtype = (torch.float32, torch.float64, torch.float16, torch.float8_e4m3fn)[index % 400 // 100]
        shape = (index % 7, 3) if index % 5 else (300 * (index % 11),)
        value = torch.randn(shape, generator=generator).to(dtype)
        start[f"w{index:04d}"] = value.t() if index % 3 and value.dim() == 2 else value
    base = base_with(tmp_path, start)
    layout = update_layout(schema_of(start).tensors, lambda spec: codecs[codec])
    outbox = Outbox(tmp_path, layout)
    for factor in (2.0, -3.0):
        local = {name: (tensor.double() * factor).to(tensor.dtype) for name, tensor in start.items()}
        expected = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for segment in layout.segments:
            wide = torch.float64 if segment.spec.dtype == "F64" else torch.float32
            name = segment.spec.name
            delta = (start[name].to(wide) - local[name].to(wide)).contiguous().reshape(-1)
            target = expected[segment.offset : segment.offset + segment.nbytes]
            codecs[codec].encode_(delta, target, segment.spec.dtype)
        outbox.write(0, memoryview(b"\xff" * layout.nbytes))
        formed = form_update(outbox, base, local, codecs)
        assert whole(outbox) == bytes(bytes_of(expected))
        assert not formed.is_zero
        assert is_described_by(outbox, formed)


@pytest.mark.covers("L14")
def test_an_update_without_movement_is_zero(tmp_path: Path) -> None:
    """An update counts as zero only if no parameter has changed, not even one element. Changes of buffers do not
    count.
    """
    start = {"a": torch.ones(5000), "b": torch.ones(3), "x.running_mean": torch.zeros(2)}
    base, outbox = base_with(tmp_path, start), Outbox(tmp_path, layout_of(start))
    still = {**start, "x.running_mean": torch.ones(2)}
    assert form_update(outbox, base, still).is_zero
    moved = {**start, "b": torch.tensor([1.0, 1.0, 1.5])}
    assert not form_update(outbox, base, moved).is_zero


def test_versions_load_into_any_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is loaded with few reads into tensors with any layout in memory."""
    # Memory with the layout of the file is filled directly, and other memory from a buffer. There are more tensors than
    # one read has targets, and some of them are not requested.
    torch.manual_seed(0)
    start = {f"small.{index}": torch.randn(index % 7, 3) for index in range(1200)}
    start |= {"large": torch.randn(700_001), "matrix": torch.randn(600, 700), "half": torch.randn(9).bfloat16()}
    start |= {"count": torch.tensor(7), "flag": torch.tensor([True, False])}
    base = base_with(tmp_path, start)
    into = {name: torch.zeros_like(tensor) for name, tensor in start.items() if not name.startswith("small.50")}
    into["matrix"] = torch.zeros(700, 600).t()
    into["small.3"] = torch.nn.Parameter(into["small.3"])
    into["half"] = torch.zeros(18, dtype=torch.bfloat16)[::2]
    reads: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *asked: reads.append(len(asked[1])) or preadv(*asked))
    load_(into, base)
    assert all(torch.equal(into[name], start[name]) for name in into)
    assert max(reads) == 512
    assert len(reads) < 30  # of 1,205 tensors
    base.close()


def test_expanded_tensors_are_refused(tmp_path: Path) -> None:
    """If the elements of a tensor share memory, as after `expand()`, the error names the tensor and the remedy."""
    base = base_with(tmp_path, {"a": torch.ones(2), "mask": torch.arange(3.0)})
    with pytest.raises(UsageError, match=r"'mask' was made by expand\(\).*Add \.clone\(\) after expand\(\)"):
        load_({"a": torch.zeros(2), "mask": torch.zeros(1).expand(3)}, base)
    base.close()


def test_a_size_limit_is_not_called_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file would be larger than the process may write, the error names this limit and is no `DiskFull`."""

    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StoreError, match=r"would have \d+ bytes, more than .*: ulimit -f unlimited") as caught:
        base_with(tmp_path, {"a": torch.ones(2)})
    assert not isinstance(caught.value, DiskFull)


class Wrapped(Tensor):
    """A tensor of a kind of its own, which tells no memory of its elements."""

    def numpy(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("no memory")

    def detach(self) -> Wrapped:
        return self


def test_unusual_targets_are_filled_by_a_copy(tmp_path: Path) -> None:
    """A target of another dtype, of its own tensor class or with a negated view is filled by a copy."""
    start = {"a": torch.arange(4.0), "b": torch.arange(6.0).view(2, 3), "c": torch.arange(5.0)}
    base = base_with(tmp_path, start)
    twisted = torch.zeros(5, dtype=torch.complex64)
    into = {
        "a": torch.zeros(4, dtype=torch.float64),
        "b": torch.zeros(2, 3).as_subclass(Wrapped),
        "c": torch._neg_view(torch.view_as_real(twisted)[:, 1].contiguous()),
    }
    assert into["c"].is_neg()
    load_(into, base)
    assert into["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert into["b"].as_subclass(Tensor).tolist() == start["b"].tolist()
    assert into["c"].tolist() == start["c"].tolist()
    base.close()


def test_autograd_sees_replaced_versions(tmp_path: Path) -> None:
    """If a version is loaded between the forward and the backward pass, autograd raises an error. Its gradient would be
    that of another model.
    """
    base = base_with(tmp_path, {"w": torch.full((3,), 5.0)})
    w = torch.ones(3, requires_grad=True)
    loss = (w * w).sum()
    load_({"w": w.detach()}, base)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # its gradient would be that of another model
    base.close()


def test_a_base_that_ends_early_is_reported(tmp_path: Path) -> None:
    """If a base file ends too early, loading raises an error with the name of the file."""
    start = {"a": torch.ones(5000), "b": torch.ones(3)}
    base = base_with(tmp_path, start)
    os.truncate(base.path, base.nbytes - 8)
    with pytest.raises(EOFError, match=r"base\.safetensors"):
        load_({name: torch.zeros_like(tensor) for name, tensor in start.items()}, base)
    base.close()


def test_local_steps_are_added_to_the_newest_version(tmp_path: Path) -> None:
    """When a site moves to a newer version, its local steps are added to it, and buffers take that version's values."""
    base = base_with(tmp_path, {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(4)})
    head = base_with(tmp_path, {"w": torch.tensor([10.0, 20.0]), "n": torch.tensor(6)}, 3, "base-next")
    local = {"w": torch.tensor([1.5, 1.0]), "n": torch.tensor(5)}
    rebase_(local, base, head)
    # 10 + (1.5 − 1), 20 + (1 − 2); buffers take the head's value
    assert local["w"].tolist() == [10.5, 19.0]
    assert local["n"].item() == 6
    base.replace_with(head)
    assert base.note.version == 3
    fresh = {"w": torch.zeros(2), "n": torch.tensor(0)}
    load_(fresh, base)
    assert fresh["w"].tolist() == [10.0, 20.0]


def test_adding_local_steps_rounds_only_once(tmp_path: Path) -> None:
    """Adding local steps to a newer version rounds only once to the model's dtype."""
    # bfloat16 has 256 and 258, but not 257. So 1 + (258 − 1) is 258, and would be 256 if the difference were rounded
    # too.
    base = base_with(tmp_path, {"w": torch.tensor([1.0]).bfloat16()})
    head = base_with(tmp_path, {"w": torch.tensor([1.0]).bfloat16()}, 1, "base-next")
    local = {"w": torch.tensor([258.0]).bfloat16()}
    rebase_(local, base, head)
    assert local["w"].item() == 258.0


@pytest.mark.covers("L25")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rebase_matches_its_specification(tmp_path: Path, dtype: torch.dtype) -> None:
    """Moving local steps to a newer version gives parameters and buffers the bits of the specification."""
    generator = torch.Generator().manual_seed(3)
    start, head, local = (
        {"w": torch.randn(300, generator=generator).to(dtype), "n": torch.tensor(number)} for number in (4, 6, 5)
    )
    rules = Rules(yogi(), buffers={"n": "max"})
    site = Site(rules, "a", {name: value.clone() for name, value in local.items()}, lambda *_: None)
    site.b = dict(start)
    site.rebase(head)
    rebase_(local, base_with(tmp_path, start), base_with(tmp_path, head, 1, "base-next"))
    assert torch.equal(local["w"], site.w["w"])
    assert torch.equal(local["n"], site.w["n"])


@pytest.mark.covers("L25")
def test_sent_steps_are_not_added_again(tmp_path: Path) -> None:
    """If the acknowledgement of an update is lost, only the steps since this update are added to the newest version."""
    # The update of w = 1.5 has counted, the training went on to 1.75, and the newest version is 9. So w is 9 + (1.75 −
    # 1.5).
    start = {"w": torch.tensor([1.0])}
    base = base_with(tmp_path, start)
    outbox = Outbox(tmp_path, layout_of(start))
    form_update(outbox, base, {"w": torch.tensor([1.5])})
    advance_base_(base, outbox, CODECS)
    head = base_with(tmp_path, {"w": torch.tensor([9.0])}, 1, "base-next")
    local = {"w": torch.tensor([1.75])}
    rebase_(local, base, head)
    assert local["w"].item() == 9.25  # 9 + (1.75 − 1.5), not 9 + (1.75 − 1)


THREE_TILES = {"w": torch.arange(3 * TILE, dtype=torch.float32)}
"""In three parts of 20,000 bytes, for a tile has 16,384."""


@pytest.mark.covers("F1")
def test_a_broken_pull_resumes(tmp_path: Path) -> None:
    """A pull that broke off resumes with the missing part. A pull of another version begins with all parts."""
    base = base_with(tmp_path, THREE_TILES, part_bytes=20_000)
    note = BaseNote("run", 0, 5, "f" * 64, digests_of(base), complete=False)
    assert [part.index for part in base.begin(note)] == [0, 1, 2]  # another version: nothing is kept
    base.write(base.layout.parts[1].start, memoryview(b"\0" * 100))  # what the interrupted pull had not yet written
    base.close()
    again = BaseFile(tmp_path, base.layout)
    assert [part.index for part in again.begin(note)] == [1]


@pytest.mark.covers("F1")
def test_a_partly_loaded_version_does_not_count(tmp_path: Path) -> None:
    """While a version is being downloaded, the base file counts as empty; afterwards, it counts as the new version."""
    base = base_with(tmp_path, {"w": torch.arange(8.0)}, version=1)
    assert base.holds("run", f"{1:064x}")
    base.begin(BaseNote("run", 0, 2, f"{2:064x}", digests_of(base), complete=False))
    assert not base.holds("run", f"{1:064x}")
    assert not base.holds("run", f"{2:064x}")
    base.finish()
    assert base.holds("run", f"{2:064x}")
    assert not base.holds("another", f"{2:064x}")


@pytest.mark.covers("F1")
def test_wrong_parts_are_found(tmp_path: Path) -> None:
    """The check of a file's parts finds only the wrong ones."""
    # The digests are always those of all parts. If two parts are checked, the right one is not taken for wrong.
    base = base_with(tmp_path, THREE_TILES, part_bytes=20_000)
    first, second, third = base.layout.parts
    digests = digests_of(base)
    base.write(second.start, memoryview(b"\xff" * 100))
    assert base.differing(digests) == [second]
    assert base.differing(digests, [second, third]) == [second]
    assert base.differing(digests, [third]) == []
    assert base.differing(digests[:1], [first, third]) == [first, third]  # of another cut


@pytest.mark.covers("F3")
def test_a_complete_outbox_survives_a_restart(tmp_path: Path) -> None:
    """A stored update that is complete is found again by the next process; an incomplete or cleared one is not."""
    # Or one with another layout.
    start = {"w": torch.ones(4)}
    layout = layout_of(start)
    outbox = Outbox(tmp_path, layout)
    formed = form_update(outbox, base_with(tmp_path, start), {"w": torch.zeros(4)})
    assert Outbox(tmp_path, layout).note is None
    digests = [digest.hex() for digest in formed.part_digests]
    report = Report(weight=2.0, steps=10, metrics={"loss": 1.5})
    note = OutboxNote("run", 3, 0, 0, "b" * 64, layout.digest, formed.digest, digests, report)
    outbox.seal(note)
    again = Outbox(tmp_path, layout)
    assert again.note == note
    assert is_described_by(again, formed)
    again.clear()
    assert Outbox(tmp_path, layout).note is None
    again.seal(note)
    assert Outbox(tmp_path, layout_of(start, "bf16")).note is None  # nothing of it is of use there


@pytest.mark.covers("X3")
def test_a_second_process_learns_of_the_first(tmp_path: Path) -> None:
    """If a second process takes the lock of a site, the error names the first process and suggests another site
    name.
    """
    with locked(tmp_path / "clinic-a", "clinic-a"):
        with pytest.raises(StateLocked, match=rf"'clinic-a' is in use: process {os.getpid()} on .*another site name"):
            with locked(tmp_path / "clinic-a", "clinic-a"):
                pass
    with locked(tmp_path / "clinic-a", "clinic-a"):
        pass


ODD = {"scalar": (), "empty": (0,), "one": (1,), "block": (256,), "more": (257,), "tile": (64, 64), "last": (17, 241)}


@pytest.mark.covers("L16", "P4")
@pytest.mark.parametrize("part_bytes", [4096, 70_000, 2**24])
@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "topk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_odd_tensors_are_encoded_independently(tmp_path: Path, dtype: torch.dtype, codec: str, part_bytes: int) -> None:
    """Tensors of any shape, strides and dtype are encoded as if each were alone, however the update is cut.

    The error of encoding each tensor is kept in the dtype in which it is summed.
    """
    start = {name: torch.randn(shape).to(dtype) for name, shape in ODD.items()}
    start["long"] = torch.randn(600, 500).to(dtype)
    local = {name: (tensor.double() - torch.randn(tensor.shape)).to(dtype) for name, tensor in start.items()}
    local["long"] = local["long"].t().contiguous().t()
    local["tile"] = torch.stack([local["tile"], local["tile"]], dim=2)[:, :, 0]
    codecs = build_codecs(OwnName(codec), {})
    schema = schema_of(start)
    layout = encoded_layout(schema, codec, codecs, part_bytes)
    outbox, base = Outbox(tmp_path, layout), base_with(tmp_path, start)
    residuals = Residuals(tmp_path, schema, owner=Owner("a", "r")) if codecs[codec].feedback else None
    form_update(outbox, base, local, codecs, residuals=residuals)
    for spec in schema.tensors:
        wide, rule = accumulate_dtype(spec.dtype), codecs[layout.by_name[spec.name].codec]
        delta = (start[spec.name].to(wide) - local[spec.name].to(wide)).reshape(-1)
        encoded = torch.zeros(rule.encoded_bytes(spec.numel, spec.dtype), dtype=torch.uint8)
        rule.encode_(delta, encoded, spec.dtype)
        assert torch.equal(read(outbox, spec.name, torch.uint8) if spec.numel else encoded, encoded)
        if residuals is not None:
            decoded = torch.empty_like(delta)
            rule.decode_(encoded, decoded, spec.dtype)
            lost = residuals._files[1].values(residuals._segments[spec.name], 0, spec.numel)
            assert torch.equal(lost, delta - decoded)
    if residuals is not None:
        residuals.close()


# -- w ← (1−α)·b + α·w


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "double": torch.randn(7, dtype=torch.float64, generator=generator),
        "single": torch.randn(300, 1000, generator=generator),  # more than one chunk
        "turned": torch.randn(6, 5, generator=generator).t(),
        "bf16": torch.randn(9, generator=generator).bfloat16(),
        "mean": torch.randn(4, generator=generator),
        "count": torch.randint(100, (3,), generator=generator),
    }


@pytest.mark.covers("L7")
@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_mixing_uses_the_accumulation_dtype(tmp_path: Path, alpha: float) -> None:
    """A merge mixes each element of the version and of the local weights in the dtype of accumulation."""
    # With α = 0 or 1, it takes one side exactly.
    held, local = tensors(1), tensors(2)
    if alpha == 0:
        local["single"].fill_(float("nan"))  # of which nothing is left
    before = {name: value.clone() for name, value in local.items()}
    merge_(local, base_with(tmp_path, held), alpha)
    for name, value in local.items():
        assert value.stride() == before[name].stride()
        if alpha in (0, 1) or not value.is_floating_point():
            assert torch.equal(value, before[name] if alpha == 1 else held[name]), name
            continue
        wide = torch.promote_types(value.dtype, torch.float32)
        mixed = held[name].to(wide) * (1 - alpha) + before[name].to(wide) * alpha
        error = (value.to(wide) - mixed).abs().max()
        assert error <= {torch.float64: 1e-15, torch.bfloat16: 2e-2}.get(value.dtype, 1e-6), name


@pytest.mark.covers("L7", "X10")
def test_merging_mixes_only_buffers_that_are_averaged(tmp_path: Path) -> None:
    """A merge mixes only buffers that are averaged. Other buffers take the value of the version or keep that of the
    site.
    """
    # With α = ¼, 8 of the version and 4 of the site make 7. A sum of integers cannot be mixed, and a float sum counts
    # over all sites.
    names = ("mean", "first", "max", "sum", "keep")
    schema = Schema.build([TensorSpec(name, "F32", (1,), f"buffers.{name}") for name in names])
    held, local = ({name: torch.tensor([value]) for name in names} for value in (8.0, 4.0))
    merge_(local, base_with(tmp_path, held, schema=schema), 0.25)
    assert {name: value.item() for name, value in local.items()} == {
        "mean": 7.0,
        "first": 8.0,
        "max": 8.0,
        "sum": 8.0,
        "keep": 4.0,
    }


# -- what encoding loses


class Counting(Bf16Codec):
    """bf16 that counts the elements that it decodes."""

    decoded = 0

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        Counting.decoded += target.numel()
        super().decode_(source, target, dtype)


def test_updates_are_decoded_until_enough_arrives(tmp_path: Path) -> None:
    """To find what encoding loses, an update is decoded piece by piece until enough of the change has arrived."""
    # The first piece is lost, the second does not move, and half of the third arrives. The fourth is not decoded.
    start = {"w": torch.zeros(4 * CHUNK_ELEMENTS)}
    codecs = CODECS | {"bf16": Counting()}
    local = {"w": torch.zeros(4 * CHUNK_ELEMENTS)}
    local["w"][:CHUNK_ELEMENTS] = 1e-42
    base, outbox = base_with(tmp_path, start), Outbox(tmp_path, layout_of(start, "bf16"))
    lost = form_update(outbox, base, local, codecs)
    assert (lost.lost, lost.is_zero, Counting.decoded) == (1.0, False, 4 * CHUNK_ELEMENTS)
    local["w"][2 * CHUNK_ELEMENTS :: 2] = 1.0
    Counting.decoded = 0
    arrives = form_update(outbox, base, local, codecs)
    assert arrives.lost < 1e-40
    assert Counting.decoded == 3 * CHUNK_ELEMENTS
