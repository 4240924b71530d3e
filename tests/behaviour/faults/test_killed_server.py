"""The server is killed, in each mode of a run and wherever chance has it: the run leaves the undisturbed bits.

No update counts twice, and no site trains a round again while the server is away.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import (
    PART_BYTES,
    STREAMING,
    Result,
    ServerProcess,
    SiteProcess,
    Sites,
    StreamingSites,
    left_undisturbed,
    parts_sent,
    serve_wide,
)
from harness.process_figures import Peaks
from harness.processes import Nursery, RestartedProcess, wait_until
from harness.proxy import Fault, Proxy
from kit import SITES, Gate, Threads, ask_journal, exported
from kit.models import wide_model
from torch import Tensor, nn

from atoll.server.verify_state import verify_state

pytestmark = pytest.mark.slow


MEAN = """
import os, signal, time
from pathlib import Path

HERE = Path(__file__).parent


def mean(updates):
    pids = [os.getpid()]
    if updates[0].round == 3:
        pids.append(os.fork())
        if pids[-1] == 0:
            time.sleep(1000)
    with (HERE / "pids").open("a") as file:
        print(*pids, file=file)
    total = sum(update.weight for update in updates)
    for index, name in enumerate(updates[0].tensors):
        result = updates[0].tensors[name].mul_(updates[0].weight / total)
        for update in updates[1:]:
            result.add_(update.tensors[name], alpha=update.weight / total)
        yield name, result
        if updates[0].round == 2 and index == 1 and not (HERE / "killed").exists():  # half of the result is written
            (HERE / "killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
"""
"""The built-in mean. It kills the server in round 2, and forks a process in round 3."""


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "filter": {
        "workflow.result_filters": [
            {"path": "norm_clip", "args": {"max_norm": 3.0}},
            {"path": "drop", "args": ["2.bias"], "sites": ["b"]},
        ]
    },
    "down": {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"},
    "best": {"rounds.best_metric": "loss", "rounds.best_mode": "min"},
    # 1 of version 0 is best, 1/2 of version 1 is worse, and one round of patience is over
    "early stop": {"rounds.best_metric": "loss", "rounds.best_mode": "max", "rounds.early_stop_after": 1, "rounds": 0},
    "aggregator": {"aggregation.aggregator.path": "own.py:mean"},
    "streaming": STREAMING,
}
"""A way of running → its settings."""


def sites_in(mode: str) -> Callable[..., Threads]:
    return StreamingSites if mode == "streaming" else Sites


@pytest.fixture(scope="module")
def undisturbed_in(tmp_path_factory: pytest.TempPathFactory, undisturbed: Result) -> Callable[[str], Result]:
    """Mode → what its run leaves if nothing is killed. `MEAN` is the built-in mean."""

    @cache
    def left(mode: str) -> Result:
        if mode in ("sync", "aggregator"):
            return undisturbed
        return left_undisturbed(tmp_path_factory.mktemp("undisturbed"), sites_in(mode), **MODES[mode])

    return left


def run_with_deaths(
    nursery: Nursery,
    folder: Path,
    lives: tuple[str, ...],
    deaths: int,
    kind: Callable[..., Threads] = Sites,
    **settings: Any,
) -> Threads:
    """A whole run, whose server ends by each of these failpoints in turn; its sites, which are threads."""
    with ServerProcess(nursery, folder, lives, **settings) as server:
        sites = kind(server.url, folder)
        sites.join()
        assert server.process.wait() == 0
        assert server.process.deaths == deaths, "a failpoint did not fire"
    return sites


LIVES = {
    "sync, receiving": """
        spool.write=kill@5 part.received=kill@8 part.recorded=kill@8 accept.before=kill@2 accept.after=kill
    """,
    "sync, closing rounds": """
        accept.after=kill@2 pass.chunk=kill@2 pass.write=kill@3 head.before=kill head.after=kill head.after=kill
    """,
    "sync, beginning and recovering": """
        journal.commit=kill@2 slot.create=kill journal.commit=kill@3
        accept.after=kill@3 recover.midway=kill recover.midway=kill@2 pass.chunk=kill recover.midway=kill
    """,
    "filter": "filters.write=kill@9 accept.after=kill@2 pass.chunk=kill@2",
    "down": """
        pass.write=kill@9 recover.midway=kill pass.delta=kill@2 pass.delta=kill@3 head.before=kill head.after=kill
    """,
    "best": "export.write=kill export.write=kill@2 head.after=kill",
    "early stop, before its sites know of the end": "head.after=kill@3",
    "aggregator": "",
    "streaming": """
        head.after=kill@2 part.recorded=kill@3 accept.before=kill@3 accept.after=kill@2
        pass.write=kill@2 head.before=kill@2 head.after=kill
    """,
}
"""Mode, and what the server does → its failpoints: each kills the process that the one before has left."""


@pytest.mark.covers("F6", "F7", "F8", "F9", "F10", "F11", "F12", "F13", "L10", "L11", "L16", "T8", "X41", "X42", "D7")
@pytest.mark.parametrize("case", LIVES)
def test_a_killed_server_gives_the_same_bits(
    nursery: Nursery, tmp_path: Path, undisturbed_in: Callable[[str], Result], case: str
) -> None:
    """A server that is killed at various places and restarted ends with the bits of an undisturbed run, in every
    mode.
    """
    mode, lives = case.partition(",")[0], tuple(LIVES[case].split())
    (tmp_path / "own.py").write_text(MEAN)
    deaths = len(lives) + (mode == "aggregator")
    sites = run_with_deaths(nursery, tmp_path, lives, deaths, sites_in(mode), **MODES[mode])
    files = {path.name for path in (tmp_path / "state").iterdir() if path.is_file()}
    assert files == {
        "admin.token",
        "audit.head",
        "journal.sqlite",
        "lock",
        "reader.token",
        "receipts.key",
        "status.json",
    }
    Result(tmp_path).require_same(undisturbed_in(mode), sites)
    if mode == "aggregator":
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 3 + 1 + 1  # one a round, again after the kill, and the fork
        wait_until(lambda: not any(map(runs, pids)), "the end of aggregators, and of what they have forked")


def runs(pid: int) -> bool:
    """Whether a process is there, and is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


ASYNC = {
    "async.enabled": True,
    "rounds.total": 10,
    "rounds.sites": 3,
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.0,
    "async.staleness_weight": "constant",
}


def change(site: str, k: int, name: str, like: Tensor) -> Tensor:
    """What the k-th update of a site moves a parameter by."""
    generator = torch.Generator().manual_seed(1000 * k + 31 * ord(site) + len(name))
    return torch.randn(like.shape, generator=generator)


@pytest.mark.covers("F8", "F9", "F10", "F12", "F13", "L3", "L5")
def test_an_asynchronous_run_counts_each_update_once(nursery: Nursery, tmp_path: Path) -> None:
    """An asynchronous run whose server is killed and restarted counts each update at most once."""
    # Time decides which updates count, and in which order. The model is the start minus the sum of the counted updates.
    trained: Counter[str] = Counter()

    def train(model: nn.Module, site: str, number: int) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(change(site, trained[site], name, parameter))
        trained[site] += 1

    lives = ("accept.before=kill@3", "recover.midway=kill", "accept.after=kill@2", "pass.chunk=kill@2")
    lives += ("head.before=kill", "head.after=kill")
    run_with_deaths(nursery, tmp_path, lives, len(lives), partial(Sites, names="abc", train=train), **ASYNC)
    rows = ask_journal(
        tmp_path,
        "SELECT site, state = 'counted', version - 1 - base_version FROM tickets "
        "WHERE state IN ('counted', 'accepted') ORDER BY ticket",
    )
    taken, counted = Counter(site for site, *_ in rows), Counter(site for site, is_counted, _ in rows if is_counted)
    assert counted.total() == ASYNC["rounds.total"]
    for site in "abc":  # none is missing but the last, which came when the run was over
        assert trained[site] - taken[site] in (0, 1)
    assert max(staleness for _, is_counted, staleness in rows if is_counted) > 0
    result = exported(tmp_path)
    for name, start in wide_model().named_parameters():
        moved = sum(change(site, k, name, start).double() for site in "abc" for k in range(counted[site]))
        assert torch.allclose(result[name].double(), start.detach().double() - moved, rtol=0, atol=1e-5), name


@pytest.mark.covers("F6", "F7")
def test_a_killed_server_keeps_the_parts_that_arrived(nursery: Nursery, tmp_path: Path, undisturbed: Result) -> None:
    """If the server is killed in the middle of a part, sites send only this part again to the restarted server."""
    gate = Gate(2)
    with ServerProcess(nursery, tmp_path, **{"network.connections": 1}) as server, Proxy(server.port) as proxy:
        stall = Fault("PUT .*/parts/3 ", "up", at=PART_BYTES // 2, action="stall")
        proxy.faults.append(stall)
        sites = Sites(proxy.url, tmp_path, during=gate)
        assert stall.reached.wait(60)
        server.process.now.kill()
        proxy.cut()
        wait_until(lambda: server.process.deaths == 1, "a new start")
        proxy.heal()
        gate.wait()
        server.process.now.kill()
        wait_until(lambda: server.process.deaths == 2, "another start")
        gate.open()
        sites.join()
        assert server.process.wait() == 0
        sent = parts_sent(proxy.requests, 3)
    # a request a part: 0, 1 and 2 were there before the kill, and are not sent again
    assert [part for part in sent if part != 3] == [0, 1, 2, 4, 5]
    assert sent.count(3) >= 2  # tried again a few times while nothing answered
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("F6")
def test_a_server_killed_during_an_export_repeats_it(nursery: Nursery, tmp_path: Path, undisturbed: Result) -> None:
    """A server that is killed while it exports the model exports it after the restart, and leaves no temporary file."""
    # The workers have left without the server's knowledge. The test does not wait until their leases end.
    with ServerProcess(nursery, tmp_path, ("export.write=kill",)) as server:
        sites = Sites(server.url, tmp_path)
        sites.join()
        wait_until(lambda: server.process.deaths == 1, "its death")
        wait_until((tmp_path / "state/exports/model.safetensors").exists, "the export")
        leftovers = list((tmp_path / "state/exports").glob(".model*"))
    assert leftovers == []
    Result(tmp_path).require_same(undisturbed, sites)


@pytest.mark.covers("F6")
def test_starting_a_finished_run_again_changes_nothing(
    tmp_path: Path, undisturbed: Result, caplog: pytest.LogCaptureFixture
) -> None:
    """Starting the server of a finished run again changes nothing. The log says how to train further."""
    caplog.set_level(logging.INFO, "atoll")
    left_undisturbed(tmp_path)
    metrics = tmp_path / "state" / "exports" / "metrics.jsonl"
    before = metrics.read_text()
    with serve_wide(tmp_path) as server:
        server.run()
    assert Result(tmp_path).bits == undisturbed.bits
    assert metrics.read_text() == before != ""
    assert "this run has ended. To train further, raise rounds.total" in caplog.text


MORE_MB = 100.0
"""For all of them together, of connections, requests and scratches; their updates alone are 68 MB."""


@pytest.mark.covers("F37")
@pytest.mark.timeout(600)  # 200 sites take a minute of both cores
@pytest.mark.parametrize("many", [30, pytest.param(200, marks=pytest.mark.long)])
def test_many_workers_come_back_at_once_after_a_kill(nursery: Nursery, tmp_path: Path, many: int) -> None:
    """If the server is killed while many workers submit, each update counts once, and the new server needs little
    memory.
    """
    submitting = threading.Barrier(many + 1)
    names = [f"site-{number:03d}" for number in range(many)]
    peaks = Peaks()
    with ServerProcess(nursery, tmp_path, **{"rounds.sites": many, "rounds.total": 1}) as server:
        wait_until(lambda: "listening" in server.log.read_text(), "the server")
        sites = Sites(server.url, tmp_path, names, during=lambda *_: submitting.wait(300))
        submitting.wait(300)  # all of them send at once, and
        server.process.now.kill()
        wait_until(lambda: server.process.deaths == 1, "a new start", 60)
        wait_until(lambda: server.log.read_text().count("listening") == 2, "the server once more", 60)
        peaks.begin(server.process.now.pid)
        sites.join(300)
        peak_mb = peaks.peak_mb(server.process.now.pid)
        assert server.process.wait(60) == 0
    peaks.close()
    assert 0.0 < peak_mb < MORE_MB
    assert sites.trained == {(site, 1): 1 for site in names}
    assert Result(tmp_path).counted() == [(site, 1) for site in names]


SERVER_PLACES = {
    "spool.write": 12,
    "part.received": 8,
    "part.recorded": 8,
    "accept.before": 2,
    "accept.after": 2,
    "journal.commit": 12,
    "pass.chunk": 2,
    "pass.write": 3,
    "head.before": 1,
    "head.after": 1,
    "recover.midway": 2,
}
SITE_PLACES = {
    "worker.write": 6,
    "pull.part": 4,
    "pull.done": 1,
    "outbox.seal": 1,
    "push.part": 2,
    "worker.acknowledged": 1,
}
"""Failpoint → how often every life that leads a whole round reaches it at least."""


@pytest.mark.covers("F44")
@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2))])
def test_random_kills_lose_no_acknowledged_update(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    """Though the server and both sites are killed again and again at random places, the run ends with the same bits.

    Each of its rounds, computed again from the journal and the updates, gives the version that it gave then.
    """
    chance = random.Random(seed)

    def lives(places: dict[str, int], count: int) -> tuple[str, ...]:
        chosen = chance.choices(sorted(places), k=count)
        return tuple(f"{place}=kill@{chance.randint(1, places[place])}" for place in chosen)

    undisturbed = left_undisturbed(tmp_path / "undisturbed", rounds=8)
    settings = {"rounds.total": 8, "disk.keep_updates": 8}
    with ServerProcess(nursery, tmp_path, lives(SERVER_PLACES, 5), **settings) as server:
        sites = [SiteProcess(nursery, tmp_path, server.url, site) for site in SITES]
        workers = [RestartedProcess(site.start, lives(SITE_PLACES, 3)) for site in sites]
        try:
            assert [worker.wait() for worker in workers] == [0, 0]
            assert server.process.wait() == 0
        finally:
            for worker in workers:
                worker.close()
        assert server.process.deaths + sum(worker.deaths for worker in workers) >= 8, "hardly anything was killed"
    Result(tmp_path).require_same(undisturbed)
    found = verify_state(tmp_path / "state")
    assert found.changed == []
    assert [(each.version, each.result) for each in found.rounds] == [(version, "same") for version in range(1, 9)]
