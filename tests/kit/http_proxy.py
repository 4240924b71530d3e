"""A forward proxy, and a gateway that serves a server under a path."""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import socket
import threading
from types import TracebackType


class HttpProxy:
    """An HTTP proxy on a free port of 127.0.0.1, which alone knows names such as `fl.example`: all lead to one port.

    It passes on requests with a whole address, and connections (CONNECT).

    Args:
        port: the port of 127.0.0.1 to which everything is passed on.
        login: `user:password` that each request must have; empty: none.
        refuses: HTTP status with which it refuses everything; 0: it refuses nothing.
        prefix: makes it a gateway: the path under which it serves the server, and nothing else.
        redirects: the address to which it redirects everything; empty: it redirects nothing.

    Attributes:
        lines: the first lines of all requests.
        seen: the headers of all requests; of a tunnel, only those of CONNECT.
    """

    def __init__(
        self, port: int, *, login: str = "", refuses: int = 0, prefix: str | None = None, redirects: str = ""
    ) -> None:
        self.target, self.login, self.refuses = port, login, refuses
        self.prefix, self.redirects = prefix, redirects
        self.lines: list[str] = []
        self.seen: list[dict[str, str]] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HttpProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: HttpProxy

    def log_message(self, *_: object) -> None:
        pass

    def _is_refused(self) -> bool:
        """Note the request; answer it if it is not to be passed on."""
        proxy, length = self.proxy, int(self.headers.get("Content-Length", 0))
        proxy.lines.append(self.requestline)
        proxy.seen.append({name.lower(): value for name, value in self.headers.items()})
        self._body, status, more = self.rfile.read(length), proxy.refuses, {}
        if proxy.login:
            expected = f"Basic {base64.b64encode(proxy.login.encode()).decode()}"
            if self.headers.get("Proxy-Authorization") != expected:
                status = 407
        if proxy.prefix is not None and not self.path.startswith(f"{proxy.prefix}/"):
            status = 404
        if proxy.redirects:
            status, more = 308, {"Location": proxy.redirects}
        if status:
            self._answer(status, b"<html>of the proxy</html>", more)
        return bool(status)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _pass_on(self) -> None:
        if self._is_refused():
            return
        if self.proxy.prefix is not None:
            path, headers = self.path.removeprefix(self.proxy.prefix), {"Host": f"127.0.0.1:{self.proxy.target}"}
        else:
            path, headers = "/" + self.path.split("/", 3)[3], {"Host": self.headers["Host"]}
        own = ("host", "connection", "proxy-authorization", "content-length")
        headers |= {name: value for name, value in self.headers.items() if name.lower() not in own}
        server = http.client.HTTPConnection("127.0.0.1", self.proxy.target, timeout=60)
        try:
            server.request(self.command, path, self._body or None, headers)
            answer = server.getresponse()
            body = answer.read()
        except OSError:
            self._answer(502, b"<html>of the proxy</html>", {})
            return
        finally:
            server.close()
        hop = ("connection", "transfer-encoding", "content-length")
        self._answer(
            answer.status, body, {name: value for name, value in answer.getheaders() if name.lower() not in hop}
        )

    do_GET = do_POST = do_PUT = do_DELETE = _pass_on  # noqa: N815 (names of http.server)

    def do_CONNECT(self) -> None:
        self.close_connection = True
        if self._is_refused():
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.proxy.target))
        except OSError:
            self._answer(502, b"<html>of the proxy</html>", {})
            return
        with server:
            self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_pump, args=(server, self.connection), daemon=True)
            back.start()
            _pump(self.connection, server)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(2**16):
            sink.sendall(piece)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
