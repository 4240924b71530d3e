"""Streaming runs of real servers and workers: what changes when, what is waited for, what is counted and shown."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness.processes import Nursery, free_port, wait_until
from harness.proxy import Fault, Proxy
from kit import Gate, ask_journal, diloco, run_to_end
from kit.damage import damage_head
from kit.processes import command, export
from kit.results import saved_model
from streaming_world import (
    Sites,
    build,
    copied,
    equal,
    expected,
    loop_of,
    names_of,
    new_server,
    require_close,
    step_,
    versions,
)
from torch import nn

from atoll.filters import Drop, Filter, Outgoing
from atoll.testing.run import status


@pytest.mark.covers("L7")
@pytest.mark.parametrize("tau", [0, 2])
def test_a_step_changes_only_the_due_fragment(tmp_path: Path, tau: int) -> None:
    """At each step, Atoll changes only the fragment whose turn it is, and never the inner optimizer's state."""
    # Each step compares the state after the optimizer's own work with the state after Atoll's hook.
    seen: list[tuple[dict[str, torch.Tensor], list[torch.Tensor]]] = []

    def look(*_: Any) -> None:
        kept = [value.clone() for state in optimizer.state.values() for value in state.values()]
        seen.append((copied(model), kept))

    merged = []
    with new_server(tmp_path, K=3, H=9, tau=tau, alpha=0.5, rounds=2) as server:
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


@pytest.mark.covers("L7", "L2")
def test_stopping_merges_updates_in_flight(tmp_path: Path) -> None:
    """If a loop ends while the update of a fragment is in flight, the loop waits for the result and merges it."""
    # The loop ends after six steps with H/K = 3 and τ = 3, while the update of fragment 1 is in flight.
    with new_server(tmp_path, K=2, H=6, tau=3, alpha=0.25) as server:
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
def test_a_whole_model_run_starts_no_fragment_thread(tmp_path: Path) -> None:
    """A DiLoCo run of a whole model, without fragments, starts no thread for fragments and has no figures about
    merges.
    """
    names: set[str] = set()
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        names.add(thread.name)
        started(thread)

    with pytest.MonkeyPatch.context() as patch, new_server(tmp_path, H=2, rounds=2) as server:
        patch.setattr(threading.Thread, "start", start)
        with loop_of(server.url, tmp_path) as loop:
            while not loop.finished:
                step_(loop)
    assert "atoll-heartbeat" in names
    assert not any(name.startswith("atoll-fragment") for name in names)
    assert loop.sync_metrics.keys().isdisjoint({"merges_waited", "merges_late"})


@pytest.mark.covers("L7")
def test_waits_for_merges_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a site must wait for a result before it can train on, the loop's figures and its log count the wait."""
    # Site `b` makes its third step when site `a` has begun to wait. Site `a` trains τ = 2 steps while its update is in
    # flight.
    caplog.set_level("INFO", "atoll")
    steps_until_a_waited: list[int] = []

    def during(site: str, step: int) -> None:
        if site == "b" and step == 2:
            wait_until(lambda: "a" in workers.loops and workers.loops["a"].sync_metrics["merges_waited"], "a waits")
            steps_until_a_waited.append(len(workers.traces["a"]))

    with new_server(tmp_path, sites=2, K=2, H=6, tau=2, rounds=1) as server:
        workers = Sites(server.url, tmp_path, ["a", "b"], steps=50, during=during)
        workers.join()
    assert steps_until_a_waited == [4], "taken after the third, merged within the fifth"
    metrics = workers.loops["a"].sync_metrics
    assert metrics["merges_waited"] >= 1
    assert f", 2 rounds (merges that training waited for: {metrics['merges_waited']}), 0 skipped" in caplog.text
    assert metrics["merges_late"] == 0
    assert metrics["rounds"] == 2


@pytest.mark.covers("L7")
@pytest.mark.parametrize("at_the_server", [False, True])
def test_a_filter_gets_one_fragment_at_a_time(tmp_path: Path, at_the_server: bool) -> None:
    """Each filter is called once for each fragment with that fragment's tensors.

    Patterns of `Drop` may name tensors of any fragment.
    """
    seen: list[tuple[int, set[str]]] = []

    class Look(Filter):
        def begin(self, update: Outgoing) -> None:
            seen.append((update.about.fragment, set(update.tensors)))

    filters = [Look(), Drop("8.*")]  # the fifth layer, of fragment 2
    with new_server(tmp_path, K=3, H=3, rounds=1, filters=filters if at_the_server else []) as server:
        run_to_end(server, Sites(server.url, tmp_path, ["a"], steps=10, filters=[] if at_the_server else filters))
    assert seen == [(index, set(names)) for index, names in enumerate(names_of(3))]
    start, result = copied(build()), safetensors.torch.load_file(server.exports / "model.safetensors")
    assert {name for name in start if torch.equal(start[name], result[name])} == {"8.weight", "8.bias"}


@pytest.mark.covers("L7")
def test_an_asynchronous_run_merges_late_results(tmp_path: Path) -> None:
    """If the answer to an update is late in an asynchronous run, training continues, and the result is merged when it
    arrives.
    """
    # With τ = 1 and a stalled upload, the turn of a fragment without a free place is skipped and counted as late.
    with new_server(tmp_path, K=2, H=4, tau=1, **{"async.enabled": True}) as server, Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/0 ", "up", at=1, action="stall")
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


# -- what is counted and shown


@pytest.mark.covers("L7")
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # fragment 0 is taken after the steps 2, 6 and 10, fragment 1 after 4, 8 and 12
        pytest.param({"K": 2, "H": 4, "tau": 0}, [(0, 2), (0, 4), (0, 4), (1, 4), (1, 4), (1, 4)], id="fragments"),
        pytest.param({"K": 2, "H": 4, "tau": 1}, [(0, 2), (0, 4), (0, 4), (1, 4), (1, 4), (1, 4)], id="merged-later"),
        # the whole model is taken after the steps 3, 6 and 9, and merged one later
        pytest.param({"K": 1, "H": 3, "tau": 1}, [(0, 3), (0, 3), (0, 3)], id="whole-merged-later"),
    ],
)
def test_steps_count_from_the_last_sent_update(
    tmp_path: Path, settings: dict[str, Any], steps: list[tuple[int, int]]
) -> None:
    """An update counts the local steps since the previous update was formed, not since its result was merged."""
    # The steps between taking and merging, τ later, belong to the next update.
    with new_server(tmp_path, sites=1, alpha=0.5, rounds=3, **settings) as server:
        run_to_end(server, Sites(server.url, tmp_path, ["a"], 20))
    counted = (
        "SELECT fragment, report ->> '$.steps' FROM tickets WHERE state = 'counted' ORDER BY fragment, base_version"
    )
    assert ask_journal(tmp_path, counted) == steps


@pytest.mark.covers("X4")
@pytest.mark.parametrize("heads", [[4], [2, 1, 1]], ids=["whole", "fragments"])
def test_the_status_shows_each_rounds_fragment(nursery: Nursery, tmp_path: Path, heads: list[int]) -> None:
    """In a run with fragments, each line about a round says which fragment it was. A run of whole models shows no
    fragment.
    """
    with new_server(tmp_path, K=len(heads), H=len(heads)) as server:
        Sites(server.url, tmp_path, ["a"], steps=4).join()
        printed = command(nursery, tmp_path, "status", "--server", server.url).stdout
        found = status(server.url)
    assert [(each.fragment, each.version) for each in found.fragments] == list(enumerate(heads))
    assert found.version == heads[-1]
    assert (found.workers[0].staleness, found.workers[0].rounds) == (0, 4)
    lines = [line.partition(" ")[2] for line in printed.splitlines() if line.startswith("round ")]
    assert len(lines) == 4
    for line, each in zip(lines, found.history, strict=True):
        of = f" of fragment {each.fragment}" if len(heads) > 1 else ""
        assert line.startswith(f"{each.round}{of}: version {each.version} ")


# -- what runs leave on disk and go on from: the split, whole models, files of each fragment


def stopped_after(
    folder: Path, steps: int, options: dict[str, Any], heads: list[int]
) -> tuple[dict[str, Any], Sites, Gate]:
    """A run of two sites whose server was stopped after these steps, when it had these versions.

    Returns the options of the server that goes on, the sites, and the gate at which they wait.
    """
    options, gate = options | {"sites": 2, "network.port": free_port()}, Gate(steps)
    with new_server(folder, **options) as server:
        sites = Sites(server.url, folder, ["a", "b"], steps=100, during=gate)
        gate.wait()
        assert versions(server) == heads
    return options, sites, gate


@pytest.mark.covers("L8", "L11")
def test_a_restart_continues_within_a_cycle(tmp_path: Path) -> None:
    """After a restart in the middle of a cycle of fragments, training gives the same values, because the server saves
    the division into fragments.
    """
    options: dict[str, Any] = {"K": 3, "H": 9, "tau": 1, "alpha": 0.25, "rounds": 2}
    right = expected(["a", "b"], options)
    # after seven steps, fragments 0 and 1 of the first cycle are merged
    options, workers, gate = stopped_after(tmp_path, 7, options, [1, 1, 0])
    gate.open()
    with new_server(tmp_path, **options) as server:
        workers.join()
        require_close(workers.traces, right)
        server.run()


class Kept:
    """A persistor that writes each version to a file."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save(self, state: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
        apart = {name: value.clone() for name, value in state.items()}  # tied tensors have the same memory
        safetensors.torch.save_file(apart, f"{self.folder}/{info['version']}.safetensors")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.last.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.again(self.last(self.norm(self.first(inputs))))
        return out


@pytest.mark.covers("L8")
def test_exports_have_the_model_of_all_fragments(nursery: Nursery, tmp_path: Path) -> None:
    """Exports, the saved state, a persistor's tensors and `atoll export` have the newest versions of all fragments in
    one model.
    """
    torch.manual_seed(1)

    start = Tied()
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {"path": f"{__name__}:Kept", "folder": str(tmp_path)}
    settings = {"disk.export_every": 1, "model.persistor": kept}
    with new_server(tmp_path, start, K=3, H=3, rounds=2, codec="bf16", **settings) as server:
        with diloco(server, tmp_path, "a", model, optimizer) as loop:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().sum().backward()
                optimizer.step()
            assert loop.finished
            assert export(nursery, tmp_path / "served.safetensors", "--server", server.url) == 2
            state = saved_model(server, tmp_path)
        result = copied(model)
        server.run()
    exports = server.exports
    assert export(nursery, tmp_path / "kept.safetensors", "--dir", "state") == 2
    written = [exports / "model.safetensors", *(tmp_path / f"{name}.safetensors" for name in ("served", "kept", 2))]
    for path in written:
        assert equal(safetensors.torch.load_file(path), result), path
        Tied().load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert equal(state, result)
    assert result["norm.num_batches_tracked"] == 5  # its fragment was due after two and after five steps
    assert sorted(path.name for path in exports.glob("model-*")) == [
        "model-000001.safetensors",
        "model-000002.safetensors",
    ]
    first = safetensors.torch.load_file(exports / "model-000001.safetensors")
    assert equal(first, safetensors.torch.load_file(tmp_path / "1.safetensors"))
    assert equal(copied(start), safetensors.torch.load_file(tmp_path / "0.safetensors"))
    assert not any(torch.equal(first[name], result[name]) for name in ("first.weight", "norm.weight", "last.weight"))
    lines = [json.loads(line) for line in (exports / "metrics.jsonl").read_text().splitlines()]
    assert [(line["round"], line["fragment"]) for line in lines] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


@pytest.mark.covers("L16")
def test_error_feedback_is_kept_for_each_fragment(tmp_path: Path) -> None:
    """A site keeps a base file, an outbox and the codec's error for each fragment. The next run deletes these files."""
    with new_server(tmp_path, K=2, H=2, rounds=2, codec="int8") as server:
        Sites(server.url, tmp_path, ["a"], steps=10).join()
        run = server.status().run
    names = {path.name for path in (tmp_path / "workers/a" / run).iterdir()}
    kept = {"base": (".safetensors", ".json"), "outbox": (".bin", ".json"), "residual": ("-0.bin", "-1.bin", ".json")}
    assert {f"{name}-f{number}{rest}" for number in (0, 1) for name in kept for rest in kept[name]} <= names
    with new_server(tmp_path / "next", K=2, H=2, rounds=1) as other:
        Sites(other.url, tmp_path, ["a"], steps=10).join()
    assert not (tmp_path / "workers/a" / run).exists(), "the files of an earlier run go, whatever fragments it had"


@pytest.mark.covers("L11", "F12")
def test_one_damaged_fragment_falls_back_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the newest version of one fragment is damaged while the server is down, only this fragment falls back. The
    final model is as without damage.
    """
    options: dict[str, Any] = {"K": 2, "H": 4, "tau": 1, "alpha": 0.5, "rounds": 3}
    right = expected(["a", "b"], options)
    # after five steps, fragment 1 has just been merged, its second version is not yet begun
    options, workers, gate = stopped_after(tmp_path, 5, options, [1, 1])
    damage_head(tmp_path, fragment=1)
    with new_server(tmp_path, **options) as server:
        assert versions(server) == [1, 0]
        assert "Version 1 of fragment 1 was lost; the run continues from version 0" in caplog.text
        gate.open()
        run_to_end(server, workers)
    assert len(workers.traces["a"]) >= len(right["a"])
    result = safetensors.torch.load_file(server.exports / "model.safetensors")
    last = right["a"][-1]
    assert max(float((result[name] - value).abs().max()) for name, value in last.items()) <= 1e-12
