"""Typed messages of the HTTP interface: runs, workers, tickets, updates, versions and objects.

The OpenAPI document is made from these classes. Unknown fields are refused, so that a misspelt field is never lost
silently. Requests refer to tickets (the right to submit one update), versions and parts by the numbers that the server
issued. Only `SchemaMessage` has names of tensors.

To send an object (any data that a user publishes), a client opens it (`ObjectOpen`), sends its parts and completes it
(`ObjectComplete`). Then the object can be downloaded.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from blake3 import blake3
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from atoll.blobs import manifest as blobs
from atoll.config.bounds import (
    LEAST_CHUNK_BYTES,
    MAX_WEIGHT,
    MOST_CHUNK_BYTES,
    MOST_CONNECTIONS,
    MOST_FRAGMENTS,
    MOST_RANKS,
    MOST_STEPS,
)
from atoll.config.round_config import fault_in
from atoll.errors import BadRequest, PartCorrupt, VersionSkew
from atoll.format_text import number_of, size, visible
from atoll.protocol.read_message import lists_in, read_message
from atoll.registry import ReceivedName
from atoll.tensors.fragments import Split
from atoll.tensors.layout import Layout
from atoll.tensors.schema import ITEM_BYTES, RULES, Schema, TensorSpec

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

SHORTEST_S, LONGEST_S = 0.001, 2e6
"""Shortest and longest time between heartbeats and without a byte, in seconds: sockets cannot wait for a month."""
LONGEST_RETRY_S = 300.0
"""Longest pause before a retry that an answer can ask for, in seconds."""
MOST_PARTS, MOST_SHARES = 120_000, 4_000_000
"""Maximum number of parts of a version, and of tensors times ranks: a site keeps a few values for each in memory."""
MOST_LISTED = 250_000
"""Maximum length of a list or a table in an answer."""
LONGEST_ESTIMATE_S = 1e12
MOST_DIMS = 64
"""Maximum number of dimensions of a tensor, as in torch."""
MOST_SHAPES = 10_000
"""Maximum number of shapes in a request."""

NUMBER_BELOW = 2**62
"""Exclusive upper bound of numbers in messages: tickets, versions, parts, counts."""


def _shown(most: int) -> AfterValidator:
    """Return a validator of received text: it escapes unprintable characters and cuts the text to `most` characters."""
    return AfterValidator(lambda text: visible(text, most))


METRICS, METRIC_CHARS = 256, 128
"""Maximum number of metrics of an update, and maximum length of a metric's name, in characters."""
MetricName = Annotated[str, StringConstraints(max_length=METRIC_CHARS), _shown(METRIC_CHARS)]
Host = Annotated[str, StringConstraints(max_length=256), _shown(256)]
Label = Host
LabelName = Annotated[str, StringConstraints(max_length=64), _shown(64)]
Activity = LabelName
Text = Annotated[str, StringConstraints(max_length=2000), _shown(2000)]
SHOWN_CHARS = 2000
Shown = Annotated[str, _shown(SHOWN_CHARS)]
"""Text from the server. Unprintable characters are replaced by escapes, and a longer text is cut."""
Metrics = Annotated[dict[MetricName, float], Field(max_length=METRICS)]
MOST_LABEL_CHARS = 2000
"""Number of characters of all labels of a site, names included, that the status shows: it has those of every site."""
Labels = Annotated[dict[LabelName, Label], Field(max_length=32)]
Count = Annotated[int, Field(ge=0, lt=NUMBER_BELOW)]
T = TypeVar("T")
Many = Annotated[list[T], FailFast(), Field(max_length=MOST_LISTED)]
"""A list in an answer. Its validation ends at the first error: a list of all errors would need much memory."""
Table = Annotated[dict[Shown, T], Field(max_length=MOST_LISTED)]
"""A table in an answer: name, as text to show, → value."""
Steps = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Fragments = Annotated[int, Field(ge=1, le=MOST_FRAGMENTS)]

OptionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Scalar = (
    bool
    | Annotated[int, Field(gt=-NUMBER_BELOW, lt=NUMBER_BELOW)]
    | Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]
    | Annotated[str, StringConstraints(max_length=256)]
)
Option = Scalar | Annotated[list[Scalar], Field(max_length=16)]
Options = Annotated[dict[OptionName, Option], Field(max_length=64)]
"""Keyword arguments of a codec, a reducer or an outer optimizer."""


def unsendable(error: ValidationError, settings: Mapping[str, str]) -> str:
    """Return which setting a message for sites cannot carry, its value and why, as the beginning of an error.

    Args:
        error: the error of the message.
        settings: field of the message → setting from which its value comes. A dot separates fields of fields.
    """
    every = error.errors(include_url=False)
    key = ".".join(map(str, every[0]["loc"]))
    field = max((each for each in settings if f"{key}.".startswith(f"{each}.")), key=len, default="")
    count = field.count(".") + 2  # the field's names, and that of its option
    options = ".".join(map(str, every[0]["loc"][count - 1 : count] if field else ()))
    name = f"{settings[field]}.{options}" if options else settings.get(field, key)
    # an option may be one of several types: the error about the value's own type has a limit
    own = [each for each in every if each["loc"][:count] == every[0]["loc"][:count]]
    first = next((each for each in own if each.get("ctx")), own[0])
    most, value = first.get("ctx", {}).get("max_length"), first["input"]
    reason = first["msg"][0].lower() + first["msg"][1:]
    if most is not None:
        unit = "characters" if isinstance(value, str) else "entries"
        reason = f"it has {len(value)} {unit}, but at most {most} are sent to sites"
    elif len(own) > 1 and "ctx" not in first:
        reason = f"it is of type {type(value).__name__}"
    return f"{visible(name, 120)} is {visible(repr(value), 80)}, which sites cannot get: {visible(reason, 100)}."


def _sound(config: dict[str, Any]) -> dict[str, Any]:
    if fault := fault_in(config):
        raise ValueError(visible(fault, 200))
    return config


RoundConfig = Annotated[dict[str, Any], AfterValidator(_sound)]
"""What the run tells a site for a round: names and JSON values, within bounds."""

Estimate = Annotated[float, AfterValidator(lambda number: min(max(number, 0.0), LONGEST_ESTIMATE_S))]
"""A measured or estimated time in seconds, or a rate. A number out of bounds is read as the nearest one within."""
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
Interval = Annotated[float, Field(ge=SHORTEST_S, le=LONGEST_S)]


SINCE = "x-since-protocol"


def since(protocol: int) -> dict[str, JsonValue]:
    """Return the mark of a field that this protocol has added: its `json_schema_extra`."""
    return {SINCE: protocol}


class Message(BaseModel):
    """Base class of messages: frozen and strict. It refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


WRONG_TOKEN = "The request has no valid token."
"""Message of the `Problem` that answers a request without the server's token."""


def _retry_s(seconds: Any) -> Any:
    """Return the pause that an answer asks for, at most `LONGEST_RETRY_S`; None if it is no usable number."""
    if type(seconds) not in (int, float) or not seconds >= 0:
        return None
    return min(float(min(seconds, NUMBER_BELOW)), LONGEST_RETRY_S)


class Problem(BaseModel):
    """Description of an error: the body of every answer with an error status."""

    code: Shown = Field(description="A stable name of the kind of error; see docs/reference.")
    message: Shown = Field(description="What happened, with the value.")
    remedy: Shown = Field("", description="What to do about it.")
    retry_after_s: Annotated[float | None, BeforeValidator(_retry_s)] = Field(
        None, description="Seconds until a retry may help; null: not given."
    )


def bounded_s(seconds: float) -> float:
    """Return the time that is nearest to a setting and may stand in a message, in seconds; 0 stays 0."""
    return min(max(seconds, SHORTEST_S), LONGEST_S) if seconds else 0.0


def _none_or_interval(seconds: float) -> float:
    if 0 < seconds < SHORTEST_S:
        raise ValueError(f"should be 0, or {SHORTEST_S:g} or more")
    return seconds


class RunInfo(Message):
    """The facts about a run that a worker needs before it joins."""

    protocol: Count = Field(description="Protocol in which the server answers: the worker's, if the server serves it.")
    oldest_protocol: Count = Field(
        1, json_schema_extra=since(2), description="The oldest protocol of workers that the server serves."
    )
    run: RunId = Field(description="Id of the run; a new state directory gives a new id.")
    name: Shown
    algorithm: ReceivedName
    local: Annotated[dict[LabelName, float], Field(max_length=64)] | None = Field(
        None, description="Options of the algorithm's local rule; null: local training is not corrected."
    )
    local_package: Shown = Field(
        "", description="Package of the algorithm at the server, with its version; empty if unknown."
    )
    on_missed: Literal["rebase", "reset"] = Field(
        description="rebase: the local steps of a missed round are carried over to the next version; reset: lost."
    )
    rounds: Count = Field(description="Number of rounds; 0: until stopped.")
    sync_every: Steps = Field(description="Local steps between two synchronisations; 0: the worker decides.")
    mode: Literal["sync", "async"] = Field("sync", description="async: a round does not wait for all expected workers.")
    sync_rounds_first: Count = Field(0, description="Number of synchronous rounds at the start of an asynchronous run.")
    barrier: bool = Field(True, description="Whether a round waits for all its sites, for as long as they take part.")
    schema_digest: Hex32
    fragments: Fragments = Field(description="Number of fragments of the model.")
    tau: Steps = Field(0, description="Local steps between forming a fragment's update and merging the result.")
    alpha: float = Field(0.0, ge=0, le=1, description="Share of the local parameters that a merge keeps.")
    max_inflight: Fragments = Field(1, description="Fragments for which a worker may have unfinished updates at once.")
    codec: ReceivedName = Field(description="Codec of `params` in an update.")
    codec_options: Options = Field(default_factory=dict, description="The codec's keyword arguments.")
    downlink_codec: ReceivedName = Field(
        ReceivedName("none"), description="Codec of version differences; none: whole versions."
    )
    downlink_codec_options: Options = Field(default_factory=dict, description="The downlink codec's keyword arguments.")
    part_bytes: int = Field(ge=LEAST_CHUNK_BYTES, le=MOST_CHUNK_BYTES, description="Largest size of a part, in bytes.")
    placement: Literal["server", "swarm"] = Field("server", description="Where rounds are aggregated.")
    ranks: int = Field(
        1, ge=1, le=MOST_RANKS, description="Number of ranks of sharded workers; each part belongs to one rank."
    )
    connections: int = Field(ge=1, le=MOST_CONNECTIONS, description="Number of parallel connections for tensors.")
    heartbeat_interval_s: Annotated[Seconds, AfterValidator(_none_or_interval)] = Field(
        description="Seconds between two heartbeats; 0: no heartbeats."
    )
    heartbeat_timeout_s: Seconds
    idle_timeout_s: Interval
    needs_steps: bool = Field(False, description="Whether each update must report its local optimizer steps.")
    max_weight: float = Field(MAX_WEIGHT, gt=0, le=MAX_WEIGHT, description="Largest weight of an update.")
    max_steps: Count = Field(
        NUMBER_BELOW - 1, ge=1, description="If steps must be reported: the largest number of them."
    )
    trains: bool = Field(True, description="Whether the run ever has rounds.")
    sends_tasks: bool = Field(False, description="Whether the run has workflows that send tasks.")
    receipt_key: str = Field(
        "",
        pattern="^([0-9a-f]{64})?$",
        json_schema_extra=since(2),
        description="Public key (Ed25519) of the server's receipts; empty: none.",
    )
    keeps_local: bool = Field(
        False, description="Whether sites keep the model that they submit, for a later evaluation."
    )

    @property
    def streams(self) -> bool:
        """Whether the run uses Streaming DiLoCo: several fragments, or a delayed (tau) or partial (alpha) merge."""
        return self.fragments > 1 or self.tau > 0 or self.alpha > 0

    def require_split(self, split: Split) -> None:
        """Check a schema from the server, with its division into fragments, against this description of the run.

        Raises:
            VersionSkew: the two do not agree, or the model has more parts than a site can keep in memory.
        """
        if split.count != self.fragments or split.schema.digest != self.schema_digest:
            raise VersionSkew(
                "The model's schema from the server does not match the digest in the server's run description.",
                "Install the same release of Atoll at the server and at this worker.",
            )
        tensors, nbytes = len(split.schema.tensors), split.schema.nbytes
        if nbytes // self.part_bytes > MOST_PARTS or tensors * self.ranks > MOST_SHARES:
            raise VersionSkew(
                f"The server's model has {number_of(tensors, 'tensor')} with {size(nbytes)}, which {self.ranks} ranks "
                f"would exchange in parts of {size(self.part_bytes)}: too many parts for a site.",
                "Set network.part_bytes to a larger value at the server, or model.ranks to a smaller one.",
            )


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"the name {visible(text, 80)!r} has unprintable characters")
    return text


TensorName = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_one_line)]
"""Name of a tensor. It is shown as it is, so it has no line feeds and no escape sequences of terminals."""


def _dtype(text: str) -> str:
    if text not in ITEM_BYTES:
        raise ValueError(f"the dtype {visible(text, 80)!r} is not supported by this version")
    return text


Shape = Annotated[list[Count], Field(max_length=MOST_DIMS)]
"""Shape of a tensor."""


class TensorEntry(Message):
    """One tensor of the model."""

    name: TensorName
    dtype: Annotated[str, AfterValidator(_dtype)] = Field(
        description="Name of the dtype as in safetensors: F32, BF16, I64, …"
    )
    shape: Shape
    group: TensorName = Field(description="Group: params or buffers, or a group of the algorithm.")
    rule: str = Field(
        "",
        pattern=f"^({'|'.join(RULES)})?$",
        description="Rule for the next value of a buffer: max, sum, first, keep, or flags (first if all values at "
        "all sites are 0 or 1, else mean). Empty: mean for floats, max for other dtypes.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if math.prod(self.shape) * ITEM_BYTES[self.dtype] >= NUMBER_BELOW:
            raise ValueError("the tensor has too many elements")
        return self


class Alias(Message):
    """A further name of a tied tensor, and the name under which the schema lists the tensor."""

    name: TensorName
    owner: TensorName


class SchemaMessage(Message):
    """The schema of the model: its tensors in storage order. Its digest is `RunInfo.schema_digest`."""

    tensors: Annotated[list[TensorEntry], Field(max_length=MOST_SHARES)]
    aliases: list[Alias] = Field(max_length=MOST_SHARES, description="Further names of tied tensors.")
    fragments: list[Count] = Field(
        default_factory=list,
        max_length=MOST_SHARES,
        description="Fragment number of each tensor; empty if the run has one fragment.",
    )

    @classmethod
    def of(cls, split: Split) -> SchemaMessage:
        """Return the message that describes a model's schema and its division into fragments."""
        schema = split.schema
        return cls(
            tensors=[_entry(spec) for spec in schema.tensors],
            aliases=[Alias(name=name, owner=owner) for name, owner in schema.aliases],
            fragments=list(split.places) if split.count > 1 else [],
        )

    def to_split(self) -> Split:
        """Return the schema in this message, with its division into fragments.

        Raises:
            VersionSkew: the fragments do not cover every tensor, or their numbers are not 0, 1, 2, ….
        """
        return _split(map(_spec, self.tensors), [*map(_pair, self.aliases)], self.fragments)

    @classmethod
    def split_in(cls, body: bytes | bytearray) -> Split:
        """Return the schema in the body of an answer, with its division into fragments.

        The result is that of `to_split`. But the tensors are read one at a time, so that a model of 100,000 tensors
        takes no more memory than its schema.

        Raises:
            ValueError: the body is not a valid message. The text of the error is short and printable.
            VersionSkew: the fragments do not cover every tensor, or their numbers are not 0, 1, 2, ….
        """
        specs, pairs, places = list[TensorSpec](), list[tuple[str, str]](), list[int]()
        for name, element in lists_in(body):
            if name == "tensors":
                specs.append(_spec(read_message(TensorEntry, element)))
            elif name == "aliases":
                pairs.append(_pair(read_message(Alias, element)))
            elif name == "fragments" and len(element) <= len(str(NUMBER_BELOW)):
                places.append(int(element))
            else:
                raise ValueError(f"{visible(name, 80)}: no list of a schema")
        return _split(specs, pairs, places)


def _spec(entry: TensorEntry) -> TensorSpec:
    group = ".".join(filter(None, (entry.group, entry.rule)))
    return TensorSpec(entry.name, entry.dtype, tuple(entry.shape), group)


def _pair(alias: Alias) -> tuple[str, str]:
    return alias.name, alias.owner


def _split(specs: Iterable[TensorSpec], pairs: Sequence[tuple[str, str]], places: Sequence[int]) -> Split:
    schema = Schema(tuple(specs), tuple(pairs))
    owners, aliases = [spec.name for spec in schema.tensors], [name for name, _ in schema.aliases]
    if len({*owners, *aliases}) < len(owners) + len(aliases) or not {owner for _, owner in pairs} <= {*owners}:
        raise VersionSkew(
            "The server's schema names a tensor twice, or ties one to a tensor that it does not have.",
            "Upgrade Atoll on both sides.",
        )
    if not places:
        return Split.whole(schema)
    count = max(places) + 1
    if len(places) != len(schema.tensors) or count > len(places) or len(set(places)) != count:
        raise VersionSkew(
            "The server's schema does not list the fragment of each tensor.", "Upgrade Atoll on both sides."
        )
    return Split(schema, tuple(places))


def _entry(spec: TensorSpec) -> TensorEntry:
    group, _, rule = spec.group.partition(".")
    return TensorEntry(name=spec.name, dtype=spec.dtype, shape=list(spec.shape), group=group, rule=rule)


class Counted(Message):
    """The last counted update of a site. If the algorithm keeps state at sites, that state must include this update.

    `base_version` is the version that the update was trained from. If it is None, no update was counted yet, and the
    local state is zero.
    """

    base_version: Count | None = None
    digest: str = Field("", pattern="^([0-9a-f]{64})?$", description="Digest of the update; empty if unknown.")
    generation: Count = Field(0, description="Generation of the algorithm's state; each begins at zero.")

    def names(self, other: Counted) -> bool:
        """Return whether both messages name the same update. An empty digest equals every digest."""
        same_digest = self.digest in ("", other.digest) or not other.digest
        return self.position == other.position and same_digest

    @property
    def position(self) -> tuple[int, int]:
        """(generation, base version): of two updates of a site, the one with the larger position is later."""
        return self.generation, -1 if self.base_version is None else self.base_version


class SiteState(Message):
    """What a site says of the state that the algorithm keeps at it."""

    local_state: Literal["", "kept", "missing", "new"] = Field(
        "", description="Whether the site has its algorithm's state; new: the user lets the state start from zero."
    )
    local_state_of: list[Counted] = Field(
        default_factory=list,
        max_length=2,
        description="Updates after which this state was saved; empty: the site has no state.",
    )
    new_local_state: bool = Field(
        False, description="The algorithm's state may start from zero if it is not the one that the run expects."
    )


class Join(SiteState):
    """A worker's request to take part in the run."""

    protocol: Count = Field(description="Protocol version of the worker.")
    site: Site
    run: str = Field("", max_length=64, description="Id of the run to join, or empty; another run refuses the worker.")
    host: Host = Field("", description="Name of the worker's host, for the status.")
    process: str = Field(
        "", pattern="^[0-9A-Za-z]{0,64}$", description="Random id of this process; the newest process of a site wins."
    )
    schema_digest: Hex32 | None = Field(
        None, description="Digest of the worker's model, or of the run's schema. It must equal the server's digest."
    )
    sync_every: Count | None = Field(None, description="The worker's H; null: use the run's. Must equal the run's.")
    num_fragments: Count | None = Field(None, description="The worker's number of fragments. Must equal the run's.")
    labels: Labels = Field(default_factory=dict, description="Labels for the status.")
    peer: Reference | None = Field(
        None,
        description="In a swarm: a reference to a small object at this worker. It has the worker's address for the "
        "others, and the server pulls the object: this proves that the address is the worker's own.",
    )


class Joined(Message):
    """The answer to `Join`. The lease authorises every later request of this process."""

    lease: Annotated[str, StringConstraints(pattern=LEASE_PATTERN)] = Field(
        repr=False, description="Value for the header Atoll-Lease; contains a secret of 128 bits."
    )
    due: Count = Field(0, description="Fragment to synchronise first.")
    evaluates: bool = Field(False, description="Whether a cross-site evaluation of the run will ask this site.")
    displaces: Host | None = Field(
        None, description="Host of the site's earlier process, which this one replaces; null: none."
    )


class Leave(Message):
    """A worker's request to leave the run. If its training failed, `error` is the reason, which the status shows.

    The other workers continue the run.
    """

    error: Text | None = None


WAITING = "waiting for the round"
"""What a worker says in `Heartbeat.state` while it asks for a ticket."""


class Heartbeat(Message):
    """A worker's sign of life, with its progress."""

    step: Count = 0
    steps_per_s: Estimate = 0.0
    version: Count = Field(0, description="Version that the worker trains from.")
    retries: Count = 0
    reconnections: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    state: Activity = Field("", description="What the worker is doing, in a word.")
    ends: bool = Field(False, description="The worker submits no more updates, and waits for the last results.")
    metrics: Metrics = Field(default_factory=dict)
    warnings: list[Text] = Field(
        default_factory=list, max_length=8, description="Warnings for the users of the site and of the server."
    )


class HeartbeatReply(Message):
    """The answer to `Heartbeat`: the newest versions that survive a power loss, and whether the run is finished."""

    durable_versions: Many[Count | None] = Field(
        description="Newest version of each fragment that survives a power loss of the server; null: none yet."
    )
    finished: bool


class TicketRequest(SiteState):
    """A request for the ticket of a fragment's open round. The server waits up to `wait_s` for a round to open."""

    fragment: Count = 0
    wait_s: float = Field(0.0, ge=0, le=20.0)
    tasks: bool = Field(False, description="This process answers tasks, too: reply at once when tasks come first.")
    holds: str | None = Field(
        None,
        pattern="^([0-9a-f]{64})?$",
        description="Digest of the version that the site has, or empty. With it, the answer is framed: the length of "
        "its JSON text in 4 bytes (big-endian), the text, and the bytes of a small version that the site lacks.",
    )
    shapes: dict[TensorName, Shape] = Field(
        default_factory=dict,
        description="Shapes of the site's buffers with the rule `first` that differ from the schema.",
        max_length=MOST_SHAPES,
    )


class SignedReceipt(Message):
    """What a server has signed of an update. `protocol/receipts` says what the signature is of."""

    run: RunId
    site: Site
    ticket: Count
    fragment: Count
    base_version: Count
    digest: Hex32 = Field(description="Digest of the update.")
    weight: float = Field(description="The weight with which it counts.")
    steps: Count
    metrics: Metrics
    state: Literal["accepted", "counted"] = Field(description="counted: a version contains the update.")
    version: Count = Field(0, description="The version that contains it; 0: none yet.")
    signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")] = Field(description="Ed25519.")


class Outcome(Message):
    """The state of a ticket (the right to submit one update) and of its update."""

    ticket: Count
    state: Literal["open", "accepted", "counted", "refused", "sat out", "expired"]
    base_version: Count
    version: Count | None = Field(None, description="Version that contains the update, once it counts.")
    digest: str = Field("", pattern="^([0-9a-f]{64})?$", description="Digest of the acknowledged update.")
    staleness: Count = Field(0, description="Versions between the base of the update and the base of its round.")
    reason: Shown = ""
    receipt: SignedReceipt | None = Field(
        None, json_schema_extra=since(2), description="The server's receipt of an accepted update."
    )

    @property
    def is_in(self) -> bool:
        """Whether the server has acknowledged the update of the ticket."""
        return self.state in ("accepted", "counted")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.version is not None and self.version <= self.base_version:
            raise ValueError(f"version {self.version} cannot contain an update of version {self.base_version}")
        return self


@dataclass(frozen=True, slots=True)
class VersionRef:
    """One version of one fragment. Versions with the same digest are bit-identical."""

    fragment: int
    number: int
    digest: str


class Ticket(Message):
    """A ticket: the right of a worker to submit one update for one round of one fragment of the model."""

    id: Count
    fragment: Count
    round: Count = Field(description="Number of the round; the first is 1.")
    base_version: Count
    base_digest: Hex32 = Field(description="Digest of the version to pull and to train from.")
    layout_digest: Hex32 = Field(description="Digest of the update's layout.")
    local_steps: Steps = Field(
        0, description="Number of local steps, by speed (DyLU) or round; 0: the run's sync_every."
    )
    generation: Count = Field(0, description="Generation of the algorithm's state with which the update is formed.")
    from_zero: bool = Field(False, description="The base version's tensors of the algorithm count as zero.")
    global_step: Count = Field(0, description="Local steps that the base version has behind it, along one site.")
    config: RoundConfig = Field(default_factory=dict, description="What the run tells the site for this round.")

    @property
    def base(self) -> VersionRef:
        """The version to train from."""
        return VersionRef(self.fragment, self.base_version, self.base_digest)


class Parts(Message):
    """The digests of a file and of its parts. Both sides know the layout that divides the file into parts."""

    digest: Hex32 = Field(description="BLAKE3 over the layout's digest and the part digests in order.")
    part_digests: Many[Hex32]

    def require_digest(self, wanted: str, layout: Layout, what: str) -> tuple[bytes, ...]:
        """Check that these digests belong to the wanted file, and return the BLAKE3 of each part.

        Args:
            wanted: digest of the file.
            layout: layout of the file, as this side has computed it.
            what: name of the file in error messages.

        Raises:
            PartCorrupt: the digests of the parts belong to another file, or to another layout.
        """
        manifest = blobs.Manifest.of_layout(layout, [bytes.fromhex(text) for text in self.part_digests])
        manifest.require_id(wanted, what)
        return manifest.part_digests


class Delta(Parts):
    """The difference between a version and its base version, for workers that have the base.

    Part n of the difference and part n of the base give part n of the version.
    """

    base_version: Count
    base_digest: Hex32 = Field(description="Digest of the base version.")


class VersionManifest(Parts):
    """The parts of a version and their digests, so that a download can be checked and resumed part by part."""

    version: Count
    delta: Delta | None = Field(None, description="Difference from the previous version; null: none.")
    sources: Many[Reference] = Field(
        default_factory=list, description="Workers of a swarm with this version; empty: the server has it."
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.delta is not None and self.delta.base_version >= self.version:
            raise ValueError(f"version {self.version} is no difference from version {self.delta.base_version}")
        return self


class TicketReply(Message):
    """The answer to `TicketRequest`.

    `status` is `ticket` (see the field `ticket`), `wait` (ask again), `finished` (the run is over), or `ended` (this
    worker submits no more updates; `previous` has the state of its last one).
    """

    status: Literal["ticket", "wait", "finished", "ended"]
    ticket: Ticket | None = None
    previous: Outcome | None = Field(None, description="State of this worker's previous ticket.")
    counted: Counted | None = Field(
        None,
        description="Last counted update of this site; only with a ticket, and if sites keep local state.",
    )
    head_version: Count
    head_digest: Hex32
    durable_version: Count | None = Field(
        None, description="The newest version that survives a power loss of the server; null: none yet."
    )
    round: Count = Field(0, description="Number of the open round, or of the next one.")
    waiting_for: Many[Site] = Field(default_factory=list, description="Sites that the round still waits for.")
    reason: Shown = ""
    tasks: bool = Field(False, description="Whether tasks come now, before or after the rounds.")
    left_s: Estimate | None = Field(None, description="Estimated seconds until the end of the run; see the status.")
    global_step: Count = Field(0, description="Local steps that the head has behind it, along one site.")
    local_steps: Steps = Field(0, description="Without a ticket: what it would say for the current round.")
    config: RoundConfig = Field(default_factory=dict, description="Without a ticket: what it would say.")
    manifest: VersionManifest | None = Field(
        None, description="Manifest of the ticket's version, if the request says that the site lacks it."
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.status == "ticket") != (self.ticket is not None):
            raise ValueError(f"the status {self.status} does not fit the ticket")
        return self


class TicketState(Message):
    """The state of a ticket, and the parts of its update that the server has on disk."""

    outcome: Outcome
    parts: Many[Count] = Field(description="Numbers of the parts that the server has.")
    part_digests: Many[Hex32] = Field(description="Digests of these parts, in the order of `parts`.")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if len(self.parts) != len(self.part_digests):
            raise ValueError("the numbers of parts and of digests differ")
        return self


class Report(Message):
    """What a site reports of its update besides the tensors.

    Notes, messages, the journal and the summary of a round all carry this record. So a new value of an update is a
    field here, a measurement where the site trains, and a place where it is shown.
    """

    weight: float = Field(1.0, ge=0, description="Weight: samples, tokens or any other number; 0: no update is sent.")
    steps: Count = Field(0, description="Local steps in this round; 0: not counted.")
    metrics: Metrics = Field(default_factory=dict)
    train_seconds: Estimate = Field(0.0, description="Seconds since the site's previous update, without waiting.")
    wait_seconds: Estimate = Field(
        0.0, description="Seconds since then in which training stood still: for a round, for versions, for uploads."
    )

    @property
    def report(self) -> Report:
        """These values alone, without those of a subclass."""
        return Report.model_construct(**{name: getattr(self, name) for name in Report.model_fields})


class Complete(Report):
    """A request to submit an update after all its parts were sent."""

    weight: float = Field(1.0, gt=0, description="Weight of the update: samples, tokens or any other number.")
    digest: Hex32 = Field(description="BLAKE3 over the layout's digest and the part digests in order.")
    base_digest: Hex32 | None = Field(None, description="Digest of the version that the update was trained from.")
    generation: Count = Field(0, description="Generation of the algorithm's state with which it was formed.")
    source: Reference | None = Field(None, description="Reference to the update, for the aggregator of a swarm.")


class SitOut(Message):
    """A request to sit out the round of a ticket: the site sends no update, for example because it has no samples.

    The request may be repeated.
    """

    metrics: Metrics = Field(default_factory=dict, description="Recorded for the site, but in no mean.")


class Receipt(Message):
    """The answer to `Complete`. If `accepted` is true, the server has recorded the update in its journal.

    A repeated request gets the same answer.
    """

    accepted: bool = Field(True, description="False in a swarm until the aggregating worker has pulled the update.")
    unpulled: bool = Field(False, description="The aggregating worker could not pull the update: offer it again.")
    digest: Hex32
    receipt: SignedReceipt | None = Field(
        None, json_schema_extra=since(2), description="The same, signed, once the update is accepted."
    )


class ObjectOpen(Message):
    """A request to the server to store an object. The parts follow, then `ObjectComplete`."""

    head_bytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Bytes of the header; a multiple of 64.")
    nbytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Bytes of the object, header included.")
    part_bytes: int = Field(gt=0, lt=NUMBER_BELOW, description="Maximum bytes of one part; a multiple of 64.")
    inline: bool = Field(False, description="Whether the manifest contains the object's bytes.")
    expires_s: float = Field(gt=0, description="Seconds to keep the object; the server may shorten this.")
    key: Hex16 | None = Field(
        None, description="The same in each attempt: the object of an attempt with a lost answer is removed."
    )


class ObjectOpened(Message):
    """The answer to `ObjectOpen`: the server has reserved space and accepts the parts."""

    object: Hex16
    secret: Hex16 = Field(description="Secret that each request for the object needs.")
    expires_s: float = Field(ge=0, le=10**9, description="Seconds that the server keeps the object.")


class ObjectComplete(Message):
    """A request to complete an object after all its parts were sent. From then on it can be downloaded."""

    digest: Hex32 = Field(description="BLAKE3 over the sizes and the part digests in order.")


class BlobManifest(Message):
    """The manifest of a blob: the sizes of its header and parts, and the digests of its parts.

    The id of the blob is the BLAKE3 hash of `layout_digest` and the digests of the parts.
    """

    layout_digest: Hex32 = Field(description="Digest of the layout; for an object, digest of its three sizes.")
    part_digests: Many[Hex32]
    head_bytes: Count
    nbytes: Count
    part_bytes: Count
    inline: str | None = Field(None, description="All bytes in base64 if the object was published inline; else null.")

    @classmethod
    def of(cls, manifest: blobs.Manifest, inline: bytes | bytearray | None = None) -> BlobManifest:
        """Convert a manifest to a message.

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
        """Parse the message in the body of an answer.

        Args:
            body: the body, JSON.
            what: name of the blob in error messages.

        Raises:
            BadRequest: the body is not a valid message.
        """
        try:
            return read_message(cls, body)
        except ValueError as error:
            raise BadRequest(
                f"The manifest of {what} cannot be read: {error}.",
                "Use the same version of Atoll on both sides.",
            ) from None

    def manifest(self) -> blobs.Manifest:
        """Return the manifest in this message, without checking it."""
        digests = tuple(bytes.fromhex(text) for text in self.part_digests)
        return blobs.Manifest(blobs.Cuts(self.head_bytes, self.nbytes, self.part_bytes), self.layout_digest, digests)

    def inline_bytes(self, manifest: blobs.Manifest, what: str) -> bytes | None:
        """Return the inline bytes of the blob, checked against the manifest; None if the message has none.

        Args:
            manifest: the manifest of the blob.
            what: name of the blob in error messages.

        Raises:
            BadRequest: the bytes are not base64, or their number is wrong.
            PartCorrupt: a part does not match its digest.
        """
        if self.inline is None:
            return None
        try:
            data = base64.b64decode(self.inline, validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest(f"The bytes in the manifest of {what} are not base64.", "Publish it again.") from None
        if len(data) != manifest.nbytes:
            raise BadRequest(f"The manifest of {what} contains {len(data)} bytes of it, not {manifest.nbytes}.")
        for part in manifest.cuts.parts():
            if blake3(memoryview(data)[part.start : part.stop]).digest() != manifest.part_digests[part.index]:
                raise PartCorrupt(f"Part {part.index} of {what} arrived damaged.", "Fetch the object again.")
        return data
