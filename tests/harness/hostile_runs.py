"""Runs of sites against a hostile server: tapes, plans, processes, and what may be said of how a run ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from kit.requests import post

import atoll
from atoll import errors
from atoll.objects import Publisher
from atoll.protocol import routes
from atoll.protocol.invitation import Invitation
from atoll.protocol.openapi import OPERATIONS
from atoll.protocol.task_messages import Cell, EvaluatedModel, Evaluation
from atoll.tensors.reference import TensorRef
from atoll.testing.run import serve
from harness import hostile_site
from harness.hostile_answers import (
    FORGED,
    NAMES,
    OPERATION_NAMED,
    Answer,
    Truth,
    answers,
    has_message,
    is_table,
    places,
)
from harness.hostile_lies import Lie, about_object, about_schema, object_lies, schema_lies
from harness.hostile_server import PATIENCE_S, HostileServer, Recorder, Strike, Tape
from harness.processes import Nursery, Process, wait_until

MOST_MB = 64.0
"""Memory that a run may take, the model included: it has 0.1 MB."""
MARGIN_S = 12.0
"""A run may take so much longer than an undisturbed one and its patience: the machine has other work."""
COMMANDS, OF_A_COMMAND_S = ("status", "evaluate", "export", "enrol"), 30.0
"""Commands wait so long for an answer; sites wait for `PATIENCE_S`."""
STAY_MARGIN_S = 15.0
"""Extra time if wrong answers do not stop: the pauses between attempts have grown by then."""
LINE_CHARS = 50_000
"""Of the one line with which a site ends: 4,000 characters, each of which may be shown as an escape."""
EXIT_CODES = {0} | {kind.exit_code for kind in errors.BY_CODE.values()}

UNASKED = frozenset(
    [
        "get_metrics",
        "get_openapi",
        "get_health",
        "get_readiness",
        "get_events",
        "get_site_curves",
        "get_updates_table",
        "get_model",
        "get_settings",
        "get_page",
        "get_page_file",
        "pause_run",
        *("invite", "revoke", "get_sites", "get_authority"),
        "stop_run",
        "roll_back",
    ]
)
"""Operations with an answer that the recorded programs do not read."""
OF_A_SWARM = frozenset({"get_swarm_plan", "work_in_swarm"})
"""Operations of workers that aggregate; their answers name other workers, so that no tape can give them again."""


# -- tapes


@dataclass
class Recorded:
    """What a true server and a program have said to each other.

    Attributes:
        program: name of the program in `hostile_site`.
        ref: for a program that fetches an object, its reference, with the recorder's port; for one that enrols, the
            secret of an invitation.
        seconds: what the run took.
    """

    program: str
    tape: Tape
    ref: str = ""
    seconds: float = 0.0

    def ref_at(self, port: int) -> str:
        """Return the reference with the port of another publisher."""
        return self.ref.replace(f":{self.tape.port}/", f":{port}/")


_SETTINGS: dict[str, Any] = {
    "rounds.sites": 1,
    "rounds.total": 2,
    "disk.min_free_bytes": 0,
    "run.threads": 1,
    "network.part_bytes": 2**16,
    "network.idle_timeout_s": PATIENCE_S,
    "network.heartbeat_interval_s": 0.05,
}


def _send_tasks(controller: Any) -> None:
    controller.sites(at_least=1, timeout_s=30)
    controller.broadcast("echo", {"text": "x", "list": [1, 2.5, None, b"b"]}, timeout_s=30)
    controller.broadcast("fetch", {"w": torch.ones(30_000)}, timeout_s=30)


@contextmanager
def _server(folder: Path, program: str) -> Iterator[atoll.Server]:
    more: dict[str, dict[str, Any]] = {
        "federated": {"algorithm.name": "fedavg", "aggregation.download_codec.name": "int8"},
        "corrected": {"algorithm.name": "scaffold"},
        "diloco": {
            "algorithm.name": "diloco",
            "diloco.num_fragments": 2,
            "diloco.sync_every": 4,
            "diloco.fragment_sync_delay": 1,
            "rounds.total": 2,
        },
        "tasks": {
            "workflow.streamed_tasks": ["fetch"],
            "workflow.tensor_part_bytes": 65_536,
            "rounds.total": None,
            "rounds.sites": None,
        },
        "export": {"algorithm.name": "fedavg", "aggregation.download_codec.name": "int8"},
        "enrol": {"algorithm.name": "fedavg", "trust.required": True, "trust.address": "https://example.org"},
    }
    given = _SETTINGS | more.get(program, {"algorithm.name": "fedavg"})
    given = {key: value for key, value in given.items() if value is not None}
    options = {"workflow": _send_tasks} if program == "tasks" else {}
    with serve(None if program == "tasks" else hostile_site.build(), folder / "state", given, **options) as server:
        yield server


def _evaluation() -> Tape:
    """The answer of a server after a cross-site evaluation."""
    cell = Cell(model="version 1", site="a", metrics={"loss": 0.5}, not_finite=["accuracy"], seconds=0.1)
    models = [EvaluatedModel(name="version 1", kind="version", version=1, digest="0" * 64)]
    message = Evaluation(run="r", name="run", finished=True, sites=["a"], models=models, cells=[cell])
    tape = Tape()
    headers = (("Content-Type", "application/json; charset=utf-8"),)
    tape.add(
        ("GET", routes.EVALUATION, "", ""), Truth("get_evaluation", 200, headers, message.model_dump_json().encode())
    )
    return tape


def record(program: str, folder: Path) -> Recorded:
    """Run a program against a true server, or publisher, and keep what that answers."""
    if program == "evaluate":
        return Recorded(program, _evaluation())
    folder.mkdir(parents=True, exist_ok=True)
    run = hostile_site.PROGRAMS[program]
    with contextlib.ExitStack() as stack:
        ref = ""
        if program == "fetch":
            publisher = stack.enter_context(contextlib.closing(Publisher()))
            true = publisher.publish({"w": torch.ones(40_000), "n": [1, "a"]}, chunk_bytes=65_536)
            port = true.port
        else:
            port = int(stack.enter_context(_server(folder, program)).url.rpartition(":")[2])
        if program == "enrol":
            token = (folder / "state" / "admin.token").read_text().strip()
            url = f"http://127.0.0.1:{port}"
            _, invited = post(url, routes.INVITE, {"site": "a"}, Authorization=f"Bearer {token}")
            ref = Invitation.parse(invited["invitation"]).secret
        recorder = stack.enter_context(Recorder(port))
        if program == "fetch":
            ref = str(
                TensorRef(true.host, recorder.port, False, true.object, true.secret, true.digest, true.expires_at)
            )
        begin_s = time.monotonic()
        (folder / "site").mkdir()
        run(recorder.url, folder / "site", ref)
        return Recorded(program, recorder.tape, ref, time.monotonic() - begin_s)


def record_all(folder: Path, programs: Iterable[str] = hostile_site.SITES) -> dict[str, Recorded]:
    """Return the recording of each program."""
    return {program: record(program, folder / program) for program in programs}


# -- plans


@dataclass(frozen=True)
class Plan:
    """One run: its program, the wrong answers that it gets, and what its true answers lie about."""

    program: str
    strikes: tuple[Strike, ...]
    lie: Lie | None = None

    def __str__(self) -> str:
        return f"{self.program}: {'; '.join(map(str, [*self.strikes, *([self.lie] if self.lie else [])]))}"

    @property
    def operation(self) -> str:
        """The operation that answers wrongly."""
        return self.strikes[0].operation if self.strikes else "get_object" if self.program == "fetch" else "get_schema"


def lying_plans() -> st.SearchStrategy[Plan]:
    """Return the strategy of runs in which the contents are wrong and their digests right."""
    return st.one_of(
        object_lies().map(lambda lie: Plan("fetch", (), lie)),
        st.builds(
            lambda program, lie: Plan(program, (), lie),
            st.sampled_from(["federated", "corrected", "diloco", "export"]),
            schema_lies(),
        ),
    )


def plans(recordings: dict[str, Recorded], operation: str) -> st.SearchStrategy[Plan]:
    """Return the strategy of runs in which one operation is answered wrongly, once or for a while."""
    places = [
        (name, number)
        for name, recorded in recordings.items()
        for number in range(recorded.tape.count(operation))
        if number < 3
    ]
    return st.builds(
        lambda place, answer, stays: Plan(place[0], (Strike(operation, place[1], answer, stays),)),
        st.sampled_from(places),
        answers(OPERATION_NAMED[operation]),
        st.sampled_from([False] * 5 + [True]),
    )


def naming_plans(recordings: dict[str, Recorded]) -> Iterator[Plan]:
    """Yield runs with a name of code, a path or an address in each place of each answer, and as a key of each table."""
    names = itertools.cycle(NAMES)
    for operation in map(OPERATION_NAMED.__getitem__, operations_of(recordings)):
        program = next(name for name, recorded in recordings.items() if recorded.tape.count(operation.name))
        for place in places(operation.reply) if has_message(operation) else ():  # type: ignore[arg-type]
            name = next(names)
            for value in (name, {name: name}) if is_table(place.annotation) else (name,):
                answer = Answer("field", (place.keys, ("is", value)))
                yield Plan(program, (Strike(operation.name, 0, answer),))


AT_ONCE = 20
"""Plans in one example of Hypothesis: an example costs more than what is drawn for it."""


def drawn(strategy: st.SearchStrategy[Plan], count: int, number: int) -> list[Plan]:
    """Return different plans of a strategy, always the same ones for one seed."""
    found: dict[str, Plan] = {}
    for more in range(10):

        @seed(number + more)
        @settings(
            max_examples=2 - (-count // AT_ONCE),  # the first one is the simplest one, always
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=[*HealthCheck],
        )
        @given(st.lists(strategy, min_size=AT_ONCE, max_size=AT_ONCE))
        def collect(some: list[Plan]) -> None:
            found.update((repr(plan), plan) for plan in some)

        collect()
        if len(found) >= count:
            break
    return [*found.values()][:count]


def operations_of(recordings: dict[str, Recorded]) -> list[str]:
    """Return the operations that the programs ask for."""
    asked = {name for recorded in recordings.values() for name in recorded.tape.operations}
    return [operation.name for operation in OPERATIONS if operation.name in asked]


# -- runs


@dataclass
class Verdict:
    """How a run ended.

    Attributes:
        told: wrong answers that the site got.
        wrong: what a site must not do, by kind; empty if it ended as it should.
        line: the one line with which it ended; empty if it went on to its end.
        asked: operation → number of its requests.
    """

    plan: Plan
    told: int = 0
    wrong: dict[str, str] = field(default_factory=dict)
    line: str = ""
    seconds: float = 0.0
    peak_mb: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)


class SiteProcess:
    """A process that runs programs, one after another; started again where one of them has ended or held it."""

    RUNS = 400
    """After so many it is replaced: threads of runs that ended early may remain."""

    def __init__(self, folder: Path, learn: Sequence[Recorded]) -> None:
        self._folder, self._learn, self._number = folder, learn, 0
        self._nursery = Nursery()
        self._process: Process | None = None
        self._channel: socket.socket
        self._left = 0
        self.log, self.margin_s = folder / "output", MARGIN_S
        folder.mkdir(parents=True, exist_ok=True)

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {"ATOLL_GIVE_UP_S": f"{PATIENCE_S:g}", "ATOLL_NETWORK__IDLE_TIMEOUT_S": f"{PATIENCE_S:g}"}
        environment |= {"TMPDIR": str(self._folder / "tmp")}
        (self._folder / "tmp").mkdir(exist_ok=True)
        self.log.unlink(missing_ok=True)
        with theirs:
            self._process = self._nursery.start(
                hostile_site.__file__,
                str(theirs.fileno()),
                cwd=self._folder,
                env=environment,
                log=self.log,
                pass_fds=[theirs.fileno()],
            )
        self._left = self.RUNS
        for recorded in self._learn:
            self._run_undisturbed(recorded)
        self._channel.send(json.dumps({"learn": True}).encode())
        self._channel.recv(1000)

    def _run_undisturbed(self, recorded: Recorded) -> None:
        for _ in range(5):  # a busy machine may outlast the patience
            with HostileServer(recorded.tape) as server:
                report = self._ask(recorded, server.port, 60.0)
            if report is not None and not report["code"] and not report["trace"]:
                return
        raise AssertionError(f"{recorded.program} fails against its tape: {report} {self._end_of()}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._channel.close()
            self._process = None

    def run(self, plan: Plan, recorded: Recorded) -> Verdict:
        """Run a plan, and judge how it ended.

        Pages of libraries that the process uses for the first time count as its memory. A second run does not need
        them again, but needs again what the answer takes.
        """
        verdict = self._run_once(plan, recorded)
        if "memory" in verdict.wrong:
            again = self._run_once(plan, recorded)
            verdict.peak_mb = again.peak_mb
            verdict.wrong = {key: value for key, value in verdict.wrong.items() if key != "memory"} | again.wrong
        return verdict

    def _run_once(self, plan: Plan, recorded: Recorded) -> Verdict:
        if self._process is None or not self._left:
            self.close()
            self._start()
        self._left -= 1
        tape, ref = recorded.tape, recorded.ref
        if plan.lie is not None and plan.lie.about == "schema":
            tape = about_schema(plan.lie, tape)
        elif plan.lie is not None:
            tape, ref = about_object(plan.lie, tape, ref)
        recorded = replace(recorded, tape=tape, ref=ref)
        begin = self.log.stat().st_size
        patience_s = OF_A_COMMAND_S if plan.program in COMMANDS else PATIENCE_S
        most_s = recorded.seconds + patience_s + self.margin_s
        most_s += STAY_MARGIN_S * any(strike.stays for strike in plan.strikes)
        with HostileServer(recorded.tape, plan.strikes) as server:
            report = self._ask(recorded, server.port, most_s)
            verdict = Verdict(plan, server.told or bool(plan.lie and server.asked), asked=server.asked)
        if report is None:
            verdict.wrong["hang or death"] = self._end_of()
            verdict.seconds = most_s
            self.close()
            return verdict
        verdict.seconds, verdict.peak_mb, verdict.line = report["seconds"], report["peak_mb"], report["line"]
        with self.log.open("rb") as log:
            log.seek(begin)
            verdict.wrong = _wrong(report, log.read(2**20).decode(errors="replace"))
        return verdict

    def _ask(self, recorded: Recorded, port: int, most_s: float) -> dict[str, Any] | None:
        """Give the process a job, and return its report; None if it does not come."""
        self._number += 1
        job = {
            "program": recorded.program,
            "port": port,
            "ref": recorded.ref_at(port),
            "folder": str(self._folder / f"run-{self._number}"),
        }
        self._channel.settimeout(most_s)
        try:
            self._channel.send(json.dumps(job).encode())
            report: dict[str, Any] = json.loads(self._channel.recv(2**17))
            return report
        except (OSError, ValueError):
            return None

    def _end_of(self) -> str:
        """Return what holds the process, or how it ended."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            return f"the process ended with {code}: {self._process.output()[-1500:]}"
        self._process.send(signal.SIGUSR1)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: _ENDS_IN_MAIN in self.log.read_text(errors="replace"), "the stacks", 10.0)
        return f"still runs: {_own_frames(self._process.output())}"


_ENDS_IN_MAIN = " in main\n"
"""What `faulthandler` prints last: the outermost frames of the main thread."""


def _own_frames(stacks: str) -> str:
    """Return where the program stands, innermost first, from what `faulthandler` has printed of all threads."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", stacks)
    of_program = next((text for text in reversed(threads) if "hostile_site.py" in text), threads[-1])
    frames = re.findall(r'File "[^"]*/(?:atoll|harness)/([^"]+)", line (\d+) in (\w+)', of_program)
    return " < ".join(f"{path}:{line} {name}" for path, line, name in frames[:6])


def place_of(trace: str) -> str:
    """Return an error and the innermost place of Atoll in its traceback."""
    frames = re.findall(r'File "[^"]*/atoll/([^"]+)", line (\d+), in (\w+)', trace)
    place = "{}:{} {}".format(*frames[-1]) if frames else "outside Atoll"
    errors_named = re.findall(r"^(?:[\w.]+\.)?(\w+)(?:: (.{0,80}).*)?$", trace.strip(), re.MULTILINE)
    return f"{errors_named[-1] if errors_named else trace[-80:]} at {place}"


def _wrong(report: dict[str, Any], log: str) -> dict[str, str]:
    """Return what a site has done that it must not do."""
    wrong = {}
    if report["trace"]:
        wrong["traceback"] = f"{place_of(report['trace'])}\n{report['trace'][-1500:]}"
    elif "Traceback" in log:
        wrong["traceback"] = f"{place_of(log)}\n{log[log.index('Traceback') :][:4000]}"
    if report["peak_mb"] > MOST_MB:
        wrong["memory"] = f"{report['peak_mb']:.0f} MB"
    if report["seen"]:
        wrong["effects"] = "; ".join(report["seen"])
    if report["code"] not in EXIT_CODES:
        wrong["exit code"] = str(report["code"])
    text = f"{report['line']}\n{log}"
    if len(report["line"]) > LINE_CHARS or max(map(len, text.split("\n"))) > LINE_CHARS:
        wrong["long line"] = max(text.split("\n"), key=len)[:300]
    if re.search(rf"^{FORGED}|[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029\u202e]", text, re.MULTILINE):
        wrong["forged line"] = text[-600:]
    return wrong


def run_all(
    todo: Iterable[Plan],
    recordings: dict[str, Recorded],
    folder: Path,
    processes: int,
    on_verdict: Callable[[Verdict], None],
    until_s: float = float("inf"),
) -> None:
    """Run plans in several processes at a time, none after `until_s` (`time.monotonic`).

    `on_verdict` is called in the threads that run them.
    """
    subprocess.run([sys.executable, "-c", ""], check=True)  # a fork server ends with the thread that starts it
    queue: SimpleQueue[Plan] = SimpleQueue()
    for plan in todo:
        queue.put(plan)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        with contextlib.closing(SiteProcess(folder / f"site-{number}", [*recordings.values()])) as process:
            with contextlib.suppress(Empty):
                while not failed and time.monotonic() < until_s:
                    plan = queue.get_nowait()
                    on_verdict(process.run(plan, recordings[plan.program]))

    def watched(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=watched, args=(number,), daemon=True) for number in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
