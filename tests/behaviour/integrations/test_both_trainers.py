"""What Lightning's and Hugging Face's Trainer have in common: simulations, checkpoints, a server that is killed."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning_world
import pytest
import torch
import transformers_world
from engine_here import simulate_here
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, exported, ticket_states
from kit.results import Result
from kit.servers import plain_server
from kit.sites import run_to_end
from lightning_world import DILOCO, Tiny, data, driver_of, fit_rounds, patched
from safetensors.torch import load_file
from transformers_world import STEPS, TARGETS, callback_of, descend, trainer_of

import atoll
import atoll.integrations.lightning
from atoll.errors import UsageError

BOTH = pytest.mark.parametrize("trainers", [lightning_world, transformers_world], ids=["lightning", "transformers"])


# -- simulated sites


def fit_as_simulated_site() -> None:
    """A loop over the rounds that there are; a simulated site has one."""
    trainer = lightning_world.trainer_of()
    assert atoll.integrations.lightning.patch(trainer).site == os.environ["ATOLL_SITE"]
    fit_rounds(trainer, Tiny(TARGETS[os.environ["ATOLL_SITE"]]))


def train_as_simulated_site() -> None:
    """One `train()` of a thousand steps, which ends with the round."""
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(None, Path(folder), site=None, target=TARGETS[os.environ["ATOLL_SITE"]]).train()


def sgd(x: float, target: float) -> float:
    """Three steps of rate 0.1 on (w − target)²/2."""
    return target + 0.9**STEPS * (x - target)


def momentum(x: float, target: float) -> float:
    """Three steps whose schedule and momentum begin anew, as a script does that is run for each round."""
    return descend(range(STEPS), x, target=target)[0]


SIMULATED = {lightning_world: (fit_as_simulated_site, sgd), transformers_world: (train_as_simulated_site, momentum)}


@BOTH
@pytest.mark.covers("V1")
def test_a_simulated_site_trains_once_per_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trainers: ModuleType
) -> None:
    """In a simulation, a site with a Trainer trains once per round, and the result is the mean of the sites."""
    simulate_here(monkeypatch)
    client, trained = SIMULATED[trainers]
    settings = {"rounds.total": 2, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "state"}
    done = atoll.Simulation(trainers.One(), script=client, sites=[*TARGETS], settings=settings).run()
    expected = 0.0
    for _ in range(2):
        expected = sum(trained(expected, target) for target in TARGETS.values()) / len(TARGETS)
    assert (done.rounds, done.worker_rounds, done.failed) == (2, 2 * len(TARGETS), {})
    assert load_file(done.model)["w"].item() == pytest.approx(expected, abs=1e-6)


# -- a round that a site sits out


@BOTH
def test_a_trainer_with_weight_0_sits_out(tmp_path: Path, trainers: ModuleType) -> None:
    """A Trainer with weight 0 sits out the round. The only version is made from the update of site `a`."""

    def train(module: Any, *_: object) -> None:
        torch.nn.init.constant_(module.w, 7.0)

    with plain_server(tmp_path, trainers.One(), algorithm="fedavg", rounds=1, sites=2) as server:
        sites = FederatedSites(server.url, tmp_path, "a", build=trainers.One, train=train)
        if trainers is lightning_world:
            fit_rounds(patched(server, tmp_path / "b", "b", weight=0.0), Tiny(TARGETS["b"]))
        else:
            trainer_of(server, tmp_path, site="b", target=TARGETS["b"], weight=0.0).train()
        run_to_end(server, sites)
    (summary,) = server.status().history
    assert (summary.workers, summary.sat_out) == (["a"], ["b"])
    assert exported(tmp_path)["w"].item() == 7.0


def test_a_lightning_site_can_skip_rounds(tmp_path: Path) -> None:
    """A site with a Lightning Trainer can skip a round instead of a fit or during one, and trains in a later round."""
    # Site a skips round 1 in place of a fit, round 2 within a fit, and fits in round 3: one version.
    with lightning_world.serve(tmp_path, rounds=3) as server:
        trainer, module = patched(server, tmp_path / "w"), Tiny()
        for number in atoll.integrations.lightning.rounds(trainer):
            if number == 1:
                atoll.integrations.lightning.skip(trainer)
            elif number == 2:
                module.on_train_start = lambda: atoll.integrations.lightning.skip(trainer)
                trainer.fit(module, data())
                del module.on_train_start
            else:
                trainer.fit(module, data())
        assert number == 3
        history = server.status().history
    assert [(each.version, each.sat_out) for each in history] == [(None, ["a"]), (None, ["a"]), (1, [])]
    assert exported(tmp_path)["w"].item() == pytest.approx(sgd(0.0, 1.0), abs=1e-6)


def test_lightning_rounds_end_without_a_server() -> None:
    """Without a server, a Lightning site may skip its only round, and the loop over rounds ends."""
    trainer = lightning_world.trainer_of()
    atoll.integrations.lightning.patch(trainer)
    for _ in atoll.integrations.lightning.rounds(trainer):
        atoll.integrations.lightning.skip(trainer)


def test_a_lightning_diloco_site_can_skip_rounds(tmp_path: Path) -> None:
    """A Lightning site of a DiLoCo run can skip a round after its first fit. Before that it has no model and is
    refused.
    """
    with lightning_world.serve(tmp_path, "diloco", rounds=3) as server:
        trainer = patched(server, tmp_path / "w")
        assert atoll.integrations.lightning.is_running(trainer)
        with pytest.raises(UsageError, match="before training began in a DiLoCo run"):
            atoll.integrations.lightning.skip(trainer)
        trainer.fit(Tiny(), data())
        atoll.integrations.lightning.skip(trainer)
        trainer.fit(Tiny(), data())
        assert [each.version for each in server.status().history] == [1, None, 2]


def test_a_transformers_site_can_skip_rounds(tmp_path: Path) -> None:
    """A site with a Transformers Trainer can skip a round before training or during it."""
    # Round 1 is skipped before training, round 2 within it after one step; rounds of three steps.
    import transformers

    with plain_server(tmp_path, transformers_world.One(), algorithm="fedavg", rounds=4, sites=1) as server:
        trainer = trainer_of(server, tmp_path / "w", sync_every=STEPS)
        callback = callback_of(trainer)
        callback.skip()

        class SkipsAfterOneStep(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 1:
                    callback.skip()

        trainer.add_callback(SkipsAfterOneStep)
        trainer.train()
        assert (callback.rounds, trainer.state.global_step) == (2, 3 * STEPS)
        assert [each.version for each in server.status().history] == [None, None, 1, 2]


def test_a_transformers_callback_has_the_rounds_configuration(tmp_path: Path) -> None:
    """At each step, a Transformers callback has the configuration of the present round; before training it has none."""
    import transformers

    rates = {"rounds.config": {"lr": {"1": 0.1, "2": 0.01}}}
    with plain_server(tmp_path, transformers_world.One(), algorithm="fedavg", rounds=2, sites=1, **rates) as server:
        trainer = trainer_of(server, tmp_path / "w", sync_every=STEPS)
        callback, seen = callback_of(trainer), list[Any]()
        assert callback.config == {}

        class Watch(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen.append(callback.config.get("lr"))

        trainer.add_callback(Watch)
        trainer.train()
    assert seen == [0.1] * STEPS + [0.01] * STEPS


@pytest.mark.covers("X46")
def test_a_transformers_callback_has_the_sites_state(tmp_path: Path) -> None:
    """A Transformers callback has the state that the site keeps with its updates, within training."""
    import transformers

    with plain_server(tmp_path, transformers_world.One(), algorithm="fedavg", rounds=2, sites=1) as server:
        trainer = trainer_of(server, tmp_path / "w", sync_every=STEPS)
        callback, found = callback_of(trainer), list[int]()
        with pytest.raises(UsageError, match="has no state now: no round of a federated run has begun"):
            assert callback.worker_state

        class Count(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                found.append(callback.worker_state.get("steps", 0))
                callback.worker_state["steps"] = found[-1] + 1

        trainer.add_callback(Count)
        trainer.train()
    assert found == list(range(2 * STEPS))


@pytest.mark.covers("X46")
def test_a_lightning_callback_has_the_sites_state(tmp_path: Path) -> None:
    """A Lightning callback has the state that the site keeps with its updates, within a fit."""
    found = list[int]()

    class Counts(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            (callback,) = (each for each in self.trainer.callbacks if hasattr(each, "driver"))
            found.append(callback.worker_state.get("steps", 0))
            callback.worker_state["steps"] = found[-1] + 1

    with lightning_world.serve(tmp_path, sites=1) as server:
        fit_rounds(patched(server, tmp_path / "w"), Counts())
    assert found == list(range(len(found)))
    assert len(found) == 2 * len(data())


# -- checkpoints in a run of DiLoCo: one that agrees with the site's folder resumes, another one is refused

OTHER_RUN = "f" * 32
REFUSED = r"trained from version 1, .* has no version"


@pytest.mark.covers("X3")
def test_lightning_resumes_diloco_from_its_checkpoint(tmp_path: Path) -> None:
    """A Lightning Trainer resumes DiLoCo from a checkpoint that agrees with the site's folder."""
    # Another one is refused. With three steps per epoch and H = 3, an epoch is a round. The second fit trains epoch 2
    # of 2.
    file, changed = tmp_path / "one.ckpt", tmp_path / "other.ckpt"
    with lightning_world.serve(tmp_path, "diloco") as server:
        first = patched(server, tmp_path / "w")
        first.fit(Tiny(), data())
        first.save_checkpoint(file)
        driver_of(first).leave()
        content = torch.load(file, weights_only=True)
        (state,) = [each for each in content["callbacks"].values() if "versions" in each]
        assert (state["site"], state["versions"]) == ("a", [1])
        state["run"] = OTHER_RUN
        torch.save(content, changed)
        with pytest.raises(UsageError, match="The checkpoint belongs to site 'a' in run ffffffff"):
            patched(server, tmp_path / "w", max_epochs=2).fit(Tiny(), data(), ckpt_path=changed)
        with pytest.raises(UsageError, match=REFUSED):
            patched(server, tmp_path / "new", max_epochs=2).fit(Tiny(), data(), ckpt_path=file)
        module = Tiny()
        patched(server, tmp_path / "w", max_epochs=2).fit(module, data(), ckpt_path=file)
        assert module.steps == 3
        assert len(lightning_world.rounds_of(server)) == 2


@pytest.mark.covers("X3")
def test_transformers_resumes_diloco_from_its_checkpoint(serve: Any, tmp_path: Path) -> None:
    """A Transformers Trainer resumes DiLoCo from a checkpoint that agrees with the site's folder. Another one is
    refused.
    """
    server = serve("diloco", H=STEPS, rounds=2)

    def trainer(folder: Path, most: int) -> Any:
        options = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": STEPS}
        return trainer_of(server, folder, max_steps=most, **options)

    trainer(tmp_path / "w", STEPS).train()
    written = tmp_path / "out" / f"checkpoint-{STEPS}" / "atoll.json"
    state = json.loads(written.read_text())
    assert (state["site"], state["versions"]) == ("a", [1])
    with pytest.raises(UsageError, match=REFUSED):
        trainer(tmp_path / "new", 2 * STEPS).train(resume_from_checkpoint=True)
    written.write_text(json.dumps(state | {"run": OTHER_RUN}))
    with pytest.raises(UsageError, match="The checkpoint belongs to site 'a' in run ffffffff"):
        trainer(tmp_path / "w", 2 * STEPS).train(resume_from_checkpoint=True)
    written.write_text(json.dumps(state))
    trainer(tmp_path / "w", 2 * STEPS).train(resume_from_checkpoint=True)
    assert server.wait(60)
    assert server.status().fragments[0].version == 2


# -- a server that is killed in the middle of a round and started again on its port and state: a Trainer goes on
# The Trainer's site has a gradient of w − 1 and three steps a round. The other one, where there is one, submits what
# it pulled, with the same weight. Other moments of a kill make no difference to a Trainer: tests/behaviour/faults.

ROUNDS = 3
LONG = pytest.mark.long


class RunWithAKill:
    """A server as a process, started again when it was killed, and the other site."""

    def __init__(self, nursery: Nursery, folder: Path, trainers: ModuleType, algorithm: str) -> None:
        self.folder, self.names = folder, ["a", "b"] if algorithm == "fedavg" else ["a"]
        settings = {
            "model.source": f"{trainers.__file__}:One",
            "algorithm.name": algorithm,
            "rounds.sites": len(self.names),
            "rounds.min_sites": len(self.names),
            "algorithm.outer_optimizer.name": None,
            "algorithm.outer_optimizer.lr": None,
            "algorithm.outer_optimizer.momentum": None,
        } | (DILOCO if algorithm == "diloco" else {})
        self.server = ForkedServer(nursery, folder, **settings)
        returns: dict[str, Any] = {"build": trainers.One, "train": lambda *_: None, "weights": {"b": 12.0}}
        self.other = FederatedSites(self.server.url, folder, self.names[1:], **returns)

    def in_step(self, number: int) -> None:
        """Called in each of the Trainer's steps, from 1 on; the fifth, in the middle of round 2, kills the server."""
        if number == STEPS + 2:
            theirs = "accepted" if len(self.names) == 2 else "counted"  # round 1 is counted by now
            wait_until(lambda: theirs in ticket_states(self.folder).values(), "the other site's update")
            self.server.process.now.kill()
            wait_until(lambda: self.server.process.deaths == 1, "a new start")

    def require_each_update_once(self) -> float:
        """Every site's update of every round counted once, and the server had died; returns w of the result."""
        self.other.join()
        assert self.server.process.wait() == 0
        assert self.server.process.deaths == 1
        each = [(site, number) for site in self.names for number in range(1, ROUNDS + 1)]
        assert Result(self.folder).counted() == each
        return exported(self.folder)["w"].item()


@pytest.mark.slow
@pytest.mark.covers("S1", "F6")
@pytest.mark.parametrize("algorithm", ["fedavg", *(pytest.param(each, marks=LONG) for each in ("scaffold", "diloco"))])
def test_a_lightning_trainer_survives_a_killed_server(nursery: Nursery, tmp_path: Path, algorithm: str) -> None:
    """After its server is killed and restarted, a Lightning Trainer goes on, and no round is trained twice."""
    # By hand: three steps of rate 0.1 turn e = 1 − w into 0.729·e. The mean with the other site's e is 0.8645·e.
    run = RunWithAKill(nursery, tmp_path, lightning_world, algorithm)

    class Counted(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            run.in_step(self.steps)
            return loss

    with run.server as server:
        trainer, module = lightning_world.trainer_of(), Counted()
        atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path / "a")
        fit_rounds(trainer, module)
        w = run.require_each_update_once()
    assert w == pytest.approx(1 - (0.8645 if algorithm == "fedavg" else 0.729) ** ROUNDS)
    assert module.w.item() == pytest.approx(w)
    assert module.steps == ROUNDS * STEPS  # no round was trained twice


@pytest.mark.slow
@pytest.mark.covers("S10", "F6")
@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("diloco", marks=LONG)])
def test_a_transformers_trainer_survives_a_killed_server(nursery: Nursery, tmp_path: Path, algorithm: str) -> None:
    """After its server is killed and restarted, a Transformers Trainer goes on, and each update counts once.

    Momentum and schedule continue over all nine steps, as without the kill.
    """
    run, steps = RunWithAKill(nursery, tmp_path, transformers_world, algorithm), count(1)

    class Counted(transformers_world.One):
        def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
            run.in_step(next(steps))
            return super().forward(target)

    with run.server as server:
        trainer = trainer_of(server.url, tmp_path, Counted(), sync_every=STEPS)
        trainer.train()
        w = run.require_each_update_once()
    x = velocity = 0.0
    for number in range(ROUNDS):
        y, velocity = descend(range(number * STEPS, (number + 1) * STEPS), x, velocity)
        x = (x + y) / 2 if algorithm == "fedavg" else y
    assert w == pytest.approx(x, rel=1e-5)
    assert trainer.model.w.item() == pytest.approx(x, rel=1e-5)
    assert trainer.state.global_step == ROUNDS * STEPS
    assert callback_of(trainer).rounds == ROUNDS


# -- optimizers that keep a copy of the weights


class Masters(torch.optim.SGD):
    """Works on after its parent's step: what this moved starts from a copy of the weights instead."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for value in (each for group in self.param_groups for each in group["params"]):
                if "master" in self.state[value]:
                    value.copy_(self.state[value]["master"].sub_(value.grad, alpha=self.param_groups[0]["lr"]))
                else:
                    self.state[value]["master"] = value.detach().clone()
        return loss


class TinyMasters(Tiny):
    def configure_optimizers(self) -> Any:
        return Masters([self.w], lr=self.lr)


@BOTH
@pytest.mark.covers("X11")
def test_weight_copies_follow_a_trainers_synchronisations(tmp_path: Path, trainers: ModuleType) -> None:
    """When a Trainer synchronises, an optimizer's copies of the weights follow."""
    # By hand, half of three steps of rate 0.1, twice: 1 − w shrinks by (1 + 0.9³)/2 each time.
    model = trainers.One()
    torch.optim.SGD(model.parameters(), lr=0.1)  # from here on torch's hooks are in SGD's own step, too
    settings = DILOCO | {"algorithm.outer_optimizer.lr": 0.5}
    with plain_server(tmp_path, model, algorithm="diloco", sites=1, rounds=2, **settings) as server:
        if trainers is lightning_world:
            fit_rounds(patched(server, tmp_path), TinyMasters())
        else:
            trainer = trainer_of(server, tmp_path)
            trainer.optimizer = Masters(trainer.model.parameters(), lr=0.1)
            trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _: 1.0)
            trainer.train()
        server.run()
    assert exported(tmp_path)["w"].item() == pytest.approx(1 - ((1 + 0.9**3) / 2) ** 2)
