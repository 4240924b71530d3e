"""`atoll run` and `atoll runs`: real servers and sites of this machine, on a terminal and off it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, Process, wait_until
from kit.processes import Outcome, running_in
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

TRAIN = '''\
"""Draws its data and its order from the global generators, and may wait for a file before a round."""

import os
import time
from pathlib import Path

import torch
from torch import nn

import atoll

HERE = Path(__file__).parent


def build() -> nn.Module:
    return nn.Linear(4, 2)


def train(worker) -> None:
    data, model = torch.randn(32, 4), build()
    for fl_round in worker:
        fl_round.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in data[torch.randperm(len(data))].split(8):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        while (HERE / f"hold-{fl_round.number}").exists():
            time.sleep(0.01)
        number, sites = int(os.environ["ATOLL_SITE_NUMBER"]), int(os.environ["ATOLL_SITES"])
        fl_round.submit(model, weight=number, metrics={"share": number / sites})


def main() -> None:
    with atoll.join() as worker:
        train(worker)


if __name__ == "__main__":
    main()
'''
RUN_FILE = """\
run.name = "small"
run.script = "train.py"
model.source = "train.py:build"
algorithm.name = "fedavg"
rounds.total = 4
"""
WITH_SITES = ("run", "run.toml", "--sites", "2")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with the run file and the script of a small run."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path


def summary(outcome: Outcome) -> dict[str, Any]:
    """What `--json` has printed, of a command that ended well."""
    assert outcome.returncode == 0, outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def started(nursery: Nursery, folder: Path, *words: str, hold: int = 2) -> Process:
    """`atoll run`, which has come to the round in which its sites wait for the removal of a file."""
    (folder / f"hold-{hold}").touch()
    process = nursery.start("atoll", *words, cwd=folder)
    wait_until(lambda: f"round {hold - 1} of" in process.output() or process.poll() is not None, "that round", 60)
    assert process.poll() is None, process.output()
    return process


# -- the example, engines, a killed server


def test_the_example_runs_in_any_folder(atoll_command, tmp_path: Path) -> None:
    """`atoll run --example` needs no file of the user, trains a good model, and writes only into the folder `runs`."""
    done = summary(atoll_command("run", "--example", "digits", "--json"))
    assert (done["run"], done["finished"], done["version"], done["ended"]) == ("digits-1", True, 10, {})
    assert done["metrics"]["accuracy"] > 0.8
    assert load_file(tmp_path / done["model"])["0.weight"].shape == (64, 64)
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]


@pytest.mark.covers("V1")
@pytest.mark.parametrize("script", ["train.py", "train.py:train", "train.py:main"])
def test_both_engines_of_run_give_the_same_bits(atoll_command, small: Path, script: str) -> None:
    """`atoll run` gives the same bits in real processes and in a simulation, also if the script draws from torch's
    global generator.
    """
    words = (*WITH_SITES, "--set", f"run.script={script}", "--json")
    real, simulated = (summary(atoll_command(*words, "--engine", each)) for each in ("process", "simulate"))
    assert real["folder"] != simulated["folder"]
    assert real["digest"] == simulated["digest"]
    assert real["metrics"] == simulated["metrics"] == {"share": pytest.approx(5 / 6)}  # (1/2 + 2 · 2/2) / 3


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_a_run_without_data_says_that_nothing_was_trained(atoll_command, small: Path, command: str) -> None:
    """If all sites sit out all rounds, the last line does not read as if a model was trained."""
    (small / "train.py").write_text(
        TRAIN.replace("fl_round.load_into(", "fl_round.skip(); continue; fl_round.load_into(")
    )
    said = atoll_command(command, *WITH_SITES[1:]).stdout
    (last,) = [line for line in said.splitlines() if "finished" in line]
    assert "; no round made a version, so the model is as it began; " in last
    assert said.count("rounds in a row ended without a version") == 1


def test_a_killed_server_loses_nothing(atoll_command, small: Path) -> None:
    """If the server of `atoll run` is killed, it is started again, and the run ends with the same bits."""
    words = (*WITH_SITES, "--rounds", "40", "--json")
    whole = summary(atoll_command(*words))
    outcome = atoll_command(*words, "--kill-server")
    killed = summary(outcome)
    assert "(SIGKILL, process" in outcome.stderr
    assert (killed["undisturbed"], killed["undisturbed_digest"]) == (whole["folder"], whole["digest"])
    assert killed["digest"] == whole["digest"]
    assert killed["run"] == "small-2"  # the whole run was there already, and was not trained again


EVALUATE = """
def evaluate(model):
    while not (HERE / "go").exists():
        time.sleep(0.01)
    return {"share": 1.0}
"""


def test_the_last_version_is_evaluated_after_the_sites_have_ended(nursery, small: Path) -> None:
    """`atoll run` lets its server evaluate the last version, also if all sites have ended, and says so."""
    (small / "train.py").write_text(TRAIN.replace("\n\nif __name__", f"\n{EVALUATE}\n\nif __name__"))
    words = (*WITH_SITES, "--set", "server.evaluate=train.py:evaluate", "--set", "server.evaluate_every=4")
    process = nursery.start("atoll", *words, cwd=small)
    said = "the run is finished; version 4 is being evaluated ("
    wait_until(lambda: said in process.output() or process.poll() is not None, "the evaluation", 60)
    (small / "go").touch()
    assert process.wait(60) == 0, process.output()
    lines = (small / "runs/small-1/state/exports/metrics.jsonl").read_text().splitlines()
    assert [json.loads(each)["global_metrics"] for each in lines] == [{}, {}, {}, {"share": 1.0}]


def test_named_sites_and_arguments_reach_the_script(atoll_command, small: Path) -> None:
    (small / "train.py").write_text(
        TRAIN.replace("import atoll\n", "import sys\n\nimport atoll\n").replace(
            "        train(worker)",
            '        (HERE / worker.site).write_text(" ".join(sys.argv[1:]))\n        train(worker)',
        )
    )
    atoll_command("run", "run.toml", "--sites", "berlin,lyon", "--", "--rate", "0.5")
    assert ((small / "berlin").read_text(), (small / "lyon").read_text()) == ("--rate 0.5", "--rate 0.5")


# -- no stale answers


def test_each_atoll_run_gets_its_own_folder(atoll_command, small: Path) -> None:
    first = summary(atoll_command(*WITH_SITES, "--json"))
    again = atoll_command(*WITH_SITES, "--json", "--set", "algorithm.name=scaffold", "--set", "run.script=train.py:fix")
    assert again.returncode != 0  # SCAFFOLD needs fl_round.correct, and there is no function `fix`
    second = summary(atoll_command(*WITH_SITES, "--json", "--set", "rounds.total=2"))
    assert (first["run"], second["run"]) == ("small-1", "small-3")
    assert (first["version"], second["version"]) == (4, 2)


@pytest.mark.covers("V3")
def test_ctrl_c_leaves_a_run_that_can_continue(nursery, atoll_command, small: Path) -> None:
    """Ctrl-C ends all processes of `atoll run`. The same command then continues the run, with the bits of an
    undisturbed run.
    """
    whole = summary(atoll_command(*WITH_SITES, "--json"))
    process = started(nursery, small, *WITH_SITES, "--fresh")
    process.send(signal.SIGINT)
    assert process.wait() == 130
    assert running_in(small) == []
    assert "stopping; a second Ctrl-C ends all processes at once" in process.output()
    assert "Traceback" not in process.output()
    assert "stopped at version 1, and nothing is lost; to go on: atoll run runs/small-2" in process.output()
    (small / "hold-2").unlink()
    outcome = atoll_command(*WITH_SITES, "--json")
    assert "runs/small-2 goes on from version 1" in outcome.stderr
    assert summary(outcome)["digest"] == whole["digest"]


def test_a_second_ctrl_c_ends_all_processes_at_once(nursery, small: Path) -> None:
    """A second Ctrl-C ends `atoll run` at once, even if a site ignores SIGTERM. The first Ctrl-C waits
    for such a site.
    """
    waits = "        while (HERE"
    deaf = f"        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{waits}"
    (small / "train.py").write_text(TRAIN.replace("import os\n", "import os\nimport signal\n").replace(waits, deaf))
    process = started(nursery, small, *WITH_SITES, "--set", "run.script=train.py:train")
    process.send(signal.SIGINT)
    wait_until(lambda: "stopping; a second Ctrl-C" in process.output(), "that it stops")
    begin_s = time.monotonic()
    process.send(signal.SIGINT)
    assert process.wait() == 130
    assert time.monotonic() - begin_s < 3.0  # the first one waits for 5 s
    assert running_in(small) == []


def test_a_token_reaches_all_processes_of_a_run(atoll_command, small: Path) -> None:
    """`atoll run` gives the token of the run file to all its processes, and on no command line."""
    (small / "token").write_text("a-token-of-at-least-sixteen-characters\n")
    (small / "token").chmod(0o600)
    done = summary(atoll_command(*WITH_SITES, "--json", "--set", "network.token_file=token"))
    assert (done["finished"], done["ended"]) == (True, {})


def test_atoll_run_says_where_a_swarms_model_is(atoll_command, small: Path) -> None:
    """With a swarm, `atoll run` names the site's folder that has the model, since the server has none."""
    words = (*WITH_SITES, "--json", "--set", "swarm.enabled=true")
    swarm, plain = summary(atoll_command(*words)), summary(atoll_command(*WITH_SITES, "--json"))
    assert "/workers/" in swarm["model"]
    assert swarm["digest"] == plain["digest"]


def test_changed_code_starts_a_new_run(nursery, atoll_command, small: Path) -> None:
    """If the script or a setting has changed since a run was stopped, `atoll run` starts a new run, says what differs,
    and how to continue the old one.
    """
    process = started(nursery, small, *WITH_SITES)
    process.send(signal.SIGTERM)
    assert process.wait() == 143
    (small / "hold-2").unlink()
    (small / "train.py").write_text(TRAIN.replace("lr=0.1", "lr=0.2"))
    outcome = atoll_command(*WITH_SITES, "--json", "--set", "rounds.total=3")
    said = " ".join(outcome.stderr.split())
    assert "was begun otherwise: rounds.total is 3, was 4; train.py has changed. To go on with it: atoll run" in said
    assert summary(outcome)["run"] == "small-2"
    outcome = atoll_command("run", "runs/small-1", "--json")
    assert "runs/small-1 goes on from version 1, now with: train.py has changed" in outcome.stderr
    assert (summary(outcome)["run"], summary(outcome)["version"]) == ("small-1", 4)


def test_resuming_a_finished_run_says_so(atoll_command, small: Path) -> None:
    before = summary(atoll_command(*WITH_SITES, "--json"))
    outcome = atoll_command(*WITH_SITES, "--json", "--resume")
    assert "The run in runs/small-1 finished at version 4" in outcome.stderr
    assert "nothing was trained" in outcome.stderr
    assert summary(outcome)["digest"] == before["digest"]


@pytest.mark.parametrize("engine", ["process", "simulate"])
def test_more_rounds_continue_a_finished_run(atoll_command, small: Path, engine: str) -> None:
    """`atoll run --resume` with more rounds continues a finished run, and prints only the new rounds."""
    words = (*WITH_SITES, "--json", "--engine", engine)
    whole = summary(atoll_command(*words, "--rounds", "6"))
    summary(atoll_command(*words))
    outcome = atoll_command(*words, "--rounds", "6", "--resume")
    assert (summary(outcome)["run"], summary(outcome)["digest"]) == ("small-2", whole["digest"])
    assert "runs/small-2 goes on from version 4, now with: rounds.total is 6, was 4" in outcome.stderr
    assert re.findall(r"round (\d) of 6: 2 updates", outcome.stderr) == ["5", "6"]


def test_a_second_atoll_run_leaves_a_running_run_alone(nursery, atoll_command, small: Path) -> None:
    """If a run is already going on in the folder, a second `atoll run` ends with an error that proposes `--fresh`."""
    process = started(nursery, small, *WITH_SITES)
    outcome = atoll_command(*WITH_SITES)
    assert outcome.returncode == 4
    assert "The run in runs/small-1 is going on" in outcome.stderr
    assert "--fresh begins another run beside it" in outcome.stderr
    process.kill()


def test_the_tutorials_two_files_run(atoll_command, tmp_path: Path) -> None:
    """The run file and the script of the five-minute tutorial run, and only ten of their lines concern Atoll."""
    page = (Path(__file__).parents[3] / "docs" / "tutorials" / "five-minutes.md").read_text()
    run_file, script = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("toml", "python no-run"))
    assert run_file
    assert script
    (tmp_path / "run.toml").write_text(run_file[1])
    (tmp_path / "train.py").write_text(script[1])
    assert len(run_file[1].splitlines()) + len(re.findall(r"  # \d$", script[1], re.MULTILINE)) == 10
    done = summary(atoll_command("run", "run.toml", "--sites", "3", "--json"))
    assert (done["run"], done["version"]) == ("prices-1", 5)
    assert done["metrics"]["loss"] < 10.0


# -- what it shows


class Terminal:
    """A pseudo-terminal with `atoll` on it, and all that it has shown."""

    def __init__(self, nursery: Nursery, folder: Path, *words: str, columns: int = 100, **env: str) -> None:
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        script = folder / "on_terminal.py"
        script.write_text(
            "import os, sys\nfd = int(sys.argv.pop(1))\nfor each in (0, 1, 2):\n    os.dup2(fd, each)\n"
            "from atoll.cli.main import main\nmain()\n"
        )
        given = {"TERM": "xterm", "COLUMNS": "", "LINES": ""} | env
        self.process = nursery.start(str(script), str(theirs), *words, cwd=folder, env=given, pass_fds=[theirs])
        os.close(theirs)
        os.set_blocking(self._own, False)
        self.shown, self.gaps_s, self._last_s = "", list[float](), time.monotonic()

    def read(self) -> str:
        """Read what is new, and note for how long nothing was."""
        with suppress(OSError):
            while data := os.read(self._own, 65536):
                self.shown += data.decode(errors="replace")
                self.gaps_s.append(time.monotonic() - self._last_s)
                self._last_s = time.monotonic()
        return self.shown

    def to_end(self) -> str:
        """Read until the command has ended; without escape sequences."""
        wait_until(lambda: (self.read(), self.process.poll())[1] is not None, "the end of the command", 60)
        self.read()
        os.close(self._own)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown)


@pytest.mark.covers("X4")
def test_atoll_run_shows_a_live_table(nursery: Nursery, small: Path) -> None:
    """On a terminal, `atoll run` shows a table with a row for each site, and below it the round and
    what it waits for.
    """
    (small / "hold-3").touch()
    terminal = Terminal(nursery, small, *WITH_SITES)
    wait_until(lambda: "waiting for site-" in terminal.read() and "round 3 of 4" in terminal.shown, "round 3", 60)
    (small / "hold-3").unlink()
    shown = terminal.to_end()
    assert terminal.process.returncode == 0
    assert re.search(r"site +state +round +seconds +bytes +metrics", shown)
    assert re.search(r"site-2 +\w+ +2 +[\d.]+ m?s +[\d.]+ k?B +share 1", shown)
    assert re.search(r"http://127\.0\.0\.1:\d+ · runs/small-1", shown)
    assert "all runs: atoll runs" in shown
    assert "\x1b[?25l" in terminal.shown  # it is drawn again in place


def test_a_narrow_terminal_shows_whole_site_names(nursery: Nursery, small: Path) -> None:
    """On a terminal of 40 columns, `atoll run` breaks a long site name into lines and cuts nothing off."""
    names = [f"clinic-of-a-very-long-name-{number}" for number in (1, 2)]
    shown = Terminal(nursery, small, "run", "run.toml", "--sites", ",".join(names), columns=40).to_end()
    assert re.search(r"^site +state +metrics", shown, re.MULTILINE)
    lines = [line.strip() for line in shown.splitlines()]
    assert max(len(line) for line in lines if line.startswith("clinic")) <= 40
    squeezed = "".join(re.sub(r" .*", "", line) for line in lines)
    assert all(name in squeezed for name in names)


def test_no_color_gives_no_colours(nursery: Nursery, small: Path) -> None:
    colour = re.compile(r"\x1b\[3[0-9]m")
    plain = Terminal(nursery, small, *WITH_SITES, NO_COLOR="1")
    plain.to_end()
    assert not colour.search(plain.shown)
    coloured = Terminal(nursery, small, *WITH_SITES)
    coloured.to_end()
    assert colour.search(coloured.shown)


@pytest.mark.covers("X4")
@pytest.mark.parametrize("on_terminal", [True, False])
def test_atoll_run_prints_something_every_two_seconds(nursery, small: Path, on_terminal: bool) -> None:
    """`atoll run` is never silent for two seconds, not even while a site imports slow modules or a round waits."""
    slow = TRAIN.replace("HERE =", "time.sleep(4)\nHERE =").replace(
        "        while (HERE", "        time.sleep(3)\n        while (HERE"
    )
    (small / "train.py").write_text(slow)
    words = (*WITH_SITES, "--rounds", "1", "--set", "run.script=train.py:train")
    if on_terminal:
        terminal = Terminal(nursery, small, *words)
        terminal.to_end()
        gaps_s = terminal.gaps_s
    else:
        process, seen_s, gaps_s, size = nursery.start("atoll", *words, cwd=small), time.monotonic(), [], 0
        while process.poll() is None:
            if (now := process.log.stat().st_size) > size:
                gaps_s.append(time.monotonic() - seen_s)
                seen_s, size = time.monotonic(), now
            time.sleep(0.01)
    assert len(gaps_s) > 5
    assert max(gaps_s) < 2.0


def test_quiet_prints_only_the_model(atoll_command, small: Path) -> None:
    """`atoll run --quiet` prints only the path of the model."""
    outcome = atoll_command(*WITH_SITES, "-q")
    assert (outcome.stdout, outcome.stderr) == ("runs/small-1/state/exports/model.safetensors\n", "")


def test_verbose_prints_the_output_of_all_processes(atoll_command, small: Path) -> None:
    said = atoll_command(*WITH_SITES, "-v").stdout
    assert re.search(r"server \| .* listening on http", said)
    assert re.search(r"site-2 \| .*joined run small", said)


def test_open_passes_the_token_in_a_file(atoll_command, small: Path) -> None:
    """`atoll run --open` passes the reader's token to the browser in a file, so it is on no command line and in no
    output.
    """
    (small / "browser").write_text(f'#!/bin/sh\necho "$@" > {small / "asked"}\n')
    (small / "browser").chmod(0o755)
    outcome = atoll_command(*WITH_SITES, "--open", BROWSER=str(small / "browser"))
    folder = small / "runs" / "small-1"
    token = (folder / "state" / "reader.token").read_text().strip()
    assert (small / "asked").read_text() == f"{(folder / 'page.html').as_uri()}\n"
    assert re.search(rf"url=http://127\.0\.0\.1:\d+/#token={re.escape(token)}\"", (folder / "page.html").read_text())
    assert (folder / "page.html").stat().st_mode & 0o77 == 0
    assert token not in outcome.stdout + outcome.stderr


# -- what goes wrong


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--example", "digit"], "There is no example 'digit'. Did you mean 'digits'?"),
        (["--example", "digits", "run.toml"], "Both --example digits and run.toml are given."),
        ([], "No run file was given. Did you mean: atoll run run.toml?"),
        (["run.toml", "--engine", "simulated"], "--engine is 'simulated'. Did you mean 'simulate'?"),
        (["run.toml", "--engine", "simulate", "--kill-server"], "need a server"),
        (["run.toml", "--sites", "many"], "--sites is 'many'. Give a number"),
        (["run.toml", "--sites", "a,a"], "names a twice"),
        (["run.toml", "--sites", "0"], "--sites is '0'"),
        (["run.toml", "--set", "run.script=tain.py"], "tain.py"),
        (["run.toml", "--set", "algorithm.name=fedavgg"], "Did you mean 'fedavg'?"),
        (["run.toml", "--resume"], "There is no run runs/small-N to go on with."),
        (["run.toml", "--resume", "--fresh"], "Both --fresh and --resume are given."),
        (["."], "There is no run in '.'."),
    ],
    ids=lambda each: " ".join(each)[:30] if isinstance(each, list) else "",
)
def test_wrong_arguments_of_run_end_with_exit_code_2(atoll_command, small: Path, words: list[str], said: str) -> None:
    outcome = atoll_command("run", *words)
    assert outcome.returncode == 2
    assert said in " ".join(outcome.stderr.split())
    assert not (small / "runs").exists()


def test_atoll_run_reports_a_port_in_use(atoll_command, canned, small: Path) -> None:
    port = canned.url.rpartition(":")[2]
    outcome = atoll_command(*WITH_SITES, "--port", port)
    assert outcome.returncode == 3
    assert port in outcome.stderr.splitlines()[-1]
    assert running_in(small) == []


def test_an_error_of_a_script_names_its_own_line(atoll_command, small: Path) -> None:
    """If a script reads what the run does not set, `atoll run` names the line of the script."""
    reads = '        fl_round.config["momentum"]\n'
    (small / "train.py").write_text(TRAIN.replace("        optimizer = ", f"{reads}        optimizer = ", 1))
    outcome = atoll_command(*WITH_SITES)
    number = 1 + (small / "train.py").read_text().splitlines().index(reads.rstrip())
    assert f"give a default: config.get('momentum', …). ({small / 'train.py'}, line {number})" in outcome.stderr


@pytest.mark.parametrize("fault", ["import no_such_module", "raise SystemExit(3)"], ids=["import", "exit"])
def test_a_script_that_fails_at_once_ends_the_run(atoll_command, small: Path, fault: str) -> None:
    """If a site's script fails at its start, `atoll run` ends with the script's last line, the path of the log, and how
    to continue.
    """
    (small / "train.py").write_text(TRAIN.replace("    with atoll.join()", f"    {fault}\n    with atoll.join()"))
    outcome = atoll_command(*WITH_SITES)
    assert outcome.returncode == 9
    last = outcome.stderr.splitlines()[-1]
    assert "exit code" in last
    assert "A round needs 2 sites, but only" in last
    assert re.search(r"See runs/small-1/site-[12]\.log\. When it is mended: atoll run runs/small-1", last)
    assert ("No module named 'no_such_module'" in last) == ("import" in fault)
    assert running_in(small) == []


# -- atoll runs


def test_atoll_runs_lists_running_failed_and_damaged_runs(nursery, atoll_command, small: Path) -> None:
    """`atoll runs` prints one line for each folder, even for a damaged run, and changes nothing in the folders."""
    summary(atoll_command(*WITH_SITES, "--json"))
    runs = small / "runs"
    shutil.copytree(runs / "small-1", runs / "small-8")
    (runs / "small-8" / "state" / "journal.sqlite").write_bytes(b"not a journal" * 1000)
    (runs / "small-9").mkdir()
    stopped = started(nursery, small, *WITH_SITES, "--rounds", "3")
    stopped.send(signal.SIGINT)
    assert stopped.wait() == 130
    living = started(nursery, small, *WITH_SITES)
    listed = json.loads(atoll_command("runs", "--json").stdout)
    found = {each["run"]: (each["state"], each["round"]) for each in listed}
    assert found == {
        "small-1": ("finished", "4 of 4"),
        "small-8": ("damaged", "-"),
        "small-9": ("never started", "-"),
        "small-10": ("interrupted", "1 of 3"),
        "small-11": ("running", "1 of 4"),
    }
    lines = atoll_command("runs").stdout.splitlines()
    assert re.match(r"run +state +round +when +metrics", lines[0])
    assert any(re.match(r"small-1 +finished +4 of 4 +20\d\d-\S+ \d\d:\d\d +share 0\.8333", each) for each in lines)
    living.kill()


def test_atoll_runs_without_runs_suggests_a_command(nursery: Nursery, tmp_path: Path) -> None:
    shown = Terminal(nursery, tmp_path, "runs").to_end()
    assert shown.split("\r\n")[:2] == ["no runs in runs", "next: atoll run --example digits"]
