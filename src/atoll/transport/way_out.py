"""The one way out: whatever leaves through Atoll passes a method of `WayOut`, which holds the site's policy.

    message(…)    a message that is about to be sent: refused, or without what must not leave
    part(…)       a part of an update or object; refused unless it was cleared
    serve(…)      a file that other processes may download; refused unless all its parts were cleared
    served(…)     bytes of such a file, before they are sent

What carries tensors is cleared by the code that has applied the policy's filters to it: `clear`, `clear_update`,
`clear_answer`. So a new way out that knows nothing of the policy is refused, not open. Clients of a process ask
`way_out()` for its one `WayOut`. Without a policy, everything passes, and there is no log.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import BaseModel

from atoll.config.site_policy import VARIABLE, Policy, allows, most, policy_path, read_policy
from atoll.errors import AtollError, ConfigError, PeerError
from atoll.posix import open_own
from atoll.protocol import admin_messages, identity_messages, messages, routes, swarm_messages, task_messages
from atoll.transport.egress_log import HEAD, EgressLog, Entry

DRY_RUN, MESSAGES = "ATOLL_DRY_RUN", "messages.jsonl"
"""Variable that `atoll worker --dry-run` sets: the folder for what would leave; the file in it with the messages that
were sent."""
MOST_CLEARED = 2**18
"""Number of parts that stay cleared; with more, the oldest ones are refused."""
FLUSH_S = 60.0
"""Seconds after which the small messages since the last entry get an entry of their own."""

ACTIVITIES = re.compile(
    r"|waiting for (the round|a task|the last results|the other sites)|training|left|failed|task [\w.-]+"
    r"|(submitting to round|sat out round|pulling version) \d+|evaluating [\w.-]*"
)
"""What Atoll itself says of a worker's work. Any other text is a script's note."""
TICKET_PART = re.compile(routes.PART.format(ticket=r"(\d+)", part=r"\d+"))
OBJECT_PART = re.compile(routes.OBJECT_PART.format(object=r"([0-9a-f]+)", part=r"\d+"))
ANSWER = re.compile(routes.TASK_ANSWER.format(task=r"([0-9a-f]+)"))
HIDDEN = "the site's policy does not let the text leave"

SMALL = (
    messages.TicketRequest,
    messages.ObjectOpen,
    task_messages.TaskRequest,
    swarm_messages.PeerReport,
    identity_messages.Enrol,
    identity_messages.Renew,
)
"""Messages that pass as they are: numbers, digests, names that the run itself has, and requests for a credential."""
OF_ADMIN = (
    admin_messages.PauseRun,
    admin_messages.StopRun,
    admin_messages.RollBack,
    identity_messages.Invite,
    identity_messages.Revoke,
)
"""Messages that control a run. No site sends them."""


@dataclass(frozen=True)
class ClearedUpdate:
    """An update to which the policy's filters were applied: what the egress log says of it.

    Attributes:
        run, site: id of the run, and name of the site.
        ticket: ticket under which it may be submitted.
        fragment: number of the fragment.
        round: number of the round.
        nbytes: its size in bytes.
        norm: L2 norm of its parameters, after the filters.
        filters: the filters, in order, as text.
    """

    run: str
    site: str
    ticket: int
    fragment: int
    round: int
    nbytes: int
    norm: float
    filters: Sequence[str]


@dataclass(eq=False)
class WayOut:
    """Whatever leaves one process through Atoll. Thread-safe.

    Attributes:
        policy: the site's policy; None: the site has none, and everything passes.
        log: the egress log; None without a policy, and in a dry run.
        dry_run: the folder for what would leave; None: this is no dry run.
    """

    policy: Policy | None = None
    log: EgressLog | None = None
    dry_run: Path | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _parts: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _updates: dict[tuple[str, str, int], tuple[str, ClearedUpdate]] = field(default_factory=dict)  # run, site, fragment
    _answers: dict[str, str] = field(default_factory=dict)
    _runs: dict[str, str] = field(default_factory=dict)  # address of a server → id of its run
    _small: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    _flushed_s: float = field(default_factory=time.monotonic)

    @property
    def digest(self) -> str:
        """The digest of the policy; empty without one."""
        return self.policy.digest if self.policy is not None else ""

    # -- before data is touched

    def require_server(self, server: str) -> None:
        """Raise an error if the policy does not let this process send anything to a server.

        Raises:
            ConfigError: the policy forbids it.
        """
        if self.policy is not None and not allows(self.policy.runs.servers, server):
            raise self.policy.refusal("runs.servers", f"the server {server} is not among runs.servers")

    def require_run(self, info: messages.RunInfo, server: str) -> None:
        """Raise an error if the policy does not let the site take part in a run. Note the run in the log.

        Raises:
            ConfigError: the run asks for more than the policy allows.
            PeerError: its receipts are signed with another key than before.
        """
        if self.policy is None:
            return
        self.require_server(server)
        runs, name = self.policy.runs, info.algorithm.text
        if not allows(runs.names, info.name):
            raise self.policy.refusal("runs.names", f"the run {info.name!r} is not among runs.names")
        if not allows(runs.algorithms, name):
            raise self.policy.refusal("runs.algorithms", f"the run {info.name!r} uses the algorithm {name!r}")
        if info.placement == "swarm" and not runs.swarm:
            raise self.policy.refusal("runs.swarm", f"the run {info.name!r} is a swarm")
        if info.trains and (info.rounds or most(None)) > most(runs.max_rounds):
            wants = f"{info.rounds} rounds" if info.rounds else "rounds without an end"
            raise self.policy.refusal("runs.max_rounds", f"the run {info.name!r} asks for {wants}")
        self._runs[server] = info.run
        if self.log is None:
            return
        known = self.log.sent[info.run].key
        if known and known != info.receipt_key:
            raise PeerError(
                f"The run {info.name!r} at {server} signs its receipts with another key than when this site first took "
                f"part ({known[:16]}…, now {info.receipt_key[:16]}…).",
                "Ask the server's operator whether receipts.key was replaced. To accept the new key, begin a new log: "
                f"move {self.log.path} and {HEAD} away.",
            )
        with self._lock:
            self._flush()
            entry = self.log.append(
                "run", run=info.run, name=info.name, server=server, algorithm=name, policy=self.digest,
                receipt_key=info.receipt_key,
            )  # fmt: skip
        self.log.keep(entry)

    def require_tensors(self, names: Iterable[str], what: str) -> None:
        """Raise an error if one of these tensors may not leave.

        Args:
            names: names of the tensors.
            what: what has them, for the message.

        Raises:
            ConfigError: the policy forbids it.
        """
        if self.policy is None:
            return
        tensors = self.policy.tensors
        for name in names:
            if not allows(tensors.drop, name) and not allows(tensors.allow, name):
                raise self.policy.refusal(
                    "tensors.allow", f"the tensor {name!r} of {what} is neither allowed nor dropped"
                )

    def require_bytes(self, run: str, nbytes: int, *, in_all: bool = False) -> None:
        """Raise an error if so many further bytes may not leave for a run.

        Args:
            run: id of the run.
            nbytes: number of bytes.
            in_all: whether these are all bytes of the run, those that have left among them.

        Raises:
            ConfigError: the policy forbids it.
        """
        if self.policy is None or self.policy.runs.max_bytes is None:
            return
        sent, limit = (
            self.log.sent[run].nbytes if self.log is not None and not in_all else 0,
            self.policy.runs.max_bytes,
        )
        if sent + nbytes > limit:
            raise self.policy.refusal(
                "runs.max_bytes",
                f"{nbytes} bytes would leave, after {sent}, of at most {limit}",
            )

    def require_round(self, run: str, fragment: int, round_: int) -> None:
        """Raise an error if the site has taken part in as many rounds of a run as it may.

        Raises:
            ConfigError: the policy forbids it.
        """
        if self.policy is None or self.policy.runs.max_rounds is None or self.log is None:
            return
        done = {number for each, number in self.log.sent[run].rounds if each == fragment} - {round_}
        if len(done) >= self.policy.runs.max_rounds:
            raise self.policy.refusal("runs.max_rounds", f"this site has taken part in {len(done)} rounds of the run")

    def why_no_task(self, name: str) -> str:
        """Return why the site does not answer a task; empty if it may."""
        if self.policy is None or allows(self.policy.metadata.tasks, name):
            return ""
        return self.policy.refusal("metadata.tasks", f"the task {name!r} is not among metadata.tasks").message

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return those metrics that may leave."""
        known = self.policy.metadata.metrics if self.policy is not None else ("*",)
        return {name: value for name, value in metrics.items() if allows(known, name)}

    # -- clear what the policy's filters were applied to

    def clear(self, digests: Iterable[bytes]) -> None:
        """Let parts with these digests leave: the policy's filters were applied to what they contain."""
        if self.policy is None:
            return
        with self._lock:
            for digest in digests:
                self._parts[digest] = None
                self._parts.move_to_end(digest)
            while len(self._parts) > MOST_CLEARED:
                self._parts.popitem(last=False)

    def clear_update(self, digest: str, update: ClearedUpdate) -> None:
        """Let an update be completed. An earlier one of the site's fragment no longer may be."""
        with self._lock:
            self._updates[update.run, update.site, update.fragment] = digest, update

    def clear_answer(self, task: str, name: str) -> None:
        """Let an answer to the task with this id leave. `name` is the task's."""
        with self._lock:
            self._answers[task] = name

    # -- what leaves

    def message(self, server: str, path: str, message: BaseModel, site: str) -> bytes:
        """Return the text of a message that is about to be sent, without what must not leave. Note it in the log.

        Args:
            server: address of the server.
            path: path of the request.
            message: the message.
            site: name of the site; empty: none has joined.

        Raises:
            ConfigError: the policy forbids it.
        """
        if self.policy is None or isinstance(message, OF_ADMIN):
            return _text(message)
        self.require_server(server)
        self._require_no_dry_run(message)
        run = self._runs.get(server, "")
        kept, (what, detail) = self._kept(run, path, message)
        text = _text(kept)
        entry: Entry | None = None
        with self._lock:
            if what == "answer":
                self.require_bytes(run, len(text))
            self._count(type(message).__name__, len(text))
            if self.dry_run is not None:
                self._keep(path, text)
            if self.log is not None and what:
                self._flush()
                entry = self.log.append(what, **{"run": run, "site": site, "bytes": len(text), **detail})
            elif time.monotonic() - self._flushed_s > FLUSH_S or isinstance(message, messages.Leave):
                self._flush()
        if entry is not None and self.log is not None:
            self.log.keep(entry)
        return text

    def _kept(self, run: str, path: str, message: BaseModel) -> tuple[BaseModel, tuple[str, dict[str, Any]]]:
        """Return what may leave of a message, and its entry in the log; no entry: it is only counted."""
        assert self.policy is not None
        rules, nothing = self.policy.metadata, ("", dict[str, Any]())
        match message:
            case messages.Join():
                labels = {name: value for name, value in message.labels.items() if allows(rules.labels, name)}
                return message.model_copy(
                    update={"host": message.host if rules.host_name else "", "labels": labels}
                ), nothing
            case messages.Heartbeat():
                is_own = rules.notes or ACTIVITIES.fullmatch(message.state) is not None
                return message.model_copy(
                    update={
                        "metrics": self.metrics(message.metrics),
                        "warnings": message.warnings if rules.warnings else [],
                        "state": message.state if is_own else "busy",
                    }
                ), nothing
            case messages.Leave():
                return message.model_copy(update={"error": self._error(message.error)}), nothing
            case messages.Complete():
                kept = message.model_copy(update={"metrics": self.metrics(message.metrics)})
                return kept, ("update", self._update(run, path, kept))
            case messages.SitOut():
                kept_metrics = self.metrics(message.metrics)
                return messages.SitOut(metrics=kept_metrics), ("sat out", {"metrics": sorted(kept_metrics)})
            case messages.ObjectComplete():
                return message, ("object", {"digest": message.digest})
            case task_messages.TaskAnswer():
                kept_answer = message.model_copy(update={"error": self._error(message.error)})
                return kept_answer, ("answer", self._answer(path, message))
        if not isinstance(message, SMALL):
            raise ConfigError(
                f"A message {type(message).__name__} is unknown to the site's policy. Nothing of it was sent.",
                "This is a fault of Atoll: please report it.",
            )
        return message, nothing

    def _error(self, error: str | None) -> str | None:
        assert self.policy is not None
        return error if error is None or self.policy.metadata.errors else HIDDEN

    def _update(self, run: str, path: str, message: messages.Complete) -> dict[str, Any]:
        with_part = TICKET_PART.fullmatch(path)

        def is_meant(digest: str, update: ClearedUpdate) -> bool:
            is_own = path == routes.COMPLETE.format(ticket=update.ticket)
            is_own |= with_part is not None and int(with_part[1]) == update.ticket
            return is_own and (digest, update.run) == (message.digest, run or update.run)

        with self._lock:  # sites of one process may have equal updates
            update = next((each for digest, each in self._updates.values() if is_meant(digest, each)), None)
        if update is None:
            raise self._uncleared(f"the update {message.digest[:16]}")
        return {
            **vars(update),
            "bytes": update.nbytes,
            "filters": list(update.filters),
            "digest": message.digest,
            "weight": message.weight,
            "steps": message.steps,
            "metrics": sorted(message.metrics),
            "policy": self.digest,
        }

    def _answer(self, path: str, message: task_messages.TaskAnswer) -> dict[str, Any]:
        found = ANSWER.fullmatch(path)
        task, body = found[1] if found else "", message.body
        if body is None:
            return {"task": task, "failed": True}
        if task not in self._answers:
            raise self._uncleared(f"the answer to task {task[:16]}")
        digest = body.object.digest if body.object else blake3((body.plain or "").encode()).hexdigest()
        return {"task": task, "name": self._answers[task], "digest": digest, "inline": body.object is None}

    def part(self, server: str, path: str, digest: bytes, nbytes: int, site: str) -> None:
        """Note in the log that a part is about to be sent.

        Args:
            server: address of the server.
            path: path of the part.
            digest: BLAKE3 of the part.
            nbytes: its size in bytes.
            site: name of the site; empty: none has joined.

        Raises:
            ConfigError: the policy forbids it.
        """
        if self.policy is None:
            return
        self.require_server(server)
        self._require_no_dry_run(None)
        with self._lock:
            self._require_cleared([digest])
            run, ticket, object_ = self._runs.get(server, ""), TICKET_PART.fullmatch(path), OBJECT_PART.fullmatch(path)
            of = {"ticket": int(ticket[1])} if ticket else {"object": object_[1] if object_ else ""}
            self.require_bytes(run, nbytes)
            if self.log is None:
                return
            self._flush()
            entry = self.log.append("part", run=run, site=site, bytes=nbytes, digest=digest.hex(), **of)
        self.log.keep(entry)  # without the lock: threads that send parts wait for the disk together

    def serve(self, digests: Iterable[bytes]) -> None:
        """Check that the parts of a file may be served to other processes.

        Raises:
            ConfigError: a part was not cleared.
        """
        if self.policy is not None:
            self._require_no_dry_run(None)
            self._require_cleared(digests)

    def served(self, digest: str, nbytes: int) -> None:
        """Note bytes that another process is about to download from this one.

        Raises:
            ConfigError: more bytes would leave than the policy allows.
        """
        if self.log is not None:
            with self._lock:
                run = next(iter(self._runs.values()), "")
                self.require_bytes(run, nbytes)
                entry = self.log.append("served", run=run, digest=digest, bytes=nbytes)
            self.log.keep(entry)

    def receipt(self, receipt: messages.SignedReceipt | None) -> None:
        """Keep a receipt that the server has signed. The same one is kept once.

        Raises:
            PeerError: its signature is not of the run's key.
        """
        if self.log is None or receipt is None or receipt.ticket in self.log.sent[receipt.run].counted:
            return
        from atoll.protocol.receipts import is_genuine  # needs cryptography, which commands would wait for

        if not is_genuine(receipt, self.log.sent[receipt.run].key):
            raise PeerError(
                f"The receipt for ticket {receipt.ticket} is not signed with the key of the run {receipt.run}.",
                "Check that no other program answers at the server's address.",
            )
        entry = self.log.append("receipt", **receipt.model_dump())
        if receipt.state == "counted":
            self.log.keep(entry)

    def _require_cleared(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if digest not in self._parts:
                raise self._uncleared(f"a part with the digest {digest.hex()[:16]}")

    def _uncleared(self, what: str) -> ConfigError:
        return ConfigError(
            f"The filters of the site's policy were not applied to {what}. It was not sent.",
            "Update it within this process: what an earlier process has formed under another policy is not sent.",
        )

    def _require_no_dry_run(self, message: BaseModel | None) -> None:
        joining = (messages.Join, messages.Heartbeat, messages.TicketRequest, messages.Leave, task_messages.TaskRequest)
        if self.dry_run is not None and not isinstance(message, joining):
            raise ConfigError("In a dry run, nothing else is sent than what joining needs.", "Leave out --dry-run.")

    def _keep(self, path: str, text: bytes) -> None:
        """Write a message of a dry run to its folder."""
        assert self.dry_run is not None
        line = json.dumps({"path": path, "message": json.loads(text)}) + "\n"
        with open(
            open_own(self.dry_run / MESSAGES, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8"
        ) as file:
            file.write(line)

    def _count(self, kind: str, nbytes: int) -> None:
        counted = self._small[kind]
        counted[:] = counted[0] + 1, counted[1] + nbytes

    def _flush(self) -> None:
        """Note the small messages since the last entry. Called with the lock."""
        self._flushed_s = time.monotonic()
        if self._small and self.log is not None:
            self.log.append("messages", **self._small)
        self._small.clear()

    def close(self) -> None:
        """Write what is counted, keep it on the disk, and close the log."""
        if self.log is None:
            return
        with self._lock, closing(self.log), suppress(AtollError):
            self._flush()
            self.log.keep_all()


def _close(process: int, *key: object) -> None:
    if process == os.getpid():  # not in a fork: its parent writes what it has counted
        _ways[process, *key].close()


def _text(message: BaseModel) -> bytes:
    return message.model_dump_json(exclude_defaults=True).encode()


_ways: dict[tuple[object, ...], WayOut] = {}
_ways_lock = threading.Lock()


def way_out(environ: Mapping[str, str] = os.environ) -> WayOut:
    """Return the way out of this process. The policy is read at its first use in the process.

    Raises:
        ConfigError: the policy cannot be used. Nothing may be sent.
        StoreError: the egress log cannot be written.
        StateCorrupt: the egress log was changed.
    """
    path, dry = policy_path(environ), environ.get(DRY_RUN)
    key = os.getpid(), path, dry, environ.get("XDG_STATE_HOME")
    with _ways_lock:
        if key not in _ways:
            if path is None and dry is None:
                _ways[key] = WayOut()
            else:
                policy = read_policy(path) if path is not None else Policy.empty(Path(f"no {VARIABLE}"))
                log = None if dry else EgressLog(policy.log_folder)
                _ways[key] = WayOut(policy, log, Path(dry) if dry else None)
                atexit.register(_close, *key)
        return _ways[key]
