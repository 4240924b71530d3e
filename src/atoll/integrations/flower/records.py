"""Flower's records as payloads of tasks, and back.

    RecordDict({"arrays": ArrayRecord, "metrics": MetricRecord})
      payload  [["arrays", "arrays", [["w", array], …]], ["metrics", "metrics", [["loss", 0.5]]]]

An array of numbers travels as a tensor. Any other one, of strings or of a serialization of the app's own, travels as
its bytes, with dtype, shape and name of the serialization.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from atoll.errors import BadRequest, UsageError
from atoll.tensors.arrays import as_tensor
from atoll.tensors.dtypes import NOT_IN_NUMPY
from atoll.tensors.lazy_tensors import LazyTensor

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
except ImportError as error:
    raise UsageError("Flower is not installed.", "pip install 'atoll[flower]'.") from error

NDArray = np.ndarray[Any, Any]

NUMPY = "numpy.ndarray"
"""Flower's name for the serialization by `numpy.save`."""
NUMBERS = "biufc"
"""Kinds of NumPy dtypes that travel as tensors."""
warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes into a message that is sent
_REMEDY = "Use the same version of Atoll at the server and at all sites."


class HeldArray(Array):
    """An array that is serialized only if the app asks for its bytes.

    Args:
        held: the values; or, of an array on disk, what reads them.
    """

    def __init__(self, held: NDArray | LazyTensor) -> None:
        self._held = held
        if isinstance(held, LazyTensor):
            self.dtype, self.shape = str(_as_numpy(torch.empty(0, dtype=held.dtype)).dtype), tuple(held.shape)
        else:
            self.dtype, self.shape = str(held.dtype), tuple(held.shape)
        self.stype = NUMPY

    def __getattr__(self, name: str) -> Any:
        """Return the array as `numpy.save` writes it, which Flower's own arrays have as `data`."""
        if name != "data":
            raise AttributeError(name)
        with io.BytesIO() as file:
            np.save(file, self.held)
            return file.getvalue()

    @property
    def held(self) -> NDArray:
        """The values, not to be changed. Those of an array on disk are read anew each time."""
        return _as_numpy(self._held.resolve()) if isinstance(self._held, LazyTensor) else self._held

    def numpy(self) -> NDArray:
        """Return the values in new memory."""
        return self.held.copy() if isinstance(self._held, np.ndarray) else self.held


def _as_numpy(tensor: Tensor) -> NDArray:
    """Return a tensor's values, over the same memory where NumPy has its dtype; those of bf16 as fp32."""
    return (tensor.float() if tensor.dtype in NOT_IN_NUMPY else tensor).numpy()


def to_payload(records: RecordDict) -> list[Any]:
    """Return records as the payload of a task. The memory of arrays is shared where that is possible.

    Raises:
        UsageError: one of them is of a type that Flower does not have.
    """
    return [[name, *_record(name, record)] for name, record in records.items()]


def _record(name: str, record: object) -> list[Any]:
    match record:
        case ArrayRecord():
            return ["arrays", [[key, _sent(array)] for key, array in record.items()]]
        case MetricRecord():
            return ["metrics", [[key, _plain(value)] for key, value in record.items()]]
        case ConfigRecord():
            return ["config", [[key, _plain(value)] for key, value in record.items()]]
    raise UsageError(
        f"The record {name!r} is of type {type(record).__name__}.", "Use an ArrayRecord, MetricRecord or ConfigRecord."
    )


def _sent(array: Array) -> Any:
    if array.stype == NUMPY:
        values = array.held if isinstance(array, HeldArray) else _loaded(array.data)
        if isinstance(values, Tensor) or values.dtype.kind in NUMBERS:
            return values
    return {
        "dtype": array.dtype,
        "shape": list(array.shape),
        "stype": array.stype,
        "data": np.frombuffer(array.data, np.uint8),
    }


def tensor_of(name: str, array: Array) -> Tensor:
    """Return the values of an array that a ClientApp has replied with, if possible over the same memory.

    Raises:
        UsageError: its elements are no numbers.
    """
    values = _sent(array)
    if isinstance(values, dict):
        raise UsageError(f"The array {name!r} has elements of {array.dtype or array.stype}.", "Reply with numbers.")
    return as_tensor(name, values)


def _loaded(data: bytes) -> NDArray | Tensor:
    """Return the array that `numpy.save` has written, if possible over the same memory: a large model is not copied."""
    with io.BytesIO(data) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise UsageError("An array has Python objects as elements.", "Send numbers, strings or bytes.")
        of_torch = getattr(torch, dtype.name, None) if dtype.isnative else None
        if isinstance(of_torch, torch.dtype) and 0 not in shape and not is_fortran:
            return torch.frombuffer(data, dtype=of_torch, offset=file.tell()).view(shape)
        file.seek(0)
        return cast(NDArray, np.load(file))


def _plain(value: Any) -> Any:
    """Return a value of a record as Python's own type: apps put NumPy's into records, too."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    kinds: tuple[type[Any], ...] = (bool, int, float, str, bytes)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)


def from_payload(payload: Any) -> RecordDict:
    """Return the records of a payload that `to_payload` made. A `LazyTensor` becomes an array that is read when needed.

    Raises:
        BadRequest: it is not such a payload.
    """
    records = RecordDict()
    try:
        for name, kind, items in payload:
            records[name] = _READ[kind](items)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"The message has no valid records: {error}.", _REMEDY) from None
    return records


def array_record(items: Iterable[tuple[str, Any]]) -> ArrayRecord:
    """Return a record of names and tensors; those on disk are read when the app asks for their values."""
    record = ArrayRecord()
    for key, value in items:  # its constructor would copy the bytes of each array
        record[key] = _array(value)
    return record


def _array(value: Any) -> Array:
    if isinstance(value, Tensor):
        return HeldArray(_as_numpy(value))
    if isinstance(value, np.ndarray | LazyTensor):
        return HeldArray(value)
    data = value["data"].resolve().numpy() if isinstance(value["data"], LazyTensor) else value["data"]
    return Array(value["dtype"], tuple(value["shape"]), value["stype"], data.tobytes())


_READ: dict[str, Callable[[Any], Any]] = {
    "arrays": array_record,
    "metrics": lambda items: MetricRecord(dict(items)),
    "config": lambda items: ConfigRecord(dict(items)),
}
