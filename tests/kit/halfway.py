"""Copies of a run's folders at two moments of round 2: what servers and sites find that are started again on them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.processes import free_port, wait_until

from kit.digests import exported, tensors_digest
from kit.folders import copy_folder
from kit.servers import serve
from kit.sites import FederatedSites, Gate


@dataclass(frozen=True)
class Halfway:
    """A run of three rounds with the sites a and b: copies of its folder, with `state` and `workers`.

    Attributes:
        earlier: both sites train in round 2.
        later: the update of a is accepted, b still trains. The server was not stopped: the journal's end is in its log.
        digest: of the model that the run came to.
        port: of the server; one that is started on a copy has it again.
        settings: of the run.
    """

    earlier: Path
    later: Path
    digest: str
    port: int
    settings: dict[str, Any]

    def go_on(self, folder: Path, **changed: Any) -> FederatedSites:
        """Start server and sites on a copy, and let them come to the end."""
        with serve(folder, **{"network.port": self.port}, **(self.settings | changed)) as server:
            sites = FederatedSites(server.url, folder)
            sites.join()
            server.run()  # to its own end: exports are written behind the rounds
        return sites


def halfway_run(home: Path, **settings: Any) -> Halfway:
    """Make the copies in `home`."""
    port, folder = free_port(), home / "run"
    gates = {site: Gate(2, site) for site in ("a", "b")}

    def during(site: str, number: int) -> None:
        gates[site](site, number)

    with serve(folder, **{"network.port": port}, **settings) as server:
        sites = FederatedSites(server.url, folder, during=during)
        for gate in gates.values():
            gate.wait()
        earlier = copy_folder(folder, home / "earlier")
        gates["a"].open()
        wait_until(lambda: "accepted" in ticket_states(folder).values(), "an accepted update of a")
        wait_until(lambda: '"sent": true' in _outbox_note(folder, "a"), "a knows that it is")
        later = copy_folder(folder, home / "later")
        gates["b"].open()
        sites.join()
    return Halfway(earlier, later, tensors_digest(exported(folder)), port, settings)


def ticket_states(folder: Path) -> dict[int, str]:
    """Ticket → its state, as the journal has it."""
    return dict(ask_journal(folder, "SELECT ticket, state FROM tickets ORDER BY ticket"))


def ask_journal(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    """Rows of the journal in `folder`/state."""
    path = folder / "state" / "journal.sqlite"
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as journal:
        return journal.execute(sql).fetchall()


def _outbox_note(folder: Path, site: str) -> str:
    (path,) = (folder / "workers" / site).glob("*/outbox.json")
    return path.read_text()
