"""Asynchronous runs over real sockets and files: what is applied when, to what, and how far behind it was."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_end_to_end import together
from test_fall_back import damage_head, slow_disk, wait_until_durable
from torch import Tensor, nn

import atoll
from atoll.errors import ConfigError, Gone
from atoll.reducers.staleness import staleness_weight
from atoll.rounds.events import TicketRequested, VersionCommitted
from atoll.server.exports import Exports
from atoll.server.run import Run
from atoll.testing.processes import free_port, wait_until

SITES = ("a", "b", "c")
START = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
LR, MOMENTUM = 0.5, 0.5


class Clients:
    """A run with an fp64 weight, and three sites that a test moves one by one."""

    def __init__(self, folder: Path, stack: ExitStack, **settings: Any) -> None:
        self.folder = folder
        self.model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.model.weight.copy_(START)
        self.options: dict[str, Any] = {
            "algorithm": "diloco",
            "codec": "none",
            "mode": "async",
            "num_workers": 3,
            "outer_lr": LR,
            "outer_momentum": MOMENTUM,
            "port": free_port(),
            "state_dir": folder / "state",
            **settings,
        }
        self.server = atoll.Server(self.model, **self.options).start()
        stack.callback(lambda: self.server.stop())
        self.clients = {
            site: stack.enter_context(atoll.Client(self.server.url, site=site, folder=folder / "w")) for site in SITES
        }
        for client in self.clients.values():
            client.register()
        self.base: dict[str, Tensor] = {}

    def pull(self, *sites: str) -> None:
        for site in sites:
            assert self.clients[site].next_round() is not None
            self.base[site] = self.clients[site].pull()["weight"]

    def submit(self, site: str, u: Tensor, **about: Any) -> None:
        """Submit the pseudo-gradient `u` against what the site pulled last."""
        self.clients[site].submit({"weight": self.base[site] - u}, **about)

    def wait(self, version: int) -> None:
        wait_until(lambda: self.server.status().fragments[0].version == version, f"version {version}")

    def weight(self) -> Tensor:
        return safetensors.torch.load_file(self.server.save_state(self.folder / "now.safetensors"))["weight"]

    def behind(self) -> list[tuple[str, int]]:
        """(site, staleness) of every update that counted, in order."""
        return [
            (site, s)
            for line in self.server.status().history
            for site, s in zip(line.workers, line.staleness, strict=True)
        ]

    def one_by_one(self) -> None:
        """All pull version 0; b, c, and a come in, then b, which is at version 1: 0, 1, 2 and 2 versions behind."""
        self.pull("a", "b", "c")
        for number, site in enumerate(("b", "c", "a")):
            self.submit(site, gradient(number))
            self.wait(number + 1)
            if site == "b":
                self.pull("b")
        self.submit("b", gradient(3))
        self.wait(4)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., Clients]]:
    with ExitStack() as stack:
        yield lambda **settings: Clients(tmp_path, stack, **settings)


def gradient(seed: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nesterov(gradients: list[Tensor]) -> Tensor:
    theta, m = START.clone(), torch.zeros_like(START)
    for g in gradients:
        m = MOMENTUM * m + g
        theta = theta - LR * (g + MOMENTUM * m)
    return theta


@pytest.mark.covers("L3", "L5", "D10")
def test_updates_are_applied_one_by_one_to_whatever_is_the_head(world: Callable[..., Clients]) -> None:
    run = world()
    run.one_by_one()
    assert run.behind() == [("b", 0), ("c", 1), ("a", 2), ("b", 2)]
    assert torch.allclose(run.weight(), nesterov([gradient(n) for n in range(4)]), rtol=0, atol=1e-12)
    status = run.server.status()
    assert (status.policy, status.outer) == ("async", "sgd(lr=0.5, momentum=0.5, nesterov=True)")
    assert status.staleness == {"0": 1, "1": 1, "2": 2}


@pytest.mark.covers("L3", "L6")
def test_delayed_nesterov(world: Callable[..., Clients]) -> None:
    run = world(dn_buffer_size=2)
    run.one_by_one()
    theta, m, g = START.clone(), torch.zeros_like(START), [gradient(n) for n in range(4)]
    for first, second in ((g[0], g[1]), (g[2], g[3])):
        theta = theta - LR * first / 2
        m = MOMENTUM * m + (first + second) / 2
        theta = theta - LR * (MOMENTUM * m + second / 2)
    assert torch.allclose(run.weight(), theta, rtol=0, atol=1e-12)


@pytest.mark.covers("L5")
def test_staleness_may_be_a_weight(world: Callable[..., Clients]) -> None:
    run = world(staleness_weight="inverse_sqrt")
    run.one_by_one()
    scales = (1.0, 1 / math.sqrt(2), 1 / math.sqrt(3), 1 / math.sqrt(3))
    expected = nesterov([scale * gradient(n) for n, scale in enumerate(scales)])
    assert torch.allclose(run.weight(), expected, rtol=0, atol=1e-12)


def by_the_user(s: int) -> float:
    return 0.5**s


@pytest.mark.covers("L5")
def test_a_user_s_own_weight_of_staleness(world: Callable[..., Clients]) -> None:
    run = world(staleness_weight=f"{__name__}:by_the_user")
    run.one_by_one()
    expected = nesterov([scale * gradient(n) for n, scale in enumerate((1.0, 0.5, 0.25, 0.25))])
    assert torch.allclose(run.weight(), expected, rtol=0, atol=1e-12)


def above_one(s: int) -> float:
    return 1.0 + s


def test_a_weight_of_staleness_that_is_none_is_refused() -> None:
    weight = staleness_weight(f"{__name__}:above_one")
    with pytest.raises(ConfigError, match=r"gives 2\.0 for 1 versions"):
        weight(1)


@pytest.mark.covers("L5")
def test_an_update_too_far_behind_does_not_count(world: Callable[..., Clients], caplog: Any) -> None:
    run = world(max_staleness=1)
    run.pull("a", "b", "c")
    run.submit("b", gradient(0))
    run.wait(1)
    run.submit("c", gradient(1))
    run.wait(2)
    run.submit("a", gradient(2))  # 2 behind: the site is told, and goes on from the head
    assert " is over: its base is more than max_staleness 1 versions behind version 2." in caplog.text
    assert "has replaced it" not in caplog.text
    run.pull("a")
    run.submit("a", gradient(3))
    run.wait(3)
    assert run.behind() == [("b", 0), ("c", 1), ("a", 0)]
    assert torch.allclose(run.weight(), nesterov([gradient(0), gradient(1), gradient(3)]), rtol=0, atol=1e-12)


def test_a_buffer_takes_the_mean_of_so_many(world: Callable[..., Clients]) -> None:
    run = world(async_buffer=2)
    run.pull("a", "b", "c")
    run.submit("c", gradient(0), weight=3.0)
    assert run.server.status().fragments[0].version == 0
    run.submit("a", gradient(1), weight=1.0)
    run.wait(1)
    assert run.server.status().history[0].workers == ["a", "c"]
    expected = nesterov([0.75 * gradient(0) + 0.25 * gradient(1)])
    assert torch.allclose(run.weight(), expected, rtol=0, atol=1e-12)


@pytest.mark.covers("L26")
def test_an_update_more_than_five_behind_is_told_of(world: Callable[..., Clients], caplog: Any) -> None:
    run = world()
    run.pull("a", "b")
    for number in range(6):
        run.submit("b", gradient(number))
        run.pull("b")
    run.submit("a", gradient(7))
    run.wait(7)
    assert "an update of a was 6 versions behind" in caplog.text
    assert "dylu = true" in run.server.status().warnings[-1]


@pytest.mark.covers("L5")
def test_a_version_that_somebody_is_to_pull_is_kept(world: Callable[..., Clients]) -> None:
    """Two versions are kept for everybody; a has a ticket of version 0, and pulls it when the head is at 4."""
    run = world()
    assert run.clients["a"].next_round() == 1
    run.pull("b")
    for number in range(4):
        run.submit("b", gradient(number))
        run.pull("b")
    assert torch.equal(run.clients["a"].pull()["weight"], START)
    run.wait(4)


def test_who_comes_too_late_for_a_version_gets_a_newer_one(world: Callable[..., Clients]) -> None:
    run = world(max_pins=1, keep_versions=1)
    assert run.clients["a"].next_round() == 1
    assert run.clients["c"].next_round() == 1
    run.pull("b")
    for number in range(3):
        run.submit("b", gradient(number))
        run.pull("b")
    run.clients["c"].next_round()  # of version 3, so that version 0 is no longer among the newest that are wanted
    run.submit("b", gradient(3))
    run.pull("b")
    pulled = run.clients["a"].pull()["weight"]
    assert torch.allclose(pulled, nesterov([gradient(n) for n in range(4)]), rtol=0, atol=1e-12)


@pytest.mark.covers("L3")
@pytest.mark.parametrize("delayed", [0, 2])
def test_an_infinite_grace_has_the_bits_of_a_synchronous_run(tmp_path: Path, delayed: int) -> None:
    weights = []
    for name, mode in (("sync", {"mode": "sync"}), ("async", {"mode": "async", "async_grace_s": math.inf})):
        with ExitStack() as stack:
            run = Clients(tmp_path / name, stack, dn_buffer_size=delayed, **mode)
            for number in range(3):
                run.pull("a", "b", "c")
                for index, site in enumerate(("c", "a", "b")):
                    run.submit(site, gradient(3 * number + index), weight=1.0 + index)
                run.wait(number + 1)
            weights.append(run.weight())
    assert torch.equal(*weights)


@pytest.mark.covers("L6")
def test_synchronous_rounds_first(world: Callable[..., Clients], caplog: Any) -> None:
    caplog.set_level("INFO", "atoll")
    run = world(sync_rounds_first=1, dn_buffer_size=2)
    run.pull("a", "b", "c")
    for number, site in enumerate(SITES):
        assert run.server.status().fragments[0].version == 0
        run.submit(site, gradient(number))
    run.wait(1)
    run.pull("a")
    run.submit("a", gradient(3))
    run.wait(2)
    # the mean of the first round makes a whole step of Nesterov's, what follows half a step without momentum
    g = sum(gradient(n) for n in range(3)) / 3
    theta = START - LR * (g + MOMENTUM * g) - LR * gradient(3) / 2
    assert torch.allclose(run.weight(), theta, rtol=0, atol=1e-12)
    assert "1 synchronous rounds first" in run.server.status().policy
    assert caplog.text.count("round 1 was the last synchronous one") == 1


def test_the_first_rounds_cannot_be_changed_at_the_next_start(tmp_path: Path) -> None:
    """What waits for its turn against an earlier version has no place in a synchronous round."""
    with ExitStack() as stack:
        run = Clients(tmp_path, stack)
        run.server.stop()
        with pytest.raises(ConfigError, match="sync_rounds_first = 0, this start says 9"):
            atoll.Server(run.model, **run.options | {"sync_rounds_first": 9}).start()


@pytest.mark.covers("L3")
def test_a_version_that_the_end_of_the_run_took_away_is_no_error(world: Callable[..., Clients]) -> None:
    """a was promised version 0; before it pulls, the run ends with b's update, and keeps its result alone."""
    run = world(rounds=1, keep_versions=1)
    assert run.clients["a"].next_round() is not None
    run.pull("b")
    run.submit("b", gradient(0))
    wait_until_durable(run.server, 1)
    pulled = run.clients["a"].pull()["weight"]
    assert torch.equal(pulled, run.weight())
    run.clients["a"].submit({"weight": pulled - gradient(1)})  # in vain, and no error
    assert run.clients["a"].next_round() is None
    assert run.behind() == [("b", 0)]


@pytest.mark.covers("L3")
def test_a_look_at_the_newest_model_leaves_the_round_as_it_is(tmp_path: Path) -> None:
    """a looks while it trains from version 0, when b has brought the run to version 1: its update counts, 1 behind."""
    models = {site: nn.Linear(3, 2, bias=False, dtype=torch.float64) for site in ("a", "b", "newest")}
    with ExitStack() as stack:
        server = atoll.Server(
            nn.Linear(3, 2, bias=False, dtype=torch.float64),
            algorithm="fedavg",
            mode="async",
            codec="none",
            num_workers=2,
            port=0,
            state_dir=tmp_path / "state",
        ).start()
        stack.callback(server.stop)
        workers = {s: stack.enter_context(atoll.join(server.url, site=s, folder=tmp_path / "w")) for s in ("a", "b")}
        rounds = {site: next(iter(worker)) for site, worker in workers.items()}
        for site, round_ in rounds.items():
            round_.load_into(models[site])
        with torch.no_grad():
            models["b"].weight += 1
        rounds["b"].submit(models["b"])
        wait_until(lambda: server.status().fragments[0].version == 1, "version 1")
        workers["a"].load_into(models["newest"])
        assert torch.allclose(models["newest"].weight, models["b"].weight, rtol=0, atol=1e-12)
        rounds["a"].submit(models["a"])
        wait_until(lambda: server.status().fragments[0].version == 2, "version 2")
        assert server.status().history[-1].staleness == [1]


def test_a_ticket_asked_for_at_a_commit_is_of_the_version_that_its_digest_names(
    world: Callable[..., Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b's step is in the journal, and the machine hears of it only after a has asked."""
    run = world()
    run.pull("a", "b")
    apply, committed, held = Run.apply, threading.Event(), list[Any]()

    def late(self: Run, event: Any) -> Any:
        if isinstance(event, VersionCommitted):
            held.append(event)
            committed.set()
            return ()
        effects = apply(self, event)
        if held and isinstance(event, TicketRequested):
            asyncio.get_running_loop().call_soon(apply, self, held.pop())
        return effects

    monkeypatch.setattr(Run, "apply", late)
    run.submit("b", gradient(0))
    assert committed.wait(30)
    session = run.clients["a"]._session
    assert session is not None
    reply = session.next_ticket(wait_s=0.0)
    assert reply.ticket is not None
    assert (reply.ticket.base_version, reply.ticket.base_digest) == (1, reply.head_digest)
    assert reply.head_version == 1


def test_an_export_that_is_overtaken_does_not_keep_a_version_from_becoming_durable(
    world: Callable[..., Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*_: Any) -> None:
        raise Gone("Version 1 is not kept.")

    monkeypatch.setattr(Exports, "save", overtaken)
    run = world(save_every=1)
    run.pull("a")
    run.submit("a", gradient(0))
    wait_until_durable(run.server, 1)


@pytest.mark.covers("L3", "F41")
def test_a_lost_version_loses_no_update(tmp_path: Path) -> None:
    """a is at version 1 when version 2, of b's update, is lost; b has gone on from it, and sends it again."""
    with slow_disk(newest=1), ExitStack() as stack:
        run = Clients(tmp_path, stack, outer_lr=1.0, outer_momentum=0.0)
        run.pull("a", "b")
        run.submit("a", gradient(0))
        wait_until_durable(run.server, 1)
        run.pull("a")
        run.submit("b", gradient(1))
        run.pull("b")
        run.server.stop()
        damage_head(tmp_path / "state")
        run.server = atoll.Server(run.model, **run.options).start()
        assert run.server.status().fragments[0].version == 1
        run.pull("b")  # sends again first
        run.pull("a")  # its ticket was of a version that may have been lost, too
        run.submit("a", gradient(2))
        wait_until(lambda: len(run.server.status().history) == 3, "three updates")
        expected = START - gradient(0) - gradient(1) - gradient(2)
        assert torch.allclose(run.weight(), expected, rtol=0, atol=1e-12)


@pytest.mark.covers("L2", "L3", "L6")
def test_diloco_loops_with_a_slow_site_and_dylu(tmp_path: Path) -> None:
    """The slow site makes a step whenever the fast one has made four: it is asked for about a quarter of the steps."""
    model = nn.Linear(1, 1, bias=False)
    options = {"mode": "async", "dylu": True, "sync_every": 16, "num_workers": 2, "codec": "none"}
    server = atoll.Server(
        model, algorithm="diloco", port=0, state_dir=tmp_path / "state", heartbeat_interval_s=0.2, **options
    ).start()
    asked: dict[str, list[int]] = {"fast": [], "slow": []}

    def job(site: str, pause_s: float) -> Callable[[], None]:
        def run() -> None:
            mine = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3)
            with atoll.DiLoCo(mine, optimizer, server=server.url, site=site, folder=tmp_path / "w") as diloco:
                while len(asked["slow"]) < 4:
                    rounds = diloco.rounds
                    before = diloco.step
                    while diloco.rounds == rounds and len(asked["slow"]) < 4:
                        optimizer.zero_grad()
                        mine.weight.sum().backward()
                        pacer.wait(pause_s)
                        optimizer.step()
                    asked[site].append(diloco.step - before)

        return run

    pacer = threading.Event()
    together(job("fast", 0.01), job("slow", 0.04))
    server.stop()
    assert asked["slow"][0] == 16  # nobody had been measured
    assert all(1 <= steps < 12 for steps in asked["slow"][2:]), asked


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "async"}, "this may diverge. Set dn_buffer_size = 3 (delayed Nesterov)"),
        ({"mode": "async", "dn_buffer_size": 3, "rounds": 5, "sync_rounds_first": 5}, "none is asynchronous"),
        ({"codec": "topk"}, "both together overshoot. Set outer_momentum = 0 and outer_lr = 1"),
        ({"num_fragments": 2, "sync_every": 4, "alpha": 1.0}, "never take over what the others have trained"),
        ({"mode": "async", "dn_buffer_size": 3, "downlink_codec": "int4"}, "Set keep_versions = 3"),
        ({"mode": "async", "dn_buffer_size": 3, "downlink_codec": "bf16"}, "it saves next to nothing"),
    ],
    ids=["momentum", "never-async", "topk", "alpha-1", "keep", "too-many-differences"],
)
def test_settings_that_defeat_each_other_are_told_of_at_the_start_and_in_status(
    tmp_path: Path, settings: dict[str, Any], says: str, caplog: Any
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with atoll.Server(model, num_workers=3, port=0, state_dir=tmp_path / "state", **settings) as server:
        (told,) = server.status().warnings
    assert says in told
    assert told in caplog.text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"downlink_codec_options": {"density": 0.1}, "mode": "sync"}, "but no downlink_codec is set"),
        ({"downlink_codec": "itn8"}, "downlink_codec = 'itn8' is not one of none, bf16"),
        ({"quorum": 1}, "quorum is 1, but mode is 'async'"),
        ({"algorithm": "scaffold"}, "SCAFFOLD's controls are means over a round"),
        ({"best_metric": "loss"}, "best_metric is 'loss', but mode is 'async'"),
        ({"min_workers": 2, "num_workers": 2}, "min_workers is 2, but async_buffer is 1"),
        ({"quorum": 1, "round_deadline_s": 3}, "quorum is 1, but mode is 'async'"),
        ({"algorithm": "fedavg", "dylu": True}, "dylu is set, but in 'fedavg'"),
        ({"staleness_weight": "inverse"}, "staleness_weight = 'inverse' is not one of constant, inverse_sqrt"),
        ({"staleness_weight": "inverse_sqrt", "reducer": "median"}, "the reducer 'median' has no weights"),
    ],
)
def test_what_an_asynchronous_run_does_not_have_is_refused(tmp_path: Path, settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        atoll.Server(
            nn.Linear(1, 1), **{"mode": "async", "port": 0, "state_dir": tmp_path / "state"} | settings
        ).start()
