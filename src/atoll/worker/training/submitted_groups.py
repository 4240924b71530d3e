"""The tensors that a script submits for the run's algorithm, if its own training loop computes them: checked, and read.

fl_round.submit(model, groups={"control": difference}, steps=steps)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from atoll.algorithms.base import ChangeReader, ElementReader, SiteState
from atoll.errors import UsageError
from atoll.tensors.arrays import as_tensor
from atoll.tensors.chunks import run_of
from atoll.tensors.schema import extra_name
from atoll.worker.exchange.encode_update import Shapes


def given_groups(
    groups: object, shapes: Mapping[str, Shapes], site_state: SiteState | None, state_groups: tuple[str, ...]
) -> Callable[[ChangeReader], Mapping[str, ElementReader]]:
    """Check the tensors that a script submits for an algorithm such as SCAFFOLD. Return a function that reads them.

    Atoll calls the returned function in place of `StepHooks.finish`. The result of this call is a mapping: group of
    tensors → function (parameter, start, stop) → elements. If the site keeps a group between rounds, the group's
    function also adds the elements that it reads to the tensor that the site keeps. (In the same way, the server adds
    the reduced tensors of all sites to the version's tensor.)

    Args:
        groups: group → parameter name → tensor.
        shapes: group of the run's algorithm → parameter name → shape.
        site_state: the tensors that the site keeps; None: the site keeps none.
        state_groups: names of the groups that the site keeps.

    Raises:
        UsageError: a group is missing or unknown, or a tensor is refused by `_require_tensors`.
    """
    if not isinstance(groups, Mapping) or set(groups) != set(shapes):
        wrong = f"is of type {type(groups).__name__}"
        problem = f"has {sorted(map(str, groups))}" if isinstance(groups, Mapping) else wrong
        raise UsageError(f"The argument `groups` {problem}, but needs {sorted(shapes)}.", "Pass exactly these keys.")
    tensors = {group: _require_tensors(f"groups[{group!r}]", groups[group], each) for group, each in shapes.items()}

    def run(group: str, name: str, start: int, stop: int) -> Tensor:
        delta = run_of(tensors[group][name], start, stop)
        if site_state is not None and group in state_groups:
            own = site_state.read(extra_name(group, name), start, stop)
            delta = delta.to(own.dtype)
            site_state.write(extra_name(group, name), start, own + delta)
        return delta

    return lambda _: {group: partial(run, group) for group in tensors}


def _require_tensors(what: str, values: object, shapes: Shapes) -> dict[str, Tensor]:
    """Check that a script gave one tensor per parameter. Return them contiguous, on the CPU, in fp32 (fp64 for fp64).

    Args:
        what: the argument's name, for messages.
        values: parameter name → tensor, or an array that converts to a tensor (numpy, DLPack, `__array__`).
        shapes: parameter name → shape.

    Raises:
        UsageError: `values` is not a mapping, a name is missing or unknown, or a tensor has a wrong shape, is not
            floating point or is not finite. The message names the tensor.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            f"{what} is of type {type(values).__name__}, not a mapping.",
            "Use a mapping from parameter names to tensors with the parameters' shapes.",
        )
    for name in shapes:
        if name not in values:
            raise UsageError(f"{what} has no entry for {name!r}.", "Add one: zeros if the parameter is not trained.")
    tensors = {}
    for name, value in values.items():
        if name not in shapes:
            raise UsageError(f"{what} has an entry for {name!r}, which is not a parameter.", "Use parameter names.")
        tensor = as_tensor(f"{what}[{name!r}]", value).detach()
        if tuple(tensor.shape) != shapes[name]:
            raise UsageError(
                f"{what}[{name!r}] has the shape {list(tensor.shape)}, but the parameter has {list(shapes[name])}.",
                "Give a tensor of the parameter's shape.",
            )
        if not tensor.is_floating_point():
            raise UsageError(f"{what}[{name!r}] is {tensor.dtype}, not floating point.", "Use a float dtype.")
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{what}[{name!r}] contains NaN or Inf.", "Check the learning rate and the loss.")
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        tensors[name] = tensor.to("cpu", wide).contiguous()
    return tensors
