"""Workers whose model FSDP2 has sharded over two ranks, real processes on Gloo: each rank moves its own share."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharded_world import ended, expected, require_close, require_success, serve, start


@pytest.mark.slow
def test_sharded_workers_train_as_one_that_is_whole(tmp_path: Path) -> None:
    server = serve(tmp_path, sync_every=3, rounds=3, num_workers=2)
    with server:
        ranks = [each for site in "ab" for each in start(server.url, site, tmp_path)]
        with ended(ranks):
            require_success(ranks)
        server.run()
    require_close(tmp_path, expected("ab", sync_every=3, rounds=3))
    assert [worker.site for worker in server.status().workers] == ["a", "b"]
