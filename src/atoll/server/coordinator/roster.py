"""What the server knows about each site beyond its lease: its process, its last heartbeat, its updates so far.

Rounds depend on only three of these facts: leases, the number of refused updates in a row, and the speeds for DyLU.
Workers report most of the other facts, which may be wrong.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.errors import BadRequest
from atoll.format_text import visible
from atoll.protocol import messages
from atoll.store.journal_tables import MemberRow, utc_text
from atoll.tensors.reference import hash_of_secret, new_id

LOG = logging.getLogger("atoll.server")

TRAINING = "training"
STILL = 4.0
"""Training counts as hanging only if it pauses for this many times the longest earlier pause between two steps."""

WARNINGS_LOGGED = 100
"""So many different warnings of each site are logged: a broken site may send others with every heartbeat."""


def _progress(beat: messages.Heartbeat) -> tuple[object, ...]:
    """Return the values of a heartbeat that change when a worker makes progress."""
    return beat.step, beat.version, beat.state, beat.bytes_up, beat.bytes_down


@dataclass
class Presence:
    """What the server knows about the worker of one site.

    Times are those of `time.monotonic`, in seconds.

    Attributes:
        sealed: hash of the lease's secret (BLAKE3); empty if the site has no lease.
        heard: whether the worker has sent a request since this server started.
        heard_s: time of the last request.
        beat: the last heartbeat.
        gradient_bytes: bytes that data-parallel training would have sent: fragment's size × local steps, summed over
            the updates accepted since the server started.
        waited_s: fragment → seconds in which training stood still until its last update since the server started.
        bases: fragment → base version of the worker's newest ticket. Restored after a restart of the server.
        refused: why the last update was refused; empty after an accepted one.
        moved_s: time of the last heartbeat that showed progress: another step, number of bytes, version or state.
        longest_s: longest time between two such heartbeats during training, in seconds.
        displaced: process → host, for older processes of this site that a newer one replaced before they left.
        rival: warning about a process that was replaced while it ran; empty if there is none.
        is_restored: whether the worker joined before this server started, so that its steps may be of earlier rounds.
        told: warnings of the site that were logged.
        metric_names: names of the metrics that the site has reported.
        many_metrics: warning that it reports too many different metrics; empty if it does not.
    """

    site: str
    host: str = ""
    process: str = ""
    sealed: str = field(default="", repr=False)
    joined_at: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    state: str = "alive"
    error: str = ""
    heard: bool = True
    heard_s: float = field(default_factory=time.monotonic)
    beat: messages.Heartbeat = field(default_factory=messages.Heartbeat)
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    gradient_bytes: int = 0
    waited_s: dict[int, float] = field(default_factory=dict)
    metric_names: set[str] = field(default_factory=set)
    many_metrics: str = ""
    bases: dict[int, int] = field(default_factory=dict)
    refused_in_a_row: int = 0
    refused: str = ""
    moved_s: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    displaced: dict[str, str] = field(default_factory=dict)
    rival: str = ""
    is_restored: bool = False
    told: set[str] = field(default_factory=set)

    @classmethod
    def joining(cls, message: messages.Join, before: Presence | None) -> tuple[Presence, str]:
        """Return the record of a worker process that joins, and the secret of its new lease.

        The site's counters are copied from `before`. If a process on another host takes part under this name, log a
        warning.

        Args:
            message: the message of the process.
            before: the record of the site so far; None for a new site.
        """
        secret = new_id()
        kept = (
            *("rounds", "bases", "refused_in_a_row", "refused", "bytes_up", "bytes_down", "gradient_bytes", "waited_s"),
            *("displaced", "rival"),
        )
        joined = cls(
            site=message.site,
            host=message.host,
            process=message.process,
            sealed=hash_of_secret(secret),
            joined_at=utc_text(),
            labels=_shown_labels(message),
            told=before.told if before is not None else set(),
            **{name: getattr(before, name) for name in kept if before is not None},
        )
        if before and before.state == "alive" and before.process and before.process != message.process:
            joined.displaced = {**before.displaced, before.process: before.host}
            if before.host != message.host:
                LOG.warning(
                    "%s joined from %s, but took part from %s until now: check that two machines do not have "
                    "the same site name",
                    message.site,
                    message.host or "an unnamed host",
                    before.host or "an unnamed host",
                )
        return joined, secret

    def meets(self, process: str) -> None:
        """Handle a request of `process`. If a newer process has replaced this one, log once that both ran."""
        if process not in self.displaced:
            return
        other_host, this_host = (host or "an unnamed host" for host in (self.displaced.pop(process), self.host))
        hosts = f"both on {this_host}" if other_host == this_host else f"on {other_host} and on {this_host}"
        self.rival = (
            f"two processes took part as {self.site}, {hosts}: the older one still ran when it was replaced. "
            "Use a different site name for each process"
        )
        LOG.warning("%s", self.rival)

    def note(self, beat: messages.Heartbeat) -> None:
        """Store a heartbeat. If it shows progress, also store the time. Log each of its warnings once."""
        for text in beat.warnings:
            if text not in self.told and len(self.told) < WARNINGS_LOGGED:
                self.told.add(text)
                LOG.warning("%s reports: %s", self.site, text)
        if _progress(beat) != _progress(self.beat):
            now_s = time.monotonic()
            if self.beat.state == TRAINING:
                self.longest_s = max(self.longest_s, now_s - self.moved_s)
            self.moved_s = now_s
        self.beat = beat

    def hangs_s(self, patience_s: float) -> float:
        """Return for how many seconds training has made no progress, if this time is unusually long; else 0.

        It is unusually long if it exceeds `patience_s`, and is at least `STILL` times as long as any earlier pause.
        """
        # a script may report no steps until its round ends, which may take long
        known = self.longest_s > 0 or (self.beat.step > 0 and not self.is_restored)
        still_s = time.monotonic() - self.moved_s
        hangs = known and self.beat.state == TRAINING and still_s >= max(patience_s, STILL * self.longest_s)
        return still_s if hangs else 0.0

    @property
    def holder(self) -> str:
        """The process id and the hash of the lease's secret, as one text for the journal."""
        return f"{self.process}:{self.sealed}"

    @property
    def ended(self) -> str:
        """How the worker ended, as words after its name, such as "has left"; empty while the worker takes part."""
        if self.state == "alive":
            return ""
        return {"dead": "is dead", "failed": "failed", "left": "has left"}.get(self.state, f"is {self.state}")


@dataclass(frozen=True)
class Lease:
    """A lease (the right of one worker process to act for a site), as stated in the header of a request.

    Attributes:
        site: name of the site.
        number: number of the lease. If the site has a lease with a higher number, this one is no longer valid.
        process: id of the process.
        secret: 128 random bits in hex that prove the sender. Only the process knows them; the server stores a hash.
    """

    site: str
    number: int
    process: str
    secret: str = field(default="", repr=False)

    @property
    def header(self) -> str:
        """The lease as text, for the header of a request."""
        return f"{self.site}:{self.number}:{self.process}:{self.secret}"

    def opens(self, presence: Presence) -> bool:
        """Return whether the lease's secret is the one that the site got. The comparison takes constant time."""
        return bool(presence.sealed) and hmac.compare_digest(hash_of_secret(self.secret), presence.sealed)

    @classmethod
    def parse(cls, text: str | None) -> Lease:
        """Parse the lease header of a request.

        Raises:
            BadRequest: the header is missing or malformed.
        """
        if text is None or not re.match(messages.LEASE_PATTERN, text):
            raise BadRequest(
                "The Atoll-Lease header is missing or malformed.", "Join first, and send the lease from the answer."
            )
        site, number, process, *secret = text.split(":")
        return cls(site, int(number), process, *secret)


def roster_of(members: Iterable[MemberRow], versions: Sequence[Mapping[str, int]]) -> dict[str, Presence]:
    """Return the records of all sites in the journal, when a server starts: site → what is known about its worker.

    Args:
        members: the journal's rows of the sites.
        versions: for each fragment, site → base version of the site's newest ticket.
    """
    return {
        member.site: Presence(
            site=member.site,
            host=visible(member.host),
            process=member.process.partition(":")[0],
            sealed=member.process.partition(":")[2],
            joined_at=member.joined_at,
            labels={visible(key): visible(value) for key, value in json.loads(member.labels_json).items()},
            state=member.state,
            error=visible(member.detail),
            rounds=member.rounds_counted,
            bases={index: bases[member.site] for index, bases in enumerate(versions) if member.site in bases},
            heard=False,
            is_restored=True,
        )
        for member in members
    }


def _shown_labels(message: messages.Join) -> dict[str, str]:
    """Return the labels of a worker for the status, `MOST_LABEL_CHARS` in all, and warn of those left out."""
    kept, left = dict[str, str](), messages.MOST_LABEL_CHARS
    for name, value in message.labels.items():
        left -= len(name) + len(value)
        if left >= 0:
            kept[name] = value
    if left < 0:
        LOG.warning(
            "the labels of %s have %d characters in all, more than %d: the last ones are not shown",
            *(message.site, messages.MOST_LABEL_CHARS - left, messages.MOST_LABEL_CHARS),
        )
    return kept
