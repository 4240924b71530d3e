"""Arrays of other libraries as tensors."""

from __future__ import annotations

import numpy as np

from atoll.tensors.arrays import as_tensor


def test_an_array_that_can_be_shared_is_not_copied() -> None:
    array = np.zeros(3, dtype=np.float32)
    tensor = as_tensor("x", array)
    array[0] = 4.0
    assert tensor[0].item() == 4.0
