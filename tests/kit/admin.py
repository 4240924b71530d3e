"""Requests of a run's admin, with the token in the state directory."""

from __future__ import annotations

from contextlib import closing

from pydantic import BaseModel

from atoll.cli.stored_status import admin_token
from atoll.protocol import routes
from atoll.protocol.admin_messages import Controlled, PauseRun, RollBack, StopRun
from atoll.testing.run import wait_until
from atoll.transport.http_client import http_to
from kit.world import World


def asked(world: World, path: str, message: BaseModel) -> Controlled:
    """What the server of a world answers to its admin."""
    with closing(http_to(world.url, token=admin_token(world.folder / "state"))) as http:
        return http.post(path, message, Controlled)


def pause(world: World) -> Controlled:
    return asked(world, routes.PAUSE, PauseRun(paused=True))


def resume(world: World) -> Controlled:
    return asked(world, routes.PAUSE, PauseRun(paused=False))


def stop(world: World, *, now: bool = False) -> Controlled:
    return asked(world, routes.STOP, StopRun(now=now))


def roll_back(world: World, version: int) -> Controlled:
    """Go back to a version, and wait until the server serves the run again."""
    answer = asked(world, routes.ROLLBACK, RollBack(version=version))
    wait_until(lambda: world.status.epoch > answer.epoch, "the server to begin again")
    return answer
