"""The command as a whole: help, exit codes, one line for an error; and `atoll new`, whose files work as they are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.processes import Nursery, wait_until
from kit.processes import Outcome, run_commands, write_run_file
from safetensors.torch import load_file

import atoll
from atoll import Settings
from atoll.cli import main
from atoll.testing.run import history

COMMANDS = [*main.COMMANDS]
ARGUMENTS = {
    "status": "The run: its folder",
    "rollback": "Version from which the run goes on",
    "new": "Folder to write into",
}
"""Command → what its help says of its argument."""


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_every_command_has_a_help_text(atoll_command, arguments: list[str]) -> None:
    outcome = atoll_command(*arguments, "--help")
    assert outcome.returncode == 0, outcome.stderr
    assert "Usage" in outcome.stdout
    assert "Raises" not in outcome.stdout  # that section of a docstring is for readers of the code
    said = ARGUMENTS.get(" ".join(arguments), "")
    assert said in outcome.stdout  # not of options alone
    if not arguments:
        assert [command for command in COMMANDS if command not in outcome.stdout] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_each_command_by_its_own_words(name: str) -> None:
    """`atoll --help` describes each command by the first words of that command's own help."""
    own = " ".join(main.loaded(name).help.split())
    assert own.startswith(main.COMMANDS[name].rstrip("."))


@pytest.mark.usefixtures("fresh_processes")
def test_help_imports_no_command() -> None:
    """`atoll --help` imports neither the commands nor slow packages, so that help appears at once."""
    script = (
        "import sys; from atoll.cli.main import app; app(['--help'], standalone_mode=False); "
        "print([name for name in ('torch', 'numpy', 'pydantic', 'atoll.cli.run_command') if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert outcome.stdout.splitlines()[-1] == "[]"


def test_the_command_prints_its_version(atoll_command) -> None:
    outcome = atoll_command("--version")
    assert outcome.stdout == f"atoll {atoll.__version__}\n"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_command_with_exit_code_130(nursery, tmp_path) -> None:
    waiting = nursery.start("atoll", "status", "--server", "http://127.0.0.1:9", "--watch", cwd=tmp_path)
    wait_until(lambda: "does not answer" in waiting.output(), "that it waits")
    waiting.send(signal.SIGINT)
    assert waiting.wait() == 130
    assert waiting.output().splitlines()[-1] == "atoll: interrupted"
    assert "Traceback" not in waiting.output()


LOSES_CTRL_C = """
import os, signal
from pathlib import Path

class Lost:
    def __del__(self):
        Path("came").touch()
        os.kill(os.getpid(), signal.SIGINT)

Lost()
raise ImportError("Ctrl-C was lost")
"""
"""A module that gets the signal of Ctrl-C where Python only prints a KeyboardInterrupt, as in an import's end."""


@pytest.mark.usefixtures("fresh_processes", "interruptible")
@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ("typer", "runs"),
        ("pydantic", "runs"),
        ("torch", "server run.toml"),
        ("torch", "simulate run.toml"),
        ("torch", "evaluate run.toml"),
        ("atoll.cli.run_here", "run run.toml"),
    ],
)
def test_early_ctrl_c_ends_a_command_with_one_line(tmp_path: Path, slow: str, words: str) -> None:
    """Ctrl-C while a command imports its modules, or PyTorch, ends it with one line and exit code 130.

    A module that sends the signal stands in for a slow one.
    """
    write_run_file(tmp_path)
    state = tmp_path / "state"
    state.mkdir()
    (state / "journal.sqlite").touch()  # `atoll evaluate` wants a run
    (tmp_path / "slow.py").write_text(LOSES_CTRL_C)
    program = (
        "import importlib.util, sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        return importlib.util.spec_from_file_location(name, 'slow.py') if name == {slow!r} else None\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from atoll.cli import start\n"
        "start()"
    )
    command = [sys.executable, "-c", program, *words.split()]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (tmp_path / "came").exists()
    assert outcome.returncode == 130
    said = [line for line in outcome.stderr.splitlines() if "loading" not in line]  # on a busy machine
    assert said == ["atoll: interrupted"]


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_before_a_worker_starts_its_script_is_said(nursery: Nursery, tmp_path: Path) -> None:
    words = ["worker", "--server", "http://127.0.0.1:9", "--", "true"]
    waiting = nursery.start("atoll", *words, cwd=tmp_path)
    wait_until(lambda: "does not answer" in waiting.output(), "that it waits")
    waiting.send(signal.SIGINT)
    assert waiting.wait() == 130
    assert waiting.output().splitlines()[-1] == "atoll: interrupted before true was started"


WRONG = [
    ("sevrer run.toml", "There is no command 'sevrer'. Did you mean atoll server?"),
    ("server", "No run file was given, and no setting names an algorithm or a workflow. Give the run file"),
    ("server --roudns 5", "--rounds"),
    ("server --port 0 --set algorithm.name=diloco", "my_models:build"),
    ("server --set rounds.total=many", "command line: rounds.total = 'many'"),
    ("server --set algorithm.outer_optimizer=lr=1", "Write algorithm.outer_optimizer={key = 1}"),
    ("server --set rounds.min_sites=5", "rounds.min_sites is 5, but rounds.sites is 1"),
    ("server missing.toml", "The run file 'missing.toml' does not exist. `atoll new` writes one."),
    ("worker --server {url} --restarts 1 -- true", "--site"),
    ("worker --server {url} -- no-such-command", "no-such-command"),
    *((f"status --server {address}", repr(address)) for address in ("h:8512", "ftp://h", "http://", "http://h:port")),
    ("status --dir state", "There is no run in 'state'."),
    ("status --dir state --server http://127.0.0.1:1", "--dir cannot be combined with --server"),
    ("export x.safetensors --server http://127.0.0.1:9 --dir state", "Leave out one of them"),
    ("export x.safetensors --dir .", "There is no run in '.'"),
    ("evaluate --server http://127.0.0.1:9 --out .", "'.' is a folder, not a file. Give a file name: evaluation.md."),
    (f"export {256 * 'x'}.safetensors --dir state", "xxx.safetensors' has more than 255 bytes. Give a shorter one."),
    (f"new {256 * 'x'}", "xxx' has more than 255 bytes. Give a shorter one."),
    ("audit .", "There is no run in"),
    ("audit", "There is no run in 'atoll-run'."),
    ("audit a --dir b", "Both RUN, 'a', and --dir are given."),
    ("compare", "No run is named, and there is none in the folder runs."),
    ("page", "No run is named, and there is none here. Name it: atoll page RUN."),
    ("run runs/nope-1", "There is no run in 'runs/nope-1'."),
    ("run --example digits --sites a,b,a", "--sites is 'a,b,a', which names a twice."),
    ("server --num-workers 3", "atoll server has no option --num-workers. Use --set rounds.sites=VALUE."),
    ("simulate run.toml --num-rounds 3", "Did you mean --rounds?"),
    ("server --sett rounds.total=1", "Did you mean --set? `atoll server --help` lists all options."),
    ("status --servr http://h", "atoll status has no option --servr. Did you mean --server?"),
    ("config show --streaming-per-request-timeout 9", "Use --set network.idle_timeout_s=VALUE."),
    ("status --frobnicate", "atoll status has no option --frobnicate. `atoll status --help` lists all options."),
    ("logs --site", "Option '--site' requires an argument. `atoll logs --help` shows how to use it."),
    ("rollback", "Missing argument 'VERSION'. `atoll rollback --help` shows how to use it."),
    ("page --port 99999", "'--port': 99999 is not in the range 0<=x<=65535. `atoll page --help` shows how to use it."),
    ("status a b", "Got unexpected extra argument (b). `atoll status --help` shows how to use it."),
    ("config sho", "No such command 'sho'. Did you mean 'show'? `atoll config --help` shows how to use it."),
    ("--versio", "atoll has no option --versio. Did you mean --version?"),
    ("new mine --algorithm fedproxy", "There is no algorithm 'fedproxy'. Did you mean 'fedprox'?"),
    ("new mine --template xgbost", "There is no template 'xgbost'. Did you mean 'xgboost'?"),
    (
        "new mine --template sklearn --algorithm fedprox",
        "--algorithm is fedprox, but the script of --template sklearn runs the rounds itself. Leave --algorithm out.",
    ),
    (
        "new mine --template peft --algorithm diloco",
        "--algorithm is diloco, but the script of --template peft trains in rounds. Leave --algorithm out.",
    ),
]


@pytest.mark.covers("X3")
@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words.split(" --")[0][:40] + said[:9] for words, said in WRONG])
def test_a_wrong_command_line_ends_with_the_reason(canned, atoll_command, tmp_path, words: str, said: str) -> None:
    """A wrong command line ends with exit code 2 and an error that says what is wrong. The command writes no file."""
    outcome = atoll_command(*words.format(url=canned.url).split())
    assert outcome.returncode == 2
    assert said in " ".join(outcome.stderr.split())
    assert "Traceback" not in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1 + outcome.stderr.count("still loading")  # on a busy machine
    assert not list(tmp_path.glob("*.*"))  # neither a model nor a journal


@pytest.mark.covers("X3")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_output_ends_with_a_one_line_error(tmp_path: Path, buffered: bool) -> None:
    """A command that cannot write its output, because the disk is full, ends with an error of one line."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    if not buffered:
        environment["PYTHONUNBUFFERED"] = "1"
    with open("/dev/full", "w") as full:
        asked = [sys.executable, "-m", "atoll.cli.main", "new", "mine"]
        outcome = subprocess.run(
            asked, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, check=False
        )
    last = [line for line in outcome.stderr.splitlines() if "still loading" not in line]  # on a busy machine
    assert last == ["atoll: The command's output cannot be written (No space left on device). Free disk space."]
    assert outcome.returncode == 7


@pytest.mark.usefixtures("fresh_processes")
def test_status_imports_neither_torch_nor_aiohttp(canned, monkeypatch) -> None:
    """`atoll status` answers quickly, because it imports neither torch nor aiohttp."""
    script = (
        "import sys; from atoll.cli.main import app; "
        f"app(['status', '--server', '{canned.url}'], standalone_mode=False); "
        "slow = ('torch', 'aiohttp', 'matplotlib', 'numpy', 'atoll.transport.way_out'); "
        "print([name for name in slow if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert outcome.stdout.splitlines()[-1] == "[]"


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("atoll", ("typing", "re")),
        ("atoll.cli", ("typing", "typer")),
        ("atoll.cli.main", ("rich", "asyncio", "pydantic", "ctypes")),
        ("atoll.cli.status", ("asyncio", "rich", "atoll.config.settings", "atoll.protocol.run_events")),
    ],
)
def test_a_module_imports_nothing_slow_that_it_does_not_need(module: str, slow: tuple[str, ...]) -> None:
    """It would make each start of a command longer, and Ctrl-C while `atoll.cli` is imported leaves a traceback."""
    script = (
        "import sys; before = {*sys.modules}\n"
        f"import {module}\n"
        f"print(sorted(({{*sys.modules}} - before).intersection({slow})))"
    )
    # -S: what `site` imports depends on the environment
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-S", "-c", script]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert outcome.stdout == "[]\n"


# -- atoll new: alone, with a server and in simulation


@pytest.mark.parametrize(
    "algorithm", ["fedavg", *(pytest.param(each, marks=pytest.mark.long) for each in ("scaffold", "diloco"))]
)
def test_new_files_train_without_a_server(atoll_command, tmp_path: Path, algorithm: str) -> None:
    """`atoll new` writes a valid run file, and its train.py trains without a server."""
    outcome = atoll_command("new", "mine", "--algorithm", algorithm)
    assert outcome.returncode == 0, outcome.stderr
    assert "atoll server run.toml" in outcome.stdout
    first, _, schema = (tmp_path / "mine" / "run.toml").read_text().split("\n")[0].partition("#:schema ")
    assert (first, json.loads((tmp_path / "mine" / schema).read_text())["additionalProperties"]) == ("", False)
    settings = Settings.read(tmp_path / "mine" / "run.toml", environ={})
    assert (settings.run.name, settings.algorithm.name, settings.model.source) == ("mine", algorithm, "train:build")
    trained = subprocess.run([sys.executable, "train.py"], cwd=tmp_path / "mine", capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    assert "loss" in trained.stdout
    assert "training alone" in trained.stderr


@pytest.mark.slow
@pytest.mark.covers("X1", "P6", "L12")
@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("diloco", ()),
        pytest.param("fedavg", (), marks=pytest.mark.long),
        pytest.param("fedavg", ("--set", "algorithm.name=scaffold"), marks=pytest.mark.long),
    ],
    ids=["diloco", "fedavg", "scaffold"],
)
def test_new_files_run_by_the_printed_commands(
    nursery: Nursery, atoll_command, tmp_path: Path, algorithm: str, flags: tuple[str, ...]
) -> None:
    """The commands that `atoll new` prints run the new files, and the resulting model can be exported."""
    printed = atoll_command("new", "mine", "--algorithm", algorithm).stdout
    folder, exports = tmp_path / "mine", tmp_path / "mine" / "atoll-run" / "exports"
    serve, work, *_ = (line.split("#")[0].split() for line in printed.splitlines() if re.match("  atoll [sw]", line))
    server = run_commands(nursery, folder, [*serve, "--rounds=3", *flags], work)
    assert "round 3: version 3 from 2 updates (a and b)" in server.output()
    assert "finished at version 3" in server.output()
    rows = history(folder / "atoll-run")
    assert [(row["version"], [each["site"] for each in row["sites"]]) for row in rows] == [
        (number, ["a", "b"]) for number in (1, 2, 3)
    ]
    assert rows[-1]["metrics"]["loss"] < rows[0]["metrics"]["loss"]
    assert "1.weight" in load_file(exports / "model.safetensors")
    exported = atoll_command("export", "again.safetensors", "--dir", "mine/atoll-run")
    assert exported.stdout.startswith("version 3"), exported.stderr
    assert (tmp_path / "again.safetensors").read_bytes() == (exports / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.covers("X1", "V1")
def test_process_count_does_not_change_a_simulation(
    atoll_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation of the files from `atoll new` gives the same bits with one process and with two.

    The script of these files draws random numbers without a seed of its own.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else one process would have all of them
    outcome = atoll_command("new", "--algorithm", "scaffold", "mine")
    assert "atoll simulate run.toml --set rounds.sites=20" in outcome.stdout
    results = []
    for processes in ("1", "2"):
        where = str(tmp_path / processes)
        sites = ["--set", "rounds.sites=5", "--set", "rounds.sample_fraction=0.6"]
        flags = [*sites, "--rounds", "2", "--processes", processes, "--dir", where]
        done = atoll_command("simulate", str(tmp_path / "mine" / "run.toml"), *flags)
        assert done.returncode == 0, done.stderr
        assert "6 worker-rounds" in done.stderr + done.stdout
        results.append((tmp_path / processes / "exports" / "model.safetensors").read_bytes())
    assert results[0] == results[1]


ADAPTIVE = "lr = 0.01, betas = [0.9, 0.99], eps = 0.001"
OPTIONS = {
    "fedavg": ['outer_optimizer = {name = "sgd", lr = 1.0, momentum = 0.0}'],
    "diloco": [
        'outer_optimizer = {name = "sgd", lr = 0.7, momentum = 0.9, nesterov = true}',
        'upload_codec = {name = "bf16"}',
        "num_fragments = 1",
    ],
    "fedprox": ["mu = 0.01"],
    "scaffold": ['outer_optimizer = {name = "sgd", lr = 1.0, momentum = 0.0}'],
    "fednova": ['upload_codec = {name = "none"}'],
    "fedavgm": ['outer_optimizer = {name = "sgd", lr = 1.0, momentum = 0.9}'],
    "fedadagrad": ['outer_optimizer = {name = "adagrad", lr = 0.01, initial_accumulator_value = 1e-06, eps = 0.001}'],
    "fedadam": [f'outer_optimizer = {{name = "adam", {ADAPTIVE}}}'],
    "fedyogi": [f'outer_optimizer = {{name = "yogi", {ADAPTIVE}}}'],
}


@pytest.mark.parametrize(("algorithm", "options"), OPTIONS.items(), ids=OPTIONS)
def test_new_writes_defaults_as_comments(atoll_command, tmp_path: Path, algorithm: str, options: list[str]) -> None:
    """`atoll new` writes the general defaults and the algorithm's defaults into the run file, as comments.

    If all of these comments are turned into settings, the effective configuration stays the same.
    """
    atoll_command("new", "x", "--algorithm", algorithm)
    file = tmp_path / "x" / "run.toml"
    text = file.read_text()
    assert {f"# {line}" for line in options} <= set(text.splitlines())
    for line in ("mu = 0.01", "num_fragments = 1"):
        assert (f"# {line}" in text) == (line in options)

    def in_effect() -> list[str]:
        shown = atoll_command("config", "show", str(file))
        assert shown.returncode == 0, shown.stderr
        return [line.split("  # ")[0] for line in shown.stdout.splitlines()]

    before = in_effect()
    file.write_text(re.sub(r"^# (\w+ =.*)$", r"\1", text, flags=re.MULTILINE))
    assert in_effect() == before


def test_new_overwrites_no_file(atoll_command, tmp_path: Path) -> None:
    """If `atoll new` would overwrite a file, it ends with an error that proposes a free folder name."""
    (tmp_path / "train.py").write_text("mine")
    outcome = atoll_command("new")
    assert outcome.returncode == 2
    assert "train.py" in outcome.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"
    assert outcome.stderr.endswith("Give another folder: atoll new my-run.\n")
    for folder in ("my-run", "my-run-2"):
        assert atoll_command("new", folder).returncode == 0
    assert atoll_command("new", "my-run").stderr.endswith("Give another folder: atoll new my-run-3.\n")


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("new taken/mine", "taken/mine cannot be written: Not a directory. Give another folder"),
        (
            "evaluate --server http://127.0.0.1:9 --out taken/found.md",
            "The folder taken cannot be made (File exists). Give a file in a folder that this user may write.",
        ),
    ],
    ids=["new", "evaluate"],
)
def test_an_unwritable_folder_is_reported_before_any_request(
    atoll_command, tmp_path: Path, words: str, said: str
) -> None:
    """A command reports a folder that it cannot write before it sends a request to a server."""
    (tmp_path / "taken").write_text("a file")
    outcome = atoll_command(*words.split())
    assert outcome.returncode == 7
    assert outcome.stderr.startswith(f"atoll: {said}")
    assert outcome.stderr.count("\n") == 1


def test_new_escapes_special_characters_in_a_run_name(atoll_command, tmp_path: Path) -> None:
    """`atoll new` writes a run name with a double quote and a backslash so that TOML reads the same name back."""
    name = 'a"b\\c'
    atoll_command("new", name)
    assert tomllib.loads((tmp_path / name / "run.toml").read_text())["run"]["name"] == name


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("run --example d", ["digits"]),
        ("run --engine s", ["simulate"]),
        ("simulate --engine ", ["local", "ray"]),
        ("logs tri", ["triage-2"]),
        ("compare digits-1 tri", ["triage-2"]),
        ("status runs/d", ["runs/digits-1/"]),
    ],
)
def test_a_shell_completes_values(
    words: str, completed: list[str], atoll_command: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Names of examples, engines and runs, and the folders of a path that is begun."""
    for name in ("digits-1", "triage-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    given = f"atoll {words}"
    asked = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": given, "COMP_CWORD": str(len(given.split(" ")) - 1)}
    outcome = atoll_command(**asked)
    assert outcome.stdout.split() == completed
    assert outcome.stderr == ""  # the shell would print it into the line that its user types


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("--set rounds.to", ["rounds.total=", "rounds.total=0"]),
        ("--set rounds.min_s", ["rounds.min_sites=", "rounds.min_sites=VALUE"]),
        ("--set disk.dur", ["disk.durability=", "disk.durability=process", "disk.durability=power"]),
        ("--set run.s", ["run.script=", "run.seed="]),
        ("--set disk.durability =", ["process", "power"]),
        ("--set algorithm.name = fedp", ["fedprox"]),
        ("--set aggregation.upload_codec.name = int", ["int8", "int4"]),
        ("--set server.trackers = ten", ["tensorboard"]),
        ("--set swarm.enabled =", ["true", "false"]),
        ("--set no.such =", []),
        ("--set rounds.total = 3 --set rounds.to", ["rounds.total=", "rounds.total=0"]),
    ],
)
def test_bash_completes_settings_and_their_values(
    words: str, completed: list[str], atoll_command: Callable[..., Outcome]
) -> None:
    """Bash separates words at equals signs, passes each in a line, and takes only the part that follows the sign."""
    given = ["atoll", "run", *words.split()]
    asked = {"COMP_WORDS": "\n".join(given), "COMP_CWORD": str(len(given) - 1)}
    outcome = atoll_command(_ATOLL_COMPLETE="complete_bash", **asked)
    assert outcome.stdout.split() == completed
    assert outcome.stderr == ""


def test_settings_are_completed_with_their_help(atoll_command: Callable[..., Outcome]) -> None:
    """Zsh and fish show the help beside each word, and pass a setting with its value as one word."""
    asked = {"_TYPER_COMPLETE_ARGS": "atoll run --set rounds.to", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    outcome = atoll_command(_ATOLL_COMPLETE="complete_fish", **asked)
    (first, help_text), (second, *_) = (line.split("\t") for line in outcome.stdout.splitlines())
    assert (first, second) == ("rounds.total=", "rounds.total=0")
    assert help_text.startswith("Number of rounds")
    asked["_TYPER_COMPLETE_ARGS"] = "atoll run --set algorithm.name=fedp"
    assert atoll_command(_ATOLL_COMPLETE="complete_fish", **asked).stdout.split() == ["algorithm.name=fedprox"]
