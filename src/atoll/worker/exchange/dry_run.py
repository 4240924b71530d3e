"""A dry run: what would leave in a site's first round is written to a folder, and then the script ends.

messages.jsonl       every message that was sent: what joining needs, and that the site leaves
update.safetensors   the update as the server would decode it, after all filters
update.json          the message that would complete it, its digest and bytes, and each tensor
answer.json          in place of an update: the answer to a task
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll.codecs.base import Codec
from atoll.errors import UsageError
from atoll.posix import OWN_FILE, replace_file
from atoll.protocol.messages import Complete
from atoll.tensors.chunks import CHUNK_ELEMENTS, WIDEST_BYTES
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.schema import PARAMS
from atoll.worker.exchange.base_and_outbox import Outbox, OutboxNote

UPDATE, TENSORS, ANSWER = "update.json", "update.safetensors", "answer.json"


class DryRunOver(SystemExit):
    """Ends the script of a dry run, with exit code 0, once all that would leave is written."""


def write_update(
    folder: Path, outbox: Outbox, note: OutboxNote, message: Complete, codecs: Mapping[str, Codec]
) -> None:
    """Write the update in the outbox to the folder of a dry run.

    Args:
        folder: the folder.
        outbox: the file of the update.
        note: its note.
        message: the message that would complete the update, as the policy lets it leave.
        codecs: the codecs of the update, by name.

    Raises:
        UsageError: the model is sharded over ranks.
    """
    if outbox.layout.rank is not None:
        raise UsageError("A dry run cannot show a sharded model.", "Run the script in one process, without shards.")
    tensors, rows = decoded(outbox, codecs), list[dict[str, Any]]()
    for segment in outbox.layout.segments:
        spec, values = segment.spec, tensors[segment.spec.name]
        norm = f"{float(torch.linalg.vector_norm(values.double())):.4g}" if spec.is_float else ""
        rows.append(
            {
                "name": spec.name,
                "group": spec.group,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "codec": segment.codec,
                "bytes": segment.nbytes,
                "norm": norm,
            }
        )
    save_file(tensors, folder / TENSORS)
    (folder / TENSORS).chmod(OWN_FILE)
    _write(
        folder / UPDATE,
        {
            "site": note.site,
            "run": note.run,
            "round": note.round,
            "bytes": outbox.layout.nbytes,
            "norm": note.norm,
            "filters": list(note.filters),
            "policy": note.policy,
            "message": json.loads(message.model_dump_json(exclude_defaults=True)),
            "tensors": rows,
        },
    )


def write_answer(folder: Path, name: str, message: Mapping[str, Any]) -> None:
    """Write the answer to a task to the folder of a dry run.

    Args:
        folder: the folder.
        name: name of the task.
        message: what would be sent: the text of the answer, or bytes and digest of the object.
    """
    _write(folder / ANSWER, {"task": name, **message})


def decoded(outbox: Outbox, codecs: Mapping[str, Codec]) -> dict[str, Tensor]:
    """Return the tensors of an update as the server decodes them, by name."""
    found: dict[str, Tensor] = {}
    encoded = memoryview(bytearray(CHUNK_ELEMENTS * WIDEST_BYTES))
    with torch.no_grad():
        for piece, start, stop in outbox.layout.chunks(CHUNK_ELEMENTS):
            spec, run = piece.segment.spec, outbox.layout.piece(piece.segment, start, stop)
            wide = accumulate_dtype(spec.dtype) if spec.group == PARAMS else torch_dtype(spec.dtype)
            whole = found.setdefault(spec.name, torch.zeros(spec.shape, dtype=wide))
            outbox.read_into(run.offset, encoded[: run.nbytes])
            source = torch.frombuffer(encoded, dtype=torch.uint8, count=run.nbytes) if run.nbytes else torch.empty(0)
            values = torch.empty(stop - start, dtype=wide)
            codecs[piece.segment.codec].decode_(source, values, spec.dtype)
            whole.view(-1)[start:stop] = values
    for segment in outbox.layout.segments:  # a tensor without elements has no chunk
        found.setdefault(segment.spec.name, torch.zeros(segment.spec.shape, dtype=torch_dtype(segment.spec.dtype)))
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, [json.dumps(content, indent=2).encode()])
