"""Readers of what others have written: messages, headers of tensor files, policies, files of state, texts.

Each has valid bytes to begin with, and the errors that it may raise. Anything else is a finding: another error, more
than `MOST_S` seconds, or more than `MOST_MB` of memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import save

import atoll
from atoll.blobs.object_file import pack_object
from atoll.blobs.ways_to_send import read_plain
from atoll.config.site_policy import read_policy
from atoll.json_files import NoteDamaged, note_from, seal
from atoll.protocol import messages, routes, run_events
from atoll.protocol.invitation import Invitation
from atoll.protocol.openapi import OPERATIONS
from atoll.protocol.read_message import framed, read_framed, read_message
from atoll.server.coordinator.roster import Lease
from atoll.store.audit_log import read_head
from atoll.store.caller_tokens import keep_tokens
from atoll.store.reader import checked_audit, open_state, open_version
from atoll.store.receipt_key import ReceiptKey
from atoll.store.store import Store
from atoll.tensors.reference import TensorRef
from atoll.tensors.safetensors_header import read_header
from atoll.transport.credential_store import CredentialNote, SiteCredential, store
from atoll.transport.egress_log import START, Entry, read_log
from atoll.worker.exchange.base_and_outbox import BaseNote, OutboxNote
from harness.fuzzed import Damage, Findings, Values, damaged, damages
from harness.hostile_answers import encode, example
from harness.hostile_runs import place_of
from harness.hostile_site import status_kb

MOST_S, MOST_MB = 5.0, 64.0


@dataclass(frozen=True)
class Reader:
    """What reads bytes of others.

    Attributes:
        read: reads them.
        seeds: valid ones.
        errors: what it may raise.
        kind: class of the message; None if it is none. Then its fields are changed, too.
        most_bytes: what a transport lets through; longer ones never come to the reader.
    """

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    errors: tuple[type[BaseException], ...]
    kind: type[BaseModel] | None = None
    most_bytes: int = routes.MANIFEST_BYTES


@dataclass(frozen=True)
class Case:
    """Bytes for a reader."""

    reader: str
    data: bytes = field(repr=False)
    shown: str = ""

    @property
    def group(self) -> str:
        """The name of the reader."""
        return self.reader

    def __str__(self) -> str:
        return f"{self.reader}: {self.shown or self.data[:700]!r}"


def message_kinds() -> dict[type[BaseModel], int]:
    """Return every message that one side sends to the other → its most bytes; the schema has a reader of its own."""
    found: dict[type[BaseModel], int] = {messages.Problem: routes.PROBLEM_BYTES}
    found[run_events.EventQuery] = routes.CONTROL_BODY_BYTES
    for operation in OPERATIONS:
        sides = (operation.request, operation.body_bytes), (operation.reply, routes.answer_bytes(operation.path))
        for kind, most in sides:
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not messages.SchemaMessage:
                found[kind] = max(most, found.get(kind, 0))
    return found


def readers() -> dict[str, Reader]:
    """Return all readers of bytes by their names."""
    found = {
        f"message {kind.__name__}": Reader(
            partial(read_message, kind), (encode(example(kind)).encode(),), (ValueError,), kind, most
        )
        for kind, most in message_kinds().items()
    }
    ticket = messages.TicketReply(status="wait", head_version=0, head_digest="0" * 64)
    complete = messages.Complete(digest="0" * 64)
    found["framed TicketReply"] = Reader(
        partial(read_framed, messages.TicketReply), (framed(ticket, b"x" * 40),), (ValueError,)
    )
    found["framed Complete"] = Reader(partial(read_framed, messages.Complete), (framed(complete),), (ValueError,))
    schema = json.dumps(example(messages.SchemaMessage) | {"tensors": [
        {"name": "w", "dtype": "F32", "shape": [2, 3], "fragment": 0}]}).encode()  # fmt: skip
    found["schema"] = Reader(messages.SchemaMessage.split_in, (schema,), (ValueError, atoll.AtollError))
    tensors = {"w": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.int64), "h": torch.ones(5).bfloat16()}
    file = save(tensors, {"a": "b"})
    found["safetensors header"] = Reader(
        lambda data: read_header(lambda at, count: data[at : at + count], len(data), "x"), (file,), (atoll.AtollError,)
    )
    tree = {"a": [1, 2.5, None, True, "t", b"b", (1, 2)], "w": torch.ones(3)}
    found["payload"] = Reader(
        lambda data: read_plain(data.decode()), (json.dumps(pack_object(tree).skeleton).encode(),),
        (ValueError, atoll.AtollError),
    )  # fmt: skip
    invitation = Invitation("https://example.org:8780", "a", "s" * 43, "0" * 64)
    found["invitation"] = Reader(
        lambda data: Invitation.parse(data.decode(errors="replace")), (str(invitation).encode(),), (atoll.AtollError,)
    )
    reference = TensorRef("example.org", 80, True, "0" * 32, "1" * 32, "2" * 64, 9_999_999_999, "")
    found["reference"] = Reader(
        lambda data: TensorRef.parse(data.decode(errors="replace")), (str(reference).encode(),), (atoll.AtollError,)
    )
    found["lease"] = Reader(
        lambda data: Lease.parse(data.decode(errors="replace")), (f"a:1:p:{'0' * 32}".encode(),), (atoll.AtollError,)
    )
    digests = dict.fromkeys(("base_digest", "layout_digest", "digest"), "0" * 64)
    base = {"run": "r", "fragment": 0, "version": 1, "digest": "0" * 64, "part_digests": ["0" * 64], "complete": True}
    outbox = {"run": "r", "ticket": 1, "fragment": 0, "base_version": 0, "part_digests": [], "report": {}} | digests
    for kind, note in ((BaseNote, base), (OutboxNote, outbox)):
        found[f"note {kind.__name__}"] = Reader(partial(_read_note, kind), (seal(note).encode(),), (NoteDamaged,))
        found[f"sealed {kind.__name__}"] = Reader(
            partial(_read_sealed, kind), (json.dumps(note).encode(),), (NoteDamaged,)
        )
    return found


def _read_note(kind: Any, data: bytes) -> object:
    return note_from(data, kind)


def _read_sealed(kind: Any, data: bytes) -> object:
    """Read a note with other values and a right digest, as another version may have written it."""
    try:
        note = json.loads(data)
        sealed = seal(note) if isinstance(note, dict) else ""
    except (ValueError, RecursionError):
        return None
    return note_from(sealed.encode(errors="replace"), kind)


def reader_case(found: dict[str, Reader], values: Values, chance: Random) -> Case:
    """Return a case: damaged bytes; of messages, values of fields, too."""
    name = chance.choice(sorted(found))
    reader = found[name]
    if reader.kind is None or chance.random() < 0.3:
        return Case(name, damaged(chance.choice(reader.seeds), damages(chance)))
    return Case(name, *values.message(reader.kind, example(reader.kind), chance))


def watched(
    case: Case | FileCase, run: Callable[[], object], errors: tuple[type[BaseException], ...], findings: Findings
) -> None:
    """Run something that may raise these errors, and add what is wrong with it to the findings."""
    findings.tried[case.group] += 1
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of memory
    before_kb, begin_s, what = status_kb("VmRSS"), time.monotonic(), ""
    try:
        run()
    except errors:
        pass
    except BaseException:
        what = traceback.format_exc()
        findings.add(f"{case.group}: {place_of(what)}", case, what)
    seconds, peak_mb = time.monotonic() - begin_s, (status_kb("VmHWM") - before_kb) / 1000
    if seconds > MOST_S:
        findings.add(f"{case.group}: more than {MOST_S:.0f} s", case, f"{seconds:.1f} s\n{what}")
    if peak_mb > MOST_MB:
        findings.add(f"{case.group}: more than {MOST_MB:.0f} MB", case, f"{peak_mb:.0f} MB\n{what}")


def read_case(found: dict[str, Reader], findings: Findings, case: Case) -> None:
    """Read the bytes of a case."""
    reader = found[case.reader]
    if len(case.data) > reader.most_bytes:
        return
    watched(case, lambda: reader.read(case.data), reader.errors, findings)


# -- files

POLICY = b"""\
[runs]
servers = ["https://fl.example.org:8512"]
names = ["chest-*"]
swarm = false
max_rounds = 200

[tensors]
allow = ["backbone.*"]
max_norm = 1.0
noise = 0.1

[metadata]
metrics = ["loss"]
objects = false

[log]
folder = "/var/log/atoll"
"""


def _egress_lines() -> bytes:
    """Return a log of three entries."""
    lines, before = b"", START
    for seq in range(1, 4):
        entry = Entry(seq, "2026-01-01T00:00:00.000+00:00", "part", {"bytes": seq, "run": "r"}, before, "")
        entry = replace(entry, hash=entry.expected_hash)
        lines, before = lines + entry.line, entry.hash
    return lines


@dataclass(frozen=True)
class FileCase:
    """A file that is damaged before something reads it."""

    file: str
    changes: tuple[Damage, ...]

    @property
    def group(self) -> str:
        """The name of the file without numbers."""
        return self.file.partition("-")[0]


class Files:
    """Files of a server and of a site, each with what reads it.

    Args:
        folder: where they are; removed by the caller.
        state: an archive with a state directory in the folder `state`.
    """

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder, self._number = folder, itertools.count()
        self._archive = state
        self._readers: dict[str, tuple[Callable[[Path], object], bytes]] = {}
        first = self._state()
        keep_tokens(first)
        ReceiptKey(first)
        for path in sorted(path for path in first.rglob("*") if path.is_file()):
            name = str(path.relative_to(first))
            if name != "lock" and not name.endswith("-shm"):
                self._readers[f"state/{name}"] = (partial(self._open_state, name), path.read_bytes())
        self._readers["policy.toml"] = (read_policy, POLICY)
        self._readers["egress.log"] = (lambda path: [*read_log(path)], _egress_lines())
        self._readers |= dict(self._of_site())

    def _of_site(self) -> Iterator[tuple[str, tuple[Callable[[Path], object], bytes]]]:
        note = CredentialNote("http://127.0.0.1:1", "a", "token", 0.0, 0.0)
        store(self.folder / "credential", note, secret=b"t" * 43)
        for path in sorted(path for path in (self.folder / "credential").iterdir() if path.is_file()):
            yield f"credential/{path.name}", (partial(self._open_credential, path.name), path.read_bytes())

    def _open_credential(self, name: str, path: Path) -> None:
        folder = self.folder / "credential"
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(path.read_bytes())
        try:
            credential = SiteCredential(folder)
            _ = credential.note, credential.token
        finally:
            (folder / name).write_bytes(before)

    def _state(self) -> Path:
        folder = self.folder / f"state-{next(self._number)}"
        with tarfile.open(self._archive) as tar:
            tar.extractall(folder, filter="data", members=[each for each in tar if each.name.startswith("state")])
        return folder / "state"

    def _open_state(self, name: str, path: Path) -> None:
        state = self._state()
        (state / name).parent.mkdir(exist_ok=True)
        (state / name).write_bytes(path.read_bytes())
        (state / name).chmod(0o600)
        try:
            with contextlib.suppress(atoll.AtollError):
                checked_audit(state, 5)
            with contextlib.suppress(atoll.AtollError), open_state(state) as reader:
                _ = reader.run(), reader.heads(), reader.versions(), reader.controls()
            with contextlib.suppress(atoll.AtollError), open_version(state, None, lambda *_: True) as files:
                assert files.number >= 0
            with contextlib.suppress(NoteDamaged):
                read_head(state)
            keep_tokens(state)
            ReceiptKey(state)
            Store(state).close()
        finally:
            shutil.rmtree(state.parent)

    def case(self, chance: Random) -> FileCase:
        """Return a damaged file."""
        return FileCase(chance.choice(sorted(self._readers)), damages(chance))

    def read(self, findings: Findings, case: FileCase) -> None:
        """Damage a file, and let it be read."""
        read, seed = self._readers[case.file]
        path = self.folder / "damaged" / Path(case.file).name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damaged(seed, case.changes))
        path.chmod(0o600)
        watched(case, lambda: read(path), (atoll.AtollError,), findings)
