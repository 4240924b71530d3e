"""How a version of the model comes to a worker: part by part into its base file, and on the way into its tensors."""

from __future__ import annotations

from atoll.errors import Gone
from atoll.failpoints import failpoint
from atoll.tensors.chunks import Scatter
from atoll.tensors.layout import Layout
from atoll.tensors.modules import Tensors
from atoll.transport.parts import Parts
from atoll.wire import messages, routes
from atoll.worker import update
from atoll.worker.connection import Connection
from atoll.worker.files import BaseFile, BaseNote
from atoll.worker.reporting import LOG, progress


class Pulling(Connection):
    """Part of `Session`, which makes what is named here."""

    parts: Parts
    layout: Layout
    base: BaseFile

    def pull(
        self,
        version: int,
        digest: str,
        into: Tensors | None,
        base: BaseFile | None = None,
        *,
        max_retries: int | None = None,
    ) -> None:
        """Bring a version into the base file, and on its way into the tensors.

        Args:
            max_retries: attempts to begin with a lost server; once bytes have moved, it is waited for.

        Raises:
            Gone: the server no longer keeps it; ask for the head. The tensors may hold a part of it.
        """
        base = base or self.base
        if base.holds(self.info.run, digest):
            if into is not None:
                update.load_(into, base)
            return
        manifest_path = routes.MANIFEST.format(fragment=0, version=version)
        manifest = self.patiently(
            lambda: self.http.get(manifest_path, messages.Manifest), max_retries, f"pull version {version}"
        )
        if manifest.digest != digest:
            raise Gone(f"Version {version} is no longer the one that was offered.", "Ask for the head again.")
        held = base.note
        if held is not None and held.run == self.info.run and held.version > version:
            LOG.warning(
                "%s: the server went back from version %d to %d: restored, or fell back after a power loss",
                self.site,
                held.version,
                version,
            )
        digests = [bytes.fromhex(text) for text in manifest.part_digests]
        path = routes.VERSION_DATA.format(fragment=0, version=version, digest=digest)
        note = BaseNote(self.info.run, 0, version, digest, manifest.part_digests, complete=False)
        resumed = held is not None and held.digest == digest
        wanted = base.begin(note)
        model = Scatter(self.layout, into) if into is not None and not resumed else None
        again = False

        def fetch() -> None:
            nonlocal again
            todo = [part for part in wanted if base.digest(part) != digests[part.index]] if again else wanted
            again = True
            bar.resume()
            self.parts.pull(path, digests, todo, [base], into=model, on_bytes=bar.add)

        self.heartbeat = self.heartbeat.model_copy(update={"state": f"pulling version {version}"})
        with progress(f"{self.site}: pulling version {version}", sum(part.nbytes for part in wanted)) as bar:
            self.patiently(fetch, None, f"pull version {version}")
        failpoint("pull.done")
        base.finish()
        if into is not None and resumed:
            update.load_(into, base)
