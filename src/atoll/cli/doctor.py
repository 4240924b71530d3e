"""`atoll doctor`: check this machine, and the way from here to a server; one line each, with a remedy."""

from __future__ import annotations

import json as json_module
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from atoll.cli.text import print_line, telling_what_is_awaited
from atoll.config import DEFAULT_PORT, default_of
from atoll.errors import AtollError, UsageError
from atoll.format_text import duration, size, visible
from atoll.protocol import routes
from atoll.protocol.status_messages import Status
from atoll.transport.http_client import Http, http_to
from atoll.transport.tls import is_loopback

OLDEST_TORCH, INSTALL = (2, 6), "pip install 'torch>=2.6,<3'"
MOST_APART_S = 30.0
"""Seconds between two clocks from which on certificates may seem invalid, and times in logs do not match."""
LOOK_S = 10.0
PROXIES = ("https_proxy", "http_proxy", "all_proxy", "no_proxy")


@dataclass(frozen=True)
class Found:
    """What one check has found. `remedy` is empty if there is nothing to do."""

    check: str
    state: Literal["ok", "note", "wrong"]
    text: str
    remedy: str = ""


def command(
    address: Annotated[
        str | None,
        typer.Argument(
            help="Also check the way to this server: HOST, HOST:PORT or a URL. Default: ATOLL_SERVER.",
            metavar="[ADDRESS]",
            show_default=False,
        ),
    ] = None,
    server: Annotated[str | None, typer.Option(help="Another way to give ADDRESS.", show_default=False)] = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="Folder in which a server or site will write.", show_default=False)
    ] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on which a server will listen.")] = DEFAULT_PORT,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Check Python, torch, GPU, disk, clock and port, and with a server: proxy, TLS, token and clock there.

    Without http:// or https://, both are tried. Exit code 1 if something is wrong.
    """
    if address and server:
        raise UsageError(f"Both {address} and --server {server} are given.", "Use one of them.")
    found = list[Found]()
    way = Way(address or server or os.environ.get("ATOLL_SERVER") or "")

    def awaited() -> str:
        if len(found) < 2:
            return "still importing PyTorch"
        return "still asking torch for GPUs" if len(found) < 3 else "still asking the server"

    with telling_what_is_awaited(awaited, lambda line: print_line(f"atoll: {line}")):
        for each in _checks(way, directory, port):
            found.append(each)
            if not json:
                remedy = f" {each.remedy}" if each.remedy else ""
                print(visible(f"{each.state:<5}  {each.check:<6}  {each.text}{remedy}"), flush=True)
    wrong = sum(each.state == "wrong" for each in found)
    if json:
        print(json_module.dumps([asdict(each) for each in found], indent=2))
    else:
        then = f"atoll worker --server {way.url} --site NAME -- python train.py" if way.url else "atoll new my-run"
        print(f"{wrong} of {len(found)} checks found something wrong." if wrong else f"All is well. Next: {then}")
    if wrong:
        raise typer.Exit(1)


@dataclass
class Way:
    """The way to a server.

    Attributes:
        address: as it was given; empty if no server is asked.
        url: with the scheme by which it has answered; empty before that.
    """

    address: str
    url: str = ""

    @property
    def urls(self) -> list[str]:
        """The addresses to try, first that of a server with default settings: beyond loopback, it has TLS."""
        if "://" in self.address:
            return [self.address]
        try:
            parts = urlsplit(f"//{self.address}")
            place = parts._replace(netloc=parts.netloc if parts.port else f"{parts.netloc.rstrip(':')}:{DEFAULT_PORT}")
        except ValueError:  # a port that is no number: the error about the address says so
            return [self.address]
        is_here = is_loopback(parts.hostname or "")
        return [f"{scheme}:{place.geturl()}" for scheme in (("http", "https") if is_here else ("https", "http"))]


def _checks(way: Way, folder: Path, port: int) -> Iterator[Found]:
    yield Found("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield from _torch()
    yield _disk(folder)
    if not way.address:
        yield _clock("")
    yield _port(port)
    if way.address:
        yield from _server(way)
    else:
        named = [name for name in PROXIES if os.environ.get(name) or os.environ.get(name.upper())]
        yield Found(
            "proxy",
            "ok",
            f"{', '.join(named) or 'no variable'} set; `atoll doctor ADDRESS` shows what it means for an address",
        )


def _torch() -> Iterator[Found]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Found("torch", "wrong", f"cannot be imported: {error}.", INSTALL)
        return
    fits = OLDEST_TORCH <= tuple(map(int, torch.__version__.split(".")[:2])) < (3,)
    text = f"{torch.__version__}, {torch.get_num_threads()} threads"
    yield Found("torch", "ok", text) if fits else Found("torch", "wrong", f"{text}: not supported.", INSTALL)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count()))
        yield Found("gpu", "ok", names)
    elif torch.backends.mps.is_available():
        yield Found("gpu", "ok", "Apple GPU (mps)")
    elif shutil.which("nvidia-smi"):
        remedy = "Compare `nvidia-smi` with torch.version.cuda, and install the matching build of torch."
        yield Found("gpu", "wrong", "this machine has NVIDIA's driver, but torch cannot use a GPU.", remedy)
    else:
        yield Found("gpu", "ok", "none; models train on the CPU")


def _disk(folder: Path) -> Found:
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    least = int(default_of("disk.min_free_bytes"))
    if not os.access(there, os.W_OK | os.X_OK):
        return Found("disk", "wrong", f"this user may not write into {there}.", "Give another folder with --dir.")
    free = shutil.disk_usage(there).free
    if free < least:
        text = f"{size(free)} free in {there}, but a server keeps {size(least)} free."
        return Found("disk", "wrong", text, "Free some space, or lower disk.min_free_bytes.")
    return Found("disk", "ok", f"{size(free)} free in {there}")


def _clock(date: str) -> Found:
    """Compare this machine's clock with the Date header of a server's answer, if there is one."""
    now = datetime.now(UTC)
    if not date:
        is_old = now.year < 2025
        remedy = "Set it, for example with NTP: else certificates seem invalid." if is_old else ""
        return Found("clock", "wrong" if is_old else "ok", f"{now:%Y-%m-%d %H:%M:%S} UTC", remedy)
    apart_s = (now - parsedate_to_datetime(date)).total_seconds()
    text = f"{duration(abs(apart_s))} {'ahead of' if apart_s > 0 else 'behind'} the server's"
    if abs(apart_s) > MOST_APART_S:
        return Found("clock", "wrong", f"{text}.", "Set both clocks, for example with NTP.")
    return Found("clock", "ok", text)


def _port(port: int) -> Found:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return Found("port", "ok", f"{port} is free")
        except OSError as error:
            why = error.strerror or str(error)
    with suppress(AtollError), closing(http_to(f"http://127.0.0.1:{port}")) as http:
        http.reach(routes.HEALTH, timeout_s=1.0)
        return Found(
            "port", "note", f"{port} is used by a server.", f"To see its run: atoll status --server {http.server}."
        )
    remedy = "`atoll server` takes the next free one, or the one that --port names."
    return Found("port", "note", f"{port} cannot be used ({why}).", remedy)


def _server(way: Way) -> Iterator[Found]:
    with ExitStack() as stack:
        tried = list[tuple[Http, str | AtollError]]()
        for url in way.urls:
            try:
                http = stack.enter_context(closing(http_to(url)))
            except AtollError as error:
                yield Found("server", "wrong", error.message, error.remedy)
                return
            begin_s = time.monotonic()
            try:
                tried.append((http, _reached(http, begin_s)))
                way.url = http.server
                break
            except AtollError as error:
                tried.append((http, error))
        # with TLS at the other end, an error of TLS says more than one without it
        of_tls = [each for each in tried if each[0].secure and getattr(each[1], "is_other", False)]
        http, outcome = tried[-1] if way.url else (of_tls or tried)[0]
        proxy = f"{http.proxy} is used" if http.proxy is not None else "none is used for this address"
        yield Found("proxy", "ok", proxy)
        check = "tls" if http.secure and (way.url or of_tls) else "reach"
        if isinstance(outcome, AtollError):
            yield Found(check, "wrong", outcome.message, outcome.remedy)
        else:
            yield Found(check, "ok", outcome)
        if http.date:
            yield _clock(http.date)
            yield _asked("token", lambda: _status(http))


def _asked(check: str, ask: Callable[[], str]) -> Found:
    try:
        return Found(check, "ok", ask())
    except AtollError as error:
        return Found(check, "wrong", error.message, error.remedy)


def _reached(http: Http, begin_s: float) -> str:
    http.reach(routes.HEALTH, timeout_s=LOOK_S)
    how = "its certificate is accepted" if http.secure else "without TLS: only for trusted networks"
    return f"{http.server} answers after {duration(time.monotonic() - begin_s)}; {how}"


def _status(http: Http) -> str:
    status = http.get(routes.STATUS, Status, timeout_s=LOOK_S)
    return f"the server lets this user in; it serves {status.name}"
