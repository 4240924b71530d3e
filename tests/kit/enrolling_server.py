"""A small HTTPS server that enrols sites and renews their certificates, and notes what certificate each request has.

Unlike `atoll server`, it can be told to answer wrongly, and its certificates may last seconds or have ended long ago.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from atoll.errors import AuthError
from atoll.protocol import routes
from atoll.protocol.invitation import Invitation
from atoll.transport.certificates import (
    Keyed,
    fingerprint,
    identity_in,
    new_authority,
    server_certificate,
    site_certificate,
)

SECRET = "s" * 43


class EnrollingServer:
    """Enrols sites on a free port of 127.0.0.1.

    Args:
        folder: folder for its certificate.
        authority: signs its certificate and those of sites; None: a new one.
        port: 0: any free port.
        lasts: how long the certificates of sites are valid; negative: they have ended.
        renew_after_s: what it tells sites.

    Attributes:
        seen: (path, site of the certificate or empty, its serial, Authorization header) of each request.
        answers: path → fields that replace those of its answers.
        extra: certificates that it sends behind its authority's.
        date: the Date header of its answers; empty: the time.
        bytes_seen: bodies of all requests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        authority: Keyed | None = None,
        port: int = 0,
        lasts: timedelta = timedelta(days=7),
        renew_after_s: float = 0.0,
    ) -> None:
        self.authority = authority or new_authority("a run")
        self.lasts, self.renew_after_s = lasts, renew_after_s
        self.seen: list[tuple[str, str, str, str]] = []
        self.answers: dict[str, dict[str, Any]] = {}
        self.extra, self.date, self.bytes_seen = b"", "", b""
        self.invited: dict[str, str] = {SECRET: "hospital-a"}
        self.renewed = threading.Event()
        own = server_certificate(self.authority, ["127.0.0.1", "localhost"])
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("server.pem", own.certificate),
            ("server.key", own.key),
            ("ca.pem", self.authority.certificate),
        ):
            (folder / name).write_bytes(text)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version, context.verify_mode = ssl.TLSVersion.TLSv1_3, ssl.CERT_OPTIONAL
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        context.load_verify_locations(folder / "ca.pem")
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", port), type("Handler", (_Handler,), {"kit": self, "context": context})
        )
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def invitation(self, site: str = "hospital-a", secret: str = SECRET, *, of: bytes | None = None) -> Invitation:
        """An invitation with the fingerprint of this server's authority, or of another one."""
        return Invitation(self.url, site, secret, fingerprint(of or self.authority.certificate))

    def __enter__(self) -> EnrollingServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def credential(self, request: str, site: str) -> dict[str, Any]:
        if not request:
            return {"site": site, "kind": "token", "token": "t" * 43}
        certificate, _ = site_certificate(self.authority, request, site, self.lasts)
        return {
            "site": site,
            "kind": "certificate",
            "certificate": certificate.decode(),
            "authority": self.authority.certificate.decode(),
            "renew_after_s": self.renew_after_s,
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    kit: EnrollingServer
    context: ssl.SSLContext

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        with contextlib.suppress(OSError):
            self.request = self.context.wrap_socket(self.request, server_side=True)
        super().setup()

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return self.kit.date or super().date_time_string(timestamp)

    def _answer(self) -> None:
        kit, path = self.kit, self.path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kit.bytes_seen += body
        found = identity_in(self.request.getpeercert() or {})
        site, serial = (found.site, found.serial) if found else ("", "")
        kit.seen.append((path, site, serial, self.headers.get("Authorization", "")))
        message = json.loads(body) if body else {}
        if path == routes.AUTHORITY:
            return self._send(200, kit.authority.certificate + kit.extra)
        if path == routes.ENROL and message["secret"] in kit.invited:
            site = kit.invited.pop(message["secret"])
        elif path != routes.RENEW or not site:
            problem = {"code": AuthError.code, "message": "The request has no valid credential."}
            return self._send(401, json.dumps(problem).encode())
        answer = kit.credential(message.get("request", ""), site) | kit.answers.get(path, {})
        self._send(200, json.dumps(answer).encode())
        if path == routes.RENEW:
            kit.renewed.set()
        return None

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()
