"""The files of the page that shows a run: the same for each run, so strangers may load them; they hold no data."""

from __future__ import annotations

import functools
import gzip
from importlib.resources import files

from aiohttp import web

from atoll.transport.serve_range import problem

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers of each file: only this server's scripts run, and the page is in no frame of another."""


@functools.cache
def page_files() -> dict[str, bytes]:
    """Return the files of the page: name → content."""
    folder = files("atoll.server.http") / "page"
    found = {each.name: each.read_bytes() for each in folder.iterdir()}
    found |= {name.removesuffix(".gz"): gzip.decompress(each) for name, each in found.items() if name.endswith(".gz")}
    return {name: content for name, content in found.items() if name.rpartition(".")[2] in TYPES}


async def get_page() -> web.Response:
    """Return the page itself."""
    return await get_page_file("index.html")


async def get_page_file(file: str) -> web.Response:
    """Return a script or style of the page. The name is looked up among the loaded files; no path is opened."""
    content = page_files().get(file)
    if content is None:
        return problem("not_found", f"The page has no file {file[:100]!r}.", "Open / in a browser.")
    kind = TYPES[file.rpartition(".")[2]]
    response = web.Response(body=content, content_type=kind, charset="utf-8", headers=HEADERS)
    response.enable_compression()  # if the browser accepts it
    return response
