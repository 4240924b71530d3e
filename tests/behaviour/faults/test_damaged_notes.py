"""A note whose bits have changed is said and discarded; what it told of is pulled, trained or asked for again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import FederatedSites, Halfway, copy_folder, exported, flip_bit, halfway_run, serve
from kit import tensors_digest as digest_of
from safetensors.torch import load_file

import atoll
from atoll.errors import ConfigError


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


def note(folder: Path, name: str) -> Path:
    (path,) = (folder / "workers" / "a").glob(f"*/{name}")
    return path


def said(caplog: pytest.LogCaptureFixture, name: str) -> int:
    return len([line for line in caplog.messages if name in line and "damaged" in line])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Halfway:
    return halfway_run(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Halfway:
    return halfway_run(
        tmp_path_factory.mktemp("compressed"),
        **{"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"},
    )


def later(image: Halfway, folder: Path) -> Path:
    return copy_folder(image.later, folder)


def served_from_its_outbox(image: Halfway, folder: Path) -> Path:
    """The server has nothing of round 2, and site a has its update for it in its outbox."""
    copy_folder(image.earlier / "state", folder / "state")
    copy_folder(image.later / "workers", folder / "workers")
    return folder


SITE_NOTES: dict[str, tuple[str, Callable[[Halfway, Path], Path], list[Callable[[Path], None] | None]]] = {
    "base.json": ("plain", later, [*DAMAGES, Path.unlink]),
    "outbox.json": ("plain", served_from_its_outbox, [None, *DAMAGES, Path.unlink]),
    "residual.json": ("compressed", later, [None, *DAMAGES]),
    "delta.json": ("compressed", later, [*DAMAGES, Path.unlink]),
}
"""Note of a site → the run in whose middle it lies, how its folder is put together, and what becomes of the note."""


@pytest.mark.covers("F41", "F1", "F3")
@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name, (*_, damages) in SITE_NOTES.items() for damage in damages]
)
def test_a_damaged_note_of_a_site_is_said_and_what_it_told_of_is_pulled_or_trained_again(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None] | None,
) -> None:
    """A missing note is none, and nothing is said. Without its residuals, error feedback begins anew: other bits."""
    run, prepare, _ = SITE_NOTES[name]
    image: Halfway = request.getfixturevalue(run)
    folder = prepare(image, tmp_path / "run")
    if damage is not None:
        damage(note(folder, name))
    caplog.set_level(logging.WARNING, "atoll")
    sites = image.go_on(folder)
    assert said(caplog, name) == (damage in DAMAGES)
    assert name != "outbox.json" or sites.trained["a", 2] == (damage is not None), "sent from the outbox, or trained"
    assert (digest_of(exported(folder)) == image.digest) == (damage is None or name != "residual.json")


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


@pytest.mark.covers("F41", "S2")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_note_of_a_control_is_said_and_the_site_refused(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "algorithm.name": "scaffold",
        "rounds.sites": 1,
        "algorithm.outer_optimizer.momentum": 0.0,
        "rounds.total": 9,
    }
    with serve(tmp_path, torch.nn.Linear(2, 1), **settings) as server:
        control_step(server, tmp_path / "workers", 2)
        damage(note(tmp_path, "algorithm.json"))
        caplog.set_level(logging.WARNING, "atoll")
        with pytest.raises(ConfigError, match="does not have its algorithm's state"):
            control_step(server, tmp_path / "workers", 3)
        assert said(caplog, "algorithm.json") == 1
        monkeypatch.setenv("ATOLL_NEW_STATE", "1")
        control_step(server, tmp_path / "workers", 4)


@pytest.mark.covers("F41")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_note_of_an_object_is_said_and_the_object_gone(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path) as server:
        url = server.url
        kept, lost = (atoll.objects.publish({"w": torch.ones(3)}, server=url) for _ in range(2))
    damage(tmp_path / "state" / "objects" / f"{lost.object}.json")
    caplog.set_level(logging.WARNING, "atoll")
    with serve(tmp_path, **{"network.port": int(url.rpartition(":")[2])}):
        assert said(caplog, f"{lost.object}.json") == 1
        assert [path.stem for path in (tmp_path / "state" / "objects").glob("*.json")] == [kept.object]
        assert torch.equal(atoll.objects.fetch(kept)["w"], torch.ones(3))


@pytest.mark.covers("F41")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_note_of_the_best_version_is_said_and_made_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the version itself is not kept any more: the model's own header says which it is."""
    with serve(tmp_path, **{"rounds.best_metric": "loss", "rounds.best_mode": "max"}) as server:
        FederatedSites(server.url, tmp_path).join()
    path = tmp_path / "state" / "exports" / "best.json"
    before = json.loads(path.read_text())
    assert before["version"] == 0
    damage(path)
    caplog.set_level(logging.WARNING, "atoll")
    with serve(tmp_path, **{"rounds.best_metric": "loss", "rounds.best_mode": "max"}):
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
        b = FederatedSites(server.url, folder, ["b"])
        a = FederatedSites(server.url, folder, ["a"], during=during)
        if change is not None:
            with pytest.raises(Ends):
                a.join()
            change(note(folder, "held.json"))
            a = FederatedSites(server.url, folder, ["a"])
        a.join()
        b.join()
        server.run()
    results = list((folder / "workers").rglob("model.safetensors"))
    assert len(results) == 2
    return {digest_of(load_file(path)) for path in results}


@pytest.fixture(scope="module")
def swarmed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return swarm_digest(tmp_path_factory.mktemp("undisturbed"), None)


@pytest.mark.covers("F41")
@pytest.mark.parametrize(("change", "times"), [(no_text, 1), (half, 1), (nothing, 1), (Path.unlink, 0)])
def test_a_damaged_note_of_held_versions_is_said_and_a_missing_one_is_not(
    swarmed: set[str], tmp_path: Path, change: Callable[[Path], None], times: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "atoll")
    assert swarm_digest(tmp_path, change) == swarmed
    assert said(caplog, "held.json") == times
