"""What the author of a script sees of errors: one line with the message and the line of the script, an exit code."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, free_port, wait_until
from kit import DiLoCoSites, FederatedSites, Gate, Threads, diloco, post, serve
from kit.peers import Peer
from kit.processes import command
from kit.servers import plain_server
from torch import nn

import atoll
from atoll import errors
from atoll.errors import AtollError, ConfigError, PeerError, SchemaMismatch, ServerLost, StateLocked, UsageError
from atoll.testing.run import status

NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        yield server


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up a server that does not answer at once; put the hook of this process back."""
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.001")
    monkeypatch.setattr(errors, "_hook_before", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


# -- `atoll worker --server … --site …` runs a script that gives others


@pytest.mark.covers("P6")
@pytest.mark.parametrize("by_command", [True, False])
@pytest.mark.parametrize(
    "join",
    [
        lambda server, folder: atoll.join(server.url, site="x", folder=folder).leave(),
        lambda server, folder: diloco(server, folder, "x", nn.Linear(8, 4)).start().stop(ZeroDivisionError()),
        lambda server, _: atoll.tasks(server.url, site="x").leave(),
    ],
    ids=["join", "diloco", "tasks"],
)
def test_an_argument_that_overrides_the_command_is_reported(
    server: atoll.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warned: Callable[[], list[str]],
    join: Callable[[atoll.Server, Path], None],
    by_command: bool,
) -> None:
    """If a script's arguments override the server or site that `atoll worker` has set, the log says so."""
    # If the shell has set the variables, the log says nothing, because the argument is meant to override them.
    if by_command:
        monkeypatch.setenv("ATOLL_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("ATOLL_SERVER", f"{server.url}/")
    monkeypatch.setenv("ATOLL_SITE", "x")
    join(server, tmp_path)
    assert [line for line in warned() if "the script's" in line] == []
    monkeypatch.setenv("ATOLL_SERVER", NO_SERVER)
    monkeypatch.setenv("ATOLL_SITE", "y")
    join(server, tmp_path)
    assert [line for line in warned() if "the script's" in line] == by_command * [
        f"the script's server '{server.url}' is used, not '{NO_SERVER}' (ATOLL_SERVER)",
        "the script's site 'x' is used, not 'y' (ATOLL_SITE)",
    ]


# -- errors that leave Atoll


def other_model(server: atoll.Server, folder: Path) -> None:
    with diloco(server, folder, model=nn.Linear(8, 5)):
        pass


def other_model_in_a_round(server: atoll.Server, folder: Path) -> None:
    with atoll.join(server.url, site="a", folder=folder) as worker:
        for fl_round in worker:
            fl_round.load_into(nn.Linear(8, 5))


def twice_the_same_site(server: atoll.Server, folder: Path) -> None:
    with atoll.join(server.url, site="a", folder=folder), atoll.join(server.url, site="a", folder=folder):
        pass


def no_update(server: atoll.Server, folder: Path) -> None:
    with atoll.join(server.url, site="a", folder=folder) as worker:
        for _ in worker:
            pass


CASES: list[tuple[Callable[[atoll.Server, Path], object], type[AtollError]]] = [
    (lambda _, folder: atoll.join(NO_SERVER, site="a", folder=folder), ServerLost),
    (lambda _, folder: atoll.join("box:8512", site="a", folder=folder), UsageError),
    (other_model, SchemaMismatch),
    (other_model_in_a_round, SchemaMismatch),
    (twice_the_same_site, StateLocked),
    (no_update, UsageError),
]


@pytest.mark.covers("X3")
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("script", "kind"), CASES)
def test_error_tracebacks_hide_atoll_frames(
    server: atoll.Server, tmp_path: Path, script: Callable[..., object], kind: type[AtollError]
) -> None:
    """The traceback of an error shows the user's line and what the user called, without Atoll's inner frames."""
    with pytest.raises(kind) as raised:
        script(server, tmp_path / "w")
    lines = traceback.format_exception(raised.value)
    assert sum(line.startswith("Traceback") for line in lines) == 1, "".join(lines)
    inside = [frame.name for frame in traceback.extract_tb(raised.tb) if frame.filename != __file__]
    # what the user called, and the one line that lets the error out
    assert inside in (["call"], ["__enter__", "call"], ["__iter__", "call"])
    assert lines[-1].startswith(f"atoll.errors.{kind.__name__}: ")


SCRIPT = """
import sys
import torch
import atoll
address, width = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(8, width)
with atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), server=address) as diloco:
    raise ValueError("this is the script's own error")
"""


@pytest.mark.slow
@pytest.mark.covers("X3", "P6")
@pytest.mark.parametrize(
    ("address", "width", "code", "last"),
    [
        pytest.param("box:8512", 4, 2, "atoll: 'box:8512' is not a valid server address.", marks=pytest.mark.long),
        ("", 5, 6, "atoll: "),
        ("", 4, 1, "ValueError: this is the script's own error"),
    ],
)
def test_atoll_worker_reports_its_scripts_error(
    server: atoll.Server, nursery: Nursery, tmp_path: Path, address: str, width: int, code: int, last: str
) -> None:
    """`atoll worker` ends with one line and the exit code of the error that ended its script.

    Only an error of the script's own shows a traceback.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["worker", "--server", server.url, "--site", "a", "--", sys.executable, "train.py", address, str(width)]
    outcome = command(nursery, tmp_path, *words)
    assert outcome.returncode == code, outcome.stderr
    line = outcome.stderr.strip().splitlines()[-1]
    assert line.startswith(last)
    assert outcome.stderr.count("Traceback") == (code == 1)  # of the script's own error
    assert line.endswith("train.py, line 7)") == (code != 1)


@pytest.mark.usefixtures("at_once")
def test_an_error_in_hooks_shows_the_scripts_line(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a hook of Atoll in the optimizer raises, the error shows a line of the script, not one of torch."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with diloco(server, tmp_path, model=nn.Linear(8, 4), sync_every=1, weight=lambda: -1.0) as loop:
        with pytest.raises(UsageError, match="The weight is -1") as raised:
            loop.optimizer.step()
    line = next(each.lineno for each in traceback.extract_tb(raised.tb) if each.filename == __file__)
    with pytest.raises(SystemExit):
        sys.excepthook(UsageError, raised.value, raised.tb)
    assert capsys.readouterr().err.rstrip().endswith(f"({__file__}, line {line})")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "enter",
    [
        lambda stack, loop: stack.enter_context(loop),
        lambda stack, loop: stack.enter_context(ThreadPoolExecutor()).submit(loop.start).result(),
    ],
    ids=["exit stack", "thread pool"],
)
def test_an_error_behind_python_code_shows_the_line(
    tmp_path: Path,
    enter: Callable[[ExitStack, atoll.DiLoCo], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If Python's own code calls Atoll, as an exit stack or a thread pool does, the error shows the script's line."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    model = nn.Linear(8, 4)
    loop = atoll.DiLoCo(model, torch.optim.SGD(model.parameters()), server=NO_SERVER, site="a", folder=tmp_path)
    with pytest.raises(ServerLost) as raised, ExitStack() as stack:
        enter(stack, loop)
    last = [each.lineno for each in traceback.extract_tb(raised.tb) if each.filename == __file__][-1]
    with pytest.raises(SystemExit):
        sys.excepthook(raised.type, raised.value, raised.tb)
    assert capsys.readouterr().err.rstrip().endswith(f"({__file__}, line {last})")


@pytest.mark.usefixtures("at_once")
def test_an_earlier_excepthook_still_gets_all_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `sys.excepthook` that the program has set gets all errors, Atoll's and others. After an error of Atoll, the
    script ends with its exit code.
    """
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    for _ in range(2):  # installed once, or it would call itself
        with pytest.raises(UsageError):
            atoll.join("box:8512", site="a")
    other, ours = ValueError(), StateLocked("Locked.")
    sys.excepthook(ValueError, other, None)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(StateLocked, ours, None)
    assert seen == [other, ours]
    assert ended.value.code == 4


@pytest.mark.usefixtures("at_once")
def test_an_error_does_not_end_interactive_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an interactive session, Atoll does not replace `sys.excepthook`, so that an error does not end the session."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before = sys.excepthook
    with pytest.raises(UsageError):
        atoll.join("box:8512", site="a")
    assert sys.excepthook is before


# -- another web server at the address: that is said at once, with the address, whatever it answers

ANSWERS = {
    "not found": (404, "text/html", "<h1>Not Found</h1>"),
    "nothing": (404, "text/html", ""),
    "a page": (200, "text/html", "<!doctype html><title>Router</title>"),
    "a login": (401, "text/plain", "login, please"),
    "elsewhere": (301, "text/html\r\nLocation: https://elsewhere.example/", "<h1>Moved</h1>"),
    "another interface": (404, "application/json", '{"detail": "Not Found"}'),
    "a list": (200, "application/json", "[]"),
    "failed": (500, "text/html", "oops"),
}


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    code, kind, body = ANSWERS[request.param]
    answer = f"HTTP/1.1 {code} So\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    with Peer.answering(lambda connection, _: connection.sock.sendall(answer)) as other:
        yield other.url


@pytest.mark.covers("X3")
@pytest.mark.parametrize("address", ANSWERS, indirect=True)
def test_scripts_report_an_address_without_atoll_server(address: str, tmp_path: Path) -> None:
    """If the address belongs to another server than Atoll's, scripts and `status` raise an error that has the
    address.
    """
    for take_part in (
        lambda: atoll.join(address, site="a", folder=tmp_path),
        lambda: diloco(address, tmp_path).start(),
        lambda: status(address),
    ):
        with pytest.raises(PeerError) as refused:
            take_part()
        assert type(refused.value) is PeerError, refused.value
        assert address in refused.value.message


@pytest.mark.covers("X3")
@pytest.mark.parametrize("address", ["not found"], indirect=True)
@pytest.mark.parametrize("words", ["status", "worker -- touch begun"])
def test_commands_report_a_wrong_address(nursery: Nursery, tmp_path: Path, address: str, words: str) -> None:
    """If the address belongs to another server than Atoll's, a command ends with its error, and `atoll worker` does not
    start its script.
    """
    name, *script = words.split()
    ended = command(nursery, tmp_path, name, "--server", address, *script)
    assert ended.returncode == PeerError.exit_code
    assert f"no Atoll server at {address}" in ended.stderr
    assert not (tmp_path / "begun").exists()


# -- another run begins at the address of the one that a site takes part in: the site's progress stays out of it


@pytest.mark.covers("L10")
@pytest.mark.parametrize("way", ["diloco", "streaming", "federated"])
def test_a_worker_refuses_another_run_at_its_address(tmp_path: Path, way: str) -> None:
    """If a new run is served at the address of a worker's run, the worker ends with an error and does not join it."""
    settings: dict[str, Any] = {"sites": 1, "rounds": 1000, "codec": "none"}
    settings |= {"network.port": free_port(), "network.heartbeat_interval_s": 0.1}
    if way in ("diloco", "streaming"):
        settings |= {"algorithm": "diloco", "H": 4, "K": 2 if way == "streaming" else 1}
    gate = Gate(3 if way == "federated" else 20, "a")
    with serve(tmp_path / "old", **settings) as old:
        sites: Threads
        if way == "federated":
            sites = FederatedSites(old.url, tmp_path, ["a"], during=gate)
        else:
            sites = DiLoCoSites(old.url, tmp_path, 10**6, ["a"], during=gate, max_sync_retries=0)
        wait_until(lambda: old.status().fragments[0].version >= 2, "two rounds")
    with serve(tmp_path / "new", **settings) as new:
        gate.open()
        with pytest.raises(ServerLost) as raised:
            sites.join()
        assert new.status().run in str(raised.value)
        assert new.status().workers == []
        assert new.status().fragments[0].version == 0
    assert raised.value.exit_code == 5


def test_a_join_for_another_run_is_refused(server: atoll.Server) -> None:
    """The server refuses a join that names another run.

    The run may change between a worker's question which run there is and its join.
    """
    code, reply = post(server.url, "/v1/workers", {"protocol": 1, "site": "a", "run": "0" * 32})
    assert (code, reply["code"]) == (409, "server_lost")
    assert server.status().run in reply["message"]
    assert server.status().workers == []


# -- a misspelt ATOLL_ variable is refused: ignored, it would let a site's script train alone, without a word


def by_join(**options: bool) -> None:
    model = nn.Linear(2, 2)
    with atoll.join(**options) as worker:
        for fl_round in worker:
            fl_round.submit(fl_round.load_into(model))


def by_functions(**options: bool) -> None:
    atoll.functional.init(**options)
    while atoll.functional.is_running():
        atoll.functional.receive(into=nn.Linear(2, 2))
        atoll.functional.send(nn.Linear(2, 2))


def by_diloco(**options: bool) -> None:
    model = nn.Linear(2, 2)
    with atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), **options):
        pass


def by_tasks() -> None:
    with pytest.raises(UsageError), atoll.tasks(site="a"):
        pass


def by_transformers() -> None:
    pytest.importorskip("transformers")
    from atoll.integrations.transformers import AtollCallback

    AtollCallback()


def by_lightning(**options: bool) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    atoll.integrations.lightning.patch(trainer, **options)


ALONE = [by_join, by_functions, by_diloco]


@pytest.mark.covers("X3")
@pytest.mark.parametrize("take_part", [*ALONE, by_tasks, by_transformers, by_lightning])
@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("ATOLL_SERVR", "ATOLL_SERVER"), ("ATOLL_SIT", "ATOLL_SITE"), ("ATOLL_TOKENFILE", "ATOLL_TOKEN_FILE")],
)
def test_a_misspelt_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, take_part: Callable[[], None], misspelt: str, meant: str
) -> None:
    """If an environment variable of Atoll is misspelt, the error suggests the nearest name, whichever way the script
    joins.
    """
    monkeypatch.setenv(misspelt, NO_SERVER)
    with pytest.raises(ConfigError, match=rf"{misspelt}.* {meant}\?"):
        take_part()


@pytest.mark.parametrize("take_part", ALONE)
def test_known_variables_allow_training_alone(monkeypatch: pytest.MonkeyPatch, take_part: Callable[[], None]) -> None:
    """A script without a server trains alone if every variable of Atoll in its environment is known."""
    # Settings of the server are known variables. Variables that only resemble Atoll's are ignored.
    for name in ("ATOLL_SITE", "ATOLL_DILOCO__SYNC_EVERY", "ATOLL_DISK__IN_FILES", "ATOLLS", "MY_ATOLL_SERVR"):
        monkeypatch.setenv(name, "1")
    take_part()


@pytest.mark.covers("X3")
@pytest.mark.parametrize("take_part", [*ALONE, by_lightning])
def test_a_script_with_require_server_needs_one(take_part: Callable[..., None]) -> None:
    """With `require_server=True`, a script without a server raises and does not train alone."""
    with pytest.raises(ConfigError, match="Set ATOLL_SERVER"):
        take_part(require_server=True)


SCRIPT_ALONE = "import atoll\nwith atoll.join():\n    print('trained alone')\n"


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    "words",
    [
        ("train.py",),
        ("worker", "--server", NO_SERVER, "--", "touch", "begun"),
        ("status",),
        ("export", "out.safetensors"),
        ("evaluate", "--server", NO_SERVER),
    ],
    ids=lambda words: words[0],
)
def test_a_wrong_setting_gives_its_exit_code(nursery: Nursery, tmp_path: Path, words: tuple[str, ...]) -> None:
    """With a misspelt variable, scripts and commands end with the exit code of a wrong setting. `atoll worker` then
    does not start its script.
    """
    program = "atoll"
    if words == ("train.py",):
        (tmp_path / "train.py").write_text(SCRIPT_ALONE)
        program, words = str(tmp_path / "train.py"), ()
    ended = command(nursery, tmp_path, *words, program=program, ATOLL_TOKENFILE="token")
    assert ended.returncode == ConfigError.exit_code
    assert "ATOLL_TOKENFILE" in ended.stderr
    assert "ATOLL_TOKEN_FILE?" in ended.stderr
    assert "trained alone" not in ended.stdout
    assert not (tmp_path / "begun").exists()


# -- lines on a terminal: once each, and as much as the program wants

EIGHT_LOOPS = """
import logging, threading, time
from atoll.errors import LOG
from atoll.runtime import ensure_lines
{before}
class Slow(logging.StreamHandler):
    def __init__(self, *stream):
        time.sleep(0.1)  # the others come in, if they can
        super().__init__(*stream)
logging.StreamHandler = Slow
together = threading.Barrier(8)
def begins():
    together.wait()
    ensure_lines()
threads = [threading.Thread(target=begins) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
LOG.info("a line")
LOG.warning("a warning")
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [("", ["a line", "a warning"]), ("logging.getLogger('atoll').setLevel(logging.WARNING)", ["a warning"])],
    ids=["usual", "the level that the program has set stays"],
)
def test_loops_in_threads_print_lines_once(before: str, said: list[str]) -> None:
    """If eight loops in threads of one process log, each line is printed once. A log level that the program has set
    stays.
    """
    program = EIGHT_LOOPS.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line.partition(" atoll: ")[2] for line in done.stderr.splitlines()] == said


@pytest.mark.covers("X4")
@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"algorithm": "diloco"}, []),
        ({"algorithm": "fedavg"}, ["a: the run's algorithm is fedavg"]),
        (
            {"algorithm": "fedavg", "workflow.steps": [{"kind": "train"}, {"kind": "cross_site_evaluation"}]},
            ["a: the run's algorithm is fedavg", "a: the run ends with a cross-site evaluation that asks site a"],
        ),
    ],
    ids=["diloco", "fedavg", "evaluation"],
)
def test_a_diloco_loop_warns_of_another_algorithm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warned: list[str]
) -> None:
    """If a run's algorithm is not DiLoCo, a DiLoCo loop warns, in the log and in the status."""
    caplog.set_level("INFO", "atoll")
    with serve(tmp_path, sites=1, **settings) as server, diloco(server, tmp_path, sync_every=500) as loop:
        assert f"joined run atoll ({settings['algorithm']}) at " in caplog.text
        assert ("the run's algorithm is fedavg, so its outer step" in caplog.text) == bool(warned)
        loop.report(loss=1.0)  # the status has it from the same heartbeat as the warnings
        told = wait_until(lambda: (told := server.status()).workers[0].metrics and told, "a heartbeat")
    assert [text.partition(",")[0] for text in told.warnings] == warned
