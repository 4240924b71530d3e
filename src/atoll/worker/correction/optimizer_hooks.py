"""What a run's algorithm adds to local training: hooks on the user's own optimizer, for one round.

    with fl_round.correct(model, optimizer):
        train()                               # plain training, whatever the algorithm
    fl_round.submit(model)

Of several optimizers FedProx corrects each one's own parameters; SCAFFOLD takes one.

FedProx changes the gradient before a step, SCAFFOLD the parameters behind it. FedAvg changes nothing. Steps are counted
and learning rates read where they happen: under gradient accumulation, with a schedule, or in a framework's loop. Where
the gradient is formed inside the step, by a closure, "before" is behind the closure, each time that it is called; and
the loss that it returns is that of the gradient, since a line search goes by both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.errors import UsageError
from atoll.tensors.module_tensors import named_parameters
from atoll.worker.correction.optimizers import Given, held_by, optimizers_in, outside_compiled, require_trains
from atoll.worker.exchange.encode_update import Runs

if TYPE_CHECKING:
    from atoll.worker.correction.control_variates import OwnControls


class Correction:
    """Local training without a correction; the others build on it.

    Args:
        model: that is trained; its parameters are known by name.

    Attributes:
        steps: optimizer steps so far.
        rates: Σ η over them.
        offsets: what a step is shifted by, for each unit of learning rate: a tensor for each parameter that is.
    """

    algorithm = "The algorithm"
    changes_training = False
    """Whether a step with it is another one than without."""
    measures_controls = False
    """Whether `control_difference` gives Δc_i, so that a loop must not."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = named_parameters(model)
        self.steps, self.rates = 0, 0.0
        self.offsets: dict[str, Tensor] = {}
        self._optimizer: Optimizer | None = None
        self._others: list[Correction] = []
        self._handles: list[Any] = []
        self._rate = 0.0
        self._under_way = self._formed = False  # a step; a gradient in it
        self._depth = 0  # 2 where step() of a class calls that of its parent: torch calls the hooks of both

    def attach(self, optimizer: Given) -> Correction:
        """Follow the steps of an optimizer, or of several in the order in which they step, until `close`.

        Those of the last one are counted.

        Raises:
            UsageError: it follows another one already, or one of these trains another model.
        """
        if self._optimizer is not None:
            raise UsageError(
                "The round is corrected already, by another call.", "Call it once, with all optimizers as a list."
            )
        *others, last = optimizers_in(optimizer)
        require_trains([*others, last], self.parameters)
        self._others = [part for each in others if (part := self._part_for(each)) is not None]
        return self._follow(last)

    def _part_for(self, optimizer: Optimizer) -> Correction | None:
        """What corrects the steps of an optimizer before the last one; None: nothing does."""
        return None

    def _follow(self, optimizer: Optimizer) -> Correction:
        self._optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(outside_compiled(self._begin)),
            optimizer.register_step_post_hook(outside_compiled(lambda *_: self._after())),
        ]
        return self

    def close(self) -> None:
        """Let go of the optimizers. Idempotent."""
        for other in self._others:
            other.close()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def __enter__(self) -> Correction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def control_difference(self) -> Runs | None:
        """Δc_i of what was trained; None for algorithms without controls.

        Raises:
            UsageError: training was to be corrected, and there was no step, or one that did not end.
        """
        if self.changes_training:
            self._require_steps()
        return None

    def _require_steps(self) -> None:
        """Refuse what was trained behind the correction's back, or not at all."""
        if self._under_way:
            raise UsageError(
                "An optimizer step began and did not end: its correction is missing.",
                "Let optimizer.step() return before the round is submitted.",
            )
        if not self.steps:
            raise UsageError(
                f"{self.algorithm} saw no optimizer step in this round.",
                "Call fl_round.correct(model, optimizer) before training, with the optimizer whose step() trains.",
            )

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """As torch calls it: `args` begin with the optimizer; what is returned takes their place."""
        self._depth += 1
        if self._depth > 1:
            return None
        self._under_way, self._formed = True, False
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._behind(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._behind(kwargs["closure"])}
        with self._a_failed_step_has_ended():
            self._before()
        return None

    def _behind(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            with self._a_failed_step_has_ended():
                loss = closure()
                self._before()
                return self._whole(loss)

        return call

    @contextmanager
    def _a_failed_step_has_ended(self) -> Iterator[None]:
        """Torch calls no hook behind it; the next step is not one within it."""
        try:
            yield
        except BaseException:
            self._depth = 0
            raise

    def _before(self) -> None:
        self._rate, self._formed = self._learning_rate(), self._formed or self._has_gradients()
        with torch.no_grad():
            self.correct_gradients_()

    def _after(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self._under_way = False
        if not (self._formed or self._has_gradients()):  # an optimizer that steps twice clears them itself
            return  # a closure that formed no gradient: nothing moved
        with torch.no_grad():
            self.correct_parameters_(self._rate)
        self.steps, self.rates = self.steps + 1, self.rates + self._rate

    def _whole(self, loss: Any) -> Any:
        """What a closure returned, with what the gradients' correction is the gradient of."""
        return loss

    def _has_gradients(self) -> bool:
        assert self._optimizer is not None
        return any(value.grad is not None for group in self._optimizer.param_groups for value in group["params"])

    def _learning_rate(self) -> float:
        """η of the step that is about to happen; where nothing depends on it, of the first group, or 0 without one."""
        assert self._optimizer is not None
        return float(self._optimizer.param_groups[0].get("lr") or 0.0)

    def correct_gradients_(self) -> None:
        """Before a step."""

    def correct_parameters_(self, rate: float) -> None:
        """Behind a step with the learning rate `rate`."""


class Proximal(Correction):
    """FedProx (arXiv 1812.06127): g ← g + μ·(w − w_t). Holds one copy of the trainable parameters, beside them.

    Args:
        mu: μ.
    """

    algorithm = "FedProx"
    changes_training = True

    def __init__(self, model: nn.Module, mu: float) -> None:
        super().__init__(model)
        self._mu = mu
        self._start = {name: value.detach().clone() for name, value in self.parameters.items() if value.requires_grad}

    def _part_for(self, optimizer: Optimizer) -> Correction:
        part, held = copy.copy(self), held_by([optimizer])
        part._handles = []
        part._start = {name: start for name, start in self._start.items() if id(self.parameters[name]) in held}
        self._start = {name: start for name, start in self._start.items() if name not in part._start}
        return part._follow(optimizer)

    def correct_gradients_(self) -> None:
        for name, start in self._start.items():
            parameter = self.parameters[name]
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"The gradient of {name!r} is sparse, and FedProx adds a dense term to it.",
                    "Build the embedding with sparse=False, or run fedavg.",
                )
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start, alpha=self._mu)

    def _whole(self, loss: Any) -> Any:
        """F(w) + (μ/2)·‖w − w_t‖², in fp32 or wider; what is no loss stays as it is."""
        if not isinstance(loss, Tensor | int | float):
            return loss
        term = torch.zeros((), device=loss.device if isinstance(loss, Tensor) else None)
        with torch.no_grad():
            for name, start in self._start.items():
                moved = self.parameters[name] - start
                norm = torch.linalg.vector_norm(moved, dtype=torch.promote_types(moved.dtype, torch.float32))
                term = term + norm.square().to(term.device)
        term = term * (self._mu / 2)
        return loss + (term if isinstance(loss, Tensor) else term.item())


def correction_for(local: Mapping[str, Any], model: nn.Module, base: Runs, controls: OwnControls | None) -> Correction:
    """What the run's algorithm asks for.

    Args:
        local: as the server said it when this worker joined.
        controls: c_i, in runs that have controls.

    Raises:
        UsageError: this version of Atoll does not know it.
    """
    kind = local.get("correction", "none")
    if kind == "none":
        return Correction(model)
    if kind == "fedprox":
        return Proximal(model, float(local["mu"]))
    if kind == "scaffold":
        if controls is None:
            raise UsageError("The run is SCAFFOLD's, and its versions hold no controls.", "Begin a new run.")
        from atoll.worker.correction.scaffold_steps import (
            ScaffoldCorrection,  # nothing of it is there before controls are
        )

        return ScaffoldCorrection(model, base, controls)
    raise UsageError(f"The run corrects local training by {kind!r}, which this worker does not know.", "Upgrade Atoll.")


def following(local: Mapping[str, Any], model: nn.Module) -> Correction:
    """What a rank other than 0 corrects its steps by; SCAFFOLD's offsets, zeros here, come from rank 0."""
    if local["correction"] == "fedprox":
        return Proximal(model, float(local["mu"]))
    from atoll.worker.correction.scaffold_steps import Shifted

    shifted = Shifted(model)
    shifted.offsets = {
        name: torch.zeros_like(value) for name, value in shifted.parameters.items() if value.requires_grad
    }
    return shifted
