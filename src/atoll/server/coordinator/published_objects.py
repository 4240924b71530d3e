"""The objects that processes publish at a server, and others download. `server/http` transfers their bytes."""

from __future__ import annotations

import time

from atoll.blobs.manifest import Cuts
from atoll.errors import BadRequest
from atoll.protocol import messages, routes
from atoll.server.coordinator.extension import Extension
from atoll.server.coordinator.run_core import RunCore
from atoll.store.kept_objects import ObjectStore
from atoll.transport.certificates import SiteIdentity


class PublishedObjects(Extension):
    """Carries out the operations on objects, and removes expired ones.

    Attributes:
        store: the objects.
    """

    name = "objects"

    def __init__(self, run: RunCore) -> None:
        super().__init__(run)
        self._run, disk = run, run.settings.disk
        self.store = ObjectStore(
            disk.state_dir / "objects",
            max_bytes=disk.objects_max_bytes,
            max_expires_s=disk.objects_expire_s,
            idle_timeout_s=run.settings.network.idle_timeout_s,
            most_bytes_of_one=run.settings.limits.site_object_bytes,
            least_bytes_per_s=routes.LEAST_BYTES_PER_S,
        )

    def tick(self, now_s: float) -> None:
        """Remove expired objects."""
        self.store.sweep()

    async def close(self) -> None:
        """Remove incomplete objects and the server's own ones."""
        self.store.close()

    async def open_object(
        self, message: messages.ObjectOpen, identity: SiteIdentity | None = None, payer: str = ""
    ) -> messages.ObjectOpened:
        """Create an empty object, to which the publisher sends parts. The answer has the object's secret.

        Args:
            message: sizes of the object.
            identity: what the publisher's credential proves. The object is then this site's alone.
            payer: the site, or else the address, that the object's bytes count for.

        Raises:
            BadRequest: the object is too large, or its part sizes are invalid.
            Busy, DiskFull: there is no space now.
        """
        cuts = Cuts(message.head_bytes, message.nbytes, message.part_bytes)
        cuts.require_object("The object")
        if message.inline and message.nbytes > routes.INLINE_BYTES:
            raise BadRequest(
                f"The object has {message.nbytes} bytes, too many to be sent inside a message.",
                f"Inside a message, send at most {routes.INLINE_BYTES} bytes. For more, leave chunk_bytes out.",
            )
        self._run.require_space()
        entry, secret = self.store.open(
            cuts,
            inline=message.inline,
            expires_s=message.expires_s,
            owner=identity.site if identity else "",
            payer=payer,
            key=message.key,
        )
        return messages.ObjectOpened(
            object=entry.object, secret=secret, expires_s=max(0.0, entry.expires_at - time.time())
        )

    async def complete_object(self, object: str, secret: str, message: messages.ObjectComplete) -> None:
        """Make an object downloadable after all its parts have arrived. The same request may be repeated.

        Raises:
            Gone: the object does not exist or has expired.
            AuthError: the secret does not belong to the object.
            Conflict: parts are missing, or do not match the digest.
            DiskFull, StoreError: the record of the object could not be written.
        """
        self.store.complete(self.store.find(object, secret), message.digest)

    async def get_object(self, object: str, secret: str) -> messages.BlobManifest:
        """Return the manifest of a complete object. If the object is inline, the manifest contains its bytes.

        Raises:
            Gone: the object does not exist or has expired.
            AuthError: the secret does not belong to the object.
            Conflict: the object is not complete.
        """
        entry = self.store.complete_one(object, secret)
        return messages.BlobManifest.of(entry.manifest, self.store.inline_bytes(entry))

    async def remove_object(self, object: str, secret: str) -> None:
        """Delete an object. Its running downloads end with an error.

        Raises:
            Gone: the object does not exist or has expired.
            AuthError: the secret does not belong to the object.
            Conflict: the object is the server's own.
        """
        self.store.remove(object, secret)
