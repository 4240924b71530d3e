"""`Partition`: which examples of a data set each site has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from atoll.data.read_values import By, taken, values_of
from atoll.errors import ConfigError, UsageError, public_api
from atoll.registry import nearest

MOST_VALUES = 16
"""A table and a plot show each value of an attribute by itself if there are at most so many."""
MOST_ROWS = 40
"""Sites that a table shows."""


@public_api
class Partition(Sequence[list[int]]):
    """The indices of each site, in ascending order. Every index of the data set belongs to exactly one site.

    A site is named by its number or its name: `parts[2]`, `parts["site-0002"]`.

    Args:
        data: the data set.
        names: the names of the sites.
        parts: the indices of each site.
        by: what the data set was split by; None: nothing, or its labels.

    Attributes:
        names: the names of the sites.
    """

    def __init__(
        self, data: Any, names: Sequence[str], parts: Iterable[NDArray[np.int64]], by: By | None = None
    ) -> None:
        self.names = tuple(names)
        self._data, self._by = data, by
        self._parts = [sorted(np.asarray(part, np.int64).tolist()) for part in parts]

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, site: int | str) -> list[int]: ...
    @overload
    def __getitem__(self, site: slice) -> list[list[int]]: ...
    def __getitem__(self, site: int | str | slice) -> list[int] | list[list[int]]:
        if not isinstance(site, str):
            return self._parts[site]
        if site not in self.names:
            some = ", ".join(self.names[:5]) + (", …" if len(self.names) > 5 else "")
            raise UsageError(
                f"The data was not split for a site {site!r}.",
                nearest(site, self.names, f"It was split for {some}; name the sites with sites=[...]."),
            )
        return self._parts[self.names.index(site)]

    @property
    def sizes(self) -> list[int]:
        """The number of examples of each site."""
        return [len(part) for part in self._parts]

    def subset(self, site: int | str) -> Any:
        """Return the examples of a site.

        Of a torch `Dataset`, this is a `Subset`; of `datasets`, arrays, tensors and lists, it is one of the same kind.

        Raises:
            UsageError: the data was not split for this site, or only the number of examples was split.
        """
        return taken(self._data, self[site])

    def counts(self, by: By | None = None) -> dict[str, dict[Any, int]]:
        """Return site → value → number of the site's examples with this value.

        Args:
            by: the attribute, as for the functions that split; None: that by which the data was split, or its labels.

        Raises:
            UsageError: there is no such attribute.
        """
        values, matrix = self._counted(by)
        return {
            name: {value: int(count) for value, count in zip(values.tolist(), row, strict=True)}
            for name, row in zip(self.names, matrix, strict=True)
        }

    def _counted(self, by: By | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return all values, sorted, and the numbers of examples [site, value]."""
        values, codes = np.unique(values_of(self._data, self._by if by is None else by), return_inverse=True)
        return values, np.stack([np.bincount(codes[part], minlength=len(values)) for part in self._parts])

    def _shown(self, by: By | None) -> tuple[list[str], NDArray[np.int64]] | None:
        """Return the values to show and their numbers; None if the data has no labels, or too many values."""
        try:
            values, matrix = self._counted(by)
        except UsageError:
            if by is not None or self._by is not None:
                raise
            return None
        return ([str(value) for value in values], matrix) if len(values) <= MOST_VALUES else None

    def table(self, by: By | None = None, rows: int = MOST_ROWS) -> str:
        """Return a table as text: for each site, its number of examples, and how many of them have which value.

        Args:
            by: the attribute, as for `counts`.
            rows: the number of sites to show; a last line says how many more there are.

        Raises:
            UsageError: there is no such attribute.
        """
        found = self._shown(by)
        values, matrix = found if found is not None else ([], np.zeros((len(self), 0), np.int64))
        lines = [["site", "examples", *values]]
        for name, size, row in zip(self.names[:rows], self.sizes, matrix, strict=False):
            lines.append([name, str(size), *(str(count) if count else "·" for count in row)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        more = len(self) - rows
        return "\n".join([*text, f"… and {more} more site{'s' * (more > 1)}"] if more > 0 else text)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        sizes = self.sizes
        return f"<Partition of {sum(sizes)} examples over {len(self)} sites, {min(sizes)} to {max(sizes)} each>"

    def plot(self, by: By | None = None, axes: Any = None) -> Any:
        """Draw a bar for each site, with a colour for each value, and return matplotlib's axes.

        Args:
            by: the attribute, as for `counts`.
            axes: the axes to draw into; by default new ones.

        Raises:
            ConfigError: matplotlib is not installed.
            UsageError: there is no such attribute.
        """
        try:
            from matplotlib import colormaps, pyplot
        except ImportError:
            raise ConfigError("A plot needs matplotlib.", "pip install 'atoll[demo]', or use table().") from None
        found = self._shown(by)
        values, matrix = found if found is not None else ([""], np.array(self.sizes)[:, None])
        if axes is None:
            axes = pyplot.subplots(figsize=(7, 1 + 0.3 * min(len(self), MOST_ROWS)), layout="constrained")[1]
        colours = colormaps["tab10" if len(values) <= 10 else "tab20"]
        begins = np.zeros(len(self), np.int64)
        for number, value in enumerate(values):
            axes.barh(range(len(self)), matrix[:, number], left=begins, color=colours(number), label=value)
            begins += matrix[:, number]
        axes.set_yticks(range(len(self)), self.names)
        axes.invert_yaxis()
        axes.set_xlabel("examples")
        if len(values) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        return axes
