"""A `DiLoCo` object takes part once; a start that fails leaves nothing behind that others wait for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import DiLoCoSites, build_model, diloco, serve, take_steps
from torch import nn
from torch.optim import SGD

import atoll
from atoll.errors import UsageError

DILOCO: dict[str, Any] = {"algorithm": "diloco", "algorithm.outer_optimizer.name": None, "H": 2, "rounds": 2}


def alive(server: atoll.Server) -> set[str]:
    return {worker.site for worker in server.status().workers if worker.state == "alive"}


@pytest.mark.covers("L2", "L20")
@pytest.mark.parametrize("alone", [False, True])
def test_refuses_to_be_entered_twice(tmp_path: Path, alone: bool) -> None:
    with serve(tmp_path, **DILOCO, sites=1) as server:
        loop = diloco("" if alone else server, tmp_path)
        with loop:
            with pytest.raises(UsageError):
                loop.start()
            assert alive(server) == (set() if alone else {"a"})  # the running one goes on
            take_steps(loop, 1)
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


@pytest.mark.parametrize("settings", [{}, {"K": 2, "tau": 1}], ids=["whole", "streaming"])
def test_a_start_that_fails_after_the_join_leaves_the_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = build_model()
    optimizer = HooksFail(model.parameters(), lr=0.05)
    with serve(tmp_path, **DILOCO, **settings) as server:
        loop = diloco(server, tmp_path, "c", model, optimizer)
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
    with serve(tmp_path, **DILOCO) as server:
        with pytest.raises(ZeroDivisionError):
            diloco(server, tmp_path, "c", metrics=lambda: {"a": 1 / 0}).start()
        assert alive(server) == set()


@pytest.mark.covers("L2")
@pytest.mark.parametrize("same", ["optimizer", "model"])
def test_refuses_a_second_loop_over_what_an_active_one_trains(tmp_path: Path, same: str) -> None:
    model = build_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    with serve(tmp_path, **DILOCO, sites=1) as server:
        other = diloco(server, tmp_path, "b", model, optimizer if same == "optimizer" else None)
        with diloco(server, tmp_path, "a", model, optimizer):
            with pytest.raises(UsageError):
                other.start()
            assert alive(server) == {"a"}
        with other:  # the first one has ended
            assert alive(server) == {"b"}


def test_loops_over_different_models_with_a_frozen_part_in_common_run_at_once(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4).requires_grad_(False)
    with serve(tmp_path, nn.Sequential(shared, nn.Linear(4, 4)), **DILOCO) as server:

        def loop(site: str) -> atoll.DiLoCo:
            model = nn.Sequential(shared, nn.Linear(4, 4))
            return diloco(server, tmp_path, site, model, SGD(model[1].parameters(), lr=0.05))

        with loop("a"), loop("b"):
            assert alive(server) == {"a", "b"}
