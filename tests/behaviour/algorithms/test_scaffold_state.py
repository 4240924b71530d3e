"""SCAFFOLD's c_i belongs to a site for the whole run: one that is lost, damaged or of another moment is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from harness.processes import free_port, wait_until
from kit import SITES, copy_folder, together
from kit.manual_site import ManualSite
from kit.servers import plain_server
from kit.sites import manual_sites
from torch import Tensor

import atoll
from atoll.errors import ConfigError

CHANGES = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0, 3.0]), "late": torch.zeros(2)}
"""Site → its Δc in each round."""


class Run:
    """SCAFFOLD of one site a, or of a and b: with weights of 1, c has to be the mean of their c_i.

    Attributes:
        workers: the folders of the sites.
        seen: (site, round) → c and c_i as the round begins.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.workers = folder, folder / "w"
        self.seen: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def serve(self, sites: int = 1, port: int = 0) -> atoll.Server:
        settings = {"algorithm": "scaffold", "sites": sites, "rounds": 9, "network.port": port}
        return plain_server(self.folder, {"w": torch.zeros(2)}, **settings)

    def part(self, server: atoll.Server, site: str = "a", until: int = 0, workers: Path | None = None) -> list[float]:
        """Rounds up to this one, at least one; c_i as the last of them begins."""
        with ManualSite(server.url, site=site, folder=workers or self.workers) as client:
            number = 0
            while number < (until or 1):
                number = client.next_round() or until
                model = client.pull()
                c, own = (state("control")["w"] for state in (client.round.global_state, client.round.own_state))
                self.seen[site, number] = (c, own)
                client.submit(model, steps=1, groups={"control": {"w": CHANGES[site]}})
        return own.tolist()  # type: ignore[no-any-return]

    def both(self, server: atoll.Server, until: int) -> None:
        together(*(lambda site=site: self.part(server, site, until) for site in SITES))
        wait_until(lambda: server.status().fragments[0].version >= until, f"version {until}")

    def require_the_mean(self, number: int) -> None:
        """c of this round, as both pulled it, is the mean of what they had."""
        (c, own_a), (other, own_b) = self.seen["a", number], self.seen["b", number]
        assert torch.equal(c, other)
        torch.testing.assert_close(c, (own_a + own_b) / 2)
        assert c.norm() > 0

    def refuses(self, server: atoll.Server, *sites: str) -> None:
        """Twice each: what the first attempt leaves does not pass for a control. They did not join."""
        before = {worker.site: worker.state for worker in server.status().workers}
        for site in 2 * sites:
            with pytest.raises(ConfigError, match="ATOLL_NEW_STATE") as error:
                self.part(server, site)
            assert "server" not in error.value.message
        assert {worker.site: worker.state for worker in server.status().workers} == before

    def restored_to(self, version: int, after: int, knows: bool = False) -> None:
        """The server's folder is a backup with this version, which is older than the sites' folders.

        Args:
            after: the round after which it was restored.
            knows: whether the sites have heard that their last update counted.
        """
        state, backup = self.folder / "state", self.folder / "backup"
        for until in (version, after):
            with self.serve(sites=2) as server:
                if until:
                    self.both(server, until)
                for client in manual_sites(server, self.folder).values() if knows and until == after else ():
                    assert client.next_round() == after + 1
                    client.close()
            if until == version:
                copy_folder(state, backup)
        shutil.rmtree(state)
        copy_folder(backup, state)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def server(run: Run) -> Iterator[atoll.Server]:
    with run.serve() as server:
        yield server


@contextmanager
def replaced(folder: Path, by: Path) -> Iterator[None]:
    """Within, a copy of another folder lies in place of this one."""
    aside = folder.rename(folder.with_name("aside"))
    copy_folder(by, folder)
    yield
    shutil.rmtree(folder)
    aside.rename(folder)


def run_folder(server: atoll.Server, run: Run) -> Path:
    return run.workers / "a" / server.status().run


def damage(file: Path) -> None:
    """One bit of every byte: small changes, no value becomes infinite."""
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


# -- lost, or damaged


CURRENT = r"This run has accepted 2 updates of a, but.*ATOLL_DIR.*a/[0-9a-f]{32}"
PENDING = (
    r"although the run's model contains updates that depend on it.*a/[0-9a-f]{32}/algorithm\.json .*ATOLL_NEW_STATE"
)
"""Which of both counts is known when the site is there."""


@pytest.mark.covers("S2", "X3", "F41")
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
def test_a_site_without_the_control_that_the_run_counts_on_is_refused(
    server: atoll.Server,
    run: Run,
    caplog: pytest.LogCaptureFixture,
    lose: Callable[[Path], object],
    names: list[str],
    said: str,
) -> None:
    assert run.part(server, until=2) == [1.0, 2.0]
    wait_until(lambda: server.status().fragments[0].version == 2, "the second update is in the controls")
    for name in names:
        lose(run_folder(server, run) / name)
    for _ in range(2):  # what the first attempt leaves in the folder does not pass for a control
        with pytest.raises(ConfigError, match=said):
            run.part(server)
    damaged = f"{names[0]} is damaged (its digest differs) and is not used. Check the disk."
    assert lose is not damage or damaged in caplog.text
    if said == CURRENT:
        assert [worker.state for worker in server.status().workers] == ["left"]  # it did not join


@pytest.mark.covers("S2")
def test_its_folder_may_move_to_another_machine(server: atoll.Server, run: Run) -> None:
    run.part(server)
    other = run.folder / "other"
    with pytest.raises(ConfigError, match="This run has accepted 1 update of a, but"):
        run.part(server, workers=other)
    shutil.rmtree(other)
    shutil.copytree(run.workers, other)
    assert run.part(server, workers=other) == [1.0, 2.0]


@pytest.mark.covers("S2")
def test_a_site_that_comes_late_or_has_no_counted_update_begins_at_zero(server: atoll.Server, run: Run) -> None:
    with ManualSite(server.url, site="a", folder=run.workers) as client:
        client.next_round()
        client.pull()
    assert run.part(server, workers=run.folder / "other") == [0.0, 0.0]
    assert run.part(server, "late") == [0.0, 0.0]


@pytest.mark.covers("S2")
def test_an_update_that_is_accepted_and_not_yet_counted_counts(run: Run) -> None:
    """Two are awaited: a's update lies there, accepted, when a loses its files."""
    with run.serve(sites=2) as server, ManualSite(server.url, site="b", folder=run.workers).join():
        run.part(server)
        shutil.rmtree(run.workers / "a")
        with pytest.raises(ConfigError, match="This run has accepted 1 update of a, but"):
            run.part(server)


@pytest.mark.covers("S2")
def test_the_server_remembers_it_over_a_restart(run: Run) -> None:
    with run.serve() as server:
        run.part(server, until=2)
    shutil.rmtree(run.workers)
    with run.serve() as server, pytest.raises(ConfigError, match="This run has accepted 2 updates of a, but"):
        run.part(server)


@pytest.mark.covers("S2")
def test_it_may_begin_at_zero_where_it_is_told_to(
    server: atoll.Server, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the note is gone: what the files hold is not taken for c_i. Told so once, the site has a control again."""
    run.part(server, until=2)
    (run_folder(server, run) / "algorithm.json").unlink()
    monkeypatch.setenv("ATOLL_NEW_STATE", "perhaps")
    with pytest.raises(ConfigError, match=r"ATOLL_NEW_STATE is 'perhaps'"):
        run.part(server)
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")
    assert run.part(server) == [0.0, 0.0]
    assert "a: no state of the algorithm was found; it starts from zero" in caplog.text
    assert "This run has accepted 2 updates of a, but the site has lost its algorithm's state" in caplog.text
    assert run.part(server) == [1.0, 2.0]  # the variable does no harm to a control that is there
    monkeypatch.delenv("ATOLL_NEW_STATE")
    assert run.part(server) == [2.0, 4.0]


# -- of another moment: c_i is that of its site, its run and its last update that counts


@pytest.mark.covers("S2")
def test_refuses_the_control_of_an_older_copy_of_the_sites_folder(run: Run) -> None:
    with run.serve(sites=2) as server:
        run.both(server, 1)
        older = copy_folder(run.workers / "a", run.folder / "older")
        run.both(server, 3)
        with replaced(run.workers / "a", older):
            run.refuses(server, "a")
        run.both(server, 5)
    run.require_the_mean(5)


@pytest.mark.covers("S2")
def test_refuses_the_control_of_another_site(run: Run) -> None:
    with run.serve(sites=2) as server:
        run.both(server, 2)
        for site, other in ("ab", "ba"):
            with replaced(run.workers / site, run.workers / other):
                run.refuses(server, site)
        run.both(server, 4)
    run.require_the_mean(4)


@pytest.mark.covers("S2")
def test_refuses_a_copy_from_before_an_update_that_is_in_and_not_counted_yet(run: Run) -> None:
    """The copy has the control of the last update that counts, and nothing of the one that is going to."""
    with run.serve(sites=2) as server:
        run.both(server, 2)
        with ManualSite(server.url, site="a", folder=run.workers) as client:
            assert client.next_round() == 3  # adopts what was pending
        older = copy_folder(run.workers / "a", run.folder / "older")
        run.part(server)  # the round still waits for b
        with replaced(run.workers / "a", older):
            run.refuses(server, "a")
        run.both(server, 4)
    run.require_the_mean(4)


@pytest.mark.covers("S2")
@pytest.mark.parametrize("knows", [False, True], ids=["pending", "counted"])
def test_a_server_restored_to_before_the_last_round_finds_the_control_before_it(run: Run, knows: bool) -> None:
    """A site keeps the control that it had before its last update, whether it knows already that this one counted."""
    run.restored_to(2, after=3, knows=knows)
    with run.serve(sites=2) as server:
        run.both(server, 6)
    for number in (4, 5, 6):
        run.require_the_mean(number)


@pytest.mark.covers("S2")
def test_a_server_restored_to_its_begin_begins_with_controls_of_zero(run: Run) -> None:
    run.restored_to(0, after=4)
    with run.serve(sites=2) as server:
        run.both(server, 3)
    assert run.seen["a", 1][1].tolist() == run.seen["b", 1][1].tolist() == [0.0, 0.0]
    run.require_the_mean(3)


@pytest.mark.covers("S2")
def test_a_running_site_steps_back_with_a_restored_server(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The server lost its third version. The site sends the third update again, and c_i is as after two, then three."""
    port, seen = free_port(), list[list[float]]()

    def rounds(client: ManualSite, server: atoll.Server, until: int) -> None:
        number = 0
        while number != until:
            number = client.next_round() or 0
            model = client.pull()
            seen.append([number, *client.round.own_state("control")["w"].tolist()])
            client.submit(model, steps=1, groups={"control": {"w": CHANGES["a"]}})
        wait_until(lambda: server.status().fragments[0].version == until, f"version {until}")

    with ExitStack() as stack:
        with run.serve(port=port) as server:
            client = stack.enter_context(ManualSite(server.url, site="a", folder=run.workers))
            rounds(client, server, until=2)
        backup = copy_folder(run.folder / "state", run.folder / "backup")
        with run.serve(port=port) as server:
            rounds(client, server, until=3)
            assert client.next_round() == 4  # the site knows that its third update counted
        shutil.rmtree(run.folder / "state")
        copy_folder(backup, run.folder / "state")
        with run.serve(port=port) as server:
            rounds(client, server, until=5)
            client.close()
    assert seen == [[1, 0, 0], [2, 1, 2], [3, 2, 4], [4, 3, 6], [5, 4, 8]]
    assert "the server went back to before this site's last update, so this state goes back, too" in caplog.text
    assert "damaged" not in caplog.text
