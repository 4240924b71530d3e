"""What `atoll status` shows of a run that is over, or whose server is away."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from harness.processes import Nursery, free_port, wait_until
from kit import FederatedSites, ForkedServer, serve
from kit.tls import write_certificate

import atoll
from atoll.testing.run import Status


def status_of(nursery: Nursery, folder: Path, *words: str, **env: str) -> tuple[int, str]:
    process = nursery.start("atoll", "status", *words, cwd=folder, env=env)
    return process.wait(), process.output()


@pytest.mark.covers("L13")
def test_reads_the_state_directory_of_a_finished_run(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path, **{"run.name": "over"}) as server:
        FederatedSites(server.url, tmp_path).join()
        server.run()
        last = server.status()
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "state").rglob("*.sqlite"))
    code, said = status_of(nursery, tmp_path, "--dir", "state", "--json")
    assert code == 0, said
    found = Status.model_validate_json(said)
    for key in ("run", "name", "algorithm", "policy", "finished", "rounds", "history", "deaths", "refused", "version"):
        assert getattr(found, key) == getattr(last, key), key
    assert [(each.site, each.rounds, each.state) for each in found.workers] == [("a", 3, "left"), ("b", 3, "left")]
    assert [fragment.phase for fragment in found.fragments] == ["finished"]
    code, said = status_of(nursery, tmp_path, "--dir", "state")
    assert code == 0
    assert "over at state: fedavg" in said
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "state").rglob("*.sqlite")) == before


def test_reads_the_default_state_directory_where_no_server_answers(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path, **{"rounds.sites": 1, "disk.state_dir": tmp_path / "atoll-run"}) as server:
        FederatedSites(server.url, tmp_path, ["a"]).join()
        server.run()
        run = server.status().run
    code, said = status_of(nursery, tmp_path, "--server", f"http://127.0.0.1:{free_port()}")
    assert code == 5  # that server was meant
    assert "--dir" in said
    with socket.socket() as held:  # bound, and not listening: no server answers at the default address
        try:
            held.bind(("127.0.0.1", 8512))
        except OSError:
            pytest.skip("port 8512 of this machine is in use")
        code, said = status_of(nursery, tmp_path)
    assert code == 0, said
    assert run[:8] in said
    assert "FINISHED" in said


def test_says_that_no_server_answers_after_it_was_stopped(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path, **{"rounds.total": 0}):
        pass
    code, said = status_of(nursery, tmp_path, "--dir", "state", "--json")
    assert code == 0, said
    (fragment,) = json.loads(said)["fragments"]
    assert fragment["phase"] == "gathering"
    assert "if no server runs, `atoll server` continues the run" in fragment["reason"]


def test_the_directory_has_the_status_of_a_version_where_its_server_is_killed(nursery: Nursery, tmp_path: Path) -> None:
    with ForkedServer(nursery, tmp_path, **{"rounds.sites": 1, "rounds.best_metric": "loss"}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            fl_round = next(iter(worker))
            fl_round.submit(fl_round.state_dict(), weight=1, metrics={"loss": 0.5})
            wait_until(
                lambda: '"value":0.5' in (tmp_path / "state" / "status.json").read_text(), "that version 1 is saved"
            )
            server.kept.close()
    code, said = status_of(nursery, tmp_path, "--dir", "state", "--json")
    assert code == 0, said
    assert json.loads(said)["best"]["value"] == 0.5
    assert json.loads(said)["bytes_up"] > 0


def test_says_why_the_server_on_the_directory_cannot_be_asked(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path, **write_certificate(tmp_path, "elsewhere.org")):
        code, said = status_of(nursery, tmp_path, "--dir", "state", ATOLL_TLS_CA=str(tmp_path / "ca.pem"))
    assert code == 0, said
    assert "cannot prove its identity" in said


def test_refuses_a_folder_without_a_run_and_an_address_beside_the_folder(nursery: Nursery, tmp_path: Path) -> None:
    code, said = status_of(nursery, tmp_path, "--dir", "state")
    assert (code, "'state'" in said) == (2, True)
    code, _ = status_of(nursery, tmp_path, "--dir", "state", "--server", "http://127.0.0.1:1")
    assert code == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm.name": "fedavg"}, set()),
        ({"algorithm.name": "diloco", "diloco.sync_every": 7}, {"sync every", "outer"}),
    ],
    ids=["fedavg", "diloco"],
)
def test_words_of_diloco_are_in_the_status_of_diloco_alone(
    nursery: Nursery, tmp_path: Path, settings: dict[str, object], words: set[str]
) -> None:
    with serve(tmp_path, **settings) as server:
        _, said = status_of(nursery, tmp_path, "--server", server.url)
    assert {word for word in ("sync every", "outer", "data-parallel", "fragment") if word in said} == words


@pytest.mark.covers("L13")
def test_asks_the_server_that_runs_on_the_state_directory_at_another_port(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        sites = FederatedSites(server.url, tmp_path, ["a"])  # the round waits for another
        wait_until(lambda: server.status().workers, "a site")
        code, said = status_of(nursery, tmp_path, "--dir", "state", "--json")
        assert code == 0, said
        found = Status.model_validate_json(said)
        assert (found.address, found.run) == (server.url, server.status().run)
        assert [(each.site, each.heard) for each in found.workers] == [("a", True)]
        FederatedSites(server.url, tmp_path, ["b"]).join()
        sites.join()
        server.run()
