"""The outer step of a run, which is torch's: rates of some parameters, and an optimizer of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.world import World, require_close
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll import Settings
from atoll.errors import ConfigError, UsageError
from atoll.outer_optimizers import DelayedNesterov

ROUNDS = 4
RATES = {"head.bias": 2.0, "head.*": 0.25}


class Fading(torch.optim.Optimizer):
    """θ ← θ − (lr/t)·m with m ← m/2 + g: t is an int of Python's, m a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for theta in group["params"]:
                state = self.state[theta]
                state["t"] = state.get("t", 0) + 1
                state["m"] = state.get("m", torch.zeros_like(theta)).div_(2).add_(theta.grad)
                theta.sub_(state["m"], alpha=group["lr"] / state["t"])


def fading(parameters: Any, lr: float = 0.5) -> Fading:
    return Fading(parameters, lr)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Linear(5, 70), "head": nn.Linear(70, 100)}).double()


def gradients(number: int) -> dict[str, Tensor]:
    """What the only site trains in a round."""
    generator = torch.Generator().manual_seed(number)
    return {n: torch.randn(t.shape, dtype=t.dtype, generator=generator) for n, t in build().state_dict().items()}


def stepped(folder: Path, outer: Any = None, **options: Any) -> World:
    """A run of one site under an outer optimizer."""
    return World(folder, build(), "a", outer_optimizer=outer, **{"rounds": ROUNDS} | options)


def trained(_: str, number: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    moved = gradients(number)
    return {name: tensor - moved[name] for name, tensor in state.items()}


def after_rounds(world: World, *numbers: int) -> dict[str, Tensor]:
    """The model after these rounds of a run."""
    with world:
        world.rounds(trained, *numbers)
        world.sites["a"].next_round(wait_s=10.0)  # answered once the last one is committed
        world.wait(numbers[-1])
        return world.model


def by_torch(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, rounds: int = ROUNDS) -> None:
    for number in range(1, rounds + 1):
        moved = gradients(number)
        for name, parameter in parameters.items():
            parameter.grad = moved[name]
        optimizer.step()


SGD = {f"algorithm.outer_optimizer.{key}": value for key, value in {"name": "sgd", "lr": 0.5, "momentum": 0.5}.items()}
ADAM = {f"algorithm.outer_optimizer.{key}": value for key, value in {"name": "adam", "lr": 0.125}.items()}


@pytest.mark.covers("L15")
@pytest.mark.parametrize(
    ("settings", "make"),
    [
        (SGD, lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5)),
        (ADAM, lambda groups: torch.optim.Adam(groups, lr=0.125)),
        (SGD | {"async.momentum_every": 2}, lambda groups: DelayedNesterov(groups, lr=0.5, momentum=0.5, delay=2)),
    ],
    ids=["sgd", "adam", "delayed"],
)
def test_each_parameter_uses_its_first_matching_rate(
    tmp_path: Path, settings: dict[str, Any], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """With `algorithm.outer_lr_of`, each parameter is stepped with the first learning rate whose pattern matches its
    name.

    The result is that of a torch optimizer with three groups.
    """
    parameters = dict(build().named_parameters())
    groups = [
        {"params": [parameters["body.weight"], parameters["body.bias"]]},
        {"params": [parameters["head.weight"]], "lr": 0.25},
        {"params": [parameters["head.bias"]], "lr": 2.0},
    ]
    by_torch(parameters, make(groups))
    world = stepped(tmp_path, **settings, **{"algorithm.outer_lr_of": RATES})
    require_close(after_rounds(world, 1, 2, 3, 4), parameters)


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("key", "table", "told"),
    [
        (
            "algorithm.outer_lr_of",
            {"haed.bias": 0.5},
            r"contains 'haed\.bias', which matches no parameter.*'head.bias'",
        ),
        ("algorithm.outer_lr_of", {"head.*": 0}, "outer_lr_of"),
        ("algorithm.outer_optimizer", {"name": "sgd", "nesterov": 1, "momentum": 0.9}, "is 1, but must be true"),
        ("algorithm.outer_optimizer", {"name": "sgd", "dampening": True}, "dampening is True, but must be a number"),
        ("algorithm.outer_optimizer", {"name": "adamw", "eps": "1e-8"}, "eps is '1e-8', but must be a number"),
        *(
            ("algorithm.outer_optimizer", {"name": name, key: value}, f"{key} is .*, but must be a list of 2 numbers")
            for name, key in (("adamw", "betas"), ("yogi", "betas"), ("rprop", "step_sizes"), ("adafactor", "eps"))
            for value in ("ab", 5, [], [0.9], [0.9, 0.99, 0.999], ["a", "b"], [[0.9], 0.99], [True, 0.9])
        ),
        ("aggregation.reducer", {"name": "trimmed_mean", "trim": "0.1"}, "trim is '0.1', but must be a number"),
        ("aggregation.reducer", {"name": "clipped_mean", "max_norm": True}, "max_norm is True, but must be a number"),
        ("aggregation.upload_codec", {"name": "topk", "density": "0.1"}, "density is '0.1', but must be a number"),
        ("workflow.result_filters", ({"path": "norm_clip", "args": {"max_norm": True}},), "max_norm is True, but must"),
    ],
    ids=str,
)
def test_implausible_options_are_refused(tmp_path: Path, key: str, table: Any, told: str) -> None:
    """The server refuses options of the wrong type and names that match no parameter, with a message that says the
    mistake.
    """
    with pytest.raises(ConfigError, match=told):
        stepped(tmp_path, **{key: table}).start()


def test_the_status_shows_the_outer_learning_rates(tmp_path: Path) -> None:
    with stepped(tmp_path, **{"algorithm.outer_lr_of": RATES}) as world:
        assert "lr of head.bias=2, lr of head.*=0.25" in world.status.outer


@pytest.mark.covers("L21")
@pytest.mark.parametrize("how", ["function", "lambda", "module", "file"])
def test_a_users_outer_optimizer_survives_a_restart(tmp_path: Path, how: str) -> None:
    """An own outer optimizer keeps its state over a restart of the server after round 2 of 4. The result is that of one
    optimizer object.
    """
    (tmp_path / "mine.py").write_text(f"from {__name__} import fading as made\n")
    outer = {
        "function": fading,
        "lambda": lambda parameters: Fading(parameters, 0.5),
        "module": f"{__name__}:fading",
        "file": f"{tmp_path / 'mine.py'}:made",
    }[how]
    parameters = dict(build().named_parameters())
    plain = Fading(parameters.values(), 0.5)
    by_torch(parameters, plain)
    world = stepped(tmp_path, outer)
    after_rounds(world, 1, 2)
    require_close(after_rounds(world, 3, 4), parameters)
    states = [load_file(path) for path in (tmp_path / "state" / "slots").glob("state-*")]
    newest = max(states, key=lambda state: state["head.bias.t"].item())
    assert newest.keys() == {f"{name}.{key}" for name in parameters for key in "tm"}
    for name, parameter in parameters.items():
        assert newest[f"{name}.t"].item() == ROUNDS
        assert torch.allclose(newest[f"{name}.m"], plain.state[parameter]["m"], rtol=0, atol=1e-12)


@pytest.mark.covers("L21")
def test_a_users_outer_optimizer_gets_its_options(tmp_path: Path) -> None:
    """An own outer optimizer is called with the options in `algorithm.outer_optimizer`, and the status shows them."""
    world = stepped(tmp_path, fading, rounds=1, **{"algorithm.outer_optimizer.lr": 0.25})
    parameters = dict(build().named_parameters())
    by_torch(parameters, Fading(parameters.values(), 0.25), rounds=1)
    require_close(after_rounds(world, 1), parameters)
    assert world.status.outer == "fading(lr=0.25)"


@pytest.mark.covers("L21", "X3")
def test_a_run_refuses_another_outer_optimizer(tmp_path: Path) -> None:
    """A run that began with one own outer optimizer refuses to continue with another."""
    after_rounds(stepped(tmp_path, fading), 1)
    with pytest.raises(ConfigError, match=r"has algorithm.outer_optimizer = .*Fading"):
        stepped(tmp_path, torch.optim.Adagrad).start()


@pytest.mark.covers("L21", "X3")
def test_an_object_that_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    """The server refuses a function that does not return an optimizer.

    The server also refuses an own optimizer together with `async.momentum_every`, or beside a `Settings` object.
    """

    def no_optimizer(parameters: Any) -> list[Any]:
        return [parameters]

    with pytest.raises(ConfigError, match=r"no_optimizer' .*no_optimizer' returned an object of type list"):
        stepped(tmp_path, no_optimizer).start()
    with pytest.raises(ConfigError, match=r"async.momentum_every is 2, but the outer optimizer is 'fading'"):
        stepped(tmp_path, fading, algorithm="diloco", **{"async.momentum_every": 2}).start()
    with pytest.raises(UsageError, match="got settings and also outer_optimizer"):
        atoll.Server(None, Settings(), outer_optimizer="adam")


DECAYING: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw": ({"lr": 0.125}, lambda values: torch.optim.AdamW(values, lr=0.125)),
    "adam": ({"lr": 0.125, "weight_decay": 0.5}, lambda values: torch.optim.Adam(values, lr=0.125, weight_decay=0.5)),
    "sgd": (
        {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.5},
        lambda values: torch.optim.SGD(values, lr=0.5, momentum=0.5, weight_decay=0.5),
    ),
    "adafactor": (
        {"lr": 0.1, "weight_decay": 0.5},
        lambda values: torch.optim.Adafactor(values, lr=0.1, weight_decay=0.5),
    ),
}
"""Outer optimizers that move a parameter without a gradient: their options in the settings, and in torch."""


def run_with_frozen_body(folder: Path, outer: dict[str, Any], trains_body: Callable[[str, int], bool]) -> Any:
    """The model after two sites with weights 1 and 3 have trained; the body only where `trains_body` says so."""

    def train(site: str, number: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        frozen = () if trains_body(site, number) else ("body.weight", "body.bias")
        return trained(site, number, state) | {name: state[name] for name in frozen}

    with World(folder, build(), {"a": 1.0, "b": 3.0}, rounds=ROUNDS, **{"algorithm.outer_optimizer": outer}) as world:
        world.rounds(train, 1, 2, 3, 4)
        return world.finish()


@pytest.mark.covers("L15")
@pytest.mark.parametrize("name", DECAYING)
def test_untrained_layers_do_not_decay(tmp_path: Path, name: str) -> None:
    """The outer optimizer's weight decay does not change a layer that no site trains."""
    # The trained layers move as with torch alone.
    options, make = DECAYING[name]
    found = run_with_frozen_body(tmp_path, {"name": name, **options}, lambda *_: False)
    parameters = dict(build().named_parameters())
    head = {key: value for key, value in parameters.items() if key.startswith("head")}
    by_torch(head, make(head.values()))
    require_close(found, parameters)
    assert torch.equal(found["body.weight"], build()["body"].weight)


@pytest.mark.covers("L15")
@pytest.mark.parametrize(
    ("trains", "at"),
    [
        # the body's gradient is a quarter of b's, or nothing: its weight decay acts from the first on
        (lambda site, number: site == "a", (0.25,) * ROUNDS),
        # at rest until round 3, where it begins; and it goes on in round 4, though no site trains it then
        (lambda site, number: number == 3, (0.0, 0.0, 1.0, 0.0)),
    ],
    ids=["one site", "one round"],
)
def test_a_layer_decays_once_it_is_trained(
    tmp_path: Path, trains: Callable[[str, int], bool], at: tuple[float, ...]
) -> None:
    """Weight decay acts on a layer from the first round in which a site trains it, also in later rounds without
    training.
    """
    # The expected values are those of SGD with momentum β: m ← β·m + g + λ·θ, θ ← θ − η·m.
    outer = {"name": "sgd", "lr": 0.5, "momentum": 0.5, "weight_decay": 0.5}
    found = run_with_frozen_body(tmp_path, outer, trains)["body.weight"]
    theta, m, begun = build()["body"].weight.detach(), torch.zeros(70, 5).double(), False
    for number, share in enumerate(at, 1):
        begun = begun or share > 0
        if begun:
            m = 0.5 * m + share * gradients(number)["body.weight"] + 0.5 * theta
            theta = theta - 0.5 * m
    torch.testing.assert_close(found, theta, rtol=0, atol=1e-12)
