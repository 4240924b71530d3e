"""What the passes of a run have in common: made by the first, kept for the next ones."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.aggregation.outer_state import Entries, entries
from atoll.aggregation.scratch import Scratch
from atoll.aggregation.windows import Places, Windows
from atoll.codecs.base import Codec
from atoll.outer_optimizers.torch_optimizer import Granularity
from atoll.tensors.layout import Layout


class Tables:
    """Where everything lies, for passes over one version and one state layout; one pass at a time.

    They have a few entries per tensor and per part, however large a tensor is.

    Args:
        granularity: of the outer optimizer.
        codecs: by name, all that updates' layouts name.
        state: layout of the state file; None where nothing is kept.
    """

    windows: Windows
    places: Places
    scratch_elements: int

    def __init__(self, granularity: Granularity, codecs: Mapping[str, Codec], state: Layout | None) -> None:
        self._granularity, self._codecs = granularity, codecs
        self.entries: Entries = entries(state)
        self._cut: tuple[int, int] | None = None

    def cut(self, max_elements: int, rows_at_once: int) -> None:
        """Have windows of at most so many elements, of which so many rows are in memory together."""
        if self._cut == (max_elements, rows_at_once):
            return
        self._cut = (max_elements, rows_at_once)
        self.scratch_elements = max_elements * rows_at_once
        self.windows = Windows(max_elements, self._granularity)
        self.places = Places(self._codecs, Scratch(self.scratch_elements).nbytes)
