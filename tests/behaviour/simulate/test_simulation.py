"""`atoll.Simulation` in a program: which settings count, what stays in memory, which clients there are."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_here import simulate_here
from simulated_world import MOVES, moved, run, start

import atoll
from atoll.errors import ConfigError, RunFailed, UsageError
from atoll.protocol import messages
from atoll.protocol.status_messages import RoundSummary
from atoll.server.coordinator.coordinator import Coordinator
from atoll.simulate import schedule_sites


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests start no process."""
    simulate_here(monkeypatch)


DRAWS = """
import random
import numpy as np

LOADED = [random.random(), np.random.rand(), torch.rand(()).item()]


def draw(worker) -> None:
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    train(worker)
    with (HERE / "drawn").open("a") as file:
        file.write(f"{worker.site} {' '.join(map(str, [*LOADED, *drawn]))}\\n")
"""


@pytest.mark.covers("V1")
def test_what_is_drawn_hangs_on_the_seed_the_site_and_the_round(tmp_path: Path) -> None:
    """By all three generators; and of what is drawn when the client is loaded, on the seed."""

    def drawn(name: str, *given: int, **options: Any) -> list[list[str]]:
        """A line for each site and round: of the loading, of the round. In the order in which they were trained."""
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(MOVES + DRAWS)
        client = f"{tmp_path / name / f'{name}.py'}:draw"
        for rounds in given:
            random.seed(rounds)
            torch.manual_seed(rounds)
            run(tmp_path / name, client, **{"rounds.total": rounds}, **options)
        return sorted(line.split() for line in (tmp_path / name / "drawn").read_text().splitlines())

    whole, interrupted, other = drawn("a", 2), drawn("b", 1, 2), drawn("c", 2, **{"run.seed": 1})
    assert whole == interrupted
    for column in range(1, 4):
        assert len({line[column] for line in whole}) == 1
        assert {line[column] for line in whole}.isdisjoint(line[column] for line in other)
    for column in range(4, 7):
        assert len({line[column] for line in [*whole, *other]}) == 2 * 4 * 2  # seeds, sites, rounds


def test_updates_pass_through_the_filters_of_the_run(tmp_path: Path, client: str) -> None:
    clip = {"path": "norm_clip", "args": {"max_norm": 8.0**0.5}}  # of 8 parameters: a change of 1 in each
    done = run(tmp_path, client, **{"workflow.result_filters": [clip]})
    assert moved(done) == pytest.approx(2.0, abs=1e-4)


def test_a_run_in_memory_has_no_file_of_a_tensor(tmp_path: Path, client: str) -> None:
    done = run(tmp_path, client, **{"disk.in_files": False})
    assert moved(done) == pytest.approx(2 * 2.5, abs=1e-5)
    assert list((tmp_path / "state" / "slots").iterdir()) == []


def test_a_simulation_of_very_many_can_be_stopped_while_they_join(
    tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_sites, "JOIN_AT_ONCE", 10)
    joined, join = list[str](), Coordinator.join

    async def counted(self: Coordinator, message: messages.Join) -> messages.Joined:
        joined.append(message.site)
        if len(joined) == 25:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # as `stop` does, which a signal calls
        return await join(self, message)

    monkeypatch.setattr(Coordinator, "join", counted)
    simulation = atoll.Simulation(
        start(),
        script=client,
        sites=200,
        settings={"rounds.total": 1, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "s"},
    )
    with pytest.raises(UsageError, match="The simulation was stopped"):
        simulation.run()
    assert len(joined) == 30  # those of the three transactions that had begun


def test_a_client_that_begins_a_simulation_when_it_is_imported_is_told_how_not_to(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(
        "import atoll\nfrom torch import nn\n\ndef train(worker):\n    pass\n\n"
        "atoll.Simulation(nn.Linear(1, 1), script=train).run()\n"
    )
    with pytest.raises(ConfigError, match="if __name__ == '__main__'"):
        run(tmp_path, f"{tmp_path / 'again.py'}:train")


def test_a_program_gives_the_function_itself(tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "client", raising=False)  # of another test
    import client as theirs  # type: ignore[import-not-found]

    assert moved(run(tmp_path, theirs.train)) == pytest.approx(2 * 2.5, abs=1e-5)


def test_it_goes_on_with_fewer_simulated_sites_or_with_more(tmp_path: Path, client: str) -> None:
    seen: list[list[str]] = []

    def on_round(summary: RoundSummary) -> None:
        seen.append([site[-1] for site in summary.workers])

    for rounds, workers in ((1, 4), (2, 2), (4, 5)):
        run(tmp_path, client, **{"rounds.total": rounds}, sites=workers, **{"rounds.min_sites": 1}, on_round=on_round)
    assert seen == [list("0123"), list("01"), list("01"), list("01234")]  # a late joiner counts from the next round on


def test_a_script_in_the_functional_form_runs_for_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\nimport torch\nimport atoll\n"
        "model = torch.nn.Linear(3, 2)\n"
        "atoll.functional.init()\n"
        "while atoll.functional.is_running():\n"
        "    atoll.functional.receive(into=model)\n"
        "    if sys.argv[1:] == ['raise']:\n"
        "        raise ValueError('in the middle of a round')\n"
        "    model.weight.data += 1.0\n"
        "    atoll.functional.send(model)\n"
    )
    done = run(tmp_path, str(tmp_path / "script.py"))
    assert moved(done) == pytest.approx(2.0, abs=1e-5)
    with pytest.raises(RunFailed, match="in the middle of a round"):  # each of them, not "init was called twice"
        run(tmp_path / "raises", str(tmp_path / "script.py"), arguments=["raise"])
