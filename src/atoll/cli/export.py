"""`atoll export`: write a version of a run's model to a safetensors file.

The version comes from a running server, or from a server's state directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from blake3 import blake3

from atoll.cli.export_like import export_like
from atoll.cli.stored_status import stored_status
from atoll.cli.text import ELSEWHERE, next_step, require_file, still
from atoll.cli.which_run import RunArgument, RunDir, named_run, newest_run, require_one
from atoll.errors import AtollError, BadRequest, Gone, PartCorrupt, ServerUnreachable, StateCorrupt, UsageError
from atoll.format_text import visible
from atoll.posix import NAMED_FILE, folder_error, open_named, replace_file
from atoll.protocol import messages, routes, status_messages
from atoll.store.file_slots import READ_BYTES
from atoll.store.reader import no_model, open_version, permitted
from atoll.system_calls import nameless_file
from atoll.tensors.layout import Layout, version_layout
from atoll.tensors.safetensors_header import read_header
from atoll.tensors.schema import Schema
from atoll.transport.credential_store import certificate_at
from atoll.transport.http_client import Http, ask, http_to, server_address
from atoll.transport.tls import ANY_SITE

if TYPE_CHECKING:
    from atoll.blobs.model_file import FragmentFiles
    from atoll.transport.object_server import UnnamedFile
    from atoll.transport.part_transfer import HttpTransfer

ATTEMPTS = 4
"""Maximum attempts to export the newest version. An attempt fails if the server deletes the version meanwhile."""


def command(
    out: Annotated[
        Path,
        typer.Argument(help="File to write, or folder with --like; never left incomplete.", metavar="OUT.safetensors"),
    ],
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Annotated[
        str | None, typer.Option(help="Server address. Default: ATOLL_SERVER, else port 8512 here.", show_default=False)
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Version to export. Default: the newest.", show_default=False)
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the best version by rounds.best_metric instead of the newest.")
    ] = False,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Folder from save_pretrained (Transformers, PEFT): write a folder OUT that from_pretrained opens.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the model of a run to OUT.safetensors, with tied tensors under each of their names.

    Without RUN and --server, it is the run of the server at port 8512 here; if none answers there, the newest run here.
    """
    require_one(run, state_dir, has_server=server is not None)
    if like is None:
        require_file(out, "model.safetensors")
    if like is None and out.suffix != ".safetensors":
        name = out.with_suffix(".safetensors")
        raise UsageError(f"{str(out)!r} does not end in .safetensors, as an export must.", f"Use {name}.")
    if best and version is not None:
        raise UsageError("Both --best and --version are given.", "Use one of them.")
    found = named_run(run, state_dir)
    call = f"atoll export {out} RUN" + (f" --like {like}" if like is not None else "")

    def write(file: Path) -> int:
        if found is not None:
            return _from_run(found, file, version, best=best)
        return _from_server_or_newest(server, file, version, best=best, call=call)

    with still(f"still writing {visible(str(out))}"):
        written = write(out) if like is None else export_like(out, like, write)
    print(f"version {written}: {out}")
    if like is None:
        next_step(f"safetensors.torch.load_file({str(out)!r}), then model.load_state_dict(...)")
    else:
        next_step(f"AutoModel.from_pretrained({str(out)!r}), or PeftModel.from_pretrained(base, {str(out)!r})")


def _from_server_or_newest(server: str | None, out: Path, version: int | None, *, best: bool, call: str) -> int:
    address = server_address(server)
    try:
        return best_of_server(address, out) if best else from_server(address, out, version)
    except ServerUnreachable as error:
        if server or os.environ.get("ATOLL_SERVER") or error.is_other or not (newest := newest_run(error.message)):
            raise ServerUnreachable(
                error.message, f"{error.remedy} Without a server, name the run: {call}.".strip()
            ) from error
    return _from_run(newest, out, version, best=best)


def _from_run(state_dir: Path, out: Path, version: int | None, *, best: bool) -> int:
    with permitted(state_dir):
        return best_of_directory(state_dir, out) if best else from_directory(state_dir, out, version)


def from_directory(state_dir: Path, out: Path, version: int | None = None) -> int:
    """Export a version from a state directory, even while its server runs. Return the version's number.

    Args:
        state_dir: the state directory of a run.
        out: the safetensors file to write.
        version: the version to export; None: the newest.

    Raises:
        UsageError: the directory contains no run, or the run has no model.
        Gone: the version or its fp32 values were deleted; or the run keeps its versions in memory or at the sites of a
            swarm.
        StateCorrupt: the journal or the file of the version is damaged.
    """
    from atoll.aggregation.outer_state import is_whole  # before a row is read: its version may be deleted soon after

    def attempt() -> int:
        with open_version(state_dir, version, is_whole) as stored:
            _write(stored.fragments, out, stored.schema, stored.require_kept)
            return stored.number

    return _repeated(attempt, version)


def _repeated(attempt: Callable[[], int], version: int | None) -> int:
    """Export a version. If `version` is None and the newest was deleted meanwhile, retry, up to `ATTEMPTS` times."""
    attempts = ATTEMPTS if version is None else 1
    while True:
        try:
            return attempt()
        except Gone:
            attempts -= 1
            if not attempts:
                raise


def best_of_directory(state_dir: Path, out: Path) -> int:
    """Copy the best version from the exports of a run, even while its server runs. Return the version's number.

    Raises:
        UsageError: the directory contains no run, or there is no file of its best version.
        StateCorrupt: the journal or the file of the best version is damaged.
    """
    from atoll.server.coordinator.exports import BEST_MODEL

    best, path = stored_status(state_dir)[0].best, state_dir / "exports" / BEST_MODEL
    if best is not None and _is_file_of(best):
        path = Path(best.file)  # in disk.export_dir, where that is set
    if not path.is_file():
        raise UsageError(
            f"There is no best version: {str(path)!r} does not exist.",
            "The server writes it after a round has reported the metric that rounds.best_metric names. If "
            "disk.export_dir is set, look there; while the server runs, use --server.",
        )
    with open(open_named(path), "rb") as file:  # opened once: the server may replace the file at any time
        number = int(_metadata(file.fileno(), path).get("version", -1))
        _replace(out, iter(partial(file.read, READ_BYTES), b""))
    return number


def best_of_server(server: str, out: Path) -> int:
    """Download the best version from a running server; return the version's number.

    The path of the server's file is only shown: a path that a server sends is never opened.

    Raises:
        ServerUnreachable: no server answers.
        UsageError: the run does not track a best version.
        Gone: no round has reported the metric yet, or the server no longer offers the best version for download.
    """
    best = ask(server, routes.STATUS, status_messages.Status).best
    if best is None:
        raise UsageError("The run does not track a best version.", "Set rounds.best_metric and restart the server.")
    if best.version is None:
        raise Gone(f"No round has reported the metric {best.metric!r} yet.", "Try again later, or without --best.")
    try:
        return from_server(server, out, best.version)
    except Gone as error:
        where = f"Copy {visible(best.file, 500)} on the server's machine, or use --dir STATE_DIRECTORY there."
        where = where if best.file else "Export again in a moment."
        raise Gone(f"The server no longer keeps version {best.version}, the best one, for download.", where) from error


def _is_file_of(best: status_messages.BestStatus) -> bool:
    """Return whether the best version's file has the version and the value that `best` names.

    Args:
        best: the status of the best version in the state directory.
    """
    if not best.file or not Path(best.file).is_file():
        return False
    try:
        with open(open_named(Path(best.file)), "rb") as file:
            metadata = _metadata(file.fileno(), Path(best.file))
    except StateCorrupt:
        return False
    return (metadata.get("version"), metadata.get(best.metric)) == (str(best.version), repr(best.value))


def _metadata(fd: int, path: Path) -> dict[str, str]:
    """Return the metadata in the header of a best-model file: its version, and the value of the metric.

    Args:
        fd: the opened file.
        path: path of the file, for errors.

    Raises:
        StateCorrupt: the file is not a complete safetensors file.
    """
    try:
        return read_header(lambda at, count: os.pread(fd, count, at), os.fstat(fd).st_size, "it").metadata
    except BadRequest as error:
        raise StateCorrupt(
            f"{path} is damaged: {error.message}", "Restart the server, which writes it again."
        ) from error


def _replace(out: Path, content: Iterator[bytes | memoryview]) -> None:
    try:
        replace_file(out, content, mode=NAMED_FILE)
    except OSError as error:
        raise folder_error(error, out.parent, ELSEWHERE) from error


def from_server(server: str, out: Path, version: int | None = None) -> int:
    """Export a version from a running server, without joining its run. Return the version's number.

    Args:
        server: the address of the server.
        out: the safetensors file to write.
        version: the version to export; None: the newest.

    Raises:
        ServerUnreachable: no server answers.
        UsageError: the run has no model.
        Gone: the server has deleted the version.
    """
    http = http_to(server)

    def attempt() -> int:
        heads = [each.version for each in http.get(routes.STATUS, status_messages.Status).fragments]
        if version is not None:
            heads = [version] * len(heads)
        _pull(http, heads, out)
        return min(heads)

    with contextlib.closing(http):
        return _repeated(attempt, version)


def _pull(http: Http, heads: Sequence[int], out: Path) -> None:
    """Download a version of each fragment of the model into temporary files in the folder of `out`, then write `out`.

    Args:
        http: the connection to the server.
        heads: for each fragment, the number of its version.
        out: the safetensors file to write.
    """
    from atoll.transport.object_server import UnnamedFile
    from atoll.transport.part_transfer import HttpTransfer

    info = http.get(routes.RUN, messages.RunInfo)
    split = http.fetch(routes.SCHEMA, messages.SchemaMessage.split_in, "SchemaMessage")
    info.require_split(split)
    if split.schema.is_nothing:
        raise no_model(http.server)
    sources: list[FragmentFiles] = []
    with contextlib.ExitStack() as stack:
        parts = stack.enter_context(contextlib.closing(HttpTransfer(http, info.connections, info.idle_timeout_s)))
        for fragment, (version, schema) in enumerate(zip(heads, split.schemas, strict=True)):
            layout = version_layout(schema, info.part_bytes, info.ranks)
            fd = nameless_file(out.parent)
            file = UnnamedFile(fd, out.parent)
            stack.callback(os.close, fd)
            sources.append((layout, fd, None))
            if info.downlink_codec.text != "none":  # the version is quantised; the server sends its fp32 masters, cast
                for part in layout.parts:
                    path = routes.MODEL_PART.format(fragment=fragment, version=version, part=part.index)
                    file.write(part.start, _checked(parts, path, part.nbytes))
                continue
            manifest = http.get(routes.MANIFEST.format(fragment=fragment, version=version), messages.VersionManifest)
            path = routes.VERSION_DATA.format(fragment=fragment, version=version, digest=manifest.digest)
            if info.placement == "swarm" and version:
                _pull_from_workers(manifest, info, http, layout, file)
            else:
                digests = manifest.require_digest(manifest.digest, layout, f"version {version}")
                parts.pull(path, digests, layout.parts, [file])
        _write(sources, out, split.schema)


def _pull_from_workers(
    manifest: messages.VersionManifest, info: messages.RunInfo, http: Http, layout: Layout, file: UnnamedFile
) -> None:
    """In a swarm, download a version from one of its workers: the server does not have the versions.

    Args:
        manifest: the version's parts and digests, and the workers that have it.
        info: the description of the run.
        http: the connection to the server.
        layout: the file layout of the version.
        file: the file to write.

    Raises:
        Gone: no worker has the version any more, or none of the workers that have it can be reached.
    """
    from atoll.tensors.reference import TensorRef
    from atoll.transport.peer_address import is_this_machine, why_no_peer
    from atoll.worker.peer.peer_transfers import connected

    digests = manifest.require_digest(manifest.digest, layout, f"version {manifest.version}")
    why, is_here = "no connected worker has this version.", is_this_machine(http.host)
    own, remedy = certificate_at(http.server), "Export from a machine that can reach the workers, while they take part."
    context = partial(own.context_to_peer, ANY_SITE) if own is not None else None  # the digests show what comes
    for source in manifest.sources:
        try:
            if refused := why_no_peer(TensorRef.parse(source).host, loopback=is_here):
                why = f"{refused}."
                continue
            if own is None and TensorRef.parse(source).secure:
                remedy = (
                    "The workers may take only certificates of the run's sites, which no token replaces: export at a "
                    "machine with the credential of a site, or set ATOLL_CREDENTIAL to its folder."
                )
            with connected(source, info.idle_timeout_s, http.counters, loopback=is_here, context=context) as (
                ref,
                parts,
            ):
                path = routes.OBJECT_DATA.format(object=ref.object)
                return parts.pull(path, digests, layout.parts, [file])
        except AtollError as error:
            why = error.message
    raise Gone(
        f"Version {manifest.version} of this swarm cannot be downloaded: {why}",
        f"{remedy} After the run, each worker has the model on its disk.",
    )


def _checked(parts: HttpTransfer, path: str, nbytes: int) -> memoryview:
    """Download bytes that are followed by their BLAKE3 digest, and check them. Return the bytes without the digest.

    If they arrive damaged, download them again, up to `PART_ATTEMPTS` times in all.

    Args:
        parts: the connections to the server.
        path: the URL path of the bytes.
        nbytes: the number of bytes, without the digest.

    Raises:
        PartCorrupt: the bytes arrived damaged each time.
    """
    from atoll.transport.part_transfer import DAMAGED, PART_ATTEMPTS

    for _ in range(PART_ATTEMPTS):
        body = memoryview(parts.read(path, nbytes + routes.DIGEST_BYTES))
        if len(body) == nbytes + routes.DIGEST_BYTES and blake3(body[:nbytes]).digest() == body[nbytes:]:
            return body[:nbytes]
    raise PartCorrupt(f"{path} arrived damaged {PART_ATTEMPTS} times in a row.", DAMAGED)


def _write(
    sources: Sequence[FragmentFiles], out: Path, schema: Schema, require_intact: Callable[[], None] = lambda: None
) -> None:
    """Write the tensors of all fragments into one safetensors file; tied tensors under each of their names.

    The file `out` appears only when it is complete.

    Args:
        sources: the files of each fragment.
        out: the file to write.
        schema: the schema of the whole model.
        require_intact: called when everything was read; if it raises an error, `out` does not appear.
    """
    from atoll.blobs.model_file import model_header, model_runs

    def content() -> Iterator[bytes | memoryview]:
        header, owners = model_header(schema)
        yield header
        yield from model_runs(owners, sources)
        require_intact()

    _replace(out, content())
