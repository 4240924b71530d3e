"""Read a data set: its length, one value of each example, some of its examples.

A data set is a torch `Dataset` with a length, a `datasets.Dataset`, an array or tensor, a list, or just a number of
examples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.errors import UsageError
from atoll.format_text import shown
from atoll.registry import nearest

By = str | int | Callable[[Any], Any] | Sequence[Any] | NDArray[Any]
"""One value of each example: a column or attribute, a position in the example, a function of it, or all values."""

LABELS = ("label", "labels", "targets")
"""Columns and attributes in which labels are looked for."""
EXPLAINED = "Give by=: the name of a column or attribute, a function of an example, or one value for each example."


def count_of(data: Any) -> int:
    """Return the number of examples.

    Raises:
        UsageError: the data set has no length, or has no examples.
    """
    try:
        count = data if isinstance(data, int) and not isinstance(data, bool) else len(data)
    except TypeError:
        raise UsageError(
            f"A data set of type {type(data).__name__} has no length, so it cannot be split.",
            "Give a data set with a length, the labels as an array, or the number of examples.",
        ) from None
    if count < 1:
        raise UsageError(f"The data set has {count} examples.", "Give a data set with at least one example.")
    return int(count)


def values_of(data: Any, by: By | None) -> NDArray[Any]:
    """Return one value for each example: its label or, with `by`, another attribute.

    Raises:
        UsageError: there is no such attribute, a value is missing or NaN, or the number of values is wrong.
    """
    values = np.asarray(_host(_labels(data) if by is None else _attribute(data, by)))
    what = "labels" if by is None else f"values of {by!r}" if isinstance(by, str | int) else "values in by"
    if values.ndim != 1 or len(values) != count_of(data):
        raise UsageError(
            f"The {what} have the shape {list(values.shape)}, but the data set has {count_of(data)} examples.",
            "Give one value for each example.",
        )
    kind = values.dtype.kind
    lacks = np.isnan(values) if kind in "fc" else np.array([each is None or each != each for each in values])
    if kind in "fcO" and lacks.any():
        raise UsageError(
            f"{int(lacks.sum())} of {len(values)} {what} are missing or NaN, the first one at index {lacks.argmax()}.",
            "Fill them, or leave these examples out.",
        )
    return values if kind != "O" else values.astype(str)


def taken(data: Any, indices: list[int]) -> Any:
    """Return the examples with these indices, as the same kind of data set; of a torch `Dataset`, a `Subset`.

    Raises:
        UsageError: the data set is only a number.
    """
    if isinstance(data, int):
        raise UsageError("Only the number of examples was split, so there are none to take.", "Use the indices.")
    if hasattr(data, "column_names") and hasattr(data, "select"):
        return data.select(indices)
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return data[indices]
    if "torch" in sys.modules:
        from torch.utils.data import Dataset, Subset

        if isinstance(data, Dataset):
            return Subset(data, indices)
    return [data[index] for index in indices]


def _labels(data: Any) -> Any:
    if hasattr(data, "column_names"):
        if (name := next((each for each in LABELS if each in data.column_names), None)) is None:
            raise UsageError(f"None of the columns {', '.join(data.column_names)} is named label.", EXPLAINED)
        return _attribute(data, name)
    for name in LABELS:
        if (found := getattr(data, name, None)) is not None and not callable(found):
            return found
    if _is_subset(data):
        return values_of(data.dataset, None)[data.indices]
    if isinstance(tensors := getattr(data, "tensors", None), tuple):  # a TensorDataset
        return tensors[-1]
    if isinstance(data, int):
        raise UsageError("The number of examples was given, but a split by labels needs the labels.", EXPLAINED)
    if hasattr(data, "dtype") or not isinstance(data[0], tuple | list | Mapping):
        return data
    return _attribute(data, 1 if not isinstance(data[0], Mapping) else "label")


def _attribute(data: Any, by: By) -> Any:
    if not isinstance(by, str | int) and not callable(by):
        return by
    if isinstance(data, int):
        raise UsageError(f"The number of examples was given, so there is no {shown(by)} of them.", EXPLAINED)
    if hasattr(data, "column_names") and isinstance(by, str):
        if by not in data.column_names:
            raise UsageError(
                f"The data set has no column {by!r}.",
                nearest(by, data.column_names, f"Its columns are {', '.join(data.column_names)}."),
            )
        return data.with_format("numpy")[by][:]
    if _is_subset(data):
        return values_of(data.dataset, by)[data.indices]
    if isinstance(by, str) and (found := getattr(data, by, None)) is not None and not callable(found):
        return found
    try:
        return [_host(_value(data[index], by)) for index in range(count_of(data))]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        if callable(by):
            raise
        first = data[0]
        names = [*first] if isinstance(first, Mapping) else list(getattr(first, "_fields", ()))
        known = f"An example has {', '.join(map(str, names))}." if names else EXPLAINED
        raise UsageError(f"The examples have no {by!r}.", nearest(str(by), map(str, names), known)) from error


def _value(example: Any, by: str | int | Callable[[Any], Any]) -> Any:
    if callable(by):
        return by(example)
    if isinstance(by, str) and not isinstance(example, Mapping):
        return getattr(example, by)
    return example[by]


def _is_subset(data: Any) -> bool:
    return hasattr(data, "dataset") and hasattr(data, "indices")


def _host(value: Any) -> Any:
    """Return a tensor as an array, and any other value as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value
