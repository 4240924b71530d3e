"""What an engine does with a job whose process ends, and what it hears of one that raised."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
from harness.processes import wait_until

from atoll.simulate import engine
from atoll.simulate.engine import Answer, Beginning, Job
from atoll.simulate.simulated_site import answer_to


def test_an_exception_that_is_its_own_cause_is_told() -> None:
    error = ValueError("round and round")
    error.__cause__ = error
    assert answer_to(error).error == "ValueError: round and round"


class Ends:
    """A host, and each of its processes in turn, by how it begins and how it ends."""

    name, kind, ahead, pid = "test", "a process", 0, 1

    def __init__(self, *lives: str) -> None:
        self._lives, self._life = list(lives), ""
        self._given = queue.SimpleQueue[int]()
        self.answers = queue.SimpleQueue[str]()

    def begin(self, beginning: Beginning) -> Ends:
        self._life = self._lives.pop(0)
        return self

    def ready(self) -> None:
        if self._life == "killed":
            raise engine.Killed("It was ended by SIGKILL.")

    def give(self, job: Job) -> None:
        for _ in range(2 if self._life == "answers twice" else 1):
            self._given.put(job.ticket.id)

    def hear(self) -> tuple[int, Answer] | None:
        ticket = self._given.get()
        return None if self._life == "ends" else (ticket, Answer(error="raised"))

    def bury(self) -> str:
        return "ended"

    def answered(self, job: Job, answer: Answer) -> None:
        self.answers.put(answer.error)

    def failed_to_go_on(self, error: Exception) -> None:
        self.answers.put(str(error))

    def nothing(self) -> None: ...

    open = close = kill = take_back = nothing

    def answer(self) -> str:
        """What comes of a job."""
        begun = engine.Engine(self, 1)
        begun.start(None, self)  # type: ignore[arg-type]
        begun.put(SimpleNamespace(ticket=SimpleNamespace(id=7), site="a", attempts=0))  # type: ignore[arg-type]
        return self.answers.get(timeout=10)


@pytest.mark.covers("V2")
@pytest.mark.parametrize(
    ("lives", "error"),
    [
        (["answers"], "raised"),
        (["ends", "killed", "killed", "answers"], "raised"),
        (["ends", "killed", "killed", "killed"], "It was ended by SIGKILL."),
        (["ends", "ends", "ends", "answers"], "its process ended, 3 times in a row"),
    ],
)
def test_begins_a_job_again_in_another_process(lives: list[str], error: str) -> None:
    assert Ends(*lives).answer() == error


@pytest.mark.covers("V2")
def test_ignores_a_second_answer(caplog: pytest.LogCaptureFixture) -> None:
    host = Ends("answers twice")
    assert host.answer() == "raised"
    wait_until(lambda: "ignored a second answer" in caplog.text, "a line")
    assert host.answers.empty()
