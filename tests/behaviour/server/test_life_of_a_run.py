"""The admin pauses, resumes and stops a run, or lets it go back to an earlier version."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.admin import asked, pause, resume, roll_back, stop
from kit.models import build_model
from kit.servers import PLAIN_DILOCO
from kit.world import World
from torch import nn

from atoll.errors import Conflict, Gone
from atoll.protocol import routes
from atoll.protocol.admin_messages import RollBack
from atoll.protocol.values import Wait
from atoll.store.reader import checked_audit, open_state
from atoll.testing.run import wait_until

START = {"w": torch.zeros(4)}


def events_of(world: World) -> list[str]:
    """What has happened to the run as a whole, in order."""
    with open_state(world.folder / "state") as state:
        found = [event["what"] for event in state.events()]
    return [each for each in found if each.startswith(("run ", "went ", "round e"))]


def why_waits(world: World, site: str) -> str:
    """Why a site gets no ticket at this moment."""
    reply = world.sites[site].worker._backend.participation.exchange.ask(0.0)
    assert isinstance(reply, Wait), reply
    return reply.reason


# -- pause


def test_a_paused_run_still_accepts_open_updates(tmp_path: Path) -> None:
    """In a paused run, the open round may still end, and no other round opens until the run is resumed."""
    with World(tmp_path, START, "ab", rounds=2) as world:
        world.pull()
        answer = pause(world)
        assert (answer.paused, answer.version) == (True, 0)
        assert answer.text == (
            "the run is paused: no round begins; round 1 is under way, and 2 updates of it may still come"
        )
        assert world.status.paused
        for name in "ab":
            world.submit(name, 1.0)
        world.wait(1)
        (fragment,) = world.status.fragments
        assert (fragment.phase, fragment.reason) == ("paused", "is paused, until its admin resumes the run")
        assert "is paused, until its admin resumes the run" in why_waits(world, "a")
        assert pause(world).text == "the run is paused already: no round begins"
        assert resume(world).text == "the run goes on"
        assert resume(world).text == "the run was not paused; it goes on"
        world.rounds(1.0, 2)
        assert torch.equal(world.finish()["w"], torch.full((4,), 2.0))
        assert events_of(world) == ["run paused", "round ended", "run resumed", "round ended", "run finished"]


def test_a_paused_round_gives_no_new_tickets(tmp_path: Path) -> None:
    """In a paused run, no site gets a new ticket. A site that has one keeps it and may submit."""
    with World(tmp_path, START, "ab", rounds=1) as world:
        world.pull("a")
        pause(world)
        assert "the run is paused, so no site gets a ticket until its admin resumes it" in why_waits(world, "b")
        world.ask("a", number=1)
        resume(world)
        world.submit("a", 1.0)
        world.move("b", 1, 1.0)
        world.finish()


def test_a_pause_survives_a_restart(tmp_path: Path) -> None:
    """A paused run is still paused after its server is restarted."""
    with World(tmp_path, START, "a", rounds=2) as world:
        world.rounds(1.0, 1)
        world.wait(1)
        pause(world)
        world.restart()
        assert world.status.paused
        assert "is paused" in why_waits(world, "a")
        resume(world)
        world.rounds(1.0, 2)
        world.finish()


def test_an_asynchronous_run_can_pause(tmp_path: Path) -> None:
    """A paused asynchronous run accepts the updates that are under way, and applies them once the run is resumed."""
    with World(tmp_path, START, "ab", rounds=3, **{"async.enabled": True}) as world:
        world.pull()
        pause(world)
        world.submit("a", 1.0)
        world.wait(1)
        assert world.status.fragments[0].phase == "paused"
        world.submit("b", 1.0)
        assert world.version == 1
        resume(world)
        world.wait(2)
        world.move("a", 3, 1.0)
        world.finish()


def test_a_run_can_be_paused_before_it_begins(tmp_path: Path) -> None:
    with World(tmp_path, START, "a", rounds=1) as world:
        pause(world)
        world.join("a")
        assert "is paused" in why_waits(world, "a")
        resume(world)
        world.rounds(1.0, 1)
        world.finish()


# -- stop


def test_a_stopped_run_ends_after_its_round(tmp_path: Path) -> None:
    """A stopped run ends after the open round: its sites end normally and hear why, and the next start trains no
    further.
    """
    with World(tmp_path, START, "ab", rounds=5) as world:
        world.rounds(1.0, 1)
        world.pull()
        assert "the run is being stopped; round 2 is under way" in stop(world).text
        assert stop(world).stopping
        with pytest.raises(Conflict, match="is being stopped, so it cannot pause"):
            pause(world)
        for name in "ab":
            world.submit(name, 1.0)
        world.wait(2)
        with pytest.raises(Conflict, match="The run was stopped by its admin, so it cannot pause"):
            pause(world)
        assert torch.equal(world.finish()["w"], torch.full((4,), 2.0))
        assert (world.status.stopped, world.version) == ("stopped by its admin", 2)
        assert events_of(world)[-3:] == ["run stopping", "round ended", "run finished"]
        assert "the run is finished at version 2, stopped by its admin" in world.text
        world.restart()
        assert world.server.wait(60)
        assert world.version == 2


def test_a_run_stopped_at_once_drops_the_open_round(tmp_path: Path) -> None:
    """A run that is stopped at once does not use the updates of the open round. If it is resumed, it trains this round
    again.
    """
    with World(tmp_path, START, "ab", rounds=2) as world:
        world.rounds(1.0, 1)
        world.pull()
        world.submit("a", 5.0)
        assert stop(world, now=True).text.startswith("the run is stopped: its result is being saved")
        assert torch.equal(world.finish()["w"], torch.ones(4))
        assert world.counted == [("a", 1), ("b", 1)]


def test_a_paused_run_can_be_stopped(tmp_path: Path) -> None:
    with World(tmp_path, START, "a", rounds=3) as world:
        world.rounds(1.0, 1)
        world.wait(1)
        pause(world)
        stop(world)
        world.finish()
        assert world.status.stopped == "stopped by its admin"


def test_a_stop_survives_a_restart(tmp_path: Path) -> None:
    """A run that is being stopped still ends after its round if its server is restarted meanwhile."""
    with World(tmp_path, START, "a", rounds=5) as world:
        world.pull()
        stop(world)
        world.restart()
        assert world.status.stopping
        world.submit("a", 1.0)
        world.finish()
        assert world.version == 1


# -- go back


def momentum(**more: Any) -> dict[str, Any]:
    """Settings of a run whose outer optimizer has a state."""
    return {"algorithm.outer_optimizer.momentum": 0.5, "disk.keep_versions": 3} | more


def test_going_back_restores_the_outer_optimizer(tmp_path: Path) -> None:
    """If a run goes back to an earlier version, the outer optimizer's state goes back, too."""
    # Momentum 0.5: m is 1, 1.5 after updates of 1. After version 1, m is 1 again, so an update of 1 adds 1.5. The next
    # version has the number 4. Sites do not send again what they formed before.
    with World(tmp_path, START, "ab", rounds=3, **momentum()) as world:
        world.rounds(1.0, 1, 2)
        world.pull(number=3)
        world.submit("a", 100.0)
        assert torch.equal(world.model["w"], torch.full((4,), 2.5))
        answer = roll_back(world, 1)
        assert answer.text == "the run goes back to version 1"
        assert world.version == 1
        again = world.move("a", 2, 1.0)
        assert torch.equal(again["w"], torch.ones(4))
        world.move("b", 2, 1.0)
        world.wait(3)
        assert torch.equal(world.model["w"], torch.full((4,), 2.5))
        world.rounds(1.0, 3)
        # 1 + 1.5 + 1.75
        assert torch.equal(world.finish()["w"], torch.full((4,), 4.25))
        assert [row.version for row in world.status.history] == [1, 3, 4]
        assert world.counted == [("a", 1), ("a", 2), ("a", 4), ("b", 1), ("b", 2), ("b", 4)]
        assert events_of(world).count("went back") == 1
        assert "The run went back from version 2 to version 1, as its admin asked: 3 updates no longer counted" in (
            world.text
        )
        assert world.status.warnings == []


def test_sat_out_rounds_after_the_version_do_not_count(tmp_path: Path) -> None:
    """Round 1 is sat out, round 2 makes version 1, round 3 is sat out, round 4 makes version 2. Then the run goes back
    to version 1, after which round 3 comes again.

    Momentum 0.5: m is 1 after version 1, then 1.5, 1.75 and 1.875.
    """
    with World(tmp_path, START, "a", rounds=5, **momentum()) as world:
        for number, weight in enumerate((0, 1, 0, 1), 1):
            world.move("a", number, 1.0, weight=weight)
        world.pull("a", number=5)
        roll_back(world, 1)
        world.restart()
        world.rounds(1.0, 3)
        world.wait(3)
        world.restart()  # it does not go back again
        world.rounds(1.0, 4, 5)
        assert world.finish()["w"].tolist() == [1 + 1.5 + 1.75 + 1.875] * 4
        rounds = [(row.round, row.version) for row in world.status.history]
        assert rounds == [(1, None), (2, 1), (3, 3), (4, 4), (5, 5)]
    checked_audit(tmp_path / "state", 1)


def test_a_site_that_sat_out_is_asked_again(tmp_path: Path) -> None:
    """Site b sits round 2 out. After the run has gone back, round 2 waits for b, also after a restart within it."""
    with World(tmp_path, START, "ab", rounds=3, **momentum()) as world:
        world.rounds(1.0, 1)
        world.pull(number=2)
        world.submit("b", 0.0, weight=0)
        world.submit("a", 1.0)
        world.wait(2)
        roll_back(world, 1)
        world.pull("a", number=2)
        world.restart()
        assert world.status.fragments[0].sat_out == []
        world.submit("a", 1.0)
        world.move("b", 2, 1.0)
        world.rounds(1.0, 3)
        world.finish()
        assert world.status.history[1].workers == ["a", "b"]


def test_going_back_too_far_lists_the_kept_versions(tmp_path: Path) -> None:
    """If a run is to go back to a version that the server no longer keeps, the error lists the versions
    that it keeps.
    """
    with World(tmp_path, START, "a", rounds=5, **momentum()) as world:
        world.rounds(1.0, 1, 2, 3, 4)
        world.wait(4)
        wait_until(lambda: world.status.durable_version == 4, "version 4 to be durable")
        with pytest.raises(Gone, match=r"no longer has it with the state of the optimizer.* It can go back to: 2, 3\."):
            roll_back(world, 1)
        with pytest.raises(Gone, match="cannot go back to version 9: its server has no such version"):
            roll_back(world, 9)
        assert asked(world, routes.ROLLBACK, RollBack(version=4)).text == "version 4 is the newest already"
        assert (
            "the newest 3 versions stay on disk for `atoll rollback` (disk.keep_versions); each further" in world.text
        )
        world.rounds(1.0, 5)
        world.finish()


def test_a_paused_run_stays_paused_after_going_back(tmp_path: Path) -> None:
    with World(tmp_path, START, "a", rounds=3, **momentum()) as world:
        world.rounds(1.0, 1, 2)
        world.wait(2)
        pause(world)
        roll_back(world, 1)
        assert (world.status.paused, world.version) == (True, 1)
        assert "is paused" in why_waits(world, "a")
        resume(world)
        world.rounds(1.0, 2, 3)
        world.finish()


def test_a_run_cannot_go_back_to_a_damaged_version(tmp_path: Path) -> None:
    """If a run is to go back to a damaged version, the server refuses, and the run stays where it is."""
    with World(tmp_path, START, "a", rounds=3, **momentum()) as world:
        world.rounds(1.0, 1, 2)
        world.wait(2)
        wait_until(lambda: world.status.durable_version == 2, "version 2 to be durable")
        row = world.server._require_served().run.store.versions.get(0, 1)
        path = world.folder / "state" / "slots" / f"version-0-{row.slot}.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        with open(path, "r+b") as file:
            file.write(damaged)
        roll_back(world, 1)
        assert world.version == 2
        assert "Version 1 is damaged or missing, so the run does not go back to it" in world.text
        world.rounds(1.0, 3)
        world.finish()


def test_site_loops_continue_after_going_back(tmp_path: Path) -> None:
    """If a run goes back, sites that train in loops take the earlier version without being started again."""
    with World(tmp_path, build_model(), "ab", rounds=6, **momentum(**{"disk.keep_versions": 9})) as world:
        reached, may_go_on = threading.Event(), threading.Event()

        def before(site: str, number: int, *_: object) -> None:
            if number == 4 and not may_go_on.is_set():
                reached.set()
                may_go_on.wait(60)

        sites = world.begin(before=before)
        assert reached.wait(60)
        roll_back(world, 2)
        may_go_on.set()
        sites.join()
        world.server.run()
        assert world.status.finished
        assert [row.version for row in world.status.history] == [1, 2, 4, 5, 6, 7]
        assert {sites.trained[name, 3] for name in "ab"} == {2}


def test_going_back_drops_a_loops_local_steps(tmp_path: Path) -> None:
    """If a run goes back, a DiLoCo site in the middle of a round takes the earlier version without adding its local
    steps.
    """
    # Each step adds 1 to the parameters, and a round has 2 steps: version n is 2n. After version 1 (2.0), the run goes
    # back from version 3 while the site trains; four rounds later, it is 10.0.
    settings = PLAIN_DILOCO | {"H": 2, "disk.keep_versions": 9}
    with World(tmp_path, ramp(), "a", rounds=5, **settings) as world:
        model = ramp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with world.diloco(model, optimizer) as loop:
            for step in range(30):
                if loop.finished:
                    break
                if step == 7:
                    roll_back(world, 1)
                model.weight.grad = -torch.ones(1, 4)
                optimizer.step()
        world.server.run()
        assert torch.equal(world.result["weight"], torch.full((1, 4), 10.0))
        assert [row.version for row in world.status.history] == [1, 4, 5, 6, 7]
        assert "went back to version 1 without this worker; its 2 local steps since version 3 are lost" in world.text


def ramp() -> nn.Linear:
    """A model of four zeros."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model
