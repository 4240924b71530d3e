"""Finds tensors in optimizers that may be copies of a model's weights, compares them, and fills them.

`tensors_in` returns them as pairs with their parameters, by the place where an optimizer keeps them. `are_equal` tells
whether all at a place are copies: equal up to a cast, in some elements of each.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.tensors.chunks import CHUNK_ELEMENTS, assign_run_, run_of
from atoll.tensors.module_tensors import PLAIN, is_sharded, memory_of

SAMPLED_ELEMENTS = 32
"""Elements of each tensor that are compared: random weights do not agree in so many by chance."""
SAMPLED_TENSORS = 256
"""Tensors of a model that are sampled: a load is not undone in a few tensors alone."""
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
Place: TypeAlias = tuple[object, ...]
"""A tensor's place in memory (`memory_of`)."""
_Leaf: TypeAlias = tuple[str, Tensor | None, Tensor]
"""A tensor in an optimizer, after its place and the tensor that is its key in a dict, if any."""
_SCALARS = {int, float, bool, str, type(None)}


class Pair(NamedTuple):
    """A parameter of the model, and a tensor that may be a copy of it."""

    parameter: Tensor
    copy: Tensor


def place_in_memory(tensor: Tensor) -> Place:
    """Return a key that is equal for two tensors if this rank's parts of them are the same memory."""
    return memory_of(tensor if type(tensor) in PLAIN else local_part(tensor))


def _places_of(tensors: Sequence[Tensor]) -> list[Place]:
    """Return the place in memory of each tensor. Of plain tensors, this takes few calls of Python functions."""
    if set(map(type, tensors)).issubset(PLAIN) and all(addresses := list(map(Tensor.data_ptr, tensors))):
        strides = map(Tensor.stride, tensors)
        return [
            (each.device, address, tuple(each.shape), stride, each.dtype)
            for each, address, stride in zip(tensors, addresses, strides, strict=True)
        ]
    return list(map(place_in_memory, tensors))


class Weights:
    """Tensors of a model, by their places in memory.

    Args:
        tensors: the tensors, each one that optimizers may keep copies of (`may_be_copied`).

    Attributes:
        by_place: place in memory → tensor.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        tensors = list(tensors)
        self.by_place = dict(zip(_places_of(tensors), tensors, strict=True))
        self._by_id = dict(zip(map(id, self.by_place.values()), self.by_place.values(), strict=True))
        self._held: dict[int, Held] = {}

    def find(self, tensor: Tensor) -> Tensor | None:
        """Return the model's tensor with the memory of the given one; None if there is none."""
        known = self._by_id.get(id(tensor))
        return self.by_place.get(place_in_memory(tensor)) if known is None else known

    def find_all(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return for each tensor what `find` returns."""
        known = list(map(self._by_id.get, map(id, tensors)))
        return [self.find(each) if mine is None else mine for each, mine in zip(tensors, known, strict=True)]

    @functools.cached_property
    def identity(self) -> int:
        """A number that is equal for the same tensors in the same order, and else differs but for rare chance."""
        return hash(tuple(self.by_place))

    @functools.cached_property
    def sampled(self) -> dict[Place, Tensor]:
        """At most `SAMPLED_TENSORS` of the tensors. If there are more, they are chosen at random from those trained."""
        if len(self.by_place) <= SAMPLED_TENSORS:
            return self.by_place
        trained = [key for key, each in self.by_place.items() if each.requires_grad] or list(self.by_place)
        return {trained[each]: self.by_place[trained[each]] for each in _chosen(len(trained))}

    @functools.cached_property
    def sampled_ids(self) -> set[int]:
        """`id(tensor)` for each of the sampled tensors."""
        return set(map(id, self.sampled.values()))

    def held_by(self, optimizer: Any) -> Held:
        """Return which of the tensors an optimizer holds. The answer is kept as long as it holds the same ones."""
        ids = [list(map(id, group["params"])) for group in groups_of(optimizer)]
        held = self._held.get(id(optimizer))
        if held is None or held.ids != ids:
            held = self._held[id(optimizer)] = Held(optimizer, self, ids)
        return held


@functools.lru_cache(maxsize=8)
def _chosen(count: int) -> list[int]:
    """Return which of so many tensors are sampled: at random, since layers repeat, but always the same ones."""
    return sorted(random.Random(0).sample(range(count), min(count, SAMPLED_TENSORS)))


class Held:
    """The tensors of a model that an optimizer holds, in its order.

    Args:
        optimizer: the optimizer.
        weights: the model's tensors.
        ids: for each group, `id(parameter)` of its parameters.

    Attributes:
        mine: the tensors.
        has_others: whether the optimizer also holds other tensors.
        wholes: `mine`, and the tensors of each group.
    """

    def __init__(self, optimizer: Any, weights: Weights, ids: list[list[int]]) -> None:
        self.ids = ids
        found = [weights.find_all(group["params"]) for group in groups_of(optimizer)]
        groups = [[each for each in group if each is not None] for group in found]
        self._all = weights.by_place.values()
        self.mine = list(chain.from_iterable(groups))
        self.has_others = len(self.mine) < sum(map(len, found))
        # an id stays that of a tensor that shares the model's memory only as long as this tensor exists
        held = zip(parameters_of(optimizer), chain.from_iterable(found), strict=True)
        self._aliases = [each for each, known in held if known is not None and known is not each]
        self.wholes = [self.mine, *groups]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each of `wholes`."""
        return [sum(map(Tensor.numel, whole)) for whole in self.wholes]

    @functools.cached_property
    def of_size(self) -> dict[int, list[Tensor]]:
        """Number of elements → the first of `wholes` with so many, if it has more than one tensor."""
        sized = reversed([*zip(self.sizes, self.wholes, strict=True)])
        return {size: whole for size, whole in sized if len(whole) > 1}

    def candidates(self, tensors: Sequence[Tensor]) -> Iterable[Tensor]:
        """Return the tensors of which some others may be copies, in their order; all the model's if it holds none."""
        if len(tensors) > 1:
            return self.mine or self._all
        keys = (tensors[0].numel(), tensors[0].shape)  # there may be many places with one tensor each
        return [self._first[key] for key in keys if key in self._first]

    @functools.cached_property
    def _first(self) -> dict[object, Tensor]:
        """Shape, and number of elements → the first of the tensors with it."""
        tensors = [*reversed(self.mine or self._all)]
        return {each.shape: each for each in tensors} | {each.numel(): each for each in tensors}

    @functools.cached_property
    def of_group(self) -> dict[int, int]:
        """`id(tensor)` → the index in `wholes` of a group that has the tensor."""
        return {key: index for index, whole in enumerate(self.wholes) if index for key in map(id, whole)}


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local


def sampled_points(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, in row-major order and evenly distributed."""
    (points,) = points_of([tensor])
    return points


def points_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return some elements of each tensor, in row-major order and evenly distributed."""
    tensors = list(tensors)
    numels, are_contiguous = map(Tensor.numel, tensors), map(Tensor.is_contiguous, tensors)
    each_with_kind = zip(map(Tensor.detach, tensors), numels, are_contiguous, strict=True)  # few calls: this is fast
    return [
        each.as_strided((numel if numel < SAMPLED_ELEMENTS else SAMPLED_ELEMENTS,), (numel // SAMPLED_ELEMENTS or 1,))
        if is_contiguous
        else each.reshape(-1)[:: numel // SAMPLED_ELEMENTS or 1][:SAMPLED_ELEMENTS]
        for each, numel, is_contiguous in each_with_kind
    ]


def gathered(pieces: Sequence[Tensor]) -> Tensor:
    """Return the elements of all pieces as fp64 on the CPU. From one device, they come in one transfer."""
    if len({piece.device for piece in pieces}) > 1:
        pieces = [piece.cpu() for piece in pieces]
    if len({piece.dtype for piece in pieces}) > 1:
        wide = torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32
        pieces = [piece.to(wide) for piece in pieces]
    return torch.cat(list(pieces)).cpu().double() if pieces else torch.empty(0, dtype=torch.float64)


class Sample:
    """Some elements of some tensors (`Weights.sampled`), as fp64 on the CPU.

    Args:
        weights: the tensors.
    """

    def __init__(self, weights: Weights) -> None:
        self._tensors, self._identity = weights.sampled, weights.identity  # not all, of which there may be many
        self.values = gathered(points_of(weights.sampled.values()))

    @functools.cached_property
    def parts(self) -> dict[Place, slice]:
        """Each sampled tensor's part of `values`, by its place in memory."""
        stops = itertools.accumulate(min(each.numel(), SAMPLED_ELEMENTS) for each in self._tensors.values())
        return {
            key: slice(begin, stop) for key, (begin, stop) in zip(self._tensors, pairwise([0, *stops]), strict=True)
        }

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the elements of one tensor; None if the tensor was not among those that were sampled."""
        part = self.parts.get(place_in_memory(tensor))
        return None if part is None else self.values[part]

    def is_of(self, weights: Weights) -> bool:
        """Return whether these are elements of these tensors."""
        return self._identity == weights.identity


def are_equal(pairs: Sequence[Pair], sample: Sample | None = None) -> bool:
    """Return whether copies equal their parameters, up to a cast to the narrower dtype, and are not all zero.

    Args:
        pairs: the parameters and copies.
        sample: earlier elements of the parameters, of which those that were not sampled are passed over; None: compare
            with their current values.
    """
    is_any = False
    for some in (pairs[:1], pairs[1:]):  # most tensors of optimizers are no copies, as the first pair tells
        if not some:
            continue
        copies, parameters = points_of([each.copy for each in some]), [each.parameter for each in some]
        values = points_of(parameters) if sample is None else list(map(sample.of, parameters))
        narrow = [narrower_dtype(*each) for each in some]
        known = [each for each in zip(copies, values, narrow, strict=True) if each[1] is not None]
        if known:
            one = gathered([points.to(dtype) for points, _, dtype in known])
            other = gathered([points.to(dtype) for _, points, dtype in known if points is not None])
            if not torch.equal(one, other):
                return False
            is_any = is_any or bool(one.any())
    return is_any


def narrower_dtype(one: Tensor, other: Tensor) -> torch.dtype:
    """Return the dtype of the tensor that has fewer bytes an element."""
    return one.dtype if one.dtype.itemsize <= other.dtype.itemsize else other.dtype


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
    found = tensors_in(optimizer, Weights(each for each in parameters if may_be_copied(local_part(each))))
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
    dtype = tensor.dtype
    return dtype.is_floating_point and dtype.itemsize > 1 and tensor.layout == torch.strided


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """Return all parameters of an optimizer; none if it is no optimizer."""
    return chain.from_iterable(group["params"] for group in groups_of(optimizer))


def groups_of(optimizer: Any) -> Sequence[dict[str, Any]]:
    """Return the parameter groups of an optimizer; none if it is no optimizer."""
    return getattr(optimizer, "param_groups", ())


def may_have_no_memory(optimizer: Any) -> bool:
    """Return whether some parameters are of kinds of tensors without a known place in memory."""
    classes = set(map(type, parameters_of(optimizer)))
    return not classes.issubset(PLAIN) and any(
        type(each) not in PLAIN and not is_sharded(each) for each in parameters_of(optimizer)
    )


def tensors_in(optimizer: Any, weights: Weights, most: int | None = None) -> dict[str, list[Pair]]:
    """Return the tensors of an optimizer, and of what it wraps, that may be copies of parameters: place → pairs.

    Args:
        optimizer: the optimizer; None: it is gone.
        weights: the model's tensors.
        most: number of sampled parameters to look at in the state, and not among the optimizer's own parameters; None:
            all.
    """
    found: dict[str, list[Pair]] = {}
    names, seen, waiting = list[str](), set[int](), [optimizer] if weights.by_place else []
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            waiting += [value for value in _own_attributes(each).values() if hasattr(value, "param_groups")]
            names.append(type(each).__name__)
            number = names.count(names[-1])
            name = names[-1] if number == 1 else f"{names[-1]}[{number}]"
            _search(each, name, weights, most, found, is_inside=each is not optimizer)
    return found


def _pieces(flat: Tensor, held: Held) -> list[Pair]:
    """Return pairs of parameters and their parts of a flat tensor that holds them all in order; none if it does not."""
    parameters = held.of_size.get(flat.numel()) if flat.dim() == 1 else None
    if parameters is None:
        return []
    pieces = torch.split(flat.detach(), [each.numel() for each in parameters])
    return [Pair(each, piece.view(each.shape)) for each, piece in zip(parameters, pieces, strict=True)]


def _padded_pieces(flats: Sequence[Tensor], held: Held, owner: Tensor | None = None) -> list[Pair]:
    """Return pairs of parameters and their parts of flat tensors with padding, such as FSDP, ZeRO and Apex make.

    Args:
        flats: flat tensors, which may be buckets: together, they hold all parameters of a group.
        held: the parameters that the optimizer holds.
        owner: the parameter that has the tensors in its state: they hold its group, or all.
    """
    most = sum(each.numel() for each in flats)
    if any(each.dim() != 1 for each in flats):
        return []
    indices = range(len(held.wholes)) if owner is None else (0, held.of_group.get(id(owner), 0))
    padding = MOST_PADDING * len(flats)
    fitting = [
        held.wholes[each]
        for each in indices
        if 0 < held.sizes[each] <= most <= held.sizes[each] + padding + ALIGNMENTS[-1] * len(held.wholes[each])
    ]
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


def _search(
    optimizer: Any, name: str, weights: Weights, most: int | None, found: dict[str, list[Pair]], *, is_inside: bool
) -> None:
    """Add the tensors of one optimizer, without those of what it wraps, to `found`. Their places begin with `name`.

    `is_inside`: whether another optimizer wraps it.
    """
    is_torchs = type(optimizer).__module__.partition(".")[0] == "torch"
    if is_torchs and most is not None:
        return
    held = weights.held_by(optimizer)
    if held.has_others and most is None:
        own = [each for each in parameters_of(optimizer) if weights.find(each) is None]
        mine = set(map(id, held.mine))
        pairs = _aligned(own, [each for each in weights.by_place.values() if id(each) not in mine])
        is_wider = any(pair.copy.element_size() > pair.parameter.element_size() for pair in pairs)
        if is_wider or (is_inside and are_equal(pairs)):  # else another model's
            found.setdefault(name + OWN_PARAMETERS, []).extend(pairs)
    if is_torchs:
        return
    unowned: dict[str, list[Tensor]] = {}
    for place, owner, tensor in _leaves_of(optimizer, name, weights, most):
        if not may_be_copied(tensor):
            continue
        parameter = None if owner is None else weights.find(owner)
        if parameter is not None and (pairs := _aligned([tensor], [parameter])):
            found.setdefault(place, []).extend(pairs)
        elif pieces := _pieces(tensor, held):
            found.setdefault(place, []).extend(pieces)
        elif owner is None:
            unowned.setdefault(place, []).append(tensor)
        elif parameter is not None:
            found.setdefault(place, []).extend(_padded_pieces([tensor], held, parameter))
    for place, tensors in unowned.items():
        pairs = _aligned(tensors, held.candidates(tensors)) or _padded_pieces(tensors, held)
        found.setdefault(place, []).extend(pairs)


def _own_attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _leaves_of(optimizer: Any, name: str, weights: Weights, most: int | None) -> list[_Leaf]:
    """Return the tensors in the state, the groups and the other attributes of an optimizer, but its parameters."""
    leaves, values = list[_Leaf](), _own_attributes(optimizer)
    state, unsearched = values.get("state"), {"defaults", "param_groups"}
    if isinstance(state, (dict, Mapping)):
        unsearched.add("state")
        items: Iterable[tuple[Any, Any]] = state.items()
        _collect_items(items if most is None else islice(_sampled(items, weights), most), f"{name}.state", leaves)
    _collect_items([(key, value) for key, value in values.items() if key not in unsearched], name, leaves)
    for group in groups_of(optimizer):
        _collect_items([(key, value) for key, value in group.items() if key != "params"], name, leaves)
    return leaves


def _sampled(items: Iterable[tuple[Any, Any]], weights: Weights) -> Iterator[tuple[Any, Any]]:
    """Yield the items of an optimizer's state, without those of tensors that are not sampled."""
    sampled = weights.sampled_ids
    return (item for item in items if not isinstance(item[0], Tensor) or id(weights.find(item[0])) in sampled)


def _collect_items(
    items: Iterable[tuple[Any, Any]],
    place: str,
    leaves: list[_Leaf],
    owner: Tensor | None = None,
    depth: int = SEARCH_DEPTH - 1,
) -> None:
    """Add each tensor in nested lists and dicts, with its place and the tensor that is its key in a dict, if any."""
    for key, value in items:
        if type(value) in _SCALARS:
            continue
        if isinstance(key, Tensor):
            _collect(value, place, leaves, key if owner is None else owner, depth)
        elif key not in MOMENTS:
            _collect(value, f"{place}.{key}" if isinstance(key, str) else place, leaves, owner, depth)


def _collect(value: Any, place: str, leaves: list[_Leaf], owner: Tensor | None, depth: int) -> None:
    if isinstance(value, Tensor):
        leaves.append((place, owner, value))
    elif depth and isinstance(value, (list, tuple)):
        for each in value:
            if type(each) not in _SCALARS:
                _collect(each, place, leaves, owner, depth - 1)
    elif depth and isinstance(value, (dict, Mapping)):
        _collect_items(value.items(), place, leaves, owner, depth - 1)


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
        if copy.data_ptr() != parameter.data_ptr() or place_in_memory(copy) != place_in_memory(parameter):
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
    return "_optimizer_step_pre_hooks" in attributes and id(optimizer) in map(id, attributes.values())
