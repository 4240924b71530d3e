"""Text for messages: ids that differ."""

from __future__ import annotations

import pytest

from atoll.blobs.manifest import Cuts, Manifest
from atoll.errors import PartCorrupt
from atoll.format_text import where_different


def test_two_ids_are_shown_where_they_differ() -> None:
    """Of two different ids, at most twelve characters are shown: the first ones if these differ, else those around the
    first difference.
    """
    assert where_different("a" * 64, "b" * 64) == ("a" * 12, "b" * 12)
    assert where_different("a" * 64, "a" * 11 + "b" * 53) == ("a" * 12, "a" * 11 + "b")
    assert where_different("a" * 64, "a" * 40 + "b" * 24) == ("…" + "a" * 12, "…" + "a" * 6 + "b" * 6)
    assert where_different("a" * 64, "a" * 63 + "b") == ("…" + "a" * 7, "…" + "a" * 6 + "b")


@pytest.mark.covers("X3")
def test_an_error_shows_where_ids_differ() -> None:
    """If a blob has another id than expected, the error shows both ids where they differ.

    So two ids with the same beginning do not look equal in the error.
    """
    manifest = Manifest.of_cuts(Cuts(64, 128, 64), [b"0" * 32, b"1" * 32])
    other = manifest.id[:30] + ("0" if manifest.id[30] != "0" else "1") + manifest.id[31:]
    with pytest.raises(PartCorrupt) as refused:
        manifest.require_id(other, "The update")
    assert f"has the id …{manifest.id[24:36]}, not …{other[24:36]}." in refused.value.message
