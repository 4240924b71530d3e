"""Answers that several threads of a site give at the same time."""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.blobs.object_file import write_object
from atoll.blobs.payload_cut import Cut
from atoll.filters import Filter, Outgoing
from atoll.tensors.payload import pack
from atoll.worker.exchange.encode_update import AnswerFilters


@pytest.mark.covers("T8")
def test_two_answers_of_one_site_do_not_meet_in_its_filter() -> None:
    """Each is divided by its own first value."""
    meeting = threading.Barrier(2)

    class ByTheFirst(Filter):
        def begin(self, update: Outgoing) -> None:
            self.by = update.changes("w", 0, 1).item()
            with suppress(threading.BrokenBarrierError):  # the other does not come, as it should be
                meeting.wait(0.5)

        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            return values.div_(self.by)

    at_site = AnswerFilters([ByTheFirst()], "a")

    def taken(value: float) -> list[float]:
        with at_site.behind(pack({"w": torch.full((3,), value)}), "train") as mine, tempfile.TemporaryFile() as file:
            head_bytes = write_object(mine, file.fileno(), Cut(2**20)).cuts.head_bytes
            return np.frombuffer(os.pread(file.fileno(), 12, head_bytes), np.float32).tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(taken, [2.0, 4.0])) == [[1.0] * 3] * 2
