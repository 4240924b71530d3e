"""Damaged versions and notes, and folders in place of files: named, and made again from what is undamaged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fault_world import Result, ServerProcess, Sites, left_undisturbed
from harness.processes import Nursery, wait_until
from kit import ForkedServer, Halfway, ask_journal, copy_folder, exported, flip_bit, halfway_run, serve, write_run_file
from kit import tensors_digest as digest_of
from kit.sites import FederatedSites, Gate, run_to_end
from safetensors.torch import load_file

import atoll
from atoll.errors import ConfigError, StoreError

pytestmark = pytest.mark.covers("F41")


def a_digit(path: Path) -> None:
    """One bit of a number or a hex digit: still JSON of the right keys and types."""
    data = path.read_bytes()
    for key in (b'"version": ', b'"weight": ', b'"current": ', b'"value": ', b'"expires_at": '):
        if key in data:
            at = data.index(key) + len(key)
            return flip_bit(path, at + (data[at : at + 1] == b'"'))
    raise AssertionError(data)


def a_key(path: Path) -> None:
    flip_bit(path, 4)


def no_text(path: Path) -> None:
    flip_bit(path, path.stat().st_size // 2, 7)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def nothing(path: Path) -> None:
    """What a power loss leaves of a file that was just written."""
    path.write_bytes(b"")


DAMAGES = [a_digit, a_key, no_text, half, nothing]
LATER = (a_key, no_text, nothing)
SOME = [pytest.param(each, marks=pytest.mark.long if each in LATER else ()) for each in DAMAGES]
"""One function unseals all notes: those of a site's base and of an object get every damage, the others two of them."""


def note(folder: Path, name: str) -> Path:
    (path,) = (folder / "workers" / "a").glob(f"*/{name}")
    return path


def said(caplog: pytest.LogCaptureFixture, name: str) -> int:
    return len([line for line in caplog.messages if name in line and "damaged" in line])


BEST = {"rounds.best_metric": "loss", "rounds.best_mode": "max"}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Halfway]:
    """Runs with plain and compressed updates and versions, halfway."""
    plain = halfway_run(tmp_path_factory.mktemp("plain"), **BEST)
    int8 = {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"}
    return {"plain": plain, "compressed": halfway_run(tmp_path_factory.mktemp("compressed"), **int8)}


SITE_NOTES: dict[str, tuple[str, list[Callable[[Path], None] | None]]] = {
    "base.json": ("plain", [*DAMAGES, Path.unlink]),
    "outbox.json": ("plain", [None, *DAMAGES, Path.unlink]),
    "residual.json": ("compressed", [None, *DAMAGES]),
    "delta.json": ("compressed", [*DAMAGES, Path.unlink]),
}
"""Note of a site → the run in whose middle it lies, and what becomes of the note."""


@pytest.mark.covers("F1", "F3")
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(name, damage, marks=pytest.mark.long if name != "base.json" and damage in LATER else ())
        for name, (_, damages) in SITE_NOTES.items()
        for damage in damages
    ],
)
def test_a_site_goes_on_without_a_damaged_metadata_file(
    tmp_path: Path,
    images: dict[str, Halfway],
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None] | None,
) -> None:
    """A site warns of a damaged metadata file, goes on, and pulls or trains again what the file described."""
    # A missing file causes no warning. Without its residuals, error feedback starts at zero, which gives other bits.
    # With an intact `outbox.json`, the site submits its stored update and does not train round 2 again.
    image = images[SITE_NOTES[name][0]]
    copy_folder((image.earlier if name == "outbox.json" else image.later) / "state", tmp_path / "state")
    copy_folder(image.later / "workers", tmp_path / "workers")
    if damage is not None:
        damage(note(tmp_path, name))
    sites = image.go_on(tmp_path)
    assert said(caplog, name) == (damage in DAMAGES)
    assert name != "outbox.json" or sites.trained["a", 2] == (damage is not None), "sent from the outbox, or trained"
    assert (digest_of(exported(tmp_path)) == image.digest) == (damage is None or name != "residual.json")


def control_step(server: atoll.Server, folder: Path, rounds: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.join(server.url, site="a", folder=folder) as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            with fl_round.correct(model, optimizer):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            fl_round.submit(model)
            if fl_round.number == rounds:
                break


@pytest.mark.covers("S2")
@pytest.mark.parametrize("damage", SOME)
def test_refuses_a_site_with_a_damaged_control_file(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the metadata file of a site's control is damaged, the site warns and cannot join.

    With ATOLL_NEW_STATE, the site may start with a control of zero.
    """
    settings = {"algorithm": "scaffold", "sites": 1, "rounds": 9, "algorithm.outer_optimizer.momentum": 0.0}
    with serve(tmp_path, torch.nn.Linear(2, 1), **settings) as server:
        control_step(server, tmp_path / "workers", 2)
        damage(note(tmp_path, "algorithm.json"))
        with pytest.raises(ConfigError, match="does not have the algorithm's state after that"):
            control_step(server, tmp_path / "workers", 3)
        assert said(caplog, "algorithm.json") == 1
        monkeypatch.setenv("ATOLL_NEW_STATE", "1")
        control_step(server, tmp_path / "workers", 4)


@pytest.mark.parametrize("damage", DAMAGES)
def test_drops_an_object_with_a_damaged_metadata_file(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """If the metadata file of an object is damaged, the server warns, drops this object and keeps the others."""
    with serve(tmp_path) as server:
        url = server.url
        kept, lost = (atoll.objects.publish({"w": torch.ones(3)}, server=url) for _ in range(2))
    damage(tmp_path / "state" / "objects" / f"{lost.object}.json")
    with serve(tmp_path, **{"network.port": int(url.rpartition(":")[2])}):
        assert said(caplog, f"{lost.object}.json") == 1
        assert [path.stem for path in (tmp_path / "state" / "objects").glob("*.json")] == [kept.object]
        assert torch.equal(atoll.objects.fetch(kept)["w"], torch.ones(3))


@pytest.mark.parametrize("damage", SOME)
def test_rewrites_a_damaged_best_json(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The server rewrites a damaged `best.json` from the header of the best model's file.

    The best version itself may no longer be kept.
    """
    with serve(tmp_path, **BEST) as server:
        FederatedSites(server.url, tmp_path).join()
    path = tmp_path / "state" / "exports" / "best.json"
    before = json.loads(path.read_text())
    assert before["version"] == 0
    damage(path)
    with serve(tmp_path, **BEST):
        pass
    assert said(caplog, "best.json") == 1
    assert json.loads(path.read_text()) == before


class Ends(Exception):
    """The script of a site ends in the middle of a round."""


def swarm_digest(folder: Path, change: Callable[[Path], None] | None) -> set[str]:
    """Of the results of both sites; a ends in round 2, its note is changed, and it is started again."""

    def during(site: str, number: int) -> None:
        if site == "a" and number == 2 and change is not None:
            raise Ends

    with serve(folder, **{"swarm.enabled": True, "rounds.total": 3}) as server:
        b = FederatedSites(server.url, folder, ["b"], swarm=True)
        a = FederatedSites(server.url, folder, ["a"], during=during, swarm=True)
        if change is not None:
            with pytest.raises(Ends):
                a.join()
            change(note(folder, "held.json"))
            a = FederatedSites(server.url, folder, ["a"], swarm=True)
        run_to_end(server, a, b)
    results = list((folder / "workers").rglob("model.safetensors"))
    assert len(results) == 2
    return {digest_of(load_file(path)) for path in results}


@pytest.fixture(scope="module")
def swarmed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return swarm_digest(tmp_path_factory.mktemp("undisturbed"), None)


@pytest.mark.parametrize(("change", "times"), [(no_text, 1), (half, 1), (nothing, 1), (Path.unlink, 0)])
def test_warns_of_a_damaged_held_json(
    swarmed: set[str], tmp_path: Path, change: Callable[[Path], None], times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A site of a swarm warns once of a damaged `held.json`, and does not warn of a missing one. The result has the
    same bits.
    """
    assert swarm_digest(tmp_path, change) == swarmed
    assert said(caplog, "held.json") == times


def waiting_in_round_3(server: ForkedServer, folder: Path) -> tuple[FederatedSites, Gate]:
    """Both sites have pulled the third round's version, and wait at the gate before they train."""
    gate = Gate(3)
    sites = Sites(server.url, folder, during=gate)
    gate.wait()
    return sites, gate


def slots_of_head(folder: Path) -> tuple[Path, Path]:
    """Files of the newest version and of its outer state."""
    row = "SELECT slot, state_slot FROM versions ORDER BY version DESC LIMIT 1"
    ((slot, state),) = ask_journal(folder, row)
    slots = folder / "state/slots"
    return slots / f"version-0-{slot}.safetensors", slots / f"state-0-{state}.safetensors"


def finish_from_version_1(
    nursery: Nursery, server: ForkedServer, sites: FederatedSites, gate: Gate, undisturbed: Result
) -> Result:
    """The next server says that version 2 is lost, and the run comes to the models of the undisturbed one."""
    with ServerProcess(nursery, server.folder, port=server.port) as again:
        wait_until(lambda: "listening" in again.log.read_text(), "the second start")
        gate.open()
        sites.join()
        assert again.process.wait() == 0
        assert "Version 2 was lost; the run continues from version 1" in again.log.read_text()
    result = Result(server.folder)
    assert (result.exports, result.digests) == (undisturbed.exports, undisturbed.digests)
    return result


def flip(path: Path) -> None:
    flip_bit(path, 2000)


def truncate(path: Path) -> None:
    os.truncate(path, 1000)


@pytest.mark.parametrize(("which", "damage"), [(0, flip), (1, flip), (0, truncate), (0, Path.unlink)])
def test_falls_back_from_a_damaged_version(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, which: int, damage: Callable[[Path], None]
) -> None:
    """If the newest version is damaged, a restarted server continues from the version before it to the same model."""
    with ServerProcess(nursery, tmp_path) as server:
        sites, gate = waiting_in_round_3(server, tmp_path)
    damage(slots_of_head(tmp_path)[which])
    result = finish_from_version_1(nursery, server, sites, gate, undisturbed)
    assert [version for _, version, _ in result.versions] == [0, 1, 3, 4]  # no number is used again
    # A site that knew version 2 to be durable had let go of its update, and trained the second round again; perhaps the
    # third too, whose update came before it knew.
    assert all(sites.trained[site, 2] in (1, 2) for site in "ab")


@pytest.mark.parametrize("which", [0, 1], ids=["version", "outer state"])
def test_a_version_damaged_in_use_ends_the_server(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, which: int
) -> None:
    """A server that finds its newest version damaged on disk ends at once, and the next start continues from the
    version before it.
    """
    with ServerProcess(nursery, tmp_path) as server:
        sites, gate = waiting_in_round_3(server, tmp_path)
        flip(slots_of_head(tmp_path)[which])
        gate.open()
        assert server.process.wait() == 7
        last = server.process.now.output().splitlines()[-1]
        assert last.startswith("atoll: Version 2 was damaged on disk while the server was running: The ")
        assert "start the run again: it continues from the newest undamaged version" in last
    finish_from_version_1(nursery, server, sites, gate, undisturbed)


def test_refuses_to_start_if_all_versions_are_damaged(nursery: Nursery, tmp_path: Path) -> None:
    """A server does not start if all its versions are damaged, and recommends restoring a backup."""
    left_undisturbed(tmp_path)
    for path in (tmp_path / "state/slots").glob("version-*"):
        flip(path)
    with ServerProcess(nursery, tmp_path) as server:
        assert server.process.wait() == 7
        last = server.process.now.output().splitlines()[-1]
    assert last.startswith(f"atoll: All versions in {tmp_path / 'state'} are damaged (their digests differ)")
    assert "Restore the whole directory from a backup" in last


def test_a_damaged_store_ends_with_its_exit_code(nursery: Nursery, tmp_path: Path) -> None:
    """A server with an unusable file in its state directory ends with the exit code for the store, without a
    traceback.
    """
    (tmp_path / "state" / "audit.head").mkdir(parents=True)
    write_run_file(tmp_path, **{"network.port": 0})
    process = nursery.start("atoll", "server", "run.toml", cwd=tmp_path, log=tmp_path / "log")
    assert process.wait(60) == StoreError.exit_code
    assert "Traceback" not in process.output()
    assert "Exception ignored" not in process.output()


@pytest.mark.parametrize(
    "name", ["journal.sqlite", "audit.head", "lock", "slots/version-0-1.safetensors", "exports/best.json"]
)
def test_a_server_refuses_a_named_pipe_as_a_file(nursery: Nursery, tmp_path: Path, name: str) -> None:
    """If a named pipe lies in place of a state file, the server ends with exit code 7 and one line that names it."""
    path = tmp_path / "state" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    write_run_file(tmp_path, **{"network.port": 0, "rounds.best_metric": "loss"})
    process = nursery.start("atoll", "server", "run.toml", cwd=tmp_path, log=tmp_path / "log")
    assert process.wait(60) == StoreError.exit_code
    assert str(path) in process.output().splitlines()[-1]
    assert "Traceback" not in process.output()


@pytest.mark.parametrize("name", ["base.json", "outbox.json", "base.safetensors"])
def test_a_site_refuses_a_named_pipe_as_a_file(tmp_path: Path, name: str) -> None:
    """If a named pipe lies in place of a site's file, the site refuses to join and names the pipe."""
    with serve(tmp_path) as server:
        path = tmp_path / "workers" / "a" / server.status().run / name
        path.parent.mkdir(parents=True)
        os.mkfifo(path)
        with pytest.raises(StoreError) as refused:
            atoll.join(server.url, "a", folder=tmp_path / "workers")
    assert f"{path} is neither a file nor a folder" in str(refused.value)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("plain", "state/audit.head"),
        ("plain", "state/exports/best.json"),
        ("plain", "state/exports/best.safetensors"),
        ("plain", "state/exports/model.safetensors"),
        ("plain", "state/slots/version-0-1.safetensors"),
        ("plain", "state/slots/spool-0-0.bin"),
        ("plain", "state/objects/id.json"),
        ("plain", "workers/a/*/base.safetensors"),
        ("plain", "workers/a/*/base.json"),
        ("plain", "workers/a/*/outbox.bin"),
        ("plain", "workers/a/*/outbox.json"),
        ("compressed", "workers/a/*/residual.json"),
        ("compressed", "workers/a/*/residual-0.bin"),
    ],
)
def test_reports_a_folder_in_place_of_a_file(tmp_path: Path, images: dict[str, Halfway], run: str, name: str) -> None:
    """If a folder lies in place of a file, the server does not start, or the site does not join."""
    # The error names the folder. Once the folder is gone, the run goes on to the same bits.
    image, folder = images[run], tmp_path / "run"
    copy_folder(image.later, folder)
    path = next(folder.glob(name), folder / name)
    file = path.rename(tmp_path / "away") if path.exists() else None
    path.mkdir(parents=True)
    named = rf"(?i){re.escape(str(path))} .*is (a directory|a folder|not a plain file).*move "
    for _ in range(2):
        with pytest.raises(StoreError, match=named):
            with serve(folder, **{"network.port": image.port}, **image.settings) as server:
                FederatedSites(server.url, folder, ["a"]).join()
    path.rmdir()
    if file is not None:
        file.rename(path)
    image.go_on(folder)
    assert digest_of(exported(folder)) == image.digest
    assert "exports" not in name or path.is_file()
