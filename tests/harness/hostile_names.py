"""Names of code, paths and addresses in what a worker reads besides answers of a run: a swarm's plan, and single names.

The worker watches itself, so it needs a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import atoll
from atoll.config import FIELDS
from atoll.errors import AtollError, ConfigError, VersionSkew
from atoll.protocol import routes
from atoll.protocol.messages import Message, SchemaMessage
from atoll.protocol.swarm_messages import SwarmPlan
from atoll.registry import REGISTRABLE, ReceivedName, resolve_received
from atoll.tensors.payload import unpack
from atoll.transport.http_client import Http
from atoll.worker.peer.agent import plan_of
from harness.hostile_answers import NAMES, places, put
from harness.hostile_site import Watch

Trial = Callable[[], object]
WARM = 20
"""So many trials only import what any of them needs. All of these but the first, which is right, come again."""


def changed_plans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a plan with names: each key of the settings is a further key, twice, and each place has each name."""
    for key, name in zip((*FIELDS, *FIELDS), itertools.cycle(NAMES), strict=False):
        group, _, setting = key.partition(".")
        code = {"path": name, "cmd": "touch outside"}
        yield plan | {group: {setting: name}, "swarm": {"enabled": False}}
        yield plan | {group: {setting: code}}
        yield {"settings": {group: {setting: code}, "swarm": {"enabled": False}}}
    for place, name in itertools.product(places(SwarmPlan), NAMES):
        yield put(plan, place.keys, ("is", name), SwarmPlan)


def read_plans(url: str, count: int, _: Path) -> Iterator[Trial]:
    """Yield what a worker of a swarm makes of each plan that the server has."""
    http = Http(url)
    split = http.fetch(routes.SCHEMA, SchemaMessage.split_in, "SchemaMessage")
    for _ in range(count):
        yield lambda: plan_of(http.get(routes.SWARM_PLAN, SwarmPlan), split)
    http.close()


def join_swarms(url: str, count: int, folder: Path) -> Iterator[Trial]:
    """Yield what a worker does that would join the swarm if it could use the plan."""

    def join() -> None:
        """Raise ValueError if the plan is not refused."""
        try:
            atoll.join(url, site="a", folder=folder / "sites", swarm=True).leave()
        except (ConfigError, VersionSkew):
            return
        except AtollError as error:
            raise ValueError("The plan was used.") from error
        raise ValueError("The worker joined.")

    return itertools.repeat(join, count)


class _Named(Message):
    name: ReceivedName


def look_up(*_: object) -> Iterator[Trial]:
    """Yield what reads a name alone: each kind of registered object, and each text in the skeleton of a payload."""

    def resolve(kind: str, name: str) -> None:
        with contextlib.suppress(ValidationError):
            resolve_received(kind, _Named.model_validate_json(json.dumps({"name": name})).name)

    for name in (*NAMES, *NAMES):
        yield from (partial(resolve, kind, name) for kind in REGISTRABLE)
        for node in (
            {"$": name},
            {"$": "registered", "type": name, "as": None},
            {"$": "ref", "text": name},
            {"$": "bytes", "base64": name},
            {"$": "float", "value": name},
            {"$": "dict", "items": [[name, name]]},
            {name: name},
        ):
            yield partial(unpack, node, [])


TRIALS = {"plans": read_plans, "joins": join_swarms, "lookups": look_up}


def site(which: str, url: str, count: int, folder: Path) -> None:
    """Try everything, and print what the watch has seen, and the errors that are not of Atoll, as JSON."""
    watch, tried, failed = Watch(), 0, list[str]()
    watch.learn()
    for tried, attempt in enumerate(TRIALS[which](url, count, folder), 1):
        try:
            attempt()
        except AtollError:
            pass
        except Exception as error:
            failed += [repr(error)] if tried > WARM else []
        if tried == WARM:
            watch.learn()
            watch.begin(folder / "sites", int(url.rpartition(":")[2] or 0))
    watch.end()
    print("\n" + json.dumps({"tried": tried, "seen": watch.seen, "failed": failed}), flush=True)
