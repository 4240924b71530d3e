"""Which parts of an update are looked at for what encoding loses."""

from __future__ import annotations

import torch

from atoll.codecs import Bf16Codec, Int8Codec
from atoll.tensors.byte_runs import Run
from atoll.tensors.layout import Piece, Segment
from atoll.tensors.schema import Schema, TensorSpec
from atoll.worker.exchange.encode_update import Losses


def run_of(schema: Schema, *names: str) -> Run:
    """Five elements of each of these tensors, in one run."""
    specs = [spec for name in names for spec in schema.tensors if spec.name == name]
    segments = [Segment(spec, "bf16", 10 * index, 10) for index, spec in enumerate(specs)]
    return Run.of([Piece(each, 0, 5, each.offset, each.nbytes) for each in segments], 2)


def test_most_tensors_are_looked_at_once() -> None:
    """As soon as something of one has come; and one of which nothing has, in every run."""
    schema = Schema.build([TensorSpec("w", "F32", (10,)), TensorSpec("v", "F32", (10,))])
    for codec in (Bf16Codec(), Int8Codec()):
        losses = Losses("a", codec, schema)
        losses.begin()
        one, nothing = torch.ones(5), torch.zeros(5)
        w, both = run_of(schema, "w"), run_of(schema, "w", "v")
        assert losses.wants(w)
        losses.see(w, one, nothing)
        assert losses.wants(w)
        losses.see(w, one, one)
        assert not losses.wants(w)
        assert losses.wants(both)
        losses.end(False, 1, False)
        assert losses.warnings == []
        losses.begin()
        assert losses.wants(w)
