"""An algorithm of a third party: one file and one entry point, with a correction and a state of its own, every way in.

By hand, with η = 0.1, α = 0.5, two steps a round and the loss (w − 1)²/2, so that ∇ = w − 1:

    round 1, from 0        0.1       = 0 − 0.1·(−1)
                           0.185     = 0.1 − 0.1·(−0.9 + 0.5·0.1)                           λ ← −0.5·0.185 = −0.0925
    round 2, from 0.185    0.25725   = 0.185 − 0.1·(−0.815 + 0.0925)
                           0.3186625 = 0.25725 − 0.1·(−0.74275 + 0.0925 + 0.5·0.07225)
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit import serve
from kit.client import Client
from kit.servers import new_simulation
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll import functional
from atoll.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_algorithm"
RESULT = 0.3186625

SITE = """\
import torch
from torch import nn


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.w - target) ** 2 / 2).mean()}


def two_steps(model, optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1))["loss"].backward()
        optimizer.step()


def train(worker) -> None:
    model = One()
    for fl_round in worker:
        fl_round.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fl_round.correct(model, optimizer):
            two_steps(model, optimizer)
        fl_round.submit(model)
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example, as an installer leaves it: its module, and beside it the metadata with its entry point."""
    packages = tmp_path / "packages"
    metadata = packages / "feddyn_local-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(EXAMPLE / "feddyn_local.py", packages)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (packages / "site_code.py").write_text(SITE)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for name in ("feddyn_local", "site_code"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def settings(**more: Any) -> dict[str, Any]:
    plain = {
        "algorithm.outer_optimizer.name": None,
        "algorithm.outer_optimizer.lr": None,
        "algorithm.outer_optimizer.momentum": None,
    }
    return (
        plain | {"algorithm.name": "feddyn_local", "algorithm.alpha": 0.5, "rounds.sites": 1, "rounds.total": 2} | more
    )


def model() -> nn.Module:
    import site_code  # of the installed package

    made: nn.Module = site_code.One()
    return made


def by_the_loop(url: str, folder: Path) -> None:
    """Each round in a worker of its own: what the site keeps outlives it."""
    import site_code

    for _ in range(2):
        with atoll.join(url, site="a", folder=folder) as worker:
            site_code.train(iter([next(iter(worker))]))


def by_requests(url: str, folder: Path) -> None:
    import site_code

    with Client(url, site="a", folder=folder) as client:
        for _ in range(2):
            client.next_round()
            local = site_code.One()
            client.pull(local)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            with client.round.correct(local, optimizer):
                site_code.two_steps(local, optimizer)
            client.submit(local)


def by_functions(url: str, folder: Path) -> None:
    import site_code

    local = site_code.One()
    functional.init(url, site="a", folder=folder)
    while functional.is_running():
        received = functional.receive(into=local)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        received.correct(local, optimizer)
        site_code.two_steps(local, optimizer)
        functional.send(local)


def by_lightning(url: str, folder: Path) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from atoll.integrations import lightning

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return ((self.w - batch) ** 2 / 2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    lightning.patch(trainer, url, "a", folder=folder)
    module, batches = Module(), DataLoader([torch.ones(1)] * 2, batch_size=1)
    while lightning.is_running(trainer):
        trainer.fit(module, batches)


def by_transformers(url: str, folder: Path) -> None:
    import site_code
    import transformers

    from atoll.integrations.transformers import AtollCallback

    local = site_code.One()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
    transformers.Trainer(
        model=local,
        args=transformers.TrainingArguments(
            output_dir=str(folder / "trainer"), max_steps=100, max_grad_norm=0.0, use_cpu=True, **quiet
        ),
        train_dataset=[{"target": torch.tensor(1.0)}] * 8,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=[AtollCallback(server=url, site="a", folder=folder, sync_every=2)],
    ).train()


@pytest.mark.parametrize("train", [by_the_loop, by_requests, by_functions, by_lightning, by_transformers])
def test_corrects_and_keeps_state_whichever_way_a_site_trains(tmp_path: Path, train: Callable[..., None]) -> None:
    with serve(tmp_path, model(), **settings()) as server:
        train(server.url, tmp_path / "sites")
        assert server.wait(60)
        exported = load_file(server.exports / "model.safetensors")
    assert exported["w"].item() == pytest.approx(RESULT, rel=1e-6)


def test_corrects_and_keeps_state_in_a_simulation(tmp_path: Path) -> None:
    given = {"algorithm.name": "feddyn_local", "algorithm.alpha": 0.5, "rounds.total": 2}
    done = new_simulation(
        model(), script="site_code:train", sites=1, **{"disk.state_dir": tmp_path / "state"}, **given
    ).run()
    assert load_file(done.model)["w"].item() == pytest.approx(RESULT, rel=1e-6)


def test_trains_plainly_alone() -> None:
    """0.1 = 0 + 0.1·1, 0.19 = 0.1 + 0.1·0.9."""
    import site_code

    with atoll.join() as worker:
        fl_round = next(iter(worker))
        local = fl_round.load_into(site_code.One())
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        with fl_round.correct(local, optimizer) as steps:
            site_code.two_steps(local, optimizer)
        fl_round.submit(local)
    assert (local.w.item(), steps.steps) == (pytest.approx(0.19), 2)


def test_refuses_a_run_at_a_site_that_does_not_have_it(tmp_path: Path, nursery: Nursery) -> None:
    with serve(tmp_path, model(), **settings()) as server:
        script = tmp_path / "site.py"
        script.write_text(f"import atoll\natoll.join({server.url!r}, site='a', folder='sites')\n")
        without = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
        process = nursery.start(str(script), cwd=tmp_path, env={"PYTHONPATH": without})
        assert process.wait(60) != 0
        said = process.output()
        assert "algorithm 'feddyn_local' corrects local training, but it is not installed at this site" in said
        assert "Install feddyn-local 1.0 at this site." in said
        assert server.status().workers == []


def test_never_loads_it_from_a_path_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has it in a file; a site with the package takes its own, and one without is refused."""
    own = f"{EXAMPLE}/feddyn_local.py:feddyn_local"
    with serve(
        tmp_path, model(), **settings(**{"algorithm.name": None, "algorithm.path": own, "rounds.total": 1})
    ) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "sites") as worker:
            assert type(worker._backend.place.exchange.local.rule).__module__ == "feddyn_local"
            monkeypatch.setattr("atoll.registry.entry_points", lambda **_: ())
            with pytest.raises(ConfigError, match="package with the entry point 'feddyn_local'"):
                atoll.join(server.url, site="b", folder=tmp_path / "sites")


def test_its_file_is_the_page_on_own_algorithms_and_at_most_60_lines() -> None:
    code = (EXAMPLE / "feddyn_local.py").read_text()
    page = (EXAMPLE.parents[1] / "docs" / "algorithms" / "own.md").read_text()
    assert f"```python\n{code}```" in page
    assert len(code.splitlines()) <= 60
