"""Runs drawn at random: their settings for Atoll and in the words of the specification, and both results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import specification as spec
import torch
from golden_axes import DENSITY
from golden_model import ExactSGD
from golden_runs import norms_of
from golden_specification import CODECS, LR, REDUCERS, State, down_codec
from hypothesis import strategies as st
from kit import exported, serve, together
from kit.servers import DEFAULT_OUTER_OPTIMIZER
from kit.sites import finish, manual_sites
from torch import nn

import atoll
from atoll.tensors.fragments import split
from atoll.tensors.module_tensors import schema_of

SHAPES = ((), (0, 3), (3,), (63,), (300,), (4, 64), (33, 200), (20_001,))
DTYPES = ("float32", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Choice:
    """One choice of a drawn run: settings, and what stands for them in the specification."""

    settings: Mapping[str, Any]
    rules: Mapping[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A run.

    Attributes:
        kind: federated, diloco or async.
        choices: of codecs, reducer, algorithm and outer optimizer.
        params: (dtype, shape, whether it is trained) of each parameter.
        buffers: the rule of each buffer.
        weights: site → weight in each round.
        steps: site → local steps in a round.
        rounds: of every fragment.
        order: the sites of each outer step, in the order in which they submit, of an asynchronous run.
        more: of the kind.
    """

    kind: str
    choices: Sequence[Choice]
    params: Sequence[tuple[str, tuple[int, ...], bool]]
    buffers: Sequence[str]
    weights: Mapping[str, Sequence[float]]
    steps: Mapping[str, int]
    rounds: int
    order: Sequence[Sequence[str]] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Those of Atoll."""
        found: dict[str, Any] = {**DEFAULT_OUTER_OPTIMIZER, "rounds.sites": len(self.weights)}
        found |= {"rounds.total": self.rounds, "model.buffers": self.rules_of_buffers}
        for choice in self.choices:
            found |= choice.settings
        return found

    @property
    def rules_of_buffers(self) -> dict[str, str]:
        """Buffer → its rule."""
        return {f"b{index}": rule for index, rule in enumerate(self.buffers)}

    def rules(self, norms: Callable[[list[float]], Sequence[float]]) -> spec.Rules:
        """Those of the specification."""
        found: dict[str, Any] = {"buffers": self.rules_of_buffers, "norms": norms}
        for choice in self.choices:
            found |= choice.rules
        return spec.Rules(**found)

    def build(self) -> nn.Module:
        """The initial model."""
        generator, model = torch.Generator().manual_seed(5), nn.Module()
        for index, (dtype, shape, is_trained) in enumerate(self.params):
            values = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
            model.register_parameter(f"p{index}", nn.Parameter(values, requires_grad=is_trained))
        for index, rule in enumerate(self.buffers):
            is_whole = rule == "max"
            values = torch.zeros(3, dtype=torch.int64) if is_whole else torch.randn(3, generator=generator)
            model.register_buffer(f"b{index}", values if is_whole else values.to(getattr(torch, DTYPES[2 * index])))
        return model


def local_step(model: nn.Module, correct: Callable[[State], State], site: str, k: int) -> None:
    """One step on a gradient that depends on site, step and parameters; the buffers change, too."""
    generator = torch.Generator().manual_seed(1000 * k + ord(site))
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    g = {
        name: (torch.randn(each.shape, generator=generator) + 0.01 * each.detach().float()).to(each.dtype)
        for name, each in trained.items()
    }
    for name, value in correct(g).items():
        trained[name].grad = value
    for index, buffer in enumerate(model.buffers()):
        buffer.add_(torch.tensor(ord(site) % 7 + index).to(buffer.dtype) * 0.25 if buffer.is_floating_point() else k)


def optimizer_of(model: nn.Module) -> ExactSGD:
    """The local optimizer."""
    return ExactSGD([each for each in model.parameters() if each.requires_grad], lr=LR)


# -- the run of Atoll


def run(drawn: Drawn, folder: Path) -> tuple[State, list[list[float]]]:
    """Run it; the exported model, and the norms of the updates."""
    with serve(folder, drawn.build(), **drawn.settings) as server:
        if drawn.kind == "async":
            _submit_in_order(drawn, server, folder)
        else:
            take_part = _take_rounds if drawn.kind == "federated" else _take_steps
            together(*(partial(take_part, drawn, server.url, folder, site) for site in drawn.weights))
        server.run()
    return exported(folder), norms_of(folder)


def _train(drawn: Drawn, fl_round: Any, model: nn.Module, site: str, k: int) -> None:
    optimizer = optimizer_of(model)
    fl_round.load_into(model)
    with fl_round.correct(model, optimizer):
        for step in range(k, k + drawn.steps[site]):
            local_step(model, lambda g: g, site, step)
            optimizer.step()


def _take_rounds(drawn: Drawn, url: str, folder: Path, site: str) -> None:
    model, k = drawn.build(), 0
    with atoll.join(url, site=site, folder=folder / "w") as worker:
        for fl_round in worker:
            _train(drawn, fl_round, model, site, k)
            k += drawn.steps[site]
            weight = drawn.weights[site][fl_round.number - 1]
            fl_round.submit(model, weight=weight, steps=drawn.steps[site])


def _take_steps(drawn: Drawn, url: str, folder: Path, site: str) -> None:
    model = drawn.build()
    optimizer = optimizer_of(model)
    with atoll.DiLoCo(
        model, optimizer, server=url, site=site, folder=folder / "w", weight=drawn.weights[site][0]
    ) as loop:
        for step in range(100):
            if loop.finished:
                break
            local_step(model, lambda g: g, site, step)
            optimizer.step()


def _submit_in_order(drawn: Drawn, server: atoll.Server, folder: Path) -> None:
    sites = manual_sites(server, folder, sorted(drawn.weights))
    models, k = {site: drawn.build() for site in sites}, dict.fromkeys(sites, 0)

    def train(site: str) -> None:
        if sites[site].next_round() is not None:
            _train(drawn, sites[site].round, models[site], site, k[site])
            k[site] += drawn.steps[site]

    for site in sites:
        train(site)
    for number, arrived in enumerate(drawn.order):
        for site in arrived:
            sites[site].submit(models[site], weight=drawn.weights[site][0], steps=drawn.steps[site])
        if number < len(drawn.order) - 1:
            for site in arrived:
                train(site)
    last = drawn.order[-1]
    finish(server, {site: sites[site] for site in [*last, *sorted(sites.keys() - last)]})


# -- the same by the specification


def by_specification(drawn: Drawn, norms: Callable[[list[float]], Sequence[float]]) -> State:
    """The exported model."""
    rules = drawn.rules(norms)

    def site_of(name: str) -> spec.Site:
        model = drawn.build()
        optimizer = optimizer_of(model)

        def step(k: int, w: State, correct: Callable[[State], State]) -> None:
            local_step(model, correct, name, k)
            optimizer.step()

        weight = drawn.weights[name][0]
        return spec.Site(rules, name, model.state_dict(), step, drawn.steps[name], weight, LR)

    sites, model = {name: site_of(name) for name in sorted(drawn.weights)}, drawn.build()
    count = drawn.more.get("fragments", 1)
    names = [[each.name for each in schema.tensors] for schema in split(schema_of(model), count).schemas]
    initial = model.state_dict()
    fragments = [spec.Fragment(rules, {name: initial[name] for name in some}) for some in names]
    everyone = list(sites.values())
    if drawn.kind == "federated":
        spec.federated(fragments[0], everyone, drawn.rounds, lambda site, number: drawn.weights[site][number - 1])
    elif drawn.kind == "diloco":
        spec.diloco(fragments, everyone, drawn.rounds, drawn.more["H"], drawn.more["tau"], drawn.more["alpha"])
    else:
        spec.asynchronous(fragments[0], sites, drawn.order, drawn.more["staleness_weight"])
    return {name: value for fragment in fragments for name, value in fragment.result().items()}


# -- what is drawn


def _codec(key: str, name: str) -> dict[str, Any]:
    density = {f"aggregation.{key}.density": DENSITY} if name == "topk" else {}
    return {f"aggregation.{key}.name": name} | density


def _up(name: str) -> Choice:
    C, feedback = CODECS[name]  # noqa: N806 (the specification's name)
    return Choice(_codec("upload_codec", name), {"up": C, "feedback": feedback})


def _down(name: str) -> Choice:
    return Choice(_codec("download_codec", name), {"down": down_codec(name)})


def _outer(name: str, step: spec.Outer, **options: Any) -> Choice:
    key = "algorithm.outer_optimizer"
    return Choice(
        {f"{key}.name": name} | {f"{key}.{option}": value for option, value in options.items()}, {"outer": step}
    )


def _of_torch(name: str, kind: type[torch.optim.Optimizer], **options: Any) -> Choice:
    return _outer(name, spec.of_torch(kind, **options), **options)


OUTERS = (
    _of_torch("sgd", torch.optim.SGD, lr=1.0, momentum=0.0),
    _of_torch("sgd", torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=False),
    _of_torch("sgd", torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    _of_torch("sgd", torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=False, weight_decay=0.1),
    _of_torch("adam", torch.optim.Adam, lr=0.01, eps=1e-3),
    _of_torch("adamw", torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    _of_torch("adagrad", torch.optim.Adagrad, lr=0.02),
    _of_torch("nadam", torch.optim.NAdam, lr=0.02),
    _of_torch("rmsprop", torch.optim.RMSprop, lr=0.01),
    _outer("yogi", spec.yogi(lr=0.02), lr=0.02),
)


def _delayed(every: int, first: int = 0) -> Choice:
    key = "algorithm.outer_optimizer"
    settings = {f"{key}.name": "sgd", f"{key}.lr": 0.7, f"{key}.momentum": 0.8, "async.momentum_every": every}
    return Choice(settings, {"outer": spec.delayed_nesterov(0.7, 0.8, every, first)})


def _reducer(name: str, **options: float) -> Choice:
    key = "aggregation.reducer"
    settings = {f"{key}.name": name} | {f"{key}.{option}": value for option, value in options.items()}
    return Choice(settings, {"reducer": REDUCERS[name](**options)})


REDUCED = (
    Choice({}, {}),
    _reducer("median"),
    _reducer("trimmed_mean", trim=0.3),
    _reducer("clipped_mean"),
    _reducer("clipped_mean", max_norm=1.0),
)
ALGORITHMS = (
    Choice({"algorithm.name": "fedavg"}, {}),
    Choice({"algorithm.name": "fedprox", "algorithm.mu": 0.3}, {"mu": 0.3}),
    Choice({"algorithm.name": "scaffold"}, {"controls": True}),
    Choice({"algorithm.name": "fednova"}, {"reducer": spec.Reducer(spec.fednova)}),
)
SITES = "abcd"
WEIGHT = st.sampled_from((1.0, 1.0, 2.5, 0.3, 7.0))
STALENESS = {"constant": lambda s: 1.0, "inverse_sqrt": spec.inverse_sqrt}


def is_robust(choice: Choice) -> bool:
    """Whether the reducer ignores weights."""
    return bool(choice.rules) and choice.rules["reducer"].of_buffers


@st.composite
def drawn_runs(draw: Any, kind: str) -> Drawn:
    """A run of a kind that Atoll does not refuse."""
    one = lambda values: draw(st.sampled_from(values))  # noqa: E731
    sites = SITES[: one((1, 2, 2, 3, 4))]
    rounds = one((1, 2, 3))
    params = draw(
        st.lists(
            st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from((True, True, False))),
            min_size=3,
            max_size=5,
        )
    )
    params = [("float32", (40,), True), *params]
    buffers = draw(st.lists(st.sampled_from(("mean", "max", "sum", "first", "keep")), max_size=3))
    algorithm = one(
        ALGORITHMS[: {"federated": 4, "async": 2, "diloco": 0}[kind]] or (Choice({"algorithm.name": "diloco"}, {}),)
    )
    choices = [algorithm, _up(one(tuple(CODECS))), _down(one(("none", *CODECS)))]
    choices.append(one(OUTERS) if one((True, True, False)) else _delayed(one((2, 3))))
    staleness = one(tuple(STALENESS)) if kind == "async" else "constant"
    if "reducer" not in algorithm.rules:
        choices.append(one(REDUCED if staleness == "constant" else [each for each in REDUCED if not is_robust(each)]))
    choices.append(Choice({"network.part_bytes": one((2**16, 2**24))}, {}))
    weights = {site: draw(st.lists(WEIGHT, min_size=rounds, max_size=rounds)) for site in sites}
    order: list[list[str]] = []
    more: dict[str, Any] = {}
    if kind == "federated":
        for number in range(rounds):
            for site in draw(st.sets(st.sampled_from(sites), max_size=len(sites) - 1)) if one((0, 0, 1)) else ():
                weights[site][number] = 0.0
    elif kind == "diloco":
        count = min(one((1, 1, 2, 3)), sum(0 not in shape for _, shape, _ in params))  # no fragment is empty
        every = one((1, 2))
        tau = one((0, *range(1, every + 1)))
        alpha = one((0.0, 0.5, 0.25) if tau < every * count else (0.5, 0.25))
        more = {"fragments": count, "H": every * count, "tau": tau, "alpha": alpha}
        streaming = {"num_fragments": count, "sync_every": every * count, "fragment_sync_delay": tau}
        streaming |= {"fragment_update_alpha": alpha}
        choices.append(Choice({f"diloco.{key}": value for key, value in streaming.items()}, {}))
        params = [(dtype, shape or (2,), trained) for dtype, shape, trained in params]
    else:
        size = draw(st.integers(1, len(sites)))
        order = [draw(st.permutations(sites))[:size] for _ in range(one((1, 2, 4, 6)))]
        rounds = len(order)
        more = {"staleness_weight": STALENESS[staleness]}
        settings = {"enabled": True, "buffer_size": size, "staleness_weight": staleness}
        choices.append(Choice({f"async.{key}": value for key, value in settings.items()}, {}))
    steps = {site: one((1, 2, 3)) for site in sites}
    return Drawn(kind, choices, params, buffers, weights, steps, rounds, order, more)
