"""One process a site's folder, whatever becomes of the file that names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit import FederatedSites, serve

import atoll
from atoll.errors import StateLocked


@pytest.mark.covers("F29")
@pytest.mark.parametrize("lock", ["there", "removed", "another file"])
def test_refuses_a_second_process_of_a_site_on_its_folder(tmp_path: Path, lock: str) -> None:
    where = tmp_path / "workers"
    with serve(tmp_path) as server:
        with atoll.join(server.url, site="a", folder=where):
            (path,) = where.glob("a/*/lock")
            assert str(os.getpid()) in path.read_text()
            if lock != "there":
                path.unlink()
            if lock == "another file":
                path.write_text("process 1 on nowhere\n")
            with pytest.raises(StateLocked):
                atoll.join(server.url, site="a", folder=where)
        FederatedSites(server.url, tmp_path).join()  # the lock has ended with its worker
