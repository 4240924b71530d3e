"""The tests' own kit does what its users rely on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from harness.processes import Nursery
from kit import DiLoCoSites, FederatedSites, ForkedServer, ForkedSite, copy_folder, exported, serve, tensors_digest
from kit.models import build_model, wide_model
from kit.wire import WireSite
from kit.world import World

import atoll

SCRIPT = """
import os

import atoll
from kit.models import SITES, build_model, train_

site, model = os.environ["ATOLL_SITE"], build_model()
with atoll.join() as worker:
    for fl_round in worker:
        fl_round.load_into(model)
        train_(model, site, fl_round.number)
        fl_round.submit(model, weight=SITES[site])
"""


def test_threads_and_forked_processes_give_equal_results(tmp_path: Path, nursery: Nursery) -> None:
    """A run with sites in threads exports the same bits as a run with sites in forked processes."""
    threads, forked = tmp_path / "threads", tmp_path / "forked"
    forked.mkdir()
    with serve(threads) as server:
        sites = FederatedSites(server.url, threads)
        sites.join()
        server.run()
    assert sites.trained == {(site, number): 1 for site in "ab" for number in (1, 2, 3)}
    with ForkedServer(nursery, forked) as remote:
        processes = [ForkedSite(nursery, forked, remote.url, site, SCRIPT).start() for site in "ab"]
        assert [process.wait(60) for process in processes] == [0, 0]
        assert remote.process.wait() == 0
    assert tensors_digest(exported(threads)) == tensors_digest(exported(forked))


def test_a_finished_world_can_be_inspected(tmp_path: Path) -> None:
    """After `World.run`, a test can read the counted updates, the trained rounds, the result and the log."""
    world = World(tmp_path, build_model(), "ab", rounds=2)
    sites = world.run()
    assert world.counted == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert sites.trained == dict.fromkeys(world.counted, 1)
    assert world.result.keys() == build_model().state_dict().keys()
    assert "the run is finished at version 2" in world.text


def test_diloco_sites_end_with_the_exported_model(tmp_path: Path) -> None:
    """After a DiLoCo run, the models of all sites have the parameters of the exported model."""
    with serve(
        tmp_path,
        **{
            "algorithm.name": "diloco",
            "diloco.sync_every": 2,
            "rounds.total": 2,
            "aggregation.upload_codec.name": "none",
        },
    ) as server:
        sites = DiLoCoSites(server.url, tmp_path, steps=10)
        sites.join()
        server.run()
    digests = {tensors_digest(dict(model.named_parameters())) for model in sites.models.values()}
    model = exported(tmp_path)
    parameters = {name: model[name] for name, _ in sites.models["a"].named_parameters()}
    assert digests == {tensors_digest(parameters)}


def test_a_digest_covers_names_dtypes_shapes_and_bytes() -> None:
    """The digest of tensors differs if a name, dtype, shape or value differs. The order of the tensors does not
    matter.
    """
    plain = {"w": torch.tensor([[1.0, 2.0]])}
    others = [
        {"v": plain["w"]},
        {"w": plain["w"].view(torch.int32)},
        {"w": plain["w"].reshape(2, 1)},
        {"w": torch.tensor([[1.0, -2.0]])},
        {**plain, "empty": torch.zeros(0)},
    ]
    assert len({tensors_digest(each) for each in [plain, *others]}) == 6
    assert tensors_digest({"b": torch.ones(1), "a": torch.zeros(1)}) == tensors_digest(
        {"a": torch.zeros(1), "b": torch.ones(1)}
    )


def test_a_copied_folder_keeps_bytes_and_holes(tmp_path: Path) -> None:
    """A copy of a folder has the bytes of the original, and its sparse files stay sparse."""
    source = tmp_path / "source"
    (source / "slots").mkdir(parents=True)
    with (source / "slots" / "sparse").open("wb") as file:
        file.truncate(2**24)
        file.seek(2**20)
        file.write(b"data")
    (source / "note").write_bytes(b"note")
    copy = copy_folder(source, tmp_path / "copy")
    assert (copy / "note").read_bytes() == b"note"
    assert (copy / "slots" / "sparse").read_bytes() == (source / "slots" / "sparse").read_bytes()
    assert os.stat(copy / "slots" / "sparse").st_blocks < 2**20 // 512


def test_a_wire_site_matches_a_joined_site(tmp_path: Path) -> None:
    """A site that sends plain HTTP requests gives the same bits as a site that joins and calls `submit`."""
    # The model has several parts and an integer buffer.

    def add_(tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor += 3 if name.endswith("num_batches_tracked") else 0.5

    for place in ("joined", "wire"):
        with serve(tmp_path / place, wide_model(), rounds=2, sites=1) as server:
            if place == "joined":
                with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
                    for fl_round in worker:
                        state = fl_round.state_dict()
                        add_(state)
                        fl_round.submit(state)
            else:
                site = WireSite(server.url, "a")
                for _ in range(2):
                    site.train(add_).submit()
                assert site.ask()["status"] == "finished"
                site.leave()
            server.run()
    assert tensors_digest(exported(tmp_path / "joined")) == tensors_digest(exported(tmp_path / "wire"))
