"""A late or restarted worker knows its place: `version`, `global_step`, and a function after each synchronisation."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.models import Weights
from kit.servers import PLAIN_DILOCO, plain_server
from kit.world import World

import atoll
from atoll.errors import UsageError
from atoll.testing.run import Threads

START = {"w": torch.zeros(2)}


def vector() -> Weights:
    return Weights(w=torch.zeros(2))


class Loop:
    """A DiLoCo site of one weight whose every step adds 1, and what it is called with."""

    def __init__(self, server: atoll.Server, folder: Path, site: str = "a", **options: Any) -> None:
        self.model = vector()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.seen: list[tuple[int, int, float]] = []  # version, global step and weight at each call of `on_sync`
        self.diloco = atoll.DiLoCo(
            self.model,
            self.optimizer,
            **{"server": server.url, "site": site, "folder": folder / "w", "on_sync": self.look} | options,
        )

    def look(self, diloco: atoll.DiLoCo) -> None:
        assert diloco is self.diloco
        self.seen.append((diloco.version, diloco.global_step, self.model.w[0].item()))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.model.w.grad = torch.full((2,), -1.0)
            self.optimizer.step()


def test_on_sync_sees_each_version_with_its_step(tmp_path: Path) -> None:
    """`on_sync` of a DiLoCo loop gets each version together with the number of steps behind it."""
    # H = 2, three rounds: version v has 2·v steps behind it, and the value 2·v; the last one is the result.
    rules = PLAIN_DILOCO | {"diloco.sync_every": 2}
    with plain_server(tmp_path, vector(), **rules, sites=1, rounds=3) as server:
        loop = Loop(server, tmp_path)
        assert (loop.diloco.version, loop.diloco.global_step) == (0, 0)
        with loop.diloco:
            loop.step(3)
            assert (loop.diloco.version, loop.diloco.global_step) == (1, 3)
            loop.step(3)
            assert loop.diloco.finished
        assert loop.seen == [(0, 0, 0.0), (1, 2, 2.0), (2, 4, 4.0), (3, 6, 6.0)]


def test_on_sync_sees_the_unmixed_global_model(tmp_path: Path) -> None:
    """If local steps are mixed into a version, `on_sync` still sees the version itself, and training goes on."""
    # With τ = 1 and α = 0.5 the model is a mixture.
    rules = {"diloco.sync_every": 2, "diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.5}
    with plain_server(tmp_path, vector(), **(PLAIN_DILOCO | rules), sites=1, rounds=3) as server:
        loop = Loop(server, tmp_path)
        with loop.diloco:
            while not loop.diloco.finished:
                loop.step()
        versions = [version for version, _, _ in loop.seen]
        assert versions == [0, 1, 2, 3]
        assert loop.seen[1][2] == 2.0  # version 1, while the model has (2 + 3)/2


@pytest.mark.parametrize("rules", [{}, {"diloco.num_fragments": 2}], ids=["whole", "fragments"])
def test_a_restarted_worker_continues_at_its_step(tmp_path: Path, rules: dict[str, Any]) -> None:
    """A restarted worker continues with the number of steps that the run has."""
    # H = 4. The first process makes 9 steps; the second begins with the 8 steps that the run has.
    rules = PLAIN_DILOCO | {"diloco.sync_every": 4} | rules
    model = Weights(w=torch.zeros(2), v=torch.zeros(2)) if "diloco.num_fragments" in rules else vector()
    with plain_server(tmp_path, model, **rules, sites=1, rounds=4) as server:
        for steps, begins in ((9, 0), (3, 8)):
            mine = Weights(**{name: torch.zeros(2) for name, _ in model.named_parameters()})
            optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
            with atoll.DiLoCo(mine, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
                assert (diloco.step, diloco.global_step) == (0, begins)
                assert diloco.version == begins // 4
                for _ in range(steps):
                    for parameter in mine.parameters():
                        parameter.grad = torch.full((2,), -1.0)
                    optimizer.step()
                assert diloco.global_step == begins + steps


def test_a_late_worker_starts_at_the_runs_step(tmp_path: Path) -> None:
    """A worker that joins late starts with the number of steps that the others have made."""
    # Site b joins after two rounds of three steps each that a has made alone; both end with the run's 12 steps.
    rules = PLAIN_DILOCO | {"diloco.sync_every": 3}
    with plain_server(tmp_path, vector(), **rules, sites=1, rounds=4) as server:
        first, late = Loop(server, tmp_path), Loop(server, tmp_path, "b")

        def to_the_end(loop: Loop) -> None:
            while not loop.diloco.finished:
                loop.step()

        with first.diloco:
            first.step(6)
            with late.diloco:
                assert (late.diloco.version, late.diloco.global_step) == (2, 6)
                Threads(partial(to_the_end, first), partial(to_the_end, late)).join()
        assert late.seen[0] == (2, 6, 6.0)
        assert first.seen[-1] == late.seen[-1]
        assert late.seen[-1][:2] == (4, 12)


def test_a_worker_without_a_server_counts_its_own_steps(tmp_path: Path) -> None:
    model = vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with atoll.DiLoCo(model, optimizer) as diloco:
        model.w.grad = torch.ones(2)
        optimizer.step()
        assert (diloco.version, diloco.global_step, diloco.config) == (0, 1, {})


def test_rounds_know_the_steps_before_them(tmp_path: Path) -> None:
    """A round tells its script the mean number of steps of all earlier rounds together."""
    # Sites report 4 and 6 steps in round 1, and 10 each in round 3; round 2 is skipped: 0, 5, 5 and 15 steps.
    with World(tmp_path, START, rounds=4) as world:
        found = []
        for number, steps in enumerate(((4, 6), None, (10, 10), (1, 1)), 1):
            world.pull(number=number)
            found.append((world.sites["a"].round.version, world.sites["a"].round.global_step))
            for site, count in zip("ab", steps or (0, 0), strict=True):
                if steps is None:
                    world.sites[site].round.skip()
                else:
                    world.submit(site, 1.0, steps=count)
            if number == 2:
                world.restart()
        world.finish()
        assert found == [(0, 0), (1, 5), (1, 5), (2, 15)]
        assert world.status.history[-1].global_step == 16.0


def test_asynchronous_steps_are_averaged_over_sites(tmp_path: Path) -> None:
    """In an asynchronous run, steps that two sites make side by side count once."""
    # Each of two sites makes 10 steps in turn: after four outer steps, the run has 20 steps along one site.
    with World(tmp_path, START, rounds=4, **{"async.enabled": True}) as world:
        world.join()
        for number, site in enumerate("abab", 1):
            world.pull(site)
            world.submit(site, 1.0, steps=10)
            world.wait(number)
        world.finish()
        assert [each.global_step for each in world.status.history] == [5.0, 10.0, 15.0, 20.0]


def test_a_checkpoint_has_plain_values(tmp_path: Path) -> None:
    """A checkpoint of a DiLoCo loop has only JSON values."""
    # One of an earlier release, without the step, is loaded; other keys are refused.
    rules = PLAIN_DILOCO | {"diloco.sync_every": 2}
    with plain_server(tmp_path, vector(), **rules, sites=1, rounds=4) as server:
        loop = Loop(server, tmp_path)
        with loop.diloco:
            loop.step(5)
            state = json.loads(json.dumps(loop.diloco.state_dict()))
        assert {key: state[key] for key in ("site", "versions", "global_step")} == {
            "site": "a",
            "versions": [2],
            "global_step": 5,
        }
        again = Loop(server, tmp_path)
        with pytest.raises(UsageError, match="was not written by Atoll"):
            again.diloco.load_state_dict(state | {"lr": 0.1})
        again.diloco.load_state_dict({key: state[key] for key in ("run", "site", "versions")})
        again.diloco.load_state_dict(state)
        assert again.diloco.state_dict() == state
        with again.diloco:
            assert again.diloco.global_step == 4
