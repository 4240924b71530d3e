"""What a run of Atoll computes: algorithms, codecs and orders of steps, as plain functions of whole tensors.

This file says what the values of a run mean. It needs torch and the standard library, no other part of Atoll, no file
and no network. What does not change a value is left out: parts, tickets, packing, threads, ranks, processes. Tests
compare runs with it, bit for bit (`tests/behaviour/golden`). All algorithms are one loop over sites i:

    w_i ← b, then local training            b: the published version of the model
    u_i = C(b − w_i + e_i)                  the update. C: a codec and back again; e_i: what it lost of earlier updates
    g   = reduce(u_1 … u_k)                 in the order of the sites' names
    θ   ← outer step of θ along g           θ: the server's parameters in fp32
    b   ← θ, or b + C(θ − b)                the second one if versions travel through a codec, too

Tensors have names. A model's float parameters are its `params`; all other tensors are its `buffers`.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Tensors = dict[str, Tensor]
T = TypeVar("T")


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype of all sums: fp32 for floats, but fp64 for fp64; integers as they are."""
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x


# -- Codecs: C(x, dtype) is what arrives when the values x of a parameter of this dtype are sent


def none(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the parameter's dtype; fp16 and fp8 travel as fp32, since differences can exceed their range."""
    return x.to(dtype).to(x.dtype) if dtype in (torch.bfloat16, torch.float32, torch.float64) else x


def bf16(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to bfloat16."""
    return x.bfloat16().to(x.dtype)


def quantized(levels: int) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return int8 (127 levels) or int4 (7): round(x/s)·s with s = max|x| / levels of each 256 elements (2501.18512)."""

    def C(x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = rows_of(x, 256)
        largest = rows.abs().amax(dim=1, keepdim=True)
        is_zero = largest < 2.0**-100
        codes = torch.round(rows * (levels / largest).masked_fill(is_zero, 0.0)) + 0.0  # −0 travels as 0
        return shaped_as(x, codes * (largest / levels).masked_fill(is_zero, 0.0))

    return C


def topk(density: float = 1 / 64) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return the codec that keeps the k largest of each 4,096 elements: signs and two magnitudes (2508.15706)."""
    k = 16 * max(1, round(density * 4096 / 16))

    def C(x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = rows_of(x, 4096)
        chosen = rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
        values = rows.gather(1, chosen)
        sizes = values.abs()
        is_high = sizes > sizes.mean(dim=1, keepdim=True)
        for group in (is_high, ~is_high):  # a magnitude is the mean of its group
            mean = torch.where(group, sizes, 0.0).sum(dim=1, keepdim=True) / group.sum(dim=1, keepdim=True).clamp(min=1)
            values = torch.where(group, torch.where(values < 0, -mean, mean), values)
        return shaped_as(x, torch.zeros_like(rows).scatter(1, chosen, values))

    return C


def rows_of(x: Tensor, width: int) -> Tensor:
    """Return x in fp32 as [rows, width], with zeros after its last element."""
    return torch.nn.functional.pad(x.reshape(-1).float(), (0, -x.numel() % width)).view(-(-x.numel() // width), width)


def shaped_as(x: Tensor, rows: Tensor) -> Tensor:
    """Return the elements of `rows` with shape and dtype of x."""
    return rows.view(-1)[: x.numel()].view(x.shape).to(x.dtype)


# -- Reducers: a factor for each update, then one tensor of the k tensors of this name. Buffers: by rules


class Facts(NamedTuple):
    """What is known of the updates of a round, in the order of the sites: weights, local steps, ‖u_i‖₂ over params."""

    weights: Sequence[float]
    steps: Sequence[int]
    norms: Sequence[float]


def shares(facts: Facts) -> list[float]:
    """Return p_i = n_i / Σ n (FedAvg, 1602.05629)."""
    total = math.fsum(facts.weights)
    return [n / total for n in facts.weights]


def fednova(facts: Facts) -> list[float]:
    """Return p_i · τ_eff / τ_i with τ_eff = Σ p_i·τ_i, τ_i: local steps (2007.07481, section 5)."""
    tau_eff = math.fsum(p * tau for p, tau in zip(shares(facts), facts.steps, strict=True))
    return [p * tau_eff / tau for p, tau in zip(shares(facts), facts.steps, strict=True)]


def clipped(bound: float | None = None) -> Callable[[Facts], list[float]]:
    """Return p_i · min(1, C / ‖u_i‖₂); without a bound C, it is the median of the norms (1911.07963, section 4)."""

    def factors(facts: Facts) -> list[float]:
        most = statistics.median(facts.norms) if bound is None else bound
        return [p * min(1.0, most / norm) if norm else p for p, norm in zip(shares(facts), facts.norms, strict=True)]

    return factors


def weighted_sum(rows: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return Σ p_i·u_i: one rounding for each update."""
    total = rows[0] * factors[0]
    for u, p in zip(rows[1:], factors[1:], strict=True):
        total = torch.add(total, u, alpha=p)
    return total


def median(rows: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the median of each element; of an even number, the mean of the two in the middle (1803.01498)."""
    rising, k = torch.stack(list(rows)).sort(dim=0).values, len(rows)
    return torch.lerp(rising[(k - 1) // 2], rising[k // 2], 0.5) + 0.0


def trimmed_mean(beta: float) -> Callable[[Sequence[Tensor], Sequence[float]], Tensor]:
    """Return the mean of each element without the ⌊β·k⌋ smallest and ⌊β·k⌋ largest values (1803.01498)."""

    def combine(rows: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        cut, k = int(beta * len(rows) + 1e-9), len(rows)
        kept = list(torch.stack(list(rows)).sort(dim=0).values[cut : k - cut])
        return weighted_sum(kept, [1.0] * len(kept)) / len(kept) + 0.0

    return combine


def inverse_sqrt(s: int) -> float:
    """Return 1/√(1+s), a factor for the weight of an update of staleness s (2106.06639, section 5.2)."""
    return 1 / math.sqrt(1 + s)


class Reducer(NamedTuple):
    """How the parameters of updates become one, and whether float buffers are reduced in this way, too."""

    factors: Callable[[Facts], list[float]] = shares
    combine: Callable[[Sequence[Tensor], Sequence[float]], Tensor] = weighted_sum
    of_buffers: bool = False


def next_buffer(rule: str, b: Tensor, rows: Sequence[Tensor], facts: Facts, reducer: Reducer) -> Tensor:
    """Return the next value of a buffer by its rule. `rows`: the sites' values; for the rule `sum`, their changes."""
    if rule == "sum":
        return (wide(b) + sum(map(wide, rows[1:]), wide(rows[0]))).to(b.dtype)
    if rule == "max":
        return torch.stack(list(rows)).amax(dim=0)
    if rule == "first" or (rule == "flags" and all(bool(((row == 0) | (row == 1)).all()) for row in rows)):
        return rows[0]
    combine = reducer.combine if reducer.of_buffers else weighted_sum
    return combine([wide(row) for row in rows], shares(facts)).to(b.dtype)


# -- Outer optimizers: step(x, g, state) changes x along g

Outer = Callable[[Tensor, Tensor, dict[str, Any]], None]


def of_torch(kind: type[Optimizer], **options: Any) -> Outer:
    """Return an optimizer of torch, such as SGD with Nesterov momentum (DiLoCo, 2311.08105) or Adam (2003.00295).

    It is torch's fused implementation if there is one: this one rounds the last elements of a tensor differently. The
    state of a tensor goes on if the options change from a round on.
    """
    fused = {"fused": True} if "fused" in inspect.signature(kind).parameters else {}

    def step(x: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        optimizer = state.setdefault("optimizer", kind([x], **{**fused, **options}))
        optimizer.param_groups[0].update(options)
        x.grad = g
        optimizer.step()

    return step


def yogi(lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3) -> Outer:
    """m ← β₁·m + (1−β₁)·g;  v ← v − (1−β₂)·g²·sign(v − g²), v₀ = τ²;  x ← x − η·m / (√v + τ) (2003.00295)."""

    def step(x: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        m, v = state.get("m", torch.zeros_like(x)), state.get("v", torch.full_like(x, eps**2))
        state["m"] = m = (m * betas[0]).add(g, alpha=1 - betas[0])
        state["v"] = v = v.addcmul(g * g, torch.sign(v - g * g), value=-(1 - betas[1]))
        x.addcdiv_(m, v.sqrt() + eps, value=-lr)

    return step


def delayed_nesterov(lr: float, momentum: float, delay: int, undelayed: int = 0) -> Outer:
    """θ ← θ − ε·g/N; before every N-th: m ← β·m + Σg/N, θ ← θ − ε·β·m (2401.09135). First `undelayed` steps: N = 1."""

    def step(x: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        t, m, total = (
            state.get("t", 0),
            state.get("m", torch.zeros_like(x)),
            state.get("total", torch.zeros_like(x)) + g,
        )
        n = 1 if t < undelayed else delay
        if n == 1 or (t - undelayed) % n == n - 1:
            m, total = (m * momentum).add(total, alpha=1 / n), torch.zeros_like(x)
            x.add_(m, alpha=-lr * momentum)
        x.add_(g, alpha=-lr / n)
        state.update(t=t + 1, m=m, total=total)

    return step


# -- The server. It has one `Fragment` for the whole model; streaming DiLoCo has several


@dataclass(frozen=True)
class Rules:
    """What decides the values of a run, besides the sites' training.

    Attributes:
        outer: the outer optimizer of the parameters; its state begins empty.
        outer_from: round → the outer optimizer from this round on, if it changes within the run.
        up_from: round → the codec of updates from this round on and its feedback, if it changes.
        up: the codec of updates. feedback: whether sites keep what it loses. down: the codec of versions, if any.
        reducer: of the parameters.
        buffers: buffer → its rule: mean, max, sum, first, flags or keep. All other tensors are parameters.
        mu: FedProx's μ.
        controls: whether the algorithm is SCAFFOLD.
        norms: ‖u_i‖₂ as computed here → as a run has summed them up, piece by piece: within 1e-6.
    """

    outer: Outer
    up: Callable[[Tensor, torch.dtype], Tensor] = none
    feedback: bool = False
    down: Callable[[Tensor, torch.dtype], Tensor] | None = None
    reducer: Reducer = Reducer()
    buffers: Mapping[str, str] = field(default_factory=dict)
    mu: float = 0.0
    controls: bool = False
    norms: Callable[[list[float]], Sequence[float]] = list
    outer_from: Mapping[int, Outer] = field(default_factory=dict)
    up_from: Mapping[int, tuple[Callable[[Tensor, torch.dtype], Tensor], bool]] = field(default_factory=dict)


def of_round(first: T, changed: Mapping[int, T], number: int) -> T:
    """Return the value in a round: `first`, or that of the last change up to it."""
    return changed.get(max((start for start in changed if start <= number), default=0), first)


class Update(NamedTuple):
    """What arrives from a site: u_i of each parameter, buffers, SCAFFOLD's Δc_i, weight n_i, local steps."""

    site: str
    params: Tensors
    buffers: Tensors
    controls: Tensors
    weight: float
    steps: int


def norm_of(update: Update) -> float:
    """Return ‖u_i‖₂ over all parameters, in fp64."""
    return math.sqrt(sum(float(u.double().square().sum()) for u in update.params.values()))


class Fragment:
    """A fragment at the server: b, θ, the outer optimizer's state, SCAFFOLD's c, and how many versions were made."""

    def __init__(self, rules: Rules, initial: Tensors):
        self.rules, self.version = rules, 0
        self.b = {name: value.clone() for name, value in initial.items()}
        self.theta = {name: wide(b).clone() for name, b in self.b.items() if name not in rules.buffers}
        self.state: dict[str, dict[str, Any]] = {name: {} for name in self.theta}
        self.trained: set[str] = set()
        self.c = {name: torch.zeros_like(theta) for name, theta in self.theta.items() if rules.controls}
        self.first_weight: dict[str, float] = {}  # of each site that has had an update, for SCAFFOLD
        self.W = 0.0

    def close(self, updates: Iterable[Update], joined: int = 0, stale: Sequence[float] = ()) -> None:
        """Make the next version from the updates of a round.

        Args:
            joined: N, the number of sites with data that have joined, for SCAFFOLD; 0: those that were heard.
            stale: factors of stale updates. They count after normalisation, so a stale update shortens the step.
        """
        rules, sent = self.rules, sorted(updates, key=lambda update: update.site)
        if rules.controls:
            self.first_weight = {update.site: update.weight for update in sent} | self.first_weight
            sent = [update._replace(weight=self.first_weight[update.site]) for update in sent]
        norms = rules.norms([norm_of(update) for update in sent])
        facts = Facts([update.weight for update in sent], [update.steps for update in sent], norms)
        factors = [p * s for p, s in zip(rules.reducer.factors(facts), stale or [1.0] * len(sent), strict=True)]
        for name, theta in self.theta.items():
            self._step(name, [update.params[name] for update in sent], factors)
            b, dtype = wide(self.b[name]), self.b[name].dtype
            self.b[name] = (b + rules.down(theta - b, dtype) if rules.down else theta).to(dtype, copy=True)
        for name, rule in rules.buffers.items():
            if name in self.b and rule != "keep":
                rows = [update.buffers[name] for update in sent]
                self.b[name] = next_buffer(rule, self.b[name], rows, facts, rules.reducer)
        if rules.controls:
            self._step_controls(sent, joined)
        self.version += 1

    def result(self) -> Tensors:
        """Return what a run exports: θ in the dtype of the model, without what a codec of versions loses."""
        return {name: self.theta[name].to(b.dtype) if name in self.theta else b for name, b in self.b.items()}

    def _step(self, name: str, rows: Sequence[Tensor], factors: Sequence[float]) -> None:
        """θ ← outer step along g. A weight decay does not move a parameter that no site has trained."""
        theta, before = self.theta[name], self.theta[name].clone()
        self.trained |= {name} if any(bool(row.any()) for row in rows) else set()
        if name not in self.trained:
            theta.zero_()
        if theta.numel():  # some optimizers of torch divide by it
            outer = of_round(self.rules.outer, self.rules.outer_from, self.version + 1)
            outer(theta, self.rules.reducer.combine(rows, factors), self.state[name])
        if name not in self.trained:
            theta.copy_(before)

    def _step_controls(self, sent: Sequence[Update], joined: int) -> None:
        """c ← c·W_before/W + Σ p_i·Δc_i, p_i = w_i / W, W = (N/M) · the weights of the M sites heard (1910.06378)."""
        M = len(self.first_weight)
        before, self.W = self.W, math.fsum(self.first_weight.values()) * (joined or M) / M
        p = [update.weight / self.W for update in sent]
        for name, c in self.c.items():
            kept = c * ((before or self.W) / self.W)
            self.c[name] = kept + weighted_sum([update.controls[name] for update in sent], p)


# -- A site

LocalStep = Callable[[int, Tensors, Callable[[Tensors], Tensors]], None]
"""(k, w, correct): the k-th local step, from 0. It changes w along `correct(g)`, where g are the gradients."""


@dataclass
class Site:
    """A site, and what it keeps between rounds.

    Attributes:
        w: its model. b: the version that each tensor of w began from.
        local_step: the user's training. k: how many were taken. steps: how many a federated round has. lr: their η.
        number: its round, from 1. e: what codecs with feedback have lost of earlier updates.
        c_i: SCAFFOLD's control variate of the site.
    """

    rules: Rules
    name: str
    w: Tensors
    local_step: LocalStep
    steps: int = 1
    weight: float = 1.0
    lr: float = 0.0

    def __post_init__(self) -> None:
        self.k, self.number, self.b = 0, 1, Tensors()
        self.e = {name: torch.zeros_like(wide(x)) for name, x in self.w.items() if name not in self.rules.buffers}
        self.c_i = {name: e.clone() for name, e in self.e.items() if self.rules.controls}

    def load(self, b: Tensors, alpha: float = 0.0) -> None:
        """w ← (1−α)·b + α·w for parameters and averaged floats; all other tensors take the version's values."""
        for name, version in b.items():
            rule, w = self.rules.buffers.get(name, "mean"), self.w[name]
            if rule != "keep":
                mixes = alpha and rule == "mean" and w.is_floating_point()
                w.copy_(torch.add(wide(version) * (1 - alpha), wide(w), alpha=alpha) if mixes else version)
            self.b[name] = version

    def train(self, c: Tensors) -> Tensors:
        """Take the local steps of a federated round. Return SCAFFOLD's Δc_i.

        FedProx (1812.06127): g ← g + μ·(w − w_t). SCAFFOLD (1910.06378, option II): y ← y − η·(c − c_i) after each
        step, and Δc_i = (x − y) / Σ η − c for the parameters that were trained.
        """
        mu, w_t, trained, rates = self.rules.mu, {name: x.clone() for name, x in self.w.items()}, set[str](), 0.0
        shift = {name: (c[name] - self.c_i[name]).to(self.w[name].dtype) for name in c}

        def correct(g: Tensors) -> Tensors:
            trained.update(g)
            return {name: torch.add(x, self.w[name] - w_t[name], alpha=mu) for name, x in g.items()} if mu else g

        for _ in range(self.steps):
            self.local_step(self.k, self.w, correct)
            self.k, rates = self.k + 1, rates + self.lr
            for name in trained & shift.keys():
                self.w[name].sub_(shift[name], alpha=self.lr)
        moved = {name: wide(self.b[name]) - wide(self.w[name]) for name in c}
        return {name: moved[name] / rates - c[name] if name in trained else torch.zeros_like(c[name]) for name in c}

    def update(self, names: Iterable[str], delta_c: Tensors | None = None) -> Update:
        """Return the update of these tensors. Once it counts, e ← u + e − C(u + e) and c_i ← c_i + Δc_i."""
        params, buffers, delta_c = dict[str, Tensor](), dict[str, Tensor](), delta_c or {}
        up, feedback = of_round((self.rules.up, self.rules.feedback), self.rules.up_from, self.number)
        self.number += 1
        for name in names:
            b, w, rule = self.b[name], self.w[name], self.rules.buffers.get(name, "")
            if not rule:
                u = wide(b) - wide(w) + self.e[name] if feedback else wide(b) - wide(w)
                params[name] = up(u, b.dtype)
                self.e[name] = u - params[name] if feedback else self.e[name]
            elif rule != "keep":
                buffers[name] = (wide(w) - wide(b)).to(b.dtype) if rule == "sum" else w.clone()
        self.c_i = {name: c_i + delta_c[name] for name, c_i in self.c_i.items()}
        return Update(self.name, params, buffers, delta_c, self.weight, self.steps)

    def rebase(self, b: Tensors, accepted: Update | None = None) -> None:
        """After a missed synchronisation: w ← b_head + (w − b_base). Buffers take the head's values.

        If an update of these steps was accepted, b_head has it already: b_base ← b_base − u first. `load` in place of
        `rebase` loses the local steps (the setting `on_missed`).
        """
        for name, head in b.items():
            rule, w, base = self.rules.buffers.get(name, ""), self.w[name], self.b[name]
            if accepted and not rule:
                base = (wide(base) - accepted.params[name]).to(base.dtype)
            if rule != "keep":
                w.copy_(head if rule else wide(head) + (wide(w) - wide(base)))
        self.b |= b

    def restart(self, b: Tensors, went_back: bool = False) -> None:
        """After a kill: the newest version. The steps since the last update are lost; e and c_i are on disk.

        If the server has gone back to an older version, e begins at zero, and so do c and all c_i, unless the sites
        still have those of that version (docs/decisions/0035).
        """
        self.load(b)
        if went_back:
            self.e = {name: torch.zeros_like(e) for name, e in self.e.items()}


# -- Runs. A process that is killed and goes on does not change their values, but for what `restart` says


def federated(
    server: Fragment, sites: Sequence[Site], rounds: int, weight: Callable[[str, int], float] | None = None
) -> None:
    """Run rounds of FedAvg, FedProx, FedNova, FedOpt or SCAFFOLD.

    Args:
        weight: (site, round) → weight of its update, if it changes; 0: the site sits out the round.
    """
    for number in range(1, rounds + 1):
        updates = []
        for site in sites:
            site.load(server.b)
            delta_c = site.train(server.c)
            site.weight = weight(site.name, number) if weight else site.weight
            site.number = number
            if site.weight:
                updates.append(site.update(server.b, delta_c))
        if updates:
            server.close(updates)
    load_at_all(sites, server)  # at the end, every site has the run's model


def diloco(
    fragments: Sequence[Fragment],
    sites: Sequence[Site],
    rounds: int,
    H: int,
    tau: int = 0,
    alpha: float = 0.0,
    H_from: Mapping[int, int] = {},
) -> None:
    """Run DiLoCo (2311.08105); with K > 1 fragments, streaming DiLoCo (2501.18512, algorithm 2).

    Every H/K local steps the next fragment is due, in turn. Its update is formed then, and the result merged τ steps
    later: w ← (1−α)·b + α·w.

    Args:
        H_from: round → H from this round on, if it changes. While the next rounds of fragments have different H, the
            smallest counts; a fragment's next round begins for a site once it has merged the result of the last one.
    """
    K, taken, step, merges = len(fragments), 0, 0, dict[int, Fragment]()
    last, heard = 0, [1] * K  # the step at which the last fragment was due; the next round of each
    for fragment in fragments:
        load_at_all(sites, fragment)
    while taken < rounds * K or merges:
        for site in sites:
            site.local_step(step, site.w, lambda g: g)
        step += 1
        if step in merges:
            heard[fragments.index(merges[step])] += 1
            load_at_all(sites, merges.pop(step), alpha)
        if step - last == min(of_round(H, H_from, number) for number in heard) // K and taken < rounds * K:
            fragment = fragments[taken % K]
            fragment.close([site.update(fragment.b) for site in sites])
            taken, last = taken + 1, step
            if tau:
                merges[step + tau] = fragment
            else:
                heard[fragments.index(fragment)] += 1
                load_at_all(sites, fragment, alpha)
    for fragment in fragments:
        load_at_all(sites, fragment)


def load_at_all(sites: Iterable[Site], fragment: Fragment, alpha: float = 0.0) -> None:
    """Load or merge a version of a fragment at all sites."""
    for site in sites:
        site.load(fragment.b, alpha)


def asynchronous(
    server: Fragment,
    sites: Mapping[str, Site],
    order: Iterable[Sequence[str]],
    staleness_weight: Callable[[int], float] = lambda s: 1.0,
) -> None:
    """Run without a barrier: FedBuff (2106.06639), asynchronous DiLoCo (2401.09135).

    Args:
        order: for each outer step, the sites of the updates that it applies. They then train from the new version.
        staleness_weight: s, the outer steps since the version that an update was trained from → factor of its weight.
    """
    began = dict.fromkeys(sites, 0)  # site → the version that it trains from

    def train(site: str) -> None:
        began[site] = server.version
        sites[site].load(server.b)
        sites[site].train({})

    for site in sites:
        train(site)
    for arrived in order:
        names = sorted(arrived)
        updates = [sites[name].update(server.b) for name in names]
        server.close(updates, stale=[staleness_weight(server.version - began[name]) for name in names])
        for name in names:
            train(name)
