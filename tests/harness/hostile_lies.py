"""Wrong contents with right digests: the sender computes both.

A publisher of an object describes it in the head of its file, and a server describes its model in a schema. A `Lie`
changes such a description, and then every digest, length and reference that follows from it, on a copy of a tape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.blobs.manifest import Cuts, Manifest
from atoll.protocol import messages
from atoll.protocol.routes import OBJECT, OBJECT_DATA
from atoll.tensors.reference import TensorRef
from harness.hostile_answers import (
    SKELETONS,
    Truth,
    anything,
    containers,
    encode,
    expand,
    numbers,
    parsed,
    payload_texts,
    places,
    put,
    texts,
)
from harness.hostile_server import Tape

_PAYLOAD = "atoll.payload"


@dataclass(frozen=True)
class Lie:
    """What is wrong, and what was drawn for it."""

    about: str
    given: tuple[Any, ...]

    def __str__(self) -> str:
        text = ", ".join(repr(each) for each in self.given)
        return f"lie about {self.about}({text if len(text) <= 200 else text[:200] + '…'})"


# -- objects: the program `fetch`


def object_lies() -> st.SearchStrategy[Lie]:
    """Return the strategy of lies of a publisher."""
    payloads = st.one_of(
        st.tuples(st.just("skeleton"), st.sampled_from(SKELETONS).map(lambda each: ("is", each))),
        st.tuples(st.just("skeleton"), st.one_of(containers, anything)),
        st.tuples(st.sampled_from(["names", "inline", "unknown"]), anything),
    )
    inline = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "I64", "BOOL", "F4", "", None]),
            "shape": st.sampled_from([[1], [0], [2**40], [-1], [1] * 200, "a", [1.0], [2**62, 2**62]]),
            "data_offsets": st.sampled_from([[0, 4], [0, 0], [4, 0], [0, 2**62], [-4, 0], [0], None]),
            "base64": st.sampled_from(["AAAAAA==", "", "é", None, "A" * 70_000]),
        }
    ).map(lambda entry: ("inline", ("is", {"w": entry})))
    tensors = st.tuples(
        st.just("w"), st.sampled_from(["dtype", "shape", "data_offsets"]), st.one_of(numbers, texts, anything, shapes)
    )
    sizes = st.tuples(st.sampled_from(["head_bytes", "nbytes", "part_bytes"]), st.integers(-1, 2**62))
    return st.one_of(
        payloads.map(lambda drawn: Lie("payload", drawn)),
        inline.map(lambda drawn: Lie("payload", drawn)),
        payload_texts.map(lambda drawn: Lie("payload text", drawn)),
        tensors.map(lambda drawn: Lie("tensor", drawn)),
        st.tuples(st.one_of(numbers, containers, anything)).map(lambda drawn: Lie("metadata", drawn)),
        st.tuples(st.sampled_from(HEADS)).map(lambda drawn: Lie("head", drawn)),
        sizes.map(lambda drawn: Lie("sizes", drawn)),
    )


shapes = st.sampled_from(
    [("is", each) for each in ([], [0], [2**40], [-1, 4], [2**31, 2**31], [1] * 65, [10_000, 4], [0, 2**62], [160_000])]
    + [("is", each) for each in ([0, 160_000], [4, 160_004], [0, 2**60], [-4, 0], [160_000, 0])]
)
HEADS = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"a":' * 100_000,
    b"[" * 100_000,
    b"{" + b",".join(b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(100_000)) + b"}",
    b'{"w":{"dtype":"F32","shape":[40000],"data_offsets":[0,160000]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    b"\xff" * 64,
)


def about_object(lie: Lie, tape: Tape, ref: str) -> tuple[Tape, str]:
    """Return a tape and a reference of the object with a lie in it. Its digests are right.

    Args:
        lie: of `object_lies`.
        tape: of the program `fetch`.
        ref: its reference.
    """
    truths = [truth for truth in tape.truths if truth.operation == "get_object"]
    told = json.loads(truths[0].body)
    cuts = Cuts(told["head_bytes"], told["nbytes"], told["part_bytes"])
    object_id = TensorRef.parse(ref).object
    path = OBJECT_DATA.format(object=object_id)
    parts = [tape.answers["GET", path, f"bytes={part.start}-{part.stop - 1}", ""][0] for part in cuts.parts()]
    whole = b"".join(part.body for part in parts)
    head, data = whole[: cuts.head_bytes], whole[cuts.head_bytes :]
    if lie.about != "sizes":
        head = _lying_head(lie, json.loads(head[8:]))
        cuts = Cuts(len(head), len(head) + len(data), cuts.part_bytes)
    whole = head + data
    manifest = Manifest.of_cuts(cuts, [blake3(whole[part.start : part.stop]).digest() for part in cuts.parts()])
    if lie.about == "sizes":
        name, value = lie.given
        changed: Any = {
            "head_bytes": cuts.head_bytes,
            "nbytes": cuts.nbytes,
            "part_bytes": cuts.part_bytes,
            name: value,
        }
        manifest = Manifest.of_cuts(Cuts(**changed), manifest.part_digests)
    lying = Tape(tape.port)
    message = {**json.loads(messages.BlobManifest.of(_plain(manifest)).model_dump_json())}
    message |= {"head_bytes": manifest.cuts.head_bytes, "nbytes": manifest.cuts.nbytes}
    message |= {"part_bytes": manifest.cuts.part_bytes}
    lying.add(
        ("GET", OBJECT.format(object=object_id), "", ""),
        Truth("get_object", 200, truths[0].headers, json.dumps(message).encode()),
    )
    for part in cuts.parts():
        key = ("GET", path, f"bytes={part.start}-{part.stop - 1}", "")
        lying.add(key, Truth("get_object_data", 206, parts[0].headers, whole[part.start : part.stop]))
    true = TensorRef.parse(ref)
    return lying, ref.replace(true.digest, manifest.id)


def _plain(manifest: Manifest) -> Manifest:
    """Return a manifest with the same digests, and sizes that a message may have."""
    return Manifest(Cuts(64, 64, 64), manifest.layout_digest, manifest.part_digests)


def _lying_head(lie: Lie, header: dict[str, Any]) -> bytes:
    if lie.about == "head":
        text = lie.given[0]
    else:
        payload = json.loads(header["__metadata__"][_PAYLOAD])
        if lie.about == "payload":
            name, value = lie.given
            header["__metadata__"][_PAYLOAD] = encode({**payload, name: expand(value, payload.get(name))})
        elif lie.about == "payload text":
            header["__metadata__"][_PAYLOAD] = str(expand(lie.given, None))
        elif lie.about == "metadata":
            header["__metadata__"] = expand(lie.given[0], header["__metadata__"])
        else:
            name, entry, value = lie.given
            tensor = header.get(name, next(header[each] for each in header if each != "__metadata__"))
            tensor[entry] = expand(value, tensor[entry])
        text = encode(header).encode("utf-8", "replace")
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


# -- schemas: programs that join


def schema_lies() -> st.SearchStrategy[Lie]:
    """Return the strategy of lies of a server about its model."""
    dims = st.sampled_from(
        [("is", each) for each in ([2**40], [2**31, 2**31], [0], [2**61], [1] * 70, [], [2**61, 0], [100_000, 100_000])]
    )
    found = [*places(messages.SchemaMessage)]
    fields = st.one_of(
        *(st.tuples(st.just(place.keys), st.one_of(texts, numbers, containers)) for place in found),
        st.tuples(st.just(("tensors", 0, "shape")), dims),
        st.tuples(
            st.just(("tensors",)), st.sampled_from([("many", 30_000), ("doubled",), ("reversed",), ("shorter",)])
        ),
    )
    return fields.map(lambda drawn: Lie("schema", drawn))


def about_schema(lie: Lie, tape: Tape) -> Tape:
    """Return a tape with a lie about the model. The digest of the schema is right, if there is a schema at all."""
    true = next(truth for truth in tape.truths if truth.operation == "get_schema")
    body = encode(put(parsed(true), *lie.given, messages.SchemaMessage)).encode("utf-8", "surrogatepass")
    old = json.loads(next(truth for truth in tape.truths if truth.operation == "get_run").body)["schema_digest"]
    new = old
    try:
        new = messages.SchemaMessage.model_validate_json(body).to_split().schema.digest
    except (ValidationError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        pass  # no schema: a site has to find out without a digest
    except Exception as error:
        if type(error).__module__ != "atoll.errors":
            raise

    def change(truth: Truth) -> Truth:
        told = body if truth.operation == "get_schema" else truth.body
        if truth.operation == "get_run":
            told = told.replace(old.encode(), new.encode())
        return Truth(truth.operation, truth.status, truth.headers, told)

    return _changed(tape, change)


def _changed(tape: Tape, change: Callable[[Truth], Truth]) -> Tape:
    changed = {key: [change(truth) for truth in truths] for key, truths in tape.answers.items()}
    return Tape(tape.port, [*map(change, tape.truths)], changed)
