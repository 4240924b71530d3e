"""A swarm's site whose note of the versions that it holds has changed on disk: said, and they are pulled again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import FederatedSites, flip_bit, serve, tensors_digest
from safetensors.torch import load_file


class Ends(Exception):
    """The script of a site ends in the middle of a round."""


def a_bit(path: Path) -> None:
    flip_bit(path, path.stat().st_size // 2)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def nothing(path: Path) -> None:
    path.write_bytes(b"")


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
            (note,) = (folder / "workers" / "a").glob("*/held.json")
            change(note)
            a = FederatedSites(server.url, folder, ["a"])
        a.join()
        b.join()
        server.run()
    results = list((folder / "workers").rglob("model.safetensors"))
    assert len(results) == 2
    return {tensors_digest(load_file(path)) for path in results}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return swarm_digest(tmp_path_factory.mktemp("undisturbed"), None)


@pytest.mark.covers("F41")
@pytest.mark.parametrize(("change", "said"), [(a_bit, 1), (half, 1), (nothing, 1), (Path.unlink, 0)])
def test_a_damaged_note_of_held_versions_is_said_and_a_missing_one_is_not(
    undisturbed: set[str],
    tmp_path: Path,
    change: Callable[[Path], None],
    said: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "atoll")
    assert swarm_digest(tmp_path, change) == undisturbed
    assert len([line for line in caplog.messages if "held.json" in line and "damaged" in line]) == said
