"""The base class of filters, and chains of filters.

In rounds, a filter changes an update: at the site before it is sent, or at the server before it is aggregated. The
filter gets the difference version − local. For `params`, this is the pseudo-gradient. Float buffers are passed as this
difference, too, although they are sent as values. In tasks (calls that a workflow sends to sites), a filter changes the
payload of a task or of an answer, and gets the values of the payload's float tensors. Values are in fp32 or fp64, on
the CPU. A filter gets at most `CHUNK_ELEMENTS` elements at a time.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from atoll.errors import AtollError, UsageError
from atoll.format_text import shown
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of, run_of
from atoll.tensors.custom_types import Chunk, Stream
from atoll.tensors.dtypes import accumulate_dtype, dtype_name
from atoll.tensors.payload import Packed, names_of, without
from atoll.tensors.schema import TensorSpec


@dataclass(frozen=True)
class About:
    """Metadata of an update or of a task's payload. In tasks, only `site` and `task` are set.

    Attributes:
        site: the site that sends the update or answer, or that gets the payload.
        round: number of the round, from 1; in tasks 0.
        version: number of the version that the update was trained from.
        weight: weight of the update.
        steps: local optimizer steps; 0 if the site did not report them.
        metrics: metrics that are sent with the update.
        task: name of the task; empty in rounds.
        fragment: number of the fragment; 0 also for an update of the whole model.
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
    """A whole update or payload, for a filter that needs to read all values before it changes any.

    Attributes:
        about: metadata of the update or payload.
        tensors: name → spec of each tensor that the earlier filters of the chain did not drop.
        changes: (name, start, stop) → elements [start, stop) after the earlier filters: of version − local in rounds,
            of the payload in tasks.
        aliases: if a tensor is in several places of a payload: each of its other names → its name in `tensors`.
        model: names of all tensors of the model, if the update is of one fragment; else empty.
    """

    about: About
    tensors: Mapping[str, TensorSpec]
    changes: Callable[[str, int, int], Tensor] = field(repr=False)
    aliases: Mapping[str, str] = field(default_factory=dict)
    model: Collection[str] = ()

    def runs(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, first element, values) for all float tensors, at most `CHUNK_ELEMENTS` elements at a time."""
        for name, spec in self.tensors.items():
            if spec.is_float:
                for start in range(0, spec.numel, CHUNK_ELEMENTS):
                    yield name, start, self.changes(name, start, min(start + CHUNK_ELEMENTS, spec.numel))

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, in its shape and in new memory: version − local in rounds, the values in tasks.

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
    """Base class of filters; it changes nothing. Override the methods that your filter needs."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def begin(self, update: Outgoing) -> None:
        """Prepare for one update or payload. Atoll calls this before it calls `keeps` and `apply` for that update.

        If your filter depends on all values, read `update.runs()`: one more pass over the data. Store your results, but
        not `update` itself: it would keep the round's model in memory.
        """

    def keeps(self, spec: TensorSpec) -> bool:
        """Return whether to send this tensor. If not, it counts as unchanged in an update, and is None in a payload."""
        return True

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        """Return the filtered values of n neighbouring elements of a tensor.

        Atoll can call this several times for the same elements, also from several threads. Return the same result each
        time. Atoll calls this only for floating point tensors.

        Args:
            name: name of the tensor.
            start: index of the first element in the flat tensor.
            values: the elements, [n]. You may change them in place and return them.

        Returns:
            The filtered elements, [n], in the dtype of `values`.
        """
        return values


def require_filters(filters: Sequence[Filter]) -> tuple[Filter, ...]:
    """Return the filters as a tuple, after a check that each is a `Filter`.

    Raises:
        UsageError: the argument is a single filter, or an element is not a filter.
    """
    if isinstance(filters, Filter):
        raise UsageError(f"filters is {filters!r}, not a list.", f"Pass a list: [{filters!r}].")
    if not isinstance(filters, Iterable):
        raise UsageError(f"filters is {shown(filters)}, not a list.", "Pass a list of filters: [MyFilter()].")
    as_tuple = tuple(filters)  # a generator can be read only once
    for each in as_tuple:
        if not isinstance(each, Filter):
            raise UsageError(f"{each!r} is not a filter.", "Derive it from atoll.filters.Filter.")
    return as_tuple


class BadFilter(Exception):
    """Raised if a filter raises an error, or returns a wrong result.

    Attributes:
        filter: the filter.
        what: the fault, as words that follow the filter's name.
        raised: whether the filter raised an error. If so, the filter's error is the cause of this one.
    """

    def __init__(self, filter_: Filter, what: str, *, raised: bool) -> None:
        super().__init__(f"{filter_!r} {what}")
        self.filter, self.what, self.raised = filter_, what, raised


class Chain:
    """A chain of filters for one update or payload. It returns the values after all filters.

    Args:
        filters: the filters, in order. The constructor calls `begin` and `keeps` of each.
        specs: name → spec of the tensors to filter.
        about: metadata of the update or payload.
        raw: a function (name, start, stop) → elements [start, stop) before any filter: of version − local, or of the
            payload. It returns new memory, in fp32 (fp64 for fp64).
        aliases: for a tensor with several names: each other name → its name in `specs`. If a filter drops one name of a
            tensor, the tensor is not sent at all.
        model: names of all tensors of the model, if the update is of one fragment.
        finite: whether to raise `BadFilter` if a filter's result has NaN or Inf.

    Raises:
        BadFilter: `begin` or `keeps` of a filter raised.
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
        self._filters, self.specs, self._raw, self._sent = filters, specs, raw, set(specs)
        self._finite, aliases = finite, aliases or {}
        whole = "the payload" if about.task else "the update"
        for index, filter_ in enumerate(filters):
            sent = {name: spec for name, spec in specs.items() if name in self._sent}

            def before(name: str, start: int, stop: int, index: int = index) -> Tensor:
                return self._after(name, start, raw(name, start, stop), index)

            further = {alias: name for alias, name in aliases.items() if name in sent}
            outgoing = Outgoing(about, sent, before, further, model)
            _call(filter_, f"the start of {whole}", partial(filter_.begin, outgoing))
            named = list(sent.items())
            named += [(name, replace(sent[name], name=alias)) for alias, name in further.items()]
            self._sent -= {
                name for name, spec in named if not _call(filter_, f"{spec.name!r}", partial(filter_.keeps, spec))
            }

    def sends(self, name: str) -> bool:
        """Return whether the tensor is sent, because no filter drops it."""
        return name in self._sent

    def change(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a float tensor after all filters; zeros if a filter drops the tensor.

        Raises:
            BadFilter: a filter raised, or returned another shape or dtype, or (if `finite`) NaN or Inf.
        """
        if name not in self._sent:
            return torch.zeros(stop - start, dtype=accumulate_dtype(self.specs[name].dtype), device="cpu")
        return self._after(name, start, self._raw(name, start, stop), len(self._filters))

    def removed(self, name: str, start: int, stop: int) -> Tensor:
        """Return what the filters removed from elements [start, stop): values before − values after."""
        raw = self._raw(name, start, stop)
        return raw.sub_(self._after(name, start, raw.clone(), len(self._filters)))

    def _after(self, name: str, start: int, values: Tensor, count: int) -> Tensor:
        """Return `values` after the first `count` filters. The filters may change `values` in place."""
        wide = values.dtype
        for filter_ in self._filters[:count]:
            found = _call(filter_, f"{name!r}", partial(filter_.apply, name, start, values))
            if not isinstance(found, Tensor) or found.shape != values.shape or found.dtype != wide:
                after = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                before = f"{wide} {list(values.shape)}"
                raise BadFilter(filter_, f"changed {name!r} from {before} to {after}", raised=False)
            values = found.to("cpu")
            if self._finite and not bool(torch.isfinite(values).all()):
                raise BadFilter(filter_, f"returned NaN or Inf in {name!r}", raised=False)
        return values


def _call(filter_: Filter, of: str, call: Callable[[], object]) -> object:
    try:
        return call()
    except (AtollError, BadFilter):
        raise
    except Exception as error:
        raise BadFilter(filter_, f"failed at {of}: {type(error).__name__}: {error}", raised=True) from error


# -- Filters of payloads: each float tensor passes through all filters while it is written, one chunk at a time.
#
#     model.w  ──chunk──▶ fp32 ──filter──▶ … ──filter──▶ its own dtype ──▶ file
#
# The tensor is not copied first. In the payload, a `Stream` replaces the tensor and filters each chunk when it is read.
# Integers, booleans and NumPy scalars are not filtered.


T = TypeVar("T")

ByTask = Sequence[Filter] | Mapping[str, Sequence[Filter]]
"""A list of filters for all tasks, or task name → list of filters."""


def for_tasks(by_task: ByTask) -> list[tuple[Filter, frozenset[str]]]:
    """Return each filter with the names of the tasks to which it applies. An empty set of names means all tasks.

    Raises:
        UsageError: an element is not a filter.
    """
    if not isinstance(by_task, Mapping):
        return [(each, frozenset()) for each in require_filters(by_task)]
    return [(each, frozenset([task])) for task, filters in by_task.items() for each in require_filters(filters)]


def filtered(packed: Packed, filters: Sequence[Filter], about: About, what: str) -> Packed:
    """Return the filtered payload: None in place of dropped tensors, and streams in place of float tensors.

    This function calls `begin` and `keeps` of the filters. Their `apply` is called later, while the payload is
    written. Until then, do not use the same filters for another payload.

    Args:
        packed: the payload.
        filters: the filters, in order.
        about: metadata of the payload.
        what: start of error messages, for example "The answer of site clinic-a to task 'train' was not sent".

    Raises:
        UsageError: a filter failed, or a tensor has NaN or Inf before it is filtered. The message names the filter or
            the tensor.
    """
    names = _as_usage_error(lambda: names_of(packed), what) if filters else {}
    if not names:
        return packed
    tensors = {own[0]: packed.tensors[index] for index, own in names.items()}
    specs = {name: TensorSpec(name, dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}
    cursors = {name: _Cursor(each) for name, each in tensors.items() if isinstance(each, Stream)}

    def raw(name: str, start: int, stop: int) -> Tensor:
        tensor = tensors[name]
        run = run_of(tensor, start, stop) if isinstance(tensor, Tensor) else cursors[name].run(start, stop)
        values = torch.empty(stop - start, dtype=accumulate_dtype(specs[name].dtype)).copy_(run)
        if not bool(torch.isfinite(values).all()):  # checked first, so that the filters are not blamed
            raise UsageError(
                f"{name!r} has NaN or Inf before it is filtered.",
                "Drop this tensor with the first filter, or, if it is a mask, send it as booleans.",
            )
        return values

    aliases = {further: own[0] for own in names.values() for further in own[1:]}
    chain = _as_usage_error(lambda: Chain(filters, specs, about, raw, aliases=aliases, finite=True), what)
    changing = any(type(each).apply is not Filter.apply for each in filters)
    through = list(packed.tensors)
    for index, (name, *_) in names.items():
        if changing and specs[name].is_float and chain.sends(name):
            runs = partial(_runs, chain, specs[name], packed.tensors[index].dtype, repr(filters[-1]), what)
            through[index] = _Through(packed.tensors[index].dtype, specs[name].shape, runs)
    dropped = frozenset(index for index, (name, *_) in names.items() if not chain.sends(name))
    return without(replace(packed, tensors=tuple(through)), dropped)


def with_cause(error: BaseException) -> str:
    """Return an error and its cause's traceback as text. Logging the error itself would keep the payload in memory."""
    cause = "" if error.__cause__ is None else "\n" + "".join(traceback.format_exception(error.__cause__)).rstrip()
    return f"{error}{cause}"


class _Through(Stream):
    """A filtered tensor, as a stream. Errors from its chunks pass unchanged, because they already name the filter."""

    def _chunks(self) -> Iterator[Chunk]:
        yield from self.chunks()


def _runs(chain: Chain, spec: TensorSpec, dtype: torch.dtype, last: str, what: str) -> Iterator[Tensor]:
    for start in range(0, spec.numel, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, spec.numel)
        values = _as_usage_error(partial(chain.change, spec.name, start, stop), what).to(dtype)
        if dtype.itemsize < 4 and not bool(torch.isfinite(values.float()).all()):
            raise UsageError(
                f"{what}: after filter {last}, {spec.name!r} has values that {dtype} cannot represent.",
                "Send the tensor in a wider dtype, or make its values smaller.",
            )
        yield values


@dataclass(eq=False)
class _Cursor:
    """Reads ranges of elements from a stream. For a range before the current position, the stream starts again."""

    stream: Stream
    position: int = 0
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    chunks: Iterator[memoryview] | None = None

    def run(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the stream, in new memory."""
        size = self.stream.itemsize
        if self.chunks is None or start * size < self.position:
            self.chunks, self.position, self.rest = self.stream.runs(), 0, memoryview(b"")
        out = torch.empty(stop - start, dtype=self.stream.dtype)
        self._read(None, start * size - self.position)
        self._read(bytes_of(out), (stop - start) * size)
        if stop * size == self.stream.nbytes:
            for _ in self.chunks:  # the stream raises here if it has too many bytes
                pass
            self.chunks = None
        return out

    def _read(self, into: memoryview | None, count: int) -> None:
        assert self.chunks is not None
        done = 0
        while done < count:
            if not self.rest:
                self.rest = next(self.chunks)  # the stream raises here if it has too few bytes
            run, self.rest = self.rest[: count - done], self.rest[count - done :]
            if into is not None:
                into[done : done + len(run)] = run
            done += len(run)
        self.position += count


def _as_usage_error(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except BadFilter as error:
        remedy = "Check its code." if error.raised else "Return as many elements, all finite, with the same dtype."
        raise UsageError(f"{what}: the filter {error}.", remedy) from error.__cause__
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", error.remedy) from error
