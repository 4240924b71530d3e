"""A run with an aggregator of the user's own, over the real path: what it is given, and what comes of its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit.client import Client
from kit.servers import plain_server
from kit.sites import clients, finish
from own_world import MEAN, write
from safetensors.torch import load_file

import atoll
from atoll.errors import ConfigError, RunFailed

START = {"w": torch.zeros(2, 3), "v": torch.zeros(4), "bn.running_mean": torch.zeros(1)}
SITES = {"a": 1.0, "b": 3.0}
"""Site → weight of its updates."""


def serve(folder: Path, name: str, start: dict[str, torch.Tensor] = START, **options: Any) -> atoll.Server:
    settings: dict[str, Any] = {
        "rounds.sites": len(SITES),
        "rounds.total": 1,
        "run.threads": 1,
        "aggregation.aggregator.path": f"{folder / 'mine.py'}:{name}",
    }
    return plain_server(folder, start, **(settings | options))


def submit(client: Client, site: str, number: int) -> None:
    """What a site's local training in a round comes to: a different number in each tensor."""
    state = client.pull()
    scale = SITES[site] * number
    added = {name: scale * torch.linspace(0.1, 1, tensor.numel()).view_as(tensor) for name, tensor in state.items()}
    moved = {name: (tensor + added[name]).to(tensor.dtype) for name, tensor in state.items()}
    client.submit(moved, weight=SITES[site], metrics={"loss": 1.0 / number})


def play(server: atoll.Server, folder: Path, rounds: int, order: str = "ab", holds_at_the_end: int = 0) -> None:
    """All rounds of a run; sites submit in this order."""
    sites = clients(server, folder, order)
    for number in range(1, rounds + 1):
        for client in sites.values():
            assert client.next_round() == number
        for site, client in sites.items():
            submit(client, site, number)
    wait_until(lambda: holds(server, "aggregator") == holds_at_the_end, "that updates are given back")
    finish(server, sites)
    server.run()


@pytest.mark.covers("D7")
@pytest.mark.parametrize(("codec", "dtype"), [("none", "bfloat16"), ("bf16", "float32")])
def test_the_weighted_mean_written_by_hand_gives_the_bits_of_the_built_in_one(
    tmp_path: Path, codec: str, dtype: str
) -> None:
    """Each element comes through the codec as the pass decodes it, and no rounding is added to a bf16 model."""
    write(tmp_path, MEAN)
    start = {name: tensor.to(getattr(torch, dtype)) for name, tensor in START.items()}
    results = []
    for folder, extra in ((tmp_path / "own", {}), (tmp_path / "built-in", {"aggregation.aggregator.path": None})):
        options: dict[str, Any] = {
            "aggregation.upload_codec.name": codec,
            "rounds.total": 2,
            "disk.state_dir": folder / "state",
        }
        with serve(tmp_path, "mean", start=start, **(options | extra)) as server:
            play(server, folder, 2)
            results.append((load_file(server.exports / "model.safetensors"), server.status().history[-1].grad_norm))
    (own, own_norm), (built_in, built_in_norm) = results
    assert own.keys() == built_in.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, built_in[name]), name
        assert bool((tensor != 0).all())
    assert own_norm == built_in_norm


@pytest.mark.covers("D7")
def test_what_it_is_given_and_that_it_may_be_kept(tmp_path: Path) -> None:
    """θ₀ = 0, so that the pseudo-gradient of round 1 is −local; its values are read again in round 2."""
    write(
        tmp_path,
        """
class Keeper:
    def __init__(self, factor):
        self.kept, self.factor = [], factor

    def aggregate(self, updates):
        told = [[u.site, u.round, u.weight, u.steps, u.metrics, sorted(u.tensors), sorted(u.buffers)] for u in updates]
        self.kept.extend(updates)
        lazy = type(updates[0].tensors.ref("w")).__name__
        again = [[u.site, u.round, u.tensors["w"].sum().item(), u.buffers["bn.running_mean"].item()] for u in self.kept]
        with open(os.path.join(HERE, "told.json"), "a") as file:
            file.write(json.dumps([told, lazy, again]) + "\\n")
        return {name: -self.factor * torch.ones(updates[0].tensors.ref(name).shape) for name in updates[0].tensors}
""",
    )
    with serve(tmp_path, "Keeper", **{"aggregation.aggregator.factor": 2.0, "rounds.total": 2}) as server:
        play(server, tmp_path, 2, "ba", holds_at_the_end=4)
        model = load_file(server.exports / "model.safetensors")
    assert holds(server, "aggregator") == 0  # the pins went with the process
    first, second = (json.loads(line) for line in (tmp_path / "told.json").read_text().splitlines())
    # in the frozen order, by site; what was added sums to 0.55 · 6 = 3.3 for "w", and the buffer has its first, 0.1
    assert first[0] == [
        ["a", 1, 1.0, 0, {"loss": 1.0}, ["v", "w"], ["bn.running_mean"]],
        ["b", 1, 3.0, 0, {"loss": 1.0}, ["v", "w"], ["bn.running_mean"]],
    ]
    assert first[1] == "LazyTensor"
    assert [entry[:2] for entry in second[2]] == [["a", 1], ["b", 1], ["a", 2], ["b", 2]]
    assert [entry[2] for entry in second[2][:2]] == pytest.approx([-3.3, -9.9])
    assert [entry[3] for entry in second[2][:2]] == pytest.approx([0.1, 0.3])
    # w ← w − (−2), twice; the buffer is the server's: the weighted mean
    assert torch.equal(model["w"], torch.full((2, 3), 4.0))
    # (1·0.1 + 3·0.3) / 4 = 0.25 in round 1; then (0.25 + 0.2 + 3·(0.25 + 0.6)) / 4 = 0.75
    assert model["bn.running_mean"].item() == pytest.approx(0.75)


def holds(server: atoll.Server, who: str) -> int:
    run = server._run
    assert run is not None
    found: dict[str, dict[str, int]] = run.store.slots.pool("spool", 0).holds()
    return sum(each.get(who, 0) for each in found.values())


@pytest.mark.covers("D13")
def test_the_other_form_gets_updates_as_they_arrive_and_keeps_no_more_than_allowed(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
class AsTheyArrive:
    def __init__(self):
        self.order, self.kept, self.log = [], [], []

    def say(self, *words):
        self.log.append(words)
        with open(os.path.join(HERE, "said.tmp"), "w") as file:
            json.dump(self.log, file)
        os.replace(os.path.join(HERE, "said.tmp"), os.path.join(HERE, "said.json"))

    def accept(self, update):
        self.order.append(update)
        self.kept.append(update)
        self.say("accept", update.site, update.round)

    def aggregate(self):
        readable = []
        for update in self.kept:
            try:
                readable.append(update.tensors["v"].sum().item())
            except Exception as error:
                readable.append(error.message)
        self.say("aggregate", readable)
        return [(name, -torch.ones(ref.shape)) for name, ref in ((n, self.order[0].tensors.ref(n)) for n in ("v", "w"))]

    def reset(self):
        self.order.clear()
        self.say("reset")
""",
    )

    def said() -> list[list[Any]]:
        path = tmp_path / "said.json"
        return json.loads(path.read_text()) if path.exists() else []

    with serve(tmp_path, "AsTheyArrive", **{"rounds.total": 2, "aggregation.max_kept_updates": 1}) as server:
        sites = clients(server, tmp_path)
        for number in (1, 2):
            for site in "ba":
                assert sites[site].next_round() == number
            submit(sites["b"], "b", number)
            first = ["accept", "b", number]
            wait_until(lambda: first in said(), "the first update, before there is another")  # noqa: B023
            assert ["accept", "a", number] not in said()
            submit(sites["a"], "a", number)
        finish(server, sites)
        wait_until(lambda: holds(server, "aggregator") == 1, "that all but one are given back")
    log = said()
    assert [entry[0] for entry in log] == 2 * ["accept", "accept", "aggregate", "reset"]
    # 0.1 … 1 over four elements sums to 2.2; of round 1 one update may be kept, so the older, b's, was taken back
    lost = "A lazy tensor was read after its files were released."
    assert log[2][1] == pytest.approx([-6.6, -2.2])
    assert log[6][1] == [lost, pytest.approx(-2.2), pytest.approx(-13.2), pytest.approx(-4.4)]


@pytest.mark.covers("D7")
@pytest.mark.usefixtures("fresh_processes")
def test_one_that_raises_ends_the_run_by_name_and_a_mended_one_goes_on_with_the_same_updates(tmp_path: Path) -> None:
    write(tmp_path, MEAN.replace("yield name, result", 'raise ValueError("no such luck")'))
    port = free_port()
    server = serve(tmp_path, "mean", **{"network.port": port}).start()
    sites = clients(server, tmp_path)
    for site, client in sites.items():
        assert client.next_round() == 1
        submit(client, site, 1)
    with pytest.raises(RunFailed) as raised:
        server.wait(60)
    line = (tmp_path / "mine.py").read_text().splitlines().index('        raise ValueError("no such luck")') + 1
    assert raised.value.message == (
        f"The aggregator '{tmp_path / 'mine.py'}:mean' failed in round 1: ValueError: no such luck "
        f"({tmp_path / 'mine.py'}, line {line})."
    )
    assert "start the server again" in raised.value.remedy
    with pytest.raises(RunFailed):
        server.run()
    assert server.status().fragments[0].version == 0
    write(tmp_path, MEAN)
    with serve(tmp_path, "mean", **{"network.port": port}) as server:
        assert server.wait(60)  # no site submits again
        model = finish(server, sites)
    # (1·1 + 3·3) / 4 = 2.5 times what a site of scale 1 adds
    assert torch.allclose(model["v"], 2.5 * torch.linspace(0.1, 1, 4))


FAILURES = [
    pytest.param(
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its process ended with signal 9", id="killed"
    ),
    pytest.param("os._exit(3)", "its process ended with exit code 3", id="exits"),
    pytest.param(
        "import threading; threading.Event().wait()", "neither read nor returned a tensor for 1 s", id="hangs"
    ),
    pytest.param(
        "return {'w': torch.zeros(3, 2)}", "returned 'w' with the shape [3, 2], the model has [2, 3]", id="shape"
    ),
]


@pytest.mark.covers("D7")
@pytest.mark.parametrize(("body", "words"), FAILURES)
def test_one_that_cannot_give_a_result_ends_the_run_with_the_reason(tmp_path: Path, body: str, words: str) -> None:
    write(tmp_path, f"def bad(updates):\n    {body}\n")
    server = serve(tmp_path, "bad", **{"rounds.sites": 1, "aggregation.aggregator_timeout_s": 1.0}).start()
    (client,) = clients(server, tmp_path, "a").values()
    assert client.next_round() == 1
    submit(client, "a", 1)
    with pytest.raises(RunFailed) as raised:
        server.wait(60)
    assert "mine.py:bad' failed" in raised.value.message
    assert words in raised.value.message
    with pytest.raises(RunFailed):
        server.run()
    assert server.status().fragments[0].version == 0
    assert not list((tmp_path / "state").glob("tmp*"))


def test_a_server_that_is_stopped_meanwhile_ends_it_and_a_next_start_runs_the_round_again(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
import time
def waits(updates):
    with open(os.path.join(HERE, "pid"), "w") as file:
        file.write(str(os.getpid()))
    while not os.path.exists(os.path.join(HERE, "go")):
        time.sleep(0.01)
    return updates[0].tensors
""",
    )
    port = free_port()
    server = serve(tmp_path, "waits", **{"rounds.sites": 1, "network.port": port}).start()
    (client,) = clients(server, tmp_path, "a").values()
    assert client.next_round() == 1
    submit(client, "a", 1)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text(), "the aggregation")
    server.stop()
    assert not Path(f"/proc/{pid.read_text()}").exists()
    assert server.status().fragments[0].version == 0
    (tmp_path / "go").write_text("")
    with serve(tmp_path, "waits", **{"rounds.sites": 1, "network.port": port}) as server:
        assert client.next_round() is None
        client.close()
        assert server.wait(60)
    assert server.status().fragments[0].version == 1


def test_one_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    write(tmp_path, "class Needs:\n    def __init__(self, n): ...\n    def aggregate(self, updates): ...\n")
    with pytest.raises(
        ConfigError, match=r"mine.py:Needs' cannot be created: .* 'n'. Write its keyword arguments next to the path"
    ):
        serve(tmp_path, "Needs").start()
    with pytest.raises(ConfigError, match="Set only one of them"):
        serve(tmp_path, "Needs", **{"aggregation.reducer.name": "median"})


def test_a_path_in_a_run_file_is_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'aggregation.aggregator.path = "mine.py:mean"\nmodel.persistor.path = "store.py:Store"\n'
    )
    settings = atoll.Settings.read(tmp_path / "run.toml", environ={})
    assert settings.aggregation.aggregator.path == f"{tmp_path / 'mine.py'}:mean"
    assert settings.model.persistor.path == f"{tmp_path / 'store.py'}:Store"
