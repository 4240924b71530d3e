"""An attempt at a part that was given up arrives after its repetition was recorded: the server takes neither for good.

The last sender of a part has it, so the server forgets what was recorded. The worker then sends that part once more.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.processes import wait_until
from kit.by_hand import formed, put_part
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import Conflict
from atoll.protocol import messages, routes
from atoll.protocol.values import Accepted
from atoll.worker.exchange.participation import Participation, take_part
from atoll.worker.exchange.upload_update import MAX_CONFLICTS


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, nn.Linear(300, 100), sites=1, part_bytes=2**16) as server:
        yield server


class Late:
    """Half of part 1, which arrives just before each of the first `times` words that the update is complete."""

    def __init__(self, place: Participation, ticket: int, times: int) -> None:
        self.completions = 0
        self._place, self._ticket, self._times = place, ticket, times
        self._sockets: list[socket.socket] = []
        self._post = place.session.http.post
        place.session.http.post = self._posted  # type: ignore[method-assign]

    def _posted(self, path: str, *args: Any, **more: Any) -> Any:
        if path == routes.COMPLETE.format(ticket=self._ticket):
            self.completions += 1
            if self.completions <= self._times:
                self._arrive()
        return self._post(path, *args, **more)

    def _arrive(self) -> None:
        http, part = self._place.session.http, self._place.exchange.outbox.layout.parts[1]
        late = put_part(http.port, http.lease, self._ticket, 1, part.nbytes + 32, bytes(part.nbytes // 2))
        self._sockets.append(late)
        path = routes.TICKET.format(ticket=self._ticket)
        wait_until(lambda: 1 not in http.get(path, messages.TicketState).parts, "the loss of part 1")

    def close(self) -> None:
        for late in self._sockets:
            late.close()


@pytest.mark.covers("F14")
@pytest.mark.parametrize("times", [1, MAX_CONFLICTS])
def test_a_part_that_a_late_attempt_undid_is_sent_again_alone(server: atoll.Server, tmp_path: Path, times: int) -> None:
    place = take_part(server.url, "a", folder=tmp_path / "w")
    late = Late(place, formed(place).id, times)
    assert isinstance(place.exchange.deliver(), Accepted)
    assert late.completions == times + 1
    layout = place.exchange.outbox.layout
    assert place.session.counters.bytes_up == layout.nbytes + times * layout.parts[1].nbytes
    place.leave()
    late.close()


def test_a_conflict_that_lasts_is_raised(server: atoll.Server, tmp_path: Path) -> None:
    place = take_part(server.url, "a", folder=tmp_path / "w")
    late = Late(place, formed(place).id, MAX_CONFLICTS + 1)
    with pytest.raises(Conflict, match="lacks 1 of 2 parts"):
        place.exchange.deliver()
    assert late.completions == MAX_CONFLICTS + 1
    place.leave()
    late.close()
