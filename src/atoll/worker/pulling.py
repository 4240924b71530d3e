"""How a version of the model comes to a worker: part by part into its base file, and on the way into its tensors."""

from __future__ import annotations

from atoll.errors import Gone
from atoll.failpoints import failpoint
from atoll.tensors.chunks import Scatter
from atoll.tensors.modules import Tensors
from atoll.transport.parts import Parts
from atoll.wire import messages, routes
from atoll.worker import update
from atoll.worker.connection import Connection
from atoll.worker.files import BaseFile, BaseNote
from atoll.worker.reporting import LOG, progress


def pull_version(
    worker: Connection,
    parts: Parts,
    fragment: int,
    base: BaseFile,
    version: int,
    digest: str,
    into: Tensors | None,
    max_retries: int | None = None,
) -> None:
    """Bring a version into the base file, and on its way into the tensors.

    Args:
        parts: over which connections.
        fragment: of which it is a version.
        max_retries: attempts to begin with a lost server; once bytes have moved, it is waited for.

    Raises:
        Gone: the server no longer keeps it; ask for the head. The tensors may hold a part of it.
    """
    if base.holds(worker.info.run, digest):
        if into is not None:
            update.load_(into, base)
        return
    manifest_path = routes.MANIFEST.format(fragment=fragment, version=version)
    manifest = worker.patiently(
        lambda: worker.http.get(manifest_path, messages.Manifest), max_retries, f"pull version {version}"
    )
    if manifest.digest != digest:
        raise Gone(f"Version {version} is no longer the one that was offered.", "Ask for the head again.")
    held = base.note
    if held is not None and held.run == worker.info.run and held.version > version:
        LOG.warning(
            "%s: the server went back from version %d to %d: restored, or fell back after a power loss",
            worker.site,
            held.version,
            version,
        )
    digests = [bytes.fromhex(text) for text in manifest.part_digests]
    path = routes.VERSION_DATA.format(fragment=fragment, version=version, digest=digest)
    note = BaseNote(worker.info.run, fragment, version, digest, manifest.part_digests, complete=False)
    resumed = held is not None and held.digest == digest
    wanted = base.begin(note)
    model = Scatter(base.layout, into) if into is not None and not resumed else None
    again = False

    def fetch() -> None:
        nonlocal again
        todo = base.differing(manifest.part_digests, wanted) if again else wanted
        again = True
        bar.resume()
        parts.pull(path, digests, todo, [base], into=model, on_bytes=bar.add)

    worker.tell(state=f"pulling version {version}")
    of = f" of fragment {fragment}" if worker.info.fragments > 1 else ""
    with progress(f"{worker.site}: pulling version {version}{of}", sum(part.nbytes for part in wanted)) as bar:
        worker.patiently(fetch, None, f"pull version {version}")
    failpoint("pull.done")
    base.finish()
    if into is not None and resumed:
        update.load_(into, base)
