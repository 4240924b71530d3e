"""The sentence at the top of a status: what the run does, what it waits for, whether it learns, and when it ends.

It tells an end only while nothing is in its way. Else it says what the end waits for (`Headline.held_up`). Names of
sites stand in quotation marks: a site chooses its name, which may look like a part of the sentence.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from atoll.format_text import about, duration, number_of, quoted, visible
from atoll.protocol.status_messages import GLOBAL, FragmentStatus, Headline, RoundSummary, Status, WorkerStatus

LATE, LATER_S = 2.0, 1.0
"""What takes this many times as long as usual, and these seconds longer, is late."""
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


def headline_of(status: Status, trouble: Trouble = NO_TROUBLE) -> Headline:
    """Return the sentence about a run, whether a person must act, and the command for it.

    Args:
        status: the status. Its own `headline` is not read.
        trouble: what only the server knows.
    """
    folder = f" --dir {shlex.quote(status.state_dir)}" if status.state_dir else ""
    again = trouble.start or f"atoll server run.toml{folder}"
    learns = _learns(status)
    if status.failed:
        return _act(f"The run has failed{_at(status)}: {_short(status.failed)}{_stop(status.failed)}{learns}", again)
    if status.finished:
        rounds = min((each.round for each in status.fragments), default=0)
        done = f" after {number_of(rounds, 'round')}" if rounds and status.model_bytes else ""
        text = f"The run is finished{done}."
        if status.stopped:
            text = f"After{done[6:]}, the run was {status.stopped}." if done else f"The run was {status.stopped}."
        return _calm(f"{text}{learns}", f"atoll export model.safetensors{folder}")
    if trouble.stored:
        return _act(
            f"No server runs: the run stopped{_at(status)}. Start it again, and it continues there.{learns}", again
        )
    if trouble.disk:
        name = _round(status, _slowest(status)) if status.fragments else "The run"
        text = f"{name} waits for the disk: {_short(trouble.disk)}{_end(status, 'that')}{learns}"
        return _act(text, f"df -h {shlex.quote(status.state_dir or '.')}")
    if status.paused:
        is_open = bool(status.fragments) and _slowest(status).phase == "open"
        what = "it may still end, but no other begins" if is_open else "no site trains"
        text = f"The run is paused{_at(status)}: {what} until it is resumed.{_end(status, 'that')}{learns}"
        return _held_up(text, f"atoll resume{folder}")
    if not status.fragments or not status.model_bytes or _slowest(status).phase == "finished":
        return _calm(_workflow(status))
    return _training(status, trouble)


def _training(status: Status, trouble: Trouble) -> Headline:
    """Return the sentence about a run in which rounds are under way."""
    fragment, learns = _slowest(status), _learns(status)
    if fragment.phase == "gathering" and not status.history:
        text = f"The first round has not begun: it {fragment.reason or 'waits for sites'}.{_end(status, 'that')}"
        is_act = status.uptime_s >= START_S and "join" in fragment.reason
        return Headline(text=visible(text), act=is_act, held_up=is_act, command=_start(status, "NAME"))
    ended = [each for each in status.workers if each.state in ("dead", "failed")]
    if trouble.sites:
        name = ended[0].site if ended else "NAME"
        text = f"{_round(status, fragment)} cannot close: {_short(trouble.sites)}{_stop(trouble.sites)}"
        return _act(f"{text}{_end(status, 'that')}{learns}", _start(status, name))
    awaited, end_waits_for, late = _awaited(status, fragment)
    opened = f"{_round(status, fragment)} {awaited}"
    if ended:
        others = f" and {len(ended) - 1} more" if len(ended) > 1 else ""
        how = {"dead": "is dead", "failed": "has failed"}[ended[0].state]
        why = f": {_short(ended[0].error)}" if ended[0].error else ""
        text = f"{quoted(ended[0].site)}{others} {how}{why}{_stop(why)} The run goes on without it. {opened}"
        text += f"{_end(status, end_waits_for)}{learns}"
        return _act(text, _start(status, ended[0].site), held_up=bool(end_waits_for), late=late)
    refused = [each for each in status.workers if each.state == "alive" and each.refused]
    if refused:
        first = refused[0]
        why = f"The updates of {quoted(first.site)} do not count: {_short(first.refused)}{_stop(first.refused)}"
        todo = "Check its data and learning rate, and start it again."
        text = f"{why} {todo} {opened}{_end(status, quoted(first.site))}{learns}"
        return _act(text, _start(status, first.site), late=late)
    if rise := _rise(status):
        until = f" Unless it is stopped, it goes on to round {status.rounds}." if status.rounds else ""
        stop = f"atoll stop{_at_server(status)}"
        return _act(f"The run diverges: its loss rose {rise}. {opened}{until}", stop)
    text = f"{opened}{_end(status, end_waits_for)}{learns}"
    return Headline(text=visible(text), held_up=bool(end_waits_for), late=late)


def _act(text: str, command: str, *, held_up: bool = True, late: Sequence[str] = ()) -> Headline:
    return Headline(text=visible(text), act=True, held_up=held_up, command=command, late=list(late))


def _calm(text: str, command: str = "") -> Headline:
    return Headline(text=visible(text), command=command)


def _held_up(text: str, command: str = "") -> Headline:
    return Headline(text=visible(text), held_up=True, command=command)


def _short(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


def _stop(text: str) -> str:
    """Return the full stop that a quoted text lacks."""
    return "" if text.endswith((".", "!", "?")) else "."


def _slowest(status: Status) -> FragmentStatus:
    return min(status.fragments, key=lambda each: (each.round, each.fragment))


def _start(status: Status, site: str) -> str:
    return f"atoll worker{_at_server(status)} --site {shlex.quote(site)} -- python train.py"


def _at_server(status: Status) -> str:
    address = status.public_address or status.address
    return f" --server {address}" if address else ""


def _round(status: Status, fragment: FragmentStatus) -> str:
    of = f" of {status.rounds}" if status.rounds else ""
    return f"Round {fragment.round}{of}"


def _at(status: Status) -> str:
    round_ = _round(status, _slowest(status)) if status.fragments and status.model_bytes else ""
    return f" in {round_[:1].lower()}{round_[1:]}" if round_ else ""


def is_late(spent_s: float, usual_s: float) -> bool:
    """Return whether something takes much longer than usual.

    Args:
        spent_s: seconds so far.
        usual_s: its usual seconds.
    """
    return spent_s > max(LATE * usual_s, usual_s + LATER_S)


def _awaited(status: Status, fragment: FragmentStatus) -> tuple[str, str, list[str]]:
    """Return what the round waits for, as the rest of a sentence; what the end waits for; and the sites that are late.

    The second text is empty while nothing is in the way of the end. In an asynchronous run, a site may be late although
    no other waits for it.
    """
    if fragment.phase == "closing":
        aggregator = fragment.place.aggregator if fragment.place else ""
        where = f" at {quoted(aggregator)}" if aggregator else ""
        told, sites = _late_alone(status)
        if status.evaluation is not None and status.evaluation.running is not None:
            return f"is closed, and waits for the evaluation of version {status.evaluation.running}.{told}", "", sites
        return f"is closed: its updates are aggregated{where}.{told}", "", sites
    usual_s = usual_round_s(status.history)
    late = usual_s is not None and is_late(fragment.open_s, usual_s)
    opened = f"has been open for {duration(fragment.open_s)}"
    if late and usual_s:
        opened += f", {fragment.open_s / usual_s:.0f} times as long as usual,"
    if not fragment.waiting_for:
        is_short = "for another site" in fragment.reason
        told, sites = _late_alone(status)
        return (
            f"{opened} and {fragment.reason or 'is about to close'}.{told}",
            "that" if late or is_short else "",
            sites,
        )
    workers = {each.site: each for each in status.workers}
    sites = [each.site for each in fragment.waiting_for]
    facts = [_doing(workers.get(site), status.workers) for site in sites[:MOST_NAMES]]
    if len(set(facts)) == 1:
        facts = [""] * (len(facts) - 1) + facts[-1:]
    alive = sum(each.state == "alive" for each in status.workers)
    why, away = fragment.trouble, [site for site in sites if site not in workers or workers[site].state != "alive"]
    in_the_way = ("it" if len(sites) == 1 else "them") if late or why or away else ""
    if not in_the_way and len(sites) == alive > 1 and len({fact for fact in facts if fact}) <= 1:
        return f"{opened} and waits for all {alive} sites{f' ({facts[-1]})' if facts[-1] else ''}.", "", []
    names = [f"{quoted(site)} ({fact})" if fact else quoted(site) for site, fact in zip(sites, facts, strict=False)]
    if len(sites) > len(names):
        names.append(number_of(len(sites) - len(names), "other site"))
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    text = f"{opened} and waits for {listed}{f': {_short(why)}' if why else ''}."
    return text, in_the_way, sites if late else away


def _late_alone(status: Status) -> tuple[str, list[str]]:
    """Return a sentence about the late sites of an asynchronous run, with a space before it; and their names."""
    if status.mode != "asynchronous":
        return "", []
    alive = [each for each in status.workers if each.state == "alive"]
    late = [each for each in alive if each.usual_s and is_late(each.ticket_s, each.usual_s)]
    if not late:
        return "", []
    first, others = late[0], f" and {len(late) - 1} more" if len(late) > 1 else ""
    times = f"{duration(first.ticket_s)}, {first.ticket_s / first.usual_s:.0f} times as long as usual"
    verb = "are" if others else "is"
    text = f" {quoted(first.site)}{others} {verb} late: {times}. The other sites do not wait."
    return text, [each.site for each in late]


def _doing(worker: WorkerStatus | None, workers: Sequence[WorkerStatus]) -> str:
    """Return what an awaited site does, and its speed if it is a slow one."""
    if worker is None or worker.state != "alive":
        return worker.state if worker is not None else ""
    speeds = [each.steps_per_s for each in workers if each.steps_per_s > 0]
    slower = median(speeds) / worker.steps_per_s if worker.steps_per_s > 0 else 0.0
    slow = f"{slower:.1f} times slower than the median" if slower >= LATE else ""
    return ", ".join(filter(None, [worker.doing, slow]))


def usual_round_s(history: Sequence[RoundSummary]) -> float | None:
    """Return the usual time of a round, from what its sites report; None: no round has ended.

    Round 1 counts only while no later one has ended. What a site waited in its own first round does not count, as far
    as `history` tells: it waited for others to join.
    """
    first_s, later_s = list[float](), list[float]()
    known = {each.site for each in history[0].sites} if history and history[0].round > 1 else set[str]()
    for row in history:
        took_s = [each.train_seconds + (each.wait_seconds if each.site in known else 0.0) for each in row.sites]
        if took_s:
            (later_s if row.round > 1 else first_s).append(max(took_s))
        known.update(each.site for each in row.sites)
    return median(later_s or first_s) if later_s or first_s else None


def _end(status: Status, waits_for: str) -> str:
    """Return when the run ends, as a sentence with a space before it.

    Args:
        status: the status.
        waits_for: what is in the way of the end, such as the name of a site; empty: nothing.
    """
    if not status.rounds:
        return "" if waits_for else " The run has no last round: it trains until it is stopped."
    if not status.fragments or not status.model_bytes:
        return ""
    if waits_for:
        slowest, is_steady = _slowest(status), any(each.round > 1 for each in status.history)
        usual_s = usual_round_s(status.history) if is_steady else None  # in round 1, sites load data and compile
        more = status.rounds - slowest.round + (slowest.phase not in ("open", "closing"))
        each = f" of about {duration(usual_s)}" if usual_s else ""
        then = "" if status.stopping or more < 1 else f", then for {number_of(more, 'more round')}{each}"
        return f" The end waits for {waits_for}{then}."
    if status.stopping:
        return " The run is being stopped: this is its last round."
    if status.left_s is not None:
        return f" Done in {about(status.left_s)}."
    return " The end can be estimated after some more rounds."


def _rise(status: Status) -> str:
    """Return from which value to which the loss of a diverging run has risen, and when; empty: it does not diverge."""
    found = [(row.metrics["loss"], row.round) for row in _of_first_fragment(status) if "loss" in row.metrics]
    found = [each for each in found if math.isfinite(each[0])]
    last = [loss for loss, _ in found[-RISES - 1 :]]
    if len(last) <= RISES or any(one >= other for one, other in pairwise(last)):
        return ""
    (lowest, low), (now, number) = min(found), found[-1]
    return f"from {lowest:.4g} in round {low} to {now:.4g} in round {number}" if now > RISE * lowest > 0 else ""


def _of_first_fragment(status: Status) -> list[RoundSummary]:
    """Return the rounds that the charts show: those of a model without fragments, or of its first one."""
    return [row for row in status.history if row.fragment == 0]


def _learns(status: Status) -> str:
    """Return how the run's metric has moved since its first recorded value."""
    best, history = status.best, _of_first_fragment(status)
    wanted = [best.metric, "loss"] if best is not None else ["loss"]
    known = {name for row in history for name in row.values}
    name = next((each for each in [*wanted, *sorted(known)] if each in known), "")
    if not name:
        if any(row.version is not None for row in history):
            return " Whether it learns is not known: no site reports a metric."
        unchanged = history and not status.version
        return " All sites sat out each round, so the model is as it began." if unchanged else ""
    found = [(row.values[name], row.round) for row in history if name in row.values]
    (first, begun), (last, number) = found[0], found[-1]
    if name in status.first:
        first, begun = status.first[name].value, status.first[name].round
    shown = f"{name.removeprefix(GLOBAL)}{' at the server' if name.startswith(GLOBAL) else ''}"
    text = f" {shown[:1].upper()}{shown[1:]} {last:.4g} in round {number}"
    if begun != number:
        moved = f"{'down' if last < first else 'up'} from {first:.4g} in" if last != first else "unchanged since"
        text += f", {moved} round {begun}"
    if best is not None and best.metric == name and best.value is not None:
        text += f"; best {best.value:.4g} in round {best.round}, for version {best.version}"
    return f"{text}."


def _workflow(status: Status) -> str:
    for number, each in enumerate(status.workflows, start=1):
        if each.state in ("running", "failed"):
            detail = f": {_short(each.detail)}" if each.detail else ""
            of = f"{number} of {len(status.workflows)}"
            return f"Workflow {of}, {each.name}, is {each.state} for {duration(each.seconds)}{detail}."
    return "The rounds have ended; the server waits for its sites." if status.fragments else "The run is beginning."
