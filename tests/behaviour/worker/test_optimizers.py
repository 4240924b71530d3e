"""What a loop needs of optimizers and their model: several of them, a part of the parameters, moments that broke."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit import DiLoCoSites, build_model, diloco, exported, local_step, run_to_end, serve, tensors_digest
from kit.servers import plain_server, state_of
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import atoll
from atoll.errors import UpdateRefused, UsageError

Warned = Callable[[], list[str]]
DILOCO: dict[str, Any] = {"algorithm": "diloco", "H": 2, "rounds": 3, "sites": 1, "codec": "none"}


@pytest.fixture(autouse=True)
def _lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atoll")


# -- several


def two(model: nn.Module) -> list[Optimizer]:
    """SGD for matrices, AdamW for the others."""
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    return [SGD(matrices, lr=0.05), AdamW(others, lr=0.01)]


class Both(Optimizer):
    """Two optimizers behind one step: what a list of them must come to."""

    def __init__(self, inner: list[Optimizer]) -> None:
        super().__init__([each for one in inner for group in one.param_groups for each in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        for each in self.inner:
            each.step()


def trained(folder: Path, given: Callable[[list[Optimizer]], Any]) -> set[str]:
    """Digests of a run's result, and of the models of its sites.

    Args:
        given: makes of the site's optimizers what `atoll.DiLoCo` gets.
    """

    def step(model: nn.Module, optimizer: Any, site: str, number: int) -> None:
        one = (
            optimizer if isinstance(optimizer, Both) else Both(sorted(optimizer, key=lambda each: type(each) is AdamW))
        )
        local_step(model, one, site, number)

    with serve(folder, **DILOCO | {"rounds": 2, "sites": 2}) as server:
        sites = DiLoCoSites(server.url, folder, 100, inner=lambda model: given(two(model)), step=step)
        run_to_end(server, sites)
    assert [loop.step for loop in sites.loops.values()] == [4, 4]
    return {
        tensors_digest(state) for state in (exported(folder), *(each.state_dict() for each in sites.models.values()))
    }


@pytest.mark.covers("L2")
def test_several_optimizers_act_like_one(tmp_path: Path, warned: Warned) -> None:
    """A list or tuple of optimizers gives the same result as one optimizer that makes their steps, and causes no
    warning.
    """
    run = trained(tmp_path / "one", Both)
    assert len(run) == 1
    assert trained(tmp_path / "list", list) == run
    assert trained(tmp_path / "tuple", tuple) == run
    assert not [text for text in warned() if "optimizer" in text]


@pytest.mark.covers("X11")
def test_the_order_of_optimizers_does_not_matter(tmp_path: Path) -> None:
    """The loop synchronises after the last optimizer has stepped, whatever the order of the optimizers in the list."""
    run = trained(tmp_path / "one", Both)
    assert trained(tmp_path / "reversed", lambda optimizers: optimizers[::-1]) == run


@pytest.mark.covers("X11")
def test_optimizers_may_step_in_the_backward_pass(tmp_path: Path) -> None:
    """Optimizers of single parameters may step in the backward pass, with the result of one optimizer that steps after
    it.

    The last parameter's optimizer steps first.
    """

    def run(folder: Path, *, in_hooks: bool) -> set[str]:
        def inner(model: nn.Module) -> Any:
            if not in_hooks:
                return SGD(model.parameters(), lr=0.05)
            optimizers = {each: SGD([each], lr=0.05) for each in model.parameters()}
            for each, optimizer in optimizers.items():
                each.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
            return list(optimizers.values())

        def step(model: nn.Module, optimizer: Any, site: str, number: int) -> None:
            inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * number + ord(site)))
            model(inputs).square().mean().backward()
            if not in_hooks:
                optimizer.step()
            model.zero_grad()

        with serve(folder, **DILOCO | {"sites": 2}) as server:
            sites = DiLoCoSites(server.url, folder, 100, inner=inner, step=step)
            run_to_end(server, sites)
        assert {loop.step for loop in sites.loops.values()} == {6}
        parameters = [dict(each.named_parameters()) for each in sites.models.values()]
        result = {name: value for name, value in exported(folder).items() if name in parameters[0]}
        return {tensors_digest(each) for each in (result, *parameters)}

    hooked = run(tmp_path / "hooks", in_hooks=True)
    assert len(hooked) == 1
    assert hooked == run(tmp_path / "one", in_hooks=False)


@pytest.mark.covers("X11")
def test_local_steps_count_the_slowest_optimizer(tmp_path: Path) -> None:
    """If two optimizers step at different rates, a local step has ended when both have stepped."""
    # One optimizer makes two steps before each step of the other. With H = 2, its 12 steps are the 6 local steps of the
    # run.
    for order in (1, -1):
        model, made = build_model(), []
        often, rarely = two(model)
        folder = tmp_path / str(order)
        with serve(folder, **DILOCO) as server:
            with diloco(server, folder, "a", model, [often, rarely][::order]) as loop:
                while not loop.finished:
                    for optimizer in (often, often, rarely):
                        local_step(model, optimizer, "a", len(made))
                        made.append(loop.step)
            server.run()
        assert made == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6]
        assert tensors_digest(exported(folder)) == tensors_digest(model.state_dict())


def freeze_vectors(model: nn.Module) -> None:
    for parameter in (each for each in model.parameters() if each.dim() < 2):
        parameter.requires_grad_(False)


PART = r"only 2 of the model's 6 trainable parameters; for example, '0.bias'.*requires_grad = False.*allow_partial=True"


@pytest.mark.covers("X11")
def test_optimizers_must_hold_all_trainable_parameters(tmp_path: Path) -> None:
    """A DiLoCo loop refuses an optimizer that holds only a part of the trainable parameters, unless `allow_partial` is
    true.
    """
    model = build_model()
    with serve(tmp_path, **DILOCO) as server:
        with pytest.raises(UsageError, match=PART):
            diloco(server, tmp_path, "a", model, two(model)[0]).start()
        with diloco(server, tmp_path, "a", model, two(model)):
            pass
        with diloco(server, tmp_path, "a", model, two(model)[0], allow_partial=True):
            pass
        freeze_vectors(model)
        with diloco(server, tmp_path, "a", model, two(model)[0]):
            pass


@pytest.mark.covers("X11")
@pytest.mark.parametrize(("algorithm", "corrects"), [("fedprox", True), ("scaffold", True), ("fedavg", False)])
def test_a_correction_needs_all_parameters(tmp_path: Path, algorithm: str, corrects: bool) -> None:
    """`fl_round.correct` refuses an optimizer that holds only a part of the parameters, if the algorithm corrects
    gradients and `allow_partial` is not set.
    """
    model = build_model()
    with (
        plain_server(tmp_path, build_model(), algorithm=algorithm, sites=1, rounds=1) as server,
        atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker,
    ):
        fl_round = worker.next_round()
        fl_round.load_into(model)
        advice = "Put all parameters into one" if algorithm == "scaffold" else "as a list"  # SCAFFOLD takes only one
        refusal = pytest.raises(UsageError, match=f"{PART[:60]}.*{advice}") if corrects else contextlib.nullcontext()
        with refusal, fl_round.correct(model, two(model)[0]):
            pass
        with fl_round.correct(model, two(model)[0], allow_partial=True):
            pass
        freeze_vectors(model)
        with fl_round.correct(model, two(model)[0]):
            pass


@pytest.mark.parametrize("given", [[], [1], "sgd", {}, "twice"], ids=str)
def test_wrong_or_repeated_optimizers_are_refused(given: Any) -> None:
    """A DiLoCo loop refuses an object that is no optimizer, an empty list, and an optimizer given twice."""
    model = build_model()
    with pytest.raises(UsageError):
        atoll.DiLoCo(model, 2 * [SGD(model.parameters(), lr=0.1)] if given == "twice" else given)


def test_refuses_an_optimizer_of_another_model(tmp_path: Path) -> None:
    """If one of several optimizers trains another model, the DiLoCo loop refuses it."""
    model = build_model()
    of_another = SGD(build_model().parameters(), lr=0.1)
    with serve(tmp_path, **DILOCO) as server:
        with pytest.raises(UsageError):
            diloco(server, tmp_path, "a", model, [SGD(model.parameters(), lr=0.1), of_another]).start()


# -- a model whose tensors a script replaces


def load_by_assignment(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace_weight(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.zeros(40, 64))


def grow(model: nn.Sequential) -> None:
    model.append(nn.Linear(40, 2))


def shrink(model: nn.Sequential) -> None:
    model[2].bias = None


def move_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def replace_buffers(model: nn.Sequential) -> None:
    model[1].running_mean = model[1].running_mean + 1.0


def changed(server: atoll.Server, folder: Path, change: Callable[[Any], None]) -> nn.Module:
    """Change the model behind one step after the first synchronisation, and train to the end of the run."""
    with diloco(server, folder) as loop:
        for step in range(40):
            if loop.finished:
                break
            if step == 3:
                change(loop.model)
            for parameter in loop.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            loop.optimizer.step()
    assert loop.finished
    return loop.model


@pytest.mark.parametrize("settings", [{}, {"K": 2, "tau": 1, "alpha": 0.5}], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (load_by_assignment, "0.weight"),
        (replace_weight, "2.weight"),
        (nn.Module.half, "0.weight"),
        (grow, "3.weight"),
        (shrink, "2.bias"),
    ],
)
def test_changed_parameters_of_the_model_are_refused(
    tmp_path: Path, settings: dict[str, Any], change: Callable[[Any], None], named: str
) -> None:
    """If the model's tensors are replaced, added, removed or changed in dtype during a DiLoCo loop, it raises an error
    that names the tensor.
    """
    with serve(tmp_path, **DILOCO | settings) as server:
        with pytest.raises(UsageError, match=named):
            changed(server, tmp_path, change)
        assert state_of(server) == "failed"


@pytest.mark.parametrize("change", [move_parameters, replace_buffers])
def test_moved_parameters_and_new_buffers_are_accepted(tmp_path: Path, change: Callable[[Any], None]) -> None:
    """A DiLoCo loop goes on if the model's parameters are moved or its buffers are replaced."""
    with serve(tmp_path, **DILOCO) as server:
        model = changed(server, tmp_path, change)
        server.run()
    assert tensors_digest(model.state_dict()) == tensors_digest(exported(tmp_path))


# -- an update with NaN is refused; at the first one the site hears whether its optimizer can recover at all


def poison(model: nn.Module, optimizer: Optimizer) -> None:
    """A step as a loss of infinity leaves its gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()


def refusals_before_moments_are_named(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How many refusals the site had heard of at each line that names the moments."""
    lines = [record.getMessage() for record in caplog.records if record.name == "atoll"]
    return [
        sum("was refused" in before for before in lines[:place])
        for place, line in enumerate(lines)
        if "exp_avg" in line
    ]


def adam_site(server: atoll.Server, folder: Path, steps: int, step: Callable[..., None]) -> DiLoCoSites:
    inner = partial(AdamW, lr=0.01)
    return DiLoCoSites(server.url, folder, steps, ["a"], inner=lambda model: inner(model.parameters()), step=step)


def shown(server: atoll.Server) -> list[str]:
    """Warnings of the status that name moments."""
    return [text for text in server.status().warnings if "exp_avg" in text]


@pytest.mark.covers("X3")
@pytest.mark.parametrize("fragments", [1, 2])
def test_nan_moments_are_reported_at_refusals(tmp_path: Path, caplog: pytest.LogCaptureFixture, fragments: int) -> None:
    """If an optimizer's moments became NaN, the log and the status say so at the first refused update, since every
    further one is refused too.
    """
    warned = []

    def step(model: nn.Module, optimizer: Optimizer, site: str, number: int) -> None:
        local_step(model, optimizer, site, number)
        if number == 2:
            poison(model, optimizer)
        if server.status().refused and not warned:
            warned.append(wait_until(lambda: shown(server), "the warning"))

    with serve(tmp_path, **DILOCO | {"H": 4, "K": fragments}) as server:
        with contextlib.suppress(UpdateRefused):  # the fifth
            adam_site(server, tmp_path, 100, step).join()
    assert refusals_before_moments_are_named(caplog)[:1] == [1]
    assert "exp_avg_sq) contains NaN or Inf, so every further update will be refused" in caplog.text
    assert warned, "status showed no warning"


@pytest.mark.covers("X3")
def test_the_warning_about_nan_moments_ends(tmp_path: Path) -> None:
    """The warning about NaN in the optimizer's moments ends when its state is cleared and an update counts."""
    warned: list[list[str]] = []

    def step(model: nn.Module, optimizer: Optimizer, site: str, number: int) -> None:
        if server.status().refused and not warned:
            warned.append(wait_until(lambda: shown(server), "the warning"))
            optimizer.state.clear()
        local_step(model, optimizer, site, number)
        if number == 2:
            poison(model, optimizer)
        if number == 80:
            wait_until(lambda: not shown(server), "no warning")

    with serve(tmp_path, **DILOCO | {"H": 4, "rounds": 30}) as server:
        adam_site(server, tmp_path, 81, step).join()
    assert warned


def test_finite_moments_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If only the parameters became NaN, the log says nothing of moments, and the site goes on from the global
    model.
    """

    def step(model: nn.Module, optimizer: Optimizer, site: str, number: int) -> None:
        local_step(model, optimizer, site, number)
        if number == 2:
            nn.init.constant_(next(model.parameters()), math.nan)

    with serve(tmp_path, **DILOCO | {"H": 4}) as server:
        DiLoCoSites(server.url, tmp_path, 100, ["a"], step=step).join()
        assert server.status().refused == 1
        assert server.status().finished
    assert refusals_before_moments_are_named(caplog) == []


@pytest.mark.covers("X3")
def test_nan_moments_in_a_round_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If an optimizer in `fl_round.correct` has moments with NaN, the log says so once, at the first refused update."""
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with serve(tmp_path, sites=1) as server, contextlib.suppress(UpdateRefused):
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                with fl_round.correct(model, optimizer):
                    poison(model, optimizer)
                fl_round.submit(model)
    # once: the next refusals are of the same moments
    assert refusals_before_moments_are_named(caplog) == [1]
