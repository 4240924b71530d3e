"""No name that a worker receives is imported, opened as a path or run; for answers see `test_hostile_server`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.hostile_answers import FORGED, NAMES
from harness.hostile_names import WARM, changed_plans
from harness.processes import Nursery
from kit import ForkedSite
from kit.peers import Connection, Peer, Request
from kit.requests import get
from kit.world import World

from atoll.config import FIELDS
from atoll.protocol import routes
from atoll.registry import REGISTRABLE

SITE = """
from pathlib import Path
from harness.hostile_names import site
site({which!r}, {url!r}, {count}, Path({folder!r}))
"""


def tried(nursery: Nursery, folder: Path, which: str, url: str = "", count: int = 0) -> int:
    """Let a worker read names, and require that nothing came of it; how many trials there were."""
    script = SITE.format(which=which, url=url, count=count, folder=str(folder))
    # a damaged answer costs one more request, and no pause
    process = ForkedSite(nursery, folder, url, "a", script).start(ATOLL_GIVE_UP_S="0.01")
    assert process.wait(110) == 0, process.output()
    said = process.output()
    told = json.loads(said.splitlines()[-1])
    assert told["seen"] == []
    assert told["failed"] == []
    assert not (folder / "outside").exists()
    assert not re.search(f"^{FORGED}", said, re.MULTILINE)
    return int(told["tried"])


@pytest.mark.covers("X8")
@pytest.mark.slow
@pytest.mark.parametrize(("which", "every", "begins"), [("plans", 1, routes.SWARM_PLAN), ("joins", 8, routes.RUN)])
def test_names_in_a_swarms_plan_are_never_imported(
    tmp_path: Path, nursery: Nursery, which: str, every: int, begins: str
) -> None:
    """If a server puts the name of a module, file or command into any setting of a swarm's plan, a worker neither
    imports, opens nor runs it.
    """
    # Each value of the plan is replaced by each name. A worker that joins gets some of these plans and cannot join with
    # any.
    with World(tmp_path / "server", {"w": torch.zeros(3)}, "abc", rounds=1, **{"swarm.enabled": True}) as world:
        honest = {path: get(world.url, path)[1] for path in (routes.RUN, routes.SCHEMA, routes.SWARM_PLAN)}
    plan = honest[routes.SWARM_PLAN]
    changed = [*changed_plans(plan)][::every]
    plans = [plan, *changed[: WARM - 1], *changed]
    todo, now, told = iter(plans), dict[str, Any](), set[int]()

    def answer(connection: Connection, request: Request) -> None:
        if "content-length" in request.headers:
            connection.body(request)
        if request.path == begins:
            now["plan"] = next(todo)
        if request.path == routes.SWARM_PLAN:
            told.add(id(now["plan"]))
        said = now["plan"] if request.path == routes.SWARM_PLAN else honest.get(request.path)
        connection.answer(200 if said else 404, json.dumps(said or {}).encode())

    with Peer.answering(answer) as liar:
        assert tried(nursery, tmp_path, which, liar.url, len(plans)) == len(plans)
    assert len(told) == 1 + len(changed)
    assert len(changed) * every >= max(500, 6 * len(FIELDS))


@pytest.mark.covers("X8")
def test_looking_up_a_received_name_runs_nothing(tmp_path: Path, nursery: Nursery) -> None:
    """Looking up a received name in Atoll's registry imports, opens and runs nothing."""
    assert tried(nursery, tmp_path, "lookups") == 2 * len(NAMES) * (len(REGISTRABLE) + 7)
