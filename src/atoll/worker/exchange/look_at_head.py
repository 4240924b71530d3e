"""A look at the newest model in the middle of a round, which keeps its base and its ticket."""

from __future__ import annotations

from functools import partial

from atoll.errors import Gone
from atoll.protocol import messages, routes, status_messages
from atoll.tensors.module_tensors import Tensors
from atoll.worker.exchange import encode_update
from atoll.worker.session.session import Session


def load_beside(session: Session, into: Tensors, base_digest: str) -> None:
    """Pull the head into a file beside the base, and from there into the tensors.

    A head that is the base itself, the version with `base_digest`, needs no second file.

    No ticket is asked for: one of the head would take the place of the one under which the round is to be submitted.
    """
    moved = session.following()
    try:
        while True:
            status = session.patiently(
                partial(session.http.get, routes.STATUS, status_messages.Status), None, "look at the run"
            )
            path = routes.MANIFEST.format(fragment=0, version=status.fragments[0].version)
            try:
                head = session.patiently(
                    partial(session.http.get, path, messages.Manifest), None, "look at the newest version"
                )
                if head.digest == base_digest:
                    session.pull(head.version, head.digest, into)
                    return
                session.pull(head.version, head.digest, None, moved)
                break
            except Gone:  # the head moved on while it was pulled
                continue
        encode_update.load_(into, moved)
    finally:
        moved.close()
        session.tell(state="training")
