"""A server that has gone back: SCAFFOLD's controls begin at zero again, everywhere, and no site ends.

Expected numbers are algorithm 1 of the paper in Python's own numbers (`scaffold_world`): after a return to version v,
it goes on from x of this version with c = 0 and every c_i = 0.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port, wait_until
from kit import ask_journal, copy_folder, flip_bit, together
from kit.manual_site import ManualSite
from kit.servers import plain_server
from scaffold_world import One, one_round, sgd, train

import atoll
from atoll.algorithms import Algorithm, ChangeReader, Correction, ElementReader, LocalContext, LocalRule

TARGETS = {"a": 1.0, "b": -3.0, "c": 5.0}
BEGUN = "begins at zero again"

Seen = tuple[float, float, float]
"""x, c and the site's c_i as a round begins."""


class World:
    """A server at one port, and three sites. Their processes stay or start again.

    Attributes:
        seen: (site, round) → what the site had as it began the round last.
        stay: whether the sites keep running while the server does not.
    """

    def __init__(self, folder: Path, stay: bool, settings: dict[str, Any]) -> None:
        self.folder, self.stay, self.settings, self.port = folder, stay, settings, free_port()
        self.group = "control"
        self.seen: dict[tuple[str, int], Seen] = {}
        self.sites: dict[str, ManualSite] = {}
        self.opened = ExitStack()

    @contextmanager
    def serve(self) -> Iterator[atoll.Server]:
        settings = {"algorithm": "scaffold", "sites": 3, "rounds": 20, "network.port": self.port}
        with plain_server(self.folder, One(), **settings | self.settings) as server:
            yield server
            if not self.stay:
                self.end_sites()

    def end_sites(self) -> None:
        self.opened.close()
        self.sites.clear()

    def site(self, name: str) -> ManualSite:
        if name not in self.sites:
            site = ManualSite(f"http://127.0.0.1:{self.port}", site=name, folder=self.folder / "w")
            self.sites[name] = self.opened.enter_context(site)
        return self.sites[name]

    def train(self, name: str, until: int) -> None:
        """Rounds of one site up to this one."""
        site, model, number = self.site(name), One(), 0
        while number < until:
            number = site.next_round() or until
            site.pull(model)
            c, own = (state(self.group)["w"] for state in (site.round.global_state, site.round.own_state))
            self.seen[name, number] = (model.w.item(), c.item(), own.item())
            optimizer = sgd(model)
            with site.round.correct(model, optimizer):
                train(model, optimizer, TARGETS[name])
            site.submit(model)

    def rounds(self, server: atoll.Server, until: int, sites: Iterable[str] = TARGETS) -> None:
        together(*(lambda name=name: self.train(name, until) for name in sites))
        if set(sites) == set(TARGETS):
            wait_until(lambda: server.status().fragments[0].version >= until, f"version {until}")

    def require_paper(self, first: int, last: int) -> None:
        """From the x of round `first` on, with controls of zero, the sites saw the numbers of the paper."""
        x, c, own = self.seen["a", first][0], 0.0, dict.fromkeys(TARGETS, 0.0)
        for number in range(first, last + 1):
            for name in TARGETS:
                assert self.seen[name, number] == pytest.approx((x, c, own[name]), abs=1e-5), (name, number)
            assert c == pytest.approx(sum(own.values()) / len(own))
            x, c, own, _ = one_round(x, c, own, TARGETS)

    def put_back(self, backup: Path) -> None:
        shutil.rmtree(self.folder / "state")
        copy_folder(backup, self.folder / "state")

    def take(self, name: str, submit: bool = True) -> None:
        """A process of one site takes a ticket of round 3, and ends; it submits first, or not."""
        if submit:
            self.train(name, 3)
        else:
            assert self.site(name).next_round() == 3
        self.end_sites()

    def backup(self) -> Path:
        return copy_folder(self.folder / "state", self.folder / "backup")

    def damage_head(self) -> None:
        """Flip one bit of the newest version's last value."""
        slots = ask_journal(self.folder, "SELECT slot FROM versions JOIN heads USING (fragment, version)")
        flip_bit(self.folder / "state/slots" / f"version-0-{slots[0][0]}.safetensors", -1)


@pytest.fixture(params=[True, False], ids=["running-sites", "restarted-sites"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(tmp_path, request.param, {})
    yield world
    world.end_sites()


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, False, {})
    yield world
    world.end_sites()


def told(server: atoll.Server) -> list[str]:
    return [text for text in server.status().warnings if BEGUN in text]


def logged(caplog: pytest.LogCaptureFixture) -> int:
    """How often the server's log says that controls begin anew."""
    return sum(BEGUN in record.getMessage() for record in caplog.records if record.name == "atoll.server")


def restore_to(world: World, version: int, after: int) -> tuple[float, Path]:
    """Put a backup with `version` back after round `after`. Return x of this version, and the backup."""
    with world.serve() as server:
        world.rounds(server, version)
    backup = world.backup()
    with world.serve() as server:
        world.rounds(server, after)
    world.put_back(backup)
    return world.seen["a", version + 1][0], backup


@pytest.mark.covers("S2", "F42")
def test_controls_begin_anew_after_a_restored_backup(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """All sites are three rounds ahead: they go on to the end, and the server says it once."""
    x, _ = restore_to(world, 2, after=5)
    world.seen.clear()
    with world.serve() as server:
        world.rounds(server, 7)
        (text,) = told(server)
    assert world.seen["b", 3] == (x, 0.0, 0.0)
    world.require_paper(3, 7)
    assert "gone back to version 2" in text
    assert "restored from a backup" in text
    assert "more slowly until all sites have taken part again" in text
    assert logged(caplog) == 1
    assert "ATOLL_NEW_STATE" not in caplog.text


@pytest.mark.covers("S2", "F42")
def test_controls_begin_anew_where_a_site_cannot_go_back_by_one_update(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is one update behind all sites, of which a has lost the control before this update: one bit of it."""
    with world.serve() as server:
        world.rounds(server, 2)
    backup = world.backup()
    with world.serve() as server:
        world.rounds(server, 3)
        assert all(world.site(name).next_round() == 4 for name in TARGETS)  # they know that the third update counted
    world.put_back(backup)
    (note,) = (world.folder / "w" / "a").rglob("algorithm.json")
    earlier = 1 - json.loads(note.read_text())["current"]
    flip_bit(note.with_name(f"algorithm-{earlier}.bin"), 3)
    x = world.seen["a", 3][0]
    world.seen.clear()
    with world.serve() as server:
        world.rounds(server, 5)
        assert len(told(server)) == 1
    assert world.seen["a", 3] == world.seen["b", 3] == (x, 0.0, 0.0)
    world.require_paper(3, 5)
    assert logged(caplog) == 1


@pytest.mark.covers("S2", "F41")
def test_controls_begin_anew_after_a_damaged_head(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """One bit of version 3 is damaged when a and b have updates against it, while c could still go back."""
    with world.serve() as server:
        world.rounds(server, 3)
        world.rounds(server, 4, "ab")
    x = world.seen["c", 3][0]
    world.damage_head()
    world.seen.clear()
    with world.serve() as server:
        if not world.stay:  # c comes first: it sends its update of round 3 again, which then no longer fits
            assert world.site("c").worker.next_round(0.0) is None
        world.rounds(server, 6)
        assert len(told(server)) == 1
    assert world.seen["c", 3] == (x, 0.0, 0.0)
    world.require_paper(3, 6)
    assert logged(caplog) == 1


@pytest.mark.covers("S2", "F13")
def test_a_server_that_ends_after_controls_began_anew_goes_on_so(
    restarted: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a has asked for a round when the server ends: what it said then stands in the journal."""
    world = restarted
    restore_to(world, 2, after=5)
    world.seen.clear()
    with world.serve() as server:
        assert world.site("a").next_round() == 3
        assert len(told(server)) == 1
    with world.serve() as server:
        assert len(told(server)) == 1
        world.rounds(server, 5)
        assert len(told(server)) == 1
    world.require_paper(3, 5)
    assert logged(caplog) == 1


@pytest.mark.covers("S2", "F42")
def test_controls_begin_anew_as_often_as_the_server_goes_back(world: World) -> None:
    """The same backup twice: the sites' controls are then of a generation that this server does not know."""
    _, backup = restore_to(world, 2, after=5)
    with world.serve() as server:
        world.rounds(server, 4)
    world.put_back(backup)
    world.seen.clear()
    with world.serve() as server:
        world.rounds(server, 6)
        assert len(told(server)) == 1
    world.require_paper(3, 6)


@pytest.mark.covers("S2", "F41")
def test_controls_begin_anew_where_a_damaged_version_was_their_beginning(
    restarted: World, caplog: pytest.LogCaptureFixture
) -> None:
    """They began at version 2. After its loss, version 1 has the controls of before, which no site has any more."""
    world = restarted
    x, _ = restore_to(world, 2, after=5)
    with world.serve() as server:
        assert [world.site(name).next_round() for name in TARGETS] == [3, 3, 3]
    world.damage_head()
    x = world.seen["a", 2][0]
    world.seen.clear()
    with world.serve() as server:
        assert len(told(server)) == 1
        world.rounds(server, 4)
    assert world.seen["a", 2] == (x, 0.0, 0.0)
    world.require_paper(2, 4)
    assert logged(caplog) == 2


@pytest.mark.covers("S2", "F42")
@pytest.mark.parametrize("same_ticket", [False, True], ids=["next-ticket", "same-ticket"])
def test_an_update_formed_before_controls_began_anew_does_not_count(
    restarted: World, caplog: pytest.LogCaptureFixture, same_ticket: bool
) -> None:
    """c is restored with the server. Its update of round 3 fits to version 2, but not to controls of zero.

    The server may by chance give c a ticket with the number under which this update was formed.
    """
    world = restarted
    with world.serve() as server:
        world.rounds(server, 2)
        if not same_ticket:
            world.take("c")
    backup = world.backup()
    with world.serve() as server:
        if same_ticket:
            world.take("a", submit=False)
            world.take("c")
        copy_folder(world.folder / "w/c", world.folder / "c")
        world.rounds(server, 5)
    world.put_back(backup)
    shutil.rmtree(world.folder / "w/c")
    (world.folder / "c").rename(world.folder / "w/c")
    world.seen.clear()
    with world.serve() as server:
        for name in "ac" if same_ticket else "a":
            world.take(name, submit=False)
        caplog.set_level("INFO", "atoll")
        world.rounds(server, 5)
    world.require_paper(3, 5)
    assert "submitting this site's update again" not in caplog.text
    assert ("formed with another generation of the algorithm's state" in caplog.text) == same_ticket


@pytest.mark.covers("S2")
def test_controls_begin_anew_with_a_site_that_lost_its_own(restarted: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATOLL_NEW_STATE at b: no share of its old control stays in c."""
    world = restarted
    with world.serve() as server:
        world.rounds(server, 2)
    shutil.rmtree(world.folder / "w" / "b")
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")
    with world.serve() as server:
        world.rounds(server, 5)
        (text,) = told(server)
    assert text.startswith("b has lost its state of scaffold")
    world.require_paper(3, 5)


@pytest.mark.covers("S2")
def test_residuals_do_not_end_a_site_when_the_server_goes_back(tmp_path: Path) -> None:
    """With one trained value, int8 is exact."""
    world = World(tmp_path, True, {"codec": "int8"})
    restore_to(world, 2, after=5)
    world.seen.clear()
    with world.serve() as server:
        world.rounds(server, 5)
    world.end_sites()
    world.require_paper(3, 5)


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
def test_the_state_of_an_own_algorithm_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a return to version 2, a site that begins round n has had n - 3 updates counted."""
    monkeypatch.setattr("atoll.registry._registered", {})
    atoll.register("algorithms", "counting", COUNTING)
    world = World(tmp_path, False, {"algorithm": "counting"})
    world.group = "count"
    restore_to(world, 2, after=5)
    assert world.seen["a", 5][1:] == (4.0, 4.0)
    with world.serve() as server:
        world.rounds(server, 5)
    assert {key: seen[1:] for key, seen in world.seen.items() if key[1] > 2} == {
        (name, number): (number - 3, number - 3) for name in TARGETS for number in (3, 4, 5)
    }
