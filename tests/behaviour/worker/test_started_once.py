"""A `DiLoCo` object takes part once; a start that fails leaves nothing behind that others wait for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import DiLoCoSites, build_model, local_step, serve
from torch import nn
from torch.optim import SGD

import atoll
from atoll.errors import UsageError

DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "algorithm.outer_optimizer.name": None,
    "diloco.sync_every": 2,
    "rounds.total": 2,
}


def alive(server: atoll.Server) -> set[str]:
    return {worker.site for worker in server.status().workers if worker.state == "alive"}


@pytest.mark.covers("L2", "L20")
@pytest.mark.parametrize("alone", [False, True])
def test_refuses_to_be_entered_twice(tmp_path: Path, alone: bool) -> None:
    model = build_model()
    with serve(tmp_path, **(DILOCO | {"rounds.sites": 1})) as server:
        url = None if alone else server.url
        loop = atoll.DiLoCo(model, SGD(model.parameters(), lr=0.1), server=url, site="a", folder=tmp_path / "workers")
        with loop:
            with pytest.raises(UsageError):
                loop.start()
            assert alive(server) == (set() if alone else {"a"})  # the running one goes on
            local_step(model, loop.optimizer, "a", 0)  # type: ignore[arg-type]
            assert loop.step == (0 if alone else 1)
        with pytest.raises(UsageError), loop:
            pass
        assert alive(server) == set()


class HooksFail(SGD):
    """Joining works, hooking does not."""

    works = False

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        if not self.works:
            raise RuntimeError("no hooks today")
        return super().register_step_post_hook(hook)


@pytest.mark.parametrize(
    "settings", [{}, {"diloco.num_fragments": 2, "diloco.fragment_sync_delay": 1}], ids=["whole", "streaming"]
)
def test_a_start_that_fails_after_the_join_leaves_the_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = build_model()
    optimizer = HooksFail(model.parameters(), lr=0.05)
    where: dict[str, Any] = {"site": "c", "folder": tmp_path / "workers"}
    with serve(tmp_path, **(DILOCO | settings)) as server:
        loop = atoll.DiLoCo(model, optimizer, server=server.url, **where)
        with pytest.raises(RuntimeError):
            loop.start()
        (left,) = server.status().workers
        assert (left.site, left.state) == ("c", "failed")
        assert "no hooks today" in left.error
        assert not optimizer._optimizer_step_pre_hooks
        optimizer.works = True
        with loop:  # its files are free again, and so is its name
            assert alive(server) == {"c"}
        DiLoCoSites(server.url, tmp_path, 10).join()  # no round waits for c
        server.run()


def test_a_metric_that_fails_at_the_start_leaves_the_run(tmp_path: Path) -> None:
    model = build_model()
    with serve(tmp_path, **DILOCO) as server:
        loop = atoll.DiLoCo(
            model,
            SGD(model.parameters(), lr=0.05),
            server=server.url,
            site="c",
            folder=tmp_path / "workers",
            metrics=lambda: {"a": 1 / 0},
        )
        with pytest.raises(ZeroDivisionError):
            loop.start()
        assert alive(server) == set()


@pytest.mark.covers("L2")
@pytest.mark.parametrize("same", ["optimizer", "model"])
def test_refuses_a_second_loop_over_what_an_active_one_trains(tmp_path: Path, same: str) -> None:
    model = build_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    another = optimizer if same == "optimizer" else SGD(model.parameters(), lr=0.05)
    with serve(tmp_path, **(DILOCO | {"rounds.sites": 1})) as server:

        def loop(site: str, given: SGD) -> atoll.DiLoCo:
            return atoll.DiLoCo(model, given, server=server.url, site=site, folder=tmp_path / "workers")

        with loop("a", optimizer):
            with pytest.raises(UsageError):
                loop("b", another).start()
            assert alive(server) == {"a"}
        with loop("b", another):  # the first one has ended
            assert alive(server) == {"b"}


def test_loops_over_different_models_with_a_frozen_part_in_common_run_at_once(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4).requires_grad_(False)
    with serve(tmp_path, nn.Sequential(shared, nn.Linear(4, 4)), **DILOCO) as server:

        def loop(site: str) -> atoll.DiLoCo:
            model = nn.Sequential(shared, nn.Linear(4, 4))
            given = SGD(model[1].parameters(), lr=0.05)
            return atoll.DiLoCo(model, given, server=server.url, site=site, folder=tmp_path / "workers")

        with loop("a"), loop("b"):
            assert alive(server) == {"a", "b"}
