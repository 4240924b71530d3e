"""An asynchronous step commits a new head, in a thread of its own, while a site is given its ticket."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from kit import joined, post, serve

from atoll.store.journal_tables import VersionRow
from atoll.store.versions import Versions


@pytest.mark.covers("L3")
def test_a_ticket_names_a_version_by_its_own_digest_though_the_head_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head moves on right after the server has looked at it, each time."""
    head, asked = Versions.head, threading.Event()

    def moving(versions: Versions, fragment: int = 0) -> VersionRow:
        row = head(versions, fragment)
        if not asked.is_set() and threading.current_thread().name == "atoll-server":
            looks.append(row)
            return replace(row, version=row.version + len(looks) - 1, digest=f"{len(looks):064x}")
        return row

    looks: list[VersionRow] = []
    with serve(tmp_path, **{"algorithm.name": "diloco", "async.enabled": True, "rounds.sites": 1}) as server:
        lease = joined(server.url, "a")
        monkeypatch.setattr(Versions, "head", moving)
        status, reply = post(server.url, "/v1/tickets", {"fragment": 0}, lease)
        asked.set()
        assert status == 200, reply
    ticket = reply["ticket"]
    assert ticket["base_version"] == looks[0].version
    versions = {row.version + look: f"{look + 1:064x}" for look, row in enumerate(looks)}
    assert ticket["base_digest"] == versions[ticket["base_version"]]
    assert reply["head_digest"] == versions[reply["head_version"]]
