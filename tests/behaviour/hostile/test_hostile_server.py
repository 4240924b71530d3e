"""Sites, commands and receivers of objects against a server that answers wrongly; `make fuzz` tries many more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from harness.hostile_answers import OPERATION_NAMED, Answer, every_fault, has_message, places
from harness.hostile_runs import (
    OF_A_SWARM,
    UNASKED,
    Plan,
    Recorded,
    SiteProcess,
    Verdict,
    drawn,
    naming_plans,
    operations_of,
    plans,
    record_all,
    run_all,
)
from harness.hostile_server import PATIENCE_S, HostileServer, Strike, Tape
from harness.hostile_site import SPOILS
from harness.processes import Nursery

SAMPLE = 90
"""Wrong answers in `make test`."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """What true servers answer to each program."""
    return record_all(tmp_path_factory.mktemp("tapes"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, recordings: dict[str, Recorded]) -> Iterator[SiteProcess]:
    with closing(SiteProcess(tmp_path_factory.mktemp("site"), [*recordings.values()])) as process:
        yield process


@pytest.mark.slow
@pytest.mark.covers("X9")
def test_a_site_survives_any_wrong_answer(tmp_path: Path, recordings: dict[str, Recorded]) -> None:
    """After any wrong answer of the server, a site goes on or ends with one line.

    It does so in time, with less than 64 MB of memory, and writes only into its own folder.
    """
    operations = operations_of(recordings)
    todo = [plan for name in operations for plan in drawn(plans(recordings, name), -(-SAMPLE // len(operations)), 1)]
    verdicts: list[Verdict] = []
    run_all(todo, recordings, tmp_path, 3, verdicts.append)
    wrong = [f"{verdict.plan}: {verdict.wrong}" for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n\n".join(wrong)
    assert sum(verdict.told for verdict in verdicts) >= 0.9 * SAMPLE


@pytest.mark.slow
@pytest.mark.covers("X8")
def test_names_in_an_answer_are_never_imported(tmp_path: Path, recordings: dict[str, Recorded]) -> None:
    """If a server puts the name of a module, file or command anywhere into an answer, a site neither imports, opens nor
    runs it.
    """
    # The site goes on or ends with one line. Each place of each answer gets a name, one at a time.
    verdicts: list[Verdict] = []
    run_all(naming_plans(recordings), recordings, tmp_path, 3, verdicts.append)
    wrong = [f"{verdict.plan}: {verdict.wrong}" for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n\n".join(wrong)
    assert all(verdict.told for verdict in verdicts)
    assert len(verdicts) >= 250


def test_every_operation_is_answered_wrongly(recordings: dict[str, Recorded]) -> None:
    """The hostile server has many wrong answers, in content and in HTTP, for each operation of the protocol."""
    assert {*operations_of(recordings)} | UNASKED | OF_A_SWARM == {*OPERATION_NAMED}
    for operation in OPERATION_NAMED.values():
        kinds = Counter(fault.is_content for fault in every_fault(operation).values())
        assert kinds[True] >= 7, operation.name
        assert kinds[False] >= 15, operation.name


def test_every_field_of_an_answer_can_be_wrong() -> None:
    """The hostile server puts wrong values into nested messages, elements of lists and values of mappings, too."""
    found = {
        operation.name: {place.keys for place in places(operation.reply)}  # type: ignore[arg-type]
        for operation in OPERATION_NAMED.values()
        if has_message(operation)
    }
    assert {("lease",), ("due",), ("evaluates",), ("displaces",)} == found["join"]
    assert {("tensors",), ("tensors", 0), ("tensors", 0, "shape"), ("tensors", 0, "shape", 0)} <= found["get_schema"]
    assert {("task", "body", "object", "secret"), ("task", "body", "plain")} <= found["request_task"]


def test_the_same_seed_draws_the_same_wrong_answers(recordings: dict[str, Recorded]) -> None:
    """The same seed draws the same wrong answers, so a failure can be repeated."""
    draw = [[str(plan) for plan in drawn(plans(recordings, "join"), 40, seed)] for seed in (7, 7, 8)]
    assert draw[0] == draw[1] != draw[2]
    assert len({*draw[0]}) == 40


@pytest.mark.slow
@pytest.mark.parametrize("how", SPOILS)
def test_the_harness_detects_each_kind_of_failure(site: SiteProcess, how: str) -> None:
    """The harness detects each kind of failure of a site, and reports it under its own name."""
    site.margin_s = 1.0 if how == "stays" else 30.0
    assert [*site.run(Plan(how, ()), Recorded(how, Tape())).wrong] == [SPOILS[how]]


SCRIPT = """
import os
from harness.hostile_site import PROGRAMS
from pathlib import Path
PROGRAMS[os.environ["PROGRAM"]](os.environ["ATOLL_SERVER"], Path("w"), "")
"""
ENDS = {
    "another program": ("federated", Strike("get_run", 0, Answer("first line", ("SSH", False)), True), (5, 6)),
    "a nested message": ("federated", Strike("get_run", 0, Answer("body", ("deep object",)), True), (6,)),
    "a pause without end": (
        "federated",
        Strike("join", 0, Answer("problem", ("busy", 429, ("is", 1e308), ("is", "Later."))), True),
        (5,),
    ),
    "a lease of two lines": (
        "tasks",
        Strike("join", 0, Answer("field", (("lease",), ("is", f"a:1:p:{'0' * 32}\r\nX: 1"))), True),
        (5, 6),
    ),
    "a body without end": ("diloco", Strike("get_schema", 0, Answer("endless", ("chunks",)), True), (5, 6)),
    "a bomb": (
        "status",
        Strike("get_status", 0, Answer("content encoding", ("gzip", 160 * 2**20, None)), True),
        (5, 6),
    ),
    "a redirect": ("status", Strike("get_status", 0, Answer("redirect", (302, "file:///etc/passwd")), True), (6,)),
}


@pytest.mark.slow
@pytest.mark.covers("X9")
@pytest.mark.parametrize("how", ENDS)
def test_a_wrong_answer_ends_a_script_with_one_line(
    nursery: Nursery, tmp_path: Path, recordings: dict[str, Recorded], how: str
) -> None:
    """After a wrong answer, a script ends with the matching exit code."""
    # The last line on standard error is the error. The output contains no traceback.
    program, strike, codes = ENDS[how]
    (tmp_path / "script.py").write_text(SCRIPT)
    with HostileServer(recordings[program].tape, [strike]) as server:
        env = {"ATOLL_SERVER": server.url, "ATOLL_GIVE_UP_S": f"{PATIENCE_S:g}", "PROGRAM": program}
        process = nursery.start("script.py", cwd=tmp_path, env=env)
        assert process.wait(60) in codes, process.output()
    assert "Traceback" not in process.output()
    assert process.output().splitlines()[-1].startswith("atoll: ")
