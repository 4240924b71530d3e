"""What a workflow's function observes through its controller, in the journal, and its replay after a restart.

The function runs again from its beginning. Each call of the controller gets what it got before, up to the point where
the server ended. Calls of the function's own thread are known by their turn, and have to ask the same as before. Other
threads come in another order each time, so their calls are known by what they ask.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from atoll import errors
from atoll.blobs.manifest import Cuts
from atoll.blobs.object_file import write_object
from atoll.blobs.ways_to_send import ChunkSizes, way_of
from atoll.errors import AtollError, RunFailed
from atoll.format_text import listed, number_of
from atoll.server.tasks.task_queue import Answer, read_contents
from atoll.store.journal_tables import FactRow
from atoll.store.workflow_facts import WorkflowFacts
from atoll.tensors.payload import Packed

LOG = logging.getLogger("atoll.server")

ASKED_S = 600.0
"""Seconds without any call of the journal after which a call of another thread counts as one that asks otherwise."""
REMEDY = (
    "Undo the change of the function, of its arguments, or of what it reads; or begin anew: `atoll run` and `atoll "
    "server` with --fresh."
)

Asked = Sequence[Any]
"""What a call asks: `["task", name, digest of the payload, sites or None]`, `["sites", at least]`, `["now"]` …"""


def digest_of(task: str, packed: Packed, sizes: ChunkSizes, *, streamed: bool) -> str:
    """Return the digest of a task's payload, cut into parts of these sizes. Nothing is written."""
    way = way_of(task, packed, sizes, streamed=streamed)
    if way.plain is not None:
        return blake3(way.plain.encode()).hexdigest()
    fd = os.open(os.devnull, os.O_WRONLY)
    try:
        return write_object(packed, fd, way.cut).id
    finally:
        os.close(fd)


@dataclass(eq=False)
class Call:
    """A call of the function, with what came of it.

    Attributes:
        number: number of the call's row; −1: it is not in the journal.
        turn: its position among the calls of the function's own thread; −1 for another thread.
        asked: what it asks.
        value: what it got. For a task: its id, its sites, and how its payload was cut.
        is_over: whether it had come to its end.
    """

    number: int
    turn: int
    asked: Asked
    value: Mapping[str, Any] = field(default_factory=dict)
    is_over: bool = True


class WorkflowJournal:
    """The journal of the workflow that runs now. Thread-safe, except what records facts: the event loop calls that.

    Args:
        facts: the rows.
        name: name of the workflow, for messages.

    Attributes:
        fail: ends the workflow with an error, from any thread.
        difference: the error with the first difference from the journal; None: there is none.
    """

    def __init__(self, facts: WorkflowFacts, name: str) -> None:
        self._facts, self.name, self._thread = facts, name, -1
        self.fail: Callable[[BaseException], None] = lambda error: None
        self._lent = threading.local()
        self.difference: RunFailed | None = None
        self._turn, self._begun_s, self._replayed = 0, time.monotonic(), 0
        self._moved = threading.Condition()
        rows, over = facts.calls() if facts.kept else ([], set[int]())
        calls = [
            Call(row.number, row.turn, json.loads(row.asked_json), json.loads(row.value_json), row.number in over)
            for row in rows
        ]
        self._own = {call.turn: call for call in calls if call.turn >= 0}
        self._others = [call for call in calls if call.turn < 0]

    def answers_before(self) -> list[tuple[str, str, str]]:
        """Return the answers in the journal: id of the task, site, key."""
        told = [json.loads(row.value_json) for row in self._facts.answers()] if self._facts.kept else []
        return [(each["task"], each["site"], each["key"]) for each in told]

    def open_tasks(self) -> set[str]:
        """Return the ids of the tasks that were open when the server ended."""
        calls = (*self._own.values(), *self._others)
        return {call.value["id"] for call in calls if "id" in call.value and not call.is_over}

    # -- calls, in the threads of the function

    def enter(self) -> None:
        """Make this thread the function's own, which begins now."""
        self._thread = threading.get_ident()
        if calls := len(self._own) + len(self._others):
            LOG.info("the workflow %s goes on: %s of the journal", self.name, number_of(calls, "call"))

    @property
    def is_own_thread(self) -> bool:
        """Whether the present thread is the function's own."""
        return threading.get_ident() == self._thread

    def turn(self) -> int:
        """Return the turn of a call that begins now; −1 if another thread than the function's own makes it."""
        if not self.is_own_thread:
            turn, self._lent.turn = getattr(self._lent, "turn", -1), -1
            return int(turn)
        self._turn += 1
        return self._turn - 1

    @property
    def is_kept(self) -> bool:
        """Whether the calls are recorded."""
        return self._facts.kept

    def lend(self, turn: int) -> None:
        """Give the next call of this thread a turn of the function's own thread, which has decided to make the call."""
        self._lent.turn = turn

    def next_kind(self) -> str:
        """Return what the next call of this thread has asked before: the kind; empty if it is not in the journal."""
        call = self._own.get(self._turn) if self.is_own_thread else None
        return "" if call is None else str(call.asked[0])

    def cut_before(self, turn: int, task: str) -> Mapping[str, Any] | None:
        """Return how the payload of such a task was cut before; None if the journal has no task in its place."""
        with self._moved:
            calls = [self._own[turn]] if turn in self._own else self._others if turn < 0 else []
            if not calls or (turn < 0 and not _tasks(calls)):
                return None
            return next((call.value for call in calls if call.asked[:2] == ["task", task]), {})

    def replayed(self, turn: int, asked: Asked) -> Call | None:
        """Return the call as the journal has it; None if the function has come beyond the journal.

        Raises:
            RunFailed: the journal has another call in its place. It is also in `difference`.
        """
        with self._moved:
            if turn >= 0:
                call = self._own.pop(turn, None)
                if call is not None and call.asked != asked:
                    raise self._differs(f"call {turn} is {described(asked)}, but was {described(call.asked)}")
            else:
                call = self._other(asked)
            if call is not None:
                self._replayed += 1
                self._moved.notify_all()
                if not self._own and not self._others:
                    seconds = time.monotonic() - self._begun_s
                    LOG.info("the workflow %s has replayed its journal in %.2f s", self.name, seconds)
            return call

    def _other(self, asked: Asked) -> Call | None:
        """Return the oldest such call of other threads. A task that is not there waits until all tasks have come."""
        until_s, replayed = time.monotonic() + ASKED_S, self._replayed
        while True:
            found = next((call for call in self._others if call.asked == asked), None)
            tasks = _tasks(self._others)
            if found is not None:
                self._others.remove(found)
            if found is not None or asked[0] != "task" or not tasks:
                return found
            if self._replayed != replayed:
                until_s, replayed = time.monotonic() + ASKED_S, self._replayed
            if not self._moved.wait(until_s - time.monotonic()):
                raise self._differs(
                    f"a thread of it asks {described(asked)}, but none asks {described(tasks[0].asked)}"
                )

    def _differs(self, why: str) -> RunFailed:
        self.difference = self.difference or RunFailed(
            f"The workflow {self.name} asks otherwise than before the restart: {why}.", REMEDY
        )
        return self.difference

    def require_all_asked(self) -> None:
        """Check at the function's end that it has made all calls of the journal that matter.

        Raises:
            RunFailed: it has not. The error is also in `difference`.
        """
        left = [*self._own.values(), *_tasks(self._others)]
        if left:
            first = min(left, key=lambda call: call.number)
            raise self._differs(f"it has ended without {described(first.asked)}")

    # -- facts, on the event loop

    def begin(self, call: Call, error: AtollError | None = None) -> None:
        """Record a call, with the error that it has ended with, if any. Set its number."""
        if error is not None:
            call.value = {"error": _recorded(error)}
        call.number = self._facts.add(
            "call", turn=call.turn, asked_json=json.dumps(call.asked), value_json=json.dumps(call.value)
        )

    def over(self, call: Call, error: AtollError | None = None) -> None:
        """Record the end of a task."""
        outcome = {} if error is None else {"error": _recorded(error)}
        self._facts.add("end", call.number, value_json=json.dumps(outcome))

    def answered(self, call: Call, answer: Answer) -> None:
        """Record an answer to a task. Call it in the transaction of its event."""
        told: dict[str, Any] = {"site": answer.site, "key": answer.key, "way": answer.way, "task": call.value["id"]}
        told |= {name: getattr(answer, name) for name in ("error", "lost", "text") if getattr(answer, name)}
        nbytes = 0
        if answer.contents is not None:
            layout = answer.contents.layout
            told["cuts"] = [layout.header_bytes, layout.nbytes, layout.part_bytes]
            nbytes = layout.nbytes
        self._facts.add(
            "answer", call.number, value_json=json.dumps(told), file=answer.kept, nbytes=nbytes if answer.kept else 0
        )

    def answers(self, call: Call) -> tuple[list[Answer], dict[str, Any] | None]:
        """Return the answers to a task in the journal, in the order in which they came, and its end if there is one."""
        rows, answers = self._facts.of_call(call.number) if call.number >= 0 else [], list[Answer]()
        for row in rows:
            if row.kind == "answer":
                answers.append(self._answer(row))
        ends = [json.loads(row.value_json) for row in rows if row.kind == "end"]
        return answers, ends[0] if ends else None

    def _answer(self, row: FactRow) -> Answer:
        told = json.loads(row.value_json)
        answer = Answer(told["site"], told["key"], told.get("error", ""), told["way"], told.get("text"))
        answer.lost = told.get("lost", "")
        if row.file:
            answer.fd = self._facts.open(row)
            answer.contents = read_contents(answer, Cuts(*told["cuts"]), f"The answer of site {answer.site}")
        return answer


def _tasks(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.asked[0] == "task"]


def _recorded(error: AtollError) -> list[str]:
    return [type(error).__name__, error.message, error.remedy]


def raise_recorded(outcome: Mapping[str, Any]) -> None:
    """Raise the error that a call ended with before the restart, if it did.

    Raises:
        AtollError: this error.
    """
    if "error" in outcome:
        kind, message, remedy = outcome["error"]
        raise getattr(errors, kind, RunFailed)(message, remedy)


def described(asked: Asked) -> str:
    """Return what a call asks, as words."""
    match asked:
        case ["task", name, digest, sites]:
            to = "all sites" if sites is None else listed(sites)
            return f"task {name!r} to {to} with the payload {str(digest)[:8]}"
        case ["sites", at_least]:
            return f"sites(at_least={at_least})"
    return f"{asked[0]}()"


# -- random numbers


def generators() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, as values of JSON."""
    version, numbers, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state()
    packed = [base64.b85encode(np.asarray(each).tobytes()).decode() for each in (keys, torch.get_rng_state())]
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [packed[0], int(place), int(has_gauss), float(cached)],
        "torch": packed[1],
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Set the global generators to these states."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", np.frombuffer(base64.b85decode(keys), np.uint32), *rest))
    torch.set_rng_state(torch.from_numpy(np.frombuffer(base64.b85decode(states["torch"]), np.uint8).copy()))
