"""Which fragment is due, lines that a worker logs, and a process without ranks beside it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.sites import logged
from torch import nn

from atoll.errors import TRANSIENT
from atoll.protocol import messages
from atoll.registry import ReceivedName
from atoll.worker.log_lines import MOST_TROUBLES, TransferProgress, Troubles, in_words
from atoll.worker.session.ranks import RankGroup
from atoll.worker.training.fragment_order import Candidate, FragmentOrder, SyncRules
from atoll.worker.training.synchroniser import REPEAT_S, Outage

# -- which fragment is due


ROUNDS = 4
"""Of each fragment, in the property below."""


@pytest.mark.covers("L7")
def test_the_fragment_in_the_lowest_round_leads() -> None:
    """A worker takes the free fragment in the lowest round."""
    # Of several such fragments, it takes the first one.
    order = FragmentOrder(SyncRules(every=6, fragments=3))
    assert order.pick([Candidate(1), Candidate(1), Candidate(1)]) == 0
    assert order.pick([Candidate(2), Candidate(1), Candidate(1)]) == 1
    assert order.pick([Candidate(2), Candidate(1, is_free=False), Candidate(2)]) == 0
    assert order.pick([Candidate(1, is_free=False)] * 3) is None


@pytest.mark.covers("L7")
def test_fragments_take_turns_if_rounds_never_wait() -> None:
    """If rounds wait for no worker, a worker takes its free fragments in turn, whatever their rounds."""
    order = FragmentOrder(SyncRules(every=6, fragments=3, waits=False), first=1)
    assert order.pick([Candidate(1), Candidate(9), Candidate(1)]) == 1
    order.took(1)
    assert order.pick([Candidate(1), Candidate(9), Candidate(1)]) == 2
    assert order.pick([Candidate(1), Candidate(9), Candidate(1, is_free=False)]) == 0


@pytest.mark.covers("L7")
def test_async_runs_take_waiting_rounds_first() -> None:
    """If an asynchronous run begins with rounds that wait for all workers, a worker takes a fragment in such a round
    first.
    """
    order = FragmentOrder(SyncRules(every=6, fragments=3, waits=False, sync_rounds_first=2), first=0)
    assert order.pick([Candidate(3), Candidate(3), Candidate(2)]) == 2
    assert order.pick([Candidate(3), Candidate(3), Candidate(3)]) == 0


@pytest.mark.covers("L6", "L18")
@pytest.mark.parametrize(("local_steps", "expected"), [((0, 0), 3), ((4, 0), 2), ((4, 2), 1), ((1, 1), 1)])
def test_fragments_synchronise_after_equal_steps(local_steps: tuple[int, int], expected: int) -> None:
    """The steps between the synchronisations of two fragments are the local steps divided by the number of fragments,
    at least one.
    """
    # H = 6 over K = 2 fragments makes 3 steps. With H_w = 4, there are 2.
    places = [Candidate(1, local_steps=steps) for steps in local_steps]
    assert FragmentOrder(SyncRules(every=6, fragments=2)).steps_between(places) == expected


@dataclass
class Worker:
    """A worker of a synchronous run, without the network.

    Attributes:
        rounds: of each fragment, that it takes part in next.
        under_way: fragments with an update that it has submitted, oldest first.
    """

    rounds: list[int]
    under_way: list[int] = field(default_factory=list)

    def picks(self, order: FragmentOrder) -> int | None:
        free = [Candidate(n, index not in self.under_way and n <= ROUNDS) for index, n in enumerate(self.rounds)]
        return order.pick(free)


@pytest.mark.covers("L7")
@given(data=st.data())
def test_workers_never_wait_for_each_other(data: st.DataObject) -> None:
    """Workers may submit in any order, and any update may break off and be due again."""
    # The run always goes on. A worker with as many updates under way as allowed waits for the oldest one and submits
    # nothing meanwhile. A round closes when every worker has submitted to it. A restarted worker begins with the open
    # rounds.
    fragments, count = data.draw(st.integers(1, 4), "fragments"), data.draw(st.integers(1, 4), "workers")
    most = data.draw(st.integers(1, fragments), "max_inflight")
    order = FragmentOrder(SyncRules(every=fragments, fragments=fragments, max_inflight=most))
    workers, breaks = [Worker([1] * fragments) for _ in range(count)], data.draw(st.integers(0, 6), "breaks")
    while any(n <= ROUNDS for worker in workers for n in worker.rounds):
        may_submit = [each for each in workers if len(each.under_way) < most and each.picks(order) is not None]
        closing = [
            fragment
            for fragment in range(fragments)
            if all(fragment in each.under_way for each in workers)
            and len({each.rounds[fragment] for each in workers}) == 1
        ]
        assert may_submit or closing, [(each.rounds, each.under_way) for each in workers]
        broken = [each for each in workers if each.under_way] if breaks else []
        kind = data.draw(st.sampled_from([k for k, some in (("s", may_submit), ("c", closing), ("b", broken)) if some]))
        if kind == "s":
            worker = data.draw(st.sampled_from(may_submit))
            fragment = worker.picks(order)
            assert fragment is not None
            worker.under_way.append(fragment)
        elif kind == "c":
            fragment = data.draw(st.sampled_from(closing))
            for each in workers:
                each.under_way.remove(fragment)
                each.rounds[fragment] += 1
        else:  # its way broke off: it is due again, before what comes later in the order
            breaks -= 1
            worker = data.draw(st.sampled_from(broken))
            worker.under_way.remove(data.draw(st.sampled_from(worker.under_way)))


# -- lines that a worker logs


MB = 1_000_000


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO, "atoll")
    return Clock()


def move(bar: TransferProgress, clock: Clock, seconds: int) -> None:
    """1 MB a second."""
    for _ in range(seconds):
        clock.now_s += 1.0
        bar.add(MB)


@pytest.mark.covers("X4")
def test_an_outage_does_not_change_the_rate(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """An outage of an hour does not change the rate that the progress lines of a transfer show."""
    bar = TransferProgress("a: submitting", 100 * MB, clock=clock)
    move(bar, clock, 10)
    clock.now_s += 3600.0
    bar.resume()
    move(bar, clock, 5)
    # 85 MB are left, 1 MB/s as before
    assert logged(caplog) == [
        "a: submitting: 5.0 MB of 100.0 MB, 1.0 MB/s, 95 s left",
        "a: submitting: 10.0 MB of 100.0 MB, 1.0 MB/s, 90 s left",
        "a: submitting: 15.0 MB of 100.0 MB, 1.0 MB/s, 85 s left",
    ]


@pytest.mark.covers("X4")
def test_the_last_progress_line_shows_the_pause(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The last progress line of a transfer says for how long the transfer was paused."""
    bar = TransferProgress("a: submitting", 4 * MB, clock=clock)
    bar.resume()  # as it is called before the first attempt, too
    move(bar, clock, 2)
    clock.now_s += 15.0
    bar.resume()
    move(bar, clock, 2)
    bar.end()
    assert logged(caplog) == ["a: submitting: 4.0 MB in 19.0 s, paused for 15.0 s (1.0 MB/s)"]


@pytest.mark.covers("X4")
def test_settings_of_a_run_are_worded() -> None:
    """The settings of a run that matter for a worker, such as codecs and fragments, are shown as words."""
    info = messages.RunInfo.model_construct(codec=ReceivedName("bf16"), fragments=1)
    assert in_words(info, 60) == "H = 60, codec bf16"
    more = {
        "mode": "async",
        "sync_rounds_first": 2,
        "downlink_codec": ReceivedName("int4"),
        "fragments": 3,
        "tau": 5,
        "alpha": 0.5,
    }
    assert in_words(info.model_copy(update=more), 60) == (
        "H = 60, asynchronous after 2 synchronous rounds, codec bf16 up, int4 down, 3 fragments, tau 5, alpha 0.5"
    )


@pytest.mark.covers("X4")
def test_the_shown_speed_ignores_a_long_stall(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """After a part stalled for 60 s, the progress line shows no speed, then the speed without the stall."""
    bar = TransferProgress("a: submitting", 100 * MB, clock=clock)
    move(bar, clock, 5)
    clock.now_s += 60.0
    move(bar, clock, 6)
    assert logged(caplog) == [
        "a: submitting: 5.0 MB of 100.0 MB, 1.0 MB/s, 95 s left",
        "a: submitting: 6.0 MB of 100.0 MB",
        "a: submitting: 11.0 MB of 100.0 MB, 1.0 MB/s, 89 s left",
    ]


@pytest.mark.covers("P10")
def test_old_failures_of_peers_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """The same failure of a peer is logged once. When a thousand other peers have failed since, it is forgotten and
    logged again.
    """
    caplog.set_level(logging.INFO, "atoll")
    troubles = Troubles()
    for of in ("a", "a", *range(MOST_TROUBLES - 1), "a", *range(MOST_TROUBLES, 2 * MOST_TROUBLES), "a"):
        troubles.say(of, f"cannot reach {of}")
    assert caplog.messages.count("cannot reach a") == 2


def numbers(record: logging.LogRecord) -> list[object]:
    return [each for each in record.args or () if isinstance(each, int)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "atoll" and record.levelno == logging.WARNING]


def test_outages_are_logged_again_later(caplog: pytest.LogCaptureFixture) -> None:
    """During an outage, the warning is logged again after some minutes, with the number of skipped turns. The end of
    the outage is logged once.
    """
    caplog.set_level("INFO", "atoll")
    now_s = [0.0]
    outage = Outage(lambda: now_s[0])
    lost = TRANSIENT[0]("gone", "")
    for now_s[0] in (0.0, 100.0, REPEAT_S, REPEAT_S + 100.0, 2 * REPEAT_S):
        outage.skipped(lost, "a", "at step 1", "Why.")
    assert [numbers(record) for record in warnings(caplog)] == [[], [3], [5]]
    assert outage.is_on
    outage.ended("a", "goes on")
    outage.ended("a", "goes on")
    assert not outage.is_on
    assert len([record for record in caplog.records if record.levelno == logging.INFO]) == 1
    outage.skipped(lost, "a", "at step 2", "Why.")
    assert len(warnings(caplog)) == 4


def test_a_single_process_has_no_ranks_to_ask() -> None:
    """A single process is the first rank and asks no other rank."""
    ranks = RankGroup.of_process(nn.Linear(1, 1))
    assert (ranks.is_first, ranks.is_distributed) == (True, False)
    assert ranks.from_rank0(lambda: 3) == 3
