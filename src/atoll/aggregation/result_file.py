"""A version of the model as a file for people: every tensor under each of its names, and nothing that a run adds."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.aggregation.plan import Plan
from atoll.posix import read_at, write_at
from atoll.protocol.routes import DIGEST_BYTES
from atoll.store.file_slots import disk_error
from atoll.tensors.layout import BUFFER_NAMES, TIED, blob_id, safetensors_header
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec

COPY_BYTES = 2**20


def export_header(schema: Schema, told: Mapping[str, str] | None = None) -> tuple[bytes, list[TensorSpec]]:
    """Header of an export, and the tensors behind it: every one, and each tied one again under its further name.

    Its metadata say which names are tied, and which are buffers.

    Args:
        schema: of the whole model.
        told: further metadata of the header.
    """
    schema = schema.model
    owners = {spec.name: spec for spec in schema.tensors}
    named = [(spec, spec.name) for spec in schema.tensors] + [
        (TensorSpec(alias, owners[owner].dtype, owners[owner].shape, owners[owner].group), owner)
        for alias, owner in schema.aliases
    ]
    ordered = sorted(named, key=lambda pair: -pair[0].item_bytes)
    metadata = {"format": "pt", BUFFER_NAMES: json.dumps([spec.name for spec, _ in named if spec.group == BUFFERS])}
    if schema.aliases:
        metadata[TIED] = json.dumps(dict(schema.aliases))
    header = safetensors_header([spec for spec, _ in ordered], metadata | dict(told or {}))
    return header, [owners[owner] for _, owner in ordered]


def write_result(plan: Plan, fds: Sequence[int], target: Path) -> None:
    """Write a model to `target`, replacing what is there in one step.

    Args:
        fds: of each fragment the file of its version.

    Raises:
        DiskFull: nothing is left behind.
    """
    header, owners = export_header(plan.schema)
    at_of = {
        name: (fd, segment.offset)
        for fd, layout in zip(fds, plan.versions, strict=True)
        for name, segment in layout.by_name.items()
    }
    path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            room, end = memoryview(bytearray(COPY_BYTES)), len(header)
            write_at(out, header, 0)
            for spec in owners:
                fd, start = at_of[spec.name]
                for done in range(0, spec.nbytes, COPY_BYTES):
                    piece = room[: min(COPY_BYTES, spec.nbytes - done)]
                    read_at(fd, piece, start + done)
                    write_at(out, piece, end)
                    end += len(piece)
            os.fsync(out)
            os.rename(path, target)
        finally:
            os.close(out)
            path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error, target) from error


# -- Digests of a version's files as server and workers of a swarm tell them to each other.


def digest_of(digests: Sequence[bytes]) -> str:
    """Return what names an outer state, by the digests of its regions; empty where there is none."""
    return blob_id("", digests) if digests else ""


def in_text(digests: Sequence[bytes]) -> str:
    """BLAKE3 digests as a message carries them."""
    return base64.b64encode(b"".join(digests)).decode()


def digests_in(text: str) -> tuple[bytes, ...]:
    """What `in_text` made of them."""
    return split(base64.b64decode(text))


def split(data: bytes) -> tuple[bytes, ...]:
    """Digests that are one behind the other."""
    return tuple(data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES))
