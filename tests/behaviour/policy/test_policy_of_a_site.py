"""What a site's policy lets leave: which runs, which tensors, which metadata; and what its log says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.world import World
from policy_world import Writes, entries, log_of

from atoll.errors import ConfigError

MODEL = {"body.w": torch.zeros(2), "head.w": torch.zeros(1)}


def test_update_passes_every_filter_of_the_policy(tmp_path: Path, policy_of: Writes) -> None:
    """An update of (3, 4) and a head of 5 is sent as (0.6, 0.8), without the head, whatever the script says."""
    policy = policy_of('[tensors]\nallow = ["body.*"]\ndrop = ["head.*"]\nmax_norm = 1.0')
    change = {"body.w": torch.tensor([3.0, 4.0]), "head.w": torch.tensor([5.0])}
    with World(tmp_path, MODEL, "a", rounds=1) as world:
        world.move("a", 1, lambda _, __, state: {name: value + change[name] for name, value in state.items()})
        found = world.finish()
    torch.testing.assert_close(found["body.w"], torch.tensor([0.6, 0.8]))
    assert found["head.w"].tolist() == [0.0]
    (update,) = entries(policy, "update")
    assert update["norm"] == pytest.approx(1.0)
    assert update["filters"] == ["Allowed(allow=['body.*'], drop=['head.*'])", "NormClip(1, noise=0)"]


def test_log_says_what_left_and_what_counts(tmp_path: Path, policy_of: Writes) -> None:
    """The log has each part before its update, the update's digest, and the server's receipts until it counts."""
    policy = policy_of("")
    with World(tmp_path, MODEL, "a", rounds=2) as world:
        world.rounds(1.0, 1, 2, metrics={"loss": 2.0})
        world.finish()
    kinds = [each.what for each in log_of(policy) if each.what != "messages"]
    assert kinds == ["run", "update", "part", "receipt", "receipt", "update", "part", "receipt", "receipt"]
    updates, receipts = entries(policy, "update"), entries(policy, "receipt")
    assert [(each["state"], each["version"]) for each in receipts] == [
        ("accepted", 0), ("counted", 1), ("accepted", 0), ("counted", 2)
    ]  # fmt: skip
    assert [each["digest"] for each in receipts] == [each["digest"] for each in updates for _ in range(2)]
    assert receipts[0]["metrics"] == {"loss": 2.0}
    counted = sum(bytes_ for each in entries(policy, "messages") for _, bytes_ in each.values())
    assert counted > 0


@pytest.mark.parametrize(
    ("rule", "line", "what"),
    [
        ('[runs]\nservers = ["https://other:8512"]', 2, "the server"),
        ('[runs]\nnames = ["heart-*"]', 2, "the run 'atoll'"),
        ('[runs]\n\nalgorithms = ["fedprox"]', 3, "the algorithm 'fedavg'"),
        ("[runs]\nmax_rounds = 1", 2, "asks for 2 rounds"),
        ("[runs]\nmax_bytes = 100", 2, "bytes would leave"),
        ('[tensors]\nallow = ["body.*"]', 2, "the tensor 'head.w'"),
    ],
)
def test_run_that_asks_for_more_is_refused(tmp_path: Path, policy_of: Writes, rule: str, line: int, what: str) -> None:
    """Before the site joins, the error names file and line; no message has left."""
    policy = policy_of(rule)
    with World(tmp_path, MODEL, "a", rounds=2) as world:
        with pytest.raises(ConfigError, match=what) as caught:
            world.join("a")
        assert f"{policy}:{line}" in str(caught.value)
        assert world.status.workers == []
    assert {"run"} >= {each.what for each in log_of(policy)}
