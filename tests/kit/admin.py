"""Requests of a run's admin, with the token in the state directory."""

from __future__ import annotations

from contextlib import closing

from pydantic import BaseModel

import atoll
from atoll.cli.stored_status import admin_token
from atoll.protocol import routes
from atoll.protocol.admin_messages import Controlled, PauseRun, RollBack, StopRun
from atoll.testing.run import wait_until
from atoll.transport.http_client import http_to
from kit.world import World


def asked(run: World | atoll.Server, path: str, message: BaseModel) -> Controlled:
    """What the server of a run answers to its admin."""
    server = run.server if isinstance(run, World) else run
    with closing(http_to(server.url, token=admin_token(server.settings.disk.state_dir))) as http:
        return http.post(path, message, Controlled)


def pause(run: World | atoll.Server) -> Controlled:
    return asked(run, routes.PAUSE, PauseRun(paused=True))


def resume(run: World | atoll.Server) -> Controlled:
    return asked(run, routes.PAUSE, PauseRun(paused=False))


def stop(run: World | atoll.Server, *, now: bool = False) -> Controlled:
    return asked(run, routes.STOP, StopRun(now=now))


def roll_back(world: World, version: int) -> Controlled:
    """Go back to a version, and wait until the server serves the run again."""
    answer = asked(world, routes.ROLLBACK, RollBack(version=version))
    wait_until(lambda: world.status.epoch > answer.epoch, "the server to begin again")
    return answer
