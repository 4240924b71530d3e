"""The sentence at the top of a status: what the run does, what it waits for, whether it learns, and when it ends."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from atoll.format_text import about, duration, number_of, visible
from atoll.protocol.status_messages import FragmentStatus, Headline, RoundSummary, Status, WorkerStatus

LATE = 2.0
"""A round is late if it is open for longer than this many times the usual time of a round."""
LEAST_LATE_S = 3.0
START_S = 60.0
"""Seconds that a server waits for its first sites before a person has to start them."""
RISES, RISE = 3, 1.5
"""A run diverges if its loss has risen for `RISES` rounds in a row, and is `RISE` times the lowest loss."""
MOST_NAMES = 3
SHORT = 300
"""Maximum characters of a reason that the sentence quotes."""


class Trouble(NamedTuple):
    """What only the server knows of the problems of a run, as text; empty: there is no such problem.

    Attributes:
        disk: why uploads are refused or a version cannot be written.
        sites: why too few sites take part for the round to close.
        stored: state directory, if no server answers and the status is the stored one.
        start: the command that starts the run again, if it is not `atoll server`.
    """

    disk: str = ""
    sites: str = ""
    stored: str = ""
    start: str = ""


NO_TROUBLE = Trouble()


def headline_of(status: Status, trouble: Trouble = NO_TROUBLE, state_dir: str = "") -> Headline:
    """Return the sentence about a run, whether a person must act, and the command for it.

    Args:
        status: the status. Its own `headline` is not read.
        trouble: what only the server knows.
        state_dir: the run's state directory, for commands; empty if there is none.
    """
    folder = f" --dir {shlex.quote(state_dir)}" if state_dir else ""
    again = trouble.start or f"atoll server run.toml{folder}"
    if status.failed:
        return _act(f"The run has failed: {_short(status.failed)}", again)
    if status.finished:
        rounds = min((each.round for each in status.fragments), default=0)
        done = f" after {number_of(rounds, 'round')}" if rounds and status.model_bytes else ""
        text = f"The run is finished{done}."
        if status.stopped:
            text = f"After{done[6:]}, the run was {status.stopped}." if done else f"The run was {status.stopped}."
        return _calm(f"{text}{_learns(status)}", f"atoll export model.safetensors{folder}")
    if trouble.stored:
        at = f" in round {_slowest(status).round}" if status.fragments else ""
        return _act(
            f"No server runs: the run stopped{at}. Start it again, and it continues there.{_learns(status)}", again
        )
    if trouble.disk:
        return _act(f"The run waits for the disk: {_short(trouble.disk)}", f"df -h{folder[6:] or ' .'}")
    if status.paused:
        at = f" in round {_slowest(status).round}" if status.fragments else ""
        return _calm(
            f"The run is paused{at}: no site trains until it is resumed.{_learns(status)}", f"atoll resume{folder}"
        )
    if not status.fragments or not status.model_bytes or _slowest(status).phase == "finished":
        return _calm(_workflow(status))
    return _training(status, trouble)


def _training(status: Status, trouble: Trouble) -> Headline:
    """Return the sentence about a run in which rounds are under way."""
    fragment = _slowest(status)
    if fragment.phase == "gathering" and not status.history:
        text = f"The first round has not begun: it {fragment.reason or 'waits for sites'}."
        is_act = status.uptime_s >= START_S and "join" in fragment.reason
        return Headline(text=text, act=is_act, command=_start(status, "NAME"))
    ended = [each for each in status.workers if each.state in ("dead", "failed")]
    if trouble.sites:
        name = ended[0].site if ended else "NAME"
        return _act(f"{_round(status, fragment)} cannot close: {_short(trouble.sites)}", _start(status, name))
    rest = f"{_awaited(status, fragment)}{_end(status)}{_learns(status)}"
    text = f"{_round(status, fragment)} {rest}"
    if ended:
        others = f" and {len(ended) - 1} more" if len(ended) > 1 else ""
        how = {"dead": "is dead", "failed": "has failed"}[ended[0].state]
        why = f": {_short(ended[0].error)}" if ended[0].error else ""
        return _act(
            f"{ended[0].site}{others} {how}{why}. The run goes on without it. {text}", _start(status, ended[0].site)
        )
    refused = [each for each in status.workers if each.state == "alive" and each.refused]
    if refused:
        first = refused[0]
        why = f"The updates of {first.site} do not count: {_short(first.refused)}."
        todo = "Check its data and learning rate, and start it again."
        stands = f"{_round(status, fragment)} {_awaited(status, fragment)}{_learns(status)}"  # no end while it stands
        return _act(f"{why} {todo} {stands}", _start(status, first.site))
    if rise := _rises(_losses(status.history)):
        stop = "atoll stop" + (f" --server {status.address}" if status.address else "")
        return _act(f"The run diverges: its loss rose from {rise[0]:.4g} to {rise[1]:.4g}. {text}", stop)
    return _calm(text)


def _act(text: str, command: str = "") -> Headline:
    return Headline(text=visible(text), act=True, command=command)


def _calm(text: str, command: str = "") -> Headline:
    return Headline(text=visible(text), act=False, command=command)


def _short(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


def _slowest(status: Status) -> FragmentStatus:
    return min(status.fragments, key=lambda each: (each.round, each.fragment))


def _start(status: Status, site: str) -> str:
    server = f" --server {status.address}" if status.address else ""
    return f"atoll worker{server} --site {shlex.quote(site)} -- python train.py"


def _round(status: Status, fragment: FragmentStatus) -> str:
    of = f" of {status.rounds}" if status.rounds else ""
    return f"Round {fragment.round}{of}"


def _awaited(status: Status, fragment: FragmentStatus) -> str:
    """Return how long the round is open, whether that is long, and what it waits for, as the rest of a sentence."""
    if fragment.phase == "closing":
        where = f" at {fragment.place.aggregator}" if fragment.place and fragment.place.aggregator else ""
        return f"is closed: its updates are aggregated{where}."
    usual_s = usual_round_s(status.history)
    late = usual_s is not None and fragment.open_s > max(LATE * usual_s, LEAST_LATE_S)
    opened = f"has been open for {duration(fragment.open_s)}"
    if late and usual_s:
        opened += f", {fragment.open_s / usual_s:.0f} times as long as usual,"
    if not fragment.waiting_for:
        return f"{opened} and {fragment.reason or 'is about to close'}."
    workers = {each.site: each for each in status.workers}
    sites = [each.site for each in fragment.waiting_for]
    facts = [_doing(workers.get(site), status.workers) for site in sites[:MOST_NAMES]]
    if len(set(facts)) == 1:
        facts = [""] * (len(facts) - 1) + facts[-1:]
    alive = sum(each.state == "alive" for each in status.workers)
    if not late and len(sites) == alive > 1 and len({fact for fact in facts if fact}) <= 1:
        return f"{opened} and waits for all {alive} sites{f' ({facts[-1]})' if facts[-1] else ''}."
    names = [f"{site} ({fact})" if fact else site for site, fact in zip(sites, facts, strict=False)]
    if len(sites) > len(names):
        names.append(number_of(len(sites) - len(names), "other site"))
    why = fragment.reason.partition("; ")[2].partition("; ")[0]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{opened} and waits for {listed}{f': {_short(why)}' if why else ''}."


def _doing(worker: WorkerStatus | None, workers: Sequence[WorkerStatus]) -> str:
    """Return what an awaited site does, and its speed if it is a slow one."""
    if worker is None or worker.state != "alive":
        return worker.state if worker is not None else ""
    speeds = [each.steps_per_s for each in workers if each.steps_per_s > 0]
    slower = median(speeds) / worker.steps_per_s if worker.steps_per_s > 0 else 0.0
    slow = f"{slower:.1f} times slower than the median" if slower >= LATE else ""
    return ", ".join(filter(None, [worker.doing, slow]))


def usual_round_s(history: Sequence[RoundSummary]) -> float | None:
    """Return the usual time of a round, from what its sites report; None: no round has ended."""
    times = [max(each.train_seconds + each.wait_seconds for each in row.sites) for row in history if row.sites]
    return median(times) if times else None


def _end(status: Status) -> str:
    if status.left_s is not None:
        return f" Done in {about(status.left_s)}."
    return "" if status.rounds else " The run has no last round: it trains until it is stopped."


def _losses(history: Sequence[RoundSummary]) -> list[float]:
    found = [row.metrics["loss"] for row in history if "loss" in row.metrics]
    return [each for each in found if math.isfinite(each)]


def _rises(losses: Sequence[float]) -> tuple[float, float] | None:
    """Return the lowest and the last loss of a run that diverges; None: it does not."""
    last = losses[-RISES - 1 :]
    rises = len(last) > RISES and all(one < other for one, other in pairwise(last))
    return (min(losses), last[-1]) if rises and last[-1] > RISE * min(losses) > 0 else None


def _learns(status: Status) -> str:
    """Return how the run's metric has moved over the rounds of the status."""
    best = status.best
    name = best.metric if best is not None else "loss"
    found = [(row.metrics[name], row.round) for row in status.history if name in row.metrics]
    if not found:
        return ""
    (first, begun), (last, number) = found[0], found[-1]
    text = f" {name[:1].upper()}{name[1:]} {last:.4g} in round {number}"
    if first != last:
        text += f", {'down' if last < first else 'up'} from {first:.4g} in round {begun}"
    if best is not None and best.value is not None:
        text += f"; best {best.value:.4g} at version {best.version}"
    return f"{text}."


def _workflow(status: Status) -> str:
    for number, each in enumerate(status.workflows, start=1):
        if each.state in ("running", "failed"):
            detail = f": {_short(each.detail)}" if each.detail else ""
            of = f"{number} of {len(status.workflows)}"
            return f"Workflow {of}, {each.name}, is {each.state} for {duration(each.seconds)}{detail}."
    return "The rounds have ended; the server waits for its sites." if status.fragments else "The run is beginning."
