"""What must hold in each history: the invariants of the fault table, checked as a run goes on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from atoll.protocol import messages, run_events
from atoll.rounds.state import State
from atoll.server.coordinator.run_core import RunCore
from atoll.store.journal_tables import TicketRow
from atoll.tensors.layout import Layout
from atoll.tensors.schema import extra_name

CONTROL = extra_name("control", "")
Values = Mapping[str, np.ndarray[Any, Any]]


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Formed:
    """An update that a site has formed: what it is in full precision, what it reports, and whether it may count.

    With SCAFFOLD, `control` is the change of the site's control variate, by the names that it has in a version. With a
    codec that loses something, `carried` is what it had lost before, which this update brings, and `left` what it has
    lost since. In streaming, `made` is the process and its number of local steps so far, of which `included` are in
    the update.
    """

    site: str
    values: Values
    weight: float
    steps: int
    is_sound: bool = True
    control: Values = field(default_factory=dict)
    carried: Values = field(default_factory=dict)
    left: Values = field(default_factory=dict)
    made: tuple[object, int] | None = None
    included: float = 0.0

    @staticmethod
    def last_of(values: Values) -> float:
        """The last element of a tensor, with which streaming counts steps."""
        return float(values[min(values)][-1]) if values else 0.0


@dataclass
class Model:
    """A fragment of the model after a version: the parameters and the momentum of the outer optimizer.

    With SCAFFOLD also c, and of each site with updates in it the weight and c_i, the sum of what these updates add.
    `last` has the last update of each site, `stored` the parameters as the server has them, rounded to fp32.
    """

    theta: dict[str, np.ndarray[Any, Any]]
    momentum: dict[str, np.ndarray[Any, Any]] | None = None
    control: Values = field(default_factory=dict)
    own: dict[str, tuple[float, Values]] = field(default_factory=dict)
    last: Mapping[str, Formed] = field(default_factory=dict)
    stored: Values = field(default_factory=dict)

    def after(
        self, updates: Sequence[tuple[Formed, float]], lr: float, momentum: float, *, per_step: bool = False
    ) -> Model:
        """θ ← θ − lr·m, m ← momentum·m + Σ p_i·u_i, with p_i the share of each weight, times its factor.

        With `per_step` (FedNova), p_i is multiplied by Σ p_k·τ_k / τ_i, where τ are the steps of the updates.
        """
        total = sum(formed.weight for formed, _ in updates)
        shares = [formed.weight / total * factor for formed, factor in updates]
        if per_step:
            steps = sum(share * formed.steps for share, (formed, _) in zip(shares, updates, strict=True))
            shares = [share * steps / formed.steps for share, (formed, _) in zip(shares, updates, strict=True)]
        theta, moments = {}, {}
        for name, value in self.theta.items():
            step = sum(formed.values[name] * share for share, (formed, _) in zip(shares, updates, strict=True))
            moments[name] = step if self.momentum is None else momentum * self.momentum[name] + step
            theta[name] = value - lr * moments[name]
        return Model(theta, moments, last={**self.last, **{each.site: each for each, _ in updates}})

    def control_after(self, updates: Sequence[Formed], total_weight: float, *, from_zero: bool) -> dict[str, Any]:
        """c_i ← c_i + Δc_i for the sites of the updates; c = Σ w_i·c_i / W, whichever sites are in this round.

        Args:
            updates: the updates of the round.
            total_weight: W, the weight of all sites.
            from_zero: whether c and all c_i count as zero before this round.
        """
        own = {} if from_zero else dict(self.own)
        for each in updates:
            _, before = own.get(each.site, (0.0, dict.fromkeys(each.control, 0.0)))
            own[each.site] = each.weight, {name: before[name] + delta for name, delta in each.control.items()}
        known = sum(weight for weight, _ in own.values())
        require(total_weight >= known - 1e-9, f"all sites weigh {total_weight}, but those with updates {known}")
        names = updates[0].control
        control = {name: sum(weight * c[name] for weight, c in own.values()) / total_weight for name in names}
        return {"control": control, "own": own}


@dataclass
class Checks:
    """Follows a run through all its server processes.

    Args:
        quorum: the least number of updates of a version.
        sites: number of sites that the first round waits for.
        rounds: number of rounds of each fragment; 0: no end.
        is_async: whether updates may be older than the version before.
        most_behind: most versions that an update may be behind; None: no limit.
        algorithm: name of the run's algorithm.
        timeout_s: seconds of silence after which a site may be declared dead.

    Attributes:
        now_s: the virtual time.
        formed: (site, digest) → an update that a site has formed.
        times: how often it has formed these bytes: updates of zeros are alike.
        acknowledged: ticket → site and digest of an update with a receipt.
        counted: ticket → (fragment, version) that has its update.
        newest: fragment → the number of the newest version that was ever there.
        may_expire: reasons for which an acknowledged update may expire at any time.
        of_digest: the models of all versions, by the digests of these versions.
        may_begin_anew: whether the algorithm's state may begin at zero again.
        may_lose_residuals: whether a site may lose what its codec has lost of earlier updates.
        counts_steps: whether each local step is in at most one update.
        begun_anew: versions at which it has.
        excused: why acknowledged updates may have expired since the last check; empty: they may not.
    """

    quorum: int
    sites: int
    rounds: int
    is_async: bool
    most_behind: int | None
    timeout_s: float
    lr: float
    momentum: float
    algorithm: str = "fedavg"
    may_begin_anew: bool = False
    may_lose_residuals: bool = False
    counts_steps: bool = False
    of_digest: dict[str, Model] = field(default_factory=dict)
    now_s: float = 0.0
    formed: dict[tuple[str, str], Formed] = field(default_factory=dict)
    times: Counter[tuple[str, str]] = field(default_factory=Counter)
    acknowledged: dict[int, tuple[str, str]] = field(default_factory=dict)
    counted: dict[int, tuple[int, int]] = field(default_factory=dict)
    models: dict[tuple[int, int], Model] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    excused: str = ""
    may_expire: set[str] = field(default_factory=set)
    epoch: int = 0
    leases: dict[str, str] = field(default_factory=dict)
    last_lease: int = 0
    last_ticket: int = 0
    paused: bool = False
    heard_s: dict[str, float] = field(default_factory=dict)
    versions: int = 0
    begun_anew: set[int] = field(default_factory=set)
    _begun: set[int] = field(default_factory=set)

    # -- at a start of the server

    def started(self, run: RunCore, before: State | None) -> None:
        """A server process has begun: what it has read from the journal is what the one before had written."""
        store, state = run.store, run.state
        require(store.run_log.epoch > self.epoch, f"the epoch is {store.run_log.epoch} after {self.epoch}")
        self.epoch, self.paused = store.run_log.epoch, state.paused
        self.heard_s = dict.fromkeys(state.members, self.now_s)
        for fragment, round_ in enumerate(state.rounds):
            self.newest.setdefault(fragment, round_.head)
            if self.excused == "power loss":
                self.newest[fragment] = store.versions.next_number(fragment) - 1
            self.heads.setdefault(fragment, round_.head)
            if round_.head > self.newest[fragment]:  # the server was killed right after the commit
                self._made(run, fragment, round_.head)
            known = self.heads[fragment]
            if (fragment, round_.head) not in self.models:
                require(round_.head == 0, f"version {round_.head} of fragment {fragment} was never made")
                first = {n: v.astype(np.float64) for n, v in read(run, fragment, 0).items()}
                control = {name: first.pop(name) for name in list(first) if name.startswith(CONTROL)}
                self._know(run, fragment, 0, Model(first, control=control))
            if round_.head != known:
                require(bool(self.excused), f"the server went back from version {known} to {round_.head}")
                require(round_.head < known, f"version {round_.head} of fragment {fragment} came from nowhere")
                self.heads[fragment] = round_.head
            self._require_values(run, fragment, round_.head)
        if before is not None and not self.excused:
            require_same(before, state)
        self._follow_losses(run)

    def _follow_losses(self, run: RunCore) -> None:
        """Forget what a server that may have gone back no longer has; else each acknowledged update is there."""
        excused, self.excused = self.excused, ""
        if excused:  # leases have secrets, so their numbers may come again; those of tickets may not
            self.last_lease = run.state.next_lease - 1
        rows = {row.ticket: row for row in run.store.tickets.select("1 = 1")}
        for ticket, (site, digest) in list(self.acknowledged.items()):
            row = rows.get(ticket)
            fits = row is not None and (row.site, row.digest) == (site, digest) and row.is_in
            if not fits and (excused or (row is not None and row.reason in self.may_expire)):
                del self.acknowledged[ticket]
                self.counted.pop(ticket, None)
                continue
            require(fits, f"acknowledged ticket {ticket} of {site} is {row.state if row else 'unknown'}")
        if excused:
            self.counted = {ticket: made for ticket, made in self.counted.items() if rows[ticket].state == "counted"}

    # -- as the run goes on

    def has_formed(self, digest: str, formed: Formed) -> None:
        """Note an update that a site has formed."""
        self.formed[formed.site, digest] = formed
        self.times[formed.site, digest] += 1

    def began_anew(self, run: RunCore) -> None:
        """Note whether SCAFFOLD's state has begun at zero again, which only some faults excuse."""
        generation = run.store.run_log.generation
        if generation.number:
            require(self.may_begin_anew, f"the state of {self.algorithm} begins anew: {generation.reason}")
            self.begun_anew.add(generation.version)

    def trains_with(self, site: str, version: int, control: Values) -> None:
        """A site begins to train: its c_i is the sum of what its updates in this version have added, each once."""
        if version > self.heads[0]:  # the run has gone back meanwhile: the update will be refused
            return
        zeros = 0.0, dict.fromkeys(control, 0.0)
        _, expected = self.models[0, version].own.get(site, zeros)
        fits = all(np.allclose(control[name], value, rtol=1e-5, atol=1e-5) for name, value in expected.items())
        if not fits and version in self.begun_anew:
            fits = not any(value.any() for value in control.values())
        require(fits, f"{site} trains from version {version} with the control variate {control}, not {expected}")

    def asked(self, site: str, at_s: float) -> None:
        """A request of a site with a valid lease has arrived."""
        self.heard_s[site] = max(at_s, self.heard_s.get(site, 0.0))

    def joined(self, site: str, joined: messages.Joined) -> None:
        number = int(joined.lease.split(":")[1])
        require(number > self.last_lease, f"lease {number} of {site} was given before")
        self.leases[site], self.last_lease = joined.lease, number
        self.asked(site, self.now_s)

    def receipted(self, run: RunCore, lease: str, ticket: int, digest: str) -> None:
        """The server answers with a receipt: the update is in the journal, and of the process with the newest lease."""
        row = run.store.tickets.get(ticket)
        formed = self.formed.get((row.site, digest))
        require(formed is not None, f"a receipt for an update that {row.site} never formed")
        assert formed is not None
        require(formed.is_sound, f"an unsound update of {row.site} was accepted")
        require(row.is_in and row.digest == digest, f"a receipt for ticket {ticket}, which is {row.state}")
        require(lease == self.leases[row.site], f"ticket {ticket} of {row.site} was accepted under stale lease {lease}")
        self._agree(run)
        before = self.acknowledged.setdefault(ticket, (row.site, digest))
        require(before == (row.site, digest), f"ticket {ticket} has two updates")

    def on_event(self, run: RunCore, event: run_events.Happened) -> None:
        if isinstance(event, run_events.RoundEnded) and event.summary.version is not None:
            self._made(run, event.fragment, event.summary.version)
        if isinstance(event, run_events.RunPaused | run_events.RunResumed | run_events.RunStopping):
            self.paused = isinstance(event, run_events.RunPaused)
        if isinstance(event, run_events.TicketIssued | run_events.RoundOpened):
            require(not self.paused, f"{type(event).__name__} in a paused run")
        if isinstance(event, run_events.TicketIssued):
            require(event.ticket > self.last_ticket, f"ticket {event.ticket} was given before")
            self.last_ticket = event.ticket
        if isinstance(event, run_events.RoundOpened):
            alive = sum(member.alive for member in run.state.members.values())
            enough = alive >= self.sites or event.fragment in self._begun
            require(enough, f"the first round opens with {alive} of {self.sites} sites")
            require(not self.rounds or event.round <= self.rounds, f"round {event.round} of {self.rounds} opens")
            self._begun.add(event.fragment)
        if isinstance(event, run_events.SiteSilent):
            last_s = self.heard_s.get(event.site, 0.0)
            silent = self.now_s - last_s >= self.timeout_s - 1e-6
            require(silent, f"{event.site} was declared dead, but was heard {self.now_s - last_s:g} s before")

    def _made(self, run: RunCore, fragment: int, version: int) -> None:
        base, newest = self.heads[fragment], self.newest[fragment]
        require(version == newest + 1, f"version {version} of fragment {fragment} follows {newest}")
        rows = run.store.tickets.select("state = 'counted' AND version = ? AND fragment = ?", version, fragment)
        require(len(rows) >= self.quorum, f"a version of {len(rows)} updates, of at least {self.quorum}")
        require(len({row.site for row in rows}) == len(rows), f"version {version} counts a site twice")
        if not self.is_async:
            require(all(row.base_version == base for row in rows), f"version {version} counts an old update")
            due = {
                ticket
                for ticket, (site, _) in self.acknowledged.items()
                if ticket not in self.counted and self._is_due(run, ticket, fragment, base)
            }
            require(due <= {row.ticket for row in rows}, f"version {version} lacks acknowledged tickets {due}")
        lags = [self._lag(run, row, base) for row in rows]
        fresh = self.most_behind is None or max(lags) <= self.most_behind
        require(fresh, f"version {version} counts an update that is {max(lags)} versions behind")
        updates = [(self._counts(row), run.plan.staleness_weight(lag)) for row, lag in zip(rows, lags, strict=True)]
        for row in rows:
            require(row.ticket not in self.counted, f"ticket {row.ticket} counts again in version {version}")
            self.counted[row.ticket] = fragment, version
        before = self.models[fragment, base]
        made = before.after(updates, self.lr, self.momentum, per_step=self.algorithm == "fednova")
        if before.control:
            total = json.loads(run.store.versions.get(fragment, version).summary_json)["total_weight"]
            from_zero = run.store.run_log.generation.begins_at(base)
            made = replace(made, **before.control_after([each for each, _ in updates], total, from_zero=from_zero))
        self._require_once(before, [each for each, _ in updates], fragment, version)
        self._know(run, fragment, version, made)
        self.heads[fragment] = self.newest[fragment] = version
        self.versions += 1
        self._require_values(run, fragment, version)

    def _know(self, run: RunCore, fragment: int, version: int, model: Model) -> None:
        model.stored = {name: value.astype(np.float64) for name, value in read(run, fragment, version).items()}
        self.models[fragment, version] = self.of_digest[run.store.versions.get(fragment, version).digest] = model

    def _require_once(self, before: Model, updates: Sequence[Formed], fragment: int, version: int) -> None:
        """What a codec has lost of a site's last update is in this one; and this one has no step that was in that.

        If a site in streaming goes on from the base of an update that has counted, what was lost of it is still in the
        difference from that base. Then the update carries what the one before had carried.
        """
        for each in updates:
            where = f"in version {version} of fragment {fragment}, the update of {each.site}"
            zeros = {name: np.zeros_like(value) for name, value in each.carried.items()}
            last = before.last.get(each.site) or replace(each, carried=zeros, left=zeros, made=None)
            if not self.may_lose_residuals:
                fits = is_same(each.carried, last.left) or (
                    each.made is not None and is_same(each.carried, last.carried)
                )
                require(fits, f"{where} carries the residual {each.carried}, not {last.left}")
            if self.counts_steps and each.made is not None:
                new = each.made[1] - (last.made[1] if last.made and last.made[0] is each.made[0] else 0)
                brought, owed = each.included - each.last_of(each.carried), -last.last_of(last.left)
                owed = max(owed, 0.0) if self.may_lose_residuals else owed
                require(
                    brought <= new + owed + 0.1,
                    f"{where} brings {brought:g} local steps, of {new} new ones after {last}",
                )

    @staticmethod
    def _is_due(run: RunCore, ticket: int, fragment: int, base: int) -> bool:
        row = run.store.tickets.get(ticket)
        return (row.fragment, row.base_version) == (fragment, base) and row.state != "expired"

    @staticmethod
    def _lag(run: RunCore, row: TicketRow, base: int) -> int:
        lost = run.store.run_log.lost_versions(row.fragment)
        return max(0, base - row.base_version - sum(row.base_version < number <= base for number in lost))

    def _counts(self, row: TicketRow) -> Formed:
        formed = self.formed.get((row.site, row.digest or ""))
        require(formed is not None, f"ticket {row.ticket} counts an update that {row.site} never formed")
        assert formed is not None
        require(formed.is_sound, f"ticket {row.ticket} counts an unsound update")
        told = row.report.weight, row.report.steps
        require(told == (formed.weight, formed.steps), f"ticket {row.ticket} counts with {told}")
        twice = [
            ticket
            for ticket, (site, digest) in self.acknowledged.items()
            if (site, digest) == (row.site, row.digest) and ticket != row.ticket and ticket in self.counted
        ]
        is_known = len(twice) < self.times[row.site, row.digest or ""]
        require(is_known, f"the update of ticket {row.ticket} counts already, under tickets {twice}")
        return formed

    def _require_values(self, run: RunCore, fragment: int, version: int) -> None:
        found, expected = read(run, fragment, version), self.models[fragment, version]
        for name, value in [*expected.theta.items(), *expected.control.items()]:
            if not np.all(np.abs(found[name] - value) <= 1e-5 + 1e-5 * np.abs(value)):  # a NaN is not, either
                raise Violation(
                    f"version {version} of fragment {fragment} is not the mean of its updates: "
                    f"{name} is {found[name][:4]}, not {value[:4]}"
                )

    @staticmethod
    def _agree(run: RunCore) -> None:
        live = {row.ticket: row.state for row in run.store.tickets.live()}
        known = {t.id: t.state for r in run.state.rounds for t in r.tickets.values() if t.is_live}
        require(live == known, f"the journal has the tickets {live}, the server {known}")

    def look(self, run: RunCore) -> None:
        """Check the journal as it is now: each acknowledged update is in one version, or waits to be in the next."""
        self._agree(run)
        for ticket, (site, digest) in self.acknowledged.items():
            row = run.store.tickets.get(ticket)
            if row.state == "expired" and row.reason in self.may_expire:
                continue
            if (row.site, row.digest) != (site, digest) or not row.is_in:
                raise Violation(f"acknowledged ticket {ticket} is {row.state}: {row.reason}")
            if row.state == "counted":
                made = self.counted.get(ticket)
                require(made == (row.fragment, row.version), f"ticket {ticket} counts in {row.version}, not in {made}")
            elif row.state == "accepted":
                waits = run.state.ticket_by_id(ticket)
                require(waits is not None and waits.state == "accepted", f"the server has forgotten ticket {ticket}")


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


def read(run: RunCore, fragment: int, version: int) -> Values:
    """The values of a version, from its file."""
    layout: Layout = run.plan.fragments[fragment].version
    with run.store.versions.pin(fragment, version) as pin:
        return {
            segment.spec.name: np.frombuffer(os.pread(pin.fd, segment.spec.nbytes, segment.offset), np.float32)
            for segment in layout.by_name.values()
        }


def require_same(before: State, after: State) -> None:
    """A restarted server has the leases, tickets, versions and controls of the one before."""

    def facts(state: State) -> dict[str, Any]:
        live = {t.id: (t.site, t.state) for r in state.rounds for t in r.tickets.values() if t.state == "accepted"}
        return {
            "members": dict(state.members),
            "accepted": live,
            "heads": [r.head for r in state.rounds],
            "paused": (state.paused, state.stopping),
            "next": (state.next_ticket, state.next_lease),
            "rounds": [r.done for r in state.rounds],
        }

    def of_open(state: State, index: int) -> dict[str, Any]:
        round_ = state.rounds[index]
        return {  # an expired one is given anew
            site: (each.id, each.state) for site, each in round_.tickets.items() if each.state != "expired"
        }

    was, now = facts(before), facts(after)
    for name, value in was.items():
        require(now[name] == value, f"after the restart, {name} are {now[name]}, not {value}")
    for index, round_ in enumerate(before.rounds):
        if round_.phase == "open" == after.rounds[index].phase:
            tickets, kept = of_open(before, index), of_open(after, index)
            require(tickets == kept, f"after the restart, tickets are {kept}, not {tickets}")
            expected = set(after.rounds[index].expected)
            fits = before.ending or expected == set(round_.expected)
            require(fits, f"after the restart, the round waits for {expected}, not for {set(round_.expected)}")


def is_same(one: Values, other: Values) -> bool:
    """Whether two lists of values are the same, bit for bit."""
    return all(np.array_equal(one[name], value) for name, value in other.items())


def as_arrays(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> Values:
    return {name: tensors[name].detach().numpy().astype(np.float64).reshape(-1) for name in names}
