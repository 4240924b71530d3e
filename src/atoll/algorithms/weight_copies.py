"""Copies of the weights that optimizers keep, and that have to follow when Atoll loads other weights into the model.

Examples are the fp32 masters of bf16 weights, and the slow weights of Lookahead. The next step of such an optimizer
starts from its copy, so without this file it would undo what was loaded.

    copies = WeightCopies(report)
    copies.watch(optimizer)                 # and before each of its steps: copies.before_step(optimizer)
    with copies.loading(model, tensors):    # finds what equals the weights now
        ...                                 # other weights are loaded into the tensors
                                            # and, at the end, into the copies

A copy is a float tensor of a parameter's shape or size: in the optimizer's state, in its attributes, or a parameter of
its own. Or it is a part of a flat tensor, which holds all parameters, or those of a group, in their order. It is
recognised by its values, which equal the parameter's, up to a cast. Tensors that are found at one place, such as
`state[parameter]["master"]` of all parameters, are copies only if all of them are equal, and are not all zero. If they
have followed the weights before, but differ now, no value would be right, so the load is refused. If a copy was not
recognised, the parameters jump back after a load, which is reported.

An average of the weights for evaluation is left as it is: the steps do not start from it, and it continues from the
loaded weights. It is known by its name (`AVERAGES`), since it may equal the weights at first.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from atoll.errors import UsageError
from atoll.tensors.chunks import CHUNK_ELEMENTS, assign_run_, run_of
from atoll.tensors.module_tensors import PLAIN, Tensors, is_sharded, memory_of

SAMPLED = 32
"""Elements of each tensor that are compared: random weights do not agree in so many by chance."""
PARAMETERS = 8
"""Parameters of each optimizer that have their state compared before a step, where that has to be fast."""
STEPS = 64
"""Steps after each load before which Atoll looks whether it was undone."""
FIRST = 2
"""Steps after which an optimizer has made the state that it makes at its first step."""
DEPTH = 4
"""Depth to which lists and dicts in the attributes of an optimizer are searched."""
JUMPED = 0.25
"""A step jumped back if a return to the earlier weights explains it so many times better than an ordinary step does."""

DRAWN_STEPS = 3
"""Steps in a row that other weights have to explain, so that they are no chance."""
EXPLAINED = 0.01
"""Share of a step that may remain unexplained, because of rounding."""
HALF_WAY = 0.5
"""Cosine of the angle from which on a change leads towards the weights, as that of an average does."""
SURE = 6
"""A tensor is on its way back if the way is so many times the noise that is expected in it by chance."""
FEWEST = 8
"""Elements of a tensor below which noise may look like a way back."""
MOST_NOTED = 8
"""Steps that are noted of each copy, for messages, at which it equalled the weights."""
ONE_DIRECTION = 0.99
"""Cosine of the angle between gradients from which on they are one gradient, but for a scale and a cast."""

AVERAGES = ("ema", "average", "avg", "shadow", "swa")
"""Parts of the names of averages that training does not read."""
MOMENTS = {
    *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "eta", "mu", "ax"),
}
"""Names of the state of torch's own optimizers, none of which a step starts from."""


OWN = ".params"
"""End of the place of tensors that an optimizer trains in place of the model's parameters."""

Memory: TypeAlias = dict[tuple[object, ...], Tensor]
"""Tensors by their place in memory (`memory_of`)."""


class Pair(NamedTuple):
    """A parameter of the model, and a tensor that may be a copy of it."""

    parameter: Tensor
    copy: Tensor


class _Companion:
    """Watches tensors that may be other weights, towards which each step draws the model's.

    In a schedule-free optimizer, z equals the weights at most at the first step. A step is Δw = a·(z − w) + b·Δz there,
    with a > 0. Not meant is an average of the weights, whose own steps lead towards these.

    Attributes:
        steps: number of the last steps in a row that the tensors explain in this way.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._last: tuple[Tensor, Tensor] | None = None

    def note(self, copy: Tensor, weights: Tensor) -> None:
        """Record elements of the tensors and of the weights after a step."""
        last, self._last = self._last, (copy, weights)
        if last is None or torch.equal(weights, last[1]):
            return
        then, earlier = last
        change, way = copy - then, weights - then
        is_average = bool(change @ way > HALF_WAY * change.norm() * way.norm())
        draws = not is_average and _draws(weights - earlier, then - earlier, change)
        self.steps = self.steps + 1 if draws else 0

    def forget_last(self) -> None:
        """Begin anew after a load, which changed the weights alone."""
        self._last = None


class _Watched:
    """What is known of the copies in one optimizer, and in what it wraps. Another one may be of the same class.

    Args:
        optimizer: the optimizer.

    Attributes:
        followed: place → numbers of the steps after which its tensors were equal to the weights, which had moved.
        left: places of tensors that existed at the last load, and were not loaded.
        companions: place → what is known of tensors that may be other weights.
    """

    def __init__(self, optimizer: Any) -> None:
        self.companions: dict[str, _Companion] = {}
        self._optimizer = weakref.ref(optimizer)
        self.followed: dict[str, list[int]] = {}
        self.left: set[str] = set()

    @property
    def optimizer(self) -> Any:
        """The optimizer; None: it is gone."""
        return self._optimizer()


class _Place(NamedTuple):
    """Where an optimizer keeps tensors."""

    watched: _Watched
    name: str

    @property
    def has_followed(self) -> bool:
        """Whether the tensors were equal to the weights after these had moved."""
        return self.name in self.watched.followed

    @property
    def is_companion(self) -> bool:
        """Whether the tensors are other weights, towards which the last steps drew the model's."""
        known = self.watched.companions.get(self.name)
        return known is not None and known.steps >= DRAWN_STEPS

    @property
    def is_trained(self) -> bool:
        """Whether the tensors are parameters of the optimizer itself."""
        return self.name.endswith(OWN)

    def note_equal(self, step: int) -> None:
        """Record that the tensors are equal to the weights after a step."""
        steps = self.watched.followed.setdefault(self.name, [])
        if len(steps) < MOST_NOTED and step not in steps:
            steps.append(step)


class WeightCopies:
    """Finds the copies of a model's weights in optimizers, and loads them together with the model.

    Args:
        report: called with a text for the users if a load was undone.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._reported = report, set[str]()
        self._watched: list[_Watched] = []
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers of other models
        self._steps_made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._tensors: Memory = {}
        self._thread = 0  # that of the last load
        self._returned: set[tuple[object, ...]] = set()  # of the last load: `_Load.returned`
        self._steps_left, self._load = 0, _Load(_Sample({}), _Sample({}))

    def watch(self, optimizer: Any) -> None:
        """Look for copies in this optimizer, and in what it wraps, from now on.

        If it was made before the last load, load its copies now.
        """
        if any(each.optimizer is optimizer for each in self._watched):
            return
        self._watched = [each for each in self._watched if each.optimizer is not None]
        self._watched.append(_Watched(optimizer))
        for pairs in _tensors_in(optimizer, self._tensors).values():
            if self._load.is_before(pairs):
                _fill(pairs)

    def before_step(self, optimizer: Optimizer) -> None:
        """Look, before a step, whether the last load was undone by the steps since then.

        Before a step inside of another optimizer's step, the weights are on their way: SAM has just taken them back.
        """
        if any(_is_inside(optimizer, each.optimizer) for each in self._watched):
            return
        self._steps_made[optimizer] = made = self._steps_made.get(optimizer, -1) + 1
        if self._steps_left:
            self._steps_left -= 1
            self._look(made)

    def discover(self, optimizer: Optimizer, *_: Any) -> None:
        """Call `watch` and `before_step` if this optimizer, which is about to step, trains the model."""
        if not self._tensors or optimizer in self._others:
            return
        if all(each.optimizer is not optimizer for each in self._watched):
            if not self._is_trained_by(optimizer):
                self._others.add(optimizer)
                return
            self.watch(optimizer)
        self.before_step(optimizer)

    def _is_trained_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer, which is about to step, holds tensors of the model, or trains copies of them.

        The same thread has to load the weights and train such copies: another site's model, which another thread
        trains, may be equal.
        """
        if any(_memory(each) in self._tensors for each in _parameters_of(optimizer)):
            return not _may_have_no_memory(optimizer)
        is_here = self._thread == threading.get_ident()
        return is_here and bool(parameters_copied(optimizer, self._tensors.values(), by_gradients=True))

    def forget_model(self) -> None:
        """Free the model's tensors. The optimizers are still known at the next load."""
        self._tensors, self._steps_left, self._load = {}, 0, _Load(_Sample({}), _Sample({}))

    def discover_all(self) -> None:
        """Call `discover` before every step of every optimizer of this process, as long as this object exists."""
        before_every_step(self.discover)

    @contextmanager
    def loading(self, model: object, tensors: Tensors, *, refuses: bool = True) -> Iterator[None]:
        """If the `with` block changes the tensors, load their new values into the copies, too.

        Args:
            model: the model. If it is a module, its buffers have no copies.
            tensors: the tensors of the model, by name.
            refuses: whether to raise an error if a copy cannot be loaded.

        Raises:
            UsageError: a copy cannot be loaded, because it differs from the weights now.
        """
        last_step = max(self._steps_made.values(), default=-1) + 1
        self._look(last_step)
        self._thread = threading.get_ident()
        self._tensors = {_memory(each): each for each in tensors.values() if _may_be_copied(each)}
        if isinstance(model, nn.Module):
            parameters = set(map(_memory, model.parameters()))
            self._tensors = {key: each for key, each in self._tensors.items() if key in parameters}
        self._others = weakref.WeakSet()
        found = self._found()
        for place, pairs in found.items():
            if place.is_trained and place.has_followed:
                _fill(pairs, from_copies=True)  # the script would do it next
        copies = {place: pairs for place, pairs in found.items() if _are_equal(pairs)}
        for place in copies:
            if place.is_trained:
                place.note_equal(last_step)
        if refuses:
            _require_loadable(found.keys() - copies.keys())
        before = _Sample(self._tensors)
        try:
            yield
        finally:
            for pairs in copies.values():
                _fill(pairs)
            load = _Load(before, _Sample(self._tensors))
            self._steps_left = STEPS
            if load.changed or not self._load.is_of(self._tensors):
                self._load = load
                for each in self._watched:
                    for companion in each.companions.values():
                        companion.forget_last()
                    each.left = {place.name for place in found.keys() - copies.keys() if place.watched is each}
                    each.left = each.left if load.changed else set()  # there is nothing to undo

    def _found(self, most: int | None = None) -> dict[_Place, list[Pair]]:
        """Return what may be copies in all optimizers that are watched: place → pairs.

        Args:
            most: number of parameters of each optimizer to look at in its state; None: all.
        """
        return {
            _Place(each, name): pairs
            for each in self._watched
            for name, pairs in _tensors_in(each.optimizer, self._tensors, most).items()
        }

    def _look(self, step: int) -> None:
        """Note which tensors have followed the weights. Report a load that was undone by the steps since then.

        Args:
            step: number of the last step.
        """
        if not self._tensors:
            return
        found = self._found(PARAMETERS)
        for place, pairs in found.items():
            companion = place.watched.companions.setdefault(place.name, _Companion())
            companion.note(*(_together([_points(each[side]) for each in pairs]) for side in (1, 0)))
            if self._load.has_moved(pairs) and _are_equal(pairs):
                place.note_equal(step)
                if place.name in place.watched.left:
                    self._undone(f"the steps since then started from the optimizer's copy of the weights, {place.name}")
        if not self._load.is_decided:
            has_jumped = self._load.jumps_back(_Sample(self._tensors).values)
            if self._load.is_decided:
                has_jumped = has_jumped or not self._returned.isdisjoint(self._load.returned)
                self._returned = self._load.returned
            if has_jumped:
                self._undone("the next step started from a copy of the weights that the optimizer or the script keeps")
        if not found and self._load.is_decided and self._steps_left < STEPS - FIRST:
            self._steps_left = 0

    def _undone(self, why: str) -> None:
        if why not in self._reported:
            self._reported.add(why)
            self._report(
                f"the global model was loaded, but {why}. So the load was undone, and the result is wrong. "
                "Keep the copy in the optimizer's state, one tensor for each parameter, or use another optimizer."
            )


def _require_loadable(places: Iterable[_Place]) -> None:
    """Check that none of these tensors, which differ from the weights, has followed them before.

    Raises:
        UsageError: one has, or is other weights that the optimizer trains. No value would be right for it.
    """
    for place in sorted(places, key=lambda each: each.name):
        if _is_average(place.name) or not (place.has_followed or place.is_companion):
            continue
        how = (
            "followed them in an earlier step" if place.has_followed else "has drawn them towards it for several steps"
        )
        raise UsageError(
            f"The optimizer keeps a copy of the weights, {place.name}, that {how} and differs from them now. Atoll "
            "cannot load the global model into it, and without that, the next steps would undo the synchronisation.",
            _when_loadable(place.watched.followed[place.name])
            if place.has_followed
            else "Use an optimizer whose steps start from the model's weights alone.",
        )


def _when_loadable(steps: Sequence[int]) -> str:
    """Return the remedy for a copy that equalled the weights after some steps, and not at a synchronisation."""
    every = min(steps, default=1)
    if every > 1 and not any(each % every for each in steps):
        return (
            f"Use an optimizer without such a copy, or synchronise when both are equal: after a multiple of {every} "
            "steps."
        )
    return (
        f"Both were equal after step {', '.join(map(str, steps))}. Use an optimizer without such a copy, or one "
        "whose copy equals the weights after each step that a synchronisation follows."
    )


class CorrectedCopies:
    """Lets what an algorithm changes in the weights after a step reach the copies from which the next step starts.

    A copy that has equalled the weights after every step is changed itself, in its own dtype, and the weights get its
    values: a small change would be lost in bf16. If a copy follows the weights, but is another tensor in between, as in
    schedule-free optimizers, the next step would undo a part of the change, so it is refused.

    Args:
        optimizer: the optimizer that makes the steps.
        parameters: the model's parameters, with the weights before the first of these steps.
        algorithm: the algorithm's name, for messages.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], algorithm: str) -> None:
        plain = [each for each in parameters if type(each) in PLAIN and _may_be_copied(each)]
        self._tensors = {} if _may_have_no_memory(optimizer) else {_memory(each): each for each in plain}
        self._optimizer, self._algorithm = optimizer, algorithm
        self._load = _Load(_Sample({}), _Sample(self._tensors))
        self._steps_left, self._followed, self._differed = STEPS, set[str](), set[str]()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let what the `with` block changes in the weights, after a step, reach the copies.

        Raises:
            UsageError: the block has changed weights of which the optimizer keeps a copy that cannot be changed.
        """
        found: dict[str, list[Pair]] = {}
        if self._steps_left or self._followed:
            found = _tensors_in(self._optimizer, self._tensors)
        self._compare(found)
        partly = {place: pairs for place, pairs in found.items() if place in self._followed & self._differed}
        before = {place: [_points(each.parameter).clone() for each in pairs] for place, pairs in partly.items()}
        with _in_place_of_weights([pair for place in found.keys() - self._differed for pair in found[place]]):
            yield
        for place, points in before.items():
            if not all(
                torch.equal(then, _points(now.parameter)) for then, now in zip(points, partly[place], strict=True)
            ):
                raise UsageError(
                    f"The optimizer keeps a copy of the weights, {place}, from which its steps start, and which does "
                    f"not equal them after each step. {self._algorithm} changes the weights after each step, and the "
                    "next steps would undo a part of that.",
                    "Use an optimizer without such a copy, or fedprox or fedavg. With Lookahead, pass the optimizer "
                    "inside of it.",
                )

    def _compare(self, found: Mapping[str, Sequence[Pair]]) -> None:
        """Note which tensors equal the weights after this step, and which do not."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        for place, pairs in found.items():
            if _is_average(place) or not _are_equal(pairs):
                self._differed.add(place)
            elif self._load.has_moved(pairs):
                self._followed.add(place)


@contextmanager
def _in_place_of_weights(pairs: Sequence[Pair]) -> Iterator[None]:
    """Let the `with` block change copies in place of their parameters. At its end, these get the values of the copies.

    Args:
        pairs: the parameters and copies, which are equal up to a cast. Of a parameter's copies, the first is changed.
    """
    weights, wide = dict[int, Tensor](), dict[int, Tensor]()
    for parameter, copy in pairs:
        if id(parameter) not in weights and copy.element_size() >= parameter.element_size():
            weights[id(parameter)], wide[id(parameter)] = parameter.data, copy.detach().to(parameter.device)
            parameter.data = wide[id(parameter)]
    try:
        yield
    finally:
        for parameter, _ in pairs:
            if id(parameter) in weights:
                parameter.data = weights.pop(id(parameter))
                _fill([Pair(parameter, wide[id(parameter)])], from_copies=True)
        for parameter, copy in pairs:
            copy.detach().copy_(wide.get(id(parameter), parameter.detach()))


Listener: TypeAlias = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""A function that is called before a step, with the optimizer and the arguments of its `step`."""

_listeners: dict[int, weakref.WeakMethod[Listener]] = {}
_installing = threading.Lock()
_installed: list[Any] = []
"""The hook of all optimizers. It stays: another thread may be calling the hooks, which must not change then."""


def before_every_step(method: Listener) -> None:
    """Call a method before every step of every optimizer of this process, as long as the method's object exists."""
    key = id(method.__self__)  # type: ignore[attr-defined]
    _listeners[key] = weakref.WeakMethod(method, lambda _: _listeners.pop(key, None))
    with _installing:
        if not _installed:
            hook: Any = _call_listeners
            if "torch._dynamo" in sys.modules:  # else there is no optimizer yet, and the import takes seconds
                hook = torch.compiler.disable(_call_listeners)  # type: ignore[no-untyped-call]
            _installed.append(register_optimizer_step_pre_hook(hook))


def no_longer_before_steps(method: Listener) -> None:
    """End what `before_every_step` has begun for the method's object. Idempotent."""
    _listeners.pop(id(method.__self__), None)  # type: ignore[attr-defined]


def _call_listeners(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    for each in list(_listeners.values()):
        method = each()
        if method is not None:
            method(optimizer, args, kwargs)


class _Sample:
    """Some elements of each tensor, as fp64 on the CPU.

    Args:
        tensors: the tensors, by their place in memory.
    """

    def __init__(self, tensors: Memory) -> None:
        self._tensors = tensors
        self.values = _together([_points(each) for each in tensors.values()])

    @functools.cached_property
    def parts(self) -> dict[tuple[object, ...], slice]:
        """Each tensor's part of `values`, by its place in memory."""
        stops = itertools.accumulate(min(each.numel(), SAMPLED) for each in self._tensors.values())
        return {
            key: slice(begin, stop) for key, (begin, stop) in zip(self._tensors, pairwise([0, *stops]), strict=True)
        }

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the elements of one tensor; None if the tensor was not among them."""
        part = self.parts.get(_memory(tensor))
        return None if part is None else self.values[part]

    def is_of(self, tensors: Memory) -> bool:
        """Return whether these are elements of these tensors."""
        return self._tensors.keys() == tensors.keys()


class _Load:
    """One load of other weights into the model, and what the next steps tell of it.

    Args:
        before: elements of the weights before the load.
        after: the same elements after it.

    Attributes:
        changed: whether the load changed the weights.
        is_decided: whether it is known whether the next step jumped back to the weights before the load.
        returned: places in memory of tensors that seem to have jumped back, alone. One load is no proof of that.
    """

    def __init__(self, before: _Sample, after: _Sample) -> None:
        self._before, self._after = before, after
        self.changed = not torch.equal(before.values, after.values)
        self.is_decided = not self.changed
        self._first: Tensor | None = None  # after the first step
        self.returned: set[tuple[object, ...]] = set()

    def is_of(self, tensors: Memory) -> bool:
        """Return whether the load was into these tensors."""
        return self._after.is_of(tensors)

    def is_before(self, pairs: Sequence[Pair]) -> bool:
        """Return whether these tensors have the values from before the load."""
        return self.changed and _are_equal(pairs, self._before)

    def has_moved(self, pairs: Sequence[Pair]) -> bool:
        """Return whether the steps since the load have changed one of these parameters."""
        loaded = [(self._after.of(each.parameter), each.parameter) for each in pairs]
        return any(then is not None and not torch.equal(then, _together([_points(now)])) for then, now in loaded)

    def jumps_back(self, now: Tensor) -> bool:
        """Return whether the first step after the load started from the weights before it, judged by the second step.

        Args:
            now: elements of the weights before a step, at every step until `is_decided`.
        """
        if torch.equal(now, self._after.values if self._first is None else self._first):
            return False  # nothing has moved
        if self._first is None:
            self._first = now
            return False
        self.is_decided = True
        before, after, step = self._before.values, self._after.values, now - self._first
        beyond = self._first - after - step  # what the first step did beyond what the second one did
        self.returned = {
            place for place, part in self._after.parts.items() if _is_return(beyond[part], before[part] - after[part])
        }
        back, onward = (self._first - before - step).norm(), beyond.norm()
        return bool((after - before).norm() >= step.norm() and back < JUMPED * onward)


def _draws(step: Tensor, way: Tensor, change: Tensor) -> bool:
    """Return whether a step is a·way + b·change with a > 0, and no multiple of the change alone."""
    if step.numel() < FEWEST or not change.any():
        return False
    along = (change @ step / (change @ change)) * change
    across = way - (change @ way / (change @ change)) * change
    if across.norm() <= EXPLAINED * way.norm():
        return False
    share = across @ (step - along) / (across @ across)
    unexplained = (step - along - share * across).norm()
    return bool(share > 0 and unexplained < EXPLAINED * step.norm() and unexplained < (step - along).norm() / SURE)


def _is_return(change: Tensor, back: Tensor) -> bool:
    """Return whether a change of one tensor is, but for noise, the way back to the values before a load."""
    if change.numel() < FEWEST or not back.any():
        return False
    share = change @ back / (back @ back)
    noise = (change - share * back).norm() / (change.numel() - 1) ** 0.5
    return bool(abs(share - 1) < 0.5 and share * back.norm() > SURE * noise)


# -- Samples of tensors.


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return memory_of(_local(tensor))


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local


def _points(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, in row-major order and evenly distributed."""
    numel = tensor.numel()
    step = numel // SAMPLED or 1
    with torch.no_grad():
        if tensor.is_contiguous():
            return tensor.as_strided((min(numel, SAMPLED),), (step,))
        return tensor.reshape(-1)[::step][:SAMPLED]


def _together(pieces: Sequence[Tensor]) -> Tensor:
    """Return the elements of all pieces as fp64 on the CPU. From one device, they come in one transfer."""
    if len({piece.device for piece in pieces}) > 1:
        pieces = [piece.cpu() for piece in pieces]
    if len({piece.dtype for piece in pieces}) > 1:
        wide = torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32
        pieces = [piece.to(wide) for piece in pieces]
    return torch.cat(list(pieces)).cpu().double() if pieces else torch.empty(0, dtype=torch.float64)


def _are_equal(pairs: Sequence[Pair], sample: _Sample | None = None) -> bool:
    """Return whether copies equal their parameters, up to a cast to the narrower dtype, and are not all zero.

    Args:
        pairs: the parameters and copies.
        sample: earlier elements of the parameters; None: compare with their current values.
    """
    copies, values = list[Tensor](), list[Tensor]()
    for parameter, copy in pairs:
        narrow = _narrow(parameter, copy)
        points = _points(parameter) if sample is None else sample.of(parameter)
        if points is None:
            return False
        copies.append(_points(copy).to(narrow))
        values.append(points.to(narrow))
    one, other = _together(copies), _together(values)
    return torch.equal(one, other) and bool(one.any())


def _narrow(one: Tensor, other: Tensor) -> torch.dtype:
    return one.dtype if one.element_size() <= other.element_size() else other.dtype


def _fill(pairs: Sequence[Pair], *, from_copies: bool = False) -> None:
    """Copy parameters into their copies, where the two differ by more than a cast; or the other way round."""
    with torch.no_grad():
        for parameter, copy in pairs:
            source, target = (copy, parameter) if from_copies else (parameter, copy)
            narrow = _narrow(parameter, copy)
            for start in range(0, target.numel(), CHUNK_ELEMENTS):
                stop = min(start + CHUNK_ELEMENTS, target.numel())
                now = run_of(target.detach(), start, stop)
                values = run_of(source.detach(), start, stop).to(now.device)
                same = now.to(narrow) == values.to(narrow)
                assign_run_(target.detach(), start, torch.where(same, now, values.to(now.dtype)))


# -- Tensors in an optimizer that may be copies.


def parameters_copied(optimizer: Optimizer, parameters: Iterable[Tensor], *, by_gradients: bool = False) -> set[int]:
    """Return `id(parameter)` for each parameter of a model with a copy that is a parameter of the optimizer.

    Args:
        optimizer: the optimizer.
        parameters: the model's parameters.
        by_gradients: whether the copies must have the parameters' gradients, too, as at the beginning of a step.
            Another model may be equal, such as a teacher that was copied from this one.
    """
    if _may_have_no_memory(optimizer):
        return set()
    found = _tensors_in(optimizer, {_memory(each): each for each in parameters if _may_be_copied(_local(each))})
    pairs = [pair for place, each in found.items() if place.endswith(OWN) for pair in each]
    if not _are_equal(pairs) or (by_gradients and not _have_same_gradients(pairs)):
        return set()
    return {id(pair.parameter) for pair in pairs}


def _have_same_gradients(pairs: Sequence[Pair]) -> bool:
    """Return whether the gradients of copies and parameters have one direction: masters' gradients may be scaled."""
    both = [
        (pair.parameter.grad, pair.copy.grad)
        for pair in pairs
        if pair.parameter.grad is not None and pair.copy.grad is not None
    ]
    one, other = (_together([_points(_local(each[side])) for each in both]) for side in (0, 1))
    return bool(one @ other > ONE_DIRECTION * one.norm() * other.norm())


def _is_average(place: str) -> bool:
    return any(word in place.rpartition(".")[2].lower() for word in AVERAGES)


def _may_be_copied(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1 and tensor.layout == torch.strided


def _parameters_of(optimizer: Any) -> Iterator[Tensor]:
    return (each for group in _groups_of(optimizer) for each in group["params"])


def _groups_of(optimizer: Any) -> Sequence[dict[str, Any]]:
    return getattr(optimizer, "param_groups", ())


def _may_have_no_memory(optimizer: Any) -> bool:
    return any(type(each) not in PLAIN and not is_sharded(each) for each in _parameters_of(optimizer))


def _tensors_in(optimizer: Any, model: Memory, most: int | None = None) -> dict[str, list[Pair]]:
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


def _search(optimizer: Any, name: str, model: Memory, most: int | None, found: dict[str, list[Pair]]) -> None:
    """Add the tensors of one optimizer, without those of what it wraps, to `found`. Their places begin with `name`."""
    parameters = list(_parameters_of(optimizer))
    keys = [_memory(each) for each in parameters]
    mine = [model[each] for each in keys if each in model]
    if len(mine) < len(parameters) and most is None:
        own = [each for each, key in zip(parameters, keys, strict=True) if key not in model]
        held = set(keys)
        pairs = _aligned(own, [model[key] for key in model if key not in held])
        if any(pair.copy.element_size() > pair.parameter.element_size() for pair in pairs):  # else another model's
            found.setdefault(name + OWN, []).extend(pairs)
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return
    unowned: dict[str, list[Tensor]] = {}
    groups = [[model[key] for key in map(_memory, each["params"]) if key in model] for each in _groups_of(optimizer)]
    for place, owner, tensor in _leaves(_attributes(optimizer, most), name, DEPTH):
        if not _may_be_copied(tensor):
            continue
        if pieces := next(filter(None, (_pieces(tensor, each) for each in (mine, *groups))), None):
            found.setdefault(place, []).extend(pieces)
        elif owner is None:
            unowned.setdefault(place, []).append(tensor)
        elif (parameter := model.get(_memory(owner))) is not None:
            found.setdefault(place, []).extend(_aligned([tensor], [parameter]))
    for place, tensors in unowned.items():
        found.setdefault(place, []).extend(_aligned(tensors, mine or model.values()))


def _is_inside(optimizer: Optimizer, other: Any) -> bool:
    """Return whether another optimizer, which calls hooks before its own steps, has this one in an attribute."""
    attributes = _own_attributes(other)
    return "_optimizer_step_pre_hooks" in attributes and any(each is optimizer for each in attributes.values())


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
    tensors, parameters = list(map(_local, tensors)), list(parameters)
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
        if _memory(copy) != _memory(parameter):
            pairs.append(Pair(parameter, copy))
    return pairs


def _has_shape_of(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def _has_size_of(one: Tensor, other: Tensor) -> bool:
    is_number = other.numel() == 1  # such as a count of steps
    return one.numel() == other.numel() and other.is_contiguous() and not is_number
