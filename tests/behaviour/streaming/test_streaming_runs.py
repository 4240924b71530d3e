"""Streaming runs of real servers and workers: what changes when, what is waited for, what is counted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness.processes import wait_until
from harness.proxy import Fault, Proxy
from streaming_world import (
    Sites,
    build,
    copied,
    expected,
    loop_of,
    names_of,
    require_close,
    serve,
    step_,
    versions,
)

from atoll.filters import Drop, Filter
from atoll.filters.base import Outgoing
from atoll.testing.run import status


@pytest.mark.covers("L7")
@pytest.mark.parametrize("tau", [0, 2])
def test_what_is_not_due_does_not_change_by_a_bit(tmp_path: Path, tau: int) -> None:
    """Looked at within one step: after the optimizer's own work, and after Atoll's hook."""
    seen: list[tuple[dict[str, torch.Tensor], list[torch.Tensor]]] = []

    def look(*_: Any) -> None:
        kept = [value.clone() for state in optimizer.state.values() for value in state.values()]
        seen.append((copied(model), kept))

    merged = []
    with serve(tmp_path, K=3, H=9, tau=tau, alpha=0.5, rounds=2) as server:
        loop = loop_of(server.url, tmp_path)
        model, optimizer = loop.model, loop.optimizer
        optimizer.register_step_post_hook(look)  # the first that is registered is called first
        with loop:
            for step in range(1, 17):
                step_(loop)
                before, state = seen.pop()
                after = copied(model)
                changed = {name for name in before if not torch.equal(before[name], after[name])}
                look()
                assert all(map(torch.equal, state, seen.pop()[1])), "the inner optimizer keeps its state"
                landed = (step - tau) // 3 - 1 if step > tau and (step - tau) % 3 == 0 else None
                allowed = set(names_of(3)[landed % 3]) if landed is not None else set()
                assert changed == allowed, (step, landed)
                merged += [landed] if changed else []
            assert merged == list(range((16 - tau) // 3))
            assert not loop.finished


@pytest.mark.covers("L7")
def test_each_fragment_has_its_turn_once_in_h_steps(tmp_path: Path) -> None:
    """Of H = 60 with K = 3, fragments 0, 1 and 2 are due after 20, 40 and 60 steps, and so on."""
    due: dict[int, list[int]] = {}
    with serve(tmp_path, K=3, H=60) as server, loop_of(server.url, tmp_path) as loop:
        for step in range(1, 141):
            rounds = loop.rounds
            step_(loop)
            if loop.rounds > rounds:
                due[step] = versions(server)
    assert due == {
        20: [1, 0, 0], 40: [1, 1, 0], 60: [1, 1, 1], 80: [2, 1, 1], 100: [2, 2, 1], 120: [2, 2, 2], 140: [3, 2, 2]
    }  # fmt: skip


@pytest.mark.covers("L7", "L2")
def test_what_is_under_way_at_stop_is_finished_merged_and_counted(tmp_path: Path) -> None:
    """Six steps of H/K = 3 and τ = 3: fragment 1 is under way when the loop ends."""
    with serve(tmp_path, K=2, H=6, tau=3, alpha=0.25) as server:
        with loop_of(server.url, tmp_path) as loop:
            for _ in range(6):
                step_(loop)
            before = copied(loop.model)
            assert loop.rounds == 1
        assert loop.rounds == 2
        heads, after = safetensors.torch.load_file(server.save_state(tmp_path / "head.safetensors")), copied(loop.model)
        for name in names_of(2)[1]:
            assert torch.allclose(after[name], 0.75 * heads[name] + 0.25 * before[name], rtol=0, atol=1e-12)
        for name in names_of(2)[0]:
            assert torch.equal(after[name], before[name])
        assert server.status().workers[0].state == "left"
        assert versions(server) == [1, 1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("atoll-fragment")]


@pytest.mark.covers("L7")
def test_a_whole_model_starts_no_thread_of_its_own(tmp_path: Path) -> None:
    names: set[str] = set()
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        names.add(thread.name)
        started(thread)

    with pytest.MonkeyPatch.context() as patch, serve(tmp_path, H=2, rounds=2) as server:
        patch.setattr(threading.Thread, "start", start)
        with loop_of(server.url, tmp_path) as loop:
            while not loop.finished:
                step_(loop)
    assert "atoll-heartbeat" in names
    assert not any(name.startswith("atoll-fragment") for name in names)
    assert loop.sync_metrics.keys().isdisjoint({"merges_waited", "merges_late"})


@pytest.mark.covers("L7")
@pytest.mark.parametrize(
    ("k", "h", "tau", "alpha", "rounds", "inflight"),
    [
        pytest.param(1, 3, 2, 0.0, 3, 1, id="a-whole-model-merged-later"),
        pytest.param(1, 3, 2, 0.5, 3, 1, id="a-whole-model-mixed"),
        # τ = 5 is longer than H/K = 3: the next fragment is taken before the last one is merged
        pytest.param(3, 9, 5, 0.25, 2, 2, id="two-fragments-under-way"),
    ],
)
def test_has_the_numbers_of_the_formula(
    tmp_path: Path, k: int, h: int, tau: int, alpha: float, rounds: int, inflight: int
) -> None:
    right = expected(["a", "b"], fragments=k, sync_every=h, tau=tau, alpha=alpha, rounds=rounds)
    settings = {"K": k, "H": h, "tau": tau, "alpha": alpha, "rounds": rounds, "inflight": inflight}
    with serve(tmp_path, sites=2, **settings) as server:
        workers = Sites(server.url, tmp_path, ["a", "b"], steps=100)
        workers.join()
    require_close(workers.traces, right)


@pytest.mark.covers("L7")
def test_that_training_waited_for_a_result_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """b makes its third step when a has begun to wait: a trains τ = 2 steps while its update is under way."""
    caplog.set_level("INFO", "atoll")
    steps_until_a_waited: list[int] = []

    def during(site: str, step: int) -> None:
        if site == "b" and step == 2:
            wait_until(lambda: "a" in workers.loops and workers.loops["a"].sync_metrics["merges_waited"], "a waits")
            steps_until_a_waited.append(len(workers.traces["a"]))

    with serve(tmp_path, sites=2, K=2, H=6, tau=2, rounds=1) as server:
        workers = Sites(server.url, tmp_path, ["a", "b"], steps=50, during=during)
        workers.join()
    assert steps_until_a_waited == [4], "taken after the third, merged within the fifth"
    metrics = workers.loops["a"].sync_metrics
    assert metrics["merges_waited"] >= 1
    assert f", 2 rounds (fragments merged; {metrics['merges_waited']} of them waited for), 0 skipped" in caplog.text
    assert metrics["merges_late"] == 0
    assert metrics["rounds"] == 2


def test_status_names_the_fragments(tmp_path: Path) -> None:
    with serve(tmp_path, K=3, H=3, rounds=0) as server:
        Sites(server.url, tmp_path, ["a"], steps=4).join()
        found = status(server.url)
    assert [(each.fragment, each.version) for each in found.fragments] == [(0, 2), (1, 1), (2, 1)]
    assert found.version == 1
    assert found.workers[0].staleness == 0
    assert found.workers[0].rounds == 4


@pytest.mark.covers("L7")
@pytest.mark.parametrize("at_the_server", [False, True])
def test_a_filter_sees_one_fragment_at_a_time_and_drop_knows_the_whole_model(
    tmp_path: Path, at_the_server: bool
) -> None:
    seen: list[tuple[int, set[str]]] = []

    class Look(Filter):
        def begin(self, update: Outgoing) -> None:
            seen.append((update.about.fragment, set(update.tensors)))

    filters = [Look(), Drop("8.*")]  # the fifth layer, of fragment 2
    with serve(tmp_path, K=3, H=3, rounds=1, filters=filters if at_the_server else []) as server:
        Sites(server.url, tmp_path, ["a"], steps=10, filters=[] if at_the_server else filters).join()
        server.run()
    assert seen == [(index, set(names)) for index, names in enumerate(names_of(3))]
    start, result = copied(build()), safetensors.torch.load_file(server.exports / "model.safetensors")
    assert {name for name in start if torch.equal(start[name], result[name])} == {"8.weight", "8.bias"}


@pytest.mark.covers("L7")
def test_merges_a_result_when_it_comes_where_no_worker_waits(tmp_path: Path) -> None:
    """τ = 1, and the answer stands still: training goes on, a turn without room is passed over."""
    with serve(tmp_path, K=2, H=4, tau=1, **{"async.enabled": True}) as server, Proxy(server.port) as proxy:
        stall = Fault("POST .*/complete ", "up", at=1, action="stall")
        proxy.faults.append(stall)
        with loop_of(proxy.url, tmp_path) as loop:
            for _ in range(5):  # fragment 0 is taken after two steps, 1 would be after four
                step_(loop)
            assert stall.reached.wait(30)
            assert loop.rounds == 0
            assert (loop.sync_metrics["merges_late"], loop.sync_metrics["merges_waited"]) == (1, 0)
            proxy.cut()
            proxy.heal()
            sync = loop._sync
            assert sync is not None
            wait_until(lambda: sync._pending[0].done.is_set(), "the result")
            step_(loop)  # the sixth: fragment 0 is merged, and fragment 1 has its turn
            assert loop.rounds == 1
            assert [each.fragment.index for each in sync._pending] == [1]
    assert loop.rounds == 2
    assert loop.skipped == 0
