"""Payloads behind filters: by which names, to the bit where nothing is changed, in a few runs of memory."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from harness.proxy import Proxy
from kit import Threads
from kit.filters import Halved
from kit.workflows import run_workflow, workflow_server
from torch import Tensor

import atoll
from atoll.errors import UsageError
from atoll.filters import CHUNK_ELEMENTS, Cast, Drop, Filter, NormClip, Outgoing
from atoll.objects import Stream, register
from atoll.testing.contracts import MORE_BYTES, peak_growth

pytestmark = pytest.mark.covers("T8")


class Answers:
    """A site of a run, whose answers pass filters of its own.

    Attributes:
        proxy: what the site's requests pass.
    """

    def __init__(self, controller: Any, proxy: Proxy) -> None:
        self._controller, self.proxy = controller, proxy

    def send(self, tree: Any, filters: list[Filter]) -> Any:
        """The server's result of a task that the site answers with this tree."""

        def site() -> None:
            with atoll.tasks(self.proxy.url, "a", filters=filters) as worker:
                task = next(worker.tasks())
                try:
                    task.answer(tree)
                except UsageError as error:
                    task.fail(error)

        answering = Threads(site)
        result = self._controller.send("a", "train", None, timeout_s=60)
        answering.join()
        return result

    def __call__(self, tree: Any, filters: list[Filter]) -> Any:
        """What the server has of an answer."""
        return self.send(tree, filters).payload

    def bytes_of_last(self) -> int:
        """Bytes of the object of the last answer."""
        bodies = [body for line, body in self.proxy.posted if line.startswith("POST /v1/objects ")]
        return int(json.loads(bodies[-1])["nbytes"])


@pytest.fixture(scope="module")
def arrived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """What arrives of a site's answers, in one run."""
    begun, over = Queue[Any](), threading.Event()

    def main(controller: Any) -> None:
        begun.put(controller)
        assert over.wait(600)

    with workflow_server(tmp_path_factory.mktemp("run"), main) as server, Proxy(server.port) as proxy:
        yield Answers(begun.get(timeout=30), proxy)
        over.set()
        assert server.wait(30)


@dataclass
class Series:
    """Of the user's own: its values are made while they travel, in chunks that end where no run does."""

    count: int
    step: int = 1000

    def chunks(self) -> Iterator[Tensor]:
        for start in range(0, self.count, self.step):
            yield torch.arange(start, min(start + self.step, self.count), dtype=torch.float32)


register(
    Series,
    "filtered.series",
    lambda series: {"values": Stream(torch.float32, (series.count,), series.chunks), "step": series.step},
    lambda sent: [sent["values"].resolve(), sent["step"]],
)


def test_a_filter_sees_tensors_by_their_path(arrived: Answers) -> None:
    """A filter gets each tensor of a payload under its path in the payload."""
    # In a flat dict, the path is the key. Numbers, also those of NumPy, do not count as tensors.
    names: list[str] = []

    class Named(Filter):
        def begin(self, update: Outgoing) -> None:
            names.extend(update.tensors)

    one, two, three, four = (torch.full((1,), float(number)) for number in range(4))
    tree = {"model": {"w": one, "layers": [two, {"b": np.ones(2)}]}, 7: (three,), "n": np.float64(2.0), "$": four}
    for payload, expected in (
        ({"head.w": one, "head.b": two}, ["head.b", "head.w"]),
        (tree, ["$", "7.0", "model.layers.0", "model.layers.1.b", "model.w"]),
        (one, ["payload"]),
        ({"s": Series(3)}, ["s.values"]),
    ):
        names.clear()
        arrived(payload, [Named()])
        assert sorted(names) == expected


def test_two_tensors_with_one_path_are_refused(arrived: Answers) -> None:
    """If two tensors of a payload have the same path, a payload with a filter is not sent. Without a filter, it is
    sent.
    """
    tree = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    error = arrived.send(tree, [Halved()]).error
    assert re.search(r"was not sent: Two tensors of the payload have the name 'a.b'", error), error
    assert repr(arrived(tree, [])) == repr(tree)  # no filter needs names


@pytest.mark.covers("T1")
def test_a_filter_that_changes_nothing_changes_no_bit(arrived: Answers) -> None:
    """A filter that returns its values unchanged does not change a bit of the payload."""
    # It reads floating-point tensors in chunks. Integers, numbers and second uses of a shared tensor do not reach the
    # filter.
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(CHUNK_ELEMENTS + 5, generator=generator)
    shared = large[:7].clone()
    tree = {
        "large": large,
        "across": torch.randn(30, 20, generator=generator).t(),
        "narrow": [large[:9].bfloat16(), large[:9].half(), large[:9].to(torch.float8_e4m3fn), large[:9].double()],
        "arrays": (np.arange(5.0), np.arange(5, dtype=np.int16), np.float32(2.5)),
        "whole": torch.arange(3),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "again": (shared, shared),
        "plain": (1, 0.5, "x", b"\x00", None),
    }

    class Same(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            seen.append((name, start, len(values)))
            return values

    seen: list[tuple[str, int, int]] = []
    found = arrived(tree, [Same()])
    assert repr(found) == repr(tree)
    assert torch.equal(found["large"], large)
    assert torch.equal(found["across"], tree["across"])
    assert found["again"][0] is found["again"][1]
    assert [each for each in seen if each[0] == "large"] == [("large", 0, CHUNK_ELEMENTS), ("large", CHUNK_ELEMENTS, 5)]
    assert {name for name, _, _ in seen} >= {"across", "narrow.3", "arrays.0", "scalar", "again.0"}
    assert not {"arrays.1", "arrays.2", "whole", "again.1"} & {name for name, _, _ in seen}


def test_built_in_filters_work_on_payloads(arrived: Answers) -> None:
    """The filters of Atoll work on the tensors of a payload: they clip, cast and add noise."""
    # (3, 4) and 12 have the norm 13, of which half is left. An integer and a NumPy number stay as they are.
    tree = {"w": torch.tensor([3.0, 4.0]), "b": np.array([12.0]), "n": torch.tensor(100), "loss": np.float64(100.0)}
    found = arrived(tree, [NormClip(6.5)])
    assert (found["w"].tolist(), found["b"].tolist(), found["n"].item(), found["loss"]) == ([1.5, 2.0], [6.0], 100, 100)
    assert arrived({"w": torch.tensor([1.0 + 2**-10])}, [Cast("bf16")])["w"].item() == 1.0
    noisy = arrived({"w": torch.zeros(1000)}, [NormClip(1.0, noise=2.0)])["w"]
    assert 1.8 < noisy.std().item() < 2.2


@pytest.mark.covers("T1")
def test_a_dropped_tensor_is_not_sent(arrived: Answers) -> None:
    """If a filter drops two tensors of 4 MB, less than 4 KB is sent. The dropped tensors arrive as None."""
    tree = {
        "head": {"w": torch.ones(10**6), "n": torch.tensor(1)},
        "body": [torch.zeros(1), np.ones(2)],
        "lr": np.float32(1),
    }
    found = arrived(tree, [Drop("head.*", "body.0")])
    assert arrived.bytes_of_last() < 4000
    assert found["head"] == {"w": None, "n": None}
    assert found["body"][0] is None
    assert isinstance(found["body"][1], np.ndarray)
    assert found["lr"] == np.float32(1)


def test_tensors_in_two_places_count_once(arrived: Answers) -> None:
    """If a tensor is in two places of a payload, it counts once, and a filter can drop it by either name."""
    # Otherwise, a head tied to the body would be sent under the body's name. (3, 4) has the norm 5, not √50.
    tied = torch.tensor([3.0, 4.0])
    tree = {"body": {"w": tied}, "head": {"w": tied, "b": torch.zeros(1)}}
    for pattern in ("head.*", "head.w", "body.w"):
        found = arrived(tree, [Drop(pattern)])
        assert (found["body"]["w"], found["head"]["w"]) == (None, None)
    found = arrived(tree, [NormClip(2.5)])
    assert found["body"]["w"].tolist() == [1.5, 2.0]
    assert found["body"]["w"] is found["head"]["w"]


def test_a_filter_sees_the_previous_filters_result(arrived: Answers) -> None:
    """A filter sees the tensors as the filters before it left them, and may ask for a whole tensor."""

    class Looking(Filter):
        def begin(self, update: Outgoing) -> None:
            about = update.about
            seen.append((about.site, about.task, about.round, list(update.tensors), update.tensor("w").tolist()))
            seen.append([(name, start, len(values)) for name, start, values in update.runs()])

    seen: list[Any] = []
    tree = {"w": torch.tensor([[2.0], [4.0]]), "head": torch.ones(1), "n": torch.tensor(1)}
    arrived(tree, [Drop("head"), Halved(), Looking()])
    assert seen == [("a", "train", 0, ["w", "n"], [[1.0], [2.0]]), [("w", 0, 2)]]


@pytest.mark.covers("T13")
def test_streams_of_own_types_are_filtered(arrived: Answers) -> None:
    """Filters work on the stream of a user's own type chunk by chunk."""
    # The stream is read three times: for the norm, by a filter that reads its end first, and for sending. 1²+…+4² = 30.

    class Backwards(Filter):
        def begin(self, update: Outgoing) -> None:
            (name,) = update.tensors
            found.append([update.changes(name, at, at + 1).item() for at in (count - 1, 1, 0)])

    found: list[list[float]] = []
    count = CHUNK_ELEMENTS + 7
    values, step = arrived({"s": Series(count)}, [Backwards(), Halved()])["s"]
    assert step == 1000
    assert found == [[count - 1, 1, 0]]
    assert torch.equal(values, torch.arange(count, dtype=torch.float32) / 2)
    values, _ = arrived({"s": Series(5, step=2)}, [NormClip(30**0.5 / 2)])["s"]
    assert values.tolist() == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])


class Grown(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return values * 1e5


MASK = {"mask": torch.tensor([0.0, -torch.inf]), "head": torch.ones(2)}


def test_drop_accepts_infinite_masks(arrived: Answers) -> None:
    """A filter that only drops tensors accepts a payload with a mask of infinities."""
    assert torch.equal(arrived(MASK, [Drop("head")])["mask"], MASK["mask"])


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("tree", "filters", "told"),
    [
        (MASK, [Drop("head"), Halved()], "'mask' has NaN or Inf"),
        ({"w": torch.full((3,), 1e5)}, [Cast("fp16")], r"the filter Cast\('fp16'\) returned NaN or Inf in 'w'"),
        (
            {"w": torch.ones(3)},
            [Drop("v")],
            r"no tensor of the payload matches 'v'.*The name of a tensor is its path",
        ),
        ({"head": torch.ones(3)}, [Drop("haed")], r"matches 'haed'.*Did you mean 'head'\?"),
        ({"w": torch.full((3,), torch.nan)}, [NormClip(1.0)], r"'w' has NaN or Inf before it is filtered"),
        (
            {"h": torch.ones(1, dtype=torch.float16)},
            [Grown()],
            r"after filter Grown\(\), 'h' has values that torch.float16 cannot represent",
        ),
    ],
    ids=["mask", "infinite", "name", "nearest name", "nan", "overflow"],
)
def test_a_filters_error_names_the_tensor(arrived: Answers, tree: Any, filters: list[Filter], told: str) -> None:
    """If a filter cannot be applied or returns wrong values, the error has the filter's name and the tensor's name."""
    error = arrived.send(tree, filters).error
    assert re.search(told, error), error


@pytest.mark.covers("D1")
@pytest.mark.parametrize("filters", [[Halved()], [NormClip(1.0, noise=1.0), Cast("bf16")]], ids=["plain", "norm"])
def test_filtering_takes_little_memory(arrived: Answers, filters: list[Filter]) -> None:
    """Filtering a payload takes only a few chunks of memory, although its two tensors and its stream have 64 MiB
    each.
    """
    tree = {"w": torch.ones(2**24), "across": torch.ones(2**12, 2**12).t(), "s": Series(2**24, step=2**16)}
    arrived({"w": torch.ones(1)}, filters)  # what is loaded once
    assert peak_growth(lambda: arrived.send(tree, filters)) < MORE_BYTES


@pytest.mark.covers("D1")
def test_filtering_answers_takes_little_memory(tmp_path: Path) -> None:
    """When the server filters an answer of 64 MiB, it takes only a few chunks of memory. The filtered half goes to an
    unnamed file on disk.
    """
    tree, growth = {"w": torch.ones(2**24)}, list[int]()  # of the norm 2¹²

    def workflow(controller: Any) -> Any:
        results: list[Any] = [controller.send("a", "train", 1, timeout_s=60)]
        growth.append(peak_growth(lambda: results.append(controller.send("a", "train", None, timeout_s=60))))
        return results[1].payload["w"]

    handlers = {"train": lambda small: {"w": torch.ones(1)} if small else tree}
    tensor = run_workflow(tmp_path, workflow, handlers, filters={"a": [NormClip(2.0**11)]})
    assert torch.equal(tensor, torch.full((2**24,), 0.5))
    assert growth[0] < MORE_BYTES
