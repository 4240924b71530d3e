"""Who waits for a round or a task when the server ends is told so: it was waited for, twice two seconds, before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness.processes import wait_until
from kit.by_hand import formed
from kit.client import Client
from kit.requests import joined
from kit.servers import plain_server

import atoll
from atoll.errors import Busy, RunFailed
from atoll.protocol import messages, routes, task_messages
from atoll.server.tasks.workflow_controller import Controller
from atoll.transport.http_client import Http
from atoll.worker.exchange.participation import Participation, take_part

START = {"w": torch.ones(4)}


def waiting_when(
    server: atoll.Server, ask: Callable[[], object], end: Callable[[], object], waiting: int = 1
) -> BaseException | None:
    """What a request is answered that waits when the server ends.

    Args:
        waiting: how many wait then, with it.
    """
    run = server._run
    assert run is not None
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask)
        wait_until(lambda: len(run._changed._waiting) == waiting or answer.done(), "that the request waits")
        assert not answer.done()
        end()
        return answer.exception(60)


def ticket_of(place: Participation) -> messages.TicketReply:
    request = messages.TicketRequest(wait_s=routes.LONG_POLL_S)
    return place.session.http.post(routes.TICKETS, request, messages.TicketReply, timeout_s=60.0)


def test_ends_a_wait_for_a_round(tmp_path: Path) -> None:
    server = plain_server(tmp_path, START, **{"rounds.sites": 2}).start()
    place = take_part(server.url, "a", folder=tmp_path / "w")
    error = waiting_when(server, lambda: ticket_of(place), server.stop)
    assert isinstance(error, Busy)
    assert "The server is ending" in str(error)
    place.leave()


def test_a_site_that_has_submitted_learns_once_which_sites_are_awaited(tmp_path: Path) -> None:
    with plain_server(tmp_path, START, **{"rounds.sites": 2}) as server:
        a, b = (take_part(server.url, site, folder=tmp_path / "w") for site in "ab")
        formed(a)
        a.exchange.deliver()
        assert a.exchange.ask(wait_s=0.0).reason == "its update is in; the round waits for b"
        a.leave()
        b.leave()


def test_ends_a_wait_for_a_task(tmp_path: Path) -> None:
    def workflow(controller: Controller) -> None:
        controller.sites(at_least=2)

    server = plain_server(tmp_path, START, workflow=workflow).start()
    http = Http(server.url)
    http.lease = joined(server.url, "a")
    request = task_messages.TaskRequest(wait_s=routes.LONG_POLL_S)

    def ask() -> object:
        return http.post(routes.TASKS, request, task_messages.TaskReply, timeout_s=60.0)

    error = waiting_when(server, ask, server.stop, waiting=2)  # the workflow, too
    assert isinstance(error, Busy)
    http.close()


def test_ends_a_wait_while_an_aggregator_fails(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def bad(updates):\n    raise ValueError('no such luck')\n")
    server = plain_server(
        tmp_path, START, **{"rounds.sites": 2, "aggregation.aggregator.path": f"{tmp_path / 'mine.py'}:bad"}
    ).start()
    first = take_part(server.url, "first", folder=tmp_path / "w")
    client = Client(server.url, site="last", folder=tmp_path / "w").register()
    assert client.next_round() == 1
    state = client.pull()
    formed(first)
    first.exchange.deliver()
    error = waiting_when(server, lambda: ticket_of(first), lambda: client.submit(state))
    assert isinstance(error, Busy)
    with pytest.raises(RunFailed, match="no such luck"):
        server.run()
    first.leave()
    client.close()
