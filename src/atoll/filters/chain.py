"""Several filters, one behind the other, over the runs of one update or payload."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from atoll.errors import AtollError
from atoll.filters.base import About, Filter, Outgoing
from atoll.tensors.dtypes import accumulate_dtype
from atoll.tensors.schema import TensorSpec


class BadFilter(Exception):
    """A filter raised, or gave what it may not.

    Attributes:
        filter: which one.
        what: what it did, as words that follow its name.
        raised: whether it raised; what it raised is the cause.
    """

    def __init__(self, filter_: Filter, what: str, *, raised: bool) -> None:
        super().__init__(f"{filter_!r} {what}")
        self.filter, self.what, self.raised = filter_, what, raised


class Chain:
    """The change of an update, or what a payload holds, behind every filter.

    Args:
        filters: in their order; `begin` of each is called here.
        specs: by name, the tensors that filters see.
        about: the metadata.
        raw: (name, start, stop) → those elements of version − local, or of the payload, before any filter, in new
            memory, in the dtype of accumulation.
        aliases: further name → name; a tensor is kept under all its names, or not at all.
        model: names of all tensors of the model, where the update is of one fragment of it.
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
        """The elements [stop − start] of a float tensor behind every filter; zeros where one does not keep it.

        Raises:
            BadFilter: one raised, gave another shape or dtype, or what is not finite.
        """
        if name not in self._kept:
            return torch.zeros(stop - start, dtype=accumulate_dtype(self.specs[name].dtype), device="cpu")
        return self._behind(name, start, self._raw(name, start, stop), len(self._filters))

    def taken(self, name: str, start: int, stop: int) -> Tensor:
        """What the filters have taken off the change of a tensor that is sent: before − behind."""
        raw = self._raw(name, start, stop)
        return raw.sub_(self._behind(name, start, raw.clone(), len(self._filters)))

    def _behind(self, name: str, start: int, values: Tensor, count: int) -> Tensor:
        """What the first `count` filters make of `values`, which they may change."""
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
