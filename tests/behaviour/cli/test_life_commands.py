"""`atoll pause`, `resume`, `stop`, `rollback`, `logs`, `compare` and `doctor`, as a run's admin meets them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, Gate, Halfway, ask_journal, copy_folder, halfway_run, serve
from kit.processes import Outcome, command, running
from kit.tls import write_certificate

from atoll.cli import logs
from atoll.cli.stored_status import stored_status
from atoll.cli.which_run import note_failure
from atoll.server.coordinator.build_status import write_status
from atoll.simulate import INPUTS_FILE
from atoll.store.reader import open_state
from atoll.store.store import Store


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Halfway:
    """A run that was killed in round 2, at version 1."""
    return halfway_run(tmp_path_factory.mktemp("halfway"), **{"disk.keep_versions": 9})


@pytest.fixture
def killed(halfway: Halfway, tmp_path: Path) -> Path:
    return copy_folder(halfway.later, tmp_path / "run")


@pytest.fixture
def ask(nursery: Nursery, tmp_path: Path) -> Callable[..., str]:
    """What a command prints that ends well."""

    def asked(*words: str, folder: Path = tmp_path, **environment: str) -> str:
        outcome = command(nursery, folder, *words, **environment)
        assert outcome.returncode == 0, outcome.stderr
        return outcome.stdout

    return asked


@pytest.fixture
def refused(nursery: Nursery, tmp_path: Path) -> Callable[..., str]:
    """Why a command is refused, after its exit code."""

    def asked(*words: str, folder: Path = tmp_path, **environment: str) -> str:
        outcome: Outcome = command(nursery, folder, *words, **environment)
        assert outcome.returncode != 0, outcome.stdout
        return f"{outcome.returncode} {outcome.stderr}"

    return asked


def fragment_of(text: str) -> dict[str, Any]:
    """The first fragment of a status."""
    return dict(json.loads(text)["fragments"][0])


@pytest.fixture
def paused(nursery: Nursery, tmp_path: Path, ask: Callable[..., str]) -> Iterator[tuple[ForkedServer, FederatedSites]]:
    """A server and two sites that were paused in round 2; its server was killed since, and started again."""
    gate = Gate(2)
    with ForkedServer(nursery, tmp_path, **{"rounds.total": 50, "disk.keep_versions": 9}) as server:
        wait_until(lambda: server.log.exists() and "listening on" in server.log.read_text(), "a server")
        sites = FederatedSites(server.url, tmp_path, during=gate)
        gate.wait()
        said = ask("pause", "--dir", "state")
        assert said == (
            "the run is paused: no round begins; round 2 is under way, and 2 updates of it may still come. "
            "To go on: atoll resume state\n"
        )
        gate.open()
        wait_until(lambda: fragment_of(ask("status", "--dir", "state", "--json"))["version"] == 2, "version 2")
        server.process.now.kill()
        yield server, sites


@pytest.mark.slow
def test_a_pause_outlives_a_killed_server(
    paused: tuple[ForkedServer, FederatedSites], ask: Callable[..., str], refused: Callable[..., str], tmp_path: Path
) -> None:
    """A paused run is still paused after its server was killed and started again. Once stopped, the run ends normally
    at the server and its sites.
    """
    server, sites = paused
    wait_until(lambda: "PAUSED" in ask("status", "--dir", "state"), "the server that was started again")
    assert fragment_of(ask("status", "--dir", "state", "--json"))["phase"] == "paused"
    words = ("--server", server.url, "--token-file", "state/reader.token")
    assert refused("resume", *words).startswith("8 ")
    assert ask("resume", *words[:3], "state/admin.token") == (
        f"the run goes on. To watch it: atoll status --server {server.url} --watch\n"
    )
    answer = json.loads(ask("stop", "--dir", "state", "--json"))
    assert (answer["paused"], answer["stopping"]) == (False, True)
    sites.join()
    assert server.process.wait() == 0
    assert "stopped by its admin" in server.log.read_text()
    status = json.loads(ask("status", "--dir", "state", "--json"))
    assert status["finished"]
    assert status["stopped"] == "stopped by its admin"
    assert "The run in state was stopped by its admin, so it cannot pause." in refused("pause", "state")
    lines = ask("logs", "state").splitlines()
    assert [each.partition("  ")[2] for each in lines if "admin" in each] == [
        "the admin has paused the run",
        "the admin lets the run go on",
        "the admin has stopped the run",
        "the run finished: stopped by its admin",
    ]
    assert any(each.endswith("a joined") for each in lines)
    of_a = ask("logs", "state", "--site", "a")
    assert "b joined" not in of_a
    assert "the update of a for round 1 is accepted" in of_a
    rounds = [json.loads(each) for each in ask("logs", "state", "--json").splitlines()]
    assert [each["summary"]["sites"][0]["site"] for each in rounds if each["what"] == "round ended"][:2] == ["a", "a"]


@pytest.mark.slow
def test_log_and_status_followers_end_with_the_run(
    paused: tuple[ForkedServer, FederatedSites], ask: Callable[..., str], tmp_path: Path
) -> None:
    """`atoll logs --follow` and `atoll status --watch --dir` end with exit code 0 when the run is over."""
    _, sites = paused
    wait_until(lambda: "PAUSED" in ask("status", "--dir", "state"), "the server that was started again")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with (
        running("logs", "state", "--follow", **pipes) as following,
        running("status", "--watch", "--dir", "state", **pipes) as watching,
    ):
        while "paused" not in (said := following.stdout.readline()):
            assert said
        ask("stop", "--dir", "state")
        sites.join()
        rest, _ = following.communicate(timeout=60)
        shown, _ = watching.communicate(timeout=60)
    assert following.returncode == watching.returncode == 0
    assert rest.splitlines()[-1].endswith("the run finished: stopped by its admin")
    assert "STOPPED" in shown


@pytest.mark.slow
def test_rollback_takes_a_run_with_sites_back(
    paused: tuple[ForkedServer, FederatedSites], ask: Callable[..., str], refused: Callable[..., str]
) -> None:
    """`atoll rollback` takes a run back to an earlier version while its sites train, and they continue from this
    version.
    """
    _, sites = paused
    wait_until(lambda: "PAUSED" in ask("status", "--dir", "state"), "the server that was started again")
    assert "It can go back to: 0, 1." in refused("rollback", "7", "--dir", "state")
    said = ask("rollback", "1", "--dir", "state")
    assert said.startswith("the run has gone back to version 1; its sites take it with their next round.")
    assert fragment_of(ask("status", "--dir", "state", "--json"))["version"] == 1
    assert ask("rollback", "1", "--dir", "state").startswith("version 1 is the newest already.")
    ask("resume", "--dir", "state")
    wait_until(lambda: fragment_of(ask("status", "--dir", "state", "--json"))["version"] >= 4, "versions 3 and 4")
    ask("stop", "--dir", "state")
    sites.join()
    ended = [each for each in ask("logs", "state", "--json").splitlines() if '"round ended"' in each]
    assert [json.loads(each)["summary"]["version"] for each in ended][:4] == [1, 2, 3, 4]


def test_the_next_start_obeys_earlier_commands(
    halfway: Halfway, killed: Path, ask: Callable[..., str], refused: Callable[..., str]
) -> None:
    """`atoll pause`, `rollback` and `resume` work without a running server: its next start obeys them."""
    # The run is back at version 0 then; its last update is not used, and its result differs from before.
    assert ask("pause", "--dir", "state", folder=killed).startswith(
        "no server runs; the run is paused from the next start of its server on."
    )
    assert json.loads(ask("status", "--dir", "state", "--json", folder=killed))["paused"]
    assert "It can go back to: 0." in refused("rollback", "5", "--dir", "state", folder=killed)
    assert "goes back to version 0 with the next start" in ask("rollback", "0", "--dir", "state", folder=killed)
    assert ask("resume", "--dir", "state", folder=killed).startswith("no server runs; the run goes on")
    sites = halfway.go_on(killed)
    assert sites.trained["a", 1] == 1
    with open_state(killed / "state") as state:
        assert [row.version for row in state.heads()] == [4]
        assert [each["what"] for each in state.events()].count("went back") == 1


@pytest.mark.slow
def test_kills_during_a_rollback_lose_nothing(
    nursery: Nursery, halfway: Halfway, killed: Path, ask: Callable[..., str]
) -> None:
    """A server that is killed twice while it takes the run back finishes the rollback at its next start, and records it
    once.
    """
    # One start is killed before it goes back, the next after it has; the third finds the earlier version.
    ask("rollback", "0", "--dir", "state", folder=killed)
    lives = ("epoch.raised=kill", "recover.midway=kill")
    with ForkedServer(nursery, killed, lives, port=halfway.port, **halfway.settings) as server:
        wait_until(lambda: server.process.deaths == 2, "two kills", 60)
        wait_until(lambda: fragment_of(ask("status", "--dir", "state", "--json", folder=killed))["version"] == 0, "0")
    assert ask_journal(killed, "SELECT back_to FROM meta") == [(-1,)]
    found = ask_journal(killed, "SELECT count(*) FROM audit WHERE what = 'fell back'")
    assert found == [(1,)]
    assert "none changed or removed" in ask("audit", "state", folder=killed)


def test_a_stopped_run_can_be_resumed_without_its_server(
    halfway: Halfway, killed: Path, ask: Callable[..., str]
) -> None:
    """`atoll resume` cancels an `atoll stop` while no server runs, and the next start continues the run."""
    assert "is finished after its present round" in ask("stop", "--dir", "state", folder=killed)
    assert "goes on with the next start" in ask("resume", "--dir", "state", folder=killed)
    halfway.go_on(killed)
    with open_state(killed / "state") as state:
        assert [row.version for row in state.heads()] == [3]


NOW = "no server runs; the run"
NEXT = "the next start of its server"
START = "To start its server: atoll server run.toml --dir state"
RESUME = "atoll resume state, and then atoll server run.toml --dir state"
MORE = "To train further: raise rounds.total, and then atoll server run.toml --dir state"
MEND = "Correct this first: The reducer raised an error."
FRESH = "To start it: atoll run trial"
BEGIN = f"its server has not begun. {FRESH}"
WISHES = ("pause", "resume", "stop", "rollback 0")
CELLS: dict[tuple[str, str], tuple[int, str]] = {
    ("interrupted", "pause"): (0, f"{NOW} is paused from {NEXT} on. To go on: {RESUME}"),
    ("interrupted", "resume"): (
        0,
        f"{NOW} was not paused; it goes on with {NEXT}. {START}",
    ),
    ("interrupted", "stop"): (
        0,
        f"{NOW} is finished after its present round, with {NEXT}.",
    ),
    ("interrupted", "rollback 0"): (
        0,
        f"{NOW} goes back to version 0 with {NEXT}. {START}",
    ),
    ("paused", "pause"): (0, f"{NOW} is paused already. To go on: {RESUME}"),
    ("paused", "resume"): (0, f"{NOW} goes on with {NEXT}. {START}"),
    ("paused", "stop"): (0, f"{NOW} is finished after its present round, with {NEXT}."),
    ("paused", "rollback 0"): (
        0,
        f"{NOW} goes back to version 0 with {NEXT}. It is paused; to go on: {RESUME}",
    ),
    ("stopping", "pause"): (6, "The run in state is being stopped: its next start ends it, so it cannot pause."),
    ("stopping", "resume"): (0, f"{NOW} goes on with {NEXT}. {START}"),
    ("stopping", "stop"): (0, f"{NOW} is being stopped already: its next start ends it."),
    ("stopping", "rollback 0"): (6, f"so it cannot go back. To train further: {RESUME}"),
    ("stopped", "pause"): (
        6,
        f"was stopped by its admin, so it cannot pause. To train further: {RESUME}",
    ),
    ("stopped", "resume"): (0, f"{NOW} goes on with {NEXT}. {START}"),
    ("stopped", "stop"): (0, f"{NOW} is stopped already. {START}"),
    ("stopped", "rollback 0"): (6, "The run in state was stopped by its admin, so it cannot go back."),
    ("finished", "pause"): (6, f"The run in state is finished, so it cannot pause. {MORE}"),
    ("finished", "resume"): (6, f"The run in state is finished, so it cannot resume. {MORE}"),
    ("finished", "stop"): (6, f"The run in state is finished, so it cannot be stopped. {MORE}"),
    ("finished", "rollback 0"): (6, f"The run in state is finished, so it cannot go back. {MORE}"),
    ("failed", "pause"): (0, f"{NOW} is paused from {NEXT} on. {MEND} To go on: {RESUME}"),
    ("failed", "resume"): (0, f"{NOW} was not paused; it goes on with {NEXT}. {MEND} {START}"),
    ("failed", "stop"): (0, f"{NOW} is finished after its present round, with {NEXT}."),
    ("failed", "rollback 0"): (0, f"{NOW} goes back to version 0 with {NEXT}. {MEND} {START}"),
    **dict.fromkeys((("never started", words) for words in WISHES), (2, f"trial was never started: {BEGIN}")),
    **dict.fromkeys(
        (("failed early", words) for words in WISHES), (2, f"trial failed before it began: no module. {FRESH}")
    ),
    ("nowhere", "pause"): (2, "There is no run in 'state'. Give the run file's disk.state_dir."),
    ("nowhere", "resume"): (2, "There is no run in 'state'."),
    ("nowhere", "stop"): (2, "There is no run in 'state'."),
    ("nowhere", "rollback 0"): (2, "There is no run in 'state'."),
}
"""State of a run without a server, command → exit code, and what the command says."""


@pytest.mark.parametrize(("state", "words"), CELLS, ids=lambda each: str(each).replace(" ", "-"))
def test_each_command_fits_the_runs_state(nursery: Nursery, killed: Path, state: str, words: str) -> None:
    """In each state of a run, a command says only what is possible there. A refused command changes nothing."""
    where = "state"
    if state in ("nowhere", "never started", "failed early"):
        (killed / "state").rename(killed / "elsewhere")
        where = where if state == "nowhere" else begun(killed / "trial", "no module" if state == "failed early" else "")
    elif state != "interrupted":
        mark(killed, state)
    code, said = CELLS[state, words]
    before = command(nursery, killed, "status", "state", "--json").stdout
    outcome = command(nursery, killed, *words.split(), where)
    assert (outcome.returncode, said in outcome.stdout + outcome.stderr) == (code, True), outcome
    if code == 6:
        after = command(nursery, killed, "status", "state", "--json").stdout
        assert [json.loads(each)["epoch"] for each in (before, after)] == [2, 2]


def test_a_resumed_run_is_no_longer_over(killed: Path, ask: Callable[..., str]) -> None:
    """After the resume of a stopped run, its stored status says that it goes on."""
    mark(killed, "stopped")
    assert "STOPPED" in ask("status", "state", folder=killed)
    ask("resume", "state", folder=killed)
    assert "INTERRUPTED" in ask("status", "state", folder=killed)


def mark(folder: Path, state: str) -> None:
    """Let the journal of a run say that it is in a state."""
    with closing(Store(folder / "state")) as store:
        store.run_log.control(paused=state == "paused", stopping=state in ("stopping", "stopped"))
        if state in ("stopped", "finished"):
            store.run_log.finish()
    if state == "failed":
        status, _ = stored_status(folder / "state")
        write_status(folder / "state", status.model_copy(update={"failed": "The reducer raised an error."}))


def begun(folder: Path, failure: str) -> str:
    """The name of a run of `atoll run` whose server has not begun; it failed before that, if a failure is given."""
    folder.mkdir()
    (folder / INPUTS_FILE).write_text("{}")
    note_failure(folder, failure)
    return folder.name


@pytest.mark.parametrize(
    ("state", "then"),
    [
        ("finished", "next: atoll page state; for its model: atoll export model.safetensors state"),
        ("stopped", "next: atoll page state; for its model: atoll export model.safetensors state"),
        ("interrupted", "next: atoll status state"),
    ],
)
def test_the_log_of_a_run_leads_to_its_result(
    state: str, then: str, killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if state != "interrupted":
        mark(killed, state)
    monkeypatch.chdir(killed)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logs.command(run=Path("state"), state_dir=None, follow=False, site=None, server=None, token_file=None, json=False)
    assert capsys.readouterr().err.splitlines()[-1].endswith(then)


def test_logs_of_an_unknown_site_name_the_nearest(killed: Path, refused: Callable[..., str]) -> None:
    """A misspelt name would look like a site to which nothing has happened."""
    for follow in ((), ("--follow",)):  # no server runs, so that nothing can follow
        said = refused("logs", "state", "--site", "aa", *follow, folder=killed)
        assert said.startswith("2 atoll: The run has no event of a site 'aa'.")
        assert "Did you mean 'a'?" in said or "Its sites: " in said


def test_commands_say_which_server_or_folder_they_need(refused: Callable[..., str]) -> None:
    """`atoll pause` and `atoll stop` without a run or a reachable server end with an error that says what to give."""
    assert "There is no run in 'nowhere'" in refused("pause", "--dir", "nowhere")
    assert "--dir cannot be combined" in refused("stop", "--dir", "state", "--server", "http://x")
    said = refused("stop", "--server", "http://127.0.0.1:9")
    assert said.startswith("5 ")
    assert "name the run, or with --dir its state directory" in said


@pytest.mark.parametrize("words", WISHES)
def test_a_command_says_to_wait_while_a_server_begins(killed: Path, refused: Callable[..., str], words: str) -> None:
    """A server that begins holds the state directory, but does not answer yet: the command says to give it again."""
    with closing(Store(killed / "state")):
        said = refused(*words.split(), "state", folder=killed)
    assert said.startswith("4 atoll: The state directory state is in use by")
    assert "give the command again in some seconds" in said


# -- compare, doctor, completion


def test_compare_prints_a_table_and_draws_a_plot(
    killed: Path, ask: Callable[..., str], refused: Callable[..., str]
) -> None:
    """`atoll compare` prints a table of several runs, draws their curves into a file, and gives both as JSON."""
    copy_folder(killed / "state", killed / "runs" / "other")
    lines = ask("compare", "state", "other", "--plot", "both.png", folder=killed).splitlines()
    assert lines[0].split()[:5] == ["run", "state", "algorithm", "rounds", "version"]
    assert lines[0].endswith("best loss (round)")
    assert [each.split()[0] for each in lines[1:3]] == ["state", "other"]
    assert (killed / "both.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(ask("compare", "state", "--json", folder=killed))
    (run,) = found
    assert (run["rounds"], run["version"], run["state"]) == (1, 1, "interrupted")
    assert run["metrics"]["loss"]["points"] == [[1, 1.0]]
    assert "There is no run" in refused("compare", "nowhere", folder=killed)


def test_compare_counts_no_pause_as_rounds(halfway: Halfway, killed: Path, ask: Callable[..., str]) -> None:
    """The seconds by round are those of a usual round, also of a run that was paused or stopped for an hour."""
    halfway.go_on(killed, **{"rounds.total": 5})
    with closing(sqlite3.connect(killed / "state" / "journal.sqlite")) as journal, journal:
        for version, at in enumerate(("10:00:00", "10:00:02", "10:00:04", "11:00:04", "11:00:06"), start=1):
            journal.execute(f"UPDATE history SET created_at = '2026-01-01T{at}+00:00' WHERE version = {version}")
    (run,) = json.loads(ask("compare", "state", "--json", folder=killed))
    assert run["rounds"] == 5
    assert run["seconds_per_round"] == 2.0  # of 2, 2, 3600 and 2


def test_doctor_checks_the_machine_and_the_server(
    ask: Callable[..., str], refused: Callable[..., str], canned: Any
) -> None:
    """`atoll doctor` checks Python, torch, disk and network of this machine, and fails if the server or the folder is
    unusable.
    """
    said = ask("doctor", ATOLL_SERVER="")
    assert [line.split()[1] for line in said.splitlines()[:-1]] == [
        *("python", "torch", "gpu", "disk", "clock", "port", "proxy")
    ]
    assert said.splitlines()[-1] == "All is well. Next: atoll new my-run"
    canned.answers["/healthz"] = (200, "ok\n")
    found = {each["check"]: each for each in json.loads(ask("doctor", "--server", canned.url, "--json"))}
    assert found["reach"]["state"] == "ok"
    wrong = refused("doctor", "--server", "http://127.0.0.1:9", "--dir", "/proc/nothing")
    assert wrong.startswith("1 ")


@pytest.mark.parametrize(
    ("address", "check", "said"),
    [
        ("{place}", "reach", "http://{place} answers"),
        ("http://{place}", "reach", "http://{place} answers"),
        ("127.0.0.1:9", "reach", "http://127.0.0.1:9 does not answer (connection refused)"),
        ("no-such-host.invalid:8512", "reach", "https://no-such-host.invalid:8512 does not answer"),
        ("127.0.0.1:port", "server", "'127.0.0.1:port' is not a valid server address"),
    ],
)
def test_doctor_takes_an_address_without_its_scheme(
    nursery: Nursery, tmp_path: Path, canned: Any, address: str, check: str, said: str
) -> None:
    canned.answers["/healthz"] = (200, "ok\n")
    place = canned.url.partition("//")[2]
    found = json.loads(command(nursery, tmp_path, "doctor", address.format(place=place), "--json").stdout)
    (of_way,) = [each for each in found if each["check"] == check]
    assert of_way["text"].startswith(said.format(place=place))
    assert of_way["state"] == ("ok" if "answers" in said else "wrong")


def test_doctor_takes_one_address(refused: Callable[..., str]) -> None:
    assert "Use one of them." in refused("doctor", "a:1", "--server", "http://b:1")


def test_doctor_tells_a_wrong_token_from_wrong_tls(
    ask: Callable[..., str], nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`atoll doctor` reports an untrusted certificate or a wrong token of a server, each as that
    check's own failure.
    """
    # Without the authority, TLS is wrong and nothing more is asked; with another token, the token alone is wrong.
    monkeypatch.setenv("ATOLL_TOKEN", "of-this-run")
    with serve(tmp_path, **write_certificate(tmp_path), **{"network.host": "localhost"}) as server:
        words = ("doctor", "--server", server.url, "--json")
        authority = {"ATOLL_TLS_CA": str(tmp_path / "ca.pem")}
        found = {each["check"]: each for each in json.loads(ask(*words, ATOLL_TOKEN="of-this-run", **authority))}
        assert {found[check]["state"] for check in ("tls", "clock", "token")} == {"ok"}
        bare = ("doctor", server.url.partition("//")[2], "--json")  # http is tried first, at loopback
        again = {each["check"]: each for each in json.loads(ask(*bare, ATOLL_TOKEN="of-this-run", **authority))}
        assert again["tls"]["text"].startswith(f"{server.url} answers")
        assert {again[check]["state"] for check in ("tls", "clock", "token")} == {"ok"}
        assert "its certificate is accepted" in found["tls"]["text"]
        for environment, wrong, said in (
            ({"ATOLL_TOKEN": "another", **authority}, "token", "token"),
            ({"ATOLL_TOKEN": "of-this-run"}, "tls", "cannot prove its identity"),
        ):
            outcome = command(nursery, tmp_path, *(bare if wrong == "tls" else words), **environment)
            assert outcome.returncode == 1
            (only,) = [each for each in json.loads(outcome.stdout) if each["state"] == "wrong"]
            assert only["check"] == wrong
            assert said in only["text"]
            assert only["remedy"]


@pytest.mark.usefixtures("fresh_processes")
def test_tab_completion_does_not_import_torch(tmp_path: Path) -> None:
    """The shell completes commands without importing torch, since it starts Atoll at each press of the tab key."""
    program = (
        "import sys\nsys.argv = ['atoll']\nfrom atoll.cli.main import app\n"
        "try:\n    app()\nfinally:\n    assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    environment = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": "atoll st", "COMP_CWORD": "1", "PATH": "/usr/bin"}
    outcome = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.stderr == ""
    assert outcome.stdout.split() == ["status", "stop"]
