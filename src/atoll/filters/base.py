"""The contract of filters, and several filters in a chain.

In rounds a filter gets an update, before it leaves its site or before it is aggregated: the change version − local, of
`params` (the pseudo-gradient) and of float buffers alike. In tasks it gets the float tensors of a payload or an answer
as they are. Values are in fp32 or wider, on the CPU; a run has at most `CHUNK_ELEMENTS`, and no tensor is held whole.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from atoll.errors import AtollError, UsageError
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of, run_of
from atoll.tensors.custom_types import Chunk, Stream
from atoll.tensors.dtypes import accumulate_dtype, dtype_name
from atoll.tensors.payload import Packed, names_of, without
from atoll.tensors.schema import TensorSpec


@dataclass(frozen=True)
class About:
    """What is known of an update or a payload, besides its values.

    Attributes:
        site: that it comes from, or is sent to.
        round: counts from 1; in tasks it is 0, as all others but `site` and `task`.
        version: that the update was trained from.
        weight: of the update.
        steps: local optimizer steps; 0 if they were not reported.
        metrics: that travel with it.
        task: name of the task; empty in rounds.
        fragment: of the model; 0 also for an update of the whole model.
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
    """An update or a payload as a whole, for a filter that has to look at all of it first.

    Attributes:
        about: its metadata.
        tensors: by name, those that earlier filters keep.
        changes: (name, start, stop) → those elements [stop − start] after the earlier filters: of version − local, or
            of the payload.
        aliases: further name → name, for tensors that are in several places of a payload.
        model: names of all tensors of the model, if the update is of one fragment.
    """

    about: About
    tensors: Mapping[str, TensorSpec]
    changes: Callable[[str, int, int], Tensor] = field(repr=False)
    aliases: Mapping[str, str] = field(default_factory=dict)
    model: Collection[str] = ()

    def runs(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, first element, values) of all float tensors, in file order, one run at a time."""
        for name, spec in self.tensors.items():
            if spec.is_float:
                for start in range(0, spec.numel, CHUNK_ELEMENTS):
                    yield name, start, self.changes(name, start, min(start + CHUNK_ELEMENTS, spec.numel))

    def tensor(self, name: str) -> Tensor:
        """Return the change of one tensor, or the tensor of the payload, whole, in its shape and in new memory.

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
    """Changes nothing; a filter overrides what it needs."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def begin(self, update: Outgoing) -> None:
        """Begin with an update or a payload; called once for each, before `keeps` and `apply`.

        A filter that has to look at all of it reads `update.runs()`, which is one more pass over it. Keep what you
        find, not `update` itself: it holds the model of the round until the next one.
        """

    def keeps(self, spec: TensorSpec) -> bool:
        """Whether this tensor is sent. If not, the server gets no change of it, and a payload has None in its place."""
        return True

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        """Return what to send in place of `values` [n], the elements of `name` from `start` on.

        It may be called more than once for the same elements, also from several threads, and returns the same each
        time. It is not called for integer tensors.

        Returns:
            [n], in the dtype of `values`, which may be changed in place and returned.
        """
        return values


def require_filters(filters: Sequence[Filter]) -> tuple[Filter, ...]:
    """Return what a user gave as `filters`.

    Raises:
        UsageError: something in it is no filter.
    """
    if isinstance(filters, Filter):
        raise UsageError(f"filters is {filters!r} alone.", f"Give a list: [{filters!r}].")
    given = tuple(filters)  # a generator can be read only once
    for each in given:
        if not isinstance(each, Filter):
            raise UsageError(f"{each!r} is not a filter.", "Derive it from atoll.filters.Filter.")
    return given


class BadFilter(Exception):
    """A filter raised, or returned something wrong.

    Attributes:
        filter: the filter.
        what: what it did, as words after its name.
        raised: whether it raised; its error is the cause.
    """

    def __init__(self, filter_: Filter, what: str, *, raised: bool) -> None:
        super().__init__(f"{filter_!r} {what}")
        self.filter, self.what, self.raised = filter_, what, raised


class Chain:
    """The change of an update, or the tensors of a payload, after all filters.

    Args:
        filters: in order; `begin` of each is called here.
        specs: by name, the tensors that filters see.
        about: the metadata.
        raw: (name, start, stop) → those elements of version − local, or of the payload, before any filter, in new
            memory, in the dtype of accumulation.
        aliases: further name → name; a tensor is kept under all its names, or under none.
        model: names of all tensors of the model, if the update is of one fragment.
        finite: whether a filter that leaves NaN or Inf is refused here.

    Raises:
        BadFilter: a `begin` or `keeps` raised.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        specs: Mapping[str, TensorSpec],
        about: About,
        raw: Callable[[str, int, int], Tensor],
        *,
        aliases: Mapping[str, str] | None = None,
        model: Collection[str] = (),
        finite: bool = False,
    ) -> None:
        self._filters, self.specs, self._raw, self._kept = filters, specs, raw, set(specs)
        self._finite, aliases = finite, aliases or {}
        whole = "the payload" if about.task else "the update"
        for index, filter_ in enumerate(filters):
            kept = {name: spec for name, spec in specs.items() if name in self._kept}

            def before(name: str, start: int, stop: int, index: int = index) -> Tensor:
                return self._behind(name, start, raw(name, start, stop), index)

            further = {alias: name for alias, name in aliases.items() if name in kept}
            outgoing = Outgoing(about, kept, before, further, model)
            _call(filter_, f"the begin of {whole}", partial(filter_.begin, outgoing))
            named = list(kept.items())
            named += [(name, replace(kept[name], name=alias)) for alias, name in further.items()]
            self._kept -= {
                name for name, spec in named if not _call(filter_, f"{spec.name!r}", partial(filter_.keeps, spec))
            }

    def sends(self, name: str) -> bool:
        """Whether every filter keeps this tensor."""
        return name in self._kept

    def change(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements [stop − start] of a float tensor after all filters; zeros if one does not keep it.

        Raises:
            BadFilter: one raised, or returned another shape or dtype, or NaN or Inf.
        """
        if name not in self._kept:
            return torch.zeros(stop - start, dtype=accumulate_dtype(self.specs[name].dtype), device="cpu")
        return self._behind(name, start, self._raw(name, start, stop), len(self._filters))

    def taken(self, name: str, start: int, stop: int) -> Tensor:
        """Return what the filters have taken off the change of a tensor that is sent: before − after."""
        raw = self._raw(name, start, stop)
        return raw.sub_(self._behind(name, start, raw.clone(), len(self._filters)))

    def _behind(self, name: str, start: int, values: Tensor, count: int) -> Tensor:
        """Return what the first `count` filters make of `values`, which they may change."""
        wide = values.dtype
        for filter_ in self._filters[:count]:
            found = _call(filter_, f"{name!r}", partial(filter_.apply, name, start, values))
            if not isinstance(found, Tensor) or found.shape != values.shape or found.dtype != wide:
                told = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise BadFilter(filter_, f"made {told} where {name!r} had {wide} {list(values.shape)}", raised=False)
            values = found.to("cpu")
            if self._finite and not bool(torch.isfinite(values).all()):
                raise BadFilter(filter_, f"left NaN or Inf in {name!r}", raised=False)
        return values


def _call(filter_: Filter, of: str, call: Callable[[], object]) -> object:
    try:
        return call()
    except (AtollError, BadFilter):
        raise
    except Exception as error:
        raise BadFilter(filter_, f"failed at {of}: {type(error).__name__}: {error}", raised=True) from error


# -- Filters of payloads: each float tensor passes through all of them while it is written.
#
#     model.w  ──run──▶ fp32 ──filter──▶ … ──filter──▶ its own dtype ──▶ file
#
# Nothing is copied before: the payload has a `Stream` in the place of a tensor, which filters each run when it is read.
# Integers, booleans and NumPy scalars stay as they are.


T = TypeVar("T")

ByTask = Sequence[Filter] | Mapping[str, Sequence[Filter]]
"""Filters for every task, or by the name of a task."""


def for_tasks(given: ByTask) -> list[tuple[Filter, frozenset[str]]]:
    """Return each filter with the names of its tasks; without names it is for every task.

    Raises:
        UsageError: something in it is no filter.
    """
    if not isinstance(given, Mapping):
        return [(each, frozenset()) for each in require_filters(given)]
    return [(each, frozenset([task])) for task, filters in given.items() for each in require_filters(filters)]


def filtered(packed: Packed, filters: Sequence[Filter], about: About, what: str) -> Packed:
    """Return a payload as it is to travel: None in the places of dropped tensors, and float tensors filtered.

    `begin` and `keeps` of the filters are called here, and `apply` while the payload is written: until then they may
    not be used for another payload.

    Args:
        what: begins the errors: it names the payload, and says what is not done with it.

    Raises:
        UsageError: a filter raised, or would read NaN or Inf; filter and tensor are named.
    """
    names = _told(lambda: names_of(packed), what) if filters else {}
    if not names:
        return packed
    tensors = {own[0]: packed.tensors[index] for index, own in names.items()}
    specs = {name: TensorSpec(name, dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}
    cursors = {name: _Cursor(each) for name, each in tensors.items() if isinstance(each, Stream)}

    def raw(name: str, start: int, stop: int) -> Tensor:
        tensor = tensors[name]
        run = run_of(tensor, start, stop) if isinstance(tensor, Tensor) else cursors[name].run(start, stop)
        values = torch.empty(stop - start, dtype=accumulate_dtype(specs[name].dtype)).copy_(run)
        if not bool(torch.isfinite(values).all()):  # a filter would make NaN of it, or be blamed for it
            raise UsageError(f"{name!r} has NaN or Inf before it is filtered.", "Drop it first, or send booleans.")
        return values

    aliases = {further: own[0] for own in names.values() for further in own[1:]}
    chain = _told(lambda: Chain(filters, specs, about, raw, aliases=aliases, finite=True), what)
    changing = any(type(each).apply is not Filter.apply for each in filters)
    through = list(packed.tensors)
    for index, (name, *_) in names.items():
        if changing and specs[name].is_float and chain.sends(name):
            runs = partial(_runs, chain, specs[name], packed.tensors[index].dtype, repr(filters[-1]), what)
            through[index] = _Through(packed.tensors[index].dtype, specs[name].shape, runs)
    dropped = frozenset(index for index, (name, *_) in names.items() if not chain.sends(name))
    return without(replace(packed, tensors=tuple(through)), dropped)


def said(error: BaseException) -> str:
    """Return an error with the traceback of its cause, as text, so that a log record holds no payload."""
    cause = "" if error.__cause__ is None else "\n" + "".join(traceback.format_exception(error.__cause__)).rstrip()
    return f"{error}{cause}"


class _Through(Stream):
    """A filtered tensor; its errors name the filter already."""

    def _chunks(self) -> Iterator[Chunk]:
        yield from self.chunks()


def _runs(chain: Chain, spec: TensorSpec, dtype: torch.dtype, last: str, what: str) -> Iterator[Tensor]:
    for start in range(0, spec.numel, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, spec.numel)
        values = _told(partial(chain.change, spec.name, start, stop), what).to(dtype)
        if dtype.itemsize < 4 and not bool(torch.isfinite(values.float()).all()):
            raise UsageError(
                f"{what}: what filter {last} left of {spec.name!r} is beyond what {dtype} can hold.",
                "Send the tensor in a wider dtype, or filter it to smaller values.",
            )
        yield values


@dataclass(eq=False)
class _Cursor:
    """Reads runs of a stream, mostly in order; an earlier run reads the stream anew."""

    stream: Stream
    at: int = 0
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    chunks: Iterator[memoryview] | None = None

    def run(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in new memory."""
        size = self.stream.itemsize
        if self.chunks is None or start * size < self.at:
            self.chunks, self.at, self.rest = self.stream.runs(), 0, memoryview(b"")
        out = torch.empty(stop - start, dtype=self.stream.dtype)
        self._read(None, start * size - self.at)
        self._read(bytes_of(out), (stop - start) * size)
        if stop * size == self.stream.nbytes:
            for _ in self.chunks:  # it raises if it has too many
                pass
            self.chunks = None
        return out

    def _read(self, into: memoryview | None, count: int) -> None:
        assert self.chunks is not None
        done = 0
        while done < count:
            if not self.rest:
                self.rest = next(self.chunks)  # it raises if it has too few
            run, self.rest = self.rest[: count - done], self.rest[count - done :]
            if into is not None:
                into[done : done + len(run)] = run
            done += len(run)
        self.at += count


def _told(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except BadFilter as error:
        remedy = "Look at its code." if error.raised else "It returns as many elements, finite, of their dtype."
        raise UsageError(f"{what}: the filter {error}.", remedy) from error.__cause__
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", error.remedy) from error
