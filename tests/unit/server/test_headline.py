"""The sentence at the top of a status, for the situations of a run; numbers are those of the status in the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from atoll.protocol.status_headline import Trouble, headline_of, usual_round_s
from atoll.protocol.status_messages import (
    BestStatus,
    FragmentStatus,
    Headline,
    Missing,
    PlaceStatus,
    RoundSummary,
    SiteRound,
    Status,
    WorkerStatus,
    WorkflowStatus,
)

ADDRESS = "http://127.0.0.1:8512"


def history(losses: Sequence[float], seconds: float = 4.0) -> list[RoundSummary]:
    """Rounds in which each of two sites took `seconds`."""
    return [
        RoundSummary(
            fragment=0,
            round=number,
            version=number,
            metrics={"loss": loss},
            counts={"loss": 2},
            seconds=0.1,
            bytes_up=20,
            sites=[SiteRound(site=site, train_seconds=seconds - 1, wait_seconds=1.0) for site in "ab"],
        )
        for number, loss in enumerate(losses, start=1)
    ]


def worker(site: str, **about: Any) -> WorkerStatus:
    return WorkerStatus(**{"site": site, "state": "alive", "doing": "training", "steps_per_s": 10.0} | about)


def running(**about: Any) -> Status:
    """Round 4 of 20 waits for the site b; an estimate of the end is known."""
    fragment = {"fragment": 0, "version": 3, "round": 4, "phase": "open", "open_s": 3.0, "reason": "waits for b"}
    waiting = [Missing(site="b", for_s=3.0)]
    given: dict[str, Any] = {
        "run": "1",
        "protocol": 1,
        "address": ADDRESS,
        "model_bytes": 1000,
        "rounds": 20,
        "left_s": 64.0,
        "fragments": [FragmentStatus(**fragment | {"waiting_for": waiting} | about.pop("fragment", {}))],
        "workers": [worker("a"), worker("b"), worker("c")],
        "history": history([0.9, 0.7, 0.5]),
    }
    return Status(**given | about)


def start(site: str) -> str:
    return f"atoll worker --server {ADDRESS} --site {site} -- python train.py"


def test_the_headline_says_what_a_run_awaits() -> None:
    """The first line of the page says which sites a healthy run waits for."""
    assert headline_of(running()) == Headline(
        text="Round 4 of 20 has been open for 3.0 s and waits for b (training). Done in about 64 s. "
        "Loss 0.5 in round 3, down from 0.9 in round 1."
    )


def test_the_headline_names_a_late_site() -> None:
    """The first line of the page names a site that is late, with its speed compared with the usual one."""
    # The usual round takes 4 s; the site makes 2 steps/s, the median of all 10.
    workers = [worker("a"), worker("b", steps_per_s=2.0), worker("c")]
    said = headline_of(running(fragment={"open_s": 20.0}, workers=workers))
    assert not said.act
    assert said.text.startswith(
        "Round 4 of 20 has been open for 20 s, 5 times as long as usual, and waits for b "
        "(training, 5.0 times slower than the median)."
    )


def test_the_headline_counts_many_awaited_sites() -> None:
    """If a run waits for many sites, the first line of the page counts them and says once what they all do."""
    waiting = [Missing(site=f"s{number}", for_s=3.0) for number in range(7)]
    workers = [worker(f"s{number}") for number in range(7)]
    said = headline_of(running(fragment={"waiting_for": waiting}, workers=[*workers, worker("s7")]))
    assert "waits for s0, s1, s2 (training) and 4 other sites." in said.text
    said = headline_of(running(fragment={"waiting_for": waiting}, workers=workers))
    assert "waits for all 7 sites (training)." in said.text


def test_the_headline_reports_a_dead_site() -> None:
    """If a site of the round is dead, the first line of the page says so, and that a person has to act."""
    said = headline_of(running(workers=[worker("a"), worker("b", state="dead", error="no heartbeat for 60 s")]))
    assert said.act
    assert said.text.startswith(
        "b is dead: no heartbeat for 60 s. The run goes on without it. Round 4 of 20 has been open"
    )
    assert said.command == start("b")


def test_the_headline_reports_too_few_sites() -> None:
    """If a round has too few sites to close, the first line of the page says so, and that a person has to act."""
    why = "1 site takes part (b is dead), but a round needs at least 2 (rounds.min_sites): the run waits."
    said = headline_of(running(workers=[worker("a"), worker("b", state="dead")]), Trouble(sites=why))
    assert said == Headline(text=f"Round 4 of 20 cannot close: {why}", act=True, command=start("b"))


def test_the_headline_reports_a_diverging_loss() -> None:
    """If the loss rises three times in a row to 1.5 times its lowest value, the first line of the page reports it."""
    # One rise is not reported.
    said = headline_of(running(history=history([0.5, 0.4, 0.5, 0.6, 0.7])))
    assert said.act
    assert said.text.startswith("The run diverges: its loss rose from 0.4 to 0.7. Round 4 of 20 has been open")
    assert not headline_of(running(history=history([0.5, 0.4, 0.6]))).act
    assert not headline_of(running(history=history([0.40, 0.41, 0.42, 0.43]))).act


def test_the_headline_reports_a_site_with_nan() -> None:
    """If a site's updates are refused because of NaN, the first line of the page names the site."""
    said = headline_of(running(workers=[worker("a"), worker("b", refused="it has NaN in 0.weight")]))
    assert said.act
    assert said.text.startswith("The updates of b do not count: it has NaN in 0.weight. Check its data")


def test_the_headline_reports_a_full_disk() -> None:
    """If the server's disk is full, the first line of the page says so."""
    why = "The server has 5 MB of disk left, but must keep 268 MB free."
    said = headline_of(running(), Trouble(disk=why), "/runs/my run")
    assert said == Headline(text=f"The run waits for the disk: {why}", act=True, command="df -h '/runs/my run'")


@pytest.mark.parametrize(("uptime_s", "act"), [(5.0, False), (61.0, True)])
def test_the_headline_says_how_to_start_a_site(uptime_s: float, act: bool) -> None:
    """A run without sites is normal for a minute. Then the first line of the page says how to start a site."""
    reason = "waits for 3 sites to join; 0 joined so far"
    fragment = {"version": 0, "round": 1, "phase": "gathering", "waiting_for": [], "reason": reason, "open_s": 0.0}
    said = headline_of(running(fragment=fragment, workers=[], history=[], uptime_s=uptime_s))
    assert said == Headline(text=f"The first round has not begun: it {reason}.", act=act, command=start("NAME"))


def test_the_headline_reports_a_paused_run() -> None:
    """If the run is paused, the first line of the page says so."""
    said = headline_of(running().model_copy(update={"paused": True}), state_dir="/s")
    assert said.text.startswith("The run is paused in round 4: no site trains until it is resumed.")
    assert (said.act, said.command) == (False, "atoll resume --dir /s")


def test_the_headline_escapes_hostile_names() -> None:
    said = headline_of(running(fragment={"waiting_for": [], "reason": "waits for <script>\x1b[2J\u202e"}))
    assert "<script>\\x1b[2J\\u202e" in said.text


def test_the_headline_names_a_swarms_aggregator() -> None:
    place = PlaceStatus(aggregator="c", checker="a", holders=["a"], collected=["a", "b"])
    said = headline_of(running(fragment={"phase": "closing", "waiting_for": [], "place": place}))
    assert said.text.startswith("Round 4 of 20 is closed: its updates are aggregated at c.")


def test_the_headline_of_an_async_run_names_no_site() -> None:
    said = headline_of(running(fragment={"waiting_for": [], "reason": "waits for an update"}, rounds=0, left_s=None))
    assert said.text.startswith("Round 4 has been open for 3.0 s and waits for an update. The run has no last round")


def test_the_headline_says_how_to_export_the_result() -> None:
    best = BestStatus(metric="loss", mode="min", version=2, round=3, value=0.5)
    fragment = {"phase": "finished", "round": 20, "version": 20, "waiting_for": []}
    said = headline_of(running(finished=True, fragment=fragment, best=best), state_dir="/s")
    assert said == Headline(
        text="The run is finished after 20 rounds. "
        "Loss 0.5 in round 3, down from 0.9 in round 1; best 0.5 at version 2.",
        command="atoll export model.safetensors --dir /s",
    )


def test_the_headline_says_why_a_run_failed() -> None:
    """If the run has failed, the first line of the page gives the reason."""
    said = headline_of(running(failed="The reducer raised an error."), state_dir="/s")
    assert said == Headline(
        text="The run has failed: The reducer raised an error.", act=True, command="atoll server run.toml --dir /s"
    )


def test_the_headline_reports_a_stopped_server() -> None:
    said = headline_of(running(), Trouble(stored="/s"), "/s")
    assert said.act
    assert said.text.startswith("No server runs: the run stopped in round 4. Start it again, and it continues there.")


def test_the_headline_shows_a_workflows_progress() -> None:
    steps = [
        WorkflowStatus(name="train", kind="train", state="done"),
        WorkflowStatus(name="evaluate", kind="", state="running", seconds=12.0, detail="2 of 3 sites answered"),
    ]
    said = headline_of(running(model_bytes=0, workflows=steps))
    assert said == Headline(text="Workflow 2 of 2, evaluate, is running for 12 s: 2 of 3 sites answered.")


def test_the_usual_round_time_is_the_median() -> None:
    """The usual time of a round is the median of the slowest site's times, and is unknown without rounds."""
    # Rounds of 4, 4 and 8 s: the median is 4 s.
    assert usual_round_s([*history([1.0, 1.0]), *history([1.0], seconds=8.0)]) == 4.0
    assert usual_round_s([]) is None
