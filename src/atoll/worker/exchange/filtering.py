"""A site's filters, between the model and the outbox, or between an answer to a task and its file: each run passes
through all of them, in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from torch import Tensor

from atoll.errors import UsageError
from atoll.filters.base import About, BadFilter, Chain, Filter
from atoll.filters.payload_filter import ByTask, filtered, for_tasks
from atoll.tensors.chunks import run_of
from atoll.tensors.dtypes import accumulate_dtype
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.payload import Packed
from atoll.tensors.schema import CONTROL
from atoll.worker.exchange.base_and_outbox import BaseFile

T = TypeVar("T")


class Filtered:
    """The change of a model as it leaves the site.

    Args:
        filters: in their order.
        base: the version that was trained from.
        tensors: the model's own, by name; not changed.
        about: the update's metadata.
        model: names of all tensors of the model, where the update is of one fragment of it.

    Raises:
        UsageError: what a filter's `begin` raised, naming the filter.
    """

    def __init__(
        self, filters: Sequence[Filter], base: BaseFile, tensors: Tensors, about: About, model: Collection[str] = ()
    ) -> None:
        self._base, self._tensors = base, tensors
        specs = {each.spec.name: each.spec for each in base.layout.segments if each.spec.group != CONTROL}
        raw = partial(_raw, base, tensors)  # no method: a cycle would hold the model until the collector runs
        self._chain = _told(lambda: Chain(filters, specs, about, raw, model=model))

    def sends(self, name: str) -> bool:
        """Whether every filter keeps this tensor."""
        return self._chain.sends(name)

    def change(self, name: str, start: int, stop: int) -> Tensor:
        """version − local [stop − start] of a float tensor, behind every filter; zeros where one does not keep it.

        Raises:
            UsageError: a filter does not keep to its contract; it and the tensor are named.
        """
        return _told(partial(self._chain.change, name, start, stop))

    def value(self, name: str, start: int, stop: int) -> Tensor:
        """What a buffer [stop − start] is said to have become."""
        if not self.sends(name):
            return self._base.values_of(name, start, stop)
        local = run_of(self._tensors[name], start, stop).cpu()
        if not self._chain.specs[name].is_float:
            return local
        taken = _told(partial(self._chain.taken, name, start, stop))
        return taken.add_(local)  # its own value, to the bit, where no filter changed it


def _raw(base: BaseFile, tensors: Tensors, name: str, start: int, stop: int) -> Tensor:
    """The change as it was trained, in new memory."""
    wide = accumulate_dtype(base.layout.by_name[name].spec.dtype)
    values = base.values_of(name, start, stop).to(wide)
    return values.sub_(run_of(tensors[name], start, stop).to("cpu", wide))


class AnswerFilters:
    """What the answers of a site pass through.

    Raises:
        UsageError: one is no filter.
    """

    def __init__(self, given: ByTask, site: str) -> None:
        self._entries, self._site = for_tasks(given), site
        self._lock = threading.Lock()  # filters keep state from the beginning of an answer to its end

    @contextmanager
    def behind(self, packed: Packed, task: str) -> Iterator[Packed]:
        """An answer as it is to travel; it is written within.

        Raises:
            UsageError: a filter failed, here or while it is written; filter, site, task and tensor are named.
        """
        filters = [each for each, tasks in self._entries if not tasks or task in tasks]
        with self._lock:
            what = f"The answer of site {self._site} to task {task!r} is not sent"
            yield filtered(packed, filters, About(self._site, task=task), what)


def _told(call: Callable[[], T]) -> T:
    try:
        return call()
    except BadFilter as error:
        if error.raised:
            raise UsageError(
                f"The filter {error}. The update is not completed.",
                "Its traceback is above. Mend the filter, and start this site again.",
            ) from error.__cause__
        raise UsageError(
            f"The filter {error}.",
            "A filter returns as many elements as it was given, of the same dtype; this update does not count.",
        ) from None
