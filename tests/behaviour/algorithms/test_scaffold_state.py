"""SCAFFOLD's c_i belongs to a site for the whole run: one that is lost, damaged or of another moment is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from kit import copy_folder, together
from kit.folders import put_back
from kit.manual_site import ManualSite
from kit.world import World
from torch import Tensor

from atoll.errors import ConfigError

pytestmark = pytest.mark.covers("S2")

CHANGES = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0, 3.0]), "late": torch.zeros(2)}
"""Site → its Δc in each round."""


Seen = dict[int, tuple[Tensor, Tensor]]
"""Round → c and the site's c_i as it begins."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """SCAFFOLD of one site."""
    with World(tmp_path, {"w": torch.zeros(2)}, "a", algorithm="scaffold", rounds=9) as world:
        yield world


@pytest.fixture
def pair(tmp_path: Path) -> World:
    """SCAFFOLD of a and b; with weights of 1, c has to be the mean of their c_i. Its server is not started."""
    return World(tmp_path, {"w": torch.zeros(2)}, "ab", algorithm="scaffold", rounds=9)


def take_rounds(client: ManualSite, name: str, until: int) -> Seen:
    """A site's rounds up to this one, at least one."""
    seen: Seen = {}
    while not seen or max(seen) < until:
        number = client.next_round()
        assert number is not None
        model = client.pull()
        c, own = (state("control")["w"] for state in (client.round.global_state, client.round.own_state))
        seen[number] = (c, own)
        client.submit(model, steps=1, groups={"control": {"w": CHANGES[name]}})
    return seen


def part(world: World, name: str = "a", until: int = 0, workers: Path | None = None) -> list[float]:
    """A process of a site takes rounds, and ends; c_i as the last of them began."""
    with ManualSite(world.url, site=name, folder=workers or world.workers) as client:
        seen = take_rounds(client, name, until)
    return seen[max(seen)][1].tolist()


def both(world: World, until: int) -> dict[str, Seen]:
    """A process of each site takes rounds up to this one, and ends."""
    seen: dict[str, Seen] = {}

    def work(name: str) -> None:
        with ManualSite(world.url, site=name, folder=world.workers) as client:
            seen[name] = take_rounds(client, name, until)

    together(*(partial(work, name) for name in "ab"))
    world.wait(until)
    return seen


def require_the_mean(seen: dict[str, Seen], *numbers: int) -> None:
    """c of these rounds, as both pulled it, is the mean of what they had."""
    for number in numbers:
        (c, own_a), (other, own_b) = seen["a"][number], seen["b"][number]
        assert torch.equal(c, other)
        torch.testing.assert_close(c, (own_a + own_b) / 2)
        assert c.norm() > 0


def refuses(world: World, name: str) -> None:
    """Twice: what the first attempt leaves does not pass for a control. The site did not join."""
    before = {worker.site: worker.state for worker in world.status.workers}
    for _ in range(2):
        with pytest.raises(ConfigError, match="ATOLL_NEW_STATE") as error:
            part(world, name)
        assert "server" not in error.value.message
    assert {worker.site: worker.state for worker in world.status.workers} == before


def restore_to(pair: World, version: int, after: int, knows: bool = False) -> None:
    """Put a backup with this version back after a round: it is older than the sites' folders.

    Args:
        knows: whether the sites have heard that their last update counted.
    """
    with pair:
        if version:
            both(pair, version)
    backup = pair.backup()
    with pair:
        both(pair, after)
        if knows:
            pair.ask(number=after + 1)
    pair.put_back(backup)


@contextmanager
def replaced(folder: Path, by: Path) -> Iterator[None]:
    """Within, a copy of another folder lies in place of this one."""
    aside = folder.rename(folder.with_name("aside"))
    copy_folder(by, folder)
    yield
    shutil.rmtree(folder)
    aside.rename(folder)


def run_folder(world: World) -> Path:
    return world.workers / "a" / world.status.run


def damage(file: Path) -> None:
    """One bit of every byte: small changes, no value becomes infinite."""
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


# -- lost, or damaged


CURRENT = r"This run has accepted 2 updates of a, but.*ATOLL_DIR.*a/[0-9a-f]{32}"
PENDING = (
    r"although the run's model contains updates that depend on it.*a/[0-9a-f]{32}/algorithm\.json .*ATOLL_NEW_STATE"
)
"""Which of both counts is known when the site is there."""


@pytest.mark.covers("X3", "F41")
@pytest.mark.parametrize(
    ("lose", "names", "said"),
    [
        pytest.param(shutil.rmtree, ["."], CURRENT, id="folder"),
        pytest.param(Path.unlink, ["algorithm-0.bin", "algorithm-1.bin"], CURRENT, id="files"),
        pytest.param(Path.unlink, ["algorithm.json"], CURRENT, id="note"),
        # the second update was written beside the first, which has file 1
        pytest.param(Path.unlink, ["algorithm-1.bin"], CURRENT, id="current"),
        pytest.param(Path.unlink, ["algorithm-0.bin"], PENDING, id="pending"),
        # of a disk: it would be a correction like any other, and train the site away from the rest
        pytest.param(damage, ["algorithm-1.bin"], CURRENT, id="current-damaged"),
        pytest.param(damage, ["algorithm-0.bin"], PENDING, id="pending-damaged"),
    ],
)
def test_a_site_with_a_lost_or_damaged_control_is_refused(
    world: World, caplog: pytest.LogCaptureFixture, lose: Callable[[Path], object], names: list[str], said: str
) -> None:
    """A site cannot take part if its control is lost or damaged, because the run's model depends on this control."""
    # A second attempt is refused, too: files that the first attempt left do not pass for a control.
    assert part(world, until=2) == [1.0, 2.0]
    world.wait(2)  # the second update is in the controls
    for name in names:
        lose(run_folder(world) / name)
    for _ in range(2):  # what the first attempt leaves in the folder does not pass for a control
        with pytest.raises(ConfigError, match=said):
            part(world)
    damaged = f"{names[0]} is damaged (its digest differs) and is not used. Check the disk."
    assert lose is not damage or damaged in caplog.text
    if said == CURRENT:
        assert [worker.state for worker in world.status.workers] == ["left"]  # it did not join


def test_a_sites_folder_may_move_to_another_machine(world: World) -> None:
    """A site may move to another machine together with its folder."""
    # Without its files, the site is refused.
    part(world)
    other = world.folder / "other"
    with pytest.raises(ConfigError, match="This run has accepted 1 update of a, but"):
        part(world, workers=other)
    put_back(world.workers, other)
    assert part(world, workers=other) == [1.0, 2.0]


def test_sites_without_counted_updates_start_with_zero_controls(world: World) -> None:
    """A site that joins late, or that has no counted update yet, starts with controls of zero."""
    with ManualSite(world.url, site="a", folder=world.workers) as client:
        client.next_round()
        client.pull()
    assert part(world, workers=world.folder / "other") == [0.0, 0.0]
    assert part(world, "late") == [0.0, 0.0]


def test_a_site_needs_its_control_before_the_round_ends(pair: World) -> None:
    """A site that loses its control after its update was accepted is refused, even before the round ends."""
    # The update of site `a` is accepted when `a` loses its files. The round still waits for site `b`.
    with pair:
        pair.join("b")
        part(pair)
        shutil.rmtree(pair.workers / "a")
        with pytest.raises(ConfigError, match="This run has accepted 1 update of a, but"):
            part(pair)


def test_a_restarted_server_remembers_accepted_updates(world: World) -> None:
    """A restarted server knows how many updates of a site it has accepted. A site that lost its control is refused."""
    part(world, until=2)
    shutil.rmtree(world.workers)
    world.restart()
    with pytest.raises(ConfigError, match="This run has accepted 2 updates of a, but"):
        part(world)


def test_atoll_new_state_lets_a_site_start_anew(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site that has lost its SCAFFOLD state may start with a control of zero if ATOLL_NEW_STATE is 1."""
    # Only `algorithm.json` is missing, and the site does not take the remaining files for its c_i. From then on the
    # site has a control again, and the variable does no harm.
    part(world, until=2)
    (run_folder(world) / "algorithm.json").unlink()
    monkeypatch.setenv("ATOLL_NEW_STATE", "perhaps")
    with pytest.raises(ConfigError, match=r"ATOLL_NEW_STATE is 'perhaps'"):
        part(world)
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")
    assert part(world) == [0.0, 0.0]
    assert "a: no state of the algorithm was found; it starts from zero" in caplog.text
    assert "This run has accepted 2 updates of a, but the site has lost its algorithm's state" in caplog.text
    assert part(world) == [1.0, 2.0]  # the variable does no harm to a control that is there
    monkeypatch.delenv("ATOLL_NEW_STATE")
    assert part(world) == [2.0, 4.0]


# -- of another moment: c_i is that of its site, its run and its last update that counts


def test_refuses_an_older_copy_of_a_sites_folder(pair: World) -> None:
    """A site with an older copy of its folder is refused, because the copy holds an outdated control."""
    with pair:
        both(pair, 1)
        older = copy_folder(pair.workers / "a", pair.folder / "older")
        both(pair, 3)
        with replaced(pair.workers / "a", older):
            refuses(pair, "a")
        require_the_mean(both(pair, 5), 5)


def test_refuses_the_control_of_another_site(pair: World) -> None:
    """A site that has the folder of another site is refused."""
    with pair:
        both(pair, 2)
        for site, other in ("ab", "ba"):
            with replaced(pair.workers / site, pair.workers / other):
                refuses(pair, site)
        require_the_mean(both(pair, 4), 4)


def test_refuses_a_copy_from_before_an_accepted_update(pair: World) -> None:
    """A site is refused if its folder is a copy from before its last accepted update, even if this update does not
    count yet.
    """
    # The copy holds the control of the last counted update, but nothing of the accepted update.
    with pair:
        both(pair, 2)
        with ManualSite(pair.url, site="a", folder=pair.workers) as client:
            assert client.next_round() == 3  # adopts what was pending
        older = copy_folder(pair.workers / "a", pair.folder / "older")
        part(pair)  # the round still waits for b
        with replaced(pair.workers / "a", older):
            refuses(pair, "a")
        require_the_mean(both(pair, 4), 4)


@pytest.mark.parametrize("knows", [False, True], ids=["pending", "counted"])
def test_a_site_keeps_the_control_before_its_last_update(pair: World, knows: bool) -> None:
    """A site keeps the control from before its last update, so it can follow a server restored by one version.

    This holds whether or not the site knows that its last update counted.
    """
    restore_to(pair, 2, after=3, knows=knows)
    with pair:
        require_the_mean(both(pair, 6), 4, 5, 6)


def test_a_server_restored_to_version_0_resets_controls(pair: World) -> None:
    """If a server is restored to version 0, all sites start with controls of zero."""
    restore_to(pair, 0, after=4)
    with pair:
        seen = both(pair, 3)
    assert seen["a"][1][1].tolist() == seen["b"][1][1].tolist() == [0.0, 0.0]
    require_the_mean(seen, 3)


def test_a_running_site_takes_its_control_back(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """When a restored server has lost a site's last update, the running site goes back to its SCAFFOLD control from
    before this update.
    """
    # The server lost version 3. The site sends its third update again: its c_i is first that after two updates, then
    # that after three.
    site, seen = world.sites["a"], list[list[float]]()

    def rounds(until: int) -> None:
        seen.extend([number, *own.tolist()] for number, (_, own) in take_rounds(site, "a", until).items())
        world.wait(until)

    rounds(until=2)
    world.stop()
    backup = world.backup()
    world.start()
    rounds(until=3)
    world.ask(number=4)  # the site knows that its third update counted
    world.stop()
    world.put_back(backup)
    world.start()
    rounds(until=5)
    assert seen == [[1, 0, 0], [2, 1, 2], [3, 2, 4], [4, 3, 6], [5, 4, 8]]
    assert "the server went back to before this site's last update, so this state goes back, too" in caplog.text
    assert "damaged" not in caplog.text
