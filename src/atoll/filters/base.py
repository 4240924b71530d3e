"""The filter contract: what travels is changed on its way, a run of elements at a time, by a site or by the server.

In rounds that is an update, before any byte of it leaves its site or before it is aggregated. What filters see is the
change: version − local, of `params` (the pseudo-gradient) and of float buffers alike. In tasks it is a payload or an
answer, whose float tensors filters see as they are. Values are in fp32 or wider, on the CPU; a run has at most
`CHUNK_ELEMENTS`, and no tensor is held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.tensors.chunks import CHUNK_ELEMENTS
from atoll.tensors.schema import TensorSpec


@dataclass(frozen=True)
class About:
    """What is known of an update, or of a payload, besides its values.

    Attributes:
        site: whose it is; of what is sent to a site, that site.
        round: counts from 1; 0 in tasks, as what follows but `task`.
        version: it was trained from.
        weight: of the update.
        steps: local optimizer steps; 0 where nobody said.
        metrics: that travel with it.
        task: name of the task; empty in rounds.
        fragment: of the model that the update is of; 0 also where it is the whole model.
    """

    site: str
    round: int = 0
    version: int = 0
    weight: float = 0.0
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    task: str = ""
    fragment: int = 0


@dataclass(frozen=True)
class Outgoing:
    """The update or payload that is on its way, for a filter that has to look at all of it first.

    Attributes:
        about: its metadata.
        tensors: by name, those that the filters before this one keep.
        changes: (name, start, stop) → those elements [stop − start], behind the filters before: of version − local, or
            of the payload.
        aliases: further name → name, of a payload's tensors that are in several places.
        model: names of all tensors of the model, where the update is of one fragment of it.
    """

    about: About
    tensors: Mapping[str, TensorSpec]
    changes: Callable[[str, int, int], Tensor] = field(repr=False)
    aliases: Mapping[str, str] = field(default_factory=dict)
    model: Collection[str] = ()

    def runs(self) -> Iterator[tuple[str, int, Tensor]]:
        """(name, first element, values) of all float tensors, in file order, one run at a time."""
        for name, spec in self.tensors.items():
            if spec.is_float:
                for start in range(0, spec.numel, CHUNK_ELEMENTS):
                    yield name, start, self.changes(name, start, min(start + CHUNK_ELEMENTS, spec.numel))

    def tensor(self, name: str) -> Tensor:
        """All of one tensor's change, or of the payload's tensor, in its shape and in new memory.

        Raises:
            KeyError: no float tensor has this name.
        """
        spec = self.tensors[name]
        if not spec.is_float:
            raise KeyError(name)
        starts = range(0, spec.numel, CHUNK_ELEMENTS)
        runs = [self.changes(name, start, min(start + CHUNK_ELEMENTS, spec.numel)) for start in starts]
        return torch.cat(runs).view(spec.shape) if runs else torch.zeros(spec.shape)


class Filter:
    """Leaves what travels as it is; others override what they need."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def begin(self, update: Outgoing) -> None:
        """A round's update, or a task's payload, is on its way; called once for each, before `keeps` and `apply`.

        A filter that needs to know the whole first looks at `update.runs()`: one pass more over the update. Keep what
        was found, not `update`: it holds the model of the round until the next one.
        """

    def keeps(self, spec: TensorSpec) -> bool:
        """Whether this tensor is sent. Else the server gets no change of it: it stays as the version has it; a payload
        has None in its place.
        """
        return True

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        """What to send in place of `values` [n], elements from `start` on of `name`.

        May be called more than once for the same elements, and from several threads; it gives the same each time.
        Integer tensors are not asked for.

        Returns:
            [n], of the dtype of `values`; those may be changed in place and returned.
        """
        return values


def require_filters(filters: Sequence[Filter]) -> tuple[Filter, ...]:
    """What a user gave as `filters`.

    Raises:
        UsageError: one is no filter.
    """
    if isinstance(filters, Filter):
        raise UsageError(f"filters is {filters!r} alone.", f"Give a list: [{filters!r}].")
    given = tuple(filters)  # first: what can be read once, a generator, would else be empty behind the check
    for each in given:
        if not isinstance(each, Filter):
            raise UsageError(f"{each!r} is not a filter.", "Derive it from atoll.filters.Filter.")
    return given
