"""Every message that crosses the HTTP interface, closed and typed; the OpenAPI document is made from these.

Unknown fields are refused: a misspelt one must not be lost silently. Names of tensors never travel here, only
numbers that the server issued; the schema is a document of its own.

Objects as they travel: opened, sent in parts, completed, pulled.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, Literal

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from atoll.blobs import manifest as blobs
from atoll.errors import BadRequest, PartCorrupt, VersionSkew
from atoll.format_text import visible
from atoll.tensors.fragments import Split
from atoll.tensors.schema import Schema, TensorSpec

Site = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A worker's name: letters, digits, `.`, `_`, `-`; at most 64; shown, logged, and safe as the name of a folder."""

RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""A worker names a folder by it, and removes those of earlier runs beside that folder: it must not lead elsewhere."""

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A BLAKE3 digest in hex."""

Hex16 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Id or secret of an object in hex."""

Reference = Annotated[str, StringConstraints(max_length=512, pattern=r"^atoll-refs?://")]
"""A `TensorRef` as text. A holder of it can pull what it names."""

LEASE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}:[0-9]{1,18}:[0-9A-Za-z]{0,64}(:[0-9a-f]{32})?$"
"""`site:number:process:secret`: a worker sends back what it was given. Without a secret, it speaks for no site."""

NUMBER_BELOW = 2**62
"""Of what the server issues: tickets, versions, parts."""


def _shown(most: int) -> AfterValidator:
    """Text that a peer writes and people read, in logs and status: what does not print becomes its escape."""
    return AfterValidator(lambda text: visible(text, most))


METRICS, METRIC_CHARS = 256, 128
"""The most metrics of an update, and the longest name of one."""
MetricName = Annotated[str, StringConstraints(max_length=METRIC_CHARS), _shown(METRIC_CHARS)]
Host = Annotated[str, StringConstraints(max_length=256), _shown(256)]
Label = Host
LabelName = Annotated[str, StringConstraints(max_length=64), _shown(64)]
State = LabelName
Address = Annotated[str, StringConstraints(max_length=300), _shown(300)]
Text = Annotated[str, StringConstraints(max_length=2000), _shown(2000)]
Shown = Annotated[str, AfterValidator(visible)]
"""Text of the server, of any length."""
Metrics = Annotated[dict[MetricName, float], Field(max_length=METRICS)]
Labels = Annotated[dict[LabelName, Label], Field(max_length=32)]
Count = Annotated[int, Field(ge=0, lt=NUMBER_BELOW)]


class Message(BaseModel):
    """Base of all messages: frozen and strict; unknown fields, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Problem(BaseModel):
    """What went wrong: the body of every answer that is not 2xx."""

    code: str = Field(description="A stable word for the kind of error; see docs/reference.")
    message: Shown = Field(description="What is wrong, and the value.")
    remedy: Shown = Field("", description="What to do about it.")
    retry_after_s: float | None = Field(None, description="When to ask again, where that helps.")


class RunInfo(Message):
    """What a worker must know of a run before it joins."""

    protocol: int = Field(description="Protocol version of the server.")
    run: RunId = Field(description="Id of the run; changes when a state directory is begun anew.")
    name: Shown
    algorithm: str
    local: dict[str, float] | None = Field(
        None, description="Options of the algorithm's local rule; null: sites train plainly."
    )
    local_package: str = Field(
        "", description="The package that has the algorithm at the server, with its version; empty: none is known."
    )
    on_missed: Literal["rebase", "reset"] = Field(
        description="Whether local steps of a missed round are carried over to the next version, or lost."
    )
    rounds: Count = Field(description="Rounds of the run; 0: until it is stopped.")
    sync_every: Count = Field(description="Local steps between two synchronisations; 0: the worker decides.")
    mode: Literal["sync", "async"] = Field("sync", description="Whether rounds wait for the workers they expect.")
    sync_rounds_first: Count = Field(0, description="Rounds of an asynchronous run that wait for them nevertheless.")
    schema_digest: Hex32
    schema_bytes: Count = Field(description="Bytes of the model's tensors.")
    fragments: int = Field(ge=1, description="Parts of the model that are synchronised in turn.")
    tau: Count = Field(0, description="Local steps between taking a fragment's update and merging its result.")
    alpha: float = Field(0.0, ge=0, le=1, description="Share of the local parameters that a merge keeps.")
    max_inflight: int = Field(1, ge=1, description="Fragments of one worker that may be under way at a time.")
    codec: str = Field(description="How `params` are encoded in an update.")
    codec_options: dict[str, str | int | float] = Field(
        default_factory=dict, description="The codec's keyword arguments."
    )
    downlink_codec: str = Field("none", description="How versions go down, as differences; none: whole.")
    downlink_codec_options: dict[str, str | int | float] = Field(
        default_factory=dict, description="That codec's keyword arguments."
    )
    part_bytes: int = Field(gt=0)
    placement: Literal["server", "swarm"] = Field("server", description="Where rounds are aggregated.")
    ranks: int = Field(1, ge=1, description="Ranks of sharded workers; no part is of two of them.")
    connections: int = Field(gt=0, description="Parallel connections a worker should use for tensors.")
    heartbeat_interval_s: float = Field(ge=0)
    heartbeat_timeout_s: float = Field(ge=0)
    waiting_heartbeat_s: float = Field(5.0, gt=0, description="Between two heartbeats while a call is unanswered.")
    idle_timeout_s: float = Field(gt=0)
    trains: bool = Field(True, description="Whether it has rounds at any time.")
    sends_tasks: bool = Field(False, description="Whether it has workflows that send tasks.")
    keeps_local: bool = Field(
        False, description="Whether sites are to keep the model that they submit: they are asked for it later."
    )


class TensorEntry(Message):
    """One tensor of the model."""

    name: str
    dtype: str = Field(description="As in safetensors: F32, BF16, I64, …")
    shape: list[Count]
    group: str = Field(description="How it is reduced: params or buffers.")


class Alias(Message):
    """A further name of a tied tensor, and the name that the tensor is listed under."""

    name: str
    owner: str


class SchemaMessage(Message):
    """The model's tensors in storage order; its digest is `RunInfo.schema_digest`."""

    tensors: list[TensorEntry]
    aliases: list[Alias] = Field(description="Further names of tied tensors.")
    fragments: list[Count] = Field(
        default_factory=list, description="The fragment that each tensor is in; empty where there is one."
    )

    @classmethod
    def of(cls, split: Split) -> SchemaMessage:
        """The message for a model as it is cut."""
        schema = split.schema
        return cls(
            tensors=[
                TensorEntry(name=s.name, dtype=s.dtype, shape=list(s.shape), group=s.group) for s in schema.tensors
            ],
            aliases=[Alias(name=name, owner=owner) for name, owner in schema.aliases],
            fragments=list(split.places) if split.count > 1 else [],
        )

    def to_split(self) -> Split:
        """How the model is cut.

        Raises:
            VersionSkew: not every tensor has a fragment.
        """
        schema = Schema(
            tuple(TensorSpec(entry.name, entry.dtype, tuple(entry.shape), entry.group) for entry in self.tensors),
            tuple((alias.name, alias.owner) for alias in self.aliases),
        )
        if not self.fragments:
            return Split.whole(schema)
        if len(self.fragments) != len(schema.tensors) or set(self.fragments) != set(range(max(self.fragments) + 1)):
            raise VersionSkew(
                "The server's schema does not say which fragment each tensor is in.", "Upgrade Atoll on both sides."
            )
        return Split(schema, tuple(self.fragments))


class Counted(Message):
    """Which update a site's kept state stands behind; without a base version: none, the state is zero."""

    base_version: Count | None = None
    digest: str = Field("", pattern="^([0-9a-f]{64})?$", description="Of the update; empty where it is not known.")

    def names(self, other: Counted) -> bool:
        """Whether both are one update."""
        return self.base_version == other.base_version and (self.digest in ("", other.digest) or not other.digest)


class Join(Message):
    """A worker asks to take part."""

    protocol: int = Field(description="Protocol version of the worker.")
    site: Site
    run: str = Field("", max_length=64, description="The run that it means; it joins no other at the same address.")
    host: Host = Field("", description="Where it runs, to be shown.")
    process: str = Field(
        "", pattern="^[0-9A-Za-z]{0,64}$", description="A random id of this process; the newest of a site wins."
    )
    schema_digest: Hex32 | None = Field(
        None, description="Of its model, or of the run's schema as it has read it; another one is refused."
    )
    sync_every: Count | None = Field(None, description="Its own H; must be the run's, where both have one.")
    num_fragments: Count | None = Field(None, description="Its own number of fragments; must be the run's.")
    labels: Labels = Field(default_factory=dict, description="Anything to be shown in status.")
    peer: Address = Field("", description="Where other workers of a swarm reach it: http://host:port.")
    local_state: Literal["", "kept", "missing", "new"] = Field(
        "", description="What it has of what the algorithm keeps at a site; new: it begins at zero on purpose."
    )
    local_state_of: list[Counted] = Field(
        default_factory=list,
        max_length=2,
        description="The updates that this state stands behind; empty: it does not tell.",
    )
    new_local_state: bool = Field(
        False, description="It begins at zero where what it has is not what the run counts on."
    )


class Joined(Message):
    """The answer to `Join`: the lease fences every later request of this process."""

    lease: str = Field(description="Sent back in the header Atoll-Lease; it holds a secret of 128 bits.")
    due: Count = Field(0, description="The fragment that is due next, for a worker that begins now.")
    evaluates: bool = Field(False, description="Whether a cross-site evaluation of the run will ask this site.")
    displaces: str | None = Field(
        None, description="The host of another process of the site, which had not left and takes part no more."
    )


class Leave(Message):
    """A worker deregisters. With `error`, because its training failed: shown at the server, the others go on."""

    error: Text | None = None


class Heartbeat(Message):
    """A worker lives, and how far it is."""

    step: Count = 0
    steps_per_s: float = Field(0.0, ge=0)
    version: Count = Field(0, description="Model version it trains on.")
    retries: Count = 0
    reconnections: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    state: State = Field("", description="What it is doing, in a word.")
    ends: bool = Field(False, description="It submits nothing more; it stays for the results of what it has submitted.")
    metrics: Metrics = Field(default_factory=dict)
    warnings: list[Text] = Field(
        default_factory=list, max_length=8, description="What the users of the site and of the server should know."
    )


class HeartbeatReply(Message):
    """The answer to `Heartbeat`: which versions are durable, and whether the run is finished."""

    durable_versions: list[Count | None] = Field(
        description="Of each fragment, the newest version that survives a power loss of the server; null: none yet."
    )
    finished: bool


class TicketRequest(Message):
    """Ask for the ticket of the next round of a fragment; waits up to `wait_s` for the round to open."""

    fragment: Count = 0
    wait_s: float = Field(0.0, ge=0, le=20.0)
    tasks: bool = Field(False, description="This process answers tasks, too: it is told at once where they come first.")


class Outcome(Message):
    """What became of a ticket."""

    ticket: Count
    state: Literal["open", "accepted", "counted", "refused", "expired"]
    base_version: Count
    version: Count | None = Field(None, description="The version it went into, once it counts.")
    digest: str = Field("", pattern="^([0-9a-f]{64})?$", description="Of its update, once it was acknowledged.")
    staleness: Count = Field(0, description="Versions between the base of an update that counts and its version.")
    reason: Shown = ""

    @property
    def is_in(self) -> bool:
        """Whether its update was acknowledged."""
        return self.state in ("accepted", "counted")


@dataclass(frozen=True, slots=True)
class VersionRef:
    """One version of one fragment; two versions with the same digest have the same bits."""

    fragment: int
    number: int
    digest: str


class Ticket(Message):
    """The right to submit one update for one round of one fragment."""

    id: Count
    fragment: Count
    round: Count = Field(description="Number of the round; the first is 1.")
    base_version: Count
    base_digest: Hex32 = Field(description="Digest of the version to pull and to train from.")
    layout_digest: Hex32 = Field(description="Of the update's layout; the worker computes the same one.")
    local_steps: Count = Field(0, description="Local steps to take from that version (DyLU); 0: the run's sync_every.")

    @property
    def base(self) -> VersionRef:
        """The version to train from."""
        return VersionRef(self.fragment, self.base_version, self.base_digest)


class TicketReply(Message):
    """A ticket; which sites the round waits for; that the run is over; or, to a worker that ends, its last result."""

    status: Literal["ticket", "wait", "finished", "ended"]
    ticket: Ticket | None = None
    previous: Outcome | None = Field(None, description="What became of this worker's ticket before.")
    counted: Counted | None = Field(
        None,
        description="With a ticket, where sites keep state: the update of this site that was counted last.",
    )
    head_version: Count
    head_digest: Hex32
    durable_version: Count | None = Field(
        None, description="The newest version that survives a power loss of the server; null: none yet."
    )
    round: Count = Field(0, description="Number of the round that is open, or opens next.")
    waiting_for: list[str] = Field(default_factory=list, description="Sites that the round still waits for.")
    reason: Shown = ""
    tasks: bool = Field(False, description="Whether tasks are what comes now: before the rounds, or behind them.")
    left_s: float | None = Field(None, description="Seconds that the run may still take; as in the status.")


class TicketState(Message):
    """Where a ticket stands, and which parts the server has on disk."""

    outcome: Outcome
    parts: list[Count] = Field(description="Parts that need not be sent again.")
    part_digests: list[Hex32] = Field(description="Their digests, in the order of `parts`.")


class Complete(Message):
    """All parts are there: submit the update."""

    digest: Hex32 = Field(description="BLAKE3 over the layout's digest and the part digests in order.")
    base_digest: Hex32 | None = Field(None, description="Of the version that it was trained from.")
    weight: float = Field(1.0, gt=0, description="Samples, tokens, or any number of the run's own.")
    steps: Count = Field(0, description="Local steps in this round.")
    metrics: Metrics = Field(default_factory=dict)
    source: Reference | None = Field(None, description="In a swarm: where the aggregating worker pulls it from.")


class Receipt(Message):
    """The update is in the journal; the same request gets the same receipt."""

    accepted: bool = Field(True, description="False in a swarm until the aggregating worker has pulled it.")
    unpulled: bool = Field(False, description="It was tried and did not work out; to be offered anew.")
    ticket: Count
    digest: Hex32
    fragment: Count
    base_version: Count


class Parts(Message):
    """The parts of a file. Its id is BLAKE3 over `layout_digest` and the digests of its parts."""

    layout_digest: Hex32 = Field(description="Of where it is cut: of its layout, else of its three sizes.")
    nbytes: Count
    part_digests: list[Hex32]


class Delta(Parts):
    """What makes a version of the one before it, where a worker has that; part n of it makes part n of the version."""

    base_version: Count
    base_digest: Hex32 = Field(description="Digest of the version that it leads from.")
    digest: Hex32


class Manifest(Parts):
    """A version's parts, so that a pull can check, resume and fetch only what is broken."""

    fragment: Count
    version: Count
    digest: Hex32
    delta: Delta | None = Field(None, description="Where there is one: what goes down in place of the whole version.")
    sources: list[Reference] = Field(
        default_factory=list, description="In a swarm: the workers that have it; empty: the server has."
    )


class ObjectOpen(Message):
    """Ask the server to keep an object. Its parts come next, then `ObjectComplete`."""

    head_bytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Of its head; a multiple of 64.")
    nbytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Of the whole, head included.")
    part_bytes: int = Field(gt=0, lt=NUMBER_BELOW, description="The most bytes of one part; a multiple of 64.")
    inline: bool = Field(False, description="Whether its manifest is to hold its bytes.")
    expires_s: float = Field(gt=0, description="Seconds that it should be kept; the server may keep it shorter.")


class ObjectOpened(Message):
    """The answer to `ObjectOpen`: the server has made room, and takes the parts."""

    object: Hex16
    secret: Hex16 = Field(description="To be shown with every request for the object.")
    expires_s: float = Field(description="Seconds that the server keeps it.")


class ObjectComplete(Message):
    """All parts are there: from now on it can be pulled, and never changes."""

    digest: Hex32 = Field(description="BLAKE3 over the sizes and the part digests in order.")


class BlobManifest(Parts):
    """The parts of a blob, and where it is cut."""

    head_bytes: Count
    part_bytes: Count
    inline: str | None = Field(None, description="All of its bytes in base64, where it is small and asked for.")

    @classmethod
    def of(cls, manifest: blobs.Manifest, inline: bytes | bytearray | None = None) -> BlobManifest:
        """Return the message, with the bytes of the file where they travel in it."""
        return cls(
            head_bytes=manifest.cuts.head_bytes,
            nbytes=manifest.cuts.nbytes,
            part_bytes=manifest.cuts.part_bytes,
            layout_digest=manifest.layout_digest,
            part_digests=[digest.hex() for digest in manifest.part_digests],
            inline=None if inline is None else base64.b64encode(inline).decode(),
        )

    @classmethod
    def read(cls, body: bytes | bytearray, what: str) -> BlobManifest:
        """Return the message in an answer.

        Raises:
            BadRequest: there is none.
        """
        try:
            return cls.model_validate_json(bytes(body))
        except ValidationError as error:
            raise BadRequest(
                f"The manifest of {what} cannot be read: {error.errors()[0]['msg']}.",
                "Check whether Atoll, of the same version, serves it.",
            ) from None

    def manifest(self) -> blobs.Manifest:
        """Return what it says, unchecked."""
        digests = tuple(bytes.fromhex(text) for text in self.part_digests)
        return blobs.Manifest(blobs.Cuts(self.head_bytes, self.nbytes, self.part_bytes), self.layout_digest, digests)

    def inline_bytes(self, manifest: blobs.Manifest, what: str) -> bytes | None:
        """Return the bytes that came along, checked against the manifest; None where there are none.

        Raises:
            BadRequest: they are none of this blob. PartCorrupt: they are damaged.
        """
        if self.inline is None:
            return None
        try:
            data = base64.b64decode(self.inline, validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest(f"What came with the manifest of {what} is no base64.", "Publish it again.") from None
        if len(data) != manifest.nbytes:
            raise BadRequest(f"{what} has {manifest.nbytes} bytes, and {len(data)} came with its manifest.")
        for part in manifest.cuts.parts():
            if blake3(memoryview(data)[part.start : part.stop]).digest() != manifest.part_digests[part.index]:
                raise PartCorrupt(f"Part {part.index} of {what} came damaged with its manifest.", "Fetch it again.")
        return data
