"""A process without ranks beside it."""

from torch import nn

from atoll.worker.session.ranks import RankGroup


def test_a_single_process_has_no_ranks_to_ask() -> None:
    ranks = RankGroup.here(nn.Linear(1, 1))
    assert (ranks.is_first, ranks.together) == (True, False)
    assert ranks.from_rank0(lambda: 3) == 3
