"""Nothing that a site receives is imported, opened as a path or run: every place of every answer is tried.

A proxy changes one value of one answer of a server, and the site watches what it does itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit import ForkedSite
from kit.peers import Connection, Peer, Request
from kit.planting import planting
from kit.requests import get
from kit.servers import plain_server
from kit.watched_site import PLANTED, RAN, TEXTS, WARMS, changed_plans, hostile
from kit.workflows import workflow_server

from atoll.config import FIELDS
from atoll.protocol import routes
from atoll.registry import REGISTRABLE

SITE = """
from pathlib import Path
from kit.watched_site import site
site({which!r}, {url!r}, Path({folder!r}))
"""


def tried(nursery: Nursery, folder: Path, which: str, url: str = "", **environment: str) -> int:
    """Number of texts that a site has read without an import, an opened file or a process."""
    (folder / "home").mkdir()
    for name in ("planted.py", "planted.safetensors"):
        (folder / "home" / name).write_text(PLANTED)
    environment |= {"ATOLL_GIVE_UP_S": "0.01"}  # a damaged answer costs one more request, and no pause
    script = SITE.format(which=which, url=url, folder=str(folder))
    process = ForkedSite(nursery, folder / "home", url, "a", script).start(**environment)
    assert process.wait(110) == 0, process.output()
    said = process.output()
    told = json.loads(said.splitlines()[-1])
    print(f"{which}: {told['count']} received texts, {len(told['seen'])} imports, opened files and processes")
    assert told["seen"] == []
    assert told["failed"] == []
    assert not (folder / "home" / RAN).exists()
    assert not re.search("^forged", said, re.MULTILINE)
    count: int = told["count"]
    return count


@pytest.mark.covers("X8")
@pytest.mark.slow
def test_no_text_of_an_answer_is_imported_opened_or_run(tmp_path: Path, nursery: Nursery) -> None:
    """From the description of the run to the receipt of an update."""
    with plain_server(tmp_path, {"w": torch.zeros(3)}, sites=1, rounds=0) as server, planting(server) as proxy:
        count = tried(nursery, tmp_path, "rounds", proxy.url)
        assert count >= 150
        assert proxy.count >= count


@pytest.mark.covers("X8")
@pytest.mark.slow
def test_no_text_of_a_task_is_imported_opened_or_run(tmp_path: Path, nursery: Nursery) -> None:
    """A site answers a task. The task's tensors are an object at the server."""

    def flow(controller: Any) -> None:
        while True:
            controller.broadcast("ask", {"w": torch.zeros(30_000), "note": ["text"]}, sites=["a"])

    with workflow_server(tmp_path, flow) as server, planting(server) as proxy:
        assert tried(nursery, tmp_path, "tasks", proxy.url) >= 35


@pytest.mark.covers("X8")
@pytest.mark.slow
def test_no_setting_in_a_plan_is_imported_opened_or_run(tmp_path: Path, nursery: Nursery) -> None:
    """Each key of the settings is a key of the plan of a swarm, and each value of the plan is each text."""
    swarm = {"swarm.enabled": True}
    with plain_server(tmp_path / "server", {"w": torch.zeros(3)}, sites=3, rounds=1, **swarm) as server:
        honest = {path: get(server.url, path)[1] for path in (routes.SCHEMA, routes.SWARM_PLAN)}
    texts = hostile(tmp_path / "home")
    plan = honest[routes.SWARM_PLAN]
    plans = [(WARMS, plan), *changed_plans(plan, [WARMS]), *changed_plans(plan, texts)]
    (tmp_path / TEXTS).write_text(json.dumps([text for text, _ in plans]))
    todo = iter([plan for _, plan in plans])

    def answer(connection: Connection, request: Request) -> None:
        told = honest[routes.SCHEMA] if request.path == routes.SCHEMA else next(todo)
        connection.answer(200, json.dumps(told).encode())

    with Peer.answering(answer) as liar:
        count = tried(nursery, tmp_path, "plans", liar.url)
    assert len(liar.requests) == 1 + len(plans)
    assert count >= max(500, 6 * len(FIELDS))


@pytest.mark.covers("X8")
def test_no_name_is_imported_opened_or_run_when_it_is_looked_up(tmp_path: Path, nursery: Nursery) -> None:
    assert tried(nursery, tmp_path, "lookups") == 11 * (len(REGISTRABLE) + 7)
