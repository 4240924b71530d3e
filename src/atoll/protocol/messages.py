"""Typed messages of the HTTP interface: runs, workers, tickets, updates, versions and objects.

The OpenAPI document is made from these classes. Unknown fields are refused, so that a misspelt field is never lost
silently. Requests name tickets, versions and parts by numbers that the server issued. Only `SchemaMessage` has names
of tensors.

An object is opened (`ObjectOpen`), sent in parts, completed (`ObjectComplete`), and then downloaded.
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
"""Name of a site: 1 to 64 letters, digits, `.`, `_`, `-`. Safe in logs and as the name of a folder."""

RunId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""Id of a run. It cannot be a path: a worker names a folder after it and deletes the folders of earlier runs."""

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A BLAKE3 digest in hex."""

Hex16 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Id or secret of an object in hex."""

Reference = Annotated[str, StringConstraints(max_length=512, pattern=r"^atoll-refs?://")]
"""A `TensorRef` as text. Every process that has this text can download the object."""

LEASE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}:[0-9]{1,18}:[0-9A-Za-z]{0,64}(:[0-9a-f]{32})?$"
"""Pattern of a lease, `site:number:process:secret`, as the server issues it. A lease without a secret has no rights."""

NUMBER_BELOW = 2**62
"""Exclusive upper bound of numbers in messages: tickets, versions, parts, counts."""


def _shown(most: int) -> AfterValidator:
    """Return a validator for text from a peer: at most `most` characters, unprintable ones replaced by escapes."""
    return AfterValidator(lambda text: visible(text, most))


METRICS, METRIC_CHARS = 256, 128
"""Most metrics of an update, and most characters in the name of a metric."""
MetricName = Annotated[str, StringConstraints(max_length=METRIC_CHARS), _shown(METRIC_CHARS)]
Host = Annotated[str, StringConstraints(max_length=256), _shown(256)]
Label = Host
LabelName = Annotated[str, StringConstraints(max_length=64), _shown(64)]
State = LabelName
Address = Annotated[str, StringConstraints(max_length=300), _shown(300)]
Text = Annotated[str, StringConstraints(max_length=2000), _shown(2000)]
Shown = Annotated[str, AfterValidator(visible)]
"""Text of any length from the server. Unprintable characters are replaced by escapes."""
Metrics = Annotated[dict[MetricName, float], Field(max_length=METRICS)]
Labels = Annotated[dict[LabelName, Label], Field(max_length=32)]
Count = Annotated[int, Field(ge=0, lt=NUMBER_BELOW)]


class Message(BaseModel):
    """Base class of messages: frozen and strict. It refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Problem(BaseModel):
    """Description of an error: the body of every answer with an error status."""

    code: str = Field(description="A stable word for the kind of error; see docs/reference.")
    message: Shown = Field(description="What is wrong, and the value.")
    remedy: Shown = Field("", description="What to do about it.")
    retry_after_s: float | None = Field(None, description="When to ask again, where that helps.")


class RunInfo(Message):
    """The facts about a run that a worker needs before it joins."""

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
    """A further name of a tied tensor, and the name under which the schema lists the tensor."""

    name: str
    owner: str


class SchemaMessage(Message):
    """The schema of the model: its tensors in storage order. Its digest is `RunInfo.schema_digest`."""

    tensors: list[TensorEntry]
    aliases: list[Alias] = Field(description="Further names of tied tensors.")
    fragments: list[Count] = Field(
        default_factory=list, description="The fragment that each tensor is in; empty where there is one."
    )

    @classmethod
    def of(cls, split: Split) -> SchemaMessage:
        """Return the message for a model and its division into fragments."""
        schema = split.schema
        return cls(
            tensors=[
                TensorEntry(name=s.name, dtype=s.dtype, shape=list(s.shape), group=s.group) for s in schema.tensors
            ],
            aliases=[Alias(name=name, owner=owner) for name, owner in schema.aliases],
            fragments=list(split.places) if split.count > 1 else [],
        )

    def to_split(self) -> Split:
        """Return the schema with its division into fragments.

        Raises:
            VersionSkew: the fragments do not cover every tensor, or their numbers are not 0, 1, 2, ….
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
    """The update after which a site's local state was saved. Without a base version: no update, the state is zero."""

    base_version: Count | None = None
    digest: str = Field("", pattern="^([0-9a-f]{64})?$", description="Of the update; empty where it is not known.")

    def names(self, other: Counted) -> bool:
        """Return whether both name the same update. An empty digest matches every digest."""
        return self.base_version == other.base_version and (self.digest in ("", other.digest) or not other.digest)


class Join(Message):
    """A worker's request to take part in the run."""

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
    """The answer to `Join`. The lease authorises every later request of this process."""

    lease: str = Field(description="Sent back in the header Atoll-Lease; it holds a secret of 128 bits.")
    due: Count = Field(0, description="The fragment that is due next, for a worker that begins now.")
    evaluates: bool = Field(False, description="Whether a cross-site evaluation of the run will ask this site.")
    displaces: str | None = Field(
        None, description="The host of another process of the site, which had not left and takes part no more."
    )


class Leave(Message):
    """A worker's departure. `error` is set if its training failed; the server shows it, and other workers go on."""

    error: Text | None = None


class Heartbeat(Message):
    """A worker's sign of life, with its progress."""

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
    """The answer to `Heartbeat`: the durable versions, and whether the run is finished."""

    durable_versions: list[Count | None] = Field(
        description="Of each fragment, the newest version that survives a power loss of the server; null: none yet."
    )
    finished: bool


class TicketRequest(Message):
    """A request for the ticket of a fragment's next round. The server waits up to `wait_s` for the round to open."""

    fragment: Count = 0
    wait_s: float = Field(0.0, ge=0, le=20.0)
    tasks: bool = Field(False, description="This process answers tasks, too: it is told at once where they come first.")


class Outcome(Message):
    """The state of a ticket and of its update."""

    ticket: Count
    state: Literal["open", "accepted", "counted", "refused", "expired"]
    base_version: Count
    version: Count | None = Field(None, description="The version it went into, once it counts.")
    digest: str = Field("", pattern="^([0-9a-f]{64})?$", description="Of its update, once it was acknowledged.")
    staleness: Count = Field(0, description="Versions between the base of an update that counts and its version.")
    reason: Shown = ""

    @property
    def is_in(self) -> bool:
        """Whether the server has acknowledged the update of the ticket."""
        return self.state in ("accepted", "counted")


@dataclass(frozen=True, slots=True)
class VersionRef:
    """One version of one fragment. Versions with the same digest are bit-identical."""

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
    """The answer to `TicketRequest`.

    `status` is `ticket` (see `ticket`), `wait` (ask again), `finished` (the run is over), or `ended` (this worker
    submits no more updates; `previous` is its last result).
    """

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
    """The state of a ticket, and the parts of its update that the server has on disk."""

    outcome: Outcome
    parts: list[Count] = Field(description="Parts that need not be sent again.")
    part_digests: list[Hex32] = Field(description="Their digests, in the order of `parts`.")


class Complete(Message):
    """A request to submit an update after all its parts were sent."""

    digest: Hex32 = Field(description="BLAKE3 over the layout's digest and the part digests in order.")
    base_digest: Hex32 | None = Field(None, description="Of the version that it was trained from.")
    weight: float = Field(1.0, gt=0, description="Samples, tokens, or any number of the run's own.")
    steps: Count = Field(0, description="Local steps in this round.")
    metrics: Metrics = Field(default_factory=dict)
    source: Reference | None = Field(None, description="In a swarm: where the aggregating worker pulls it from.")


class Receipt(Message):
    """The answer to `Complete`; a repeated request gets the same one. If `accepted`, the update is in the journal."""

    accepted: bool = Field(True, description="False in a swarm until the aggregating worker has pulled it.")
    unpulled: bool = Field(False, description="It was tried and did not work out; to be offered anew.")
    ticket: Count
    digest: Hex32
    fragment: Count
    base_version: Count


class Parts(Message):
    """The parts of a file. The id of the file is BLAKE3 over `layout_digest` and the digests of the parts."""

    layout_digest: Hex32 = Field(description="Of where it is cut: of its layout, else of its three sizes.")
    nbytes: Count
    part_digests: list[Hex32]


class Delta(Parts):
    """The difference between a version and its base version, for workers that have the base.

    Part n of the difference and part n of the base give part n of the version.
    """

    base_version: Count
    base_digest: Hex32 = Field(description="Digest of the version that it leads from.")
    digest: Hex32


class Manifest(Parts):
    """The parts of a version. With them a download can be checked and resumed part by part."""

    fragment: Count
    version: Count
    digest: Hex32
    delta: Delta | None = Field(None, description="Where there is one: what goes down in place of the whole version.")
    sources: list[Reference] = Field(
        default_factory=list, description="In a swarm: the workers that have it; empty: the server has."
    )


class ObjectOpen(Message):
    """A request that the server keep an object. The parts follow, then `ObjectComplete`."""

    head_bytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Of its head; a multiple of 64.")
    nbytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Of the whole, head included.")
    part_bytes: int = Field(gt=0, lt=NUMBER_BELOW, description="The most bytes of one part; a multiple of 64.")
    inline: bool = Field(False, description="Whether its manifest is to hold its bytes.")
    expires_s: float = Field(gt=0, description="Seconds that it should be kept; the server may keep it shorter.")


class ObjectOpened(Message):
    """The answer to `ObjectOpen`: the server has reserved space and accepts the parts."""

    object: Hex16
    secret: Hex16 = Field(description="To be shown with every request for the object.")
    expires_s: float = Field(description="Seconds that the server keeps it.")


class ObjectComplete(Message):
    """A request to complete an object after all its parts were sent. From then on it can be downloaded."""

    digest: Hex32 = Field(description="BLAKE3 over the sizes and the part digests in order.")


class BlobManifest(Parts):
    """The manifest of a blob: the sizes of its head and parts, and the digests of its parts."""

    head_bytes: Count
    part_bytes: Count
    inline: str | None = Field(None, description="All of its bytes in base64, where it is small and asked for.")

    @classmethod
    def of(cls, manifest: blobs.Manifest, inline: bytes | bytearray | None = None) -> BlobManifest:
        """Return the message for a manifest.

        Args:
            manifest: the manifest.
            inline: all bytes of the blob, to send within the message; None to leave them out.
        """
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
        """Return the message in the body of an answer.

        Args:
            body: the body, JSON.
            what: noun for the blob in errors.

        Raises:
            BadRequest: the body is not a valid message.
        """
        try:
            return cls.model_validate_json(bytes(body))
        except ValidationError as error:
            raise BadRequest(
                f"The manifest of {what} cannot be read: {error.errors()[0]['msg']}.",
                "Check whether Atoll, of the same version, serves it.",
            ) from None

    def manifest(self) -> blobs.Manifest:
        """Return the manifest in this message, without checking it."""
        digests = tuple(bytes.fromhex(text) for text in self.part_digests)
        return blobs.Manifest(blobs.Cuts(self.head_bytes, self.nbytes, self.part_bytes), self.layout_digest, digests)

    def inline_bytes(self, manifest: blobs.Manifest, what: str) -> bytes | None:
        """Return the inline bytes of the blob, checked against the manifest; None if the message has none.

        Args:
            manifest: the manifest of the blob.
            what: noun for the blob in errors.

        Raises:
            BadRequest: the bytes are not base64, or their number is wrong.
            PartCorrupt: a part does not match its digest.
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
