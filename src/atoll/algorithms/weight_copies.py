"""Copies of the weights that optimizers keep, and that have to follow when Atoll loads other weights into the model.

Examples are the fp32 masters of bf16 weights, and the slow weights of Lookahead. The next step of such an optimizer
starts from its copy, so without this file it would undo what was loaded.

    copies = WeightCopies(report)
    copies.watch(optimizer)                 # and before each of its steps: copies.before_step(optimizer)
    with copies.loading(model, tensors):    # finds what equals the weights now
        ...                                 # other weights are loaded into the tensors
                                            # and, at the end, into the copies

A hand-written optimizer that is no torch optimizer calls no hooks. Its copies stay unknown, but a load that it undoes
is reported: Atoll looks at the weights in the backward passes before its first steps, and when they are submitted.

A copy is a float tensor of a parameter's shape or size: in the optimizer's state, in its attributes, or a parameter of
its own. Or it is a part of a flat tensor, which holds all parameters, or those of a group, in their order; there may be
several such tensors, with padding. It is recognised by its values, which equal the parameter's, up to a cast. Tensors
that are found at one place, such as `state[parameter]["master"]` of all parameters, are copies only if all of them are
equal, and are not all zero. If they have followed the weights before, but differ now, no value would be right, so the
load is refused. If a copy was not recognised, the parameters jump back after a load, which is reported.

An average of the weights for evaluation is left as it is: the steps do not start from it, and it continues from the
loaded weights. It is known by its name (`AVERAGES`), since it may equal the weights at first.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.copies_in_optimizers import (
    OWN_PARAMETERS,
    Pair,
    Place,
    Sample,
    Weights,
    are_equal,
    fill,
    gathered,
    is_average,
    is_inside,
    may_be_copied,
    may_have_no_memory,
    parameters_copied,
    parameters_of,
    place_in_memory,
    points_of,
    tensors_in,
    wrappers_of,
)
from atoll.algorithms.every_step import before_every_step
from atoll.algorithms.undone_loads import DRAWN_STEPS, Anchor, Changes, EarlierWeights, Load
from atoll.errors import UsageError
from atoll.tensors.module_tensors import PLAIN, Tensors

SAMPLED_PARAMETERS = 8
"""Parameters of each optimizer that have their state compared before a step, where that has to be fast."""
WATCHED_STEPS = 64
"""Steps after each load before which Atoll looks whether it was undone."""
WHOLE_LOOKS = 5
"""The first of these steps, before which it compares copies of several parameters in any case."""
SHORT_LOOKS = 16
"""The first of these steps, before which it compares a copy of at least one parameter."""
STEPS_BETWEEN_LOOKS = 8
"""Steps between later such comparisons. A jump back is awaited in every one."""
STEPS_UNTIL_STATE = 2
"""Steps after which an optimizer has made the state that it makes at its first step."""
MOST_NOTED_STEPS = 8
"""Steps that are noted of each copy, for messages, at which it equalled the weights."""
JUMP = "the next step started from a copy of the weights that the optimizer or the script keeps"
"""What undid a load, if the copy is not known."""
PUT_BACK = "the script put weights from before the load back into the model before the next step"
KEEP_IN_STATE = (
    "Keep the copy in the state of a torch.optim.Optimizer, one tensor for each parameter, or use another optimizer."
)
LOAD_LAST = (
    "Put earlier weights, such as the best ones or those that an average was swapped for, back before the global model "
    "is loaded, or into another model."
)


class _Watched:
    """What is known of the copies in one optimizer, and in what it wraps. Another one may be of the same class.

    Args:
        optimizer: the optimizer.

    Attributes:
        followed: place → numbers of the steps after which its tensors were equal to the weights, which had moved.
        left: places of tensors that existed at the last load, and were not loaded.
        anchors: place → what is known of tensors that may be other weights.
    """

    def __init__(self, optimizer: Any) -> None:
        self.anchors: dict[str, Anchor] = {}
        self._optimizer = weakref.ref(optimizer)
        self.followed: dict[str, list[int]] = {}
        self.left: set[str] = set()

    @property
    def optimizer(self) -> Any:
        """The optimizer; None: it is gone."""
        return self._optimizer()


class _Where(NamedTuple):
    """Where an optimizer keeps tensors."""

    watched: _Watched
    name: str

    @property
    def has_followed(self) -> bool:
        """Whether the tensors were equal to the weights after these had moved."""
        return self.name in self.watched.followed

    @property
    def is_anchor(self) -> bool:
        """Whether the tensors are other weights, towards which the last steps drew the model's."""
        known = self.watched.anchors.get(self.name)
        return known is not None and known.steps >= DRAWN_STEPS

    @property
    def is_trained(self) -> bool:
        """Whether the tensors are parameters of the optimizer itself."""
        return self.name.endswith(OWN_PARAMETERS)

    def note_equal(self, step: int) -> None:
        """Record that the tensors are equal to the weights after a step."""
        steps = self.watched.followed.setdefault(self.name, [])
        if len(steps) < MOST_NOTED_STEPS and step not in steps:
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
        self._steps_begun, self._has_candidates = 0, False
        self._steps_made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._weights = Weights()
        self._thread = 0  # that of the last load
        self._model: Callable[[], nn.Module | None] = lambda: None  # a weak reference, of the last load
        self._returned: set[Place] = set()  # of the last load: `Load.returned`
        self._steps_left, self._load = 0, Load(Sample(Weights()), Sample(Weights()))
        self._earlier = EarlierWeights()
        self._changes: Changes | None = None  # of the last federated round
        self._backward: Any = None  # the handle of the hook on a parameter

    def watch(self, optimizer: Any) -> None:
        """Look for copies in this optimizer, and in what it wraps, from now on.

        If it was made before the last load, load its copies now.
        """
        if any(each.optimizer is optimizer for each in self._watched):
            return
        self._watched = [each for each in self._watched if each.optimizer is not None]
        self._watched.append(_Watched(optimizer))
        for pairs in tensors_in(optimizer, self._weights).values():
            if self._load.is_before(pairs):
                fill(pairs)

    def before_step(self, optimizer: Optimizer) -> None:
        """Look, before a step, whether the last load was undone by the steps since then.

        Before a step inside of another optimizer's step, the weights are on their way: SAM has just taken them back.
        """
        for each in self._watched:
            other = each.optimizer
            if other is not optimizer and is_inside(optimizer, other):
                return
        self._look_no_more_in_backward()
        self._steps_made[optimizer] = made = self._steps_made.get(optimizer, -1) + 1
        for wrapper in wrappers_of(optimizer) if not made else ():
            self.watch(wrapper)
        self._steps_begun += 1
        if self._steps_left or self._earlier.are_back:
            self._steps_left = max(0, self._steps_left - 1)
            self._look(made)

    def discover(self, optimizer: Optimizer, *_: Any) -> None:
        """Call `watch` and `before_step` if this optimizer, which is about to step, trains the model."""
        if not self._weights.by_place or optimizer in self._others:
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
        if any(self._weights.find(each) is not None for each in parameters_of(optimizer)):
            return not may_have_no_memory(optimizer)
        model = self._model() if self._thread == threading.get_ident() else None
        if model is None:
            return False
        # the model's own parameters, since those of `_weights` are detached and have no gradients
        parameters = (each for each in model.parameters() if self._weights.find(each) is not None)
        return bool(parameters_copied(optimizer, parameters, by_gradients=True))

    def forget_model(self) -> None:
        """Free the model's tensors. The optimizers are still known at the next load."""
        self._look_no_more_in_backward()
        self._weights, self._steps_left, self._load = Weights(), 0, Load(Sample(Weights()), Sample(Weights()))

    def discover_all(self) -> None:
        """Call `discover` before every step of every optimizer of this process, as long as this object exists."""
        before_every_step(self.discover)

    @contextmanager
    def loading(self, model: object, tensors: Tensors, *, refuses: bool = True) -> Iterator[None]:
        """If the `with` block changes the tensors, load their new values into the copies, too.

        Args:
            model: the model. If it is a module, its buffers have no copies.
            tensors: the tensors of the model, by name.
            refuses: whether to raise an error if a copy cannot be loaded. If not, the script only looks at the weights.

        Raises:
            UsageError: a copy cannot be loaded, because it differs from the weights now.
        """
        last_step = max(self._steps_made.values(), default=-1) + 1
        self._look(last_step, is_end=True)
        self._thread = threading.get_ident()
        self._weights = Weights()  # free the last ones first
        self._weights = _weights_of(model, tensors)
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else lambda: None
        self._look_no_more_in_backward()
        self._others = weakref.WeakSet()
        found = self._found()
        for place, pairs in found.items():
            if place.is_trained and place.has_followed:
                fill(pairs, from_copies=True)  # the script would do it next
        copies = {place: pairs for place, pairs in found.items() if are_equal(pairs)}
        for place in copies:
            if place.is_trained:
                place.note_equal(last_step)
        if refuses:
            _require_loadable(found.keys() - copies.keys())
        before = Sample(self._weights)
        self._earlier.look_around(self._weights)
        try:
            yield
        finally:
            for pairs in copies.values():
                fill(pairs)
            after = Sample(self._weights)
            load = Load(before, after)
            if refuses:
                self._earlier.note_load(before, after)
            self._steps_left = WATCHED_STEPS
            if load.changed or not self._load.is_of(self._weights):
                self._load = load
                for each in self._watched:
                    for anchor in each.anchors.values():
                        anchor.forget_last()
                    each.left = {place.name for place in found.keys() - copies.keys() if place.watched is each}
                    each.left = each.left if load.changed else set()  # there is nothing to undo
            self._look_in_backward(model)

    def look_at_end(self) -> None:
        """Look, at the end of a federated round, whether the last load was undone."""
        self._look_for_jump(is_end=True)
        now, last = Sample(self._weights).values, self._changes
        self._earlier.note_end(now)
        if last is not None and not self._load.is_decided and self._load.is_continued(now, last):
            self._undone(JUMP)
        self._changes = self._load.changes(now) if self._load.is_of(self._weights) else None

    def _look_in_backward(self, model: Any) -> None:
        """Look in each backward pass whether the last load was undone, until an optimizer that calls hooks steps.

        The gradient of the first parameter tells of a backward pass: that of a first layer comes last.
        """
        parameters = model.parameters() if isinstance(model, nn.Module) else model.values()
        trained = (each for each in parameters if isinstance(each, Tensor) and each.requires_grad and each.is_leaf)
        first: Any = next((each for each in trained if self._weights.find(each) is not None), None)
        if first is None or self._load.is_decided:
            return
        this = weakref.ref(self)

        def look(_: Tensor) -> None:
            copies = this()
            if copies is not None and copies._steps_left:
                copies._steps_left -= 1
                copies._look_for_jump()

        hook = torch.compiler.disable(look) if "torch._dynamo" in sys.modules else look  # type: ignore[no-untyped-call]
        self._backward = first.register_post_accumulate_grad_hook(hook)

    def _look_no_more_in_backward(self) -> None:
        if self._backward is not None:
            self._backward.remove()
            self._backward = None

    def _found(self, most: int | None = None) -> dict[_Where, list[Pair]]:
        """Return what may be copies in all optimizers that are watched: place → pairs.

        Args:
            most: number of sampled parameters of each optimizer to look at in its state; None: all.
        """
        return {
            _Where(each, name): pairs
            for each in self._watched
            for name, pairs in tensors_in(each.optimizer, self._weights, most).items()
        }

    def _found_in_some(self, most: int) -> dict[_Where, list[Pair]]:
        """Return what may be copies of at most so many sampled parameters, at each place in all optimizers."""
        sampled, found = self._weights.sampled_ids, dict[_Where, list[Pair]]()
        for place, pairs in self._found(most).items():
            some = [each for each in pairs if id(each.parameter) in sampled] if len(pairs) > most else pairs
            found[place] = some[:: max(1, len(some) // most)][:most]
        return found

    def _look(self, step: int, *, is_end: bool = False) -> None:
        """Note which tensors have followed the weights. Report a load that was undone by the steps since then.

        Args:
            step: number of the last step.
            is_end: whether other weights are loaded next.
        """
        if not self._weights.by_place:
            return
        looks = WATCHED_STEPS - self._steps_left
        if is_end or looks <= SHORT_LOOKS or looks % STEPS_BETWEEN_LOOKS == 0:
            self._compare(step, is_whole=is_end or looks <= WHOLE_LOOKS, is_end=is_end)
        self._look_for_jump(is_end=is_end)
        if not self._has_candidates and self._load.is_decided and looks > STEPS_UNTIL_STATE:
            self._steps_left = 0

    def _compare(self, step: int, *, is_whole: bool, is_end: bool) -> None:
        """Compare what may be copies with the weights. The arguments are those of `_look`.

        Args:
            step: number of the last step.
            is_whole: whether to compare several parameters even if a first one differs.
            is_end: whether other weights are loaded next.
        """
        found = self._found_in_some(SAMPLED_PARAMETERS if is_whole else 1)
        self._has_candidates = bool(found)
        if not is_whole:
            found = self._found_in_some(SAMPLED_PARAMETERS) if any(map(are_equal, found.values())) else {}
        for place, pairs in found.items():
            if is_whole:
                anchor = place.watched.anchors.setdefault(place.name, Anchor())
                copy, weights = (gathered(points_of([each[side] for each in pairs])) for side in (1, 0))
                anchor.note(copy, weights, self._steps_begun + is_end)
            if are_equal(pairs) and self._load.has_moved(pairs):
                place.note_equal(step)
                if place.name in place.watched.left:
                    self._undone(f"the steps since then started from the optimizer's copy of the weights, {place.name}")

    def _look_for_jump(self, *, is_end: bool = False) -> None:
        """Report a load that the next step undid by a jump back to the weights before the load."""
        if self._load.is_decided and not self._earlier.are_back:
            return
        now = Sample(self._weights).values
        if not is_end or self._earlier.are_back:  # without a step, weights that were put back harm nothing
            self._earlier.look(now)
        if self._earlier.are_back:
            if is_end:
                self._undone(PUT_BACK, LOAD_LAST)
            return
        if self._load.is_decided:
            return
        has_jumped = self._load.jumps_back(now, is_end=is_end)
        if self._load.is_decided:
            has_jumped = has_jumped or not self._returned.isdisjoint(self._load.returned)
            self._returned = self._load.returned
        if has_jumped and not self._steps_from_weights():
            self._undone(JUMP)

    def _steps_from_weights(self) -> bool:
        """Return whether only torch's own optimizers train the model: their steps start from the model's weights.

        Near a site's own optimum, a first step back to it followed by mere noise looks like a jump.
        """
        alive = [each.optimizer for each in self._watched if each.optimizer is not None]
        return bool(alive) and all(type(each).__module__.startswith("torch.optim.") for each in alive)

    def _undone(self, why: str, remedy: str = KEEP_IN_STATE) -> None:
        if why not in self._reported:
            self._reported.add(why)
            self._report(
                f"the global model was loaded, but {why}. So the load was undone, and the result is wrong. {remedy}"
            )


def _weights_of(model: object, tensors: Tensors) -> Weights:
    """Return the tensors of a model of which an optimizer may keep copies. The arguments are those of `loading`."""
    if not isinstance(model, nn.Module):
        return Weights(filter(may_be_copied, tensors.values()))
    parameters = [
        each
        for part in model.modules()
        for each in part._parameters.values()
        if each is not None and may_be_copied(each)
    ]
    if set(map(type, parameters)).issubset(PLAIN):  # an optimizer holds the same objects, which are found at once
        given = [each for each in tensors.values() if type(each) in PLAIN and each.layout == torch.strided]
        addresses = set(map(Tensor.data_ptr, given))
        held = zip(parameters, map(Tensor.data_ptr, parameters), strict=True)
        return Weights([each for each, address in held if address in addresses])
    given = [each for each in tensors.values() if may_be_copied(each)]
    places = set(map(place_in_memory, parameters))
    return Weights(each for each in given if place_in_memory(each) in places)


def _require_loadable(places: Iterable[_Where]) -> None:
    """Check that none of these tensors, which differ from the weights, has followed them before.

    Raises:
        UsageError: one has, or is other weights that the optimizer trains. No value would be right for it.
    """
    for place in sorted(places, key=lambda each: each.name):
        if is_average(place.name) or not (place.has_followed or place.is_anchor):
            continue
        how = (
            "followed them in an earlier step" if place.has_followed else "has drawn them towards it for several steps"
        )
        raise UsageError(
            f"The optimizer keeps a copy of the weights, {place.name}, that {how} and differs from them now. Atoll "
            "cannot load the global model into it, and without that, the next steps would undo the synchronisation.",
            _when_loadable(place.watched.followed[place.name])
            if place.has_followed
            else "Use an optimizer with steps that start from the model's weights alone.",
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
        "with a copy that equals the weights after each step before a synchronisation."
    )
