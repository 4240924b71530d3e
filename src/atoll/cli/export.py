"""`atoll export`: a version of the model as a safetensors file, from a running server or a stopped one's directory."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import Gone, StateLocked, UsageError

if TYPE_CHECKING:
    from atoll.transport.client import Http

ATTEMPTS = 4
"""The head may move on while it is pulled; then the next one is."""


def command(
    out: Annotated[Path, typer.Argument(help="File to write; appears whole or not at all.", metavar="OUT.safetensors")],
    server: Annotated[
        str | None, typer.Option(help="Address; by default ATOLL_SERVER, else port 8512 here.", show_default=False)
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="State directory of a server that is stopped.", show_default=False)
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="A version that is still kept; by default the newest.", show_default=False)
    ] = None,
) -> None:
    """Write the model to OUT.safetensors, tied tensors under each of their names."""
    if server is not None and state_dir is not None:
        raise UsageError(
            "Both --server and --state-dir are given.", "Give one: a running server, or a stopped one's folder."
        )
    if out.is_dir():
        raise UsageError(f"{str(out)!r} is a folder.", f"Name a file: {out / 'model.safetensors'}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if state_dir is not None:
        written = from_directory(state_dir, out, version)
    else:
        from atoll.cli.ask import server_address

        written = from_server(server_address(server), out, version)
    print(f"version {written}: {out}")


def from_directory(state_dir: Path, out: Path, version: int | None = None) -> int:
    """Export from the state directory of a server that is stopped; returns the version.

    Raises:
        UsageError: no run was begun there.
        StateLocked: its server runs.
        Gone: the version is not kept.
    """
    if not (state_dir / "journal.sqlite").exists():
        raise UsageError(f"{str(state_dir)!r} holds no run.", "Name the state_dir of the run file.")
    from atoll.config import Settings
    from atoll.server.exports import export_ranges
    from atoll.server.plan import Plan
    from atoll.store.store import Store
    from atoll.tensors.schema import Schema

    try:
        store = Store.open(state_dir)
    except StateLocked as error:
        raise StateLocked(error.message, "Its server runs: ask it with --server.") from None
    with store:
        if store.run is None:
            raise UsageError(f"{str(state_dir)!r} holds no run.", "Name the state_dir of the run file.")
        begun = json.loads(store.run.settings_json)
        known = {key: value for key, value in begun.items() if key in Settings.model_fields and value is not None}
        schema = Schema.from_json(json.loads(store.run.schema_json))
        plan = Plan.make(Settings.build(known | {"state_dir": state_dir}), schema)
        store.shape([plan.shapes()])
        store.recover()
        header, ranges = export_ranges(schema, plan.version)
        number = store.head(0).version if version is None else version
        store.export(out, version=number, header=header, ranges=ranges)
        return number


def from_server(server: str, out: Path, version: int | None = None) -> int:
    """Export from a running server, without taking part in its run; returns the version.

    Raises:
        ServerUnreachable: nobody answers.
        Gone: the version is not kept.
    """
    from atoll.transport.client import Http
    from atoll.transport.tls import read_token
    from atoll.wire import messages, routes

    token_file = os.environ.get("ATOLL_TOKEN_FILE")
    token = read_token(Path(token_file) if token_file else None)
    http = Http(server, token=token, ca=os.environ.get("ATOLL_TLS_CA"))
    try:
        for attempt in range(1, ATTEMPTS + 1):
            number = version
            if number is None:
                number = http.get(routes.STATUS, messages.Status).fragments[0].version
            try:
                _pull(http, number, out)
                return number
            except Gone:
                if version is not None or attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")
    finally:
        http.close()


def _pull(http: Http, version: int, out: Path) -> None:
    """Fetch a version beside `out`, then write it in the order of a file for people."""
    from atoll.server.exports import export_ranges
    from atoll.tensors.layout import version_layout
    from atoll.tensors.schema import Schema
    from atoll.wire import messages, routes

    info = http.get(routes.RUN, messages.RunInfo)
    http.resize(info.connections, info.idle_timeout_s)
    schema = Schema.from_json(http.get(routes.SCHEMA, messages.SchemaMessage).model_dump())
    layout = version_layout(schema, info.part_bytes)
    manifest = http.get(routes.MANIFEST.format(fragment=0, version=version), messages.Manifest)
    path = routes.VERSION_DATA.format(fragment=0, version=version, digest=manifest.digest)
    digests = [bytes.fromhex(digest) for digest in manifest.part_digests]
    with _beside(out) as pulled, _beside(out) as ordered:
        http.pull(path, layout, digests, layout.parts, [_File(pulled[0])])
        header, ranges = export_ranges(schema, layout)
        _copy(pulled[0], ordered[0], header, ranges)
        os.fsync(ordered[0])
        os.rename(ordered[1], out)


class _File:
    """A sink that writes at offsets."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, offset: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._fd, data, offset)
            offset, data = offset + count, data[count:]


def _copy(source: int, target: int, header: bytes, ranges: list[tuple[int, int]]) -> None:
    file = _File(target)
    file.write(0, memoryview(header))
    at = len(header)
    for offset, nbytes in ranges:
        for start in range(0, nbytes, 2**20):
            data = os.pread(source, min(2**20, nbytes - start), offset + start)
            file.write(at, memoryview(data))
            at += len(data)


@contextmanager
def _beside(out: Path) -> Iterator[tuple[int, Path]]:
    """A file in the folder of `out` that is gone in the end, unless it was renamed."""
    path = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd, path
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
