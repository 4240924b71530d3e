"""Sites without samples: a site that submits with weight 0 sits out the round, and the run goes on without it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import ask_journal, flip_bit
from kit.models import Weights
from kit.servers import PLAIN_DILOCO, plain_server
from kit.sites import logged
from kit.world import World
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.cli.status import latest, plain
from atoll.cli.stored_status import stored_status
from atoll.errors import StateCorrupt
from atoll.protocol.messages import Report
from atoll.store.reader import checked_audit
from atoll.testing.run import Threads, history

START = {"w": torch.zeros(2)}
MOMENTUM = {
    "algorithm.outer_optimizer.name": "sgd",
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.5,
}


def sit_out(world: World, site: str, number: int, **how: Any) -> None:
    """Sit out round `number`, with a model that would change the version."""
    world.move(site, number, 1000.0, weight=0, **how)


def outcomes(folder: Path) -> list[tuple[str, int, str]]:
    """Site, base version and state of every ticket."""
    return [tuple(row) for row in ask_journal(folder, "SELECT site, base_version, state FROM tickets ORDER BY ticket")]


def test_a_round_averages_only_sites_that_train(tmp_path: Path) -> None:
    """If a site sits out a round, the version is made from the other sites' updates, and status and log
    name the site.
    """
    # In round 1, `a` moves by 2 and `b` sits out, so the model is 2. In round 2, they move by 1 and 3: the model is 4.
    with World(tmp_path, START, rounds=2) as world:
        up = world.sites["b"].worker.bytes_up
        sit_out(world, "b", 1, metrics={"loss": 7.0})
        status = world.status
        assert status.fragments[0].sat_out == ["b"]
        assert "waits for a; b sat out" in status.fragments[0].reason
        assert any("b sat out" in line for line in plain(status, world.url))
        assert world.sites["b"].worker.bytes_up == up
        world.move("a", 1, 2.0, metrics={"loss": 3.0})
        assert world.sites["b"].next_round() == 2
        assert world.sites["b"].pull()["w"].tolist() == [2.0, 2.0]
        world.sites["b"].submit({"w": torch.full((2,), 5.0)})
        world.move("a", 2, 1.0)
        assert world.finish()["w"].tolist() == [4.0, 4.0]
        first, second = world.status.history
    assert (first.workers, first.sat_out, second.workers, second.sat_out) == (["a"], ["b"], ["a", "b"], [])
    assert first.metrics == {"loss": 3.0}
    assert outcomes(tmp_path) == [("b", 0, "sat out"), ("a", 0, "counted"), ("b", 1, "counted"), ("a", 1, "counted")]
    assert any("b sat out round 1 (loss 7)" in line for line in world.log)
    assert not any("without b" in line for line in world.log)


def test_rounds_without_updates_make_no_version(tmp_path: Path) -> None:
    """Rounds that every site sits out count towards the total of rounds, but make no version. After three in a row, the
    status warns, with the same text at each further round: what follows the events is told once.
    """
    start = {"w": torch.tensor([1.0, -2.0])}
    with World(tmp_path, start, rounds=5, **MOMENTUM) as world:
        warned = set[str]()
        for number in (1, 2, 3, 4, 5):
            now = [text for text in world.status.warnings if "rounds in a row" in text]
            assert len(now) == (number >= 4)
            warned |= {*now}
            for site in "ab":
                sit_out(world, site, number)
        assert torch.equal(world.finish()["w"], start["w"])
        assert world.version == 0
        warned |= {text for text in world.status.warnings if "rounds in a row" in text}
        assert len(warned) == 1
    assert sum("rounds in a row ended without a version" in line for line in world.log) == 1
    assert {state for _, _, state in outcomes(tmp_path)} == {"sat out"}


def test_a_round_without_updates_is_recorded(tmp_path: Path) -> None:
    """The status and the history record a round that every site sat out, with no version, also after a restart."""
    # Rounds 1 and 3 are sat out, and round 2 makes version 1. The restart is in round 3.
    state = tmp_path / "state"
    expected = [(1, None, [], ["a"]), (2, 1, ["a"], []), (3, None, [], ["a"])]
    with World(tmp_path, START, "a", rounds=3) as world:
        sit_out(world, "a", 1)
        world.move("a", 2, 1.0)
        assert world.sites["a"].next_round() == 3
        assert brief(each.model_dump() for each in world.status.history) == expected[:2]
        assert any("round 1: no version, because all sites sat out (a)" in line for line in latest(world.status))
        world.restart()
        assert brief(history(state)) == expected[:2]
        sit_out(world, "a", 3)
        world.finish()
    assert brief(history(state)) == expected
    assert brief(each.model_dump() for each in stored_status(state)[0].history) == expected
    assert any("all sites sat out round 1," in line for line in world.log)


def test_a_round_after_a_damaged_version_has_a_new_number(tmp_path: Path) -> None:
    """If the newest version is damaged, the next round gets a new number and starts from the version before."""
    # Round 2 makes version 2, and round 3 is sat out. Version 2 is damaged, so round 4 begins from version 1. The site
    # submits its update of round 2 again. The model is 2 after round 4, and 3 after round 5.
    with World(tmp_path, START, "a", rounds=5) as world:
        world.move("a", 1, 1.0)
        world.move("a", 2, 1.0)
        sit_out(world, "a", 3)
        assert world.sites["a"].next_round() == 4
        world.stop()
        versions = (tmp_path / "state" / "slots").glob("version-*")
        flip_bit(max(versions, key=lambda path: path.stat().st_mtime_ns), -1)
        world.start()
        assert world.sites["a"].next_round() == 5
        world.restart()
        world.move("a", 5, 1.0)
        assert world.finish()["w"].tolist() == [3.0, 3.0]
    assert brief(history(tmp_path / "state")) == [
        (1, 1, ["a"], []),
        (3, None, [], ["a"]),
        (4, 3, ["a"], []),
        (5, 4, ["a"], []),
    ]


def brief(rounds: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Number, version, workers and sites that sat out, for each round."""
    return [
        (each["round"], each["version"], [one["site"] for one in each["sites"]], each["sat_out"]) for each in rounds
    ]


def test_a_round_without_updates_makes_no_outer_step(tmp_path: Path) -> None:
    """In a round that every site sits out, the outer optimizer makes no step, not even with momentum."""
    # With momentum 0.5 and updates of 1 in rounds 1 and 3, the model is 1, then 1 + 1.5 = 2.5. A step in round 2 would
    # add 0.5.
    with World(tmp_path, START, "a", rounds=3, **MOMENTUM) as world:
        world.move("a", 1, 1.0)
        sit_out(world, "a", 2)
        world.move("a", 3, 1.0)
        assert world.finish()["w"].tolist() == [2.5, 2.5]
        assert [(each.round, each.version) for each in world.status.history] == [(1, 1), (2, None), (3, 2)]


def test_sites_that_sit_out_do_not_count(tmp_path: Path) -> None:
    """A site that sits out does not count towards `rounds.min_sites`: the round waits and says why, until a third site
    trains.
    """
    with World(tmp_path, START, rounds=1, **{"rounds.min_sites": 2}) as world:
        world.move("a", 1, 2.0)
        sit_out(world, "b", 1)
        status = world.status
        assert "only 1 of 2 updates accepted or expected (rounds.min_sites); b sat out" in status.fragments[0].reason
        assert any("round 1 needs at least 2 updates (rounds.min_sites), but b sat out" in w for w in status.warnings)
        assert world.sites["b"].next_round(0) is None
        world.move("c", 1, 4.0)
        assert world.finish()["w"].tolist() == [3.0, 3.0]


def test_a_restarted_site_may_train_after_sitting_out(tmp_path: Path) -> None:
    """If a site sat out a round that is still open, a new process of this site can train in it."""
    with World(tmp_path, START, rounds=1, **{"rounds.min_sites": 2}) as world:
        world.move("a", 1, 2.0)
        sit_out(world, "b", 1)
        world.sites["b"].close()
        world.move("b", 1, 4.0)
        assert world.finish()["w"].tolist() == [3.0, 3.0]
        (summary,) = world.status.history
    assert (summary.workers, summary.sat_out) == (["a", "b"], [])  # b's update counts, so it did not sit out
    assert "sat out" not in summary.line()


def test_a_quorum_counts_updates_not_sites(tmp_path: Path) -> None:
    """With a quorum of 2, a round of three sites ends at its second update, although the third site sits out."""
    rules = {"rounds.quorum": 2, "rounds.deadline_s": 1000.0}
    with World(tmp_path, START, "abc", rounds=1, **rules) as world:
        sit_out(world, "c", 1)
        world.move("a", 1, 2.0)
        world.move("b", 1, 4.0)
        assert world.finish()["w"].tolist() == [3.0, 3.0]


def test_a_drawn_site_that_sits_out_is_replaced(tmp_path: Path) -> None:
    """If a site drawn for a round sits out, another site is drawn in its place, until one trains."""
    rules = {"rounds.sample_fraction": 0.3, "rounds.sample_min": 1}
    with World(tmp_path, START, "abc", rounds=1, **rules) as world:
        world.join()
        for _ in range(2):
            (drawn,) = (missing.site for missing in world.status.fragments[0].waiting_for)
            sit_out(world, drawn, 1)
        (last,) = (missing.site for missing in world.status.fragments[0].waiting_for)
        world.move(last, 1, 5.0)
        assert world.finish()["w"].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("rules", [{}, {"async.enabled": True, "async.buffer_size": 2}], ids=["sync", "async"])
def test_a_restart_remembers_which_sites_sat_out(tmp_path: Path, rules: dict[str, Any]) -> None:
    """After a restart, a site that sat out the open round gets no second ticket. The round ends with the other site's
    update.
    """
    with World(tmp_path, START, rounds=2, **rules) as world:
        for site in "ab":
            sit_out(world, site, 1)
        sit_out(world, "b", 2)
        world.restart()
        assert world.status.fragments[0].sat_out == ["b"]
        assert world.sites["b"].next_round(0) is None
        world.move("a", 2, 3.0)
        assert world.finish()["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("DELETE FROM tickets WHERE ticket = 2", "ticket 2 is not marked as sat out, but entry "),
        ("DELETE FROM sat_out_rounds", "0 rounds recorded as sat out by all sites, but entry "),
    ],
    ids=["ticket", "round"],
)
def test_an_audit_notices_deleted_sat_out_entries(tmp_path: Path, change: str, told: str) -> None:
    """If a row about a site or a round that sat out is deleted from the journal, `atoll audit` fails and says which."""
    # Both sites sat out round 1 with tickets 1 and 2, and `b` sat out round 2.
    with World(tmp_path, START, rounds=2) as world:
        for site in "ab":
            sit_out(world, site, 1)
        sit_out(world, "b", 2)
        world.move("a", 2, 3.0)
        world.finish()
    state = tmp_path / "state"
    checked_audit(state, 1)
    with closing(sqlite3.connect(state / "journal.sqlite")) as db:
        db.execute(change)
        db.commit()
    with pytest.raises(StateCorrupt, match=told):
        checked_audit(state, 1)


def test_a_restart_keeps_the_count_of_rounds(tmp_path: Path) -> None:
    """After a restart, the number of rounds and the warning about rounds that all sites sat out continue as before."""
    # Three of five rounds are sat out before the restart. The fourth is still open after it, and its update ends the
    # warning.
    with World(tmp_path, START, "a", rounds=5) as world:
        for number in (1, 2, 3):
            sit_out(world, "a", number)
        world.restart()
        assert any("3 rounds in a row" in text for text in world.status.warnings)
        world.move("a", 4, 3.0)
        assert world.sites["a"].next_round() == 5
        assert not any("rounds in a row" in text for text in world.status.warnings)
        world.sites["a"].submit({"w": world.sites["a"].pull()["w"] + 1.0})
        assert world.finish()["w"].tolist() == [4.0, 4.0]


def test_a_site_sits_out_once(tmp_path: Path) -> None:
    """A site may send the message that it sits out twice. After an update, this message is refused, and so is an update
    after sitting out.
    """
    with World(tmp_path, START, rounds=1) as world:
        a, b = world.sites["a"], world.sites["b"]
        sit_out(world, "b", 1)
        exchange, ticket = b._place.exchange, b.round._ticket
        report = Report(weight=0)
        assert type(exchange.sit_out(ticket, report)).__name__ == "SatOut"
        b.round.done = False
        b.submit({"w": torch.ones(2)})
        assert a.next_round() == 1
        assert type(exchange.sit_out(a.round._ticket, report)).__name__ == "TooLate"
        a.submit({"w": a.pull()["w"] + 1})
        assert world.finish()["w"].tolist() == [1.0, 1.0]
    assert sorted(outcomes(tmp_path)) == [("a", 0, "counted"), ("b", 0, "sat out")]


def test_sitting_out_keeps_the_codecs_rounding_error(tmp_path: Path) -> None:
    """The rounding error that a site's codec keeps for its next update survives a round that the site sits out."""
    # With int8 of scale 1, 0.28 is rounded to 0 in round 1, and 0.28 + 0.28 to 1 in round 3.
    with World(tmp_path, START, "a", rounds=3, codec="int8") as world:
        for number in (1, 3):
            world.move("a", number, -torch.tensor([127.0, 0.28]))
            if number == 1:
                sit_out(world, "a", 2)
        assert world.finish()["w"].tolist() == [-254.0, -1.0]


@pytest.mark.parametrize("algorithm", ["fednova", "fedprox", "scaffold", "fedadam"])
def test_every_algorithm_lets_sites_sit_out(tmp_path: Path, algorithm: str) -> None:
    """With every algorithm, a site may sit out a round without steps, without a correction and without loading the
    model. The run ends as usual.
    """
    with World(tmp_path, nn.Linear(2, 1), "a", algorithm=algorithm, rounds=2) as world:
        model = nn.Linear(2, 1)
        assert world.sites["a"].next_round() == 1
        world.sites["a"].submit(model, weight=0)
        assert world.sites["a"].next_round() == 2
        world.sites["a"].round.load_into(model)
        with world.sites["a"].round.correct(model, torch.optim.SGD(model.parameters(), lr=0.1)):
            world.sites["a"].submit(model, weight=0.0)
        world.finish()
        assert world.version == 0


def test_an_async_buffer_ignores_idle_sites(tmp_path: Path) -> None:
    """With a buffer of two, a site that sits out is not awaited: the update of the other site alone makes version 1.

    Then both sites sit out, which ends the second and last round.
    """
    rules = {"async.enabled": True, "async.buffer_size": 2}
    with World(tmp_path, START, rounds=2, **rules) as world:
        sit_out(world, "b", 1)
        assert world.sites["b"].next_round(0) is None
        world.move("a", 1, 3.0)
        for site in "ab":
            sit_out(world, site, 2)
        assert world.finish()["w"].tolist() == [3.0, 3.0]
        assert world.version == 1


def vector() -> Weights:
    return Weights(w=torch.zeros(2))


@pytest.mark.parametrize("tau", [0, 1])
def test_a_diloco_site_with_weight_zero_sits_out(tmp_path: Path, tau: int) -> None:
    """A DiLoCo loop with weight 0 sits out every round, but follows the model of the others."""
    # Site `a` moves by 1 in each of two rounds and site `b`, with weight 0, by 10. At the end, both have the same
    # model. Without a delay, half of the local model is mixed into each version at `a`, and nothing at `b`.
    rules: dict[str, Any] = {"diloco.sync_every": 1, "diloco.fragment_update_alpha": 0.5}
    if tau:
        rules = {"diloco.sync_every": 2, "diloco.fragment_sync_delay": tau}
    with plain_server(tmp_path, vector(), **(PLAIN_DILOCO | rules), sites=2, rounds=2) as server:
        models, met = {}, list[float]()

        def work(site: str, weight: float, gradient: float) -> None:
            model = models[site] = vector()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with atoll.DiLoCo(
                model, optimizer, server=server.url, site=site, weight=weight, folder=tmp_path / "w"
            ) as loop:
                for _ in range(20):
                    if loop.finished:
                        break
                    model.w.grad = torch.full((2,), gradient / (2 if tau else 1))
                    optimizer.step()
                    if not weight:
                        met.append(model.w[0].item())
                assert loop.finished
                assert loop.rounds == (2 if weight else 0)

        Threads(partial(work, "a", 1.0, -1.0), partial(work, "b", 0.0, -10.0)).join()
        assert server.wait(60)
        result = load_file(server.exports / "model.safetensors")["w"]
        assert torch.equal(models["a"].w.detach(), result)
        assert torch.equal(models["b"].w.detach(), result)
        if not tau:
            assert result.tolist() == [2.0, 2.0]
            assert met == [1.0, 2.0]
        assert all(each.sat_out == ["b"] for each in server.status().history)


def test_a_script_without_a_server_may_sit_out(caplog: pytest.LogCaptureFixture) -> None:
    """A script without a server can submit with weight 0: the log says that it sat out, and the model stays."""
    caplog.set_level(logging.INFO)
    model = vector()
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            fl_round.submit(model, weight=0)
    assert model.w.tolist() == [0.0, 0.0]
    assert any("sat out the round" in line for line in logged(caplog))


def test_the_functional_interface_can_sit_out(tmp_path: Path) -> None:
    """`atoll.functional.send` with weight 0 sits out a round, as `submit` with weight 0 does."""
    with plain_server(tmp_path, START, sites=1, rounds=2) as server:
        atoll.functional.init(server.url, "a", folder=tmp_path / "w")
        for weight in (0, 1):
            assert atoll.functional.is_running()
            atoll.functional.receive()
            atoll.functional.send({"w": torch.full((2,), 3.0)}, weight=weight)
        assert not atoll.functional.is_running()
        assert server.wait(60)
        assert load_file(server.exports / "model.safetensors")["w"].tolist() == [3.0, 3.0]
