"""Links, pipes and folders planted in the folders of servers and sites: no other file changes, and nothing hangs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit import FederatedSites, Halfway, copy_folder, exported, halfway_run, serve, tensors_digest
from kit.processes import Outcome, command, write_run_file
from kit.servers import plain_server
from kit.tls import write_certificate
from safetensors.torch import save_file

import atoll
from atoll.errors import ConfigError, StoreError

RUNS: dict[str, dict[str, Any]] = {
    "plain": {"rounds.best_metric": "loss", "rounds.best_mode": "min"},
    "compressed": {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Halfway]:
    """Runs that stop when the folders of server and sites have every kind of file."""
    return {name: halfway_run(tmp_path_factory.mktemp(name), **settings) for name, settings in RUNS.items()}


def symbolic(path: Path, target: Path) -> None:
    path.symlink_to(target)


def hard(path: Path, target: Path) -> None:
    os.link(target, path)


def look(path: Path) -> list[tuple[Path, bytes, int]]:
    """A file, or those of a folder: content and mode."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(each, each.read_bytes(), each.stat().st_mode) for each in files if each.is_file()]


@contextmanager
def elsewhere(path: Path, link: Callable[[Path, Path], None]) -> Iterator[None]:
    """Move a file or folder away, and put a link to it in its place; after the block, it is unchanged and comes back.

    A file that Atoll has put there in place of the link stays.
    """
    away = path.parents[3] / "away"
    path.rename(away)
    link(path, away)
    before = look(away)
    yield
    assert look(away) == before, path
    if path.is_symlink() or (path.exists() and path.samefile(away)):
        path.unlink()
        away.rename(path)
    else:
        away.unlink()


def contents(folder: Path) -> list[Path]:
    """All that is in a folder; SQLite's files come first, since a later start may remove them."""
    return sorted(folder.rglob("*"), key=lambda path: (not path.name.startswith("journal"), path))


def refusal(image: Halfway, folder: Path) -> str:
    """Why the server does not start; empty if it does."""
    try:
        with serve(folder, **{"network.port": image.port}, **image.settings):
            return ""
    except StoreError as error:
        return str(error)


RECOVERS = {"status.json", "best.json", "best.safetensors", "metrics.jsonl", "model.safetensors"}
"""Files of the server that are only ever replaced as a whole: a link in their place is replaced, too."""


@pytest.mark.covers("X9", "F41")
@pytest.mark.parametrize("link", [symbolic, hard])
def test_a_server_changes_nothing_through_a_link(
    tmp_path: Path, images: dict[str, Halfway], link: Callable[[Path, Path], None]
) -> None:
    """If a file or folder of the server is replaced by a link, the server changes nothing in the link's target."""
    # Each file and folder is replaced by a link, one at a time. Once the links are gone, the run ends with the same
    # bits.
    image, folder = images["plain"], tmp_path / "a" / "b"
    copy_folder(image.later, folder)
    refused = set()
    for path in contents(folder / "state"):
        if not path.exists() or (path.is_dir() and link is hard):  # removed by an earlier start
            continue
        with elsewhere(path, link):
            if said := refusal(image, folder):
                assert str(path) in said
                assert f"is a {link.__name__} link" in said
                refused.add(path.name)
    assert not refused & RECOVERS
    assert {"journal.sqlite", "journal.sqlite-wal", "audit.head", "lock", "version-0-1.safetensors"} <= refused
    image.go_on(folder)
    assert tensors_digest(exported(folder)) == image.digest


@pytest.mark.covers("X9", "F41")
@pytest.mark.parametrize("run", RUNS)
def test_a_site_changes_nothing_through_a_link(tmp_path: Path, images: dict[str, Halfway], run: str) -> None:
    """If a link stands in place of a site's folder or one of its files, the site refuses to join and changes nothing in
    the target.
    """
    # Once the links are gone, the site still has its update, and the run ends with the same bits.
    image, folder = images[run], tmp_path / "a"
    copy_folder(image.later, folder)
    with serve(folder, **{"network.port": image.port}, **image.settings) as server:
        for link in (symbolic, hard):
            for path in [folder / "workers" / "a", *contents(folder / "workers" / "a")]:
                if path.stem == "delta" or (link is hard and path.suffix not in (".bin", ".safetensors")):
                    continue  # opened later; notes are replaced as a whole; folders have no hard links
                with elsewhere(path, link):
                    with pytest.raises(StoreError, match=rf"(?s)^{re.escape(str(path))} .*is a {link.__name__} link"):
                        atoll.join(server.url, "a", folder=folder / "workers")
        sites = FederatedSites(server.url, folder)
        sites.join()
        server.run()
    assert sites.trained["a", 2] == 0  # its update of round 2 was accepted before
    assert tensors_digest(exported(folder)) == image.digest


@pytest.mark.covers("X9")
@pytest.mark.parametrize("name", ["delta.bin", "delta.json"])
def test_a_link_found_after_joining_ends_the_site(tmp_path: Path, images: dict[str, Halfway], name: str) -> None:
    """A site that finds a link in place of a file after it has joined ends with an error."""
    # Without the link, it goes on.
    image, folder = images["compressed"], tmp_path / "a"
    copy_folder(image.later, folder)
    (path,) = (folder / "workers" / "a").glob(f"*/{name}")
    with serve(folder, **{"network.port": image.port}, **image.settings) as server:
        other = FederatedSites(server.url, folder, "b")
        with elsewhere(path, symbolic):
            with pytest.raises(StoreError, match=rf"^{re.escape(str(path))} .*is a symbolic link"):
                FederatedSites(server.url, folder, "a").join()
        FederatedSites(server.url, folder, "a").join()
        other.join()
        server.run()
    assert tensors_digest(exported(folder)) == image.digest


@pytest.mark.covers("X9")
def test_replaces_links_in_place_of_new_files(tmp_path: Path, images: dict[str, Halfway]) -> None:
    """If a link stands where the server or a site writes a new file, the link is replaced and its target is unchanged.

    Another program can guess the names of temporary files and slots.
    """
    image, folder = images["plain"], tmp_path / "run"
    copy_folder(image.later, folder)
    (site,) = (path for path in (folder / "workers" / "a").iterdir())
    state, victim = folder / "state", tmp_path / "victim"
    victim.write_bytes(b"of another program")
    names = [site / name for name in ("base.tmp", "outbox.tmp", "base-next.tmp")]
    names += [state / ".status.json.tmp", state / "exports" / "model.safetensors"]
    names += [state / "exports" / f".{name}.tmp" for name in ("metrics.jsonl", "best.json")]
    names += [
        state / "slots" / f"{kind}-0-{number}.{end}"
        for kind, number, end in (("version", 2, "safetensors"), ("spool", 2, "bin"))
    ]
    for path in names:
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
    image.go_on(folder)
    assert victim.read_bytes() == b"of another program"
    assert [path for path in names if path.is_symlink()] == [site / "base-next.tmp"]  # this run has used no such file
    assert tensors_digest(exported(folder)) == image.digest


@pytest.mark.covers("X9", "P9")
def test_a_server_start_deletes_nothing_behind_a_link(tmp_path: Path) -> None:
    """A server refuses to start if its folder `objects` is a link, and deletes no file in the target.

    A start deletes all files in `objects` that belong to no object.
    """
    other = tmp_path / "pictures"
    other.mkdir()
    (other / "cat.png").write_bytes(b"a cat")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "objects").symlink_to(other)
    with pytest.raises(StoreError, match=r"objects cannot be used \(it is a symbolic link"):
        plain_server(tmp_path, {"w": torch.zeros(2)}, sites=1, rounds=1).start()
    assert (other / "cat.png").read_bytes() == b"a cat"


@pytest.mark.covers("X9")
def test_folders_given_by_the_user_may_be_links(tmp_path: Path, images: dict[str, Halfway]) -> None:
    """The state directory, the export folder and the sites' folder may be links, for example to another disk."""
    image, folder = images["plain"], tmp_path / "run"
    copy_folder(image.later, tmp_path / "disk")
    folder.mkdir()
    (tmp_path / "results").mkdir()
    for name in ("state", "workers"):
        (folder / name).symlink_to(tmp_path / "disk" / name)
    (folder / "exports").symlink_to(tmp_path / "results")
    image.go_on(folder, **{"disk.export_dir": folder / "exports"})
    assert (tmp_path / "results" / "model.safetensors").is_file()


# -- what commands read


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


NOT_A_FILE = "is a named pipe, a socket or a device"


@pytest.mark.covers("F41", "X3")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("journal.sqlite", "status --dir state"),
        ("journal.sqlite-wal", "status --dir state"),
        ("journal.sqlite", "audit state"),
        ("audit.head", "audit state"),
        ("journal.sqlite", "export model.safetensors --dir state"),
        ("journal.sqlite-shm", "export model.safetensors --dir state"),
        ("slots/version-0-1.safetensors", "export model.safetensors --dir state"),
    ],
)
@pytest.mark.parametrize("plant", [pipe, lambda path: (path.unlink(), path.symlink_to("/dev/zero"))])
def test_commands_report_pipes_and_links_in_one_line(
    nursery: Nursery, tmp_path: Path, images: dict[str, Halfway], name: str, words: str, plant: Callable[[Path], object]
) -> None:
    """A command that finds a pipe or a link in place of a file that it reads ends at once with one line that names
    it.
    """
    copy_folder(images["plain"].later / "state", tmp_path / "state")
    plant(tmp_path / "state" / name)
    outcome = command(nursery, tmp_path, *words.split())
    assert outcome.returncode == StoreError.exit_code, outcome.stderr
    assert f"state/{name}" in outcome.stderr
    assert NOT_A_FILE in outcome.stderr or "is a symbolic link" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.covers("F41")
def test_the_status_does_not_wait_for_a_pipe(nursery: Nursery, tmp_path: Path, images: dict[str, Halfway]) -> None:
    """If a pipe stands in place of the saved status, `atoll status` calls the file damaged and shows the journal."""
    copy_folder(images["plain"].later / "state", tmp_path / "state")
    pipe(tmp_path / "state" / "status.json")
    outcome = command(nursery, tmp_path, "status", "--dir", "state")
    assert outcome.returncode == 0, outcome.stderr
    assert "status.json is missing or damaged" in outcome.stdout


@pytest.mark.covers("F41")
def test_an_export_does_not_wait_for_a_pipe(nursery: Nursery, tmp_path: Path, images: dict[str, Halfway]) -> None:
    """If a pipe stands in place of the best version, `atoll export --best` says that there is no best version."""
    copy_folder(images["plain"].later / "state", tmp_path / "state")
    pipe(tmp_path / "state" / "exports" / "best.safetensors")
    outcome = command(nursery, tmp_path, "export", "model.safetensors", "--dir", "state", "--best")
    assert outcome.returncode == 2
    assert "There is no best version" in outcome.stderr


TLS = {"network.tls_cert": "cert.pem", "network.tls_key": "key.pem"}
READ_BY_A_SERVER: dict[str, dict[str, Any]] = {
    "other.toml": {},
    "model.safetensors": {"model.source": "model.safetensors"},
    "models/2.safetensors": {"model.source": "models"},
    "token": {"network.token_file": "token"},
    "key.pem": TLS,
    "cert.pem": TLS,
}
"""File → the settings that name it; `other.toml` is the run file itself."""


@pytest.mark.covers("X3")
@pytest.mark.parametrize("name", READ_BY_A_SERVER)
def test_a_server_refuses_pipes_in_place_of_its_input_files(nursery: Nursery, tmp_path: Path, name: str) -> None:
    """If a pipe stands in place of the run file or of a file named in it, the server ends with an error that says
    so.
    """
    write_certificate(tmp_path)
    (tmp_path / "models").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "models" / "1.safetensors")
    pipe(tmp_path / name)
    (tmp_path / name).chmod(0o600)
    write_run_file(tmp_path, **{"network.port": 0}, **READ_BY_A_SERVER[name])
    outcome = command(nursery, tmp_path, "server", name if name == "other.toml" else "run.toml")
    assert outcome.returncode == ConfigError.exit_code, outcome.stderr
    assert NOT_A_FILE in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr


@pytest.mark.covers("X3")
@pytest.mark.parametrize("variable", ["ATOLL_TOKEN_FILE", "ATOLL_TLS_CA"])
def test_a_command_refuses_a_pipe_given_by_a_variable(nursery: Nursery, tmp_path: Path, variable: str) -> None:
    """If an environment variable gives the path of a pipe in place of a file, the command ends at once with an
    error.
    """
    pipe(tmp_path / "file")
    (tmp_path / "file").chmod(0o600)
    outcome: Outcome = command(
        nursery, tmp_path, "status", "--server", "https://127.0.0.1:9", **{variable: str(tmp_path / "file")}
    )
    assert outcome.returncode == ConfigError.exit_code
    assert NOT_A_FILE in outcome.stderr


@pytest.mark.covers("F41")
def test_a_model_file_may_be_a_link(tmp_path: Path, images: dict[str, Halfway]) -> None:
    """The file of the initial model may be a link. Package managers and download caches store models so."""
    save_file({"w": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    with plain_server(tmp_path, str(tmp_path / "model.safetensors"), sites=1, rounds=1) as server:
        assert server.status().model_bytes == 8
