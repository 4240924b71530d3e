"""Workers with a model that FSDP2 has sharded over ranks, real processes on Gloo: each rank moves its own share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from harness.processes import Nursery
from kit.processes import export_model
from kit.servers import plain_server
from sharded_world import World, build, expected, require_close, rows, told


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
def test_sharded_workers_train_as_one_that_is_whole(nursery: Nursery, tmp_path: Path) -> None:
    """Three rounds of two sites of two ranks, to 1e-12; and each rank moves its parts, the two together the model.

    Between the ranks go the elements of rank 1's rows in tiles that begin in rank 0's: of wide.weight 4·4096 − 151·97
    = 1,737, of wide.bias 150, of down.weight 3·301 = 903, of down.bias 3; nothing of the last layer: its row is rank
    0's. To rank 0 before each of three updates, back to rank 1 after each of four versions; 8 bytes each.
    """
    with World(nursery, tmp_path, H=3, rounds=3, sites=2) as world:
        world.ended(world.site("a"), world.site("b"))
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


def test_each_rank_keeps_its_own_share_on_disk(nursery: Nursery, tmp_path: Path) -> None:
    """The base file is as long as the version, and so is what error feedback keeps; most of them are holes."""
    with World(nursery, tmp_path, H=2, rounds=1, sites=1, codec="int8") as world:
        world.ended(world.site("a"))
    for rank in (0, 1):
        (folder,) = (tmp_path / "workers" / "a" / f"rank-{rank}-of-2").iterdir()
        whole = (folder / "base.safetensors").stat().st_size
        assert whole > 8 * sum(parameter.numel() for parameter in build().parameters())
        most = 0.75 * whole  # in whole pages
        kept = {path.name: path.stat().st_blocks * 512 for path in folder.iterdir()}
        assert 0 < kept["base.safetensors"] <= most
        assert 0 < max(kept["residual-0.bin"], kept["residual-1.bin"]) <= most


@pytest.mark.covers("D4")
def test_a_site_that_is_divided_anew_keeps_no_files_of_its_earlier_divisions(nursery: Nursery, tmp_path: Path) -> None:
    home = tmp_path / "workers" / "a"
    for ranks, how in ((1, {"sharded": ""}), (3, {}), (2, {})):
        run: dict[str, Any] = {
            "disk.state_dir": f"state-{ranks}",
            "model.ranks": ranks,
            "diloco.sync_every": 2,
            "rounds.total": 1,
        }
        with World(nursery, tmp_path, sites=1, **run) as world:
            world.ended(world.site("a", ranks=ranks, **how))
        if ranks == 3:
            assert {path.name for path in home.iterdir()} == {f"rank-{rank}-of-3" for rank in range(3)}
    assert {path.name for path in home.iterdir()} == {"rank-0-of-2", "rank-1-of-2"}


def test_a_rank_may_have_no_rows(nursery: Nursery, tmp_path: Path) -> None:
    """Of three ranks the second has the border of two tiles, and the last no row of two tensors."""
    assert [rows(build().last.weight, rank, 3).numel() for rank in range(3)] == [7, 0, 0]
    with World(nursery, tmp_path, H=2, rounds=2, sites=1, **{"model.ranks": 3}) as world:
        world.ended(world.site("a", ranks=3))
    require_close(tmp_path, expected("a", sync_every=2, rounds=2), ranks=3)


def test_sharded_and_whole_workers_train_together(nursery: Nursery, tmp_path: Path) -> None:
    right = expected("ab", sync_every=3, rounds=2)
    with World(nursery, tmp_path, H=3, rounds=2, sites=2) as world:
        world.ended(world.site("a"), world.site("b", ranks=1, sharded=""))
    require_close(tmp_path, {"a": right["a"]})
    require_close(tmp_path, {"b": right["b"]}, ranks=1)
    assert told(tmp_path, "b", 0)["bytes_down"] == 3 * base_bytes(tmp_path, "b")
    assert told(tmp_path, "b", 0)["bytes_up"] == 2 * update_bytes()


def test_one_rank_has_the_whole_of_a_sharded_model(nursery: Nursery, tmp_path: Path) -> None:
    with World(nursery, tmp_path, H=2, rounds=1, sites=1, **{"model.ranks": 2}) as world:
        world.ended(world.site("a", ranks=1))
    require_close(tmp_path, expected("a", sync_every=2, rounds=1), ranks=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", ["bf16", "int4", "topk"])
def test_every_rank_ends_with_its_rows_of_the_runs_model(
    nursery: Nursery, tmp_path: Path, dtype: str, codec: str
) -> None:
    """To the bit, in other dtypes and codecs: the last version has come to where it belongs."""
    how = {"aggregation.upload_codec.name": codec, "model.args": {"dtype": dtype}}
    with World(nursery, tmp_path, H=2, rounds=2, sites=1, **how) as world:
        world.ended(world.site("a", dtype=dtype))
    model = safetensors.torch.load_file(tmp_path / "state/exports/model.safetensors")
    for rank in (0, 1):
        mine = safetensors.torch.load_file(tmp_path / f"a-{rank}.safetensors")
        for name, parameter in build(dtype).named_parameters():
            want = model[name] if name == "gain" else rows(model[name], rank, 2)
            assert mine[f"3/{name}"].dtype == parameter.dtype
            assert mine[f"3/{name}"].equal(want), name
            assert not want.numel() or not want.equal(rows(parameter, rank, 2) if name != "gain" else parameter)


@pytest.mark.covers("L16")
@pytest.mark.parametrize("down", ["none", "int8"])
def test_codecs_lose_what_they_lose_of_a_whole_model(nursery: Nursery, tmp_path: Path, down: str) -> None:
    """int8 has its blocks, and error feedback its residuals, where they are without ranks: the numbers are the same."""
    folders = {name: tmp_path / name for name in ("sharded", "whole")}
    for name, folder in folders.items():
        folder.mkdir()
        how = {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": down}
        with World(nursery, folder, H=2, rounds=3, sites=1, **how) as world:
            world.ended(world.site("a") if name == "sharded" else world.site("a", ranks=1, sharded=""))
    whole = safetensors.torch.load_file(folders["whole"] / "a-0.safetensors")
    right = [{name: whole[f"{step}/{name}"] for name, _ in build().named_parameters()} for step in range(6)]
    require_close(folders["sharded"], {"a": right}, most=1e-10)
    plain = expected("a", sync_every=2, rounds=3)["a"]
    assert any(float((right[5][name] - plain[5][name]).abs().max()) > 1e-6 for name in right[5])  # int8 did lose
    # the first version comes whole; of fp64, the others as an eighth and scales
    times = sum(told(folders["sharded"], "a", rank)["bytes_down"] for rank in (0, 1)) / base_bytes(folders["sharded"])
    assert times == 4 if down == "none" else 1 + 3 / 8 < times < 1 + 3 / 6


MEAN = """
def mean(updates):
    total = sum(update.weight for update in updates)
    for name in updates[0].tensors:
        yield name, sum(update.tensors[name] * (update.weight / total) for update in updates)
"""


def test_an_aggregator_of_ones_own_and_the_export_know_nothing_of_ranks(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MEAN)
    right = expected("ab", sync_every=2, rounds=2)
    aggregator = str(tmp_path / "mine.py") + ":mean"
    with World(nursery, tmp_path, H=2, rounds=2, sites=2, **{"aggregation.aggregator.path": aggregator}) as world:
        world.ended(world.site("a"), world.site("b"))
    require_close(tmp_path, right)
    assert export_model(nursery, tmp_path, "out.safetensors", "--dir", "state") == 2
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert found.keys() == build().state_dict().keys()
    for name, value in right["a"][-1].items():
        assert float((found[name] - value).abs().max()) <= 1e-12, name


def test_a_running_server_is_exported_from_though_its_versions_are_cut_for_ranks(
    nursery: Nursery, tmp_path: Path
) -> None:
    model = build()
    with plain_server(tmp_path, model, algorithm="diloco", part_bytes=2**16, **{"model.ranks": 3}) as server:
        assert export_model(nursery, tmp_path, "out.safetensors", "--server", server.url) == 0
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert all(found[name].equal(value) for name, value in model.state_dict().items())
