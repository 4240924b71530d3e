"""Streaming runs of real servers and workers: what changes when, what is refused, what is written."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from streaming_world import Sites, build, expected, inner, local_step, names_of, require_close, serve, serving
from torch import nn

import atoll
from atoll.cli.export import from_directory, from_server
from atoll.errors import ConfigError
from atoll.filters import Drop, Filter
from atoll.filters.base import Outgoing
from atoll.tensors.fragments import split
from atoll.tensors.modules import schema_of
from atoll.testing.processes import free_port, wait_until
from atoll.testing.proxy import Fault, Proxy
from atoll.worker.client import status
from atoll.worker.connection import Connection


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.covers("L7")
@pytest.mark.parametrize("tau", [0, 2])
def test_what_is_not_due_does_not_change_by_a_bit(tmp_path: Path, tau: int) -> None:
    """Looked at within one step: after the optimizer's own work, and after Atoll's hook."""
    server = serve(tmp_path, num_fragments=3, sync_every=9, tau=tau, alpha=0.5, rounds=2)
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


@pytest.mark.covers("L7", "L2")
def test_what_is_under_way_at_stop_is_finished_merged_and_counted(tmp_path: Path) -> None:
    """Six steps of H/K = 3 and τ = 3: fragment 1 is under way when the loop ends."""
    server = serve(tmp_path, num_fragments=2, sync_every=6, tau=3, alpha=0.25)
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
    server = serve(tmp_path, sync_every=2, rounds=2)
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
    server = serve(tmp_path, num_workers=2, sync_every=3, tau=2, alpha=alpha, rounds=3)
    right = expected(["a", "b"], fragments=1, sync_every=3, tau=2, alpha=alpha, rounds=3)
    with server:
        workers = Sites(server.url, tmp_path, ["a", "b"], steps=50)
        workers.join()
    require_close(workers.traces, right)


@pytest.mark.covers("L7")
def test_two_fragments_of_a_worker_may_be_under_way(tmp_path: Path) -> None:
    """τ = 5 is longer than H/K = 3: the next fragment is taken before the last one is merged."""
    run: dict[str, Any] = {"sync_every": 9, "tau": 5, "alpha": 0.25, "rounds": 2}
    server = serve(tmp_path, num_workers=2, num_fragments=3, max_inflight=2, **run)
    right = expected(["a", "b"], fragments=3, **run)
    with server:
        workers = Sites(server.url, tmp_path, ["a", "b"], steps=100)
        workers.join()
    require_close(workers.traces, right)


@pytest.mark.covers("L7")
def test_that_training_waited_for_a_result_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """b makes its third step when a has begun to wait: a trains τ = 2 steps while its update is under way."""
    caplog.set_level("INFO", "atoll")
    server = serve(tmp_path, num_workers=2, num_fragments=2, sync_every=6, tau=2, rounds=1)
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


@pytest.mark.covers("L8", "L11")
def test_the_split_is_saved_and_a_restart_goes_on_in_the_middle_of_a_cycle(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_workers": 2, "num_fragments": 3, "sync_every": 9, "tau": 1, "alpha": 0.25}
    right = expected(["a", "b"], fragments=3, sync_every=9, tau=1, alpha=0.25, rounds=2)
    port = free_port()
    server = serve(tmp_path, port=port, rounds=2, **options).start()
    restarted = threading.Event()
    at_the_step = threading.Barrier(3)

    def during(site: str, step: int) -> None:
        if step == 7:  # after fragments 0 and 1 of the first cycle
            at_the_step.wait(30)
            assert restarted.wait(30)

    workers = Sites(server.url, tmp_path, ["a", "b"], steps=100, during=during)
    at_the_step.wait(30)
    assert [fragment.version for fragment in server.status().fragments] == [1, 1, 0]
    server.stop()
    with pytest.raises(ConfigError, match="num_fragments = 3, this start says 2"):
        serve(tmp_path, port=port, rounds=2, **options | {"num_fragments": 2, "sync_every": 8}).start()
    with pytest.raises(ConfigError, match="num_fragments = 3, this start says 1"):
        serve(tmp_path, port=port, rounds=2, sync_every=9).start()
    server = serve(tmp_path, port=port, rounds=2, **options)
    restarted.set()
    with server:
        workers.join()
        require_close(workers.traces, right)
        server.run()


@pytest.mark.covers("L8")
def test_what_people_open_is_the_whole_model(tmp_path: Path) -> None:
    """Exports, the state, a persistor's tensors and `atoll export` put the heads of all fragments together."""
    torch.manual_seed(1)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
            self.again = nn.Linear(4, 4, bias=False)
            self.again.weight = self.last.weight

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.again(self.last(self.norm(self.first(inputs))))
            return out

    start = Tied()
    server = serve(tmp_path, start, num_fragments=3, sync_every=3, rounds=2, save_every=1, codec="bf16")
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().sum().backward()
                optimizer.step()
            assert diloco.finished
            assert from_server(server.url, tmp_path / "served.safetensors") == 2
            state = safetensors.torch.load_file(server.save_state(tmp_path / "state.safetensors"))
        result = copied(model)
        server.run()
    exports = server.exports
    assert from_directory(tmp_path / "state", tmp_path / "kept.safetensors") == 2
    for path in (exports / "model.safetensors", tmp_path / "served.safetensors", tmp_path / "kept.safetensors"):
        assert equal(safetensors.torch.load_file(path), result), path
        Tied().load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert equal(state, result)
    assert result["norm.num_batches_tracked"] == 5  # its fragment was due after two and after five steps
    assert sorted(path.name for path in exports.glob("model-*")) == [
        "model-000001.safetensors",
        "model-000002.safetensors",
    ]
    first = safetensors.torch.load_file(exports / "model-000001.safetensors")
    assert not any(torch.equal(first[name], result[name]) for name in ("first.weight", "norm.weight", "last.weight"))
    lines = [json.loads(line) for line in (exports / "metrics.jsonl").read_text().splitlines()]
    assert [(line["round"], line["fragment"]) for line in lines] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


@pytest.mark.covers("L16")
def test_error_feedback_is_kept_for_each_fragment(tmp_path: Path) -> None:
    server = serve(tmp_path, num_fragments=2, sync_every=2, rounds=2, codec="int8")
    with server:
        workers = Sites(server.url, tmp_path, ["a"], steps=10)
        workers.join()
        run = server.status().run
    names = {path.name for path in (tmp_path / "workers/a" / run).iterdir()}
    for fragment in (0, 1):
        assert {
            f"{name}-f{fragment}{rest}"
            for name, rest in [
                ("base", ".safetensors"),
                ("base", ".json"),
                ("outbox", ".bin"),
                ("outbox", ".json"),
                ("residual", "-0.bin"),
                ("residual", "-1.bin"),
                ("residual", ".json"),
            ]
        } <= names
    other = serve(tmp_path / "next", num_fragments=2, sync_every=2, rounds=1)
    with other:
        Sites(other.url, tmp_path, ["a"], steps=10).join()
    assert not (tmp_path / "workers/a" / run).exists(), "the files of an earlier run go, whatever fragments it had"


def test_status_names_the_fragments(tmp_path: Path) -> None:
    server = serve(tmp_path, num_fragments=3, sync_every=3, rounds=0)
    with server:
        Sites(server.url, tmp_path, ["a"], steps=4).join()
        found = status(server.url)
    assert [(each.fragment, each.version) for each in found.fragments] == [(0, 2), (1, 1), (2, 1)]
    assert found.version == 1
    assert found.workers[0].staleness == 0
    assert found.workers[0].rounds == 4


THREE: dict[str, Any] = {"num_fragments": 3, "sync_every": 9}
PLAIN: dict[str, Any] = {"outer_lr": None, "outer_momentum": None}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"num_fragments": 3, "sync_every": 10}, "sync_every is 10, and num_fragments is 3", "9 or 12"),
    (THREE | {"best_metric": "loss"}, "best_metric is 'loss', and num_fragments is 3", "to 1"),
    (THREE | {"aggregator": "a:b"}, "aggregator is 'a:b', and num_fragments is 3", "to 1"),
    (THREE | {"sample_fraction": 0.5}, "sample_fraction is 0.5, and num_fragments is 3", "to 1"),
    (THREE | {"workflow": "a:b"}, "workflow is 'a:b', and num_fragments is 3", "to 1"),
    ({"num_fragments": 2, "sync_every": 8, "tau": 5}, "tau is 5", "at most 4"),
    ({"num_fragments": 13, "sync_every": 13}, "num_fragments is 13, but the model has 12", "at most 12"),
    (PLAIN | {"algorithm": "fedavg", "num_fragments": 2}, "num_fragments is 2, but in 'fedavg'", "diloco"),
    (PLAIN | {"algorithm": "scaffold", "tau": 2}, "tau is 2, but in 'scaffold'", "diloco"),
]


@pytest.mark.covers("L7")
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_does_not_go_with_fragments_is_refused_with_the_remedy(tmp_path: Path, case: int) -> None:
    settings, told, remedy = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        serve(tmp_path, **settings).start()
    assert told in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.covers("L7")
def test_who_cannot_stream_or_does_it_in_another_way_is_refused_when_joining(tmp_path: Path) -> None:
    server = serve(tmp_path, num_fragments=3, sync_every=9)
    model = build()

    def diloco(**options: Any) -> Callable[[], object]:
        return lambda: atoll.DiLoCo(
            model, inner(model), server=server.url, site="a", folder=tmp_path / "w", **options
        ).start()

    with server:
        with pytest.raises(ConfigError, match="a has 2 fragments, the run has 3"):
            diloco(num_fragments=2)()
        with pytest.raises(ConfigError, match="every 6 steps, the run every 9"):
            diloco(sync_every=6)()
        with pytest.raises(ConfigError, match=r"streams .*, and this worker takes whole rounds"):
            atoll.join(server.url, site="a", folder=tmp_path / "w")
        with pytest.raises(ConfigError, match="takes whole rounds"), atoll.Client(server.url, site="a") as client:
            client.next_round()


@pytest.mark.covers("L8")
def test_a_worker_hears_how_the_model_is_cut(tmp_path: Path) -> None:
    server = serve(tmp_path, num_fragments=3, sync_every=9, tau=2, alpha=0.5, max_inflight=2)
    with server:
        connection = Connection(server.url, "a", labels=None, max_retries=1)
        assert connection.split == split(schema_of(build()), 3)
        assert [[spec.name for spec in part.tensors] for part in connection.split.schemas] == names_of(3)
        info = connection.info
        assert (info.fragments, info.tau, info.alpha, info.max_inflight) == (3, 2, 0.5, 2)
        connection.http.close()


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
    server = atoll.Server(
        build(),
        filters=filters if at_the_server else [],
        **serving(tmp_path, num_fragments=3, sync_every=3, rounds=1),
    )
    with server:
        Sites(server.url, tmp_path, ["a"], steps=10, filters=[] if at_the_server else filters).join()
        server.run()
    assert seen == [(index, set(names)) for index, names in enumerate(names_of(3))]
    start, result = copied(build()), safetensors.torch.load_file(server.exports / "model.safetensors")
    assert {name for name in start if torch.equal(start[name], result[name])} == {"8.weight", "8.bias"}


@pytest.mark.covers("L7")
def test_where_nobody_waits_a_result_is_merged_when_it_comes(tmp_path: Path) -> None:
    """τ = 1, and the answer stands still: training goes on, a turn without room is passed over."""
    server = serve(tmp_path, num_fragments=2, sync_every=4, tau=1, mode="async")
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
            streaming = diloco._streaming
            assert streaming is not None
            wait_until(lambda: streaming._flights[0].done.is_set(), "the result")
            local_step(model, optimizer, "a")  # the sixth: fragment 0 is merged, and fragment 1 has its turn
            assert diloco.rounds == 1
            assert [each.fragment.index for each in streaming._flights] == [1]
    assert diloco.rounds == 2
    assert diloco.sync_metrics["skipped"] == 0


@pytest.mark.covers("L8")
def test_a_persistor_gets_the_whole_model(tmp_path: Path) -> None:
    (tmp_path / "my_store.py").write_text(
        "import safetensors.torch\n"
        "class Store:\n"
        "    def __init__(self, folder):\n"
        "        self.folder = folder\n"
        "    def save(self, state, info):\n"
        "        path = f'{self.folder}/{info[\"version\"]}.safetensors'\n"
        "        safetensors.torch.save_file(state, path)\n"
    )
    server = serve(
        tmp_path,
        num_fragments=3,
        sync_every=3,
        rounds=2,
        save_every=1,
        persistor=f"{tmp_path}/my_store.py:Store",
        persistor_options={"folder": str(tmp_path)},
    )
    with server:
        workers = Sites(server.url, tmp_path, ["a"], steps=10)
        workers.join()
        server.run()
    saved = [safetensors.torch.load_file(tmp_path / f"{version}.safetensors") for version in range(3)]
    assert equal(saved[0], copied(build()))
    assert equal(saved[2], safetensors.torch.load_file(server.exports / "model.safetensors"))
    assert equal(saved[1], safetensors.torch.load_file(server.exports / "model-000001.safetensors"))


@pytest.mark.covers("L11", "F12")
def test_one_fragment_falls_back_alone_and_is_served_from_the_outboxes(tmp_path: Path) -> None:
    """The head of fragment 1 is damaged while the server is down; the numbers go on as if nothing had been."""
    options: dict[str, Any] = {"num_workers": 2, "num_fragments": 2, "sync_every": 4, "tau": 1, "alpha": 0.5}
    right = expected(["a", "b"], fragments=2, sync_every=4, tau=1, alpha=0.5, rounds=3)
    port = free_port()
    server = serve(tmp_path, port=port, rounds=3, **options).start()
    restarted, at_the_step = threading.Event(), threading.Barrier(3)

    def during(site: str, step: int) -> None:
        if step == 5:  # fragment 1 has just been merged, its second version is not yet begun
            at_the_step.wait(30)
            assert restarted.wait(30)

    workers = Sites(server.url, tmp_path, ["a", "b"], steps=100, during=during)
    at_the_step.wait(30)
    assert [fragment.version for fragment in server.status().fragments] == [1, 1]
    server.stop()
    with sqlite3.connect(tmp_path / "state/journal.sqlite") as journal:
        (slot,) = journal.execute("SELECT slot FROM versions WHERE fragment = 1 AND version = 1").fetchone()
    path = tmp_path / f"state/slots/version-1-{slot}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    server = serve(tmp_path, port=port, rounds=3, **options).start()
    assert [fragment.version for fragment in server.status().fragments] == [1, 0]
    restarted.set()
    try:
        workers.join()
        server.run()
    finally:
        server.stop()
    assert len(workers.traces["a"]) >= len(right["a"])
    result = safetensors.torch.load_file(server.exports / "model.safetensors")
    last = right["a"][-1]
    assert max(float((result[name] - value).abs().max()) for name, value in last.items()) <= 1e-12
