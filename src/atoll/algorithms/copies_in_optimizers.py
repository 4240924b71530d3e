"""Finds tensors in optimizers that may be copies of a model's weights, compares them, and fills them.

`tensors_in` returns them as pairs with their parameters, by the place where an optimizer keeps them. `are_equal` tells
whether all at a place are copies: equal up to a cast, in some elements of each.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.tensors.chunks import CHUNK_ELEMENTS, assign_run_, run_of
from atoll.tensors.module_tensors import PLAIN, is_sharded, memory_of

SAMPLED_ELEMENTS = 32
"""Elements of each tensor that are compared: random weights do not agree in so many by chance."""
SEARCH_DEPTH = 4
"""Depth to which lists and dicts in the attributes of an optimizer are searched."""
SAME_DIRECTION = 0.99
"""Cosine of the angle between gradients from which on they are one gradient, but for a scale and a cast."""
AVERAGES = ("ema", "average", "avg", "shadow", "swa")
"""Parts of the names of averages that training does not read."""
MOMENTS = {
    *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "eta", "mu", "ax"),
}
"""Names of the state of torch's own optimizers, none of which a step starts from."""
ALIGNMENTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of elements at multiples of which the parts of a flat tensor may begin."""
MOST_PADDING = 1024
"""Elements that may follow the last part of a flat tensor."""
OWN_PARAMETERS = ".params"
"""End of the place of tensors that an optimizer trains in place of the model's parameters."""
Memory: TypeAlias = dict[tuple[object, ...], Tensor]
"""Tensors by their place in memory (`memory_of`)."""


class Pair(NamedTuple):
    """A parameter of the model, and a tensor that may be a copy of it."""

    parameter: Tensor
    copy: Tensor


def place_in_memory(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors if this rank's parts of them are the same memory."""
    return memory_of(local_part(tensor))


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local


def sampled_points(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, in row-major order and evenly distributed."""
    numel = tensor.numel()
    step = numel // SAMPLED_ELEMENTS or 1
    with torch.no_grad():
        if tensor.is_contiguous():
            return tensor.as_strided((min(numel, SAMPLED_ELEMENTS),), (step,))
        return tensor.reshape(-1)[::step][:SAMPLED_ELEMENTS]


def gathered(pieces: Sequence[Tensor]) -> Tensor:
    """Return the elements of all pieces as fp64 on the CPU. From one device, they come in one transfer."""
    if len({piece.device for piece in pieces}) > 1:
        pieces = [piece.cpu() for piece in pieces]
    if len({piece.dtype for piece in pieces}) > 1:
        wide = torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32
        pieces = [piece.to(wide) for piece in pieces]
    return torch.cat(list(pieces)).cpu().double() if pieces else torch.empty(0, dtype=torch.float64)


class Sample:
    """Some elements of each tensor, as fp64 on the CPU.

    Args:
        tensors: the tensors, by their place in memory.
    """

    def __init__(self, tensors: Memory) -> None:
        self._tensors = tensors
        self.values = gathered([sampled_points(each) for each in tensors.values()])

    @functools.cached_property
    def parts(self) -> dict[tuple[object, ...], slice]:
        """Each tensor's part of `values`, by its place in memory."""
        stops = itertools.accumulate(min(each.numel(), SAMPLED_ELEMENTS) for each in self._tensors.values())
        return {
            key: slice(begin, stop) for key, (begin, stop) in zip(self._tensors, pairwise([0, *stops]), strict=True)
        }

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the elements of one tensor; None if the tensor was not among them."""
        part = self.parts.get(place_in_memory(tensor))
        return None if part is None else self.values[part]

    def is_of(self, tensors: Memory) -> bool:
        """Return whether these are elements of these tensors."""
        return self._tensors.keys() == tensors.keys()


def are_equal(pairs: Sequence[Pair], sample: Sample | None = None) -> bool:
    """Return whether copies equal their parameters, up to a cast to the narrower dtype, and are not all zero.

    Args:
        pairs: the parameters and copies.
        sample: earlier elements of the parameters; None: compare with their current values.
    """
    copies, values = list[Tensor](), list[Tensor]()
    for parameter, copy in pairs:
        narrow = narrower_dtype(parameter, copy)
        points = sampled_points(parameter) if sample is None else sample.of(parameter)
        if points is None:
            return False
        copies.append(sampled_points(copy).to(narrow))
        values.append(points.to(narrow))
    one, other = gathered(copies), gathered(values)
    return torch.equal(one, other) and bool(one.any())


def narrower_dtype(one: Tensor, other: Tensor) -> torch.dtype:
    """Return the dtype of the tensor that has fewer bytes an element."""
    return one.dtype if one.element_size() <= other.element_size() else other.dtype


def fill(pairs: Sequence[Pair], *, from_copies: bool = False) -> None:
    """Copy parameters into their copies, where the two differ by more than a cast; or the other way round."""
    with torch.no_grad():
        for parameter, copy in pairs:
            source, target = (copy, parameter) if from_copies else (parameter, copy)
            narrow = narrower_dtype(parameter, copy)
            for start in range(0, target.numel(), CHUNK_ELEMENTS):
                stop = min(start + CHUNK_ELEMENTS, target.numel())
                now = run_of(target.detach(), start, stop)
                values = run_of(source.detach(), start, stop).to(now.device)
                same = now.to(narrow) == values.to(narrow)
                assign_run_(target.detach(), start, torch.where(same, now, values.to(now.dtype)))


def parameters_copied(optimizer: Optimizer, parameters: Iterable[Tensor], *, by_gradients: bool = False) -> set[int]:
    """Return `id(parameter)` for each parameter of a model with a copy that is a parameter of the optimizer.

    Args:
        optimizer: the optimizer.
        parameters: the model's parameters.
        by_gradients: whether the copies must have the parameters' gradients, too, as at the beginning of a step.
            Another model may be equal, such as a teacher that was copied from this one.
    """
    if may_have_no_memory(optimizer):
        return set()
    model = {place_in_memory(each): each for each in parameters if may_be_copied(local_part(each))}
    found = tensors_in(optimizer, model)
    pairs = [pair for place, each in found.items() if place.endswith(OWN_PARAMETERS) for pair in each]
    if not are_equal(pairs) or (by_gradients and not _have_same_gradients(pairs)):
        return set()
    return {id(pair.parameter) for pair in pairs}


def _have_same_gradients(pairs: Sequence[Pair]) -> bool:
    """Return whether the gradients of copies and parameters have one direction: masters' gradients may be scaled."""
    both = [
        (pair.parameter.grad, pair.copy.grad)
        for pair in pairs
        if pair.parameter.grad is not None and pair.copy.grad is not None
    ]
    one, other = (gathered([sampled_points(local_part(each[side])) for each in both]) for side in (0, 1))
    return bool(one @ other > SAME_DIRECTION * one.norm() * other.norm())


def is_average(place: str) -> bool:
    """Return whether the name of a place says that it is an average of the weights."""
    return any(word in place.rpartition(".")[2].lower() for word in AVERAGES)


def may_be_copied(tensor: Tensor) -> bool:
    """Return whether an optimizer may keep a copy of a tensor: whether it is dense and of floats of 16 bits or more."""
    return tensor.is_floating_point() and tensor.element_size() > 1 and tensor.layout == torch.strided


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """Return all parameters of an optimizer; none if it is no optimizer."""
    return (each for group in groups_of(optimizer) for each in group["params"])


def groups_of(optimizer: Any) -> Sequence[dict[str, Any]]:
    """Return the parameter groups of an optimizer; none if it is no optimizer."""
    return getattr(optimizer, "param_groups", ())


def may_have_no_memory(optimizer: Any) -> bool:
    """Return whether some parameters are of kinds of tensors without a known place in memory."""
    return any(type(each) not in PLAIN and not is_sharded(each) for each in parameters_of(optimizer))


def tensors_in(optimizer: Any, model: Memory, most: int | None = None) -> dict[str, list[Pair]]:
    """Return the tensors of an optimizer, and of what it wraps, that may be copies of parameters: place → pairs.

    Args:
        optimizer: the optimizer; None: it is gone.
        model: the model's tensors.
        most: number of parameters to look at in the state, and not among the optimizer's own parameters; None: all.
    """
    found: dict[str, list[Pair]] = {}
    names, seen, waiting = list[str](), set[int](), [optimizer]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            waiting += [value for value in _own_attributes(each).values() if hasattr(value, "param_groups")]
            names.append(type(each).__name__)
            number = names.count(names[-1])
            _search(each, names[-1] if number == 1 else f"{names[-1]}[{number}]", model, most, found)
    return found


def _pieces(flat: Tensor, parameters: Sequence[Tensor]) -> list[Pair]:
    """Return pairs of parameters and their parts of a flat tensor that holds them all in order; none if it does not."""
    sizes = [each.numel() for each in parameters]
    if len(sizes) < 2 or flat.shape != (sum(sizes),):
        return []
    pieces = torch.split(flat.detach(), sizes)
    return [Pair(each, piece.view(each.shape)) for each, piece in zip(parameters, pieces, strict=True)]


def _padded_pieces(flats: Sequence[Tensor], groups: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[Pair]:
    """Return pairs of parameters and their parts of flat tensors with padding, such as FSDP, ZeRO and Apex make.

    Args:
        flats: flat tensors, which may be buckets: together, they hold all parameters of a group.
        groups: the groups to try, each with its parameters in order.
        sizes: number of elements of each group.
    """
    most = sum(each.numel() for each in flats)
    if any(each.dim() != 1 for each in flats):
        return []
    fitting = [each for each, size in zip(groups, sizes, strict=True) if 0 < size <= most]
    tries = (_split(flats, each, alignment) for each in fitting for alignment in ALIGNMENTS)
    possible = [pairs for pairs in tries if pairs]
    return next(filter(are_equal, possible), possible[0] if possible else [])


def _split(flats: Iterable[Tensor], parameters: Iterable[Tensor], alignment: int) -> list[Pair]:
    pairs, waiting = list[Pair](), deque(parameters)
    for flat in flats:
        start = 0
        while waiting and start + waiting[0].numel() <= flat.numel():
            parameter = waiting.popleft()
            stop = start + parameter.numel()
            pairs.append(Pair(parameter, flat.detach()[start:stop].view(parameter.shape)))
            start = -(-stop // alignment) * alignment
        if not start or flat.numel() - start > MOST_PADDING:
            return []
    return [] if waiting else pairs


def _search(optimizer: Any, name: str, model: Memory, most: int | None, found: dict[str, list[Pair]]) -> None:
    """Add the tensors of one optimizer, without those of what it wraps, to `found`. Their places begin with `name`."""
    parameters = list(parameters_of(optimizer))
    keys = [place_in_memory(each) for each in parameters]
    mine = [model[each] for each in keys if each in model]
    if len(mine) < len(parameters) and most is None:
        own = [each for each, key in zip(parameters, keys, strict=True) if key not in model]
        held = set(keys)
        pairs = _aligned(own, [model[key] for key in model if key not in held])
        if any(pair.copy.element_size() > pair.parameter.element_size() for pair in pairs):  # else another model's
            found.setdefault(name + OWN_PARAMETERS, []).extend(pairs)
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return
    unowned: dict[str, list[Tensor]] = {}
    of_groups = [map(place_in_memory, each["params"]) for each in groups_of(optimizer)]
    groups = [[model[key] for key in places if key in model] for places in of_groups]
    wholes = [mine, *groups]
    sizes = [sum(each.numel() for each in whole) for whole in wholes]
    for place, owner, tensor in _leaves(_attributes(optimizer, most), name, SEARCH_DEPTH):
        if not may_be_copied(tensor):
            continue
        if pieces := next(filter(None, (_pieces(tensor, each) for each in wholes)), None):
            found.setdefault(place, []).extend(pieces)
        elif owner is None:
            unowned.setdefault(place, []).append(tensor)
        elif (parameter := model.get(place_in_memory(owner))) is not None:
            pairs = _aligned([tensor], [parameter]) or _padded_pieces([tensor], wholes, sizes)
            found.setdefault(place, []).extend(pairs)
    for place, tensors in unowned.items():
        pairs = _aligned(tensors, mine or model.values()) or _padded_pieces(tensors, wholes, sizes)
        found.setdefault(place, []).extend(pairs)


def _own_attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _attributes(optimizer: Any, most: int | None) -> dict[str, Any]:
    values = {
        key: value for key, value in _own_attributes(optimizer).items() if key not in ("defaults", "param_groups")
    }
    if isinstance(values.get("state"), Mapping):
        values["state"] = dict(islice(values["state"].items(), most))
    groups = getattr(optimizer, "param_groups", ())
    return values | {
        key: [each.get(key) for each in groups] for key in {key for each in groups for key in each} - {"params"}
    }


def _leaves(value: Any, place: str, depth: int) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Yield each tensor in nested lists and dicts, with its place and the tensor that is its key in a dict, if any."""
    if isinstance(value, Tensor):
        yield place, None, value
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each, place, depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, Tensor):
                yield from ((inner, key, tensor) for inner, _, tensor in _leaves(each, place, depth - 1))
            elif key not in MOMENTS:
                yield from _leaves(each, f"{place}.{key}" if isinstance(key, str) else place, depth - 1)


def _aligned(tensors: Iterable[Tensor], parameters: Iterable[Tensor]) -> list[Pair]:
    """Return pairs of equal shape, or else of equal size, in the order of both; none if a tensor has no parameter.

    Parameters may be left out, since an optimizer keeps masters only of those in half precision.
    """
    tensors, parameters = list(map(local_part, tensors)), list(parameters)
    return _in_order(tensors, parameters, _has_shape_of) or _in_order(tensors, parameters, _has_size_of)


def _in_order(
    tensors: Iterable[Tensor], parameters: Iterable[Tensor], fits: Callable[[Tensor, Tensor], bool]
) -> list[Pair]:
    pairs, remaining = list[Pair](), iter(parameters)
    for tensor in tensors:
        parameter = next((each for each in remaining if fits(each, tensor)), None)
        if parameter is None:
            return []
        copy = tensor if tensor.shape == parameter.shape else tensor.detach().view(parameter.shape)
        if place_in_memory(copy) != place_in_memory(parameter):
            pairs.append(Pair(parameter, copy))
    return pairs


def _has_shape_of(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def _has_size_of(one: Tensor, other: Tensor) -> bool:
    is_number = other.numel() == 1  # such as a count of steps
    return one.numel() == other.numel() and other.is_contiguous() and not is_number


def wrappers_of(optimizer: Optimizer) -> list[Any]:
    """Return the objects with a method `step` that is now running, and has called the step of this optimizer.

    An example is a Lookahead that is no torch optimizer, and that the script has not passed to Atoll. An object that
    also has the model is a trainer, and copies in it are its own.
    """
    found: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_code.co_argcount:
            caller = frame.f_locals.get(frame.f_code.co_varnames[0])
            held = _own_attributes(caller).values()
            if any(each is optimizer for each in held) and not any(isinstance(each, nn.Module) for each in held):
                found.append(caller)
        frame = frame.f_back
    return found


def is_inside(optimizer: Optimizer, other: Any) -> bool:
    """Return whether another optimizer, which calls hooks before its own steps, has this one in an attribute."""
    attributes = _own_attributes(other)
    return "_optimizer_step_pre_hooks" in attributes and any(each is optimizer for each in attributes.values())
