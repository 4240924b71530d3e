"""Workers with a model that FSDP2 has sharded over ranks, real processes on Gloo: each rank moves its own share."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
from harness.processes import Nursery
from kit.processes import export
from kit.servers import plain_server
from sharded_world import ShardedRun, build, expected, require_close, rows, share, steps_of, told


def base_bytes(folder: Path, site: str = "a") -> int:
    """The size of a version, as a site has it on disk; a rank's file has holes for what others have."""
    return next((folder / "workers" / site).rglob("base.safetensors")).stat().st_size


def update_bytes() -> int:
    """The size of an update without a codec: every tensor once, up to the next multiple of 64 bytes."""
    sizes = (
        value.numel() * value.element_size() for name, value in build().state_dict().items() if name != "tied.weight"
    )
    return sum(-(-size // 64) * 64 for size in sizes)


@pytest.mark.covers("P4")
def test_sharded_workers_train_like_unsharded_workers(nursery: Nursery, tmp_path: Path) -> None:
    """Two sites of two ranks each train for three rounds like unsharded workers, to 1e-12."""
    # Each rank moves its own parts, and both together move the model. The ranks exchange the elements of rank 1's rows
    # in tiles that begin in rank 0's rows. These are 4·4096 − 151·97 = 1,737 of wide.weight, 150 of wide.bias, 3·301 =
    # 903 of down.weight and 3 of down.bias. These elements go to rank 0 before each of three updates, and back to rank
    # 1 after each of four versions, with 8 bytes each.
    with ShardedRun(nursery, tmp_path, H=3, rounds=3, sites=2) as served:
        served.ended(served.site("a"), served.site("b"))
    require_close(tmp_path, expected("ab", sync_every=3, rounds=3))
    for site in "ab":
        ranks = [told(tmp_path, site, rank) for rank in (0, 1)]
        # four versions are pulled, the first and one a round
        assert sum(said["bytes_down"] for said in ranks) == 4 * base_bytes(tmp_path, site)
        assert sum(said["bytes_up"] for said in ranks) == 3 * update_bytes()
        assert [said["given"] for said in ranks] == [4 * 8 * (1737 + 150 + 903 + 3), 3 * 8 * (1737 + 150 + 903 + 3)]
        for said in ranks:
            assert 0.35 < said["bytes_up"] / (3 * update_bytes()) < 0.65
            assert 0.35 < said["bytes_down"] / (4 * base_bytes(tmp_path, site)) < 0.65
            # 9 forwards count up by one and by 0.25; integers take the maximum, floats the mean
            assert (said["seen"], said["mean"]) == (9, [2.25] * 3)


@pytest.mark.covers("D4", "P4")
def test_each_run_may_have_another_number_of_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """A site may train in one run with one rank, in the next with three and then with two."""
    # No files of earlier ranks stay. Of three ranks, the second has the border of two tiles, and the last has no row of
    # two tensors.
    assert [rows(build().last.weight, rank, 3).numel() for rank in range(3)] == [7, 0, 0]
    home, right = tmp_path / "workers" / "a", expected("a", sync_every=2, rounds=1)
    for ranks in (1, 3, 2):
        run = {"disk.state_dir": f"state-{ranks}", "model.ranks": max(2, ranks)}
        with ShardedRun(nursery, tmp_path, H=2, rounds=1, sites=1, **run) as served:
            served.ended(served.site("a", ranks=ranks))
        require_close(tmp_path, right, ranks=ranks)
        if ranks > 1:
            assert {path.name for path in home.iterdir()} == {f"rank-{rank}-of-{ranks}" for rank in range(ranks)}


@pytest.mark.covers("P4")
def test_all_ranks_sit_out_together(nursery: Nursery, tmp_path: Path) -> None:
    """A sharded site with weight 0 sits out with all its ranks, and gets the versions made from the other site's
    updates.
    """
    with ShardedRun(nursery, tmp_path, H=3, rounds=2, sites=2) as served:
        served.ended(served.site("a"), served.site("b", weight=0))
    require_close(tmp_path, expected("a", sync_every=3, rounds=2))
    assert [told(tmp_path, "b", rank)["bytes_up"] for rank in (0, 1)] == [0, 0]


def test_sharded_and_unsharded_workers_train_together(nursery: Nursery, tmp_path: Path) -> None:
    """A run of one sharded and one unsharded worker gives both the parameters that the specification expects."""
    right = expected("ab", sync_every=3, rounds=2)
    with ShardedRun(nursery, tmp_path, H=3, rounds=2, sites=2) as served:
        served.ended(served.site("a"), served.site("b", ranks=1, sharded=""))
    require_close(tmp_path, {"a": right["a"]})
    require_close(tmp_path, {"b": right["b"]}, ranks=1)
    assert told(tmp_path, "b", 0)["bytes_down"] == 3 * base_bytes(tmp_path, "b")
    assert told(tmp_path, "b", 0)["bytes_up"] == 2 * update_bytes()


@pytest.mark.covers("L3", "L5", "F9")
def test_an_async_run_with_one_worker_is_synchronous(nursery: Nursery, tmp_path: Path) -> None:
    """An asynchronous run with one worker gives the parameters of the synchronous run, also if the server is killed
    after it accepted an update.
    """
    # Each update is applied to the version that it was computed from.
    with ShardedRun(
        nursery, tmp_path, ("accept.after=kill@2",), H=2, rounds=3, sites=1, **{"async.enabled": True}
    ) as served:
        served.ended(served.site("a"))
        assert served.process.deaths == 1
    require_close(tmp_path, expected("a", sync_every=2, rounds=3))


@pytest.mark.covers("L5")
def test_async_sharded_workers_end_with_the_model(nursery: Nursery, tmp_path: Path) -> None:
    """At the end of an asynchronous run, a sharded and an unsharded worker both have the run's model."""
    # The workers overtake each other freely. The run is over after eight updates.
    with ShardedRun(nursery, tmp_path, H=2, rounds=8, sites=2, codec="int8", **{"async.enabled": True}) as served:
        served.ended(served.site("a"), served.site("b", ranks=1, sharded=""))
    model = safetensors.torch.load_file(tmp_path / "state/exports/model.safetensors")
    for site, ranks in (("a", 2), ("b", 1)):
        (last,) = {told(tmp_path, site, rank)["step"] - 1 for rank in range(ranks)}
        for rank in range(ranks):
            mine = steps_of(tmp_path, site, rank)
            for name, start in build().named_parameters():
                assert mine[f"{last}/{name}"].equal(share(name, model[name], rank, ranks)), (site, rank, name)
                assert not model[name].equal(start)


@pytest.mark.covers("L16")
def test_ranks_receive_their_share_of_compressed_versions(nursery: Nursery, tmp_path: Path) -> None:
    """With the download codec int8, each rank downloads only its share of the versions: the first whole, the later ones
    as differences.
    """
    # The base file and the error feedback of each rank have the full length, but their files have holes for what the
    # rank lacks.
    down = {"aggregation.download_codec.name": "int8"}
    with ShardedRun(nursery, tmp_path, H=2, rounds=3, sites=1, codec="int8", **down) as served:
        served.ended(served.site("a"))
    # the first version comes whole; of fp64, the others as an eighth and scales
    times = sum(told(tmp_path, "a", rank)["bytes_down"] for rank in (0, 1)) / base_bytes(tmp_path)
    assert 1 + 3 / 8 < times < 1 + 3 / 6
    for rank in (0, 1):
        (folder,) = (tmp_path / "workers" / "a" / f"rank-{rank}-of-2").iterdir()
        nbytes = (folder / "base.safetensors").stat().st_size
        assert nbytes > 8 * sum(parameter.numel() for parameter in build().parameters())
        kept = {path.name: path.stat().st_blocks * 512 for path in folder.iterdir()}  # in whole pages
        assert 0 < kept["base.safetensors"] <= 0.75 * nbytes
        assert 0 < max(kept["residual-0.bin"], kept["residual-1.bin"]) <= 0.75 * nbytes


MEAN = """
def mean(updates):
    total = sum(update.weight for update in updates)
    for name in updates[0].tensors:
        yield name, sum(update.tensors[name] * (update.weight / total) for update in updates)
"""


def test_aggregators_and_exports_see_unsharded_models(nursery: Nursery, tmp_path: Path) -> None:
    """An own aggregator gets unsharded updates from workers of two ranks. The export has the unsharded model."""
    (tmp_path / "mine.py").write_text(MEAN)
    right = expected("ab", sync_every=2, rounds=2)
    aggregator = str(tmp_path / "mine.py") + ":mean"
    with ShardedRun(nursery, tmp_path, H=2, rounds=2, sites=2, **{"aggregation.aggregator.path": aggregator}) as served:
        served.ended(served.site("a"), served.site("b"))
    require_close(tmp_path, right)
    assert export(nursery, tmp_path / "out.safetensors", "--dir", "state") == 2
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert found.keys() == build().state_dict().keys()
    for name, value in right["a"][-1].items():
        assert float((found[name] - value).abs().max()) <= 1e-12, name


def test_an_export_joins_versions_cut_for_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """An export from a running server has the whole model, although the server keeps its versions cut for three
    ranks.
    """
    model = build()
    with plain_server(tmp_path, model, algorithm="diloco", part_bytes=2**16, **{"model.ranks": 3}) as server:
        assert export(nursery, tmp_path / "out.safetensors", "--server", server.url) == 0
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert all(found[name].equal(value) for name, value in model.state_dict().items())
