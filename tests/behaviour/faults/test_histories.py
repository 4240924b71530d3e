"""Random histories hold their invariants, can be played again, and find bugs that are planted.

`make histories MINUTES=10` plays many more. A history is a whole run: see `harness/histories`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.histories import story
from harness.histories.checks import Violation
from harness.histories.scenario import FEEDBACK, Scenario
from harness.histories.story import play

from atoll.reducers.means import NormalisedMean, Share, WeightedMean
from atoll.rounds import machine
from atoll.rounds.state import Rules
from atoll.server.coordinator.accept_update import UpdateAdmission
from atoll.store.versions import Versions
from atoll.worker.exchange import apply_version, exchange
from atoll.worker.exchange.local_state import Residuals, TwoPhaseFile

ROOT = Path(__file__).parents[3]
PLAYED = range(40)


@pytest.mark.covers("F1", "F2", "F3", "F4", "F5", "F6", "F8", "F9", "F12", "F17", "F19", "F22", "F25", "F33", "F34")
def test_the_invariants_hold_in_random_histories():
    """In random histories of servers and sites with all faults, each acknowledged update is in exactly one version,
    and each run goes on once faults stop.
    """
    seen = Counter[str]()
    for seed in PLAYED:
        seen += play(seed).counts
    assert seen["versions"] > 40
    assert seen["receipts"] > 100
    assert all(seen[what] for what in ("kill server", "power loss", "kill site", "rival", "RunFinished")), seen


def test_sites_learn_that_another_fragment_went_back():
    """After a rollback of one of two fragments, sites that wait for the other one submit the first one again.

    This seed leads to such a wait; a planted fault in `tests/mutants.toml` tells if it no longer does.
    """
    play(3345)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(5511, id="a site sends a part for a ticket that a power loss took, as another fragment gets one"),
        pytest.param(6259, id="a site sits out an asynchronous round with an old ticket, and the server restarts"),
        pytest.param(21646, id="50 versions of a fragment: the checks' own rounding must not grow"),
    ],
)
def test_the_invariants_hold_where_they_once_did_not(seed):
    """Histories that led to a violation once no longer do."""
    play(seed)


@pytest.mark.parametrize("delay", [0, 1])
def test_sites_that_wait_for_a_result_give_way_to_a_fragment_that_went_back(delay):
    """After a rollback of one of two fragments, sites whose updates of the other one are at the server no longer wait
    for its result, but submit the first one again.
    """
    # The seeds lead to such a wait; planted faults in `tests/mutants.toml` tell if they no longer do.
    if not delay:
        play(21429)
        return
    found = Scenario.of(21429)
    settings = found.settings | {
        "rounds.sites": 2,
        "diloco.fragment_sync_delay": delay,
        "diloco.fragment_update_alpha": 0.0,
    }
    faults = (replace(found.faults[1], at_s=1.306),)
    play(replace(found, seed=100000037, sites=("a", "b"), large=False, faults=faults, settings=settings))


def test_a_history_leaves_no_open_file():
    """When a history is over, the files of all its sites are closed, so that many can be played."""
    play(20002)
    before = sorted(os.listdir("/proc/self/fd"))
    play(20002)  # its sites do not leave: they are killed at its end
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_history_can_be_played_again():
    """A seed leads to the same history, line by line: in the same process after another one, and in another process."""
    seed = 3
    first = play(seed).trace
    play(seed + 1)
    assert play(seed).trace == first
    command = [sys.executable, "tools/histories.py", "--seed", str(seed)]
    again = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[: len(first)] == first


def test_a_failed_history_says_how_to_play_it_again(monkeypatch, capsys):
    """If an invariant does not hold, the tool prints what is wrong, the seed, and the command that plays it again."""
    sys.path.insert(0, str(ROOT / "tools"))
    import histories

    def fails(seed: int) -> Any:
        raise Violation("version 2 follows 3")

    monkeypatch.setattr(histories, "play", fails)
    assert histories.main(["--from", "11", "--count", "1"]) == 1
    told = capsys.readouterr().out
    assert "version 2 follows 3" in told
    assert "python tools/histories.py --seed 11" in told


# -- the checks themselves


def no_dedupe(monkeypatch):
    """A worker sends the update in its outbox again under each new ticket, whether or not it has counted."""

    def again(note, ticket, previous, info, outcome_of):
        if note is None or note.run != info.run:
            return None
        base = ticket.base
        return replace(note, ticket=ticket.id, base_version=base.number, base_digest=base.digest, sent=False)

    monkeypatch.setattr(exchange, "resend_note", again)


def acknowledge_before_journal(monkeypatch):
    """The server answers with a receipt, and writes the update into its journal a moment later."""
    accept = UpdateAdmission.accept

    def later(self, row, message, norm, last=None):
        import asyncio

        def write():
            kept = None if self._run.store.journal.closed else self._run.store.tickets.get(row.ticket)
            if kept is not None and not kept.is_in:
                accept(self, row, message, norm, last)

        asyncio.get_running_loop().call_later(0.05, write)
        return replace(row, state="accepted", digest=message.digest, report=message.report, norm=norm)

    monkeypatch.setattr(UpdateAdmission, "accept", later)


def lost_restore(monkeypatch):
    """A restarted server forgets the updates that were accepted before."""
    restore = machine.restore

    def forgets(rules, journal, now_s):
        kept = tuple(ticket for ticket in journal.tickets if ticket.state != "accepted")
        return restore(rules, replace(journal, tickets=kept), now_s)

    monkeypatch.setattr(machine, "restore", forgets)


def quorum_of_one(monkeypatch):
    """One update is enough for a version, whatever the settings say."""
    monkeypatch.setattr(Rules, "floor", property(lambda self: 1))


def two_file_commit(monkeypatch):
    """The updates of a round are marked as counted in one commit, and the new version follows in another."""
    count = Versions._count

    def apart(self, *args):
        count(self, *args)
        self._journal._db.execute("COMMIT")
        self._journal._db.execute("BEGIN IMMEDIATE")

    monkeypatch.setattr(Versions, "_count", apart)


def wall_clock(monkeypatch):
    """The server's timeouts follow the wall clock, which is set forward by a day."""
    monkeypatch.setattr(story.History, "clock", lambda self: self.loop.now_s + 86400.0 * (self.loop.now_s > 2.5))


def steps_ignored(monkeypatch):
    """FedNova's mean is that of FedAvg: a site with more steps moves the model further."""
    monkeypatch.setattr(NormalisedMean, "weigh", WeightedMean.weigh)


def control_not_rescaled(monkeypatch):
    """SCAFFOLD's sum at the server keeps its scale as the weight of all sites becomes known."""
    monkeypatch.setattr(Share, "carry", lambda self, facts: 1.0)


def state_left_behind(monkeypatch):
    """A site's state does not follow the updates that have counted."""
    monkeypatch.setattr(TwoPhaseFile, "adopt_if_counted", lambda self, outcome_of: None)


def residual_before_it_counts(monkeypatch):
    """What a codec has lost of an update goes into the next one, whether or not the update has counted."""
    belongs_to = TwoPhaseFile.belongs_to

    def at_once(self, ticket, version, update=""):
        belongs_to(self, ticket, version, update)
        if isinstance(self, Residuals):
            self._write(self.note.pending_counted())

    monkeypatch.setattr(TwoPhaseFile, "belongs_to", at_once)


def residual_left_behind(monkeypatch):
    """What a codec has lost of an update that has counted is lost."""
    adopt = TwoPhaseFile.adopt_if_counted
    monkeypatch.setattr(
        TwoPhaseFile,
        "adopt_if_counted",
        lambda self, outcome_of: isinstance(self, Residuals) or adopt(self, outcome_of),
    )


def steps_sent_again(monkeypatch):
    """In streaming, a worker that got no answer sends the local steps of its accepted update once more."""
    monkeypatch.setattr(exchange.Exchange, "settle_update", lambda self, retries=None: None)


def merge_left_out(monkeypatch):
    """In streaming, a worker goes on from a new version without loading it."""
    monkeypatch.setattr(apply_version, "merge_", lambda own, base, alpha: None)


def any_(_: Scenario) -> bool:
    return True


def loses_something(scenario: Scenario) -> bool:
    return scenario.settings["aggregation.upload_codec.name"] in FEEDBACK and not scenario.may_lose_residuals


def is_killed_within(scenario: Scenario) -> bool:
    return any(fault.what == "kill server at" for fault in scenario.faults)


def of_kind(kind: str) -> Callable[[Scenario], bool]:
    return lambda scenario: scenario.kind == kind


PLANTED: dict[Callable[..., None], tuple[str, Callable[[Scenario], bool]]] = {
    residual_before_it_counts: ("carries the residual", loses_something),
    residual_left_behind: ("carries the residual", loses_something),
    steps_sent_again: ("local steps, of", of_kind("streaming")),
    merge_left_out: ("local steps, of", of_kind("streaming")),
    steps_ignored: ("is not the mean of its updates", of_kind("fednova")),
    control_not_rescaled: ("is not the mean of its updates: atoll.control", of_kind("scaffold")),
    state_left_behind: ("with the control variate|begins anew", of_kind("scaffold")),
    no_dedupe: ("counts already|was trained from|already has the update", any_),
    acknowledge_before_journal: ("a receipt for ticket", any_),
    lost_restore: ("after the restart|lacks acknowledged|has forgotten ticket", any_),
    quorum_of_one: ("updates, of at least", any_),
    two_file_commit: ("has the state 'counted'|counts|made from the tickets|the server failed", is_killed_within),
    wall_clock: ("was declared dead, but was heard", any_),
}
"""What is wrong → what the histories say of it, and which of them can show it."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, monkeypatch):
    """Random histories find each bug that was put into the server or the worker, and name the broken invariant."""
    told, shows = PLANTED[plant]
    plant(monkeypatch)
    with pytest.raises(Exception, match=told):  # noqa: PT012  # the seed that finds it may change
        for scenario in filter(shows, map(Scenario.of, range(1000))):
            play(scenario)
