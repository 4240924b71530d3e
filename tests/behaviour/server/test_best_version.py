"""The best version and the early stop over the real path: server, workers, files."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, wait_until
from kit import Threads
from kit.processes import command, export
from kit.servers import plain_server
from safetensors import safe_open
from safetensors.torch import save_file

import atoll
from atoll.errors import ConfigError, Gone, StateCorrupt, UsageError
from atoll.server.coordinator import exports as export_files


def best_server(folder: Path, **settings: Any) -> atoll.Server:
    return plain_server(folder, {"w": torch.zeros(2)}, **({"rounds.best_metric": "acc"} | settings))


def run_rounds(server: atoll.Server, folder: Path, *measured: float | dict[str, float]) -> int:
    """One site: it validates what it pulled, adds 1 to it, submits. So version v is all v. Returns the rounds done.

    `measured` are accuracies of the rounds, or metrics.

    In the end all of its rounds are committed, and the next one is open, or the run is finished.
    """
    done = 0
    with atoll.join(server.url, site="a", folder=folder / "workers") as worker:
        for fl_round in worker:
            if done == len(measured):
                break
            metrics = measured[done]
            moved = {"w": fl_round.state_dict()["w"] + 1}
            fl_round.submit(moved, metrics={"acc": metrics} if isinstance(metrics, float) else metrics)
            done += 1
    return done


def best_of(folder: Path) -> tuple[dict[str, Any], list[float]]:
    """What best.json says, and the values in best.safetensors."""
    with safe_open(folder / "best.safetensors", framework="pt") as file:
        values = file.get_tensor("w").tolist()
    return json.loads((folder / "best.json").read_text()), values


def saved(server: atoll.Server) -> int:
    """Waits until the best version so far is a file; its number."""
    best = server.status().best
    assert best is not None
    wait_until(lambda: (now := server.status().best) and now.file, "the best version is written")
    assert best.version is not None
    return best.version


@pytest.mark.covers("X41")
def test_the_best_version_is_the_measured_one(tmp_path: Path, nursery: Nursery) -> None:
    """The best version is the one on which sites measured the best metric, not the one that this round made."""
    # A restarted server still knows it. `atoll export --best` exports it.
    exports = tmp_path / "saved"
    with best_server(tmp_path, **{"disk.export_dir": exports}) as server:
        # round 1 measures version 0, round 2 version 1, …: the best is version 2
        run_rounds(server, tmp_path, 0.1, 0.3, 0.8, 0.5)
        assert saved(server) == 2
        shown = command(nursery, tmp_path, "status", "--server", server.url).stdout
        assert "best acc 0.8: version 2, measured in round 3" in shown
        note, values = best_of(exports)
        assert note == {"version": 2, "round": 3, "metric": "acc", "mode": "max", "value": 0.8}
        assert values == [2.0, 2.0]
    with best_server(tmp_path, **{"disk.export_dir": exports}) as server:
        best = server.status().best
        assert best is not None
        assert (best.version, best.value, best.stale) == (2, 0.8, 1)
        run_rounds(server, tmp_path, 0.7, 0.9)  # of version 4, which is no better, and of 5
        assert saved(server) == 5
        assert best_of(exports)[1] == [5.0, 5.0]
        assert [path.name for path in exports.iterdir() if path.name.endswith(".tmp")] == []
    out = tmp_path / "best.safetensors"
    assert export(nursery, out, "--best", "--dir", str(tmp_path / "state")) == 5  # which says where its exports are
    assert out.read_bytes() == (exports / "best.safetensors").read_bytes()


def test_a_restart_writes_missing_best_files(tmp_path: Path) -> None:
    """If the files of the best version are missing, a restarted server writes them again."""
    with best_server(tmp_path) as server:
        run_rounds(server, tmp_path, 0.1, 0.3)
        assert saved(server) == 1
    exports = tmp_path / "state" / "exports"
    before = (exports / "best.safetensors").read_bytes()
    (exports / "best.json").unlink()  # as after a kill between the two
    (exports / "best.safetensors").unlink()
    with best_server(tmp_path) as server:
        assert saved(server) == 1
        assert (exports / "best.safetensors").read_bytes() == before
        assert json.loads((exports / "best.json").read_text())["version"] == 1


def test_a_new_round_rewrites_removed_best_files(tmp_path: Path) -> None:
    """If the exports folder is removed, the server writes the best version again after the next round."""
    with best_server(tmp_path, **{"disk.keep_versions": 4}) as server:
        run_rounds(server, tmp_path, 0.1, 0.3)
        assert saved(server) == 1
        before = best_of(server.exports)
        wait_until(lambda: server.status().durable_version == 2, "all files of version 2")
        shutil.rmtree(server.exports)
        run_rounds(server, tmp_path, 0.2)
        wait_until((server.exports / "best.json").exists, "the best version is written again")
        assert best_of(server.exports) == before


@contextmanager
def held_up(owner: Any, name: str, is_held: Callable[..., bool] = lambda *_: True) -> Iterator[threading.Event]:
    """Calls of a function wait for the event. It is set at the end: else the server of a failing test would wait."""
    may, function = threading.Event(), getattr(owner, name)

    def late(*given: Any, **more: Any) -> Any:
        assert not is_held(*given) or may.wait(60)
        return function(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, late)
        try:
            yield may
        finally:
            may.set()


def test_makes_no_new_version_while_saving_the_best(tmp_path: Path) -> None:
    """While the best version is being saved, the server makes no new version.

    On a slow disk, the next versions would otherwise displace the best one before it is a file.
    """
    with best_server(tmp_path) as server, held_up(export_files, "export_model") as may:
        sites = Threads(lambda: run_rounds(server, tmp_path, 0.9, 0.1, 0.1, 0.1))

        def is_closed() -> bool:
            now = server.status().fragments[0]
            return now.version > 1 or (now.version, now.phase) == (1, "closing")

        wait_until(is_closed, "round 2 is closed")
        assert not may.wait(0.2)
        assert server.status().fragments[0].version == 1
        may.set()
        sites.join(60)
        assert saved(server) == 0
        assert best_of(server.exports)[1] == [0.0, 0.0]


def test_the_last_metrics_are_written_before_the_end(tmp_path: Path) -> None:
    """The server ends only after it has written the metrics of the last round."""
    held = held_up(export_files.Exports, "append_metrics")
    with best_server(tmp_path, **{"rounds.total": 1, "rounds.best_metric": None}) as server, held as may:
        run_rounds(server, tmp_path, 0.9)
        wait_until((server.exports / "model.safetensors").exists, "the result")
        assert not server.wait(0.5)
        may.set()
        assert server.wait(60)
        assert len((server.exports / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_best_version_is_saved_before_the_end(tmp_path: Path) -> None:
    """The server ends only after it has saved the best version."""
    # The server does not end while it replaces the file of the first best version with the second one.

    def is_second(_: Any, __: Any, target: Path, *___: Any) -> bool:
        return target.name == export_files.BEST_MODEL and target.exists()

    held = held_up(export_files, "export_model", is_second)
    with best_server(tmp_path, **{"rounds.total": 2}) as server, held as may:
        run_rounds(server, tmp_path, 0.1, 0.9)
        wait_until((server.exports / "model.safetensors").exists, "the result")
        assert not server.wait(0.5)
        may.set()
        assert server.wait(60)
        assert best_of(server.exports)[1] == [1.0, 1.0]


def test_metrics_are_written_in_the_order_of_rounds(tmp_path: Path) -> None:
    """The lines of the metrics file have the order of the rounds, even if the disk is slower than the rounds."""
    begun: list[int] = []
    held = held_up(export_files.Exports, "append_metrics", lambda _, row, __: begun.append(row.round) is None)
    with best_server(tmp_path, **{"rounds.best_metric": None}) as server, held as may:
        run_rounds(server, tmp_path, 0.9, 0.1, 0.1)
        wait_until(lambda: server.status().fragments[0].version == 3, "three versions")
        assert not may.wait(0.2)
        assert begun == [1]
        may.set()
        path = server.exports / "metrics.jsonl"
        wait_until(lambda: len(path.read_text().splitlines()) == 3, "the metrics")
        assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_reports_a_lost_best_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the best version's file is missing and the server no longer keeps this version, the log says so and the run
    goes on.
    """
    # The next better version is saved again.
    with best_server(tmp_path) as server:
        run_rounds(server, tmp_path, 0.9, 0.3, 0.3, 0.3)
        assert saved(server) == 0
    (tmp_path / "state" / "exports" / "best.safetensors").unlink()
    with best_server(tmp_path) as server:
        path = tmp_path / "state" / "exports" / "best.safetensors"
        missing = f"no longer kept, so it cannot be saved: {path} is missing until a better version is found"
        wait_until(lambda: missing in caplog.text, "it is said")
        run_rounds(server, tmp_path, 0.95)
        assert saved(server) == 4
        assert best_of(server.exports)[1] == [4.0, 4.0]


@pytest.mark.covers("X42")
def test_the_smallest_loss_is_best_by_default(tmp_path: Path) -> None:
    """For a metric such as `val_loss`, the smallest value is best by default."""
    losses = [{"val_loss": value} for value in (0.9, 0.7, 0.5, 0.5, 0.6)]
    settings = {"rounds.best_metric": "val_loss", "rounds.early_stop_after": 2}
    with best_server(tmp_path, **settings) as server:
        assert run_rounds(server, tmp_path, *losses) == 5
        assert server.wait(30)
        why = "stopped early: val_loss has not improved for 2 rounds; the minimum is 0.5, version 2"
        assert server.status().stopped == why
        assert best_of(server.exports)[1] == [2.0, 2.0]


@pytest.mark.covers("X42")
def test_an_early_stop_reports_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the metric has not improved for `rounds.early_stop_after` rounds, the run ends, and logs and
    status say why.
    """
    # A restarted server stays finished. Without this setting, the run goes on.
    caplog.set_level(logging.INFO, "atoll")
    why = "stopped early: acc has not improved for 2 rounds; the maximum is 0.6, version 1"
    with best_server(tmp_path, **{"rounds.early_stop_after": 2}) as server:
        assert run_rounds(server, tmp_path, 0.5, 0.6, 0.6, 0.4, 0.9) == 4  # there is no fifth round
        assert server.wait(30)
        status = server.status()
        assert (status.finished, status.stopped) == (True, why)
        assert best_of(server.exports)[1] == [1.0, 1.0]
        with safe_open(server.exports / "model.safetensors", framework="pt") as file:
            assert file.get_tensor("w").tolist() == [4.0, 4.0]
    assert f"the run is finished at version 4, {why}" in caplog.text
    assert f"a: the run is finished at version 4 ({why}" in caplog.text, "the site is told, too"
    with best_server(tmp_path, **{"rounds.early_stop_after": 2}) as server:  # it stays finished, and says so again
        assert server.wait(30)
        assert server.status().stopped == why
    with best_server(tmp_path) as server:  # without patience it goes on
        assert not server.status().finished
        assert run_rounds(server, tmp_path, 0.7) == 1


def test_warns_once_of_an_unreported_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If rounds lack a finite value of the chosen metric, the log warns once and names the metrics that were
    reported.
    """
    with best_server(tmp_path, **{"rounds.early_stop_after": 1}) as server:
        run_rounds(server, tmp_path, {"loss": 1.0}, {}, float("nan"), 0.5)
        assert saved(server) == 3
    said = [record.message for record in caplog.records if "no finite value of 'acc'" in record.message]
    assert len(said) == 1
    assert "its metrics: loss" in said[0]
    assert said[0].endswith("submit(model, metrics={'acc': …})")


def test_export_best_gives_the_best_version_or_a_reason(tmp_path: Path, nursery: Nursery) -> None:
    """`atoll export --best` exports the best version from a server or a state directory, or says why it cannot.

    It never exports a file that is damaged or belongs to another run.
    """
    out = tmp_path / "best.safetensors"

    def exported(*source: str) -> int | str:
        return export(nursery, out, "--best", *source)

    def require_refused(error: type[atoll.AtollError], words: str, *source: str) -> None:
        assert re.search(f"^exit {error.exit_code}: .*{words}", str(exported(*source)))

    with best_server(tmp_path) as server:
        at = ("--server", server.url)
        require_refused(Gone, "No round has reported the metric 'acc'", *at)
        run_rounds(server, tmp_path, 0.9, 0.3, 0.3, 0.3)
        assert saved(server) == 0
        original = (server.exports / "best.safetensors").read_bytes()
        require_refused(Gone, r"Copy .*best\.safetensors on the server's machine", *at)  # no path of a server is opened
        (server.exports / "best.safetensors").rename(tmp_path / "elsewhere")
        run_rounds(server, tmp_path, 0.95)  # of version 4, which is still kept to be pulled
        assert saved(server) == 4
        other = {"version": "4", "acc": "0.1"}  # of another run, which is on this machine under the same path
        save_file({"w": torch.zeros(2)}, server.exports / "best.safetensors", other)
        assert exported(*at) == 4
        with safe_open(out, framework="pt") as file:
            assert file.get_tensor("w").tolist() == [4.0, 4.0]
        (server.exports / "best.safetensors").write_bytes(b"half")
        assert exported(*at) == 4
        require_refused(StateCorrupt, r"best\.safetensors is damaged", "--dir", str(tmp_path / "state"))
        (server.exports / "best.safetensors").unlink()
        require_refused(UsageError, "There is no", "--dir", str(tmp_path / "state"))
        (tmp_path / "elsewhere").rename(server.exports / "best.safetensors")
        assert exported("--dir", str(tmp_path / "state")) == 0
        assert out.read_bytes() == original
    with best_server(tmp_path / "other", **{"rounds.best_metric": None}) as server:
        require_refused(UsageError, "does not track a best version", "--server", server.url)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds.best_metric": None, "rounds.early_stop_after": 1}, "best_metric"),
        ({"disk.keep_versions": 1}, "keep_versions"),
    ],
    ids=["nothing to stop by", "nothing to keep"],
)
def test_contradictory_settings_of_the_best_version_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        best_server(tmp_path, **settings)


@pytest.mark.covers("X41")
def test_best_json_is_synced_before_and_after_its_renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss cannot leave a half-written `best.json`: the server calls fsync on the file before renaming it, and
    on the folder afterwards.
    """
    from atoll.store.journal import Journal

    done: list[tuple[str, str]] = []
    sync, replace = Journal.sync, os.replace

    def synced(self: Journal, fd: int, what: str) -> None:
        sync(self, fd, what)
        done.append(("sync", Path(what).name))

    def replaced(source: Any, target: Any) -> None:
        replace(source, target)
        done.append(("name", Path(target).name))

    with best_server(tmp_path, rounds=9, **{"disk.export_every": 0}) as server:
        monkeypatch.setattr(Journal, "sync", synced)
        monkeypatch.setattr(os, "replace", replaced)
        run_rounds(server, tmp_path, 0.5)
        saved(server)
        names = (".best.json.tmp", "best.json", server.exports.name)
        found = [each for each in list(done) if each[1] in names]
    assert found[-3:] == [("sync", ".best.json.tmp"), ("name", "best.json"), ("sync", server.exports.name)]
