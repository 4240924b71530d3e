"""Lightning in processes of its own: two ranks on Gloo that are one site, what is imported when, and the example.

This file is also the script of the ranks: what each one saw goes into a file of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning_world
import pytest
from harness.processes import Nursery, free_port, wait_until
from kit import together
from kit.results import of_sites
from lightning_world import (
    PACKAGES,
    SAMPLES,
    Tiny,
    data,
    driver_of,
    fit_rounds,
    patched,
    rounds_of,
    scaffold_by_hand,
    serve,
    trainer_of,
)

import atoll
import atoll.integrations.lightning
from atoll.protocol import routes
from atoll.worker.session import session

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_sites.py"


def run_python(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def train_as_rank(package: str, out: Path, lr: float, patience_s: float) -> None:
    """What Lightning runs as two ranks; they give each other up after `patience_s`, unless it is 0."""
    import torch.distributed as dist

    lightning_world.usual = package
    trainer = trainer_of(devices=2, strategy="ddp", use_distributed_sampler=True)
    atoll.integrations.lightning.patch(trainer, folder=out / f"files-{trainer.global_rank}")
    if patience_s:
        routes.LONG_POLL_S = session.LONGEST_BACKOFF_S = patience_s / 4
        trainer.callbacks.insert(0, impatient(patience_s))
    module, locals_ = Tiny(lr=lr), []
    for _ in atoll.integrations.lightning.rounds(trainer):
        trainer.fit(module, data())
        locals_.append(module.w.item())
    told = {
        "locals": locals_,
        "result": module.w.item(),
        "files": (out / f"files-{trainer.global_rank}").exists(),
        "device": str(module.w.device),
        "joined": driver_of(trainer).info is not None,
    }
    (out / f"rank-{trainer.global_rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()  # else Gloo's threads may end the process with SIGABRT (pytorch issue 190489)


def impatient(patience_s: float) -> Any:
    """A callback that sets the timeout of the process group, for which the ranks can hardly start together."""
    from torch.distributed import distributed_c10d

    def setup(*_: Any, **__: Any) -> None:
        distributed_c10d._set_pg_timeout(timedelta(seconds=patience_s))

    return lightning_world.package().callbacks.LambdaCallback(setup=setup)


def run_ranks(package: str, url: str, out: Path, lr: float = 0.1) -> subprocess.CompletedProcess[str]:
    return run_python(__file__, package, out, lr, 0, ATOLL_SERVER=url, ATOLL_SITE="a")


@pytest.mark.slow
@pytest.mark.covers("S9")
@pytest.mark.parametrize("package", ["pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.long)])
def test_two_ranks_are_one_site(tmp_path: Path, package: str) -> None:
    """Two ranks of a Lightning Trainer are one site. Only rank 0 joins, and both ranks have the same model and
    correction.
    """
    # Each rank has 6 samples, which make 2 steps.
    rounds, done = 3, []
    with serve(tmp_path, "scaffold", rounds=rounds, sites=2) as server:
        together(
            lambda: done.append(run_ranks(package, server.url, tmp_path)),
            lambda: fit_rounds(patched(server, tmp_path / "b", "b"), Tiny(target=-3.0)),
            timeout_s=115,
        )
        assert done[0].returncode == 0, done[0].stderr[-3000:]
        ends, x = scaffold_by_hand({"a": (1.0, 2), "b": (-3.0, 3)}, rounds)
        told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        for rank in told:
            assert rank["locals"] == pytest.approx([end["a"] for end in ends], rel=1e-5)
            assert rank["result"] == pytest.approx(x, rel=1e-5)
            assert rank["device"] == "cpu"
        assert [rank["joined"] for rank in told] == [True, False]
        assert [rank["files"] for rank in told] == [True, False]
        assert [row.workers for row in rounds_of(server)] == [["a", "b"]] * rounds
        assert of_sites(rounds_of(server), "weight") == [[SAMPLES, SAMPLES]] * rounds  # of both ranks together


@pytest.mark.slow
@pytest.mark.covers("S9")
@pytest.mark.long
@pytest.mark.parametrize("package", PACKAGES)
def test_an_error_at_rank_0_ends_both_ranks(tmp_path: Path, package: str) -> None:
    """If the update of rank 0 is refused, rank 1 ends, too, and does not wait for ever."""
    # The update is refused because the learning rates sum up to 0.
    with serve(tmp_path, "scaffold", rounds=1) as server:
        done = run_ranks(package, server.url, tmp_path, lr=0.0)
        assert done.returncode != 0
        assert "sum of the learning rates of this round (2 steps) is 0" in done.stdout + done.stderr
        assert server.status().fragments[0].version == 0


@pytest.mark.slow
@pytest.mark.covers("S9")
def test_rank_1_waits_while_rank_0_waits_for_a_server(nursery: Nursery, tmp_path: Path) -> None:
    """Rank 1 keeps waiting as long as rank 0 waits for a server, although its timeout for rank 0 is shorter."""
    # The timeout is 3 s. Both ranks still wait 5 s after rank 0 has started to wait.
    environment = {"ATOLL_SERVER": f"http://127.0.0.1:{free_port()}", "ATOLL_SITE": "a", "CUDA_VISIBLE_DEVICES": ""}
    ranks = nursery.start(__file__, PACKAGES[0], str(tmp_path), "0.1", "3.0", cwd=tmp_path, env=environment)
    wait_until(lambda: "cannot join" in ranks.output() or ranks.poll() is not None, "the first attempt to join", 90)
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() > begin_s + 5.0 or ranks.poll() is not None, "5 s", 60)
    assert ranks.poll() is None, ranks.output()[-4000:]
    ranks.kill()


IMPORTS = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import lightning_world
lightning_world.usual = sys.argv[2]
for algorithm in ("fedavg", "scaffold"):
    folder = Path(sys.argv[3]) / algorithm
    with lightning_world.serve(folder, algorithm, rounds=1) as server:
        lightning_world.patched(server, folder).fit(lightning_world.Tiny(), lightning_world.data())
        assert server.wait(60)
        assert ("atoll.algorithms.scaffold" in sys.modules) == (algorithm == "scaffold")
"""


@pytest.mark.slow
@pytest.mark.covers("S1")
@pytest.mark.parametrize("package", [PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.long)])
def test_scaffold_is_imported_only_when_used(tmp_path: Path, package: str) -> None:
    """With Lightning, Atoll imports its SCAFFOLD module only if the run uses SCAFFOLD."""
    # tests/test_architecture.py shows that `atoll.integrations.lightning` itself does not import Lightning.
    done = run_python("-c", IMPORTS, Path(__file__).parent, package, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.covers("S15", "S13")
@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["scaffold", "diloco"])
def test_the_lightning_example_trains_two_sites(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Lightning example trains two sites for two rounds, and names its run after the algorithm."""
    monkeypatch.chdir(tmp_path)
    done = run_python(EXAMPLE, "--algorithm", algorithm, "--rounds", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert said[0].startswith(f"run lightning-{algorithm} at http://127.0.0.1:")
    rounds = [line for line in said if line.startswith(f"lightning-{algorithm} round ")]
    assert len(rounds) == 2
    if algorithm == "scaffold":
        assert all("accuracy" in line and "global_accuracy" in line for line in rounds)


if __name__ == "__main__":
    train_as_rank(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
