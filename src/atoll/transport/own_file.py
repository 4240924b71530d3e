"""What this process serves, and asks of itself: read where it lies, not over a socket."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from atoll.errors import BadRequest, Gone, PartCorrupt
from atoll.failpoints import failpoint
from atoll.posix import read_at
from atoll.protocol.object_manifest import FileManifest, Manifest
from atoll.tensors.chunks import CHUNK_BYTES
from atoll.tensors.layout import Part
from atoll.transport.parts import Memory, Parts, Sink


@dataclass(frozen=True)
class OwnFile:
    """A served file; takes the place of `Parts` for who reads it in the same process.

    Attributes:
        fd: of its own; `close` gives it back.
        gone: it is served no more, and may be rewritten.
        on_read: told what was read.
    """

    fd: int
    manifest: Manifest | FileManifest
    gone: threading.Event
    on_read: Callable[[int], None] = lambda _: None

    def read(self, path: str, most_bytes: int) -> bytearray:
        """As `Parts.read`: the manifest, which is all that is ever read so.

        Raises:
            BadRequest: it has more than `most_bytes`.
        """
        message = self.manifest.message().model_dump_json().encode()
        if len(message) > most_bytes:
            raise BadRequest(f"{path}, served here, has a manifest of more than {most_bytes} bytes.")
        return bytearray(message)

    def pull(
        self,
        path: str,
        digests: Sequence[bytes],
        parts: Sequence[Part],
        sinks: Sequence[Sink],
        *,
        into: Memory | None = None,
        on_bytes: Callable[[int], None] | None = None,
        on_part: Callable[[Part], None] | None = None,
    ) -> None:
        """As `Parts.pull`.

        Raises:
            Gone: it was withdrawn meanwhile. PartCorrupt: the disk has damaged it.
        """
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for part in parts:
            hasher, offset = blake3(), part.start
            while offset < part.stop:
                most = min(CHUNK_BYTES, part.stop - offset)
                room = into.room(offset, most) if into is not None else None
                run = scratch[:most] if room is None else room
                self._read(run, offset, part, path)
                hasher.update(run)
                if into is not None and room is None:
                    into.write(offset, run)
                for sink in sinks:
                    sink.write(offset, run)
                offset += len(run)
                self.on_read(len(run))
                if on_bytes:
                    on_bytes(len(run))
            if self.gone.is_set():  # asked after the reading: what was right until here is right
                raise Gone(f"{path} is served here no more.")
            if hasher.digest() != digests[part.index]:
                raise PartCorrupt(f"Part {part.index} of {path}, served here, is not what it was.", "Look at the disk.")
            failpoint("pull.part")
            if on_part:
                on_part(part)

    def _read(self, run: memoryview, offset: int, part: Part, path: str) -> None:
        try:
            read_at(self.fd, run, offset)
        except (OSError, EOFError) as error:  # over a socket it would be a peer that breaks off
            if self.gone.is_set():
                raise Gone(f"{path} is served here no more.") from error
            raise PartCorrupt(f"Part {part.index} of {path}, served here: {error}.", "Look at the disk.") from error

    def close(self) -> None:
        os.close(self.fd)


Ranges = Parts | OwnFile
"""Where parts are pulled from: over connections, or in this process."""
