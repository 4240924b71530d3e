"""Which fragment is due, and that no two workers wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.worker.training.fragment_order import FragmentOrder, Place, SyncRules

ROUNDS = 4
"""Of each fragment, in the property below."""


@pytest.mark.covers("L7")
def test_takes_the_lowest_round_first_and_of_those_the_first_fragment() -> None:
    order = FragmentOrder(SyncRules(every=6, fragments=3))
    assert order.pick([Place(1), Place(1), Place(1)]) == 0
    assert order.pick([Place(2), Place(1), Place(1)]) == 1
    assert order.pick([Place(2), Place(1, is_free=False), Place(2)]) == 0
    assert order.pick([Place(1, is_free=False)] * 3) is None


@pytest.mark.covers("L7")
def test_takes_the_cycle_where_rounds_wait_for_no_worker() -> None:
    order = FragmentOrder(SyncRules(every=6, fragments=3, waits=False), first=1)
    assert order.pick([Place(1), Place(9), Place(1)]) == 1
    order.took(1)
    assert order.pick([Place(1), Place(9), Place(1)]) == 2
    assert order.pick([Place(1), Place(9), Place(1, is_free=False)]) == 0


@pytest.mark.covers("L7")
def test_takes_the_rounds_that_wait_first_in_an_asynchronous_run_that_begins_with_some() -> None:
    order = FragmentOrder(SyncRules(every=6, fragments=3, waits=False, sync_rounds_first=2), first=0)
    assert order.pick([Place(3), Place(3), Place(2)]) == 2
    assert order.pick([Place(3), Place(3), Place(3)]) == 0


@pytest.mark.covers("L6", "L18")
@pytest.mark.parametrize(("local_steps", "expected"), [((0, 0), 3), ((4, 0), 2), ((4, 2), 1), ((1, 1), 1)])
def test_turns_are_a_share_of_the_local_steps_apart(local_steps: tuple[int, int], expected: int) -> None:
    """H = 6 over K = 2 fragments: 3 steps; with H_w = 4: 2; never less than one."""
    places = [Place(1, local_steps=steps) for steps in local_steps]
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
        free = [Place(n, index not in self.under_way and n <= ROUNDS) for index, n in enumerate(self.rounds)]
        return order.pick(free)


@pytest.mark.covers("L7")
@given(data=st.data())
def test_no_two_workers_wait_for_each_other(data: st.DataObject) -> None:
    """Workers submit in any interleaving, and any update may break off and be due again; the run always goes on.

    A worker with as many updates under way as it may have waits for the oldest, and submits nothing meanwhile. A round
    closes once every worker has submitted to it. A worker that is started again begins with what is open.
    """
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
