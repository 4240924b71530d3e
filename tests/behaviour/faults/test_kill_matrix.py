"""The kill matrix: the server or a site is killed in each mode of a run, and the run leaves the undisturbed bits.

Rows are modes, columns are places. No update counts twice, and no site trains a round again while the server is away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_world import (
    EVERY_SITE_AND_ROUND,
    PART_BYTES,
    STREAMING,
    Result,
    ServerProcess,
    SiteProcess,
    Sites,
    StreamingSites,
    beside,
    left_undisturbed,
    serving,
    told,
)
from harness.processes import Nursery, wait_until
from kit import Threads, ask_journal, exported
from kit.models import wide_model
from kit.wire import version_parts
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Mode:
    """A way of running.

    Attributes:
        files: further ones beside the run file, by name.
        same_as: the mode whose undisturbed run leaves the same bits, where it is another one.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    sites: Callable[..., Threads] = Sites
    files: Mapping[str, str] = field(default_factory=dict)
    same_as: str = ""


MODES = {
    "sync": Mode(),
    "filter": Mode(
        {
            "workflow.result_filters": [
                {"path": "norm_clip", "args": {"max_norm": 3.0}},
                {"path": "drop", "args": ["2.bias"], "sites": ["b"]},
            ]
        }
    ),
    "residuals": Mode({"aggregation.upload_codec.name": "int4"}),
    "down": Mode({"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"}),
    "best": Mode({"rounds.best_metric": "loss", "rounds.best_mode": "min"}),
    "early stop": Mode(  # 1 of version 0 is best, 1/2 of version 1 is worse, and one round of patience is over
        {
            "rounds.best_metric": "loss",
            "rounds.best_mode": "max",
            "rounds.early_stop_after": 1,
            "rounds.total": 0,
        }
    ),
    "aggregator": Mode({"aggregation.aggregator.path": "own.py:mean"}, files={"own.py": MEAN}, same_as="sync"),
    "streaming": Mode(STREAMING, sites=StreamingSites),
}

UndisturbedIn = Callable[[str], Result]


@pytest.fixture(scope="module")
def undisturbed_in(tmp_path_factory: pytest.TempPathFactory, undisturbed: Result) -> UndisturbedIn:
    """Mode → what its run leaves if nothing is killed."""
    found = {"sync": undisturbed}

    def get(name: str) -> Result:
        name = MODES[name].same_as or name
        if name not in found:
            found[name] = left_undisturbed(tmp_path_factory.mktemp(name), MODES[name].sites, **MODES[name].settings)
        return found[name]

    return get


def server_case(mode: str, name: str, *lives: str, deaths: int | None = None) -> Any:
    deaths = len(lives) if deaths is None else deaths
    return pytest.param(mode, lives, deaths, id=f"{mode}-{name}")


@pytest.mark.covers("F6", "F7", "F8", "F9", "F10", "F11", "F12", "F13", "L10", "L11", "L16", "T8", "X41", "X42", "D7")
@pytest.mark.parametrize(
    ("mode", "lives", "deaths"),
    [
        server_case("sync", "while-a-part-is-written", "spool.write=kill@5"),
        server_case("sync", "before-a-part-is-recorded", "part.received=kill@8"),
        server_case("sync", "after-a-part-is-recorded", "part.recorded=kill@8"),
        server_case("sync", "before-the-accept", "accept.before=kill@2"),
        server_case("sync", "after-the-accept", "accept.after=kill"),
        server_case("sync", "after-the-last-accept-of-a-round", "accept.after=kill@4"),
        server_case("sync", "mid-aggregation", "pass.chunk=kill@2"),
        server_case("sync", "mid-write", "pass.write=kill@3"),
        server_case("sync", "before-the-head-moves", "head.before=kill@3"),
        server_case("sync", "after-the-head-moves", "head.after=kill@3"),
        server_case("sync", "after-the-last-head-moves", "head.after=kill@4"),
        server_case(
            "sync",
            "during-recovery",
            "accept.after=kill@3",
            "recover.midway=kill",
            "recover.midway=kill@2",
            "pass.chunk=kill",
            "recover.midway=kill",
        ),
        server_case("sync", "while-it-begins", "journal.commit=kill@2", "slot.create=kill", "journal.commit=kill@3"),
        server_case("filter", "while-it-filters", "filters.write=kill@9"),
        server_case("filter", "after-the-accept", "accept.after=kill@3"),
        server_case("filter", "mid-aggregation", "pass.chunk=kill@2"),
        server_case("filter", "disk-full", "filters.write=enospc@9", deaths=0),
        server_case("down", "while-a-delta-is-written", "pass.delta=kill@3"),
        server_case("down", "in-the-pass-and-again", "pass.write=kill@9", "recover.midway=kill", "pass.delta=kill@2"),
        server_case("down", "before-the-head-moves", "head.before=kill@2"),
        server_case("down", "after-the-head-moves", "head.after=kill@3"),
        server_case("best", "while-the-first-best-version-is-written", "export.write=kill@1"),
        server_case("best", "while-a-later-one-is-written", "export.write=kill@2"),
        server_case("best", "after-the-head-moves", "head.after=kill@3"),
        server_case("early stop", "before-its-sites-know-of-the-end", "head.after=kill@3"),
        server_case("aggregator", "while-it-works", deaths=1),
        server_case("streaming", "a-part-of-the-first-fragment", "part.recorded=kill@3"),
        server_case("streaming", "before-an-accept-of-the-second-fragment", "accept.before=kill@3"),
        server_case("streaming", "after-the-last-accept-of-a-cycle", "accept.after=kill@6"),
        server_case("streaming", "while-the-second-fragment-is-written", "pass.write=kill@2"),
        server_case("streaming", "before-the-head-of-the-second-fragment-moves", "head.before=kill@5"),
        server_case("streaming", "after-the-head-of-the-first-fragment-moved", "head.after=kill@4"),
        server_case("streaming", "again", "head.after=kill@5", "recover.midway=kill@2", "accept.after=kill@3"),
        server_case("streaming", "while-it-begins-with-one-of-three-first-versions", "head.after=kill@2"),
    ],
)
def test_a_killed_server_comes_to_the_same_bits(
    nursery: Nursery, tmp_path: Path, undisturbed_in: UndisturbedIn, mode: str, lives: tuple[str, ...], deaths: int
) -> None:
    sites = run_with_deaths(nursery, tmp_path, MODES[mode], lives, deaths)
    files = {path.name for path in (tmp_path / "state").iterdir() if path.is_file()}
    assert files == {"audit.head", "journal.sqlite", "lock", "status.json"}
    Result(tmp_path).require_same(undisturbed_in(mode), sites)
    if (tmp_path / "pids").exists():
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 3 + deaths + 1
        wait_until(lambda: not any(map(runs, pids)), "the end of aggregators, and of what they have forked")


def run_with_deaths(nursery: Nursery, folder: Path, mode: Mode, lives: tuple[str, ...], deaths: int) -> Threads:
    """A whole run; its sites, which are threads and survive."""
    for name, text in mode.files.items():
        (folder / name).write_text(text)
    with ServerProcess(nursery, folder, lives, **mode.settings) as server:
        sites = mode.sites(server.url, folder)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == deaths, "a failpoint did not fire"
    return sites


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


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param(("accept.before=kill@3",), id="before-an-accept", marks=pytest.mark.covers("F8")),
        pytest.param(("accept.after=kill@4",), id="after-an-accept", marks=pytest.mark.covers("F9")),
        pytest.param(("pass.chunk=kill@9",), id="in-a-pass", marks=pytest.mark.covers("F10")),
        pytest.param(("head.before=kill@4",), id="before-the-head-moves", marks=pytest.mark.covers("F12")),
        pytest.param(("head.after=kill@5",), id="after-the-head-moves", marks=pytest.mark.covers("F12")),
        pytest.param(
            ("accept.after=kill@3", "recover.midway=kill", "head.after=kill@2", "accept.before=kill@2"),
            id="again-and-again",
            marks=pytest.mark.covers("F13"),
        ),
    ],
)
@pytest.mark.covers("L3", "L5")
def test_every_acknowledged_update_of_an_asynchronous_run_counts_once(
    nursery: Nursery, tmp_path: Path, lives: tuple[str, ...]
) -> None:
    """Which updates count, and in which order, depends on time; the model is the sum of those that did."""
    trained: Counter[str] = Counter()

    def train(model: nn.Module, site: str, number: int) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(change(site, trained[site], name, parameter))
        trained[site] += 1

    sites = partial(Sites, names="abc", train=train)
    run_with_deaths(nursery, tmp_path, Mode(ASYNC, sites=sites), lives, len(lives))
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


def bytes_behind(parts: int) -> int:
    """Bytes of a version behind its first parts."""
    return sum(stop - start for start, stop in version_parts(wide_model(), PART_BYTES)[parts:])


BEHIND_TWO_OF_A_DIFFERENCE = -1
"""Stands for the bytes of a difference between two versions behind its first two parts."""


def site_case(mode: str, name: str, place: str, goes_on: tuple[str, int, str, int] | None = None) -> Any:
    """`goes_on`: what its next process says first, of which round, and the bytes that had gone up or come down then."""
    return pytest.param(mode, place, goes_on, id=f"{mode}-{name}")


@pytest.mark.covers("F1", "F2", "F3", "F4", "L10", "L16")
@pytest.mark.parametrize(
    ("mode", "place", "goes_on"),
    [
        # three of the six parts were there
        site_case("sync", "pulling", "pull.part=kill@3", ("trains", 1, "down", bytes_behind(3))),
        # the base was whole
        site_case("sync", "training", "training", ("trains", 2, "down", 0)),
        # the round is trained again
        site_case("sync", "before-its-update-is-whole", "outbox.seal=kill@2", ("begins", 2, "up", 0)),
        site_case("sync", "after-the-acknowledgement", "worker.acknowledged=kill@2", ("begins", 3, "up", 0)),
        # what the codec has left over is added once: amid the files, all written, all sent
        site_case("residuals", "forming-its-update", "worker.write=kill@20"),
        site_case("residuals", "before-its-update-is-whole", "outbox.seal=kill@2"),
        site_case("residuals", "after-the-acknowledgement", "worker.acknowledged=kill@2"),
        # three of six parts of its base are those of the next version: the other three are pulled
        site_case("down", "adding-to-its-base", "delta.part=kill@3", ("trains", 2, "down", bytes_behind(3))),
        # six parts of version 0, then two of the difference
        site_case(
            "down",
            "pulling-a-difference",
            "pull.part=kill@8",
            ("trains", 2, "down", BEHIND_TWO_OF_A_DIFFERENCE),
        ),
        site_case("down", "training", "training", ("trains", 2, "down", 0)),
    ],
)
def test_a_killed_site_goes_on_where_it_was(
    nursery: Nursery,
    tmp_path: Path,
    undisturbed_in: UndisturbedIn,
    mode: str,
    place: str,
    goes_on: tuple[str, int, str, int] | None,
) -> None:
    from atoll.codecs.version_difference import Downlink
    from atoll.tensors.layout import version_layout
    from atoll.tensors.module_tensors import schema_of

    settings = {**MODES[mode].settings, "network.connections": 1, "rounds.min_sites": 1}
    with serving(tmp_path, **settings) as server, beside(server, Sites(server.url, tmp_path, names=["b"])):
        site = SiteProcess(nursery, tmp_path, server.url, "a")
        again = site.killed_in_training_and_again(2) if place == "training" else site.killed_and_again(place)
    if goes_on is not None:
        what, number, way, nbytes = goes_on
        if nbytes == BEHIND_TWO_OF_A_DIFFERENCE:
            downlink = Downlink.of(version_layout(schema_of(wide_model()), PART_BYTES), "int8", {})
            assert downlink is not None
            nbytes = sum(part.nbytes for part in downlink.parts[2:])
        line = told(again, what)
        assert (line["round"], line[way]) == (number, nbytes)
    result = Result(tmp_path)
    result.require_same(undisturbed_in(mode))
    assert result.tickets == len(EVERY_SITE_AND_ROUND), "an open ticket is given again, not another one"
