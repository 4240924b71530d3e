"""What goes down is encoded window by window in the pass, with the bits of whole tensors, however the pass is cut."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from blake3 import blake3
from pass_world import PART_BYTES, Reference, World, raw

from atoll.aggregation.make_version import ClosedRound, NextFiles
from atoll.aggregation.outer_state import state_layout
from atoll.codecs.version_difference import Downlink
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import ALIGN_BYTES


@dataclass
class DownWorld(World):
    """Versions go down by a codec; files are v, s and d of each round."""

    down: str = "int8"
    density: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        found = Downlink.of(self.version_layout, self.down, {"density": self.density} if self.density else {})
        assert found is not None
        self.downlink = found
        self.state = state_layout(self.schema.tensors, self.rule, PART_BYTES, masters=True)
        self.planned = self.plan_of_fragment(found)

    def round(self, **how) -> ClosedRound:
        version, state, delta = (self.open(f"{kind}{self.number + 1}") for kind in "vsd")
        os.ftruncate(delta, self.downlink.layout.nbytes)  # a slot is made of zeros
        self.result = self.close(out=NextFiles(version, state, delta), **how)
        self.number, self.base, self.state_fd = self.number + 1, version, state
        return self.result

    def version(self) -> dict[str, torch.Tensor]:
        """What the last version file has."""
        found = {}
        for segment in self.version_layout.segments:
            data = bytearray(os.pread(self.base, segment.nbytes, segment.offset))
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            found[segment.spec.name] = flat.view(torch_dtype(segment.spec.dtype)).view(segment.spec.shape)
        return found


class DownReference(Reference):
    """b ← b + dec(C(θ − b)) on whole tensors, after the round as it is without."""

    def round(self, number: int) -> None:
        held = {name: tensor.clone() for name, tensor in self.version.items()}
        super().round(number)
        for segment in self.world.downlink.layout.segments:
            spec, codec = segment.spec, self.world.downlink.codecs[segment.codec]
            if not spec.is_stepped or not spec.numel:
                continue
            theta = self.masters[spec.name].detach()
            encoded, change = torch.zeros(segment.nbytes, dtype=torch.uint8), torch.empty(theta.numel()).to(theta.dtype)
            codec.encode_((theta - held[spec.name].to(theta.dtype)).reshape(-1), encoded, spec.dtype)
            codec.decode_(encoded, change, spec.dtype)
            self.version[spec.name] = (held[spec.name].to(theta.dtype) + change.view(spec.shape)).to(
                torch_dtype(spec.dtype)
            )


CODECS_DOWN = [("int8", 0.0), ("int4", 0.0), ("bf16", 0.0), ("topk", 1 / 64), ("topk", 1.0)]
IDS = ["int8", "int4", "bf16", "topk", "topk-of-all"]


@pytest.mark.covers("L16")
@pytest.mark.parametrize(("down", "density"), CODECS_DOWN, ids=IDS)
@pytest.mark.parametrize(
    ("target", "options"),
    [("sgd", {"lr": 0.7, "momentum": 0.9, "nesterov": True}), ("sgd", {"lr": 1.0}), ("torch.optim:Adafactor", {})],
    ids=["momentum", "plain", "whole-tensors"],
)
def test_the_bits_are_those_of_whole_tensors(tmp_path, down: str, density: float, target: str, options: dict) -> None:
    world = DownWorld(tmp_path, target=target, options=options, down=down, density=density)
    reference = DownReference(world)
    for number in range(3):
        world.round(run_elements=4096, threads=2)
        reference.round(number)
        for name, tensor in world.version().items():
            assert raw(tensor) == raw(reference.version[name].to(tensor.dtype)), name


@pytest.mark.parametrize(("down", "density"), CODECS_DOWN, ids=IDS)
def test_no_file_depends_on_how_the_pass_is_cut(tmp_path, down: str, density: float) -> None:
    """Neither on chunks nor on threads; and digests are those of the files, every byte of them."""
    contents = []
    for index, how in enumerate([{"run_elements": 4096}, {"threads": 3}, {"run_elements": 8192, "threads": 2}]):
        folder = tmp_path / str(index)
        folder.mkdir()
        world = DownWorld(folder, down=down, density=density)
        for _ in range(2):
            result = world.round(**how)
        contents.append([world.file(kind).read_bytes() for kind in "vsd"])
        delta = contents[-1][2]
        parts = world.downlink.parts
        assert [blake3(delta[part.start : part.stop]).digest() for part in parts] == list(result.delta_digests)
        assert (parts[0].start, parts[-1].stop) == (0, len(delta))
    assert contents[0] == contents[1] == contents[2]


def test_a_part_of_a_delta_makes_a_part_of_the_version(tmp_path) -> None:
    world = DownWorld(tmp_path)
    assert len(world.downlink.parts) == len(world.version_layout.parts) > 3
    end = 0
    for down, part in zip(world.downlink.parts, world.version_layout.parts, strict=True):
        assert down.start == end
        end = down.stop
        assert [(piece.segment.spec.name, piece.start, piece.stop) for piece in down.pieces] == [
            (piece.segment.spec.name, piece.start, piece.stop) for piece in part.pieces
        ]
        assert all(piece.offset % 4 == 0 for piece in down.pieces)
    assert end == world.downlink.layout.nbytes
    assert end % ALIGN_BYTES == 0
