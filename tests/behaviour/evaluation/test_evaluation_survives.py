"""Servers and sites that are killed while sites evaluate, and where the bytes go."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from evaluation_world import MATRIX, TARGETS, losses, matrix_of, serve, start_site
from harness.process_figures import Peaks
from harness.processes import Nursery, Process, free_port, wait_until
from safetensors.torch import save_file

BIG = str(Path(__file__).parent / "big_site.py")


def start_server(nursery: Nursery, folder: Path, *flags: str, port: int) -> Process:
    return nursery.start("atoll", "server", "run.toml", "--port", str(port), *flags, cwd=folder)


def run_file(folder: Path) -> None:
    save_file({"weight": torch.zeros(1, 1)}, folder / "zero.safetensors")
    (folder / "run.toml").write_text(
        'algorithm.name = "fedavg"\nmodel.source = "zero.safetensors"\nrounds.total = 1\nrounds.sites = '
        '3\ndisk.state_dir = "state"\n'
        'disk.min_free_bytes = 0\n[[workflow.steps]]\nkind = "train"\n[[workflow.steps]]\nkind = '
        '"cross_site_evaluation"\n'
    )


@pytest.mark.covers("P9", "P12")
def test_a_server_that_is_killed_in_the_middle_evaluates_again_and_does_not_train_again(
    nursery: Nursery, tmp_path: Path
) -> None:
    run_file(tmp_path)
    port = free_port()
    server = start_server(nursery, tmp_path, port=port)
    wait_until(lambda: "listening on" in server.output(), "the server")
    url = f"http://127.0.0.1:{port}"
    sites = [start_site(nursery, tmp_path, url, name) for name in "ab"]
    sites.append(start_site(nursery, tmp_path, url, "c", "hangs"))
    wait_until((tmp_path / "c.hangs").exists, "an evaluation at c")
    server.kill()
    again = start_server(nursery, tmp_path, port=port)
    wait_until(lambda: "listening on" in again.output(), "the server")
    (tmp_path / "c.go").touch()
    assert again.wait(60) == 0
    assert [site.wait() for site in sites] == [0, 0, 0]
    assert losses(matrix_of(tmp_path)) == MATRIX
    assert "workflow 1 of 2, train, ended before this start" in again.output()
    assert [site.output().count("submitted") for site in sites] == [1, 1, 1]
    assert "round 1" not in again.output()


@pytest.mark.covers("P9")
def test_a_site_that_is_started_again_still_has_the_model_that_it_submitted(nursery: Nursery, tmp_path: Path) -> None:
    """It is killed while it evaluates, before it could have given its model anew; the run has no round for it."""
    with serve(tmp_path) as server:
        sites = [start_site(nursery, tmp_path, server.url, name) for name in "ab"]
        dying = start_site(nursery, tmp_path, server.url, "c", "hangs")
        wait_until((tmp_path / "c.hangs").exists, "an evaluation at c")
        dying.kill()
        sites.append(start_site(nursery, tmp_path, server.url, "c"))
        assert server.wait(60)
        server.run()
    assert [site.wait() for site in sites] == [0, 0, 0]
    assert losses(matrix_of(tmp_path)) == MATRIX
    assert "submitted" not in sites[2].output()


@pytest.mark.covers("P9")
def test_sends_each_model_to_the_server_once(nursery: Nursery, tmp_path: Path) -> None:
    """Three models of 8 MB, each evaluated at all sites: 3 · 8 MB come to the server, and 9 · 8 MB leave it.

    The last of these may not be counted whole when the run ends.
    """
    nbytes = 8_000_000
    only = ({"kind": "cross_site_evaluation"},)
    with serve(tmp_path, **{"workflow.steps": only, "rounds.total": 0}, has_model=False) as server:
        sites = [nursery.start(BIG, server.url, name, str(TARGETS[name]), str(nbytes), cwd=tmp_path) for name in "abc"]
        assert server.wait(90)
        server.run()
    assert [site.wait() for site in sites] == [0, 0, 0]
    assert losses(matrix_of(tmp_path)) == {name: MATRIX[name] for name in "abc"}
    run = server._run
    assert run is not None
    assert 3 * nbytes <= run.bytes_up < 3.03 * nbytes
    assert 8 * nbytes <= run.bytes_down < 9.09 * nbytes
    assert list((tmp_path / "state" / "objects").glob("*")) == []


@pytest.mark.slow
@pytest.mark.covers("P9", "D1")
@pytest.mark.usefixtures("fresh_processes")  # a forked one copies huge pages of its parent as it begins to work
def test_memory_is_flat_at_the_server_and_at_sites_that_evaluate(nursery: Nursery, tmp_path: Path) -> None:
    """A model that is 224 MB larger takes at most 32 MB more, which are buffers: no process holds a model.

    Two of the models are the sites', in files of theirs, and one is a file at the server. The small one has too few
    parts to keep all threads and their buffers busy, so it takes less by some 20 MB.
    """
    small, large = (peaks_mb(nursery, tmp_path / str(megabytes), megabytes) for megabytes in (32, 256))
    assert all(there < here + 32 for here, there in zip(small, large, strict=True)), (small, large)
    assert max(large) < 64, large


def peaks_mb(nursery: Nursery, folder: Path, megabytes: int) -> list[float]:
    """What the server, and the one of two equal sites that takes more, take beyond what they had at their start."""
    folder.mkdir()
    nbytes, port = megabytes * 2**20, free_port()
    save_file({"weight": torch.ones(1, nbytes // 4)}, folder / "global.safetensors")
    (folder / "run.toml").write_text(
        f'rounds.sites = 2\nnetwork.port = {port}\ndisk.state_dir = "state"\n[[workflow.steps]]\n'
        'kind = "cross_site_evaluation"\nversions = ["global.safetensors"]\n'
    )
    server = nursery.start("atoll", "server", "run.toml", cwd=folder)
    wait_until(partial(says, server, "listening on"), "the server")
    peaks, url = Peaks(), f"http://127.0.0.1:{port}"
    try:
        peaks.begin(server.pid)
        sites = [
            nursery.start(BIG, url, name, str(TARGETS[name]), str(nbytes), "lazy", cwd=folder) for name in ("a", "b")
        ]
        for site in sites:
            wait_until(partial(says, site, "begins"), "the site")
            peaks.begin(site.pid)
            (folder / f"{site.pid}.go").touch()
        assert server.wait(120) == 0, server.output()
        assert [site.wait() for site in sites] == [0, 0]
    finally:
        peaks.close()
    found = losses(matrix_of(folder))
    assert found["a"] == {"a": 0.0, "b": 18.0}
    assert len(found) == 3
    return [peaks.peak_mb(server.pid), max(peaks.peak_mb(site.pid) for site in sites)]


def says(process: Process, word: str) -> bool:
    return word in process.output()
