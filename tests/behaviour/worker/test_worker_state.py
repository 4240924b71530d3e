"""What a site's script keeps in `worker.state`: it belongs to the last update of the site that counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.admin import roll_back
from kit.manual_site import ManualSite
from kit.world import World
from torch import nn

import atoll
from atoll.errors import ConfigError, UsageError
from atoll.testing.run import local_worker

pytestmark = pytest.mark.covers("X46")
MODEL = {"w": torch.zeros(3)}


def taken(site: ManualSite) -> list[int]:
    """The rounds in the site's state."""
    return list(site.worker.state.get("rounds", []))


def take(world: World, name: str = "a", **about: Any) -> list[int]:
    """The site takes a round, notes its number in its state, and submits; the rounds that it found there."""
    site = world.sites[name]
    world.pull(name)
    found = taken(site)
    state = site.worker.state
    state["rounds"] = [*found, site.round.number]
    state["sum"] = state.get("sum", torch.zeros(2)) + site.round.number
    assert torch.equal(state["sum"], torch.full((2,), float(sum(state["rounds"]))))
    world.submit(name, about.pop("change", 1.0), **about)
    return found


def again(world: World, name: str = "a") -> list[int]:
    """Another process of the site begins a round; the rounds that it finds in its state."""
    if name in world.sites:
        world.sites.pop(name).close()
    world.pull(name)
    return taken(world.sites[name])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, MODEL, "a", rounds=9)


@pytest.mark.parametrize("way", ["joined", "local"])
def test_a_site_finds_its_state_in_the_next_round(world: World, way: str) -> None:
    """What a script writes before it submits is what it finds in the next round: tensors, arrays, plain values."""
    kept = {
        "head": {"weight": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)},
        "view": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        "flags": torch.tensor([True, False]),
        "array": np.arange(3, dtype=np.int16),
        "plain": [1, 2.5, float("inf"), "text", None, {"deep": ("a", b"b")}],
        "none": torch.zeros(0, 2),
    }
    with world:
        with world.worker() if way == "joined" else local_worker(world.server, "a") as worker:
            first, second = next(rounds := iter(worker)), None
            worker.state.update(kept)
            first.submit(first.state_dict())
            second = next(rounds)
            found = dict(worker.state)
            assert list(found) == list(kept)
            assert torch.equal(found["head"]["weight"], kept["head"]["weight"])
            assert found["head"]["n"].item() == 3
            assert found["view"].dtype == torch.bfloat16
            assert torch.equal(found["view"], kept["view"])
            assert found["flags"].tolist() == [True, False]
            assert found["array"].dtype == np.int16
            assert found["array"].tolist() == [0, 1, 2]
            assert found["plain"] == kept["plain"]
            assert found["none"].shape == (0, 2)
            second.skip()


def test_tensors_that_change_in_place_are_kept(world: World) -> None:
    """What a script changes in place in a tensor or list of its state is kept with the next update."""
    # 1, then 0.5 · 1 + 2 = 2.5, then 0.5 · 2.5 + 3 = 4.25
    with world, world.worker() as worker:
        for number, fl_round in enumerate(worker, 1):
            ema = worker.state.setdefault("ema", torch.zeros(1))
            worker.state.setdefault("seen", []).append(number)
            ema.mul_(0.5).add_(number)
            if number == 3:
                break
            fl_round.submit(fl_round.state_dict())
        assert worker.state["seen"] == [1, 2, 3]
        assert ema.item() == 4.25


def test_a_script_without_state_has_no_files(world: World) -> None:
    """A script that writes nothing into its state leaves no files, and one that empties it finds it empty."""
    with world:
        world.move("a", 1, 1.0)
        assert not list(world.workers.rglob("script*"))
        take(world)
        world.pull("a", number=3)
        world.sites["a"].worker.state.clear()
        world.submit("a", 1.0)
        assert again(world) == []


def test_rounds_that_do_not_count_leave_the_state(world: World) -> None:
    """After a refused update, a round that the site sat out, and a round that it left, the state is that of before."""
    with world:
        assert take(world) == []
        assert take(world) == [1]
        assert take(world, change=float("nan")) == [1, 2]
        assert take(world, weight=0) == [1, 2]
        world.pull("a")
        world.sites["a"].worker.state["rounds"] = ["lost"]
        assert again(world) == [1, 2]


def test_a_state_goes_back_with_the_admins_run(tmp_path: Path) -> None:
    """If the admin goes back to a version, each site finds the state of its last update in that version."""
    # Three states: rounds 1 and 2 count, the third is accepted and round 3 open as the run goes back to version 1.
    with World(tmp_path, MODEL, "ab", rounds=9) as world:
        for number in (1, 2):
            assert take(world, "a") == take(world, "b") == list(range(1, number))
        assert take(world, "a") == [1, 2]
        roll_back(world, 1)
        assert take(world, "a") == take(world, "b") == [1]
        world.wait(3)  # numbers of lost versions are not used again
        assert take(world, "a") == [1, 2]
        roll_back(world, 1)
        assert again(world, "a") == [1]


def test_a_state_goes_back_with_a_backup(world: World) -> None:
    """If the server is restored from a backup, the site finds the state of its last update that the backup has."""
    with world:
        take(world)
        take(world)
        world.wait(2)
    backup = world.backup()
    with world:
        take(world)
        assert take(world) == [1, 2, 3]
        world.wait(4)
        world.sites.pop("a").close()
    world.put_back(backup)
    with world:
        assert again(world) == [1, 2]


def test_a_ticket_that_was_given_again_has_no_state(tmp_path: Path) -> None:
    """A restored server gives a number of a ticket to another update: the state of the first one does not count."""
    # In two folders, the site's second update has the same ticket: +1 in one, and after the backup +5 in the other.
    with World(tmp_path, MODEL, "a", rounds=9) as world:
        take(world)
        world.wait(1)
    backup = world.backup()
    with world:
        take(world)
        world.pull("a")
        world.sites.pop("a").close()
    world.put_back(backup)
    with world:
        world.workers = tmp_path / "other"
        world.move("a", 2, 5.0)
        world.pull("a", number=3)
        world.sites.pop("a").close()
        world.workers = tmp_path / "workers"
        assert again(world) == [1]


def test_a_server_gone_too_far_back_is_told(world: World, tmp_path: Path) -> None:
    """A site that no longer has the state of its last update begins with an empty one, and says so."""
    with world:
        take(world)
        world.wait(1)
    backup = world.backup()
    with world:
        for _ in range(6):
            take(world)
        world.wait(7)
        world.sites.pop("a").close()
    world.put_back(backup)
    with world:
        assert again(world) == []
        assert "the server went back too far: worker.state begins empty" in world.text


def test_a_lost_state_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged state, or a damaged note of it, is refused; with `ATOLL_NEW_STATE` it begins empty."""
    with world:
        take(world)
        take(world)
        world.pull("a")
        world.sites.pop("a").close()
        (note,) = world.workers.rglob("script.json")
        for file in [note, *note.parent.glob("script-*.bin")]:
            whole = file.read_bytes()
            file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
            if file == note:
                with pytest.raises(ConfigError, match=r"worker\.state of site a is lost: .*script\.json is damaged"):
                    again(world)
            with monkeypatch.context() as allowed:
                allowed.setenv("ATOLL_NEW_STATE", "1")
                assert again(world) == ([] if file == note else again(world))
                world.sites.pop("a").close()
            file.write_bytes(whole)
        for file in note.parent.glob("script-*.bin"):
            file.unlink()
        with pytest.raises(ConfigError, match=r"script-1\.bin is damaged or missing.*ATOLL_NEW_STATE=1"):
            again(world)


def test_nothing_of_a_state_leaves_the_site(world: World) -> None:
    """The state is in the site's folder alone: no byte of it reaches the server, and an update is no larger."""
    marker = b"only-at-this-site"
    with world:
        take(world)
        sent = world.sites["a"].worker.bytes_up
        world.pull("a")
        world.sites["a"].worker.state["secret"] = marker.decode()
        world.sites["a"].worker.state["tensor"] = torch.frombuffer(bytearray(marker), dtype=torch.uint8)
        world.submit("a", 1.0)
        assert world.sites["a"].worker.bytes_up == 2 * sent
        world.wait(2)
    assert any(marker in path.read_bytes() for path in world.workers.rglob("script-*.bin"))
    assert not any(marker in path.read_bytes() for path in (world.folder / "state").rglob("*") if path.is_file())


class Other:
    """A value that cannot be kept."""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("x", Other(), r"worker\.state\['x'\] is of type Other, which Atoll cannot keep"),
        ("x", {"deep": [Other()]}, r"worker\.state\['x'\]\['deep'\]\[0\] is of type Other"),
        ("x", torch.zeros(2, dtype=torch.complex64), r"worker\.state\['x'\] is a tensor of torch\.complex64"),
        ("x", torch.zeros(2).to_sparse(), r"worker\.state\['x'\] is a tensor of layout torch\.sparse_coo"),
        ("x", nn.Linear(2, 2), r"worker\.state\['x'\] is of type Linear"),
        (3, 1, r"cannot have the name 3"),
        ("", 1, r"cannot have the name ''"),
        ("n" * 201, 1, r"Use a text of 1 to 200 characters"),
    ],
)
def test_values_that_cannot_be_kept_are_named(world: World, name: Any, value: Any, said: str) -> None:
    """A value or a name that a state cannot have is refused at once, with its place and the remedy."""
    with world:
        world.pull("a")
        with pytest.raises(UsageError, match=said):
            world.sites["a"].worker.state[name] = value
        assert not world.sites["a"].worker.state


def test_a_state_is_bounded(world: World) -> None:
    """A state has at most 1,000 names and 1 MiB besides its tensors; what is too much is refused before it is sent."""
    with world:
        world.pull("a")
        state = world.sites["a"].worker.state
        state.update((f"n{number}", number) for number in range(1000))
        with pytest.raises(UsageError, match="has 1000 names already, and cannot have 'more', too"):
            state["more"] = 1
        state["n0"] = "x" * 2**20
        with pytest.raises(UsageError, match=r"bytes besides its tensors; 1048576 are possible"):
            world.submit("a", 1.0)
        assert world.sites["a"].worker.bytes_up == 0
        nested: list[Any] = []
        state["n0"] = nested
        nested.append(nested)
        with pytest.raises(UsageError, match=r"worker\.state\['n0'\]\[0\] is worker\.state\['n0'\] again"):
            world.submit("a", 1.0)
        nested.clear()
        world.submit("a", 1.0)


def test_a_state_outside_of_rounds_is_refused(tmp_path: Path) -> None:
    """Before the first round the state is not known, and after `submit` a change would be lost: both are refused."""
    with World(tmp_path, MODEL, "ab", rounds=1) as world:
        world.join("b")
        with world.worker() as worker:
            world.move("b", 1, 1.0)  # and stays, so that the server does
            with pytest.raises(UsageError, match="its content is known once the first round has begun"):
                worker.state.get("x")
            for fl_round in worker:
                worker.state["x"] = 1
                fl_round.submit(fl_round.state_dict())
                assert worker.state["x"] == 1
                with pytest.raises(UsageError, match="round 1 is over for this site"):
                    worker.state["x"] = 2
            assert dict(worker.state) == {"x": 1}
        with world.worker() as worker:  # a process that comes after the last round
            assert list(worker) == []
            assert dict(worker.state) == {"x": 1}


def test_functions_have_the_state(world: World) -> None:
    """A script with `atoll.functional` has the same state."""
    world.set(**{"rounds.total": 3})
    found = []
    with world:
        atoll.functional.init(world.url, "a", folder=world.workers)
        while (fl_round := atoll.functional.receive()) is not None:
            state = atoll.functional.state()
            found.append(state.get("n", 0))
            state["n"] = found[-1] + fl_round.number
            atoll.functional.send(fl_round.params)
        world.server.run()
    assert found == [0, 1, 3]


def test_a_script_alone_has_an_empty_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server, the state begins empty, and takes what it takes with one."""
    model = nn.Linear(2, 1)
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            assert not worker.state
            worker.state["n"] = [1]
            worker.state["n"].append(Other())
            with pytest.raises(UsageError, match=r"worker\.state\['n'\]\[1\] is of type Other"):
                fl_round.submit(model)
            worker.state["n"].pop()
            with torch.no_grad():
                model.weight.add_(1)
            fl_round.submit(model)
