"""The federated loop without a server: the same script, one round, plain local training; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from atoll.algorithms.optimizer_hooks import Given, StepHooks
from atoll.errors import UsageError, public_api
from atoll.tensors.arrays import Arrays, require_framework, to_numpy
from atoll.tensors.module_tensors import Tensors, named_parameters, named_tensors
from atoll.worker.arguments import finite_metrics, positive
from atoll.worker.log_lines import LOG

ALONE = "no server is configured (ATOLL_SERVER): training alone"
ALONE_ENDED = "alone: nothing was sent, and Atoll saved nothing; the script keeps the model, or loses it"

H = TypeVar("H")
Model = TypeVar("Model", bound="nn.Module | dict[str, Tensor]")


class Round(Protocol):
    """One round, as a training script sees it."""

    @property
    def number(self) -> int:
        """Counts from 1."""
        ...

    def load_into(self, model: Model) -> Model:
        """Pull the global model into `model`, in place, and return it."""
        ...

    def correct(self, model: nn.Module, optimizer: Given) -> StepHooks:
        """Have the run's algorithm correct local training."""
        ...

    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return what the algorithm keeps beside the model in a group, by parameter's name; empty without one."""
        ...

    def own_state(self, group: str) -> dict[str, Tensor]:
        """Return what the algorithm keeps at this site in a group, likewise."""
        ...

    @overload
    def state_dict(self, framework: Literal["torch"] = "torch") -> dict[str, Tensor]: ...

    @overload
    def state_dict(self, framework: Literal["numpy"]) -> dict[str, np.ndarray[Any, Any]]: ...

    def state_dict(self, framework: str = "torch") -> dict[str, Any]:
        """The global model as new tensors, or arrays, by name."""
        ...

    def submit(
        self,
        model: nn.Module | Arrays,
        *,
        weight: float = 1.0,
        metrics: dict[str, float] | None = None,
        steps: int = 0,
        groups: Mapping[str, Arrays] | None = None,
    ) -> None:
        """Submit what `model` has become in this round."""
        ...


@public_api
class LocalWorker:
    """What `atoll.join` gives without a server: the same loop, one round, nothing sent."""

    site = "alone"
    bytes_up = bytes_down = 0
    _left = False

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Nothing to leave: says so, unless an error ended training."""
        if not self._left and error is None:
            LOG.info("%s", ALONE_ENDED)
        self._left = True

    def load_into(self, model: Model) -> Model:
        """The model as it is."""
        return model

    def __iter__(self) -> Iterator[Round]:
        yield LocalRound()

    def task(self, name: str) -> Callable[[H], H]:
        """No tasks come without a server: the handler is given back."""
        return lambda handler: handler

    def evaluates(self, function: Any = None, *, model: nn.Module | None = None) -> Any:
        """No server asks: the function is given back."""
        return function or (lambda decorated: decorated)

    def submits(self, function: Any) -> Any:
        """No server asks: the function is given back."""
        return function

    def note(self, text: str) -> None:
        """No server is told."""

    def tasks(self) -> Iterator[Any]:
        """None come without a server."""
        return iter(())

    def run(self) -> None:
        """Nothing is to be answered without a server."""


@public_api
class LocalRound:
    """The one round of a script that runs without a server."""

    number = 1
    version = 0

    def __init__(self) -> None:
        self._model: nn.Module | Tensors | None = None

    def load_into(self, model: Model) -> Model:
        """The model as it is."""
        self._model = model
        return model

    def correct(self, model: nn.Module, optimizer: Given) -> StepHooks:
        """Without a server nothing is corrected; steps are counted."""
        return StepHooks(model).attach(optimizer)

    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return zeros after `load_into`, so that a loop written by hand for an algorithm trains plainly."""
        return self._zeros()

    def own_state(self, group: str) -> dict[str, Tensor]:
        """Zeros, likewise."""
        return self._zeros()

    def _zeros(self) -> dict[str, Tensor]:
        named = named_parameters(self._model) if isinstance(self._model, nn.Module) else {}
        return {name: torch.zeros(value.shape) for name, value in named.items() if value.is_floating_point()}

    @overload
    def state_dict(self, framework: Literal["torch"] = "torch") -> dict[str, Tensor]: ...

    @overload
    def state_dict(self, framework: Literal["numpy"]) -> dict[str, np.ndarray[Any, Any]]: ...

    @public_api
    def state_dict(self, framework: str = "torch") -> dict[str, Any]:
        """Nothing is known without a server and before `load_into`; after it, copies of the model's tensors."""
        if self._model is None:
            raise UsageError(
                "There is no global model without a server.",
                "Fill a model first: fl_round.load_into(model), or atoll.functional.receive(into=model).",
            )
        require_framework(framework)
        tensors = {name: tensor.clone() for name, tensor in named_tensors(self._model)[0].items()}
        return to_numpy(tensors) if framework == "numpy" else tensors

    def submit(
        self,
        model: nn.Module | Arrays,
        *,
        weight: float = 1.0,
        metrics: dict[str, float] | None = None,
        steps: int = 0,
        groups: Mapping[str, Arrays] | None = None,
    ) -> None:
        """Say what would have been submitted."""
        positive(weight)
        told = ", ".join(f"{key} {value:.4g}" for key, value in finite_metrics(metrics or {}, "alone").items())
        self._model = None
        LOG.info("alone: trained without a server%s", f" ({told})" if told else "")
