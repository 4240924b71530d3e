"""The tensors of a model that a script has replaced while it trains: found anew, or refused.

`load_state_dict(assign=True)` and a new `nn.Parameter` leave the optimizer with the old tensors, and `half()` leaves a
model of another dtype. Updates would come from what is no longer trained, and versions go where the model is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.optimizer_hooks import held_by
from atoll.errors import UsageError
from atoll.tensors.module_tensors import Tensors, memory_of, named_parameters, named_tensors

_REMEDY = (
    "Copy values into the tensors that are there, as load_state_dict(state) does without assign=True; or change the "
    "model before atoll.DiLoCo starts, and build the optimizer over the new parameters."
)


def replaced(model: nn.Module, before: Tensors, optimizers: Sequence[Optimizer]) -> Tensors:
    """The model's tensors as they are now: `before` itself where none was replaced.

    Args:
        before: as they were.
        optimizers: that train the model.

    Raises:
        UsageError: one has come, gone, or is of another dtype or shape; or the optimizers train another one. It is
            named.
    """
    now = named_tensors(model)[0]
    for name in [*before, *now]:
        if name not in now or name not in before:
            raise UsageError(
                f"The model has {'lost its' if name in before else 'a new'} tensor {name!r} since training began.",
                _REMEDY,
            )
    moved = [name for name, tensor in now.items() if not _is_same(tensor, before[name])]
    if not moved:
        return before
    held, parameters = held_by(optimizers), named_parameters(model)
    for name in moved:
        was, has_become = before[name], now[name]
        if (was.dtype, was.shape) != (has_become.dtype, has_become.shape):
            raise UsageError(
                f"The model's tensor {name!r} was {_form(was)} when training began, and is {_form(has_become)} now.",
                _REMEDY,
            )
        parameter = parameters.get(name)
        if parameter is not None and parameter.requires_grad and id(parameter) not in held:
            raise UsageError(
                f"The model's parameter {name!r} was replaced since training began, and no optimizer trains the new "
                "one.",
                _REMEDY,
            )
    return now


def _is_same(tensor: Tensor, before: Tensor) -> bool:
    return memory_of(tensor) == memory_of(before) or (
        tensor.numel() == 0 and (tensor.dtype, tensor.shape) == (before.dtype, before.shape)
    )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
