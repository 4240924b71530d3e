"""`Server.save_state` and `Server.load_state`: a run goes on in another state directory, as it would have here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit import ask_journal
from kit.damage import damage_head, flip_bit
from kit.servers import plain_server
from kit.sites import DiLoCoSites, manual_sites
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import atoll
from atoll.errors import AtollError, ConfigError, StateCorrupt, StateLocked, StoreError, UsageError
from atoll.filters import NormClip
from atoll.reducers.means import WeightedMean
from atoll.server import saved_state
from atoll.server.coordinator.coordinator import Coordinator
from atoll.server.saved_state import SavedState
from atoll.store.reader import checked_audit
from atoll.store.saved_rows import saved_rows
from atoll.store.store import Store

pytestmark = pytest.mark.covers("L20")

TWO: dict[str, Any] = {"rounds.sites": 2, "rounds.total": 4}
MOMENTUM = {
    f"algorithm.outer_optimizer.{key}": value for key, value in {"name": "sgd", "lr": 0.7, "momentum": 0.9}.items()
}


class Net(nn.Module):
    """A layer, its tied copy, running statistics, a counter, and a buffer of one's own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("own", torch.tensor([1.0, 2.0]))
        self.register_buffer("flags", torch.tensor([True]))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def play(server: atoll.Server, folder: Path, last: int, build: Callable[[], nn.Module] = Net) -> None:
    """Both sites join, take the rounds up to `last`, and leave; a round's data depend on site and round alone."""
    sites = manual_sites(server, folder)
    while server.status().version < last:
        numbers = {site.next_round() for site in sites.values()}
        (number,) = numbers
        for name, site in sites.items():
            model = site.round.load_into(build())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * number + ord(name)))
            with site.round.correct(model, optimizer):
                for _ in range(2):
                    optimizer.zero_grad()
                    model(x.to(model.own.dtype)).square().mean().backward()
                    optimizer.step()
                model.own.add_(ord(name) - 96)
            site.submit(model, weight=2.0 if name == "a" else 1.0, metrics={"loss": float(number)})
        wait_until(lambda number=number: server.status().version == number, "the version")
    for site in sites.values():
        site.close()


def loaded(path: Path, folder: Path, **settings: Any) -> atoll.Server:
    given = {"network.port": 0, "disk.state_dir": folder / "state", "disk.min_free_bytes": 0}
    return atoll.Server.load_state(path, settings=given | settings)


def require_equal(one: Path, other: Path) -> None:
    """Every tensor of two saved states: the model, the outer state, and those of the algorithm."""
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


CASES: dict[str, dict[str, Any]] = {
    "momentum": MOMENTUM,
    "adam": {"algorithm.outer_optimizer": {"name": "adam", "lr": 0.1}},
    "adamw by rate": {
        "algorithm.outer_optimizer": {"name": "adamw", "lr": 0.1, "weight_decay": 0.1},
        "algorithm.outer_lr_of": {"*.bias": 0.5},
    },
    "rmsprop": {"algorithm.outer_optimizer": {"name": "rmsprop", "lr": 0.01, "momentum": 0.5}},
    "whole tensors": {"algorithm.outer_optimizer": {"name": "adafactor", "lr": 0.1}},
    "fedyogi": {"algorithm.name": "fedyogi"},
    "scaffold": {"algorithm.name": "scaffold"},
    "fednova": {"algorithm.name": "fednova"},
    "rounded versions": MOMENTUM | {"aggregation.download_codec.name": "int8"},
    "residuals": MOMENTUM | {"aggregation.upload_codec.name": "topk"},
    "rules": MOMENTUM
    | {
        "model.buffers": {"own": "sum", "norm.running_mean": "keep", "flags": "first"},
        "aggregation.reducer.name": "mean",
    },
    "asynchronous": MOMENTUM | {"async.enabled": True, "async.buffer_size": 2, "async.momentum_every": 2},
}

IN_BFLOAT16 = ("momentum", "scaffold", "residuals", "rules")
"""Cases of which each has other states than the rest, and so also runs in another dtype in `make test`."""


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        pytest.param(
            settings,
            dtype,
            marks=() if dtype == torch.float32 or name in IN_BFLOAT16 else pytest.mark.long,
            id=f"{name}-{dtype}",
        )
        for name, settings in CASES.items()
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_a_loaded_run_continues_as_the_saved_one(tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """A run that is started from a saved state gives the same versions and states, bit for bit, as the run that was
    saved.

    The start repeats none of the saved settings.
    """
    build = lambda: Net(dtype)  # noqa: E731
    with plain_server(tmp_path, build(), **(TWO | settings)) as server:
        play(server, tmp_path, 2, build)
        path = server.save_state(tmp_path / "two.safetensors")
        shutil.copytree(tmp_path / "w", tmp_path / "other" / "w")
        play(server, tmp_path, 4, build)
        whole = server.save_state(tmp_path / "whole.safetensors")
    with loaded(path, tmp_path / "other") as server:
        assert (server.status().version, server.status().run) == (2, server.status().run)
        play(server, tmp_path / "other", 4, build)
        require_equal(server.save_state(tmp_path / "again.safetensors"), whole)
        assert [each.version for each in server.status().history] == [1, 2, 3, 4]


def by_itself(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
    optimizer.zero_grad()
    (sum(parameter.square().sum() for parameter in model.parameters()) * (ord(site) - 96)).backward()
    optimizer.step()


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def test_each_fragment_continues_from_its_own_version(tmp_path: Path) -> None:
    """A loaded state continues each fragment from its own version. After 5 steps, two of three fragments have one
    version more than the third.
    """
    settings = {"algorithm.name": "diloco", "K": 3, "H": 3, "rounds.sites": 1, "rounds.total": 4}

    def take(server: atoll.Server, folder: Path, steps: int) -> None:
        DiLoCoSites(server.url, folder, steps, "a", build=stack, step=by_itself).join()

    with plain_server(tmp_path, stack(), **settings) as server:
        take(server, tmp_path, 5)
        wait_until(lambda: sum(each.version for each in server.status().fragments) == 5, "five versions")
        versions = [each.version for each in server.status().fragments]
        path = server.save_state(tmp_path / "five.safetensors")
        shutil.copytree(tmp_path / "workers", tmp_path / "other" / "workers")
        take(server, tmp_path, 4)
        wait_until(lambda: sum(each.version for each in server.status().fragments) == 9, "nine versions")
        whole = server.save_state(tmp_path / "whole.safetensors")
    assert sorted(versions) == [1, 2, 2]
    with loaded(path, tmp_path / "other") as server:
        assert [each.version for each in server.status().fragments] == versions
        take(server, tmp_path / "other", 4)
        wait_until(lambda: sum(each.version for each in server.status().fragments) == 9, "nine versions")
        require_equal(server.save_state(tmp_path / "again.safetensors"), whole)


def test_state_can_be_saved_after_the_server_ended(tmp_path: Path) -> None:
    """The state can be saved after the server has ended."""
    # The file equals one that was saved before the end. Saving is refused while another server uses the directory, or
    # if the versions were only in memory.
    with plain_server(tmp_path, Net(), **TWO, **MOMENTUM) as server:
        play(server, tmp_path, 2)
        before = server.save_state(tmp_path / "before.safetensors").read_bytes()
    assert server.save_state(tmp_path / "after.safetensors").read_bytes() == before
    with plain_server(tmp_path, **TWO, **MOMENTUM):
        with pytest.raises(StateLocked, match="is in use by"):
            server.save_state(tmp_path / "locked.safetensors")
    with plain_server(tmp_path / "memory", Net(), **{"disk.in_files": False}) as server:
        server.save_state(tmp_path / "memory.safetensors")
    with pytest.raises(UsageError, match=r"kept its versions in memory .* Save the state while the server runs"):
        server.save_state(tmp_path / "memory.safetensors")


def test_a_loaded_finished_run_can_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved run that is finished stays finished when it is loaded, and its result is written once. With a higher
    `rounds.total`, it trains on.
    """
    with plain_server(tmp_path, Net(), **(TWO | {"rounds.total": 2})) as server:
        play(server, tmp_path, 2)
        server.run()
    path = server.save_state(tmp_path / "end.safetensors")
    begun: list[Coordinator] = []
    finish = Coordinator._finish
    monkeypatch.setattr(Coordinator, "_finish", lambda run: begun.append(run) or finish(run))
    with loaded(path, tmp_path / "same") as server:
        assert server.wait(30)
        assert server.status().finished
    assert len(begun) == 1
    with loaded(path, tmp_path / "more", **{"rounds.total": 3}) as server:
        play(server, tmp_path, 3)
        assert server.status().version == 3


def test_updates_of_the_open_round_are_submitted_again(tmp_path: Path) -> None:
    """A saved state does not have the updates of the open round."""
    # A site that had submitted one sends it again, without training again. No ticket of the first run has a number that
    # is given again. The file has nothing about the secrets of leases, because it may be passed on.
    with plain_server(tmp_path, {"w": torch.zeros(2)}, **TWO) as server:
        sites = manual_sites(server, tmp_path)
        for number in (1, 2):
            for name, site in sites.items():
                assert site.next_round() == number
                if (name, number) != ("b", 2):
                    site.submit({"w": site.pull()["w"] + (1 if name == "a" else 2)})
        path = server.save_state(tmp_path / "one.safetensors")
        holders = [process for (process,) in ask_journal(tmp_path, "SELECT process FROM members")]
        for site in sites.values():
            site.close()
    assert len(holders) == 2
    assert not any(process in json.dumps(SavedState.read(path).note) for process in holders)
    with loaded(path, tmp_path / "other") as server:
        sites = manual_sites(server, tmp_path)
        assert sites["b"].next_round() == 2
        sites["b"].submit({"w": sites["b"].pull()["w"] + 2})
        assert sites["a"].next_round(wait_s=30.0) == 3
        assert sites["a"].pull()["w"].tolist() == [3.0, 3.0]  # twice the mean of 1 and 2
        counted = "SELECT ticket FROM tickets WHERE state = 'counted' ORDER BY ticket"
        assert ask_journal(tmp_path / "other", counted) == [(1,), (2,), (10**9 + 1,), (10**9 + 2,)]


def test_a_loaded_runs_audit_log_passes(tmp_path: Path) -> None:
    """A run that once lost a damaged version can be saved and loaded, and its audit log still passes the check."""
    one = {"rounds.sites": 1, "rounds.total": 4}
    with plain_server(tmp_path, {"w": torch.zeros(2)}, **one) as server:
        (site,) = manual_sites(server, tmp_path, "a").values()
        for number in (1, 2):
            assert site.next_round() == number
            site.submit({"w": site.pull()["w"] + 1})
        wait_until(lambda: server.status().version == 2, "version 2")
        site.close()
    damage_head(tmp_path)
    with plain_server(tmp_path, **one) as server:
        path = server.save_state(tmp_path / "one.safetensors")
    with loaded(path, tmp_path / "other") as server:
        assert server.status().version == 1
    assert "fell back" in [each.what for each in checked_audit(tmp_path / "other" / "state", 50).last]


@pytest.mark.covers("S2")
def test_a_loaded_run_remembers_lost_algorithm_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a site has lost its SCAFFOLD control, the warning about it is in the saved state, and the loaded server does
    not add another.
    """
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")
    with plain_server(tmp_path, Net(), **TWO, **CASES["scaffold"]) as server:
        play(server, tmp_path, 1)
        shutil.rmtree(tmp_path / "w" / "b")
        (site,) = manual_sites(server, tmp_path, "b").values()
        assert site.next_round() == 2
        site.close()
        begun = [text for text in server.status().warnings if "begins at zero again" in text]
        path = server.save_state(tmp_path / "one.safetensors")
    shutil.copytree(tmp_path / "w", tmp_path / "other" / "w")
    with loaded(path, tmp_path / "other") as server:
        assert [text for text in server.status().warnings if "begins at zero again" in text] == begun
        play(server, tmp_path / "other", 2)
        assert [text for text in server.status().warnings if "begins at zero again" in text] == begun
    assert len(begun) == 1


FIRST = """
from pathlib import Path

def first(controller):
    with Path(__file__).with_name("ran").open("a") as file:
        file.write("once")
"""


def test_a_loaded_run_does_not_repeat_finished_workflows(tmp_path: Path) -> None:
    """A run that is loaded after the first of its two workflows had ended does not run that workflow again."""
    (tmp_path / "flow.py").write_text(FIRST)
    steps = {"workflow.steps": [{"path": f"{tmp_path / 'flow.py'}:first"}, {"kind": "train"}]}
    with plain_server(tmp_path, Net(), **TWO, **steps) as server:
        wait_until(lambda: server.status().workflows[1].state == "running", "training")
        path = server.save_state(tmp_path / "first.safetensors")
    with loaded(path, tmp_path / "other", **steps) as server:
        wait_until(lambda: server.status().workflows[1].state == "running", "training")
    assert (tmp_path / "ran").read_text() == "once"


def test_a_saved_state_is_consistent(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server reads the rows for a saved state, no other thread can commit a version."""
    free = []

    def try_lock(store: Store) -> None:
        free.append(store.journal.lock.acquire(blocking=False))
        if free[-1]:
            store.journal.lock.release()

    def rows(store: Store) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(try_lock, store).result()
        return saved_rows(store)

    monkeypatch.setattr(saved_state, "saved_rows", rows)
    with loaded(saved, tmp_path) as server:
        server.save_state(tmp_path / "again.safetensors")
    assert free == [False]


def test_the_same_start_continues_a_loaded_run(tmp_path: Path) -> None:
    """If a program that loads a saved state is started again, it continues the run in the new directory. The audit log
    there passes the check.
    """
    with plain_server(tmp_path, Net(), **TWO) as server:
        play(server, tmp_path, 2)
    path = server.save_state(tmp_path / "two.safetensors")
    with loaded(path, tmp_path / "other") as server:
        play(server, tmp_path, 3)
    with loaded(path, tmp_path / "other") as server:
        assert server.status().version == 3
        play(server, tmp_path, 4)
    assert "restored" in [each.what for each in checked_audit(tmp_path / "other" / "state", 50).last]


def test_a_state_is_not_loaded_over_a_run(tmp_path: Path) -> None:
    """A saved state is not loaded into a directory that has a run already. That run stays as it was."""
    with plain_server(tmp_path, Net(), **TWO) as server:
        play(server, tmp_path, 1)
        path = server.save_state(tmp_path / "one.safetensors")
        play(server, tmp_path, 2)
    with pytest.raises(ConfigError, match=r"already contains a run .* version 2.*set another disk\.state_dir"):
        loaded(path, tmp_path).start()
    with plain_server(tmp_path, **TWO) as server:
        assert server.status().version == 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a run after its first round, with momentum."""
    folder = tmp_path_factory.mktemp("saved")
    with plain_server(folder, Net(torch.bfloat16), **TWO, **MOMENTUM) as server:
        play(server, folder, 1, lambda: Net(torch.bfloat16))
        return server.save_state(folder / "one.safetensors")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"algorithm.name": "fedadam"},
            r"one\.safetensors has algorithm\.name = 'fedavg', but this start sets 'fedadam'",
        ),
        (
            {"algorithm.outer_optimizer": {"name": "adam", "lr": 0.1}},
            r"algorithm\.outer_optimizer = .*sgd.* but this start",
        ),
        ({"algorithm.outer_optimizer.momentum": 0.5}, r"algorithm\.outer_optimizer = .*0\.9.*0\.5"),
        ({"async.enabled": True}, r"async\.enabled = False, but this start sets True"),
        ({"network.part_bytes": 2**17}, r"network\.part_bytes = 16777216, but this start sets 131072"),
        (
            {"model.buffers": {"own": "max"}},
            r"has the rule 'mean' for 'own', but this start sets model\.buffers to 'max'",
        ),
        ({"round.total": 3}, "round"),
    ],
)
def test_a_loaded_run_refuses_other_fixed_settings(
    tmp_path: Path, saved: Path, settings: dict[str, Any], told: str
) -> None:
    """If a start loads a state with other values of settings that are fixed for a run, it is refused. The error has the
    setting's name.
    """
    with pytest.raises(ConfigError, match=told):
        loaded(saved, tmp_path, **settings).start()
    assert not (tmp_path / "state").exists()
    with loaded(saved, tmp_path) as server:
        assert server.status().version == 1


def test_a_saved_state_omits_machine_settings(tmp_path: Path, saved: Path) -> None:
    """A saved state leaves out settings of the machine, such as port, folder, disk limit and the file of the model. The
    size of parts is kept.
    """
    own = {"model.source": str(saved), "network.part_bytes": 2**17}
    with plain_server(tmp_path, **TWO, **own) as server:
        path = server.save_state(tmp_path / "own.safetensors")
    kept = {"algorithm.name": "fedavg", "network.part_bytes": 2**17} | TWO
    assert SavedState.read(path).values == kept


def test_the_log_lists_replaced_settings(tmp_path: Path, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a start loads a state with other values of settings that may change, the log lists each new value with the old
    one.
    """
    with loaded(saved, tmp_path, **{"rounds.total": 9, "rounds.min_sites": 2}) as server:
        assert server.status().rounds == 9
    assert "rounds.total = 9 in place of 4; rounds.min_sites = 2 in place of nothing" in caplog.text


def test_code_is_never_loaded_from_a_saved_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A state with code in its settings loads only if the start gives the path of the code again.

    If the saved run had filters from its program and the new start has none, the log warns.
    """
    path, setting = f"{__name__}:Own", "algorithm.outer_optimizer"
    settings = TWO | {f"{setting}.path": path, f"{setting}.lr": 0.5}
    with plain_server(tmp_path, Net(), filters=[NormClip(1.0)], **settings) as server:
        state = server.save_state(tmp_path / "own.safetensors")
    with pytest.raises(ConfigError, match=rf"{setting} = .*{path}.*never loads code.*Set {setting}"):
        loaded(state, tmp_path / "other")
    with loaded(state, tmp_path / "other", **{setting: {"path": path, "lr": 0.5}}) as server:
        assert "was served with filters = NormClip, but this start has none" in caplog.text
        server.stop()


@pytest.mark.parametrize(
    "settings",
    [{"run.name": "exp: lr 0.1"}, {"model.buffers": {"x:*": "first"}}, {"algorithm.outer_lr_of": {"*[!:]": 0.5}}],
    ids=lambda each: min(each),
)
def test_a_colon_does_not_make_code_paths(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A setting whose text has a colon, such as a run name, loads from a saved state like any other."""
    with plain_server(tmp_path, Net(), **TWO, **settings) as server:
        state = server.save_state(tmp_path / "own.safetensors")
    with loaded(state, tmp_path / "other") as server:
        assert server.settings.chosen(tuple(settings)) == settings


def test_a_starts_setting_replaces_a_saved_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A setting of the start replaces the saved setting, and the log says both values.

    A saved reducer that is a code path is refused, unless the start chooses another reducer.
    """
    own = {"aggregation.reducer": {"path": f"{__name__}:OwnMean"}}
    with plain_server(tmp_path, Net(), **TWO, **own, **{"run.name": "exp: 1"}) as server:
        state = server.save_state(tmp_path / "own.safetensors")
    with pytest.raises(ConfigError, match=r"aggregation\.reducer = .*OwnMean.* but this start has nothing"):
        loaded(state, tmp_path / "other", **{"run.name": "exp: 2"})
    with loaded(state, tmp_path / "other", **{"run.name": "exp: 2", "aggregation.reducer.name": "mean"}) as server:
        assert server.settings.run.name == "exp: 2"
    assert "run.name = 'exp: 2' in place of 'exp: 1'" in caplog.text
    assert re.search(r"aggregation\.reducer = .*'mean'.* in place of .*OwnMean", caplog.text)


class OwnMean(WeightedMean):
    """A reducer of the user's own."""


class Own(torch.optim.SGD):
    """An outer optimizer of the user's own."""


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def plain(path: Path) -> None:
    save_file({"w": torch.zeros(2)}, path)


def saved_anew(path: Path) -> None:
    save_file(load_file(path), path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cut, "is not the state .* or is damaged: .* has .* bytes of tensors"),
        (halved, "is damaged"),
        (lambda path: path.write_bytes(b""), "has only 0 bytes"),
        (lambda path: path.write_bytes(b"PK\x03\x04\x00\x00\x08\x08" + bytes(64)), "claims to have a header of"),
        (plain, "is a safetensors file without the state of a run.*To begin a new run with the model in this file"),
        (saved_anew, "is a safetensors file without the state of a run"),
        (lambda path: path.unlink(), r"cannot be read \(No such file or directory\)"),
        (lambda path: (path.unlink(), path.mkdir()), r"cannot be read \(Is a directory\)"),
    ],
)
def test_refuses_files_without_state(tmp_path: Path, saved: Path, change: Callable[[Path], object], told: str) -> None:
    """A file that is missing, damaged or has no state of a run is refused with a message that says so. No folder is
    made.
    """
    shutil.copy(saved, path := tmp_path / "state.safetensors")
    change(path)
    with pytest.raises(AtollError, match=told):
        loaded(path, tmp_path).start()
    assert not (tmp_path / "state").exists()
    with loaded(saved, tmp_path) as server:
        assert server.status().version == 1


def test_every_damaged_bit_of_a_state_is_noticed(tmp_path: Path, saved: Path) -> None:
    """If any bit of a saved state is flipped, the start refuses the file and makes no folder."""
    # The only bytes without a meaning are spaces at the end of the header, and they are compared too.
    size = saved.stat().st_size
    for offset in [3, 9, *range(40, size, size // 40), size - 1]:
        shutil.copy(saved, path := tmp_path / "state.safetensors")
        flip_bit(path, offset, bit=offset % 7)
        with pytest.raises((StateCorrupt, ConfigError), match=re.escape(str(path))):
            loaded(path, tmp_path).start()
        assert not (tmp_path / "state").exists()


def test_a_refused_start_writes_nothing(tmp_path: Path, saved: Path) -> None:
    """If a start is refused, an empty state directory of the user stays empty."""
    (state := tmp_path / "state").mkdir()
    with pytest.raises(ConfigError):
        plain_server(tmp_path, **{"model.source": str(tmp_path / "missing.safetensors")}).start()
    assert list(state.iterdir()) == []
    with pytest.raises(ConfigError):
        loaded(saved, tmp_path, **{"algorithm.name": "fedadam"}).start()
    assert list(state.iterdir()) == []


def test_a_state_is_not_saved_onto_a_folder(tmp_path: Path, saved: Path) -> None:
    """`save_state` makes missing folders of its path. It refuses a path that is empty or is a folder."""
    with loaded(saved, tmp_path) as server:
        assert server.save_state(tmp_path / "new" / "sub" / "x.safetensors").is_file()
        for path in ("", tmp_path):
            with pytest.raises(UsageError, match="names no file"):
                server.save_state(path)
        with pytest.raises(StoreError, match=r"The folder /proc/missing cannot be made"):
            server.save_state("/proc/missing/x")


def test_the_state_of_a_swarm_is_refused(tmp_path: Path) -> None:
    """If the run is a swarm, `save_state` refuses and suggests `atoll export`."""
    with plain_server(tmp_path, Net(), **{"algorithm.name": "diloco", "swarm.enabled": True, **TWO}) as server:
        with pytest.raises(UsageError, match=r"The run is a swarm.*atoll export"):
            server.save_state(tmp_path / "state.safetensors")


def test_a_state_may_be_an_initial_model(tmp_path: Path, saved: Path) -> None:
    """A new run may start from the model in a saved state. It begins at version 0, with the same tensors."""
    with plain_server(tmp_path, **{"model.source": str(saved)}) as server:
        assert server.status().version == 0
        new = load_file(server.save_state(tmp_path / "new.safetensors"))
    assert new.keys() == Net().state_dict().keys()
    assert all(torch.equal(tensor, load_file(saved)[name]) for name, tensor in new.items())


def test_early_stopping_counts_the_rounds_before(tmp_path: Path) -> None:
    """A loaded run counts the rounds without an improvement before its state was saved."""
    # The loss of each round is the round's number. Round 1 is the best, and rounds 2 and 3 end the run.
    settings = {"rounds.best_metric": "loss", "rounds.best_mode": "min", "rounds.early_stop_after": 2}
    with plain_server(tmp_path, Net(), **TWO, **settings) as server:
        play(server, tmp_path, 2)
        path = server.save_state(tmp_path / "two.safetensors")
    with loaded(path, tmp_path / "other") as server:
        play(server, tmp_path, 3)
        assert server.wait(30)
        assert server.status().finished


def test_a_loaded_run_keeps_scaffolds_total_weight(tmp_path: Path) -> None:
    """A loaded run continues with the same total weight of SCAFFOLD.

    The total weight is 2 in every round: sites `a` and `b` have weight 1 each, and site `c` only sits out.
    """
    kept = tmp_path

    def play_round(server: atoll.Server, folder: Path, number: int) -> Path:
        sites = manual_sites(server, folder, "cab")
        assert {site.next_round() for site in sites.values()} == {number}
        for name, site in sites.items():
            model = site.round.load_into(nn.Linear(2, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with site.round.correct(model, optimizer):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            site.submit(model, weight=0 if name == "c" else 1)
        wait_until(lambda: server.status().version == number, "the version")
        assert [each.total_weight for each in server.status().history] == [2.0] * number
        for site in sites.values():
            site.close()
        return server.save_state(tmp_path / f"{number}.safetensors")

    three = {"rounds.sites": 3, "rounds.total": 4, "algorithm.name": "scaffold"}
    with plain_server(tmp_path, nn.Linear(2, 1), **three) as server:
        path = play_round(server, tmp_path, 1)
    for number in (2, 3):
        folder = tmp_path / str(number)
        shutil.copytree(kept / "w", folder / "w")
        with loaded(path, folder) as server:
            path = play_round(server, folder, number)
        kept = folder
