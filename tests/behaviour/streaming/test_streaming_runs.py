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
from kit.servers import new_server
from streaming_world import (
    Sites,
    build,
    copied,
    expected,
    inner,
    local_step,
    names_of,
    require_close,
    serve,
    serving,
)

import atoll
from atoll.filters import Drop, Filter
from atoll.filters.base import Outgoing
from atoll.testing.run import status


@pytest.mark.covers("L7")
@pytest.mark.parametrize("tau", [0, 2])
def test_what_is_not_due_does_not_change_by_a_bit(tmp_path: Path, tau: int) -> None:
    """Looked at within one step: after the optimizer's own work, and after Atoll's hook."""
    server = serve(tmp_path, K=3, H=9, tau=tau, alpha=0.5, rounds=2)
    model = build()
    optimizer = inner(model)
    seen: list[tuple[dict[str, torch.Tensor], list[torch.Tensor]]] = []

    def look(*_: Any) -> None:
        kept = [value.clone() for state in optimizer.state.values() for value in state.values()]
        seen.append((copied(model), kept))

    optimizer.register_step_post_hook(look)  # the first that is registered is called first
    merged = []
    with server, atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
        for step in range(1, 17):
            local_step(model, optimizer, "a")
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
        assert not diloco.finished


@pytest.mark.covers("L7")
def test_each_fragment_has_its_turn_once_in_h_steps(tmp_path: Path) -> None:
    """Of H = 60 with K = 3, fragments 0, 1 and 2 are due after 20, 40 and 60 steps, and so on."""
    server = serve(tmp_path, K=3, H=60)
    model = build()
    optimizer = inner(model)
    due: dict[int, list[int]] = {}
    with server, atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
        for step in range(1, 141):
            rounds = diloco.rounds
            local_step(model, optimizer, "a")
            if diloco.rounds > rounds:
                due[step] = [fragment.version for fragment in server.status().fragments]
    assert due == {
        20: [1, 0, 0], 40: [1, 1, 0], 60: [1, 1, 1], 80: [2, 1, 1], 100: [2, 2, 1], 120: [2, 2, 2], 140: [3, 2, 2]
    }  # fmt: skip


@pytest.mark.covers("L7", "L2")
def test_what_is_under_way_at_stop_is_finished_merged_and_counted(tmp_path: Path) -> None:
    """Six steps of H/K = 3 and τ = 3: fragment 1 is under way when the loop ends."""
    server = serve(tmp_path, K=2, H=6, tau=3, alpha=0.25)
    model = build()
    optimizer = inner(model)
    with server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            for _ in range(6):
                local_step(model, optimizer, "a")
            before = copied(model)
            assert diloco.rounds == 1
        assert diloco.rounds == 2
        heads = safetensors.torch.load_file(server.save_state(tmp_path / "head.safetensors"))
        for name in names_of(2)[1]:
            assert torch.allclose(copied(model)[name], 0.75 * heads[name] + 0.25 * before[name], rtol=0, atol=1e-12)
        for name in names_of(2)[0]:
            assert torch.equal(copied(model)[name], before[name])
        assert server.status().workers[0].state == "left"
        assert [fragment.version for fragment in server.status().fragments] == [1, 1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("atoll-fragment")]


@pytest.mark.covers("L7")
def test_a_whole_model_starts_no_thread_of_its_own(tmp_path: Path) -> None:
    names: set[str] = set()
    server = serve(tmp_path, H=2, rounds=2)
    model = build()
    optimizer = inner(model)
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        names.add(thread.name)
        started(thread)

    with pytest.MonkeyPatch.context() as patch, server:
        patch.setattr(threading.Thread, "start", start)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            while not diloco.finished:
                local_step(model, optimizer, "a")
    assert "atoll-heartbeat" in names
    assert not any(name.startswith("atoll-fragment") for name in names)
    assert diloco.sync_metrics.keys().isdisjoint({"merges_waited", "merges_late"})


@pytest.mark.covers("L7")
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_whole_model_may_be_merged_later_as_well(tmp_path: Path, alpha: float) -> None:
    server = serve(tmp_path, sites=2, H=3, tau=2, alpha=alpha, rounds=3)
    right = expected(["a", "b"], fragments=1, sync_every=3, tau=2, alpha=alpha, rounds=3)
    with server:
        workers = Sites(server.url, tmp_path, ["a", "b"], steps=50)
        workers.join()
    require_close(workers.traces, right)


@pytest.mark.covers("L7")
def test_two_fragments_of_a_worker_may_be_under_way(tmp_path: Path) -> None:
    """τ = 5 is longer than H/K = 3: the next fragment is taken before the last one is merged."""
    settings = {
        "rounds.sites": 2,
        "rounds.total": 2,
        "diloco.num_fragments": 3,
        "diloco.max_inflight": 2,
        "diloco.sync_every": 9,
        "diloco.fragment_sync_delay": 5,
        "diloco.fragment_update_alpha": 0.25,
    }
    server = serve(tmp_path, **settings)
    right = expected(["a", "b"], fragments=3, sync_every=9, tau=5, alpha=0.25, rounds=2)
    with server:
        workers = Sites(server.url, tmp_path, ["a", "b"], steps=100)
        workers.join()
    require_close(workers.traces, right)


@pytest.mark.covers("L7")
def test_that_training_waited_for_a_result_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """b makes its third step when a has begun to wait: a trains τ = 2 steps while its update is under way."""
    caplog.set_level("INFO", "atoll")
    server = serve(tmp_path, sites=2, K=2, H=6, tau=2, rounds=1)
    steps_until_a_waited: list[int] = []

    def during(site: str, step: int) -> None:
        if site == "b" and step == 2:
            wait_until(lambda: "a" in workers.loops and workers.loops["a"].sync_metrics["merges_waited"], "a waits")
            steps_until_a_waited.append(len(workers.traces["a"]))

    with server:
        workers = Sites(server.url, tmp_path, ["a", "b"], steps=50, during=during)
        workers.join()
    assert steps_until_a_waited == [4], "taken after the third, merged within the fifth"
    metrics = workers.loops["a"].sync_metrics
    assert metrics["merges_waited"] >= 1
    assert f", 2 rounds (fragments merged; {metrics['merges_waited']} of them waited for), 0 skipped" in caplog.text
    assert metrics["merges_late"] == 0
    assert metrics["rounds"] == 2


def test_status_names_the_fragments(tmp_path: Path) -> None:
    server = serve(tmp_path, K=3, H=3, rounds=0)
    with server:
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
    server = new_server(
        build(),
        filters=filters if at_the_server else [],
        **serving(tmp_path, K=3, H=3, rounds=1),
    )
    with server:
        Sites(server.url, tmp_path, ["a"], steps=10, filters=[] if at_the_server else filters).join()
        server.run()
    assert seen == [(index, set(names)) for index, names in enumerate(names_of(3))]
    start, result = copied(build()), safetensors.torch.load_file(server.exports / "model.safetensors")
    assert {name for name in start if torch.equal(start[name], result[name])} == {"8.weight", "8.bias"}


@pytest.mark.covers("L7")
def test_merges_a_result_when_it_comes_where_no_worker_waits(tmp_path: Path) -> None:
    """τ = 1, and the answer stands still: training goes on, a turn without room is passed over."""
    server = serve(tmp_path, K=2, H=4, tau=1, **{"async.enabled": True})
    model = build()
    optimizer = inner(model)
    with server, Proxy(server.port) as proxy:
        stall = Fault("POST .*/complete ", "up", at=1, action="stall")
        proxy.faults.append(stall)
        with atoll.DiLoCo(model, optimizer, server=proxy.url, site="a", folder=tmp_path / "w") as diloco:
            for _ in range(5):  # fragment 0 is taken after two steps, 1 would be after four
                local_step(model, optimizer, "a")
            assert stall.reached.wait(30)
            assert diloco.rounds == 0
            metrics = diloco.sync_metrics
            assert (metrics["merges_late"], metrics["merges_waited"]) == (1, 0)
            proxy.cut()
            proxy.heal()
            sync = diloco._sync
            assert sync is not None
            wait_until(lambda: sync._pending[0].done.is_set(), "the result")
            local_step(model, optimizer, "a")  # the sixth: fragment 0 is merged, and fragment 1 has its turn
            assert diloco.rounds == 1
            assert [each.fragment.index for each in sync._pending] == [1]
    assert diloco.rounds == 2
    assert diloco.sync_metrics["skipped"] == 0
