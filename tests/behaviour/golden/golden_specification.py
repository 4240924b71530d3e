"""The golden runs as `spec/specification.py` computes them; Atoll says here only which tensors make a fragment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import specification as spec
import torch
from golden_axes import CLIPPED, DENSITY, STEPS, STREAMS, Row
from golden_model import STEPS as LOCAL_STEPS
from golden_model import WEIGHTS, build, inner, local_step, state_of
from golden_runs import replaced_by
from kit import SITES, tensors_digest
from torch import Tensor, nn

from atoll.tensors.fragments import split
from atoll.tensors.module_tensors import schema_of

State = dict[str, Tensor]
Codec = Callable[[Tensor, torch.dtype], Tensor]
LR = 0.05
TIED = "head.weight"
ROUNDS = 3
BUFFERS = {"norm.running_mean": "mean", "norm.running_var": "mean", "norm.num_batches_tracked": "max", "seen": "max"}
CODECS: dict[str, tuple[Codec, bool]] = {
    "none": (spec.none, False),
    "bf16": (spec.bf16, False),
    "int8": (spec.quantized(127), True),
    "int4": (spec.quantized(7), True),
    "topk": (spec.topk(DENSITY), True),
}
"""Name → the codec, and whether its error is fed back."""
REDUCERS: dict[str, Callable[..., spec.Reducer]] = {
    "own": spec.Reducer,
    "median": lambda: spec.Reducer(combine=spec.median, of_buffers=True),
    "trimmed_mean": lambda trim: spec.Reducer(combine=spec.trimmed_mean(trim), of_buffers=True),
    "clipped_mean": lambda max_norm=None: spec.Reducer(spec.clipped(max_norm)),
}
"""Name → the reducer with these options."""

Norms = Callable[[list[float]], Sequence[float]]


def rules_of(row: Row, norms: Norms = list) -> spec.Rules:
    """What a row of the matrix says, in the words of the specification."""
    algorithm = row["algorithm"]
    up, feedback = CODECS[row["codec"]]
    return spec.Rules(
        outer=_outer(algorithm, row["outer"]),
        up=up,
        feedback=feedback,
        down=down_codec(row["downlink"]),
        reducer=spec.Reducer(spec.fednova) if algorithm == "fednova" else REDUCERS[row["reducer"]](),
        buffers=BUFFERS,
        mu=0.1 if algorithm == "fedprox" else 0.0,
        controls=algorithm == "scaffold",
        norms=norms,
    )


def down_codec(name: str) -> Codec | None:
    """The codec of versions; None: they travel whole."""
    return None if name == "none" else CODECS[name][0]


def _outer(algorithm: str, outer: str) -> spec.Outer:
    if algorithm == "fedadam":
        return spec.of_torch(torch.optim.Adam, lr=0.01, betas=(0.9, 0.99), eps=1e-3)
    if outer == "delayed":
        return spec.delayed_nesterov(lr=0.7, momentum=0.9, delay=2)
    nesterov = algorithm in STEPS
    momentum = 0.9 if outer == "momentum" or nesterov else 0.0
    return spec.of_torch(torch.optim.SGD, lr=0.7, momentum=momentum, nesterov=nesterov)


class _Corrected:
    """The local optimizer, along the gradients that the specification has corrected."""

    def __init__(self, model: nn.Module, correct: Callable[[State], State]) -> None:
        self._model, self._correct, self._optimizer = model, correct, inner(model)

    def step(self) -> None:
        parameters = dict(self._model.named_parameters())
        g = {name: each.grad for name, each in parameters.items() if each.grad is not None}
        for name, corrected in self._correct(g).items():
            parameters[name].grad = corrected
        self._optimizer.step()


def digests_by_specification(row: Row, recorded: list[list[float]]) -> dict[str, str]:
    """What `golden_runs.digests_of` returns, by the specification.

    Args:
        recorded: the norms of the run's updates, version by version. The specification takes them in place of its own.
    """
    states = _states(row, replaced_by(recorded) if row["reducer"] == CLIPPED else list)
    return {name: tensors_digest(state)[:16] for name, state in sorted(states.items())}


def _states(row: Row, norms: Norms) -> dict[str, State]:
    rules, is_of_steps = rules_of(row, norms), row["algorithm"] in STEPS
    before: dict[str, State] = {}

    def site_of(name: str) -> spec.Site:
        model, steps = build(row["dtype"]), LOCAL_STEPS[name]

        def step(k: int, w: State, correct: Callable[[State], State]) -> None:
            if is_of_steps:
                before[name] = state_of(model)
            number = k if is_of_steps else 10 * (k // steps + 1) + k % steps
            local_step(model, _Corrected(model, correct), name, number)  # type: ignore[arg-type]

        class Watched(spec.Site):
            def update(self, *given: Any) -> spec.Update:
                if not is_of_steps:
                    before[name] = state_of(model)
                return super().update(*given)

        return Watched(rules, name, tensors_of(model), step, steps, WEIGHTS[row["weights"]][name], LR)

    start = build(row["dtype"])
    schemas = split(schema_of(start), 3 if row["algorithm"] in STREAMS else 1).schemas
    sites, initial = [site_of(name) for name in SITES], tensors_of(start)
    parts = [spec.Fragment(rules, {each.name: initial[each.name] for each in schema.tensors}) for schema in schemas]
    if is_of_steps:
        every = 2 if row["algorithm"] == "diloco" else 6
        alpha = 0.0 if row["algorithm"] == "diloco" else 0.5
        spec.diloco(parts, sites, ROUNDS, every, tau=int(row["algorithm"] == "overlapped"), alpha=alpha)
    else:
        spec.federated(parts[0], sites, ROUNDS)
    result = {name: value for part in parts for name, value in part.result().items()}
    states = before | {"result": result | {TIED: result["embed.weight"]}}
    ends = [site.w | {TIED: site.w["embed.weight"]} for site in sites]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    return states | {"end": ends[0]}


def tensors_of(model: nn.Module) -> State:
    """The model's own tensors, in its memory; a tied one once."""
    return {name: value for name, value in model.state_dict().items() if name != TIED}
