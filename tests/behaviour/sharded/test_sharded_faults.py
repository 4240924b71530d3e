"""What befalls a sharded worker: its server killed, its update refused, a rank killed, a round that it missed."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
from harness.processes import Nursery, free_port, wait_until
from kit import serve
from kit.damage import damage_head
from kit.results import Result
from sharded_world import (
    SETTINGS,
    ShardedRun,
    build,
    expected,
    require_close,
    require_step,
    start_site,
    steps_of,
    trained,
)

from atoll.errors import RunFailed, ServerUnreachable, StoreError
from atoll.testing.run import status

PLAIN_OUTER = {"algorithm.outer_optimizer.lr": 1.0, "algorithm.outer_optimizer.momentum": 0.0}


@pytest.mark.covers("F7", "F8", "F9", "F12")
def test_ranks_survive_a_killed_server(nursery: Nursery, tmp_path: Path) -> None:
    """After the server was killed, rank 0 joins again, and the other ranks go on under its new lease. The results are
    those of an undisturbed run.
    """
    lives = ("part.received=kill@7", "accept.before=kill@2", "accept.after=kill", "head.after=kill")
    lives += ("part.recorded=kill@3",)
    with ShardedRun(nursery, tmp_path, lives, H=2, rounds=3, sites=2) as served:
        served.ended(served.site("a"), served.site("b"))
        assert served.process.deaths == len(lives), "a failpoint did not fire"
    require_close(tmp_path, expected("ab", sync_every=2, rounds=3))
    assert Result(tmp_path).counted() == [(site, number) for site in "ab" for number in (1, 2, 3)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_worker(nursery: Nursery, tmp_path: Path, rank: int) -> None:
    """If one rank is killed, the other ranks of its worker end and say why. A restarted worker goes on, and each update
    counts once.
    """
    with ShardedRun(nursery, tmp_path, H=2, rounds=3, sites=1) as served:
        points = ["", ""]
        points[rank] = "worker.acknowledged=kill@2"
        ranks = served.site("a", failpoints=(points[0], points[1]))
        assert ranks[rank].wait(60) == -signal.SIGKILL
        assert ranks[1 - rank].wait(60) == RunFailed.exit_code
        assert "Another rank of this worker ended" in ranks[1 - rank].output()
        served.ended(served.site("a"))
    assert Result(tmp_path).counted() == [("a", 1), ("a", 2), ("a", 3)]


@pytest.mark.covers("F2")
def test_restarted_ranks_send_their_stored_update(nursery: Nursery, tmp_path: Path) -> None:
    """If all ranks of a site die with an update that was not sent yet, the restarted ranks send it."""
    # Rank 1 dies with its share of round 2 in its outbox, before the message that all parts are sent.
    right = expected("a", sync_every=2, rounds=2)["a"]
    with ShardedRun(nursery, tmp_path, H=2, rounds=2, sites=1) as served:
        ranks = served.site("a", failpoints=("", "outbox.sealed=kill@2"))
        assert ranks[1].wait(60) == -signal.SIGKILL
        assert ranks[0].wait(60) == RunFailed.exit_code
        again = served.site("a")
        served.ended(again)
        assert "the server accepted the update of round 2 that an earlier process left" in again[0].output()
    assert Result(tmp_path).counted() == [("a", 1), ("a", 2)]
    final = safetensors.torch.load_file(tmp_path / "state/exports/model.safetensors")
    for name, value in right[-1].items():
        assert float((final[name] - value).abs().max()) <= 1e-12, name


@pytest.mark.parametrize("sharded", ["rows", pytest.param("", marks=pytest.mark.long)], ids=["sharded", "whole"])
def test_ranks_wait_for_a_long_round(nursery: Nursery, tmp_path: Path, sharded: str) -> None:
    """Ranks do not give each other up during a round that takes longer than the timeout of the process group."""
    # Site `b` is held up for more than twice the 2 s after which a rank gives up another.
    go = tmp_path / "go"
    with ShardedRun(nursery, tmp_path, H=2, rounds=1, sites=2) as served:
        b = served.site("b", ranks=1, sharded="", held={"1": str(go)})
        a = served.site("a", sharded=sharded, patience_s=2.0)
        wait_until(lambda: waits(served.url) > 4.5, "a long wait for b", 60)
        go.touch()
        served.ended(a, b)
    if sharded:
        require_close(tmp_path, {"a": expected("ab", sync_every=2, rounds=1)["a"]})


@pytest.mark.parametrize("sharded", [pytest.param("rows", marks=pytest.mark.long), ""], ids=["sharded", "whole"])
def test_ranks_wait_for_a_late_server(nursery: Nursery, tmp_path: Path, sharded: str) -> None:
    """Ranks do not give each other up if the server starts only after three times the 2 s after which a rank gives up
    another.
    """
    port = free_port()
    options = SETTINGS | {"network.port": port, "H": 2, "rounds": 1, "sites": 1}
    ranks = start_site(nursery, tmp_path, f"http://127.0.0.1:{port}", "a", sharded=sharded, patience_to_join_s=2.0)
    wait_until(lambda: "cannot join" in ranks[0].output(), "rank 0 to wait for the server", 60)
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() > began_s + 6.0 or any(rank.poll() is not None for rank in ranks), "6 s", 60)
    with serve(tmp_path, build(), **options):
        assert [rank.wait(90) for rank in ranks] == [0, 0], ranks[1].output()[-4000:]


def waits(url: str) -> float:
    """Seconds for which a round has waited for b alone."""
    try:
        missing = status(url).fragments[0].waiting_for
    except ServerUnreachable:
        return 0.0
    return missing[0].for_s if [each.site for each in missing] == ["b"] else 0.0


@pytest.mark.covers("F5")
def test_ranks_go_on_under_a_new_lease(nursery: Nursery, tmp_path: Path) -> None:
    """If the ranks were stopped until their lease had ended, rank 0 joins again, and the ranks train on under the new
    lease.
    """
    go, ways = tmp_path / "go", {"network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 1.0}
    with ShardedRun(nursery, tmp_path, H=2, rounds=2, sites=1, **ways) as served:
        ranks = served.site("a", held={"1": str(go)})
        wait_until(lambda: all((tmp_path / f"go.awaited-{rank}").exists() for rank in (0, 1)), "round one", 60)
        for rank in ranks:
            rank.send(signal.SIGSTOP)
        wait_until(lambda: status(served.url).workers[0].state == "dead", "the end of the lease", 60)
        for rank in ranks:
            rank.send(signal.SIGCONT)
        go.touch()
        served.ended(ranks)
    assert "the server no longer knows this worker; joining again" in ranks[0].output()
    require_close(tmp_path, expected("a", sync_every=2, rounds=2))


@pytest.mark.covers("F41")
def test_every_rank_resends_a_lost_versions_update(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server falls back to an earlier version, every rank sends its share of the lost version's update again."""
    # Version 2 is lost while the worker trains from it.
    from atoll.store.versions import Versions

    write_durable = Versions.write_durable

    def write_first(self: Versions, fragment: int = 0) -> int | None:
        return self.durable(fragment) if self.head(fragment).version > 1 else write_durable(self, fragment)

    monkeypatch.setattr(Versions, "write_durable", write_first)
    options = SETTINGS | {"network.port": free_port(), "H": 2, "rounds": 3, "sites": 1}

    def held(at: str) -> None:
        wait_until(lambda: all((tmp_path / f"{at}.awaited-{rank}").exists() for rank in (0, 1)), at, 60)

    with serve(tmp_path, build(), **options) as server:
        held_at = {"3": str(tmp_path / "one"), "5": str(tmp_path / "two")}
        ranks = start_site(nursery, tmp_path, server.url, "a", held=held_at)
        held("one")
        wait_until(lambda: server.status().durable_version == 1, "version 1 to be durable")
        (tmp_path / "one").touch()
        held("two")
    damage_head(tmp_path)
    with serve(tmp_path, build(), **options) as server:
        assert server.status().fragments[0].version == 1
        (tmp_path / "two").touch()
        for rank in ranks:
            assert rank.wait(60) == 0, rank.output()
        server.run()
    assert "the server fell back to version 1; submitting this site's update again" in ranks[0].output()
    require_close(tmp_path, expected("a", sync_every=2, rounds=3))


@pytest.mark.covers("X3")
def test_a_full_disk_ends_both_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """If the disk is full at one rank, both ranks end with an error that says which rank and why."""
    with ShardedRun(nursery, tmp_path, H=2, rounds=3, sites=1) as served:
        ranks = served.site("a", failpoints=("", "worker.write=enospc@4"))
        for rank in ranks:
            assert rank.wait(60) == StoreError.exit_code
        assert "rank-1-of-2" in ranks[0].output()
        assert "Rank 1: " in ranks[0].output()
        assert "cannot be written (failpoint worker.write: no space left on device)" in ranks[0].output()
        assert "no space left on device" in ranks[1].output()


@pytest.mark.covers("X3")
def test_a_refused_rank_resets_all_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """If the server refuses the part of one rank, all ranks of this worker go back to the global model and train on.

    The rows of the last rank become NaN in the second round.
    """
    with ShardedRun(nursery, tmp_path, H=2, rounds=3, sites=1) as served:
        ranks = served.site("a", poison=3)
        served.ended(ranks)
    assert "wide.weight" in ranks[0].output()
    assert "update refused: steps since version 1 are lost" in ranks[0].output()
    for rank in (0, 1):
        mine = steps_of(tmp_path, "a", rank)
        assert len(mine) == 8 * 7  # one round more than three, of seven parameters
        assert all(bool(value.isfinite().all()) for value in mine.values())
    assert Result(tmp_path).counted() == [("a", 1), ("a", 2), ("a", 3)]


@pytest.mark.covers("L25")
def test_local_steps_are_added_to_a_missed_version(nursery: Nursery, tmp_path: Path) -> None:
    """If a site missed a version, its local steps are added to the newest version, and its next update is computed from
    there.
    """
    # Site `b` is held up for a round, and the outer step is plain. Site `a` moves θ0 to θ1, which `b` never trained
    # from. Then `b` goes on from θ1 + (w − θ0) and θ2 = θ1 + (w − θ0).
    ways = PLAIN_OUTER | {"rounds.quorum": 1, "rounds.deadline_s": 0.2}
    with ShardedRun(nursery, tmp_path, H=2, rounds=2, sites=2, **ways) as served:
        first, go, stay = (tmp_path / name for name in ("first", "go", "stay"))
        a = served.site("a", ranks=1, sharded="", held={"1": str(first), "2": str(stay)})
        wait_until(Path(f"{first}.awaited-0").exists, "a in the run, which opens the round when b joins", 60)
        b = served.site("b", held={"1": str(go)})
        wait_until(Path(f"{go}.awaited-0").exists, "b, which has its ticket of round 1", 60)
        first.touch()
        wait_until(lambda: is_at(served.url, 1), "a round without b", 60)
        go.touch()
        assert b[0].wait(60) == 0, b[0].output()
        stay.touch()
        served.ended(a, b)
    assert "the local steps were added to it" in b[0].output()
    start, one, two = (trained(*local) for local in (("a", 0), ("a", 2), ("b", 4)))
    right = {name: one[name] + (two[name] - start[name]) for name in start}
    require_step(tmp_path, "b", 3, right)


def test_an_update_with_a_lost_acknowledgement_counts_once(nursery: Nursery, tmp_path: Path) -> None:
    """If the server dies after it accepted an update but before it answered, the restarted server counts the update
    once.
    """
    # The worker trains on meanwhile. With a plain outer step, the newest version is what the worker has trained, so a
    # repeated or lost step would show.
    back = tmp_path / "back"
    with ShardedRun(nursery, tmp_path, ("accept.after=kill",), H=2, rounds=2, sites=1, **PLAIN_OUTER) as served:
        ranks = served.site("a", max_sync_retries=0, held={"3": str(back)})
        wait_until(lambda: served.process.deaths == 1, "the server's death", 60)
        wait_until(lambda: is_at(served.url, 1), "the server's return", 60)
        back.touch()
        served.ended(ranks)
    assert "synchronisation at step 2 skipped" in ranks[0].output()
    assert "the server had accepted the update of round 1" in ranks[0].output()
    assert Result(tmp_path).counted() == [("a", 1), ("a", 2)]
    require_step(tmp_path, "a", 3, trained("a", 4))


def is_at(url: str, version: int) -> bool:
    """Whether a server answers there, and its head is this version."""
    with suppress(ServerUnreachable):
        return status(url).fragments[0].version == version
    return False
