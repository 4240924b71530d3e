"""Filters at the server: what is aggregated of a site's update is what they left, and what was received stays."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from filter_world import START, Halved, State, become, join, play, serving
from kit.client import Client
from torch import Tensor

from atoll import Settings
from atoll.filters import CHUNK_ELEMENTS, Drop, Filter, NormClip, Outgoing


@pytest.mark.covers("T8")
def test_filters_of_the_run_file_are_for_all_sites_or_for_a_named_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """a's head is dropped; b moved by (6, 8), of norm 10, and is clipped to 5; n stays at both.

    The mean: w = (1 + 3)/2, (1 + 4)/2. Integers are not averaged, so the 9 of b would have won.
    """
    (tmp_path / "run.toml").write_text(
        """
        algorithm.name = "fedavg"
        workflow.result_filters = [
            {path = "drop", args = ["n"]},
            {path = "drop", args = ["head"], sites = ["a"]},
            {path = "norm_clip", args = {max_norm = 5.0}, sites = ["b"]},
        ]
        """
    )
    given = Settings.read(tmp_path / "run.toml", environ={}).workflow.result_filters
    caplog.set_level(logging.INFO, "atoll.server")
    with serving(tmp_path, **{"workflow.result_filters": given}) as server:
        found = play(server, tmp_path, {"a": become([1.0, 1.0], 7.0), "b": become([6.0, 8.0], 0.0, n=9)})
    assert (found["w"].tolist(), found["head"].tolist(), found["n"].item()) == ([2.0, 2.5], [0.0], 7)
    assert "Drop('n') of every site, Drop('head') of a, NormClip(5, noise=0) of b" in caplog.text


@pytest.mark.covers("T8")
def test_a_program_gives_filters_by_site_and_buffers_are_filtered_too(tmp_path: Path) -> None:
    """a's change is (3, 4) and 12 in the buffer, of norm 13: half of it is left. b sends no change of the buffer."""
    filters = {"a": [NormClip(6.5)], "b": [Drop("*.running_mean")]}
    with serving(tmp_path, filters=filters) as server:
        found = play(server, tmp_path, {"a": become([3.0, 4.0], 0.0, 12.0), "b": become([0.0, 0.0], 0.0, 99.0)})
    assert found["w"].tolist() == [0.75, 1.0]  # (1.5 + 0)/2, (2 + 0)/2
    assert found["bn.running_mean"].item() == 3.0  # (6 + 0)/2


MEAN = """
def mean(updates):
    for name in updates[0].tensors:
        yield name, sum(update.tensors[name].float() for update in updates) / len(updates)


class Arriving:
    def __init__(self):
        self.reset()

    def accept(self, update):
        self.updates.append(update)

    def aggregate(self):
        return mean(self.updates)

    def reset(self):
        self.updates = []
"""


@pytest.mark.covers("T8", "D7", "D13")
@pytest.mark.parametrize("how", ["mean", "median", "own", "arriving", "memory"])
def test_reducers_and_aggregators_see_what_the_filters_left(tmp_path: Path, how: str) -> None:
    """Of (2, 4) and (6, 8) half is left: the mean, and the median of two, is (2, 3)."""
    (tmp_path / "mine.py").write_text(MEAN)
    options: dict[str, dict[str, Any]] = {
        "median": {"aggregation.reducer.name": "median"},
        "own": {"aggregation.aggregator.path": f"{tmp_path}/mine.py:mean"},
        "arriving": {"aggregation.aggregator.path": f"{tmp_path}/mine.py:Arriving"},
        "memory": {"disk.in_files": False},
    }
    with serving(tmp_path, filters=[Halved()], **options.get(how, {})) as server:
        found = play(server, tmp_path, {"a": become([2.0, 4.0], 0.0), "b": become([6.0, 8.0], 0.0)})
        assert server._run is not None
        assert server._run.filtering._kept == {}  # nothing is left of the round
    assert found["w"].tolist() == [2.0, 3.0]


@pytest.mark.covers("T8", "D13")
@pytest.mark.parametrize("to_disk", [True, False])
def test_what_filters_leave_is_a_file_without_a_name_or_memory(tmp_path: Path, to_disk: bool) -> None:
    """A machine without a disk has nothing of it in the state directory, not even nameless."""
    state, nameless = tmp_path / "state", set[bool]()

    class Looking(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            links = []
            for entry in os.listdir("/proc/self/fd"):
                with suppress(FileNotFoundError):  # closed by another thread meanwhile
                    links.append(os.readlink(f"/proc/self/fd/{entry}"))
            nameless.add(any(link.startswith(f"{state}/") and link.endswith("(deleted)") for link in links))
            return values

    with serving(tmp_path, **{"rounds.sites": 1}, filters=[Looking()], **{"disk.in_files": to_disk}) as server:
        play(server, tmp_path, {"a": become([2.0, 4.0], 0.0)})
    assert nameless == {to_disk}


@pytest.mark.covers("T8")
def test_a_reducer_that_clips_knows_the_norm_behind_the_filters(tmp_path: Path) -> None:
    """Halves of (6, 8) and (0, 4): norms 5 and 2. Clipped to 2.5: (1.5, 2) and (0, 2); the mean is (0.75, 2).

    The norm is that of parameters: a's buffer, which moves by 24, does not count.
    """
    options = {"aggregation.reducer.name": "clipped_mean", "aggregation.reducer.max_norm": 2.5}
    with serving(tmp_path, filters=[Halved()], **options) as server:
        found = play(server, tmp_path, {"a": become([6.0, 8.0], 0.0, 24.0), "b": become([0.0, 4.0], 0.0)})
    assert found["w"].tolist() == [0.75, 2.0]


class Spy(Filter):
    seen: list[tuple[str, int, int]] = []  # noqa: RUF012 (shared with the test)

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        self.seen.append((name, start, len(values)))
        return values


@pytest.mark.covers("T8")
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_filter_that_changes_nothing_changes_no_bit(tmp_path: Path, codec: str) -> None:
    Spy.seen.clear()
    generator = torch.Generator().manual_seed(0)
    start: State = {
        "large": torch.randn(CHUNK_ELEMENTS + 5, generator=generator),
        "half": torch.randn(7, generator=generator).half(),
        "double": torch.randn(7, generator=generator).double(),
        "x.running_var": torch.rand(9, generator=generator),
        "x.num_batches_tracked": torch.tensor(3),
        "scalar": torch.tensor(1.5),
    }
    updates = {
        site: {name: (value + number * 0.1).to(value.dtype) for name, value in start.items()}
        for number, site in enumerate("ab", 1)
    }
    results = []
    for folder, filters in ((tmp_path / "plain", []), (tmp_path / "filtered", [Spy()])):
        with serving(folder, start, **{"aggregation.upload_codec.name": codec}, filters=filters) as server:
            results.append(play(server, folder, updates))
    assert [name for name in start if not torch.equal(results[0][name], results[1][name])] == []
    assert Spy.seen.count(("large", 0, CHUNK_ELEMENTS)) == 2  # once a site, and never more at a time
    assert Spy.seen.count(("large", CHUNK_ELEMENTS, 5)) == 2


@pytest.mark.covers("T8")
def test_a_filter_may_look_at_the_lazy_whole_and_its_metadata(tmp_path: Path) -> None:
    class Looking(Filter):
        def begin(self, update: Outgoing) -> None:
            about = update.about
            seen[about.site] = (
                about.round,
                about.version,
                about.weight,
                dict(about.metrics),
                update.tensor("w").tolist(),
            )

    seen: dict[str, object] = {}
    with serving(tmp_path, **{"rounds.sites": 1}, filters=[Looking()]) as server:
        client = join(server, tmp_path, "a")["a"]
        client.submit(become([1.0, 2.0], 0.0), weight=3.0, metrics={"loss": 0.5})
        assert client.next_round() is None
        client.close()
    assert seen == {"a": (1, 0, 3.0, {"loss": 0.5}, [-1.0, -2.0])}


@pytest.mark.covers("T8")
def test_scaffolds_controls_pass_as_they_came(tmp_path: Path) -> None:
    """c is the mean of what sites hold as c_i, and a site does not know what the server does to its update."""
    with serving(
        tmp_path, **{"algorithm.name": "scaffold", "rounds.sites": 1, "rounds.total": 2}, filters=[Halved()]
    ) as server:
        with Client(server.url, site="a", folder=tmp_path / "w") as client:
            client.next_round()
            client.pull()
            client.submit(
                become([2.0, 4.0], 0.0),
                steps=1,
                groups={"control": {"w": torch.tensor([1.0, 2.0]), "head": torch.tensor([3.0])}},
            )
            client.next_round()
            assert client.pull()["w"].tolist() == [1.0, 2.0]
            assert client.round.global_state("control")["w"].tolist() == [1.0, 2.0]
            assert client.round.own_state("control")["w"].tolist() == [1.0, 2.0]


@pytest.mark.covers("T8")
def test_sites_do_not_share_their_noise(tmp_path: Path) -> None:
    """Without a change only the noise is left; the same noise twice would not become smaller in the mean."""
    moved: list[Tensor] = []

    class Noted(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            if name == "w":
                moved.append(values.clone())
            return values

    with serving(tmp_path, filters=[NormClip(1.0, noise=1.0), Noted()]) as server:
        play(server, tmp_path, {"a": dict(START), "b": dict(START)})
    assert len(moved) == 2
    assert not torch.equal(*moved)
