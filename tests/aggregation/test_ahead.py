"""Threads that no part is left for reduce the windows that come next: the same bits, in order, and nobody is left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_world import CODECS, REDUCERS, World

from atoll.aggregation import make_version
from atoll.aggregation.decode_updates import Updates
from atoll.aggregation.make_version import LEAST_ELEMENTS, Ahead, PassOutputs, elements_for, helpers_for, run_pass
from atoll.aggregation.scratch import Scratch
from atoll.errors import StateCorrupt
from atoll.outer_optimizers import build_outer
from atoll.reducers.robust import Median
from atoll.tensors.layout import TILE, version_layout
from atoll.tensors.schema import Schema, TensorSpec

WEIGHTS = tuple(1.0 + site / 7 for site in range(9))
DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("threads", "parts", "updates", "helpers"),
    [
        (1, 1, 200, 0),
        (2, 1, 200, 2),
        (8, 1, 100, 8),
        (8, 1, 99, 0),  # done about as soon as they are told
        (8, 3, 200, 2),
        (8, 4, 200, 2),
        (8, 5, 200, 0),  # one each would only wait for the other
        (8, 100, 200, 0),
    ],
)
def test_a_pass_has_as_many_helpers_as_its_threads_allow(threads: int, parts: int, updates: int, helpers: int) -> None:
    assert helpers_for(threads, parts, updates) == helpers


def test_windows_are_cut_so_that_every_helper_has_one() -> None:
    assert elements_for(2, 1_000_000) == 625_000  # two of 500,000, and room for a bias
    assert elements_for(4, 1_000_000) == 312_500
    assert elements_for(8, 1_000) == LEAST_ELEMENTS


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Nine updates are many; the names of threads that have reduced."""
    monkeypatch.setattr(make_version, "MANY_UPDATES", len(WEIGHTS))
    names: list[str] = []
    reduce_ = Updates.reduce_

    def seen(self: Updates, *asked: Any) -> None:
        names.append(threading.current_thread().name)
        assert torch.get_num_threads() == 1
        reduce_(self, *asked)

    monkeypatch.setattr(Updates, "reduce_", seen)
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # what a new thread takes that does not stay alone
    yield names
    torch.set_num_threads(before)


@pytest.mark.parametrize("target", ["sgd", "adam", torch.optim.Adafactor])
@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("reducers", [REDUCERS, REDUCERS | {"params": Median()}], ids=["mean", "median"])
def test_they_change_no_bit(tmp_path: Path, few: list[str], target: object, codec: str, reducers: Any) -> None:
    results = []
    for threads in (1, 200):
        folder = tmp_path / str(threads)
        folder.mkdir()
        world = World(folder, target=target, options={"lr": 0.1}, codec=codec, weights=WEIGHTS)
        done = []
        few.clear()
        for number in (1, 2):
            inputs, outputs = world.inputs(), PassOutputs(world.open(f"v{number}"), world.open(f"s{number}"))
            world.result = run_pass(
                inputs, outputs, world.rule, reducers, CODECS, threads=threads, chunk_elements=2 * TILE
            )
            world.number, world.base, world.state_fd = number, outputs.version_fd, outputs.state_fd
            done.append((world.result.digest, world.result.state_digests, world.result.grad_norm))
        results.append(done)
        helped = {name.rsplit("_", 1)[0] for name in few if name.startswith("atoll-ahead")}
        assert bool(helped) == (threads > 1 and reducers is REDUCERS)  # none where all rows are taken together
    assert results[0] == results[1]


@pytest.mark.covers("D1")
@pytest.mark.parametrize("threads", [1, 2, 200])
def test_a_pass_gives_its_memory_back_without_the_collector(tmp_path: Path, few: list[str], threads: int) -> None:
    world = World(tmp_path, weights=WEIGHTS)
    gc.collect()
    before = sum(type(each) is Scratch for each in gc.get_objects())
    gc.disable()
    try:
        world.round(threads=threads, chunk_elements=TILE)
        after = sum(type(each) is Scratch for each in gc.get_objects())
    finally:
        gc.enable()
    assert after == before


@pytest.mark.covers("D1")
def test_windows_of_a_large_part_are_cut_for_helpers(tmp_path: Path, few: list[str]) -> None:
    """One part of 240,000 elements, which one window has room for; two helpers, so two windows."""
    schema = Schema.build(TensorSpec(f"w{index}", "F32", (40_000,)) for index in range(6))
    world = World(tmp_path, schema=schema, weights=WEIGHTS)
    layout = version_layout(schema, 2**24)
    inputs = replace(world.inputs(), version_layout=layout, base_digests=None, state_layout=None, state_header=b"")
    outputs = PassOutputs(world.open("v1"), None)
    run_pass(inputs, outputs, build_outer("sgd", {"lr": 1.0}), REDUCERS, CODECS, threads=2)
    by_helpers = [name.startswith("atoll-ahead") for name in few]
    assert by_helpers == [True, True]  # 150,000 elements at most: three tensors and three


def reducing() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("atoll-ahead", "atoll-pass"))]


def test_what_one_of_them_raises_ends_the_pass_and_all_of_them(tmp_path: Path, few: list[str]) -> None:
    world = World(tmp_path, weights=WEIGHTS)
    inputs = world.inputs()
    (tmp_path / "u0.5").open("r+b").truncate(world.update_layout.nbytes // 2)
    outputs = PassOutputs(world.open("v1"), world.open("s1"))
    with pytest.raises(StateCorrupt, match="ends before byte"):
        run_pass(inputs, outputs, world.rule, REDUCERS, CODECS, threads=200, chunk_elements=TILE)
    assert reducing() == []


def test_the_next_windows_are_reduced_meanwhile_and_none_is_written_over() -> None:
    """While the first is looked at, helpers have reduced as many more as there is memory for, and none beyond."""
    begun = {number: threading.Event() for number in range(6)}

    def reduce_(window: Any, scratch: Scratch) -> None:
        scratch.view("reduced", 1)[0] = window
        begun[window].set()

    with ThreadPoolExecutor(2) as pool:
        mine = Ahead(reduce_, Scratch(TILE), pool, 2, TILE)
        coming: Any = range(6)
        for number, (window, scratch) in enumerate(mine.of(coming)):
            for other in range(number, min(number + 3, 6)):
                assert begun[other].wait(DEADLINE_S)
            assert not any(begun[other].is_set() for other in range(number + 3, 6))
            assert (window, scratch.view("reduced", 1)[0]) == (number, number)
    assert all(each.is_set() for each in begun.values())


def test_without_helpers_each_is_reduced_when_it_is_asked_for() -> None:
    asked: list[int] = []
    own = Scratch(TILE)

    def reduce_(window: Any, scratch: Scratch) -> None:
        assert scratch is own
        asked.append(window)

    mine = Ahead(reduce_, own, None, 0, TILE)
    coming: Any = range(3)
    windows = mine.of(coming)
    assert next(windows) == (0, own)
    assert asked == [0]
    assert [window for window, _ in windows] == [1, 2]
    assert asked == [0, 1, 2]
