"""What a process serves to others: a file, its manifest, and who reads it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.protocol.object_manifest import FileManifest, Manifest


@dataclass(eq=False)
class Served:
    """An object of this process.

    Attributes:
        inline: whether its bytes go with its manifest.
        until_s: monotonic, when it expires.
        readers: requests that read `fd` at this moment; on the host's loop alone.
        gone: it is served no more.
        on_bytes: told what was sent.
    """

    sealed: str
    manifest: Manifest | FileManifest
    inline: bool
    fd: int
    until_s: float
    digest: str
    on_bytes: Callable[[int], None]
    readers: int = 0
    gone: threading.Event = field(default_factory=threading.Event)

    def close_if_unread(self) -> None:
        if self.gone.is_set() and not self.readers and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
