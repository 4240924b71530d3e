"""A server whose sites have credentials of their own, and requests with any of these."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

import atoll
from atoll.protocol import routes
from atoll.protocol.invitation import Invitation
from atoll.transport.authority_files import authority_file, stored_authority
from atoll.transport.certificates import new_key, signing_request, site_certificate
from kit.servers import plain_server

QUIET = {"network.heartbeat_interval_s": 0.0, "network.heartbeat_timeout_s": 0.0}
"""A server that waits for no heartbeat, so that nothing changes while a test does nothing."""


class Trusted:
    """A started server, its files, and what sites send to it.

    Attributes:
        certificates: site → file with its key and certificate.
        tokens: site → its token, at a server without TLS.
    """

    def __init__(self, folder: Path, server: atoll.Server) -> None:
        self.folder, self.server, self.state = folder, server, folder / "state"
        self.admin = self.token_in("admin")
        self.certificates: dict[str, Path] = {}
        self.tokens: dict[str, str] = {}

    def token_in(self, kind: str) -> str:
        return (self.state / f"{kind}.token").read_text().strip()

    @property
    def store(self) -> Any:
        return self.server._require_served().run.store

    def set_clock(self, ahead_s: float) -> None:
        """Let the server's clock for credentials be ahead."""
        import time

        self.server._gate.clock = self.store.identities.clock = lambda: time.time() + ahead_s

    # -- requests

    def context(self, certificate: Path | None = None) -> ssl.SSLContext:
        """TLS of a client that trusts the run's authority."""
        context = ssl.create_default_context(cafile=str(authority_file(self.state)))
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context

    def connect(self, site: str = "", certificate: Path | None = None) -> http.client.HTTPConnection:
        """A connection with the site's certificate, or this one; with neither, without one."""
        if not self.server.url.startswith("https"):
            return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        context = self.context(certificate or self.certificates.get(site))
        return http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=20, context=context)

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        site: str = "",
        certificate: Path | None = None,
        token: str = "",
        over: http.client.HTTPConnection | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and body of the answer: JSON as values, else text. `headers` have `_` for `-`."""
        connection = over or self.connect(site, certificate)
        token = token or ("" if certificate else self.tokens.get(site, ""))
        shown = {"Authorization": f"Bearer {token}" if token else "", "Content-Type": "application/json"}
        shown |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {name: value for name, value in shown.items() if value})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            if over is None:
                connection.close()
        is_json = "json" in answer.headers.get("Content-Type", "")
        return answer.status, json.loads(text) if is_json else text.decode(errors="replace")

    def ok(self, *given: Any, **options: Any) -> Any:
        """The body of an answer that is no error."""
        status, body = self.send(*given, **options)
        assert status < 300, body
        return body

    # -- life of a credential

    def invite(self, site: str, **more: Any) -> Invitation:
        body = self.ok("POST", routes.INVITE, {"site": site, **more}, token=self.admin)
        return Invitation.parse(body["invitation"])

    def use(self, invitation: Invitation, key: bytes | None = None) -> tuple[int, Any]:
        """Use an invitation, for a certificate if a key is given."""
        request = "" if key is None else signing_request(key, invitation.site).decode()
        return self.send("POST", routes.ENROL, {"secret": invitation.secret, "request": request})

    def enrol(self, *sites: str, **more: Any) -> None:
        """Invite these sites, and let each enrol."""
        for site in sites:
            key = new_key()
            status, body = self.use(self.invite(site, **more), key)
            assert status == 200, body
            self.keep(site, key, body)

    def keep(self, site: str, key: bytes, credential: dict[str, Any]) -> None:
        """Let a site have this credential from now on."""
        if credential["kind"] == "token":
            self.tokens[site] = credential["token"]
        else:
            self.certificates[site] = self.write(site, key, credential["certificate"].encode())

    def write(self, name: str, key: bytes, certificate: bytes) -> Path:
        path = self.folder / f"{name}-{len(list(self.folder.iterdir()))}.pem"
        path.touch(mode=0o600)
        path.write_bytes(key + certificate)
        return path

    def signed(self, site: str, lasts: timedelta = timedelta(days=1)) -> Path:
        """A certificate of the run's authority that the server does not know, or one that has expired."""
        authority, key = stored_authority(self.state), new_key()
        assert authority is not None
        return self.write(site, key, site_certificate(authority, signing_request(key, site).decode(), site, lasts)[0])

    def revoke(self, site: str) -> None:
        self.ok("POST", routes.REVOKE, {"site": site}, token=self.admin)

    def sites(self) -> dict[str, str]:
        """Site → state."""
        found = self.ok("GET", routes.SITES, token=self.admin)["sites"]
        return {each["site"]: each["state"] for each in found}

    def join(self, site: str) -> str:
        """The lease of a site that joins with its credential."""
        body = {"protocol": routes.PROTOCOL, "site": site}
        return str(self.ok("POST", routes.WORKERS, body, site=site)["lease"])

    # -- look

    def dump(self) -> dict[str, list[Any]]:
        """All rows of all tables of the journal, but the events that come with time: warnings."""
        rows = self.store.journal.rows
        tables = [name for (name,) in rows("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        found = {name: rows(f"SELECT * FROM {name}") for name in tables}
        return found | {"events": [row for row in found["events"] if '"what":"warn' not in row[2]]}


@contextmanager
def trusted(folder: Path, model: nn.Module | None = None, **settings: Any) -> Iterator[Trusted]:
    """A started server whose sites need credentials of their own, with TLS unless `trust.address` is set."""
    server = plain_server(folder, model or nn.Linear(2, 1), **({"trust.required": True} | QUIET | settings)).start()
    try:
        yield Trusted(folder, server)
    finally:
        server.stop()
