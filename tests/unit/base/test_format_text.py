"""Text for messages: ids that differ."""

from __future__ import annotations

import pytest

from atoll.blobs.manifest import Cuts, Manifest
from atoll.errors import PartCorrupt
from atoll.format_text import where_different


def test_shows_two_ids_where_they_differ() -> None:
    """Twelve characters are shown: the first ones if they differ there, else those around the first difference."""
    assert where_different("a" * 64, "b" * 64) == ("a" * 12, "b" * 12)
    assert where_different("a" * 64, "a" * 11 + "b" * 53) == ("a" * 12, "a" * 11 + "b")
    assert where_different("a" * 64, "a" * 40 + "b" * 24) == ("…" + "a" * 12, "…" + "a" * 6 + "b" * 6)
    assert where_different("a" * 64, "a" * 63 + "b") == ("…" + "a" * 7, "…" + "a" * 6 + "b")


@pytest.mark.covers("X3")
def test_different_ids_show_where_they_differ() -> None:
    """The error for another blob shows where the ids differ.

    Two ids with the same beginning do not look the same in the message.
    """
    manifest = Manifest.of_cuts(Cuts(64, 128, 64), [b"0" * 32, b"1" * 32])
    other = manifest.id[:30] + ("0" if manifest.id[30] != "0" else "1") + manifest.id[31:]
    with pytest.raises(PartCorrupt) as refused:
        manifest.require_id(other, "The update")
    assert f"has the id …{manifest.id[24:36]}, not …{other[24:36]}." in refused.value.message
