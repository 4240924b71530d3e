"""Objects that the server makes its own: a site's model stays while an evaluation needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.blobs.object_file import pack_object, write_object
from atoll.blobs.payload_cut import Cut
from atoll.errors import Busy, Conflict
from atoll.store.kept_objects import Kept, ObjectStore


def stored(objects: ObjectStore) -> tuple[Kept, str]:
    """Publish an object of 4,000 bytes of tensors."""
    object_id, fd = objects.draft()
    manifest = write_object(pack_object({"w": torch.ones(1000)}), fd, Cut(2**20))
    objects.discard(object_id)
    kept, secret = objects.open(manifest.cuts, inline=False, expires_s=60.0)
    objects.write(kept, memoryview(bytearray(manifest.nbytes)), 0)
    kept.digests.update(enumerate(manifest.part_digests))
    objects.complete(kept, manifest.id)
    return kept, secret


@pytest.mark.covers("P9")
def test_an_object_of_its_own_counts_no_more_does_not_expire_and_ends_with_the_server(tmp_path: Path) -> None:
    """All objects together may have 5,000 bytes: a second one fits once the first belongs to the server."""

    def opened() -> ObjectStore:
        return ObjectStore(tmp_path, max_bytes=5000, max_expires_s=60.0, idle_timeout_s=60.0)

    objects = opened()
    first, secret = stored(objects)
    with pytest.raises(Busy):
        stored(objects)
    assert objects.make_own(first.object, secret) is first
    second, _ = stored(objects)
    with pytest.raises(Conflict, match="belongs to the server"):
        objects.remove(first.object, secret)
    assert first.expires_at - second.expires_at > 365 * 86400
    objects.close()
    opened()
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {second.object}
