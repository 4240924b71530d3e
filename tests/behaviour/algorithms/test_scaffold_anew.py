"""A server that has gone back: SCAFFOLD's controls begin at zero again, everywhere, and no site ends.

Expected numbers are algorithm 1 of the paper in Python's own numbers (`scaffold_world`): after a return to version v,
it goes on from x of this version with c = 0 and every c_i = 0.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import copy_folder, flip_bit, together
from kit.admin import roll_back
from kit.damage import damage_head
from kit.folders import put_back
from kit.world import World
from scaffold_world import One, one_round, sgd, train

import atoll
from atoll.algorithms import Algorithm, ChangeReader, Correction, ElementReader, LocalContext, LocalRule
from atoll.server.verify_state import verify_state
from atoll.testing.run import wait_until

TARGETS = {"a": 1.0, "b": -3.0, "c": 5.0}
BEGUN = "begins at zero again"

Seen = tuple[float, float, float]
"""x, c and the site's c_i as a round begins."""


Rounds = dict[tuple[str, int], Seen]
"""(site, round) → what the site had as it began the round."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Three sites. Their processes end with the block in which the server is there."""
    world = World(tmp_path, One(), TARGETS.keys(), algorithm="scaffold", rounds=20)
    yield world
    world.close()


@contextmanager
def with_sites_that_stay(world: World) -> Iterator[None]:
    """The server is there within the block; the sites run on behind it."""
    world.start()
    yield
    world.stop()


@pytest.fixture(params=["running-sites", "restarted-sites"])
def served(world: World, request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[object]]:
    """Makes blocks in which the server is there."""
    return (lambda: with_sites_that_stay(world)) if request.param == "running-sites" else lambda: world


def join_where_needed(world: World, names: str) -> None:
    for name in names:
        if name not in world.sites:
            world.join(name)


def take_rounds(world: World, until: int, names: str = "abc", group: str = "control") -> Rounds:
    """Rounds of these sites up to this one."""
    seen: Rounds = {}

    def train_site(name: str) -> None:
        site, model, number = world.sites[name], One(), 0
        while number < until:
            number = site.next_round() or until
            site.pull(model)
            c, own = (state(group)["w"] for state in (site.round.global_state, site.round.own_state))
            seen[name, number] = (model.w.item(), c.item(), own.item())
            optimizer = sgd(model)
            with site.round.correct(model, optimizer):
                train(model, optimizer, TARGETS[name])
            site.submit(model)

    join_where_needed(world, names)
    together(*(partial(train_site, name) for name in names))
    if names == "abc":  # a round after a lost version makes one with a higher number
        wait_until(lambda: world.version >= until, f"version {until}")
    return seen


def require_paper(seen: Rounds, first: int, last: int) -> None:
    """From the x of round `first` on, with controls of zero, the sites saw the numbers of the paper."""
    x, c, own = seen["a", first][0], 0.0, dict.fromkeys(TARGETS, 0.0)
    for number in range(first, last + 1):
        for name in TARGETS:
            assert seen[name, number] == pytest.approx((x, c, own[name]), abs=1e-5), (name, number)
        assert c == pytest.approx(sum(own.values()) / len(own))
        x, c, own, _ = one_round(x, c, own, TARGETS)


def take_ticket(world: World, name: str, *, submits: bool = False) -> None:
    """A process of one site takes a ticket of round 3, and ends; it submits first, or not."""
    if submits:
        take_rounds(world, 3, name)
    else:
        join_where_needed(world, name)
        world.ask(name, number=3)
    world.sites.pop(name).close()


def told(world: World) -> list[str]:
    return [text for text in world.status.warnings if BEGUN in text]


def logged(caplog: pytest.LogCaptureFixture) -> int:
    """How often the server's log says that controls begin anew."""
    return sum(BEGUN in record.getMessage() for record in caplog.records if record.name == "atoll.server")


def restore_to(
    world: World,
    version: int,
    after: int,
    served: Callable[[], AbstractContextManager[object]] | None = None,
    group: str = "control",
) -> tuple[Rounds, Path]:
    """Put a backup with `version` back after round `after`. Return what sites saw until then, and the backup."""
    served = served or (lambda: world)
    with served():
        seen = take_rounds(world, version, group=group)
    backup = world.backup()
    with served():
        seen |= take_rounds(world, after, group=group)
    world.put_back(backup)
    return seen, backup


@pytest.mark.covers("S2")
def test_going_back_to_a_version_resets_the_controls(world: World) -> None:
    """When an administrator takes the run back to an earlier version, SCAFFOLD's controls start at zero again."""
    # Version 2 is the base of round 3 again. The versions 3 and 4 are lost, so round 5 makes version 7.
    world.set(**{"disk.keep_versions": 9, "disk.keep_updates": 9})
    with world:
        take_rounds(world, 4)
        roll_back(world, 2)
        seen = take_rounds(world, 5, "acb")
        world.wait(7)
        (text,) = told(world)
    assert "The run went back to version 2, as its admin asked" in text
    require_paper(seen, 3, 5)
    found = verify_state(world.folder / "state")  # the first round afterwards is computed from controls of zero, too
    assert (found.changed, [(each.version, each.result) for each in found.rounds]) == (
        [],
        [(version, "same") for version in (1, 2, 5, 6, 7)],
    )


@pytest.mark.covers("S2", "F42")
def test_restoring_a_backup_resets_the_controls(
    world: World, served: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """After a server is restored from a backup, SCAFFOLD's controls start at zero again at the server and all sites."""
    # All sites are three rounds ahead of the backup. They go on training, and the server logs the reset once.
    before, _ = restore_to(world, 2, after=5, served=served)
    with served():
        seen = take_rounds(world, 7)
        (text,) = told(world)
    assert seen["b", 3] == (before["a", 3][0], 0.0, 0.0)
    require_paper(seen, 3, 7)
    assert "gone back to version 2" in text
    assert "restored from a backup" in text
    assert "more slowly until all sites have taken part again" in text
    assert logged(caplog) == 1
    assert "ATOLL_NEW_STATE" not in caplog.text


@pytest.mark.covers("S2", "F42")
def test_a_lost_earlier_control_resets_all_controls(
    world: World, served: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """If a site must go back by one update, but its earlier control is damaged, the controls of all sites start at zero
    again.
    """
    # The restored server is one update behind all sites. At site `a`, one bit of the control from before this update is
    # damaged.
    with served():
        take_rounds(world, 2)
    backup = world.backup()
    with served():
        before = take_rounds(world, 3)
        world.ask(number=4)  # they know that the third update counted
    world.put_back(backup)
    (note,) = (world.workers / "a").rglob("algorithm.json")
    earlier = 1 - json.loads(note.read_text())["current"]
    flip_bit(note.with_name(f"algorithm-{earlier}.bin"), 3)
    with served():
        seen = take_rounds(world, 5)
        assert len(told(world)) == 1
    assert seen["a", 3] == seen["b", 3] == (before["a", 3][0], 0.0, 0.0)
    require_paper(seen, 3, 5)
    assert logged(caplog) == 1


@pytest.mark.covers("S2", "F41")
def test_a_damaged_newest_version_resets_all_controls(
    world: World, served: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """All controls start at zero again if the newest version is damaged after sites have trained on it."""
    # One bit of version 3 is damaged after the sites `a` and `b` have submitted updates against version 3. Site `c` has
    # not, and could still go back.
    with served():
        before = take_rounds(world, 3)
        take_rounds(world, 4, "ab")
    damage_head(world.folder)
    with served():
        if not world.sites:  # c comes first: it sends its update of round 3 again, which then no longer fits
            world.join("c")
            assert world.sites["c"].worker.next_round(0.0) is None
        seen = take_rounds(world, 6)
        assert len(told(world)) == 1
    assert seen["c", 3] == (before["c", 3][0], 0.0, 0.0)
    require_paper(seen, 3, 6)
    assert logged(caplog) == 1


@pytest.mark.covers("S2", "F13")
def test_reset_controls_survive_a_server_restart(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A server that restarts after it has reset the controls keeps the reset and does not log it again."""
    # Only site `a` has asked for a round before the restart. The server reads the reset from its journal.
    restore_to(world, 2, after=5)
    with world:
        world.join("a")
        world.ask("a", number=3)
        assert len(told(world)) == 1
    with world:
        assert len(told(world)) == 1
        seen = take_rounds(world, 5)
        assert len(told(world)) == 1
    require_paper(seen, 3, 5)
    assert logged(caplog) == 1


@pytest.mark.covers("S2", "F42")
def test_restoring_a_backup_twice_resets_controls_twice(world: World, served: Callable[[], Any]) -> None:
    """Each time the server is restored from the same backup, SCAFFOLD's controls start at zero again."""
    _, backup = restore_to(world, 2, after=5, served=served)
    with served():
        take_rounds(world, 4)
    world.put_back(backup)
    with served():
        seen = take_rounds(world, 6)
        assert len(told(world)) == 1
    require_paper(seen, 3, 6)


@pytest.mark.covers("S2", "F41")
def test_losing_the_version_of_a_reset_resets_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The controls start at zero once more if the version at which they were reset is damaged."""
    # The controls were reset at version 2. The server then goes back to version 1, whose controls no site has any more.
    before, _ = restore_to(world, 2, after=5)
    with world:
        world.ask(number=3)
    damage_head(world.folder)
    with world:
        assert len(told(world)) == 1
        seen = take_rounds(world, 4)
    assert seen["a", 2] == (before["a", 2][0], 0.0, 0.0)
    require_paper(seen, 2, 4)
    assert logged(caplog) == 2


@pytest.mark.covers("S2", "F42")
@pytest.mark.parametrize("same_ticket", [False, True], ids=["next-ticket", "same-ticket"])
def test_an_update_formed_before_a_reset_never_counts(
    world: World, caplog: pytest.LogCaptureFixture, same_ticket: bool
) -> None:
    """An update that a site formed before SCAFFOLD's controls were reset does not count after the reset."""
    # Site `c` is restored together with the server. Its update of round 3 fits version 2, but it does not fit controls
    # of zero. In one case, the server gives site `c` a ticket whose number is, by chance, that of the old update's
    # ticket.
    with world:
        take_rounds(world, 2)
        if not same_ticket:
            take_ticket(world, "c", submits=True)
    backup = world.backup()
    with world:
        if same_ticket:
            take_ticket(world, "a")
            take_ticket(world, "c", submits=True)
        copy = copy_folder(world.workers / "c", world.folder / "c")
        take_rounds(world, 5)
    world.put_back(backup)
    put_back(copy, world.workers / "c")
    with world:
        for name in "ac" if same_ticket else "a":
            take_ticket(world, name)
        caplog.set_level("INFO", "atoll")
        caplog.clear()
        seen = take_rounds(world, 5)
    require_paper(seen, 3, 5)
    assert "submitting this site's update again" not in caplog.text
    assert ("formed with another generation of the algorithm's state" in caplog.text) == same_ticket


@pytest.mark.covers("S2")
def test_a_site_that_lost_its_control_resets_all_controls(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one site has lost its control and its user allows a new start, the controls of all sites start at zero."""
    # Site `b` has lost its folder and has set ATOLL_NEW_STATE. No share of its old control stays in c.
    with world:
        take_rounds(world, 2)
    shutil.rmtree(world.workers / "b")
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")
    with world:
        seen = take_rounds(world, 5)
        (text,) = told(world)
    assert text.startswith("b has lost its state of scaffold")
    require_paper(seen, 3, 5)


@pytest.mark.covers("S2")
def test_sites_with_lossy_codecs_survive_a_backup(world: World) -> None:
    """Sites that keep the rounding error of a lossy codec go on training after the server is restored from a backup."""
    world.set(codec="int8")
    stays = partial(with_sites_that_stay, world)
    restore_to(world, 2, after=5, served=stays)
    with stays():
        seen = take_rounds(world, 5)
    require_paper(seen, 3, 5)


class Counted(Correction):
    """Each update adds 1 to a number at the site, and to the mean of these numbers in the version."""

    def __init__(self, context: LocalContext) -> None:
        super().__init__()
        self.context = context

    def finish(self, read_change: ChangeReader, rate_sum: float) -> Mapping[str, ElementReader]:
        for name in self.context.parameters:
            self.context.set_own_state("count", name, self.context.own_state("count", name) + 1)
        return {"count": lambda name, start, stop: torch.ones(stop - start)}


@dataclass(frozen=True)
class Counting(LocalRule):
    state_groups = ("count",)

    def start(self, context: LocalContext) -> Correction:
        return Counted(context)


COUNTING = Algorithm(
    name="counting",
    citation="",
    outer="sgd",
    outer_options={"lr": 1.0},
    reduce={"params": "mean", "buffers": "mean", "count": "mean"},
    local=Counting,
)


@pytest.mark.covers("S2", "F42")
def test_a_backup_resets_the_state_of_an_own_algorithm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a server goes back to version 2, the state of a user's own algorithm starts at zero again.

    At the start of round n, a site and the version have then counted n − 3 updates.
    """
    monkeypatch.setattr("atoll.registry._registered", {})
    atoll.register("algorithms", "counting", COUNTING)
    world.set(algorithm="counting")
    before, _ = restore_to(world, 2, after=5, group="count")
    assert before["a", 5][1:] == (4.0, 4.0)
    with world:
        seen = take_rounds(world, 5, group="count")
    assert {key: values[1:] for key, values in seen.items()} == {
        (name, number): (number - 3, number - 3) for name in TARGETS for number in (3, 4, 5)
    }
