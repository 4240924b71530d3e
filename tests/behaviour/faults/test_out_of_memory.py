"""A server that gets no more memory ends; started again with more, it has lost nothing."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest
from harness.processes import Nursery
from kit import FederatedSites, ForkedServer, exported, serve, tensors_digest

ROUNDS = 3


def memory_bytes(pid: int) -> int:
    """The address space of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    with serve(folder, **{"rounds.total": ROUNDS}) as server:
        FederatedSites(server.url, folder).join()
    return tensors_digest(exported(folder))


@pytest.mark.covers("F27")
@pytest.mark.parametrize("spare_bytes", [-(100 << 20), 0, 1 << 20], ids=["less than it has", "what it has", "1 MiB"])
def test_a_server_without_memory_ends_and_its_next_start_has_lost_nothing(
    tmp_path: Path, nursery: Nursery, undisturbed: str, spare_bytes: int
) -> None:
    """Its address space is limited while both sites train in round 2, and they train until it has ended."""
    limited, ended = threading.Event(), threading.Event()
    sites_train = threading.Barrier(2)
    with ForkedServer(nursery, tmp_path, **{"rounds.total": ROUNDS}) as server:

        def during(site: str, number: int) -> None:
            if number == 2:
                sites_train.wait(60)
                if site == "a":
                    pid = server.kept.now.pid
                    resource.prlimit(pid, resource.RLIMIT_AS, (memory_bytes(pid) + spare_bytes, resource.RLIM_INFINITY))
                    limited.set()
                assert ended.wait(100)

        sites = FederatedSites(server.url, tmp_path, during=during)
        assert limited.wait(60)
        assert server.kept.wait(60) not in (0, None), "it ends by itself, and as one that failed"
        ended.set()
        with ForkedServer(nursery, tmp_path, port=server.port, **{"rounds.total": ROUNDS}) as again:
            sites.join()
            assert again.kept.wait(60) == 0  # it has exported the model
    assert tensors_digest(exported(tmp_path)) == undisturbed
    assert set(sites.trained.values()) == {1}, "no site trains a round again"
