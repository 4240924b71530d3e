"""nginx, as the distribution has it, in front of a server: with the configuration that the documents give."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.testing.run import wait_until

NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
needs_nginx = pytest.mark.skipif(NGINX is None, reason="the distribution's package nginx-light is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
_AROUND = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ }}
http {{
    log_format asked '$request_method $uri $status $request_length';
    access_log {folder}/access.log asked;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {server}
}}
"""


def documented() -> str:
    """The configuration in docs/deployment.md."""
    found = re.search(r"^```nginx\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@contextmanager
def nginx(folder: Path, port: int, server_port: int, **changes: str) -> Iterator[Path]:
    """Serve `localhost:port` with `cert.pem` and `key.pem` of this folder, in front of a server. Yields the access log.

    Args:
        changes: directive → its value in place of the documented one.
    """
    assert NGINX is not None
    text = documented()
    changes = {
        "listen": f"127.0.0.1:{port} ssl",
        "server_name": "localhost",
        "ssl_certificate": f"{folder}/cert.pem",
        "ssl_certificate_key": f"{folder}/key.pem",
        "proxy_pass": f"http://127.0.0.1:{server_port}/",
    } | changes
    for name, value in changes.items():
        text, count = re.subn(rf"(\n\s+{name} )[^;]+;", rf"\g<1>{value};", text)
        assert count == 1, name
    (folder / "nginx.conf").write_text(_AROUND.format(folder=folder, server=text))
    argv = [NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", str(folder / "error.log")]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: _answers(port) or process.poll() is not None, "nginx")
        if process.poll() is not None and process.stderr is not None:
            raise AssertionError(process.stderr.read().decode())
        yield folder / "access.log"
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
