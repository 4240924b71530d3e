"""`atoll status`: what each site does, which ones are awaited and why; a run that is over, a server that is away."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, free_port, wait_until
from kit import FederatedSites, ForkedServer, serve
from kit.processes import running
from kit.servers import new_server, plain_server
from kit.tls import write_certificate
from kit.wire import WireSite
from torch import nn

import atoll
from atoll.protocol.status_messages import RoundSummary
from atoll.testing.run import Status, together


def message(said: str, state: str) -> Status:
    """The server's message in what `atoll status --json` prints, which has the state of the run besides."""
    found = json.loads(said)
    assert found.pop("state") == state
    return Status.model_validate(found)


@pytest.fixture
def known(canned) -> dict[str, Any]:
    return json.loads(canned.answers["/v1/status"][1])


@pytest.fixture
def lines(canned, atoll_command) -> Callable[[dict[str, Any]], list[str]]:
    """What `atoll status` prints of a status."""

    def shown(status: dict[str, Any]) -> list[str]:
        canned.answers["/v1/status"] = (200, json.dumps(status))
        outcome = atoll_command("status", "--server", canned.url)
        assert outcome.returncode == 0, outcome.stderr
        return outcome.stdout.splitlines()

    return shown


@pytest.mark.covers("L13")
def test_status_names_the_sites_that_a_round_waits_for(canned, atoll_command) -> None:
    """`atoll status` prints plain lines with the state of each site and the name of the site that the round waits
    for.
    """
    outcome = atoll_command("status", "--server", canned.url)
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith(f"canned at {canned.url}: fedavg, waits for all sites")
    assert "waiting for clinic-b (31 s); round 3 needs 2 updates" in outcome.stdout
    head = next(line for line in lines if line.startswith("site"))
    first, second = lines[lines.index(head) + 1 :][:2]
    assert first.split()[:5] == ["clinic-a", "alive", "training", "1250", "4.50"]
    assert first[head.index("step") :].startswith("1250")
    assert "3.4 MB" in first
    assert "1.2 GB" in first
    assert "loss 2.25" in first
    assert second.endswith("no heartbeat for 120 s")
    assert (
        lines[-1] == "round 2: version 2 from 2 updates (clinic-a and clinic-b), 8.0 MB, aggregated in 0.25 s; loss 2.5"
    )
    assert "\x1b" not in outcome.stdout


@pytest.mark.covers("L13")
@pytest.mark.parametrize(
    ("changes", "step", "pace", "stale"),
    [
        ({}, "7", "4.50", "2"),
        ({"step": 0, "steps_per_s": 0.0}, "-", "-", "2"),
        ({"doing": "submitting to round 3"}, "7", "4.50", "2"),
        ({"doing": "waiting for the round"}, "7", "4.50", "-"),
        ({"state": "left", "doing": "left"}, "7", "4.50", "-"),
        ({"state": "dead"}, "7", "4.50", "-"),
    ],
)
def test_a_dash_stands_for_a_missing_number(
    known, lines, changes: dict[str, Any], step: str, pace: str, stale: str
) -> None:
    """`atoll status` shows a dash if a site has reported no steps, or trains from no version."""
    worker = known["workers"][0] | {"step": 7, "steps_per_s": 4.5, "local_steps": 0, "staleness": 2} | changes
    shown = lines(known | {"workers": [worker]})
    head = next(line for line in shown if line.startswith("site"))
    row = shown[shown.index(head) + 1]
    cells = {column: row[head.index(column) :].split()[0] for column in ("step", "steps/s", "stale")}
    assert cells == {"step": step, "steps/s": pace, "stale": stale}


@pytest.mark.covers("L13")
def test_the_status_adds_up_the_steps_of_all_rounds(tmp_path) -> None:
    """The status adds up the steps that a site made in all rounds of a federated loop.

    The script reports 3 steps in round 1, none in round 2, and the hook of `correct` counts 2 steps in round 3.
    """
    model = nn.Linear(2, 2)
    with plain_server(tmp_path, model, rounds=3) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                if fl_round.number == 3:
                    hooks = fl_round.correct(model, sgd := torch.optim.SGD(model.parameters(), lr=0.1))
                    for _ in range(2):
                        model(torch.ones(1, 2)).sum().backward()
                        sgd.step()
                    assert hooks.steps == 2
                fl_round.submit(model, steps=3 if fl_round.number == 1 else 0)
        found = server.status().workers[0]
    assert found.step == 5
    assert found.steps_per_s > 0


@pytest.mark.covers("L16")
def test_status_compares_traffic_with_data_parallel_training(known, lines) -> None:
    """`atoll status` compares the bytes in each direction with those of data-parallel training."""
    # By hand: two workers would each have moved 2·(1/2) times 5 GB of gradients, 10 GB in all. The updates had 6.8 MB,
    # 1471 times less; the versions had 2.4 GB, 4.2 times less.
    of_diloco = known | {"sync_every": 500, "codec": "int8", "downlink_codec": "int4"}
    shown = lines(of_diloco)
    assert "codec int8 up, int4 down, " in shown[1]
    assert shown[3] == (
        "data-parallel training would have moved 10.0 GB each way for the same steps: 1471 × the bytes of the "
        "updates, 4.2 × those of the versions"
    )
    alone = of_diloco | {"workers": known["workers"][:1]}  # one worker alone has nothing to reduce
    assert not any("data-parallel" in line for line in lines(alone))


def test_status_json_equals_the_servers_message(canned, atoll_command, known) -> None:
    """`atoll status --json` prints the server's message and the state of the run.

    The address comes from the variable ATOLL_SERVER.
    """
    outcome = atoll_command("status", "--json", ATOLL_SERVER=canned.url)
    assert message(outcome.stdout, "running") == Status.model_validate(known)


@pytest.mark.slow
@pytest.mark.covers("L12")
def test_watching_waits_for_a_server(tmp_path, monkeypatch) -> None:
    """`atoll status --watch` waits for a server that is not started yet, or is restarted, until the run has finished.

    After the run, the server stays until the watching command has seen the finished status.
    """
    monkeypatch.setattr("atoll.server.serve.WATCHED_S", 60.0)
    options = {
        "algorithm.name": "fedavg",
        "rounds.total": 1,
        "disk.state_dir": tmp_path / "state",
        "network.port": free_port(),
    }
    server = new_server(nn.Linear(2, 2), **options)
    url = f"http://127.0.0.1:{options['network.port']}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with running("status", "--server", url, "--watch", "--json", **pipes) as watching:
        assert "does not answer" in watching.stderr.readline()
        server.start()
        assert not json.loads(watching.stdout.readline())["finished"]
        server.stop()
        assert "does not answer" in (said := watching.stderr.readline())
        assert "Asking again every second" in said
        server = new_server(nn.Linear(2, 2), **options).start()
        assert json.loads(watching.stdout.readline())["epoch"] == 2
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.state_dict(), weight=1)
        assert server.wait(60)
        out, _ = watching.communicate(timeout=60)
        assert watching.returncode == 0
        assert json.loads(out.splitlines()[-1])["finished"]


@pytest.mark.covers("L16", "L14")
def test_traffic_is_compared_since_the_servers_last_start(tmp_path, lines) -> None:
    """The status compares the traffic since the server's last start with the gradients that data-parallel training
    would have sent in the same rounds.
    """
    # Two workers have H = 4 and a weight of 16 bytes. Each round adds 4 × 16 bytes of gradients per worker, at whatever
    # step the worker joined.
    model = nn.Linear(2, 2, bias=False)
    options = {
        "rounds.sites": 2,
        "diloco.sync_every": 4,
        "disk.state_dir": tmp_path / "state",
        "network.port": free_port(),
    }

    def train(site: str) -> None:
        mine = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        with atoll.DiLoCo(mine, optimizer, server=server.url, site=site, folder=tmp_path / "w") as diloco:
            while not diloco.finished:
                optimizer.zero_grad()
                mine(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    for start in (1, 2):
        server = new_server(model, **{"rounds.total": 3 * start}, **options).start()
        together(*(partial(train, site) for site in "ab"))
        server.run()
        told = server.status()
        done = [site for line in told.history if line.round > 3 * (start - 1) for site in line.workers]
        assert 3 < len(done) <= 6  # a site that comes later behind the restart may miss one
        assert {worker.site: worker.gradient_bytes for worker in told.workers} == {
            site: done.count(site) * 4 * 16 for site in "ab"
        }
        shown = "\n".join(lines(told.model_dump(mode="json")))
        assert f"would have moved {len(done) * 4 * 16} B each way" in shown


def test_status_maps_a_servers_error_to_its_exit_code(canned, atoll_command) -> None:
    """If the server answers with an error, `atoll status` prints its message and ends with the exit code of this
    error.
    """
    problem = {"code": "auth", "message": "The server wants a token.", "remedy": "Set ATOLL_TOKEN."}
    canned.answers["/v1/status"] = (401, json.dumps(problem))
    outcome = atoll_command("status", "--server", canned.url)
    assert outcome.returncode == 8
    assert outcome.stderr == "atoll: The server wants a token. Set ATOLL_TOKEN.\n"


@pytest.mark.covers("X2")
def test_status_accepts_the_reader_token_or_state_directory(
    tmp_path: Path, atoll_command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees the status with the reader token, and the owner of the state directory sees it by `--dir`."""
    # Neither needs the token of the sites. The token in the directory takes precedence over a token in the environment.
    monkeypatch.setenv("ATOLL_TOKEN", "of-sites")
    with plain_server(tmp_path, nn.Linear(2, 1), **{"run.name": "watched"}) as server:
        copy = tmp_path / "copy"
        copy.touch(mode=0o600)
        copy.write_text((tmp_path / "state" / "reader.token").read_text())

        def shown(*args: str, **variables: str) -> tuple[int, str]:
            outcome = atoll_command("status", *args, **{"ATOLL_TOKEN": ""} | variables)
            return outcome.returncode, outcome.stdout.partition(":")[0] or outcome.stderr.strip()

        live = (0, "watched at http")
        assert shown("--server", server.url, "--token-file", str(copy)) == live
        assert shown("--server", server.url, ATOLL_TOKEN_FILE=str(copy)) == live
        assert shown("--dir", "state") == shown("--dir", "state", ATOLL_TOKEN="wrong") == live
        code, said = shown("--server", server.url)
        assert code == 8
        assert "requires a token" in said
        code, said = shown("--dir", "state", "--token-file", str(copy))
        assert code == 2
        assert "--dir cannot be combined with" in said
        copy.write_text("wrong")
        code, said = shown("--server", server.url, "--token-file", str(copy))
        assert code == 8
        assert f"The one in the token file {str(copy)!r} is not the server's." in said


@pytest.mark.covers("X4")
def test_the_live_table_matches_the_plain_status(known, monkeypatch) -> None:
    """The live table shows the same words as the plain status. A log line that comes meanwhile stands above the
    table.
    """
    from rich.console import Console

    from atoll.cli import status
    from atoll.cli.text import _Lines

    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    handler = _Lines()
    console = Console(width=200, file=out, force_terminal=True)
    of_now = Status.model_validate(known)
    with status.live_table(of_now, "http://there", console) as show:
        handler.emit(logging.LogRecord("atoll", logging.INFO, "", 0, "round 3: version 3", (), None))
        show(of_now.model_copy(update={"name": "later"}), "http://there does not answer")
    before, after = out.getvalue().split("round 3: version 3")
    for word in ("canned at http://there", "clinic-a", "no heartbeat for 120 s", "waiting for clinic-b (31 s)"):
        assert word in before
    assert after.index("canned at http://there") < after.index("later at http://there")  # drawn again below the line
    assert "clinic-b" in after
    assert "http://there does not answer" in after


def test_status_says_that_no_worker_has_joined(known, lines) -> None:
    assert lines(known | {"workers": [], "history": []})[-1] == "no worker has joined yet"


@pytest.mark.covers("L5", "L6", "L13")
def test_an_async_run_shows_staleness(known, lines) -> None:
    """The status of an asynchronous run shows how many versions the updates were behind."""
    worker = known["workers"][0] | {"staleness": 3, "local_steps": 166}
    last = known["history"][-1]
    last |= {"sites": [site | {"staleness": lag} for site, lag in zip(last["sites"], (0, 4), strict=True)]}
    outer = "delayed_nesterov(lr=0.7, momentum=0.9, N=4)"
    asynchronous = {
        "sync_every": 500,
        "policy": "async, 2 updates a step",
        "outer": outer,
        "tau": 20,
        "alpha": 0.5,
        "staleness": {"0": 2, "1": 1, "4": 1},  # (0 + 0 + 1 + 4) / 4 = 1.25
        "workers": [worker],
        "history": [last],
    }
    shown = lines(known | asynchronous)
    assert "async, 2 updates a step" in shown[0]
    assert "streaming: 1 fragment, tau 20, alpha 0.5" in shown
    assert f"outer optimizer {outer}; staleness 1.2 on average, at most 4" in shown
    assert "4.50 (H 166)" in "\n".join(shown)
    assert "from 2 updates (clinic-a and clinic-b, up to 4 behind)," in shown[-1]


# -- without a server, or with one that is to be found


@pytest.fixture
def status_of(atoll_command) -> Callable[..., tuple[int, str]]:
    """Run `atoll status`; its exit code, and what it printed."""

    def run(*words: str, **env: str) -> tuple[int, str]:
        outcome = atoll_command("status", *words, **env)
        return outcome.returncode, outcome.stdout + outcome.stderr

    return run


@pytest.mark.covers("L13")
def test_status_reads_a_finished_runs_folder(status_of, tmp_path: Path) -> None:
    """`atoll status` reads the state directory of a finished run."""
    # If no server answers at the default address, the command reads the default directory, `atoll-run`. At an address
    # that was given, it fails.
    with serve(tmp_path, **{"run.name": "over", "disk.state_dir": tmp_path / "atoll-run"}) as server:
        FederatedSites(server.url, tmp_path).join()
        server.run()
        last = server.status()
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "atoll-run").rglob("*.sqlite"))
    code, said = status_of("--dir", "atoll-run", "--json")
    assert code == 0, said
    found = message(said, "finished")
    for key in ("run", "name", "algorithm", "policy", "finished", "rounds", "history", "deaths", "refused", "version"):
        assert getattr(found, key) == getattr(last, key), key
    assert [(each.site, each.rounds, each.state) for each in found.workers] == [("a", 3, "left"), ("b", 3, "left")]
    assert [fragment.phase for fragment in found.fragments] == ["finished"]
    code, said = status_of("--server", f"http://127.0.0.1:{free_port()}")
    assert code == 5  # that server was meant
    assert "atoll status RUN" in said
    with socket.socket() as held:  # bound, and not listening: no server answers at the default address
        try:
            held.bind(("127.0.0.1", 8512))
        except OSError:
            pytest.skip("port 8512 of this machine is in use")
        code, said = status_of()
    assert code == 0, said
    assert "over at atoll-run (stored at " in said
    assert "; no server answers): fedavg" in said
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "atoll-run").rglob("*.sqlite")) == before


def test_a_killed_server_leaves_its_status(nursery: Nursery, status_of, tmp_path: Path) -> None:
    """After a server is killed, `atoll status --dir` shows the status that was saved with the last version."""
    with ForkedServer(nursery, tmp_path, **{"rounds.sites": 1, "rounds.best_metric": "loss"}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            fl_round = next(iter(worker))
            fl_round.submit(fl_round.state_dict(), weight=1, metrics={"loss": 0.5})
            wait_until(
                lambda: '"value":0.5' in (tmp_path / "state" / "status.json").read_text(), "that version 1 is saved"
            )
            server.process.close()
    code, said = status_of("--dir", "state", "--json")
    assert code == 0, said
    assert json.loads(said)["best"]["value"] == 0.5
    assert json.loads(said)["bytes_up"] > 0


def test_a_stored_status_shows_its_age(status_of, tmp_path: Path) -> None:
    """The status read from a stopped server's directory shows when it was stored, and shows no site as alive now."""
    with serve(tmp_path, **{"run.name": "stopped"}) as server:
        WireSite(server.url, "a")
    before = datetime.now() - timedelta(seconds=1210)
    os.utime(tmp_path / "state" / "status.json", (before.timestamp(), before.timestamp()))
    code, said = status_of("--dir", "state")
    assert code == 0, said
    head = f"stopped at state (stored at {before:%Y-%m-%d %H:%M:%S}, 20 min "
    assert said.startswith(head), said
    assert "; no server answers): fedavg" in said
    row = next(line for line in said.splitlines() if line.startswith("a "))
    assert "alive then" in row
    assert " 20 min " in row  # heard
    assert json.loads(status_of("--dir", "state", "--json")[1])["workers"][0]["last_heartbeat_s"] > 1200


@pytest.mark.covers("L13")
@pytest.mark.parametrize("saved", [None, b"", b"\xff", b"{}"], ids=["missing", "empty", "no text", "no status"])
def test_status_works_without_the_saved_status_file(status_of, tmp_path: Path, saved: bytes | None) -> None:
    """If the saved status file is missing or damaged, `atoll status` shows what the journal contains and adds a
    warning.
    """
    with serve(tmp_path) as server:
        nbytes = server.status().model_bytes
    path = tmp_path / "state" / "status.json"
    path.unlink()
    if saved is not None:
        path.write_bytes(saved)
    code, said = status_of("--dir", "state", "--json")
    assert (code, json.loads(said)["model_bytes"]) == (0, nbytes), said
    _, said = status_of("--dir", "state")
    assert re.match(
        r"a run at state \(.+\): model [\d.]+ k?B, run [0-9a-f]{8}, epoch 1, INTERRUPTED\n"
        r"No server runs: the run stopped in round 1\. .+ Next: atoll server run\.toml --dir state\n"
        r"version 0, gathering; as read",
        said,
    )
    assert "\nwarning: state/status.json is missing or damaged, so the run's settings are not shown." in said


def test_status_says_why_it_cannot_ask_the_server(status_of, tmp_path: Path) -> None:
    """If the directory's server cannot prove its identity by TLS, `atoll status --dir` says so and shows the stored
    status.
    """
    with serve(tmp_path, **write_certificate(tmp_path, "elsewhere.org")):
        code, said = status_of("--dir", "state", ATOLL_TLS_CA=str(tmp_path / "ca.pem"))
    assert code == 0, said
    assert "cannot prove its identity" in said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm.name": "fedavg"}, set()),
        ({"algorithm.name": "diloco", "diloco.sync_every": 7}, {"sync every", "outer"}),
    ],
    ids=["fedavg", "diloco"],
)
def test_only_a_diloco_status_shows_diloco_words(
    status_of, tmp_path: Path, settings: dict[str, object], words: set[str]
) -> None:
    """The status shows words such as `sync every` and `outer` for DiLoCo, and not for other algorithms."""
    with serve(tmp_path, **settings) as server:
        _, said = status_of("--server", server.url)
    assert {word for word in ("sync every", "outer", "data-parallel", "fragment") if word in said} == words


@pytest.mark.covers("L13")
def test_status_asks_the_server_of_the_directory(status_of, tmp_path: Path) -> None:
    """`atoll status --dir` asks the server that runs on the directory.

    If no server runs there, the output says that `atoll server` continues the run.
    """
    with serve(tmp_path) as server:
        WireSite(server.url, "a")
        code, said = status_of("--dir", "state", "--json")
        assert code == 0, said
        found = message(said, "running")
        assert (found.address, found.run) == (server.url, server.status().run)
        assert [(each.site, each.heard) for each in found.workers] == [("a", True)]
    code, said = status_of("--dir", "state", "--json")
    assert code == 0, said
    (fragment,) = json.loads(said)["fragments"]
    assert fragment["phase"] == "gathering"
    assert "if no server runs, `atoll server` continues the run" in fragment["reason"]


def drawn(status: dict[str, Any], width: int, height: int | None = None) -> list[str]:
    """The status as a terminal of this size shows it."""
    from rich.console import Console

    from atoll.cli.status import table

    out = io.StringIO()
    console = Console(width=width, file=out)
    console.print(table(Status.model_validate(status), "http://there", width, height))
    return out.getvalue().splitlines()


NAMES = [f"hospital-of-the-university-of-{city}-radiology" for city in ("bonn", "bern", "brno")]


@pytest.mark.parametrize("width", [40, 60, 80, 240])
def test_the_live_table_never_cuts_site_names(known, width: int) -> None:
    """The live table breaks a site name that is wider than the terminal into lines. It omits columns that do not fit,
    and says so.
    """
    workers = [known["workers"][0] | {"site": name} for name in NAMES]
    lines = drawn(known | {"workers": workers}, width)
    assert max(map(len, lines)) <= width
    text = "".join(line.rstrip() for line in lines)
    assert [text.count(name) for name in NAMES] == [1, 1, 1]
    assert "…" not in "".join(lines)
    assert ("columns need a wider terminal" in " ".join(lines)) == (width < 240)


def test_the_live_table_shows_sites_that_need_attention(known) -> None:
    """With 500 sites, the live table shows the dead ones and those that the round waits for, and counts the rest in one
    line.
    """
    workers = [known["workers"][0] | {"site": f"s{number:03}", "state": "alive"} for number in range(500)]
    workers[400] |= {"state": "dead", "error": "no heartbeat"}
    fragment = known["fragments"][0] | {"waiting_for": [{"site": f"s{each}", "for_s": 3.0} for each in range(450, 490)]}
    many = known | {"workers": workers, "fragments": [fragment]}
    lines = drawn(many, 120, 30)
    shown = [line.split()[0] for line in lines if line.split()[1:2] in (["alive"], ["dead"])]
    assert "s400" in shown
    assert {"s450", "s451"} <= {*shown}
    assert len(lines) <= 30
    (rest,) = [line for line in lines if line.startswith("and ")]
    assert rest.strip() == f"and {500 - len(shown)} more: {500 - len(shown)} alive (atoll status --json has all)"
    assert any("s469 (3.0 s), and 20 more" in line for line in drawn(many, 1000, 30))


def test_lines_about_many_sites_stay_short(lines, known) -> None:
    """The lines of a round and of a task name three sites and count the others; `atoll logs` prints the same lines."""
    names = [f"s{number:03}" for number in range(500)]
    (done,) = known["history"][-1:]
    site = done["sites"][0]
    done |= {"sites": [site | {"site": name, "staleness": 0} for name in names], "expected": 500, "sat_out": []}
    task = {"number": 1, "name": "train", "way": "inline", "sites": names, "answers": {}, "missing": names}
    shown = lines(known | {"history": [done], "sent": [task | {"open": True, "seconds": 1.0}]})
    assert "version 2 from 500 updates (s000, s001, s002 and 497 others), " in shown[-2]
    assert shown[-1].endswith(
        "to s000, s001, s002 and 497 others; 0 of 500 answers; waiting for s000, s001, s002 and 497 others, 1.0 s"
    )
    late = done | {"sites": [*done["sites"][:400], done["sites"][0] | {"site": "z", "staleness": 3}], "version": None}
    assert "3 behind" in RoundSummary.model_validate(late | {"version": 2}).line()
    nothing = done | {"version": None, "sites": [], "sat_out": names}
    for summary in (late, nothing):
        assert len(RoundSummary.model_validate(summary).line()) < 200


def test_a_watch_gives_up_after_a_while(tmp_path, monkeypatch, capsys) -> None:
    """`atoll status --watch` waits for a stopped server to start again, but not for ever."""
    from atoll.cli import status as command
    from atoll.errors import ServerUnreachable

    monkeypatch.setattr(command, "AWAY_S", 1.0)
    monkeypatch.chdir(tmp_path)
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        url = server.url

        def stop_later(*_: object) -> None:
            server.stop()

        monkeypatch.setattr(command, "plain", lambda *words: (stop_later(), ["shown once"])[1])
        with pytest.raises(ServerUnreachable, match=r"It has been away for 1 s.*atoll status --dir"):
            command.command(server=url, watch=True)
    assert "shown once" in capsys.readouterr().out
