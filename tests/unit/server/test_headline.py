"""The sentence at the top of a status, for the situations of a run; numbers are those of the status in the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from atoll.protocol.status_headline import Trouble, headline_of, usual_round_s
from atoll.protocol.status_messages import (
    BestStatus,
    EvaluationStatus,
    FragmentStatus,
    Headline,
    Missing,
    PlaceStatus,
    Recorded,
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
            sites=[SiteRound(site=site, train_seconds=0.75 * seconds, wait_seconds=0.25 * seconds) for site in "ab"],
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
        text='Round 4 of 20 has been open for 3.0 s and waits for "b" (training). Done in about 64 s. '
        "Loss 0.5 in round 3, down from 0.9 in round 1."
    )


def test_the_headline_names_a_late_site() -> None:
    """The first line of the page names a site that is late, with its speed compared with the usual one."""
    # The usual round takes 4 s; the site makes 2 steps/s, the median of all 10.
    workers = [worker("a"), worker("b", steps_per_s=2.0), worker("c")]
    said = headline_of(running(fragment={"open_s": 20.0}, workers=workers))
    assert (said.act, said.held_up, said.late) == (False, True, ["b"])
    assert said.text == (
        'Round 4 of 20 has been open for 20 s, 5 times as long as usual, and waits for "b" '
        "(training, 5.0 times slower than the median). The end waits for it, then for 16 more rounds of about 4.0 s. "
        "Loss 0.5 in round 3, down from 0.9 in round 1."
    )


@pytest.mark.parametrize(("open_s", "late"), [(1.2, []), (1.4, ["b"])])
@pytest.mark.parametrize("mode", ["rounds", "swarm"])
def test_a_short_round_is_late_by_its_usual_time(mode: str, open_s: float, late: list[str]) -> None:
    """A round that usually takes 0.3 s is late after 1.3 s: twice its time, and at least one second more."""
    said = headline_of(running(history=history([0.9, 0.7], seconds=0.3), fragment={"open_s": open_s}, mode=mode))
    assert (said.held_up, said.late) == (bool(late), late)


@pytest.mark.parametrize(("ticket_s", "late"), [(1.2, []), (12.0, ["b"])])
def test_a_slow_site_of_an_async_run_is_late(ticket_s: float, late: list[str]) -> None:
    """The other sites go on without it, so the end is told; the sentence says how late the site is."""
    waiting = {"waiting_for": [], "reason": "waits for an update"}
    workers = [worker("a"), worker("b", ticket_s=ticket_s, usual_s=0.3), worker("c", ticket_s=9.0)]
    said = headline_of(running(fragment=waiting, workers=workers, mode="asynchronous"))
    assert (said.held_up, said.late) == (False, late)
    told = ' "b" is late: 12 s, 40 times as long as usual. The other sites do not wait. Done in about 64 s.'
    assert (told in said.text) is bool(late)


@pytest.mark.parametrize("state", ["left", "dead"])
def test_a_site_that_has_left_is_not_late(state: str) -> None:
    """A site that has left is not late, although its ticket is still open."""
    waiting = {"waiting_for": [], "reason": "waits for an update"}
    workers = [worker("a"), worker("b", state=state, ticket_s=3000.0, usual_s=60.0)]
    assert headline_of(running(fragment=waiting, workers=workers, mode="asynchronous")).late == []


@pytest.mark.parametrize(
    ("about", "reason"),
    [({}, "waits for a, b; c sat out"), ({"stopping": True, "left_s": None}, "waits for a, b; this is the last round")],
    ids=["sat-out", "stopping"],
)
def test_sites_of_a_round_on_time_are_not_late(about: dict[str, Any], reason: str) -> None:
    """If a site sits out, or the round is the last one, the headline does not call the other sites late."""
    waiting = [Missing(site=site, for_s=1.0) for site in "ab"]
    said = headline_of(running(fragment={"open_s": 0.5, "reason": reason, "waiting_for": waiting}, **about))
    assert (said.held_up, said.late) == (False, [])


def test_only_the_site_that_is_away_is_late() -> None:
    waiting = [Missing(site=site, for_s=1.0) for site in "abc"]
    workers = [worker("a"), worker("b"), worker("c", state="dead")]
    said = headline_of(running(fragment={"open_s": 0.5, "waiting_for": waiting}, workers=workers))
    assert (said.held_up, said.late) == (True, ["c"])


@pytest.mark.parametrize(
    ("about", "trouble"),
    [({}, Trouble(disk="The disk is full.")), ({"paused": True}, Trouble())],
    ids=["disk", "paused"],
)
def test_no_site_is_late_while_the_server_holds_the_run_up(about: dict[str, Any], trouble: Trouble) -> None:
    said = headline_of(running(fragment={"open_s": 20.0}, **about), trouble)
    assert (said.held_up, said.late) == (True, [])


@pytest.mark.parametrize(
    ("about", "waits_for"),
    [
        ({"fragment": {"open_s": 20.0}}, "it"),
        ({"workers": [worker("a"), worker("b", state="left"), worker("c")]}, "it"),
        ({"fragment": {"trouble": "no heartbeat from b (declared dead after 60 s)"}}, "it"),
        ({"fragment": {"waiting_for": [Missing(site=site, for_s=3.0) for site in "ab"], "open_s": 20.0}}, "them"),
        ({"fragment": {"waiting_for": [], "open_s": 20.0, "reason": "waits for an update"}}, "that"),
        ({"fragment": {"waiting_for": [], "reason": "waits for another site: only 1 of 2 updates"}}, "that"),
        ({"paused": True}, "that"),
        ({"workers": [worker("a"), worker("b", refused="it has NaN in 0.weight"), worker("c")]}, '"b"'),
    ],
    ids=["late", "left", "silent", "two-late", "asynchronous", "another-site", "paused", "refused"],
)
def test_no_end_is_promised_while_something_is_in_its_way(about: dict[str, Any], waits_for: str) -> None:
    """The sentence says what the end waits for, and for which rounds after that. The estimate of 64 s is not told."""
    said = headline_of(running(**about))
    assert said.held_up
    assert f" The end waits for {waits_for}, then for 16 more rounds of about 4.0 s." in said.text
    assert "Done" not in said.text


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"left_s": None}, " The end can be estimated after some more rounds."),
        ({"stopping": True, "left_s": None}, " The run is being stopped: this is its last round."),
        ({"rounds": 0, "left_s": None}, " The run has no last round: it trains until it is stopped."),
    ],
    ids=["early", "stopping", "endless"],
)
def test_a_run_without_an_estimate_says_why(about: dict[str, Any], told: str) -> None:
    said = headline_of(running(**about))
    assert told in said.text
    assert not said.held_up


def test_names_of_sites_stand_in_quotation_marks() -> None:
    """A name that reads like a part of the sentence is recognisable as a name, and cannot end the quotation."""
    name = 'b is finished. Done" in 3 s'
    waiting = {"waiting_for": [Missing(site=name, for_s=3.0)]}
    shown = '"b is finished. Done\' in 3 s"'
    assert f"waits for {shown} (training)." in headline_of(running(fragment=waiting, workers=[worker(name)])).text
    for about, part in (
        ({"state": "dead"}, f"{shown} is dead."),
        ({"refused": "it has NaN"}, f"The updates of {shown} do not count: it has NaN."),
    ):
        assert headline_of(running(workers=[worker("a"), worker(name, **about)])).text.startswith(part)


def test_the_loss_is_compared_with_the_first_recorded_one() -> None:
    """The status has the last rounds only; the first value is that of round 1, as in the charts."""
    rounds = [each.model_copy(update={"round": each.round + 40}) for each in history([0.5, 0.45, 0.4])]
    said = headline_of(running(history=rounds, first={"loss": Recorded(round=1, value=2.5)}))
    assert "Loss 0.4 in round 43, down from 2.5 in round 1." in said.text


def test_a_metric_of_the_servers_evaluation_tells_whether_it_learns() -> None:
    rounds = history([0.5, 0.4])
    rounds[1] = rounds[1].model_copy(update={"global_metrics": {"accuracy": 0.75}})
    best = BestStatus(metric="global.accuracy", mode="max", version=2, round=2, value=0.75)
    first = {"global.accuracy": Recorded(round=1, value=0.5)}
    said = headline_of(running(history=rounds, best=best, first=first))
    assert (
        "Accuracy at the server 0.75 in round 2, up from 0.5 in round 1; best 0.75 in round 2, for version 2."
        in said.text
    )


def test_a_run_without_metrics_says_that_learning_is_not_known() -> None:
    rounds = [each.model_copy(update={"metrics": {}}) for each in history([0.5])]
    assert headline_of(running(history=rounds)).text.endswith("not known: no site reports a metric.")


def test_a_run_that_all_sites_sat_out_says_that_its_model_is_unchanged() -> None:
    """Rounds without a version are no rounds in which it learns; the page and `atoll status` show the sentence."""
    rounds = [RoundSummary.sat_out_by_all(0, number, ["a", "b"], 2) for number in (1, 2)]
    text = headline_of(running(fragment={"round": 2, "version": 0}, history=rounds, finished=True)).text
    assert text == "The run is finished after 2 rounds. All sites sat out each round, so the model is as it began."


def test_the_headline_counts_many_awaited_sites() -> None:
    """If a run waits for many sites, the first line of the page counts them and says once what they all do."""
    waiting = [Missing(site=f"s{number}", for_s=3.0) for number in range(7)]
    workers = [worker(f"s{number}") for number in range(7)]
    said = headline_of(running(fragment={"waiting_for": waiting}, workers=[*workers, worker("s7")]))
    assert 'waits for "s0", "s1", "s2" (training) and 4 other sites.' in said.text
    said = headline_of(running(fragment={"waiting_for": waiting}, workers=workers))
    assert "waits for all 7 sites (training)." in said.text


def test_the_headline_reports_a_dead_site() -> None:
    """If a site of the round is dead, the first line of the page says so, and that a person has to act."""
    said = headline_of(running(workers=[worker("a"), worker("b", state="dead", error="no heartbeat for 60 s")]))
    assert said.act
    assert said.text.startswith(
        '"b" is dead: no heartbeat for 60 s. The run goes on without it. Round 4 of 20 has been open'
    )
    assert said.command == start("b")


def test_the_headline_reports_too_few_sites() -> None:
    """If a round has too few sites to close, the first line of the page says so, and that a person has to act."""
    why = "1 site takes part (b is dead), but a round needs at least 2 (rounds.min_sites): the run waits."
    said = headline_of(running(workers=[worker("a"), worker("b", state="dead")]), Trouble(sites=why))
    assert said == Headline(
        text=f"Round 4 of 20 cannot close: {why} The end waits for that, then for 16 more rounds of about 4.0 s. "
        "Loss 0.5 in round 3, down from 0.9 in round 1.",
        act=True,
        held_up=True,
        command=start("b"),
    )


def test_the_headline_reports_a_diverging_loss() -> None:
    """If the loss rises three times in a row to 1.5 times its lowest value, the first line of the page reports it."""
    # One rise is not reported.
    said = headline_of(running(history=history([0.5, 0.4, 0.5, 0.6, 0.7])))
    assert said.act
    assert said.text == (
        "The run diverges: its loss rose from 0.4 in round 2 to 0.7 in round 5. Round 4 of 20 has been open for 3.0 s "
        'and waits for "b" (training). Unless it is stopped, it goes on to round 20.'
    )
    assert not headline_of(running(history=history([0.5, 0.4, 0.6]))).act
    assert not headline_of(running(history=history([0.40, 0.41, 0.42, 0.43]))).act


def test_the_headline_reports_a_site_with_nan() -> None:
    """If a site's updates are refused because of NaN, the first line of the page names the site."""
    said = headline_of(running(workers=[worker("a"), worker("b", refused="it has NaN in 0.weight")]))
    assert said.act
    assert said.text.startswith('The updates of "b" do not count: it has NaN in 0.weight. Check its data')


def test_the_headline_reports_a_full_disk() -> None:
    """If the server's disk is full, the first line of the page says so."""
    why = "The server has 5.0 MB of disk left, but must keep 268.0 MB free (disk.min_free_bytes)."
    said = headline_of(running(state_dir="/runs/my run"), Trouble(disk=why))
    assert said == Headline(
        text=f"Round 4 of 20 waits for the disk: {why} The end waits for that, then for 16 more rounds of about 4.0 s. "
        "Loss 0.5 in round 3, down from 0.9 in round 1.",
        act=True,
        held_up=True,
        command="df -h '/runs/my run'",
    )


@pytest.mark.parametrize(("uptime_s", "act"), [(5.0, False), (61.0, True)])
def test_the_headline_says_how_to_start_a_site(uptime_s: float, act: bool) -> None:
    """A run without sites is normal for a minute. Then the first line of the page says how to start a site."""
    reason = "waits for 3 sites to join; 0 joined so far"
    fragment = {"version": 0, "round": 1, "phase": "gathering", "waiting_for": [], "reason": reason, "open_s": 0.0}
    said = headline_of(running(fragment=fragment, workers=[], history=[], uptime_s=uptime_s))
    assert said == Headline(
        text=f"The first round has not begun: it {reason}. The end waits for that, then for 20 more rounds.",
        act=act,
        held_up=act,
        command=start("NAME"),
    )


def test_the_headline_reports_a_paused_run() -> None:
    """If the run is paused, the first line of the page says so."""
    said = headline_of(running(paused=True, state_dir="/s", fragment={"phase": "paused"}))
    assert said.text.startswith("The run is paused in round 4 of 20: no site trains until it is resumed. The end waits")
    still = headline_of(running(paused=True))
    assert still.text.startswith(
        "The run is paused in round 4 of 20: it may still end, but no other begins until it is resumed. The end waits"
    )
    assert (said.act, said.held_up, said.command) == (False, True, "atoll resume --dir /s")


def test_the_first_round_tells_nothing_of_the_others() -> None:
    """In the first round, sites load data and compile: its time does not say how long the rounds after it take."""
    text = headline_of(running(paused=True, history=history([0.5]))).text
    assert "The end waits for that, then for 16 more rounds. Loss 0.5" in text


def test_the_headline_escapes_hostile_names() -> None:
    said = headline_of(running(fragment={"waiting_for": [], "reason": "waits for <script>\x1b[2J\u202e"}))
    assert "<script>\\x1b[2J\\u202e" in said.text


def test_the_headline_names_a_swarms_aggregator() -> None:
    place = PlaceStatus(aggregator="c", checker="a", holders=["a"], collected=["a", "b"])
    said = headline_of(running(fragment={"phase": "closing", "waiting_for": [], "place": place}))
    assert said.text.startswith('Round 4 of 20 is closed: its updates are aggregated at "c".')


def test_the_headline_says_that_a_version_waits_for_an_evaluation() -> None:
    """The next version is not made before the last one is evaluated, which is no time of the aggregation."""
    evaluation = EvaluationStatus(function="mine:evaluate", every=1, running=2)
    said = headline_of(running(fragment={"phase": "closing"}, evaluation=evaluation))
    assert said.text.startswith("Round 4 of 20 is closed, and waits for the evaluation of version 2.")


def test_the_headline_of_an_async_run_names_no_site() -> None:
    said = headline_of(running(fragment={"waiting_for": [], "reason": "waits for an update"}, rounds=0, left_s=None))
    assert said.text.startswith("Round 4 has been open for 3.0 s and waits for an update. The run has no last round")


def test_the_headline_says_how_to_export_the_result() -> None:
    best = BestStatus(metric="loss", mode="min", version=2, round=3, value=0.5)
    fragment = {"phase": "finished", "round": 20, "version": 20, "waiting_for": []}
    said = headline_of(running(finished=True, fragment=fragment, best=best, state_dir="/s"))
    assert said == Headline(
        text="The run is finished after 20 rounds. "
        "Loss 0.5 in round 3, down from 0.9 in round 1; best 0.5 in round 3, for version 2.",
        command="atoll export model.safetensors --dir /s",
    )


def test_the_headline_says_why_a_run_failed() -> None:
    """If the run has failed, the first line of the page gives the reason."""
    said = headline_of(running(failed="The reducer raised an error.", state_dir="/s"))
    assert said == Headline(
        text="The run has failed in round 4 of 20: The reducer raised an error. "
        "Loss 0.5 in round 3, down from 0.9 in round 1.",
        act=True,
        held_up=True,
        command="atoll server run.toml --dir /s",
    )


def test_the_headline_reports_a_stopped_server() -> None:
    said = headline_of(running(state_dir="/s"), Trouble(stored="/s"))
    assert said.act
    assert said.text.startswith(
        "No server runs: the run stopped in round 4 of 20. Start it again, and it continues there."
    )


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


def test_the_usual_round_time_leaves_out_first_waits() -> None:
    """The usual time of a round leaves out round 1, and what a site waited before its own first update."""
    waited = SiteRound(site="c", train_seconds=5.0, wait_seconds=3600.0)
    rounds = history([1.0, 1.0, 1.0])
    late = rounds[1].model_copy(update={"sites": [*rounds[1].sites, waited]})
    # Alone: 3 s of training, the wait of 1 s left out. Then rounds of 5 s (c) and 4 s (a, b): 4.5 s.
    assert usual_round_s(rounds[:1]) == 3.0
    assert usual_round_s([rounds[0], late, rounds[2]]) == 4.5
    assert usual_round_s([late]) == 3605.0  # without the rounds before: c may have taken part in them
