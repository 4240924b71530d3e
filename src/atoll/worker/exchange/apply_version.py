"""Apply a version of the global model to the local one: load it, mix both, or add the local progress to it.

All functions work in place, through a few buffers of fixed size, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from atoll.codecs.base import Codec
from atoll.errors import UsageError
from atoll.runtime import single_thread
from atoll.tensors.byte_runs import Move
from atoll.tensors.chunks import (
    CHUNK_ELEMENTS,
    WIDEST_BYTES,
    AnyTensors,
    add_,
    assign_run_,
    bytes_of,
    moved,
    run_of,
    writable_bytes,
)
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.module_tensors import Tensors, is_expanded
from atoll.tensors.schema import PARAMS
from atoll.worker.exchange.base_and_outbox import BaseFile, Outbox, TensorFile


def _scratch() -> memoryview:
    """Return an uninitialised buffer that has room for one chunk of elements of any dtype."""
    return bytes_of(torch.empty(CHUNK_ELEMENTS * WIDEST_BYTES, dtype=torch.uint8, device="cpu"))


def rebase_(tensors: AnyTensors, old: TensorFile, new: TensorFile) -> None:
    """Move local training from one version of the global model to another: w ← new + (w − old) for each parameter w.

    The tensors are changed in place. Buffers, as in `nn.Module.buffers()`, take the new version's values. Those with
    the rule `sum` change like parameters, and tensors that the site keeps for itself do not change.

    Args:
        tensors: the model's own tensors, by name.
        old: the version that local training started from.
        new: the version that replaces `old`.
    """
    scratch_old, scratch_new = (_scratch() for _ in range(2))
    with torch.no_grad(), single_thread():
        for piece, start, stop in new.layout.chunks(CHUNK_ELEMENTS):
            spec = piece.segment.spec
            if spec.name not in tensors or spec.is_kept:
                continue
            dtype = torch_dtype(spec.dtype)
            head = new.elements(piece, start, stop, scratch_new, dtype)
            if spec.group == PARAMS:
                wide = accumulate_dtype(spec.dtype)
                base = old.elements(piece, start, stop, scratch_old, dtype)
                local = run_of(tensors[spec.name], start, stop).cpu()
                head = (head.to(wide) + (local.to(wide) - base.to(wide))).to(dtype)
            elif spec.rule == "sum":
                base = old.elements(piece, start, stop, scratch_old, dtype)
                add_(head, moved(base, run_of(tensors[spec.name], start, stop).cpu(), accumulate_dtype(spec.dtype)))
            assign_run_(tensors[spec.name], start, head)


def merge_(tensors: Tensors, version: TensorFile, alpha: float) -> None:
    """Mix a version of the global model into the local model, in place: w ← (1−α)·v + α·w.

    Here w is a tensor of the model and v the version's tensor of the same name. α = 0 loads the version, and α = 1
    leaves the model unchanged. For other α, integers and buffers that are not averaged take the version's values, since
    they cannot be mixed. Tensors that the site keeps for itself do not change.

    Args:
        tensors: the model's own tensors, by name; changed in place.
        version: the file of the version.
        alpha: α, the share of the local values.
    """
    if alpha == 0:
        load_(tensors, version)
    if alpha in (0, 1):
        return
    scratch = _scratch()
    with torch.no_grad(), single_thread():
        for piece, start, stop in version.layout.chunks(CHUNK_ELEMENTS):
            spec, dtype = piece.segment.spec, torch_dtype(piece.segment.spec.dtype)
            if spec.is_kept:
                continue
            values = version.elements(piece, start, stop, scratch, dtype)
            if spec.is_float and spec.rule == "mean":
                wide, local = accumulate_dtype(spec.dtype), run_of(tensors[spec.name], start, stop)
                values = values.to(local.device, wide).mul(1 - alpha).add_(local.to(wide), alpha=alpha)
            assign_run_(tensors[spec.name], start, values)


def advance_base_(base: BaseFile, outbox: Outbox, codecs: Mapping[str, Codec]) -> None:
    """Decode the outbox's update, and subtract it from the values in the base file: base ← base − decoded update.

    For buffers with the rule `sum`, the update has local − base, which is added. Other buffers do not change.
    """
    scratch = _scratch()
    encoded = _scratch()
    with torch.no_grad(), single_thread():
        for piece, start, stop in outbox.layout.chunks(CHUNK_ELEMENTS):
            spec = piece.segment.spec
            if spec.group != PARAMS and spec.rule != "sum":
                continue
            wide = accumulate_dtype(spec.dtype)
            values = base.elements(piece, start, stop, scratch, torch_dtype(spec.dtype))
            run = outbox.layout.piece(piece.segment, start, stop)
            outbox.read_into(run.offset, encoded[: run.nbytes])
            delta = torch.empty(stop - start, dtype=wide, device="cpu")
            source = torch.frombuffer(encoded, dtype=torch.uint8, count=run.nbytes)
            codecs[piece.segment.codec].decode_(source, delta, spec.dtype)
            if spec.group == PARAMS:
                values.copy_(values.to(wide) - delta)
            else:
                add_(values, delta)
            offset = base.layout.by_name[spec.name].offset + start * spec.item_bytes
            base.write(offset, scratch[: (stop - start) * spec.item_bytes])


def load_(tensors: AnyTensors, base: TensorFile) -> None:
    """Copy the values of the base file into the tensors, in place; not into those that the site keeps for itself.

    A contiguous CPU tensor with the file's dtype is filled directly from the file. Every other tensor is filled through
    a buffer.
    """
    scratch = None

    def moves() -> Iterator[Move]:
        nonlocal scratch
        for piece, start, stop in base.layout.chunks(CHUNK_ELEMENTS):
            spec = piece.segment.spec
            if spec.name not in tensors or spec.is_kept:
                continue
            tensor, dtype = tensors[spec.name], torch_dtype(spec.dtype)
            memory = writable_bytes(tensor) if isinstance(tensor, Tensor) and tensor.dtype == dtype else None
            if memory is None:
                _require_own_elements(spec.name, tensor)
                scratch = scratch or _scratch()
                assign_run_(tensor, start, base.elements(piece, start, stop, scratch, dtype))
                continue
            if start == 0:
                increment_version(cast(Tensor, tensor))  # as `copy_` does: autograd notices the in-place change
            low, high = start * spec.item_bytes, stop * spec.item_bytes
            yield base.layout.by_name[spec.name].offset + low, memory[low:high]

    with torch.no_grad():
        base.read_pieces(moves())


def _require_own_elements(name: str, tensor: object) -> None:
    if isinstance(tensor, Tensor) and is_expanded(tensor):
        raise UsageError(
            f"The tensor {name!r} was made by expand(): its elements share memory, so it cannot be loaded.",
            "Add .clone() after expand().",
        )


def store_(base: BaseFile, tensors: Tensors) -> None:
    """Write the tensors into the base file, each at its offset in the file."""
    with torch.no_grad(), single_thread():
        for piece, start, stop in base.layout.chunks(CHUNK_ELEMENTS):
            spec = piece.segment.spec
            if spec.name in tensors and not spec.is_kept:
                values = run_of(tensors[spec.name], start, stop).to("cpu", torch_dtype(spec.dtype))
                base.write(base.layout.by_name[spec.name].offset + start * spec.item_bytes, bytes_of(values))
